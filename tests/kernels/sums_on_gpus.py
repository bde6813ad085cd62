"""One of several processes that sum over their GPUs: ``python -m tests.kernels.sums_on_gpus``.

Arguments: rank, number of ranks, port of rank 0's store. Exit code 0 if all results were right.
"""

from __future__ import annotations

import random
import sys

import torch
import torch.distributed as dist

from mrv1 import kernels
from mrv1.kernels import AllReduceBuffers
from mrv1.runner.ranks.symmetric_memory import SymmetricMemory

EPS = 1e-6
ROWS = (1, 2, 7, 32, 255, 256, 257, 300, 1000)
FORMATS = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
)


class Rank:
    """The calls of one rank, and what they should give."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.device = rank, size, torch.device("cuda", rank)
        self.memory = SymmetricMemory(dist.group.WORLD, self.device)
        self.choices = random.Random(7)  # the same on every rank
        self.alike = torch.Generator(self.device).manual_seed(7)
        self.own = torch.Generator(self.device).manual_seed(100 + rank)

    def normal(self, shape: tuple[int, ...], dtype: torch.dtype, *, own: bool) -> torch.Tensor:
        generator = self.own if own else self.alike
        return torch.randn(shape, generator=generator, device=self.device).to(dtype)

    def expected(self, partial: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(partial) for _ in range(self.size)]
        dist.all_gather(parts, partial)
        level = [part.float() for part in parts]
        while len(level) > 1:
            level = [sum(level[i + 1 : i + 2], level[i]) for i in range(0, len(level), 2)]
        return (residual.float() + level[0]).to(residual.dtype)

    def is_right(self, residual: torch.Tensor, normed: torch.Tensor, want: torch.Tensor, weight):
        torch.cuda.synchronize()
        assert torch.equal(residual, want), f"{(residual != want).sum()} wrong sums"
        num_wrong = (normed != kernels.rms_norm(want, weight, EPS)).sum()
        assert num_wrong == 0, f"{num_wrong} norms of {list(want.shape)} {want.dtype}"

    def call_each(self, hidden: int, dtype: torch.dtype, wire: torch.dtype) -> None:
        """Check single calls of all sizes in random order, while some rank comes late."""
        buffers = AllReduceBuffers.allocate(self.memory, hidden, wire)
        weight = self.normal((hidden,), dtype, own=False)
        for _ in range(24):
            shape = (self.choices.choice(ROWS), hidden)
            algorithm = self.choices.choice([None, "one_shot", "two_shot"])
            partial = sent = self.normal(shape, wire, own=True)
            if self.choices.randrange(3) == 0:
                sent = self.normal((3, *shape), torch.float32, own=True)
                partial = ((sent[0] + sent[1]) + sent[2]).to(wire)
            residual = self.normal(shape, dtype, own=False) * 3
            normed, want = torch.full_like(residual, torch.nan), self.expected(partial, residual)
            if self.choices.randrange(self.size) == self.rank:
                torch.cuda._sleep(200_000)
            kernels.all_reduce_norm(
                sent, buffers, residual=residual, out=residual, norm_weight=weight, eps=EPS,
                normed_out=normed, algorithm=algorithm,
            )  # fmt: skip
            self.is_right(residual, normed, want, weight)

    def call_many(self, hidden: int = 1024, num_calls: int = 20_000) -> None:
        """Check the sum of many calls of random sizes that nobody waits between."""
        buffers = AllReduceBuffers.allocate(self.memory, hidden, torch.float32)
        total = torch.zeros(max(ROWS), hidden, device=self.device)
        ones = torch.ones_like(total)
        counts = torch.zeros(max(ROWS), 1, device=self.device)
        sizes = self.choices.choices(ROWS[:-1], k=num_calls)
        for rows in sizes:
            part = total[:rows]
            kernels.all_reduce_norm(
                ones[:rows], buffers, residual=part, out=part,
                algorithm="two_shot" if rows % 2 else "one_shot",
            )  # fmt: skip
            counts[:rows] += self.size
        torch.cuda.synchronize()
        assert torch.equal(total, counts.expand_as(total))

    def come_late(self, hidden: int = 4096, rows: int = 256, num_calls: int = 64) -> None:
        """Check that a rank that comes late is late once, and not in all sums that follow."""
        buffers = AllReduceBuffers.allocate(self.memory, hidden, torch.bfloat16)
        part = torch.ones(rows, hidden, dtype=torch.bfloat16, device=self.device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        kernels.all_reduce_norm(part, buffers)  # compiles
        for late_rank in (None, *range(self.size)):
            dist.barrier()
            torch.cuda.synchronize()
            start.record()
            if late_rank == self.rank:
                torch.cuda._sleep(10_000_000)  # about 5 ms
            for _ in range(num_calls):
                kernels.all_reduce_norm(part, buffers)
            end.record()
            torch.cuda.synchronize()
            milliseconds = start.elapsed_time(end)
            assert milliseconds < 30, f"{milliseconds} ms with rank {late_rank} late"

    def replay(self, hidden: int = 4096, rows: int = 5) -> None:
        """Check replays of a graph, between which there are other calls."""
        dtype = torch.bfloat16
        buffers = AllReduceBuffers.allocate(self.memory, hidden, dtype)
        weight = self.normal((hidden,), dtype, own=False)
        partial = self.normal((rows, hidden), dtype, own=True)
        residual = self.normal((rows, hidden), dtype, own=False)
        normed = torch.empty_like(residual)

        def call() -> None:
            kernels.all_reduce_norm(
                partial, buffers, residual=residual, out=residual, norm_weight=weight, eps=EPS,
                normed_out=normed,
            )  # fmt: skip

        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
            call()
        for count in range(30):
            partial.copy_(self.normal((rows, hidden), dtype, own=True))
            want = self.expected(partial, self.expected(partial, residual))
            graph.replay()
            self.is_right(residual, normed, want, weight)
            if count % 3 == 0:
                want = self.expected(partial, residual)
                call()
                self.is_right(residual, normed, want, weight)


def main(rank: int, size: int, port: int) -> None:
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    ranks = Rank(rank, size)
    for hidden in (4096, 576, 130):
        for formats in FORMATS if hidden == 576 else FORMATS[:1]:
            ranks.call_each(hidden, *formats)
    ranks.replay()
    ranks.come_late()
    ranks.call_many()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
