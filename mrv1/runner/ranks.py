"""A runner whose model is spread over several processes of one host: tensor-parallel ranks.

Rank 0, the process of the engine, sends the calls of its runner to the others. All compute the
same logits from the parts that they gather, and draw the same tokens. A rank that fails, dies or
does not answer ends them all: the others are at another point of the step.
"""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import signal
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.multiprocessing

from mrv1.config import EngineConfig, checkpoint_dir
from mrv1.device import resolve_device
from mrv1.errors import CapacityError, ConfigError, RequestError, StepError, UnsupportedDeviceError
from mrv1.forks import keep_for_ever, tell_of_forks
from mrv1.headwise import HeadPolicy
from mrv1.models import DecoderModel, ModelConfig, NamedTensors, ParallelContext
from mrv1.multimodal import MultimodalItem
from mrv1.runner.async_output import AsyncOutput
from mrv1.runner.kv_listener import KVListener
from mrv1.runner.model_runner import FORKED, ModelRunner, is_caused_by
from mrv1.runner.step import SlotRequest, StepPlan
from mrv1.sampler import LogitsProcessor, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.context import SpawnProcess

    from torch.distributed import ProcessGroup, TCPStore  # type: ignore[attr-defined]

HOST = "127.0.0.1"
"""Where the ranks listen: they are processes of one host."""

TIMEOUT_SECONDS = 60.0
"""Longest wait of a rank for the other ranks within a step; one that takes longer hangs."""

START_SECONDS = 600.0
"""Longest wait for a rank to be ready, once rank 0 is: ranks load equal parts of the weights."""

REPORT_SECONDS = 2.0
"""Longest wait for the report of a failed rank, after another rank has noticed the failure."""

STOP_SECONDS = 5.0
"""Longest wait for a rank to end by itself when the runner is closed."""

PARAMS = fields(SamplingParams)

_START_ERRORS = {
    each.__name__: each for each in (CapacityError, ConfigError, UnsupportedDeviceError)
}

Result = TypeVar("Result")


