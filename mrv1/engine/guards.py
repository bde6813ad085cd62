"""Decorators that keep an object consistent under interrupts and calls of several threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from mrv1.errors import ConfigError, RequestError
from mrv1.forks import tell_of_forks

P = ParamSpec("P")
R = TypeVar("R")
GIVE_WAY_SECONDS = 50e-6  # wakes up a thread that waits for the lock

WITHIN = (
    "LLM: expected no call from within another call in the same thread (in a callback or a signal "
    "handler), got one"
)


class Recoverable(Protocol):
    """An object whose methods may end anywhere: KeyboardInterrupt comes between any two lines."""

    _is_changing: bool  # a change has begun, and may be half done by an interrupt

    def _recover(self, error: BaseException) -> None:
        """Make the state consistent; called again if the recovery is interrupted."""


Object = TypeVar("Object", bound=Recoverable)


def recovers(method: Callable[Concatenate[Object, P], R]) -> Callable[Concatenate[Object, P], R]:
    """Make a method leave its object consistent: changed completely, or recovered.

    A ``RequestError`` or ``ConfigError`` means that nothing was changed. After any other exception
    the object recovers at once; if the recovery is interrupted, the next call recovers first.
    """

    @wraps(method)
    def guarded(self: Object, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._is_changing:
            self._recover(RuntimeError("interrupted"))
        self._is_changing = True
        try:
            result = method(self, *args, **kwargs)
        except (RequestError, ConfigError):
            self._is_changing = False
            raise
        except BaseException as error:
            self._recover(error)
            self._is_changing = False
            raise
        self._is_changing = False
        return result

    return guarded


class Turns:
    """Lets one thread at a time call an object.

    Waiting threads go before one that has just had its turn. An interrupt does no harm: ``with``
    takes and releases the lock, and a thread wrongly listed as waiting only costs the others
    ``GIVE_WAY_SECONDS`` per turn. A forked child starts without turns.
    """

    def __init__(self) -> None:
        self.after_fork()
        tell_of_forks(self)

    def after_fork(self) -> None:
        """Forget who has a turn and who waits."""
        self._lock = threading.RLock()  # a plain lock would block a nested call for ever
        self._owner: int | None = None
        self._waiting: set[int] = set()
        self.reports = threading.RLock()  # for calls that only read, and take no turn
        self.is_reporting = False  # whether the thread that holds ``reports`` reads now

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread has its turn now, for example in a callback."""
        return self._owner == threading.get_ident()

    def take(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result of ``call`` in a turn of this thread; a RuntimeError if it has one."""
        thread = threading.get_ident()
        if self._waiting:
            time.sleep(GIVE_WAY_SECONDS)
        self._waiting.add(thread)
        try:
            with self._lock:
                self._waiting.discard(thread)
                if self._owner is not None:
                    raise RuntimeError(WITHIN)
                self._owner = thread
                try:
                    return call(*args, **kwargs)
                finally:
                    self._owner = None
        finally:
            self._waiting.discard(thread)


class TakesTurns(Protocol):
    """An object whose methods run one at a time."""

    _turns: Turns


Shared = TypeVar("Shared", bound=TakesTurns)


def in_turn(method: Callable[Concatenate[Shared, P], R]) -> Callable[Concatenate[Shared, P], R]:
    """Make a method wait until no other thread runs an ``in_turn`` method of the object."""

    @wraps(method)
    def waiting(self: Shared, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._turns.take(method, self, *args, **kwargs)

    return waiting


def reports(method: Callable[Concatenate[Shared, P], R]) -> Callable[Concatenate[Shared, P], R]:
    """Make a reading method hold ``Turns.reports`` and take no turn: it waits for no step."""

    @wraps(method)
    def reading(self: Shared, /, *args: P.args, **kwargs: P.kwargs) -> R:
        turns = self._turns
        with turns.reports:
            outer, turns.is_reporting = turns.is_reporting, True
            try:
                return method(self, *args, **kwargs)
            finally:
                turns.is_reporting = outer

    return reading
