"""Mask the tokens that would complete a banned word.

A word is a list of token ids; its prefix is all ids but the last. Where a row's history ends with
the prefix, the logit of the last id becomes -inf (a word of one token is always masked)::

    history[end - (length - 1) : end] == word[: length - 1]   =>   logits[word[length - 1]] = -inf

A prefix must lie in the output, unless the slot lets it begin in the prompt. The history on the
device includes tokens that the host does not know yet; drafts that precede a row's logits follow
it::

    token_ids[slot, : num_tokens]  draft_token_ids[request, : ahead]  <- the row's logits
    [   prompt   |     output    ][              drafts             ]

One program compares a tile of a row's words at once, and ends after two round trips to memory if
the slot has no word in the tile: the grid does not depend on the slots' words.

Source: vLLM's ``bad_words`` for the meaning of a word (``vllm/v1/sample/ops/bad_words.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.checks import FLOAT_DTYPES, check_launchable
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.sampling.contracts import BadWords, History, check_bad_words


@triton.jit(
    # a value that differs from step to step must not compile another kernel
    do_not_specialize=["stride_draft_token_ids_req", "rows_per_req", "shard_start"],
    do_not_specialize_on_alignment=["idx_mapping_ptr", "ahead_ptr", "draft_token_ids_ptr"],
)
def _apply_bad_words_kernel(
    logits_ptr, stride_logits_row,  # [num_rows, vocab_size], unit last stride
    token_ids_ptr, stride_token_ids_slot,  # [max_num_reqs, max_model_len] int32
    num_tokens_ptr,  # [max_num_reqs] int32
    prompt_len_ptr,  # [max_num_reqs] int32
    match_prompt_ptr,  # [max_num_reqs] int32, or None: only output counts
    bad_words_ptr,  # [max_num_reqs, max_words, MAX_LEN] int32, a slot's words contiguous
    stride_bad_words_slot,
    bad_word_lens_ptr, stride_bad_word_lens_slot,  # [max_num_reqs, max_words] int32
    num_bad_words_ptr,  # [max_num_reqs] int32
    draft_token_ids_ptr, stride_draft_token_ids_req,  # [num_reqs, max_drafts] int32, or None
    idx_mapping_ptr,  # [num_rows] int32, -1 = padding row
    ahead_ptr,  # [num_rows] int32 or int64, with draft_token_ids_ptr
    rows_per_req, max_words, vocab_size,
    shard_start,  # first token of the logits; None: they are of the whole vocabulary
    MAX_LEN: tl.constexpr, TILE_WORDS: tl.constexpr,
    TILE_LEN: tl.constexpr,  # power of two >= MAX_LEN
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (num_rows, cdiv(max_words, TILE_WORDS)): one program compares a tile of words."""
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    first_word = tl.program_id(1) * TILE_WORDS
    slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
    if slot < 0:
        return
    # All loads that address words and history, the lengths included, share one round trip.
    num_words = tl.load(num_bad_words_ptr + slot)
    known = tl.load(num_tokens_ptr + slot)
    start = tl.load(prompt_len_ptr + slot)  # the first position where a prefix may begin
    if match_prompt_ptr is not None:
        start = tl.where(tl.load(match_prompt_ptr + slot) != 0, 0, start)
    end = known
    if draft_token_ids_ptr is not None:
        end += tl.load(ahead_ptr + row).to(tl.int32)
    word = first_word + tl.arange(0, TILE_WORDS)
    length_ptr = bad_word_lens_ptr + slot * stride_bad_word_lens_slot + word
    length = tl.load(length_ptr, mask=word < max_words, other=0)
    if first_word >= num_words:
        return

    begin = end - length + 1  # the position of a prefix's first token
    fits = (word < num_words) & (length >= 1) & (length <= MAX_LEN)
    fits &= (begin >= start) | (length == 1)
    word_ptr = bad_words_ptr + slot * stride_bad_words_slot + word * MAX_LEN
    last = tl.load(word_ptr + length - 1, mask=fits, other=-1)
    if shard_start is not None:
        last -= shard_start
    # Whole words are loaded, 16 bytes at a time where their width allows it.
    column = tl.arange(0, TILE_LEN)[None, :]
    is_inside = fits[:, None] & (column < MAX_LEN)
    token = tl.load(word_ptr[:, None] + column, mask=is_inside, other=0)
    is_prefix = is_inside & (column < length[:, None] - 1)
    position = begin[:, None] + column
    history_ptr = token_ids_ptr + slot * stride_token_ids_slot + position
    seen = tl.load(history_ptr, mask=is_prefix & (position < known), other=0)
    if draft_token_ids_ptr is not None:
        drafts_ptr = draft_token_ids_ptr + (row // rows_per_req) * stride_draft_token_ids_req
        is_draft = is_prefix & (position >= known)
        draft = tl.load(drafts_ptr + (position - known), mask=is_draft, other=0)
        seen = tl.where(is_draft, draft, seen)
    num_differing = tl.sum((is_prefix & (token != seen)).to(tl.int32), axis=1)
    completes = fits & (num_differing == 0) & (last >= 0) & (last < vocab_size)
    tl.store(logits_ptr + row * stride_logits_row + last, float("-inf"), mask=completes)


@dataclass(frozen=True, slots=True)
class BadWordsConfig:
    """How a row's words are divided among programs; never changes a result."""

    tile_words: int  # words of one program
    tile_len: int  # tokens of a word in a tile, power of two
    num_warps: int

    @classmethod
    @lru_cache(maxsize=64)
    def default_for(cls, max_words: int, max_len: int) -> BadWordsConfig:
        """Return the configuration for a GPU: one warp per program, eight tokens per thread.

        The time goes into dependent loads, which no barrier separates within a warp; all programs
        for 256 rows with 128 words of 8 tokens run at once.
        """
        tile_len = triton.next_power_of_2(max_len)
        tile_words = min(triton.next_power_of_2(max_words), max(256 // tile_len, 1))
        return cls(tile_words, tile_len, num_warps=min(max(tile_len // 256, 1), 4))

    @classmethod
    def for_interpreter(cls, max_words: int, max_len: int) -> BadWordsConfig:
        """Return the configuration for the interpreter: one program per row."""
        tile_len = triton.next_power_of_2(max_len)
        return cls(triton.next_power_of_2(max_words), tile_len, num_warps=1)


def apply_bad_words(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    history: History,
    bad_words: BadWords,
    *,
    ahead: torch.Tensor | None = None,
    draft_token_ids: torch.Tensor | None = None,
    first_token: int | None = None,
) -> None:
    """Set the logit of every token that would complete a banned word to -inf.

    Args:
        logits: [rows, vocab] float32 | float16 | bfloat16, unit last stride, *written* at the
            masked tokens and nowhere else.
        idx_mapping: [rows] int32, contiguous: the request slot of each row; -1 = padding row, left
            unchanged. Slots may repeat.
        history: of every slot.
        bad_words: of every slot.
        ahead: [rows] int32 or int64, contiguous: drafts before a row, as in ``edit_logits``.
        draft_token_ids: [num_reqs, max_drafts] int32, unit last stride, as in ``edit_logits``.
        first_token: >= 0, as in ``edit_logits``; words are of the whole vocabulary.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: exact (tier A); all other logits, NaN included, keep their bits.
    Stream: one launch on the current stream (none without rows or words), no synchronisation,
        CUDA-graph safe for any words of the slots.
    """
    check_bad_words(logits, idx_mapping, history, bad_words, ahead, draft_token_ids, FLOAT_DTYPES)
    check_launchable("logits", logits)
    num_rows, vocab_size = logits.shape
    _, max_words, max_len = bad_words.bad_words.shape
    if logits.numel() == 0 or bad_words.bad_words.numel() == 0:
        return
    if INTERPRET:
        config = BadWordsConfig.for_interpreter(max_words, max_len)
    else:
        config = BadWordsConfig.default_for(max_words, max_len)
    _apply_bad_words_kernel[(num_rows, triton.cdiv(max_words, config.tile_words))](
        *with_strides(logits, 1), *with_strides(history.token_ids, 1),
        history.num_tokens, history.prompt_len, bad_words.bad_words_match_prompt,
        *with_strides(bad_words.bad_words, 1), *with_strides(bad_words.bad_word_lens, 1),
        bad_words.num_bad_words, *with_strides(draft_token_ids, 1), idx_mapping, ahead,
        1 if draft_token_ids is None else num_rows // draft_token_ids.shape[0],
        max_words, vocab_size, first_token,
        MAX_LEN=max_len, TILE_WORDS=config.tile_words, TILE_LEN=config.tile_len,
        num_warps=config.num_warps, **overlap_options(logits.device),
    )  # fmt: skip
