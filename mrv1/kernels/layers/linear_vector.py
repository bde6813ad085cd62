"""The linear layer of one token: every warp multiplies two rows of weights by the vector.

No warp waits for another: each warp loads and norms all of x itself and adds up its own rows. The
loads of all weights of short rows start before the previous kernel has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.layers.linear_call import LinearCall, Rows, normed
from mrv1.kernels.layers.lora_values import MOST_OF_VECTOR, load_columns, vector_values
from mrv1.kernels.layers.silu import gated


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorConfig:
    """How the rows of weights are cut into programs, and a row into chunks."""

    tile_rows: int  # pairs of rows of one program: one pair per warp
    tile_in: int  # inputs of one chunk, which a warp loads at once
    early_chunks: int
    """Chunks whose weights are loaded into registers before the previous kernel has ended."""
    late_chunks: int  # number of other chunks that are loaded together
    num_warps: int

    @classmethod
    @lru_cache(maxsize=256)
    def default_for(
        cls, num_in: int, dtype: torch.dtype, *, norm_dtype: torch.dtype | None
    ) -> VectorConfig:
        """Return the configuration for a GPU; ``norm_dtype`` is that of a norm's weight, if any.

        Measured on an H200 in bfloat16, 1,024 to 14,336 inputs: the two rows of a pair share one
        norm of x (single rows: 15% slower with a norm); four rows would need the registers of
        early loads. Long rows are fastest with eight early chunks (four: 16% slower, sixteen: 5 to
        50%), with a norm with four (eight: 7 to 14% slower), and with a wider norm's weight with
        three, so that four programs fit a multiprocessor (3584 -> 2 x 14,336: 51.1 us, not 56.3).
        Without a norm 12 chunks are too many (3072 -> 3072: 5.0 us with eight, 5.7 with all).
        """
        tile_in = 512 // dtype.itemsize  # 16 bytes for each of a warp's 32 threads
        num_chunks = triton.cdiv(num_in, tile_in)
        if norm_dtype is None:
            most, early = 10, 8
        else:
            most, early = 12, 4 if norm_dtype == dtype else 3
        return cls(
            tile_rows=4,
            tile_in=tile_in,
            early_chunks=num_chunks if num_chunks <= most else early,
            late_chunks=4,
            num_warps=4,
        )

    @classmethod
    def for_interpreter(cls, num_in: int, num_out: int) -> VectorConfig:
        """Return one program for up to 2,048 rows of weights, and one early chunk."""
        return cls(
            tile_rows=min(1024, triton.next_power_of_2(num_out)),
            tile_in=triton.next_power_of_2(triton.cdiv(num_in, 4)),
            early_chunks=1,
            late_chunks=2,
            num_warps=1,
        )


@triton.jit
def _load_chunks(rows, first, CHUNKS: tl.constexpr, IN: tl.constexpr, TILE_IN: tl.constexpr):
    """Return CHUNKS chunks [rows, TILE_IN]; all loads start before the program waits for any."""
    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        col = (first + chunk) * TILE_IN + tl.arange(0, TILE_IN)[None, :]
        loaded = tl.load(rows.ptr + col, mask=rows.is_row & (col < IN), other=0.0)
        chunks += (loaded,)  # type: ignore[assignment]
    return chunks


@triton.jit
def _add_squares(total, xs, CHUNKS: tl.constexpr):
    for chunk in tl.static_range(CHUNKS):
        wide = xs[chunk].to(tl.float32)
        total += wide * wide
    return total


@triton.jit
def _normed_chunks(xs, scale, norm_weights, CHUNKS: tl.constexpr):
    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        x = normed(xs[chunk], scale, norm_weights[chunk])
        chunks += (x,)  # type: ignore[assignment]
    return chunks


@triton.jit
def _add_products(total, weights, xs, CHUNKS: tl.constexpr):
    for chunk in tl.static_range(CHUNKS):
        total += weights[chunk].to(tl.float32) * xs[chunk].to(tl.float32)
    return total


@triton.jit(do_not_specialize=["num_out"])
def _linear_vector_kernel(
    out_ptr,  # [num_out]; may be the residual
    residual_ptr,  # [num_out], or None
    x_ptr,  # [IN]
    weight_ptr,  # [num_out, IN]; with GATED [2 * num_out, IN], gates then ups
    bias_ptr,  # [num_out] or [2 * num_out], or None
    norm_weight_ptr,  # [IN], or None
    eps, num_out,
    IN: tl.constexpr,
    GATED: tl.constexpr,  # a kind of gate, 0 = none
    TILE_ROWS: tl.constexpr, TILE_IN: tl.constexpr,
    EARLY_CHUNKS: tl.constexpr,  # at most NUM_CHUNKS
    LATE_CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,  # see dependent_launch
    lora=None, LORA: tl.constexpr = None,  # adapters: LoraPointers, LoraConstants; None = none
):  # fmt: skip
    """Grid (cdiv(rows of weights, 2 * TILE_ROWS),): TILE_ROWS pairs of rows, one per warp.

    A pair is a gate and its up, or two neighbours. Tiles are [TILE_ROWS, TILE_IN], x too.
    """
    NUM_CHUNKS: tl.constexpr = (IN + TILE_IN - 1) // TILE_IN
    let_next_start(OVERLAP)
    pair = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    if GATED:
        first, second = pair, pair + num_out
        is_first, is_second = pair < num_out, pair < num_out
    else:
        first, second = 2 * pair, 2 * pair + 1
        is_first, is_second = first < num_out, second < num_out
    first_rows = Rows(weight_ptr + first * IN, is_first)
    second_rows = Rows(weight_ptr + second * IN, is_second)
    every = tl.zeros([TILE_ROWS, 1], tl.int32)
    always = every == 0
    firsts = _load_chunks(first_rows, 0, EARLY_CHUNKS, IN, TILE_IN)
    seconds = _load_chunks(second_rows, 0, EARLY_CHUNKS, IN, TILE_IN)
    if norm_weight_ptr is not None:
        norm_rows = Rows(norm_weight_ptr + every, always)
        norm_weights = _load_chunks(norm_rows, 0, EARLY_CHUNKS, IN, TILE_IN)
    if bias_ptr is not None:
        first_bias = tl.load(bias_ptr + first, mask=is_first, other=0.0).to(tl.float32)
        second_bias = tl.load(bias_ptr + second, mask=is_second, other=0.0).to(tl.float32)
    if lora is not None:
        first_columns = load_columns(lora, first, is_first, LORA)
        second_columns = load_columns(lora, second, is_second, LORA)
    wait_for_previous(OVERLAP)

    vector = Rows(x_ptr + every, always)
    xs = _load_chunks(vector, 0, EARLY_CHUNKS, IN, TILE_IN)
    if residual_ptr is not None:
        first_residual = tl.load(residual_ptr + first, mask=is_first, other=0.0).to(tl.float32)
        if not GATED:
            second_residual = tl.load(residual_ptr + second, mask=is_second, other=0.0)
    if num_out == 0:  # never: keeps loads from being moved among the products, one by one
        return
    total = tl.zeros([TILE_ROWS, TILE_IN], tl.float32)
    if norm_weight_ptr is not None:
        squares = _add_squares(total, xs, EARLY_CHUNKS)
        for late in range(EARLY_CHUNKS, NUM_CHUNKS, LATE_CHUNKS):
            late_xs = _load_chunks(vector, late, LATE_CHUNKS, IN, TILE_IN)
            squares = _add_squares(squares, late_xs, LATE_CHUNKS)
        scale = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / IN + eps)
        xs = _normed_chunks(xs, scale, norm_weights, EARLY_CHUNKS)
    first_y = _add_products(total, firsts, xs, EARLY_CHUNKS)
    second_y = _add_products(total, seconds, xs, EARLY_CHUNKS)
    for late in range(EARLY_CHUNKS, NUM_CHUNKS, LATE_CHUNKS):
        late_firsts = _load_chunks(first_rows, late, LATE_CHUNKS, IN, TILE_IN)
        late_seconds = _load_chunks(second_rows, late, LATE_CHUNKS, IN, TILE_IN)
        late_xs = _load_chunks(vector, late, LATE_CHUNKS, IN, TILE_IN)
        if norm_weight_ptr is not None:
            late_weights = _load_chunks(norm_rows, late, LATE_CHUNKS, IN, TILE_IN)
            late_xs = _normed_chunks(late_xs, scale, late_weights, LATE_CHUNKS)
        first_y = _add_products(first_y, late_firsts, late_xs, LATE_CHUNKS)
        second_y = _add_products(second_y, late_seconds, late_xs, LATE_CHUNKS)

    y = tl.sum(first_y, axis=1, keep_dims=True)
    second_y = tl.sum(second_y, axis=1, keep_dims=True)
    if lora is not None:
        y += vector_values(lora, first_columns, first, LORA)
        second_y += vector_values(lora, second_columns, second, LORA)
    if bias_ptr is not None:
        y += first_bias
        second_y += second_bias
    if GATED:
        y = gated(y, second_y, GATED)
    if residual_ptr is not None:
        y += first_residual
        if not GATED:
            second_y += second_residual.to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + first, y.to(dtype), mask=is_first)
    if not GATED:
        tl.store(out_ptr + second, second_y.to(dtype), mask=is_second)


def multiply_vector(call: LinearCall, config: VectorConfig) -> None:
    """Compute ``call.out`` for one token."""
    num_rows = call.weight.shape[0]
    lora = call.lora_arguments(config.tile_rows, config.num_warps)
    if lora:
        constants = lora["LORA"]
        at_once = min(MOST_OF_VECTOR, triton.next_power_of_2(constants.MAX_RANK))
        lora["LORA"] = constants._replace(AT_ONCE=at_once)
    _linear_vector_kernel[(triton.cdiv(num_rows, 2 * config.tile_rows),)](
        call.out, call.residual, call.x, call.weight,
        call.bias, call.norm_weight, call.eps, call.num_out,
        IN=call.num_in, GATED=call.gate, TILE_ROWS=config.tile_rows, TILE_IN=config.tile_in,
        EARLY_CHUNKS=min(config.early_chunks, triton.cdiv(call.num_in, config.tile_in)),
        LATE_CHUNKS=config.late_chunks, num_warps=config.num_warps,
        **overlap_options(call.x.device), **lora,
    )  # fmt: skip