class PeerError(RuntimeError):
    """A collective failed, because another rank has ended or does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """What a rank sends to rank 0 before it ends."""

    kind: str
    message: str
    is_of_peer: bool
    """Whether another rank is the cause."""

    @classmethod
    def of(cls, error: BaseException) -> RankFailure:
        """Return the report of an error."""
        kind, message = type(error).__name__, str(error) or repr(error)
        return cls(kind=kind, message=message, is_of_peer=is_caused_by(error, PeerError))


class Gloo:
    """The collectives of a rank, a gloo group of its own; they fail after ``timeout`` seconds."""

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self._timeout = rank, size, timedelta(seconds=timeout)
        self._group: ProcessGroup | None = None

    def connect(self, store: TCPStore) -> None:
        """Connect to the other ranks, which all have to call this."""
        from torch.distributed import ProcessGroupGloo  # not every build of torch has it

        try:
            group = ProcessGroupGloo(store, self.rank, self.size, self._timeout)
        except RuntimeError as error:
            raise PeerError(f"gloo: expected {self.size} ranks, got {error}") from error
        self._group = cast("ProcessGroup", group)  # a backend's own stub lacks its collectives

    def close(self) -> None:
        """Close the connections."""
        self._group = None

    def leave(self) -> None:
        """Leave the connections to the parent of this process, a forked child."""
        keep_for_ever(self._group)
        self._group = None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, which replaces ``tensor``."""
        with self._joined() as group:
            group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, one behind the other along the last dimension."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._joined() as group:
            group.allgather([parts], [tensor]).wait()
        return torch.cat(parts, dim=-1)

    @contextlib.contextmanager
    def _joined(self) -> Iterator[ProcessGroup]:
        if self._group is None:
            raise PeerError("gloo: expected connected ranks, got none")
        try:
            yield self._group
        except RuntimeError as error:
            raise PeerError(str(error)) from error

    @property
    def context(self) -> ParallelContext:
        """This rank and its collectives."""
        return ParallelContext(
            rank=self.rank, size=self.size, all_reduce=self.all_reduce, all_gather=self.all_gather
        )


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
        self._store = _store(0, size)
        self._members: list[Member] = []
        self._finalizer = weakref.finalize(self, _stop, self._members, 0.0)
        tell_of_forks(self)
        spawn = torch.multiprocessing.get_context("spawn")  # a fork would share torch's threads
        num_threads = max(torch.get_num_threads() // size, 1)
        for rank in range(1, size):
            ours, theirs = spawn.Pipe()
            _limit_sends(ours)
            process = spawn.Process(
                target=_serve,
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


def _store(port: int, size: int) -> TCPStore:
    """Return the store by which ranks find each other: rank 0's at ``port``; 0 = a new one."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(HOST, port, size, is_master=port == 0, wait_for_workers=False)


def _limit_sends(connection: Connection) -> None:
    """Let ``send`` fail after a while if nobody reads, instead of waiting for ever."""
    seconds = struct.pack("ll", int(TIMEOUT_SECONDS), 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)


def _serve(
    rank: int,
    config: EngineConfig,
    head_policy: HeadPolicy | None,
    port: int,
    connection: Connection,
    num_threads: int,
    *,
    timeout: float,
) -> None:
    """Run a rank until rank 0 closes the connection: the main function of its process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which then ends this one
    torch.set_num_threads(num_threads)
    size = config.tensor_parallel_size
    gloo = Gloo(rank, size, timeout)
    try:
        runner = ModelRunner(
            config, head_policy=head_policy, parallel=gloo.context, allocates=False, progress=False
        )
        connection.send(None)
        gloo.connect(_store(port, size))
        runner.allocate_kv_cache(progress=False)
        connection.send(None)
        while True:
            try:
                name, args = connection.recv()
            except EOFError:
                return
            make_call(runner, name, *args)
    except BaseException as error:
        with contextlib.suppress(OSError):  # rank 0 has ended
            connection.send(RankFailure.of(error))
        sys.exit(1)


def make_call(runner: ModelRunner, name: str, *args: object) -> None:
    """Make rank 0's call on another rank's runner; raise even if only the step's result fails."""
    output = getattr(runner, name)(*args)
    if isinstance(output, AsyncOutput):
        output.result()


def _sendable(plan: StepPlan) -> StepPlan:
    """Return a plan that every rank can unpickle: without grammars; masks come in ``sample``."""
    if all(
        type(each.sampling_params) is SamplingParams
        and each.sampling_params.structured_output is None
        for each in plan.entering
    ):
        return plan

    def stripped(request: SlotRequest) -> SlotRequest:
        values = {each.name: getattr(request.sampling_params, each.name) for each in PARAMS}
        params = SamplingParams(**values | {"structured_output": None})
        return replace(request, sampling_params=params)

    return replace(
        plan, new=tuple(map(stripped, plan.new)), resumed=tuple(map(stripped, plan.resumed))
    )


class ParallelRunner(ModelRunner):
    """Rank 0 of a runner that is spread over ``config.tensor_parallel_size`` processes.

    Its reports are of rank 0. Once a call has failed on any rank, or was interrupted, no rank runs
    any more, and every step fails with the first rank's error.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: DecoderModel | None = None,
        head_policy: HeadPolicy | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        progress: bool = True,
    ) -> None:
        """Start the ranks, load the model's parts and allocate the KV cache on each.

        Arguments and errors are those of ``ModelRunner``; ConfigError also if an option does not
        work with several ranks, or the model cannot be divided among them.
        """
        size = config.tensor_parallel_size
        for name, given in (("model", model), ("logits_processors", logits_processors)):
            if given:
                raise ConfigError(
                    f"{name}: expected none with tensor_parallel_size={size}, got one"
                )
        device = resolve_device(config.device)
        if device.type != "cpu":
            raise ConfigError(
                f"tensor_parallel_size: expected 1 on {device}, got {size}; several ranks run on "
                "device='cpu' only so far"
            )
        config = replace(config, model=str(checkpoint_dir(config.model, progress=progress)))
        Gloo(0, size, TIMEOUT_SECONDS).context.shard(ModelConfig.from_pretrained(config.model))
        self._ended: str | None = None
        """Why no rank runs any more; None = all run."""
        self._ranks = Ranks(config, head_policy)
        try:
            super().__init__(
                config,
                head_policy=head_policy,
                parallel=self._ranks.context,
                allocates=False,
                progress=progress,
            )
            self._ranks.connect()
            self._start_clock.lap("ranks")
            self.allocate_kv_cache(progress=progress)
            self._ranks.await_ready()
        except PeerError as error:
            cause = self._ranks.cause(error)
            self._ranks.stop(0.0)
            raise RuntimeError(f"tensor_parallel_size: {cause}") from error
        except BaseException:
            self._ranks.stop(0.0)
            raise

    def execute(self, plan: StepPlan) -> AsyncOutput:
        """Launch one step on every rank; see ``ModelRunner.execute``."""
        return self._on_all_ranks(plan, super().execute, _sendable(plan))

    def forward(self, plan: StepPlan) -> None:
        """Launch one step up to the last layer on every rank; see ``ModelRunner.forward``."""
        self._on_all_ranks(plan, super().forward, _sendable(plan))

    def sample(
        self, bitmask: npt.NDArray[np.int32] | None = None, rows: Sequence[int] = ()
    ) -> AsyncOutput:
        """Launch the sampling of the step of ``forward``; see ``ModelRunner.sample``."""
        if self._pending is None:
            return super().sample(bitmask, rows)
        return self._on_all_ranks(self._pending.plan, super().sample, bitmask, rows)

    def _on_all_ranks(self, plan: StepPlan, call: Callable[..., Result], *args: object) -> Result:
        """Have every rank make a call of the step ``plan``, and return this rank's result."""
        cause = None
        if self._ended is None:
            self.check_usable()
            try:
                self._ranks.send(call.__name__, *args)
                return call(*args)
            except BaseException as error:  # an interrupt, too, leaves the ranks at unlike points
                self._end(error)
                if not isinstance(error, Exception):
                    raise
                cause = error
        raise StepError(
            f"tensor_parallel_size: {self._ended}",
            step_id=plan.step_id,
            req_ids=plan.req_ids,
            device_lost=True,
        ) from cause

    def _end(self, error: BaseException) -> None:
        """End all ranks after a call that failed on one."""
        is_interrupt = not isinstance(error, Exception)
        self._ended = f"rank 0: {error!r}" if is_interrupt else self._ranks.cause(error)
        self._unusable = f"tensor_parallel_size: {self._ended}; make a new engine"
        self._ranks.stop(0.0)

    def discard(self) -> None:
        """Give up a step on every rank; see ``ModelRunner.discard``."""
        if self._ended is None and not self._closed:
            try:
                self._ranks.send("discard")
            except BaseException as error:
                self._end(error)
                if not isinstance(error, Exception):
                    raise
        super().discard()

    def after_fork(self) -> None:
        """Refuse to run in this process, a forked child, which has no ranks."""
        self._ended = self._unusable = FORKED

    def prepared(self, item: MultimodalItem) -> MultimodalItem:
        """Refuse an item: only a single rank takes features."""
        raise RequestError(f"multimodal: expected no items with {self._option}, got some")

    def set_kv_listener(self, listener: KVListener | None) -> None:
        """Refuse a listener, which would see the keys and values of rank 0 alone."""
        if listener is not None:
            self._refuse("set_kv_listener")

    def sleep(self, level: int = 1) -> None:
        """Refuse to sleep."""
        self._refuse("sleep")

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Refuse to wake up."""
        self._refuse("wake_up")

    def update_weights(self, named_tensors: NamedTensors, *, partial: bool = False) -> None:
        """Refuse new weights."""
        self._refuse("update_weights")

    def _refuse(self, call: str) -> NoReturn:
        raise ConfigError(f"{call}: expected tensor_parallel_size=1, got {self._option}")

    @property
    def _option(self) -> str:
        return f"tensor_parallel_size={self.config.tensor_parallel_size}"

    def describe(self) -> str:
        """Return one line about rank 0: as ``ModelRunner.describe``, and the number of ranks."""
        return f"{super().describe()}, rank 0 of {self.config.tensor_parallel_size} over gloo"

    def close(self) -> None:
        """End the other ranks and free this one's memory; the runner cannot be used afterwards."""
        self._ranks.stop()
        super().close()
