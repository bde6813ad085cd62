"""Turn a step's row-to-slot map into the model's inputs, entirely on the device.

Token ``j`` of row ``r`` is the token at position ``num_computed_tokens[slot] + j`` of the row's
request. Its cache slot in head group ``g`` is ``block * block_size + position % block_size``, the
block read from the group's segment of the request's table row (S = ceil(sink / block_size),
L = position // block_size)::

    column = table_offset[g] + (L                              if ring_blocks[g] == 0 or L < S
                                S + (L - S) % ring_blocks[g]   otherwise)

One program serves a tile of tokens and, for the per-row outputs, a tile of rows. A token finds its
row by bisecting ``query_start_loc``, so ragged batches cost no more than even ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrv1.kernels._checks import check_launchable, check_tensor
from mrv1.kernels._triton import INTERPRET, tl, triton


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
def _gather_rows(
    seq_lens_ptr,  # [num_rows] int32
    logits_rows_ptr,  # [num_rows] int64
    idx_mapping_ptr,  # [num_rows] int32
    query_start_loc_ptr,  # [num_rows + 1] int32
    num_tokens_ptr,  # [max_num_reqs] int32
    num_computed_ptr,  # [max_num_reqs] int32
    row,  # [TILE_TOKENS] int32
    num_rows,
):
    """Write the per-row outputs of a tile of rows."""
    is_row = row < num_rows
    slot = tl.load(idx_mapping_ptr + row, mask=is_row, other=-1).to(tl.int64)
    is_request = slot >= 0
    start = tl.load(query_start_loc_ptr + row, mask=is_request, other=0)
    end = tl.load(query_start_loc_ptr + row + 1, mask=is_request, other=0)
    computed = tl.load(num_computed_ptr + slot, mask=is_request, other=0)
    known = tl.load(num_tokens_ptr + slot, mask=is_request, other=0)
    seq_len = computed + (end - start)
    samples = is_request & (end > start) & (seq_len == known)
    tl.store(seq_lens_ptr + row, seq_len, mask=is_row)
    tl.store(logits_rows_ptr + row, tl.where(samples, end - 1, -1).to(tl.int64), mask=is_row)


@triton.jit(do_not_specialize=["num_rows", "num_padded_tokens", "num_bisections"])
def _gather_tokens_kernel(
    input_ids_ptr,  # [num_padded_tokens] int64
    positions_ptr,  # [num_padded_tokens] int64
    slot_mapping_ptr,  # [num_groups, num_padded_tokens] int64
    stride_slot_group,
    seq_lens_ptr,  # [num_rows] int32
    logits_rows_ptr,  # [num_rows] int64
    idx_mapping_ptr,  # [num_rows] int32, -1 = padding row
    query_start_loc_ptr,  # [num_rows + 1] int32
    token_ids_ptr,  # [max_num_reqs, max_model_len] int32
    stride_token_ids_slot,
    num_tokens_ptr,  # [max_num_reqs] int32
    num_computed_ptr,  # [max_num_reqs] int32
    block_tables_ptr,  # [max_num_reqs, row_width] int32, -1 = no page
    stride_block_tables_slot,
    table_offset_ptr,  # [num_groups] int32
    sink_ptr,  # [num_groups] int32, tokens
    ring_blocks_ptr,  # [num_groups] int32, 0 = no ring
    num_rows,
    num_padded_tokens,
    num_bisections,  # enough to halve num_rows + 1 candidates down to one
    max_model_len,
    num_groups,
    BLOCK_SIZE: tl.constexpr,  # tokens per KV block
    TILE_TOKENS: tl.constexpr,
):
    """Grid (cdiv(max(num_padded_tokens, num_rows), TILE_TOKENS),): one tile of both each."""
    index = tl.program_id(0) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    _gather_rows(
        seq_lens_ptr,
        logits_rows_ptr,
        idx_mapping_ptr,
        query_start_loc_ptr,
        num_tokens_ptr,
        num_computed_ptr,
        index,
        num_rows,
    )

    is_output = index < num_padded_tokens
    row = _find_rows(index, query_start_loc_ptr, num_rows, num_bisections)
    has_row = is_output & (row < num_rows)
    slot = tl.load(idx_mapping_ptr + row, mask=has_row, other=-1).to(tl.int64)
    is_token = slot >= 0
    start = tl.load(query_start_loc_ptr + row, mask=is_token, other=0)
    computed = tl.load(num_computed_ptr + slot, mask=is_token, other=0)
    position = computed + (index - start)
    is_token = is_token & (position < max_model_len)
    position = tl.where(is_token, position, 0)
    token_id_ptr = token_ids_ptr + slot * stride_token_ids_slot + position
    token_id = tl.load(token_id_ptr, mask=is_token, other=0)
    tl.store(input_ids_ptr + index, token_id.to(tl.int64), mask=is_output)
    tl.store(positions_ptr + index, position.to(tl.int64), mask=is_output)

    logical = position // BLOCK_SIZE
    output_ptr = slot_mapping_ptr + index
    for group in range(num_groups):
        sink_blocks = (tl.load(sink_ptr + group) + BLOCK_SIZE - 1) // BLOCK_SIZE
        ring = tl.load(ring_blocks_ptr + group)
        in_ring = sink_blocks + (logical - sink_blocks) % tl.maximum(ring, 1)
        column = tl.where((ring == 0) | (logical < sink_blocks), logical, in_ring)
        column += tl.load(table_offset_ptr + group)
        entry_ptr = block_tables_ptr + slot * stride_block_tables_slot + column
        block = tl.load(entry_ptr, mask=is_token, other=-1).to(tl.int64)
        cache_slot = tl.where(block >= 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(output_ptr, cache_slot, mask=is_output)
        output_ptr += stride_slot_group


@dataclass(frozen=True, slots=True)
class GatherTokensConfig:
    """How the gather is cut into programs."""

    tile_tokens: int
    """Tokens, and rows, of one program."""
    num_warps: int

    @classmethod
    def default_for(cls) -> GatherTokensConfig:
        """Return the GPU's choice: one token a thread, for the time goes into dependent loads."""
        return cls(tile_tokens=128, num_warps=4)

    @classmethod
    def for_interpreter(cls, num_indices: int) -> GatherTokensConfig:
        """Return one program for everything, up to 2^16 tokens."""
        return cls(min(triton.next_power_of_2(num_indices), 2**16), num_warps=1)


