"""Stop codes, limits, argument dataclasses and checks of the ops around a model's forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from mrv1.kernels._base.checks import check_tensor, check_vectors

RUNNING = 0
"""Stop code of a slot whose request has not stopped."""
STOP_TOKEN = 1
"""Stop code: the newest token is one of the request's stop tokens."""
LENGTH = 2
"""Stop code: the request has ``max_total_tokens`` tokens."""
FAILED = 3
"""Stop code: the sampler had no token to give."""
STOP_SEQUENCE = 4
"""Stop code: the newest tokens are one of the request's stop sequences."""

MAX_DRAFT_TOKENS = 7
"""Most drafts of a row in one step."""
MAX_SAMPLED_TOKENS = 8
"""Most tokens that a row appends in one step: its drafts, if all are accepted, and one more."""

MROPE_SPAN_WORDS = 7
"""Words that give the M-RoPE positions of a span of tokens and of the text after it.

    start, end, first, delta, width, area, time_scale (the bits of a float32)

The token at position p of the request with start <= p < end has the place (frame, row, column) in
a grid of frames of ``area`` tokens with ``width`` columns: p - start in that mixed base. Its
positions in time, height and width are ``first`` plus floor(frame * time_scale) (one float32
product), row and column. The text from ``end`` to the next span has the position p + delta on each
axis. A span with start = end has only this text; before the first span delta is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSlots:
    """The request of every slot, as steps read and update it: int32, contiguous unless noted.

    An op checks the fields that it reads; other fields may have any content.
    """

    token_ids: torch.Tensor
    """[max_num_reqs, max_model_len], unit last stride: prompt, then output."""
    num_tokens: torch.Tensor
    """[max_num_reqs], known tokens, prompt and output."""
    num_computed_tokens: torch.Tensor
    """[max_num_reqs], tokens whose keys and values are in the cache."""
    stopped: torch.Tensor
    """[max_num_reqs], a stop code; not ``RUNNING`` = the request has stopped."""
    prompt_len: torch.Tensor
    """[max_num_reqs], prompt tokens."""
    max_total_tokens: torch.Tensor
    """[max_num_reqs], the length at which a request stops, at most max_model_len."""
    min_total_tokens: torch.Tensor
    """[max_num_reqs], the length below which no stop sequence stops a request."""
    stop_token_ids: torch.Tensor
    """[max_num_reqs, any], unit last stride, -1 = none."""
    stop_sequences: torch.Tensor | None = None
    """[max_num_reqs, max_sequences, max_len], each slot's sequences contiguous: token ids from
    column 0. A request stops where its output, without its prompt, ends with a sequence. None = no
    request has stop sequences; the next two fields are given or None with this field."""
    stop_sequence_lens: torch.Tensor | None = None
    """[max_num_reqs, max_sequences], unit last stride: tokens (1 to max_len, else skipped)."""
    num_stop_sequences: torch.Tensor | None = None
    """[max_num_reqs], sequences of each slot, from row 0; above max_sequences, all."""
    mrope_spans: torch.Tensor | None = None
    """[max_num_reqs, max_spans, MROPE_SPAN_WORDS], each slot's spans contiguous: the image and
    video tokens of a request, in ascending order without overlap; see ``MROPE_SPAN_WORDS``. None =
    a token has one position."""
    num_mrope_spans: torch.Tensor | None = None
    """[max_num_reqs], number of spans of each slot, from row 0. Goes with ``mrope_spans``."""
    adapter_slot: torch.Tensor | None = None
    """[max_num_reqs], the slot of the request's adapter (LoRA), -1 = none. None = no request has
    one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTables:
    """The block table of every slot, a row of concatenated segments, one per head group; int32."""

    block_tables: torch.Tensor
    """[max_num_reqs, row_width], unit last stride; -1 = no page."""
    table_offset: torch.Tensor
    """[groups], contiguous: first column of each group's segment."""
    sink: torch.Tensor
    """[groups], contiguous: sink tokens."""
    ring_blocks: torch.Tensor
    """[groups], contiguous: ring width in blocks, 0 = no ring."""
    block_size: int
    """Tokens per KV block, a power of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredTokens:
    """Outputs of ``gather_tokens``; contiguous, and *written* in every element, unless noted."""

    input_ids: torch.Tensor
    """[padded tokens] int64."""
    positions: torch.Tensor
    """[padded tokens] int64, or [3, padded tokens] int64, unit last stride, with M-RoPE."""
    seq_lens: torch.Tensor
    """[num_reqs] int32: the row's first position plus its query; 0 for padding, also where the
    slot's request has stopped. Where the query is longer than the tokens left to compute, this is
    ``num_tokens`` plus the row's drafts. Not limited to max_model_len."""
    slot_mapping: torch.Tensor
    """[groups, padded tokens] int64, unit last stride."""
    logits_rows: torch.Tensor
    """[num_reqs] int64: the index in the batch of the row's token at position ``num_tokens - 1``
    if the row samples, else -1. A row samples if it is no padding, its query reaches the last
    draft (without drafts, the last known token) and ``num_computed_tokens`` is less than
    ``num_tokens``, even with drafts. With k drafts the row's k + 1 logits are at this index and
    the k after it."""
    block_table: torch.Tensor | None = None
    """[num_reqs, row_width] int32, unit last stride, *written* in the live columns and nowhere
    else: for a group without a ring, the first ceil(seq_len / block_size) of its segment (at most
    ceil(max_model_len / block_size)); for a group with a ring, all ceil(sink / block_size) +
    ring_blocks; for a padding row, none. None = not wanted."""
    adapter_slots: torch.Tensor | None = None
    """[padded tokens] int32: the adapter slot of each token's request; -1 = none, or padding. None
    = not wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendedTokens:
    """Outputs of ``post_update``, on the device or pinned; the host reads after an event."""

    output: torch.Tensor
    """[num_reqs, 1 + max_drafts] int64, unit last stride, *written*: tokens appended, then -1."""
    num_output: torch.Tensor
    """[num_reqs] int32, unit last stride, *written*: tokens appended; 0 for padding, stopped and
    unfinished rows; for a row that failed in this launch, the value < 0 in place of its token."""
    ring_slot: torch.Tensor | None = None
    """[1] int32: the index, on an additional first axis of ``output`` and ``num_output``, of the
    only element that is *written*. The device reads the index, so that a captured graph writes to
    another element each time; not checked."""


def check_slots(slots: RequestSlots, device: torch.device, *vectors: str) -> None:
    """Raise unless ``token_ids`` and the fields ``vectors``, one element per slot, are valid."""
    check = partial(check_tensor, dtype=torch.int32, device=device)
    check("slots.token_ids", slots.token_ids, shape=(None, None), unit_last_stride=True)
    check_vectors("slots", slots, vectors, slots.token_ids.shape[0], device)


def check_queries(
    query_start_loc: torch.Tensor | None,
    query_len: int | None,
    num_rows: int,
    device: torch.device,
) -> None:
    """Raise unless ``query_start_loc`` or ``query_len`` gives the rows' query lengths."""
    if query_len is None and query_start_loc is None:
        raise ValueError("query_start_loc: expected a tensor where query_len is None, got None")
    if query_len is not None and query_len < 1:
        raise ValueError(f"query_len: expected None or at least 1, got {query_len}")
    if query_start_loc is not None:
        check = partial(check_tensor, dtype=torch.int32, device=device)
        check("query_start_loc", query_start_loc, shape=(num_rows + 1,), contiguous=True)
