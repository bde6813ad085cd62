"""The one place where the host waits for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from mrv1.errors import StepError
from mrv1.runner.step import Int32Array, Int64Array, StepOutput, StepPlan

POLL_SECONDS = 50e-6
"""How often a wait with a timeout looks at the event."""

NO_TOKEN_MESSAGE = "the logits hold no selectable token (all -inf or NaN)"


class OutputRing:
    """Where steps leave their tokens on the device, and where the host finds them, in turns.

    A slot of the device's ring is written by the step that has it and read by one copy on the copy
    stream; before the next step that has it writes, the compute stream waits for that copy (a wait
    on the device, not of the host). A slot of the pinned ring is read by one ``AsyncOutput``; if
    that has not been asked for its result by the time the slot's next step is launched, it takes
    what it holds, and waits if it must.

    Args:
        max_num_reqs: rows of a step.
        max_tokens: tokens of a row, at most.
        depth: steps in flight, at most; there is one slot more.
        device: the runner's.
    """

    def __init__(
        self, max_num_reqs: int, max_tokens: int, depth: int, device: torch.device
    ) -> None:
        on_gpu = device.type == "cuda"
        num_slots = depth + 1
        count_words = -(-max_num_reqs // 4) * 4
        words = (num_slots, count_words + 2 * max_num_reqs * max_tokens)
        on_device = torch.zeros(words, dtype=torch.int32, device=device)
        host = torch.zeros(words, dtype=torch.int32, pin_memory=on_gpu)
        self._copies = list(zip(host, on_device, strict=True))
        """Of each slot, where it is copied to and from."""

        def views(buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            tokens = buffer.view(torch.int64)[:, count_words // 2 :]
            return buffer[:, :max_num_reqs], tokens.unflatten(1, (max_num_reqs, max_tokens))

        self.num_output, self.tokens = views(on_device)
        """[slots, max_num_reqs] int32 and [slots, max_num_reqs, max_tokens] int64: of one buffer,
        so that one copy takes both."""
        self._host_num_output, self._host_tokens = (view.numpy() for view in views(host))
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._events = [_Events.new() for _ in range(num_slots)] if on_gpu else None
        self._readers: list[AsyncOutput | None] = [None] * num_slots
        self._next = 0

    def acquire(self) -> int:
        """Return the slot of the step that is launched next, whose time starts now.

        Its last reader has what it wanted.
        """
        slot = self._next
        self._next = (slot + 1) % len(self._readers)
        reader, self._readers[slot] = self._readers[slot], None
        if reader is not None:
            reader.take()
        if self._events is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self._events[slot].copied)  # passes where none was recorded yet
            self._events[slot].started.record(stream)
        return slot

    def deliver(
        self,
        slot: int,
        plan: StepPlan,
        order: Int64Array | None = None,
        on_output: Callable[[StepOutput], None] | None = None,
    ) -> AsyncOutput:
        """Start the copy of a slot to the host, behind what the current stream holds.

        Args:
            slot: as ``acquire`` returned it.
            plan: of the step.
            order: ``[rows]``, the plan's row of each row on the device; None = the same.
            on_output: is given the result once it is there.
        """
        events = None
        on_host, on_device = self._copies[slot]
        if self._events is None or self._stream is None:
            on_host.copy_(on_device)
        else:
            events = self._events[slot]
            events.done.record()
            self._stream.wait_event(events.done)
            with torch.cuda.stream(self._stream):
                on_host.copy_(on_device, non_blocking=True)
            events.copied.record(self._stream)
        num_rows = len(plan.req_ids)
        output = AsyncOutput(
            plan,
            self._host_num_output[slot, :num_rows],
            self._host_tokens[slot, :num_rows],
            events,
            order=order,
            on_output=on_output,
        )
        self._readers[slot] = output
        return output


@dataclass(frozen=True, slots=True, kw_only=True)
class _Events:
    """Of one slot of the ring; recorded anew by each step that has it."""

    started: torch.cuda.Event
    """Before the step's work, on the compute stream."""
    done: torch.cuda.Event
    """Behind it."""
    copied: torch.cuda.Event
    """Behind the copy to the host."""

    @classmethod
    def new(cls) -> Self:
        """Return events of which none has been recorded."""
        return cls(
            started=torch.cuda.Event(enable_timing=True),
            done=torch.cuda.Event(enable_timing=True),
            copied=torch.cuda.Event(),
        )

    @property
    def gpu_seconds(self) -> float:
        """Time of the step's work, which is over."""
        milliseconds: float = self.started.elapsed_time(self.done)
        return milliseconds * 1e-3


