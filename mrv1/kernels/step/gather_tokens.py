"""Turn a step's row-to-slot map into the model's inputs, entirely on the device.

Token ``j`` of row ``r`` is the token at position ``first + j`` of the row's request: one of its
``num_tokens[slot]`` known tokens or, after them, one of the row's drafts. ``first`` is
``num_computed_tokens[slot]``, or less if the query is longer than the tokens left to compute, so
that it ends with the last draft: then the length of the request, and so every key that attention
may read, is exact.

The token's cache slot in head group ``g`` is ``block * block_size + position % block_size``, with
the block read from the group's segment of the request's table row, by the rule of ``kv_layout``.

One launch has three kinds of programs, each for one head group: tiles of tokens, of rows (for the
per-row outputs), and of the block table. In a ragged batch, a bisection of ``query_start_loc``
finds a token's row, at no more cost than in an even batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.checks import check_launchable, check_tensor
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.step.contracts import (
    MAX_DRAFT_TOKENS,
    MROPE_SPAN_WORDS,
    GatheredTokens,
    RequestSlots,
    SlotTables,
    check_queries,
    check_slots,
)

_SPAN_WORDS = tl.constexpr(MROPE_SPAN_WORDS)


class _Queries(NamedTuple):
    """The step's rows, and the lengths and stop codes of all slots."""

    idx_mapping_ptr: tl.tensor
    query_start_loc_ptr: tl.tensor  # or None: every row has query_len tokens
    query_len: tl.tensor
    num_tokens_ptr: tl.tensor
    num_computed_ptr: tl.tensor
    stopped_ptr: tl.tensor
    num_draft_tokens_ptr: tl.tensor  # or None
    num_rows: tl.tensor
    num_bisections: tl.tensor


class _Sources(NamedTuple):
    """The sources of token ids, positions and adapters."""

    token_ids_ptr: tl.tensor
    stride_token_ids_slot: tl.tensor
    max_model_len: tl.tensor
    draft_token_ids_ptr: tl.tensor  # or None
    stride_draft_token_ids_row: tl.tensor
    mrope_spans_ptr: tl.tensor  # or None
    stride_mrope_spans_slot: tl.tensor
    num_mrope_spans_ptr: tl.tensor
    adapter_slot_ptr: tl.tensor  # or None


class _Segment(NamedTuple):
    """One head group's segment of the slots' block tables."""

    block_tables_ptr: tl.tensor
    stride_block_tables_slot: tl.tensor
    table_offset: tl.tensor
    sink_blocks: tl.tensor
    ring_blocks: tl.tensor


class _Tokens(NamedTuple):
    """The outputs of each token; ``slot_mapping_ptr`` is one head group's."""

    input_ids_ptr: tl.tensor
    positions_ptr: tl.tensor
    stride_positions_axis: tl.tensor
    slot_mapping_ptr: tl.tensor
    num_padded_tokens: tl.tensor
    adapter_slots_ptr: tl.tensor  # or None


@triton.jit
def _find_rows(queries, token):
    """Return the row of each token, or num_rows: the number of rows that end at or before it."""
    low = tl.zeros_like(token)
    high = low + queries.num_rows
    for _ in range(queries.num_bisections):
        middle = (low + high) // 2
        searching = low < high
        end = tl.load(queries.query_start_loc_ptr + middle + 1, mask=searching, other=0)
        ends_before = searching & (end <= token)
        low = tl.where(ends_before, middle + 1, low)
        high = tl.where(searching & (end > token), middle, high)
    return low


@triton.jit
def _load_queries(queries, row, is_row):
    """Return (slot, lives, start, length, first, computed tokens, known tokens, end) of rows.

    A row lives if it is not padding and its request has not stopped. Its first token is at
    ``start`` in the batch and at position ``first``, which is negative if the request has fewer
    tokens than the query. ``end`` is the position after its last draft.
    """
    slot = tl.load(queries.idx_mapping_ptr + row, mask=is_row, other=-1).to(tl.int64)
    lives = slot >= 0
    # not masked by the stop code, so that all loads of the slot share one round trip
    computed = tl.load(queries.num_computed_ptr + slot, mask=slot >= 0, other=0)
    known = tl.load(queries.num_tokens_ptr + slot, mask=slot >= 0, other=0)
    lives &= tl.load(queries.stopped_ptr + slot, mask=slot >= 0, other=0) == 0
    if queries.query_start_loc_ptr is None:
        start = row * queries.query_len
        length = tl.zeros_like(row) + queries.query_len
    else:
        start = tl.load(queries.query_start_loc_ptr + row, mask=is_row, other=0)
        length = tl.load(queries.query_start_loc_ptr + row + 1, mask=is_row, other=0) - start
    end = known
    if queries.num_draft_tokens_ptr is not None:
        end += tl.load(queries.num_draft_tokens_ptr + row, mask=is_row, other=0)
    first = tl.minimum(computed, end - length)
    return slot, lives, start, length, first, computed, known, end


