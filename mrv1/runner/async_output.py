"""The one place where the host waits for the device."""

from __future__ import annotations

import time

import torch

from mrv1.errors import StepError
from mrv1.runner.step import StepOutput, StepPlan

POLL_SECONDS = 50e-6
"""How often a wait with a timeout looks at the event."""

NO_TOKEN_MESSAGE = "the logits hold no selectable token (all -inf or NaN)"


class AsyncOutput:
    """Tokens of a launched step on their way to the host.

    Carries the request ids and epochs as they were at launch. Holds the device tensors until the
    copy's event has passed, so that their memory is not reused under the copy.
    """

    def __init__(
        self,
        plan: StepPlan,
        sampled_rows: list[int],
        tokens: torch.Tensor,
        copy_stream: torch.cuda.Stream | None,
    ) -> None:
        """Start the copy to the host.

        Args:
            plan: the step that was launched.
            sampled_rows: the rows that sampled a token, in the order of ``tokens``.
            tokens: ``[len(sampled_rows)]`` int64 on the runner's device, on its current stream.
            copy_stream: the stream that carries outputs; None on a CPU.
        """
        self._plan = plan
        self._sampled_rows = sampled_rows
        self._device_tokens: torch.Tensor | None = tokens
        self._event: torch.cuda.Event | None = None
        self._output: StepOutput | None = None
        if copy_stream is None:
            self._host_tokens = tokens
            return
        self._host_tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copy_stream):
            self._host_tokens.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def step_id(self) -> int:
        """The step this is the output of."""
        return self._plan.step_id

    def ready(self) -> bool:
        """Whether ``result`` would return without waiting."""
        return self._output is not None or self._event is None or self._event.query()

    def result(self, timeout: float | None = None) -> StepOutput:
        """Wait for the step's event and return its output; later calls return the same object.

        Args:
            timeout: seconds to wait; None waits for ever.

        Raises:
            TimeoutError: the step was not over in time; call again.
            StepError: a kernel of this step, or of one before it, failed.
        """
        if self._output is None:
            try:
                self._wait(timeout)
            except RuntimeError as error:
                raise StepError(
                    str(error), step_id=self._plan.step_id, req_ids=self._plan.req_ids
                ) from error
            self._output = self._collect()
            self._device_tokens = None
        return self._output

    def _wait(self, timeout: float | None) -> None:
        if self._event is None:
            return
        if timeout is None:
            self._event.synchronize()
            return
        deadline = time.monotonic() + timeout
        while not self._event.query():
            if time.monotonic() >= deadline:
                raise TimeoutError(f"step {self._plan.step_id}: not finished within {timeout} s")
            time.sleep(POLL_SECONDS)

    def _collect(self) -> StepOutput:
        plan = self._plan
        token_ids: list[tuple[int, ...]] = [()] * len(plan.req_ids)
        errors = {}
        for row, token in zip(self._sampled_rows, self._host_tokens.tolist(), strict=True):
            if token < 0:
                errors[row] = NO_TOKEN_MESSAGE
            else:
                token_ids[row] = (token,)
        return StepOutput(
            step_id=plan.step_id,
            req_ids=plan.req_ids,
            slots=plan.slots,
            epochs=plan.epochs,
            token_ids=tuple(token_ids),
            errors=errors,
        )
