"""Forked children of a process with engines: what they have no copy of, and must not touch."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """An object that may exist when its process forks."""

    def after_fork(self) -> None:
        """Adapt to the child, where only the thread that forked goes on."""


_OBJECTS: weakref.WeakSet[Forkable] = weakref.WeakSet()


def tell_of_forks(forkable: Forkable) -> None:
    """Have ``after_fork`` called in every forked child, before anything else runs there."""
    _OBJECTS.add(forkable)


def keep_for_ever(parents: object) -> None:
    """Let nothing destroy an object, whose end would wait for threads or a GPU of the parent."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(parents))


def _tell_all() -> None:
    for forkable in _OBJECTS:
        forkable.after_fork()


os.register_at_fork(after_in_child=_tell_all)
