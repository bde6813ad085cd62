"""Turn a step's row-to-slot map into the model's inputs, entirely on the device.

Token ``j`` of row ``r`` is the token at position ``num_computed_tokens[slot] + j`` of the row's
request: one of its ``num_tokens[slot]`` known tokens, or behind them one of the row's drafts. Its
cache slot in head group ``g`` is ``block * block_size + position % block_size``, the block read
from the group's segment of the request's table row (S = ceil(sink / block_size),
L = position // block_size)::

    column = table_offset[g] + (L                              if ring_blocks[g] == 0 or L < S
                                S + (L - S) % ring_blocks[g]   otherwise)

Three kinds of programs in one launch, each for one head group: tiles of tokens, tiles of rows (for
the per-row outputs), and tiles of the block table. A token of a ragged batch finds its row by
bisecting ``query_start_loc``, so ragged batches cost no more than even ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrv1.kernels._base.checks import check_launchable, check_tensor
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.step.contracts import MAX_DRAFT_TOKENS, check_queries


@triton.jit
def _find_rows(
    token,  # [TILE_TOKENS] int32
    query_start_loc_ptr,  # [num_rows + 1] int32
    num_rows,
    num_bisections,
):
    """Return how many rows end at or before each token: its row, or num_rows past the last."""
    low = tl.zeros_like(token)
    high = low + num_rows
    for _ in range(num_bisections):
        middle = (low + high) // 2
        searching = low < high
        end = tl.load(query_start_loc_ptr + middle + 1, mask=searching, other=0)
        ends_before = searching & (end <= token)
        low = tl.where(ends_before, middle + 1, low)
        high = tl.where(searching & (end > token), middle, high)
    return low


@triton.jit
def _load_queries(
    idx_mapping_ptr,  # [num_rows] int32
    query_start_loc_ptr,  # [num_rows + 1] int32, or None: every row has query_len tokens
    query_len,
    num_tokens_ptr,  # [max_num_reqs] int32
    num_computed_ptr,  # [max_num_reqs] int32
    stopped_ptr,  # [max_num_reqs] int32, or None
    row,  # [rows] int32
    is_row,  # [rows] bool
):
    """Return (slot, lives, first token, tokens, computed tokens, known tokens) of rows.

    A row lives if it is no padding and its request has not stopped.
    """
    slot = tl.load(idx_mapping_ptr + row, mask=is_row, other=-1).to(tl.int64)
    lives = slot >= 0
    # not masked by the stop code, so that all loads of the slot are one round trip
    computed = tl.load(num_computed_ptr + slot, mask=slot >= 0, other=0)
    known = tl.load(num_tokens_ptr + slot, mask=slot >= 0, other=0)
    if stopped_ptr is not None:
        lives &= tl.load(stopped_ptr + slot, mask=slot >= 0, other=0) == 0
    if query_start_loc_ptr is None:
        start = row * query_len
        length = tl.zeros_like(row) + query_len
    else:
        start = tl.load(query_start_loc_ptr + row, mask=is_row, other=0)
        length = tl.load(query_start_loc_ptr + row + 1, mask=is_row, other=0) - start
    return slot, lives, start, length, computed, known


@triton.jit
def _gather_rows(
    seq_lens_ptr,  # [num_rows] int32
    logits_rows_ptr,  # [num_rows] int64
    idx_mapping_ptr,
    query_start_loc_ptr,
    query_len,
    num_tokens_ptr,
    num_computed_ptr,
    stopped_ptr,
    num_draft_tokens_ptr,  # [num_rows] int32, or None
    row,  # [TILE_TOKENS] int32
    num_rows,
):
    """Write the per-row outputs of a tile of rows."""
    is_row = row < num_rows
    _, lives, start, length, computed, known = _load_queries(
        idx_mapping_ptr,
        query_start_loc_ptr,
        query_len,
        num_tokens_ptr,
        num_computed_ptr,
        stopped_ptr,
        row,
        is_row,
    )
    seq_len = computed + length
    end = known
    if num_draft_tokens_ptr is not None:
        end += tl.load(num_draft_tokens_ptr + row, mask=is_row, other=0)
    samples = lives & (computed < known) & (seq_len >= end)
    logits_row = (start + (known - 1 - computed)).to(tl.int64)
    tl.store(seq_lens_ptr + row, tl.where(lives, seq_len, 0), mask=is_row)
    tl.store(logits_rows_ptr + row, tl.where(samples, logits_row, -1), mask=is_row)


@triton.jit
def _gather_tile_of_tokens(
    input_ids_ptr,  # [num_padded_tokens] int64
    positions_ptr,  # [num_padded_tokens] int64, or [3, num_padded_tokens] with M-RoPE
    stride_positions_axis,
    slot_mapping_ptr,  # [num_padded_tokens] int64, of this group
    idx_mapping_ptr,
    query_start_loc_ptr,
    query_len,
    token_ids_ptr,  # [max_num_reqs, max_model_len] int32
    stride_token_ids_slot,
    num_tokens_ptr,
    num_computed_ptr,
    stopped_ptr,
    draft_token_ids_ptr,  # [num_rows, most drafts] int32, or None
    stride_draft_token_ids_row,
    num_draft_tokens_ptr,
    mrope_positions_ptr,  # [max_num_reqs, 3, max_prompt] int32, or None
    stride_mrope_positions_slot,
    stride_mrope_positions_axis,
    mrope_delta_ptr,  # [max_num_reqs] int32, or None
    prompt_len_ptr,  # [max_num_reqs] int32, or None
    block_tables_ptr,  # [max_num_reqs, row_width] int32
    stride_block_tables_slot,
    table_offset,
    sink_blocks,
    ring_blocks,
    token,  # [TILE_TOKENS] int32
    num_rows,
    num_padded_tokens,
    num_bisections,
    max_model_len,
    IS_FIRST_GROUP,
    BLOCK_SIZE: tl.constexpr,
):
    """Write the per-token outputs of a tile of tokens; only the first group's are for all."""
    is_output = token < num_padded_tokens
    if query_start_loc_ptr is None:
        row = token // query_len
    else:
        row = _find_rows(token, query_start_loc_ptr, num_rows, num_bisections)
    has_row = is_output & (row < num_rows)
    slot, is_token, start, _, computed, known = _load_queries(
        idx_mapping_ptr,
        query_start_loc_ptr,
        query_len,
        num_tokens_ptr,
        num_computed_ptr,
        stopped_ptr,
        row,
        has_row,
    )
    position = computed + (token - start)
    end = known
    if num_draft_tokens_ptr is not None:
        end += tl.load(num_draft_tokens_ptr + row, mask=has_row, other=0)
    is_token &= position < tl.minimum(end, max_model_len)
    position = tl.where(is_token, position, 0)

    if IS_FIRST_GROUP:
        is_known = is_token & (position < known)
        token_id_ptr = token_ids_ptr + slot * stride_token_ids_slot + position
        token_id = tl.load(token_id_ptr, mask=is_known, other=0)
        if draft_token_ids_ptr is not None:
            draft_ptr = draft_token_ids_ptr + row.to(tl.int64) * stride_draft_token_ids_row
            draft_ptr += position - known
            token_id += tl.load(draft_ptr, mask=is_token & (position >= known), other=0)
        tl.store(input_ids_ptr + token, token_id.to(tl.int64), mask=is_output)
        if mrope_positions_ptr is None:
            tl.store(positions_ptr + token, position.to(tl.int64), mask=is_output)
        else:
            in_prompt = position < tl.load(prompt_len_ptr + slot, mask=is_token, other=0)
            behind = position + tl.load(mrope_delta_ptr + slot, mask=is_token, other=0)
            axes_ptr = mrope_positions_ptr + slot * stride_mrope_positions_slot + position
            for axis in tl.static_range(3):
                axis_ptr = axes_ptr + axis * stride_mrope_positions_axis
                of_axis = tl.load(axis_ptr, mask=is_token & in_prompt, other=0)
                of_axis = tl.where(in_prompt, of_axis, behind)
                output_ptr = positions_ptr + axis * stride_positions_axis + token
                tl.store(output_ptr, tl.where(is_token, of_axis, 0).to(tl.int64), mask=is_output)

    logical = position // BLOCK_SIZE
    in_ring = sink_blocks + (logical - sink_blocks) % tl.maximum(ring_blocks, 1)
    column = tl.where((ring_blocks == 0) | (logical < sink_blocks), logical, in_ring)
    entry_ptr = block_tables_ptr + slot * stride_block_tables_slot + (table_offset + column)
    block = tl.load(entry_ptr, mask=is_token, other=-1).to(tl.int64)
    cache_slot = tl.where(block >= 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(slot_mapping_ptr + token, cache_slot, mask=is_output)


@triton.jit
def _gather_block_table(
    block_table_ptr,  # [num_rows, row_width] int32
    stride_block_table_row,
    idx_mapping_ptr,
    query_start_loc_ptr,
    query_len,
    num_tokens_ptr,
    num_computed_ptr,
    stopped_ptr,
    block_tables_ptr,  # [max_num_reqs, row_width] int32
    stride_block_tables_slot,
    table_offset,
    sink_blocks,
    ring_blocks,
    row,  # [TILE_ROWS] int32
    num_rows,
    max_model_len,
    BLOCK_SIZE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Copy the live columns of one group's segments of a tile of rows."""
    slot, lives, _, length, computed, _ = _load_queries(
        idx_mapping_ptr,
        query_start_loc_ptr,
        query_len,
        num_tokens_ptr,
        num_computed_ptr,
        stopped_ptr,
        row,
        row < num_rows,
    )
    num_columns = tl.cdiv(tl.minimum(computed + length, max_model_len), BLOCK_SIZE)
    num_columns = tl.where(ring_blocks == 0, num_columns, sink_blocks + ring_blocks)
    num_columns = tl.where(lives, num_columns, 0)
    source_ptr = block_tables_ptr + slot * stride_block_tables_slot + table_offset
    target_ptr = block_table_ptr + row.to(tl.int64) * stride_block_table_row + table_offset
    for first in range(0, tl.max(num_columns, axis=0), TILE_COLUMNS):
        column = first + tl.arange(0, TILE_COLUMNS)[None, :]
        is_live = column < num_columns[:, None]
        block = tl.load(source_ptr[:, None] + column, mask=is_live, other=-1)
        tl.store(target_ptr[:, None] + column, block, mask=is_live)


@triton.jit(
    # what differs from step to step must not compile a kernel
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
    slot_mapping_ptr,  # [num_groups, num_padded_tokens] int64
    stride_slot_mapping_group,
    seq_lens_ptr,  # [num_rows] int32
    logits_rows_ptr,  # [num_rows] int64
    block_table_ptr,  # [num_rows, row_width] int32, or None
    stride_block_table_row,
    idx_mapping_ptr,  # [num_rows] int32, -1 = padding row
    query_start_loc_ptr,  # [num_rows + 1] int32, or None: every row has query_len tokens
    query_len,
    token_ids_ptr,  # [max_num_reqs, max_model_len] int32
    stride_token_ids_slot,
    num_tokens_ptr,  # [max_num_reqs] int32
    num_computed_ptr,  # [max_num_reqs] int32
    stopped_ptr,  # [max_num_reqs] int32, or None
    draft_token_ids_ptr,  # [num_rows, most drafts] int32, or None
    stride_draft_token_ids_row,
    num_draft_tokens_ptr,  # [num_rows] int32, or None
    mrope_positions_ptr,  # [max_num_reqs, 3, max_prompt] int32, or None
    stride_mrope_positions_slot,
    stride_mrope_positions_axis,
    mrope_delta_ptr,  # [max_num_reqs] int32, or None
    prompt_len_ptr,  # [max_num_reqs] int32, or None
    block_tables_ptr,  # [max_num_reqs, row_width] int32, -1 = no page
    stride_block_tables_slot,
    table_offset_ptr,  # [num_groups] int32
    sink_ptr,  # [num_groups] int32, tokens
    ring_blocks_ptr,  # [num_groups] int32, 0 = no ring
    num_rows,
    num_padded_tokens,
    num_bisections,  # enough to halve num_rows + 1 candidates down to one
    max_model_len,
    BLOCK_SIZE: tl.constexpr,  # tokens per KV block
    OVERLAP: tl.constexpr,  # see dependent_launch
    TILE_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Grid (tiles of tokens, of rows, of the block table; num_groups), see the module."""
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    tile = tl.program_id(0)
    group = tl.program_id(1)
    table_offset = tl.load(table_offset_ptr + group)
    sink_blocks = tl.cdiv(tl.load(sink_ptr + group), BLOCK_SIZE)
    ring_blocks = tl.load(ring_blocks_ptr + group)
    num_token_tiles = tl.cdiv(num_padded_tokens, TILE_TOKENS)
    num_row_tiles = tl.cdiv(num_rows, TILE_TOKENS)
    if tile < num_token_tiles:
        _gather_tile_of_tokens(
            input_ids_ptr,
            positions_ptr,
            stride_positions_axis,
            slot_mapping_ptr + group.to(tl.int64) * stride_slot_mapping_group,
            idx_mapping_ptr,
            query_start_loc_ptr,
            query_len,
            token_ids_ptr,
            stride_token_ids_slot,
            num_tokens_ptr,
            num_computed_ptr,
            stopped_ptr,
            draft_token_ids_ptr,
            stride_draft_token_ids_row,
            num_draft_tokens_ptr,
            mrope_positions_ptr,
            stride_mrope_positions_slot,
            stride_mrope_positions_axis,
            mrope_delta_ptr,
            prompt_len_ptr,
            block_tables_ptr,
            stride_block_tables_slot,
            table_offset,
            sink_blocks,
            ring_blocks,
            tile * TILE_TOKENS + tl.arange(0, TILE_TOKENS),
            num_rows,
            num_padded_tokens,
            num_bisections,
            max_model_len,
            group == 0,
            BLOCK_SIZE,
        )
    elif tile < num_token_tiles + num_row_tiles:
        if group == 0:
            _gather_rows(
                seq_lens_ptr,
                logits_rows_ptr,
                idx_mapping_ptr,
                query_start_loc_ptr,
                query_len,
                num_tokens_ptr,
                num_computed_ptr,
                stopped_ptr,
                num_draft_tokens_ptr,
                (tile - num_token_tiles) * TILE_TOKENS + tl.arange(0, TILE_TOKENS),
                num_rows,
            )
    elif block_table_ptr is not None:
        _gather_block_table(
            block_table_ptr,
            stride_block_table_row,
            idx_mapping_ptr,
            query_start_loc_ptr,
            query_len,
            num_tokens_ptr,
            num_computed_ptr,
            stopped_ptr,
            block_tables_ptr,
            stride_block_tables_slot,
            table_offset,
            sink_blocks,
            ring_blocks,
            (tile - num_token_tiles - num_row_tiles) * TILE_ROWS + tl.arange(0, TILE_ROWS),
            num_rows,
            max_model_len,
            BLOCK_SIZE,
            TILE_COLUMNS,
        )


@dataclass(frozen=True, slots=True)
class GatherTokensConfig:
    """How the gather is cut into programs."""

    tile_tokens: int
    """Tokens, and rows of the per-row outputs, of one program."""
    tile_rows: int
    """Block table rows of one program."""
    tile_columns: int
    """Block table columns in flight in one program."""
    num_warps: int

    @classmethod
    def default_for(cls) -> GatherTokensConfig:
        """Return the GPU's choice: one token a thread, for the time goes into dependent loads.

        At a context of 1000 no other choice is faster on an H200; the wide tile of the block table
        is for long contexts.
        """
        return cls(tile_tokens=128, tile_rows=1, tile_columns=1024, num_warps=4)

    @classmethod
    def for_interpreter(cls, num_indices: int, num_rows: int) -> GatherTokensConfig:
        """Return one program of each kind, up to 2^16 tokens and 2^10 rows."""
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
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_size: int,
    group_table_offset: torch.Tensor,
    group_sink: torch.Tensor,
    group_ring_blocks: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    logits_rows: torch.Tensor,
    query_len: int | None = None,
    stopped: torch.Tensor | None = None,
    draft_token_ids: torch.Tensor | None = None,
    num_draft_tokens: torch.Tensor | None = None,
    mrope_positions: torch.Tensor | None = None,
    mrope_delta: torch.Tensor | None = None,
    prompt_len: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> None:
    """Write a step's token ids, positions, lengths, cache slots, sampling rows and block table.

    A padding row has slot -1, or a slot that has stopped. Tokens of padding rows, tokens past the
    last row, positions past the row's last draft and positions from ``max_model_len`` on are
    padding: id 0, position 0, cache slot -1.

    Args:
        idx_mapping: [num_reqs] int32, the request slot of each batch row; -1 = padding row.
        query_start_loc: [num_reqs + 1] int32, first token of each row, ascending from 0; not
            read, and may be None, if ``query_len`` is given.
        token_ids: [max_num_reqs, max_model_len] int32, unit last stride: prompt, then output.
        num_tokens: [max_num_reqs] int32, tokens known of each request.
        num_computed_tokens: [max_num_reqs] int32, tokens already in the cache.
        block_tables: [max_num_reqs, row_width] int32, slot order, unit last stride; -1 = no page.
        block_size: tokens per KV block, a power of two.
        group_table_offset: [groups] int32, first column of each group's segment of a row.
        group_sink: [groups] int32, sink tokens.
        group_ring_blocks: [groups] int32, ring width in blocks, 0 = no ring.
        input_ids: [padded tokens] int64, *written*, every element.
        positions: [padded tokens] int64, or [3, padded tokens] int64, unit last stride, with
            ``mrope_positions``; *written*, every element.
        seq_lens: [num_reqs] int32, *written*: computed tokens plus the row's query, 0 for padding.
        slot_mapping: [groups, padded tokens] int64, unit last stride, *written*, every element.
        logits_rows: [num_reqs] int64, *written*: the row's token at position ``num_tokens - 1``
            if the query holds it and the drafts, so that the row samples; else -1. With k drafts
            the row's k + 1 logits are those of k + 1 tokens from there.
        query_len: tokens of every row, if they all have the same number.
        stopped: [max_num_reqs] int32, not 0 = the request has stopped. None = none has.
        draft_token_ids: [num_reqs, most drafts] int32, unit last stride, at most 7 columns, batch
            order: the tokens at positions ``num_tokens``, ``num_tokens + 1``, ... of each row.
        num_draft_tokens: [num_reqs] int32, batch order: drafts of each row; its query ends with
            them. Goes with ``draft_token_ids``.
        mrope_positions: [max_num_reqs, 3, max_prompt] int32, unit last stride: a prompt token's
            position on each of M-RoPE's axes.
        mrope_delta: [max_num_reqs] int32, added to an output token's position, on each axis alike.
            Goes with ``mrope_positions``.
        prompt_len: [max_num_reqs] int32, at most max_prompt. Goes with ``mrope_positions``.
        block_table: [num_reqs, row_width] int32, unit last stride, *written* in the live columns
            and nowhere else: of a group without a ring the first ceil(seq_len / block_size) of
            its segment (at most ceil(max_model_len / block_size)), of one with a ring all
            ceil(sink / block_size) + ring_blocks; none of a padding row.

    Raises:
        TypeError, ValueError: an argument is not as described, or one lacks what it goes with.
        UnsupportedDeviceError: a CPU tensor while not interpreting, or the reverse.

    Numerics: integers; exact (tier A).
    Stream: one launch on the current stream, no synchronisation, CUDA-graph safe.
    """
    check_launchable("idx_mapping", idx_mapping)
    groups = (group_table_offset, group_sink, group_ring_blocks)
    _check_inputs(idx_mapping, token_ids, num_tokens, num_computed_tokens, block_tables, stopped)
    check_queries(query_start_loc, query_len, idx_mapping.shape[0], idx_mapping.device)
    _check_drafts(idx_mapping, draft_token_ids, num_draft_tokens)
    _check_mrope(token_ids, mrope_positions, mrope_delta, prompt_len)
    _check_groups(block_size, groups, idx_mapping.device)
    num_axes = None if mrope_positions is None else 3
    _check_outputs(
        idx_mapping, groups, num_axes, input_ids, positions, seq_lens, slot_mapping, logits_rows
    )
    if block_table is not None:
        check_tensor(
            "block_table",
            block_table,
            shape=(idx_mapping.shape[0], block_tables.shape[1]),
            dtype=torch.int32,
            device=idx_mapping.device,
            unit_last_stride=True,
        )
    num_rows, num_padded_tokens = idx_mapping.shape[0], input_ids.shape[0]
    num_indices = max(num_rows, num_padded_tokens)
    if num_indices == 0:
        return
    if INTERPRET:
        config = GatherTokensConfig.for_interpreter(num_indices, num_rows)
    else:
        config = _GPU_CONFIG
    num_tiles = triton.cdiv(num_padded_tokens, config.tile_tokens)
    num_tiles += triton.cdiv(num_rows, config.tile_tokens)
    if block_table is not None:
        num_tiles += triton.cdiv(num_rows, config.tile_rows)
    _gather_tokens_kernel[(num_tiles, group_sink.shape[0])](
        input_ids,
        positions,
        positions.stride(0),
        slot_mapping,
        slot_mapping.stride(0),
        seq_lens,
        logits_rows,
        block_table,
        _row_stride(block_table),
        idx_mapping,
        None if query_len is not None else query_start_loc,
        query_len or 0,
        token_ids,
        token_ids.stride(0),
        num_tokens,
        num_computed_tokens,
        stopped,
        draft_token_ids,
        _row_stride(draft_token_ids),
        num_draft_tokens,
        mrope_positions,
        _row_stride(mrope_positions),
        0 if mrope_positions is None else mrope_positions.stride(1),
        mrope_delta,
        None if mrope_positions is None else prompt_len,
        block_tables,
        block_tables.stride(0),
        *groups,
        num_rows,
        num_padded_tokens,
        num_bisections=num_rows.bit_length(),
        max_model_len=token_ids.shape[1],
        BLOCK_SIZE=block_size,
        TILE_TOKENS=config.tile_tokens,
        TILE_ROWS=config.tile_rows,
        TILE_COLUMNS=config.tile_columns,
        num_warps=config.num_warps,
        **overlap_options(idx_mapping.device),
    )


def _row_stride(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def _check_inputs(
    idx_mapping: torch.Tensor,
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    stopped: torch.Tensor | None,
) -> None:
    device = idx_mapping.device
    check_tensor("idx_mapping", idx_mapping, shape=(None,), dtype=torch.int32, contiguous=True)
    check_tensor(
        "token_ids",
        token_ids,
        shape=(None, None),
        dtype=torch.int32,
        device=device,
        unit_last_stride=True,
    )
    max_num_reqs = token_ids.shape[0]
    check_tensor(
        "block_tables",
        block_tables,
        shape=(max_num_reqs, None),
        dtype=torch.int32,
        device=device,
        unit_last_stride=True,
    )
    _check_vectors(
        max_num_reqs,
        device,
        num_tokens=num_tokens,
        num_computed_tokens=num_computed_tokens,
        stopped=stopped if stopped is not None else num_tokens,
    )


def _check_drafts(
    idx_mapping: torch.Tensor,
    draft_token_ids: torch.Tensor | None,
    num_draft_tokens: torch.Tensor | None,
) -> None:
    if draft_token_ids is None and num_draft_tokens is None:
        return
    if draft_token_ids is None or num_draft_tokens is None:
        raise ValueError("draft_token_ids, num_draft_tokens: expected both or neither, got one")
    check_tensor(
        "draft_token_ids",
        draft_token_ids,
        shape=(idx_mapping.shape[0], None),
        dtype=torch.int32,
        device=idx_mapping.device,
        unit_last_stride=True,
    )
    if draft_token_ids.shape[1] > MAX_DRAFT_TOKENS:
        raise ValueError(
            f"draft_token_ids: expected at most {MAX_DRAFT_TOKENS} columns, "
            f"got {draft_token_ids.shape[1]}"
        )
    _check_vectors(idx_mapping.shape[0], idx_mapping.device, num_draft_tokens=num_draft_tokens)


def _check_mrope(
    token_ids: torch.Tensor,
    mrope_positions: torch.Tensor | None,
    mrope_delta: torch.Tensor | None,
    prompt_len: torch.Tensor | None,
) -> None:
    if mrope_positions is None:
        if mrope_delta is not None:
            raise ValueError("mrope_positions: expected a tensor with mrope_delta, got None")
        return
    if mrope_delta is None or prompt_len is None:
        raise ValueError("mrope_positions: expected mrope_delta and prompt_len with it, got None")
    max_num_reqs = token_ids.shape[0]
    check_tensor(
        "mrope_positions",
        mrope_positions,
        shape=(max_num_reqs, 3, None),
        dtype=torch.int32,
        device=token_ids.device,
        unit_last_stride=True,
    )
    _check_vectors(max_num_reqs, token_ids.device, mrope_delta=mrope_delta, prompt_len=prompt_len)


def _check_vectors(size: int, device: torch.device, **vectors: torch.Tensor) -> None:
    for name, tensor in vectors.items():
        check_tensor(
            name, tensor, shape=(size,), dtype=torch.int32, device=device, contiguous=True
        )


def _check_groups(
    block_size: int, groups: tuple[torch.Tensor, torch.Tensor, torch.Tensor], device: torch.device
) -> None:
    if block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"block_size: expected a power of two, got {block_size}")
    names = ("group_table_offset", "group_sink", "group_ring_blocks")
    num_groups = groups[0].shape[0] if groups[0].dim() == 1 else None
    if num_groups == 0:
        raise ValueError("group_table_offset: expected at least one group, got none")
    for name, tensor in zip(names, groups, strict=True):
        check_tensor(
            name, tensor, shape=(num_groups,), dtype=torch.int32, device=device, contiguous=True
        )


def _check_outputs(
    idx_mapping: torch.Tensor,
    groups: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    num_axes: int | None,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    logits_rows: torch.Tensor,
) -> None:
    device, num_rows = idx_mapping.device, idx_mapping.shape[0]
    check_tensor("input_ids", input_ids, shape=(None,), dtype=torch.int64, device=device)
    num_padded_tokens = input_ids.shape[0]
    for name, tensor, size, dtype in (
        ("input_ids", input_ids, num_padded_tokens, torch.int64),
        ("seq_lens", seq_lens, num_rows, torch.int32),
        ("logits_rows", logits_rows, num_rows, torch.int64),
    ):
        check_tensor(name, tensor, shape=(size,), dtype=dtype, device=device, contiguous=True)
    for name, tensor, rows in (
        ("positions", positions, num_axes),
        ("slot_mapping", slot_mapping, groups[0].shape[0]),
    ):
        check_tensor(
            name,
            tensor,
            shape=(num_padded_tokens,) if rows is None else (rows, num_padded_tokens),
            dtype=torch.int64,
            device=device,
            unit_last_stride=True,
        )