_GPU_CONFIG = GatherTokensConfig.default_for()


def gather_tokens(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
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
) -> None:
    """Write a step's token ids, positions, lengths, cache slots and sampling rows.

    Tokens of padding rows, tokens past ``query_start_loc[-1]`` and positions
    from ``max_model_len`` on are padding: id 0, position 0, cache slot -1.

    Args:
        idx_mapping: [num_reqs] int32, the request slot of each batch row; -1 = padding row.
        query_start_loc: [num_reqs + 1] int32, first token of each row, ascending from 0.
        token_ids: [max_num_reqs, max_model_len] int32, unit last stride: prompt, then output.
        num_tokens: [max_num_reqs] int32, tokens known of each request.
        num_computed_tokens: [max_num_reqs] int32, tokens already in the cache.
        block_tables: [max_num_reqs, row_width] int32, slot order, unit last stride; -1 = no page.
        block_size: tokens per KV block, a power of two.
        group_table_offset: [groups] int32, first column of each group's segment of a row.
        group_sink: [groups] int32, sink tokens.
        group_ring_blocks: [groups] int32, ring width in blocks, 0 = no ring.
        input_ids: [padded tokens] int64, *written*, every element.
        positions: [padded tokens] int64, *written*, every element.
        seq_lens: [num_reqs] int32, *written*: computed tokens plus the row's query, 0 for padding.
        slot_mapping: [groups, padded tokens] int64, unit last stride, *written*, every element.
        logits_rows: [num_reqs] int64, *written*: the row's last token if the step reaches the last
            known token of the request, so that the row samples; else -1.

    Raises:
        TypeError, ValueError: an argument is not as described.
        UnsupportedDeviceError: a CPU tensor while not interpreting, or the reverse.

    Numerics: integers; exact (tier A).
    Stream: current stream, no synchronisation, CUDA-graph safe.
    """
    check_launchable("idx_mapping", idx_mapping)
    groups = (group_table_offset, group_sink, group_ring_blocks)
    _check_inputs(
        idx_mapping, query_start_loc, token_ids, num_tokens, num_computed_tokens, block_tables
    )
    _check_groups(block_size, groups, idx_mapping.device)
    _check_outputs(idx_mapping, groups, input_ids, positions, seq_lens, slot_mapping, logits_rows)
    num_rows, num_padded_tokens = idx_mapping.shape[0], input_ids.shape[0]
    num_indices = max(num_rows, num_padded_tokens)
    if num_indices == 0:
        return
    config = GatherTokensConfig.for_interpreter(num_indices) if INTERPRET else _GPU_CONFIG
    _gather_tokens_kernel[(triton.cdiv(num_indices, config.tile_tokens),)](
        input_ids,
        positions,
        slot_mapping,
        slot_mapping.stride(0),
        seq_lens,
        logits_rows,
        idx_mapping,
        query_start_loc,
        token_ids,
        token_ids.stride(0),
        num_tokens,
        num_computed_tokens,
        block_tables,
        block_tables.stride(0),
        *groups,
        num_rows,
        num_padded_tokens,
        num_bisections=num_rows.bit_length(),
        max_model_len=token_ids.shape[1],
        num_groups=group_sink.shape[0],
        BLOCK_SIZE=block_size,
        TILE_TOKENS=config.tile_tokens,
        num_warps=config.num_warps,
    )


def _check_inputs(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    block_tables: torch.Tensor,
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
    for name, tensor, size in (
        ("query_start_loc", query_start_loc, idx_mapping.shape[0] + 1),
        ("num_tokens", num_tokens, max_num_reqs),
        ("num_computed_tokens", num_computed_tokens, max_num_reqs),
    ):
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
    for name, tensor in zip(names, groups, strict=True):
        check_tensor(
            name, tensor, shape=(num_groups,), dtype=torch.int32, device=device, contiguous=True
        )


def _check_outputs(
    idx_mapping: torch.Tensor,
    groups: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
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
        ("positions", positions, num_padded_tokens, torch.int64),
        ("seq_lens", seq_lens, num_rows, torch.int32),
        ("logits_rows", logits_rows, num_rows, torch.int64),
    ):
        check_tensor(name, tensor, shape=(size,), dtype=dtype, device=device, contiguous=True)
    check_tensor(
        "slot_mapping",
        slot_mapping,
        shape=(groups[0].shape[0], num_padded_tokens),
        dtype=torch.int64,
        device=device,
        unit_last_stride=True,
    )
