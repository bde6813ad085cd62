"""The running requests: each has a slot and, in every head group, its blocks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from mrv1.engine.head_pools import HeadPools
from mrv1.engine.prefix_cache import PrefixCache
from mrv1.engine.request import Request, Status
from mrv1.engine.slot_table import SlotTable
from mrv1.runner.step import Int32Array, Int64Array, RequestId

BoolArray = npt.NDArray[np.bool_]
NewBlocks = dict[int, tuple[tuple[int, ...], ...]]  # slot -> per head group, block ids to append


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """The rows of a step; shared by the steps that follow until a request joins or leaves."""

    version: int  # ``RunningBatch.version`` of these rows
    requests: tuple[Request, ...]
    req_ids: tuple[RequestId, ...]
    index: Int64Array  # [rows] slots as int64, with which numpy indexes fastest
    slots: Int32Array
    epochs: Int32Array
    ones: Int32Array  # [rows] one token per row
    ending_token_ids: frozenset[int]  # tokens that may end at least one of the requests
    any_logprobs: bool  # whether any of the requests asks for log-probabilities
    logprob_rows: tuple[int, ...] | None  # that ask for those of outputs; None = some of prompts
    any_grammars: bool  # whether any of the requests has a grammar

    @classmethod
    def from_requests(cls, requests: Iterable[Request], version: int) -> ScheduledRows:
        """Return the rows of running requests."""
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
            logprob_rows=_logprob_rows(requests),
            any_grammars=any(request.matcher is not None for request in requests),
        )
        for shared in (rows.slots, rows.epochs, rows.ones):
            shared.flags.writeable = False  # by plans and steps
        return rows

    def where(self, mask: BoolArray | None) -> Sequence[Request]:
        """Return the requests of the rows for which ``mask`` is true; None = of all."""
        if mask is None:
            return self.requests
        return [self.requests[row] for row in mask.nonzero()[0].tolist()]


def _logprob_rows(requests: Sequence[Request]) -> tuple[int, ...] | None:
    if any(request.params.prompt_logprobs is not None for request in requests):
        return None
    return tuple([row for row, each in enumerate(requests) if each.params.wants_logprobs])


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A launched step, with all that is needed to apply its output."""

    step_id: int
    rows: ScheduledRows
    num_scheduled_tokens: Int32Array
    ends: Int64Array  # [rows] tokens that are computed after the step
    samples: BoolArray  # [rows] whether it computes its last token, and samples the next
    all_sample: bool
    num_left: int  # steady steps that may follow; 0 unless all running requests sample in it
    last_rows: list[int]  # whose request ends by length with this step, if it is known
    tells_last_rows: bool = True  # False = drafts decide, of this step or of those in flight
    draft_token_ids: tuple[tuple[int, ...], ...] = ()  # of each row; () = none
    num_device_drafts: int = 0  # most drafts of each row that are on the device alone

    @property
    def rows_with_grammars(self) -> list[tuple[int, Request]]:
        """Rows that sample a token under a grammar, and their requests."""
        if not self.rows.any_grammars:
            return []
        return [
            (row, self.rows.requests[row])
            for row in self.samples.nonzero()[0].tolist()
            if self.rows.requests[row].matcher is not None
        ]

    def num_drafts(self, row: int) -> int:
        """Return the number of drafts of a row; with a draft head, the most."""
        return len(self.draft_token_ids[row]) if self.draft_token_ids else self.num_device_drafts

    def start(self, row: int) -> int:
        """Return how many tokens of a row are computed before the step."""
        return int(self.ends[row]) - int(self.num_scheduled_tokens[row])

    def num_prompt_logprobs(self, row: int) -> int:
        """Return the number of prompt tokens for which a row must give log-probabilities."""
        request = self.rows.requests[row]
        if not request.lacks_prompt_logprobs:
            return 0
        end = min(int(self.ends[row]), len(request.prompt_token_ids) - 1)
        return max(end - self.start(row), 0)


