"""Launches of the logits' edits that are compiled ahead of time."""

from __future__ import annotations

import torch

from mrv1.kernels._base.triton import triton
from mrv1.kernels.sampling.edit_logits import (
    LIMITED,
    MAX_REGISTERS,
    EditLogitsConfig,
    _apply_token_bitmask_kernel,
    _edit_logits_kernel,
)
from mrv1.testing.aot import AotCase, Target, pointer

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def cases(target: Target) -> list[AotCase]:
    return [
        *(_edit_logits(target, dtype, 151_936) for dtype in DTYPES),
        _edit_logits(target, torch.float32, 128_256, rows_per_req=4),
        _edit_logits(target, torch.float32, 1000),
        _edit_logits(target, torch.float32, 75_904, first_token=76_032),
        _edit_logits(target, torch.float32, 64_128, rows_per_req=4, first_token=64_128),
        *(_apply_token_bitmask(target, dtype) for dtype in DTYPES),
    ]


def _edit_logits(
    target: Target,
    dtype: torch.dtype,
    vocab_size: int,
    *,
    rows_per_req: int = 1,
    first_token: int | None = None,
) -> AotCase:
    config = EditLogitsConfig.default_for(vocab_size, 256)
    int32, float32 = pointer(torch.int32), pointer(torch.float32)
    drafts = rows_per_req > 1
    max_bias = 300
    name = f"edit_logits-{str(dtype).removeprefix('torch.')}-{vocab_size}"
    return AotCase(
        name=f"{name}{'-drafts' if drafts else ''}{'-shard' if first_token else ''}",
        kernel=_edit_logits_kernel,
        args=(
            *(pointer(dtype), vocab_size, int32, vocab_size, int32, int32, 40_960),
            *(int32, int32, int32, int32, triton.cdiv(vocab_size, 32), int32, int32, 16),
            *(int32, max_bias, float32, max_bias, int32, float32, float32, float32),
            *((int32, rows_per_req - 1) if drafts else (None, 0)),
            *(int32, pointer(torch.int64) if drafts else None, rows_per_req),
            *(16, max_bias, vocab_size, config.part_tiles, first_token),
        ),
        constexprs={
            "TILE_ROWS": rows_per_req,
            "TILE_STOP_TOKENS": 16,
            "TILE_BIAS": triton.next_power_of_2(max_bias),
            "TILE_VOCAB": config.tile_vocab,
            "IS_ALIGNED": vocab_size % 16 == 0,
            "enable_fp_fusion": False,
            **({"maxnreg": MAX_REGISTERS} if target.capability in LIMITED and not drafts else {}),
            "OVERLAP": target.has_dependent_launch,
        },
        num_warps=config.num_warps,
        parked_bytes=16,  # parked over the loops, on sm_89 (drafts) and sm_120
    )


def _apply_token_bitmask(target: Target, dtype: torch.dtype) -> AotCase:
    vocab_size = 151_936
    config = EditLogitsConfig.default_for(vocab_size, 256)
    int32 = pointer(torch.int32)
    return AotCase(
        name=f"apply_token_bitmask-{str(dtype).removeprefix('torch.')}",
        kernel=_apply_token_bitmask_kernel,
        args=(
            *(pointer(dtype), vocab_size, int32, vocab_size // 32, int32),
            *(vocab_size, config.part_tiles),
        ),
        constexprs={
            "TILE_VOCAB": config.tile_vocab,
            "IS_ALIGNED": True,
            "OVERLAP": target.has_dependent_launch,
        },
        num_warps=config.num_warps,
    )
