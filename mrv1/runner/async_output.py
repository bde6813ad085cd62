"""The results of steps on their way to the host: the one place where the host waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from mrv1.errors import RequestError, StepError
from mrv1.runner.logprobs import LogprobReport, StoredLogprobs
from mrv1.runner.step import (
    Int32Array,
    Int64Array,
    RowFailure,
    StepOutput,
    StepPlan,
    TokenLogprobs,
)

POLL_SECONDS = 50e-6
"""Interval at which a wait with a timeout queries the event."""

FAILURES = {-1: RowFailure.MASKED, -2: RowFailure.NAN}
"""Why a row failed, by the negative number of tokens that ``post_update`` stores for the row."""


class GpuClock:
    """Measures at almost no cost how long the GPU has worked on steps.

    It sums the time from each launch that finds the GPU idle to the end of the steps that follow.

    Only the steps' end events are needed, one with timing in ``ends`` for each slot of their ring.
    A gap shorter than the launch that follows it counts as work.
    """

    def __init__(self, ends: Sequence[torch.cuda.Event]) -> None:
        self._ends = ends
        self._begin = torch.cuda.Event(enable_timing=True)
        self._num_steps = 0
        """Steps since ``_begin`` was recorded."""
        self._seconds = 0.0
        """Time of the steps before ``_begin``."""

    def start(self, slot: int) -> None:
        """Measure on the current stream if the GPU is idle; the step in ``slot`` comes next."""
        last = self._ends[slot - 1]
        if self._num_steps and not last.query():
            return
        if self._num_steps:
            self._seconds += self._seconds_until(last)
        self._num_steps = 0
        self._begin.record()

    def end(self, slot: int) -> None:
        """Record, on the current stream, the end of the step in ``slot`` of the ring."""
        self._ends[slot].record()
        self._num_steps += 1

    def seconds(self, next_slot: int) -> float:
        """Return the time of the finished steps; ``next_slot`` is the slot of the next step.

        A lost GPU no longer reports when its last steps ended: their time is left out.
        """
        try:
            for age in range(1, min(self._num_steps, len(self._ends)) + 1):
                end = self._ends[next_slot - age]
                if end.query():
                    return self._seconds + self._seconds_until(end)
        except RuntimeError:
            pass
        return self._seconds

    def _seconds_until(self, end: torch.cuda.Event) -> float:
        milliseconds: float = self._begin.elapsed_time(end)
        return milliseconds * 1e-3


class OutputRing:
    """A ring of pinned buffers in which kernels store the tokens of each step for the host.

    A slot belongs to a step from ``acquire`` until the step's ``AsyncOutput`` has read it; if
    nobody has when the next step needs the slot, ``acquire`` reads it and may wait
    (``num_waits``). From then on the same slot of ``Staging`` is free, too. Rows include padding.
    """

    def __init__(
        self, max_num_reqs: int, max_tokens: int, depth: int, device: torch.device
    ) -> None:
        on_gpu = device.type == "cuda"
        self.num_slots = depth + 1
        count_words = -(-max_num_reqs // 4) * 4
        self._buffer = torch.zeros(
            (self.num_slots, count_words + 2 * max_num_reqs * max_tokens),
            dtype=torch.int32,
            pin_memory=on_gpu,
        )
        self._counts = self._buffer[:, :max_num_reqs]
        self._tokens = self._buffer.view(torch.int64)[:, count_words // 2 :]
        self._host_counts, self._host_tokens = self._counts.numpy(), self._tokens.numpy()
        self._done = None
        """Per slot, an event after its step: once it has passed, the host may read the buffer."""
        self._clock = None
        if on_gpu:
            self._done = [torch.cuda.Event(enable_timing=True) for _ in range(self.num_slots)]
            self._clock = GpuClock(self._done)
        self._readers: list[AsyncOutput | None] = [None] * self.num_slots
        self._next = 0
        self._is_given_up = False
        self.num_waits = 0

    @property
    def next_slot(self) -> int:
        """The slot of the step that is launched next."""
        return self._next

    def views(self, num_rows: int, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return counts [slots, rows] int32 and tokens [slots, rows, columns] int64, dense."""
        tokens = self._tokens[:, : num_rows * num_columns]
        return self._counts[:, :num_rows], tokens.unflatten(1, (num_rows, num_columns))

    def acquire(self) -> int:
        """Return the next step's slot, its older result read; only ``deliver`` moves on."""
        if self._is_given_up and self._done is not None:
            self._done[self._next].synchronize()
            self._is_given_up = False
        reader, self._readers[self._next] = self._readers[self._next], None
        if reader is not None and not reader.is_taken:
            self.num_waits += not reader.ready()
            reader.take()
        return self._next

    def drain(self) -> None:
        """Read the result of every launched step that nobody has read yet, the oldest first."""
        for reader in (*self._readers[self._next :], *self._readers[: self._next]):
            if reader is not None:
                reader.take()

    def start(self) -> None:
        """Mark the start of the step's work on the current stream."""
        if self._clock is not None:
            self._clock.start(self._next)

    @property
    def gpu_seconds(self) -> float:
        """Seconds that the GPU has worked on finished steps; 0 on a CPU."""
        return 0.0 if self._clock is None else self._clock.seconds(self._next)

    def end(
        self, num_rows: int, num_columns: int = 1
    ) -> tuple[Int32Array, Int64Array, torch.cuda.Event | None]:
        """Mark the step's end; return counts, tokens of ``num_rows`` (padded), and the event."""
        slot, done = self._next, None
        if self._done is not None and self._clock is not None:
            done = self._done[slot]
            self._clock.end(slot)
        tokens = self._host_tokens[slot, : num_rows * num_columns]
        return self._host_counts[slot, :num_rows], tokens.reshape(num_rows, num_columns), done

    def deliver(self, output: AsyncOutput) -> None:
        """Record ``output`` as the reader of the step's slot; move on to the following slot."""
        self._readers[self._next] = output
        self._next = (self._next + 1) % self.num_slots

    def give_up(self) -> None:
        """Keep the slot of a step launched only in part; its launched kernels may still use it."""
        if self._done is not None:
            self._done[self._next].record()
            self._is_given_up = True


