"""One run of the engine, its steps timed on the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mrv1.engine import EngineCore, LoRARequest
from mrv1.sampler import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One run of one batch. No row of a decode step is still in its prompt."""

    num_tokens: int
    """Tokens that all requests together generated."""
    num_steps: int
    num_graph_steps: int
    """Steps that ran as CUDA graphs, sampling included."""
    num_preemptions: int
    wall_s: float
    """Time from before the first request was added to after the last token arrived."""
    prefill_ms: float
    """Time until every request had its first token."""
    decode_step_ms: float
    """Median over decode steps, from the end of the step before to the end of this one."""
    decode_step_p20_ms: float
    decode_step_p80_ms: float
    host_ms: float
    """Mean over decode steps of the engine's ``host_seconds``, without waits for results."""
    gpu_ms: float
    """Mean over decode steps of the engine's ``gpu_seconds``; 0 on a CPU."""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the time of the whole run, prefill included."""
        return self.num_tokens / self.wall_s


def run_once(
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    adapters: Sequence[LoRARequest | None] | None = None,
) -> Sample:
    """Generate for all ``prompts`` at once, each >= 2 tokens, and time every step.

    ``adapters``: each prompt's; None = none has one.

    Raises:
        RequestError: a prompt or the parameters were refused.
        StepError: a step failed.
    """
    before = prefilled = core.metrics()
    ends: list[float] = []
    num_prefill_steps = 0  # steps in which some row was in its prompt
    start = time.perf_counter()
    requests = [
        core.add_request(str(i), prompt, params, lora_request=adapters[i] if adapters else None)
        for i, prompt in enumerate(prompts)
    ]
    while core.scheduler.has_unfinished_requests:
        core.step()
        ends.append(time.perf_counter())
        if not num_prefill_steps and all(r.output_token_ids for r in requests):
            num_prefill_steps = len(ends)
            prefilled = core.metrics()
    for request in requests:
        if request.error is not None:
            raise request.error
    after = core.metrics()
    steps_ms = np.diff([start, *ends]) * 1e3
    decode_ms = steps_ms[num_prefill_steps:]
    ms_per_step = 1e3 / len(decode_ms)
    return Sample(
        num_tokens=sum(len(request.output_token_ids) for request in requests),
        num_steps=len(ends),
        num_graph_steps=after["num_graph_steps"] - before["num_graph_steps"],
        num_preemptions=after["num_preemptions"] - before["num_preemptions"],
        wall_s=ends[-1] - start,
        prefill_ms=float(steps_ms[:num_prefill_steps].sum()),
        decode_step_ms=float(np.median(decode_ms)),
        decode_step_p20_ms=float(np.percentile(decode_ms, 20)),
        decode_step_p80_ms=float(np.percentile(decode_ms, 80)),
        host_ms=(after["host_seconds"] - prefilled["host_seconds"]) * ms_per_step,
        gpu_ms=(after["gpu_seconds"] - prefilled["gpu_seconds"]) * ms_per_step,
    )
