"""Which requests run in the next step, with how many tokens and which blocks. Pure host code."""

from __future__ import annotations

from collections import deque
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from mrv1.engine.adapters import AdapterSlots
from mrv1.engine.admission import Admission
from mrv1.engine.feature_pool import FeaturePool
from mrv1.engine.head_pools import HeadPools
from mrv1.engine.prefix_cache import PrefixCache
from mrv1.engine.request import FinishReason, Request, Status
from mrv1.engine.request_limits import check_fits
from mrv1.engine.running_batch import BoolArray, LaunchedStep, NextStep, RunningBatch
from mrv1.engine.scheduler_config import SchedulerConfig
from mrv1.engine.slot_table import SlotTable
from mrv1.engine.speculation import Speculation
from mrv1.engine.step_budget import StepBudget
from mrv1.engine.step_results import take_output
from mrv1.errors import Mrv1Error, RequestError
from mrv1.runner.step import Int64Array, RequestId, SlotRequest, StepOutput, StepPlan


class Scheduler:
    """Continuous batching with chunked prefill under a token budget.

    Running requests go before waiting ones, in order of arrival; with the policy ``priority`` by
    priority, then in order of admission. When blocks run out, the last running request is
    preempted, and recomputed later; none is preempted for a waiting one.

    **Steps in flight.** ``schedule`` may be called again before the output of up to
    ``max_steps_in_flight - 1`` plans has come. A row that computes its last known token then has a
    *pending* token, and is scheduled again before it is known, up to its length. No step is
    planned while one with drafts is in flight: only its result tells how many were accepted. A
    draft head's drafts are on the device: their steps follow each other all the same, and until
    results come, lengths are upper bounds. A row is *stale* if its request ended or was preempted
    after the launch: the epoch of its slot has then changed, and the row is dropped.

    **Blocks.** A block freed while steps are in flight is quarantined until they are over. If
    these will free enough blocks, nothing is preempted: a request without blocks is left out.

    ``Admission`` decides which requests enter, ``StepBudget`` who gets how many tokens;
    ``SlotTable`` counts progress, ``RunningBatch`` manages blocks.
    """

    def __init__(self, config: SchedulerConfig, speculation: Speculation | None = None) -> None:
        """Make the pools of the head groups; ``speculation`` proposes drafts, None = no drafts."""
        self.num_preemptions = 0
        self.wasted_tokens = 0  # tokens of stale rows, whose request had ended or been preempted
        self.num_nan_rows = 0  # rows that failed because of NaN in their logits
        self.num_finished = 0
        self.num_generated_tokens = 0  # tokens that were appended to a request
        self._speculation = speculation
        self._requests: dict[RequestId, Request] = {}  # unfinished, in order of arrival
        self._next_step_id = 0
        self.adapter_slots = AdapterSlots(config.max_loras)
        self.admission = Admission(self.adapter_slots)
        self.configure(config)

    def configure(self, config: SchedulerConfig) -> None:
        """Schedule with another runner's blocks and limits; no request may be unfinished."""
        self.pools = HeadPools(config.num_blocks, config.block_size, config.keeps)
        self.block_size = config.block_size
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_steps_in_flight = config.max_steps_in_flight
        self.features = FeaturePool(config.num_feature_rows)
        self._config = config
        self._eos_token_ids = tuple(sorted(set(config.eos_token_ids)))
        self._slots = SlotTable(config.max_num_seqs, [group for group, _ in self.pools.streaming])
        self.prefix_cache = PrefixCache(
            self.pools, self._slots, is_enabled=config.enable_prefix_caching
        )
        self.admission.configure(config, self._slots, self.features, self.prefix_cache)
        self._start()

    def _start(self) -> None:
        """Start empty: no request waits or runs, every block is free, no step is in flight."""
        self.pools.reset()
        self.features.reset()
        self.adapter_slots.reset()
        self._budget = StepBudget(self._config, self._slots)
        self._batch = RunningBatch(
            self.pools, self._slots, self.prefix_cache, has_head=self._config.num_head_drafts > 0
        )
        self.running = self._batch.requests  # running requests by id, in order of arrival
        self.admission.start(self.pools, self._batch)
        self.waiting = self.admission.waiting
        self._in_flight: deque[LaunchedStep] = deque()
        self._finished: list[int] = []  # slots of requests that ended since the last plan
        self._preempted: list[int] = []  # slots preempted since the last plan

    # --- requests -------------------------------------------------------------------------

    @property
    def num_steps_in_flight(self) -> int:
        """Plans that await their output."""
        return len(self._in_flight)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        """Unfinished requests that do not run."""
        return len(self._requests) - len(self.running)

    @property
    def unfinished(self) -> tuple[Request, ...]:
        """Every request that waits or runs, in order of arrival."""
        return tuple(self._requests.values())

    def get(self, req_id: RequestId) -> Request | None:
        """Return an unfinished request, or None."""
        return self._requests.get(req_id)

    def add(self, request: Request) -> None:
        """Queue a request and its followers; RequestError: an id is in use, ``check_fits``."""
        family = (request, *request.followers)
        if any(member.req_id in self._requests for member in family):
            raise RequestError(
                f"request_id: expected an id that no unfinished request has, got {request.name!r}"
            )
        for member in family:
            member.set_ending_tokens(self._eos_token_ids)
        check_fits(request, self.pools, self.features, self.max_num_batched_tokens)
        self._requests |= {member.req_id: member for member in family}
        self.admission.add(request)

    def abort(self, req_id: RequestId) -> Request | None:
        """End a request now and return it; None if no unfinished request has this id."""
        request = self._requests.get(req_id)
        if request is not None:
            self._finish(request, "abort")
        return request

    def stop(self, request: Request, reason: str, num_output_tokens: int) -> None:
        """End a request's output with one of its tokens, for a reason such as a stop string.

        Tokens after the first ``num_output_tokens``, which a step with drafts may have given, are
        dropped. The reason replaces that of a request that has ended, even with an error: without
        drafts it would have ended with that token.
        """
        if not request.finished:
            self._finish(request, "stop")
        request.finish_reason, request.stop_reason, request.error = "stop", reason, None
        num_dropped = len(request.output_token_ids) - num_output_tokens
        if num_dropped:
            self.num_generated_tokens -= num_dropped
            self.wasted_tokens += num_dropped
            del request.output_token_ids[num_output_tokens:]
            del request.output_logprobs[num_output_tokens:]

    def fail(self, request: Request, error: Mrv1Error) -> None:
        """End an unfinished request with an error."""
        request.error = error
        self._finish(request, "error")

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; no block that was computed until now is shared again."""
        self.prefix_cache.reset()
        self.admission.readmit(self.admission.prefix_waits.reset())

    # --- one step -------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Return the plan of the next step, or None.

        None = no token can be computed at all, or none shall be before ``update`` has the output
        of a step in flight. RuntimeError: ``max_steps_in_flight`` plans await their output.
        """
        if len(self._in_flight) >= self.max_steps_in_flight:
            raise RuntimeError(
                f"schedule: expected fewer than {self.max_steps_in_flight} steps in flight "
                f"(max_steps_in_flight), got {len(self._in_flight)}; call update first"
            )
        if self._config.num_head_drafts:
            if (plan := self._plan_with_head()) is not None:
                return plan
        else:
            drafts = self._proposed()
            if drafts is None:
                return None
            if drafts and (plan := self._plan_with_drafts(drafts)) is not None:
                return plan
        step = self._plan_running()
        self.admission.admit(step, self._budget)
        if step.continued is None:
            self._give_rest(step)
            self._trim(step)
        return self._launch(step)

    def _proposed(self) -> dict[int, tuple[int, ...]] | None:
        """Return drafts by row of all running requests; None if a result has to come first.

        Only a step in which every row decodes has drafts, and none samples under a grammar, whose
        masks are for one token. Drafts follow known tokens: their step is the only one in flight.
        """
        speculation = self._speculation
        if speculation is None:
            return {}
        rows, slots = self._batch.rows, self._slots
        if self._in_flight and self._in_flight[-1].draft_token_ids:
            return None
        if not self._may_verify():
            return {}
        num_tokens = slots.num_tokens[rows.index]
        room = slots.max_computed[rows.index] - num_tokens
        drafts = speculation.propose(rows.requests, room.tolist())
        return None if drafts and self._in_flight else drafts

    def _may_verify(self) -> bool:
        """Whether all rows of the next step decode, none of them under a grammar."""
        rows, slots = self._batch.rows, self._slots
        if rows.any_grammars or self.features.has_users or (self.waiting and slots.free):
            return False
        if rows.any_logprobs and not self._config.drafts_beside_logprobs:
            return False
        left = slots.num_tokens[rows.index] - slots.num_computed[rows.index]
        return not (left > 1).any()

    def _plan_with_head(self) -> StepPlan | None:
        """Return a plan that verifies the drafts which a head has made, none preempted, or None.

        Lengths are upper bounds, for which there are blocks; a row whose bound is its end waits
        for a result. Where blocks are left, the head has some for the drafts that it makes.
        """
        rows, slots, count = self._batch.rows, self._slots, self._config.num_head_drafts
        if (1 + count) * len(rows.requests) > self.max_num_batched_tokens:
            return None
        if not self._may_verify():
            return None
        computed, most = slots.num_computed[rows.index], slots.max_computed[rows.index]
        # The end of a prompt has no drafts of its own yet, and may see a range of keys.
        if (computed < slots.prompt_len[rows.index]).any():
            return None
        ends = np.minimum(slots.num_tokens[rows.index] + count, most)
        if not (ends > computed).any():
            return None
        ahead = np.minimum(ends + count - 1, most)
        for wanted in (ahead, ends):
            if self._batch.has_blocks(wanted, int((wanted - computed).sum())):
                new_blocks = self._batch.grow(wanted)
                step = NextStep(rows, ends, None, new_blocks, num_device_drafts=count)
                self._batch.drop_idle_rows(step)
                return self._launch(step)
        return None

    def _plan_with_drafts(self, drafts: dict[int, tuple[int, ...]]) -> StepPlan | None:
        """Return a plan of all running requests, none preempted; None if tokens or blocks lack."""
        rows = self._batch.rows
        each = tuple([drafts.get(row, ()) for row in range(len(rows.requests))])
        counts = np.array([1 + len(own) for own in each])
        ends = self._slots.num_computed[rows.index] + counts
        num_tokens = int(counts.sum())
        has_tokens = num_tokens <= self.max_num_batched_tokens
        if not has_tokens or not self._batch.has_blocks(ends, num_tokens):
            return None
        step = NextStep(rows, ends, None, self._batch.grow(ends), draft_token_ids=each)
        return self._launch(step)

    def rows_with_grammars(self) -> list[tuple[int, Request]]:
        """Return the rows of the newest plan that sample a token under a grammar."""
        newest = self._batch.newest
        return [] if newest is None else newest.rows_with_grammars

    def _plan_running(self) -> NextStep:
        """Return the step of all running requests: all their tokens, or their share of them."""
        batch, slots, budget = self._batch, self._slots, self._budget
        rows, continued = batch.rows, batch.continued
        counts: npt.NDArray[np.integer]
        if continued is None:
            ends = np.minimum(slots.num_tokens[rows.index], slots.max_computed[rows.index])
            counts = ends - slots.num_computed[rows.index]
            num_tokens = int(counts.sum())
        else:
            ends, counts, num_tokens = continued.ends + 1, rows.ones, len(rows.requests)
        self.features.start_step()
        budget.start(num_tokens)
        if continued is None or self.waiting:
            budget.limit_chunks(counts, self.admission.num_prompt_tokens)
        is_starved = False
        if budget.is_short or self.features.has_users or not batch.has_blocks(ends, num_tokens):
            ends, is_starved = self._share()
            rows, continued = batch.rows, None
        return NextStep(rows, ends, continued, batch.grow(ends), is_starved=is_starved)

    def _share(self) -> tuple[Int64Array, bool]:
        """Return how far each running request is computed, and whether blocks ran out.

        May preempt requests; the ends, ``[running]``, are of those that still run. A request
        without tokens in this step ends at its computed tokens.
        """
        batch, slots, budget = self._batch, self._slots, self._budget
        budget.share()
        claimed, is_starved = 0, False  # blocks for the tokens of the requests so far
        ends: dict[RequestId, int] = {}
        for request in self._in_order():
            if request.req_id not in self.running:
                continue  # preempted below, for a request before it
            slot = request.slot
            computed = int(slots.num_computed[slot])
            wanted = min(int(slots.num_tokens[slot]), int(slots.max_computed[slot])) - computed
            count = self.features.fit(request, computed, budget.fit(request, computed, wanted))
            needed = batch.num_lacking(request, computed + count)
            while needed > 0 and claimed + needed > self.pools.num_free:
                is_starved = True
                if claimed + needed <= batch.num_free_soon():
                    count = 0  # its blocks stay claimed, so that later rows do not take them
                    break
                # The victim has no row in this step yet: rows are filled in order.
                self._preempt(self._victim())
                if request.req_id not in self.running:
                    break
            if not count and needed <= 0:
                budget.promise(request, computed)
            if request.req_id in self.running:
                ends[request.req_id] = computed + count
                self.features.stage(request, computed, computed + count)
                budget.take(request, count, wanted)
                claimed += max(needed, 0)
        return np.array([ends[req_id] for req_id in self.running], dtype=np.int64), is_starved

    def _give_rest(self, step: NextStep) -> None:
        """Give long prompts the tokens that the step has left, and blocks for them."""
        if not self._budget.rest(step, self._batch, self.pools.num_free):
            return
        for slot, more in self._batch.grow(step.ends).items():
            own = step.new_blocks.get(slot, ((),) * len(more))
            step.new_blocks[slot] = tuple([a + b for a, b in zip(own, more, strict=True)])

    def _trim(self, step: NextStep) -> None:
        """Leave tokens out that would only pad a graph, and the rows that have none."""
        for request, end in self._budget.trim(step, self._batch, self._in_order).items():
            self._batch.shrink(request, end, step.new_blocks)
        self._batch.drop_idle_rows(step)

    def _in_order(self) -> list[Request]:
        """Return the running requests by priority, then in order of admission."""
        return sorted(self.running.values(), key=attrgetter("priority"))

    def _victim(self) -> Request:
        """Return the last request that is not ending: ending requests free their blocks anyway."""
        running = reversed(self._in_order())
        return next(request for request in running if not self._batch.is_ending(request))

    def _launch(self, step: NextStep) -> StepPlan | None:
        """Record the step as launched, and return its plan; None if it has no rows."""
        if not step.rows.requests:
            if self._budget.promised is None:
                return None
            self._budget.forget_promise()  # the span got no blocks: others need not wait for it
            return self.schedule()
        launched = self._batch.launch(self._next_step_id, step)
        new: list[SlotRequest] = []
        resumed: list[SlotRequest] = []
        for request in step.entering:
            (resumed if request.num_preemptions else new).append(request.slot_request())
        plan = StepPlan(
            step_id=launched.step_id,
            continues=None if step.continued is None else step.continued.step_id,
            new=tuple(new),
            resumed=tuple(resumed),
            preempted=tuple(self._preempted),
            finished=tuple(self._finished),
            req_ids=step.rows.req_ids,
            slots=step.rows.slots,
            epochs=step.rows.epochs,
            num_scheduled_tokens=launched.num_scheduled_tokens,
            new_block_ids=step.new_blocks,
            draft_token_ids=launched.draft_token_ids,
            num_device_drafts=launched.num_device_drafts,
            staged_features=self.features.launch(self._slots.num_computed),
        )
        self._in_flight.append(launched)
        self._next_step_id += 1
        self._preempted, self._finished = [], []
        return plan

    # --- results --------------------------------------------------------------------------

    def update(self, output: StepOutput) -> list[Request]:
        """Apply the oldest step's output; return the requests that got a token or ended.

        RuntimeError: the output is of a different step, or has not as many rows as its plan.
        """
        step = self._in_flight[0] if self._in_flight else None
        if step is None or step.step_id != output.step_id:
            raise RuntimeError(
                f"update: expected the output of step {step and step.step_id}, the oldest in "
                f"flight, got step {output.step_id}"
            )
        if len(output.token_ids) != len(step.rows.requests):
            raise RuntimeError(
                f"update: expected {len(step.rows.requests)} rows, as in the plan of step "
                f"{step.step_id}, got {len(output.token_ids)}"
            )
        self._retire(step)
        result = take_output(step, output, self._live_rows(step), self._config.custom_masks)
        self.num_generated_tokens += result.num_tokens
        self.num_nan_rows += result.num_nan_rows
        if step.draft_token_ids:
            self._batch.settle(step, result.succeeded)
        elif self._config.num_head_drafts:
            self._batch.settle_bounds(step, result.succeeded)
        if self._speculation is not None:
            self._speculation.note(step, output, result.succeeded)
        for request in reversed(self._batch.note_first_tokens(result.sampled)):
            self.waiting.admit_followers(request)  # in reverse: each call puts its followers first
        self._batch.land(step, result.succeeded)
        if self.admission.prefix_waits:
            self.admission.readmit(self.admission.prefix_waits.computed())
        for request, reason in result.ended.items():
            self._finish(request, reason)
        return [*result.failed, *result.sampled]

    def fail_step(self, plan: StepPlan, error: Mrv1Error) -> list[Request]:
        """End and return the live rows' requests of a failed step; RuntimeError: not in flight."""
        step = next((step for step in self._in_flight if step.step_id == plan.step_id), None)
        if step is None:
            raise RuntimeError(
                "fail_step: expected one of the steps in flight, "
                f"{[step.step_id for step in self._in_flight]}, got step {plan.step_id}"
            )
        self._retire(step)
        failed = [*step.rows.where(self._live_rows(step))]
        for request in failed:
            self.fail(request, error)
        for staged in plan.staged_features:
            self.features.forget(staged)
        return failed

    def abandon(self, error: Mrv1Error) -> list[Request]:
        """Start over from any state that an interrupt has left; end and return running requests.

        Steps in flight and the prefix cache are forgotten, waiting requests stay. Safe to call
        again if it is interrupted itself.
        """
        self._start()
        self._slots.reset()
        failed = []
        for request in self.unfinished:
            request.slot, request.adapter_slot, request.block_ids = -1, -1, []
            if request.status is Status.WAITING:
                self.waiting.add_last(request)
                continue
            if request.status is Status.RUNNING:
                request.error = error
                request.end("error")
                self.num_finished += 1
            failed.append(request)
        self._requests = dict(self.waiting)
        return failed

    def _retire(self, step: LaunchedStep) -> None:
        """Remove a step from the steps in flight; release the blocks whose last step is over."""
        self._in_flight.remove(step)
        oldest = self._in_flight[0].step_id if self._in_flight else self._next_step_id
        self.pools.release(oldest - 1)

    def _live_rows(self, step: LaunchedStep) -> BoolArray | None:
        """Return ``RunningBatch.live`` of a step that is over; count its stale rows."""
        live = self._batch.live(step.rows)
        if live is not None:
            self.wasted_tokens += int(step.num_scheduled_tokens[~live].sum())
        return live

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is Status.RUNNING:
            self._finished.append(request.slot)
            self._release(request)
        else:
            self.admission.remove(request)
        self.waiting.charge(request, len(request.output_token_ids))
        self.waiting.admit_followers(request)
        request.end(reason)
        self.num_finished += 1
        del self._requests[request.req_id]

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        request.num_preemptions += 1
        self._preempted.append(request.slot)
        self._release(request)
        request.status = Status.WAITING
        self.waiting.add_first(request)

    def _release(self, request: Request) -> None:
        """Free slot and blocks of a request, which the steps in flight may still use."""
        self._batch.leave(request, self._next_step_id - 1 if self._in_flight else None)
        self.admission.readmit(self.admission.prefix_waits.leave(request))
        self.features.leave(request)
        request.adapter_slot = self.adapter_slots.leave(request.adapter_slot)
