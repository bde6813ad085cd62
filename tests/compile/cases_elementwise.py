"""Launches of norms, rope and activation that are compiled ahead of time."""

from __future__ import annotations

import torch

from mrv1.kernels._base.triton import triton
from mrv1.kernels.layers.activation import SiluAndMulConfig, _silu_and_mul_kernel
from mrv1.kernels.layers.rms_norm import RmsNormConfig, _rms_norm_kernel
from mrv1.kernels.layers.rope import RopeConfig, _apply_rope_kernel
from mrv1.testing.aot import AotCase, Target, pointer

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def cases(target: Target) -> list[AotCase]:
    return [
        *(_rms_norm(target, dtype, dim) for dtype in DTYPES for dim in (128, 1024, 2880, 8192)),
        *(_rms_norm(target, torch.bfloat16, dim, residual=True) for dim in (1024, 8192)),
        *(_rope(dtype, interleaved) for dtype in DTYPES for interleaved in (False, True)),
        _rope(torch.bfloat16, False, num_q_heads=64, head_dim=256),
        *(_silu_and_mul(target, dtype) for dtype in DTYPES),
    ]


def _name(op: str, *details: object) -> str:
    return "-".join([op, *(str(d).removeprefix("torch.") for d in details)])


def _rms_norm(target: Target, dtype: torch.dtype, dim: int, *, residual: bool = False) -> AotCase:
    config = RmsNormConfig.default_for(dim)
    x = pointer(dtype)
    return AotCase(
        name=_name("rms_norm", dtype, dim, *(["residual"] if residual else [])),
        kernel=_rms_norm_kernel,
        args=(x, dim, dim, x if residual else None, dim, x, dim, dim, x, 33, 1, dim, 1e-6),
        constexprs={
            "TILE_ROWS": config.tile_rows,
            "TILE_DIM": triton.next_power_of_2(dim),
            "OVERLAP": target.has_dependent_launch,
        },
        num_warps=config.num_warps,
    )


def _rope(
    dtype: torch.dtype, interleaved: bool, *, num_q_heads: int = 16, head_dim: int = 128
) -> AotCase:
    config = RopeConfig.default_for(num_q_heads, head_dim)
    num_kv_heads, row = num_q_heads // 2, 2 * num_q_heads * head_dim
    x = pointer(dtype)
    return AotCase(
        name=_name(
            "rope", dtype, num_q_heads, head_dim, *(["interleaved"] if interleaved else [])
        ),
        kernel=_apply_rope_kernel,
        args=(
            *(x, row, head_dim, x, row, head_dim),
            *(pointer(torch.float32), pointer(torch.int64)),
            *(33, num_q_heads, num_kv_heads, head_dim // 2),
        ),
        constexprs={
            "INTERLEAVED": interleaved,
            "TILE_TOKENS": config.tile_tokens,
            "TILE_Q_HEADS": triton.next_power_of_2(num_q_heads),
            "TILE_KV_HEADS": triton.next_power_of_2(num_kv_heads),
            "TILE_PAIRS": triton.next_power_of_2(head_dim // 2),
        },
        num_warps=config.num_warps,
    )


def _silu_and_mul(target: Target, dtype: torch.dtype) -> AotCase:
    config = SiluAndMulConfig.default_for()
    return AotCase(
        name=_name("silu_and_mul", dtype),
        kernel=_silu_and_mul_kernel,
        args=(pointer(dtype), 3072, pointer(dtype), 6144, 33, 3072),
        constexprs={
            "TILE_TOKENS": config.tile_tokens,
            "TILE_COLS": config.tile_cols,
            "OVERLAP": target.has_dependent_launch,
        },
        num_warps=config.num_warps,
    )
