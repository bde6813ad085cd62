"""Launches of KV writes with a scale per quarter of a block that are compiled ahead of time."""

from __future__ import annotations

from typing import Any

import torch

from mrv1.kernels.cache.quarter_write import (
    QuarterWriteConfig,
    _list_quarters_kernel,
    _mark_tokens_kernel,
    _write_quarters_kernel,
)
from mrv1.testing.aot import AotCase, Target, pointer
from tests.compile.cases_attention import NUM_KV_HEADS, _caches, _fp8, _name

SHAPES = (
    *((torch.bfloat16, head_dim, 16) for head_dim in (64, 80, 256)),
    *((torch.bfloat16, 128, block_size) for block_size in (16, 64, 128)),
    (torch.float32, 256, 128),
)


def cases(target: Target) -> list[AotCase]:
    found = [_write(target, *shape, num) for shape in SHAPES for num in (33, 16384)]
    found.append(_write(target, torch.bfloat16, 128, 16, 2048))  # small tiles
    for block_size in (16, 128):
        found += [_mark(block_size), _list(block_size)]
    return found


def _slots(head_dim: int) -> tuple[Any, ...]:
    """Return the arguments that all kernels have, from the slots on."""
    int32, int64 = pointer(torch.int32), pointer(torch.int64)
    return (int64, 33, 1, int32, int64, int64, head_dim, 33)


def _write(
    target: Target, dtype: torch.dtype, head_dim: int, block_size: int, num_tokens: int
) -> AotCase:
    config = QuarterWriteConfig.default_for(num_tokens, block_size // 4 * head_dim)
    fp8 = _fp8(target, "quarter")
    data, qkv_row = pointer(dtype), 4 * NUM_KV_HEADS * head_dim
    how = "compared" if config.compares else f"listed{config.tile_rows}"
    listed = (pointer(torch.int32), pointer(torch.int64), pointer(torch.int32))
    return AotCase(
        name=_name("quarter_write", dtype, head_dim, f"block{block_size}_{how}"),
        kernel=_write_quarters_kernel,
        args=(
            *_caches(dtype, fp8),
            *(data, qkv_row, head_dim),
            *(data, qkv_row, head_dim),
            *_slots(head_dim),
            *((None, None, None) if config.compares else listed),
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


def _of_tokens(block_size: int) -> dict[str, int]:
    config = QuarterWriteConfig.default_for(16384, block_size // 4 * 128)
    return {
        "NUM_KV_HEADS": NUM_KV_HEADS,
        "BLOCK_SIZE": block_size,
        "TILE_TOKENS": config.tile_slots,
    }


def _mark(block_size: int) -> AotCase:
    return AotCase(
        name=f"mark_tokens_block{block_size}",
        kernel=_mark_tokens_kernel,
        args=(pointer(torch.int32), pointer(torch.int32), *_slots(128)),
        constexprs=_of_tokens(block_size),
        num_warps=4,
    )


def _list(block_size: int) -> AotCase:
    return AotCase(
        name=f"list_quarters_block{block_size}",
        kernel=_list_quarters_kernel,
        args=(
            *(pointer(torch.int32), pointer(torch.int64), pointer(torch.int32)),
            *(pointer(torch.int32), *_slots(128)),
        ),
        constexprs=_of_tokens(block_size) | {"TOKENS": block_size // 4},
        num_warps=4,
    )
