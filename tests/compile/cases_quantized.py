"""Launches of the linear layer with quantized weights that are compiled ahead of time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrv1.kernels._base.triton import triton
from mrv1.kernels.layers.contracts import GATES
from mrv1.kernels.layers.dequantize import TILE_ELEMENTS, TILE_ROWS, _widen_kernel
from mrv1.kernels.layers.linear_codes import LINE, ROOMY, CodesConfig, _linear_codes_kernel
from mrv1.kernels.layers.linear_scaled import _quantize_tokens_kernel, tokens_config
from mrv1.kernels.layers.quantized import BLOCK, E4M3_CAPABILITY, TILES_CAPABILITY
from mrv1.testing.aot import AotCase, Target, pointer


@dataclass(frozen=True)
class Kind:
    """How a weight is quantized; see ``QuantizedWeight``."""

    name: str
    code: str
    group: int
    scaling: str
    scales: torch.dtype | None = torch.bfloat16
    added: tuple[str, ...] = ()

    @property
    def per_element(self) -> int:
        return 2 if self.code in ("e4m3", "int8") else 4

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        heads = {"q6_k": torch.int16, "q4_k": torch.int32, "q5_k": torch.int32}.get(self.code)
        high = {"q6_k": torch.int32, "q5_k": torch.int32}.get(self.code)
        dtypes = (
            torch.int16,
            self.scales,
            torch.uint8 if "zeros" in self.added else None,
            self.scales if "mins" in self.added else None,
            heads,
            high,
        )
        return tuple(None if dtype is None else pointer(dtype) for dtype in dtypes)


PARKED_BYTES = 16
"""Bytes of four registers for which the compiler prefers one more program on a multiprocessor."""
KINDS = (
    Kind("e4m3_row", "e4m3", 0, "end", torch.float32),
    Kind("e4m3_block", "e4m3", 128, "step", torch.float32),
    Kind("int8", "int8", 128, "step"),
    Kind("q8_0", "int8", 32, "values", torch.float16),
    Kind("int8_zeros", "int8", 128, "values", torch.float16, ("zeros",)),
    Kind("int4", "int4", 128, "step"),
    Kind("uint4_zeros", "uint4", 128, "step", torch.float16, ("zeros",)),
    Kind("q4_0", "int4", 32, "values", torch.float16),
    Kind("q4_1", "uint4", 32, "values", torch.float16, ("mins",)),
    Kind("mxfp4", "e2m1", 32, "values", torch.uint8),
    Kind("q4_k", "q4_k", 0, "values", None),
    Kind("q5_k", "q5_k", 0, "values", None),
    Kind("q6_k", "q6_k", 0, "values", None),
)
SHAPES = (
    (4096, 6144, ("norm",)),
    (4096, 4096, ("residual",)),
    (4096, 14336, ("norm", "gated")),
    (14336, 4096, ("residual",)),
)
"""Inputs, outputs and what is fused of an 8B layer's products."""


BF16, FP16 = torch.bfloat16, torch.float16
TILES = (
    ("int4", BF16, 64, 1), ("int4", BF16, 64, 4), ("int4", BF16, 128, 2), ("int4", BF16, 256, 1),
    ("e4m3_row", BF16, 256, 1), ("e4m3_block", BF16, 256, 1), ("int8", BF16, 128, 2),
    ("int8_zeros", FP16, 128, 1), ("uint4_zeros", FP16, 256, 1), ("q8_0", BF16, 128, 1),
    ("q4_0", BF16, 128, 2), ("mxfp4", BF16, 256, 1),
)  # fmt: skip
"""Kinds, dtypes, tokens of a tile and splits, of tiles that widen codes."""


def cases(target: Target) -> list[AotCase]:
    dtypes = (torch.bfloat16, torch.float16)
    widening = [_widen(kind, dtype) for dtype in dtypes for kind in KINDS]
    if target.capability is None:  # AMD's GPUs widen first
        return widening
    measured = [kind for kind in KINDS if kind.name in ("e4m3_row", "int4")]
    return [
        *(_linear(target, kind, *SHAPES[0], 1, torch.bfloat16) for kind in KINDS),
        *(_linear(target, kind, *SHAPES[0], 16, torch.bfloat16) for kind in KINDS),
        *(_linear(target, kind, *SHAPES[0], 8, torch.float16) for kind in KINDS),
        *(
            _linear(target, kind, *shape, tokens, torch.bfloat16)
            for kind in measured
            for shape in SHAPES[1:]
            for tokens in (1, 16, 64)
        ),
        *(
            _quantize_tokens(target, num_in, inputs_per_scale)
            for num_in in (2880, 14336)
            for inputs_per_scale in (0, BLOCK)
            if target.capability >= E4M3_CAPABILITY
        ),
        *(_code_tiles(*case) for case in TILES if target.capability == TILES_CAPABILITY),
        *widening,
    ]