class AsyncOutput:
    """Tokens of a launched step on their way to the host.

    Carries the request ids and epochs as they were at launch.
    """

    def __init__(
        self,
        plan: StepPlan,
        num_output: Int32Array,
        tokens: Int64Array,
        events: _Events | None,
        *,
        order: Int64Array | None = None,
        on_output: Callable[[StepOutput], None] | None = None,
    ) -> None:
        """Wait for nothing yet.

        Args:
            plan: the step that was launched.
            num_output: ``[rows]``, tokens of each row, -1 = the row failed; valid once the copy to
                the host has run.
            tokens: ``[rows, most tokens]``, likewise.
            events: of the step; None on a CPU.
            order: ``[rows]``, the plan's row of each row; None = the same.
            on_output: is given the result once it is there.
        """
        self._plan = plan
        self._num_output = num_output
        self._tokens = tokens
        self._events = events
        self._order = order
        self._on_output = on_output
        self._outcome: StepOutput | StepError | None = None

    @property
    def step_id(self) -> int:
        """The step this is the output of."""
        return self._plan.step_id

    def ready(self) -> bool:
        """Whether ``result`` would return without waiting."""
        return self._outcome is not None or self._events is None or self._events.copied.query()

    def result(self, timeout: float | None = None) -> StepOutput:
        """Wait for the step's event and return its output; later calls return the same object.

        Args:
            timeout: seconds to wait; None waits for ever.

        Raises:
            TimeoutError: the step was not over in time; call again.
            StepError: a kernel of this step, or of one before it, failed.
        """
        outcome = self.take(timeout)
        if isinstance(outcome, StepError):
            raise outcome
        return outcome

    def take(self, timeout: float | None = None) -> StepOutput | StepError:
        """Wait, and return what ``result`` returns or raises; the step's buffers are free then.

        Raises:
            TimeoutError: the step was not over in time.
        """
        if self._outcome is None:
            try:
                self._wait(timeout)
                output = self._outcome = self._collect()
                if self._on_output is not None:
                    self._on_output(output)
            except RuntimeError as error:  # what the driver reports of any kernel so far
                self._outcome = StepError(
                    str(error),
                    step_id=self._plan.step_id,
                    req_ids=self._plan.req_ids,
                    device_lost=True,
                )
                self._outcome.__cause__ = error
            self._events = None
        return self._outcome

    def _wait(self, timeout: float | None) -> None:
        if self._events is None:
            return
        if timeout is None:
            self._events.copied.synchronize()
            return
        deadline = time.monotonic() + timeout
        while not self._events.copied.query():
            if time.monotonic() >= deadline:
                raise TimeoutError(f"step {self._plan.step_id}: not finished within {timeout} s")
            time.sleep(POLL_SECONDS)

    def _collect(self) -> StepOutput:
        plan = self._plan
        num_output, tokens = self._num_output, self._tokens
        if self._order is not None:
            position = np.argsort(self._order)
            num_output, tokens = num_output[position], tokens[position]
        errors = {}
        token_ids: tuple[tuple[int, ...], ...]
        if (num_output == 1).all():  # a decode step: the one that must not cost time
            token_ids = tuple(zip(tokens[:, 0].tolist(), strict=True))
        else:
            counts = num_output.tolist()
            rows = zip(tokens.tolist(), counts, strict=True)
            token_ids = tuple([tuple(row[: max(count, 0)]) for row, count in rows])
            errors = {row: NO_TOKEN_MESSAGE for row, count in enumerate(counts) if count < 0}
        return StepOutput(
            step_id=plan.step_id,
            req_ids=plan.req_ids,
            slots=plan.slots,
            epochs=plan.epochs,
            token_ids=token_ids,
            errors=errors,
            gpu_seconds=None if self._events is None else self._events.gpu_seconds,
        )
