"""Paged decode attention: the last 1 to 8 tokens of each request attend to the request's cache.

    out[i, h] = sum_k softmax_k(softmax_scale * q[i, h] . K[k, h // group]) V[k, h // group]

over the keys ``k`` that ``kv_layout`` lets the query see: one program per item of the plan
(``plan_kernel``), a range of the keys that one KV head of one request sees. The programs of a
segment merge their partial results by log-sum-exp, in groups: the last program of a group to
finish merges the group's, and takes part with the result in a group of groups. A launch of its own
would hold up all layers, even in steps where no segment has several pieces.

A short context costs a chain of loads, from the plan to the block table to K and V. Plan and table
may be loaded while the previous launch, L, still runs (``read_early`` of ``DecodePlan.allocate``),
without a race. A program of this launch runs before its wait only if all programs of L have let it
start, after their own wait (the caller's promise). That wait returns when the launch before L has
ended and its writes are visible; that launch had waited for its predecessor, and so on: all writes
before L are in memory. L itself writes neither plan, table nor layout (the caller's promise).
Early loads bypass L1, which may hold older lines. K and V are loaded after the wait: L has just
written the newest.

Scores are computed transposed, keys times queries: the tensor core's 16-row side holds keys, its
8-column side the few query rows. That halves the padding and the softmax of queries times keys.

Source: FlashAttention (arXiv:2205.14135) for the online softmax, Flash-Decoding (Dao et al., 2023,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html) for the split over keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.checks import FLOAT_DTYPES, check_launchable
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.launches import launch_kernel
from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.attention.contracts import (
    check_num_kv_splits,
    check_paged_attention,
    check_query_len,
)
from mrv1.kernels.attention.decode.plan import (
    ITEM_FIELDS,
    PIECE_TOKENS,
    DecodePlan,
    Item,
    check_plan,
    check_plan_options,
    padded_rows,
)
from mrv1.kernels.attention.decode.plan_kernel import plan_decode_attention
from mrv1.kernels.attention.online_softmax import (
    LOG2_E,
    SMALLEST_UNIT,
    Cache,
    HeadRows,
    Softmax,
    States,
    arrives_last,
    attention_constexprs,
    base_2_lse,
    first_state,
    fold_piece,
    fold_state,
    halves,
    head_offset,
    load_logit_sink,
    natural_lse,
    next_piece,
    normalized,
    soft_capped,
    store_out,
    work_position,
)
from mrv1.kernels.cache.addresses import (
    ALIGNED_ELEMENTS,
    PagedKV,
    TableRow,
    page_offset,
    table_column,
)
from mrv1.kernels.cache.codes import (
    codes_in_word,
    decode_parts,
    is_nibbles,
    part_factor,
    product_query_parts,
    scale_index,
    zero_of,
)
from mrv1.kernels.cache.contracts import check_head_dim
from mrv1.kernels.cache.kv_layout import KVLayout
from mrv1.kernels.cache.kv_scales import KVScales, format_of
from mrv1.kernels.cache.scale_arguments import cache_arguments

_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)
_NUM_FIELDS = tl.constexpr(len(Item._fields))
_MOST_MERGED = tl.constexpr(16)
"""Most partial results that a program merges in a round, but for two rounds of _MERGED_TWICE."""
_MERGED_TWICE = tl.constexpr(8)
"""Most in each of two rounds, which segments of 17 to 64 pieces take."""
_PIECE_TOKENS = tl.constexpr(PIECE_TOKENS)
_SUM_ROWS = tl.constexpr(16)
"""Rows of ones that are multiplied with weights to add them up: all rows of sums are the same."""

MIN_PART_DIM = 16
"""Smallest padded dimensions of a part of a vector of codes: they fill the 16 of a tensor core."""
MAX_PROGRAMS = 4096  # of a grid, for plans that may have many more items than segments


class Heads(NamedTuple):
    """Constants of the heads."""

    NUM_KV_HEADS: int
    QUERY_LEN: int
    GROUP: int  # query heads per KV head
    HEAD_DIM: int


class Tiles(NamedTuple):
    """Constants of a program and its tiles."""

    TILE_ROWS: int  # power of two >= max(8, QUERY_LEN * GROUP)
    TILE_TOKENS: int
    TILE_DIM: int
    PRECISION: str
    MERGE_ROWS: int  # power of two >= QUERY_LEN * GROUP
    LOADED_STATES: int  # partial results that a merging program loads at a time
    EARLY: bool  # whether plan and table may be read before the previous kernel has ended
    DETERMINISTIC: bool  # whether the result is the fold of fixed pieces, see fold_state


class Items(NamedTuple):
    """The items of a plan, and where their partial results go."""

    ptr: tl.tensor  # [max_items, ITEM_FIELDS] int32
    count: tl.tensor
    states: States  # QUERY_LEN * GROUP per item; an arrival count per item


class BlockTable(NamedTuple):
    """The block table, and which of its pages were read."""

    ptr: tl.tensor  # [num_reqs, row_width] int32
    stride_row: tl.tensor
    row_width: tl.tensor
    visited_ptr: tl.tensor | None  # [num_reqs, NUM_KV_HEADS, row_width] uint8


class HeadPages(NamedTuple):
    """Where the pages of one KV head lie: its keys and values, or their scales."""

    k_ptr: tl.tensor  # for a cache of codes, two or four in each int16
    v_ptr: tl.tensor
    block_stride: tl.tensor  # int32, in elements
    token_stride: tl.tensor


class Queries(NamedTuple):
    """The query rows of an item: its queries times the query heads of its KV head."""

    row_ptr: tl.tensor  # [1, TILE_ROWS] pointers to their first elements
    in_tile: tl.tensor  # [TILE_ROWS], False in padding rows
    position: tl.tensor  # [TILE_ROWS] int32, negative in padding rows


@triton.jit
def _load_item(ptr, is_there, CACHE_MODIFIER: tl.constexpr):
    """Return the fields of an item; zeros if there is none, where memory holds anything.

    All fields are loaded beside the number of items, so no load is masked. Garbage need not be an
    empty range: after 0x7fffffff, a GPU's float32 NaN, the next work index is negative.
    """
    fields = ()
    for field in tl.static_range(_NUM_FIELDS):
        value = tl.load(ptr + field, cache_modifier=CACHE_MODIFIER)
        fields += (tl.where(is_there, value, 0),)  # type: ignore[assignment]
    return Item(*fields)  # type: ignore[call-arg]


@triton.jit
def _load_blocks(item, row, work, CACHE: tl.constexpr, CACHE_MODIFIER: tl.constexpr):
    """Return the blocks of work indices, -1 where there is no page or the item has ended."""
    position = work_position(work, item.sink_end, item.start, CACHE.HAS_WINDOW)
    column = table_column(position // CACHE.BLOCK_SIZE, row, CACHE.BLOCK_SIZE)
    in_item = work < item.end_work
    return tl.load(row.ptr + column, mask=in_item, other=-1, cache_modifier=CACHE_MODIFIER)


@triton.jit
def _attend_item(
    item, queries, pages, scales, row, visited_ptr, block, softmax, logit_sink,
    HEADS: tl.constexpr, CACHE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Run the online softmax over an item's work indices (see ``work_position``).

    Blocks are looked up one tile ahead (``block``: the first tile's), so that no load of pages
    waits for a load of the table. A token's K scale multiplies its score, its V scale its weight.
    Weights are rounded to 16 bits in units of the largest V scale so far, or small scales would
    underflow. Codes are read in int16, PARTS in each: dimensions of each part have own products.
    The zeros of 4-bit vectors come last: a score loses its key's zero times the query's sum, and
    all of an output's dimensions the sum of weights times zeros.

    If DETERMINISTIC and without codes, the result is the fold of the item's pieces, and tensor
    cores add up the weights in the order of the keys: the order of a sum over registers would
    depend on the shape of the tile.

    Returns:
        (acc, top, total): ``[TILE_DIM, TILE_ROWS]`` sum of weights * v, and per row the largest
        scaled score in base 2 (-inf where nothing is visible) and the sum of weights.
    """
    FOLDS: tl.constexpr = TILES.DETERMINISTIC and CACHE.CODEC is None
    SCALES_LATE: tl.constexpr = FOLDS and softmax.soft_cap is None  # in the maximum and exponent
    CODEC: tl.constexpr = CACHE.CODEC
    IS_CODED: tl.constexpr = CODEC is not None
    HAS_ZEROS: tl.constexpr = is_nibbles(CODEC)
    PARTS: tl.constexpr = codes_in_word(CODEC)
    HEAD_DIM: tl.constexpr = HEADS.HEAD_DIM
    BLOCK_SIZE: tl.constexpr = CACHE.BLOCK_SIZE
    SCALES_PER_BLOCK: tl.constexpr = CACHE.SCALES_PER_BLOCK
    TILE_DIM: tl.constexpr = TILES.TILE_DIM
    TILE_ROWS: tl.constexpr = TILES.TILE_ROWS
    TILE_TOKENS: tl.constexpr = TILES.TILE_TOKENS
    PRECISION: tl.constexpr = TILES.PRECISION
    WIDTH: tl.constexpr = TILE_DIM // PARTS  # elements of k_ptr in a row
    column_of = tl.arange(0, WIDTH)
    in_head = column_of < HEAD_DIM // PARTS
    query_mask = in_head[:, None] & queries.in_tile[None, :]
    score_scale = softmax.scale * LOG2_E
    if softmax.soft_cap is not None:
        score_scale *= 2.0 / softmax.soft_cap
    acc = tl.zeros([WIDTH, TILE_ROWS], dtype=tl.float32)
    if IS_CODED:
        queries_of = ()
        accs = ()
        for part in tl.static_range(PARTS):
            part_ptr = queries.row_ptr + (PARTS * column_of[:, None] + part)
            part_q = tl.load(part_ptr, mask=query_mask, other=0.0)
            queries_of += (part_q,)  # type: ignore[assignment]
            accs += (acc,)  # type: ignore[assignment]
        queries_of, q_unit, q_sum = product_query_parts(queries_of, CODEC)
        q = queries_of[0]
        score_scale = (q_unit * score_scale)[None, :]
        v_unit = tl.full([], SMALLEST_UNIT, tl.float32)
        if SCALES_PER_BLOCK == 0:
            score_scale *= tl.load(scales.k_ptr)
            v_unit = tl.load(scales.v_ptr)
        if HAS_ZEROS:
            score_scale *= part_factor(1, CODEC)
            q_sum /= part_factor(1, CODEC)
            zeros = tl.zeros([TILE_ROWS], dtype=tl.float32)
    top, total = first_state(logit_sink, TILE_ROWS)
    if FOLDS:
        folded = acc
        folded_top, folded_total = first_state(None, TILE_ROWS)
        sums = tl.zeros([_SUM_ROWS, TILE_ROWS], dtype=tl.float32)
        if logit_sink is not None:
            sums += total[None, :]
        piece_size = tl.full([], _PIECE_TOKENS, tl.int32)
        cut = tl.where(item.pieces == 1, piece_size, -1)  # an item that is one piece has no cut
    lane = tl.arange(0, TILE_TOKENS)
    for tile_start in range(item.first_work, item.end_work, TILE_TOKENS):
        if FOLDS and tile_start == cut:
            folded, folded_top, folded_total = fold_piece(
                folded, folded_top, folded_total, acc, top, tl.max(sums, axis=0), 0
            )
            acc, sums = tl.zeros_like(acc), tl.zeros_like(sums)
            top = tl.full([TILE_ROWS], float("-inf"), dtype=tl.float32)
            cut, piece_size = next_piece(cut, piece_size)
        position = work_position(tile_start + lane, item.sink_end, item.start, CACHE.HAS_WINDOW)
        # Wider, so that the compiler moves blocks between threads, as addresses do, not this too.
        present = block.to(tl.int64) >= 0
        if visited_ptr is not None:
            column = table_column(position // BLOCK_SIZE, row, BLOCK_SIZE)
            tl.store(visited_ptr + column, 1, mask=present)
        token = position % BLOCK_SIZE
        if not CACHE.HAS_WINDOW and TILE_TOKENS % BLOCK_SIZE == 0:
            token = lane % BLOCK_SIZE  # the same in every tile
        address = page_offset(block, pages.block_stride) + token * pages.token_stride
        address = tl.multiple_of(address, ALIGNED_ELEMENTS)
        # NaN of a page that no query sees must not enter. V is loaded by columns for its product.
        k_mask, v_mask = present[:, None], present[None, :]
        if HEAD_DIM != TILE_DIM:
            k_mask, v_mask = k_mask & in_head[None, :], v_mask & in_head[:, None]

        if not IS_CODED:
            # q is loaded with K and V, not before: waiting for q first costs a trip to L2. The
            # offset, which is 0, keeps the compiler from moving the load out of the loop.
            offset = tl.minimum(tile_start, 0) * ALIGNED_ELEMENTS + column_of[:, None]
            q = tl.load(queries.row_ptr + offset, mask=query_mask, other=0.0)
        k_row_ptr = pages.k_ptr + (address[:, None] + column_of[None, :])
        k = tl.load(k_row_ptr, mask=k_mask, other=0)
        v_column_ptr = pages.v_ptr + (address[None, :] + column_of[:, None])
        v = tl.load(v_column_ptr, mask=v_mask, other=0)
        if SCALES_PER_BLOCK > 0:
            scale_address = page_offset(block, scales.block_stride)
            scale_address += scale_index(token, BLOCK_SIZE, SCALES_PER_BLOCK)
            k_scale = tl.load(scales.k_ptr + scale_address, mask=present, other=0.0)
            v_scale = tl.load(scales.v_ptr + scale_address, mask=present, other=0.0)
        block = _load_blocks(item, row, tile_start + TILE_TOKENS + lane, CACHE, "")
        if IS_CODED:
            keys = decode_parts(k, CODEC)
            scores = tl.dot(keys[0].to(q.dtype), q, input_precision=PRECISION)
            for part in tl.static_range(1, PARTS):
                scores = tl.dot(
                    keys[part].to(q.dtype), queries_of[part], scores, input_precision=PRECISION
                )
            if HAS_ZEROS:
                scores = tl.fma(-zero_of(k_scale)[:, None], q_sum[None, :], scores)
        else:
            scores = tl.dot(k, q, input_precision=PRECISION)
        if not SCALES_LATE:
            scores *= score_scale
        if SCALES_PER_BLOCK > 0:
            scores *= k_scale[:, None]
        if softmax.soft_cap is not None:
            scores = soft_capped(scores, softmax.soft_cap)
        visible = present[:, None]
        # A single query sees all keys of its item, unless hidden keys are visited.
        if HEADS.QUERY_LEN > 1 or CACHE.VISITS_MASKED:
            visible = visible & (position[:, None] <= queries.position[None, :])
            if CACHE.HAS_WINDOW:
                visible &= (
                    (item.window < 0)
                    | (position[:, None] > queries.position[None, :] - item.window)
                    | (position[:, None] < item.sink)
                )
        scores = tl.where(visible, scores, float("-inf"))

        highest = tl.max(scores, axis=0)
        if SCALES_LATE:
            highest *= score_scale
        new_top = tl.maximum(top, highest)
        # A row that has seen nothing yet keeps -inf, and -inf - -inf is NaN: subtract 0 there.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale = tl.exp2(top - shift)
        if SCALES_LATE:
            weights = tl.exp2(tl.fma(scores, score_scale, -shift[None, :]))
        else:
            weights = tl.exp2(scores - shift[None, :])
        if not FOLDS:
            total = total * rescale + tl.sum(weights, axis=0)
        if SCALES_PER_BLOCK > 0:
            new_unit = tl.maximum(v_unit, tl.max(v_scale, axis=0))
            weights *= (v_scale / new_unit)[:, None]
            rescale *= v_unit / new_unit
            v_unit = new_unit
        if FOLDS:
            ones = tl.full([_SUM_ROWS, TILE_TOKENS], 1.0, q.dtype)
            rounded, rest = halves(weights, q.dtype)
            sums = tl.dot(ones, rounded, sums * rescale[None, :], input_precision=PRECISION)
            if q.dtype != tl.float32:
                sums = tl.dot(ones, rest, sums)
        weights = weights.to(q.dtype)
        if IS_CODED:
            if HAS_ZEROS:
                of_zeros = weights.to(tl.float32) * zero_of(v_scale)[:, None]
                zeros = zeros * rescale + tl.sum(of_zeros, axis=0)
            values = decode_parts(v, CODEC)
            updated = ()
            for part in tl.static_range(PARTS):
                part_acc = tl.dot(
                    values[part].to(q.dtype), weights, accs[part] * rescale[None, :],
                    input_precision=PRECISION,
                )  # fmt: skip
                updated += (part_acc,)  # type: ignore[assignment]
            accs = updated
        else:
            acc *= rescale[None, :]
            acc = tl.dot(v, weights, acc, input_precision=PRECISION)
        top = new_top
    if FOLDS:
        acc, top, total = fold_piece(
            folded, folded_top, folded_total, acc, top, tl.max(sums, axis=0), 0
        )
    if IS_CODED:
        if HAS_ZEROS:
            scaled = ()
            for part in tl.static_range(PARTS):
                part_acc = accs[part] * part_factor(part, CODEC) - zeros[None, :]
                scaled += (part_acc,)  # type: ignore[assignment]
            first = tl.join(scaled[0], scaled[1])  # type: ignore[misc]
            second = tl.join(scaled[2], scaled[3])  # type: ignore[misc]
            # [word, the first code's dimension or the second's, row]
            both = tl.permute(tl.join(first, second), (0, 3, 2, 1))
        else:
            both = tl.join(accs[0], accs[1])  # type: ignore[misc]
            both = tl.permute(both, (0, 2, 1))  # [word, its dims, row]
        acc = tl.reshape(both, [TILE_DIM, TILE_ROWS]) * v_unit
    return acc, top, total


@triton.jit
def _rows_of(req, head, row, HEADS: tl.constexpr):
    """Return (query row, query head) of the rows of a KV head of one request, int64.

    Without a division where an item has one query: a GROUP that is no power of two would divide by
    multiplying, in registers that a program on each multiprocessor needs.
    """
    first_head = head * HEADS.GROUP
    if HEADS.QUERY_LEN == 1:
        return req + tl.zeros_like(row), (first_head + row).to(tl.int64)
    query = row // HEADS.GROUP
    q_head = (first_head + row % HEADS.GROUP).to(tl.int64)
    return req * HEADS.QUERY_LEN + query, q_head


@triton.jit
def _store_result(
    out, lse, states, slot, item, is_whole, row, acc, top, total,
    HEADS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Store rows of a segment: the output if ``is_whole``, else the partial result of a slot."""
    ROWS: tl.constexpr = HEADS.QUERY_LEN * HEADS.GROUP
    in_tile = row < ROWS
    dims = tl.arange(0, TILES.TILE_DIM)
    req = item.req.to(tl.int64)
    if is_whole:
        out_row, q_head = _rows_of(req, item.head, row, HEADS)
        mask = in_tile[:, None] & (dims < HEADS.HEAD_DIM)[None, :]
        store_out(out, out_row, q_head, dims, normalized(acc, total), mask)
        if lse.ptr is not None:
            target = lse.ptr + head_offset(lse, out_row, q_head)
            tl.store(target, natural_lse(top, total), mask=in_tile)
    elif states.ptr is not None:
        state = slot.to(tl.int64) * ROWS + row
        mask = in_tile[:, None] & (dims < HEADS.HEAD_DIM)[None, :]
        value = normalized(acc, total)  # nothing seen: zeros, and lse = -inf
        tl.store(states.ptr + state[:, None] * HEADS.HEAD_DIM + dims[None, :], value, mask=mask)
        tl.store(states.lse_ptr + state, base_2_lse(top, total), mask=in_tile)


@triton.jit
def _merged_states(states, first, step, count, row, HEADS: tl.constexpr, TILES: tl.constexpr):
    """Return (acc, top, total), the partial results of slots first + i * step merged in order."""
    ROWS: tl.constexpr = HEADS.QUERY_LEN * HEADS.GROUP
    dims = tl.arange(0, TILES.TILE_DIM)
    in_tile = row < ROWS
    mask = in_tile[:, None] & (dims < HEADS.HEAD_DIM)[None, :]
    states_ptr = states.ptr + first.to(tl.int64) * ROWS * HEADS.HEAD_DIM
    states_lse_ptr = states.lse_ptr + first.to(tl.int64) * ROWS
    top = tl.full([TILES.MERGE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILES.MERGE_ROWS], tl.float32)
    acc = tl.zeros([TILES.MERGE_ROWS, TILES.TILE_DIM], tl.float32)
    for begin in range(0, count, TILES.LOADED_STATES):
        parts = ()
        for offset in tl.static_range(TILES.LOADED_STATES):
            is_there = begin + offset < count  # all loads are issued before any result is used
            state = (begin + offset) * step * ROWS + row
            part_lse = tl.load(
                states_lse_ptr + state, mask=in_tile & is_there, other=float("-inf")
            )
            part = tl.load(
                states_ptr + state[:, None] * HEADS.HEAD_DIM + dims[None, :],
                mask=mask & is_there,
                other=0.0,
            )
            parts += ((part_lse, part),)  # type: ignore[assignment]
        if TILES.DETERMINISTIC:
            for offset in tl.static_range(TILES.LOADED_STATES):
                part_lse, part = parts[offset]
                acc, top, total = fold_state(acc, top, total, part, part_lse, 1)
        else:  # together: one after the other, each would wait for the maximum of those before
            new_top = top
            for offset in tl.static_range(TILES.LOADED_STATES):
                new_top = tl.maximum(new_top, parts[offset][0])
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf is NaN
            rescale = tl.exp2(top - shift)
            acc *= rescale[:, None]
            total *= rescale
            for offset in tl.static_range(TILES.LOADED_STATES):
                part_lse, part = parts[offset]
                weight = tl.exp2(part_lse - shift)
                acc += weight[:, None] * part
                total += weight
            top = new_top
    return acc, top, total


@triton.jit
def _merge_segment(out, lse, states, index, item, HEADS: tl.constexpr, TILES: tl.constexpr):
    """Merge the partial results of a segment of several pieces.

    In a round, group g is ``most`` pieces from ``g * most`` on. Its last program to finish merges
    them into the first one's slot and takes part as piece g in the next round, whose slots are
    ``step`` apart; the order does not depend on which program is last. A group's arrival count is
    that of its first slot plus the number of the round: a group that counts has more slots than
    rounds were before, so no two rounds share a count. Deterministic pieces are one group.
    """
    row = tl.arange(0, TILES.MERGE_ROWS)
    first_item = index - item.piece
    piece, pieces = item.piece, item.pieces
    if TILES.DETERMINISTIC:
        if pieces > 1:
            is_last = arrives_last(states.arrivals_ptr + first_item, pieces)
            if is_last:
                acc, top, total = _merged_states(states, first_item, 1, pieces, row, HEADS, TILES)
                _store_result(
                    out, lse, states, first_item, item, True, row, acc, top, total, HEADS, TILES
                )
    else:
        # Two rounds of 8 take less time than a round of 16 and one of 4.
        is_two = (pieces > _MOST_MERGED) & (pieces <= _MERGED_TWICE * _MERGED_TWICE)
        most = tl.where(is_two, _MERGED_TWICE, _MOST_MERGED)
        step = tl.full([], 1, tl.int32)
        number = tl.full([], 0, tl.int32)
        while pieces > 1:
            group = piece // most
            count = tl.minimum(pieces - group * most, most)
            first = first_item + group * most * step
            goes_on = count == 1  # a piece without others is merged as it is
            if count > 1:
                goes_on = arrives_last(states.arrivals_ptr + first + number, count)
                if goes_on:
                    acc, top, total = _merged_states(states, first, step, count, row, HEADS, TILES)
                    tl.debug_barrier()  # all threads have read the first slot
                    _store_result(
                        out, lse, states, first, item, pieces <= most, row, acc, top, total,
                        HEADS, TILES,
                    )  # fmt: skip
            piece = group
            pieces = tl.where(goes_on, tl.cdiv(pieces, most), 0)
            step *= most
            number += 1


@triton.jit
def _load_head(
    cache, head, PACKED: tl.constexpr, ALIGNED: tl.constexpr, CACHE_MODIFIER: tl.constexpr
):
    """Return the ``HeadPages`` of a head, in elements of PACKED codes."""
    base = tl.load(cache.base_ptr + head, cache_modifier=CACHE_MODIFIER)
    # Below 2^31, so that an address takes one 32 by 32 bit product (``KVLayout`` checks).
    stride = tl.load(cache.block_stride_ptr + head, cache_modifier=CACHE_MODIFIER).to(tl.int32)
    token_stride = cache.token_stride
    if PACKED > 1:
        base, stride, token_stride = base // PACKED, stride // PACKED, token_stride // PACKED
    base = tl.multiple_of(base, ALIGNED)
    return HeadPages(cache.k_ptr + base, cache.v_ptr + base, stride, token_stride)


@triton.jit
def _write_item(
    index, items, out, lse, q, cache, scales, table, softmax,
    HEADS: tl.constexpr, CACHE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Attend for one item; write its output rows, or its partial result if a merge follows.

    With EARLY it waits for the previous kernel, which must not write what is loaded before.
    """
    EARLY: tl.constexpr = TILES.EARLY
    CACHE_MODIFIER: tl.constexpr = ".cg" if EARLY else ""  # L1 may hold an older line
    item_ptr = items.ptr + index.to(tl.int64) * _ITEM_FIELDS
    is_item = index < items.count
    item = _load_item(item_ptr, is_item, CACHE_MODIFIER)
    row = tl.arange(0, TILES.TILE_ROWS)
    in_tile = row < HEADS.QUERY_LEN * HEADS.GROUP
    req = item.req.to(tl.int64)
    head = item.head
    query_position = row
    if HEADS.QUERY_LEN > 1 or CACHE.VISITS_MASKED:
        query = row // HEADS.GROUP if HEADS.QUERY_LEN > 1 else 0
        query_position = tl.where(in_tile, item.seq_len - HEADS.QUERY_LEN + query, -1)

    out_row, q_head = _rows_of(req, head, row, HEADS)
    q_row_ptr = q.ptr + head_offset(q, out_row, q_head)[None, :]
    queries = Queries(q_row_ptr, in_tile, query_position)
    PARTS: tl.constexpr = codes_in_word(CACHE.CODEC)
    pages = _load_head(cache, head, PARTS, ALIGNED_ELEMENTS, CACHE_MODIFIER)
    head_scales = None
    if CACHE.CODEC is not None:
        head_scales = _load_head(scales, head, 1, 1, CACHE_MODIFIER)
    visited_row_ptr = None
    if table.visited_ptr is not None:
        visited_row_ptr = table.visited_ptr + (req * HEADS.NUM_KV_HEADS + head) * table.row_width
    table_row = TableRow(
        table.ptr + req * table.stride_row,
        item.table_offset,
        item.sink if CACHE.HAS_WINDOW else None,
        item.ring_blocks if CACHE.HAS_RING else None,
    )
    first_work = item.first_work + tl.arange(0, TILES.TILE_TOKENS)
    first_block = _load_blocks(item, table_row, first_work, CACHE, CACHE_MODIFIER)
    wait_for_previous(EARLY)
    let_next_start(EARLY)
    if is_item:
        logit_sink = load_logit_sink(softmax.sinks_ptr, q_head, in_tile & (item.piece == 0))
        acc, top, total = _attend_item(
            item, queries, pages, head_scales, table_row, visited_row_ptr, first_block,
            softmax, logit_sink, HEADS, CACHE, TILES,
        )  # fmt: skip
        _store_result(
            out, lse, items.states, index, item, item.pieces == 1, row, tl.trans(acc), top, total,
            HEADS, TILES,
        )  # fmt: skip
        if items.states.ptr is not None:
            _merge_segment(out, lse, items.states, index, item, HEADS, TILES)


@triton.jit
def _paged_decode_attention_kernel(
    out_ptr, stride_out_row, stride_out_head,  # [num_reqs * QUERY_LEN, q_heads, HEAD_DIM]
    lse_ptr, stride_lse_row, stride_lse_head,  # [num_reqs * QUERY_LEN, q_heads] fp32, or None
    states_ptr,  # [max_items, QUERY_LEN * GROUP, HEAD_DIM] fp32, or None: no segment is split
    states_lse_ptr,  # [max_items, QUERY_LEN * GROUP] fp32, or None
    arrivals_ptr,  # [max_items] int32, zeros, or None
    visited_ptr,  # [num_reqs, NUM_KV_HEADS, row_width] uint8, contiguous, or None
    items_ptr,  # [max_items, ITEM_FIELDS] int32, an Item each
    num_items_ptr,  # [1] int32
    q_ptr, stride_q_row, stride_q_head,  # [num_reqs * QUERY_LEN, q_heads, HEAD_DIM]
    k_cache_ptr, v_cache_ptr,  # one layer's keys and values, flat; codes in int16
    k_scale_ptr, v_scale_ptr,  # float32, flat, or None
    scale_base_ptr, scale_block_stride_ptr,  # [NUM_KV_HEADS] int64, in elements, or None
    block_table_ptr, stride_table_row, row_width,  # [num_reqs, row_width] int32
    head_base_ptr, block_stride_ptr,  # [NUM_KV_HEADS] int64, in elements of the cache
    token_stride,  # in elements of the cache
    softmax_scale,
    soft_cap,  # float32, or None
    sinks_ptr,  # [q_heads], or None
    NUM_KV_HEADS: tl.constexpr, QUERY_LEN: tl.constexpr,  # see Heads
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr, VISITS_MASKED: tl.constexpr,  # see Cache
    HAS_RING: tl.constexpr,
    IN_ROUNDS: tl.constexpr,  # whether there may be more items than programs
    TILE_ROWS: tl.constexpr, TILE_TOKENS: tl.constexpr, TILE_DIM: tl.constexpr,  # see Tiles
    PRECISION: tl.constexpr,
    CODEC: tl.constexpr, SCALES_PER_BLOCK: tl.constexpr,  # see Cache
    MERGE_ROWS: tl.constexpr, LOADED_STATES: tl.constexpr, EARLY: tl.constexpr,  # see Tiles
    DETERMINISTIC: tl.constexpr,
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (num_programs,): one item each, IN_ROUNDS every num_programs-th. Unit last strides."""
    if not EARLY:
        wait_for_previous(OVERLAP)
        let_next_start(OVERLAP)
    num_items = tl.load(num_items_ptr, cache_modifier=".cg" if EARLY else "")
    HEADS: tl.constexpr = Heads(NUM_KV_HEADS, QUERY_LEN, GROUP, HEAD_DIM)
    CACHE: tl.constexpr = Cache(
        BLOCK_SIZE, HAS_WINDOW, VISITS_MASKED, HAS_RING, CODEC, SCALES_PER_BLOCK
    )
    TILES: tl.constexpr = Tiles(
        TILE_ROWS, TILE_TOKENS, TILE_DIM, PRECISION, MERGE_ROWS, LOADED_STATES, EARLY,
        DETERMINISTIC,
    )  # fmt: skip
    items = Items(items_ptr, num_items, States(states_ptr, states_lse_ptr, arrivals_ptr))
    out = HeadRows(out_ptr, stride_out_row, stride_out_head)
    lse = HeadRows(lse_ptr, stride_lse_row, stride_lse_head)
    q = HeadRows(q_ptr, stride_q_row, stride_q_head)
    cache = PagedKV(k_cache_ptr, v_cache_ptr, head_base_ptr, block_stride_ptr, token_stride)
    scales = PagedKV(k_scale_ptr, v_scale_ptr, scale_base_ptr, scale_block_stride_ptr, 1)
    table = BlockTable(block_table_ptr, stride_table_row, row_width, visited_ptr)
    softmax = Softmax(softmax_scale, soft_cap, sinks_ptr)
    # Two calls, because a loop that runs once costs registers, and so a program on each SM.
    if IN_ROUNDS:
        for index in range(tl.program_id(0), num_items, tl.num_programs(0)):
            _write_item(
                index, items, out, lse, q, cache, scales, table, softmax, HEADS, CACHE, TILES
            )
    else:
        index = tl.program_id(0)
        _write_item(index, items, out, lse, q, cache, scales, table, softmax, HEADS, CACHE, TILES)


def merge_tile(rows: int, tile_dim: int, deterministic: bool) -> dict[str, int]:
    """Return the padded rows of a merge, and how many partial results registers hold at a time."""
    merge_rows = triton.next_power_of_2(rows)
    # More would take a program off a multiprocessor: 186 registers with 256 dimensions, not 168.
    most = 4 if deterministic or tile_dim > 128 else 8
    states = min(most, max(1, 8192 // (merge_rows * tile_dim)))
    return {"MERGE_ROWS": merge_rows, "LOADED_STATES": states}


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: KVLayout,
    *,
    softmax_scale: float,
    logits_soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    query_len: int = 1,
    num_kv_splits: int | None = None,
    deterministic: bool = False,
    plan: DecodePlan | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    scales: KVScales | None = None,
    visited: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from the last ``query_len`` tokens of each request to its paged cache.

    Query ``j`` of request ``r`` is row ``r * query_len + j`` of ``q`` and sits at position
    ``seq_lens[r] - query_len + j``; ``kv_layout`` says which keys the query sees. One launch
    serves full and streaming heads, whether heads share a table or have their own tables.

    Args:
        q: ``[num_reqs * query_len, q_heads, head_dim]`` fp16, bf16 or fp32; any row and head
            stride, unit last stride. ``q_heads`` is a multiple of the layout's KV heads.
        k_cache: one layer's key buffer, flat or of the layout's shape, contiguous, dtype of ``q``,
            or with ``scales`` their codes' dtype or its uint8 view; addressed flat by ``layout``
            (two 4-bit codes are one byte, and a last size is half of ``head_dim``). Pages
            that no query may see are not read, and may hold NaN.
        v_cache: one layer's value buffer, likewise.
        block_table: ``[num_reqs, row_width]`` int32 in batch-row order, or contiguous per-head
            ``[num_reqs * kv_heads, max_blocks]``; -1 = no page, its keys are skipped.
        seq_lens: ``[num_reqs]`` int32, tokens including the queries; 0 = padding row.
        layout: where the pages lie and what each head may see.
        softmax_scale: factor of the scores, positive, usually ``head_dim ** -0.5``.
        logits_soft_cap: bound of the scaled scores: ``s`` becomes ``cap * tanh(s / cap)``, before
            keys are hidden; 0 = none.
        sinks: ``[q_heads]`` fp32, fp16 or bf16, contiguous: the logit sink of each query head, one
            more score in the softmax's sum, neither scaled nor capped, which has no value. -inf =
            none for this head; None = no head has one.
        query_len: queries per request, 1 to 8.
        num_kv_splits: pieces that the longest segment is cut into, 1 to 256, each a program's
            work; None = pieces that give every program of the device an equal share. Changes the
            result by rounding only.
        deterministic: give each query a result that is bitwise the same in any batch, with any
            width of the table, and with any later tokens beside it (``query_len``): the fold of
            pieces that begin at fixed keys (``plan.PIECE_TOKENS``). With a 16 or 32-bit cache and
            without windows, ``paged_prefill_attention`` computes the same bits.
        plan: the plan that ``plan_decode_attention`` wrote for these ``seq_lens``, which saves a
            launch in every layer; None = made here. It decides the cuts: ``num_kv_splits`` must
            then be None, and ``deterministic=True`` needs a deterministic plan. For its
            ``read_early`` see ``DecodePlan.allocate``.
        out: like ``q``; *written*. None = a new tensor.
        lse: ``[num_reqs * query_len, q_heads]`` fp32, *written* if given: the natural log-sum-exp
            of the scaled, capped scores and the head's logit sink.
        scales: of a cache of codes, else None. Scales of pages that are not read may be NaN too.
        visited: ``[num_reqs, kv_heads, row_width]`` uint8, contiguous, for debugging: *written* 1
            where a head reads the page in a column, untouched elsewhere.

    Returns:
        ``out``. A row that sees no key is zero, its ``lse`` -inf or the head's logit sink.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: products accumulate in fp32 (fp32 inputs: no TF32), the softmax is fp32, its weights
        are rounded to the cache's dtype before the product with V. Tier B. Codes are multiplied in
        fp16 (fp32 if ``q`` is), scales and zeros go into scores and sums in fp32. A soft cap adds
        an error of at most 2**-20 of the cap to a score.
    Stream: one launch on the current stream; without ``plan`` one more, and the plan's buffers are
        allocated. Grids follow from shapes alone: CUDA-graph safe.
    """
    table = check_paged_attention(
        q, k_cache, v_cache, block_table, seq_lens, layout, FLOAT_DTYPES,
        softmax_scale=softmax_scale, logits_soft_cap=logits_soft_cap, sinks=sinks,
        out=out, lse=lse, scales=scales, visited=visited,
    )  # fmt: skip
    num_reqs = seq_lens.shape[0]
    check_query_len(q, query_len, num_reqs)
    check_head_dim(layout)
    check_num_kv_splits(num_kv_splits)
    check_plan_options(plan, num_kv_splits, deterministic)
    check_launchable("q", q)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if num_reqs == 0:
        return out
    if plan is None:
        plan = DecodePlan.allocate(
            max_reqs=num_reqs, max_keys=block_table.shape[1] * layout.block_size, layout=layout,
            num_q_heads=q.shape[1], dtype=q.dtype, query_len=query_len,
            page_format=format_of(q.dtype, scales), num_kv_splits=num_kv_splits,
            deterministic=deterministic,
        )  # fmt: skip
        plan_decode_attention(seq_lens, layout, plan)
    else:
        check_plan(plan, seq_lens, layout, num_q_heads=q.shape[1], query_len=query_len)
    rows = plan.query_len * (q.shape[1] // layout.num_kv_heads)
    tile_dim = triton.next_power_of_2(layout.head_dim)
    if scales is not None:
        tile_dim = max(tile_dim, MIN_PART_DIM * 2 * scales.page_format.codes_per_element)
    config = plan.config
    # Each segment has an item. Programs in rounds need more registers, and so run more slowly;
    # yet a program for every item that a plan may have, and mostly has not, takes longer.
    num_programs = min(plan.max_items, max(MAX_PROGRAMS, 2 * num_reqs * layout.num_kv_heads))
    in_rounds = plan.max_items > num_programs
    overlap = overlap_options(q.device)
    early = plan.read_early and overlap["OVERLAP"] and not in_rounds
    states = (plan.states, plan.states_lse, plan.arrivals) if plan.may_split else (None,) * 3
    launch_kernel(
        _paged_decode_attention_kernel, (num_programs,),
        *with_strides(out), *with_strides(lse), *states, visited, plan.items, plan.num_items,
        *with_strides(q), *cache_arguments(k_cache, v_cache, scales, codes=torch.int16),
        table, table.stride(0), table.shape[1],
        layout.head_base, layout.block_stride, layout.token_stride,
        softmax_scale, logits_soft_cap or None, sinks,
        NUM_KV_HEADS=layout.num_kv_heads, QUERY_LEN=plan.query_len, IN_ROUNDS=in_rounds,
        TILE_ROWS=padded_rows(rows), TILE_TOKENS=config.tile_tokens, TILE_DIM=tile_dim,
        EARLY=early, DETERMINISTIC=plan.deterministic,
        **merge_tile(rows, tile_dim, plan.deterministic),
        **attention_constexprs(q, layout, scales), **config.launch_options(), **overlap,
    )  # fmt: skip
    return out
