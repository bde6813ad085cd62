"""The linear layer of few tokens and a quantized weight: codes are widened in registers.

As in ``linear_registers`` a line of a row, 64 bytes of codes, is shared by four lanes of a warp, a
warp has its own part of every row, and the tensor cores multiply what a lane has in any order in
which weights and tokens agree. A lane's 16 bytes are 32 codes of 4 bits or 16 of 8; it loads the
same inputs of every token.

Scales are applied where they cost least. ``SCALING``: "end" to the results, where all inputs of a
row share one; "step" to the sums of a line's products, where lines lie inside of groups; "values"
to each weight, in float32, rounded once as ``QuantizedWeight.dense`` rounds. Zero points of 4-bit
codes are taken from sums: the product of a line is scale * (codes @ x - zero * sum(x)).

The first steps' codes are loaded before the previous kernel has ended. Each step that is
multiplied makes room for the one that is loaded next, so that all but one are under way at any
time: as whole registers, because a loop that carries halves of them takes these apart, and waits,
as soon as they are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from mrv1.device import device_info
from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.prefetch import prefetch_arguments, prefetch_part
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.layers.lanes import lane_rows, sum_of_warps
from mrv1.kernels.layers.linear_call import LinearCall, Results, Rows, normed, store_results
from mrv1.kernels.layers.linear_splits import empty_sums
from mrv1.kernels.layers.norm import inverse_rms
from mrv1.kernels.layers.quantized import MOST_TOKENS, QuantizedWeight
from mrv1.kernels.layers.widening import (
    Matrix,
    as_float,
    codes_per_element,
    converts_e4m3,
    dense_values,
    load_bits,
    matrix_arguments,
    widen,
)

LINE = 32
"""16-bit elements of a line."""
NUM_PROGRAMS = 264
"""Most programs of a launch that splits inputs: two for each multiprocessor of an H100."""
MOST_TILES = 144
"""Tiles of rows that are few: about one for each multiprocessor."""
ROOMY: tuple[tuple[int, int] | None, ...] = ((9, 0), (10, 0), (12, 0))
"""Compute capabilities on which 64 rows of 4-bit codes and 16 tokens fit registers."""
MOST_NORMED = 8192
"""Most inputs of a token that a program norms by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodesConfig:
    """How a quantized weight is cut into programs."""

    tile_tokens: int  # tokens of one program
    tile_rows: int  # rows of one program; if gated, half of them gates and half ups
    splits: int  # programs that share a tile's inputs
    num_warps: int  # 4 or 8: they share a program's inputs
    depth: int  # steps whose codes are loaded at once

    @classmethod
    @lru_cache(maxsize=1024)
    def default_for(
        cls,
        num_tokens: int,
        num_elements: int,
        num_rows: int,
        *,
        is_gated: bool,
        scaling: str,
        per_element: int,
        adds_tokens: bool,
        has_room: bool,
    ) -> CodesConfig:
        """Return the configuration for a GPU; ``num_elements`` are 16-bit elements of a row.

        ``scaling`` is where scales are applied, ``per_element`` the codes in 16 bits,
        ``adds_tokens`` whether zero points need sums of tokens, ``has_room`` whether the GPU is
        one of ``ROOMY``. Measured on an H100 in bfloat16 with the products of an 8B layer, each
        alone in a graph, weights rotated (int4 in groups of 128, e4m3 with a scale for each row or
        block):

        - Eight warps with two steps each have enough bytes under way: 11 us for 6,144 rows of
          4,096 e4m3 codes, where four warps take 13 to 15 us.
        - Programs load all inputs of their tokens: with many rows, 64 rows in four warps are
          faster (46 us for 28,672 rows, with 16 rows 48 to 55 us), most of all for 4-bit codes of
          16 tokens (33 us, with 32 rows 42).
        - Few rows of e4m3 are split along the inputs (25 us for 4,096 rows of 14,336 codes, 28 us
          in programs of 16 whole rows); few of 4-bit codes are not (15 us, 17 us), but with 16
          tokens (17.5 us, 19 us).
        """
        has_many = num_rows >= 64 * NUM_PROGRAMS
        is_small = num_tokens <= 8
        most_programs = NUM_PROGRAMS
        if num_tokens > 16:
            tile_rows, num_warps, depth = 64 if per_element == 2 else 32, 4, 1
            tile_rows = tile_rows if scaling != "values" else 32
        elif scaling == "values":
            tile_rows, num_warps, depth = 16, 8, 2
        elif per_element == 4 and not is_small and (adds_tokens or not has_room):
            tile_rows, num_warps, depth = 32, 8, 2
        elif has_many and per_element == 4 and num_tokens == 1:  # may be normed
            tile_rows, num_warps, depth = 16, 8, 2
        elif has_many:
            tile_rows, num_warps, depth = 64, 4, 2 if per_element == 4 and is_small else 1
        elif per_element == 2:
            tile_rows, num_warps, depth = 32 if num_rows <= 32 * MOST_TILES else 16, 8, 2
        elif is_small:
            tile_rows, num_warps, depth = 16 if num_rows <= 16 * NUM_PROGRAMS else 32, 8, 2
            most_programs = MOST_TILES
        else:
            tile_rows, num_warps, depth = 64, 4, 1
        if num_elements < 2 * LINE * num_warps:
            num_warps = 4
        tiles = triton.cdiv(num_rows, tile_rows)
        steps = triton.cdiv(num_elements, LINE * num_warps)
        splits = 1
        if not is_gated:
            splits = max(1, min(8, most_programs // tiles, steps // depth))
        return cls(
            tile_tokens=8 if is_small else 16 if num_tokens <= 16 else 32,
            tile_rows=tile_rows,
            splits=splits,
            num_warps=num_warps,
            depth=depth,
        )

    @classmethod
    def for_interpreter(cls, num_tokens: int, num_rows: int) -> CodesConfig:
        """Return few large programs."""
        return cls(
            tile_tokens=max(8, triton.next_power_of_2(num_tokens) // 2),
            tile_rows=min(1024, max(16, triton.next_power_of_2(num_rows) // 2)),
            splits=2,
            num_warps=4,
            depth=2,
        )


@triton.jit
def load_codes(rows, step, last, ELEMENTS: tl.constexpr, WARPS: tl.constexpr):
    """Return the codes of a step, [rows * WARPS, 32 int16 or 16 int32]; from ``last`` on zeros."""
    LINES: tl.constexpr = rows.shape[0]
    WORDS: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth // 16
    LINE: tl.constexpr = 32 // WORDS
    line = tl.arange(0, LINES)[:, None] // 8 % WARPS * LINE + tl.arange(0, LINE)[None, :]
    element = step * (WARPS * LINE) + line
    if ELEMENTS % (WARPS * 32) != 0:
        mask = (step < last) & (element < ELEMENTS // WORDS)
        codes = tl.load(rows + element, mask=mask, other=0)
    else:
        codes = tl.load(rows + element, mask=step < last)
    return codes


@triton.jit
def code_elements(codes):
    """Return a step's codes as [rows * WARPS, 32] int16."""
    if codes.dtype == tl.int32:
        low, high = codes.to(tl.int16), (codes >> 16).to(tl.int16)
        codes = tl.reshape(tl.join(low, high), [codes.shape[0], 32])
    return codes


@triton.jit
def _load_piece(
    rows, col, inside, norm_weight_ptr, scale, IN: tl.constexpr, TILE_IN: tl.constexpr
):
    """Return eight inputs of each lane, normed if there is a norm; of bfloat16 but for ``scale``.

    Results are multiplied by it instead. A product of float16 could overflow without it.
    """
    mask = inside if IN % TILE_IN == 0 else inside & (col < IN)
    piece = tl.load(rows.ptr + col, mask=mask, other=0.0)
    if norm_weight_ptr is not None:
        weight = tl.load(norm_weight_ptr + col, mask=mask, other=0.0)
        piece = piece * weight if weight.dtype == tl.bfloat16 else normed(piece, scale, weight)
    return piece


@triton.jit
def _every_second(x, LINES: tl.constexpr, COUNT: tl.constexpr):
    """Return the even and the odd elements of each lane's COUNT."""
    return tl.split(tl.reshape(x, [LINES, 4, COUNT // 2, 2]))


@triton.jit
def load_tokens(
    rows, norm_weight_ptr, scale, step, last,
    PER: tl.constexpr, IN: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Return the inputs of a step as PER tensors [tokens * WARPS, 32], as ``widen`` has codes."""
    LINES: tl.constexpr = rows.ptr.shape[0]
    TILE_IN: tl.constexpr = WARPS * 32 * PER
    lane_col = tl.arange(0, 32)[None, :]
    first = (step * WARPS + tl.arange(0, LINES)[:, None] // 8 % WARPS) * (32 * PER)
    first = first + lane_col // 8 * (8 * PER) + lane_col % 8
    inside = rows.is_row & (step < last)
    if PER == 2:
        a = _load_piece(rows, first, inside, norm_weight_ptr, scale, IN, TILE_IN)
        b = _load_piece(rows, first + 8, inside, norm_weight_ptr, scale, IN, TILE_IN)
        a0, a1 = _every_second(a, LINES, 8)
        b0, b1 = _every_second(b, LINES, 8)
        xs = (_of_pieces_2(a0, b0, LINES), _of_pieces_2(a1, b1, LINES))
    else:
        pieces = ()
        for piece in tl.static_range(4):
            x = _load_piece(
                rows, first + 8 * piece, inside, norm_weight_ptr, scale, IN, WARPS * 32 * PER
            )
            even, odd = _every_second(x, LINES, 8)
            x0, x2 = _every_second(even, LINES, 4)
            x1, x3 = _every_second(odd, LINES, 4)
            pieces += ((x0, x1, x2, x3),)  # type: ignore[assignment]
        a, b, c, d = pieces  # type: ignore[misc]
        xs = ()  # type: ignore[assignment]
        for i in tl.static_range(4):
            x = _of_pieces_4(a[i], b[i], c[i], d[i], LINES)
            xs += (x,)  # type: ignore[assignment]
    return xs


@triton.jit
def _of_pieces_2(a, b, LINES: tl.constexpr):
    """Return [LINES, 32]: of each lane the four elements of a, then those of b."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 1, 3, 2)), [LINES, 32])


@triton.jit
def _of_pieces_4(a, b, c, d, LINES: tl.constexpr):
    """Return [LINES, 32]: of each lane the two elements of a, those of b, of c, of d."""
    joined = tl.join(tl.join(a, b), tl.join(c, d))  # [LINES, 4, 2, b or d, c or d]
    return tl.reshape(tl.permute(joined, (0, 1, 4, 3, 2)), [LINES, 32])


@triton.jit
def as_joined_operand(lines, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Return lines as [WARPS, ROWS, 32], columns in an order that keeps them in their registers.

    Where an operand comes from a join, as tokens do, Triton gives a lane four neighbours of each
    sixteen columns of both operands; see ``as_operand`` for the usual two and two.
    """
    lines = tl.reshape(lines, [ROWS // 8, WARPS, 8, 4, 2, 4])
    return tl.reshape(tl.permute(lines, (1, 0, 2, 4, 3, 5)), [WARPS, ROWS, 32])


@triton.jit
def load_numbers(
    ptr, row, step, last,
    IN: tl.constexpr, LINE_IN: tl.constexpr, GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Return the bits of a step's numbers, [WARPS, rows, 1]: of the group of a warp's line."""
    GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP
    group = (step * WARPS + tl.arange(0, WARPS)[:, None, None]) * LINE_IN // GROUP
    mask = step < last
    if IN % (LINE_IN * WARPS) != 0:
        mask = mask & (group < GROUPS)
    return load_bits(ptr + row // ROWS_PER_SCALE * GROUPS + group, mask)


@triton.jit
def _signed(byte, DTYPE: tl.constexpr):
    """Return a zero point in float32, by its byte in int32."""
    number = byte
    if tl.int8 == DTYPE:
        number = (byte ^ 128) - 128
    return number.to(tl.float32)


@triton.jit(
    do_not_specialize=[
        "num_tokens", "num_out", "num_steps", "prefetch_bytes", "prefetch_warp_bytes"
    ]
)  # fmt: skip
def _linear_codes_kernel(
    out_ptr, stride_out_token,  # [num_tokens, num_out], unit last stride; may be the residual
    sums_ptr,  # [SPLITS, num_tokens, num_out] float32: written instead of out; None = one split
    residual_ptr, stride_residual_token,  # [num_tokens, num_out], unit last stride, or None
    x_ptr, stride_x_token,  # [num_tokens, IN], unit last stride
    codes_ptr,  # see Matrix; with GATED of 2 * num_out rows, gates then ups
    scales_ptr, zeros_ptr, mins_ptr, heads_ptr, high_ptr,
    bias_ptr,  # [num_out] or [2 * num_out], or None
    norm_weight_ptr,  # [IN], of one token, or None
    eps,
    prefetch_ptr,  # see prefetch_part; or None
    prefetch_bytes, prefetch_warp_bytes, num_tokens, num_out,
    num_steps,  # those of a row
    CODE: tl.constexpr,
    HARDWARE: tl.constexpr,  # see widen
    IN: tl.constexpr,
    GROUP: tl.constexpr,  # inputs per scale
    ROWS_PER_SCALE: tl.constexpr,
    SCALING: tl.constexpr,  # "end", "step" or "values"
    GATED: tl.constexpr,  # a kind of gate, 0 = none
    TILE_TOKENS: tl.constexpr, TILE_ROWS: tl.constexpr, SPLITS: tl.constexpr,
    WARPS: tl.constexpr,  # 4 or 8: warps of a program
    DEPTH: tl.constexpr,
    NORM_IN: tl.constexpr,  # power of two, at least IN, if there is a norm
    OVERLAP: tl.constexpr,  # see dependent_launch
    lora=None, LORA: tl.constexpr = None,  # adapters: LoraPointers, LoraConstants; None = none
):  # fmt: skip
    """Grid (token tiles * splits * row tiles,); token tiles vary fastest and share weights."""
    PER: tl.constexpr = 2 if (CODE == "e4m3") | (CODE == "int8") else 4
    ELEMENTS: tl.constexpr = IN // PER
    STEPS: tl.constexpr = (ELEMENTS + WARPS * 32 - 1) // (WARPS * 32)
    SPLIT_STEPS: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    TILE_OUT: tl.constexpr = TILE_ROWS // 2 if GATED else TILE_ROWS
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    let_next_start(OVERLAP)
    num_token_tiles = tl.cdiv(num_tokens, TILE_TOKENS)
    first_token = (tl.program_id(0) % num_token_tiles).to(tl.int64) * TILE_TOKENS
    split = (tl.program_id(0) // num_token_tiles) % SPLITS
    first_out = (tl.program_id(0) // (num_token_tiles * SPLITS)).to(tl.int64) * TILE_OUT
    step = split * SPLIT_STEPS
    last = tl.minimum(step + SPLIT_STEPS, num_steps)

    # Rows past the end are read as the last one.
    tile_row = lane_rows(TILE_ROWS, WARPS)
    row = tl.minimum(first_out + tile_row % TILE_OUT, num_out - 1)
    row += tl.where(tile_row < TILE_OUT, 0, num_out)  # the second half of a gated tile is ups
    WORDS: tl.constexpr = codes_ptr.dtype.element_ty.primitive_bitwidth // 16
    rows = codes_ptr + row * (ELEMENTS // WORDS)
    matrix = Matrix(codes_ptr, scales_ptr, zeros_ptr, mins_ptr, heads_ptr, high_ptr)
    sum_row = tl.arange(0, TILE_ROWS)
    sum_out = tl.minimum(first_out + sum_row % TILE_OUT, num_out - 1)
    sum_row = sum_out + tl.where(sum_row < TILE_OUT, 0, num_out)
    number_row = sum_row[None, :, None]
    steps = ()
    scales = ()
    zeros = ()
    for at in tl.static_range(DEPTH):
        loaded = load_codes(rows, step + at, last, ELEMENTS, WARPS)
        steps += (loaded,)  # type: ignore[assignment]
        if SCALING == "step":
            scale = load_numbers(
                scales_ptr, number_row, step + at, last, IN, 32 * PER, GROUP,
                ROWS_PER_SCALE, WARPS,
            )  # fmt: skip
            scales += (scale,)  # type: ignore[assignment]
            if zeros_ptr is not None:
                zero = load_numbers(
                    zeros_ptr, number_row, step + at, last, IN, 32 * PER, GROUP,
                    ROWS_PER_SCALE, WARPS,
                )  # fmt: skip
                zeros += (zero,)  # type: ignore[assignment]
    wait_for_previous(OVERLAP)

    if norm_weight_ptr is not None:
        col = tl.arange(0, NORM_IN)[None, :]
        vector = tl.load(x_ptr + col, mask=col < IN, other=0.0)
        norm_scale = inverse_rms(vector.to(tl.float32), IN, eps)
    else:
        norm_scale = 1.0
    token = first_token + lane_rows(TILE_TOKENS, WARPS)
    tokens = Rows(x_ptr + token * stride_x_token, token < num_tokens)
    if prefetch_ptr is not None:
        prefetch_part(prefetch_ptr, prefetch_bytes, prefetch_warp_bytes, WARPS)
    ones = tl.full([WARPS, 16, 32], 1.0, DTYPE)
    total = tl.zeros([WARPS, TILE_ROWS, TILE_TOKENS], tl.float32)
    for first in range(0, SPLIT_STEPS, DEPTH):
        later_steps = ()
        later_scales = ()
        later_zeros = ()
        for at in tl.static_range(DEPTH):
            now = step + first + at
            # A branch: else the compiler would load the next codes after all products.
            if now < last:
                codes = code_elements(steps[at])
                xs = load_tokens(tokens, norm_weight_ptr, norm_scale, now, last, PER, IN, WARPS)
                if SCALING == "values":
                    line = tl.arange(0, TILE_ROWS * WARPS)[:, None] // 8 % WARPS
                    element = (now * WARPS + line) * 32 + tl.arange(0, 32)[None, :]
                    mask = element // 8 * 8 < ELEMENTS
                    weights = dense_values(
                        matrix, codes, row, element, mask, CODE, DTYPE, HARDWARE, IN, GROUP,
                        ROWS_PER_SCALE, True,
                    )  # fmt: skip
                else:
                    weights = widen(codes, CODE, DTYPE, HARDWARE)
                if SCALING == "step":
                    y = tl.zeros([WARPS, TILE_ROWS, TILE_TOKENS], tl.float32)
                else:
                    y = total
                if SCALING == "step" and CODE == "uint4":
                    x_sum = tl.zeros([WARPS, 16, TILE_TOKENS], tl.float32)
                for i in tl.static_range(PER):
                    x = tl.permute(as_joined_operand(xs[i], TILE_TOKENS, WARPS), (0, 2, 1))
                    y = tl.dot(as_joined_operand(weights[i], TILE_ROWS, WARPS), x, y)
                    if SCALING == "step" and CODE == "uint4":
                        x_sum = tl.dot(ones, x, x_sum)
                if SCALING == "step":
                    if CODE == "uint4":
                        middle = 8.0
                        if zeros_ptr is not None:
                            middle -= _signed(zeros[at], zeros_ptr.dtype.element_ty)
                        if TILE_ROWS > 16:  # all rows of the product with ones are alike
                            x_sum = tl.max(x_sum, axis=1, keep_dims=True)
                        y += middle * x_sum
                    total += as_float(scales[at], scales_ptr.dtype.element_ty) * y
                else:
                    total = y
            loaded = load_codes(rows, now + DEPTH, last, ELEMENTS, WARPS)
            later_steps += (loaded,)  # type: ignore[assignment]
            if SCALING == "step":
                scale = load_numbers(
                    scales_ptr, number_row, now + DEPTH, last, IN, 32 * PER,
                    GROUP, ROWS_PER_SCALE, WARPS,
                )  # fmt: skip
                later_scales += (scale,)  # type: ignore[assignment]
                if zeros_ptr is not None:
                    zero = load_numbers(
                        zeros_ptr, number_row, now + DEPTH, last, IN, 32 * PER,
                        GROUP, ROWS_PER_SCALE, WARPS,
                    )  # fmt: skip
                    later_zeros += (zero,)  # type: ignore[assignment]
        steps = later_steps
        scales = later_scales
        zeros = later_zeros

    y = sum_of_warps(total, WARPS, TILE_ROWS, TILE_TOKENS)
    if norm_weight_ptr is not None and norm_weight_ptr.dtype.element_ty == tl.bfloat16:
        y *= norm_scale
    if SCALING == "end":
        scale = tl.load(scales_ptr + sum_row // ROWS_PER_SCALE)
        y *= scale.to(tl.float32)[:, None]
    token = first_token + tl.arange(0, TILE_TOKENS)[None, :]
    col = first_out + tl.arange(0, TILE_OUT)[:, None]
    results = Results(
        out_ptr, stride_out_token, sums_ptr, residual_ptr, stride_residual_token, bias_ptr, lora
    )
    is_out, is_token = col < num_out, token < num_tokens
    inside = is_out & is_token
    store_results(
        results, y, split.to(tl.int64), token, is_token, col, is_out, inside, num_tokens,
        num_out, GATED, LORA,
    )  # fmt: skip


def begins_at_lanes(weight: QuantizedWeight) -> bool:
    """Return whether each row of codes begins at 16 bytes, those of a lane.

    Numbers of "values" are loaded once for the eight elements of a lane: only then does Triton
    give these to one lane.
    """
    is_aligned = weight.codes.data_ptr() % 16 == 0
    return is_aligned and weight.num_in % (8 * codes_per_element(weight)) == 0


def has_lanes_of_groups(weight: QuantizedWeight) -> bool:
    """Return whether the codes of a lane share their numbers."""
    return weight.group % (8 * codes_per_element(weight)) == 0 or weight.group >= weight.num_in


def scaling_of(weight: QuantizedWeight) -> str | None:
    """Return where the kernel applies scales; None = it cannot multiply by this weight."""
    if weight.heads is not None:
        return "values" if begins_at_lanes(weight) else None
    has_exponents = weight.scales is not None and weight.scales.dtype == torch.uint8
    if (
        not has_exponents
        and weight.mins is None
        and not (weight.code == "int8" and weight.zeros is not None)
    ):
        if weight.group >= weight.num_in and weight.code != "uint4":
            return "end"
        if weight.group % (32 * codes_per_element(weight)) == 0:
            return "step"
    return "values" if begins_at_lanes(weight) and has_lanes_of_groups(weight) else None


def multiplies_codes(weight: QuantizedWeight) -> bool:
    """Return whether the kernel multiplies few tokens by this weight."""
    if weight.dtype.itemsize != 2 or torch.version.hip is not None:
        return False
    return scaling_of(weight) is not None


def codes_config(call: LinearCall, weight: QuantizedWeight) -> CodesConfig | None:
    """Return the configuration; None = the weight has to be widened first."""
    if call.num_tokens > MOST_TOKENS or call.order is not None or not multiplies_codes(weight):
        return None
    num_rows = weight.shape[0]
    if INTERPRET:
        return CodesConfig.for_interpreter(call.num_tokens, num_rows)
    per_element = codes_per_element(weight)
    return CodesConfig.default_for(
        call.num_tokens,
        call.num_in // per_element,
        num_rows,
        is_gated=call.is_gated,
        scaling=scaling_of(weight) or "",
        per_element=per_element,
        adds_tokens=weight.code == "uint4",
        has_room=device_info(call.x.device).capability in ROOMY,
    )


def _matrix_arguments(weight: QuantizedWeight) -> tuple[torch.Tensor | None, ...]:
    """Return the tensors of ``Matrix``, with codes as int32 where rows begin at 4 bytes."""
    codes = weight.codes.view(torch.int16)
    if codes.shape[-1] % 2 == 0 and codes.data_ptr() % 4 == 0:
        codes = codes.view(torch.int32)
    return (codes, *matrix_arguments(weight)[1:])


def multiply_codes(
    call: LinearCall, weight: QuantizedWeight, config: CodesConfig
) -> torch.Tensor | None:
    """Compute ``call.out``, or return the sums of its splits, as ``add_splits`` takes them."""
    splits = 1 if call.is_gated else config.splits
    sums = empty_sums(call, splits)
    program_out = config.tile_rows // (2 if call.is_gated else 1)
    token_tiles = triton.cdiv(call.num_tokens, config.tile_tokens)
    num_programs = token_tiles * splits * triton.cdiv(call.num_out, program_out)
    wanted = call.prefetch if splits == 1 else None
    _linear_codes_kernel[(num_programs,)](
        *with_strides(call.out, 1),
        sums,
        *with_strides(call.residual, 1),
        *with_strides(call.x, 1),
        *_matrix_arguments(weight),
        *(call.bias, call.norm_weight, call.eps),
        num_tokens=call.num_tokens,
        num_out=call.num_out,
        num_steps=triton.cdiv(call.num_in // codes_per_element(weight), LINE * config.num_warps),
        CODE=weight.code,
        HARDWARE=converts_e4m3(call.x.device),
        IN=call.num_in,
        GROUP=weight.group,
        ROWS_PER_SCALE=weight.rows_per_scale,
        SCALING=scaling_of(weight),
        GATED=call.gate,
        TILE_TOKENS=config.tile_tokens,
        TILE_ROWS=config.tile_rows,
        SPLITS=splits,
        WARPS=config.num_warps,
        DEPTH=config.depth,
        NORM_IN=triton.next_power_of_2(call.num_in),
        num_warps=config.num_warps,
        num_stages=1,  # the loop loads ahead by itself, into registers
        **prefetch_arguments(wanted, call.x.device, num_programs * config.num_warps),
        **overlap_options(call.x.device),
        **call.lora_arguments(config.tile_tokens * program_out, config.num_warps),
    )
    return sums
