"""One request, from arrival to finish."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from mrv1.errors import Mrv1Error
from mrv1.runner.step import Int32Array
from mrv1.sampler import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class Status(enum.Enum):
    """Where a request is."""

    WAITING = enum.auto()
    """Holds no slot and no blocks: new, or preempted."""
    RUNNING = enum.auto()
    """Holds a slot and blocks."""
    FINISHED = enum.auto()
    """Holds nothing any more."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """What the engine knows of one request; changed by the scheduler only."""

    req_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    """64-bit key of its noise."""
    max_total_tokens: int
    """Prompt and output tokens at which it ends with ``"length"``."""
    unsplittable: tuple[tuple[int, int], ...] = ()
    """Spans ``[start, end)`` of the prompt, ascending, each computed within one step."""
    cache_key: bytes = b""
    """What else its K and V depend on: only requests with the same key share prefixes."""
    arrival_time: float = field(default_factory=time.perf_counter)
    """Seconds on the ``time.perf_counter`` clock."""
    first_token_time: float | None = None
    finish_time: float | None = None
    output_token_ids: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it, if the caller named it."""
    error: Mrv1Error | None = None
    banned_token_sequences: tuple[tuple[int, ...], ...] = ()
    """Its bad words, as the tokenizer writes them, and those given as tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Every token that ends it, end-of-sequence tokens among them unless ignored."""
    slot: int = -1
    """Row in the runner's state while running."""
    epoch: int = -1
    block_ids: list[int] = field(default_factory=list)
    block_digests: list[bytes] = field(default_factory=list)
    """Digests of its leading full blocks, as far as they are worked out."""
    num_cached_tokens: int = 0
    """Tokens that came from the prefix cache when it was last admitted."""
    num_preemptions: int = 0
    _prompt: Int32Array = field(init=False, repr=False)
    """[prompt tokens] ``prompt_token_ids``."""

    def __post_init__(self) -> None:
        """Keep the prompt as the runner and the prefix cache take it."""
        self._prompt = np.array(self.prompt_token_ids, dtype=np.int32)
        self._prompt.flags.writeable = False  # plans share it

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_ids(self, start: int = 0, end: int | None = None) -> Int32Array:
        """Return prompt and output tokens of positions ``[start, end)``; None = all from start."""
        num_prompt_tokens = len(self._prompt)
        end = self.num_tokens if end is None else end
        if end <= num_prompt_tokens:
            return self._prompt[start:end]
        output = self.output_token_ids[max(start - num_prompt_tokens, 0) : end - num_prompt_tokens]
        own = np.array(output, dtype=np.int32)
        if start >= num_prompt_tokens:
            return own
        return np.concatenate([self._prompt[start:], own])

    @property
    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is Status.FINISHED
