"""Which requests run in the next step, with how many tokens and which blocks. Pure host code."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from mrv1.engine.head_pools import HeadPools
from mrv1.engine.prefix_cache import extend_chain
from mrv1.engine.request import FinishReason, Request, Status
from mrv1.errors import Mrv1Error, RequestError
from mrv1.headwise import FULL, Visible
from mrv1.runner.request_state import MAX_STOP_TOKENS
from mrv1.runner.step import (
    Int32Array,
    Int64Array,
    RequestId,
    RowFailure,
    SlotRequest,
    StepOutput,
    StepPlan,
)
from mrv1.sampler import GrammarMatcher

BoolArray = npt.NDArray[np.bool_]
NewBlocks = dict[int, tuple[tuple[int, ...], ...]]
"""Slot -> per head group, block ids to append."""

NEVER = np.iinfo(np.int64).max
"""Full blocks at which a request's next one would enter the prefix cache, if none may."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Requests as the rows of a step; made once and used until another request joins or leaves."""

    version: int
    """How often a request had joined or left those that run."""
    requests: tuple[Request, ...]
    req_ids: tuple[RequestId, ...]
    index: Int64Array
    """[rows] slots, as numpy indexes fastest."""
    slots: Int32Array
    epochs: Int32Array
    ones: Int32Array
    """[rows] a token each."""
    ending_token_ids: frozenset[int]
    """Tokens that may end one of them or another."""
    any_logprobs: bool
    """Whether one of them asks for log-probabilities."""
    any_grammars: bool
    """Whether one of them has a grammar."""

    @classmethod
    def of(cls, requests: Iterable[Request], version: int) -> _Rows:
        requests = tuple(requests)
        index = np.array([request.slot for request in requests], dtype=np.int64)
        rows = cls(
            version=version,
            requests=requests,
            req_ids=tuple([request.req_id for request in requests]),
            index=index,
            slots=index.astype(np.int32),
            epochs=np.array([request.epoch for request in requests], dtype=np.int32),
            ones=np.ones(len(requests), dtype=np.int32),
            ending_token_ids=frozenset(
                chain.from_iterable({request.ending_token_ids for request in requests})
            ),
            any_logprobs=any(request.asks_logprobs for request in requests),
            any_grammars=any(request.matcher is not None for request in requests),
        )
        for shared in (rows.slots, rows.epochs, rows.ones):
            shared.flags.writeable = False  # among plans and steps
        return rows


@dataclass(slots=True, eq=False)
class _Launched:
    """A step whose output has yet to come."""

    step_id: int
    rows: _Rows
    num_scheduled_tokens: Int32Array
    ends: Int64Array
    """[rows] tokens that are computed after the step."""
    samples: BoolArray
    """[rows] whether it computes its last token, known or pending, and yields the next."""
    all_sample: bool
    num_left: int
    """Steps that may continue this one; 0 unless all that run are rows of it, and sample."""
    last_rows: list[int]
    """Rows whose token of this step is their last by length."""


