"""Paged prefill attention: ragged chunks of queries attend to their requests' caches.

    out[i, h] = sum_k softmax_k(softmax_scale * q[i, h] . K[k, h // group]) V[k, h // group]

over the keys ``k`` that ``kv_layout`` lets the query see: causal (or a range per query), window
and sink per KV head. A program owns a tile of TILE_QUERIES queries times the query heads of one KV
head. The tiles of request ``r`` begin at::

    first_tile(r) = query_start_loc[r] // TILE_QUERIES + r

which ascends strictly and leaves every request enough tiles, as floor(a + b) >= floor(a) +
floor(b). So the grid follows from shapes alone, and a tile finds its request by counting.

A program goes through its keys in steps, ascending::

    sinks' tiles | gap, not looked at | window's left edge | seen by every row | right edge

Keys that every row sees are not masked: their step is two products, a softmax, and the loads of
the next step, whose blocks are known by then.

A short chunk after a long context has few tiles with many keys each. With ``PrefillSplits``
several programs divide a tile's keys, and the last program to finish merges the partial results.

Source: FlashAttention (arXiv:2205.14135) for the online softmax; vLLM's Triton kernels for the
tile map of ragged batches; Flash-Decoding, as ``decode.attention``, for the split over keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mrv1.device import device_info
from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.checks import FLOAT_DTYPES, check_launchable, check_tensor
from mrv1.kernels._base.launches import launch_kernel
from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.attention.contracts import (
    check_attn_mask_offsets,
    check_paged_attention,
    check_query_start_loc,
)
from mrv1.kernels.attention.decode.plan import PIECE_TOKENS
from mrv1.kernels.attention.online_softmax import (
    LOG2_E,
    SMALLEST_UNIT,
    Cache,
    HeadRows,
    Softmax,
    States,
    add_states,
    arrives_last,
    attention_constexprs,
    first_state,
    fold_piece,
    halves,
    head_offset,
    load_logit_sink,
    natural_lse,
    next_piece,
    normalized,
    soft_capped,
    store_out,
)
from mrv1.kernels.attention.prefill.call import PrefillCall
from mrv1.kernels.attention.prefill.choice import (
    ANY_QUERY_LEN,
    PrefillLayer,
    PrefillSplits,
    check_splits,
    choose_config,
    kernel_for,
)
from mrv1.kernels.cache.addresses import (
    ALIGNED_CODES,
    ALIGNED_ELEMENTS,
    PagedKV,
    TableRow,
    load_page_rows,
    table_column,
)
from mrv1.kernels.cache.codes import codes_in_byte, product_query, scale_index
from mrv1.kernels.cache.contracts import check_head_dim
from mrv1.kernels.cache.kv_layout import KVLayout
from mrv1.kernels.cache.kv_scales import KVScales, format_of
from mrv1.kernels.cache.scale_arguments import cache_arguments, role_arguments

SCAN_REQS = tl.constexpr(128)  # requests whose first tiles are compared at once
NO_WINDOW = tl.constexpr(1 << 30)  # a window larger than every context
SCAN_BLOCKS = tl.constexpr(1024)  # columns of a table row whose blocks are checked at once
MIN_SPLIT_STEPS = 8  # fewest steps of a program where several programs divide a tile's keys

_PIECE_TOKENS = tl.constexpr(PIECE_TOKENS)
_SUM_COLUMNS = tl.constexpr(16)
"""Columns of ones that weights are multiplied with to add them up: all columns are the same."""
MERGED_ROWS = tl.constexpr(16)
"""Rows of a tile that a program merges at a time, so that they fit its registers."""


class Tiles(NamedTuple):
    """Constants of the heads, and of a program and its tiles."""

    GROUP: int  # query heads per KV head
    HEAD_DIM: int
    TILE_QUERIES: int  # TILE_ROWS // GROUP
    TILE_ROWS: int
    TILE_TOKENS: int
    TILE_DIM: int
    PRECISION: str
    MIN_STEPS: int  # fewest of a program that shares a tile
    FOLDS: bool  # whether the result is the fold of fixed pieces, see fold_state


class Batch(NamedTuple):
    """The ragged batch of a launch."""

    query_start_loc_ptr: tl.tensor  # [num_reqs + 1] int32
    num_tokens: tl.tensor
    num_reqs: tl.tensor
    num_kv_heads: tl.tensor


class QueryTile(NamedTuple):
    """A tile of a request's queries."""

    query_start: tl.tensor  # int32, the request's first token
    query_len: tl.tensor  # int32, its queries
    first_query: tl.tensor  # int32, of the tile
    end_query: tl.tensor


class TileRow(NamedTuple):
    """The query, token and query head of each row of a tile."""

    query: tl.tensor  # int32
    in_tile: tl.tensor  # whether the tile has the query
    token: tl.tensor  # int64
    q_head: tl.tensor  # int64


