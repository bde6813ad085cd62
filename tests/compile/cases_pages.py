"""Launches of page copies and merges of partial results that are compiled ahead of time."""

from __future__ import annotations

import torch

from mrv1.kernels._base.triton import triton
from mrv1.kernels.attention.merge_states import MergeStatesConfig, _merge_states_kernel
from mrv1.kernels.cache.copy_pages import CopyPagesConfig, _copy_pages_kernel
from mrv1.kernels.cache.kv_layout import ALIGNMENT_BYTES
from mrv1.testing.aot import AotCase, Target, pointer

NUM_KV_HEADS = 8


def cases(_target: Target) -> list[AotCase]:
    return [
        *(_copy(bits, dim) for bits in (torch.uint8, torch.int16) for dim in (80, 128, 256)),
        _copy(torch.int32, 128),
        _copy(torch.int16, 128, ids=torch.int64),
        *(_copy(torch.uint8, dim, scales=16) for dim in (128, 256)),
        _copy(torch.uint8, 128, scales=4),
        _copy(torch.uint8, 128, scales=16, packed=2),
        *(_merge(dtype, dim) for dtype in (torch.bfloat16, torch.float32) for dim in (80, 256)),
        _merge(torch.float16, 128),
    ]


def _name(op: str, *details: object) -> str:
    return "-".join([op, *(str(d).removeprefix("torch.") for d in details)])


def _copy(
    bits: torch.dtype, head_dim: int, *, ids: torch.dtype = torch.int32, scales: int = 0,
    packed: int = 1,
) -> AotCase:  # fmt: skip
    """Return a copy with ``scales`` per block and head, 0 = none, ``packed`` codes an element."""
    config = CopyPagesConfig.default_for(head_dim // packed, bits.itemsize)
    int32, int64 = pointer(torch.int32), pointer(torch.int64)
    return AotCase(
        name=_name(
            "copy_pages",
            bits,
            head_dim,
            ids,
            *([f"scales{scales}"] if scales else []),
            *(["packed"] if packed > 1 else []),
        ),
        kernel=_copy_pages_kernel,
        args=(
            *(pointer(bits), pointer(bits)),
            *((int32, int32, int64, int64) if scales else (None, None, None, None)),
            *(pointer(ids), pointer(ids)),
            *(int32, int64, int64, head_dim),
            *(-1, 3 * NUM_KV_HEADS * 16),
        ),
        constexprs={
            "NUM_KV_HEADS": NUM_KV_HEADS,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": 16,
            "SCALES_PER_BLOCK": scales,
            "PACKED": packed,
            "ALIGNMENT": ALIGNMENT_BYTES // bits.itemsize,
            "TILE_ROWS": config.tile_rows,
        },
        num_warps=config.num_warps,
    )


def _merge(dtype: torch.dtype, head_dim: int) -> AotCase:
    config = MergeStatesConfig.default_for(head_dim, dtype)
    out, lse = pointer(dtype), pointer(torch.float32)
    num_heads = 2 * NUM_KV_HEADS
    states = (out, num_heads * head_dim, head_dim, lse, num_heads, 1)
    return AotCase(
        name=_name("merge_states", dtype, head_dim),
        kernel=_merge_states_kernel,
        args=(*states, *states, *states, 33 * num_heads, num_heads),
        constexprs={
            "HEAD_DIM": head_dim,
            "TILE_ROWS": config.tile_rows,
            "TILE_DIM": triton.next_power_of_2(head_dim),
        },
        num_warps=config.num_warps,
    )
