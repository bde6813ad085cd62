"""The requests that wait for a slot and blocks, and which of them is next."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from mrv1.engine.request import Request
from mrv1.runner.step import RequestId

QUANTUM = 512
"""Tokens that a turn gives to a fairness id. A turn ends with the request that uses them up: of
two ids that always have a request waiting, none is ahead by more than two quanta and a request."""
FEW_PRIORITIES = 16  # priorities of which no request waits that the queue keeps without more ado


class WaitingQueue(OrderedDict[RequestId, Request]):
    """Requests by id, first come, first served, and followers that wait for a computed prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[Request, list[Request]] = {}  # followers, until the prompt is computed

    def peek(self) -> Request:
        """Return the request to be admitted next."""
        return next(iter(self.values()))

    def first(self, count: int) -> Iterator[Request]:
        """Yield up to ``count`` requests that are admitted next; of ids that take turns, about."""
        return islice(self.values(), count)

    def add(self, request: Request, *, holds_followers: bool) -> None:
        """Queue a request and its followers; ``holds_followers`` holds the followers back."""
        self.add_last(request)
        if holds_followers and request.followers:
            self.held[request] = list(request.followers)
        else:
            for follower in request.followers:
                self.add_last(follower)

    def add_last(self, request: Request) -> None:
        """Put a request after all others."""
        self[request.req_id] = request

    def add_first(self, request: Request) -> None:
        """Put a request before all others."""
        self[request.req_id] = request
        self.move_to_end(request.req_id, last=False)

    def take(self, request: Request) -> None:
        """Remove a request that is not held back."""
        del self[request.req_id]

    def remove(self, request: Request) -> None:
        """Remove a request, held back or not."""
        if request.leader in self.held:
            self.held[request.leader].remove(request)
        else:
            self.take(request)

    def admit_followers(self, request: Request) -> None:
        """Put the held-back followers of a request first: its prompt is computed, or it ended."""
        for follower in reversed(self.held.pop(request, ())):
            self.add_first(follower)

    def charge(self, request: Request, num_tokens: int) -> None:
        """Record tokens that are computed for a request; the order of arrival ignores them."""


class _Lane:
    """The waiting requests of one fairness id at one priority, in order of arrival."""

    def __init__(self) -> None:
        self.requests: OrderedDict[RequestId, Request] = OrderedDict()
        self.credit = QUANTUM  # tokens that it may still have computed in its turn; < 0 = a debt


class PriorityQueue(WaitingQueue):
    """Lower priorities first; requests of one priority take turns by their fairness ids.

    A deficit round robin: each turn adds ``QUANTUM`` tokens to an id's credit, and the id is
    served while that is positive. Its requests are charged for the prompt tokens that they
    compute, and at their end for their output. An id in debt keeps its place until the debt is
    paid, even if none of its requests waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lanes: dict[int, OrderedDict[str, _Lane]] = {}  # by priority; the first has the turn
        self._sizes: dict[int, int] = {}  # priority -> its waiting requests, if any
        self._priorities: list[int] = []  # heap of the keys that ``_sizes`` has or had

    def peek(self) -> Request:
        """Return the first request of the id that has the turn, at the lowest priority value."""
        while self._priorities[0] not in self._sizes:
            heapq.heappop(self._priorities)
        lanes = self._lanes[self._priorities[0]]
        while True:
            fairness_id, lane = next(iter(lanes.items()))
            if lane.credit > 0:
                if lane.requests:
                    return next(iter(lane.requests.values()))
                del lanes[fairness_id]  # nothing waits, and no debt is left
            else:
                lane.credit += QUANTUM
                lanes.move_to_end(fairness_id)

    def first(self, count: int) -> Iterator[Request]:
        """Yield up to ``count`` requests of the lowest priority values, one id after the other."""
        lanes = (lane for key in sorted(self._sizes) for lane in self._lanes[key].values())
        return islice((request for lane in lanes for request in lane.requests.values()), count)

    def add_last(self, request: Request) -> None:
        """Put a request after all others of its priority and fairness id."""
        super().add_last(request)
        self._enter(request)

    def add_first(self, request: Request) -> None:
        """Put a request before all others of its priority and fairness id."""
        super().add_first(request)
        self._enter(request).requests.move_to_end(request.req_id, last=False)

    def _enter(self, request: Request) -> _Lane:
        if request.priority not in self._sizes:
            self._sizes[request.priority] = 0
            heapq.heappush(self._priorities, request.priority)
        self._sizes[request.priority] += 1
        lanes = self._lanes.setdefault(request.priority, OrderedDict())
        lane = lanes.setdefault(request.fairness_id, _Lane())
        lane.requests[request.req_id] = request
        return lane

    def take(self, request: Request) -> None:
        """Remove a request that is not held back."""
        super().take(request)
        lanes = self._lanes[request.priority]
        del lanes[request.fairness_id].requests[request.req_id]
        self._sizes[request.priority] -= 1
        if not self._sizes[request.priority]:  # nobody waits for a turn: debts are void
            del self._sizes[request.priority], self._lanes[request.priority]
            if len(self._priorities) > 2 * len(self._sizes) + FEW_PRIORITIES:
                self._priorities = sorted(self._sizes)  # without those that it has no more

    def charge(self, request: Request, num_tokens: int) -> None:
        """Lower the credit of a request's fairness id, if anybody waits at its priority."""
        lanes = self._lanes.get(request.priority)
        if lanes is not None:
            lanes.setdefault(request.fairness_id, _Lane()).credit -= num_tokens
