"""vLLM's scheduler output as a plan of mrv1: the requests, their slots and their progress."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mrv1.engine.request_maker import derive_seed
from mrv1.errors import ConfigError
from mrv1.integrations.vllm.adapters import WorkerAdapters
from mrv1.integrations.vllm.sampling import sampling_params_of
from mrv1.runner import SlotRequest, StepPlan, TokenLogprobs
from mrv1.runner.step import Int32Array
from mrv1.sampler import SamplingParams

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

Tokens = tuple[tuple[int, ...], ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Known:
    """An unfinished request, as vLLM described it when it was new."""

    prompt_len: int
    params: SamplingParams
    seed: int
    late_token_ids: tuple[int, ...]
    """Tokens that end the request, which are not drawn before ``min_tokens``."""
    slot: int | None = None
    """Its slot; None = preempted, or not scheduled yet."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of the prompt since the last entry; None = not asked for, or reported."""
    lora_request: object = None
    """vLLM's; None = the model alone."""
    has_failed: bool = False
    """Whether a step drew no token, for example because of NaN."""


@dataclass(slots=True, frozen=True, kw_only=True, eq=False)
class Step:
    """A plan, and what its result needs to become vLLM's."""

    plan: StepPlan
    req_ids: list[str]
    rows: dict[str, int]
    requests: Sequence[Known]
    samples: npt.NDArray[np.bool_]
    """[rows], whether the row draws a token."""
    prompt_logprobs: Mapping[int, list[TokenLogprobs]]
    """Row -> where to collect the log-probabilities of its prompt, if it has to report them. A
    later admission of the request collects elsewhere."""