class Scheduler:
    """First come, first served: continuous batching with chunked prefill under a token budget.

    Running requests go before waiting ones, in order of arrival. When blocks run out, the running
    request that arrived last gives up its slot and blocks and is computed again later
    (preemption by recompute). A waiting request is admitted when the blocks of all its known
    tokens can be had. With ``enable_prefix_caching`` the followers of a request join the waiting
    when it has its first token, so that its prompt is computed once.

    **Steps in flight.** ``schedule`` may be called again before the output of up to
    ``max_steps_in_flight - 1`` plans has come. A row that computes its last known token then has a
    *pending* token: it is scheduled on without the token being known, up to its length. Outputs
    come in the order of launches. A row of a request that ended or was preempted since its launch
    is told by its slot's epoch and dropped.

    **Blocks.** A block that is given up while steps are in flight is in quarantine until the
    newest of them is over; rather than preempt a request for blocks that steps in flight will
    give back, it is left out of the plan. With ``enable_prefix_caching`` full blocks whose step
    succeeded stay known by their content, and an admitted request starts behind the longest
    prefix found, its last token excepted. What names a block is worked out when a request is
    looked up, or leaves: a step that only goes on has nothing to do for it.

    **Head groups.** A request takes as many blocks of every group. Of a group whose heads have a
    window it gives back those that left the window once the step has returned that moved it on:
    steps in flight start behind that one, so that none of them reads what is given back.
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
    ) -> None:
        """Make the pools of the head groups.

        Args:
            num_blocks: of each head group.
            block_size: tokens per block.
            max_num_seqs: requests that run at the same time.
            max_num_batched_tokens: token budget of a step.
            keeps: what each group's heads see; those that see everything first.
            eos_token_ids: end-of-sequence tokens.
            max_steps_in_flight: plans that may await their output.
            enable_prefix_caching: keep blocks for requests that begin alike.
            custom_masks: what may mask every request's tokens, for errors to name.
        """
        self.pools = HeadPools(num_blocks, block_size, keeps)
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_steps_in_flight = max_steps_in_flight
        self.enable_prefix_caching = enable_prefix_caching
        self.num_preemptions = 0
        self.num_stale_outputs = 0
        """Rows that were dropped because their request had ended or been preempted."""
        self.wasted_tokens = 0
        """Tokens scheduled in those rows."""
        self.num_nan_rows = 0
        """Rows that failed for NaN in their logits."""
        self.num_finished = 0
        self.num_generated_tokens = 0
        """Tokens that were appended to a request."""
        self.num_prefix_queries = 0
        """Tokens of admitted requests, looked up in the prefix cache."""
        self.prefix_hit_tokens = 0
        """Of those, tokens that it had."""
        self._custom_masks = custom_masks
        self._requests: dict[RequestId, Request] = {}
        """Unfinished ones by id, in order of arrival."""
        self._eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self._next_step_id = 0

        def per_slot() -> Int64Array:
            return np.zeros(max_num_seqs, dtype=np.int64)

        self._epochs = np.zeros(max_num_seqs, dtype=np.int32)
        self._num_tokens = per_slot()
        """Known and pending tokens."""
        self._num_computed = per_slot()
        """Tokens whose K and V are in the cache once the launched steps are over."""
        self._max_computed = per_slot()
        """One less than the tokens at which it ends: its last token is never computed."""
        self._capacity = per_slot()
        """Tokens that its blocks hold."""
        self._num_landed = per_slot()
        """Tokens whose K and V are in the cache by steps that are over and succeeded."""
        self._num_cached_blocks = per_slot()
        """Leading blocks that were offered to the prefix cache."""
        self._first_live = {group: per_slot() for group, _ in self.pools.streaming}
        """Of groups with a window: the first logical block behind the sink that is held."""
        self._start()

    def _start(self) -> None:
        """Have no request wait or run: every slot and block is free, nothing is in flight."""
        self.pools.reset()
        self.waiting: OrderedDict[RequestId, Request] = OrderedDict()
        """By request id, in order of admission."""
        self._held: dict[Request, list[Request]] = {}
        """Followers that wait for their leader's prompt."""
        self.running: dict[RequestId, Request] = {}
        """By request id, in order of arrival."""
        self._without_token: set[Request] = set()
        """Running requests that have yet to get their first token."""
        self._version = 0
        """How often a request joined or left ``running``."""
        self._rows = _Rows.of((), self._version)
        """Of ``running``, as it was at their version."""
        self._in_flight: deque[_Launched] = deque()
        self._newest: _Launched | None = None
        """What was launched last, in flight or not."""
        self._blocked: tuple[Request, int] | None = None
        """The first of the waiting, which could not be admitted, and the tokens it might have had.

        It is looked up in the prefix cache again once the pools have changed.
        """
        self._free_slots = deque(range(len(self._epochs)))
        self._vacated: list[int] = []
        """Slots of requests that ended since the last plan."""
        self._preempted: list[int] = []
        """Slots given up by preemption since the last plan."""

    # --- requests -------------------------------------------------------------------------

    @property
    def num_free_slots(self) -> int:
        """Slots that no request holds."""
        return len(self._free_slots)

    @property
    def num_steps_in_flight(self) -> int:
        """Plans whose output has yet to come."""
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
        """Return how many tokens of ``request`` are being computed by steps in flight."""
        if request.status is not Status.RUNNING:
            return 0
        return int(self._num_tokens[request.slot]) - request.num_tokens

    def add(self, request: Request) -> None:
        """Queue a request and its followers.

        Raises:
            RequestError: an id is in use, it could never get the blocks it may need, a span that
                must not be split is out of order or longer than a step, or more tokens end it
                than ``min_tokens`` can keep from being drawn.
        """
        family = (request, *request.followers)
        if any(member.req_id in self._requests for member in family):
            raise RequestError(f"request_id: {request.name!r} is in use by an unfinished request")
        self._check_blocks(request)
        self._check_spans(request)
        named = tuple(dict.fromkeys(request.params.stop_token_ids))
        late_token_ids = tuple(dict.fromkeys((*named, *self._eos_token_ids)))
        stop_token_ids = named if request.params.ignore_eos else late_token_ids
        if request.params.min_tokens and len(late_token_ids) > MAX_STOP_TOKENS:
            raise RequestError(
                f"stop_token_ids: expected at most {MAX_STOP_TOKENS} beside min_tokens, the "
                f"model's end-of-sequence tokens among them, got {len(late_token_ids)}"
            )
        last_of_sequences = [sequence[-1] for sequence in request.params.stop_token_sequences]
        for member in family:
            member.stop_token_ids = stop_token_ids
            member.late_token_ids = late_token_ids
            member.ending_token_ids = (*stop_token_ids, *last_of_sequences)
        self._requests |= {member.req_id: member for member in family}
        self.waiting[request.req_id] = request
        shares_blocks = len(request.prompt_token_ids) > self.block_size
        if self.enable_prefix_caching and shares_blocks and request.followers:
            self._held[request] = list(request.followers)
        else:
            self.waiting.update((member.req_id, member) for member in request.followers)

    def _check_blocks(self, request: Request) -> None:
        lacking = self.pools.lacking(request.max_total_tokens, self.max_num_batched_tokens)
        if lacking is None:
            return
        group, needed = lacking
        num_blocks, seen = self.pools[group].num_blocks, self.pools.keeps[group]
        if seen.is_full:
            raise RequestError(
                f"prompt and max_tokens: expected at most {num_blocks * self.block_size} tokens "
                f"(num_kv_blocks = {num_blocks} of {self.block_size}), got up to "
                f"{request.max_total_tokens}; raise num_kv_blocks or lower max_tokens"
            )
        raise RequestError(
            f"prompt and max_tokens: expected to need at most the {num_blocks} blocks of heads "
            f"that see {seen.window} tokens, got {needed} for {request.max_total_tokens} tokens, "
            f"up to {self.max_num_batched_tokens} a step; raise num_kv_blocks or lower "
            "max_num_batched_tokens"
        )

    def _check_spans(self, request: Request) -> None:
        previous_end = 0
        for start, end in request.unsplittable:
            if not previous_end <= start < end <= len(request.prompt_token_ids):
                raise RequestError(
                    "unsplittable: expected ascending spans [start, end) within the prompt's "
                    f"{len(request.prompt_token_ids)} tokens, got {list(request.unsplittable)}"
                )
            if end - start > self.max_num_batched_tokens:
                raise RequestError(
                    f"unsplittable: expected spans of at most {self.max_num_batched_tokens} tokens"
                    f" (max_num_batched_tokens), got {end - start} from {start} to {end}; raise "
                    "max_num_batched_tokens"
                )
            previous_end = end

    def abort(self, req_id: RequestId) -> Request | None:
        """End a request now and return it; None if no unfinished request has this id."""
        request = self._requests.get(req_id)
        if request is not None:
            self._finish(request, "abort")
        return request

    def stop(self, request: Request, reason: str) -> None:
        """Let a request's output end with its newest token, for a reason that is the caller's.

        One that has ended by itself has then ended for this reason.
        """
        if not request.finished:
            self._finish(request, "stop")
        request.finish_reason, request.stop_reason = "stop", reason

    def fail(self, request: Request, error: Mrv1Error) -> None:
        """End an unfinished request with an error."""
        request.error = error
        self._finish(request, "error")

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; nothing that was computed until now is shared again."""
        self.pools.reset_cache()
        self._num_cached_blocks.fill(NEVER)

    # --- one step -------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Return the next step, or None.

        None means that there is nothing to compute, or nothing before the output of a step in
        flight comes.

        Raises:
            RuntimeError: ``max_steps_in_flight`` plans await their output.
        """
        if len(self._in_flight) >= self.max_steps_in_flight:
            raise RuntimeError(
                f"schedule: expected fewer than {self.max_steps_in_flight} steps in flight "
                f"(max_steps_in_flight), got {len(self._in_flight)}; call update first"
            )
        rows, continued, starved = self._running_rows(), self._continued(), False
        if continued is None:
            ends = np.minimum(self._num_tokens[rows.index], self._max_computed[rows.index])
            num_tokens = int((ends - self._num_computed[rows.index]).sum())
        else:
            ends, num_tokens = continued.ends + 1, len(rows.requests)
        if not self._suffices(rows, ends, num_tokens):
            continued = None
            ends, starved = self._ends_one_by_one()
            rows = self._running_rows()
            num_tokens = int((ends - self._num_computed[rows.index]).sum())
        new_blocks = self._grow_running(rows, ends)
        entering: list[Request] = []
        if self.waiting and not starved:
            budget = self.max_num_batched_tokens - num_tokens
            entering, ends_of_entering = self._admit_waiting(new_blocks, budget)
            if entering:
                continued, rows = None, self._running_rows()
                ends = np.array([*ends.tolist(), *ends_of_entering], dtype=np.int64)
        if continued is None:
            is_scheduled = ends > self._num_computed[rows.index]
            if not is_scheduled.all():
                (scheduled,) = is_scheduled.nonzero()
                requests = [rows.requests[row] for row in scheduled.tolist()]
                ends, rows = ends[scheduled], _Rows.of(requests, self._version)
        if not rows.requests:
            return None
        return self._launch(rows, ends, new_blocks, entering, continued)

    def rows_with_grammars(self) -> list[tuple[int, Request]]:
        """Return the rows of the plan made last that draw a token by a grammar."""
        step = self._newest
        if step is None or not step.rows.any_grammars:
            return []
        samples = step.samples.tolist()
        return [
            (row, request)
            for row, request in enumerate(step.rows.requests)
            if request.matcher is not None and samples[row]
        ]

    def _continued(self) -> _Launched | None:
        """Return the newest step if all that run are to compute the token that it samples."""
        last = self._newest
        if last is None or not last.num_left or last.rows.version != self._version:
            return None
        return last

    def _suffices(self, rows: _Rows, ends: Int64Array, num_tokens: int) -> bool:
        """Return whether budget and blocks suffice to compute every row up to its end.

        Args:
            rows: all that run.
            ends: ``[rows]`` tokens that are computed after the step.
            num_tokens: to be computed in it.
        """
        if num_tokens > self.max_num_batched_tokens:
            return False
        # A row can lack blocks only for what it computes: no more than that many in all.
        num_free = self.pools.num_free
        if num_free >= num_tokens:
            return True
        short = -(-(ends - self._capacity[rows.index]) // self.block_size)
        return bool(num_free >= np.maximum(short, 0).sum())

    def _ends_one_by_one(self) -> tuple[Int64Array, bool]:
        """Return how far each running request is computed, and whether blocks ran out.

        For steps whose tokens or blocks do not suffice for all. May preempt; the ends,
        ``[running]``, are of those that still run. A row that has no room in this step, or nothing
        to compute, ends where it began.
        """
        budget, claimed, starved = self.max_num_batched_tokens, 0, False
        ends: dict[RequestId, int] = {}
        for request in tuple(self.running.values()):
            if request.req_id not in self.running:
                continue  # preempted below, for a request that arrived before it
            slot = request.slot
            computed = int(self._num_computed[slot])
            known = min(int(self._num_tokens[slot]), int(self._max_computed[slot]))
            count = self._uncut(request, computed, min(known - computed, budget))
            needed = self._blocks_for(computed + count) - self._num_blocks(slot)
            while needed > 0 and claimed + needed > self.pools.num_free:
                starved = True
                if claimed + needed <= self._num_free_soon():
                    count = 0  # its blocks stay claimed, so that later rows do not take them
                    break
                # The last of the running has no row in this step yet: rows are filled in order.
                self._preempt(self._victim())
                if request.req_id not in self.running:
                    break
            if request.req_id in self.running:
                ends[request.req_id] = computed + count
                budget -= count
                claimed += max(needed, 0)
        return np.array([ends[req_id] for req_id in self.running], dtype=np.int64), starved

    def _grow_running(self, rows: _Rows, ends: Int64Array) -> NewBlocks:
        """Give the running requests the blocks of this step's tokens; return them by slot."""
        (short,) = (ends > self._capacity[rows.index]).nonzero()
        if not len(short):
            return {}
        index = rows.index[short]
        counts = -(-(ends[short] - self._capacity[index]) // self.block_size)
        blocks = self.pools.allocate(int(counts.sum()))
        self._capacity[index] += counts * self.block_size
        new_blocks: NewBlocks = {}
        at = 0
        for row, slot, count in zip(short.tolist(), index.tolist(), counts.tolist(), strict=True):
            own = tuple(map(itemgetter(slice(at, at + count)), blocks))
            at += count
            for held, fresh in zip(rows.requests[row].block_ids, own, strict=True):
                held += fresh
            new_blocks[slot] = own
        return new_blocks

    def _admit_waiting(
        self, new_blocks: NewBlocks, budget: int
    ) -> tuple[list[Request], list[int]]:
        """Admit waiting requests, in order, as long as slots, blocks and tokens suffice.

        Returns:
            Who enters, and how many tokens of each are computed after the step.
        """
        entering: list[Request] = []
        ends: list[int] = []
        if self.enable_prefix_caching and self._free_slots:
            self._cache_running_blocks()
        while budget and self.waiting and self._free_slots:
            request = next(iter(self.waiting.values()))
            if self._blocked == (request, budget) and not self.pools.has_changed:
                break
            hit = self._find_prefix(request)
            num_hit = len(hit[0])
            num_cached = num_hit * self.block_size
            count = self._uncut(request, num_cached, min(request.num_tokens - num_cached, budget))
            if not count or self.pools.lacks(hit, self._blocks_to_admit(request, num_hit, count)):
                self._blocked = request, budget
                self.pools.watch(request.block_digests)
                break
            self._enter(request, hit)
            self._grow(request, self._blocks_for(num_cached + count) - num_hit)
            new_blocks[request.slot] = tuple([tuple(own) for own in request.block_ids])
            entering.append(request)
            ends.append(num_cached + count)
            budget -= count
        return entering, ends

    def _launch(
        self,
        rows: _Rows,
        ends: Int64Array,
        new_blocks: NewBlocks,
        entering: Sequence[Request],
        continued: _Launched | None,
    ) -> StepPlan:
        """Count the step's tokens, note what its output will mean, and return its plan."""
        index = rows.index
        if continued is None:
            counts = (ends - self._num_computed[index]).astype(np.int32)
            num_tokens = self._num_tokens[index]
            samples = ends == num_tokens
            self._num_tokens[index] = num_tokens + samples
            all_sample, num_left = bool(samples.all()), 0
            if all_sample and len(rows.requests) == len(self.running):
                num_left = int((self._max_computed[index] - ends).min())
        else:
            counts, samples, all_sample = rows.ones, continued.samples, True
            self._num_tokens[index] = ends + 1
            num_left = continued.num_left - 1
        self._num_computed[index] = ends
        plan = StepPlan(
            step_id=self._next_step_id,
            continues=None if continued is None else continued.step_id,
            new=tuple([_entering(request) for request in entering if not request.num_preemptions]),
            resumed=tuple([_entering(request) for request in entering if request.num_preemptions]),
            preempted=tuple(self._preempted),
            finished=tuple(self._vacated),
            req_ids=rows.req_ids,
            slots=rows.slots,
            epochs=rows.epochs,
            num_scheduled_tokens=counts,
            new_block_ids=new_blocks,
        )
        last_rows = []
        if not num_left:
            last_rows = (ends == self._max_computed[index]).nonzero()[0].tolist()
        self._newest = _Launched(
            step_id=plan.step_id,
            rows=rows,
            num_scheduled_tokens=counts,
            ends=ends,
            samples=samples,
            all_sample=all_sample,
            num_left=num_left,
            last_rows=last_rows,
        )
        self._in_flight.append(self._newest)
        self._next_step_id += 1
        self._preempted, self._vacated = [], []
        return plan

    def update(self, output: StepOutput) -> list[Request]:
        """Take in what the oldest step in flight produced.

        Returns:
            The requests that got a token or ended.

        Raises:
            RuntimeError: the output is of another step, or has another number of rows.
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
        live = self._live_rows(step)
        requests: Sequence[Request] = step.rows.requests
        ended: dict[Request, FinishReason] = {}
        tokens = None
        if (
            step.all_sample
            and live is None
            and not output.errors
            and not step.rows.any_logprobs
            and not step.rows.any_grammars
        ):
            tokens = _one_each(output.token_ids)
        if tokens is None:
            live = np.ones(len(step.rows.requests), dtype=np.bool_) if live is None else live
            requests, tokens = self._sampled_rows(step, output, live, ended)
        changed = [*ended, *requests]
        for request, token in zip(requests, tokens, strict=True):
            request.output_token_ids.append(token)
        self.num_generated_tokens += len(tokens)
        if self._without_token:
            self._note_first_tokens(requests)
        if not step.rows.ending_token_ids.isdisjoint(tokens):
            for request, token in zip(requests, tokens, strict=True):
                if token in request.stop_token_ids or request.stop_sequence is not None:
                    ended[request] = "stop"
        if step.rows.any_grammars:
            for request in requests:
                try:
                    if request.matcher is not None and request.matcher.is_finished():
                        ended.setdefault(request, "stop")
                except Exception as error:  # whatever a matcher raises fails its request alone
                    ended[request] = "error"
                    request.error = RequestError.caused_by(error, "structured_output")
        for row in step.last_rows:
            if live is None or live[row]:
                ended.setdefault(step.rows.requests[row], "length")
        self._land(step, live)
        for request, reason in ended.items():
            self._finish(request, reason)
        return changed

    def _sampled_rows(
        self,
        step: _Launched,
        output: StepOutput,
        live: BoolArray,
        ended: dict[Request, FinishReason],
    ) -> tuple[list[Request], list[int]]:
        """Return the live requests that got a token, and the tokens; row by row.

        Rows that failed are not live any more, and in ``ended``.
        """
        requests, tokens = [], []
        for row in live.nonzero()[0].tolist():
            request, row_tokens = step.rows.requests[row], output.token_ids[row]
            reason = self._failure(step, output, row)
            if reason is None and row_tokens and request.matcher is not None:
                reason = _refusal(request, request.matcher, row_tokens[0])
            if reason is not None:
                ended[request] = "error"
                request.error = RequestError(f"request {request.name!r}: {reason}")
                if isinstance(reason, RequestError):
                    request.error.__cause__ = reason.__cause__
                live[row] = False  # what it computed is not to be shared
                continue
            if step.rows.any_logprobs:
                self._take_logprobs(step, output, row)
            if row_tokens:  # else an unfinished prefill
                requests.append(request)
                tokens.append(row_tokens[0])
        return requests, tokens

    def _note_first_tokens(self, requests: Sequence[Request]) -> None:
        now = time.perf_counter()
        first = [request for request in requests if request in self._without_token]
        for request in reversed(first):  # the followers of who came first go first
            request.first_token_time = now
            self._admit_followers(request)
        self._without_token.difference_update(requests)

    def _failure(self, step: _Launched, output: StepOutput, row: int) -> str | RequestError | None:
        """Return why a row has failed; None = it has not."""
        request, num_expected = step.rows.requests[row], int(step.samples[row])
        reason = output.errors.get(row)
        if reason is not None:
            self.num_nan_rows += reason == RowFailure.NAN
            masks = request.params.masks(len(request.output_token_ids)) + self._custom_masks
            if reason == RowFailure.MASKED and masks:
                return f"{reason}, by {', '.join(masks)}"
            return reason
        if len(output.token_ids[row]) != num_expected:
            return (
                f"expected {num_expected} tokens of step {step.step_id}, "
                f"got {output.token_ids[row]}"
            )
        if not step.rows.any_logprobs:
            return None
        wants = (
            ("logprobs", num_expected if request.params.wants_logprobs else 0, output.logprobs),
            ("prompt_logprobs", self._num_prompt_logprobs(step, row), output.prompt_logprobs),
        )
        for name, count, given in wants:
            got = len(given[row]) if row in given else 0
            if count and got != count:
                return f"{name}: expected {count} positions of step {step.step_id}, got {got}"
        return None

    def _num_prompt_logprobs(self, step: _Launched, row: int) -> int:
        """Return for how many prompt tokens a row is to give log-probabilities."""
        request, end = step.rows.requests[row], int(step.ends[row])
        if not request.lacks_prompt_logprobs:
            return 0
        start = end - int(step.num_scheduled_tokens[row])
        return max(min(end, len(request.prompt_token_ids) - 1) - start, 0)

    def _take_logprobs(self, step: _Launched, output: StepOutput, row: int) -> None:
        """Keep a row's log-probabilities; a prompt's only once, though it be computed again."""
        request = step.rows.requests[row]
        if request.params.wants_logprobs and step.samples[row]:
            request.output_logprobs.append(output.logprobs[row])
        if self._num_prompt_logprobs(step, row):
            start = int(step.ends[row]) - int(step.num_scheduled_tokens[row])
            fresh = output.prompt_logprobs[row].behind(request.num_prompt_logprobs - start)
            if len(fresh):
                request.prompt_logprobs.append(fresh)

    def fail_step(self, plan: StepPlan, error: Mrv1Error) -> list[Request]:
        """End every request of a failed step that is still in it; return them.

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
        live, failed = self._live_rows(step), list(step.rows.requests)
        if live is not None:
            failed = [failed[row] for row in live.nonzero()[0].tolist()]
        for request in failed:
            self.fail(request, error)
        return failed

    def abandon(self, error: Mrv1Error) -> list[Request]:
        """Start over, whatever state an interrupt has left; end who ran, and return them.

        The steps in flight are forgotten, and so is the prefix cache. Requests that waited wait
        on. Safe to call again if it is interrupted itself.
        """
        self._start()
        self._epochs += 1  # a slot's next request is not the one that the runner knows
        failed = []
        for request in self.unfinished:
            request.slot, request.block_ids = -1, []
            if request.status is Status.WAITING:
                self.waiting[request.req_id] = request
                continue
            if request.status is Status.RUNNING:
                request.error = error
                self._end(request, "error")
            failed.append(request)
        self._requests = dict(self.waiting)
        return failed

    # --- steps in flight ------------------------------------------------------------------

    def _retire(self, step: _Launched) -> None:
        """Take a step out of flight; blocks that only it and steps before it used are free."""
        self._in_flight.remove(step)
        oldest = self._in_flight[0].step_id if self._in_flight else self._next_step_id
        self.pools.release(oldest - 1)

    def _live_rows(self, step: _Launched) -> BoolArray | None:
        """Return ``[rows]`` whether each request is still in its slot; count the others.

        None = all are.
        """
        if step.rows.version == self._version:
            return None
        live: BoolArray = self._epochs[step.rows.index] == step.rows.epochs
        num_stale = len(live) - int(np.count_nonzero(live))
        if not num_stale:
            return None
        self.num_stale_outputs += num_stale
        self.wasted_tokens += int(step.num_scheduled_tokens[~live].sum())
        return live

    # --- blocks ---------------------------------------------------------------------------

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _num_blocks(self, slot: int) -> int:
        """Return a running request's logical blocks."""
        return int(self._capacity[slot]) // self.block_size

    def _blocks_to_admit(self, request: Request, num_hit: int, count: int) -> list[int]:
        """Return the blocks of each group that have to be there for a waiting request.

        Those of all its known tokens, or, where what leaves the window is given back, of the
        first so many behind its cached blocks.
        """
        in_step = self._blocks_for(num_hit * self.block_size + count) - num_hit
        known = self._blocks_for(request.num_tokens) - num_hit
        return [known if seen.is_full else in_step for seen in self.pools.keeps]

    def _grow(self, request: Request, num_blocks: int) -> None:
        for held, fresh in zip(request.block_ids, self.pools.allocate(num_blocks), strict=True):
            held += fresh
        self._capacity[request.slot] += num_blocks * self.block_size

    def _uncut(self, request: Request, start: int, count: int) -> int:
        """Return ``count`` tokens from ``start``, or fewer to end before a span, not inside it."""
        for span_start, span_end in request.unsplittable:
            if span_start < start + count < span_end:
                return span_start - start
        return count

    def _num_free_soon(self) -> int:
        """Blocks of every group that are free when the steps in flight are over.

        Whatever these produce: what ends by length, and what windows leave behind.
        """
        num_free = np.array([pool.num_free + pool.num_quarantined for pool in self.pools])
        for request in self.running.values():
            if self._is_ending(request):
                num_free += self.pools.num_sole(request.block_ids)
                continue
            for group, seen in self.pools.streaming:
                start = int(self._first_live[group][request.slot])
                end = int(seen.first_live(self._num_computed[request.slot], self.block_size))
                num_free[group] += self.pools[group].num_sole(request.block_ids[group][start:end])
        return int(num_free.min())

    def _is_ending(self, request: Request) -> bool:
        """Whether the last token of a running request is pending."""
        return bool(self._num_tokens[request.slot] > self._max_computed[request.slot])

    def _victim(self) -> Request:
        """The last arrival that gains by waiting: one that ends soon gives its blocks anyway."""
        return next(r for r in reversed(self.running.values()) if not self._is_ending(r))

    def _find_prefix(self, request: Request) -> list[list[int]]:
        """Return, per group, cached blocks of the request's first tokens.

        Full ones, and not its last token's.
        """
        if not self.enable_prefix_caching or request.lacks_prompt_logprobs:
            return [[] for _ in self.pools]
        self._extend_digests(request, request.num_tokens)
        num_blocks = (request.num_tokens - 1) // self.block_size

        # The start of a span that would be cut may be within a block, hence within another span.
        def cut(count: int) -> int:
            return self._uncut(request, 0, count * self.block_size) // self.block_size

        return self.pools.find(request.block_digests[:num_blocks], cut)

    def _land(self, step: _Launched, live: BoolArray | None) -> None:
        """Note what a step computed of the requests that are live and did not fail; None = all."""
        index, ends = step.rows.index, step.ends
        requests: Sequence[Request] = step.rows.requests
        if live is not None:
            index, ends = index[live], ends[live]
            requests = [requests[row] for row in live.nonzero()[0].tolist()]
        self._num_landed[index] = ends
        if self.pools.streaming:
            self._give_up_behind_windows(requests, index, ends)

    def _give_up_behind_windows(
        self, requests: Sequence[Request], index: Int64Array, num_landed: Int64Array
    ) -> None:
        """Give back the blocks that no token behind those that have landed will see."""
        for group, seen in self.pools.streaming:
            starts = self._first_live[group][index]
            ends = seen.first_live(num_landed, self.block_size)
            for row in (ends > starts).nonzero()[0].tolist():
                request = requests[row]
                if self.enable_prefix_caching:
                    self._cache_blocks(request)
                self.pools.give_up(
                    group, request.block_ids[group], int(starts[row]), int(ends[row])
                )
            self._first_live[group][index] = np.maximum(starts, ends)

    def _cache_running_blocks(self) -> None:
        """Let the full blocks of all that run be found by their content.

        Done when somebody looks, and for a request that leaves: until then nobody asks, and a step
        that only goes on need not work out digests.
        """
        rows = self._running_rows()
        num_full = self._num_landed[rows.index] // self.block_size
        for row in (num_full > self._num_cached_blocks[rows.index]).nonzero()[0].tolist():
            self._cache_blocks(rows.requests[row])

    def _cache_blocks(self, request: Request) -> None:
        """Let the blocks of a running request that successful steps filled be found."""
        start = int(self._num_cached_blocks[request.slot])
        end = int(self._num_landed[request.slot]) // self.block_size
        if start < end:
            self._extend_digests(request, end * self.block_size)
            self.pools.cache(request.block_ids, request.block_digests, start, end)
            self._num_cached_blocks[request.slot] = end

    def _extend_digests(self, request: Request, num_tokens: int) -> None:
        """Work out the digests of the full blocks of the first ``num_tokens`` tokens."""
        start = len(request.block_digests) * self.block_size
        if start + self.block_size <= num_tokens:
            extend_chain(
                request.block_digests,
                request.token_ids(start, num_tokens),
                self.block_size,
                request.cache_key,
            )

    # --- slots ----------------------------------------------------------------------------

    def _running_rows(self) -> _Rows:
        if self._rows.version != self._version:
            self._rows = _Rows.of(self.running.values(), self._version)
        return self._rows

    def _enter(self, request: Request, hit: list[list[int]]) -> None:
        """Take a waiting request into a slot, behind the cached blocks of its prefix."""
        num_cached = len(hit[0]) * self.block_size
        if self.enable_prefix_caching:
            self.num_prefix_queries += request.num_tokens
            self.prefix_hit_tokens += num_cached
        self.pools.share(hit)
        del self.waiting[request.req_id]
        self.running[request.req_id] = request
        self._version += 1
        self._blocked = None
        slot = self._free_slots.popleft()
        request.slot, request.epoch = slot, int(self._epochs[slot])
        request.status = Status.RUNNING
        request.block_ids = hit
        request.num_cached_tokens = num_cached
        self._num_tokens[slot] = request.num_tokens
        self._num_computed[slot] = num_cached
        self._max_computed[slot] = request.max_total_tokens - 1
        self._capacity[slot] = num_cached
        self._num_landed[slot] = num_cached
        self._num_cached_blocks[slot] = len(hit[0])
        for group, seen in self.pools.streaming:
            self._first_live[group][slot] = seen.first_live(num_cached, self.block_size)
        if request.first_token_time is None:
            self._without_token.add(request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is Status.RUNNING:
            self._vacated.append(request.slot)
            self._release(request)
        elif request.leader in self._held:
            self._held[request.leader].remove(request)
        else:
            del self.waiting[request.req_id]
        self._admit_followers(request)
        self._end(request, reason)
        del self._requests[request.req_id]

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Note why a request has ended; its status says so last, when all else is noted."""
        request.stop_reason = None
        if reason == "stop":
            last = request.output_token_ids[-1]
            named = last in request.params.stop_token_ids
            request.stop_reason = last if named else request.stop_sequence
        request.finish_reason = reason
        request.finish_time = time.perf_counter()
        self.num_finished += 1
        request.status = Status.FINISHED

    def _admit_followers(self, request: Request) -> None:
        """Let the followers of a request go on: its prompt is computed, or will not be."""
        for follower in reversed(self._held.pop(request, ())):
            self.waiting[follower.req_id] = follower
            self.waiting.move_to_end(follower.req_id, last=False)

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        request.num_preemptions += 1
        self._preempted.append(request.slot)
        self._release(request)
        request.status = Status.WAITING
        self.waiting[request.req_id] = request
        self.waiting.move_to_end(request.req_id, last=False)

    def _release(self, request: Request) -> None:
        """Take back slot and blocks; the slot's next request has another epoch."""
        if self.enable_prefix_caching:
            self._cache_blocks(request)
        del self.running[request.req_id]
        self._version += 1
        self._without_token.discard(request)
        last_step = self._next_step_id - 1 if self._in_flight else None
        self.pools.free(request.block_ids, last_step=last_step)
        request.block_ids = []
        self._epochs[request.slot] += 1
        self._free_slots.append(request.slot)
        request.slot = -1


def _entering(request: Request) -> SlotRequest:
    """Return a request that has been given a slot as the plan tells of it."""
    num_prompt_tokens = len(request.prompt_token_ids)
    return SlotRequest(
        req_id=request.req_id,
        slot=request.slot,
        epoch=request.epoch,
        token_ids=request.token_ids(),
        prompt_len=num_prompt_tokens,
        sampling_params=request.params,
        seed=request.seed,
        child=request.child,
        banned_token_sequences=request.banned_token_sequences,
        num_computed_tokens=request.num_cached_tokens,
        max_total_tokens=request.max_total_tokens,
        stop_token_ids=request.stop_token_ids[:MAX_STOP_TOKENS],
        stop_token_sequences=request.params.stop_token_sequences,
        min_total_tokens=num_prompt_tokens + request.params.min_tokens,
        late_token_ids=request.late_token_ids[:MAX_STOP_TOKENS],
    )


def _refusal(request: Request, matcher: GrammarMatcher, token: int) -> str | RequestError | None:
    """Let a grammar follow a token; return why it does not. What ends a request it need not."""
    try:
        if matcher.accept(token) or token in request.stop_token_ids:
            return None
    except Exception as error:  # whatever a matcher raises fails its request alone
        return RequestError.caused_by(error, "structured_output")
    return f"structured_output: token {token}, which its bitmask allowed, was not accepted"


def _one_each(token_ids: Sequence[tuple[int, ...]]) -> list[int] | None:
    """Return the rows' tokens if each has one."""
    try:
        return [token for (token,) in token_ids]
    except ValueError:
        return None
