"""End a step on the device: append the sampled tokens, advance the lengths, mark the stops.

For each row whose request has not stopped, with the row's sampled tokens in order::

    token < 0                                   the request has failed; nothing more is appended
    otherwise                                   the token is appended to the history, then
      it is one of the slot's stop tokens       the request stops (STOP_TOKEN)
      the output ends with a stop sequence,
        and num_tokens >= min_total_tokens      the request stops (STOP_SEQUENCE)
      num_tokens has reached max_total_tokens   the request stops (LENGTH)

Tokens after a stop are dropped. A token depends on the tokens before it only through a stop, so
all tokens of a row are judged at the same time and a minimum finds the first that stops it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.checks import check_launchable, check_reachable, check_tensor
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.step.contracts import (
    FAILED,
    LENGTH,
    MAX_SAMPLED_TOKENS,
    RUNNING,
    STOP_SEQUENCE,
    STOP_TOKEN,
    AppendedTokens,
    RequestSlots,
    check_queries,
    check_slots,
)

_RUNNING = tl.constexpr(RUNNING)
_STOP_TOKEN = tl.constexpr(STOP_TOKEN)
_LENGTH = tl.constexpr(LENGTH)
_FAILED = tl.constexpr(FAILED)
_STOP_SEQUENCE = tl.constexpr(STOP_SEQUENCE)


class _Sequences(NamedTuple):
    """The stop sequences of all slots, and the lengths from which they count."""

    sequences_ptr: tl.tensor
    stride_sequences_slot: tl.tensor
    lens_ptr: tl.tensor
    stride_lens_slot: tl.tensor
    num_sequences_ptr: tl.tensor
    prompt_len_ptr: tl.tensor
    min_total_ptr: tl.tensor


class _Rows(NamedTuple):
    """A tile of rows, [TILE_ROWS] each; the pointers are to each row's first element."""

    slot: tl.tensor
    is_request: tl.tensor
    known: tl.tensor
    history_ptr: tl.tensor
    tokens_ptr: tl.tensor


@triton.jit
def _ends_with_sequence(
    sequences, rows, column, is_output, MAX_SEQUENCES: tl.constexpr, MAX_LEN: tl.constexpr
):
    """Return whether the output up to each sampled token ends with a stop sequence."""
    slot, is_request, known, history_ptr, tokens_ptr = rows
    num_sequences = tl.load(sequences.num_sequences_ptr + slot, mask=is_request, other=0)
    prompt_len = tl.load(sequences.prompt_len_ptr + slot, mask=is_request, other=0)
    min_total = tl.load(sequences.min_total_ptr + slot, mask=is_request, other=0)
    sequences_ptr = sequences.sequences_ptr + slot * sequences.stride_sequences_slot
    lens_ptr = sequences.lens_ptr + slot * sequences.stride_lens_slot
    total = known[:, None] + column + 1  # length of the request after each sampled token
    may_end = is_output & (total >= min_total[:, None])
    ends = is_output & (column < 0)
    # The loop has no iteration if no row has a sequence.
    for sequence in range(tl.minimum(tl.max(num_sequences, axis=0), MAX_SEQUENCES)):
        has = is_request & (sequence < num_sequences)
        length = tl.load(lens_ptr + sequence, mask=has, other=0)
        has &= (length >= 1) & (length <= MAX_LEN)
        matches = may_end & has[:, None] & (total - length[:, None] >= prompt_len[:, None])
        for back in range(tl.minimum(tl.max(length, axis=0), MAX_LEN)):
            is_inside = has & (back < length)
            wanted_ptr = sequences_ptr + sequence * MAX_LEN + (length - 1 - back)
            wanted = tl.load(wanted_ptr, mask=is_inside, other=0)
            at = column - back  # >= 0: a sampled token, < 0: the history
            compares = matches & is_inside[:, None]
            sampled = tl.load(tokens_ptr[:, None] + at, mask=compares & (at >= 0), other=0)
            old_ptr = history_ptr[:, None] + (known[:, None] + at)
            old = tl.load(old_ptr, mask=compares & (at < 0), other=0)
            seen = tl.where(at >= 0, sampled, old.to(tl.int64))
            matches &= (seen == wanted[:, None]) | ~is_inside[:, None]
        ends |= matches
    return ends


