"""Launches, copies, waits and GPU idle time of steady steps, from a profiler's trace."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

Event = dict[str, Any]
"""One complete ("X") event of a Chrome trace; times in microseconds."""

STEPS_RANGE = "benchmarks.steps"
"""Name of the range whose calls are counted."""

HOST_CALLS = ("cuda_runtime", "cuda_driver")
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
VENDOR = re.compile("^(cuda|cu|hip)")
EVENT_WAITS = ("EventSynchronize",)
OTHER_WAITS = ("StreamSynchronize", "DeviceSynchronize", "CtxSynchronize", "Memcpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """Means over the traced steps: shares and counts. The profiler makes the host's calls slow.

    Idle time is time in which no stream that runs kernels has a kernel, copy or fill in progress,
    between the first work of the first step and the last work of the last step.
    """

    num_steps: int
    step_us: float
    busy_us: float
    idle_share: float
    idle_between_launches_share: float
    """Part of ``idle_share`` in gaps between two launches by the host, not inside a graph."""
    graph_launches: float
    kernel_launches: float
    """Kernels that the host launched one by one, outside graphs."""
    host_to_device_copies: float
    device_to_host_copies: float
    event_waits: float
    """Calls that wait for an event; ``AsyncOutput.result`` makes one."""
    other_waits: float
    """Calls that wait for a stream or the device, or copy and wait."""


def trace_steps(run_step: Callable[[], object], num_steps: int, num_warm_steps: int) -> StepTrace:
    """Run steps under the profiler, the first steps uncounted; return the trace's figures.

    Launches of graphs stay slow in this process afterwards, so time everything else before.

    Raises:
        ValueError: the trace has no kernel of the steps.
    """

    def run() -> None:
        for _ in range(num_warm_steps):
            run_step()
        with record_function(STEPS_RANGE):
            for _ in range(num_steps):
                run_step()

    return summarize(profiled(run), num_steps)


def profiled(run: Callable[[], None]) -> list[Event]:
    """Run under the profiler; return the events of its Chrome trace."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as profiler:
        run()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text("utf-8"))["traceEvents"]
    return events


def summarize(events: Iterable[Event], num_steps: int) -> StepTrace:
    """Return the figures of the ``num_steps`` steps in a Chrome trace's ``STEPS_RANGE``.

    Raises:
        ValueError: the trace has no such range, or several, or no kernel launched in it.
    """
    by_category: dict[str, list[Event]] = {}
    for event in events:
        if event.get("ph") == "X":
            by_category.setdefault(event.get("cat", ""), []).append(event)
    ranges = [e for e in by_category.get("user_annotation", []) if e["name"] == STEPS_RANGE]
    if len(ranges) != 1:
        raise ValueError(f"trace: expected one range {STEPS_RANGE}, got {len(ranges)}")
    start, end = ranges[0]["ts"], ranges[0]["ts"] + ranges[0]["dur"]
    calls = [
        (VENDOR.sub("", call["name"]), call["args"].get("correlation"))
        for category in HOST_CALLS
        for call in by_category.get(category, [])
        if start <= call["ts"] <= end
    ]
    launched = {correlation for _, correlation in calls}
    graphs = {correlation for name, correlation in calls if name == "GraphLaunch"}
    work = [
        event
        for category in DEVICE_WORK
        for event in by_category.get(category, [])
        if event["args"]["correlation"] in launched
    ]
    kernels = [event for event in work if event["cat"] == "kernel"]
    if not kernels:
        raise ValueError("trace: expected kernels launched in the steps, got none")
    single = {kernel["args"]["correlation"] for kernel in kernels} - graphs
    copies = [event["name"] for event in work if event["cat"] == "gpu_memcpy"]
    streams = {kernel["args"]["stream"] for kernel in kernels}
    wall, busy, between = _occupancy([e for e in work if e["args"]["stream"] in streams])

    def per_step(count: float) -> float:
        return count / num_steps

    return StepTrace(
        num_steps=num_steps,
        step_us=per_step(wall),
        busy_us=per_step(busy),
        idle_share=1 - busy / wall,
        idle_between_launches_share=between / wall,
        graph_launches=per_step(len(graphs)),
        kernel_launches=per_step(len(single)),
        host_to_device_copies=per_step(sum("HtoD" in name for name in copies)),
        device_to_host_copies=per_step(sum("DtoH" in name for name in copies)),
        event_waits=per_step(sum(name in EVENT_WAITS for name, _ in calls)),
        other_waits=per_step(sum(name in OTHER_WAITS for name, _ in calls)),
    )


def _occupancy(work: Sequence[Event]) -> tuple[float, float, float]:
    """Return the time from first to last work, the busy time, and the gaps between launches."""
    ordered = sorted(work, key=lambda event: event["ts"])
    busy = between = 0.0
    reached, launch = ordered[0]["ts"], ordered[0]["args"]["correlation"]
    for event in ordered:
        start, end = event["ts"], event["ts"] + event["dur"]
        if start > reached and event["args"]["correlation"] != launch:
            between += start - reached
        if end > reached:
            busy += end - max(start, reached)
            reached, launch = end, event["args"]["correlation"]
    return reached - ordered[0]["ts"], busy, between
