"""Launches of KV writes with a scale per quarter of a block that are compiled ahead of time."""

from __future__ import annotations

import torch

from mrv1.kernels.cache.quarter_write import QuarterWriteConfig, _quarter_write_kernel
from mrv1.testing.aot import AotCase, Target, pointer
from tests.compile.cases_attention import NUM_KV_HEADS, _caches, _fp8, _name

SHAPES = (
    *((torch.bfloat16, head_dim, 16) for head_dim in (64, 80, 256)),
    *((torch.bfloat16, 128, block_size) for block_size in (16, 64, 128)),
    (torch.float32, 256, 128),
)


def cases(target: Target) -> list[AotCase]:
    return [_write(target, *shape) for shape in SHAPES]


def _write(target: Target, dtype: torch.dtype, head_dim: int, block_size: int) -> AotCase:
    config = QuarterWriteConfig.default_for()
    fp8 = _fp8(target, "quarter")
    data, int32, int64 = pointer(dtype), pointer(torch.int32), pointer(torch.int64)
    qkv_row = 4 * NUM_KV_HEADS * head_dim
    return AotCase(
        name=_name("quarter_write", dtype, head_dim, f"block{block_size}"),
        kernel=_quarter_write_kernel,
        args=(
            *_caches(dtype, fp8),
            *(data, qkv_row, head_dim),
            *(data, qkv_row, head_dim),
            *(int64, 33, 1),
            *(int32, int64, int64, head_dim),
            33,
        ),
        constexprs={
            "NUM_KV_HEADS": NUM_KV_HEADS,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
            "TILE_ROWS": config.tile_rows,
            "TILE_SLOTS": config.tile_slots,
            **fp8,
        },
        num_warps=config.num_warps,
    )
