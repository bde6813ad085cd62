"""Which KV blocks are free. Plain Python; knows nothing of the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from mrv1.errors import CapacityError


class BlockPool:
    """Blocks ``0 .. num_blocks - 1``, each free or held; what was freed first is reused first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can give now."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks that requests hold."""
        return len(self._held)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take ``count`` free blocks, all or none.

        Raises:
            CapacityError: fewer are free.
        """
        if count > len(self._free):
            raise CapacityError(
                f"block pool: expected {count} free blocks, got {len(self._free)} of "
                f"{self.num_blocks}; raise num_kv_blocks"
            )
        blocks = tuple(self._free.popleft() for _ in range(count))
        self._held.update(blocks)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give back ``blocks``, all or none.

        Raises:
            ValueError: a block is not held (freed twice, or never this pool's) or named twice.
        """
        given = tuple(blocks)
        foreign = sorted(set(given) - self._held)
        if foreign or len(set(given)) != len(given):
            raise ValueError(f"blocks: expected blocks held once, got {foreign or list(given)}")
        self._held.difference_update(given)
        self._free.extend(given)
