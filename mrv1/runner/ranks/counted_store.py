"""A store in which ranks meet that have done unlike numbers of exchanges before.

Torch's symmetric memory numbers its exchanges by a counter of the whole process: rank 0, which may
have had engines before, and a new rank would wait for keys of each other that never come.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]


class CountedStore(Store):
    """``store``, with keys "name/number/rank" numbered from the first number of each name on.

    ``wait`` fails after ``timeout``, unless it is given another.
    """

    def __init__(self, store: Store, timeout: timedelta) -> None:
        super().__init__()
        self._store, self._timeout = store, timeout
        self._firsts: dict[str, int] = {}

    def _key(self, key: str) -> str:
        name, *numbers = key.rsplit("/", 2)
        if len(numbers) < 2 or not numbers[0].isdecimal():
            return key
        number = int(numbers[0])
        return f"{name}/{number - self._firsts.setdefault(name, number)}/{numbers[1]}"

    def set(self, key: str, value: str) -> None:  # torch gives bytes, and its stores take them
        """Set a key."""
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        """Return the value of a key, once there is one."""
        return self._store.get(self._key(key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have a value."""
        self._store.wait([self._key(key) for key in keys], timeout or self._timeout)
