"""Launches of the bad-words mask that are compiled ahead of time."""

from __future__ import annotations

import torch

from mrv1.kernels.sampling.bad_words import BadWordsConfig, _apply_bad_words_kernel
from mrv1.testing.aot import AotCase, Target, pointer

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def cases(target: Target) -> list[AotCase]:
    return [
        *(_apply_bad_words(target, dtype, 128, 8) for dtype in DTYPES),
        _apply_bad_words(target, torch.float32, 16, 8, drafts=True),
        _apply_bad_words(target, torch.float32, 128, 8, first_token=76_032),
        *(_apply_bad_words(target, torch.float32, *size) for size in ((1, 1), (5, 3), (40, 300))),
    ]


def _apply_bad_words(
    target: Target,
    dtype: torch.dtype,
    max_words: int,
    max_len: int,
    *,
    drafts: bool = False,
    first_token: int | None = None,
) -> AotCase:
    config = BadWordsConfig.default_for(max_words, max_len)
    int32 = pointer(torch.int32)
    name = f"apply_bad_words-{str(dtype).removeprefix('torch.')}-{max_words}x{max_len}"
    return AotCase(
        name=f"{name}{'-drafts' if drafts else ''}{'-shard' if first_token else ''}",
        kernel=_apply_bad_words_kernel,
        args=(
            *(pointer(dtype), 151_936, int32, 40_960, int32, int32, int32 if drafts else None),
            *(int32, max_words * max_len, int32, max_words, int32),
            *((int32, 7) if drafts else (None, 0)),
            *(int32, pointer(torch.int64) if drafts else None, 8 if drafts else 1),
            *(max_words, 151_936, first_token),
        ),
        constexprs={
            "MAX_LEN": max_len,
            "TILE_WORDS": config.tile_words,
            "TILE_LEN": config.tile_len,
            "OVERLAP": target.has_dependent_launch,
        },
        num_warps=config.num_warps,
    )
