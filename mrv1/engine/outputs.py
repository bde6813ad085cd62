"""What users get back."""

from __future__ import annotations

from dataclasses import dataclass

from mrv1.engine.request import FinishReason
from mrv1.errors import Mrv1Error


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times of one request in seconds on the ``time.perf_counter`` clock; None = not yet."""

    arrival_time: float
    first_token_time: float | None
    finish_time: float | None
    num_preemptions: int
    """How often it gave up its blocks and was computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """The log-probability of one token at one position."""

    logprob: float
    """Natural logarithm."""
    rank: int
    """1 + the number of tokens that are more likely."""
    decoded_token: str | None
    """The token by itself as text; None without a tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    """Which of the request's sequences."""
    text: str
    """Output without special tokens, the stop token and, unless asked for, the stop string or
    sequence. While the request runs, without an end that may become one. Empty without a
    tokenizer."""
    token_ids: tuple[int, ...]
    """All generated tokens, a stop token or sequence included."""
    logprobs: tuple[dict[int, Logprob], ...] | None
    """For each of ``token_ids``: it, the likeliest tokens and those asked for, by id; None if not
    asked for."""
    finish_reason: FinishReason | None
    """``"stop"``, ``"length"``, ``"abort"``, ``"error"``, or None while it runs."""
    stop_reason: int | str | tuple[int, ...] | None
    """What of ``stop_token_ids``, ``stop`` or ``stop_token_sequences`` ended it; None for
    end-of-sequence and other reasons."""
    error: Mrv1Error | None = None
    """Why it failed; the request's other outputs go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What is known of one request; cumulative, not a difference to the last one."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None
    """For each of ``prompt_token_ids``, as in ``CompletionOutput.logprobs``; None for the first,
    which nothing comes before. None as a whole if not asked for, or not known yet."""
    outputs: tuple[CompletionOutput, ...]
    """``n`` of them, by index."""
    finished: bool
    """Whether all of them are."""
    error: Mrv1Error | None
    """Why the request failed: of the first output, once all have; ``outputs`` then holds what
    they had."""
    metrics: RequestMetrics | None
    """None for a request that was refused."""
