"""What of the paged KV cache and attention is compiled ahead of time, as launched."""

from __future__ import annotations

import torch

from mrv1.kernels._paged import MIN_DOT_ROWS, dot_precision
from mrv1.kernels._triton import triton
from mrv1.kernels.decode_attention import (
    MERGE_TILE_SPLITS,
    DecodeAttentionConfig,
    _merge_splits_kernel,
    _paged_decode_attention_kernel,
)
from mrv1.kernels.kv_cache_write import KVCacheWriteConfig, _kv_cache_write_kernel
from mrv1.kernels.prefill_attention import (
    PrefillAttentionConfig,
    _paged_prefill_attention_kernel,
)
from mrv1.testing.aot import AotCase, Target, pointer

SHAPES = (
    *((torch.bfloat16, head_dim) for head_dim in (64, 80, 128, 256)),
    *((torch.float32, head_dim) for head_dim in (64, 80, 128, 256)),
    (torch.float16, 128),  # the code is bfloat16's but for the conversion
)
STREAMING_SHAPES = ((torch.bfloat16, 128), (torch.float32, 128))
NUM_KV_HEADS = 8
BLOCK_SIZE = 16


def cases(target: Target) -> list[AotCase]:
    full = [(dtype, dim, False) for dtype, dim in SHAPES]
    streaming = [(dtype, dim, True) for dtype, dim in STREAMING_SHAPES]
    return [
        *(_write(dtype, dim) for dtype, dim, _ in full),
        *(_decode(dtype, dim, ring) for dtype, dim, ring in full + streaming),
        _decode(torch.bfloat16, 128, False, group=8, query_len=8),
        _decode(torch.bfloat16, 256, True, group=8, query_len=4),
        *(_merge(dim, splits) for dim in (64, 256) for splits in (2, 64, 256)),
        *(
            _prefill(target, dtype, dim, ring, max_query_len)
            for dtype, dim, ring in full + streaming
            for max_query_len in (1, 4096)
        ),
    ]


def _name(op: str, dtype: torch.dtype, *details: object) -> str:
    return "-".join([op, str(dtype).removeprefix("torch."), *map(str, details)])


def _write(dtype: torch.dtype, head_dim: int) -> AotCase:
    config = KVCacheWriteConfig.default_for(head_dim, dtype)
    data, int32, int64 = pointer(dtype), pointer(torch.int32), pointer(torch.int64)
    qkv_row = 4 * NUM_KV_HEADS * head_dim
    return AotCase(
        name=_name("kv_cache_write", dtype, head_dim),
        kernel=_kv_cache_write_kernel,
        args=(
            *(data, data),
            *(data, qkv_row, head_dim),
            *(data, qkv_row, head_dim),
            *(int64, 33, 1),
            *(int32, int64, int64, head_dim),
            33 * NUM_KV_HEADS,
        ),
        constexprs={
            "NUM_KV_HEADS": NUM_KV_HEADS,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": BLOCK_SIZE,
            "TILE_ROWS": config.tile_rows,
            "TILE_DIM": triton.next_power_of_2(head_dim),
        },
        num_warps=config.num_warps,
    )


def _pages(dtype: torch.dtype) -> tuple[object, ...]:
    """K cache, V cache, block table and its row stride."""
    return pointer(dtype), pointer(dtype), pointer(torch.int32), 512


def _roles(head_dim: int) -> tuple[object, ...]:
    """The layout's tensors, its token stride, and softmax_scale."""
    int32, int64 = pointer(torch.int32), pointer(torch.int64)
    return int64, int64, int32, int32, int32, int32, head_dim, head_dim**-0.5


def _decode(
    dtype: torch.dtype, head_dim: int, streaming: bool, *, group: int = 2, query_len: int = 1
) -> AotCase:
    row = group * NUM_KV_HEADS * head_dim
    float32 = pointer(torch.float32)
    rows = query_len * group
    tile_rows = max(MIN_DOT_ROWS, triton.next_power_of_2(rows))
    config = DecodeAttentionConfig.default_for(head_dim, dtype, tile_rows)
    return AotCase(
        name=_name("decode", dtype, head_dim, f"rows{rows}", *(["ring"] if streaming else [])),
        kernel=_paged_decode_attention_kernel,
        args=(
            *(float32, row, 4 * head_dim, head_dim),
            *(float32, 4 * group * NUM_KV_HEADS, 4, 1),
            *(pointer(dtype), 2 * row, head_dim),
            *_pages(dtype),
            pointer(torch.int32),
            *_roles(head_dim),
        ),
        constexprs={
            "QUERY_LEN": query_len,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": BLOCK_SIZE,
            "HAS_WINDOW": streaming,
            "HAS_RING": streaming,
            "IS_PARTIAL": True,
            "TILE_ROWS": tile_rows,
            "TILE_TOKENS": config.tile_tokens,
            "TILE_DIM": triton.next_power_of_2(head_dim),
            "PRECISION": dot_precision(dtype),
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _merge(head_dim: int, num_splits: int) -> AotCase:
    float32 = pointer(torch.float32)
    all_splits = triton.next_power_of_2(num_splits)
    return AotCase(
        name=_name("merge_splits", torch.bfloat16, head_dim, num_splits),
        kernel=_merge_splits_kernel,
        args=(
            *(pointer(torch.bfloat16), 16 * head_dim, head_dim),
            *(None, 0, 0),
            *(float32, float32),
        ),
        constexprs={
            "NUM_SPLITS": num_splits,
            "HEAD_DIM": head_dim,
            "TILE_ALL_SPLITS": all_splits,
            "TILE_SPLITS": min(MERGE_TILE_SPLITS, all_splits),
            "TILE_DIM": triton.next_power_of_2(head_dim),
        },
    )


def _prefill(
    target: Target, dtype: torch.dtype, head_dim: int, streaming: bool, max_query_len: int
) -> AotCase:
    group = 2
    config = PrefillAttentionConfig.default_for(head_dim, dtype, target.capability)
    config = config.fit_rows(group, max_query_len)
    row = group * NUM_KV_HEADS * head_dim
    int32 = pointer(torch.int32)
    return AotCase(
        name=_name(
            "prefill", dtype, head_dim, f"q{max_query_len}", *(["ring"] if streaming else [])
        ),
        kernel=_paged_prefill_attention_kernel,
        args=(
            *(pointer(dtype), row, head_dim),
            *(pointer(torch.float32), group * NUM_KV_HEADS, 1),
            *(pointer(dtype), 2 * row, head_dim),
            *_pages(dtype),
            *(int32, int32, 33),
            *_roles(head_dim),
        ),
        constexprs={
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": BLOCK_SIZE,
            "HAS_WINDOW": streaming,
            "HAS_RING": streaming,
            "TILE_QUERIES": config.tile_rows // group,
            "TILE_ROWS": config.tile_rows,
            "TILE_TOKENS": config.tile_tokens,
            "TILE_DIM": triton.next_power_of_2(head_dim),
            "PRECISION": dot_precision(dtype),
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
