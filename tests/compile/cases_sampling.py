"""Launches of the draw that are compiled ahead of time."""

from __future__ import annotations

import torch

from mrv1.kernels.sampling.contracts import group_size
from mrv1.kernels.sampling.draw import draw_kernel
from mrv1.kernels.sampling.filters import FILTERS
from mrv1.kernels.sampling.groups import group_sums_kernel
from mrv1.kernels.sampling.sample_tokens import SampleTokensConfig
from mrv1.testing.aot import AotCase, Target, pointer

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def cases(target: Target) -> list[AotCase]:
    return [
        *(_group_sums(target, dtype, 151_936) for dtype in DTYPES),
        _group_sums(target, torch.float32, 1 << 24),
        *(_draw(target, dtype, 151_936) for dtype in DTYPES),
        _draw(target, torch.float32, 151_936, filters=False),
        _draw(target, torch.float32, 1000),
        _draw(target, torch.float32, 1 << 24),
    ]


def _group_sums(target: Target, dtype: torch.dtype, vocab_size: int) -> AotCase:
    config = SampleTokensConfig.default_for(vocab_size)
    size, float32 = group_size(vocab_size), pointer(torch.float32)
    num_groups = -(-vocab_size // size)
    return AotCase(
        name=f"group_sums-{str(dtype).removeprefix('torch.')}-{vocab_size}",
        kernel=group_sums_kernel,
        args=(
            *(float32, float32, pointer(dtype), vocab_size, pointer(torch.int32), float32),
            *(vocab_size, num_groups, -(-num_groups // config.tile_groups)),
        ),
        constexprs={
            "GROUP": size,
            "TILE_GROUPS": config.tile_groups,
            "OVERLAP": target.has_dependent_launch,
        },
        num_warps=config.num_warps,
    )


def _draw(target: Target, dtype: torch.dtype, vocab_size: int, *, filters: bool = True) -> AotCase:
    config = SampleTokensConfig.default_for(vocab_size)
    size = group_size(vocab_size)
    num_groups = -(-vocab_size // size)
    float32, int32, int64 = map(pointer, (torch.float32, torch.int32, torch.int64))
    limited = target.capability is not None and config.draw_registers is not None
    name = f"draw-{str(dtype).removeprefix('torch.')}-{vocab_size}"
    return AotCase(
        name=name if filters else f"{name}-plain",
        kernel=draw_kernel,
        args=(
            *(int64, pointer(dtype), vocab_size, float32, float32, float32 if filters else None),
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
        },
        num_warps=config.draw_warps,
        parked_bytes=320,  # so that two programs fit an SM; where they are parked is unknown
        programs_per_sm=2 if limited else 0,
    )
