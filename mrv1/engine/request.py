"""One request, from arrival to finish."""

from __future__ import annotations

import enum
import time
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from mrv1.engine.adapters import LoadedAdapter
from mrv1.engine.drafter import Drafter
from mrv1.errors import Mrv1Error, RequestError
from mrv1.multimodal import MultimodalItem
from mrv1.runner.request_state import MAX_STOP_TOKENS
from mrv1.runner.step import Int32Array, RequestId, SlotRequest, TokenLogprobs
from mrv1.sampler import GrammarMatcher, SamplingParams

KeySpan = tuple[int, int, bytes]  # start, end, and key of what it depends on

SHARED_BY_FOLLOWERS = (
    "prompt_token_ids", "seed", "max_total_tokens", "unsplittable", "multimodal",
    "attn_mask_offsets", "key_spans", "cache_key", "priority", "fairness_id", "arrival_time",
    "banned_token_sequences", "adapter",
)  # fmt: skip
"""Fields of a request that its followers have too."""

FinishReason = Literal["stop", "length", "abort", "error"]


class Status(enum.Enum):
    """The state of a request."""

    WAITING = enum.auto()  # without slot and blocks: new, or preempted
    RUNNING = enum.auto()  # with a slot and blocks
    FINISHED = enum.auto()  # ended; its slot and blocks are freed


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """The engine's record of one request; only the scheduler changes it."""

    req_id: RequestId  # unique; a follower's is a tuple, unlike callers' names
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int  # 64-bit key of the request's noise
    child: int = 0  # index among the ``n`` outputs of the caller's request
    leader: Request | None = None  # the request of the first output; None if this is the first
    followers: tuple[Request, ...] = ()  # of the other outputs
    max_total_tokens: int  # prompt and output tokens at which the request ends with ``"length"``
    unsplittable: tuple[tuple[int, int], ...] = ()  # ascending spans of a step each
    multimodal: tuple[MultimodalItem, ...] = ()  # ascending by their start
    attn_mask_offsets: Int32Array | None = None  # [prompt tokens, 2] keys seen; None = causal
    key_spans: tuple[KeySpan, ...] = ()  # whose K and V depend on more than tokens
    cache_key: bytes = b""  # what K and V depend on but tokens; equal for common prefixes
    adapter: LoadedAdapter | None = None  # its LoRA adapter
    adapter_slot: int = -1  # slot of the adapter while the request runs; else -1
    priority: int = 0  # requests with a lower value run first, under the policy ``priority``
    fairness_id: str = ""  # the caller's key, by which requests of one priority take turns
    has_waited: bool = False  # for another one to compute a common prefix
    arrival_time: float = field(default_factory=time.perf_counter)  # seconds
    first_token_time: float | None = None
    finish_time: float | None = None
    output_token_ids: list[int] = field(default_factory=list)
    output_logprobs: list[TokenLogprobs] = field(default_factory=list)  # per token, if requested
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # from the second token
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | tuple[int, ...] | None = None  # ending token, string or sequence
    error: Mrv1Error | None = None
    banned_token_sequences: tuple[tuple[int, ...], ...] = ()  # the bad words as tokens
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence too, unless ``ignore_eos``
    late_token_ids: tuple[int, ...] = ()  # stop tokens and end-of-sequence before ``min_tokens``
    ending_token_ids: tuple[int, ...] = ()  # ``stop_token_ids``, last tokens of stop sequences
    asks_logprobs: bool = field(init=False)  # of output or prompt tokens
    matcher: GrammarMatcher | None = field(init=False)  # None without a grammar
    slot: int = -1  # slot while the request runs; else -1
    epoch: int = -1
    block_ids: list[list[int]] = field(default_factory=list)  # per group; -1 = freed
    block_digests: list[bytes] = field(default_factory=list)  # leading full blocks, so far
    num_cached_tokens: int = 0  # tokens of the prefix hit when the request was last admitted
    num_prefix_hits: int = 0  # tokens of the prefix hit when the request was first admitted
    num_preemptions: int = 0
    num_draft_tokens: int = 0  # drafts that steps have verified
    num_accepted_tokens: int = 0  # drafts among them that were accepted
    drafter: Drafter | None = None  # None before its first use and after the end
    prompt_array: InitVar[Int32Array | None] = None  # [prompt tokens]; None = made here
    _prompt: Int32Array = field(init=False, repr=False)

    def __post_init__(self, prompt_array: Int32Array | None) -> None:
        """Set the prompt's array, and make the grammar's matcher."""
        if prompt_array is None:
            prompt_array = np.array(self.prompt_token_ids, dtype=np.int32)
        self._prompt = prompt_array
        self._prompt.flags.writeable = False  # plans share the array
        self.asks_logprobs = self.params.wants_logprobs or self.params.prompt_logprobs is not None
        grammar = self.params.structured_output
        try:
            self.matcher = None if grammar is None else grammar.matcher()
        except Exception as error:  # of any type: only this request fails
            raise RequestError(f"structured_output: {error!r}") from error

    def add_followers(self) -> None:
        """Make the requests of the other outputs, which compute no prompt log-probabilities."""
        if self.params.n == 1:
            return  # no copy of the parameters: its check takes half the time of an admission
        params = replace(self.params, prompt_logprobs=None)
        shared: dict[str, Any] = {name: getattr(self, name) for name in SHARED_BY_FOLLOWERS}
        self.followers = tuple(
            Request(
                req_id=(self.name, child),
                prompt_array=self._prompt,
                params=params,
                child=child,
                leader=self,
                **shared,
            )
            for child in range(1, self.params.n)
        )

    @property
    def name(self) -> str:
        """The caller's name for the request, the same for all its outputs."""
        return self.req_id if isinstance(self.req_id, str) else self.req_id[0]

    @property
    def stop_sequence(self) -> tuple[int, ...] | None:
        """The first stop sequence that the output ends with; None = no stop sequence ends it."""
        output = self.output_token_ids
        if len(output) < self.params.min_tokens:
            return None
        for sequence in self.params.stop_token_sequences:
            if tuple(output[-len(sequence) :]) == sequence:
                return sequence
        return None

    @property
    def num_prompt_logprobs(self) -> int:
        """Prompt tokens whose log-probabilities are known, the first token not counted."""
        return sum(map(len, self.prompt_logprobs))

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether the prompt must be computed because its log-probabilities are not all known."""
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
        """Return ``count``, or less: ``start + count`` must not be inside an unsplittable span."""
        for span_start, span_end in self.unsplittable:
            if span_start < start + count < span_end:
                return span_start - start
        return count

    def span_size(self, start: int) -> int:
        """Return the tokens of the unsplittable span that starts at ``start``; 0 = none does."""
        return next((end - begin for begin, end in self.unsplittable if begin == start), 0)

    def items_in(self, start: int, end: int) -> list[MultimodalItem]:
        """Return the items of which tokens ``[start, end)`` contain some."""
        return [item for item in self.multimodal if item.start < end and start < item.end]

    def slot_request(self) -> SlotRequest:
        """Return the part of a plan that describes the request when it takes its slot."""
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
            adapter_slot=self.adapter_slot,
            multimodal=self.multimodal,
            attn_mask_offsets=self.attn_mask_offsets,
        )

    def set_ending_tokens(self, eos_token_ids: tuple[int, ...]) -> None:
        """Set the tokens that end the request, given the model's end-of-sequence tokens."""
        named = tuple(dict.fromkeys(self.params.stop_token_ids))
        self.late_token_ids = tuple(dict.fromkeys((*named, *eos_token_ids)))
        self.stop_token_ids = named if self.params.ignore_eos else self.late_token_ids
        sequence_ends = [sequence[-1] for sequence in self.params.stop_token_sequences]
        self.ending_token_ids = (*self.stop_token_ids, *sequence_ends)

    def end(self, reason: FinishReason) -> None:
        """Record why the request has ended; ``status`` is set last, after all other fields."""
        self.stop_reason = None
        if reason == "stop":
            last = self.output_token_ids[-1]
            named = last in self.params.stop_token_ids
            self.stop_reason = last if named else self.stop_sequence
        self.finish_reason = reason
        self.finish_time = time.perf_counter()
        self.drafter = None
        self.status = Status.FINISHED

    @property
    def finished(self) -> bool:
        """Whether the request has ended, for any reason."""
        return self.status is Status.FINISHED
