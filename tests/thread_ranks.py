"""Tensor-parallel ranks that are threads of one process: tests of what ranks compute are cheap."""

from __future__ import annotations

import os
import pickle
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from typing import TypeVar

import torch

from mrv1 import EngineConfig, HeadPolicy, ModelRunner
from mrv1.kernels._base.peers import PeerBuffer, PeerError
from mrv1.models import ModelConfig, ParallelContext
from mrv1.runner.follower import Follower
from mrv1.runner.ranks.child import make_call
from mrv1.runner.ranks.control import RankControl
from mrv1.runner.ranks.messages import Answer, Asked
from mrv1.runner.ranks.shared_memory import SharedMemory
from mrv1.sampler import LogitsProcessors

Result = TypeVar("Result")

TIMEOUT_SECONDS = 60


class Meeting:
    """Collectives of threads: each gives its tensor, and takes those of all."""

    def __init__(self, size: int, *, has_peers: bool = True) -> None:
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_SECONDS)
        self.aborted = torch.zeros(1, dtype=torch.int32)
        """What waiting ops look at; see ``PeerMemory.abort``."""
        self._given: list[torch.Tensor | None] = [None] * size
        self.contexts = [
            ParallelContext(
                rank=rank,
                size=size,
                all_reduce=lambda tensor, rank=rank: reduce(
                    torch.add, self.exchange(rank, tensor.clone())
                ),
                all_gather=lambda tensor, rank=rank: torch.cat(
                    self.exchange(rank, tensor.clone()), -1
                ),
                peers=ThreadPeers(self, rank, size) if has_peers else None,
            )
            for rank in range(size)
        ]

    def abort(self) -> None:
        """End the waits of all threads, now and later, with an error."""
        self.aborted.fill_(1)
        self.barrier.abort()

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Give a tensor, and return those of all ranks."""
        self._given[rank] = tensor
        try:
            self.barrier.wait()
            taken = [*self._given]
            self.barrier.wait()  # nobody gives the next one before all have taken this one
        except threading.BrokenBarrierError as error:
            raise PeerError("another thread has ended") from error
        return taken


class ThreadPeers:
    """``PeerMemory`` of one thread: all ranks have the same address space."""

    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self.rank, self.size, self.abort = rank, size, meeting.aborted
        self._meeting = meeting

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> PeerBuffer:
        own = torch.zeros(shape, dtype=dtype)
        return PeerBuffer(self.rank, tuple(self._meeting.exchange(self.rank, own)))


def on_ranks(
    size: int, function: Callable[[ParallelContext], Result], *, has_peers: bool = True
) -> list[Result]:
    """Return what ``function`` returns for each rank; without peers it has collectives alone."""
    if size == 1:
        return [function(ParallelContext())]
    meeting = Meeting(size, has_peers=has_peers)

    def run(context: ParallelContext) -> Result:
        try:
            return function(context)
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [each.result() for each in [pool.submit(run, c) for c in meeting.contexts]]


class ThreadMemory:
    """``HostMemory`` of one thread: all ranks have the same buffers, in order of their calls."""

    _lock = threading.Lock()

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self._buffers, self._count = buffers, 0

    def zeros(self, *shape: int) -> torch.Tensor:
        with self._lock:
            if self._count == len(self._buffers):
                self._buffers.append(torch.zeros(shape, dtype=torch.int32))
            self._count += 1
            buffer = self._buffers[self._count - 1]
        assert buffer.shape == shape
        return buffer


class ThreadRanks:
    """Stands in for ``processes.Ranks``; what is sent is pickled as for a process."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        head_policy: HeadPolicy | None,
        devices: Sequence[torch.device],
        *,
        has_processors: bool,
    ) -> None:
        size = len(devices)
        self.failure: str | None = None
        self._meeting = Meeting(size)
        self._memory: list[torch.Tensor] = []
        self.memory = ThreadMemory(self._memory)
        self._calls = [queue.Queue() for _ in range(1, size)]
        self._answers = [queue.Queue() for _ in range(1, size)]
        self._errors: list[BaseException] = []
        self._started = threading.Semaphore(0)
        self.runners: dict[int, ModelRunner] = {}
        """The other ranks' runners, by rank."""
        given = {"model_config": model_config, "head_policy": head_policy}
        self._threads = [
            threading.Thread(
                target=partial(self._serve, rank, config, has_processors, **given), daemon=True
            )
            for rank in range(1, size)
        ]
        for thread in self._threads:
            thread.start()

    def _serve(
        self, rank: int, config: EngineConfig, has_processors: bool, **given: object
    ) -> None:
        context, calls = self._meeting.contexts[rank], self._calls[rank - 1]
        try:
            runner = self.runners[rank] = ModelRunner(
                config,
                **given,
                logits_processors=LogitsProcessors((), are_elsewhere=has_processors),
                parallel=context,
                memory=ThreadMemory(self._memory),
                progress=False,
            )
            follower = Follower(runner)
            self._started.release()
            control = RankControl(runner)
            while (message := calls.get()) is not None:
                if isinstance(message, SharedMemory):
                    control.attach(message)
                elif (answer := make_call(control, follower, pickle.loads(message))) is not None:
                    self._answers[rank - 1].put(pickle.dumps(answer))
        except BaseException as error:
            self._errors.append(error)
            self._meeting.abort()
            self._started.release()
            self._answers[rank - 1].put(None)

    @property
    def context(self) -> ParallelContext:
        return self._meeting.contexts[0]

    def connect(self) -> None: ...

    def start_watch(self) -> None: ...

    def await_ready(self) -> None:
        for _ in self._threads:
            self._started.acquire()
        if self._errors:
            raise self._errors[0]

    def send(self, name: str, *args: object) -> None:
        for calls in self._calls:
            calls.put(pickle.dumps((name, args)))

    def ask(self, asked: Asked) -> None:
        for calls in self._calls:
            calls.put(pickle.dumps(asked))

    def answers(self) -> list[Answer]:
        answers = [answers.get(timeout=TIMEOUT_SECONDS) for answers in self._answers]
        if None in answers:
            raise PeerError("another thread has ended")
        return [pickle.loads(answer) for answer in answers]

    def share(self, fd: int) -> None:
        for calls in self._calls:
            calls.put(SharedMemory(os.dup(fd)))

    def describe(self) -> str:
        return "threads"

    def waiting(self, what: str, timeout: float | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def end(self, error: BaseException) -> str:
        if self.failure is None:
            self.failure = "; ".join(map(repr, self._errors or [error]))
            self._meeting.abort()
            self._join()
        return self.failure

    def close(self) -> None:
        if self.failure is None:
            self._join()

    def _join(self) -> None:
        for calls in self._calls:
            calls.put(None)
        for thread in self._threads:
            thread.join(TIMEOUT_SECONDS)
