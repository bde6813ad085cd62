"""Calls between steps that all ranks make: memory, weights, listeners and reports.

Rank 0 sends the name of a method of ``RankControl`` or ``SleepMode`` and its arguments, makes the
call itself, and waits for an answer from each rank. A change that a rank may refuse has two parts:
all ranks get ready; if one refuses, the others undo that, and nothing has changed anywhere.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mrv1.errors import ConfigError, short
from mrv1.models import NamedTensors
from mrv1.models.lora import AdapterPair, StoredAdapter
from mrv1.runner.kv_listener import EachRank, KVListener
from mrv1.runner.model_runner import ModelRunner
from mrv1.runner.ranks.messages import CALL_SECONDS, REFUSALS, Answer, Asked
from mrv1.runner.ranks.processes import Ranks
from mrv1.runner.ranks.shared_memory import SharedMemory
from mrv1.runner.sleep import checked_tags
from mrv1.runner.step import StepPlan

SHARED_BYTES = 1 << 26
"""Most bytes of new weights that the ranks read at a time."""

ALIGNMENT = 16
"""Bytes at a multiple of which each piece begins."""


class Piece(NamedTuple):
    """Rows of a new weight in the memory that the ranks share."""

    name: str
    first_row: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """Its first byte."""

    def of(self, shared: SharedMemory) -> torch.Tensor:
        """Return the values, a view of the memory."""
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        return shared.bytes[self.offset : self.offset + nbytes].view(self.dtype).view(self.shape)


class SharedPart(NamedTuple):
    """A part of an adapter in the memory that the ranks share."""

    name: str
    a: Piece
    b: Piece
    scaling: float

    def of(self, shared: SharedMemory) -> AdapterPair:
        """Return the part, views of the memory."""
        return AdapterPair(a=self.a.of(shared), b=self.b.of(shared), scaling=self.scaling)


OF_MEMORY = (
    "copy_weights", "forget_copies", "free", "allocate", "capture_awake", "free_again",
    "end_sleep", "begin_update", "free_features",
)  # fmt: skip
"""Methods of ``SleepMode`` that all ranks call, each of them between two steps."""


class RankControl:
    """The calls of one rank, on its runner."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._shared: SharedMemory | None = None
        self._made: KVListener | None = None
        self._former: KVListener | None = None

    def answer(self, asked: Asked) -> Answer | None:
        """Make a call; return its answer, None if rank 0 waits for none.

        Errors that are no refusal are raised.
        """
        try:
            if asked.name in OF_MEMORY:
                with self._runner.between_steps():
                    value = getattr(self._runner.memory, asked.name)(*asked.args)
            else:
                value = getattr(self, asked.name)(*asked.args)
            return Answer(value=value) if asked.waits else None
        except tuple(REFUSALS.values()) as error:
            return Answer(refusal=(type(error).__name__, str(error)))

    def take_late_error(self) -> str | None:
        """Return why a step fails that was launched to its end; None = here it does not."""
        error = self._runner.device_step.take_late_error()
        return None if error is None else str(error)

    def attach(self, shared: SharedMemory | None) -> None:
        """Take the memory in which new weights come; None = they have all come."""
        if self._shared is not None:
            self._shared.close()
        self._shared = shared

    @property
    def _given(self) -> SharedMemory:
        """The memory of ``attach``."""
        if self._shared is None:
            raise RuntimeError("attach: expected shared memory, got none")
        return self._shared

    def make_listener(self, pickled: bytes) -> None:
        """Make the listener that is set next; ConfigError: it cannot be made here."""
        try:
            self._made = pickle.loads(pickled).make(self._runner.model.parallel.rank)
        except Exception as error:  # of any type: it is the caller's code
            raise ConfigError(
                f"listener: expected EachRank.make to return a listener, got {error!r}"
            ) from error

    def allocate_features(self) -> None:
        """Allocate the feature buffer."""
        memory = self._runner.memory
        with self._runner.between_steps():
            if not self._runner.features.is_used:
                memory.allocate_features()

    def write_features(
        self, runs: Sequence[range], shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """Write features that rank 0 shares to runs of rows of the feature buffer."""
        self._runner.features.write(runs, self._given.bytes.view(dtype).view(shape))
        self.attach(None)

    def write_adapter(self, slot: int, parts: Collection[SharedPart], name: str) -> None:
        """Write this rank's part of an adapter that rank 0 shares."""
        shared = self._given
        adapter = StoredAdapter(name=name, parts={each.name: each.of(shared) for each in parts})
        ModelRunner.load_adapter(self._runner, slot, adapter)  # of this rank alone
        self.attach(None)  # its memory is not pinned: the copy has read it

    def set_listener(self) -> None:
        """Tell the listener that was made last, None = nobody, of the next steps."""
        listening = self._runner.listening
        made, self._made, self._former = self._made, None, listening.listener
        listening.set(made)

    def set_former_listener(self) -> None:
        """Undo ``set_listener``."""
        self._runner.listening.set(self._former)

    def write_weights(self, pieces: Collection[Piece]) -> None:
        """Write this rank's part of pieces of new weights."""
        with self._runner.between_steps():
            for piece in pieces:
                values = piece.of(self._given)
                self._runner.memory.write(piece.name, piece.first_row, values)

    def end_update(self, names: Collection[str]) -> None:
        """Let steps run with new weights, and give the shared memory up."""
        self._runner.memory.end_update(names)
        self.attach(None)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def pieces_of(
    tensors: Mapping[str, torch.Tensor], shared: SharedMemory
) -> Iterator[tuple[Piece, ...]]:
    """Copy tensors to shared memory; yield the pieces each time that it is full."""
    pieces: list[Piece] = []
    end = 0
    for name, tensor in tensors.items():
        values = tensor.detach()
        row_bytes = math.prod(values.shape[1:]) * values.itemsize
        start = 0
        while start < len(values):
            count = min((len(shared.bytes) - end) // row_bytes, len(values) - start)
            if count == 0:
                yield tuple(pieces)
                pieces, end = [], 0
                continue
            part = values[start : start + count]
            piece = Piece(name, start, tuple(part.shape), part.dtype, end)
            piece.of(shared).copy_(part)
            pieces.append(piece)
            start += count
            end += _aligned(count * row_bytes)
    if pieces:
        yield tuple(pieces)


class ControlledRunner(ModelRunner):
    """Rank 0's runner, with the calls of all ranks; an error that is no refusal ends the ranks."""

    _ranks: Ranks
    _own: RankControl

    def ask(self, name: str, *args: object) -> list[Any]:
        """Have every rank make a call; return the results, or raise the first rank's refusal."""
        with self._ending(name):
            self._ranks.ask(Asked(name, args))
            own = self._own.answer(Asked(name, args)) or Answer()
            answers = [own, *self._ranks.answers()]
        return [answer.result(rank) for rank, answer in enumerate(answers)]

    def _late_error(self) -> Exception | None:
        """Return why a step that all ranks have launched fails on one of them."""
        if not self.listening:
            return super()._late_error()
        for rank, message in enumerate(self.ask("take_late_error")):
            if message is not None:
                return RuntimeError(message if rank == 0 else f"rank {rank}: {message}")
        return None

    def _share_features(self, plan: StepPlan) -> None:
        """Let every other rank have the features that a plan stages, before the step.

        They are copied to shared memory once. CapacityError: a rank has no room for the buffer.
        """
        if plan.staged_features and not self.features.is_used:
            with self._or_undo("free_features"):
                self.ask("allocate_features")
        with self._ending("write_features"):
            for staged in plan.staged_features:
                values = staged.item.tensor
                shared = SharedMemory.new(values.nbytes)
                shared.bytes.view(values.dtype).view(values.shape).copy_(values)
                self._ranks.share(shared.fd)
                shared.close()
                args = staged.rows, tuple(values.shape), values.dtype
                self._ranks.ask(Asked("write_features", args, waits=False))

    def load_adapter(self, slot: int, adapter: StoredAdapter) -> None:
        """Give each rank its part of an adapter; see ``ModelRunner.load_adapter``.

        It is copied to shared memory once, whatever the number of ranks.
        """
        self.check_usable()
        parts = adapter.parts.items()
        halves = {f"{name}.{half}": getattr(part, half) for name, part in parts for half in "ab"}
        shared = SharedMemory.new(sum(_aligned(each.nbytes) for each in halves.values()))
        (pieces,) = pieces_of(halves, shared)  # all fit
        pairs = zip(parts, pieces[0::2], pieces[1::2], strict=True)
        given = [SharedPart(name, a, b, part.scaling) for (name, part), a, b in pairs]
        with self._ending("load_adapter"):
            self._ranks.share(shared.fd)
            self._own.attach(shared)
            self.ask("write_adapter", slot, given, adapter.name)

    def set_kv_listener(self, listener: KVListener | EachRank | None) -> None:
        """Have each rank make and set a listener; see ``ModelRunner.set_kv_listener``."""
        self.check_between_steps()
        if listener is not None:
            if not isinstance(listener, EachRank):
                raise ConfigError(
                    "listener: expected None or EachRank(make) with several ranks, which are "
                    f"processes, got {short(listener)}"
                )
            try:
                pickled = pickle.dumps(listener)
            except Exception as error:  # of any type: it is the caller's object
                raise ConfigError(
                    f"listener: expected an EachRank that can be pickled, got {error!r}"
                ) from error
            self.ask("make_listener", pickled)
        with self._or_undo("set_former_listener"):
            self.ask("set_listener")

    def sleep(self, level: int = 1) -> None:
        """Put all ranks to sleep; see ``ModelRunner.sleep``."""
        self.check_between_steps()
        self.memory.check_level(level)
        with self._or_undo("forget_copies"):
            self.ask("copy_weights", level)
        self.ask("free", level)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Wake all ranks; see ``ModelRunner.wake_up``."""
        self.check_between_steps()
        checked = checked_tags(tags)
        with self._or_undo("free_again"):
            self.ask("allocate", checked)
            self.ask("capture_awake")
        self.ask("end_sleep")

    def update_weights(self, named_tensors: NamedTensors, *, partial: bool = False) -> None:
        """Give each rank its part of new weights; see ``ModelRunner.update_weights``.

        All are checked before the first is sent. They are copied to shared memory once, piece by
        piece, whatever the number of ranks.
        """
        self.check_between_steps()
        self.memory.check_awake()
        tensors = self.memory.checked_update(named_tensors, partial=partial)
        if not tensors:  # those that were given are no weights
            return
        names = tuple(tensors)
        widest = max(tensor[:1].nbytes for tensor in tensors.values())
        nbytes = sum(_aligned(tensor.nbytes) for tensor in tensors.values())
        shared = SharedMemory.new(max(min(nbytes, SHARED_BYTES), widest))
        with self._ending("update_weights"):
            self._ranks.share(shared.fd)
            self._own.attach(shared)
            self.ask("begin_update", names)
            for pieces in pieces_of(tensors, shared):
                self.ask("write_weights", pieces)
            self.ask("end_update", names)

    @contextlib.contextmanager
    def _ending(self, what: str) -> Iterator[None]:
        """End all ranks if something fails inside."""
        try:
            with self._ranks.waiting(what, CALL_SECONDS):
                yield
        except BaseException as error:
            self._end(error)
            if isinstance(error, Exception):
                self.check_between_steps()  # says which rank failed
            raise

    @contextlib.contextmanager
    def _or_undo(self, name: str) -> Iterator[None]:
        """Have every rank make a call if one refuses what is asked inside."""
        try:
            yield
        except tuple(REFUSALS.values()):
            self.ask(name)
            raise

    def _end(self, error: BaseException) -> None:
        """End all ranks after a call that failed on one; this one can launch nothing any more."""
        self._unusable = f"tensor_parallel_size: {self._ranks.end(error)}; make a new engine"
        if "_step" in self.__dict__ and self.device.type == "cuda":
            with contextlib.suppress(torch.AcceleratorError):
                stream, deadline = torch.cuda.current_stream(self.device), time.monotonic() + 5.0
                while not stream.query() and time.monotonic() < deadline:
                    time.sleep(0.001)  # its kernels give up
                self._step.graphs.clear()  # NCCL ends once no graph is left
        self._ranks.close()
