"""Shared prefixes of a decode plan: which requests read the same pages first, found on the device.

Requests of one prompt, or of prompts that begin alike, have the same blocks in the first columns
of their rows of the block table. ``plan.prefixes`` puts them into groups of up to SHARERS, in the
order of the batch: requests with the same block in the column that ends the first MIN_PREFIX
tokens. The first of a group leads it; the columns in which all others are like the leader, in the
part of every full head, are the group's prefix, in whole tiles. It has no column without a page,
and is before the last queries: each query of the group sees all of its keys. A group whose prefix
is shorter than MIN_PREFIX, or a request without others, shares nothing.

Source: Hydragen (arXiv:2402.05099) for attention to a shared prefix with the queries of several
requests, there found by the caller.
"""

from __future__ import annotations

import torch

from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.launches import launch_kernel
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.attention.decode.plan import DecodePlan, padded_reqs
from mrv1.kernels.cache.kv_layout import KVLayout


@triton.jit(do_not_specialize=["first_count", "num_counts", "num_reqs", "num_parts"])
def _find_prefixes_kernel(
    prefixes_ptr,  # [num_reqs, 2 + SHARERS] int32, see DecodePlan
    arrivals_ptr, first_count, num_counts,  # from first_count on zeroed: num_counts per request
    seq_lens_ptr, num_reqs,  # [num_reqs] int32
    table_ptr, stride_table_row,  # [num_reqs, row_width] int32
    offsets_ptr, num_parts,  # [num_parts] int32, see KVLayout.full_offsets
    QUERY_LEN: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_TOKENS: tl.constexpr,
    MIN_TOKENS: tl.constexpr, SHARERS: tl.constexpr,
    ALL_REQS: tl.constexpr,  # power of two >= num_reqs
    TILE_SHARERS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_COUNTS: tl.constexpr,
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (num_reqs,): a program writes the group that its request leads, if it leads one."""
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    ROW: tl.constexpr = 2 + SHARERS
    LAST_COLUMN: tl.constexpr = (MIN_TOKENS + BLOCK_SIZE - 1) // BLOCK_SIZE - 1
    leader = tl.program_id(0)
    reqs = tl.arange(0, ALL_REQS)
    first_part = tl.load(offsets_ptr)
    known = tl.load(seq_lens_ptr + reqs, mask=reqs < num_reqs, other=0) - QUERY_LEN
    has_page = (reqs < num_reqs) & (known >= (LAST_COLUMN + 1) * BLOCK_SIZE)
    page_ptr = table_ptr + reqs.to(tl.int64) * stride_table_row + (first_part + LAST_COLUMN)
    page = tl.load(page_ptr, mask=has_page, other=-1)
    count = tl.arange(0, TILE_COUNTS)
    counts_ptr = arrivals_ptr + first_count + leader * num_counts
    for first in range(0, num_counts, TILE_COUNTS):
        tl.store(counts_ptr + first + count, 0, mask=first + count < num_counts)

    own_page = tl.max(tl.where(reqs == leader, page, -1))
    is_like = ((page == own_page) & (own_page >= 0)) | (reqs == leader)
    before = tl.sum((is_like & (reqs < leader)).to(tl.int32))
    if before % SHARERS == 0:
        place = tl.cumsum(is_like.to(tl.int32), axis=0) - 1 - before  # the leader's is 0
        is_in = is_like & (place >= 0) & (place < SHARERS)
        num_sharers = tl.sum(is_in.to(tl.int32))
        sharer = tl.arange(0, TILE_SHARERS)
        row_ptr = prefixes_ptr + leader * ROW
        tl.store(row_ptr + 2 + sharer, -1, mask=(sharer >= num_sharers) & (sharer < SHARERS))
        tl.store(row_ptr + 2 + place, reqs, mask=is_in)
        tl.debug_barrier()
        is_there = sharer < num_sharers
        req = tl.load(row_ptr + 2 + sharer, mask=is_there, other=0)
        shortest = tl.min(tl.where(is_in, known, 0x7FFFFFFF))
        columns = tl.where(num_sharers > 1, shortest // BLOCK_SIZE, 0)
        for part in range(num_parts):
            offset = tl.load(offsets_ptr + part)
            leader_ptr = table_ptr + leader.to(tl.int64) * stride_table_row + offset
            sharer_ptr = table_ptr + req.to(tl.int64) * stride_table_row + offset
            first = 0
            while first < columns:
                column = first + tl.arange(0, TILE_COLUMNS)
                is_column = column < columns
                expected = tl.load(leader_ptr + column, mask=is_column, other=-1)
                found = tl.load(
                    sharer_ptr[:, None] + column[None, :],
                    mask=is_there[:, None] & is_column[None, :],
                    other=-1,
                )
                differs = (found != expected[None, :]) & is_there[:, None] & is_column[None, :]
                differs |= (expected < 0)[None, :] & is_column[None, :]
                columns = tl.min(tl.where(differs, column[None, :], columns))
                first += TILE_COLUMNS
        tiles = columns * BLOCK_SIZE // TILE_TOKENS
        tiles = tl.where(tiles * TILE_TOKENS >= MIN_TOKENS, tiles, 0)
        tl.store(prefixes_ptr + req * ROW, leader, mask=is_there)
        tl.store(prefixes_ptr + req * ROW + 1, tiles, mask=is_there)


def columns_per_step(tile_sharers: int) -> int:
    """Return how many columns of the sharers' rows a program compares at a time."""
    return 256 if INTERPRET else max(32, 1024 // tile_sharers)


def find_prefixes(
    seq_lens: torch.Tensor, table: torch.Tensor, layout: KVLayout, plan: DecodePlan
) -> None:
    """Write ``plan.prefixes`` from a table of one row per request; zero the rows' ``arrivals``."""
    tile_sharers = triton.next_power_of_2(plan.sharers)
    num_counts = plan.num_kv_heads * plan.states.shape[1]
    launch_kernel(
        _find_prefixes_kernel, (plan.max_reqs,),
        plan.prefixes, plan.arrivals, plan.max_items, num_counts, seq_lens, plan.max_reqs,
        table, table.stride(0), layout.full_offsets, len(layout.full_offsets),
        QUERY_LEN=plan.query_len, BLOCK_SIZE=layout.block_size,
        TILE_TOKENS=plan.config.tile_tokens, MIN_TOKENS=plan.min_prefix, SHARERS=plan.sharers,
        ALL_REQS=padded_reqs(plan.max_reqs), TILE_SHARERS=tile_sharers,
        TILE_COLUMNS=columns_per_step(tile_sharers), TILE_COUNTS=128,
        num_warps=4, **overlap_options(seq_lens.device),
    )  # fmt: skip
