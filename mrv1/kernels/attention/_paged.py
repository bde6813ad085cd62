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

from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.cache.fp8 import decode_e4m3

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
def page_offset(block, block_stride):
    """Return where pages start, in elements; of block -1 anything.

    One product of 32 by 32 bits (``KVLayout`` checks): the compiler sees that the upper halves are
    zero, which it would not of signed factors.
    """
    return (block.to(tl.uint32).to(tl.uint64) * block_stride.to(tl.uint32).to(tl.uint64)).to(
        tl.int64
    )


@triton.jit
def work_position(work, sink_end, start, HAS_WINDOW: tl.constexpr):
    """Return the positions of work indices."""
    position = work
    if HAS_WINDOW:
        position = tl.where(work < sink_end, work, work - sink_end + start)
    return position


@triton.jit
def split_slot(slot, BLOCK_SIZE: tl.constexpr):
    """Return block and offset of int64 slots >= 0: unsigned, so that each is one instruction."""
    slot = slot.to(tl.uint64)
    return (slot // BLOCK_SIZE).to(tl.int64), (slot % BLOCK_SIZE).to(tl.int64)


@triton.jit
def load_page_rows(pointers, mask, dtype: tl.constexpr, FP8_PATH: tl.constexpr):
    """Load keys or values as the products take them; codes become ``dtype``, scales aside."""
    if FP8_PATH is None:
        rows = tl.load(pointers, mask=mask, other=0.0)
    else:
        rows = decode_e4m3(tl.load(pointers, mask=mask, other=0), FP8_PATH).to(dtype)
    return rows


@triton.jit
def arrives_last(arrivals_ptr, programs):
    """Return whether so many programs have left their states, of which the last resets the count.

    The arrival releases this program's state, which all its threads have stored before the
    barrier, and acquires those of the programs that arrived before.
    """
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu")
    is_last = arrived == programs - 1
    if is_last:
        tl.store(arrivals_ptr, 0)
    return is_last


@triton.jit
def add_states(acc, top, total, part, lse):
    """Return (acc, top, total) with a state more in each row, weighed by its base-2 lse."""
    new_top = tl.maximum(top, lse)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf is NaN
    weight = tl.exp2(lse - shift)
    rescale = tl.exp2(top - shift)
    acc = acc * rescale[:, None] + weight[:, None] * part
    return acc, new_top, total * rescale + weight


@triton.jit
def natural_lse(top, total):
    """Return the natural log-sum-exp of a base-2 (top, total); -inf where nothing was visible."""
    seen = total != 0.0  # true of NaN, which must come out as NaN
    return tl.where(seen, (top + tl.log2(tl.where(seen, total, 1.0))) * LN_2, float("-inf"))


@triton.jit
def normalized(acc, total):
    """Return acc / total by row, zeros where nothing was visible."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]
