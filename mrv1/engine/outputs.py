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
class CompletionOutput:
    """One generated sequence."""

    index: int
    """Which of the request's sequences."""
    text: str
    """Output without special tokens, the stop token and, unless asked for, the stop string. While
    the request runs, without an end that may become a stop string. Empty without a tokenizer."""
    token_ids: tuple[int, ...]
    """All generated tokens, the stop token included."""
    logprobs: None
    """Not available yet."""
    finish_reason: FinishReason | None
    """``"stop"``, ``"length"``, ``"abort"``, ``"error"``, or None while it runs."""
    stop_reason: int | str | None
    """What of ``stop_token_ids`` or ``stop`` ended it; None for end-of-sequence and other
    reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What is known of one request; cumulative, not a difference to the last one."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    error: Mrv1Error | None
    """Why the request failed; ``outputs`` then holds what it had."""
    metrics: RequestMetrics | None
    """None for a request that was refused."""