@triton.jit(
    # a value that differs from step to step must not compile another kernel
    do_not_specialize=["stride_output_row", "stride_tokens_row", "num_rows", "query_len"],
    do_not_specialize_on_alignment=["idx_mapping_ptr", "query_start_loc_ptr"],
)
def _post_update_kernel(
    output_ptr, stride_output_row,  # [num_rows, num_columns] int64
    num_output_ptr,  # [num_rows] int32
    ring_slot_ptr,  # [1] int32, index in the ring of outputs; or None
    stride_output_slot, stride_num_output_slot,
    token_ids_ptr, stride_token_ids_slot,  # [max_num_reqs, max_model_len] int32
    num_tokens_ptr,  # [max_num_reqs] int32
    num_computed_ptr,  # [max_num_reqs] int32
    stopped_ptr,  # [max_num_reqs] int32
    idx_mapping_ptr,  # [num_rows] int32, -1 = padding row
    query_start_loc_ptr,  # [num_rows + 1] int32, or None: every row has query_len tokens
    logits_rows_ptr,  # [num_rows] int64, -1 = the row does not sample
    num_sampled_ptr,  # [num_rows] int32, or None: one token
    tokens_ptr, stride_tokens_row,  # [num_rows, num_columns] int64
    max_total_ptr,  # [max_num_reqs] int32
    stop_token_ids_ptr,  # [max_num_reqs, MAX_STOP_TOKENS] int32, -1 = none
    stride_stop_token_ids_slot,
    sequences_ptr, stride_sequences_slot,  # [max_num_reqs, MAX_SEQUENCES, MAX_LEN] int32, or None
    sequence_lens_ptr, stride_sequence_lens_slot,  # [max_num_reqs, MAX_SEQUENCES] int32
    num_sequences_ptr,  # [max_num_reqs] int32
    prompt_len_ptr,  # [max_num_reqs] int32
    min_total_ptr,  # [max_num_reqs] int32
    num_rows, query_len,
    num_columns,  # 1 + max_drafts
    MAX_STOP_TOKENS: tl.constexpr, MAX_SEQUENCES: tl.constexpr, MAX_LEN: tl.constexpr,
    OVERLAP: tl.constexpr,  # see dependent_launch
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,  # power of two >= num_columns
):  # fmt: skip
    """Grid (cdiv(num_rows, TILE_ROWS),): one program updates rows of distinct slots."""
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.arange(0, TILE_COLUMNS)[None, :]
    is_row = row < num_rows
    is_output = is_row[:, None] & (column < num_columns)
    slot = tl.load(idx_mapping_ptr + row, mask=is_row, other=-1).to(tl.int64)
    is_request = slot >= 0
    # All loads come first, and none waits for the stop code: they share one round trip.
    runs = is_request & (tl.load(stopped_ptr + slot, mask=is_request, other=0) == _RUNNING)
    known = tl.load(num_tokens_ptr + slot, mask=is_request, other=0)
    computed = tl.load(num_computed_ptr + slot, mask=is_request, other=0)
    max_total = tl.load(max_total_ptr + slot, mask=is_request, other=0)
    samples = tl.load(logits_rows_ptr + row, mask=is_row, other=-1) >= 0
    num_sampled = (runs & samples).to(tl.int32)
    if num_sampled_ptr is not None:
        num_sampled *= tl.load(num_sampled_ptr + row, mask=is_row, other=0)
    if query_start_loc_ptr is None:
        computed += query_len
    else:
        computed += tl.load(query_start_loc_ptr + row + 1, mask=is_row, other=0)
        computed -= tl.load(query_start_loc_ptr + row, mask=is_row, other=0)
    tokens_row_ptr = tokens_ptr + row * stride_tokens_row
    history_row_ptr = token_ids_ptr + slot * stride_token_ids_slot
    token = tl.load(tokens_row_ptr[:, None] + column, mask=is_output, other=0)
    stops = token < 0
    for i in tl.static_range(MAX_STOP_TOKENS):
        stop_token_ptr = stop_token_ids_ptr + slot * stride_stop_token_ids_slot + i
        stop_token = tl.load(stop_token_ptr, mask=is_request, other=-1)
        stops |= token == stop_token[:, None]

    is_sampled = is_output & (column < num_sampled[:, None])
    at_limit = known[:, None] + column + 1 >= max_total[:, None]
    code = tl.where(at_limit, _LENGTH, _RUNNING)
    if sequences_ptr is not None:
        sequences = _Sequences(
            sequences_ptr, stride_sequences_slot, sequence_lens_ptr, stride_sequence_lens_slot,
            num_sequences_ptr, prompt_len_ptr, min_total_ptr,
        )  # fmt: skip
        rows = _Rows(slot, is_request, known, history_row_ptr, tokens_row_ptr)
        ends = _ends_with_sequence(sequences, rows, column, is_sampled, MAX_SEQUENCES, MAX_LEN)
        code = tl.where(ends, _STOP_SEQUENCE, code)
    code = tl.where(token < 0, _FAILED, tl.where(stops, _STOP_TOKEN, code))
    last = tl.min(tl.where(is_sampled & (code != _RUNNING), column, TILE_COLUMNS), axis=1)
    stop_code = tl.sum(tl.where(column == last[:, None], code, _RUNNING), axis=1)
    appends = is_sampled & (column <= last[:, None]) & (token >= 0)
    num_appended = tl.sum(appends.to(tl.int32), axis=1)
    computed = tl.where(num_sampled > 0, known + num_appended - 1, computed)

    history_ptr = (history_row_ptr + known)[:, None] + column
    tl.store(history_ptr, token.to(tl.int32), mask=appends)
    tl.store(num_tokens_ptr + slot, known + num_appended, mask=runs)
    tl.store(num_computed_ptr + slot, computed, mask=runs)
    tl.store(stopped_ptr + slot, stop_code, mask=runs)
    if ring_slot_ptr is not None:
        ring_slot = tl.load(ring_slot_ptr).to(tl.int64)
        output_ptr += ring_slot * stride_output_slot
        num_output_ptr += ring_slot * stride_num_output_slot
    output_row_ptr = output_ptr + row[:, None] * stride_output_row
    tl.store(output_row_ptr + column, tl.where(appends, token, -1), mask=is_output)
    failure = tl.sum(tl.where(column == last[:, None], token, 0), axis=1).to(tl.int32)
    num_output = tl.where(stop_code == _FAILED, failure, num_appended)
    tl.store(num_output_ptr + row, num_output, mask=is_row)


