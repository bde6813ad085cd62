"""Measure sums over ranks: ``all_reduce_norm`` against NCCL and torch's symmetric memory.

python -m benchmarks.all_reduce OUTPUT.json [--gpus 2] [--sizes 1x4096,32x4096] [--repeats 21]

Each rank is a process with a GPU of its own. ``mrv1`` sums, adds the residual and norms;
``one_shot`` and ``two_shot`` are its two algorithms, of which it takes one by size. The peers only
sum: ``nccl``, and symmetric memory's ``symm_one_shot`` and ``symm_two_shot``, without multicast.
Before it is timed, each variant's sum is compared with a float32 sum of all partials. Needs peer
access.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, TCPStore  # type: ignore[attr-defined]
from torch.distributed import _symmetric_memory as symmetric_memory

from benchmarks.measure.options import parse_script, script_parser
from benchmarks.measure.timing import Launch, WrongResultError, capture, measure
from mrv1 import kernels
from mrv1.kernels import AllReduceBuffers
from mrv1.provenance import provenance
from mrv1.runner.ranks.symmetric_memory import SymmetricMemory

SIZES = "1x4096,32x4096,32x8192,256x8192,4096x8192"
LAUNCHES, LARGE_LAUNCHES = 40, 4
"""Launches of a replay, and of one that moves more than LARGE_BYTES."""
LARGE_BYTES = 2**23
MAX_DIFFERENCE = 0.02
"""Largest difference of two sums, relative to the largest element: a ring may round each step."""
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


class Data(NamedTuple):
    """The tensors of one size on one rank."""

    partial: torch.Tensor
    residual: torch.Tensor
    out: torch.Tensor
    normed: torch.Tensor
    weight: torch.Tensor


Variant = Callable[[Data], tuple[Launch, torch.Tensor]]
"""Returns a launch, and the tensor that holds its sum of partials and residual, or of partials."""


def ours(memory: SymmetricMemory, algorithm: Any, data: Data) -> tuple[Launch, torch.Tensor]:  # noqa: ANN401 - as the op's
    """Sum, add the residual and norm."""
    buffers = AllReduceBuffers.allocate(memory, data.partial.shape[1], data.partial.dtype)
    launch = partial(
        kernels.all_reduce_norm,
        data.partial,
        buffers,
        residual=data.residual,
        out=data.out,
        norm_weight=data.weight,
        normed_out=data.normed,
        algorithm=algorithm,
    )
    return launch, data.out


def nccl(data: Data) -> tuple[Launch, torch.Tensor]:
    """Sum in place, as often as it is launched."""
    summed = data.partial.clone()
    return partial(dist.all_reduce, summed), summed


def symmetric(name: str, data: Data) -> tuple[Launch, torch.Tensor]:
    """Sum by one of torch's ops on symmetric memory; the two-shot one works in place."""
    shared = symmetric_memory.empty(
        data.partial.shape, dtype=data.partial.dtype, device=data.partial.device
    )
    group = _all_ranks()
    symmetric_memory.rendezvous(shared, group)
    shared.copy_(data.partial)
    op = getattr(torch.ops.symm_mem, name)
    if name.endswith("_"):
        return partial(op, shared, "sum", group.group_name), shared
    out = torch.empty_like(data.partial)
    op_out = getattr(torch.ops.symm_mem, f"{name}_out")
    return partial(op_out, shared, "sum", group.group_name, out), out


def _all_ranks() -> ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("expected a process group, got none")
    return group


