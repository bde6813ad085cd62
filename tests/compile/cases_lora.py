"""Launches with adapters (LoRA) that are compiled ahead of time: their ops, and linear layers."""

from __future__ import annotations

from dataclasses import replace

import torch

from mrv1.kernels.layers.add_adapters import NUM_WARPS, _add_adapters_kernel, tile_for
from mrv1.kernels.layers.lora_values import (
    MOST_OF_VECTOR,
    LoraConstants,
    LoraPointers,
    ranks_at_once,
)
from mrv1.kernels.layers.shrink_adapters import ShrinkConfig, _shrink_adapters_kernel
from mrv1.testing.aot import AotCase, Target, pointer
from tests.compile import cases_linear

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INT32, FLOAT32 = pointer(torch.int32), pointer(torch.float32)

LINEAR = {
    "linear_vector-bfloat16-1x14336x4096-residual": 1,
    "linear_vector-bfloat16-1x4096x14336-norm-gated": 2,
    "linear_vector-float32-1x100x48-norm-bias-gated-residual": 2,
    "linear_tile-bfloat16-16x4096x6144-norm": 3,
    "linear_tile-bfloat16-32x4096x14336-norm-gated": 2,
    "linear_tile-float32-16x100x48-norm-bias-gated-residual": 2,
    "linear_leaves-bfloat16-32x4096x6144-norm-4x1": 3,
    "linear_leaves-bfloat16-32x4096x14336-norm-gated-4x1": 2,
    "linear_registers-bfloat16-16x1024x4096-norm": 3,
    "linear_registers-bfloat16-16x1024x3072-norm-gated": 2,
    "linear_in_order-bfloat16-16x1024x4096-norm-1x8": 3,
    "linear_add_splits-4096": 1,
    "linear_add_splits-None": 1,
}
"""Launches of the linear layer, by the parts of their weights."""
PARKED_BYTES = {"sm_80": 8, "sm_90": 8, "sm_120": 16}
"""Bytes of registers that the compiler parks: where all weights are loaded early, as in
``cases_linear``, with 128 registers two programs fit a multiprocessor; and up to four registers in
a tile of float32 gates and ups."""


def cases(target: Target) -> list[AotCase]:
    linear = {case.name: case for case in cases_linear.cases(target)}
    return [
        *(_shrink(target, dtype, num_in) for dtype in DTYPES for num_in in (100, 4096, 14_336)),
        *(
            _add(target, dtype, out)
            for dtype in DTYPES
            for out in dict.fromkeys((dtype, torch.float32))
        ),
        *(
            _adapted(target, linear[name], parts)
            for name, parts in LINEAR.items()
            if name in linear
        ),
    ]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _constants(parts: int, tile: int, num_warps: int) -> LoraConstants:
    max_rank, num_rows = 16, 6144
    starts = {1: (num_rows, num_rows), 2: (num_rows // 2, num_rows), 3: (4096, 5120)}
    at_once = ranks_at_once(max_rank, tile, num_warps)
    return LoraConstants(num_rows, parts, max_rank, 8, at_once, *starts[parts])


def _shrink(target: Target, dtype: torch.dtype, num_in: int) -> AotCase:
    config, data = ShrinkConfig.default_for(num_in, 16, dtype), pointer(dtype)
    return AotCase(
        name=f"shrink_adapters-{_short(dtype)}-{num_in}",
        kernel=_shrink_adapters_kernel,
        args=(FLOAT32, data, num_in, data, FLOAT32, INT32, INT32, 33),
        constexprs={
            "IN": num_in,
            "PARTS": 3,
            "MAX_RANK": 16,
            "TILE_TOKENS": config.tile_tokens,
            "TILE_RANKS": config.tile_ranks,
            "TILE_IN": config.tile_in,
            "STEPS": config.steps,
            "SPLITS": config.splits,
            "WARPS": config.num_warps,
            "OVERLAP": target.has_dependent_launch,
        },
        num_warps=config.num_warps,
    )


def _add(target: Target, dtype: torch.dtype, out: torch.dtype) -> AotCase:
    tile_tokens, tile_rows = tile_for(33, 6144)
    return AotCase(
        name=f"add_adapters-{_short(dtype)}-{_short(out)}",
        kernel=_add_adapters_kernel,
        args=(pointer(out), 6144, LoraPointers(FLOAT32, pointer(dtype), INT32, INT32), 33),
        constexprs={
            "LORA": _constants(3, tile_tokens * tile_rows, NUM_WARPS),
            "TILE_TOKENS": tile_tokens,
            "TILE_ROWS": tile_rows,
            "OVERLAP": target.has_dependent_launch,
        },
        num_warps=NUM_WARPS,
    )


def _adapted(target: Target, case: AotCase, parts: int) -> AotCase:
    """Return the launch of a product with adapters."""
    dtype = case.args[0].dtype  # type: ignore[attr-defined] - that of the result
    of, args = case.constexprs, case.args
    if "linear_leaves" in case.name:  # many tokens are not split
        of = {**of, "SPLITS": 1, "PARTS": of["SPLITS"] * of["PARTS"]}
        args = (*args[:2], None, *args[3:])
    rows = of.get("TILE_ROWS", of.get("TILE_OUT", 1)) // (2 if of.get("GATED") else 1)
    tile = of.get("TILE_TOKENS", 1) * rows
    constants = _constants(parts, tile, case.num_warps)
    if "linear_vector" in case.name:
        constants = constants._replace(AT_ONCE=min(MOST_OF_VECTOR, 16))
    pointers = LoraPointers(FLOAT32, pointer(dtype), INT32, INT32)
    constexprs = {**of, "lora": pointers, "LORA": constants}
    parked = max(case.parked_bytes, PARKED_BYTES.get(target.name, 0))
    return replace(
        case, name=f"lora-{case.name}", args=args, constexprs=constexprs, parked_bytes=parked
    )
