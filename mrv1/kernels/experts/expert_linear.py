"""The products of tokens with the weights of the experts that they are routed to.

    out[p] = activation(x[row of p] @ weight[expert of p].T)        for each pair p

A pair is a token and one of its experts. Nothing is permuted in memory: a program finds the pairs
of its expert, reads their rows of x, and writes their rows of the result.

With few pairs, a program has some rows of one expert's weights, and all pairs of that expert: it
looks through the ids, which are a few hundred. So the weights of each active expert are read once,
and those of other experts never; the programs of an expert without pairs end at once. With many
pairs ``sort_pairs`` lists the pairs of each expert first, and a program has a tile of a list.

Where ranks divide the inputs of a deterministic product, they are cut into leaves of equal length,
as those of ``linear`` are. Here the sums of the leaves stay apart: a leaf's sum over the experts
of a token comes first, and then the tree over the leaves, of which each rank has a part. Shared
experts are one MLP, whose neighbouring inputs a rank has: a leaf of these is a leaf of the MLP.

Codes are widened where they are multiplied: a tile's in registers before each product, those of
few pairs as ``expert_codes`` does.

Weights are the left operand of the tensor cores, as in ``linear_tiles``: it needs 64 rows on
Hopper, and the pairs of one expert are few.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from mrv1.device import device_info
from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.arithmetic import cdiv, next_power_of_2
from mrv1.kernels._base.checks import FLOAT_DTYPES, check_launchable, check_tensor
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.experts.contracts import (
    ClampedSwiGLU,
    ExpertActivation,
    check_expert_linear,
)
from mrv1.kernels.experts.expert_codes import (
    ExpertCodesConfig,
    codes_config,
    multiply_few_codes,
)
from mrv1.kernels.experts.few_pairs import own_pairs, pair_at
from mrv1.kernels.experts.sort_pairs import sort_pairs
from mrv1.kernels.layers.contracts import GATES
from mrv1.kernels.layers.quantized import QuantizedWeight
from mrv1.kernels.layers.silu import CLAMPED_SWIGLU, clamped_swiglu, silu
from mrv1.kernels.layers.sum_order import check_leaves
from mrv1.kernels.layers.widening import (
    Matrix,
    converts_e4m3,
    dense_values,
    matrix_arguments,
)

FEW_PAIRS = 256
"""Most pairs that a program looks through by itself."""
LARGE_SHARED_MEMORY: tuple[tuple[int, int] | None, ...] = ((9, 0), (10, 0))
"""Compute capabilities whose programs may have 227 KiB of shared memory, as large tiles need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConfig:
    """How weights and pairs are cut into programs, and a program's inputs into steps."""

    tile_pairs: int  # pairs that are multiplied together
    tile_rows: int
    """Rows of weights of one program: one result per pair each, or half gates and half ups."""
    tile_in: int  # inputs of one step
    is_sorted: bool  # whether pairs are sorted first
    num_warps: int
    num_stages: int
    pairs_first: bool = False
    """Whether pairs, not weights, are the left operand of the tensor cores."""

    @classmethod
    @lru_cache(maxsize=256)
    def default_for(
        cls,
        num_pairs: int,
        num_experts: int,
        num_in: int,  # of a leaf
        dtype: torch.dtype,
        *,
        is_gated: bool,
        deterministic: bool,
        has_room: bool,
        has_codes: bool = False,
    ) -> ExpertConfig:
        """Return the configuration for a GPU.

        A deterministic call has one order of additions, hence one shape of products, for any
        number of pairs. Other tiles hold about the pairs of one expert, so that its weights are
        read once: on an H200, 256 tokens of Qwen3-30B-A3B (16 pairs an expert) take 304 us for
        both products in tiles of 32 pairs, and 327 in tiles of 64. Long rows go through a deep
        pipeline of short steps: one token of ERNIE-4.5-21B-A3B takes 52 us instead of 55. In
        large tiles pairs come first: on an H100, 4,096 tokens of Qwen3-30B-A3B take 997 us instead
        of 1,057, and of ERNIE 1,818 instead of 2,024. Widened codes must be the left operand;
        those of sorted pairs are faster without a pipeline, but in large tiles: on an H100, 256
        tokens of gpt-oss-20b take 440 us for gates and ups instead of 541.
        """
        of_expert = num_pairs // num_experts  # on average
        is_free = has_room and not deterministic
        num_warps = 4
        if dtype.itemsize == 4:
            tile_pairs, tile_rows, tile_in, num_stages = 16, 64, 32, 3
        elif of_expert <= 8 and is_free:
            tile_pairs, tile_rows = 16, 64
            tile_in, num_stages = (64, 6) if num_in >= 1024 else (128, 4)
        elif of_expert <= 24 and is_free:
            tile_pairs, tile_rows, tile_in, num_stages = 32, 64, 128, 3
        elif of_expert > 64 and is_free:
            num_stages = 3 if has_codes and is_gated else 4
            tile_pairs, tile_rows, tile_in, num_warps = 128, 256, 64, 8
        else:
            tile_pairs = 64 if deterministic else min(64, max(16, next_power_of_2(of_expert)))
            tile_rows, tile_in, num_stages = 64, 64, 4 if has_room else 3
        is_sorted = deterministic or num_pairs > FEW_PAIRS
        return cls(
            tile_pairs=tile_pairs,
            tile_rows=tile_rows,
            tile_in=min(max(16, next_power_of_2(num_in)), tile_in),
            is_sorted=is_sorted,
            num_warps=num_warps,
            num_stages=1 if has_codes and is_sorted and tile_pairs < 128 else num_stages,
            pairs_first=tile_pairs == 128 and not has_codes,
        )

    @classmethod
    def for_interpreter(
        cls, num_pairs: int, num_in: int, num_out: int, *, is_gated: bool, deterministic: bool
    ) -> ExpertConfig:
        """Return few large programs."""
        num_rows = 2 * num_out if is_gated else num_out
        return cls(
            tile_pairs=16 if deterministic else min(64, next_power_of_2(num_pairs)),
            tile_rows=min(1024, max(2, next_power_of_2(num_rows))),
            tile_in=min(1024, max(4, next_power_of_2(cdiv(num_in, 2)))),  # 16 bits of codes
            is_sorted=deterministic or num_pairs > 64,
            num_warps=1,
            num_stages=1,
        )


