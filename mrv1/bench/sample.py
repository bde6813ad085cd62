"""One run of the engine, its steps timed on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from mrv1.engine import EngineCore
from mrv1.runner import AsyncOutput, ModelRunner, StepPlan
from mrv1.sampler import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One run of one batch. A decode step is one in which no row is still in its prompt."""

    num_tokens: int
    """Generated, all requests together."""
    num_steps: int
    num_preemptions: int
    wall_s: float
    """From before the first request was added to after the last token came."""
    prefill_ms: float
    """Until every request had its first token."""
    decode_step_ms: float
    """Median over decode steps, from the end of the step before to the end of this one."""
    decode_step_p20_ms: float
    decode_step_p80_ms: float
    launch_ms: float
    """Median over decode steps of the time ``ModelRunner.execute`` kept the host."""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the time of the whole run, prefill included."""
        return self.num_tokens / self.wall_s


def run_once(core: EngineCore, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Sample:
    """Generate for all ``prompts`` at once, each >= 2 tokens, and time every step.

    Raises:
        RequestError: a prompt or the parameters were refused.
        StepError: a step failed.
    """
    preemptions_before = core.scheduler.num_preemptions
    ends: list[float] = []
    num_prefill_steps = 0  # steps in which some row was in its prompt
    with _launch_times(core.runner) as launch_ms:
        start = time.perf_counter()
        requests = [core.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
        while core.scheduler.has_unfinished_requests:
            core.step()
            ends.append(time.perf_counter())
            if not num_prefill_steps and all(r.output_token_ids for r in requests):
                num_prefill_steps = len(ends)
    for request in requests:
        if request.error is not None:
            raise request.error
    steps_ms = np.diff([start, *ends]) * 1e3
    decode_ms = steps_ms[num_prefill_steps:]
    return Sample(
        num_tokens=sum(len(request.output_token_ids) for request in requests),
        num_steps=len(ends),
        num_preemptions=core.scheduler.num_preemptions - preemptions_before,
        wall_s=ends[-1] - start,
        prefill_ms=float(steps_ms[:num_prefill_steps].sum()),
        decode_step_ms=float(np.median(decode_ms)),
        decode_step_p20_ms=float(np.percentile(decode_ms, 20)),
        decode_step_p80_ms=float(np.percentile(decode_ms, 80)),
        launch_ms=statistics.median(launch_ms[num_prefill_steps:]),
    )


@contextmanager
def _launch_times(runner: ModelRunner) -> Iterator[list[float]]:
    """Note in the list, step by step, for how many ms ``runner.execute`` keeps the host."""
    times_ms: list[float] = []
    execute = runner.execute

    def timed(plan: StepPlan) -> AsyncOutput:
        start = time.perf_counter()
        output = execute(plan)
        times_ms.append((time.perf_counter() - start) * 1e3)
        return output

    runner.execute = timed  # type: ignore[method-assign]  # on this instance, for this run
    try:
        yield times_ms
    finally:
        del runner.execute
