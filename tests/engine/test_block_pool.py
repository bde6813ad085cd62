"""BlockPool against plain sets and counts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mrv1.engine.block_pool import BlockPool
from mrv1.errors import CapacityError

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """Allocates, shares, caches, frees and ends steps at random."""

    holdings = Bundle("holdings")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: Counter[int] = Counter()
        self.quarantine: dict[int, int] = {}
        self.cached: dict[bytes, int] = {}
        self.newest_step = self.newest_over = 0
        self.used_until: dict[int, int] = {}
        """Per block still in use: the newest step in flight of the requests that freed it."""

    @property
    def num_free(self) -> int:
        return NUM_BLOCKS - len(+self.held) - len(self.quarantine)

    @rule(target=holdings, count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count):
        if count > self.num_free:
            with pytest.raises(CapacityError, match=f"expected {count} free blocks"):
                self.pool.allocate(count)
            return ()
        blocks = self.pool.allocate(count)
        assert len(blocks) == len(set(blocks)) == count
        assert not any(self.held[block] or block in self.quarantine for block in blocks)
        assert set(blocks) <= set(range(NUM_BLOCKS))
        self.cached = {d: b for d, b in self.cached.items() if b not in blocks}
        self.held.update(blocks)
        return blocks

    @rule(blocks=holdings, digest=st.integers(0, 5).map(lambda n: b"%d" % n))
    def cache(self, blocks, digest):
        if blocks and self.held[blocks[0]] and blocks[0] not in self.cached.values():
            self.pool.cache(blocks[0], digest)
            self.cached.setdefault(digest, blocks[0])

    @rule(target=holdings, digests=st.lists(st.integers(0, 5), unique=True, max_size=3))
    def share(self, digests):
        names = [b"%d" % n for n in digests]
        blocks = self.pool.find(names)
        expected = [self.cached.get(name) for name in names]
        assert blocks == expected[: len(blocks)]
        assert len(blocks) == len(expected) or expected[len(blocks)] is None
        evictable = [b for b in blocks if not self.held[b] and b not in self.quarantine]
        assert self.pool.num_evictable(blocks) == len(evictable)
        self.pool.share(blocks)
        self.held.update(blocks)
        for block in blocks:
            if block in self.quarantine:
                self.used_until[block] = self.quarantine.pop(block)
        return tuple(blocks)

    @rule(blocks=consumes(holdings), in_flight=st.booleans())
    def free(self, blocks, in_flight):
        self.newest_step += in_flight
        assert self.pool.num_sole(blocks) == sum(self.held[block] == 1 for block in blocks)
        self.pool.free(blocks, last_step=self.newest_step if in_flight else None)
        self.held.subtract(blocks)
        if in_flight:
            self.used_until |= dict.fromkeys(blocks, self.newest_step)
        gone = [block for block in blocks if not self.held[block]]
        for block in gone:
            if (step := self.used_until.pop(block, 0)) > self.newest_over:
                self.quarantine[block] = step
        if gone:
            with pytest.raises(ValueError, match="expected blocks in use, each listed once"):
                self.pool.free(blocks)

    @rule(lag=st.integers(0, 3))
    def release(self, lag):
        self.newest_over = max(self.newest_over, self.newest_step - lag)
        self.pool.release(self.newest_step - lag)
        self.quarantine = {b: s for b, s in self.quarantine.items() if s > self.newest_step - lag}

    @rule(chance=st.integers(0, 3))
    def reset_cache(self, chance):
        if chance == 0:
            self.pool.reset_cache()
            self.cached.clear()

    @invariant()
    def counts_agree(self):
        assert self.pool.num_held == len(+self.held)
        assert self.pool.num_quarantined == len(self.quarantine)
        assert self.pool.num_free == self.num_free
        assert self.pool.num_cached == len(self.cached)
        for digest, block in self.cached.items():
            assert self.pool.find([digest]) == [block]


TestPool = PoolMachine.TestCase


@pytest.mark.parametrize("blocks", [(7,), (3,), (-4,), (0, 0)])
def test_freeing_a_block_that_is_not_in_use_changes_nothing(blocks):
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(ValueError, match="expected blocks in use, each listed once"):
        pool.free(blocks)
    assert (pool.num_held, pool.num_free) == (1, 3)


def test_uncached_free_blocks_are_allocated_first_then_the_least_recently_used():
    pool = BlockPool(4)
    a, b, c = pool.allocate(3)
    pool.cache(a, b"a")
    pool.cache(b, b"b")
    pool.free([a, b])
    pool.share(pool.find([b"a"]))
    pool.free([a, c])  # a was used after b
    assert pool.allocate(2) == (3, c)
    assert pool.allocate(1) == (b,)
    assert (pool.find([b"a"]), pool.find([b"b"])) == ([a], [])


@pytest.mark.parametrize("is_shared_late", [False, True])
def test_a_block_is_quarantined_until_the_steps_of_all_its_former_requests_end(is_shared_late):
    """One request frees the block with its step 3 in flight, the other request with no step."""
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.cache(block, b"a")
    if not is_shared_late:
        pool.share([block])
    pool.free([block], last_step=3)
    if is_shared_late:  # out of quarantine
        pool.share([block])
    assert (pool.num_held, pool.num_quarantined) == (1, 0)
    pool.free([block])
    for step, num_free in ((2, 3), (3, 4)):
        pool.release(step)
        assert (pool.num_free, pool.num_quarantined) == (num_free, 4 - num_free)
    pool.share([block])
    pool.free([block])
    assert pool.num_free == 4, "step 3 is over"
