"""Kernels of which a test reads the instructions."""

from __future__ import annotations

from dataclasses import replace

import torch

from mrv1.testing.aot import AotCase, Target
from tests.compile.cases_elementwise import cases as elementwise_cases
from tests.compile.cases_qkv import cases as qkv_cases
from tests.compile.cases_quantized import cases as quantized_cases
from tests.compile.cases_sampling import group_sums
from tests.compile.cases_step import cases as step_cases

LOADS = (
    r"\b(?:ld(?:\.\w+)*\.global\S*|(?:global|buffer)_load_\w+ .*|s_load_dword (?!.* 0x[1-9]).*)"
)
CONVERSIONS = r"\bcvt\.\S*e4m3\S*"
CODES = CONVERSIONS + r"|\b(?:max|min|div)\.\S*"
"""Conversions, bounds, through which no NaN passes, and the divisions between both."""
SUMS = (
    r"(?:\bld\.global(?:\.\w+)*?\.|shfl\.sync\.bfly\.b32.*, )"
    r"(v[24]\.b32|b32|\d+(?=, 31, -1;))"
)
"""Widths of loads, and the distances of lanes that add up."""

WAITS = r"(?:@%p\d+ )?ld\.volatile\.global\S*"
"""Loads that a wait for other ranks repeats, with their conditions."""


def cases(target: Target) -> list[AotCase]:
    if target.name == "sm_89":
        wanted = "qkv_cache_write-bfloat16-128-rope128-norm-fp8-scales16"
        write = next(case for case in qkv_cases(target) if case.name == wanted)
        return [replace(write, pattern=CONVERSIONS), _quantize(target)]
    fetch = next(case for case in step_cases(target) if case.name == "fetch_upload")
    return [
        replace(fetch, pattern=LOADS),
        *((_quantize(target), *_group_sums(target), _sum(target)) if target.capability else []),
    ]


def _quantize(target: Target) -> AotCase:
    name = "quantize_tokens-2880-token"
    case = next(case for case in quantized_cases(target) if case.name == name)
    return replace(case, pattern=CODES)


def _sum(target: Target) -> AotCase:
    name = "all_reduce_norm-bfloat16-bfloat16-4096-2ranks"
    case = next(case for case in elementwise_cases(target) if case.name == name)
    return replace(case, pattern=WAITS)


def _group_sums(target: Target) -> list[AotCase]:
    """Sums of groups of whole logits and of shards, in rows that are aligned and not."""
    return [
        replace(case, pattern=SUMS)
        for vocab_size in (151_936, 1000)
        for case in (
            group_sums(target, torch.float32, vocab_size),
            group_sums(target, torch.float32, vocab_size, ranks=2),
        )
    ]
