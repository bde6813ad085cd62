"""Launches of log-probabilities that are compiled ahead of time."""

from __future__ import annotations

import torch

from mrv1.kernels._base.triton import triton
from mrv1.kernels.sampling.contracts import group_size
from mrv1.kernels.sampling.groups import group_sums_kernel
from mrv1.kernels.sampling.logprobs import TopLogprobsConfig, _top_logprobs_kernel
from mrv1.testing.aot import AotCase, Target, pointer
from tests.compile.cases_sampling import numbers_of_ranks, shard_arguments, shard_stride

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def cases(target: Target) -> list[AotCase]:
    return [
        *(case for dtype in DTYPES for case in _top_logprobs(target, dtype, 151_936)),
        *_top_logprobs(target, torch.float32, 1000),
        *_top_logprobs(target, torch.bfloat16, 1 << 20),
        *(case for n in numbers_of_ranks(target)
          for case in _top_logprobs(target, torch.float32, 151_936, n)),
    ]  # fmt: skip


def _top_logprobs(
    target: Target, dtype: torch.dtype, vocab_size: int, ranks: int = 1
) -> list[AotCase]:
    config, size = TopLogprobsConfig.default_for(vocab_size), group_size(vocab_size)
    num_groups = triton.cdiv(vocab_size, size)
    num_parts = triton.cdiv(num_groups, config.tile_groups)
    int32, int64, float32 = (pointer(d) for d in (torch.int32, torch.int64, torch.float32))
    name = f"{str(dtype).removeprefix('torch.')}-{vocab_size}"
    sums, better, logits, stride = float32, int32, pointer(dtype), vocab_size
    first, second = {}, {}
    if ranks > 1:
        name += f"-{ranks}-ranks"
        first = shard_arguments(vocab_size, ranks, first_launch=True)
        second = shard_arguments(vocab_size, ranks, first_launch=False)
        second |= {"stride_better_call": 1024}
        sums, better, logits = ((each,) * ranks for each in (sums, better, logits))
        stride = shard_stride(vocab_size, ranks)
    overlap = {"OVERLAP": target.has_dependent_launch}
    return [
        AotCase(
            name=f"ranked_group_sums-{name}",
            kernel=group_sums_kernel,
            args=(
                *(sums, sums, logits, stride, None, None),
                *(vocab_size, num_groups, num_parts),
            ),
            constexprs={
                "GROUP": size,
                "TILE_GROUPS": config.tile_groups,
                "SUM_GREEDY": True,
                "num_better_ptr": better,
                "token_ids_ptr": int64,
                "stride_token_ids_row": 1,
                "num_tokens": 1,
            }
            | first
            | overlap,
            num_warps=config.num_warps,
        ),
        AotCase(
            name=f"top_logprobs-{name}",
            kernel=_top_logprobs_kernel,
            args=(
                *(float32, int64, int64, float32, float32, float32, int32),
                *(logits, stride, int64, 1, int32, float32, int32, 1, 20),
                *(vocab_size, num_groups, num_parts),
            ),
            constexprs={
                "GROUP": size,
                "TILE_GROUPS": triton.next_power_of_2(num_groups),
                "TILE_PARTS": triton.next_power_of_2(num_parts),
            }
            | second
            | overlap,
            num_warps=config.num_row_warps,
            programs_per_sm=2 if (target.name, vocab_size) == ("sm_90", 151_936) else 0,
        ),
    ]
