"""Device functions shared by the paged attention kernels: visible keys, page addresses, softmax.

The keys some query of a tile may see are ``[0, sink_end)`` and ``[start, end)``. A *work index*
``i`` in ``[0, sink_end + end - start)`` counts them without the gap, so that a streaming head's
work, and the pages it touches, stay bounded however long the context is::

    position(i) = i                          if i < sink_end
                  i - sink_end + start       otherwise

The softmax runs in base 2 (``exp2`` is one instruction): scores carry ``softmax_scale * log2(e)``.
The online form follows Milakov and Gimelshein, arXiv:1805.02867, and FlashAttention,
arXiv:2205.14135.
"""

from __future__ import annotations

from typing import Literal

import torch

from mrv1.kernels._fp8 import decode_e4m3, product_query
from mrv1.kernels._triton import tl, triton

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

ALIGNED_ELEMENTS = tl.constexpr(8)
"""``KVLayout`` admits bases and strides that are multiples of this only (16 bytes of fp16)."""

ALIGNED_CODES = tl.constexpr(16)
"""Likewise beside scales: 16 bytes of e4m3 codes (the launchers check)."""

SMALLEST_UNIT = tl.constexpr(1e-30)
"""Where the running unit of the V scales starts: below every scale, and finite inverted."""

MIN_DOT_ROWS = 16
"""Fewest rows ``tl.dot`` takes."""


def dot_precision(dtype: torch.dtype) -> Literal["ieee", "tf32"]:
    """Return ``tl.dot``'s input precision: fp32 inputs keep all their bits."""
    return "ieee" if dtype == torch.float32 else "tf32"


@triton.jit
def load_head_role(
    head,  # int32
    table_offset_ptr,  # [kv_heads] int32
    window_ptr,  # [kv_heads] int32
    sink_ptr,  # [kv_heads] int32
    ring_blocks_ptr,  # [kv_heads] int32
    HAS_WINDOW: tl.constexpr,
    HAS_RING: tl.constexpr,
):
    """Return (table_offset, window, sink, ring_blocks) of a head; absent features cost no load."""
    table_offset = tl.load(table_offset_ptr + head)
    window = -1
    sink = 0
    ring_blocks = 0
    if HAS_WINDOW:
        window = tl.load(window_ptr + head)
        sink = tl.load(sink_ptr + head)
    if HAS_RING:
        ring_blocks = tl.load(ring_blocks_ptr + head)
    return table_offset, window, sink, ring_blocks


@triton.jit
def visible_range(first_position, end, window, sink, HAS_WINDOW: tl.constexpr):
    """Return (sink_end, start, num_visible) for queries at positions [first_position, end)."""
    sink_end = 0
    start = 0
    if HAS_WINDOW:
        sink_end = tl.where(window >= 0, tl.minimum(sink, end), 0)
        begin = tl.maximum(first_position - window + 1, sink_end)
        start = tl.where(window >= 0, tl.minimum(begin, end), 0)
    return sink_end, start, sink_end + end - start


@triton.jit
def table_column(
    logical, table_offset, sink, ring_blocks, BLOCK_SIZE: tl.constexpr, HAS_RING: tl.constexpr
):
    """Return the block-table column of logical blocks (the ring rule of ``kv_layout``)."""
    column = logical
    if HAS_RING:
        sink_blocks = (sink + BLOCK_SIZE - 1) // BLOCK_SIZE
        behind_sink = tl.maximum(logical - sink_blocks, 0)  # "%" of a negative truncates
        in_ring = sink_blocks + behind_sink % tl.maximum(ring_blocks, 1)
        column = tl.where((ring_blocks == 0) | (logical < sink_blocks), logical, in_ring)
    return table_offset + column


@triton.jit
def load_page_rows(pointers, mask, dtype: tl.constexpr, FP8_PATH: tl.constexpr):
    """Load keys or values as the products take them; codes become ``dtype``, scales aside."""
    if FP8_PATH is None:
        rows = tl.load(pointers, mask=mask, other=0.0)
    else:
        rows = decode_e4m3(tl.load(pointers, mask=mask, other=0), FP8_PATH).to(dtype)
    return rows


