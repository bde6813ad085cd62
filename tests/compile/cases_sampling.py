"""Launches of the draw that are compiled ahead of time."""

from __future__ import annotations

import torch

from mrv1.kernels.sampling.contracts import group_size
from mrv1.kernels.sampling.draw import draw_kernel
from mrv1.kernels.sampling.filters import FILTERS
from mrv1.kernels.sampling.groups import group_sums_kernel
from mrv1.kernels.sampling.sample_tokens import SampleTokensConfig
from mrv1.kernels.sampling.shards import VocabShards
from mrv1.runner.stand_in_device import StandInPeers
from mrv1.testing.aot import AotCase, Target, pointer

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def cases(target: Target) -> list[AotCase]:
    return [
        *(group_sums(target, dtype, 151_936) for dtype in DTYPES),
        group_sums(target, torch.float32, 1 << 24),
        *(_draw(target, dtype, 151_936) for dtype in DTYPES),
        _draw(target, torch.float32, 151_936, filters=False),
        _draw(target, torch.float32, 1000),
        _draw(target, torch.float32, 1 << 24),
        *(case(target, torch.float32, 151_936, ranks=n) for case in (group_sums, _draw)
          for n in numbers_of_ranks(target)),
        *(_draw(target, torch.float32, 151_936, filters=False, ranks=n)
          for n in numbers_of_ranks(target)[:1]),
    ]  # fmt: skip


def numbers_of_ranks(target: Target) -> tuple[int, ...]:
    """Return some numbers of several ranks; none on AMD, where ranks are refused."""
    return (2, 8) if target.backend == "cuda" else ()


def shard_stride(vocab_size: int, ranks: int) -> int:
    """Return the elements between two rows of a shard."""
    peers = StandInPeers(0, ranks, torch.device("meta"))
    return VocabShards.allocate_logits(peers, vocab_size, 1).own.stride(0)


def shard_arguments(vocab_size: int, ranks: int, *, first_launch: bool) -> dict[str, object]:
    """Return what launches get for shards besides tuples of pointers."""
    size, int32 = group_size(vocab_size), pointer(torch.int32)
    arguments = {
        "shard_size": -(-vocab_size // (size * ranks)) * size,
        "calls_ptr": int32,
        "stride_sums_call": 256 * -(-vocab_size // size),
        "RANK": ranks - 1,
    }
    if first_launch:
        return arguments | {"stride_better_call": 256 * 4}
    return arguments | {"flag_ptrs": (int32,) * ranks, "abort_ptr": int32}


def group_sums(target: Target, dtype: torch.dtype, vocab_size: int, *, ranks: int = 1) -> AotCase:
    config = SampleTokensConfig.default_for(vocab_size)
    size, float32, logits = group_size(vocab_size), pointer(torch.float32), pointer(dtype)
    num_groups = -(-vocab_size // size)
    name = f"group_sums-{str(dtype).removeprefix('torch.')}-{vocab_size}"
    memory = (float32, float32, logits, vocab_size)
    of_shards = {}
    if ranks > 1:
        memory = (*((each,) * ranks for each in memory[:3]), shard_stride(vocab_size, ranks))
        of_shards = shard_arguments(vocab_size, ranks, first_launch=True)
    return AotCase(
        name=name if ranks == 1 else f"{name}-{ranks}-ranks",
        kernel=group_sums_kernel,
        args=(
            *(*memory, pointer(torch.int32), float32),
            *(vocab_size, num_groups, -(-num_groups // config.tile_groups)),
        ),
        constexprs={
            "GROUP": size,
            "TILE_GROUPS": config.tile_groups,
            "OVERLAP": target.has_dependent_launch,
            **of_shards,
        },
        num_warps=config.num_warps,
    )


def _draw(
    target: Target, dtype: torch.dtype, vocab_size: int, *, filters: bool = True, ranks: int = 1
) -> AotCase:
    config = SampleTokensConfig.default_for(vocab_size)
    size = group_size(vocab_size)
    num_groups = -(-vocab_size // size)
    float32, int32, int64 = map(pointer, (torch.float32, torch.int32, torch.int64))
    limited = target.capability is not None and config.draw_registers is not None
    name = f"draw-{str(dtype).removeprefix('torch.')}-{vocab_size}"
    logits, stride, of_shards = pointer(dtype), vocab_size, {}
    if ranks > 1:
        logits, stride = (logits,) * ranks, shard_stride(vocab_size, ranks)
        of_shards = shard_arguments(vocab_size, ranks, first_launch=False)
        name += f"-{ranks}-ranks"
    return AotCase(
        name=name if filters else f"{name}-plain",
        kernel=draw_kernel,
        args=(
            *(int64, logits, stride, float32, float32, float32 if filters else None),
            *(config.scratch_size, int32, float32, int64, int32, int32),
            *(int32 if filters else None, vocab_size, num_groups),
        ),
        constexprs={
            **{f"{n}_ptr": pointer(f.dtype) if filters else None for n, f in FILTERS.items()},
            "GROUP": size,
            "TILE_GROUPS": config.all_groups,
            "FEW_GROUPS": config.few_groups,
            "LANES": config.lanes,
            "COLUMNS": config.columns,
            "DEPTH": config.depth,
            "PIVOTS": config.pivots,
            "LISTED": config.listed,
            "NUM_STAGES": config.draw_stages,
            "OVERLAP": target.has_dependent_launch,
            **({"maxnreg": config.draw_registers} if limited else {}),
            **of_shards,
        },
        num_warps=config.draw_warps,
        parked_bytes=320,  # so that two programs fit an SM; where they are parked is unknown
        programs_per_sm=2 if limited else 0,
    )
