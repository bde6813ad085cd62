"""Constants, results and shared argument checks of the ops from logits to tokens."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from mrv1.kernels._base.checks import check_drafts, check_tensor

ALLOWED = 1
"""Bit of ``edits``: only the tokens of ``allowed_mask``."""
MIN_TOKENS = 2
"""Bit of ``edits``: no stop token before ``min_total_tokens``."""
BIAS = 4
"""Bit of ``edits``: the ids of ``bias_ids`` have a bias."""
PENALTIES = 8
"""Bit of ``edits``: repetition, frequency or presence penalty."""
MAX_PARTS = 64
"""Columns of ``counted``: a request's vocabulary is cut into at most so many programs."""

MAX_LOGPROBS_VOCAB_SIZE = 1 << 20
"""Token ids of a row: a program looks at all its groups at once."""


class TopLogprobs(NamedTuple):
    """What ``top_logprobs`` returns."""

    logprobs: torch.Tensor
    """[rows, n] float32, of the tokens asked for."""
    ranks: torch.Tensor
    """[rows, n] int64, of the tokens asked for; 1 = no token is better."""
    top_token_ids: torch.Tensor
    """[rows, num_top] int64, best first."""
    top_logprobs: torch.Tensor
    """[rows, num_top] float32."""


def check_bad_words(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    prompt_len: torch.Tensor,
    bad_words: torch.Tensor,
    bad_word_lens: torch.Tensor,
    num_bad_words: torch.Tensor,
    match_prompt: torch.Tensor | None,
    ahead: torch.Tensor | None,
    draft_token_ids: torch.Tensor | None,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Raise unless the arguments are as ``apply_bad_words`` describes them."""
    check_tensor("logits", logits, shape=(None, None), dtype=dtypes, unit_last_stride=True)
    num_rows = logits.shape[0]
    check = partial(check_tensor, dtype=torch.int32, device=logits.device)
    check("idx_mapping", idx_mapping, shape=(num_rows,), contiguous=True)
    check("token_ids", token_ids, shape=(None, None), unit_last_stride=True)
    max_num_reqs = token_ids.shape[0]
    check("bad_words", bad_words, shape=(max_num_reqs, None, None))
    if max_num_reqs and not bad_words[0].is_contiguous():
        raise ValueError(
            f"bad_words: expected each slot's words contiguous, got strides {bad_words.stride()}"
        )
    check("bad_word_lens", bad_word_lens, shape=bad_words.shape[:2], unit_last_stride=True)
    for name, tensor in (
        ("num_tokens", num_tokens),
        ("prompt_len", prompt_len),
        ("num_bad_words", num_bad_words),
        ("match_prompt", match_prompt),
    ):
        if tensor is not None or name != "match_prompt":
            check(name, tensor, shape=(max_num_reqs,), contiguous=True)
    check_drafts(logits, ahead, draft_token_ids)


def check_edit_logits(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    token_ids: torch.Tensor,
    allowed_mask: torch.Tensor,
    stop_token_ids: torch.Tensor,
    bias: tuple[torch.Tensor, torch.Tensor],
    counts: torch.Tensor,
    counted: torch.Tensor,
    ahead: torch.Tensor | None,
    draft_token_ids: torch.Tensor | None,
    dtypes: tuple[torch.dtype, ...],
    **per_slot: torch.Tensor,
) -> None:
    """Raise unless the arguments are as ``edit_logits`` describes them."""
    check_tensor("logits", logits, shape=(None, None), dtype=dtypes, unit_last_stride=True)
    num_rows, vocab_size = logits.shape
    check = partial(check_tensor, dtype=torch.int32, device=logits.device)
    check("idx_mapping", idx_mapping, shape=(num_rows,), contiguous=True)
    check("token_ids", token_ids, shape=(None, None), unit_last_stride=True)
    max_num_reqs = token_ids.shape[0]
    for name, tensor in per_slot.items():
        dtype = torch.float32 if name.endswith("_penalty") else torch.int32
        check(name, tensor, shape=(max_num_reqs,), dtype=dtype, contiguous=True)
    bias_ids, bias_values = bias
    for name, tensor, width in (
        ("allowed_mask", allowed_mask, -(-vocab_size // 32)),
        ("stop_token_ids", stop_token_ids, None),
        ("bias_ids", bias_ids, None),
        ("counts", counts, vocab_size),
    ):
        check(name, tensor, shape=(max_num_reqs, width), unit_last_stride=True)
    check(
        "bias_values",
        bias_values,
        shape=bias_ids.shape,
        dtype=torch.float32,
        unit_last_stride=True,
    )
    check("counted", counted, shape=(max_num_reqs, MAX_PARTS), contiguous=True)
    check_drafts(logits, ahead, draft_token_ids)


def check_token_bitmask(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    rows: torch.Tensor | None,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Raise unless the arguments are as ``apply_token_bitmask`` describes them."""
    check_tensor("logits", logits, shape=(None, None), dtype=dtypes, unit_last_stride=True)
    num_rows, vocab_size = logits.shape
    check = partial(check_tensor, dtype=torch.int32, device=logits.device)
    num_masks = num_rows if rows is None else None
    width = -(-vocab_size // 32)
    check("bitmask", bitmask, shape=(num_masks, width), unit_last_stride=True)
    if rows is not None:
        check("rows", rows, shape=bitmask.shape[:1], contiguous=True)


def check_top_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_top: int,
    idx_mapping: torch.Tensor | None,
    temperature: torch.Tensor | None,
    dtypes: tuple[torch.dtype, ...],
) -> tuple[int, int, int]:
    """Return rows, tokens of each and vocab, or raise as ``top_logprobs`` says."""
    check_tensor("logits", logits, shape=(None, None), dtype=dtypes, unit_last_stride=True)
    num_rows, vocab_size = logits.shape
    if not 1 <= vocab_size <= MAX_LOGPROBS_VOCAB_SIZE:
        raise ValueError(
            f"logits: expected a vocabulary of 1 to {MAX_LOGPROBS_VOCAB_SIZE} tokens, "
            f"got {vocab_size}"
        )
    check = partial(check_tensor, device=logits.device)
    check(
        "token_ids",
        token_ids,
        shape=(num_rows, None),
        dtype=torch.int64,
        unit_last_stride=True,
    )
    if not 0 <= num_top <= vocab_size:
        raise ValueError(f"num_top: expected 0 to {vocab_size}, got {num_top}")
    if idx_mapping is not None:
        check("idx_mapping", idx_mapping, shape=(num_rows,), dtype=torch.int32, contiguous=True)
    if temperature is not None:
        check(
            "temperature",
            temperature,
            shape=(None if idx_mapping is not None else num_rows,),
            dtype=torch.float32,
            contiguous=True,
        )
    return num_rows, token_ids.shape[1], vocab_size
