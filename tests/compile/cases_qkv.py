"""Launches of the fused op from qkv to the cache that are compiled ahead of time."""

from __future__ import annotations

import torch

from mrv1.kernels.cache.contracts import hadamard_block
from mrv1.kernels.cache.qkv_cache_write import QKVCacheWriteConfig, _qkv_cache_write_kernel
from mrv1.testing.aot import AotCase, Target, pointer
from tests.compile.cases_attention import (
    BLOCK_SIZE,
    NO_FP8,
    _caches,
    _fp8,
    _fp8_name,
    _int4,
    _name,
)

NUM_Q_HEADS = 32
NUM_KV_HEADS = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def cases(target: Target) -> list[AotCase]:
    fp8 = [_fp8(target, granularity) for granularity in ("token", "head", "quarter")]
    return [
        *(_write(target, dtype, 128, norm=True) for dtype in DTYPES),
        *(_write(target, torch.bfloat16, dim) for dim in (64, 80, 256)),
        *(_write(target, torch.bfloat16, 128, norm=True, fp8=scales) for scales in fp8),
        _write(target, torch.bfloat16, 128, rotary_dim=None),
        _write(target, torch.bfloat16, 128, rotary_dim=None, norm=True, k_out=True),
        _write(target, torch.bfloat16, 128, rotary_dim=32, norm=True, fp8=fp8[0], k_out=True),
        _write(target, torch.bfloat16, 96, rotary_dim=40, interleaved=True, fp8=fp8[0]),
        _write(target, torch.float32, 256, norm=True, fp8=fp8[0], k_out=True),
        _write(target, torch.bfloat16, 256, norm=True, wide_norm=True),
        _write(target, torch.bfloat16, 128, interleaved=True, norm=True),
        _write(target, torch.bfloat16, 128, interleaved=True, mrope=True, norm=True, fp8=fp8[1]),
        _write(target, torch.bfloat16, 128, mrope=True),
        *(_write(target, torch.bfloat16, dim, norm=True, mixes=True, fp8=_int4(target))
          for dim in (64, 96, 128, 256)),
        _write(target, torch.float32, 128, mixes=True, fp8=_int4(target)),
        _write(target, torch.bfloat16, 128, rotary_dim=32, mixes=True, fp8=_int4(target)),
        _write(target, torch.bfloat16, 128, interleaved=True, mixes=True, fp8=_int4(target)),
        _write(target, torch.bfloat16, 128, rotary_dim=None, mixes=True, fp8=_int4(target)),
    ]  # fmt: skip


def _write(
    target: Target,
    dtype: torch.dtype,
    head_dim: int,
    *,
    rotary_dim: int | None = -1,
    interleaved: bool = False,
    mrope: bool = False,
    norm: bool = False,
    wide_norm: bool = False,
    k_out: bool = False,
    mixes: bool = False,
    fp8: dict[str, object] = NO_FP8,
) -> AotCase:
    """Return a write; ``rotary_dim`` -1 = the whole head, None = no rope."""
    rotary_dim = head_dim if rotary_dim == -1 else rotary_dim
    config = QKVCacheWriteConfig.default_for(head_dim, dtype)
    data, int32, int64 = pointer(dtype), pointer(torch.int32), pointer(torch.int64)
    weight = (pointer(torch.float32) if wide_norm else data) if norm else None
    num_pairs = (rotary_dim or head_dim) // 2
    quarter = num_pairs // 4
    flags = {"interleaved": interleaved, "mrope": mrope, "norm": norm, "wide": wide_norm}
    flags |= {"k_out": k_out, "mixes": mixes}
    details = [f"rope{rotary_dim}", *(name for name, given in flags.items() if given)]
    return AotCase(
        name=_name("qkv_cache_write", dtype, head_dim, *details, *_fp8_name(fp8)),
        kernel=_qkv_cache_write_kernel,
        args=(
            *_caches(dtype, fp8),
            *(data, NUM_Q_HEADS * head_dim, head_dim),
            *((data, NUM_KV_HEADS * head_dim, head_dim) if k_out else (None, 0, 0)),
            *(data, (NUM_Q_HEADS + 2 * NUM_KV_HEADS) * head_dim, head_dim),
            *(weight, weight, 1e-6),
            *((None, None) if rotary_dim is None else (pointer(torch.float32), int64)),
            33,
            *(int64, 33, 1),
            *(int32, int64, int64, head_dim),
            33,
        ),
        constexprs={
            "NUM_Q_HEADS": NUM_Q_HEADS,
            "NUM_KV_HEADS": NUM_KV_HEADS,
            "HEAD_DIM": head_dim,
            "NUM_PAIRS": num_pairs,
            "INTERLEAVED": interleaved,
            "HADAMARD": hadamard_block(head_dim, rotary_dim) if mixes else 0,
            "SECTION": (num_pairs - 2 * quarter, quarter, quarter) if mrope else None,
            "MROPE_INTERLEAVED": mrope and norm,
            "GROUPS": mrope,
            "BLOCK_SIZE": BLOCK_SIZE,
            "TILE_TOKENS": config.tile_tokens,
            "TILE_HEADS": config.tile_heads,
            **fp8,
            "OVERLAP": target.has_dependent_launch,
        },
        num_warps=config.num_warps,
    )