class AsyncOutput:
    """Tokens of a launched step on their way to the host; ids and epochs are those at launch."""

    def __init__(
        self,
        plan: StepPlan,
        num_output: Int32Array,
        tokens: Int64Array,
        done: torch.cuda.Event | None,
        *,
        rows: Int32Array | None = None,
        refusals: Mapping[int, RequestError] | None = None,
        on_output: Callable[[StepOutput], None] | None = None,
        logprobs: Sequence[LogprobReport | StoredLogprobs] = (),
        prompt_logprobs: Sequence[LogprobReport] = (),
        waiting: Callable[[str], AbstractContextManager[object]] | None = None,
    ) -> None:
        """Store the arguments; nothing waits yet.

        ``num_output [device rows]`` (negative = it failed, ``FAILURES``) and ``tokens [device
        rows, most tokens]`` are valid once ``done`` has passed, None on a CPU. ``rows``: the
        device row of each row of the plan; None = the first, in order. ``refusals``, by row of the
        plan, are of custom processors. ``on_output`` gets the result once it has been read;
        ``waiting`` returns a context for the wait, which may raise a RuntimeError at its end.
        """
        self._plan, self._rows, self._done, self._on_output = plan, rows, done, on_output
        self._num_output, self._tokens, self._refusals = num_output, tokens, refusals or {}
        self._logprobs, self._prompt_logprobs = logprobs, prompt_logprobs
        self._waiting = waiting or nullcontext
        self._outcome: StepOutput | StepError | None = None

    @property
    def step_id(self) -> int:
        """``step_id`` of the step."""
        return self._plan.step_id

    @property
    def is_taken(self) -> bool:
        """Whether the step's buffers have been read."""
        return self._outcome is not None

    def ready(self) -> bool:
        """Whether ``result`` would return without waiting."""
        return self._outcome is not None or self._done is None or self._done.query()

    def result(self, timeout: float | None = None) -> StepOutput:
        """Wait for the step's event and return its output; later calls return the same object.

        ``timeout`` is in seconds; None waits for ever.

        Raises:
            TimeoutError: the step was not over in time; call again.
            StepError: a kernel of this step, or of one before it, failed.
        """
        outcome = self.take(timeout)
        if isinstance(outcome, StepError):
            raise outcome
        return outcome

    def take(self, timeout: float | None = None) -> StepOutput | StepError:
        """Wait and read the step's buffers; returns and raises as ``result`` does."""
        if self._outcome is None:
            try:
                with self._waiting(f"step {self._plan.step_id}"):
                    self._wait(timeout)
                output = self._outcome = self._collect()
                if self._on_output is not None:
                    self._on_output(output)
            except RuntimeError as error:  # the driver reports any kernel that failed so far
                self._outcome = StepError(
                    str(error),
                    step_id=self._plan.step_id,
                    req_ids=self._plan.req_ids,
                    device_lost=True,
                )
                self._outcome.__cause__ = error
            self._done = None
        return self._outcome

    def _wait(self, timeout: float | None) -> None:
        if self._done is None:
            return
        if timeout is None:
            self._done.synchronize()
            return
        deadline = time.monotonic() + timeout
        while not self._done.query():
            if time.monotonic() >= deadline:
                raise TimeoutError(f"step {self._plan.step_id}: not finished within {timeout} s")
            time.sleep(POLL_SECONDS)

    def _collect(self) -> StepOutput:
        plan = self._plan
        rows = slice(len(plan.req_ids)) if self._rows is None else self._rows
        num_output, tokens = self._num_output[rows], self._tokens[rows]
        errors: dict[int, str | RequestError] = {}
        token_ids: tuple[tuple[int, ...], ...]
        if (num_output == 1).all():  # a decode step: the case that must be fast
            token_ids = tuple(zip(tokens[:, 0].tolist(), strict=True))
        else:
            counts = num_output.tolist()
            errors = {row: FAILURES[count] for row, count in enumerate(counts) if count < 0}
            for row in errors:  # drafts may have been accepted before: the others are -1
                counts[row] = int((tokens[row] >= 0).sum())
            pairs = zip(tokens.tolist(), counts, strict=True)
            token_ids = tuple([tuple(row[:count]) for row, count in pairs])
            errors |= self._refusals
        return StepOutput(
            step_id=plan.step_id,
            req_ids=plan.req_ids,
            slots=plan.slots,
            epochs=plan.epochs,
            token_ids=token_ids,
            errors=errors,
            logprobs=_read(self._logprobs, [*map(len, token_ids)] if self._logprobs else None),
            prompt_logprobs=_read(self._prompt_logprobs),
        )


def _read(
    reports: Sequence[LogprobReport | StoredLogprobs], num_positions: Sequence[int] | None = None
) -> dict[int, TokenLogprobs]:
    """Return the log-probabilities of all reports, by row of the plan."""
    found: dict[int, TokenLogprobs] = {}
    for report in reports:
        found |= report.read(num_positions)
    return found
