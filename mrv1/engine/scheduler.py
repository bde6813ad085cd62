"""Which requests run in the next step, with how many tokens and which blocks. Pure host code."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter

import numpy as np

from mrv1.config import SchedulingPolicyName
from mrv1.engine.feature_pool import FeaturePool
from mrv1.engine.graph_padding import Padding, TokenRoom
from mrv1.engine.head_pools import HeadPools
from mrv1.engine.prefix_cache import PrefixCache
from mrv1.engine.prefix_waits import LEAST_SHARED_TOKENS, PrefixWaits
from mrv1.engine.request import FinishReason, Request, Status
from mrv1.engine.request_limits import check_fits
from mrv1.engine.running_batch import (
    BoolArray,
    LaunchedStep,
    NewBlocks,
    RunningBatch,
    ScheduledRows,
)
from mrv1.engine.slot_table import SlotTable
from mrv1.engine.speculation import Speculation
from mrv1.engine.step_results import take_output
from mrv1.engine.waiting_queue import PriorityQueue, WaitingQueue
from mrv1.errors import Mrv1Error, RequestError
from mrv1.headwise import FULL, Visible
from mrv1.runner.step import Int64Array, RequestId, StagedFeatures, StepOutput, StepPlan

Drafts = dict[int, tuple[int, ...]]
"""Row -> drafts."""


class Scheduler:
    """Continuous batching with chunked prefill under a token budget; first come, first served.

    Running requests go before waiting requests, in order of arrival. When blocks run out, the
    running request that arrived last gives up its slot and blocks and is computed again later
    (preemption by recompute). A waiting request is admitted when enough blocks are free for all
    its known tokens. With ``enable_prefix_caching`` the followers of a request join the queue when
    the request has its first token, so that the prompt is computed once; and a request that has a
    longer prefix in common with one that still computes it waits for those blocks.

    With the policy ``priority`` the order is that of ``PriorityQueue``; running requests get their
    tokens by priority, then in order of admission, and the last of them is preempted first. No
    running request is preempted for a waiting one.

    **Long prompts.** With ``long_prefill_token_threshold`` T, a request computes at most T tokens
    in a step. The running requests with more than T tokens left share T tokens of the step, and
    get what the other requests leave. So a prompt waits for those before it as if each of them had
    T tokens at most, and each step T tokens less. Of ``max_mixed_prefill_tokens`` they share half
    at most.

    **Chunks that fit.** ``max_mixed_prefill_tokens`` limits the tokens of all chunks of a step
    with decodes together, unless more prompt tokens wait than a step holds: then throughput
    counts. Chunks get these tokens in the order of the requests; the first has at least a block's
    tokens, or the span that it begins with.

    **Padding.** With ``padding``, a step that is not full leaves the last tokens of its chunks to
    the next step, where a smaller CUDA graph then runs it and that saves time: first of chunks
    that do not end their prompt, and of the newest. Each keeps at least a block's tokens.

    **Steps in flight.** ``schedule`` may be called again before the output of up to
    ``max_steps_in_flight - 1`` plans has come. A row that computes its last known token then has a
    *pending* token: the row is scheduled again before the token is known, up to its length.
    No step is planned while a step with drafts is in flight: only its result tells how many were
    accepted. Outputs come in the order of launches. A row is *stale* if its request ended or was
    preempted after the launch: the epoch of its slot has then changed, and the row is dropped.

    **Blocks.** A block that is freed while steps are in flight is quarantined until the newest of
    them is over. If steps in flight will free enough blocks, nothing is preempted: the request
    without blocks is left out of the plan. With ``enable_prefix_caching`` full blocks of steps
    that succeeded stay known by their content, and an admitted request starts after the longest
    prefix hit, its last token excepted.

    ``SlotTable`` counts the progress of each running request, ``RunningBatch`` manages blocks,
    ``take_output`` applies a step's output to its requests.
    """

    def __init__(
        self,
        *,
        num_blocks: Sequence[int],
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        keeps: Sequence[Visible] = (FULL,),
        eos_token_ids: Iterable[int] = (),
        max_steps_in_flight: int = 2,
        enable_prefix_caching: bool = False,
        custom_masks: tuple[str, ...] = (),
        num_feature_rows: int = 0,
        scheduling_policy: SchedulingPolicyName = "fcfs",
        long_prefill_token_threshold: int = 0,
        max_mixed_prefill_tokens: int | None = None,
        padding: Padding | None = None,
        least_shared_tokens: int = LEAST_SHARED_TOKENS,
        speculation: Speculation | None = None,
        drafts_beside_logprobs: bool = True,
    ) -> None:
        """Make the pools of the head groups.

        Args:
            num_blocks: blocks of each head group.
            block_size: tokens per block.
            max_num_seqs: most requests that run at the same time.
            max_num_batched_tokens: most tokens of a step.
            keeps: the window and sink of each group's blocks; groups without a window first.
            eos_token_ids: end-of-sequence tokens.
            max_steps_in_flight: most plans that await their output.
            enable_prefix_caching: keep blocks for requests that begin with the same tokens.
            custom_masks: names of features that may mask tokens of every request, for errors.
            num_feature_rows: rows of the runner's buffer for the features of multimodal items.
            scheduling_policy: ``fcfs`` or ``priority``.
            long_prefill_token_threshold: most tokens of a request in a step; 0 = no limit.
            max_mixed_prefill_tokens: most prompt tokens of a step with decodes; None = no limit.
            padding: sizes of the graphs that run steps with prompts; None = no step is padded.
            least_shared_tokens: tokens of a common prefix for which a request waits.
            speculation: proposes drafts; None = no row has any.
            drafts_beside_logprobs: whether steps with log-probabilities may have drafts.
        """
        self.pools = HeadPools(num_blocks, block_size, keeps)
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_steps_in_flight = max_steps_in_flight
        self.enable_prefix_caching = enable_prefix_caching
        self.num_preemptions = 0
        self.num_stale_outputs = 0
        """Stale rows: dropped because their request had ended or been preempted."""
        self.wasted_tokens = 0
        """Tokens scheduled in stale rows."""
        self.num_nan_rows = 0
        """Rows that failed because of NaN in their logits."""
        self.num_finished = 0
        self.num_generated_tokens = 0
        """Tokens that were appended to a request."""
        self.num_prefix_queries = 0
        """Tokens of admitted requests, looked up in the prefix cache."""
        self.prefix_hit_tokens = 0
        """Tokens of ``num_prefix_queries`` that the prefix cache had."""
        self.num_prefix_waits = 0
        """Requests that waited for another one to compute a prefix that both have."""
        self.features = FeaturePool(num_feature_rows)
        self._queue_class = PriorityQueue if scheduling_policy == "priority" else WaitingQueue
        self._threshold = long_prefill_token_threshold
        self._max_mixed_tokens = max_mixed_prefill_tokens
        self._padding = padding
        self._least_shared_tokens = least_shared_tokens
        self._speculation = speculation
        self._drafts_beside_logprobs = drafts_beside_logprobs
        self._custom_masks = custom_masks
        self._requests: dict[RequestId, Request] = {}
        """Unfinished requests by id, in order of arrival."""
        self._eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self._next_step_id = 0
        self._slots = SlotTable(max_num_seqs, [group for group, _ in self.pools.streaming])
        self._prefix_cache = PrefixCache(self.pools, self._slots, is_enabled=enable_prefix_caching)
        self._start()

    def _start(self) -> None:
        """Start empty: no request waits or runs, every block is free, no step is in flight."""
        self.pools.reset()
        self.features.reset()
        self.waiting = self._queue_class()
        self._prefix_waits = PrefixWaits(self._slots, self.block_size, self._least_shared_tokens)
        self._batch = RunningBatch(self.pools, self._slots, self._prefix_cache)
        self.running = self._batch.requests
        """Running requests by id, in order of arrival."""
        self._in_flight: deque[LaunchedStep] = deque()
        self._blocked: tuple[Request, int, int, int | None] | None = None
        """The first waiting request if it could not be admitted, and the tokens, the rows of
        features and, beside decodes, the prompt tokens left for it then.

        It is looked up in the prefix cache again once the pools or one of these have changed.
        """
        self._with_items: dict[RequestId, Request] = {}
        """Running requests that have yet to compute tokens of items."""
        self._lacks_rows = False
        """Whether an item of a request got no rows in the step that is being planned."""
        self._limited: list[Request] = []
        """Running requests with a long prompt that got fewer than the threshold's tokens in the
        step that is being planned."""
        self._promised: tuple[Request, int] | None = None
        """The request whose unsplittable span had too few tokens left in the last step, and the
        tokens of the span: they are kept for it in the next step, or decodes would always come
        first."""
        self._staged: list[StagedFeatures] = []
        """Items to be staged before the step that is being planned."""
        self._finished: list[int] = []
        """Slots of requests that ended since the last plan."""
        self._preempted: list[int] = []
        """Slots of requests that were preempted since the last plan."""

    # --- requests -------------------------------------------------------------------------

    @property
    def num_free_slots(self) -> int:
        """Slots without a request."""
        return len(self._slots.free)

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

    def num_pending(self, request: Request) -> int:
        """Return the number of pending tokens of ``request``."""
        if request.status is not Status.RUNNING:
            return 0
        return int(self._slots.num_tokens[request.slot]) - request.num_tokens

    def add(self, request: Request) -> None:
        """Queue a request and its followers.

        Raises:
            RequestError: an id is in use, or ``check_fits`` refuses the request.
        """
        family = (request, *request.followers)
        if any(member.req_id in self._requests for member in family):
            raise RequestError(
                f"request_id: expected an id that no unfinished request has, got {request.name!r}"
            )
        for member in family:
            member.set_ending_tokens(self._eos_token_ids)
        check_fits(request, self.pools, self.features, self.max_num_batched_tokens)
        self._requests |= {member.req_id: member for member in family}
        shares_blocks = len(request.prompt_token_ids) > self.block_size
        self.waiting.add(request, holds_followers=self.enable_prefix_caching and shares_blocks)

    def abort(self, req_id: RequestId) -> Request | None:
        """End a request now and return it; None if no unfinished request has this id."""
        request = self._requests.get(req_id)
        if request is not None:
            self._finish(request, "abort")
        return request

    def stop(self, request: Request, reason: str, num_output_tokens: int) -> None:
        """End a request's output with one of its tokens, for a reason such as a stop string.

        A request that has already ended, even with an error, gets this reason in place of its own:
        without drafts it would have ended with that token.

        Args:
            request: the request.
            reason: the stop string.
            num_output_tokens: tokens of the output; later ones, which a step with drafts may have
                given, are dropped.
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
        self._prefix_cache.reset()
        self._end_waits(self._prefix_waits.reset())

    # --- one step -------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Return the plan of the next step, or None.

        None means that no token can be computed at all, or that none shall be before ``update``
        has the output of a step in flight.

        Raises:
            RuntimeError: ``max_steps_in_flight`` plans await their output.
        """
        if len(self._in_flight) >= self.max_steps_in_flight:
            raise RuntimeError(
                f"schedule: expected fewer than {self.max_steps_in_flight} steps in flight "
                f"(max_steps_in_flight), got {len(self._in_flight)}; call update first"
            )
        batch, slots = self._batch, self._slots
        if self._speculation is not None:
            if self._in_flight and self._in_flight[-1].draft_token_ids:
                return None
            drafts = self._proposed(self._speculation)
            if drafts and self._in_flight:
                return None  # they have to follow the tokens of the steps in flight
            plan = self._plan_with_drafts(drafts) if drafts else None
            if plan is not None:
                return plan
        self._lacks_rows = False
        self._limited.clear()
        promised, self._promised = self._promised, None
        if promised is not None and promised[0].finished:
            promised = None
        rows, continued, starved = batch.rows, batch.continued, False
        room: TokenRoom | None = None
        cuts = False
        if continued is None:
            ends = np.minimum(slots.num_tokens[rows.index], slots.max_computed[rows.index])
            num_tokens = int((ends - slots.num_computed[rows.index]).sum())
        else:
            ends, num_tokens = continued.ends + 1, len(rows.requests)
        if self._max_mixed_tokens is not None and (continued is None or self.waiting):
            counts = ends - slots.num_computed[rows.index]
            num_decodes = int(np.count_nonzero(counts == 1))
            if num_decodes and self._waits_for_room(self._max_mixed_tokens, counts[counts > 1]):
                room = TokenRoom(self._max_mixed_tokens)
                cuts = num_tokens > num_decodes
        if (
            num_tokens > self.max_num_batched_tokens
            or self._with_items
            or promised is not None
            or cuts
            or (continued is None and self._has_long(rows, ends))
            or not batch.has_blocks(ends, num_tokens)
        ):
            ends, starved = self._ends_one_by_one(promised, room)
            rows, continued = batch.rows, None
            num_tokens = int((ends - slots.num_computed[rows.index]).sum())
        new_blocks = batch.grow(ends)
        entering: list[Request] = []
        if self.waiting and not starved:
            budget = self.max_num_batched_tokens - num_tokens
            entering, ends_of_entering = self._admit_waiting(new_blocks, budget, room)
            if entering:
                rows, continued = batch.rows, None
                ends = np.array([*ends.tolist(), *ends_of_entering], dtype=np.int64)
        if self._limited and not starved:
            self._give_rest(ends, new_blocks, room)
        if self._padding is not None and continued is None:
            self._leave_out_padding(self._padding, ends, new_blocks)
        if continued is None:
            is_scheduled = ends > slots.num_computed[rows.index]
            if not is_scheduled.all():
                rows = ScheduledRows.of(rows.where(is_scheduled), batch.version)
                ends = ends[is_scheduled]
        if not rows.requests:
            if promised is None:
                return None
            self._promised = None  # the span got no blocks: the others need not wait for it
            return self.schedule()
        return self._launch(rows, ends, new_blocks, entering, continued)

    def _waits_for_room(self, most: int, chunks: Int64Array) -> bool:
        """Return whether prompts have more tokens than a mixed step may have, and fit a step.

        What a step could not compute does not count: cached prefixes, requests that lack blocks,
        and more tokens of a request than ``long_prefill_token_threshold``.

        Args:
            most: prompt tokens that a step with decodes may have.
            chunks: tokens that are left of the prompts of running requests.
        """
        budget = self.max_num_batched_tokens
        most_of_one = self._threshold or budget + 1
        num_tokens = int(np.minimum(chunks, most_of_one).sum())
        for request in self.waiting.first(len(self._slots.free)):
            if num_tokens > budget:
                return False
            hit = self._prefix_cache.find(request)
            num_cached = len(hit[0]) * self.block_size
            if self.pools.lacks(hit, request.num_tokens, num_cached + 1):
                break
            num_tokens += min(request.num_tokens - num_cached, most_of_one)
        return most < num_tokens <= budget

    def _has_long(self, rows: ScheduledRows, ends: Int64Array) -> bool:
        """Return whether a request has more tokens to compute than a step may give it."""
        threshold = self._threshold
        return bool(threshold and (ends - self._slots.num_computed[rows.index] > threshold).any())

    def _proposed(self, speculation: Speculation) -> Drafts:
        """Return drafts that may follow the known tokens of running requests.

        Only a step in which every row decodes has drafts, and none whose row samples under a
        grammar: masks are made for one token.
        """
        rows, slots = self._batch.rows, self._slots
        if rows.any_grammars or self._with_items or (self.waiting and slots.free):
            return {}
        if rows.any_logprobs and not self._drafts_beside_logprobs:
            return {}
        num_tokens = slots.num_tokens[rows.index]
        if (slots.num_computed[rows.index] + 1 < num_tokens).any():
            return {}
        room = slots.max_computed[rows.index] - num_tokens
        return speculation.propose(rows.requests, room.tolist())

    def _plan_with_drafts(self, drafts: Drafts) -> StepPlan | None:
        """Return the plan of a step of all running requests; None if tokens or blocks are short.

        Drafts preempt no request.
        """
        rows = self._batch.rows
        counts = np.array([1 + len(drafts.get(row, ())) for row in range(len(rows.requests))])
        ends = self._slots.num_computed[rows.index] + counts
        num_tokens = int(counts.sum())
        if num_tokens > self.max_num_batched_tokens or not self._batch.has_blocks(
            ends, num_tokens
        ):
            return None
        return self._launch(rows, ends, self._batch.grow(ends), (), None, drafts)

    def rows_with_grammars(self) -> list[tuple[int, Request]]:
        """Return the rows of the newest plan that sample a token under a grammar."""
        newest = self._batch.newest
        return [] if newest is None else newest.rows_with_grammars

    def _ends_one_by_one(
        self, promised: tuple[Request, int] | None, room: TokenRoom | None
    ) -> tuple[Int64Array, bool]:
        """Return how far each running request is computed, and whether blocks ran out.

        For a step whose tokens or blocks may not suffice for all running requests. May
        preempt requests: the ends, ``[running]``, are of the requests that still run. The end of a
        request that computes nothing in this step is the number of its tokens that are computed
        already.
        """
        budget, claimed, starved = self.max_num_batched_tokens, 0, False
        favoured, num_kept = (None, 0) if promised is None else promised
        batch, slots = self._batch, self._slots
        ends: dict[RequestId, int] = {}
        for_long = self._threshold
        """Tokens that are left for requests with a long prompt, together."""
        if room is not None:
            for_long = min(for_long, max(room.num_left // 2, self.block_size))
        for request in self._in_order():
            if request.req_id not in self.running:
                continue  # preempted below, for a request before it
            slot = request.slot
            computed = int(slots.num_computed[slot])
            known = min(int(slots.num_tokens[slot]), int(slots.max_computed[slot]))
            if request is favoured:
                num_kept = 0
            budget_left = max(budget - num_kept, 0)
            count = min(known - computed, budget_left)
            is_long = 0 < self._threshold < known - computed
            if is_long:
                count = min(count, max(for_long, request.span_size(computed)))
            chunk_room = room if known - computed > 1 else None
            if chunk_room is not None:
                count = self._fitting(chunk_room, request, computed, count)
            count = self._chunk(request, computed, count)
            needed = batch.num_lacking(request, computed + count)
            while needed > 0 and claimed + needed > self.pools.num_free:
                starved = True
                if claimed + needed <= batch.num_free_soon():
                    count = 0  # its blocks stay claimed, so that later rows do not take them
                    break
                # The victim has no row in this step yet: rows are filled in order.
                self._preempt(self._victim())
                if request.req_id not in self.running:
                    break
            if not count and needed <= 0:
                self._promise(request, computed, budget_left)
            if request.req_id in self.running:
                ends[request.req_id] = computed + count
                self._hold_items(request, computed, computed + count)
                if chunk_room is not None and count:
                    chunk_room.take(count)
                budget -= count
                claimed += max(needed, 0)
                if is_long:
                    for_long = max(for_long - count, 0)
                    if count < self._threshold:
                        self._limited.append(request)
        return np.array([ends[req_id] for req_id in self.running], dtype=np.int64), starved

    def _fitting(self, room: TokenRoom, request: Request, start: int, count: int) -> int:
        """Return ``count``, or less: as many tokens as the step has room for."""
        return room.fit(count, max(self.block_size, request.span_size(start)))

    def _give_rest(self, ends: Int64Array, new_blocks: NewBlocks, room: TokenRoom | None) -> None:
        """Give the tokens that the step has left to the long prompts, up to the threshold of each.

        Not to those with items or spans, which their turn in ``_ends_one_by_one`` serves; and no
        request is preempted for them.

        Args:
            ends: ``[running]`` how far each request is computed; raised in place.
            new_blocks: blocks of the step; extended in place.
            room: the prompt tokens that the step may still have; None = any number.
        """
        batch, slots = self._batch, self._slots
        index = batch.rows.index
        budget = self.max_num_batched_tokens - int((ends - slots.num_computed[index]).sum())
        num_free = self.pools.num_free
        for request in self._limited:
            if not budget or request.unsplittable or request.multimodal:
                continue
            row = int((index == request.slot).nonzero()[0][0])
            start, computed = int(ends[row]), int(slots.num_computed[request.slot])
            capacity = int(slots.capacity[request.slot]) + num_free * self.block_size
            end = min(computed + self._threshold, start + budget, capacity)
            if room is not None and end > start:
                end = start + self._fitting(room, request, start, end - start)
                if end > start:
                    room.take(end - start)
            num_free -= max(batch.num_lacking(request, end), 0)
            budget -= end - start
            ends[row] = end
        for slot, more in batch.grow(ends).items():
            own = new_blocks.get(slot, ((),) * len(more))
            new_blocks[slot] = tuple([a + b for a, b in zip(own, more, strict=True)])

    def _leave_out_padding(
        self, padding: Padding, ends: Int64Array, new_blocks: NewBlocks
    ) -> None:
        """Shorten chunks, if the step then fills a smaller graph and that saves time.

        First those that do not end their prompt, so that short prompts do not wait for long ones;
        the newest first. A step that is full stays so, for the bounds of prompts that wait. Items
        and spans are not cut.

        Args:
            padding: the sizes of the graphs.
            ends: ``[running]`` how far each request is computed; lowered in place.
            new_blocks: blocks of the step; those that are no longer needed are given back.
        """
        batch, slots = self._batch, self._slots
        index = batch.rows.index
        counts = ends - slots.num_computed[index]
        if int(counts.sum()) == self.max_num_batched_tokens:
            return
        surplus = padding.surplus(int(counts[counts > 1].sum()))
        if not surplus:
            return
        rows = {request: row for row, request in enumerate(batch.rows.requests)}
        ends_prompt = ends == np.minimum(slots.num_tokens[index], slots.max_computed[index])
        shorter: dict[Request, int] = {}
        newest_first = reversed(self._in_order())
        for request in sorted(newest_first, key=lambda each: bool(ends_prompt[rows[each]])):
            row = rows[request]
            if not request.unsplittable and not request.multimodal:
                cut = min(surplus, max(int(counts[row]) - self.block_size, 0))
                shorter[request] = int(ends[row]) - cut
                surplus -= cut
        if surplus:
            return  # a step between two sizes is padded all the same
        for request, end in shorter.items():
            if end < ends[rows[request]]:
                ends[rows[request]] = end
                batch.shrink(request, end, new_blocks)

    def _chunk(self, request: Request, start: int, count: int) -> int:
        """Return ``count``, or less: spans stay whole, and each item gets its rows of features."""
        count = request.uncut(start, count)
        if not request.multimodal:
            return count
        end = self.features.reach(request, start, start + count, takes=not self._lacks_rows)
        if end < start + count:
            self._lacks_rows = True  # the rows that become free are its: later arrivals wait
            count = max(request.uncut(start, end - start), 0)
        return count

    def _promise(self, request: Request, start: int, budget: int) -> None:
        """Keep tokens for a request in the next step if its span does not fit into ``budget``."""
        size = request.span_size(start)
        if size > budget and self._promised is None:
            self._promised = request, size

    def _hold_items(self, request: Request, start: int, end: int) -> None:
        """Let a request hold the items of its chunk ``[start, end)`` in the step."""
        if request.multimodal and start < end:
            self._staged += self.features.hold(request, start, end)
            self._with_items[request.req_id] = request

    def _release_items(self) -> None:
        """Release the items whose tokens are all computed when the launched steps are over."""
        for request in tuple(self._with_items.values()):
            num_computed = int(self._slots.num_computed[request.slot])
            self.features.release(request, num_computed)
            if num_computed >= request.multimodal[-1].end:
                del self._with_items[request.req_id]

    def _in_order(self) -> list[Request]:
        """Return the running requests by priority, then in order of admission."""
        return sorted(self.running.values(), key=attrgetter("priority"))

    def _victim(self) -> Request:
        """Return the last request that is not ending: ending requests free their blocks anyway."""
        running = reversed(self._in_order())
        return next(request for request in running if not self._batch.is_ending(request))

    def _admit_waiting(
        self, new_blocks: NewBlocks, budget: int, room: TokenRoom | None
    ) -> tuple[list[Request], list[int]]:
        """Admit waiting requests, in order, as long as slots, blocks and tokens suffice.

        Returns:
            The requests that enter, and how many tokens of each are computed after the step.
        """
        entering: list[Request] = []
        ends: list[int] = []
        if self.enable_prefix_caching and self._slots.free:
            self._batch.cache_blocks()
        while budget and self.waiting and self._slots.free:
            if room is not None and room.is_full:
                break
            request = self.waiting.peek()
            # Requests that wait for a prefix are as good as admitted: no more of them than free
            # slots. A more urgent request takes such a slot, and they follow it.
            if len(self._slots.free) <= self._prefix_waits.num_before(request):
                break
            left = request, budget, self.features.num_held, None if room is None else room.num_left
            if self._blocked == left and not self.pools.has_changed:
                break
            hit = self._prefix_cache.find(request)
            num_cached = len(hit[0]) * self.block_size
            count = min(request.num_tokens - num_cached, budget)
            if 0 < self._threshold < count:
                count = min(count, max(self._threshold, request.span_size(num_cached)))
            if room is not None:
                count = self._fitting(room, request, num_cached, count)
            count = self._chunk(request, num_cached, count)
            end = num_cached + count
            if not count and not self.pools.lacks(
                hit, request.num_tokens, num_cached + request.span_size(num_cached)
            ):
                self._promise(request, num_cached, budget)
            if not count or self.pools.lacks(hit, request.num_tokens, end):
                self._blocked = left
                self.pools.watch(request.block_digests)
                break
            self._blocked = None
            self.waiting.take(request)
            if self.enable_prefix_caching:
                if self._prefix_waits.try_wait(request, num_cached):
                    self.num_prefix_waits += 1
                    continue
                self._prefix_waits.enter(request, num_cached)
                self.num_prefix_queries += request.num_tokens
                self.prefix_hit_tokens += num_cached
            if not request.num_preemptions:
                self.waiting.charge(request, request.num_tokens - num_cached)
            blocks = self._batch.enter(request, hit, end)
            new_blocks[request.slot] = blocks
            self._hold_items(request, num_cached, end)
            entering.append(request)
            ends.append(end)
            budget -= count
            if room is not None:
                room.take(count)
        return entering, ends

    def _launch(
        self,
        rows: ScheduledRows,
        ends: Int64Array,
        new_blocks: NewBlocks,
        entering: Sequence[Request],
        continued: LaunchedStep | None,
        drafts: Drafts | None = None,
    ) -> StepPlan:
        """Record the step as launched, and return its plan."""
        of_rows = () if not drafts else [drafts.get(row, ()) for row in range(len(rows.requests))]
        step = self._batch.launch(self._next_step_id, rows, ends, continued, tuple(of_rows))
        new = [request.slot_request() for request in entering if not request.num_preemptions]
        resumed = [request.slot_request() for request in entering if request.num_preemptions]
        plan = StepPlan(
            step_id=step.step_id,
            continues=None if continued is None else continued.step_id,
            new=tuple(new),
            resumed=tuple(resumed),
            preempted=tuple(self._preempted),
            finished=tuple(self._finished),
            req_ids=rows.req_ids,
            slots=rows.slots,
            epochs=rows.epochs,
            num_scheduled_tokens=step.num_scheduled_tokens,
            new_block_ids=new_blocks,
            draft_token_ids=step.draft_token_ids,
            staged_features=tuple(self._staged),
        )
        self._staged = []
        self._release_items()
        self._in_flight.append(step)
        self._next_step_id += 1
        self._preempted, self._finished = [], []
        return plan

    def update(self, output: StepOutput) -> list[Request]:
        """Apply the output of the oldest step in flight.

        Returns:
            The requests that got a token or ended.

        Raises:
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
        result = take_output(step, output, self._live_rows(step), self._custom_masks)
        self.num_generated_tokens += result.num_tokens
        self.num_nan_rows += result.num_nan_rows
        if step.draft_token_ids:
            self._batch.settle(step, result.succeeded)
        if self._speculation is not None:
            self._speculation.note(step, output, result.succeeded)
        for request in reversed(self._batch.note_first_tokens(result.sampled)):
            self.waiting.admit_followers(request)  # in reverse: each call puts its followers first
        self._batch.land(step, result.succeeded)
        if self._prefix_waits:
            self._end_waits(self._prefix_waits.computed())
        for request, reason in result.ended.items():
            self._finish(request, reason)
        return [*result.failed, *result.sampled]

    def fail_step(self, plan: StepPlan, error: Mrv1Error) -> list[Request]:
        """End every request of a failed step whose row is not stale; return these requests.

        Raises:
            RuntimeError: the step is not in flight.
        """
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

        The steps in flight and the prefix cache are forgotten. Waiting requests stay queued. Safe
        to call again if the call itself is interrupted.
        """
        self._start()
        self._slots.reset()
        failed = []
        for request in self.unfinished:
            request.slot, request.block_ids = -1, []
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

    # --- steps in flight ------------------------------------------------------------------

    def _retire(self, step: LaunchedStep) -> None:
        """Remove a step from the steps in flight; release the blocks whose last step is over."""
        self._in_flight.remove(step)
        oldest = self._in_flight[0].step_id if self._in_flight else self._next_step_id
        self.pools.release(oldest - 1)

    def _live_rows(self, step: LaunchedStep) -> BoolArray | None:
        """Return ``RunningBatch.live`` of a step that is over; count its stale rows."""
        live = self._batch.live(step.rows)
        if live is not None:
            self.num_stale_outputs += len(live) - int(np.count_nonzero(live))
            self.wasted_tokens += int(step.num_scheduled_tokens[~live].sum())
        return live

    # --- leaving --------------------------------------------------------------------------

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is Status.RUNNING:
            self._finished.append(request.slot)
            self._release(request)
        elif request in self._prefix_waits:
            self._prefix_waits.remove(request)
        else:
            self.waiting.remove(request)
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

    def _end_waits(self, requests: Sequence[Request]) -> None:
        """Put requests that have waited for a prefix before all others, in their order."""
        for request in reversed(requests):
            self.waiting.add_first(request)

    def _release(self, request: Request) -> None:
        """Free slot and blocks of a request, which the steps in flight may still use."""
        self._batch.leave(request, self._next_step_id - 1 if self._in_flight else None)
        self._end_waits(self._prefix_waits.leave(request))
        if request.multimodal:
            self.features.release(request, len(request.prompt_token_ids))
            self._with_items.pop(request.req_id, None)
