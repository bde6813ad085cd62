"""How much host time each part of an engine step takes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from mrv1.engine import EngineCore
from mrv1.runner import AsyncOutput, StepPlan
from mrv1.runner.step import StepOutput

P = ParamSpec("P")
R = TypeVar("R")

PARTS = ("schedule", "execute", "wait", "read", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """Host time of a step in microseconds, without waits for the device: medians over steps."""

    total_us: float
    """Time of everything the engine does in a step."""
    mean_total_us: float
    """The mean, in which rare pauses show."""
    quietest_us: float
    """The least median of any window of steps: other users of the machine slow some CPUs down,
    for tenths of a second at a time."""
    schedule_us: float
    """``Scheduler.schedule``."""
    execute_us: float
    """``ModelRunner.execute``."""
    read_us: float
    """``AsyncOutput.take`` of an output that is ready."""
    update_us: float
    """``Scheduler.update``."""


def host_times(core: EngineCore, num_steps: int, num_windows: int = 1) -> HostTimes:
    """Time the parts of steady steps, in ``num_windows`` windows of ``num_steps`` steps each.

    Uncounted steps run first. Several windows take turns on the CPUs that this thread may use.
    """
    steps: list[dict[str, float]] = []
    cpus = sorted(os.sched_getaffinity(0))
    try:
        with _clock(core) as seconds:
            for _ in range(core.config.steps_in_flight):  # outputs from before the clock
                core.step()
            for window in range(num_windows):
                if num_windows > 1:
                    os.sched_setaffinity(0, {cpus[window % len(cpus)]})
                for _ in range(num_steps):
                    before = dict(seconds)
                    start = time.perf_counter()
                    core.step()
                    elapsed = time.perf_counter() - start
                    parts = {part: seconds[part] - before[part] for part in PARTS}
                    steps.append(parts | {"total": elapsed - parts["wait"]})
    finally:
        os.sched_setaffinity(0, cpus)

    def median_us(part: str) -> float:
        return statistics.median(step[part] for step in steps) * 1e6

    totals = [step["total"] for step in steps]
    windows = [totals[start : start + num_steps] for start in range(0, len(totals), num_steps)]
    return HostTimes(
        total_us=median_us("total"),
        mean_total_us=statistics.mean(totals) * 1e6,
        quietest_us=min(map(statistics.median, windows)) * 1e6,
        schedule_us=median_us("schedule"),
        execute_us=median_us("execute"),
        read_us=median_us("read"),
        update_us=median_us("update"),
    )


@contextmanager
def _clock(core: EngineCore) -> Iterator[dict[str, float]]:
    """Add up, per part, the host seconds that the calls of this engine take."""
    seconds = dict.fromkeys(PARTS, 0.0)

    def timed(part: str, call: Callable[P, R]) -> Callable[P, R]:
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                seconds[part] += time.perf_counter() - start

        return run

    scheduler, runner = core.scheduler, core.runner
    execute = timed("execute", runner.execute)
    wait = timed("wait", _until_ready)

    def execute_and_watch(plan: StepPlan) -> AsyncOutput:
        output = execute(plan)
        read = timed("read", output.take)

        def take(timeout: float | None = None) -> StepOutput | Exception:
            del output.take  # a second call runs untimed: it has no wait
            wait(output)
            return read(timeout)

        output.take = take  # type: ignore[method-assign, assignment]  # on this output only
        return output

    # These methods are replaced on two objects only, until the ``with`` block ends.
    scheduler.schedule = timed("schedule", scheduler.schedule)  # type: ignore[method-assign]
    scheduler.update = timed("update", scheduler.update)  # type: ignore[method-assign]
    runner.execute = execute_and_watch  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        del scheduler.schedule, scheduler.update, runner.execute


def _until_ready(output: AsyncOutput) -> None:
    """Poll until the output is ready, so that only the host's own work follows."""
    while not output.ready():
        pass
