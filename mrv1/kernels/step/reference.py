"""The ops before and behind a model's forward pass in plain torch."""

from __future__ import annotations

import torch

from mrv1.kernels._base.oracle import counted
from mrv1.kernels.step.contracts import (
    FAILED,
    LENGTH,
    RUNNING,
    STOP_SEQUENCE,
    STOP_TOKEN,
    check_queries,
)


@counted
def fetch_upload(uploads: torch.Tensor, slot: torch.Tensor, staged: torch.Tensor) -> None:
    """Oracle of :func:`mrv1.kernels.fetch_upload`."""
    upload = uploads[int(slot)]
    num_words = int(upload[0])
    staged[:num_words] = upload[:num_words]


@counted
def scatter_segments(
    state: torch.Tensor,
    staged: torch.Tensor,
    segments: torch.Tensor,
    num_segments: torch.Tensor,
) -> None:
    """Oracle of :func:`mrv1.kernels.scatter_segments`."""
    for dst, src, length in segments[: int(num_segments)].tolist():
        if length > 0:
            state[dst : dst + length] = staged[src : src + length] if src >= 0 else -1


@counted
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
    """Oracle of :func:`mrv1.kernels.gather_tokens`."""
    starts = _query_starts(query_start_loc, query_len, idx_mapping)
    query_lens = starts.diff()
    slots = idx_mapping.clamp_min(0).long()
    lives = idx_mapping >= 0
    if stopped is not None:
        lives = lives & (stopped[slots] == 0)
    computed, known = num_computed_tokens[slots].long(), num_tokens[slots].long()
    end = known if num_draft_tokens is None else known + num_draft_tokens
    row_seq_lens = torch.where(lives, computed + query_lens, 0)
    samples = lives & (computed < known) & (row_seq_lens >= end)
    seq_lens.copy_(row_seq_lens)
    logits_rows.copy_(torch.where(samples, starts[:-1] + known - 1 - computed, -1))
    columns_inside = -(-row_seq_lens.clamp_max(token_ids.shape[1]) // block_size)

    rows = torch.repeat_interleave(query_lens)  # row of each token
    tokens = torch.arange(rows.numel(), device=rows.device)
    token_positions = computed[rows] + tokens - starts[rows]
    inside = lives[rows] & (token_positions < end[rows].clamp_max(token_ids.shape[1]))
    rows, tokens, token_positions = rows[inside], tokens[inside], token_positions[inside]
    for output, padding in ((input_ids, 0), (positions, 0), (slot_mapping, -1)):
        output.fill_(padding)
    input_ids[tokens] = token_ids[slots[rows], token_positions].long()
    if draft_token_ids is not None:
        draft = token_positions - known[rows]
        is_draft = draft >= 0
        input_ids[tokens[is_draft]] = draft_token_ids[rows[is_draft], draft[is_draft]].long()
    if mrope_positions is None or mrope_delta is None or prompt_len is None:
        positions[tokens] = token_positions
    else:
        in_prompt = token_positions < prompt_len[slots[rows]]
        at = token_positions.clamp_max(mrope_positions.shape[2] - 1)
        of_axes = mrope_positions[slots[rows], :, at].T.long()
        positions[:, tokens] = torch.where(
            in_prompt, of_axes, token_positions + mrope_delta[slots[rows]]
        )
    for group in range(group_table_offset.numel()):
        offset, ring_blocks = group_table_offset[group], group_ring_blocks[group]
        sink_blocks = -(-group_sink[group] // block_size)
        columns = offset + _ring_column(token_positions // block_size, sink_blocks, ring_blocks)
        blocks = block_tables[slots[rows], columns].long()
        token_slots = blocks * block_size + token_positions % block_size
        slot_mapping[group, tokens] = torch.where(blocks >= 0, token_slots, -1)
        if block_table is None:
            continue
        first = int(offset)
        for row in lives.nonzero().flatten().tolist():
            width = int(sink_blocks + ring_blocks if ring_blocks else columns_inside[row])
            segment = block_tables[slots[row], first : first + width]
            block_table[row, first : first + width] = segment


def _query_starts(
    query_start_loc: torch.Tensor | None, query_len: int | None, idx_mapping: torch.Tensor
) -> torch.Tensor:
    """Return the first token of each row, and the end, [rows + 1] int64."""
    check_queries(query_start_loc, query_len, idx_mapping.shape[0], idx_mapping.device)
    if query_len is None and query_start_loc is not None:
        return query_start_loc.long()
    return torch.arange(idx_mapping.shape[0] + 1, device=idx_mapping.device) * (query_len or 0)


def _ring_column(
    block: torch.Tensor, sink_blocks: torch.Tensor, ring_blocks: torch.Tensor
) -> torch.Tensor:
    """Return the column of each logical block inside its group's segment of a table row."""
    in_ring = sink_blocks + (block - sink_blocks) % ring_blocks.clamp_min(1)
    return torch.where((ring_blocks == 0) | (block < sink_blocks), block, in_ring)


def _stop_sequences_of(
    slot: int,
    stop_sequences: torch.Tensor | None,
    stop_sequence_lens: torch.Tensor | None,
    num_stop_sequences: torch.Tensor | None,
) -> list[list[int]]:
    """Return the sequences of a slot that may end its request."""
    if stop_sequences is None or stop_sequence_lens is None or num_stop_sequences is None:
        return []
    lens = stop_sequence_lens[slot, : num_stop_sequences[slot]].tolist()
    rows = stop_sequences[slot].tolist()
    max_len = stop_sequences.shape[2]
    return [rows[i][:length] for i, length in enumerate(lens) if 1 <= length <= max_len]


@counted
def post_update(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    logits_rows: torch.Tensor,
    tokens: torch.Tensor,
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    max_total_tokens: torch.Tensor,
    stop_token_ids: torch.Tensor,
    stopped: torch.Tensor,
    *,
    output: torch.Tensor,
    num_output: torch.Tensor,
    ring_slot: torch.Tensor | None = None,
    query_len: int | None = None,
    num_sampled: torch.Tensor | None = None,
    stop_sequences: torch.Tensor | None = None,
    stop_sequence_lens: torch.Tensor | None = None,
    num_stop_sequences: torch.Tensor | None = None,
    prompt_len: torch.Tensor | None = None,
    min_total_tokens: torch.Tensor | None = None,
) -> None:
    """Oracle of :func:`mrv1.kernels.post_update`."""
    if ring_slot is not None:
        output, num_output = output[int(ring_slot)], num_output[int(ring_slot)]
    query_lens = _query_starts(query_start_loc, query_len, idx_mapping).diff().tolist()
    sampling = (logits_rows >= 0).int()
    counts = (sampling if num_sampled is None else sampling * num_sampled).tolist()
    output.fill_(-1)
    num_output.fill_(0)
    for row, slot in enumerate(idx_mapping.tolist()):
        if slot < 0 or stopped[slot] != RUNNING:
            continue
        stop_tokens = stop_token_ids[slot].tolist()
        sequences = _stop_sequences_of(
            slot, stop_sequences, stop_sequence_lens, num_stop_sequences
        )
        failure = num_appended = 0
        for token in tokens[row, : counts[row]].tolist():
            if token < 0:
                stopped[slot] = FAILED
                failure = token
                break
            token_ids[slot, num_tokens[slot]] = token
            num_tokens[slot] += 1
            output[row, num_appended] = token
            num_appended += 1
            if token in stop_tokens:
                stopped[slot] = STOP_TOKEN
                break
            if (
                prompt_len is not None
                and min_total_tokens is not None
                and num_tokens[slot] >= min_total_tokens[slot]
            ):
                new = token_ids[slot, prompt_len[slot] : num_tokens[slot]].tolist()
                if any(new[-len(sequence) :] == sequence for sequence in sequences):
                    stopped[slot] = STOP_SEQUENCE
                    break
            if num_tokens[slot] >= max_total_tokens[slot]:
                stopped[slot] = LENGTH
                break
        num_output[row] = failure or num_appended
        if counts[row] > 0:
            num_computed_tokens[slot] = num_tokens[slot] - 1
        else:
            num_computed_tokens[slot] += query_lens[row]