class Requests:
    """Gives each request of vLLM's scheduler a slot, and turns its decisions into plans.

    vLLM sends what has changed. A preempted request comes back among the cached ones
    (``resumed_req_ids``) or, for some model runners, as a new one with ``prefill_token_ids``.
    ``seed`` is for requests without one. Without ``adapters`` no request has one.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        seed: int,
        adapters: WorkerAdapters | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self.adapters = adapters
        self._seed = seed
        self._num_added = 0
        self._known: dict[str, Known] = {}
        self._free = deque(range(max_num_seqs))
        self._epochs = np.zeros(max_num_seqs, dtype=np.int32)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        """By slot: tokens known, or drawn by a launched step."""
        self._num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self._finished: list[int] = []
        """Slots of requests that ended since the last plan."""
        self._preempted: list[int] = []
        """Slots of requests that were preempted since the last plan."""
        self._next_step_id = 0
        self._counts: Mapping[str, int] = {}
        """Tokens of each request that vLLM schedules in the step that is planned."""
        self._new_block_ids: dict[int, Tokens] = {}
        """By slot: what the step that is planned adds."""
        self._last: Step | None = None
        """The step planned last, if every row of it draws a token."""

    def plan(self, output: SchedulerOutput) -> Step | None:
        """Return vLLM's step; None = nothing to compute; ConfigError: it is not supported."""
        if output.scheduled_spec_decode_tokens or output.scheduled_encoder_inputs:
            raise ConfigError(
                "SchedulerOutput: expected no drafts and no encoder inputs, got some"
            )
        if output.kv_cache_block_copies or output.new_block_ids_to_zero:
            raise ConfigError("SchedulerOutput: expected no blocks to copy or clear, got some")
        for req_id in output.finished_req_ids:
            known = self._known.pop(req_id, None)
            if known is not None:
                self._leave(req_id, known, self._finished)
        for req_id in output.preempted_req_ids or ():
            known = self._known.get(req_id)
            if known is not None:
                self._leave(req_id, known, self._preempted)
        counts = self._counts = output.num_scheduled_tokens
        self._new_block_ids = {}
        entering = [*map(self._new, output.scheduled_new_reqs)]
        resumed = self._cached(output.scheduled_cached_reqs)
        moved = {} if self.adapters is None else self.adapters.restore(counts)
        if not counts:
            return None
        last = self._last
        continues = (
            last is not None
            and not (entering or resumed or moved or self._finished or self._preempted)
            and output.total_num_scheduled_tokens == len(counts)
            and [*counts] == last.req_ids
        )
        if last is not None and continues:
            step = self._steady(last)
        else:
            step = self._step(entering, resumed, moved)
        self._next_step_id += 1
        self._last = step if step.samples.all() else None
        return step

    def forget_last(self) -> None:
        """Note that the step planned last was not launched, so that no step may continue it."""
        self._last = None

    # --- entering and leaving -----------------------------------------------------------------
    def _new(self, new: NewRequestData) -> SlotRequest:
        """Return the admission of a request that is new, or that comes back in this form."""
        if new.prompt_token_ids is None or new.sampling_params is None:
            raise ConfigError(f"request {new.req_id}: expected a prompt of token ids, got another")
        params, before = sampling_params_of(new.sampling_params), self._known.get(new.req_id)
        if before is not None:  # preempted, or a session that goes on with a longer prompt
            self._leave(new.req_id, before, self._preempted)
            seed = before.seed
        else:
            seed = derive_seed(self._seed, self._num_added) if params.seed is None else params.seed
            self._num_added += 1
        stops = sorted(new.sampling_params.all_stop_token_ids)
        known = self._known[new.req_id] = Known(
            prompt_len=len(new.prompt_token_ids),
            params=params,
            seed=seed,
            late_token_ids=tuple(stops) if params.min_tokens else (),
            lora_request=new.lora_request,
        )
        tokens = new.prefill_token_ids or new.prompt_token_ids
        return self._enter(new.req_id, known, tokens, new.num_computed_tokens, new.block_ids)

    def _cached(self, cached: CachedRequestData) -> list[SlotRequest]:
        """Return the admissions of requests that come back; note new blocks of the others."""
        resumed = []
        for req_id, num_computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            if blocks is None:  # as most rows of most steps
                continue
            if req_id in cached.resumed_req_ids:
                known, tokens = self._known[req_id], cached.all_token_ids[req_id]
                resumed.append(self._enter(req_id, known, tokens, num_computed, blocks))
                continue
            slot = self._known[req_id].slot
            if slot is not None:
                self._new_block_ids[slot] = tuple(map(tuple, blocks))
        return resumed

    def _enter(
        self,
        req_id: str,
        known: Known,
        tokens: Sequence[int],
        num_computed_tokens: int,
        blocks: Sequence[Sequence[int]],
    ) -> SlotRequest:
        if known.slot is not None:
            self._leave(req_id, known, self._preempted)
        slot = known.slot = self._free.popleft()
        params, prompt_len = known.params, known.prompt_len
        has_output = len(tokens) > prompt_len
        reports_prompt = params.prompt_logprobs is not None
        if reports_prompt and has_output:  # with the first token came those of the prompt
            params = params.clone()
            params.prompt_logprobs, reports_prompt = None, False
        known.prompt_logprobs = [] if reports_prompt else None
        self._num_tokens[slot] = len(tokens)
        self._num_computed[slot] = num_computed_tokens
        self._new_block_ids[slot] = tuple(map(tuple, blocks))
        adapter_slot = -1
        if self.adapters is not None:
            adapter_slot = self.adapters.enter(req_id, known.lora_request, self._counts)
        return SlotRequest(
            req_id=req_id,
            slot=slot,
            epoch=int(self._epochs[slot]),
            token_ids=np.array(tokens, dtype=np.int32),
            prompt_len=prompt_len,
            sampling_params=params,
            seed=known.seed,
            banned_token_sequences=tuple(map(tuple, params.bad_words_token_ids)),
            num_computed_tokens=num_computed_tokens,
            max_total_tokens=self.max_model_len,
            min_total_tokens=prompt_len + params.min_tokens,
            late_token_ids=known.late_token_ids,
            adapter_slot=adapter_slot,
        )

    def _leave(self, req_id: str, known: Known, slots: list[int]) -> None:
        """Take a request's slot, if it has one, and note it in ``slots``."""
        if known.slot is not None:
            slots.append(known.slot)
            self._epochs[known.slot] += 1
            self._free.append(known.slot)
            known.slot = None
            if self.adapters is not None:
                self.adapters.leave(req_id)

    # --- plans ---------------------------------------------------------------------------------
    def _steady(self, last: Step) -> Step:
        """Return the step in which the rows of ``last`` compute the tokens that it draws."""
        before = last.plan
        self._num_tokens[before.slots] += 1
        self._num_computed[before.slots] += 1
        plan = StepPlan(
            step_id=self._next_step_id,
            continues=before.step_id,
            req_ids=before.req_ids,
            slots=before.slots,
            epochs=before.epochs,
            num_scheduled_tokens=before.num_scheduled_tokens
            if before.continues is not None
            else np.ones(len(before.slots), dtype=np.int32),
            new_block_ids=self._new_block_ids,
        )
        return Step(
            plan=plan,
            req_ids=last.req_ids,
            rows=last.rows,
            requests=last.requests,
            samples=last.samples,
            prompt_logprobs=last.prompt_logprobs,
        )

    def _step(
        self, entering: list[SlotRequest], resumed: list[SlotRequest], moved: Mapping[str, int]
    ) -> Step:
        counts, req_ids = self._counts, [*self._counts]
        requests = [self._known[req_id] for req_id in req_ids]
        slots: Int32Array = np.array([known.slot for known in requests], dtype=np.int32)
        num_scheduled_tokens = np.fromiter(counts.values(), dtype=np.int32, count=len(counts))
        self._num_computed[slots] += num_scheduled_tokens
        samples = self._num_computed[slots] >= self._num_tokens[slots]
        self._num_tokens[slots] += samples
        plan = StepPlan(
            step_id=self._next_step_id,
            new=tuple(entering),
            resumed=tuple(resumed),
            preempted=tuple(self._preempted),
            finished=tuple(self._finished),
            req_ids=tuple(req_ids),
            slots=slots,
            epochs=self._epochs[slots],
            num_scheduled_tokens=num_scheduled_tokens,
            new_block_ids=self._new_block_ids,
            adapter_slots={
                slot: adapter_slot
                for req_id, adapter_slot in moved.items()
                if (slot := self._known[req_id].slot) is not None
            },
        )
        self._finished, self._preempted = [], []
        return Step(
            plan=plan,
            req_ids=req_ids,
            rows={req_id: row for row, req_id in enumerate(req_ids)},
            requests=requests,
            samples=samples,
            prompt_logprobs={
                row: known.prompt_logprobs
                for row, known in enumerate(requests)
                if known.prompt_logprobs is not None
            },
        )