@dataclass(slots=True, eq=False)
class NextStep:
    """The step that is being planned."""

    rows: ScheduledRows
    ends: Int64Array
    """[rows] tokens that are computed after the step, drafts included. Until the step is launched
    some rows may have no tokens: their ends are the tokens that are computed already."""
    continued: LaunchedStep | None  # for a steady step, the step before it; else None
    new_blocks: NewBlocks
    entering: Sequence[Request] = ()  # requests that get a slot
    is_starved: bool = False  # whether running requests lack blocks: nobody else gets any
    draft_token_ids: tuple[tuple[int, ...], ...] = ()  # drafts of each row; () = no row has any
    num_device_drafts: int = 0  # most drafts of each row that are on the device alone


class RunningBatch:
    """The running requests, their slots and blocks; decides nothing about scheduling.

    A request has as many blocks of every head group. In a group with a window, a block that has
    left it is freed when the step that moved it has returned: steps in flight start after that
    step, so that none reads the block.
    """

    def __init__(
        self,
        pools: HeadPools,
        slots: SlotTable,
        prefix_cache: PrefixCache,
        *,
        has_head: bool = False,
    ) -> None:
        """Start without requests; ``has_head``: drafts of a head make lengths upper bounds."""
        self._has_head = has_head
        self.requests: dict[RequestId, Request] = {}  # by request id, in order of arrival
        self.version = 0  # how often a request has joined or left
        self.newest: LaunchedStep | None = None  # the step launched last, in flight or not
        self._without_token: set[Request] = set()  # running requests without a first token
        self._pools = pools
        self._slots = slots
        self._prefix_cache = prefix_cache
        self._rows = ScheduledRows.from_requests((), self.version)

    @property
    def rows(self) -> ScheduledRows:
        """All running requests, as rows."""
        if self._rows.version != self.version:
            self._rows = ScheduledRows.from_requests(self.requests.values(), self.version)
        return self._rows

    @property
    def continued(self) -> LaunchedStep | None:
        """The step launched last, if a steady step may follow; else None."""
        last = self.newest
        if last is None or not last.num_left or last.rows.version != self.version:
            return None
        return last

    def live(self, rows: ScheduledRows) -> BoolArray | None:
        """Return ``[rows]`` whether each request is still in its slot; None = all are."""
        if rows.version == self.version:
            return None
        live: BoolArray = self._slots.epochs[rows.index] == rows.epochs
        return None if live.all() else live

    # --- joining and leaving ----------------------------------------------------------------

    def enter(
        self, request: Request, blocks: list[list[int]], end: int
    ) -> tuple[tuple[int, ...], ...]:
        """Give a waiting request a slot, and the blocks of its first ``end`` tokens; return these.

        New blocks are appended in place to ``blocks``, the cached blocks of its prefix per group.
        """
        pools, slots = self._pools, self._slots
        num_cached = len(blocks[0]) * pools.block_size
        pools.share(blocks)
        self.requests[request.req_id] = request
        self.version += 1
        slot = slots.free.popleft()
        request.slot, request.epoch = slot, int(slots.epochs[slot])
        request.status = Status.RUNNING
        request.num_cached_tokens = num_cached
        request.block_ids = blocks
        num_fresh = pools.blocks_for(end - num_cached)
        for held, fresh in zip(blocks, pools.allocate(num_fresh), strict=True):
            held += fresh
        slots.num_tokens[slot] = request.num_tokens
        slots.num_computed[slot] = slots.num_landed[slot] = num_cached
        slots.num_pending[slot] = 0
        slots.prompt_len[slot] = len(request.prompt_token_ids)
        slots.max_computed[slot] = request.max_total_tokens - 1
        slots.num_cached_blocks[slot] = num_cached // pools.block_size
        slots.capacity[slot] = num_cached + num_fresh * pools.block_size
        for group, seen in pools.streaming:
            slots.first_live[group][slot] = seen.first_live(num_cached, pools.block_size)
        if request.first_token_time is None:
            self._without_token.add(request)
        return tuple([tuple(own) for own in blocks])

    def leave(self, request: Request, last_step: int | None) -> None:
        """Free slot and blocks, which steps up to ``last_step`` may still use; None = no step."""
        self._prefix_cache.add(request)
        del self.requests[request.req_id]
        self._without_token.discard(request)
        self.version += 1
        self._pools.free(request.block_ids, last_step=last_step)
        request.block_ids = []
        self._slots.give_back(request.slot)
        request.slot = -1

    # --- blocks -----------------------------------------------------------------------------

    def num_lacking(self, request: Request, end: int) -> int:
        """Return how many more blocks of a group a request's first ``end`` tokens need."""
        return self._pools.blocks_for(end - int(self._slots.capacity[request.slot]))

    def has_blocks(self, ends: Int64Array, num_tokens: int) -> bool:
        """Return whether blocks suffice for ``ends``; ``num_tokens`` are not computed yet."""
        num_free = self._pools.num_free
        if num_free >= num_tokens:  # a token needs one new block at most
            return True
        short = ends - self._slots.capacity[self.rows.index]
        return bool(num_free >= np.maximum(-(-short // self._pools.block_size), 0).sum())

    def grow(self, ends: Int64Array) -> NewBlocks:
        """Allocate and return the blocks that the first ``ends`` tokens of every request lack."""
        rows, capacity, block_size = self.rows, self._slots.capacity, self._pools.block_size
        (short,) = (ends > capacity[rows.index]).nonzero()
        if not len(short):
            return {}
        index = rows.index[short]
        counts = -(-(ends[short] - capacity[index]) // block_size)
        blocks = self._pools.allocate(int(counts.sum()))
        capacity[index] += counts * block_size
        new_blocks: NewBlocks = {}
        at = 0
        for row, slot, count in zip(short.tolist(), index.tolist(), counts.tolist(), strict=True):
            own = tuple(map(itemgetter(slice(at, at + count)), blocks))
            at += count
            for held, fresh in zip(rows.requests[row].block_ids, own, strict=True):
                held += fresh
            new_blocks[slot] = own
        return new_blocks

    def shrink(self, request: Request, end: int, new_blocks: NewBlocks) -> None:
        """Give back blocks beyond ``end`` tokens, from ``new_blocks``, which no step has used."""
        pools, slot = self._pools, request.slot
        count = int(self._slots.capacity[slot]) // pools.block_size - pools.blocks_for(end)
        if count <= 0:
            return
        pools.free([held[-count:] for held in request.block_ids], last_step=None)
        for held in request.block_ids:
            del held[-count:]
        self._slots.capacity[slot] -= count * pools.block_size
        new_blocks[slot] = tuple([blocks[:-count] for blocks in new_blocks[slot]])
        if not new_blocks[slot][0]:
            del new_blocks[slot]

    def num_free_soon(self) -> int:
        """Return how many blocks of every group steps in flight leave free, whatever they draw."""
        pools, slots = self._pools, self._slots
        num_free = np.array([pool.num_free + pool.num_quarantined for pool in pools])
        for request in self.requests.values():
            if self.is_ending(request):
                num_free += pools.num_sole(request.block_ids)
                continue
            for group, seen in pools.streaming:
                start = int(slots.first_live[group][request.slot])
                end = int(seen.first_live(slots.num_computed[request.slot], pools.block_size))
                num_free[group] += pools[group].num_sole(request.block_ids[group][start:end])
        return int(num_free.min())

    def is_ending(self, request: Request) -> bool:
        """Return whether the last token of a running request is pending."""
        return bool(self._slots.num_tokens[request.slot] > self._slots.max_computed[request.slot])

    # --- steps --------------------------------------------------------------------------------

    def drop_idle_rows(self, step: NextStep) -> None:
        """Drop the rows of a step that have no tokens."""
        has_tokens = step.ends > self._slots.num_computed[step.rows.index]
        if not has_tokens.all():
            step.rows = ScheduledRows.from_requests(step.rows.where(has_tokens), self.version)
            step.ends = step.ends[has_tokens]

    def launch(self, step_id: int, step: NextStep) -> LaunchedStep:
        """Record a step as launched: count the tokens that it computes and samples."""
        slots, continued, draft_token_ids = self._slots, step.continued, step.draft_token_ids
        rows, ends = step.rows, step.ends
        index = rows.index
        if continued is None:
            counts = (ends - slots.num_computed[index]).astype(np.int32)
            num_tokens = slots.num_tokens[index]
            samples = ends >= num_tokens
            slots.num_tokens[index] = np.where(samples, ends + 1, num_tokens)
            all_sample, num_left = bool(samples.all()), 0
            if self._has_head:
                slots.num_pending[index] += samples * (1 + step.num_device_drafts)
            elif all_sample and not draft_token_ids and len(rows.requests) == len(self.requests):
                num_left = int((slots.max_computed[index] - ends).min())
        else:
            counts, samples, all_sample = rows.ones, continued.samples, True
            slots.num_tokens[index] = ends + 1
            num_left = continued.num_left - 1
        slots.num_computed[index] = ends
        last_rows = []
        tells_last_rows = not draft_token_ids and not self._has_head
        if not num_left and tells_last_rows:
            last_rows = (ends == slots.max_computed[index]).nonzero()[0].tolist()
        self.newest = LaunchedStep(
            step_id=step_id, rows=rows, num_scheduled_tokens=counts, ends=ends, samples=samples,
            all_sample=all_sample, num_left=num_left, last_rows=last_rows,
            tells_last_rows=tells_last_rows,
            draft_token_ids=draft_token_ids, num_device_drafts=step.num_device_drafts,
        )  # fmt: skip
        return self.newest

    def settle(self, step: LaunchedStep, succeeded: BoolArray | None) -> None:
        """Count what a step with drafts has computed, its tokens appended; as in ``land``."""
        ones = np.ones(len(step.ends), dtype=np.bool_)
        for row in (ones if succeeded is None else succeeded).nonzero()[0].tolist():
            if step.draft_token_ids[row]:
                request = step.rows.requests[row]
                self._slots.num_tokens[request.slot] = request.num_tokens
                self._slots.num_computed[request.slot] = request.num_tokens - 1
                step.ends[row] = request.num_tokens - 1

    def settle_bounds(self, step: LaunchedStep, succeeded: BoolArray | None) -> None:
        """Replace bounds by what a step has computed, its tokens appended; as in ``land``.

        A step in flight appends 1 + drafts tokens at most, and no request gets more than its most.
        """
        slots = self._slots
        sampled = step.samples if succeeded is None else step.samples & succeeded
        for row in sampled.nonzero()[0].tolist():
            request = step.rows.requests[row]
            slots.num_pending[request.slot] -= 1 + step.num_device_drafts
            bound = request.num_tokens + int(slots.num_pending[request.slot])
            bound = min(bound, request.max_total_tokens)
            slots.num_tokens[request.slot] = bound
            slots.num_computed[request.slot] = bound - 1
            step.ends[row] = request.num_tokens - 1

    def note_first_tokens(self, requests: Sequence[Request]) -> list[Request]:
        """Set the time of first tokens; return the requests that have just got theirs."""
        if not self._without_token:
            return []
        now = time.perf_counter()
        first = [request for request in requests if request in self._without_token]
        for request in first:
            request.first_token_time = now
        self._without_token.difference_update(first)
        return first

    def land(self, step: LaunchedStep, succeeded: BoolArray | None) -> None:
        """Record that a step is over, and free the blocks that left a window.

        ``succeeded``: ``[rows]`` whether the request still runs and did not fail; None = all.
        """
        index, ends = step.rows.index, step.ends
        if succeeded is not None:
            index, ends = index[succeeded], ends[succeeded]
        self._slots.num_landed[index] = ends
        for group, seen in self._pools.streaming:  # free blocks that no later token sees
            requests = step.rows.where(succeeded)
            first_live = self._slots.first_live[group]
            starts, firsts = first_live[index], seen.first_live(ends, self._pools.block_size)
            for row in (firsts > starts).nonzero()[0].tolist():
                request = requests[row]
                self._prefix_cache.add(request)
                start, end = int(starts[row]), int(firsts[row])
                self._pools.give_up(group, request.block_ids[group], start, end)
            first_live[index] = np.maximum(starts, firsts)

    def cache_blocks(self) -> None:
        """Register running requests' full blocks for a look-up; they do it when they leave."""
        index = self.rows.index
        num_full = self._slots.num_landed[index] // self._pools.block_size
        is_new = num_full > self._slots.num_cached_blocks[index]
        for request in self.rows.where(is_new):
            self._prefix_cache.add(request)
