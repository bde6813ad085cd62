"""Device functions of the paged cache: head roles, table columns, addresses and rows of pages.

The rules are those of ``kv_layout``.
"""

from __future__ import annotations

from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.cache.fp8 import decode_e4m3

ALIGNED_ELEMENTS = tl.constexpr(8)
"""``KVLayout`` admits bases and strides that are multiples of this only (16 bytes of fp16)."""

ALIGNED_CODES = tl.constexpr(16)
"""Likewise beside scales: 16 bytes of e4m3 codes (the launchers check)."""


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
