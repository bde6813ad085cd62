"""Address checks for the interpreter: stock, a kernel may touch any byte of the process."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import numpy as np

from mrv1.kernels._base.interpreter.internals import Array, Opaque, tensors_of, ti


def _storages(args: Iterable[object]) -> Iterator[tuple[int, int]]:
    """Yield (first byte, byte past the last) of every tensor among launch arguments."""
    for tensor in tensors_of(args):
        storage = tensor.untyped_storage()
        yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()


class _Ranges(threading.local):
    """The bytes that this thread's launch may touch."""

    value: Array = np.zeros((0, 2), dtype=np.uint64)


class CheckedMemory:
    """Stands in for the interpreter's memory module; refuses addresses outside the arguments."""

    def __init__(self, memory: Opaque) -> None:
        self._memory = memory
        self._ranges = _Ranges()

    def __getattr__(self, name: str) -> Opaque:
        return getattr(self._memory, name)

    def allow(self, args: Iterable[object]) -> None:
        """Make the storages of ``args`` the only readable and writable bytes."""
        ranges = sorted(set(_storages(args)))
        self._ranges.value = np.array(ranges, dtype=np.uint64).reshape(-1, 2)

    def load(self, pointers: Array, mask: Array, other: Array, dtype: Opaque) -> Opaque:
        """Load after a check."""
        self._check("load", pointers, mask, dtype.itemsize)
        return self._memory.load(pointers, mask, other, dtype)

    def store(self, pointers: Array, value: Array, mask: Array) -> Opaque:
        """Store after a check."""
        self._check("store", pointers, mask, value.dtype.itemsize)
        return self._memory.store(pointers, value, mask)

    def atomic_rmw(
        self, op: Opaque, pointers: Array, value: Array, mask: Array, sem: Opaque
    ) -> Opaque:
        """Read, modify and write after a check."""
        self._check("atomic", pointers, mask, value.dtype.itemsize)
        return self._memory.atomic_rmw(op, pointers, value, mask, sem)

    def atomic_cas(self, pointers: Array, expected: Array, value: Array, sem: Opaque) -> Opaque:
        """Compare and swap after a check."""
        self._check("atomic", pointers, np.ones((), dtype=bool), value.dtype.itemsize)
        return self._memory.atomic_cas(pointers, expected, value, sem)

    def _check(self, what: str, pointers: Array, mask: Array, itemsize: int) -> None:
        used = pointers[np.broadcast_to(mask, pointers.shape)]
        if not used.size:
            return
        ranges = self._ranges.value
        if len(ranges):
            row = np.searchsorted(ranges[:, 0], used, side="right") - 1
            end = ranges[np.maximum(row, 0), 1]
            outside = int(np.count_nonzero((row < 0) | (used + np.uint64(itemsize) > end)))
        else:
            outside = used.size
        if outside:
            raise IndexError(
                f"{what}: {outside} of {used.size} addresses outside every tensor argument, "
                f"program {ti.interpreter_builder.grid_idx}"
            )


class BoundedExecutor(ti.GridExecutor):  # type: ignore[misc]
    """Runs a grid with loads and stores confined to the launch's tensor arguments."""

    def _init_args_hst(self, args_dev: Opaque, kwargs: Opaque) -> Opaque:
        args, kwargs = super()._init_args_hst(args_dev, kwargs)
        ti._interpreter.allow((*args, *kwargs.values()))
        return args, kwargs
