"""Measure the draw of several ranks, one GPU each: from shards, and from gathered logits.

python -m benchmarks.rank_draws OUTPUT.json [--ranks 2] [--rows 1,32,256] [--repeats 30]

``shards`` is ``sample_tokens`` on each rank's own logits; ``gather`` is NCCL's gather, the copy to
rows of the whole vocabulary, and a draw of one rank; ``one_rank`` is that draw alone. Tokens must
be equal. Each rank reports its times; the result has rank 0's. Needs GPUs that reach each other's
memory.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from benchmarks.kernels.sampler_cases import TARGET_VOCAB_SIZE
from benchmarks.measure.timing import WrongResultError, capture, measure
from mrv1 import kernels
from mrv1.kernels.sampling.shards import VocabShards
from mrv1.provenance import provenance
from mrv1.runner.ranks.symmetric_memory import NamedGroup, SymmetricMemory

SCHEMA = 1
LAUNCHES = 20
"""Calls of a replay."""
CASES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "draw": {},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
}
WAYS = ("shards", "gather", "one_rank")
FILTERS = {"top_k": (torch.int32, 0.0), "top_p": (torch.float32, 1.0)}
"""Dtypes, and the values that keep all tokens."""


class Case:
    """One case on this rank: the logits, and the ways to draw from them."""

    def __init__(self, shards: VocabShards, num_rows: int, options: dict[str, float]) -> None:
        device, vocab_size = shards.logits.own.device, shards.vocab_size
        generator = torch.Generator(device).manual_seed(num_rows)  # the same on every rank
        self.whole = torch.randn(num_rows, vocab_size, device=device, generator=generator) * 2.5
        self._shards, first = shards, shards.first_token
        self._own = shards.own(num_rows).copy_(self.whole[:, first : first + shards.num_tokens])
        temperature = torch.full((num_rows,), options.get("temperature", 1.0), device=device)
        positions = torch.arange(num_rows, device=device)
        self._given = (temperature, positions + 7, positions)
        self._filters: dict[str, Any] = {
            name: torch.full((num_rows,), options.get(name, off), dtype=dtype, device=device)
            for name, (dtype, off) in FILTERS.items()
            if options.keys() & FILTERS
        }

    def from_shards(self) -> torch.Tensor:
        """Draw from the shards where they are."""
        return kernels.sample_tokens(self._own, *self._given, shards=self._shards, **self._filters)

    def from_gathered(self) -> torch.Tensor:
        """Gather the logits of all ranks, and draw from them."""
        own, size = self._shards.padded(len(self.whole)).contiguous(), self._shards.size
        parts = own.new_empty(size * len(own), own.shape[1])
        dist.all_gather_into_tensor(parts, own)
        logits = torch.cat(parts.chunk(size), dim=1)[:, : self._shards.vocab_size].contiguous()
        return kernels.sample_tokens(logits, *self._given, **self._filters)

    def from_whole(self) -> torch.Tensor:
        """Draw from logits that are there, as one rank does."""
        return kernels.sample_tokens(self.whole, *self._given, **self._filters)

    @property
    def ways(self) -> dict[str, Callable[[], torch.Tensor]]:
        """All ways to draw, by name."""
        draws = (self.from_shards, self.from_gathered, self.from_whole)
        return dict(zip(WAYS, draws, strict=True))


def entries(shards: VocabShards, rows: tuple[int, ...], repeats: int) -> Iterator[dict[str, Any]]:
    """Yield the times of every case; all ranks run this together."""
    device = shards.logits.own.device
    for num_rows in rows:
        for name, options in CASES.items():
            case = Case(shards, num_rows, options)
            dist.barrier()
            want = case.from_whole()
            for way, draw in case.ways.items():
                if not torch.equal(draw(), want):
                    raise WrongResultError(f"{way}, {name}, {num_rows} rows: other tokens")
            dist.barrier()
            replays = {way: capture([draw], LAUNCHES, device) for way, draw in case.ways.items()}
            dist.barrier()
            timings = measure(replays, repeats, device)
            yield {
                "case": name,
                "rows": num_rows,
                **{f"{way}_us": timing.median_us for way, timing in timings.items()},
                "samples_us": {way: timing.samples_us for way, timing in timings.items()},
            }


def run_rank(rank: int, options: argparse.Namespace) -> None:
    """Run one rank; rank 0 writes the result."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", options.port, options.ranks, is_master=rank == 0
    )
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=options.ranks, device_id=device
    )
    memory = SymmetricMemory(cast("NamedGroup", dist.group.WORLD), device)
    vocab_size, rows = options.vocab_size, options.rows
    shards = VocabShards.allocate(memory, vocab_size, max(rows), device)
    found = []
    for entry in entries(shards, rows, options.repeats):
        found.append(entry)
        if rank == 0:
            times = (f"{way} {entry[f'{way}_us']:.1f} us" for way in WAYS)
            print(f"{entry['case']} of {entry['rows']} rows: {', '.join(times)}", flush=True)
    if rank == 0:
        result = {
            "op": "rank_draws", "schema": SCHEMA, **provenance(device, options.commit),
            "conditions": {
                "ranks": options.ranks, "vocab_size": vocab_size, "repeats": options.repeats,
                "data": "normal logits of standard deviation 2.5, float32, in L2 if they fit",
            },
            "results": found,
        }  # fmt: skip
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str]) -> int:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rank_draws")
    parser.add_argument("output", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", default=(1, 32, 256), type=_counts)
    parser.add_argument("--vocab-size", type=int, default=TARGET_VOCAB_SIZE)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--commit")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        run_rank(options.rank, options)
        return 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.rank_draws", *arguments, "--port", str(port)]
    ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(options.ranks)]
    try:
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            time.sleep(0.1)
        return int(any(codes))
    finally:
        for rank in ranks:
            rank.kill()


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
