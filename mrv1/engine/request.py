"""One request, from arrival to finish."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from mrv1.errors import Mrv1Error, RequestError
from mrv1.runner.request_state import MAX_STOP_TOKENS
from mrv1.runner.step import Int32Array, RequestId, SlotRequest, TokenLogprobs
from mrv1.sampler import GrammarMatcher, SamplingParams

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

    req_id: RequestId
    """No other unfinished request has it, whatever callers name theirs."""
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    """64-bit key of its noise."""
    child: int = 0
    """Which of its caller's ``n`` outputs it is."""
    leader: Request | None = None
    """The first of these outputs, if it is another one."""
    followers: tuple[Request, ...] = ()
    """The others, if it is the first."""
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
    output_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of a position each, if asked for."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of prompt tokens from the second on, in order, if asked for."""
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | tuple[int, ...] | None = None
    """The stop token id, string or sequence that ended it, if the caller named it."""
    error: Mrv1Error | None = None
    banned_token_sequences: tuple[tuple[int, ...], ...] = ()
    """Its bad words, as the tokenizer writes them, and those given as tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Every token that ends it, end-of-sequence tokens among them unless ignored."""
    late_token_ids: tuple[int, ...] = ()
    """These and the end-of-sequence tokens: not drawn before its ``min_tokens``."""
    ending_token_ids: tuple[int, ...] = ()
    """Every token that ends it, and the last ones of its stop sequences."""
    asks_logprobs: bool = field(init=False)
    """Whether a step may have to tell log-probabilities of it."""
    matcher: GrammarMatcher | None = field(init=False)
    """Follows its output, if that is to be of a grammar."""
    slot: int = -1
    """Row in the runner's state while running."""
    epoch: int = -1
    block_ids: list[list[int]] = field(default_factory=list)
    """Per head group, the ids of its logical blocks; -1 = given up."""
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
        self.asks_logprobs = self.params.wants_logprobs or self.params.prompt_logprobs is not None
        grammar = self.params.structured_output
        try:
            self.matcher = None if grammar is None else grammar.matcher()
        except Exception as error:  # whatever a grammar raises fails its request alone
            raise RequestError(f"structured_output: {error!r}") from error

    def add_followers(self) -> None:
        """Make the other outputs that its parameters ask for: requests that differ in ``child``.

        What their prompts' log-probabilities are, the first one tells for all.
        """
        if self.params.n == 1:
            return  # a copy of the parameters is checked anew, which is half of an admission
        params = replace(self.params, prompt_logprobs=None)
        self.followers = tuple(
            Request(
                req_id=(self.name, child),
                prompt_token_ids=self.prompt_token_ids,
                params=params,
                seed=self.seed,
                child=child,
                leader=self,
                max_total_tokens=self.max_total_tokens,
                unsplittable=self.unsplittable,
                cache_key=self.cache_key,
                arrival_time=self.arrival_time,
                banned_token_sequences=self.banned_token_sequences,
            )
            for child in range(1, self.params.n)
        )

    @property
    def name(self) -> str:
        """What the caller calls it, whichever of the outputs it is."""
        return self.req_id if isinstance(self.req_id, str) else self.req_id[0]

    @property
    def stop_sequence(self) -> tuple[int, ...] | None:
        """The stop sequence that its output ends with, the first of several; None = none does."""
        output = self.output_token_ids
        if len(output) < self.params.min_tokens:
            return None
        for sequence in self.params.stop_token_sequences:
            if tuple(output[-len(sequence) :]) == sequence:
                return sequence
        return None

    @property
    def num_prompt_logprobs(self) -> int:
        """Prompt tokens whose log-probabilities are known, the first one not counted."""
        return sum(map(len, self.prompt_logprobs))

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether its prompt has to be computed for the log-probabilities it asks for."""
        return (
            self.params.prompt_logprobs is not None
            and self.num_prompt_logprobs < len(self.prompt_token_ids) - 1
        )

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

    def uncut(self, start: int, count: int) -> int:
        """Return ``count`` tokens from ``start``, or fewer to end before a span, not inside it."""
        for span_start, span_end in self.unsplittable:
            if span_start < start + count < span_end:
                return span_start - start
        return count

    def slot_request(self) -> SlotRequest:
        """Return what a plan tells of it as it takes its slot."""
        num_prompt_tokens = len(self.prompt_token_ids)
        return SlotRequest(
            req_id=self.req_id,
            slot=self.slot,
            epoch=self.epoch,
            token_ids=self.token_ids(),
            prompt_len=num_prompt_tokens,
            sampling_params=self.params,
            seed=self.seed,
            child=self.child,
            banned_token_sequences=self.banned_token_sequences,
            num_computed_tokens=self.num_cached_tokens,
            max_total_tokens=self.max_total_tokens,
            stop_token_ids=self.stop_token_ids[:MAX_STOP_TOKENS],
            stop_token_sequences=self.params.stop_token_sequences,
            min_total_tokens=num_prompt_tokens + self.params.min_tokens,
            late_token_ids=self.late_token_ids[:MAX_STOP_TOKENS],
        )

    def set_ending_tokens(self, eos_token_ids: tuple[int, ...]) -> None:
        """Work out which tokens end it, given those that end a sequence of the model."""
        named = tuple(dict.fromkeys(self.params.stop_token_ids))
        self.late_token_ids = tuple(dict.fromkeys((*named, *eos_token_ids)))
        self.stop_token_ids = named if self.params.ignore_eos else self.late_token_ids
        last_of_sequences = [sequence[-1] for sequence in self.params.stop_token_sequences]
        self.ending_token_ids = (*self.stop_token_ids, *last_of_sequences)

    def end(self, reason: FinishReason) -> None:
        """Note why it has ended; its status says so last, when all else is noted."""
        self.stop_reason = None
        if reason == "stop":
            last = self.output_token_ids[-1]
            named = last in self.params.stop_token_ids
            self.stop_reason = last if named else self.stop_sequence
        self.finish_reason = reason
        self.finish_time = time.perf_counter()
        self.status = Status.FINISHED

    @property
    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is Status.FINISHED
