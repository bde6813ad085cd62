"""The block pools of all head groups: a request allocates equally many blocks of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from mrv1.engine.block_pool import BlockPool
from mrv1.headwise import FULL, Visible

GIVEN_UP = -1  # a block id of a request: freed, as no head of the group sees it
GroupBlocks = Sequence[Sequence[int]]  # per head group, a request's block ids


class HeadPools:
    """A ``BlockPool`` for each head group; index or iterate it for the pools.

    A request's tokens are in the same logical blocks in every group, so it allocates equally many
    of each. Groups differ in the blocks that they free early: those that none of their heads sees.
    ``keeps``: the window and sink of each group, those without a window first.
    """

    def __init__(
        self, num_blocks: Sequence[int], block_size: int, keeps: Sequence[Visible] = (FULL,)
    ) -> None:
        self._pools = tuple([BlockPool(count) for count in num_blocks])
        self.keeps = tuple(keeps)
        self.block_size = block_size
        self.streaming = tuple(
            [(index, seen) for index, seen in enumerate(keeps) if not seen.is_full]
        )
        """(group, window and sink) of each group that frees blocks as its window moves."""

    def __getitem__(self, group: int) -> BlockPool:
        return self._pools[group]

    def __iter__(self) -> Iterator[BlockPool]:
        return iter(self._pools)

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can return now, of every group."""
        if len(self._pools) == 1:  # needed in every step
            return self._pools[0].num_free
        return min([pool.num_free for pool in self._pools])

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks of a group ``num_tokens`` tokens need."""
        return -(-num_tokens // self.block_size)

    def lacking(self, num_tokens: int, chunk: int) -> tuple[int, int] | None:
        """Return a group that is too small for a request of ``num_tokens``, and the blocks needed.

        A step computes ``chunk`` tokens of it at most. None = every group suffices.
        """
        num_blocks = self.blocks_for(num_tokens)
        for group, (pool, seen) in enumerate(zip(self._pools, self.keeps, strict=True)):
            needed = num_blocks
            if not seen.is_full:
                needed = min(num_blocks, seen.num_blocks(self.block_size, chunk))
            if needed > pool.num_blocks:
                return group, needed
        return None

    def allocate(self, count: int) -> list[tuple[int, ...]]:
        """Allocate ``count`` blocks of every group; all, or none with a CapacityError."""
        taken: list[tuple[int, ...]] = []
        try:
            for pool in self._pools:
                taken += [pool.allocate(count)]
        except BaseException:  # an interrupt, too
            for pool, blocks in zip(self._pools, taken, strict=False):
                pool.free(blocks)
            raise
        return taken

    def share(self, blocks: GroupBlocks) -> None:
        """Add one reference to each of ``blocks``, which ``find`` returned."""
        for pool, own in zip(self._pools, blocks, strict=True):
            pool.share(_held(own))

    def free(self, blocks: GroupBlocks, *, last_step: int | None) -> None:
        """Free the blocks of a request; see ``BlockPool.free``."""
        for pool, own in zip(self._pools, blocks, strict=True):
            # The last block is reused first: without its first block a prefix cannot be found.
            pool.free(_held(own)[::-1], last_step=last_step)

    def release(self, step: int) -> None:
        """End the quarantine of blocks whose last step is ``step`` or earlier."""
        for pool in self._pools:
            pool.release(step)

    def reset(self) -> None:
        """Make every block free, with no content: no request uses a block any more."""
        for pool in self._pools:
            pool.reset()

    def num_sole(self, blocks: GroupBlocks) -> npt.NDArray[np.int64]:
        """Return ``[groups]`` how many of a request's blocks no other request uses."""
        return np.array(
            [pool.num_sole(_held(own)) for pool, own in zip(self._pools, blocks, strict=True)],
            dtype=np.int64,
        )

    def cache(self, blocks: GroupBlocks, digests: Sequence[bytes], start: int, end: int) -> None:
        """Register the logical blocks ``[start, end)`` for ``find``, each under its digest."""
        for pool, own in zip(self._pools, blocks, strict=True):
            for block, digest in zip(own[start:end], digests[start:end], strict=True):
                if block != GIVEN_UP:
                    pool.cache(block, digest)

    def find(
        self, digests: Sequence[bytes], cut: Callable[[int], int] = lambda count: count
    ) -> list[list[int]]:
        """Return, per group, the blocks of the longest prefix that every group has.

        A group with a window needs only the blocks that the token after the prefix sees: the
        others are ``GIVEN_UP``. ``cut`` maps a number of blocks to the number, no larger, that a
        hit may have.
        """
        found: dict[int, list[int]] = {}
        for group, (pool, seen) in enumerate(zip(self._pools, self.keeps, strict=True)):
            if seen.is_full:
                found[group] = pool.find(digests)
                digests = digests[: len(found[group])]  # no hit is longer
        count = len(digests)
        # Usually the streaming groups have what the whole prefix needs, which is few blocks.
        if cut(count) < count or not all(
            self._is_hit(group, digests) for group, _ in self.streaming
        ):
            count = self._longest(digests, cut)
        for group, seen in self.streaming:
            gap, known = self._gap(seen, count), self._pools[group].known
            found[group] = known(digests[: gap.start]) + [GIVEN_UP] * len(gap)
            found[group] += known(digests[gap.stop : count])
        return [found[group][:count] for group in range(len(self._pools))]

    def _gap(self, seen: Visible, num_blocks: int) -> range:
        """Return the blocks of a prefix, between sink and window, that the next token sees not."""
        first = int(seen.first_live(num_blocks * self.block_size, self.block_size))
        sink = min(seen.sink_blocks(self.block_size), num_blocks)
        return range(sink, min(first, num_blocks))

    def _is_hit(self, group: int, digests: Sequence[bytes]) -> bool:
        """Return whether a streaming group has the blocks of a prefix that the next token sees."""
        gap = self._gap(self.keeps[group], len(digests))
        visible = [*digests[: gap.start], *digests[gap.stop :]]
        return GIVEN_UP not in self._pools[group].known(visible)

    def _longest(self, digests: Sequence[bytes], cut: Callable[[int], int]) -> int:
        """Return the length of the longest prefix that every streaming group has."""
        usable = np.ones(len(digests) + 1, dtype=np.bool_)
        """[len(digests) + 1] by number of blocks: whether every group has that prefix."""
        for group, seen in self.streaming:
            usable &= self._has_windows(self._pools[group].known(digests), seen)
        count = int(usable.nonzero()[0][-1])
        while (allowed := cut(count)) < count:
            count = int(usable[: allowed + 1].nonzero()[0][-1])
        return count

    def _has_windows(self, blocks: Sequence[int], seen: Visible) -> npt.NDArray[np.bool_]:
        """Return, by prefix length, whether sink and window are cached; -1 in ``blocks`` = not."""
        counts = np.arange(len(blocks) + 1)
        is_missing = np.array([0, *blocks]) == GIVEN_UP
        newest = np.maximum.accumulate(np.where(is_missing, counts, 0))
        """By prefix length: its last block that is not cached, counted from 1; 0 = all are."""
        has_sink = newest[np.minimum(counts, seen.sink_blocks(self.block_size))] == 0
        first = seen.first_live(counts * self.block_size, self.block_size)
        has_both: npt.NDArray[np.bool_] = has_sink & (newest <= first)
        return has_both

    def watch(self, digests: Sequence[bytes]) -> None:
        """Reset ``has_changed``, which then reports changes that may make ``lacks`` false."""
        for pool in self._pools:
            pool.watch(digests)

    @property
    def has_changed(self) -> bool:
        """Whether, since ``watch``, a block became free or ``find(digests)`` may differ."""
        return any(pool.has_changed for pool in self._pools)

    def lacks(self, blocks: GroupBlocks, num_tokens: int, end: int) -> bool:
        """Return whether a group has too few free blocks for a request that shares ``blocks``.

        A group of full heads needs blocks for all ``num_tokens`` known tokens. One with a window
        frees blocks as it moves: it needs them up to ``end``, the tokens computed after the step.
        """
        for pool, seen, own in zip(self._pools, self.keeps, blocks, strict=True):
            num_blocks = self.blocks_for(num_tokens if seen.is_full else end)
            # Usually there is room for all, whichever of its cached blocks count as free.
            if num_blocks > pool.num_free:
                num_evictable = pool.num_evictable(_held(own))
                if num_blocks - len(own) > pool.num_free - num_evictable:
                    return True
        return False

    def reset_cache(self) -> None:
        """Forget all content; see ``BlockPool.reset_cache``."""
        for pool in self._pools:
            pool.reset_cache()

    def give_up(self, group: int, blocks: list[int], start: int, end: int) -> None:
        """Free the logical blocks ``[start, end)`` of a request, which no step will read."""
        self._pools[group].free(blocks[start:end])
        blocks[start:end] = [GIVEN_UP] * (end - start)


def _held(blocks: Sequence[int]) -> Sequence[int]:
    """Return a request's blocks of a group without ``GIVEN_UP``, which is one run of entries."""
    num_gone = blocks.count(GIVEN_UP)
    if not num_gone:
        return blocks
    start = blocks.index(GIVEN_UP)
    return [*blocks[:start], *blocks[start + num_gone :]]
