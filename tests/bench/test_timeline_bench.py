"""The script that records steps of the host and the GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from benchmarks import timeline
from mrv1.config import EngineConfig
from mrv1.engine import EngineCore


def _trace(num_steps: int) -> list[dict[str, Any]]:
    """Return steps of 100 us: a launch in ``execute``, whose kernels run from 60 us later on."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]

    def add(category: str, name: str, start: float, duration: float, **args: object) -> None:
        events.append({
            "ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": args
        })  # fmt: skip

    for step in range(num_steps):
        start = 1000 + 100.0 * step
        add("user_annotation", "timeline schedule", start, 5)
        add("user_annotation", "timeline execute", start + 10, 20)
        add("cuda_runtime", "cudaGraphLaunch", start + 15, 3, correlation=step)
        add("cuda_runtime", "cudaEventQuery", start + 40, 3, correlation=1000 + step)
        add("kernel", "first", start + 70, 50, correlation=step)
        add("gpu_memcpy", "second", start + 120, 40, correlation=step)
        add("kernel", "elsewhere", start + 160, 1, correlation=1000 + step)
        add("user_annotation", "timeline read", start + 50, 30)
        add("user_annotation", "timeline update", start + 85, 4)
        add("user_annotation", "another range", start + 90, 4)
    return events


def test_the_last_whole_steps_are_returned_from_their_first_event_on():
    found = timeline.timeline(_trace(6), 2)
    assert found["gpu"] == [
        {"step": 0, "name": "first", "start_us": 60, "us": 50},
        {"step": 0, "name": "second", "start_us": 110, "us": 40},
        {"step": 1, "name": "first", "start_us": 160, "us": 50},
        {"step": 1, "name": "second", "start_us": 210, "us": 40},
    ]
    parts = [(call["part"], call["start_us"]) for call in found["host"]]
    assert parts == [
        ("execute", 0), ("read", 40), ("update", 75), ("schedule", 90), ("execute", 100),
        ("read", 140), ("update", 175), ("schedule", 190), ("execute", 200), ("read", 240),
    ]  # fmt: skip
    assert found["host"][1]["us"] == 30


def test_kernels_are_summed_up_by_name():
    gpu = [
        *({"step": step, "name": "sum", "us": us} for step in range(2) for us in (4.0, 6.0, 5.0)),
        {"step": 0, "name": "copy", "us": 50.0},
    ]
    assert timeline.by_kernel(gpu, 2) == [
        {"name": "copy", "count": 0.5, "median_us": 50.0, "step_us": 25.0},
        {"name": "sum", "count": 3.0, "median_us": 5.0, "step_us": 15.0},
    ]


def test_a_trace_with_too_few_steps_is_refused():
    with pytest.raises(ValueError, match="num_steps: expected at most 4 of the trace, got 5"):
        timeline.timeline(_trace(6), 5)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_every_part_of_a_step_has_a_range_and_the_methods_are_themselves_again(monkeypatch):
    config = EngineConfig(model="tiny", device="cpu", num_kv_blocks=64, max_num_seqs=2)
    core = EngineCore(config, progress=False)
    recorded: list[dict[str, Any]] = []

    def keep(events: list[dict[str, Any]], num_steps: int) -> dict[str, Any]:
        recorded.extend(events)
        return {"num_steps": num_steps}

    monkeypatch.setattr(timeline, "timeline", keep)
    methods = [getattr(owner, name) for owner, name in timeline.PARTS.values()]
    assert timeline.record(core, 2, 3) == {"num_steps": 3}
    core.runner.close()
    found = Counter(event["name"] for event in recorded if event.get("cat") == "user_annotation")
    assert found == dict.fromkeys((f"timeline {part}" for part in timeline.PARTS), 25)
    assert methods == [getattr(owner, name) for owner, name in timeline.PARTS.values()]