@dataclass(frozen=True, slots=True)
class PostUpdateConfig:
    """How the rows are divided among programs."""

    tile_rows: int  # rows of one program
    num_warps: int

    @classmethod
    def default_for(cls, num_columns: int) -> PostUpdateConfig:
        """Return the configuration for a GPU: one warp per program.

        On an H200, 256 rows of one token take 1.2 us with one warp and 1.6 us with four.
        """
        return cls(tile_rows=32 // triton.next_power_of_2(num_columns), num_warps=1)

    @classmethod
    def for_interpreter(cls, num_rows: int) -> PostUpdateConfig:
        """Return the configuration for the interpreter: one program, up to 2^12 rows."""
        return cls(min(triton.next_power_of_2(num_rows), 2**12), num_warps=1)


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
    """Append a step's tokens to their requests, advance the lengths and mark requests that stop.

    Padding rows, and rows of slots that had stopped before the launch, change no slot.

    Args:
        idx_mapping: [num_reqs] int32, the slot of each batch row, all different; -1 = padding row.
        query_start_loc: [num_reqs + 1] int32, first token of each row; not read, and may be None,
            if ``query_len`` is given.
        logits_rows: [num_reqs] int64, as :func:`gather_tokens` wrote it; -1 = row does not sample.
        tokens: [num_reqs, 1 + max_drafts] int64, unit last stride, at most 8 columns: the tokens
            that each row sampled, in order; < 0 = no token could be sampled, and why.
        slots: the request of every slot; ``token_ids``, ``num_tokens``, ``num_computed_tokens``
            and ``stopped`` are *written*. A row that samples has ``num_tokens`` less than
            ``max_total_tokens``, and ``num_computed_tokens`` becomes ``num_tokens - 1``, stopped
            or not: the cache has all but the newest. In any other row it advances by the query.
        out: *written*.
        query_len: tokens of every row, if they all have the same number.
        num_sampled: [num_reqs] int32, number of leading ``tokens`` that count in each row that
            samples: 1 + the accepted drafts. None = 1.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: integers; exact (tier A).
    Stream: one launch on the current stream, no synchronisation, CUDA-graph safe.
    """
    num_rows, num_columns = _check_rows(idx_mapping, logits_rows, tokens, num_sampled)
    check_queries(query_start_loc, query_len, num_rows, idx_mapping.device)
    _check_slots(slots, idx_mapping.device)
    _check_outputs(out, tokens)
    if num_rows == 0:
        return
    if INTERPRET:
        config = PostUpdateConfig.for_interpreter(num_rows)
    else:
        config = PostUpdateConfig.default_for(num_columns)
    sequences = slots.stop_sequences
    _post_update_kernel[(triton.cdiv(num_rows, config.tile_rows),)](
        out.output, out.output.stride(-2), out.num_output, out.ring_slot,
        0 if out.ring_slot is None else out.output.stride(0),
        0 if out.ring_slot is None else out.num_output.stride(0),
        *with_strides(slots.token_ids, 1),
        slots.num_tokens, slots.num_computed_tokens, slots.stopped, idx_mapping,
        None if query_len is not None else query_start_loc, logits_rows, num_sampled,
        *with_strides(tokens, 1), slots.max_total_tokens, *with_strides(slots.stop_token_ids, 1),
        *with_strides(sequences, 1), *with_strides(slots.stop_sequence_lens, 1),
        slots.num_stop_sequences, None if sequences is None else slots.prompt_len,
        None if sequences is None else slots.min_total_tokens,
        num_rows, query_len or 0, num_columns,
        MAX_STOP_TOKENS=slots.stop_token_ids.shape[1],
        MAX_SEQUENCES=0 if sequences is None else sequences.shape[1],
        MAX_LEN=0 if sequences is None else sequences.shape[2], TILE_ROWS=config.tile_rows,
        TILE_COLUMNS=triton.next_power_of_2(num_columns), num_warps=config.num_warps,
        **overlap_options(idx_mapping.device),
    )  # fmt: skip


def _check_rows(
    idx_mapping: torch.Tensor,
    logits_rows: torch.Tensor,
    tokens: torch.Tensor,
    num_sampled: torch.Tensor | None,
) -> tuple[int, int]:
    """Return the number of rows, and of columns of ``tokens``."""
    check_tensor("idx_mapping", idx_mapping, shape=(None,), dtype=torch.int32, contiguous=True)
    check_launchable("idx_mapping", idx_mapping)
    num_rows = idx_mapping.shape[0]
    check = partial(check_tensor, device=idx_mapping.device)
    check("tokens", tokens, shape=(num_rows, None), dtype=torch.int64, unit_last_stride=True)
    num_columns = tokens.shape[1]
    if not 1 <= num_columns <= MAX_SAMPLED_TOKENS:
        raise ValueError(f"tokens: expected 1 to {MAX_SAMPLED_TOKENS} columns, got {num_columns}")
    check("logits_rows", logits_rows, shape=(num_rows,), dtype=torch.int64, contiguous=True)
    if num_sampled is not None:
        check("num_sampled", num_sampled, shape=(num_rows,), dtype=torch.int32, contiguous=True)
    return num_rows, num_columns


def _check_slots(slots: RequestSlots, device: torch.device) -> None:
    check_slots(slots, device, "num_tokens", "num_computed_tokens", "max_total_tokens", "stopped")
    check = partial(check_tensor, dtype=torch.int32, device=device)
    max_num_reqs = slots.token_ids.shape[0]
    shape = (max_num_reqs, None)
    check("slots.stop_token_ids", slots.stop_token_ids, shape=shape, unit_last_stride=True)
    names = ("stop_sequences", "stop_sequence_lens", "num_stop_sequences")
    missing = [name for name in names if getattr(slots, name) is None]
    if len(missing) == len(names):
        return
    sequences, lens = slots.stop_sequences, slots.stop_sequence_lens
    if sequences is None or missing:
        raise ValueError(f"{', '.join(names)}: expected all or none, got no {', '.join(missing)}")
    check("slots.stop_sequences", sequences, shape=(max_num_reqs, None, None))
    if max_num_reqs and not sequences[0].is_contiguous():
        raise ValueError(
            "slots.stop_sequences: expected each slot's sequences contiguous, got strides "
            f"{sequences.stride()}"
        )
    check("slots.stop_sequence_lens", lens, shape=sequences.shape[:2], unit_last_stride=True)
    check_slots(slots, device, "num_stop_sequences", "prompt_len", "min_total_tokens")


def _check_outputs(out: AppendedTokens, tokens: torch.Tensor) -> None:
    device = tokens.device
    ring: tuple[int | None, ...] = ()
    if out.ring_slot is not None:
        check = partial(check_tensor, dtype=torch.int32, device=device)
        check("out.ring_slot", out.ring_slot, shape=(1,), contiguous=True)
        ring = (out.output.shape[0] if out.output.dim() else None,)
    for name, tensor, shape, dtype in (
        ("out.output", out.output, tokens.shape, torch.int64),
        ("out.num_output", out.num_output, tokens.shape[:1], torch.int32),
    ):
        check_tensor(name, tensor, shape=(*ring, *shape), dtype=dtype, unit_last_stride=True)
        check_reachable(name, tensor, device)
