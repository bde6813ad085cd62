"""The processes of ranks, as rank 0 starts, watches and ends them."""

from __future__ import annotations

import multiprocessing.process
import os
import signal
import socket
import struct
import time
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

import torch
import torch.multiprocessing

from mrv1.config import EngineConfig
from mrv1.errors import CapacityError, ConfigError, UnsupportedDeviceError
from mrv1.forks import keep_for_ever, tell_of_forks
from mrv1.headwise import HeadPolicy
from mrv1.models import ParallelContext
from mrv1.runner.model_runner import is_caused_by
from mrv1.runner.ranks.child import serve
from mrv1.runner.ranks.failure import PeerError, RankFailure
from mrv1.runner.ranks.groups import Gloo, open_store

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

TIMEOUT_SECONDS = 60.0
"""Longest wait of a rank for the other ranks within a step; one that takes longer hangs."""

START_SECONDS = 600.0
"""Longest wait for a rank to be ready, once rank 0 is: ranks load equal parts of the weights."""

REPORT_SECONDS = 2.0
"""Longest wait for the report of a failed rank, after another rank has noticed the failure."""

STOP_SECONDS = 5.0
"""Longest wait for a rank to end by itself when the runner is closed."""

_START_ERRORS = {
    each.__name__: each for each in (CapacityError, ConfigError, UnsupportedDeviceError)
}


class Member:
    """Another rank, as rank 0 sees it."""

    def __init__(self, rank: int, process: SpawnProcess, connection: Connection) -> None:
        self.rank, self.process, self.connection = rank, process, connection
        self._failure: RankFailure | None = None

    def await_ready(self, deadline: float) -> None:
        """Wait until the rank is ready, up to ``deadline`` on the clock of ``time.monotonic``.

        ConfigError, CapacityError, UnsupportedDeviceError, RuntimeError: it failed or was silent.
        """
        if not wait([self.connection], max(deadline - time.monotonic(), 0.0)):
            raise RuntimeError(
                f"tensor_parallel_size: rank {self.rank}: not ready within {START_SECONDS:g} s "
                "after rank 0"
            )
        failure = self.failure()
        if failure is not None:
            error = _START_ERRORS.get(failure.kind, RuntimeError)
            raise error(f"rank {self.rank}: {failure.message}")

    def failure(self) -> RankFailure | None:
        """Return why the rank has failed; None = it has not said so, and its process lives."""
        if self._failure is None and self.connection.poll():
            try:
                self._failure = self.connection.recv()
            except (EOFError, OSError):  # without a word
                self.process.join(REPORT_SECONDS)
                self._failure = RankFailure(
                    kind="", message=_exit_of(self.process.exitcode), is_of_peer=False
                )
        return self._failure

    def stop(self, seconds: float) -> None:
        """Let the rank end by itself, which it does when it waits for a call; else kill it."""
        self.connection.close()
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _exit_of(code: int | None) -> str:
    if code is None:
        return "its process closed its connection"
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return (
        f"its process ended with exit code {code} (see stderr; a script that is run as a file has "
        'to make the engine under `if __name__ == "__main__":`)'
    )


def _stop(members: Sequence[Member], seconds: float) -> None:
    """Stop all ranks; none has to wait until the one before it has ended."""
    for member in members:
        member.connection.close()
    for member in members:
        member.stop(seconds)


class Ranks:
    """The processes of all ranks but this one, 0; ``config`` has the checkpoint's directory."""

    def __init__(self, config: EngineConfig, head_policy: HeadPolicy | None) -> None:
        size = config.tensor_parallel_size
        self._gloo = Gloo(0, size, TIMEOUT_SECONDS)
        self._store = open_store(0, size)
        self._members: list[Member] = []
        self._finalizer = weakref.finalize(self, _stop, self._members, 0.0)
        tell_of_forks(self)
        spawn = torch.multiprocessing.get_context("spawn")  # a fork would share torch's threads
        num_threads = max(torch.get_num_threads() // size, 1)
        for rank in range(1, size):
            ours, theirs = spawn.Pipe()
            limit_sends(ours)
            process = spawn.Process(
                target=serve,
                args=(rank, config, head_policy, self._store.port, theirs, num_threads),
                kwargs={"timeout": TIMEOUT_SECONDS},
                name=f"mrv1-rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()  # so that the end of the process is the end of the connection
            self._members.append(Member(rank, process, ours))

    @property
    def context(self) -> ParallelContext:
        """Rank 0 and its collectives."""
        return self._gloo.context

    def connect(self) -> None:
        """Connect all ranks, once each has loaded its weights."""
        self.await_ready()
        self._gloo.connect(self._store)

    def await_ready(self) -> None:
        """Wait until every rank is ready, for ``START_SECONDS`` at most; raises as ``Member``."""
        deadline = time.monotonic() + START_SECONDS
        for member in self._members:
            member.await_ready(deadline)

    def send(self, name: str, *args: object) -> None:
        """Have every rank's runner call ``name``; OSError if a rank has ended or does not read."""
        for member in self._members:
            member.connection.send((name, args))

    def cause(self, error: BaseException) -> str:
        """Return why a call failed: the rank that failed first, and its error."""
        if not (is_caused_by(error, PeerError) or isinstance(error, OSError)):
            return f"rank 0: {error!r}"
        deadline = time.monotonic() + REPORT_SECONDS
        while True:
            failures = {member.rank: member.failure() for member in self._members}
            for rank, failure in failures.items():
                if failure is not None and not failure.is_of_peer:
                    return f"rank {rank}: {failure.message}"
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        silent = [str(rank) for rank, failure in failures.items() if failure is None]
        if silent:
            return f"rank {', '.join(silent)}: no answer within {TIMEOUT_SECONDS:g} s ({error})"
        return f"rank 0: {error}"

    def after_fork(self) -> None:
        """Leave the ranks to the parent of this process, a forked child.

        The child has copies of the connections, which would keep the ranks from noticing the
        parent's end, and the objects of threads that it does not have: it must not wait for these.
        """
        if self._finalizer.detach() is None:
            return
        for member in self._members:
            member.connection.close()
            multiprocessing.process._children.discard(member.process)  # type: ignore[attr-defined]
        keep_for_ever(self._store)
        self._gloo.leave()

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """End all ranks and wait, ``seconds`` before each is killed; harmless when repeated."""
        if self._finalizer.detach() is not None:
            _stop(self._members, seconds)
            self._gloo.close()
            del self._store


def limit_sends(connection: Connection) -> None:
    """Let ``send`` fail after a while if nobody reads, instead of waiting for ever."""
    seconds = struct.pack("ll", int(TIMEOUT_SECONDS), 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
