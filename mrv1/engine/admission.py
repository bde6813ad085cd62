"""Which waiting requests get a slot and blocks in a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mrv1.engine.adapters import AdapterSlots
from mrv1.engine.feature_pool import FeaturePool
from mrv1.engine.head_pools import HeadPools
from mrv1.engine.prefix_cache import PrefixCache
from mrv1.engine.prefix_waits import PrefixWaits
from mrv1.engine.request import Request
from mrv1.engine.running_batch import NextStep, RunningBatch
from mrv1.engine.scheduler_config import SchedulerConfig
from mrv1.engine.slot_table import SlotTable
from mrv1.engine.step_budget import StepBudget
from mrv1.engine.waiting_queue import PriorityQueue, WaitingQueue


class Admission:
    """The waiting requests; admits them, in order, while slots, blocks and tokens suffice.

    With an adapter, a request needs a slot of the device for it, too.
    A request needs free blocks for all its known tokens, and starts after the longest prefix hit,
    its last token excepted. With ``enable_prefix_caching`` its followers join the queue when it
    has its first token, so that the prompt is computed once; and a request waits for another one
    that still computes a longer common prefix.
    """

    def __init__(self, adapter_slots: AdapterSlots) -> None:
        """Count from 0; ``configure`` and ``start`` have to follow."""
        self.num_prefix_queries = 0  # tokens of admitted requests, looked up in the prefix cache
        self.prefix_hit_tokens = 0  # tokens of ``num_prefix_queries`` that the prefix cache had
        self.num_prefix_waits = 0  # requests that waited for the prefix of another
        self._adapter_slots = adapter_slots

    def configure(
        self,
        config: SchedulerConfig,
        slots: SlotTable,
        features: FeaturePool,
        prefix_cache: PrefixCache,
    ) -> None:
        """Admit to these slots, by these limits; ``start`` has to follow."""
        self._config = config
        self._slots = slots
        self._features = features
        self._prefix_cache = prefix_cache

    def start(self, pools: HeadPools, batch: RunningBatch) -> None:
        """Start empty: no request waits."""
        config = self._config
        is_by_priority = config.scheduling_policy == "priority"
        self.waiting = PriorityQueue() if is_by_priority else WaitingQueue()
        self.prefix_waits = PrefixWaits(self._slots, config.block_size, config.least_shared_tokens)
        self.blocked: tuple[Request, int, int, int | None] | None = None
        """The first waiting request if it could not be admitted, and the tokens, feature rows and,
        beside decodes, prompt tokens left for it then; looked up again once the pools or these
        have changed."""
        self._pools, self._batch = pools, batch

    def add(self, request: Request) -> None:
        """Queue a request and its followers."""
        shares_blocks = len(request.prompt_token_ids) > self._config.block_size
        holds_followers = self._config.enable_prefix_caching and shares_blocks
        self.waiting.add(request, holds_followers=holds_followers)

    def remove(self, request: Request) -> None:
        """Forget a waiting request that has ended."""
        if request in self.prefix_waits:
            self.prefix_waits.remove(request)
        else:
            self.waiting.remove(request)

    def readmit(self, requests: Sequence[Request]) -> None:
        """Put requests that have waited for a prefix before all others, in their order."""
        for request in reversed(requests):
            self.waiting.add_first(request)

    def num_prompt_tokens(self, most_per_request: int, most: int) -> int:
        """Return how many tokens of waiting requests a step could compute, up to about ``most``.

        Cached prefixes, requests that lack blocks, and tokens beyond ``most_per_request`` do not
        count.
        """
        num_tokens = 0
        for request in self.waiting.first(len(self._slots.free)):
            if num_tokens > most:
                break
            hit = self._prefix_cache.find(request)
            num_cached = len(hit[0]) * self._config.block_size
            if self._pools.lacks(hit, request.num_tokens, num_cached + 1):
                break
            num_tokens += min(request.num_tokens - num_cached, most_per_request)
        return num_tokens

    def admit(self, step: NextStep, budget: StepBudget) -> None:
        """Admit waiting requests to a step; its rows, ends and blocks are extended."""
        if not self.waiting or step.is_starved:
            return
        caches, free = self._config.enable_prefix_caching, self._slots.free
        if caches and free:
            self._batch.cache_blocks()
        entering: list[Request] = []
        ends: list[int] = []
        while self.waiting and free and budget.is_open:
            request = self.waiting.peek()
            # Requests that wait for a prefix are as good as admitted: no more of them than free
            # slots. A more urgent request takes such a slot, and they follow it.
            if len(free) <= self.prefix_waits.num_before(request):
                break
            num_in_room = None if budget.room is None else budget.room.num_left
            adapter_slot = self._adapter_slots.find(request.adapter)
            if adapter_slot is None:
                break
            left = request, budget.num_left, self._features.num_held, num_in_room
            if self.blocked == left and not self._pools.has_changed:
                break
            hit = self._prefix_cache.find(request)
            num_cached = len(hit[0]) * self._config.block_size
            num_wanted = request.num_tokens - num_cached
            count = budget.fit(request, num_cached, num_wanted, enters=True)
            count = self._features.fit(request, num_cached, count)
            if not count:
                span_end = num_cached + request.span_size(num_cached)
                if not self._pools.lacks(hit, request.num_tokens, span_end):
                    budget.promise(request, num_cached)
            end = num_cached + count
            if not count or self._pools.lacks(hit, request.num_tokens, end):
                self.blocked = left
                self._pools.watch(request.block_digests)
                break
            self.blocked = None
            self.waiting.take(request)
            if caches:
                if self.prefix_waits.try_wait(request, num_cached):
                    self.num_prefix_waits += 1
                    continue
                self.prefix_waits.enter(request, num_cached)
                self.num_prefix_queries += request.num_tokens
                self.prefix_hit_tokens += num_cached
            if not request.num_preemptions:
                self.waiting.charge(request, num_wanted)
                request.num_prefix_hits = num_cached
            blocks = self._batch.enter(request, hit, end)
            request.adapter_slot = self._adapter_slots.enter(adapter_slot, request.adapter)
            step.new_blocks[request.slot] = blocks
            self._features.stage(request, num_cached, end)
            budget.take(request, count, num_wanted, enters=True)
            entering.append(request)
            ends.append(end)
        if entering:
            step.entering = entering
            step.rows, step.continued = self._batch.rows, None
            step.ends = np.array([*step.ends.tolist(), *ends], dtype=np.int64)