def measure_size(
    num_tokens: int, hidden: int, repeats: int, variants: dict[str, Variant], device: torch.device
) -> dict[str, Any]:
    """Return the median microseconds of each variant on this rank.

    Raises:
        WrongResultError: a sum is wrong.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.Generator(device).manual_seed(rank)
    alike = torch.Generator(device).manual_seed(size)

    def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    addend = normal(own, num_tokens, hidden)
    parts = [torch.empty_like(addend) for _ in range(size)]
    dist.all_gather(parts, addend)
    expected = torch.stack(parts).float().sum(dim=0)
    residual = normal(alike, num_tokens, hidden)
    replays = {}
    for name, variant in variants.items():
        data = Data(
            addend,
            residual,
            torch.full_like(addend, torch.nan),
            torch.empty_like(addend),
            normal(alike, hidden),
        )
        launch, found = variant(data)
        launch()
        want = expected + residual.float() if found is data.out else expected
        difference = float((found.float() - want).abs().max() / want.abs().max())
        if not difference <= MAX_DIFFERENCE:
            raise WrongResultError(f"{name}: expected a difference <= 0.02, got {difference}")
        if found is not data.out:
            found.zero_()  # sums in place grow from launch to launch
        is_large = addend.nbytes > LARGE_BYTES
        replays[name] = capture([launch], LARGE_LAUNCHES if is_large else LAUNCHES, device)
    dist.barrier()
    us = {name: timing.median_us for name, timing in measure(replays, repeats, device).items()}
    slowest = torch.tensor([*us.values()], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(us, slowest.tolist(), strict=True))


def run_rank(options: argparse.Namespace) -> None:
    """Measure on one rank; rank 0 writes the result."""
    rank, size = options.rank, options.gpus
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = TCPStore("127.0.0.1", options.port, size, is_master=rank == 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    memory = SymmetricMemory(_all_ranks(), device)
    variants: dict[str, Variant] = {
        "mrv1": partial(ours, memory, None),
        "one_shot": partial(ours, memory, "one_shot"),
        "two_shot": partial(ours, memory, "two_shot"),
        "nccl": nccl,
        "symm_one_shot": partial(symmetric, "one_shot_all_reduce"),
        "symm_two_shot": partial(symmetric, "two_shot_all_reduce_"),
    }
    results = []
    for name in options.sizes.split(","):
        num_tokens, hidden = map(int, name.split("x"))
        us = measure_size(num_tokens, hidden, options.repeats, variants, device)
        results.append({"tokens": num_tokens, "hidden": hidden, "us": us})
        if rank == 0:
            times = ", ".join(f"{variant} {time:.2f}" for variant, time in us.items())
            sys.stdout.write(f"[{num_tokens}, {hidden}] us: {times}\n")
            sys.stdout.flush()
    if rank == 0:
        result = {
            "op": "all_reduce",
            "schema": 1,
            "dtype": "bfloat16",
            **provenance(device, options.commit),
            "conditions": {
                "gpus": size,
                "repeats": options.repeats,
                "timer": "CUDA graph of launches, events around a replay, variants in turns, the "
                "slowest rank",
                "data": "normal; mrv1's variants add a residual and norm, the others sum",
                "clocks": "as found, not locked",
            },
            "results": results,
        }
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = script_parser(__doc__, repeats=21)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--sizes", default=SIZES, help="TOKENSxHIDDEN, comma-separated")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parse_script(parser, arguments)


def main(arguments: list[str] | None = None) -> int:
    """Start a process for each rank, and wait for them; return the exit code."""
    options = parse(arguments)
    if options.rank is not None:
        run_rank(options)
        return 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    given = sys.argv[1:] if arguments is None else arguments

    def rank_options(rank: int) -> list[str]:
        return ["--rank", str(rank), "--port", str(port)]

    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.all_reduce", *given, *rank_options(rank)],
            env=os.environ | WITHOUT_MULTICAST,
        )
        for rank in range(options.gpus)
    ]
    try:
        while all(each.poll() is None for each in ranks):
            try:
                ranks[0].wait(0.2)
            except subprocess.TimeoutExpired:
                continue
        if any(each.poll() for each in ranks):  # the others wait for one that failed
            return 1
        return max(each.wait() for each in ranks)
    finally:
        for each in ranks:
            each.kill()
            each.wait()


if __name__ == "__main__":
    sys.exit(main())
