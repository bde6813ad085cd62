"""A thread that ends what waits for a rank that has died or hangs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple, Protocol

from mrv1.kernels._base.peers import PeerError

TICK_SECONDS = 0.1
"""How often the thread looks."""


class Watched(Protocol):
    """The ranks, as the thread sees them."""

    def any_has_ended(self) -> bool:
        """Return whether a rank's process has ended."""

    def end(self, error: BaseException) -> object:
        """End all ranks, and the kernels of this process that wait for them."""


class Wait(NamedTuple):
    """What rank 0 waits for, and how long at most."""

    what: str
    timeout: float


class Watch:
    """Ends the ranks once one of them has ended, or rank 0 waits too long for its GPU.

    Its kernels wait for those of the others, and so may a launch. A wait counts its seconds in
    looks of the thread: a process that is suspended does not wait. Between waits the thread looks
    once ``looks_always`` is set: an error of the start is told by the rank itself.
    """

    def __init__(self, ranks: Watched) -> None:
        self.looks_always = False
        self._wait: Wait | None = None
        self._stopped = threading.Event()
        target, ranks_of = self._run, weakref.ref(ranks)
        self._thread = threading.Thread(target=target, args=(ranks_of,), daemon=True)
        self._thread.start()

    def begin(self, what: str, timeout: float) -> Wait | None:
        """End the ranks unless ``end_wait`` is called within ``timeout`` seconds.

        Return the wait within which this one is, None = it is within none.
        """
        outer, self._wait = self._wait, Wait(what, timeout)
        return outer

    def end_wait(self, outer: Wait | None) -> None:
        """End the wait of ``begin``, and go on with the outer one."""
        self._wait = outer

    def stop(self) -> None:
        """End the thread, which may call this itself."""
        self._stopped.set()

    def _run(self, ranks_of: Callable[[], Watched | None]) -> None:
        last, looks = None, 0
        while not self._stopped.wait(TICK_SECONDS):
            ranks, current = ranks_of(), self._wait
            if ranks is None:
                return
            looks = looks + 1 if current is last else 0
            last = current
            if current is None and not self.looks_always:
                continue
            what = "between steps" if current is None else current.what
            if ranks.any_has_ended():
                if not self._stopped.is_set():
                    ranks.end(PeerError(f"{what}: a rank has ended"))
                return
            if current is not None and looks * TICK_SECONDS > current.timeout:
                ranks.end(
                    PeerError(f"{what}: rank 0 has waited {current.timeout:g} s for its GPU")
                )
                return
