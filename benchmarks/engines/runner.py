"""A steady decode step: its time, the host's part of it, and the GPU's part in a trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.engines.engine import EngineBench, start_engine
from benchmarks.engines.first_requests import first_requests
from benchmarks.measure.host_clock import host_times
from benchmarks.measure.trace import trace_steps
from mrv1.device import resolve_device
from mrv1.engine import EngineCore
from mrv1.errors import CapacityError, ConfigError
from mrv1.provenance import provenance
from mrv1.sampler import SamplingParams

SCHEMA = 1
"""Version of the result's layout; raised when a field changes its meaning or goes."""

WARM_STEPS = 10
"""Uncounted decode steps at the start of each measurement."""

HOST_WINDOWS = 16
"""Windows of ``steps`` steps in which host time is measured, taking turns on the CPUs: the machine
may have other users."""

COMPARED = ("deterministic", "rank_invariant")
"""Options of the engines that are timed beside the default one; the second needs the first."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerBench(EngineBench):
    """Options: decode steps are measured, of a batch that no request joins or leaves.

    Raises:
        ConfigError: a field is out of its range; the message names it.
    """

    steps: int = 50
    """Counted steps of each measurement."""
    waiting: tuple[int, ...] = (0, 1_000, 10_000)
    """Requests that wait while the largest batch occupies every slot; several in turn."""
    logprobs: int | None = 5
    """Also measure the step's time with this many log-probabilities for every request; None = do
    not."""
    compare_deterministic: bool = True
    """Also measure the step's time in engines with ``deterministic=True``, and with
    ``rank_invariant=True`` too."""

    def __post_init__(self) -> None:
        """Check the fields that the engine does not check."""
        EngineBench.__post_init__(self)
        self.check_least(steps=2)
        if self.logprobs is not None and self.logprobs < 0:
            raise ConfigError(f"logprobs: expected None or a number >= 0, got {self.logprobs}")
        if len(set(self.waiting)) < len(self.waiting) or min(self.waiting, default=0) < 0:
            raise ConfigError(
                f"waiting: expected different numbers >= 0, got {list(self.waiting)}"
            )

    @property
    def output_tokens(self) -> int:
        """Most tokens of a request: enough for the prefill of the others and one measurement."""
        num_prefill_steps = -(
            -max(self.batches) * self.prompt_tokens // self.max_num_batched_tokens
        )
        return HOST_WINDOWS * self.steps + 3 * WARM_STEPS + 2 * num_prefill_steps


def run_runner(bench: RunnerBench, say: Say = lambda _: None) -> dict[str, object]:
    """Measure every batch and return the result, ready for JSON.

    Args:
        bench: the options.
        say: receives messages about the progress, one line each.

    Raises:
        ConfigError: an option or the checkpoint is wrong.
        UnsupportedDeviceError: the device is not there or cannot run mrv1.
        CapacityError: the KV cache does not fit, or is too small for a steady batch.
        StepError: a step failed.
    """
    device = resolve_device(bench.device)
    compares = bench.compare_deterministic and not bench.deterministic
    others_ms = _other_steps_ms(bench, device, say) if compares else {}
    core = _start(bench, device)
    try:
        say(core.runner.describe())
        vocab_size = core.runner.model_config.vocab_size
        first = first_requests(core, lambda run: bench.prompts(1, vocab_size, run + 1)[0])
        slowest = max(first, key=lambda each: each.first_ms - each.second_ms)
        say(
            f"first request of any kind: at most {slowest.first_ms - slowest.second_ms:.1f} ms "
            f"more than the second ({slowest.kind})"
        )
        entries = [_measure_batch(core, bench, batch, others_ms, say) for batch in bench.batches]
        waiting = [_measure_waiting(core, bench, number, say) for number in bench.waiting]
        for entry, batch in zip(entries, bench.batches, strict=True):
            entry["trace"] = None
            if device.type == "cuda":
                with steady(core, bench, batch):
                    entry["trace"] = asdict(trace_steps(core.step, bench.steps, WARM_STEPS))
        return {
            "op": "runner",
            "schema": SCHEMA,
            "shape": bench.shape or bench.model,
            "weights": bench.weights,
            "dtype": str(core.runner.model.dtype).removeprefix("torch."),
            "path": core.runner.path,
            **provenance(device, bench.commit),
            "conditions": bench.conditions(device)
            | {
                "logprobs": bench.logprobs,
                "steps": bench.steps,
                "warm_steps": WARM_STEPS,
                "host_windows": HOST_WINDOWS,
            },
            "results": entries,
            "waiting": waiting,
            "first_requests": [asdict(each) for each in first],
        }
    finally:
        core.runner.close()


def _start(bench: RunnerBench, device: torch.device) -> EngineCore:
    max_model_len = bench.prompt_tokens + bench.output_tokens
    return start_engine(bench, device, max_model_len=max_model_len)[0]


# --- measurements --------------------------------------------------------------------------------


def _other_steps_ms(
    bench: RunnerBench, device: torch.device, say: Say
) -> dict[str, dict[int, float]]:
    """Return, of a deterministic and of a rank-invariant engine, batch -> the step's median ms."""
    found: dict[str, dict[int, float]] = {}
    for name in COMPARED:
        other = replace(bench, deterministic=True, rank_invariant=name == "rank_invariant")
        core, steps_ms = _start(other, device), found.setdefault(name, {})
        try:
            for batch in bench.batches:
                with steady(core, other, batch):
                    steps_ms[batch] = float(np.median(step_times(core, bench.steps)))
                say(f"batch {batch}, {name}: {steps_ms[batch]:.3f} ms a step")
        finally:
            core.runner.close()
    return found


