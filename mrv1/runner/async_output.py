"""The one place where the host waits for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from mrv1.errors import RequestError, StepError
from mrv1.runner.gpu_clock import GpuClock
from mrv1.runner.logprobs import LogprobReport
from mrv1.runner.step import (
    Int32Array,
    Int64Array,
    RowFailure,
    StepOutput,
    StepPlan,
    TokenLogprobs,
)

POLL_SECONDS = 50e-6
"""How often a wait with a timeout looks at the event."""

FAILURES = {-1: RowFailure.MASKED, -2: RowFailure.NAN}
"""What a negative number of tokens says of a row."""


class OutputRing:
    """Where steps leave their tokens for the host, in turns: pinned memory that kernels write.

    A slot belongs to a step from ``acquire`` on until its ``AsyncOutput`` has taken what it holds;
    if that has not been asked for its result by the time the slot's next step is launched, it
    takes it then, and waits if it must (``num_waits``). The slot's upload (``Staging``) is free
    with it.

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
        """For each slot an event behind its step: what kernels stored for the host is there."""
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
        """Return (counts, tokens) of steps with so many rows, padding included, and columns.

        Counts are [slots, num_rows] int32, tokens [slots, num_rows, num_columns] int64, dense, so
        that a step stores no more than it must. A row's place does not depend on ``num_rows``.
        """
        tokens = self._tokens[:, : num_rows * num_columns]
        return self._counts[:, :num_rows], tokens.unflatten(1, (num_rows, num_columns))

    def acquire(self) -> int:
        """Return the slot of the step that is launched next; its last reader has what it wanted.

        Until ``deliver`` or ``give_up`` the slot stays the next one's.
        """
        if self._is_given_up and self._done is not None:
            self._done[self._next].synchronize()
            self._is_given_up = False
        reader, self._readers[self._next] = self._readers[self._next], None
        if reader is not None and not reader.is_taken:
            self.num_waits += not reader.ready()
            reader.take()
        return self._next

    def start(self) -> None:
        """Mark the beginning of the step's work, which goes to the current stream."""
        if self._clock is not None:
            self._clock.start(self._next)

    @property
    def gpu_seconds(self) -> float:
        """Time that the GPU has worked on steps which are over; 0 on a CPU."""
        return 0.0 if self._clock is None else self._clock.seconds(self._next)

    def end(
        self, num_rows: int, num_columns: int = 1
    ) -> tuple[Int32Array, Int64Array, torch.cuda.Event | None]:
        """Mark the end of the step's work; return what its ``AsyncOutput`` reads, and when.

        Args:
            num_rows: of the step on the device, padding included.
            num_columns: tokens a row has, at most.
        """
        slot, done = self._next, None
        if self._done is not None and self._clock is not None:
            done = self._done[slot]
            self._clock.end(slot)
        tokens = self._host_tokens[slot, : num_rows * num_columns]
        return self._host_counts[slot, :num_rows], tokens.reshape(num_rows, num_columns), done

    def deliver(self, output: AsyncOutput) -> None:
        """Note who takes what the step will leave in its slot; the next step has the next one."""
        self._readers[self._next] = output
        self._next = (self._next + 1) % self.num_slots

    def give_up(self) -> None:
        """Keep the next slot, whose step was not launched whole: what was may still read it."""
        if self._done is not None:
            self._done[self._next].record()
            self._is_given_up = True


class AsyncOutput:
    """Tokens of a launched step on their way to the host.

    Carries the request ids and epochs as they were at launch.
    """

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
        logprobs: Sequence[LogprobReport] = (),
        prompt_logprobs: Sequence[LogprobReport] = (),
    ) -> None:
        """Wait for nothing yet.

        Args:
            plan: the step that was launched.
            num_output: ``[any]``, tokens of each row on the device, negative = the row failed;
                valid once the step is over.
            tokens: ``[any, most tokens]``, likewise.
            done: recorded behind the step; None on a CPU.
            rows: ``[rows]``, where the plan's rows are among them; None = in order, in front.
            refusals: by row of the plan, why it was not computed.
            on_output: is given the result once it is there.
            logprobs: of the tokens that the step draws, by row of the plan.
            prompt_logprobs: of prompts' tokens, likewise.
        """
        self._plan = plan
        self._num_output = num_output
        self._tokens = tokens
        self._done = done
        self._rows = rows
        self._refusals = refusals or {}
        self._on_output = on_output
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs
        self._outcome: StepOutput | StepError | None = None

    @property
    def step_id(self) -> int:
        """The step this is the output of."""
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
        if (num_output == 1).all():  # a decode step: the one that must not cost time
            token_ids = tuple(zip(tokens[:, 0].tolist(), strict=True))
        else:
            counts = num_output.tolist()
            pairs = zip(tokens.tolist(), counts, strict=True)
            token_ids = tuple([tuple(row[: max(count, 0)]) for row, count in pairs])
            errors = {row: FAILURES[count] for row, count in enumerate(counts) if count < 0}
            errors |= self._refusals
        return StepOutput(
            step_id=plan.step_id,
            req_ids=plan.req_ids,
            slots=plan.slots,
            epochs=plan.epochs,
            token_ids=token_ids,
            errors=errors,
            logprobs=_read(self._logprobs, num_output.tolist() if self._logprobs else None),
            prompt_logprobs=_read(self._prompt_logprobs),
        )


def _read(
    reports: Sequence[LogprobReport], num_positions: Sequence[int] | None = None
) -> dict[int, TokenLogprobs]:
    """Return the log-probabilities of all reports by row of the plan."""
    found: dict[int, TokenLogprobs] = {}
    for report in reports:
        found |= report.read(num_positions)
    return found
