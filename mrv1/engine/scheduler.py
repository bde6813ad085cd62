"""Which requests run in the next step, with how many tokens and which blocks. Pure host code."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mrv1.engine.block_pool import BlockPool
from mrv1.engine.request import FinishReason, Request, Status
from mrv1.errors import Mrv1Error, RequestError
from mrv1.runner.step import SlotRequest, StepOutput, StepPlan


@dataclass(slots=True)
class _Step:
    """A step being put together, row by row."""

    new: list[SlotRequest] = field(default_factory=list)
    resumed: list[SlotRequest] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    block_ids: list[tuple[int, ...]] = field(default_factory=list)


class Scheduler:
    """First come, first served: continuous batching with chunked prefill under a token budget.

    Running requests go before waiting ones, in order of arrival. When blocks run out, the running
    request that arrived last gives up its slot and blocks and is computed again later
    (preemption by recompute). A waiting request is admitted when the blocks of all its known
    tokens are free. At most one step is in flight.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """In order of arrival."""
        self.num_preemptions = 0
        self.num_stale_outputs = 0
        self.num_finished = 0
        self._requests: dict[str, Request] = {}
        self._eos_token_ids = frozenset(eos_token_ids)
        self._free_slots = deque(range(max_num_seqs))
        self._epochs = [0] * max_num_seqs
        self._vacated: list[int] = []
        """Slots of requests that ended since the last plan."""
        self._preempted: list[int] = []
        """Slots given up by preemption since the last plan."""
        self._next_step_id = 0

    # --- requests -------------------------------------------------------------------------

    @property
    def num_free_slots(self) -> int:
        """Slots that no request holds."""
        return len(self._free_slots)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    def get(self, req_id: str) -> Request | None:
        """Return an unfinished request, or None."""
        return self._requests.get(req_id)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: its id is in use, or it could never get the blocks it may need.
        """
        if request.req_id in self._requests:
            raise RequestError(
                f"request_id: {request.req_id!r} is in use by an unfinished request"
            )
        needed = self._blocks_for(request.max_total_tokens)
        if needed > self.pool.num_blocks:
            raise RequestError(
                f"prompt and max_tokens: expected at most {self.pool.num_blocks * self.block_size}"
                f" tokens (num_kv_blocks = {self.pool.num_blocks} of {self.block_size}), got up "
                f"to {request.max_total_tokens}; raise num_kv_blocks or lower max_tokens"
            )
        self._requests[request.req_id] = request
        self.waiting.append(request)

    def abort(self, req_id: str) -> Request | None:
        """End a request now and return it; None if no unfinished request has this id."""
        request = self._requests.get(req_id)
        if request is not None:
            self._finish(request, "abort")
        return request

    def fail(self, request: Request, error: Mrv1Error) -> None:
        """End a request with an error."""
        request.error = error
        self._finish(request, "error")

    # --- one step -------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Return the next step, or None when there is nothing to compute."""
        step = _Step()
        budget = self.max_num_batched_tokens
        preemptions_before = self.num_preemptions
        for request in tuple(self.running):
            if budget == 0:
                break
            budget -= self._schedule_running(request, step, budget)
        if self.num_preemptions == preemptions_before:
            while self.waiting and budget and self._can_admit(self.waiting[0]):
                budget -= self._admit(self.waiting.popleft(), step, budget)
        if not step.requests:
            return None
        return self._plan(step)

    def _schedule_running(self, request: Request, step: _Step, budget: int) -> int:
        """Give a running request its tokens of this step; return how many (0: preempted)."""
        if request.status is not Status.RUNNING:
            return 0  # preempted above, for a request that arrived before it
        num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
        needed = self._blocks_for(request.num_computed_tokens + num_tokens) - len(
            request.block_ids
        )
        while needed > self.pool.num_free:
            # The last of the running has no row in this step yet: rows are filled in order.
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return 0
        self._append_row(request, step, num_tokens, needed)
        return num_tokens

    def _can_admit(self, request: Request) -> bool:
        return bool(self._free_slots) and (
            self._blocks_for(request.num_tokens) <= self.pool.num_free
        )

    def _admit(self, request: Request, step: _Step, budget: int) -> int:
        """Give a waiting request a slot and the tokens of its first chunk; return how many."""
        request.slot = self._free_slots.popleft()
        request.epoch = self._epochs[request.slot]
        request.status = Status.RUNNING
        self.running.append(request)
        entering = step.resumed if request.num_preemptions else step.new
        entering.append(
            SlotRequest(
                req_id=request.req_id,
                slot=request.slot,
                epoch=request.epoch,
                token_ids=np.array(
                    [*request.prompt_token_ids, *request.output_token_ids], dtype=np.int32
                ),
                prompt_len=len(request.prompt_token_ids),
                sampling_params=request.params,
                seed=request.seed,
            )
        )
        num_tokens = min(request.num_tokens, budget)
        self._append_row(request, step, num_tokens, self._blocks_for(num_tokens))
        return num_tokens

    def _append_row(self, request: Request, step: _Step, num_tokens: int, num_blocks: int) -> None:
        block_ids = self.pool.allocate(num_blocks)
        request.block_ids.extend(block_ids)
        request.num_computed_tokens += num_tokens
        step.requests.append(request)
        step.num_tokens.append(num_tokens)
        step.block_ids.append(block_ids)

    def _plan(self, step: _Step) -> StepPlan:
        plan = StepPlan(
            step_id=self._next_step_id,
            new=tuple(step.new),
            resumed=tuple(step.resumed),
            preempted=tuple(self._preempted),
            finished=tuple(self._vacated),
            req_ids=tuple(request.req_id for request in step.requests),
            slots=np.array([request.slot for request in step.requests], dtype=np.int32),
            epochs=np.array([request.epoch for request in step.requests], dtype=np.int32),
            num_scheduled_tokens=np.array(step.num_tokens, dtype=np.int32),
            new_block_ids=tuple((ids,) for ids in step.block_ids),
        )
        self._next_step_id += 1
        self._preempted, self._vacated = [], []
        return plan

    def update(self, output: StepOutput) -> list[Request]:
        """Take in what a step produced; return the requests that got a token or ended."""
        changed = []
        for row, req_id in enumerate(output.req_ids):
            request = self._requests.get(req_id)
            if (
                request is None
                or request.slot != output.slots[row]
                or request.epoch != output.epochs[row]
            ):
                self.num_stale_outputs += 1  # ended or preempted since the launch: dropped
                continue
            if row in output.errors:
                self.fail(request, RequestError(f"request {req_id!r}: {output.errors[row]}"))
            elif output.token_ids[row]:
                self._append_tokens(request, output.token_ids[row])
            else:
                continue
            changed.append(request)
        return changed

    def fail_step(self, req_ids: Sequence[str], error: Mrv1Error) -> list[Request]:
        """End every request of a failed step; return them."""
        failed = [r for r in map(self._requests.get, req_ids) if r is not None]
        for request in failed:
            self.fail(request, error)
        return failed

    # --- inside ---------------------------------------------------------------------------

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _append_tokens(self, request: Request, token_ids: Sequence[int]) -> None:
        if request.first_token_time is None:
            request.first_token_time = time.perf_counter()
        for token in token_ids:
            request.output_token_ids.append(token)
            if token in request.params.stop_token_ids:
                request.stop_reason = token
                self._finish(request, "stop")
            elif token in self._eos_token_ids and not request.params.ignore_eos:
                self._finish(request, "stop")
            elif request.num_tokens >= request.max_total_tokens:
                self._finish(request, "length")
            if request.finished:
                return

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is Status.RUNNING:
            self._vacated.append(request.slot)
            self._release(request)
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        request.finish_time = time.perf_counter()
        self.num_finished += 1
        del self._requests[request.req_id]

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        request.num_preemptions += 1
        self._preempted.append(request.slot)
        self._release(request)
        request.status = Status.WAITING
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        """Take back slot and blocks; the slot's next request has another epoch."""
        self.running.remove(request)
        self.pool.free(request.block_ids)
        request.block_ids.clear()
        self._epochs[request.slot] += 1
        self._free_slots.append(request.slot)
        request.slot = -1
