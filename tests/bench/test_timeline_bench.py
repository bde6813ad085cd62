"""The script that records steps of the host and the GPU."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import timeline
from benchmarks.report.rows import layer_rows
from mrv1 import kernels
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


START = ["fetch_upload", "plan_decode", "embed_tokens"]
DENSE = [
    "paged_decode_attention_kernel",
    "linear_tile",
    "add_splits",
    "linear_tile",
    "linear_tile",
]


def _step(step: int, names: list[str]) -> list[dict[str, Any]]:
    """Return kernels of 3 us, which begin 1 us before the kernel before them ends."""
    begin = step * (2.0 * len(names) + 1)
    return [
        {"step": step, "name": name, "start_us": begin + 2 * i, "us": 3.0}
        for i, name in enumerate(names)
    ]


def test_kernels_belong_to_phases_by_the_products_around_them():
    qkv = ["linear_tile", "qkv_cache_write"]
    dense = [*START, *qkv, *DENSE, *qkv, *DENSE, "nvjet_tst", "draw", "post_update"]
    found = timeline.phases(_step(0, dense))
    layer = ["qkv", "attention", "attention", "o", "o", "gate_up", "down"]
    assert found == ["start"] * 3 + 2 * layer + ["head", "sampling", "sampling"]
    experts = ["router_logits", "choose_experts", "few_pairs", "few_pairs", "combine"]
    mixed = [*START, *qkv, *DENSE[:3], *experts, *qkv[:1], *DENSE[:2], "gemm"]
    assert timeline.phases(_step(0, mixed)) == [
        *["start"] * 3, "qkv", "attention", "attention", "o", "o", *["mlp"] * 5, "qkv",
        "attention", "o", "head",
    ]  # fmt: skip


def test_phases_go_by_the_names_that_kernels_have():
    """A kernel of products with another name would be of the phase before it."""
    folder = Path(kernels.__path__[0])
    found = {
        name: path.stem
        for path in folder.rglob("*.py")
        for name in re.findall(r"^def (_\w+_kernel)\(", path.read_text("utf-8"), re.MULTILINE)
    }
    of_products = {name for name, module in found.items() if module.startswith("linear")}
    others = {name for name in of_products if not timeline.PRODUCT.search(name)}
    assert others == {"_add_splits_kernel", "_quantize_tokens_kernel"}
    assert len(of_products - others) > 5
    (attention,) = filter(timeline.ATTENTION.search, found)
    assert attention == "_paged_decode_attention_kernel"
    words = {*timeline.PRODUCT.pattern.split("|")} - {"gemm", "nvjet", "cutlass"}
    assert [word for word in words if not any(word in name for name in found)] == []


def test_phases_take_the_time_from_end_to_end():
    names = [*START, "linear_tile", *DENSE, "linear_tile", "draw"]
    gpu = [each for step in range(3) for each in _step(step, names)]
    rows = {row["phase"]: row for row in timeline.phase_times(gpu)}
    assert sum(row["us"] for row in rows.values()) == pytest.approx(2 * len(names) + 1)
    assert rows["start"]["us"] == 7  # and the gap between steps
    assert (rows["o"]["kernels"], rows["o"]["us"]) == (2, 4)
    layer = timeline.middle_layer(gpu)
    assert [each["phase"] for each in layer] == ["qkv", "attention", "o", "o", "gate_up", "down"]
    assert [each["start_us"] for each in layer] == [0, 2, 4, 6, 8, 10]
    bars = [row["bar"] for row in layer_rows(layer)]
    assert bars[0] == "#" * 14
    assert bars[-1] == " " * 46 + "#" * 14


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
    bench = timeline.FloorBench(prompt_tokens=8)
    assert timeline.record(core, bench, 2) == {"num_steps": 3}
    assert not core.scheduler.running
    core.runner.close()
    found = Counter(event["name"] for event in recorded if event.get("cat") == "user_annotation")
    assert found == dict.fromkeys((f"timeline {part}" for part in timeline.PARTS), 25)
    assert methods == [getattr(owner, name) for owner, name in timeline.PARTS.values()]