def _code_tiles(name: str, dtype: torch.dtype, tile_tokens: int, splits: int) -> AotCase:
    """Return a case of tiles that widen codes, which only sm_90 has."""
    from mrv1.kernels.layers import linear_code_tiles as tiles

    (kind,) = (kind for kind in KINDS if kind.name == name)
    words = tiles.STEP_IN.value // (2 * kind.per_element)
    x = torch.empty(256, 1024, dtype=dtype)
    codes = torch.empty(512, 8 * words, dtype=torch.int32)
    return AotCase(
        name=f"code_tiles-{name}-{dtype}-{tile_tokens}-{splits}",
        kernel=tiles._code_tiles_kernel,
        args=(
            *(pointer(torch.float32 if splits > 1 else dtype), 512, pointer(dtype)),
            *(pointer(kind.scales or dtype), pointer(torch.uint8) if kind.added else None),
            *tiles.describe(x, codes, tile_tokens, words),
            *(256, 512, 8, 2, 2, 4, 8 // splits, splits, 8),
        ),
        constexprs={
            "CODE": kind.code,
            "GROUP": kind.group,
            "ROWS_PER_SCALE": 128 if name == "e4m3_block" else 1,
            "STAGES": tiles.CodeTiles.of(tile_tokens, splits, words=words).stages,
            "OVERLAP": True,
        },
        num_warps=4,
    )


def _quantize_tokens(target: Target, num_in: int, inputs_per_scale: int) -> AotCase:
    groups, group, num_warps = tokens_config(num_in, inputs_per_scale)
    scales = pointer(torch.float32)
    return AotCase(
        name=f"quantize_tokens-{num_in}-{inputs_per_scale or 'token'}",
        kernel=_quantize_tokens_kernel,
        args=(
            *(pointer(torch.float8_e4m3fn), scales, 33, pointer(torch.bfloat16), num_in),
            33,
        ),
        constexprs={
            "IN": num_in,
            "GROUPS": groups,
            "GROUP": group,
            "OVERLAP": target.has_dependent_launch,
        },
        num_warps=num_warps,
    )


def _widen(kind: Kind, dtype: torch.dtype) -> AotCase:
    return AotCase(
        name=f"widen-{kind.name}-{dtype}",
        kernel=_widen_kernel,
        args=(pointer(dtype), *kind.tensors(), 4096),
        constexprs={
            "CODE": kind.code,
            "IN": 4096,
            "GROUP": kind.group or 4096,
            "ROWS_PER_SCALE": 1,
            "TILE_ROWS": TILE_ROWS,
            "TILE_ELEMENTS": TILE_ELEMENTS,
        },
    )


def _linear(
    target: Target,
    kind: Kind,
    num_in: int,
    num_out: int,
    fused: tuple[str, ...],
    num_tokens: int,
    dtype: torch.dtype,
) -> AotCase:
    is_gated = "gated" in fused
    num_rows = num_out * (2 if is_gated else 1)
    config = CodesConfig.default_for(
        num_tokens,
        num_in // kind.per_element,
        num_rows,
        is_gated=is_gated,
        scaling=kind.scaling,
        per_element=kind.per_element,
        adds_tokens=kind.code == "uint4",
        has_room=target.capability in ROOMY,
    )
    data, has_norm = pointer(dtype), "norm" in fused and num_tokens == 1
    prefetches = target.has_dependent_launch and config.splits == 1
    return AotCase(
        name=f"linear_codes-{kind.name}-{dtype}-{num_tokens}x{num_in}x{num_out}",
        kernel=_linear_codes_kernel,
        args=(
            *(data, num_out),
            pointer(torch.float32) if config.splits > 1 else None,
            *((data, num_out) if "residual" in fused else (None, 0)),
            *(data, num_in),
            *(pointer(torch.int32), *kind.tensors()[1:]),
            *(None, data if has_norm else None, 1e-6),
            *((pointer(torch.int8), 4096, 64) if prefetches else (None, 0, 0)),
            *(num_tokens, num_out),
            triton.cdiv(num_in // kind.per_element, LINE * config.num_warps),
        ),
        constexprs={
            "CODE": kind.code,
            "HARDWARE": (target.capability or (0, 0)) >= (8, 9),
            "IN": num_in,
            "GROUP": kind.group or num_in,
            "ROWS_PER_SCALE": 1,
            "SCALING": kind.scaling,
            "GATED": GATES["silu_and_mul"] if is_gated else 0,
            "TILE_TOKENS": config.tile_tokens,
            "TILE_ROWS": config.tile_rows,
            "SPLITS": config.splits,
            "WARPS": config.num_warps,
            "DEPTH": config.depth,
            "NORM_IN": triton.next_power_of_2(num_in),
            "OVERLAP": target.has_dependent_launch,
        },
        num_warps=config.num_warps,
        num_stages=1,
        parked_bytes=PARKED_BYTES,
    )
