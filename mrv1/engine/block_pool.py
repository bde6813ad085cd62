"""Which KV blocks are free, in use, cached or quarantined. Pure host code."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import repeat

from mrv1.errors import CapacityError


class BlockPool:
    """Blocks ``0 .. num_blocks - 1`` with reference counts, a quarantine and a prefix cache.

    A block is *in use* while requests refer to it; otherwise it is

    - *free*: its content means nothing; the block that was freed first is reused first;
    - *cached*, hence evictable: the prefix cache knows its content, so that a request may share it
      again. It counts as free; the least recently used block is evicted when no block is free;
    - *quarantined*: a launched step may still read or write it. It can be shared if the prefix
      cache knows its content, but it cannot be allocated before ``release``.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.peak_held = 0  # most blocks that were in use at a time
        self.reset()

    def reset(self) -> None:
        """Make every block free, with no content: no request uses a block any more."""
        num_blocks = self.num_blocks
        self._num_refs = [0] * num_blocks
        self._evictable: OrderedDict[int, bytes] = OrderedDict()  # digests; oldest use first
        self._quarantine: dict[int, int] = {}  # block -> the step after which it may be allocated
        self._free = deque(range(num_blocks))  # last: no report counts a block as free twice
        self._used_until: dict[int, int] = {}  # block in use -> the newest step of a former user
        self._released = -1  # the newest step that is over
        self._cached: dict[bytes, int] = {}  # digest of a prefix -> the last block of the prefix
        self._digests: list[bytes | None] = [None] * num_blocks  # inverse of ``_cached``
        self.watch(())

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can return now: free and cached blocks."""
        return len(self._free) + len(self._evictable)

    @property
    def num_quarantined(self) -> int:
        """Blocks that no request uses and that become free once launched steps are over."""
        return len(self._quarantine)

    @property
    def num_held(self) -> int:
        """Blocks in use."""
        return self.num_blocks - self.num_free - self.num_quarantined

    @property
    def num_cached(self) -> int:
        """Blocks whose content the prefix cache knows, including blocks in use."""
        return len(self._cached)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Allocate ``count`` free or cached blocks; all, or none with a CapacityError."""
        if count > self.num_free:
            raise CapacityError(
                f"block pool: expected {count} free blocks, got {self.num_free} of "
                f"{self.num_blocks}; raise num_kv_blocks"
            )
        self.peak_held = max(self.peak_held, self.num_held + count)
        num_evicted = max(count - len(self._free), 0)
        taken = [self._free.popleft() for _ in range(count - num_evicted)]
        if num_evicted:
            taken += [self._evict() for _ in range(num_evicted)]
        blocks = tuple(taken)
        for block in blocks:
            self._num_refs[block] = 1
        return blocks

    def free(self, blocks: Sequence[int], *, last_step: int | None = None) -> None:
        """Drop one reference to each of ``blocks``, all or none.

        Args:
            blocks: in the order in which they should be reused or evicted.
            last_step: the newest step in which the request that frees them may use them; never
                decreases; None = no step. A block without references is quarantined until the last
                steps of all its former users are released.

        Raises:
            ValueError: a block is not in use (freed twice, or not of this pool) or listed twice.
        """
        foreign = [b for b in blocks if not 0 <= b < self.num_blocks or not self._num_refs[b]]
        if foreign or len(set(blocks)) != len(blocks):
            raise ValueError(
                f"blocks: expected blocks in use, each listed once, got {foreign or list(blocks)}"
            )
        for block in blocks:
            self._num_refs[block] -= 1
            if self._num_refs[block]:
                if last_step is not None:
                    self._used_until[block] = last_step
                continue
            former = self._used_until.pop(block, -1)
            step = former if last_step is None else last_step
            if step <= self._released:
                self._settle(block)
            else:
                self._quarantine[block] = step

    def release(self, step: int) -> None:
        """End the quarantine of blocks whose last step is ``step`` or earlier."""
        if step > self._released:
            self._released = step
        if not self._quarantine:
            return
        for block in [b for b, last_step in self._quarantine.items() if last_step <= step]:
            del self._quarantine[block]
            self._settle(block)

    def num_sole(self, blocks: Iterable[int]) -> int:
        """Return how many of ``blocks`` only one request uses, which frees them when it ends."""
        return sum(self._num_refs[block] == 1 for block in blocks)

    def cache(self, block: int, digest: bytes) -> None:
        """Make a block in use known by ``digest``, unless another block is known by it."""
        if digest not in self._cached:
            self._cached[digest] = block
            self._digests[block] = digest
            self.has_changed |= digest in self._watched

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of ``digests``."""
        return [*iter(map(self._cached.get, digests).__next__, None)]  # up to the first None

    def known(self, digests: Iterable[bytes]) -> list[int]:
        """Return the block of every digest, -1 where no block is known."""
        return [*map(self._cached.get, digests, repeat(-1))]

    def watch(self, digests: Iterable[bytes]) -> None:
        """Reset ``has_changed``; it then reports freed blocks and changes of ``find(digests)``."""
        self._watched = frozenset(digests)
        self.has_changed = False  # a block became free or cached, or ``find`` differs

    def num_evictable(self, blocks: Iterable[int]) -> int:
        """Return how many of ``blocks`` count as free, but would not once they are shared."""
        return sum(map(self._evictable.__contains__, blocks))

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of ``blocks``, which ``find`` returned."""
        num_refs, evict = self._num_refs, self._evictable.pop
        for block in blocks:
            if not num_refs[block] and evict(block, None) is None:
                self._used_until[block] = self._quarantine.pop(block)
            num_refs[block] += 1

    def reset_cache(self) -> None:
        """Forget all content: cached blocks become free, blocks in use stay in use."""
        for block in self._cached.values():
            self._digests[block] = None
        self._cached.clear()
        evictable = [*self._evictable]
        self._evictable.clear()  # first: no report counts a block as free twice
        self._free.extend(evictable)
        self.has_changed = True

    def _evict(self) -> int:
        block, digest = self._evictable.popitem(last=False)
        del self._cached[digest]
        self._digests[block] = None
        self.has_changed |= digest in self._watched
        return block

    def _settle(self, block: int) -> None:
        """Make a block that no request and no step uses free or cached."""
        self.has_changed = True
        digest = self._digests[block]
        if digest is None:
            self._free.append(block)
        else:
            self._evictable[block] = digest
