"""What of the log-probabilities is compiled ahead of time, as launched."""

from __future__ import annotations

import torch

from mrv1.kernels._triton import triton
from mrv1.kernels.logprobs import (
    GROUP,
    TopLogprobsConfig,
    _sum_groups_kernel,
    _top_logprobs_kernel,
)
from mrv1.testing.aot import AotCase, Target, pointer

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def cases(target: Target) -> list[AotCase]:
    return [
        *(case for dtype in DTYPES for case in _top_logprobs(target, dtype, 151_936)),
        *_top_logprobs(target, torch.float32, 1000),
        *_top_logprobs(target, torch.bfloat16, 1 << 20),
    ]


def _top_logprobs(target: Target, dtype: torch.dtype, vocab_size: int) -> list[AotCase]:
    config = TopLogprobsConfig.default_for(vocab_size, 256)
    num_groups = triton.cdiv(vocab_size, GROUP)
    int32, int64, float32 = (pointer(d) for d in (torch.int32, torch.int64, torch.float32))
    name = f"{str(dtype).removeprefix('torch.')}-{vocab_size}"
    overlap = {"OVERLAP": target.has_dependent_launch}
    return [
        AotCase(
            name=f"sum_groups-{name}",
            kernel=_sum_groups_kernel,
            args=(
                *(float32, float32, pointer(dtype), vocab_size, int32, float32),
                *(vocab_size, num_groups, config.part_tiles),
            ),
            constexprs={"TILE_GROUPS": config.tile_groups} | overlap,
            num_warps=config.num_warps,
        ),
        AotCase(
            name=f"top_logprobs-{name}",
            kernel=_top_logprobs_kernel,
            args=(
                *(float32, int64, int64, float32, float32, float32, pointer(dtype), vocab_size),
                *(int64, 1, int32, float32, 1, 20, vocab_size, num_groups),
            ),
            constexprs={
                "TILE_GROUPS": triton.next_power_of_2(num_groups),
                "TILE_RANKED": config.tile_ranked,
            }
            | overlap,
            num_warps=config.num_ranking_warps,
        ),
    ]
