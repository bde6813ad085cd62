"""Launches of norms, sums over ranks, rope and activation, compiled ahead of time."""

from __future__ import annotations

import torch

from mrv1.kernels._base.triton import triton
from mrv1.kernels.layers.activation import _silu_and_mul_kernel, tile_for
from mrv1.kernels.layers.all_reduce_norm import LIMITED, MOST_REGISTERS, _all_reduce_norm_kernel
from mrv1.kernels.layers.contracts import GATES, RING_ROWS, RING_SLOTS, Activation
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
        _rms_norm(target, torch.bfloat16, 4096, wide=True),
        _rms_norm(target, torch.bfloat16, 3584, wide=True, onto=True),
        _rms_norm(target, torch.bfloat16, 4096, second=True),
        *(_gated(target, dtype, "silu_and_mul") for dtype in DTYPES),
        *(_gated(target, dtype, "gelu_tanh_and_mul") for dtype in DTYPES),
        *(_sums_over_ranks(target) if target.backend == "cuda" else ()),  # no AMD
    ]


def _sums_over_ranks(target: Target) -> list[AotCase]:
    return [
        *(_all_reduce_norm(target, dtype, 4096, 2) for dtype in DTYPES),
        _all_reduce_norm(target, torch.bfloat16, 576, 3, two_shot=True, is_fused=False),
        _all_reduce_norm(target, torch.bfloat16, 4096, 8, two_shot=True),
        _all_reduce_norm(target, torch.bfloat16, 8192, 4, two_shot=True),
        _all_reduce_norm(target, torch.bfloat16, 8192, 2),
        _all_reduce_norm(target, torch.bfloat16, 4096, 2, wire=torch.float32),
        _all_reduce_norm(target, torch.bfloat16, 4096, 2, splits=4),
    ]


def _name(op: str, *details: object) -> str:
    return "-".join([op, *(str(d).removeprefix("torch.") for d in details)])


def _rms_norm(
    target: Target,
    dtype: torch.dtype,
    dim: int,
    *,
    residual: bool = False,
    wide: bool = False,
    onto: bool = False,
    second: bool = False,
) -> AotCase:
    config = RmsNormConfig.default_for(dim)
    x = pointer(dtype)
    return AotCase(
        name=_name(
            "rms_norm",
            dtype,
            dim,
            *(["residual"] if residual else []),
            *(["wide"] if wide else []),
            *(["onto"] if onto else []),
            *(["second"] if second else []),
        ),
        kernel=_rms_norm_kernel,
        args=(
            *(x, dim, dim, x if residual else None, dim, x if onto else None, dim, x, dim, dim),
            *(pointer(torch.float32) if wide else x, x if second else None, 33, 1, dim, 1e-6),
        ),
        constexprs={
            "TILE_ROWS": config.tile_rows,
            "TILE_DIM": triton.next_power_of_2(dim),
            "NEXT_AT_ONCE": onto,
            "OVERLAP": target.has_dependent_launch,
        },
        num_warps=config.num_warps,
    )


def _all_reduce_norm(
    target: Target,
    dtype: torch.dtype,
    hidden: int,
    size: int,
    *,
    two_shot: bool = False,
    is_fused: bool = True,
    wire: torch.dtype | None = None,
    splits: int = 1,
) -> AotCase:
    config = RmsNormConfig.default_for(hidden)
    x, partial = pointer(dtype), pointer(torch.float32 if splits > 1 else wire or dtype)
    words = pointer(torch.int16 if (wire or dtype).itemsize == 2 else torch.int32)
    is_limited = target.capability in LIMITED and size == 2 and words.itemsize == 2
    counter, fused = pointer(torch.int32), x if is_fused else None
    flags = {"two_shot": two_shot, "splits": splits > 1, "sum_alone": not is_fused}
    details = [f"{size}ranks", *(flag for flag, is_set in flags.items() if is_set)]
    return AotCase(
        name=_name("all_reduce_norm", dtype, partial.dtype, hidden, *details),
        kernel=_all_reduce_norm_kernel,
        args=(
            *(x, hidden, fused, hidden, (words,) * size, counter, partial, 33 * hidden, hidden),
            *(fused, hidden, None, fused, counter, 33, hidden, 1e-6),
        ),
        constexprs={
            "RANK": size - 1,
            "SIZE": size,
            "RING_SLOTS": RING_SLOTS,
            "RING_ROWS": RING_ROWS,
            "TREE_SIZE": triton.next_power_of_2(size),
            "SPLITS": splits,
            "TWO_SHOT": two_shot,
            "TILE_ROWS": config.tile_rows,
            "TILE_DIM": triton.next_power_of_2(hidden),
            "OVERLAP": target.has_dependent_launch,
            **({"maxnreg": MOST_REGISTERS} if is_limited else {}),
        },
        num_warps=config.num_warps,
        parked_bytes=64 if size == 2 else 0,  # before the wait, for what follows it
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


def _gated(target: Target, dtype: torch.dtype, activation: Activation) -> AotCase:
    tile_tokens, tile_cols = tile_for(33, 3072)
    return AotCase(
        name=_name(activation, dtype),
        kernel=_silu_and_mul_kernel,
        args=(pointer(dtype), 3072, pointer(dtype), 6144, 33, 3072),
        constexprs={
            "GATED": GATES[activation],
            "TILE_TOKENS": tile_tokens,
            "TILE_COLS": tile_cols,
            "OVERLAP": target.has_dependent_launch,
        },
        num_warps=4,
    )