@triton.jit
def _gather_rows(
    seq_lens_ptr,  # [num_rows] int32
    logits_rows_ptr,  # [num_rows] int64
    queries,
    row,  # [TILE_TOKENS] int32
):
    """Write the per-row outputs of a tile of rows."""
    is_row = row < queries.num_rows
    _, lives, start, length, first, computed, known, end = _load_queries(queries, row, is_row)
    seq_len = first + length
    samples = lives & (computed < known) & (seq_len >= end)
    logits_row = (start + (known - 1 - first)).to(tl.int64)
    tl.store(seq_lens_ptr + row, tl.where(lives, seq_len, 0), mask=is_row)
    tl.store(logits_rows_ptr + row, tl.where(samples, logits_row, -1), mask=is_row)


@triton.jit
def _mrope_positions(sources, slot, position, is_token):
    """Return the positions of tokens in time, height and width; see MROPE_SPAN_WORDS."""
    spans_ptr = sources.mrope_spans_ptr + slot * sources.stride_mrope_spans_slot
    high = tl.load(sources.num_mrope_spans_ptr + slot, mask=is_token, other=0)
    low = tl.zeros_like(high)  # bisected: the number of spans that start at or before the token
    searched = tl.max(high, axis=0)
    while searched > 0:  # no iteration in a tile of text alone
        middle = (low + high) // 2
        searching = low < high
        start = tl.load(spans_ptr + middle * _SPAN_WORDS, mask=searching, other=0)
        starts_before = searching & (start <= position)
        low = tl.where(starts_before, middle + 1, low)
        high = tl.where(searching & (start > position), middle, high)
        searched = searched // 2
    has_span = low > 0
    span_ptr = spans_ptr + (low - 1) * _SPAN_WORDS
    start = tl.load(span_ptr, mask=has_span, other=0)
    end = tl.load(span_ptr + 1, mask=has_span, other=0)
    first = tl.load(span_ptr + 2, mask=has_span, other=0)
    delta = tl.load(span_ptr + 3, mask=has_span, other=0)
    in_span = has_span & (position < end)
    width = tl.load(span_ptr + 4, mask=in_span, other=1)
    area = tl.load(span_ptr + 5, mask=in_span, other=1)
    time_scale = tl.load(span_ptr + 6, mask=in_span, other=0).to(tl.float32, bitcast=True)
    place = position - start
    frame = place // area
    in_frame = place - frame * area
    time = (frame.to(tl.float32) * time_scale).to(tl.int32)
    text = position + delta
    return (
        tl.where(in_span, first + time, text),
        tl.where(in_span, first + in_frame // width, text),
        tl.where(in_span, first + in_frame % width, text),
    )


@triton.jit
def _gather_ids_and_positions(outputs, sources, token, row, slot, position, known, is_token):
    """Write the ids and positions of a tile of tokens, 0 where ``is_token`` is false."""
    is_output = token < outputs.num_padded_tokens
    is_known = is_token & (position < known)
    token_id_ptr = sources.token_ids_ptr + slot * sources.stride_token_ids_slot + position
    token_id = tl.load(token_id_ptr, mask=is_known, other=0)
    if sources.draft_token_ids_ptr is not None:
        draft_ptr = sources.draft_token_ids_ptr
        draft_ptr += row.to(tl.int64) * sources.stride_draft_token_ids_row
        draft_ptr += position - known
        token_id += tl.load(draft_ptr, mask=is_token & (position >= known), other=0)
    tl.store(outputs.input_ids_ptr + token, token_id.to(tl.int64), mask=is_output)
    if sources.mrope_spans_ptr is None:
        tl.store(outputs.positions_ptr + token, position.to(tl.int64), mask=is_output)
    else:
        axes = _mrope_positions(sources, slot, position, is_token)
        for axis in tl.static_range(3):
            of_axis = tl.where(is_token, axes[axis], 0).to(tl.int64)
            output_ptr = outputs.positions_ptr + axis * outputs.stride_positions_axis + token
            tl.store(output_ptr, of_axis, mask=is_output)


@triton.jit
def _gather_tile_of_tokens(
    outputs, queries, sources, segment,
    token,  # [TILE_TOKENS] int32
    IS_FIRST_GROUP,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Write the per-token outputs of a tile; only the first group writes ids and positions."""
    is_output = token < outputs.num_padded_tokens
    if queries.query_start_loc_ptr is None:
        row = token // queries.query_len
    else:
        row = _find_rows(queries, token)
    has_row = is_output & (row < queries.num_rows)
    slot, is_token, start, _, first, computed, known, end = _load_queries(queries, row, has_row)
    position = first + (token - start)
    is_token &= (position >= 0) & (position < tl.minimum(end, sources.max_model_len))
    is_new = is_token & (position >= computed)
    position = tl.where(is_token, position, 0)

    if IS_FIRST_GROUP:
        _gather_ids_and_positions(outputs, sources, token, row, slot, position, known, is_token)
        if outputs.adapter_slots_ptr is not None:
            adapter = tl.load(sources.adapter_slot_ptr + slot, mask=is_token, other=-1)
            tl.store(outputs.adapter_slots_ptr + token, adapter, mask=is_output)

    sink_blocks, ring_blocks = segment.sink_blocks, segment.ring_blocks
    logical = position // BLOCK_SIZE
    in_ring = sink_blocks + (logical - sink_blocks) % tl.maximum(ring_blocks, 1)
    column = tl.where((ring_blocks == 0) | (logical < sink_blocks), logical, in_ring)
    entry_ptr = segment.block_tables_ptr + slot * segment.stride_block_tables_slot
    entry_ptr += segment.table_offset + column
    block = tl.load(entry_ptr, mask=is_new, other=-1).to(tl.int64)
    cache_slot = tl.where(block >= 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(outputs.slot_mapping_ptr + token, cache_slot, mask=is_output)


@triton.jit
def _gather_block_table(
    block_table_ptr, stride_block_table_row,  # [num_rows, row_width] int32
    queries, segment,
    row,  # [TILE_ROWS] int32
    max_model_len,
    BLOCK_SIZE: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy the live columns of one group's segments for a tile of rows."""
    is_row = row < queries.num_rows
    slot, lives, _, length, first, _, _, _ = _load_queries(queries, row, is_row)
    num_columns = tl.cdiv(tl.minimum(first + length, max_model_len), BLOCK_SIZE)
    in_ring = segment.sink_blocks + segment.ring_blocks
    num_columns = tl.where(segment.ring_blocks == 0, num_columns, in_ring)
    num_columns = tl.where(lives, num_columns, 0)
    source_ptr = segment.block_tables_ptr + slot * segment.stride_block_tables_slot
    source_ptr += segment.table_offset
    target_ptr = block_table_ptr + row.to(tl.int64) * stride_block_table_row
    target_ptr += segment.table_offset
    for first in range(0, tl.max(num_columns, axis=0), TILE_COLUMNS):
        column = first + tl.arange(0, TILE_COLUMNS)[None, :]
        is_live = column < num_columns[:, None]
        block = tl.load(source_ptr[:, None] + column, mask=is_live, other=-1)
        tl.store(target_ptr[:, None] + column, block, mask=is_live)


@triton.jit(
    # a value that differs from step to step must not compile another kernel
    do_not_specialize=[
        "stride_positions_axis",
        "stride_slot_mapping_group",
        "query_len",
        "stride_draft_token_ids_row",
        "num_rows",
        "num_padded_tokens",
        "num_bisections",
    ],
    do_not_specialize_on_alignment=[
        "idx_mapping_ptr",
        "query_start_loc_ptr",
        "draft_token_ids_ptr",
        "num_draft_tokens_ptr",
    ],
)
def _gather_tokens_kernel(
    input_ids_ptr,  # [num_padded_tokens] int64
    positions_ptr,  # [num_padded_tokens] int64, or [3, num_padded_tokens] with M-RoPE
    stride_positions_axis,
    slot_mapping_ptr, stride_slot_mapping_group,  # [num_groups, num_padded_tokens] int64
    seq_lens_ptr,  # [num_rows] int32
    logits_rows_ptr,  # [num_rows] int64
    block_table_ptr, stride_block_table_row,  # [num_rows, row_width] int32, or None
    idx_mapping_ptr,  # [num_rows] int32, -1 = padding row
    query_start_loc_ptr,  # [num_rows + 1] int32, or None: every row has query_len tokens
    query_len,
    token_ids_ptr, stride_token_ids_slot,  # [max_num_reqs, max_model_len] int32
    num_tokens_ptr,  # [max_num_reqs] int32
    num_computed_ptr,  # [max_num_reqs] int32
    stopped_ptr,  # [max_num_reqs] int32, not 0 = the request has stopped
    draft_token_ids_ptr, stride_draft_token_ids_row,  # [num_rows, max_drafts] int32, or None
    num_draft_tokens_ptr,  # [num_rows] int32, or None
    mrope_spans_ptr,  # [max_num_reqs, max_spans, _SPAN_WORDS] int32, or None
    stride_mrope_spans_slot,
    num_mrope_spans_ptr,  # [max_num_reqs] int32, or None
    block_tables_ptr, stride_block_tables_slot,  # [max_num_reqs, row_width] int32, -1 = no page
    table_offset_ptr,  # [num_groups] int32
    sink_ptr,  # [num_groups] int32, tokens
    ring_blocks_ptr,  # [num_groups] int32, 0 = no ring
    num_rows, num_padded_tokens,
    num_bisections,  # enough to halve num_rows + 1 candidates down to one
    max_model_len,
    BLOCK_SIZE: tl.constexpr,  # tokens per KV block
    OVERLAP: tl.constexpr,  # see dependent_launch
    TILE_TOKENS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    adapter_slots_ptr=None,  # [num_padded_tokens] int32, or None
    adapter_slot_ptr=None,  # [max_num_reqs] int32, or None
):  # fmt: skip
    """Grid (token tiles + row tiles + block-table tiles, num_groups): see the module docstring."""
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    tile = tl.program_id(0)
    group = tl.program_id(1)
    queries = _Queries(
        idx_mapping_ptr, query_start_loc_ptr, query_len, num_tokens_ptr, num_computed_ptr,
        stopped_ptr, num_draft_tokens_ptr, num_rows, num_bisections,
    )  # fmt: skip
    sources = _Sources(
        token_ids_ptr, stride_token_ids_slot, max_model_len, draft_token_ids_ptr,
        stride_draft_token_ids_row, mrope_spans_ptr, stride_mrope_spans_slot,
        num_mrope_spans_ptr, adapter_slot_ptr,
    )  # fmt: skip
    outputs = _Tokens(
        input_ids_ptr,
        positions_ptr,
        stride_positions_axis,
        slot_mapping_ptr + group.to(tl.int64) * stride_slot_mapping_group,
        num_padded_tokens,
        adapter_slots_ptr,
    )
    segment = _Segment(
        block_tables_ptr,
        stride_block_tables_slot,
        tl.load(table_offset_ptr + group),
        tl.cdiv(tl.load(sink_ptr + group), BLOCK_SIZE),
        tl.load(ring_blocks_ptr + group),
    )
    num_token_tiles = tl.cdiv(num_padded_tokens, TILE_TOKENS)
    num_row_tiles = tl.cdiv(num_rows, TILE_TOKENS)
    if tile < num_token_tiles:
        token = tile * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
        _gather_tile_of_tokens(outputs, queries, sources, segment, token, group == 0, BLOCK_SIZE)
    elif tile < num_token_tiles + num_row_tiles:
        if group == 0:
            row = (tile - num_token_tiles) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
            _gather_rows(seq_lens_ptr, logits_rows_ptr, queries, row)
    elif block_table_ptr is not None:
        _gather_block_table(
            block_table_ptr,
            stride_block_table_row,
            queries,
            segment,
            (tile - num_token_tiles - num_row_tiles) * TILE_ROWS + tl.arange(0, TILE_ROWS),
            max_model_len,
            BLOCK_SIZE,
            TILE_COLUMNS,
        )


@dataclass(frozen=True, slots=True)
class GatherTokensConfig:
    """How the gather is divided among programs."""

    tile_tokens: int  # tokens of one program, or rows of one program that writes per-row outputs
    tile_rows: int  # block table rows of one program
    tile_columns: int  # block table columns in flight in one program
    num_warps: int

    @classmethod
    def default_for(cls) -> GatherTokensConfig:
        """Return the configuration for a GPU: one token per thread.

        The time goes into dependent loads: at a context of 1000 tokens nothing is faster on an
        H200; the wide tile of the block table is for long contexts.
        """
        return cls(tile_tokens=128, tile_rows=1, tile_columns=1024, num_warps=4)

    @classmethod
    def for_interpreter(cls, num_indices: int, num_rows: int) -> GatherTokensConfig:
        """Return the configuration for the interpreter: 2^16 tokens or 2^10 rows a program."""
        return cls(
            tile_tokens=min(triton.next_power_of_2(num_indices), 2**16),
            tile_rows=min(triton.next_power_of_2(max(num_rows, 1)), 2**10),
            tile_columns=64,
            num_warps=1,
        )


_GPU_CONFIG = GatherTokensConfig.default_for()


def gather_tokens(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    slots: RequestSlots,
    tables: SlotTables,
    out: GatheredTokens,
    *,
    query_len: int | None = None,
    draft_token_ids: torch.Tensor | None = None,
    num_draft_tokens: torch.Tensor | None = None,
) -> None:
    """Write a step's token ids, positions, lengths, cache slots, sampling rows and block table.

    A padding row has slot -1, or a slot whose request has stopped. Tokens of padding rows, tokens
    past the last row, and positions below 0 or from ``max_model_len`` on are padding: id 0,
    position 0, cache slot -1. A row with more tokens than are left to compute begins with tokens
    that the cache has already: their cache slot is -1, too, so that nothing is written.

    Args:
        idx_mapping: [num_reqs] int32, the request slot of each batch row; -1 = padding row.
        query_start_loc: [num_reqs + 1] int32, first token of each row, ascending from 0; not read,
            and may be None, if ``query_len`` is given.
        slots: the request of every slot: its history, lengths, stop code and M-RoPE spans.
        tables: the block table of every slot.
        out: *written*.
        query_len: tokens of every row, if they all have the same number.
        draft_token_ids: [num_reqs, max_drafts] int32, unit last stride, at most 7 columns, batch
            order: the tokens at positions ``num_tokens``, ``num_tokens + 1``, ... of each row.
        num_draft_tokens: [num_reqs] int32, batch order: number of drafts of each row, at the end
            of the row's query. Goes with ``draft_token_ids``.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: integers; exact (tier A).
    Stream: one launch on the current stream, no synchronisation, CUDA-graph safe.
    """
    check_launchable("idx_mapping", idx_mapping)
    check_tensor("idx_mapping", idx_mapping, shape=(None,), dtype=torch.int32, contiguous=True)
    device, num_rows = idx_mapping.device, idx_mapping.shape[0]
    check_slots(slots, device, "num_tokens", "num_computed_tokens", "stopped")
    check_queries(query_start_loc, query_len, num_rows, device)
    _check_drafts(idx_mapping, draft_token_ids, num_draft_tokens)
    _check_mrope(slots, device)
    if out.adapter_slots is not None:
        check_slots(slots, device, "adapter_slot")
    num_groups = _check_tables(tables, slots.token_ids.shape[0], device)
    _check_outputs(out, num_rows, num_groups, tables, slots.mrope_spans is not None, device)
    num_padded_tokens = out.input_ids.shape[0]
    num_indices = max(num_rows, num_padded_tokens)
    if num_indices == 0:
        return
    config = _GPU_CONFIG
    if INTERPRET:
        config = GatherTokensConfig.for_interpreter(num_indices, num_rows)
    num_tiles = triton.cdiv(num_padded_tokens, config.tile_tokens)
    num_tiles += triton.cdiv(num_rows, config.tile_tokens)
    if out.block_table is not None:
        num_tiles += triton.cdiv(num_rows, config.tile_rows)
    _gather_tokens_kernel[(num_tiles, num_groups)](
        out.input_ids, *with_strides(out.positions, 1), *with_strides(out.slot_mapping, 1),
        out.seq_lens, out.logits_rows, *with_strides(out.block_table, 1),
        idx_mapping, None if query_len is not None else query_start_loc, query_len or 0,
        *with_strides(slots.token_ids, 1),
        slots.num_tokens, slots.num_computed_tokens, slots.stopped,
        *with_strides(draft_token_ids, 1), num_draft_tokens, *with_strides(slots.mrope_spans, 1),
        slots.num_mrope_spans, *with_strides(tables.block_tables, 1),
        tables.table_offset, tables.sink, tables.ring_blocks, num_rows, num_padded_tokens,
        num_bisections=num_rows.bit_length(), max_model_len=slots.token_ids.shape[1],
        BLOCK_SIZE=tables.block_size, TILE_TOKENS=config.tile_tokens, TILE_ROWS=config.tile_rows,
        TILE_COLUMNS=config.tile_columns, num_warps=config.num_warps, **overlap_options(device),
        **_adapter_arguments(slots, out),
    )  # fmt: skip


def _adapter_arguments(slots: RequestSlots, out: GatheredTokens) -> dict[str, torch.Tensor | None]:
    """Return the kernel's arguments for adapters, none if they are not wanted."""
    if out.adapter_slots is None:
        return {}
    return {"adapter_slots_ptr": out.adapter_slots, "adapter_slot_ptr": slots.adapter_slot}


def _check_drafts(
    idx_mapping: torch.Tensor,
    draft_token_ids: torch.Tensor | None,
    num_draft_tokens: torch.Tensor | None,
) -> None:
    if draft_token_ids is None and num_draft_tokens is None:
        return
    if draft_token_ids is None or num_draft_tokens is None:
        raise ValueError("draft_token_ids, num_draft_tokens: expected both or neither, got one")
    num_rows = idx_mapping.shape[0]
    check = partial(check_tensor, dtype=torch.int32, device=idx_mapping.device)
    check("draft_token_ids", draft_token_ids, shape=(num_rows, None), unit_last_stride=True)
    if draft_token_ids.shape[1] > MAX_DRAFT_TOKENS:
        raise ValueError(
            f"draft_token_ids: expected at most {MAX_DRAFT_TOKENS} columns, "
            f"got {draft_token_ids.shape[1]}"
        )
    check("num_draft_tokens", num_draft_tokens, shape=(num_rows,), contiguous=True)


def _check_mrope(slots: RequestSlots, device: torch.device) -> None:
    spans = slots.mrope_spans
    if spans is None and slots.num_mrope_spans is None:
        return
    if spans is None or slots.num_mrope_spans is None:
        raise ValueError("slots.mrope_spans, num_mrope_spans: expected both or neither, got one")
    check = partial(check_tensor, dtype=torch.int32, device=device)
    shape = (slots.token_ids.shape[0], None, MROPE_SPAN_WORDS)
    check("slots.mrope_spans", spans, shape=shape, unit_last_stride=True)
    if spans.stride(1) != MROPE_SPAN_WORDS:
        raise ValueError(
            f"slots.mrope_spans: expected a span every {MROPE_SPAN_WORDS} words, got "
            f"{spans.stride(1)}"
        )
    check_slots(slots, device, "num_mrope_spans")


def _check_tables(tables: SlotTables, max_num_reqs: int, device: torch.device) -> int:
    """Return the number of head groups."""
    if tables.block_size < 1 or tables.block_size & (tables.block_size - 1):
        raise ValueError(f"tables.block_size: expected a power of two, got {tables.block_size}")
    check = partial(check_tensor, dtype=torch.int32, device=device)
    shape = (max_num_reqs, None)
    check("tables.block_tables", tables.block_tables, shape=shape, unit_last_stride=True)
    check("tables.table_offset", tables.table_offset, shape=(None,), contiguous=True)
    num_groups = tables.table_offset.shape[0]
    if num_groups == 0:
        raise ValueError("tables.table_offset: expected at least one group, got none")
    check("tables.sink", tables.sink, shape=(num_groups,), contiguous=True)
    check("tables.ring_blocks", tables.ring_blocks, shape=(num_groups,), contiguous=True)
    return num_groups


def _check_outputs(
    out: GatheredTokens,
    num_rows: int,
    num_groups: int,
    tables: SlotTables,
    has_mrope: bool,
    device: torch.device,
) -> None:
    int32 = partial(check_tensor, dtype=torch.int32, device=device)
    int64 = partial(check_tensor, dtype=torch.int64, device=device)
    int64("out.input_ids", out.input_ids, shape=(None,), contiguous=True)
    num_tokens = out.input_ids.shape[0]
    positions = (3, num_tokens) if has_mrope else (num_tokens,)
    int64("out.positions", out.positions, shape=positions, unit_last_stride=True)
    int32("out.seq_lens", out.seq_lens, shape=(num_rows,), contiguous=True)
    int64("out.logits_rows", out.logits_rows, shape=(num_rows,), contiguous=True)
    shape = (num_groups, num_tokens)
    int64("out.slot_mapping", out.slot_mapping, shape=shape, unit_last_stride=True)
    if out.adapter_slots is not None:
        int32("out.adapter_slots", out.adapter_slots, shape=(num_tokens,), contiguous=True)
    if out.block_table is not None:
        shape = (num_rows, tables.block_tables.shape[1])
        int32("out.block_table", out.block_table, shape=shape, unit_last_stride=True)
