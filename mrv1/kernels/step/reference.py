"""The ops before and after a model's forward pass in plain torch."""

from __future__ import annotations

import torch

from mrv1.kernels._base.oracle import counted
from mrv1.kernels.step.contracts import (
    FAILED,
    LENGTH,
    RUNNING,
    STOP_SEQUENCE,
    STOP_TOKEN,
    AppendedTokens,
    GatheredTokens,
    RequestSlots,
    SlotTables,
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
    state: torch.Tensor, staged: torch.Tensor, segments: torch.Tensor, num_segments: torch.Tensor
) -> None:
    """Oracle of :func:`mrv1.kernels.scatter_segments`."""
    for dst, src, length in segments[: int(num_segments)].tolist():
        if length > 0:
            state[dst : dst + length] = staged[src : src + length] if src >= 0 else -1


@counted
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
    """Oracle of :func:`mrv1.kernels.gather_tokens`."""
    starts = _query_starts(query_start_loc, query_len, idx_mapping)
    query_lens = starts.diff()
    slot = idx_mapping.clamp_min(0).long()
    lives = (idx_mapping >= 0) & (slots.stopped[slot] == RUNNING)
    computed, known = slots.num_computed_tokens[slot].long(), slots.num_tokens[slot].long()
    end = known if num_draft_tokens is None else known + num_draft_tokens
    first = torch.minimum(computed, end - query_lens)
    row_seq_lens = torch.where(lives, first + query_lens, 0)
    samples = lives & (computed < known) & (row_seq_lens >= end)
    out.seq_lens.copy_(row_seq_lens)
    out.logits_rows.copy_(torch.where(samples, starts[:-1] + known - 1 - first, -1))
    max_model_len, block_size = slots.token_ids.shape[1], tables.block_size
    columns_inside = -(-row_seq_lens.clamp_max(max_model_len) // block_size)

    rows = torch.repeat_interleave(query_lens)  # row of each token
    tokens = torch.arange(rows.numel(), device=rows.device)
    positions = first[rows] + tokens - starts[rows]
    inside = lives[rows] & (positions >= 0) & (positions < end[rows].clamp_max(max_model_len))
    rows, tokens, positions = rows[inside], tokens[inside], positions[inside]
    for output, padding in ((out.input_ids, 0), (out.positions, 0), (out.slot_mapping, -1)):
        output.fill_(padding)
    out.input_ids[tokens] = slots.token_ids[slot[rows], positions].long()
    if draft_token_ids is not None:
        draft = positions - known[rows]
        is_draft = draft >= 0
        out.input_ids[tokens[is_draft]] = draft_token_ids[rows[is_draft], draft[is_draft]].long()
    if out.adapter_slots is not None and slots.adapter_slot is not None:
        out.adapter_slots.fill_(-1)
        out.adapter_slots[tokens] = slots.adapter_slot[slot[rows]]
    if slots.mrope_spans is None or slots.num_mrope_spans is None:
        out.positions[tokens] = positions
    else:
        out.positions[:, tokens] = _mrope_positions(
            slots.mrope_spans[slot[rows]], slots.num_mrope_spans[slot[rows]], positions
        )
    for group in range(tables.table_offset.numel()):
        offset, ring_blocks = tables.table_offset[group], tables.ring_blocks[group]
        sink_blocks = -(-tables.sink[group] // block_size)
        columns = offset + _ring_column(positions // block_size, sink_blocks, ring_blocks)
        blocks = tables.block_tables[slot[rows], columns].long()
        token_slots = blocks * block_size + positions % block_size
        is_written = (blocks >= 0) & (positions >= computed[rows])
        out.slot_mapping[group, tokens] = torch.where(is_written, token_slots, -1)
        if out.block_table is None:
            continue
        column = int(offset)
        for row in lives.nonzero().flatten().tolist():
            width = int(sink_blocks + ring_blocks if ring_blocks else columns_inside[row])
            segment = tables.block_tables[slot[row], column : column + width]
            out.block_table[row, column : column + width] = segment


def _mrope_positions(
    spans: torch.Tensor, num_spans: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Return [3, tokens] from each token's position and the spans of its request."""
    before = torch.arange(spans.shape[1], device=spans.device) < num_spans[:, None]
    before &= spans[:, :, 0] <= positions[:, None]
    span = before.sum(dim=1)  # 0 = the token is before the first span
    tokens = torch.arange(len(positions), device=spans.device)
    words = spans[tokens, span.sub(1).clamp_min(0)]
    words = torch.where(span[:, None] > 0, words, torch.zeros_like(words))
    start, end, first, delta, width, area, time_scale = words.T.contiguous()
    place, area, width = positions - start, area.clamp_min(1), width.clamp_min(1)
    frame = place // area
    of_grid = torch.stack(
        (
            (frame.float() * time_scale.view(torch.float32)).long(),
            place % area // width,
            place % area % width,
        )
    )
    return torch.where(positions < end, first + of_grid, positions + delta)


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


def _stop_sequences_of(slots: RequestSlots, slot: int) -> list[list[int]]:
    """Return the stop sequences of a slot."""
    sequences, lens = slots.stop_sequences, slots.stop_sequence_lens
    if sequences is None or lens is None or slots.num_stop_sequences is None:
        return []
    rows, max_len = sequences[slot].tolist(), sequences.shape[2]
    counting = lens[slot, : slots.num_stop_sequences[slot]].tolist()
    return [rows[i][:length] for i, length in enumerate(counting) if 1 <= length <= max_len]


@counted
def post_update(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    logits_rows: torch.Tensor,
    tokens: torch.Tensor,
    slots: RequestSlots,
    out: AppendedTokens,
    *,
    query_len: int | None = None,
    num_sampled: torch.Tensor | None = None,
) -> None:
    """Oracle of :func:`mrv1.kernels.post_update`."""
    output, num_output = out.output, out.num_output
    if out.ring_slot is not None:
        output, num_output = output[int(out.ring_slot)], num_output[int(out.ring_slot)]
    query_lens = _query_starts(query_start_loc, query_len, idx_mapping).diff().tolist()
    sampling = (logits_rows >= 0).int()
    counts = (sampling if num_sampled is None else sampling * num_sampled).tolist()
    output.fill_(-1)
    num_output.fill_(0)
    for row, slot in enumerate(idx_mapping.tolist()):
        if slot < 0 or slots.stopped[slot] != RUNNING:
            continue
        history, num_tokens = slots.token_ids[slot], slots.num_tokens[slot]  # views
        stop_tokens = slots.stop_token_ids[slot].tolist()
        sequences = _stop_sequences_of(slots, slot)
        failure = num_appended = 0
        for token in tokens[row, : counts[row]].tolist():
            if token < 0:
                slots.stopped[slot] = FAILED
                failure = token
                break
            history[num_tokens] = token
            num_tokens += 1
            output[row, num_appended] = token
            num_appended += 1
            if token in stop_tokens:
                slots.stopped[slot] = STOP_TOKEN
                break
            if sequences and num_tokens >= slots.min_total_tokens[slot]:
                new = history[slots.prompt_len[slot] : num_tokens].tolist()
                if any(new[-len(sequence) :] == sequence for sequence in sequences):
                    slots.stopped[slot] = STOP_SEQUENCE
                    break
            if num_tokens >= slots.max_total_tokens[slot]:
                slots.stopped[slot] = LENGTH
                break
        num_output[row] = failure or num_appended
        if counts[row] > 0:
            slots.num_computed_tokens[slot] = num_tokens - 1
        else:
            slots.num_computed_tokens[slot] += query_lens[row]