@triton.jit
def attend_keys(
    q,  # [TILE_ROWS, TILE_DIM], zero in padding rows and dims
    query_position,  # [TILE_ROWS] int32, negative in padding rows
    k_cache_ptr,  # one layer's keys, flat
    v_cache_ptr,  # one layer's values, flat
    k_scale_ptr,  # float32, flat; None = not an fp8 cache
    v_scale_ptr,
    scale_base_ptr,  # [kv_heads] int64, elements, or None
    scale_block_stride_ptr,  # [kv_heads] int64, elements, or None
    head,  # int32
    head_base_ptr,  # [kv_heads] int64, elements
    block_stride_ptr,  # [kv_heads] int64, elements
    table_row_ptr,  # [row_width] int32, this request's row
    first_work,  # int32, first work index
    end_work,  # int32, end of the work indices
    sink_end,  # int32
    start,  # int32
    table_offset,  # int32
    window,  # int32, -1 = full
    sink,  # int32
    ring_blocks,  # int32, 0 = none
    token_stride,  # elements
    scale_log2,  # softmax_scale * log2(e)
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_RING: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8_PATH: tl.constexpr,  # None = not an fp8 cache
    TOKEN_SCALES: tl.constexpr,  # a scale per (token, head), else per head
):
    """Run the online softmax over work indices [first_work, end_work).

    A token's K scale is a factor of its logit, its V scale one of its weight. Weights are rounded
    to 16 bits in units of the largest V scale so far, lest small scales underflow.

    Returns:
        (acc, top, total): ``[TILE_ROWS, TILE_DIM]`` sum of weights * v, and per row the largest
        scaled score in base 2 (-inf where nothing is visible) and the sum of weights.
    """
    dims = tl.arange(0, TILE_DIM)
    in_head = dims < HEAD_DIM
    ALIGNED: tl.constexpr = ALIGNED_ELEMENTS if FP8_PATH is None else ALIGNED_CODES
    head_base = tl.multiple_of(tl.load(head_base_ptr + head), ALIGNED)
    block_stride = tl.load(block_stride_ptr + head)
    k_ptr = k_cache_ptr + head_base
    v_ptr = v_cache_ptr + head_base
    score_scale = scale_log2
    if FP8_PATH is not None:
        scale_base = tl.load(scale_base_ptr + head)
        scale_block_stride = tl.load(scale_block_stride_ptr + head)
        q, q_unit = product_query(q)
        score_scale = (q_unit * scale_log2)[:, None]
        v_unit = tl.full([], SMALLEST_UNIT, tl.float32)
        if not TOKEN_SCALES:
            score_scale *= tl.load(k_scale_ptr + scale_base)
            v_unit = tl.load(v_scale_ptr + scale_base)
    acc = tl.zeros([TILE_ROWS, TILE_DIM], dtype=tl.float32)
    top = tl.full([TILE_ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([TILE_ROWS], dtype=tl.float32)
    for tile_start in range(first_work, end_work, TILE_TOKENS):
        work = tile_start + tl.arange(0, TILE_TOKENS)
        in_work = work < end_work
        position = work
        if HAS_WINDOW:
            position = tl.where(work < sink_end, work, work - sink_end + start)
        logical = position // BLOCK_SIZE
        column = table_column(logical, table_offset, sink, ring_blocks, BLOCK_SIZE, HAS_RING)
        block = tl.load(table_row_ptr + column, mask=in_work, other=-1).to(tl.int64)
        present = block >= 0
        token = (position % BLOCK_SIZE).to(tl.int64)
        address = block * block_stride + token * token_stride
        address = tl.multiple_of(address, ALIGNED)
        offsets = address[:, None] + dims[None, :]
        loaded = present[:, None] & in_head[None, :]  # NaN of a dead page must not come in

        k = load_page_rows(k_ptr + offsets, loaded, q.dtype, FP8_PATH)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * score_scale
        if TOKEN_SCALES:
            scale_address = scale_base + block * scale_block_stride + token
            k_scale = tl.load(k_scale_ptr + scale_address, mask=present, other=0.0)
            scores *= k_scale[None, :]
        visible = present[None, :] & (position[None, :] <= query_position[:, None])
        if HAS_WINDOW:
            visible &= (
                (window < 0)
                | (position[None, :] > query_position[:, None] - window)
                | (position[None, :] < sink)
            )
        scores = tl.where(visible, scores, float("-inf"))

        new_top = tl.maximum(top, tl.max(scores, axis=1))
        # A row that has seen nothing yet keeps -inf, and -inf - -inf is NaN: subtract 0 there.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale = tl.exp2(top - shift)
        weights = tl.exp2(scores - shift[:, None])
        total = total * rescale + tl.sum(weights, axis=1)
        if TOKEN_SCALES:
            v_scale = tl.load(v_scale_ptr + scale_address, mask=present, other=0.0)
            new_unit = tl.maximum(v_unit, tl.max(v_scale, axis=0))
            weights *= (v_scale / new_unit)[None, :]
            rescale *= v_unit / new_unit
            v_unit = new_unit
        v = load_page_rows(v_ptr + offsets, loaded, q.dtype, FP8_PATH)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top
    if FP8_PATH is not None:
        acc *= v_unit
    return acc, top, total


@triton.jit
def natural_lse(top, total):
    """Return the natural log-sum-exp of a base-2 (top, total); -inf where nothing was visible."""
    seen = total != 0.0  # true of NaN, which must come out as NaN
    return tl.where(seen, (top + tl.log2(tl.where(seen, total, 1.0))) * LN_2, float("-inf"))


@triton.jit
def normalized(acc, total):
    """Return acc / total by row, zeros where nothing was visible."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]
