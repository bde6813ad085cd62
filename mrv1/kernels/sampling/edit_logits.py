"""Edit a step's logits as each request asks: a bias, penalties, masks.

One word per slot says which edits the slot uses, :data:`ALLOWED` to :data:`PENALTIES`; a program
whose slot uses none ends after it has read the word. In this order, on the row's logits ``x``::

    bias         x[id] += value
    repetition   x = x / r  if x > 0 else  x * r      tokens of the prompt and of the output
    frequency    x -= f * (number of times the token is in the output)
    presence     x -= p                               tokens of the output
    min tokens   x = -inf                             stop tokens, of an output that is too short
    allowed      x = -inf                             tokens whose bit is 0

Masks first would give the same: -inf stays -inf under every finite bias and penalty.

A slot has one word of counts per token of the vocabulary: how often the token is in the output,
and bit 30 if the token is in the prompt. Each launch counts the tokens that the device's history
has gained since the launch before: one in a decode step, the whole history of a new slot. The row
of a draft token sees the drafts before it, but does not count them. A program owns a part of the
vocabulary of a request, in the counts and in all its logits rows, so no program waits for another.

Source: vLLM's ``apply_penalties`` for the formulas (``vllm/model_executor/layers/utils.py``),
xgrammar for the layout of the bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from mrv1.device import device_info
from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.checks import FLOAT_DTYPES, check_launchable
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.sampling.contracts import (
    ALLOWED,
    BIAS,
    MAX_PARTS,
    MIN_TOKENS,
    PENALTIES,
    History,
    LogitEdits,
    check_edit_logits,
    check_token_bitmask,
    shard_masks,
)

PROGRAMS = 1024
"""Most programs of a launch of fewer requests: an H200 runs 1056 with 64 registers a thread."""
MAX_REGISTERS = 64
"""Limit per thread on an H200; too few with drafts, and on other GPUs registers would spill."""
LIMITED = ((9, 0),)
"""Compute capabilities with that limit."""

_ALLOWED = tl.constexpr(ALLOWED)
_MIN_TOKENS = tl.constexpr(MIN_TOKENS)
_BIAS = tl.constexpr(BIAS)
_PENALTIES = tl.constexpr(PENALTIES)
_MAX_PARTS = tl.constexpr(MAX_PARTS)
_MANY_MASKS = tl.constexpr(8)
"""A launch of fewer masks takes the latency of its loads, not the time of its bytes."""
_IN_PROMPT = tl.constexpr(1 << 30)  # bit of a count; the bits below it count the output


class _Part(NamedTuple):
    """A program's part of the vocabulary: ``num_tiles`` tiles of tokens."""

    first_token: tl.tensor
    end_token: tl.tensor
    num_tiles: tl.tensor


class _Penalties(NamedTuple):
    """The penalties of a slot."""

    repetition: tl.tensor
    frequency: tl.tensor
    presence: tl.tensor


