"""The processes of ranks, as rank 0 starts, watches and ends them."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from pathlib import Path

import torch

from mrv1.config import EngineConfig
from mrv1.device import reach_each_other
from mrv1.environment import child_environment, module_paths
from mrv1.errors import CapacityError, ConfigError, UnsupportedDeviceError
from mrv1.forks import tell_of_forks
from mrv1.headwise import HeadPolicy
from mrv1.kernels._base.peers import PeerError
from mrv1.models import ModelConfig, ParallelContext
from mrv1.runner.model_runner import is_caused_by
from mrv1.runner.ranks.groups import open_store
from mrv1.runner.ranks.links import Links
from mrv1.runner.ranks.mailbox import BY_CONNECTION, Mailbox, mailbox_words
from mrv1.runner.ranks.messages import CALL_SECONDS, Answer, Asked, RankFailure, RankStart
from mrv1.runner.ranks.shared_memory import SharedMemory
from mrv1.runner.ranks.watch import Watch

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 60.0
"""Longest wait of a rank for the other ranks within a step; one that takes longer hangs."""

START_SECONDS = 600.0
"""Longest wait for a rank to be ready, once rank 0 is: ranks load equal parts of the weights."""

REPORT_SECONDS = 2.0
"""Longest wait for the report of a failed rank, after another rank has noticed the failure."""

STOP_SECONDS = 5.0
"""Longest wait for a rank to end by itself when the runner is closed."""

_MAIN = str(Path(__file__).with_name("__main__.py"))
"""Run as a file: the packages of a module, and torch, would be imported before it."""

_START_ERRORS = {
    each.__name__: each for each in (CapacityError, ConfigError, UnsupportedDeviceError)
}


class Member:
    """Another rank, as rank 0 sees it."""

    def __init__(
        self, rank: int, process: subprocess.Popen[bytes], connection: Connection
    ) -> None:
        self.rank, self.process, self.connection = rank, process, connection
        self._failure: RankFailure | None = None

    @classmethod
    def start(cls, start: RankStart) -> Member:
        """Start the process of a rank, which reads ``start`` and serves."""
        ours, theirs = Pipe()
        limit_sends(ours)
        of_main_thread = ["main"] if threading.current_thread() is threading.main_thread() else []
        with theirs:  # closed here, so that the end of the process is the end of the connection
            process = subprocess.Popen(
                [sys.executable, "-P", _MAIN, str(theirs.fileno()), *of_main_thread],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), start.memory),
                start_new_session=True,  # the terminal's Ctrl-C is for rank 0 alone
                env=child_environment(PYTHONPATH=_python_path()),
            )
        member = cls(start.rank, process, ours)
        try:
            ours.send(start)
        except BaseException:
            member.stop(0.0)
            raise
        return member

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
        if self._failure is None:
            try:
                message = self.connection.recv() if self.connection.poll() else None
                if not isinstance(message, Answer):  # of a call that has failed on another rank
                    self._failure = message
            except (EOFError, OSError):  # without a word
                message = "its process closed its connection"
                with suppress(subprocess.TimeoutExpired):
                    message = _exit_of(self.process.wait(REPORT_SECONDS))
                self._failure = RankFailure(kind="", message=message, is_of_peer=False)
        return self._failure

    def answer(self, deadline: float) -> Answer:
        """Wait for the answer to a call; PeerError: the rank failed, or was silent until then."""
        if not wait([self.connection], max(deadline - time.monotonic(), 0.0)):
            raise PeerError(f"expected an answer within {CALL_SECONDS:g} s, got none")
        try:
            message = self.connection.recv()
        except (EOFError, OSError):  # ``failure`` says why
            message = None
        if isinstance(message, Answer):
            return message
        self._failure = message
        raise PeerError("expected an answer, got the end of the rank")

    def stop(self, seconds: float) -> None:
        """Let the rank end by itself, which it does when it waits for a call; else kill it."""
        self.connection.close()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def leave(self) -> None:
        """Leave the rank to the parent of this process, a forked child."""
        self.connection.close()
        self.process.returncode = 0  # it is no child of this process, which cannot wait for it


def _python_path() -> str:
    """Return the variable with which a child finds every module where this process does."""
    root = str(Path(__file__).resolve().parents[3])
    paths = module_paths()
    return os.pathsep.join(paths if root in paths else [root, *paths])


def _exit_of(code: int) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code} (see stderr)"


def _stop(watch: Watch | None, members: Sequence[Member], seconds: float) -> None:
    """Stop all ranks; none has to wait until the one before it has ended.

    The watch, if any, ends first: it would take the ranks' ends for failures.
    """
    if watch is not None:
        watch.stop()
    for member in members:
        member.connection.close()
    for member in members:
        member.stop(seconds)


class Ranks:
    """The processes of all ranks but this one, 0, and this one's links with them.

    ``config`` and ``model_config`` are those of ``read_config``, ``devices`` the device of each
    rank; ``has_processors`` says whether this rank has custom logits processors.

    UnsupportedDeviceError: as ``reach_each_other``.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        head_policy: HeadPolicy | None,
        devices: Sequence[torch.device],
        *,
        has_processors: bool,
    ) -> None:
        size, on_gpus = len(devices), devices[0].type == "cuda"
        has_peers = on_gpus and reach_each_other(devices)
        if on_gpus and not has_peers:
            logger.warning(
                "tensor_parallel_size: some of these %d GPUs cannot read and write each other's "
                "memory (peer access): NCCL adds up and gathers, which takes longer", size
            )  # fmt: skip
        store = open_store(0, size)
        self.links = Links(
            0,
            devices,
            store,
            has_peers=has_peers,
            meet=self.await_ready,
            timeout=TIMEOUT_SECONDS,
        )
        self.memory = SharedMemory(os.memfd_create("mrv1-ranks"), devices[0])
        """Where this rank writes uploads for the kernels of all."""
        self._mailbox = Mailbox(self.memory.zeros(mailbox_words(size)))
        self.failure: str | None = None
        """Why no rank runs any more; None = all run."""
        self._lock = threading.Lock()
        self._watch = Watch(self) if needs_watch(devices[0]) else None
        self._members: list[Member] = []
        self._finalizer = weakref.finalize(self, _stop, self._watch, self._members, 0.0)
        tell_of_forks(self)
        num_threads = max(torch.get_num_threads() // size, 1)
        for rank in range(1, size):
            start = RankStart(
                rank=rank,
                config=config,
                model_config=model_config,
                head_policy=head_policy,
                has_peers=has_peers,
                has_processors=has_processors,
                port=store.port,
                memory=self.memory.fd,
                num_threads=num_threads,
                timeout=TIMEOUT_SECONDS,
            )
            self._members.append(Member.start(start))

    @property
    def context(self) -> ParallelContext:
        """Rank 0, its collectives and its peers' memory."""
        return self.links.context

    def describe(self) -> str:
        """Return by what the ranks reach each other."""
        return self.links.describe()

    def connect(self) -> None:
        """Connect all ranks, once each has loaded its weights."""
        self.links.connect()

    def await_ready(self) -> None:
        """Wait until every rank is ready, for ``START_SECONDS`` at most; raises as ``Member``."""
        deadline = time.monotonic() + START_SECONDS
        for member in self._members:
            member.await_ready(deadline)

    def send(self, name: str, *args: object) -> None:
        """Have every other rank's follower call ``name``; OSError: one has ended or reads not."""
        self._say((name, args))

    def _say(self, message: object) -> None:
        pickled = pickle.dumps(message)
        self._mailbox.post(BY_CONNECTION)
        for member in self._members:
            member.connection.send_bytes(pickled)

    def replay(self, number: int) -> None:
        """Have every other rank launch the graph of a number; OSError as ``send``."""
        if self._mailbox.any_sleeps:  # it waits for its connection
            self.send("replay", number)
        else:
            self._mailbox.post(number)

    def ask(self, asked: Asked) -> None:
        """Have every rank make a call and answer it; OSError as ``send``."""
        self._say(asked)

    def answers(self) -> list[Answer]:
        """Wait for the answers in the order of the ranks; PeerError: a rank has failed."""
        deadline = time.monotonic() + CALL_SECONDS
        return [member.answer(deadline) for member in self._members]

    def share(self, fd: int) -> None:
        """Let every rank attach the memory of a file descriptor; OSError as ``send``."""
        self._say(None)
        for member in self._members:
            send_handle(member.connection, fd, member.process.pid)

    @contextmanager
    def waiting(self, what: str, timeout: float | None = None) -> Iterator[None]:
        """Let this rank's GPU wait for the others' in the body; PeerError: a rank failed.

        ``timeout`` is in seconds, None = ``TIMEOUT_SECONDS``.
        """
        if self._watch is None:
            yield
            return
        outer = self._watch.begin(what, TIMEOUT_SECONDS if timeout is None else timeout)
        is_interrupt = False
        try:
            yield
        except BaseException as error:
            is_interrupt = not isinstance(error, Exception)
            raise
        finally:
            self._watch.end_wait(outer)
            with self._lock:  # a failure that is being looked into
                failure = self.failure
            if failure is not None and not is_interrupt:
                raise PeerError(f"tensor_parallel_size: {failure}")

    def start_watch(self) -> None:
        """End all ranks as soon as one has ended, from now on, when all have started."""
        if self._watch is not None:
            self._watch.looks_always = True

    def any_has_ended(self) -> bool:
        """Return whether a rank's process has ended."""
        return any(member.process.poll() is not None for member in self._members)

    def end(self, error: BaseException) -> str:
        """End all ranks after a call of this one that failed; return why, the first time."""
        with self._lock:
            if self.failure is None:
                is_interrupt = not isinstance(error, Exception)
                try:
                    self.failure = f"rank 0: {error!r}" if is_interrupt else self._cause(error)
                except BaseException as interrupt:
                    self.failure = f"rank 0: {interrupt!r}"
                    raise
                finally:
                    self.links.abort()
                    self.stop(0.0)
            return self.failure

    def _cause(self, error: BaseException) -> str:
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
            return f"rank {', '.join(silent)}: no answer ({error})"
        return f"rank 0: {error}"

    def after_fork(self) -> None:
        """Leave the ranks to the parent of this process, a forked child.

        The child has copies of the connections, which would keep the ranks from noticing the
        parent's end, and the objects of threads that it does not have: it must not wait for these.
        """
        if self._finalizer.detach() is None:
            return
        for member in self._members:
            member.leave()
        self.memory.leave()
        self.links.leave()

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """End all ranks and wait, ``seconds`` before each is killed; harmless when repeated."""
        if self._finalizer.detach() is not None:
            _stop(self._watch, self._members, seconds)

    def close(self) -> None:
        """Stop, and close the links, once no CUDA graph of this rank is left."""
        self.stop()
        self.links.close()
        self.memory.close()


def needs_watch(device: torch.device) -> bool:
    """Return whether rank 0 may wait on a device for a rank that has failed.

    Not on a CPU, where its collectives fail by themselves.
    """
    return device.type != "cpu"


def limit_sends(connection: Connection) -> None:
    """Let ``send`` fail after a while if nobody reads, instead of waiting for ever."""
    seconds = struct.pack("ll", int(TIMEOUT_SECONDS), 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