@triton.jit
def _widened(
    matrix,
    row,  # [TILE_ROWS, 1] int64, of all experts' rows
    is_row, first, end,
    DTYPE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_IN: tl.constexpr, MASKED: tl.constexpr,
    CODE: tl.constexpr, HARDWARE: tl.constexpr, IN: tl.constexpr, GROUP: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr,
):  # fmt: skip
    """Return a tile of values, [TILE_ROWS, TILE_IN], from input ``first`` on, 0 from ``end``.

    Codes at the end may share 16 bits with others: x is 0 there.
    """
    PER: tl.constexpr = 2 if (CODE == "e4m3") | (CODE == "int8") else 4
    element = first // PER + tl.arange(0, TILE_IN // PER)[None, :]
    mask = is_row
    if MASKED:
        mask = is_row & (element * PER < end)
    codes = tl.load(matrix.codes + row * (IN // PER) + element, mask=mask, other=0)
    values = dense_values(
        matrix, codes, row, element, mask, CODE, DTYPE, HARDWARE, IN, GROUP, ROWS_PER_SCALE, False
    )
    if PER == 2:
        tile = tl.join(values[0], values[1])
    else:
        tile = tl.join(tl.join(values[0], values[2]), tl.join(values[1], values[3]))
    return tl.reshape(tile, [TILE_ROWS, TILE_IN])


@triton.jit
def _awaited(y):
    """Return ``y``, for which the compiler then waits within a loop's step.

    Without it Triton (3.6 to 3.9, on Hopper) lets the next step go on while the tensor cores still
    read widened codes, their left operand, from registers, which that step overwrites.
    """
    return tl.inline_asm_elementwise("", "=r,0", [y], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _multiply(
    out_ptr, x_ptr, stride_x_row,
    weight_ptr,  # of the expert
    stride_half, stride_row,
    pair,  # [TILE_PAIRS], -1 = none
    first_out, num_out,
    end,  # inputs to read, None = all LEAF_IN
    expert,
    first_in,  # of the leaf; only of codes
    bias_ptr, stride_bias_half, stride_bias_out,  # of the expert, or None
    has_bias,  # whether it is added; None = it is
    alpha, limit, scales_ptr, zeros_ptr, mins_ptr, heads_ptr, high_ptr,
    PAIRS_PER_ROW: tl.constexpr, LEAF_IN: tl.constexpr, GATED: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_IN: tl.constexpr, NUM_STAGES: tl.constexpr,
    PAIRS_FIRST: tl.constexpr, CODE: tl.constexpr, HARDWARE: tl.constexpr, IN: tl.constexpr,
    GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr,
):  # fmt: skip
    """Store the results of some pairs of one expert for a tile of its rows."""
    TILE_OUT: tl.constexpr = TILE_ROWS // 2 if GATED else TILE_ROWS
    MASKED: tl.constexpr = LEAF_IN % TILE_IN != 0 or end is not None
    if end is None:
        end = LEAF_IN
    tile_row = tl.arange(0, TILE_ROWS)[:, None]
    row = first_out + tile_row % TILE_OUT
    is_row = row < num_out
    pair = pair.to(tl.int64)[:, None]
    is_pair = pair >= 0
    lane = tl.arange(0, TILE_IN)[None, :]
    if CODE is None:
        weight_rows = weight_ptr + row.to(tl.int64) * stride_row + lane
        weight_rows += tl.where(tile_row < TILE_OUT, 0, stride_half)  # a tile's last half is ups
    else:
        matrix_row = expert.to(tl.int64) * (2 * num_out if GATED else num_out) + row
        matrix_row += tl.where(tile_row < TILE_OUT, 0, num_out)
    x_rows = x_ptr + tl.maximum(pair, 0) // PAIRS_PER_ROW * stride_x_row + lane
    TILE_PAIRS: tl.constexpr = pair.shape[0]
    y = tl.zeros([TILE_PAIRS, TILE_ROWS] if PAIRS_FIRST else [TILE_ROWS, TILE_PAIRS], tl.float32)
    for first in tl.range(0, LEAF_IN, TILE_IN, num_stages=NUM_STAGES):
        row_mask, pair_mask = is_row, is_pair
        if MASKED:
            row_mask, pair_mask = is_row & (first + lane < end), is_pair & (first + lane < end)
        if CODE is None:
            weight = tl.load(weight_rows + first, mask=row_mask, other=0.0)
        else:
            weight = _widened(
                Matrix(weight_ptr, scales_ptr, zeros_ptr, mins_ptr, heads_ptr, high_ptr),
                matrix_row, is_row, first_in + first, first_in + end, x_ptr.dtype.element_ty,
                TILE_ROWS, TILE_IN, MASKED, CODE, HARDWARE, IN, GROUP, ROWS_PER_SCALE,
            )  # fmt: skip
        x = tl.load(x_rows + first, mask=pair_mask, other=0.0)
        if x.dtype == tl.float32:  # a chain of additions for each step, not one for all inputs
            product = tl.dot(weight, tl.trans(x), input_precision="ieee")
            y = tl.fma(product, tl.full(product.shape, 1.0, tl.float32), y)
        elif PAIRS_FIRST:
            y = tl.dot(x, tl.trans(weight), y)
        else:
            y = tl.dot(weight, tl.trans(x), y)
            if HARDWARE is not None:
                y = _awaited(y)
    if not PAIRS_FIRST:
        y = tl.trans(y)
    col = first_out + tl.arange(0, TILE_OUT)[None, :]
    if GATED:
        halves = tl.permute(tl.reshape(y, [y.shape[0], 2, TILE_OUT]), (0, 2, 1))
        gate, up = tl.split(halves)
        if bias_ptr is not None:
            bias_ptr += col * stride_bias_out
            gate += tl.load(bias_ptr, mask=col < num_out, other=0.0).to(tl.float32)
            bias_ptr += stride_bias_half
            up += tl.load(bias_ptr, mask=col < num_out, other=0.0).to(tl.float32)
        y = clamped_swiglu(gate, up, alpha, limit) if GATED == CLAMPED_SWIGLU else silu(gate) * up
    elif bias_ptr is not None:
        is_added = col < num_out
        if has_bias is not None:
            is_added = is_added & has_bias
        y += tl.load(bias_ptr + col * stride_bias_out, mask=is_added, other=0.0).to(tl.float32)
    inside = is_pair & (col < num_out)
    tl.store(out_ptr + pair * num_out + col, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_pairs"])
def _few_pairs_kernel(
    out_ptr,  # [num_pairs, num_out]
    x_ptr, stride_x_row,  # [num_pairs / PAIRS_PER_ROW, IN], unit last stride
    weight_ptr,  # [num_experts, num_out, IN]; GATED [num_experts, 2, num_out, IN]
    stride_weight_expert,
    stride_weight_half,  # from gates to ups, 0 without
    stride_weight_row,
    ids_ptr,  # [num_pairs] int32, -1 = no expert
    num_pairs, num_out,
    bias_ptr,  # [num_experts, num_out]; GATED [num_experts, 2, num_out]; or None, as its strides
    stride_bias_expert,
    stride_bias_half,  # from gates to ups, 0 without
    stride_bias_out,
    alpha,  # of a ClampedSwiGLU, else None
    limit,
    scales_ptr,  # of codes, see Matrix; weight_ptr has the codes, and strides are not read
    zeros_ptr, mins_ptr, heads_ptr, high_ptr,
    BY_PAIR: tl.constexpr,  # see own_pairs
    PAIRS_PER_ROW: tl.constexpr, IN: tl.constexpr, GATED: tl.constexpr, TILE_PAIRS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_IN: tl.constexpr,
    LANES: tl.constexpr,  # power of two >= num_pairs
    NUM_STAGES: tl.constexpr,
    PAIRS_FIRST: tl.constexpr,  # pairs are the left operand
    CODE: tl.constexpr,  # None = weights are values
    HARDWARE: tl.constexpr,  # see widen
    GROUP: tl.constexpr,  # inputs per scale
    ROWS_PER_SCALE: tl.constexpr,
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (pairs or experts, row tiles): some rows of one expert, and all of its pairs."""
    TILE_OUT: tl.constexpr = TILE_ROWS // 2 if GATED else TILE_ROWS
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    expert, is_own, count = own_pairs(ids_ptr, num_pairs, BY_PAIR, LANES)
    first_out = tl.program_id(1) * TILE_OUT
    if CODE is None:
        weight_ptr += expert.to(tl.int64) * stride_weight_expert
    if bias_ptr is not None:
        bias_ptr += expert.to(tl.int64) * stride_bias_expert
    for place in range(0, count, TILE_PAIRS):
        _multiply(
            out_ptr, x_ptr, stride_x_row, weight_ptr, stride_weight_half, stride_weight_row,
            pair_at(is_own, place, TILE_PAIRS), first_out, num_out, None,
            expert, 0, bias_ptr, stride_bias_half, stride_bias_out, None, alpha, limit,
            scales_ptr, zeros_ptr, mins_ptr, heads_ptr, high_ptr,
            PAIRS_PER_ROW, IN, GATED, TILE_ROWS, TILE_IN, NUM_STAGES, PAIRS_FIRST,
            CODE, HARDWARE, IN, GROUP, ROWS_PER_SCALE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["max_tiles", "num_pairs"])
def _sorted_pairs_kernel(
    out_ptr,  # [LEAVES, num_pairs, num_out]
    x_ptr, stride_x_row,  # [num_pairs / PAIRS_PER_ROW, IN], unit last stride
    weight_ptr,  # [num_experts, num_out, IN]; GATED [num_experts, 2, num_out, IN]
    stride_weight_expert,
    stride_weight_half,  # from gates to ups, 0 without
    stride_weight_row,
    order_ptr,  # [num_pairs] int32, SortedPairs.order
    starts_ptr,  # [num_experts + 1] int32
    max_tiles, num_pairs, num_out, num_experts,
    bias_ptr,  # [num_experts, num_out]; GATED [num_experts, 2, num_out]; or None, as its strides
    stride_bias_expert,
    stride_bias_half,  # from gates to ups, 0 without
    stride_bias_out,
    alpha,  # of a ClampedSwiGLU, else None
    limit,
    scales_ptr,  # of codes, see Matrix; weight_ptr has the codes, and strides are not read
    zeros_ptr, mins_ptr, heads_ptr, high_ptr,
    PAIRS_PER_ROW: tl.constexpr, IN: tl.constexpr, LEAVES: tl.constexpr,
    SHARED: tl.constexpr,  # experts at the end that are one MLP, with rows of x side by side
    GATED: tl.constexpr, TILE_PAIRS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_IN: tl.constexpr,
    EXPERTS: tl.constexpr,  # power of two >= num_experts
    NUM_STAGES: tl.constexpr,
    PAIRS_FIRST: tl.constexpr,  # pairs are the left operand
    CODE: tl.constexpr,  # None = weights are values
    HARDWARE: tl.constexpr,  # see widen
    GROUP: tl.constexpr,  # inputs per scale
    ROWS_PER_SCALE: tl.constexpr,
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (max_tiles * row tiles, LEAVES): a tile of one expert's pairs, and some of its rows.

    Tiles of pairs vary fastest, so that neighbours share weights.
    """
    TILE_OUT: tl.constexpr = TILE_ROWS // 2 if GATED else TILE_ROWS
    LEAF_IN: tl.constexpr = (IN + LEAVES - 1) // LEAVES
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    tile = tl.program_id(0) % max_tiles
    each = tl.arange(0, EXPERTS)
    start = tl.load(starts_ptr + each, mask=each < num_experts, other=0)
    end = tl.load(starts_ptr + 1 + each, mask=each < num_experts, other=0)
    tiles = (end - start + TILE_PAIRS - 1) // TILE_PAIRS
    tiles_end = tl.cumsum(tiles, axis=0)
    is_mine = (tile >= tiles_end - tiles) & (tile < tiles_end)
    if tl.sum(is_mine.to(tl.int32), axis=0) == 0:  # fewer tiles than there may be
        return
    expert = tl.sum(tl.where(is_mine, each, 0), axis=0)
    first = tl.sum(tl.where(is_mine, start + (tile - tiles_end + tiles) * TILE_PAIRS, 0), axis=0)
    last = tl.sum(tl.where(is_mine, end, 0), axis=0)
    place = first + tl.arange(0, TILE_PAIRS)
    pair = tl.load(order_ptr + place, mask=place < last, other=-1)
    if CODE is None:
        weight_ptr += expert.to(tl.int64) * stride_weight_expert
    if bias_ptr is not None:
        bias_ptr += expert.to(tl.int64) * stride_bias_expert
    end = None
    has_bias = None
    first_in = 0
    if LEAVES > 1:
        leaf = tl.program_id(1).to(tl.int64)
        first_in = leaf * LEAF_IN
        if LEAVES * LEAF_IN != IN:
            end = tl.minimum(LEAF_IN, IN - first_in)
        elif SHARED > 1:
            shared = expert - (num_experts - SHARED)
            of_shared = leaf * (SHARED * LEAF_IN) + shared * (LEAF_IN - IN)
            first_in = tl.where(shared >= 0, of_shared, first_in)
        if CODE is None:
            weight_ptr += first_in
        has_bias = leaf == 0
        x_ptr += first_in
        out_ptr += leaf * num_pairs * num_out
    _multiply(
        out_ptr, x_ptr, stride_x_row, weight_ptr, stride_weight_half, stride_weight_row, pair,
        tl.program_id(0) // max_tiles * TILE_OUT, num_out, end,
        expert, first_in, bias_ptr, stride_bias_half, stride_bias_out, has_bias, alpha, limit,
        scales_ptr, zeros_ptr, mins_ptr, heads_ptr, high_ptr,
        PAIRS_PER_ROW, LEAF_IN, GATED, TILE_ROWS, TILE_IN, NUM_STAGES, PAIRS_FIRST,
        CODE, HARDWARE, IN, GROUP, ROWS_PER_SCALE,
    )  # fmt: skip


def choose_kernel(
    num_pairs: int,
    weight: torch.Tensor | QuantizedWeight,
    *,
    is_gated: bool,
    deterministic: bool,
    leaves: int = 1,
) -> tuple[ExpertConfig | ExpertCodesConfig, bool, int]:
    """Return the configuration of a product, and BY_PAIR and LANES of few pairs.

    With more pairs, no choice comes back once left.
    """
    num_experts, num_out, num_in = weight.shape[0], *weight.shape[-2:]
    if is_gated and isinstance(weight, QuantizedWeight):
        num_out //= 2
    num_in = cdiv(num_in, leaves)
    if not deterministic and num_pairs <= (64 if INTERPRET else FEW_PAIRS):
        few = codes_config(weight, num_pairs, as_interpreted=INTERPRET)
        if few is not None:
            return few, num_pairs < num_experts, max(16, next_power_of_2(num_pairs))
    if INTERPRET:
        config = ExpertConfig.for_interpreter(
            num_pairs, num_in, num_out, is_gated=is_gated, deterministic=deterministic
        )
    else:
        config = ExpertConfig.default_for(
            num_pairs,
            num_experts,
            num_in,
            weight.dtype,
            is_gated=is_gated,
            deterministic=deterministic,
            has_room=device_info(weight.device).capability in LARGE_SHARED_MEMORY,
            has_codes=isinstance(weight, QuantizedWeight),
        )
    if config.is_sorted:
        return config, False, 0
    return config, num_pairs < num_experts, max(16, next_power_of_2(num_pairs))


def expert_linear(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    topk_ids: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: ExpertActivation | None = None,
    out: torch.Tensor | None = None,
    deterministic: bool = False,
    leaves: int | None = None,
    num_shared: int = 0,
) -> torch.Tensor:
    """Return, for each pair of a token and one of its experts, the expert's product.

    Args:
        x: [tokens, in] or [tokens * chosen, in] float32 | float16 | bfloat16, unit last stride: a
            row for each token, or for each pair.
        weight: [experts, n, in], x's dtype, unit last stride, none of the sizes 0; with an
            activation [experts, 2, n, in], gates, then ups. Or a contiguous ``QuantizedWeight``
            of x's dtype, [experts, n, in], with an activation [experts, 2 * n, in], without an
            order of inputs; rows that share a scale are of one expert, and in and inputs per
            scale are as ``linear`` takes them.
        topk_ids: [tokens, chosen] int32, contiguous: the experts of each token, no expert twice;
            -1 = none. Ids are not checked.
        bias: [experts, n], with an activation [experts, 2, n], x's dtype: added to
            each product. With leaves the first one has it.
        activation: ``"silu_and_mul"``: the result is ``silu(gate) * up``; or a
            ``ClampedSwiGLU``.
        out: [tokens * chosen, n], x's dtype, contiguous, *written* and returned; rows of pairs
            without an expert are not written. Allocated if omitted. With leaves, [leaves,
            tokens * chosen, n] float32.
        deterministic: whether a row's bits depend on that row alone, not on the number of tokens
            and on where they are routed to.
        leaves: only if deterministic and without an activation: 1, 2, 4 or 8, the parts of equal
            length (the last may be shorter) into which the inputs are cut. Their sums are
            returned, for ``combine_experts``.
        num_shared: experts at the end that every token has, its last ones, in order. With leaves
            that divide the inputs equally they are one MLP, with the inputs of all: a leaf is a
            leaf of its inputs, and an equal part of it counts as each expert's. x then has
            contiguous rows, one for each pair, and ``weight.stride(0)`` is in.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: products are summed in float32, those of float32 inputs 32 at a time; bias and
        activation are computed in float32 too, and the result is rounded once. Codes are widened
        to the values that ``QuantizedWeight.dense`` rounds. Tier B.
    Stream: current stream, no synchronisation, CUDA-graph safe; the host knows no counts. Two
        launches with more than 256 pairs, or if deterministic, else one.
    """
    check_tensor("x", x, dtype=FLOAT_DTYPES)
    is_gated = activation is not None
    check_leaves(leaves, deterministic=deterministic)
    num_pairs, num_out = check_expert_linear(
        x, weight, topk_ids, bias, out,
        activation=activation, leaves=leaves, num_shared=num_shared,
    )  # fmt: skip
    check_launchable("x", x)
    if out is None:
        out = x.new_empty(num_pairs, num_out)
        if leaves is not None:
            out = x.new_empty(leaves, num_pairs, num_out, dtype=torch.float32)
    if num_pairs == 0:
        return out
    num_experts, num_in = weight.shape[0], x.shape[1]
    config, by_pair, lanes = choose_kernel(
        num_pairs, weight, is_gated=is_gated, deterministic=deterministic, leaves=leaves or 1
    )
    numbers: tuple[float | None, ...] = (None, None)
    if isinstance(activation, ClampedSwiGLU):
        numbers = activation.alpha, activation.limit
    strides: tuple[int | None, ...] = (None, None, None)
    if bias is not None:
        strides = bias.stride(0), bias.stride(1) if is_gated else 0, bias.stride(-1)
    common: dict[str, Any] = {
        "PAIRS_PER_ROW": num_pairs // x.shape[0],
        "IN": num_in,
        "GATED": _gate(activation),
        **_code_options(weight),
        **overlap_options(x.device),
    }
    others: list[torch.Tensor | None] = [None] * 5
    if isinstance(weight, QuantizedWeight):
        codes, *others = matrix_arguments(weight)
        given = (out, *with_strides(x, 1), codes, 0, 0, 0)
    else:
        stride_half = weight.stride(1) if is_gated else 0
        given = (
            *(out, *with_strides(x, 1)),
            *(weight, weight.stride(0), stride_half, weight.stride(-2)),
        )
    if isinstance(config, ExpertCodesConfig):
        multiply_few_codes(
            config, given[:4], (*others, topk_ids, num_pairs, num_out), (bias, *strides, *numbers),
            by_pair=by_pair, lanes=lanes, num_experts=num_experts, options=common,
        )  # fmt: skip
        return out
    common |= {
        "TILE_PAIRS": config.tile_pairs,
        "TILE_ROWS": config.tile_rows,
        "TILE_IN": config.tile_in,
        "NUM_STAGES": config.num_stages,
        "PAIRS_FIRST": config.pairs_first,
        "num_warps": config.num_warps,
    }
    row_tiles = cdiv(num_out, config.tile_rows // (2 if is_gated else 1))
    more = (bias, *strides, *numbers, *others)
    if not config.is_sorted:
        _few_pairs_kernel[(num_pairs if by_pair else num_experts, row_tiles)](
            *(*given, topk_ids, num_pairs, num_out, *more),
            BY_PAIR=by_pair,
            LANES=lanes,
            **common,
        )
        return out
    pairs = sort_pairs(topk_ids, num_experts)
    max_tiles = min(num_pairs, num_pairs // config.tile_pairs + num_experts)
    _sorted_pairs_kernel[(max_tiles * row_tiles, leaves or 1)](
        *(*given, pairs.order, pairs.starts, max_tiles, num_pairs, num_out, num_experts, *more),
        LEAVES=leaves or 1,
        SHARED=num_shared if leaves is not None else 0,
        EXPERTS=next_power_of_2(num_experts),
        **common,
    )
    return out


def _gate(activation: ExpertActivation | None) -> int:
    """Return what kernels call an activation."""
    if isinstance(activation, ClampedSwiGLU):
        return int(CLAMPED_SWIGLU.value)
    return GATES[activation]


def _code_options(weight: torch.Tensor | QuantizedWeight) -> dict[str, object]:
    """Return the constants of a kernel that say how weights are stored."""
    if not isinstance(weight, QuantizedWeight):
        return {"CODE": None, "HARDWARE": None, "GROUP": 0, "ROWS_PER_SCALE": 0}
    return {
        "CODE": weight.code,
        "HARDWARE": converts_e4m3(weight.device),
        "GROUP": weight.group,
        "ROWS_PER_SCALE": weight.rows_per_scale,
    }
