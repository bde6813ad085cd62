"""Requests that wait until a running request has computed the prefix that both have."""

from __future__ import annotations

from operator import eq

from mrv1.engine.request import Request
from mrv1.engine.slot_table import SlotTable

LEAST_SHARED_TOKENS = 256
"""Shared tokens for which a request waits. Fewer cost a step next to nothing: it reads the weights
once, which takes a GPU as long as the products of about so many tokens."""


class PrefixWaits:
    """Which blocks running requests compute, and which requests wait for them.

    A request waits once at most, for a running request of its own or a more urgent priority, which
    waits for none. It waits until the shared blocks are computed, or the other leaves.
    """

    def __init__(self, slots: SlotTable, block_size: int, least_tokens: int) -> None:
        self._slots = slots
        self._block_size = block_size
        self._least_blocks = max(-(-least_tokens // block_size), 1)
        self._computing: dict[bytes, Request] = {}  # digest of a block -> who computes it
        self._waiters: dict[Request, list[tuple[Request, int]]] = {}  # each with the tokens shared
        self._leaders: dict[Request, Request] = {}  # waiting request -> the one it waits for

    def __len__(self) -> int:
        return len(self._leaders)

    def __contains__(self, request: Request) -> bool:
        return request in self._leaders

    def num_before(self, request: Request) -> int:
        """Return how many of the requests that wait are at least as urgent as another one."""
        return sum(each.priority <= request.priority for each in self._leaders)

    def enter(self, request: Request, num_cached: int) -> None:
        """Note that an admitted request computes its known tokens from ``num_cached`` on."""
        digests = request.block_digests[num_cached // self._block_size :]
        if len(digests) >= self._least_blocks:
            self._computing |= dict.fromkeys(digests, request)

    def try_wait(self, request: Request, num_cached: int) -> bool:
        """Let a request wait if it shares a prefix that is being computed; return whether it does.

        The request could be admitted now, with ``num_cached`` tokens of its prefix.
        """
        num_usable = (request.num_tokens - 1) // self._block_size
        last = num_cached // self._block_size + self._least_blocks - 1
        if (
            request.has_waited
            or request.lacks_prompt_logprobs  # it shares no blocks
            or last >= min(num_usable, len(request.block_digests))
        ):
            return False
        leader = self._computing.get(request.block_digests[last])
        if leader is None or leader.priority > request.priority:
            return False
        # A digest covers all blocks before it: digests are equal up to the first that differ.
        own = request.block_digests[:num_usable]
        shared = sum(map(eq, own, leader.block_digests)) * self._block_size
        if self._slots.num_landed[leader.slot] >= shared:
            return False
        request.has_waited = True
        self._leaders[request] = leader
        self._waiters.setdefault(leader, []).append((request, shared))
        return True

    def remove(self, request: Request) -> None:
        """Forget a request that waits: it has ended."""
        leader = self._leaders.pop(request)
        self._waiters[leader] = [each for each in self._waiters[leader] if each[0] is not request]

    def computed(self) -> list[Request]:
        """Remove and return the requests whose shared blocks are computed by now, in order."""
        released = []
        for leader, waiters in tuple(self._waiters.items()):
            landed = int(self._slots.num_landed[leader.slot])
            released += [request for request, shared in waiters if shared <= landed]
            left = [each for each in waiters if each[1] > landed]
            if left:
                self._waiters[leader] = left
            else:
                del self._waiters[leader]
        for request in released:
            del self._leaders[request]
        return released

    def leave(self, leader: Request) -> list[Request]:
        """Forget a running request; remove and return the requests that wait for it, in order."""
        for digest in leader.block_digests if self._computing else ():
            if self._computing.get(digest) is leader:
                del self._computing[digest]
        released = [request for request, _ in self._waiters.pop(leader, ())]
        for request in released:
            del self._leaders[request]
        return released

    def reset(self) -> list[Request]:
        """Forget all blocks; remove and return all requests that wait, in order."""
        released = [*self._leaders]
        self._computing.clear()
        self._waiters.clear()
        self._leaders.clear()
        return released
