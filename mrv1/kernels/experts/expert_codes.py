"""The products of few pairs with experts that are codes, which are widened in registers.

As in ``linear_codes`` four lanes of a warp share a line of a row, 64 bytes of codes, and a warp
has its own part of every row: a load brings 16 bytes to each lane, and the tensor cores take what
it has. A program has some rows of one expert's weights, and all pairs of that expert, as in
``expert_linear``. Scales are applied to each weight, which is rounded as ``QuantizedWeight.dense``
rounds it. Codes of the next steps are loaded while these are multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mrv1.kernels._base.arithmetic import cdiv, next_power_of_2
from mrv1.kernels._base.dependent_launch import let_next_start, wait_for_previous
from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.experts.few_pairs import own_pairs, pair_at
from mrv1.kernels.layers.lanes import lane_rows, sum_of_warps
from mrv1.kernels.layers.linear_call import Rows
from mrv1.kernels.layers.linear_codes import (
    as_joined_operand,
    begins_at_lanes,
    code_elements,
    has_lanes_of_groups,
    load_codes,
    load_tokens,
)
from mrv1.kernels.layers.quantized import CODES, QuantizedWeight
from mrv1.kernels.layers.silu import CLAMPED_SWIGLU, clamped_swiglu, silu
from mrv1.kernels.layers.widening import Matrix, dense_values


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCodesConfig:
    """How weights and pairs are cut into programs."""

    tile_pairs: int  # pairs that are multiplied together
    tile_rows: int
    """Rows of weights of one program: one result per pair each, or half gates and half ups."""
    num_warps: int  # 4 or 8: they share a program's inputs
    depth: int  # steps whose codes are loaded at once

    @classmethod
    def default_for(cls, num_pairs: int, num_experts: int) -> ExpertCodesConfig:
        """Return the configuration for a GPU.

        Measured on an H100 with the experts of gpt-oss-20b (e2m1): one token takes 37 us in 32
        rows, 44 in 64; 8 tokens 144 us in 64 rows, 150 in 32, 156 in 16; 32 tokens 244 us in 8
        pairs x 32 rows, 260 in 16 x 64; 64 tokens (8 pairs an expert) 290 us in 16 x 32, and
        281 in 16 x 64, which spills in float16.
        """
        of_expert = num_pairs / num_experts
        tile_pairs = 8 if of_expert <= 4 else 16
        tile_rows = 64 if 1 <= of_expert < 2 else 32
        return cls(tile_pairs=tile_pairs, tile_rows=tile_rows, num_warps=4, depth=1)

    @classmethod
    def for_interpreter(cls, num_pairs: int, num_rows: int) -> ExpertCodesConfig:
        """Return few large programs."""
        return cls(
            tile_pairs=max(8, next_power_of_2(num_pairs) // 2),
            tile_rows=min(1024, max(16, next_power_of_2(num_rows) // 2)),
            num_warps=4,
            depth=2,
        )


def codes_config(
    weight: torch.Tensor | QuantizedWeight, num_pairs: int, *, as_interpreted: bool
) -> ExpertCodesConfig | None:
    """Return the configuration of few pairs; None = tiles have to widen this weight."""
    if not isinstance(weight, QuantizedWeight) or weight.dtype.itemsize != 2:
        return None
    if torch.version.hip is not None:
        return None
    if not (begins_at_lanes(weight) and has_lanes_of_groups(weight)):
        return None
    if as_interpreted:
        return ExpertCodesConfig.for_interpreter(num_pairs, weight.shape[1])
    return ExpertCodesConfig.default_for(num_pairs, weight.shape[0])


@triton.jit(do_not_specialize=["num_pairs", "num_steps"])
def _few_codes_kernel(
    out_ptr,  # [num_pairs, num_out]
    x_ptr, stride_x_row,  # [num_pairs / PAIRS_PER_ROW, IN], unit last stride
    codes_ptr,  # see Matrix; of all experts, each with num_out rows, GATED 2 * num_out
    scales_ptr, zeros_ptr, mins_ptr, heads_ptr, high_ptr,
    ids_ptr,  # [num_pairs] int32, -1 = no expert
    num_pairs, num_out,
    num_steps,  # those of a row
    bias_ptr,  # [num_experts, num_out]; GATED [num_experts, 2, num_out]; or None, as its strides
    stride_bias_expert,
    stride_bias_half,  # from gates to ups, 0 without
    stride_bias_out,
    alpha,  # of a ClampedSwiGLU, else None
    limit,
    BY_PAIR: tl.constexpr,  # see own_pairs
    PAIRS_PER_ROW: tl.constexpr, IN: tl.constexpr, CODE: tl.constexpr,
    HARDWARE: tl.constexpr,  # see widen
    GROUP: tl.constexpr,  # inputs per scale
    ROWS_PER_SCALE: tl.constexpr, GATED: tl.constexpr, TILE_PAIRS: tl.constexpr,
    TILE_ROWS: tl.constexpr, WARPS: tl.constexpr, DEPTH: tl.constexpr,
    LANES: tl.constexpr,  # power of two >= num_pairs
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (pairs or experts, row tiles): some rows of one expert, and all of its pairs."""
    PER: tl.constexpr = 2 if (CODE == "e4m3") | (CODE == "int8") else 4
    ELEMENTS: tl.constexpr = IN // PER
    STEPS: tl.constexpr = (ELEMENTS + WARPS * 32 - 1) // (WARPS * 32)
    TILE_OUT: tl.constexpr = TILE_ROWS // 2 if GATED else TILE_ROWS
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    expert, is_own, count = own_pairs(ids_ptr, num_pairs, BY_PAIR, LANES)
    if count == 0:
        return
    first_out = tl.program_id(1) * TILE_OUT
    # Rows past the end are read as the last one.
    tile_row = lane_rows(TILE_ROWS, WARPS)
    row = tl.minimum(first_out + tile_row % TILE_OUT, num_out - 1)
    row = row + expert.to(tl.int64) * (2 * num_out if GATED else num_out)
    row += tl.where(tile_row < TILE_OUT, 0, num_out)  # a tile's second half is ups
    WORDS: tl.constexpr = codes_ptr.dtype.element_ty.primitive_bitwidth // 16
    rows = codes_ptr + row * (ELEMENTS // WORDS)
    matrix = Matrix(codes_ptr, scales_ptr, zeros_ptr, mins_ptr, heads_ptr, high_ptr)
    line = tl.arange(0, TILE_ROWS * WARPS)[:, None] // 8 % WARPS
    if bias_ptr is not None:
        bias_ptr += expert.to(tl.int64) * stride_bias_expert
    col = first_out + tl.arange(0, TILE_OUT)[:, None]
    is_out = col < num_out
    for place in range(0, count, TILE_PAIRS):
        pair = pair_at(is_own, place, TILE_PAIRS)
        of_line = tl.reshape(pair, [TILE_PAIRS // 8, 1, 8])  # as lane_rows has them
        of_line = tl.broadcast_to(of_line, [TILE_PAIRS // 8, WARPS, 8])
        of_line = tl.reshape(of_line, [TILE_PAIRS * WARPS, 1]).to(tl.int64)
        x_rows = x_ptr + tl.maximum(of_line, 0) // PAIRS_PER_ROW * stride_x_row
        inputs = Rows(x_rows, of_line >= 0)
        steps = ()
        for at in tl.static_range(DEPTH):
            loaded = load_codes(rows, at, num_steps, ELEMENTS, WARPS)
            steps += (loaded,)  # type: ignore[assignment]
        y = tl.zeros([WARPS, TILE_ROWS, TILE_PAIRS], tl.float32)
        for first in range(0, STEPS, DEPTH):
            later = ()
            for at in tl.static_range(DEPTH):
                now = first + at
                # A branch: else the compiler would load the next codes after all products.
                if now < num_steps:
                    codes = code_elements(steps[at])
                    xs = load_tokens(inputs, None, 1.0, now, num_steps, PER, IN, WARPS)
                    element = (now * WARPS + line) * 32 + tl.arange(0, 32)[None, :]
                    mask = element // 8 * 8 < ELEMENTS
                    weights = dense_values(
                        matrix, codes, row, element, mask, CODE, DTYPE, HARDWARE, IN, GROUP,
                        ROWS_PER_SCALE, True,
                    )  # fmt: skip
                    for i in tl.static_range(PER):
                        x = tl.permute(as_joined_operand(xs[i], TILE_PAIRS, WARPS), (0, 2, 1))
                        y = tl.dot(as_joined_operand(weights[i], TILE_ROWS, WARPS), x, y)
                loaded = load_codes(rows, now + DEPTH, num_steps, ELEMENTS, WARPS)
                later += (loaded,)  # type: ignore[assignment]
            steps = later
        y = sum_of_warps(y, WARPS, TILE_ROWS, TILE_PAIRS)
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(y, [2, TILE_OUT, TILE_PAIRS]), (1, 2, 0)))
            if bias_ptr is not None:
                gate_bias = bias_ptr + col * stride_bias_out
                gate += tl.load(gate_bias, mask=is_out, other=0.0).to(tl.float32)
                up_bias = gate_bias + stride_bias_half
                up += tl.load(up_bias, mask=is_out, other=0.0).to(tl.float32)
            if GATED == CLAMPED_SWIGLU:
                y = clamped_swiglu(gate, up, alpha, limit)
            else:
                y = silu(gate) * up
        elif bias_ptr is not None:
            added = tl.load(bias_ptr + col * stride_bias_out, mask=is_out, other=0.0)
            y += added.to(tl.float32)
        of_col = pair.to(tl.int64)[None, :]
        out = out_ptr + of_col * num_out + col
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=is_out & (of_col >= 0))


def multiply_few_codes(
    config: ExpertCodesConfig,
    tensors: tuple[Any, ...],
    more: tuple[Any, ...],
    added: tuple[Any, ...],
    *,
    by_pair: bool,
    lanes: int,
    num_experts: int,
    options: dict[str, Any],
) -> None:
    """Launch the kernel.

    ``tensors`` are its arguments up to the codes, these as int16; ``more`` those from there to the
    sizes; ``added`` those from the bias on; ``options`` constants that the caller knows.
    """
    *first, codes = tensors
    num_pairs, num_out = more[-2:]
    per = 2 * CODES[options["CODE"]].per_byte
    row_tiles = cdiv(num_out, config.tile_rows // (2 if options["GATED"] else 1))
    _few_codes_kernel[(num_pairs if by_pair else num_experts, row_tiles)](
        *(*first, codes.view(torch.int32), *more),
        cdiv(options["IN"] // per, 32 * config.num_warps),
        *added,
        BY_PAIR=by_pair,
        TILE_PAIRS=config.tile_pairs,
        TILE_ROWS=config.tile_rows,
        WARPS=config.num_warps,
        DEPTH=config.depth,
        LANES=lanes,
        num_warps=config.num_warps,
        num_stages=1,  # the loop loads ahead by itself, into registers
        **options,
    )
