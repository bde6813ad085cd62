"""Constants, bundles, results and argument checks of the ops from logits to tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from mrv1.kernels._base.checks import check_drafts, check_tensor, check_vectors

ALLOWED = 1
"""Bit of ``edits``: mask the tokens that are not in ``allowed_mask``."""
MIN_TOKENS = 2
"""Bit of ``edits``: mask ``late_token_ids`` before ``min_total_tokens``."""
BIAS = 4
"""Bit of ``edits``: add ``bias_values`` to the logits of ``bias_ids``."""
PENALTIES = 8
"""Bit of ``edits``: apply the repetition, frequency and presence penalties."""
MAX_PARTS = 256
"""Columns of ``counted``: most programs that share the vocabulary of a request."""

MAX_GROUPS = 4096
"""Most groups of a row: a program of a draw's second launch holds all of them at once."""

MAX_LOGPROBS_VOCAB_SIZE = 1 << 20
"""Most token ids of a row: a program holds the maxima of all groups of a row at once."""


def group_size(vocab_size: int) -> int:
    """Return the number of consecutive token ids in a group: 128, beyond 524,288 ids more."""
    size = 128
    while size * MAX_GROUPS < vocab_size:
        size *= 2
    return size


class TopLogprobs(NamedTuple):
    """The results of ``top_logprobs``."""

    logprobs: torch.Tensor
    """[rows, n] float32, of the tokens asked for."""
    ranks: torch.Tensor
    """[rows, n] int64, of the tokens asked for; 1 = no token has a greater logit."""
    top_token_ids: torch.Tensor
    """[rows, num_top] int64, best first."""
    top_logprobs: torch.Tensor
    """[rows, num_top] float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The tokens of each slot, as known on the device; int32, contiguous unless noted.

    An op checks the fields that it reads; other fields may have any content.
    """

    token_ids: torch.Tensor
    """[max_num_reqs, max_model_len], unit last stride: prompt, then output."""
    num_tokens: torch.Tensor
    """[max_num_reqs], known tokens, prompt and output."""
    prompt_len: torch.Tensor
    """[max_num_reqs], prompt tokens."""
    min_total_tokens: torch.Tensor
    """[max_num_reqs], prompt, output and draft tokens before ``late_token_ids`` may be sampled."""
    late_token_ids: torch.Tensor
    """[max_num_reqs, any], unit last stride, -1 = none; ids outside the vocabulary are skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """The edits of its logits that each slot asks for; int32, unit last stride unless noted.

    The content of an edit's fields does not matter for a slot whose ``edits`` lack the edit's bit.
    """

    edits: torch.Tensor
    """[max_num_reqs], contiguous: the bits, ``ALLOWED`` to ``PENALTIES``, that the slot uses."""
    allowed_mask: torch.Tensor
    """[max_num_reqs, ceil(vocab / 32)]: bit i of word w is 1 where token 32 w + i is allowed."""
    bias_ids: torch.Tensor
    """[max_num_reqs, max_bias], distinct token ids; ids outside the vocabulary are skipped."""
    bias_values: torch.Tensor
    """[max_num_reqs, max_bias] float32, finite: added to the logits of ``bias_ids``."""
    num_bias: torch.Tensor
    """[max_num_reqs], contiguous: number of leading ids to use; above max_bias, all ids."""
    repetition_penalty: torch.Tensor
    """[max_num_reqs] float32 > 0, contiguous: for each token in the prompt or the output, divides
    a positive logit and multiplies any other logit; 1 = none."""
    frequency_penalty: torch.Tensor
    """[max_num_reqs] float32, contiguous, finite: subtracted for each time in the output."""
    presence_penalty: torch.Tensor
    """[max_num_reqs] float32, contiguous, finite: subtracted once if it is in the output."""
    counts: torch.Tensor
    """[max_num_reqs, vocab], *written*: state that only ``edit_logits`` reads and writes."""
    counted: torch.Tensor
    """[max_num_reqs, MAX_PARTS], contiguous, *written*: number of tokens of the history that are
    in ``counts``. State of ``edit_logits``, except that the caller fills a slot's row with -1 when
    a request takes the slot; the slot's ``counts`` may then have any content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadWords:
    """The banned words of each slot; int32."""

    bad_words: torch.Tensor
    """[max_num_reqs, max_words, max_len], each slot's words contiguous: token ids from column 0. A
    word whose last id is outside the vocabulary masks nothing."""
    bad_word_lens: torch.Tensor
    """[max_num_reqs, max_words], unit last stride: tokens, 1 to max_len; others mask nothing."""
    num_bad_words: torch.Tensor
    """[max_num_reqs], contiguous: words of each slot, from row 0; above max_words, all."""
    bad_words_match_prompt: torch.Tensor | None = None
    """[max_num_reqs], contiguous: not 0 = a prefix may begin in the prompt; None = all are 0."""


def _check_histories(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    history: History,
    dtypes: tuple[torch.dtype, ...],
) -> int:
    """Return the number of slots, or raise unless rows and histories are as described."""
    check_tensor("logits", logits, shape=(None, None), dtype=dtypes, unit_last_stride=True)
    check = partial(check_tensor, dtype=torch.int32, device=logits.device)
    check("idx_mapping", idx_mapping, shape=logits.shape[:1], contiguous=True)
    check("history.token_ids", history.token_ids, shape=(None, None), unit_last_stride=True)
    return history.token_ids.shape[0]


