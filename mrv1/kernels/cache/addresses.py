"""Device functions of the paged cache: table columns, addresses and rows of pages.

``kv_layout`` states the rules of columns and addresses.
"""

from __future__ import annotations

from typing import NamedTuple

from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.cache.codes import is_nibbles, nibble_rows, to_values

ALIGNED_ELEMENTS = tl.constexpr(8)
"""``KVLayout`` accepts only bases and strides that are multiples of this (16 bytes of fp16)."""
ALIGNED_CODES = tl.constexpr(16)
"""The same in bytes for a cache with scales (the launchers check)."""


class PagedKV(NamedTuple):
    """One layer's keys and values, flat, or their scales, and the addresses of heads' pages."""

    k_ptr: tl.tensor | None
    v_ptr: tl.tensor | None
    base_ptr: tl.tensor | None  # [kv_heads] int64, in elements
    block_stride_ptr: tl.tensor | None  # [kv_heads] int64, in elements
    token_stride: tl.tensor  # in elements


class TableRow(NamedTuple):
    """A request's row of the block table as one KV head reads it."""

    ptr: tl.tensor  # int32
    offset: tl.tensor  # int32, first column of the head
    sink: tl.tensor | None  # int32, tokens; None = no head has a window
    ring_blocks: tl.tensor | None  # int32, 0 = no ring; None = no head has a ring


@triton.jit
def table_column(logical, row, BLOCK_SIZE: tl.constexpr):
    """Return the columns of logical blocks in a ``TableRow`` (the ring rule of ``kv_layout``)."""
    column = logical
    if row.ring_blocks is not None:
        sink_blocks = (row.sink + BLOCK_SIZE - 1) // BLOCK_SIZE
        behind_sink = tl.maximum(logical - sink_blocks, 0)  # "%" of a negative number truncates
        in_ring = sink_blocks + behind_sink % tl.maximum(row.ring_blocks, 1)
        column = tl.where((row.ring_blocks == 0) | (logical < sink_blocks), logical, in_ring)
    return row.offset + column


@triton.jit
def page_offset(block, block_stride):
    """Return the offset of each block, in elements, without the head's base; for -1 any number.

    One product of 32 by 32 bits (``KVLayout`` checks strides), as the compiler sees only of
    unsigned factors that their upper halves are zero.
    """
    return (block.to(tl.uint32).to(tl.uint64) * block_stride.to(tl.uint32).to(tl.uint64)).to(
        tl.int64
    )


@triton.jit
def split_slot(slot, BLOCK_SIZE: tl.constexpr):
    """Return block and offset of int64 slots >= 0; unsigned arithmetic: one instruction each."""
    slot = slot.to(tl.uint64)
    return (slot // BLOCK_SIZE).to(tl.int64), (slot % BLOCK_SIZE).to(tl.int64)


@triton.jit
def load_page_rows(pointers, mask, scale, dtype: tl.constexpr, CODEC: tl.constexpr):
    """Return keys or values as the products take them: codes become ``dtype``, not yet scaled.

    ``pointers`` are to a cache's elements; from 4-bit codes, two in each, goes the zero that a
    row's ``scale`` holds.
    """
    if CODEC is None:
        rows = tl.load(pointers, mask=mask, other=0.0)
    elif is_nibbles(CODEC):
        rows = nibble_rows(tl.load(pointers, mask=mask, other=0), scale).to(dtype)
    else:
        rows = to_values(tl.load(pointers, mask=mask, other=0), CODEC).to(dtype)
    return rows
