"""What of the paged KV cache and attention is compiled ahead of time, as launched."""

from __future__ import annotations

import torch

from mrv1.device import DeviceInfo, choose_fp8_path
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
FP8_SHAPES = (
    *((torch.bfloat16, head_dim) for head_dim in (64, 80, 128, 256)),
    (torch.float16, 128),
    (torch.float32, 128),
)
"""Dtype of q, key and value, and head_dim, beside a cache of e4m3 codes."""
NO_FP8: dict[str, object] = {"FP8_PATH": None, "TOKEN_SCALES": False}
NUM_KV_HEADS = 8
BLOCK_SIZE = 16


def cases(target: Target) -> list[AotCase]:
    full = [(dtype, dim, False) for dtype, dim in SHAPES]
    streaming = [(dtype, dim, True) for dtype, dim in STREAMING_SHAPES]
    return [
        *(_write(dtype, dim) for dtype, dim, _ in full),
        *(_decode(target, dtype, dim, ring) for dtype, dim, ring in full + streaming),
        _decode(target, torch.bfloat16, 128, False, group=8, query_len=8),
        _decode(target, torch.bfloat16, 256, True, group=8, query_len=4),
        *(_merge(dim, splits) for dim in (64, 256) for splits in (2, 64, 256)),
        *(
            _prefill(target, dtype, dim, ring, max_query_len)
            for dtype, dim, ring in full + streaming
            for max_query_len in (1, 4096)
        ),
        *_fp8_cases(target),
    ]


def _fp8_cases(target: Target) -> list[AotCase]:
    decode: dict[str, int] = {"group": 8, "query_len": 8}
    found = []
    for scales in ("token", "head"):
        for dtype, dim in FP8_SHAPES:
            found.append(_write(dtype, dim, _fp8(target, scales)))
            found.append(_decode(target, dtype, dim, False, fp8=_fp8(target, scales)))
            found += (
                _prefill(target, dtype, dim, False, max_query_len, fp8=_fp8(target, scales))
                for max_query_len in (1, 4096)
            )
        found.append(
            _decode(target, torch.bfloat16, 128, True, fp8=_fp8(target, scales), **decode)
        )
        found.append(_prefill(target, torch.bfloat16, 128, True, 4096, fp8=_fp8(target, scales)))
    return found


def _fp8(target: Target, granularity: str) -> dict[str, object]:
    """The constexprs of an fp8 cache, converted as on the target."""
    info = DeviceInfo(
        device=torch.device("cuda"),
        name=target.name,
        capability=target.capability,
        num_sms=1,
        total_memory_bytes=0,
    )
    path = choose_fp8_path(info, is_amd=target.backend == "hip").path
    return {"FP8_PATH": path, "TOKEN_SCALES": granularity == "token"}


def _fp8_name(fp8: dict[str, object]) -> list[str]:
    return [] if fp8 is NO_FP8 else ["fp8", "token" if fp8["TOKEN_SCALES"] else "head"]


def _caches(dtype: torch.dtype, fp8: dict[str, object]) -> tuple[object, ...]:
    """K and V cache, scales and their addresses."""
    if fp8 is NO_FP8:
        return pointer(dtype), pointer(dtype), None, None, None, None
    codes, scale, int64 = map(pointer, (torch.uint8, torch.float32, torch.int64))
    return codes, codes, scale, scale, int64, int64


def _config_dtype(dtype: torch.dtype, fp8: dict[str, object]) -> torch.dtype:
    return dtype if fp8 is NO_FP8 or dtype == torch.float32 else torch.float8_e4m3fn


def _name(op: str, dtype: torch.dtype, *details: object) -> str:
    return "-".join([op, str(dtype).removeprefix("torch."), *map(str, details)])


def _write(dtype: torch.dtype, head_dim: int, fp8: dict[str, object] = NO_FP8) -> AotCase:
    config = KVCacheWriteConfig.default_for(head_dim, dtype)
    data, int32, int64 = pointer(dtype), pointer(torch.int32), pointer(torch.int64)
    qkv_row = 4 * NUM_KV_HEADS * head_dim
    return AotCase(
        name=_name("kv_cache_write", dtype, head_dim, *_fp8_name(fp8)),
        kernel=_kv_cache_write_kernel,
        args=(
            *_caches(dtype, fp8),
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
            **fp8,
        },
        num_warps=config.num_warps,
    )


def _pages(dtype: torch.dtype, fp8: dict[str, object]) -> tuple[object, ...]:
    """K cache, V cache, their scales, block table and its row stride."""
    return *_caches(dtype, fp8), pointer(torch.int32), 512


def _roles(head_dim: int) -> tuple[object, ...]:
    """The layout's tensors, its token stride, and softmax_scale."""
    int32, int64 = pointer(torch.int32), pointer(torch.int64)
    return int64, int64, int32, int32, int32, int32, head_dim, head_dim**-0.5


def _decode(
    target: Target,
    dtype: torch.dtype,
    head_dim: int,
    streaming: bool,
    *,
    group: int = 2,
    query_len: int = 1,
    fp8: dict[str, object] = NO_FP8,
) -> AotCase:
    row = group * NUM_KV_HEADS * head_dim
    float32 = pointer(torch.float32)
    rows = query_len * group
    tile_rows = max(MIN_DOT_ROWS, triton.next_power_of_2(rows))
    config = DecodeAttentionConfig.default_for(
        head_dim, _config_dtype(dtype, fp8), tile_rows, target.capability
    )
    return AotCase(
        name=_name(
            "decode",
            dtype,
            head_dim,
            f"rows{rows}",
            *(["ring"] if streaming else []),
            *_fp8_name(fp8),
        ),
        kernel=_paged_decode_attention_kernel,
        args=(
            *(float32, row, 4 * head_dim, head_dim),
            *(float32, 4 * group * NUM_KV_HEADS, 4, 1),
            *(pointer(dtype), 2 * row, head_dim),
            *_pages(dtype, fp8),
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
            **fp8,
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
    target: Target,
    dtype: torch.dtype,
    head_dim: int,
    streaming: bool,
    max_query_len: int,
    *,
    fp8: dict[str, object] = NO_FP8,
) -> AotCase:
    group = 2
    config = PrefillAttentionConfig.default_for(
        head_dim, _config_dtype(dtype, fp8), target.capability
    )
    config = config.fit_rows(group, max_query_len)
    row = group * NUM_KV_HEADS * head_dim
    int32 = pointer(torch.int32)
    return AotCase(
        name=_name(
            "prefill",
            dtype,
            head_dim,
            f"q{max_query_len}",
            *(["ring"] if streaming else []),
            *_fp8_name(fp8),
        ),
        kernel=_paged_prefill_attention_kernel,
        args=(
            *(pointer(dtype), row, head_dim),
            *(pointer(torch.float32), group * NUM_KV_HEADS, 1),
            *(pointer(dtype), 2 * row, head_dim),
            *_pages(dtype, fp8),
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
            **fp8,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