def shard_masks(masks: torch.Tensor, first_token: int | None) -> torch.Tensor:
    """Return the words of [any, ceil(vocab / 32)] masks from a shard's first token on."""
    return masks if first_token is None else masks[:, first_token // 32 :]


def _check_masks(
    name: str, masks: torch.Tensor, num_masks: int | None, num_tokens: int, first_token: int | None
) -> None:
    """Raise unless masks have a bit for each token, or ``first_token`` is none of a shard."""
    if first_token is not None and (first_token < 0 or first_token % 32):
        raise ValueError(f"first_token: expected a multiple of 32, at least 0, got {first_token}")
    width = -(-((first_token or 0) + num_tokens) // 32)
    is_whole = first_token is None or masks.dim() != 2 or masks.shape[1] < width
    shape = (num_masks, width if is_whole else None)
    check_tensor(name, masks, shape=shape, dtype=torch.int32, unit_last_stride=True)


def check_bad_words(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    history: History,
    bad_words: BadWords,
    ahead: torch.Tensor | None,
    draft_token_ids: torch.Tensor | None,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Raise unless the arguments are as ``apply_bad_words`` describes them."""
    max_num_reqs = _check_histories(logits, idx_mapping, history, dtypes)
    device = logits.device
    check = partial(check_tensor, dtype=torch.int32, device=device)
    words, lens = bad_words.bad_words, bad_words.bad_word_lens
    check("bad_words.bad_words", words, shape=(max_num_reqs, None, None))
    if max_num_reqs and not words[0].is_contiguous():
        raise ValueError(
            "bad_words.bad_words: expected each slot's words contiguous, got strides "
            f"{words.stride()}"
        )
    check("bad_words.bad_word_lens", lens, shape=words.shape[:2], unit_last_stride=True)
    check_vectors("history", history, ("num_tokens", "prompt_len"), max_num_reqs, device)
    check_vectors("bad_words", bad_words, ("num_bad_words",), max_num_reqs, device)
    if bad_words.bad_words_match_prompt is not None:
        check_vectors("bad_words", bad_words, ("bad_words_match_prompt",), max_num_reqs, device)
    check_drafts(logits, ahead, draft_token_ids)


def check_edit_logits(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    history: History,
    edits: LogitEdits,
    ahead: torch.Tensor | None,
    draft_token_ids: torch.Tensor | None,
    first_token: int | None,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Raise unless the arguments are as ``edit_logits`` describes them."""
    max_num_reqs = _check_histories(logits, idx_mapping, history, dtypes)
    device, vocab_size = logits.device, logits.shape[1]
    vectors = ("num_tokens", "prompt_len", "min_total_tokens")
    check_vectors("history", history, vectors, max_num_reqs, device)
    check_vectors("edits", edits, ("edits", "num_bias"), max_num_reqs, device)
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    check_vectors("edits", edits, penalties, max_num_reqs, device, torch.float32)
    check = partial(check_tensor, dtype=torch.int32, device=device)
    _check_masks("edits.allowed_mask", edits.allowed_mask, max_num_reqs, vocab_size, first_token)
    for name, tensor, width in (
        ("edits.allowed_mask", edits.allowed_mask, None),  # its device
        ("history.late_token_ids", history.late_token_ids, None),
        ("edits.bias_ids", edits.bias_ids, None),
        ("edits.counts", edits.counts, vocab_size),
    ):
        check(name, tensor, shape=(max_num_reqs, width), unit_last_stride=True)
    floats = partial(check, dtype=torch.float32, unit_last_stride=True)
    floats("edits.bias_values", edits.bias_values, shape=edits.bias_ids.shape)
    check("edits.counted", edits.counted, shape=(max_num_reqs, MAX_PARTS), contiguous=True)
    check_drafts(logits, ahead, draft_token_ids)


def check_token_bitmask(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    rows: torch.Tensor | None,
    first_token: int | None,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Raise unless the arguments are as ``apply_token_bitmask`` describes them."""
    check_tensor("logits", logits, shape=(None, None), dtype=dtypes, unit_last_stride=True)
    num_rows, vocab_size = logits.shape
    check = partial(check_tensor, dtype=torch.int32, device=logits.device)
    num_masks = num_rows if rows is None else None
    _check_masks("bitmask", bitmask, num_masks, vocab_size, first_token)
    check("bitmask", bitmask)
    if rows is not None:
        check("rows", rows, shape=bitmask.shape[:1], contiguous=True)


def check_top_logprobs(
    logits: torch.Tensor,
    vocab_size: int,
    token_ids: torch.Tensor,
    num_top: int,
    idx_mapping: torch.Tensor | None,
    temperature: torch.Tensor | None,
    row_num_top: torch.Tensor | None,
    dtypes: tuple[torch.dtype, ...],
) -> tuple[int, int]:
    """Return rows and tokens per row, or raise as ``top_logprobs`` says."""
    check_tensor("logits", logits, shape=(None, None), dtype=dtypes, unit_last_stride=True)
    num_rows = len(logits)
    if not 1 <= vocab_size <= MAX_LOGPROBS_VOCAB_SIZE:
        raise ValueError(
            f"logits: expected a vocabulary of 1 to {MAX_LOGPROBS_VOCAB_SIZE} tokens, "
            f"got {vocab_size}"
        )
    check = partial(check_tensor, device=logits.device)
    check("token_ids", token_ids, shape=(num_rows, None), dtype=torch.int64, unit_last_stride=True)
    if not 0 <= num_top <= vocab_size:
        raise ValueError(f"num_top: expected 0 to {vocab_size}, got {num_top}")
    if idx_mapping is not None:
        check("idx_mapping", idx_mapping, shape=(num_rows,), dtype=torch.int32, contiguous=True)
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("row_num_top", row_num_top, torch.int32),
    ):
        if tensor is not None:
            size = None if idx_mapping is not None else num_rows
            check(name, tensor, shape=(size,), dtype=dtype, contiguous=True)
    return num_rows, token_ids.shape[1]