class VisibleKeys(NamedTuple):
    """The positions that some row of a tile may see, and the positions that each row may see."""

    start: tl.tensor  # int32
    end: tl.tensor  # int32
    sink_end: tl.tensor  # int32
    query_position: tl.tensor  # [TILE_ROWS] int32
    first_key: tl.tensor | None  # [TILE_ROWS] int32; None = causal
    end_key: tl.tensor | None  # [TILE_ROWS] int32
    window: tl.tensor | None  # int32; None = no head has a window
    sink: tl.tensor | None  # int32


class Steps(NamedTuple):
    """The steps of a program: a tile of keys each, those of the sink first, then from a gap on."""

    first: tl.tensor  # int32, as the others
    end: tl.tensor
    sink_tiles: tl.tensor
    gap: tl.tensor  # tiles between the last of the sink and the next step
    inner_start: tl.tensor  # every row sees all keys of the tiles [inner_start, inner_end)
    inner_end: tl.tensor


@triton.jit
def _find_request(batch, tile, TILE_QUERIES: tl.constexpr):
    """Return the last request whose first tile is at or before ``tile``."""
    req = -1
    for first in range(0, batch.num_reqs, SCAN_REQS):
        other = first + tl.arange(0, SCAN_REQS)
        in_batch = other < batch.num_reqs
        query_start = tl.load(batch.query_start_loc_ptr + other, mask=in_batch, other=0)
        has_begun = in_batch & (query_start // TILE_QUERIES + other <= tile)
        req += tl.sum(has_begun.to(tl.int32), axis=0)
    return req


@triton.jit
def _count_tiles(batch, TILE_QUERIES: tl.constexpr):
    """Return how many tiles come before the padding after the last token, at least one."""
    end = tl.load(batch.query_start_loc_ptr + batch.num_reqs)
    last_req = -1
    last_start = 0
    for first in range(0, batch.num_reqs, SCAN_REQS):
        other = first + tl.arange(0, SCAN_REQS)
        in_batch = other < batch.num_reqs
        query_start = tl.load(batch.query_start_loc_ptr + other, mask=in_batch, other=end)
        precedes_tokens = query_start < end
        last_req += tl.sum(precedes_tokens.to(tl.int32), axis=0)
        starts = tl.where(precedes_tokens, query_start, 0)
        last_start = tl.maximum(last_start, tl.max(starts, axis=0))
    first_tile = last_start // TILE_QUERIES + last_req
    return tl.maximum(first_tile + tl.cdiv(end - last_start, TILE_QUERIES), 1)


@triton.jit
def _load_tile(batch, req, tile, TILE_QUERIES: tl.constexpr):
    """Return the ``QueryTile`` with index ``tile`` in the batch, a tile of request ``req``."""
    query_start = tl.load(batch.query_start_loc_ptr + req)
    query_len = tl.load(batch.query_start_loc_ptr + req + 1) - query_start
    first_query = (tile - (query_start // TILE_QUERIES + req)) * TILE_QUERIES
    end_query = tl.minimum(first_query + TILE_QUERIES, query_len)
    return QueryTile(query_start, query_len, first_query, end_query)


@triton.jit
def _tile_row(tile, head, row, GROUP: tl.constexpr):
    """Return the ``TileRow`` of the rows ``row`` of a tile."""
    query = tile.first_query + row // GROUP
    token = (tile.query_start + query).to(tl.int64)
    return TileRow(query, query < tile.end_query, token, (head * GROUP + row % GROUP).to(tl.int64))


@triton.jit
def _find_keys(
    tile, row, seq_len, first_key, end_key, window, sink, CACHE: tl.constexpr, TILES: tl.constexpr
):
    """Return (start, end, sink_end, query_position) of a tile, and the ``Steps`` through its keys.

    Some row may see a key in [start, end); every row sees all of [inner_start, inner_end). No
    value is None, which Triton 3.6 cannot return in a tuple: the caller makes ``VisibleKeys``.
    """
    TILE_TOKENS: tl.constexpr = TILES.TILE_TOKENS
    context_len = seq_len - tile.query_len
    first_position = context_len + tile.first_query
    end_position = tl.maximum(context_len + tile.end_query, 0)  # 0 in a padding row: no step
    query_position = tl.where(row.in_tile, context_len + row.query, -1)
    start = 0
    end = end_position
    inner_start = 0
    inner_end = first_position + 1
    if first_key is not None:
        end = tl.maximum(tl.max(end_key, axis=0), 0)
        start = tl.min(tl.where(first_key < end_key, first_key, end), axis=0)
        inner_start = tl.max(first_key, axis=0)
        inner_end = tl.min(tl.where(row.in_tile, end_key, end), axis=0)
    sink_end = 0
    if window is not None:
        if not CACHE.VISITS_MASKED:
            sink_end = tl.minimum(sink, end)
            start = tl.maximum(start, first_position + 1 - window)
            start = tl.minimum(tl.maximum(start, sink_end), end)
        inner_start = tl.maximum(inner_start, end_position - window)
    sink_tiles = tl.cdiv(sink_end, TILE_TOKENS)
    gap = tl.maximum(start // TILE_TOKENS, sink_tiles) - sink_tiles
    inner_start = tl.cdiv(tl.maximum(inner_start, 0), TILE_TOKENS)
    inner_end = tl.maximum(inner_end, 0) // TILE_TOKENS
    end_step = tl.cdiv(end, TILE_TOKENS) - gap
    steps = Steps(0, end_step, sink_tiles, gap, inner_start, inner_end)
    return start, end, sink_end, query_position, steps


@triton.jit
def _divide_steps(steps, split, num_splits, MIN_STEPS: tl.constexpr):
    """Return the ``Steps`` of one of the programs that share a tile, and their number."""
    share = tl.maximum(tl.cdiv(steps.end, num_splits), MIN_STEPS)
    splits = tl.maximum(tl.cdiv(steps.end, share), 1)
    first = split * share
    end = tl.minimum(first + share, steps.end)
    return Steps(
        first, end, steps.sink_tiles, steps.gap, steps.inner_start, steps.inner_end
    ), splits


@triton.jit
def _tile_of_step(step, steps):
    """Return which tile of keys a step takes."""
    return tl.where(step < steps.sink_tiles, step, step + steps.gap)


@triton.jit
def _visible(position, keys):
    """Return which keys each row may see, with or without a page."""
    distance = keys.query_position[:, None] - position[None, :]
    if keys.first_key is not None:
        visible = position[None, :] >= keys.first_key[:, None]
        visible &= position[None, :] < keys.end_key[:, None]
    else:
        visible = distance >= 0
    if keys.window is not None:
        visible &= (distance < keys.window) | (position[None, :] < keys.sink)
    return visible


@triton.jit
def _holds_every_page(row, first_block, end_block, BLOCK_SIZE: tl.constexpr):
    """Return whether every logical block in [first_block, end_block) has a page."""
    lowest = tl.zeros([SCAN_BLOCKS], dtype=tl.int32)
    for first in range(first_block, end_block, SCAN_BLOCKS):
        logical = first + tl.arange(0, SCAN_BLOCKS)
        column = table_column(logical, row, BLOCK_SIZE)
        block = tl.load(row.ptr + column, mask=logical < end_block, other=0)
        lowest = tl.minimum(lowest, block)
    return tl.min(lowest, axis=0) >= 0


@triton.jit
def _load_blocks(
    row, visited_row_ptr, keys, tile, BLOCK_SIZE: tl.constexpr, TILE_TOKENS: tl.constexpr
):
    """Return the block of each key of ``tile``, -1 where no row sees the key or it has no page."""
    lane = tl.arange(0, TILE_TOKENS)
    position = tile * TILE_TOKENS + lane
    logical = tile * TILE_TOKENS // BLOCK_SIZE + lane // BLOCK_SIZE
    column = table_column(logical, row, BLOCK_SIZE)
    seen = position < keys.end
    if keys.first_key is not None:
        seen &= tl.max(_visible(position, keys).to(tl.int32), axis=0) > 0
    elif keys.window is not None:
        seen &= (position >= keys.start) | (position < keys.sink_end)
    block = tl.load(row.ptr + column, mask=seen, other=-1)
    if visited_row_ptr is not None:
        tl.store(visited_row_ptr + column, 1, mask=block >= 0)
    return block


@triton.jit
def _attend_tile(
    q, keys, steps, row, head, visited_row_ptr, cache, scales, softmax, logit_sink,
    SHARED: tl.constexpr, CACHE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Return the (acc, top, total) of the online softmax over the keys of a program's steps.

    As decode attention's ``_attend_item``, with FOLDS bit for bit: ``acc`` is [TILE_ROWS,
    TILE_DIM]. A step takes TILE_TOKENS keys from a multiple of TILE_TOKENS on.
    """
    CODEC: tl.constexpr = CACHE.CODEC
    BLOCK_SIZE: tl.constexpr = CACHE.BLOCK_SIZE
    SCALES_PER_BLOCK: tl.constexpr = CACHE.SCALES_PER_BLOCK
    FOLDS: tl.constexpr = TILES.FOLDS
    PRECISION: tl.constexpr = TILES.PRECISION
    TILE_ROWS: tl.constexpr = TILES.TILE_ROWS
    TILE_TOKENS: tl.constexpr = TILES.TILE_TOKENS
    read = keys
    if CACHE.VISITS_MASKED:
        read = VisibleKeys(
            keys.start, keys.end, keys.sink_end, keys.query_position, keys.first_key, keys.end_key,
            None, None,
        )  # fmt: skip
    inner_end = steps.inner_end
    first_inner = steps.inner_start
    end_inner = inner_end
    if SHARED:  # only for the pages: in the loop, these bounds would take registers
        first_inner = tl.maximum(first_inner, _tile_of_step(steps.first, steps))
        end = steps.end
        end_inner = tl.minimum(end_inner, tl.where(end > steps.sink_tiles, end + steps.gap, end))
    first_block = first_inner * TILE_TOKENS // BLOCK_SIZE
    end_block = tl.cdiv(end_inner * TILE_TOKENS, BLOCK_SIZE)
    if not _holds_every_page(row, first_block, end_block, BLOCK_SIZE):
        inner_end = 0

    ALIGNED: tl.constexpr = ALIGNED_ELEMENTS if CODEC is None else ALIGNED_CODES
    head_base = tl.multiple_of(tl.load(cache.base_ptr + head), ALIGNED)
    block_stride = tl.load(cache.block_stride_ptr + head)
    score_scale = tl.full([TILE_ROWS], softmax.scale * LOG2_E, tl.float32)
    if CODEC is not None:
        scale_base = tl.load(scales.base_ptr + head)
        scale_block_stride = tl.load(scales.block_stride_ptr + head)
        q, q_unit = product_query(q)
        score_scale *= q_unit
        v_unit = tl.full([], SMALLEST_UNIT, tl.float32)
        if SCALES_PER_BLOCK == 0:
            score_scale *= tl.load(scales.k_ptr + scale_base)
            v_unit = tl.load(scales.v_ptr + scale_base)
        score_scale = tl.maximum(score_scale, SMALLEST_UNIT)  # -inf * 0 is NaN
    if softmax.soft_cap is not None:
        capped_scale = score_scale * (2.0 / softmax.soft_cap)
        score_scale = tl.full([TILE_ROWS], 1.0, tl.float32)  # capped scores are in base 2

    PACKED: tl.constexpr = codes_in_byte(CODEC)
    dims = tl.arange(0, TILES.TILE_DIM // PACKED)
    in_head = dims < TILES.HEAD_DIM // PACKED
    acc = tl.zeros([TILE_ROWS, TILES.TILE_DIM], dtype=tl.float32)
    top, total = first_state(logit_sink, TILE_ROWS)
    if FOLDS:
        folded = acc
        folded_top, folded_total = first_state(None, TILE_ROWS)
        sums = tl.zeros([TILE_ROWS, _SUM_COLUMNS], dtype=tl.float32)
        if logit_sink is not None:
            sums += total[:, None]
        piece_size = tl.full([], _PIECE_TOKENS, tl.int32)
        cut = piece_size
    lane = tl.arange(0, TILE_TOKENS)
    # Blocks are looked up a step ahead, so that no load of pages waits for a load of the table.
    next_tile = _tile_of_step(steps.first, steps)
    next_block = _load_blocks(row, visited_row_ptr, read, next_tile, BLOCK_SIZE, TILE_TOKENS)
    for step in range(steps.first, steps.end):
        if FOLDS and step * TILE_TOKENS == cut:
            folded, folded_top, folded_total = fold_piece(
                folded, folded_top, folded_total, acc, top, tl.max(sums, axis=1), 1
            )
            acc, sums = tl.zeros_like(acc), tl.zeros_like(sums)
            top = tl.full([TILE_ROWS], float("-inf"), dtype=tl.float32)
            cut, piece_size = next_piece(cut, piece_size)
        tile = _tile_of_step(step, steps)
        block = next_block.to(tl.int64)
        next_tile = _tile_of_step(step + 1, steps)
        next_block = _load_blocks(row, visited_row_ptr, read, next_tile, BLOCK_SIZE, TILE_TOKENS)
        token_of_page = (tile * TILE_TOKENS % BLOCK_SIZE + lane % BLOCK_SIZE).to(tl.int64)
        address = head_base + token_of_page * cache.token_stride + block * block_stride
        if PACKED > 1:
            address = address // PACKED
        offsets = tl.multiple_of(address, ALIGNED)[:, None] + dims[None, :]
        present = block >= 0
        loaded = present[:, None] & in_head[None, :]  # NaN of an unseen page must not enter

        k_scale = None
        if SCALES_PER_BLOCK > 0:
            scale_address = scale_base + block * scale_block_stride
            scale_address += scale_index(token_of_page, BLOCK_SIZE, SCALES_PER_BLOCK)
            k_scale = tl.load(scales.k_ptr + scale_address, mask=present, other=0.0)
        k = load_page_rows(cache.k_ptr + offsets, loaded, k_scale, q.dtype, CODEC)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if k_scale is not None:
            scores *= k_scale[None, :]
        if softmax.soft_cap is not None:
            scores = soft_capped(scores * capped_scale[:, None], softmax.soft_cap)
        at_edge = (tile < steps.inner_start) | (tile >= inner_end)
        if q.dtype == tl.float32:  # a branch makes fp32 products, outside tensor cores, spill
            at_edge = True
        if at_edge:
            visible = _visible(tile * TILE_TOKENS + lane, keys)
            # Looked up again: the scores have another register layout than the loads.
            again = _load_blocks(row, None, keys, tile, BLOCK_SIZE, TILE_TOKENS)
            scores = tl.where((again >= 0)[None, :] & visible, scores, float("-inf"))

        # The maximum is kept scaled: a product in the exponent of the rescale would be fused with
        # the subtraction, which would then leave the product's rounding error, not zero.
        new_top = tl.maximum(top, tl.max(scores, axis=1) * score_scale)
        # A row that has seen nothing yet keeps -inf, and -inf - -inf is NaN: subtract 0 there.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale = tl.exp2(top - shift)
        if FOLDS:
            weights = tl.exp2(tl.fma(scores, score_scale[:, None], -shift[:, None]))
            ones = tl.full([TILE_TOKENS, _SUM_COLUMNS], 1.0, q.dtype)
            rounded, rest = halves(weights, q.dtype)
            sums = tl.dot(rounded, ones, sums * rescale[:, None], input_precision=PRECISION)
            if q.dtype != tl.float32:
                sums = tl.dot(rest, ones, sums)
        else:
            weights = tl.exp2(scores * score_scale[:, None] - shift[:, None])
            total = total * rescale + tl.sum(weights, axis=1)
        v_scale = None
        if SCALES_PER_BLOCK > 0:
            v_scale = tl.load(scales.v_ptr + scale_address, mask=present, other=0.0)
            new_unit = tl.maximum(v_unit, tl.max(v_scale, axis=0))
            weights *= (v_scale / new_unit)[None, :]
            rescale *= v_unit / new_unit
            v_unit = new_unit
        v = load_page_rows(cache.v_ptr + offsets, loaded, v_scale, q.dtype, CODEC)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top
    if FOLDS:
        acc, top, total = fold_piece(
            folded, folded_top, folded_total, acc, top, tl.max(sums, axis=1), 1
        )
    if CODEC is not None:
        acc *= v_unit
    return acc, top, total


@triton.jit
def _store_tile(
    out, lse, states, batch, req, tile, head, split, splits, acc, top, total, TILES: tl.constexpr
):
    """Write a tile's rows, or one of ``splits`` partial results, which the last program merges."""
    # Computed again: kept through the loop, the rows' addresses would take registers it needs.
    queries = _load_tile(batch, req, tile, TILES.TILE_QUERIES)
    row = _tile_row(queries, head, tl.arange(0, TILES.TILE_ROWS), TILES.GROUP)
    dims = tl.arange(0, TILES.TILE_DIM)
    mask = row.in_tile[:, None] & (dims < TILES.HEAD_DIM)[None, :]
    value = normalized(acc, total)
    if splits == 1:
        store_out(out, row.token, row.q_head, dims, value, mask)
        if lse.ptr is not None:
            lse_offset = head_offset(lse, row.token, row.q_head)
            row_lse = natural_lse(top, total)
            tl.store(lse.ptr + lse_offset, row_lse, mask=row.in_tile)
    elif states.ptr is not None:
        num_q_heads = batch.num_kv_heads * TILES.GROUP
        state = (split * batch.num_tokens + row.token) * num_q_heads + row.q_head
        tl.store(states.ptr + state[:, None] * TILES.HEAD_DIM + dims[None, :], value, mask=mask)
        row_lse = natural_lse(top, total)
        tl.store(states.lse_ptr + state, row_lse, mask=row.in_tile)
        if arrives_last(states.arrivals_ptr + tile * batch.num_kv_heads + head, splits):
            _merge_tile(out, lse, states, batch, splits, queries, head, TILES)


@triton.jit
def _merge_tile(out, lse, states, batch, splits, tile, head, TILES: tl.constexpr):
    """Merge a tile's partial results by their log-sum-exp, in order, and write its rows."""
    num_q_heads = batch.num_kv_heads * TILES.GROUP
    dims = tl.arange(0, TILES.TILE_DIM)
    for first_row in range(0, TILES.TILE_ROWS, MERGED_ROWS):
        row = _tile_row(tile, head, first_row + tl.arange(0, MERGED_ROWS), TILES.GROUP)
        mask = row.in_tile[:, None] & (dims < TILES.HEAD_DIM)[None, :]
        top = tl.full([MERGED_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([MERGED_ROWS], tl.float32)
        acc = tl.zeros([MERGED_ROWS, TILES.TILE_DIM], tl.float32)
        for split in range(splits):
            state = (split * batch.num_tokens + row.token) * num_q_heads + row.q_head
            part_lse = tl.load(states.lse_ptr + state, mask=row.in_tile, other=float("-inf"))
            part_lse *= LOG2_E
            part_ptr = states.ptr + state[:, None] * TILES.HEAD_DIM + dims[None, :]
            part = tl.load(part_ptr, mask=mask, other=0.0)
            acc, top, total = add_states(acc, top, total, part, part_lse)
        store_out(out, row.token, row.q_head, dims, normalized(acc, total), mask)
        if lse.ptr is not None:
            target = lse.ptr + head_offset(lse, row.token, row.q_head)
            tl.store(target, natural_lse(top, total), mask=row.in_tile)


@triton.jit(
    do_not_specialize=["num_splits", "num_programs", "num_tokens", "num_reqs", "num_heads"],
    # After decode rows they begin anywhere.
    do_not_specialize_on_alignment=[
        "block_table_ptr", "query_start_loc_ptr", "seq_lens_ptr", "mask_offsets_ptr"
    ],
)  # fmt: skip
def _paged_prefill_attention_kernel(
    out_ptr, stride_out_token, stride_out_head,  # [num_tokens, q_heads, HEAD_DIM]
    lse_ptr, stride_lse_token, stride_lse_head,  # [num_tokens, q_heads] fp32, or None
    states_ptr,  # [num_splits, num_tokens, q_heads, HEAD_DIM] fp32, or None: one program per tile
    states_lse_ptr,  # [num_splits, num_tokens, q_heads] fp32
    arrivals_ptr,  # [tiles * kv_heads] int32, 0 before and after a launch
    num_splits,  # most programs per tile
    num_programs,  # of all tiles together, where programs share tiles
    num_tokens,
    visited_ptr,  # [num_reqs, kv_heads, row_width] uint8, contiguous, or None
    q_ptr, stride_q_token, stride_q_head,  # [num_tokens, q_heads, HEAD_DIM]
    k_cache_ptr, v_cache_ptr,  # one layer's keys and values, flat
    k_scale_ptr, v_scale_ptr,  # float32, flat, or None
    scale_base_ptr, scale_block_stride_ptr,  # [kv_heads] int64, in elements, or None
    block_table_ptr, stride_table_row, row_width,  # [num_reqs, row_width] int32
    query_start_loc_ptr,  # [num_reqs + 1] int32
    seq_lens_ptr,  # [num_reqs] int32
    mask_offsets_ptr,  # [num_tokens, 2] int32, contiguous, or None
    num_reqs, num_kv_heads,
    heads_ptr, num_heads,  # [num_heads] int32, KV heads of the launch, or None: all
    head_base_ptr, block_stride_ptr,  # [kv_heads] int64, in elements
    table_offset_ptr, window_ptr, sink_ptr, ring_blocks_ptr,  # [kv_heads] int32
    token_stride,  # in elements
    softmax_scale,
    soft_cap,  # float32, or None
    sinks_ptr,  # [q_heads], or None
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,  # these and the others: see Cache and Tiles
    BLOCK_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr, VISITS_MASKED: tl.constexpr,
    HAS_RING: tl.constexpr,
    TILE_QUERIES: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_TOKENS: tl.constexpr,
    TILE_DIM: tl.constexpr, PRECISION: tl.constexpr,
    CODEC: tl.constexpr, SCALES_PER_BLOCK: tl.constexpr,
    MIN_STEPS: tl.constexpr, FOLDS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles * num_heads,), plus num_programs - num_heads where programs share tiles.

    A program computes a query tile of one KV head, or a part of its keys. There are ``num_tokens
    // TILE_QUERIES + num_reqs`` tiles, padding included; the additional programs share tiles that
    have queries. The last strides of out, q and the table are 1.
    """
    CACHE: tl.constexpr = Cache(
        BLOCK_SIZE, HAS_WINDOW, VISITS_MASKED, HAS_RING, CODEC, SCALES_PER_BLOCK
    )
    TILES: tl.constexpr = Tiles(
        GROUP, HEAD_DIM, TILE_QUERIES, TILE_ROWS, TILE_TOKENS, TILE_DIM, PRECISION, MIN_STEPS,
        FOLDS,
    )  # fmt: skip
    batch = Batch(query_start_loc_ptr, num_tokens, num_reqs, num_kv_heads)
    pairs = tl.num_programs(0)
    if states_ptr is not None:
        pairs -= num_programs - num_heads
    # The last tiles of a chunk have the most keys, so they run first. Heads vary fastest.
    pair = pairs - 1 - tl.program_id(0)
    split = 0
    if states_ptr is not None:
        tiles = _count_tiles(batch, TILE_QUERIES)
        num_splits = tl.minimum(num_splits, num_programs // (tiles * num_heads))
        num_splits = tl.maximum(num_splits, 1)
        if pair < 0:
            split = 1 + (-1 - pair) // (tiles * num_heads)
            pair = (-1 - pair) % (tiles * num_heads)
        if split >= num_splits:
            return
    head = pair % num_heads
    tile = pair // num_heads
    if heads_ptr is not None:
        head = tl.load(heads_ptr + head)
    req = _find_request(batch, tile, TILE_QUERIES)
    queries = _load_tile(batch, req, tile, TILE_QUERIES)
    if queries.first_query >= queries.query_len:
        return
    seq_len = tl.load(seq_lens_ptr + req)
    table_offset = tl.load(table_offset_ptr + head)
    window = tl.load(window_ptr + head) if HAS_WINDOW else None
    sink = tl.load(sink_ptr + head) if HAS_WINDOW else None
    ring_blocks = tl.load(ring_blocks_ptr + head) if HAS_RING else None

    row = _tile_row(queries, head, tl.arange(0, TILE_ROWS), GROUP)
    dims = tl.arange(0, TILE_DIM)
    in_head = dims < HEAD_DIM
    q_offset = head_offset(HeadRows(q_ptr, stride_q_token, stride_q_head), row.token, row.q_head)
    q_offset = q_offset[:, None] + dims[None, :]
    q = tl.load(q_ptr + q_offset, mask=row.in_tile[:, None] & in_head[None, :], other=0.0)
    first_key = None
    end_key = None
    if mask_offsets_ptr is not None:
        range_ptr = mask_offsets_ptr + 2 * row.token
        first_key = tl.maximum(tl.load(range_ptr, mask=row.in_tile, other=0), 0)
        end_key = tl.minimum(tl.load(range_ptr + 1, mask=row.in_tile, other=0), seq_len)
    if HAS_WINDOW:
        window = tl.where(window < 0, NO_WINDOW, window)  # type: ignore[operator]
    start, end, sink_end, query_position, steps = _find_keys(
        queries, row, seq_len, first_key, end_key, window, sink, CACHE, TILES
    )
    keys = VisibleKeys(start, end, sink_end, query_position, first_key, end_key, window, sink)
    splits = 1
    if states_ptr is not None:
        steps, splits = _divide_steps(steps, split, num_splits, MIN_STEPS)
        if split >= splits:
            return
    # The head's columns of the request's row, counted from 0.
    table_row_ptr = block_table_ptr + req.to(tl.int64) * stride_table_row + table_offset
    visited_row_ptr = None
    if visited_ptr is not None:
        visited_row = req.to(tl.int64) * num_kv_heads + head
        visited_row_ptr = visited_ptr + visited_row * row_width + table_offset
    acc, top, total = _attend_tile(
        q, keys, steps, TableRow(table_row_ptr, 0, sink, ring_blocks), head, visited_row_ptr,
        PagedKV(k_cache_ptr, v_cache_ptr, head_base_ptr, block_stride_ptr, token_stride),
        PagedKV(k_scale_ptr, v_scale_ptr, scale_base_ptr, scale_block_stride_ptr, 1),
        Softmax(softmax_scale, soft_cap, sinks_ptr),
        load_logit_sink(sinks_ptr, row.q_head, row.in_tile & (split == 0)),
        states_ptr is not None, CACHE, TILES,
    )  # fmt: skip
    _store_tile(
        HeadRows(out_ptr, stride_out_token, stride_out_head),
        HeadRows(lse_ptr, stride_lse_token, stride_lse_head),
        States(states_ptr, states_lse_ptr, arrivals_ptr),
        batch, req, tile, head, split, splits, acc, top, total, TILES,
    )  # fmt: skip


def paged_prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: KVLayout,
    *,
    softmax_scale: float,
    max_query_len: int,
    logits_soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    attn_mask_offsets: torch.Tensor | None = None,
    splits: PrefillSplits | None = None,
    deterministic: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    scales: KVScales | None = None,
    visited: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from a ragged batch of chunks, decodes among them, to their paged caches.

    The queries of request ``r`` are rows ``query_start_loc[r]`` to ``query_start_loc[r + 1]`` of
    ``q``; the last query sits at position ``seq_lens[r] - 1``. ``kv_layout`` says which keys a
    query sees. The chunk's own keys must be in the cache already: its queries see them too.

    Args:
        q: ``[num_tokens, q_heads, head_dim]``, otherwise as in ``paged_decode_attention``.
        k_cache: as in ``paged_decode_attention``.
        v_cache: as in ``paged_decode_attention``.
        block_table: as in ``paged_decode_attention``.
        query_start_loc: ``[num_reqs + 1]`` int32, ascending from 0 to at most ``num_tokens`` (also
            called ``cu_seqlens_q``). A request without queries is fine.
        seq_lens: ``[num_reqs]`` int32, tokens including the queries (also ``context_lens``).
        layout: where the pages lie and what each head may see.
        softmax_scale: as in ``paged_decode_attention``.
        max_query_len: upper bound on a request's queries. It limits the size of a tile, and on
            sm_90 it may choose the kernel (``choice.KERNELS``), so it changes the result by
            rounding only. 0 = no queries (``q`` may still have rows of padding).
        logits_soft_cap: as in ``paged_decode_attention``.
        sinks: as in ``paged_decode_attention``.
        attn_mask_offsets: ``[num_tokens, 2]`` int32, contiguous: the range ``[lo, hi)`` of key
            positions in its request that each query sees instead of ``[0, its own]``. ``hi`` may
            lie after the query, as inside an image. Keys from ``seq_lens`` on are never seen; with
            ``lo >= hi`` a query sees no key. A window still hides the keys before its start,
            except the sink. None = causal.
        splits: buffers allocated for these shapes, through which several programs divide the keys
            of a tile: faster for few short chunks with long contexts. Changes the result by
            rounding only. Buffers of one split, which only sm_90 has, are a queue of whole tiles:
            which program takes a tile changes no bit. None = one program per tile.
        deterministic: give each query a result that is bitwise the same in any batch and chunk:
            one kernel (not ``hopper``), one tile, no ``splits``. With a 16 or 32-bit cache, no
            windows and no ``attn_mask_offsets``, ``paged_decode_attention`` gives the same bits.
        out: like ``q``; *written* in rows before ``query_start_loc[-1]``, untouched in later rows.
            None = a new tensor, whose later rows are uninitialised.
        lse: ``[num_tokens, q_heads]`` fp32, *written* likewise if given: the natural
            log-sum-exp of the scaled, capped scores and the head's logit sink.
        scales: as in ``paged_decode_attention``.
        visited: as in ``paged_decode_attention``.

    Returns:
        ``out``. A row that sees no key is zero, its ``lse`` -inf or the head's logit sink.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: as ``paged_decode_attention``; tier B. In the kernels for sm_90 the tanh of a soft
        cap is one instruction, whose relative error is at most 2**-16 (on an H200; PTX promises
        2**-11): so is then that of a capped score. With ``deterministic`` the bound is decode's.
    Stream: one launch on the current stream, its grid from shapes alone: CUDA-graph safe, no
        scratch except ``splits``. On sm_90 a second one merges where many programs divide a tile's
        keys. Two launches where a layout has both full and streaming heads and the full heads take
        a kernel for sm_90 that knows no windows, that for e4m3 caches: one for either kind.
    """
    table = check_paged_attention(
        q, k_cache, v_cache, block_table, seq_lens, layout, FLOAT_DTYPES,
        softmax_scale=softmax_scale, logits_soft_cap=logits_soft_cap, sinks=sinks,
        out=out, lse=lse, scales=scales, visited=visited,
    )  # fmt: skip
    num_tokens, num_q_heads, _ = q.shape
    num_reqs = seq_lens.shape[0]
    check_query_start_loc(query_start_loc, num_reqs, max_query_len, q.device)
    check_attn_mask_offsets(attn_mask_offsets, q)
    check_splits(splits, q, deterministic)
    check_head_dim(layout)
    check_launchable("q", q)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if num_reqs == 0 or num_tokens == 0 or max_query_len == 0:
        return out
    layer = PrefillLayer(
        layout, q.dtype, format_of(q.dtype, scales), num_q_heads,
        plain_scores=not logits_soft_cap and sinks is None,
    )  # fmt: skip
    longest = ANY_QUERY_LEN if deterministic else max_query_len
    config = choose_config(layer, longest, attn_mask_offsets is not None)
    folds = deterministic and attn_mask_offsets is None and scales is None
    folds = folds and not layout.has_window
    if folds:
        config = config.with_folds(layer.group, device_info(q.device).capability)
    tile_queries = config.tile_rows // layer.group
    num_tiles = num_tokens // tile_queries + num_reqs
    arrivals = None if splits is None else splits.arrivals
    num_sharing = 0 if splits is None or arrivals is None else splits.num_programs
    if arrivals is not None and arrivals.numel() < num_tiles * layout.num_kv_heads:
        raise ValueError(
            f"splits: expected room for {num_reqs} requests of at most {max_query_len} "
            f"queries, got room for fewer tiles"
        )
    if splits is not None and splits.counts is not None:
        check_tensor("splits.counts", splits.counts, shape=(num_tokens, layout.num_kv_heads))
    is_causal = attn_mask_offsets is None and visited is None and not deterministic
    heads, num_heads = None, layout.num_kv_heads
    if is_causal and (kernel := kernel_for(layer, q, k_cache, v_cache, max_query_len, splits)):
        # Imported here: Gluon needs a compiler, which the interpreter's process has not.
        from mrv1.kernels.attention.prefill import hopper, hopper_queue

        call = PrefillCall(
            q=q, k_cache=k_cache, v_cache=v_cache, block_table=table,
            query_start_loc=query_start_loc, seq_lens=seq_lens, layout=layout,
            softmax_scale=softmax_scale, soft_cap=logits_soft_cap or None, sinks=sinks,
            full_only=layout.has_window and not kernel.takes_windows(layout), out=out, lse=lse,
        )  # fmt: skip
        if splits is not None and kernel.module == "hopper_queue":
            hopper_queue.launch(call, splits)
        else:
            hopper.launch(call, splits if num_sharing else None, scales)
        if not call.full_only:
            return out
        heads, num_heads = layout.streaming_heads, len(layout.streaming_heads)
    elif layout.has_window and len(layout.full_heads) and not layout.visits_masked:
        # Beside long contexts of full heads, the programs of streaming heads end at once.
        num_sharing = num_sharing * num_heads // len(layout.full_heads)
    num_programs = num_tiles * num_heads + (num_sharing - num_heads if num_sharing else 0)
    states = splits.arguments if splits is not None else (None, None, None, 0)
    launch_kernel(
        _paged_prefill_attention_kernel, (num_programs,),
        *with_strides(out), *with_strides(lse), *states, num_sharing, num_tokens, visited,
        *with_strides(q), *cache_arguments(k_cache, v_cache, scales),
        table, table.stride(0), table.shape[1], query_start_loc, seq_lens, attn_mask_offsets,
        num_reqs, layout.num_kv_heads, heads, num_heads,
        layout.head_base, layout.block_stride, *role_arguments(layout), layout.token_stride,
        softmax_scale, logits_soft_cap or None, sinks,
        TILE_QUERIES=tile_queries, TILE_ROWS=config.tile_rows, TILE_TOKENS=config.tile_tokens,
        TILE_DIM=triton.next_power_of_2(layout.head_dim), MIN_STEPS=MIN_SPLIT_STEPS, FOLDS=folds,
        **attention_constexprs(q, layout, scales), **config.launch_options(),
    )  # fmt: skip
    return out
