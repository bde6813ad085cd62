"""Launches of the experts' ops that are compiled ahead of time: routers and model shapes."""

from __future__ import annotations

import torch

from mrv1.kernels._base.arithmetic import next_power_of_2
from mrv1.kernels.experts.add_experts import SumConfig, _add_experts_kernel
from mrv1.kernels.experts.combine_experts import _combine_kernel
from mrv1.kernels.experts.expert_codes import ExpertCodesConfig, _few_codes_kernel
from mrv1.kernels.experts.expert_linear import (
    LARGE_SHARED_MEMORY,
    ExpertConfig,
    _few_pairs_kernel,
    _sorted_pairs_kernel,
)
from mrv1.kernels.experts.route_experts import (
    RouteConfig,
    _choose_experts_kernel,
    _router_logits_kernel,
)
from mrv1.kernels.experts.sort_pairs import SCANNED, _sort_pairs_kernel
from mrv1.kernels.layers.silu import CLAMPED_SWIGLU
from mrv1.testing.aot import AotCase, Target, pointer

INT32, FLOAT32 = pointer(torch.int32), pointer(torch.float32)
PARKED_BYTES = 16
"""Bytes of four registers for which the compiler prefers one more program on a multiprocessor."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = {"qwen3-30b": (2048, 768, 128, 8), "ernie-21b": (2560, 1536, 66, 8)}
"""Hidden size, width of an expert, experts and experts of a token."""
CLAMPED = {"gpt-oss-20b": (2880, 2880, 32, 4)}
"""The same of a model with biases and a clamped activation."""
GROUPS = {"e2m1": (1, 32), "e4m3": (128, 128), "q4_k": (1, 256), "q6_k": (1, 256)}
"""Rows and inputs that share a scale, by code."""
NUMBERS = {
    "e2m1": (pointer(torch.uint8), None, None, None, None),
    "e4m3": (FLOAT32, None, None, None, None),
    "q4_k": (None, None, None, INT32, None),
    "q6_k": (None, None, None, pointer(torch.int16), INT32),
}
"""Scales, zeros, minima, heads and high bits, by code."""


def cases(target: Target) -> list[AotCase]:
    return [
        *(_logits(target, dtype, router, tokens)
          for dtype in DTYPES for router in dict.fromkeys((dtype, torch.float32))
          for tokens in (1, 4096)),
        *(_choice(target, sigmoid=sigmoid, rounds=not sigmoid) for sigmoid in (False, True)),
        _choice(target, sigmoid=False, rounds=True, has_logits_bias=True),
        _sort(target),
        *(_products(target, shape, dtype, pairs, is_gated=is_gated)
          for shape in SHAPES for dtype in DTYPES
          for pairs in (8, 256, 2048, 65_536) for is_gated in (True, False)),
        *(_products(target, shape, dtype, 2048, is_gated=False, leaves=leaves)
          for shape in SHAPES for dtype in DTYPES for leaves in (1, 8)),
        *(_products(target, "qwen3-30b", dtype, 2048, is_gated=is_gated, deterministic=True)
          for dtype in DTYPES for is_gated in (True, False)),
        *(_products(target, "gpt-oss-20b", torch.bfloat16, pairs, is_gated=is_gated, code="e2m1")
          for pairs in (4, 256, 2048, 65_536) for is_gated in (True, False)),
        _products(target, "gpt-oss-20b", torch.bfloat16, 2048, is_gated=False, leaves=8,
                  code="e2m1"),
        *(_few_codes(target, shape, dtype, pairs, code, is_gated=is_gated)
          for shape, code in (("gpt-oss-20b", "e2m1"), ("qwen3-30b", "e4m3"))
          for dtype in (torch.float16, torch.bfloat16)
          for pairs in (4, 32, 256) for is_gated in (True, False) if target.capability),
        *(_products(target, "gpt-oss-20b", dtype, 32, is_gated=True)
          for dtype in DTYPES),
        *(_products(target, "qwen3-30b", dtype, pairs, is_gated=True, code="e4m3")
          for dtype in (torch.float16, torch.bfloat16) for pairs in (8, 2048)),
        *(_products(target, "qwen3-30b", torch.bfloat16, pairs, is_gated=False, code=code)
          for code, pairs in (("q4_k", 2048), ("q6_k", 8), ("q6_k", 2048))),
        *(_few_codes(target, "qwen3-30b", torch.bfloat16, 32, "q4_k", is_gated=is_gated)
          for is_gated in (True, False) if target.capability),
        *(_added(target, shape, dtype) for shape in SHAPES for dtype in DTYPES[1:]),
        *(_combination(target, dtype, has_norm=has_norm)
          for dtype in DTYPES for has_norm in (True, False)),
        _combination(target, torch.bfloat16, has_norm=True, leaves=8),
        _combination(target, torch.float32, has_norm=False, leaves=4),
    ]  # fmt: skip


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _logits(target: Target, dtype: torch.dtype, router: torch.dtype, tokens: int) -> AotCase:
    config = RouteConfig.default_for(tokens, 2560, deterministic=False)
    return AotCase(
        name=f"router-{_short(dtype)}-{_short(router)}-{tokens}",
        kernel=_router_logits_kernel,
        args=(FLOAT32, pointer(dtype), 2560, pointer(router), tokens, 64, 2560),
        constexprs={
            "TILE_TOKENS": config.tile_tokens,
            "TILE_EXPERTS": config.tile_experts,
            "TILE_IN": config.tile_in,
            "SPLITS": config.splits,
            "NUM_STAGES": config.num_stages,
            "OVERLAP": target.has_dependent_launch,
        },
        num_warps=config.num_warps,
    )


def _choice(
    target: Target, *, sigmoid: bool, rounds: bool, has_logits_bias: bool = False
) -> AotCase:
    return AotCase(
        name=f"choose-{'sigmoid' if sigmoid else 'softmax'}{'-bias' if has_logits_bias else ''}",
        kernel=_choose_experts_kernel,
        args=(
            *(INT32, FLOAT32, FLOAT32, pointer(torch.bfloat16), FLOAT32 if sigmoid else None),
            pointer(torch.bfloat16) if has_logits_bias else None,
            *(pointer(torch.int64), 2, 40, 128, 1e-20, 1.0),
        ),
        constexprs={
            "TOP_K": 8,
            "SHARED": 1,
            "SIGMOID": sigmoid,
            "GROUPS": 4 if sigmoid else 1,
            "KEPT": 2 if sigmoid else 1,
            "GROUP": 32 if sigmoid else 128,
            "RENORMALIZES": True,
            "ROUNDS": rounds,
            "SPLITS": 8,
            "TILE_EXPERTS": 128,
            "TILE_CHOSEN": 16,
            "OVERLAP": target.has_dependent_launch,
        },
        num_warps=1,
    )


def _sort(target: Target) -> AotCase:
    return AotCase(
        name="sort-pairs",
        kernel=_sort_pairs_kernel,
        args=(INT32, INT32, INT32, 4096),
        constexprs={"TILE": SCANNED, "OVERLAP": target.has_dependent_launch},
        num_warps=8,
    )


def _products(
    target: Target, name: str, dtype: torch.dtype, pairs: int, *, is_gated: bool,
    leaves: int | None = None, code: str | None = None, deterministic: bool = False,
) -> AotCase:  # fmt: skip
    hidden, width, experts, chosen = (SHAPES | CLAMPED)[name]
    num_in, num_out = (hidden, width) if is_gated else (width, hidden)
    config = ExpertConfig.default_for(
        pairs,
        experts,
        num_in // (leaves or 1),
        dtype,
        is_gated=is_gated,
        deterministic=deterministic or leaves is not None,
        has_room=target.capability in LARGE_SHARED_MEMORY,
        has_codes=code is not None,
    )
    half = experts * width * hidden if is_gated else 0
    weight = (pointer(dtype), width * hidden if is_gated else width, half)
    weight += (num_in if is_gated else experts * width,)
    if code is not None:
        weight = (pointer(torch.int16), 0, 0, 0)
    data = (FLOAT32 if leaves else pointer(dtype), pointer(dtype), num_in, *weight)
    is_clamped = name in CLAMPED
    more = (pointer(dtype), 2 * num_out, 1, 2) if is_clamped else (None,) * 4
    more += (1.702, 7.0) if is_clamped and is_gated else (None, None)
    more += NUMBERS[code] if code else (None,) * 5
    gate = CLAMPED_SWIGLU.value if is_clamped else 1
    common = {
        "PAIRS_PER_ROW": chosen if is_gated else 1,
        "IN": num_in,
        "GATED": gate if is_gated else 0,
        "TILE_PAIRS": config.tile_pairs,
        "TILE_ROWS": config.tile_rows,
        "TILE_IN": config.tile_in,
        "NUM_STAGES": config.num_stages,
        "PAIRS_FIRST": config.pairs_first,
        "CODE": code,
        "HARDWARE": target.capability and target.capability >= (8, 9) if code else None,
        "GROUP": GROUPS[code][1] if code else 0,
        "ROWS_PER_SCALE": GROUPS[code][0] if code else 0,
        "OVERLAP": target.has_dependent_launch,
    }
    label = f"{name}-{_short(dtype)}-{pairs}-{'gated' if is_gated else 'down'}"
    label += f"-leaves{leaves}" if leaves else "-deterministic" if deterministic else ""
    label += f"-{code}" if code else ""
    if config.is_sorted:
        return AotCase(
            name=f"sorted-pairs-{label}",
            kernel=_sorted_pairs_kernel,
            args=(*data, INT32, INT32, 1000, pairs, num_out, experts, *more),
            constexprs=common
            | {
                "EXPERTS": next_power_of_2(experts),
                "LEAVES": leaves or 1,
                "SHARED": 2 if leaves and experts == 66 else 0,
            },
            num_warps=config.num_warps,
            parked_bytes=PARKED_BYTES if dtype == torch.float32 else 0,
        )
    return AotCase(
        name=f"few-pairs-{label}",
        kernel=_few_pairs_kernel,
        args=(*data, INT32, pairs, num_out, *more),
        constexprs=common | {"BY_PAIR": pairs < experts, "LANES": max(16, next_power_of_2(pairs))},
        num_warps=config.num_warps,
    )


def _few_codes(
    target: Target, name: str, dtype: torch.dtype, pairs: int, code: str, *, is_gated: bool
) -> AotCase:
    hidden, width, experts, chosen = (SHAPES | CLAMPED)[name]
    num_in, num_out = (hidden, width) if is_gated else (width, hidden)
    config = ExpertCodesConfig.default_for(pairs, experts)
    is_clamped = name in CLAMPED
    gate = CLAMPED_SWIGLU.value if is_clamped else 1
    added = (pointer(dtype), 2 * num_out, 1, 2) if is_clamped else (None,) * 4
    added += (1.702, 7.0) if is_clamped and is_gated else (None, None)
    return AotCase(
        name=f"few-codes-{name}-{_short(dtype)}-{pairs}-{'gated' if is_gated else 'down'}-{code}",
        kernel=_few_codes_kernel,
        args=(
            *(pointer(dtype), pointer(dtype), num_in, INT32, *NUMBERS[code]),
            *(INT32, pairs, num_out, 100, *added),
        ),
        constexprs={
            "BY_PAIR": pairs < experts,
            "PAIRS_PER_ROW": chosen if is_gated else 1,
            "IN": num_in,
            "CODE": code,
            "HARDWARE": target.capability is not None and target.capability >= (8, 9),
            "GROUP": GROUPS[code][1],
            "ROWS_PER_SCALE": GROUPS[code][0],
            "GATED": gate if is_gated else 0,
            "TILE_PAIRS": config.tile_pairs,
            "TILE_ROWS": config.tile_rows,
            "WARPS": config.num_warps,
            "DEPTH": config.depth,
            "LANES": max(16, next_power_of_2(pairs)),
            "OVERLAP": target.has_dependent_launch,
        },
        num_warps=config.num_warps,
        num_stages=1,
        parked_bytes=24 if target.name == "sm_120" else PARKED_BYTES,  # over the loop
    )


def _added(target: Target, name: str, dtype: torch.dtype) -> AotCase:
    hidden, width, _, chosen = SHAPES[name]
    config = SumConfig.default_for(width, chosen, dtype)
    assert config is not None, name
    return AotCase(
        name=f"add_experts-{name}-{_short(dtype)}",
        kernel=_add_experts_kernel,
        args=(
            *(pointer(dtype), pointer(dtype), pointer(dtype), width),
            *(pointer(dtype), width, chosen * width, INT32, FLOAT32, hidden),
        ),
        constexprs={
            "CHOSEN": chosen,
            "IN": width,
            "TILE_ROWS": config.tile_rows,
            "TILE_IN": config.tile_in,
            "AHEAD": config.experts_ahead,
            "OVERLAP": target.has_dependent_launch,
        },
        num_warps=config.num_warps,
    )


def _combination(
    target: Target, dtype: torch.dtype, *, has_norm: bool, leaves: int | None = None
) -> AotCase:
    data = pointer(dtype)
    normed = (data, 2560) if has_norm else (None, 0)
    tile_cols = 4096 if has_norm else 1024
    return AotCase(
        name=f"combine-{_short(dtype)}{'-norm' if has_norm else ''}"
        f"{f'-leaves{leaves}' if leaves else ''}",
        kernel=_combine_kernel,
        args=(
            *(data, 2560, *normed, data, 2560, FLOAT32 if leaves else data, FLOAT32),
            *(data if has_norm else None, 40, 2560, 1e-6),
        ),
        constexprs={
            "CHOSEN": 8,
            "LEAVES": leaves or 1,
            "TILE_COLS": tile_cols,
            "OVERLAP": target.has_dependent_launch,
        },
        num_warps=8 if has_norm else 4,
    )