@triton.jit
def _mask_tokens(logits_row_ptr, mask_row_ptr, part, TILE_VOCAB: tl.constexpr):
    """Set the logits of a part's tokens with bit 0 to -inf; first_token is a multiple of 32."""
    for tile in range(part.num_tiles):
        token = part.first_token + tile * TILE_VOCAB + tl.arange(0, TILE_VOCAB)
        bits = tl.load(mask_row_ptr + token // 32, mask=token < part.end_token, other=-1)
        is_banned = ((bits >> (token % 32)) & 1) == 0
        # One token per thread, one mask word per warp: 16 bytes per thread would be four stores,
        # each of a quarter of every sector.
        tl.store(tl.max_contiguous(logits_row_ptr + token, 1), float("-inf"), mask=is_banned)


@triton.jit
def _load_words(mask_row_ptr, tile, part, TILE_WORDS: tl.constexpr):
    """Return the words of a part's tile, with all bits set beyond the part, and their indices."""
    word = part.first_token // 32 + tile * TILE_WORDS + tl.arange(0, TILE_WORDS)
    return tl.load(mask_row_ptr + word, mask=word * 32 < part.end_token, other=-1), word


@triton.jit
def _mask_words(
    logits_row_ptr, mask_row_ptr, bits, part, TILE_WORDS: tl.constexpr, REWRITE: tl.constexpr
):
    """Set the logits of a part's tokens with bit 0 to -inf; ``bits`` are of the first tile.

    REWRITE reads and writes back the logits of a word that allows some tokens, because a GPU takes
    longer to write a part of a sector; words that allow none are not read, all not written.
    """
    member = tl.arange(0, 32)[None, :]
    word = part.first_token // 32 + tl.arange(0, TILE_WORDS)
    for tile in range(part.num_tiles):
        token = word[:, None] * 32 + member
        following, word = _load_words(mask_row_ptr, tile + 1, part, TILE_WORDS)
        is_token = token < part.end_token
        is_banned = ((bits[:, None] >> member) & 1) == 0
        if REWRITE:
            is_written = (bits != -1)[:, None] & is_token
            is_read = (bits != 0)[:, None] & is_written
            x = tl.load(logits_row_ptr + token, mask=is_read, other=float("-inf"))
            x = tl.where(is_banned, float("-inf"), x)
            tl.store(logits_row_ptr + token, x, mask=is_written)
        else:
            tl.store(logits_row_ptr + token, float("-inf"), mask=is_banned & is_token)
        bits = following


@triton.jit
def _in_shard(token, shard_start):
    """Return token ids as places in the logits; None: the logits are of the whole vocabulary."""
    if shard_start is not None:
        token -= shard_start
    return token


@triton.jit
def _count_part(
    counts_row_ptr, history_ptr, counted, known, prompt_len,
    shard_start,  # or None
    part,
    TILE_VOCAB: tl.constexpr,
):  # fmt: skip
    """Count a history's tokens at positions ``counted`` to ``known`` that are in a part."""
    first_token, end_token, num_tiles = part
    if counted < 0:
        for tile in range(num_tiles):
            token = first_token + tile * TILE_VOCAB + tl.arange(0, TILE_VOCAB)
            tl.store(counts_row_ptr + token, 0, mask=token < end_token)
        tl.debug_barrier()  # cleared before any token is counted
    for start in range(tl.maximum(counted, 0), known, 2 * TILE_VOCAB):
        position = start + tl.arange(0, 2 * TILE_VOCAB)
        token_ptr = tl.max_contiguous(history_ptr + position, 1)  # in the layout of the atomics
        token = _in_shard(tl.load(token_ptr, mask=position < known, other=-1), shard_start)
        in_part = (token >= first_token) & (token < end_token)
        in_prompt = in_part & (position < prompt_len)
        in_output = in_part & (position >= prompt_len)
        # atomics, because a tile may repeat a token
        tl.atomic_or(counts_row_ptr + token, _IN_PROMPT, mask=in_prompt, sem="relaxed")
        tl.atomic_add(counts_row_ptr + token, 1, mask=in_output, sem="relaxed")


@triton.jit
def _penalize_part(
    logits_row_ptr, counts_row_ptr,
    drafts_ptr,  # or None
    ahead, penalties,
    shard_start,  # or None
    part,
    TILE_VOCAB: tl.constexpr,
):  # fmt: skip
    """Penalize a part's tokens that have been seen; no other logit is read or written."""
    repetition, frequency, presence = penalties
    first_token, end_token, num_tiles = part
    token = first_token + tl.arange(0, TILE_VOCAB)
    following = tl.load(counts_row_ptr + token, mask=token < end_token, other=0)
    for tile in range(num_tiles):
        token = first_token + tile * TILE_VOCAB + tl.arange(0, TILE_VOCAB)
        count = following  # the next tile's counts load while these are used
        next_token = token + TILE_VOCAB
        following = tl.load(counts_row_ptr + next_token, mask=next_token < end_token, other=0)
        if drafts_ptr is not None:
            for i in range(ahead):
                draft = _in_shard(tl.load(drafts_ptr + i), shard_start)
                is_draft = (token == draft) & (token < end_token)
                count += is_draft.to(tl.int32)
        is_seen = count != 0
        num_output = count & (_IN_PROMPT - 1)
        logit_ptr = tl.max_contiguous(logits_row_ptr + token, 4)  # in the layout of the counts
        # 1, not 0, where nothing is loaded: a GPU divides 0 on a slow path, and every lane waits.
        x = tl.load(logit_ptr, mask=is_seen, other=1.0).to(tl.float32)
        if repetition != 1.0:
            divisor = tl.full([TILE_VOCAB], 1.0, tl.float32) * repetition
            x = tl.where(x > 0, tl.div_rn(x, divisor), x * repetition)
        x -= frequency * num_output.to(tl.float32)
        x -= tl.where(num_output > 0, presence, 0.0)
        tl.store(logit_ptr, x, mask=is_seen)


@triton.jit(
    # a value that differs from step to step must not compile another kernel
    do_not_specialize=["stride_draft_token_ids_req", "rows_per_req", "part_tiles", "shard_start"],
    do_not_specialize_on_alignment=["idx_mapping_ptr", "ahead_ptr", "draft_token_ids_ptr"],
)
def _edit_logits_kernel(
    logits_ptr, stride_logits_row,  # [num_rows, vocab_size], unit last stride
    counts_ptr, stride_counts_slot,  # [max_num_reqs, vocab_size] int32
    counted_ptr,  # [max_num_reqs, MAX_PARTS] int32, contiguous, a slot's columns are equal
    token_ids_ptr, stride_token_ids_slot,  # [max_num_reqs, max_model_len] int32
    num_tokens_ptr,  # [max_num_reqs] int32
    prompt_len_ptr,  # [max_num_reqs] int32
    edits_ptr,  # [max_num_reqs] int32
    allowed_mask_ptr, stride_allowed_mask_slot,  # [max_num_reqs, cdiv(vocab_size, 32)] int32
    min_total_tokens_ptr,  # [max_num_reqs] int32
    stop_token_ids_ptr,  # [max_num_reqs, max_stop_tokens] int32, -1 = none
    stride_stop_token_ids_slot,
    bias_ids_ptr, stride_bias_ids_slot,  # [max_num_reqs, max_bias] int32
    bias_values_ptr, stride_bias_values_slot,  # [max_num_reqs, max_bias] float32
    num_bias_ptr,  # [max_num_reqs] int32
    repetition_penalty_ptr,  # [max_num_reqs] float32
    frequency_penalty_ptr,  # [max_num_reqs] float32
    presence_penalty_ptr,  # [max_num_reqs] float32
    draft_token_ids_ptr, stride_draft_token_ids_req,  # [num_reqs, max_drafts] int32, or None
    idx_mapping_ptr,  # [num_rows] int32, -1 = padding row
    ahead_ptr,  # [num_rows] int32 or int64, with draft_token_ids_ptr
    rows_per_req, max_stop_tokens, max_bias, vocab_size, part_tiles,
    shard_start,  # first token of the logits; None: they are of the whole vocabulary
    TILE_ROWS: tl.constexpr,  # power of two >= rows_per_req
    TILE_STOP_TOKENS: tl.constexpr,  # power of two >= max_stop_tokens
    TILE_BIAS: tl.constexpr,  # power of two >= max_bias
    TILE_VOCAB: tl.constexpr,
    IS_ALIGNED: tl.constexpr,  # see _is_aligned
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (num_reqs, num_parts): one program edits part_tiles tiles of a request's rows."""
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    req, part_index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_of_req = tl.arange(0, TILE_ROWS)
    row_slot_ptr = idx_mapping_ptr + req * rows_per_req + row_of_req
    slots = tl.load(row_slot_ptr, mask=row_of_req < rows_per_req, other=-1)
    slot = tl.max(slots, axis=0).to(tl.int64)  # all rows but padding have the same slot
    if slot < 0:
        return
    first_token = part_index * part_tiles * TILE_VOCAB
    end_token = tl.minimum(first_token + part_tiles * TILE_VOCAB, vocab_size)
    part = _Part(first_token, end_token, part_tiles)
    allowed_ptr = allowed_mask_ptr + slot * stride_allowed_mask_slot
    if draft_token_ids_ptr is None:
        # Few masks take the latency of their loads: a mask is loaded beside the word of edits.
        is_few = tl.num_programs(0) < _MANY_MASKS
        eager_part = _Part(first_token, tl.where(is_few, end_token, 0), part_tiles)
        bits, _ = _load_words(allowed_ptr, 0, eager_part, TILE_VOCAB // 32)
        edits = tl.load(edits_ptr + slot)
        if (edits == _ALLOWED) & is_few:
            logits_row_ptr = logits_ptr + req * stride_logits_row
            _mask_words(logits_row_ptr, allowed_ptr, bits, part, TILE_VOCAB // 32, False)
            return
    else:
        edits = tl.load(edits_ptr + slot)
    if edits == 0:
        return

    known = tl.load(num_tokens_ptr + slot)
    counts_row_ptr = counts_ptr + slot * stride_counts_slot
    if edits & _PENALTIES:
        column = tl.arange(0, _MAX_PARTS)
        counted_row_ptr = counted_ptr + slot * _MAX_PARTS
        _count_part(
            counts_row_ptr,
            token_ids_ptr + slot * stride_token_ids_slot,
            tl.load(counted_row_ptr + part_index),
            known,
            tl.load(prompt_len_ptr + slot),
            shard_start,
            part,
            TILE_VOCAB,
        )
        tl.debug_barrier()  # all warps have read ``counted`` before the store, and see the counts
        # Every column, with or without a program: another launch may have more programs.
        is_own = column % tl.num_programs(1) == part_index
        tl.store(counted_row_ptr + column, known, mask=is_own)

    for i in range(rows_per_req):
        row = req * rows_per_req + i
        if tl.load(idx_mapping_ptr + row) >= 0:
            logits_row_ptr = logits_ptr + row * stride_logits_row
            ahead = 0
            if draft_token_ids_ptr is not None:
                ahead = tl.load(ahead_ptr + row).to(tl.int32)
            if edits & _BIAS:
                index = tl.arange(0, TILE_BIAS)
                has_bias = index < tl.minimum(tl.load(num_bias_ptr + slot), max_bias)
                bias_id_ptr = bias_ids_ptr + slot * stride_bias_ids_slot + index
                token = _in_shard(tl.load(bias_id_ptr, mask=has_bias, other=-1), shard_start)
                bias_ptr = bias_values_ptr + slot * stride_bias_values_slot + index
                bias = tl.load(bias_ptr, mask=has_bias, other=0.0)
                in_part = (token >= first_token) & (token < end_token)
                x = tl.load(logits_row_ptr + token, mask=in_part, other=0.0).to(tl.float32)
                tl.store(logits_row_ptr + token, x + bias, mask=in_part)
                tl.debug_barrier()  # later edits read and write the same logits
            if edits & _PENALTIES:
                drafts_ptr = draft_token_ids_ptr
                if draft_token_ids_ptr is not None:
                    drafts_ptr = draft_token_ids_ptr + req * stride_draft_token_ids_req
                penalties = _Penalties(
                    tl.load(repetition_penalty_ptr + slot),
                    tl.load(frequency_penalty_ptr + slot),
                    tl.load(presence_penalty_ptr + slot),
                )
                _penalize_part(
                    logits_row_ptr, counts_row_ptr, drafts_ptr, ahead, penalties, shard_start,
                    part, TILE_VOCAB,
                )  # fmt: skip
                tl.debug_barrier()  # masks overwrite penalized logits
            if edits & _MIN_TOKENS:
                index = tl.arange(0, TILE_STOP_TOKENS)
                is_short = known + ahead < tl.load(min_total_tokens_ptr + slot)
                stop_ptr = stop_token_ids_ptr + slot * stride_stop_token_ids_slot + index
                token = tl.load(stop_ptr, mask=is_short & (index < max_stop_tokens), other=-1)
                token = _in_shard(token, shard_start)
                in_part = (token >= first_token) & (token < end_token)
                tl.store(logits_row_ptr + token, float("-inf"), mask=in_part)

    if edits & _ALLOWED:
        tl.debug_barrier()  # a mask may write back logits that the other edits have written
        for i in range(rows_per_req):
            row = req * rows_per_req + i
            if tl.load(idx_mapping_ptr + row) >= 0:
                logits_row_ptr = logits_ptr + row * stride_logits_row
                if IS_ALIGNED:
                    words, _ = _load_words(allowed_ptr, 0, part, TILE_VOCAB // 32)
                    _mask_words(logits_row_ptr, allowed_ptr, words, part, TILE_VOCAB // 32, True)
                else:
                    _mask_tokens(logits_row_ptr, allowed_ptr, part, TILE_VOCAB)


@triton.jit(do_not_specialize=["part_tiles"], do_not_specialize_on_alignment=["rows_ptr"])
def _apply_token_bitmask_kernel(
    logits_ptr, stride_logits_row,  # [num_rows, vocab_size], unit last stride
    bitmask_ptr, stride_bitmask_row,  # [num_masks, cdiv(vocab_size, 32)] int32
    rows_ptr,  # [num_masks] int32, -1 = none; None: mask i is for row i
    vocab_size, part_tiles,
    TILE_VOCAB: tl.constexpr,
    IS_ALIGNED: tl.constexpr,  # see _is_aligned
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (num_masks, num_parts): one program masks part_tiles tiles of a row."""
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    index = tl.program_id(0).to(tl.int64)
    row = index
    if rows_ptr is not None:
        row = tl.load(rows_ptr + index).to(tl.int64)
    if row < 0:
        return
    first_token = tl.program_id(1) * part_tiles * TILE_VOCAB
    end_token = tl.minimum(first_token + part_tiles * TILE_VOCAB, vocab_size)
    part = _Part(first_token, end_token, part_tiles)
    logits_row_ptr = logits_ptr + row * stride_logits_row
    mask_row_ptr = bitmask_ptr + index * stride_bitmask_row
    if IS_ALIGNED and tl.num_programs(0) >= _MANY_MASKS:
        bits, _ = _load_words(mask_row_ptr, 0, part, TILE_VOCAB // 32)
        _mask_words(logits_row_ptr, mask_row_ptr, bits, part, TILE_VOCAB // 32, True)
    else:
        _mask_tokens(logits_row_ptr, mask_row_ptr, part, TILE_VOCAB)


@dataclass(frozen=True, slots=True)
class EditLogitsConfig:
    """How a request's vocabulary is divided among programs; never changes a result."""

    tile_vocab: int  # token ids of one tile, power of two >= 32
    part_tiles: int  # tiles of one program
    num_warps: int

    @classmethod
    @lru_cache(maxsize=1024)
    def default_for(cls, vocab_size: int, num_reqs: int) -> EditLogitsConfig:
        """Return the configuration for a GPU: up to 1024 programs, or one per request if more.

        An H200 runs 1024 programs at once. A launch that edits nothing takes the time to start and
        end them; one that edits everything fills the GPU, with eight ids per thread in flight.
        """
        tile_vocab = min(max(triton.next_power_of_2(vocab_size), 32), 1024)
        num_tiles = triton.cdiv(vocab_size, tile_vocab)
        num_parts = min(max(PROGRAMS // max(num_reqs, 1), 1), num_tiles, MAX_PARTS)
        part_tiles = triton.cdiv(num_tiles, num_parts)
        return cls(tile_vocab, part_tiles, num_warps=min(max(tile_vocab // 256, 1), 4))

    @classmethod
    def for_interpreter(cls, vocab_size: int) -> EditLogitsConfig:
        """Return the configuration for the interpreter: up to 2^16 ids a tile, 64 programs."""
        tile_vocab = min(max(triton.next_power_of_2(vocab_size), 32), 2**16)
        num_tiles = triton.cdiv(vocab_size, tile_vocab)
        return cls(tile_vocab, triton.cdiv(num_tiles, min(num_tiles, MAX_PARTS)), num_warps=1)

    def num_parts(self, vocab_size: int) -> int:
        """Return the number of programs per request."""
        return -(-vocab_size // (self.tile_vocab * self.part_tiles))


def _config(vocab_size: int, num_reqs: int) -> EditLogitsConfig:
    if INTERPRET:
        return EditLogitsConfig.for_interpreter(vocab_size)
    return EditLogitsConfig.default_for(vocab_size, num_reqs)


def _is_aligned(logits: torch.Tensor) -> bool:
    """Return whether Triton knows that four logits of a row can be written at once."""
    return logits.data_ptr() % 16 == 0 and logits.stride(0) % 16 == 0


def edit_logits(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    history: History,
    edits: LogitEdits,
    *,
    ahead: torch.Tensor | None = None,
    draft_token_ids: torch.Tensor | None = None,
    first_token: int | None = None,
) -> None:
    """Add biases, apply penalties and mask tokens in each row, as the row's slot asks.

    Args:
        logits: [rows, vocab] float32 | float16 | bfloat16, unit last stride, *written* in place.
        idx_mapping: [rows] int32, contiguous: the request slot of each row; -1 = padding row, left
            unchanged. All rows of a request have one slot; different requests, different slots.
        history: of every slot. Ids outside the vocabulary are ignored.
        edits: of every slot; ``counts`` and ``counted`` are *written*.
        ahead: [rows] int32 or int64, contiguous: drafts between the newest known token and the
            row's logits, 0 to max_drafts; not checked. Goes with ``draft_token_ids``.
        draft_token_ids: [num_reqs, max_drafts] int32, unit last stride: each request has rows /
            num_reqs consecutive rows; the first ``ahead`` drafts count as a row's output. None =
            every row is a request.
        first_token: a multiple of 32: the logits and ``counts`` are of consecutive tokens, a
            shard, from this one on; all other tensors are as for the whole vocabulary. None = the
            logits are of the whole vocabulary.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: float32, each operation rounded, then rounded to the logits' dtype: once after the
        bias and once after the penalties. Equal to the oracle bit for bit (tier A), except for the
        bits of a NaN. Logits that no edit names keep their bits.
    Stream: one launch on the current stream (none without rows), no synchronisation, CUDA-graph
        safe whatever the slots ask. A slot's first launch with penalties reads its whole history,
        each later launch the tokens appended since.
    """
    drafts = (ahead, draft_token_ids)
    check_edit_logits(logits, idx_mapping, history, edits, *drafts, first_token, FLOAT_DTYPES)
    check_launchable("logits", logits)
    num_rows, vocab_size = logits.shape
    if num_rows == 0 or vocab_size == 0:
        return
    num_reqs = num_rows if draft_token_ids is None else draft_token_ids.shape[0]
    config = _config(vocab_size, num_reqs)
    capability = None if INTERPRET else device_info(logits.device).capability
    limited = draft_token_ids is None and capability in LIMITED
    max_stop_tokens, max_bias = history.late_token_ids.shape[1], edits.bias_ids.shape[1]
    _edit_logits_kernel[(num_reqs, config.num_parts(vocab_size))](
        *with_strides(logits, 1),
        *with_strides(edits.counts, 1),
        edits.counted,
        *with_strides(history.token_ids, 1),
        *(history.num_tokens, history.prompt_len, edits.edits),
        *with_strides(shard_masks(edits.allowed_mask, first_token), 1),
        history.min_total_tokens,
        *with_strides(history.late_token_ids, 1),
        *with_strides(edits.bias_ids, 1),
        *with_strides(edits.bias_values, 1),
        edits.num_bias,
        *(edits.repetition_penalty, edits.frequency_penalty, edits.presence_penalty),
        *with_strides(draft_token_ids, 1),
        *(idx_mapping, ahead, num_rows // num_reqs),
        *(max_stop_tokens, max_bias, vocab_size, config.part_tiles, first_token),
        TILE_ROWS=triton.next_power_of_2(num_rows // num_reqs),
        TILE_STOP_TOKENS=triton.next_power_of_2(max(max_stop_tokens, 1)),
        TILE_BIAS=triton.next_power_of_2(max(max_bias, 1)),
        TILE_VOCAB=config.tile_vocab,
        IS_ALIGNED=_is_aligned(logits),
        num_warps=config.num_warps,
        enable_fp_fusion=False,  # a penalty's product is rounded, as torch's is
        **({"maxnreg": MAX_REGISTERS} if limited else {}),
        **overlap_options(logits.device),
    )


def apply_token_bitmask(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    first_token: int | None = None,
) -> None:
    """Set the logit of every token that a grammar does not allow next to -inf.

    Args:
        logits: [rows, vocab] float32 | float16 | bfloat16, unit last stride, *written* at the
            masked tokens and nowhere else.
        bitmask: [masks, ceil(vocab / 32)] int32, unit last stride: bit i of word w is 1 where
            token 32 w + i is allowed.
        rows: [masks] int32, contiguous: the row of logits that each mask is for, less than the
            number of rows, no row twice, not checked; -1 = none. None = mask i is for row i.
        first_token: as in ``edit_logits``; the bitmask is of the whole vocabulary.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: exact (tier A); all other logits, NaN included, keep their bits.
    Stream: one launch on the current stream (if masks), no synchronisation, CUDA-graph safe.
    """
    check_token_bitmask(logits, bitmask, rows, first_token, FLOAT_DTYPES)
    check_launchable("logits", logits)
    num_masks, vocab_size = bitmask.shape[0], logits.shape[1]
    if num_masks == 0 or vocab_size == 0:
        return
    config = _config(vocab_size, num_masks)
    _apply_token_bitmask_kernel[(num_masks, config.num_parts(vocab_size))](
        *with_strides(logits, 1), *with_strides(shard_masks(bitmask, first_token), 1),
        rows, vocab_size, config.part_tiles,
        TILE_VOCAB=config.tile_vocab, IS_ALIGNED=_is_aligned(logits), num_warps=config.num_warps,
        **overlap_options(logits.device),
    )  # fmt: skip
