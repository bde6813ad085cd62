"""The outputs of requests, as users get them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mrv1.engine.request import FinishReason
from mrv1.errors import Mrv1Error
from mrv1.from_vllm import refuse_attribute


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times of one request in seconds on the ``time.perf_counter`` clock; None = not yet."""

    arrival_time: float
    first_token_time: float | None
    finish_time: float | None
    num_preemptions: int
    """How often the request was preempted and computed again."""
    num_draft_tokens: int
    """Drafts that steps verified for the request, with the option ``speculative``."""
    num_accepted_tokens: int
    """Drafts among them that were accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """The log-probability of one token at one position."""

    logprob: float
    """Natural logarithm."""
    rank: int
    """1 + the number of tokens that are more likely."""
    decoded_token: str | None
    """The token by itself as text; None without a tokenizer or with ``detokenize=False``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    """Index among the request's ``n`` sequences."""
    text: str = ""
    """Output without special tokens (if ``skip_special_tokens``) and, unless
    ``include_stop_str_in_output``, without the stop string, sequence or token; while the request
    runs, also without an end that may become one. It continues the prompt's text: a space between
    the two is in it. Empty without a tokenizer or with ``detokenize=False``."""
    token_ids: tuple[int, ...] = ()
    """All generated tokens, a stop token or sequence included."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of ``token_ids``; None if not requested with ``logprobs``."""
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    """For each of ``token_ids``, by id: the token itself, the likeliest tokens and the tokens of
    ``logprob_token_ids``; None if not requested."""
    finish_reason: FinishReason | None = None
    """``"stop"``, ``"length"``, ``"abort"``, ``"error"``, or None while the request runs."""
    stop_reason: int | str | tuple[int, ...] | None = None
    """The element of ``stop_token_ids``, ``stop`` or ``stop_token_sequences`` that ended the
    output; None for end-of-sequence tokens and other reasons."""
    error: Mrv1Error | None = None
    """Why this output failed; the request's other outputs continue."""
    if not TYPE_CHECKING:
        __getattr__ = refuse_attribute

    def finished(self) -> bool:
        """Whether this output has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One request up to now: cumulative, not only the changes since the output before."""

    request_id: str
    prompt: str | None
    """The prompt as it was given, if it was text; None for a prompt of token ids."""
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    """For each of ``prompt_token_ids``, as in ``CompletionOutput.logprobs``; None for the first
    token, and as a whole if not requested, or not known yet."""
    outputs: tuple[CompletionOutput, ...]
    """The ``n`` outputs, by index."""
    finished: bool
    """Whether all outputs are finished."""
    error: Mrv1Error | None
    """The error of the first output, if all outputs have failed; ``outputs`` then holds the tokens
    and texts before the failure."""
    metrics: RequestMetrics | None = None
    """None for a request that was refused."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache had when the first output was admitted."""
    if not TYPE_CHECKING:
        __getattr__ = refuse_attribute
