"""BlockPool against a set."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mrv1.engine.block_pool import BlockPool
from mrv1.errors import CapacityError

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """Allocates and frees at random; a set says what is held."""

    allocations = Bundle("allocations")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: set[int] = set()

    @rule(target=allocations, count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count):
        if count > NUM_BLOCKS - len(self.held):
            with pytest.raises(CapacityError, match=f"expected {count} free blocks"):
                self.pool.allocate(count)
            return ()
        blocks = self.pool.allocate(count)
        assert len(blocks) == len(set(blocks)) == count
        assert self.held.isdisjoint(blocks)
        assert set(blocks) <= set(range(NUM_BLOCKS))
        self.held |= set(blocks)
        return blocks

    @rule(blocks=consumes(allocations))
    def free(self, blocks):
        self.pool.free(blocks)
        self.held -= set(blocks)
        if blocks:
            with pytest.raises(ValueError, match="expected blocks held once"):
                self.pool.free(blocks)

    @invariant()
    def counts_agree(self):
        assert self.pool.num_held == len(self.held)
        assert self.pool.num_free == NUM_BLOCKS - len(self.held)


TestPool = PoolMachine.TestCase


@pytest.mark.parametrize("blocks", [(7,), (-1,), (0, 0)])
def test_freeing_what_is_not_held_changes_nothing(blocks):
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(ValueError, match="expected blocks held once"):
        pool.free(blocks)
    assert (pool.num_held, pool.num_free) == (1, 3)
