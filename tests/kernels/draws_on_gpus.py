"""One of several processes that draw from shards of logits on their GPUs.

``python -m tests.kernels.draws_on_gpus`` with a rank, the number of ranks and the port of rank 0's
store. Exit code 0 if all results were those of this GPU alone with all logits.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from mrv1 import kernels
from mrv1.kernels.sampling.shards import MAX_ASKED, VocabShards
from mrv1.runner.ranks.symmetric_memory import SymmetricMemory

MAX_ROWS = 256
VOCABS = (151_936, 1000)
"""Rows that are aligned, and rows that are not; each takes half a minute to compile for."""
ROWS = (1, 2, 7, 33, 256)
FILTERS = {
    "top_k": (torch.int32, (0, 1, 40, 300, 5000)),
    "top_p": (torch.float32, (1.0, 0.9, 0.3, 0.999)),
    "min_p": (torch.float32, (0.0, 0.0, 1e-4, 0.1)),
}
Tensors = dict[str, torch.Tensor]


class Rank:
    """The calls of one rank, and what they should give."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.device = rank, size, torch.device("cuda", rank)
        self.memory = SymmetricMemory(dist.group.WORLD, self.device)
        self.choices = random.Random(7)  # the same on every rank
        self.delays = random.Random(100 + rank)
        self.generator = torch.Generator(self.device).manual_seed(7)
        self.ones = torch.ones(1, device=self.device)

    def shards(self, vocab: int) -> VocabShards:
        return VocabShards.allocate(self.memory, vocab, MAX_ROWS, self.device)

    def logits(self, rows: int, vocab: int) -> torch.Tensor:
        """Return logits of many kinds: ties, a masked shard, few tokens, NaN, infinities, none."""
        logits = torch.randn(rows, vocab, device=self.device, generator=self.generator) * 3
        for row in logits:
            kind, at = self.choices.randrange(12), self.choices.randrange(vocab)
            if kind == 0:
                row.copy_(row.round())
            elif kind == 1:
                row[: vocab // self.size + 300] = -torch.inf
            elif kind == 2:
                row[vocab // 3 :] = -torch.inf
            elif kind == 3:
                row[at] = torch.nan
            elif kind == 4:
                row[at] = torch.inf
            elif kind == 5:
                row.fill_(-torch.inf)
        return logits

    def arguments(self, rows: int, *, has_filters: bool) -> Tensors:
        """Return the other arguments of a draw."""

        def vector(values: tuple[float, ...], dtype: torch.dtype) -> torch.Tensor:
            chosen = self.choices.choices(values, k=rows)
            return torch.tensor(chosen, dtype=dtype, device=self.device)

        integers = (self.choices.randrange(-(2**63), 2**63) for _ in range(rows))
        seeds = torch.tensor([*integers], dtype=torch.int64, device=self.device)
        arguments = {
            "temperature": vector((0.0, 0.3, 1.0, 2.0), torch.float32),
            "seeds": seeds,
            "positions": vector(tuple(range(1000)), torch.int64),
        }
        if has_filters:
            for name, (dtype, values) in FILTERS.items():
                arguments[name] = vector(values, dtype)
        return arguments

    def meet(self) -> None:
        """Sum over ranks, as the layers of a step do before its logits."""
        dist.all_reduce(self.ones)

    def late(self, cycles: int) -> None:
        """Keep this GPU busy for a while, which differs from rank to rank."""
        torch.cuda._sleep(self.delays.randrange(1, cycles))

    def own(self, shards: VocabShards, logits: torch.Tensor) -> torch.Tensor:
        first = shards.first_token
        return shards.own(len(logits)).copy_(logits[:, first : first + shards.num_tokens])

    def draw_once(self, shards: VocabShards, rows: int) -> None:
        logits = self.logits(rows, shards.vocab_size)
        arguments = self.arguments(rows, has_filters=self.choices.random() < 0.7)
        want = kernels.sample_tokens(logits, **arguments)
        got = torch.full_like(want, -77)
        self.meet()
        own = self.own(shards, logits)
        self.late(200_000)
        kernels.sample_tokens(own, **arguments, shards=shards, out=got)
        assert torch.equal(got, want), f"{(got != want).sum()} other tokens of {rows} rows"

    def score_once(self, shards: VocabShards, rows: int) -> None:
        """Check log-probabilities; they are NaN in the same places."""
        vocab, num_asked = shards.vocab_size, self.choices.randrange(MAX_ASKED + 1)
        logits = self.logits(rows, vocab)
        asked = [
            [self.choices.randrange(-1, vocab) for _ in range(num_asked)] for _ in range(rows)
        ]
        token_ids = torch.tensor(asked, dtype=torch.int64, device=self.device).view(rows, -1)
        num_top = self.choices.choice([0, 1, 20, 50])
        want = kernels.top_logprobs(logits, token_ids, num_top)
        self.meet()
        own = self.own(shards, logits)
        self.late(100_000)
        self.meet()
        for got, expected in zip(
            kernels.top_logprobs(own, token_ids, num_top, shards=shards), want, strict=True
        ):
            assert torch.equal(got.isnan(), expected.isnan())
            assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
        tokens = want.top_token_ids
        assert torch.equal(
            shards.of_tokens(tokens).nan_to_num(), logits.gather(1, tokens).nan_to_num()
        )

    def replay(self, shards: VocabShards, rows: int, num_steps: int) -> None:
        """Check replays of a graph of whole steps; ranks are late at random, and none waits.

        A step is a sum over ranks, the copy of new logits, the draw, and the log-probabilities.
        """
        source = torch.empty(rows, shards.vocab_size, device=self.device)
        arguments = self.arguments(rows, has_filters=True)
        got = torch.empty(rows, dtype=torch.int64, device=self.device)

        def step() -> torch.Tensor:
            self.meet()
            own = self.own(shards, source)
            kernels.sample_tokens(own, **arguments, shards=shards, out=got)
            return kernels.top_logprobs(own, got[:, None], 8, shards=shards).logprobs

        source.copy_(self.logits(rows, shards.vocab_size))
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logprobs = step()
        steps, wrong = [self.logits(rows, shards.vocab_size) for _ in range(4)], self.ones * 0
        tokens = [kernels.sample_tokens(each, **arguments) for each in steps]
        of_tokens = [
            kernels.top_logprobs(each, drawn[:, None], 8).logprobs.nan_to_num(7.0)
            for each, drawn in zip(steps, tokens, strict=True)
        ]
        for index in range(num_steps):
            source.copy_(steps[index % 4])
            if index % 3:
                self.late(100_000)
            got.fill_(-77)
            graph.replay()
            wrong += (got != tokens[index % 4]).sum()
            wrong += (logprobs.nan_to_num(7.0) != of_tokens[index % 4]).sum()
        assert wrong.item() == 0, f"{wrong.item()} wrong values in {num_steps} replays"


def main(rank: int, size: int, port: int, say: Callable[[str], None] = lambda _: None) -> None:
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    ranks = Rank(rank, size)
    for vocab in VOCABS:
        shards = ranks.shards(vocab)
        for rows in ROWS:
            ranks.draw_once(shards, rows)
        for rows in ROWS[:-1]:
            ranks.score_once(shards, rows)
        say(f"vocabulary {vocab}: right")
    ranks.replay(ranks.shards(VOCABS[0]), 16, 500)
    say("replays: right")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