def _measure_batch(
    core: EngineCore,
    bench: RunnerBench,
    batch: int,
    others_ms: Mapping[str, Mapping[int, float]],
    say: Say,
) -> dict[str, Any]:
    with steady(core, bench, batch):
        before = core.metrics()
        steps_ms = step_times(core, bench.steps)
        after = core.metrics()
    with steady(core, bench, batch):
        host = host_times(core, bench.steps, HOST_WINDOWS)
    step_ms, logprobs_ms = float(np.median(steps_ms)), None
    if bench.logprobs is not None:
        with steady(core, bench, batch, bench.logprobs):
            logprobs_ms = float(np.median(step_times(core, bench.steps)))
        say(f"batch {batch}, logprobs={bench.logprobs}: {logprobs_ms:.3f} ms a step")
    say(
        f"batch {batch}: {step_ms:.3f} ms a step, host {host.total_us:.0f} us, "
        f"{host.quietest_us:.0f} at best"
    )
    on_gpu = core.runner.device.type == "cuda"
    gpu_seconds = after["gpu_seconds"] - before["gpu_seconds"]
    return {
        "batch": batch,
        "step_ms": step_ms,
        "step_p20_ms": float(np.percentile(steps_ms, 20)),
        "step_p80_ms": float(np.percentile(steps_ms, 80)),
        "gpu_ms": gpu_seconds / bench.steps * 1e3 if on_gpu else None,
        "staging_waits": after["staging_waits"] - before["staging_waits"],
        **_beside(others_ms, batch, step_ms),
        "logprobs_step_ms": logprobs_ms,
        "logprobs_over_default": logprobs_ms and logprobs_ms / step_ms,
        "host": asdict(host),
        "samples_ms": steps_ms,
    }


def _beside(
    others_ms: Mapping[str, Mapping[int, float]], batch: int, step_ms: float
) -> dict[str, float | None]:
    """Return the other engines' times of a batch, and how they compare with ``step_ms``."""
    found: dict[str, float | None] = {}
    for name in COMPARED:
        other = others_ms.get(name, {}).get(batch)
        found[f"{name}_step_ms"] = other
        found[f"{name}_over_default"] = other and other / step_ms
    return found


def _measure_waiting(
    core: EngineCore, bench: RunnerBench, number: int, say: Say
) -> dict[str, object]:
    batch = max(bench.batches)
    with steady(core, bench, batch), queued(core, bench, number):
        host = host_times(core, bench.steps, HOST_WINDOWS)
    say(f"{number} waiting, batch {batch}: host {host.total_us:.0f} us")
    return {"batch": batch, "waiting": number, "host": asdict(host)}


def step_times(core: EngineCore, num_steps: int) -> list[float]:
    """Return for each step the milliseconds from the end of the step before to its own end."""
    ends = [time.perf_counter()]
    for _ in range(num_steps):
        core.step()
        ends.append(time.perf_counter())
    times_ms: list[float] = (np.diff(ends) * 1e3).tolist()
    return times_ms


# --- what is measured ----------------------------------------------------------------------------


@contextmanager
def steady(
    core: EngineCore, bench: RunnerBench, batch: int, logprobs: int | None = None
) -> Iterator[None]:
    """Run ``batch`` requests, and no others, up to warm decode steps; abort them at the end.

    ``logprobs`` is a parameter of each request.

    Raises:
        CapacityError: a request was preempted, or finished before the end.
        Mrv1Error: the error of a request that failed.
    """
    params = SamplingParams(
        temperature=0, max_tokens=bench.output_tokens, ignore_eos=True, logprobs=logprobs
    )
    prompts = bench.prompts(batch, core.runner.model_config.vocab_size)
    num_preemptions = core.scheduler.num_preemptions
    requests = [core.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    try:
        while any(not r.output_token_ids and r.error is None for r in requests):
            core.step()
        for _ in range(WARM_STEPS):
            core.step()
        yield
        for request in requests:
            if request.error is not None:
                raise request.error
        num_lost = core.scheduler.num_preemptions - num_preemptions
        if num_lost or len(core.scheduler.running) < batch:
            raise CapacityError(
                f"batch: expected {batch} requests to decode together for {bench.steps} steps, "
                f"got {num_lost} preemptions and {len(core.scheduler.running)} at the end; "
                f"{core.scheduler.pools[0].num_blocks} KV blocks of {bench.block_size} tokens, "
                f"max_num_batched_tokens {bench.max_num_batched_tokens}"
            )
    finally:
        for request in requests:
            core.scheduler.abort(request.req_id)
        while core.scheduler.num_steps_in_flight:
            core.step()


@contextmanager
def queued(core: EngineCore, bench: RunnerBench, number: int) -> Iterator[None]:
    """Queue ``number`` requests, which wait for slots that others occupy; then abort them."""
    params = SamplingParams(temperature=0, max_tokens=bench.output_tokens, ignore_eos=True)
    (prompt,) = bench.prompts(1, core.runner.model_config.vocab_size)
    ids = [f"waiting-{i}" for i in range(number)]
    for req_id in ids:
        core.add_request(req_id, prompt, params)
    try:
        yield
    finally:
        for req_id in ids:
            core.scheduler.abort(req_id)
