"""Record what the host and the GPU do in a few decode steps, on one clock.

python -m benchmarks.timeline OUTPUT.json [--shape qwen3-0.6b] [--batch 32] [--steps 3]
                              [--tensor-parallel-size 1]

A recording by torch's profiler of steady steps: the host's calls (``schedule``, ``execute``,
``read``, which may wait for the GPU, and ``update``), and each kernel and copy on the GPU with the
step that launched it. The profiler makes the host's calls slow, so the times of the host are upper
bounds; ``mrv1 bench runner`` measures them. Of several GPUs the first is recorded. The table that
is printed says how long each kernel runs; some start before the kernel before them has ended.
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
from torch.profiler import record_function

from benchmarks.engines.engine import EngineBench, start_engine
from benchmarks.measure.trace import DEVICE_WORK, HOST_CALLS, Event, profiled
from mrv1.device import resolve_device
from mrv1.engine import EngineCore
from mrv1.engine.scheduler import Scheduler
from mrv1.provenance import provenance
from mrv1.runner import ModelRunner
from mrv1.runner.async_output import AsyncOutput
from mrv1.sampler import SamplingParams

PROMPT_TOKENS = 128
WARM_STEPS = 20
PREFIX = "timeline "
PARTS = {
    "schedule": (Scheduler, "schedule"),
    "execute": (ModelRunner, "execute"),
    "read": (AsyncOutput, "take"),
    "update": (Scheduler, "update"),
}
"""The host's part of a step, and the method that does it."""


def timeline(events: Iterable[Event], num_steps: int) -> dict[str, list[dict[str, Any]]]:
    """Return the host's calls and the GPU's work of the last ``num_steps`` whole steps of a trace.

    Steps are counted from 0 by their ``execute``. Times are in microseconds, from the first call
    or kernel on.

    Args:
        events: of a Chrome trace, with a range for each part of a step.
        num_steps: that the trace has at least, before the last two, whose results nobody reads.

    Raises:
        ValueError: the trace has fewer steps.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    calls: dict[str, list[Event]] = {part: [] for part in PARTS}
    for event in sorted(complete, key=lambda event: event["ts"]):
        name = event["name"].removeprefix(PREFIX)
        if event.get("cat") == "user_annotation" and name in calls:
            calls[name].append(event)
    found = len(calls["execute"]) - 2
    if found < num_steps:
        raise ValueError(f"num_steps: expected at most {found} of the trace, got {num_steps}")
    starts = [call["ts"] for call in calls["execute"]]
    step_of = {}  # a launch's correlation -> its step, of all in the trace
    for event in complete:
        if event.get("cat") in HOST_CALLS:
            step = bisect_right(starts, event["ts"]) - 1
            execute = calls["execute"][max(step, 0)]
            if step >= 0 and event["ts"] < execute["ts"] + execute["dur"]:
                step_of[event["args"].get("correlation")] = step
    first = found - num_steps
    gpu = [
        (step_of[event["args"]["correlation"]] - first, event)
        for event in complete
        if event.get("cat") in DEVICE_WORK and event["args"]["correlation"] in step_of
    ]
    work = sorted(((s, e) for s, e in gpu if 0 <= s < num_steps), key=lambda each: each[1]["ts"])
    begin = min(work[0][1]["ts"], starts[first])
    end = work[-1][1]["ts"] + work[-1][1]["dur"]
    return {
        "host": sorted(
            (
                {"part": part, **_times(call, begin)}
                for part, own in calls.items()
                for call in own
                if begin <= call["ts"] <= end
            ),
            key=lambda call: call["start_us"],
        ),
        "gpu": [{"step": s, "name": event["name"], **_times(event, begin)} for s, event in work],
    }


def by_kernel(gpu: Sequence[Mapping[str, Any]], num_steps: int) -> list[dict[str, Any]]:
    """Return for each kernel or copy its number in a step, and its microseconds.

    Args:
        gpu: of ``timeline``, of whole steps.
        num_steps: how many they are.

    Returns:
        ``name``, ``count`` and ``step_us`` a step, ``median_us`` of one; the longest in a step
        comes first.
    """
    times: dict[str, list[float]] = {}
    for each in gpu:
        times.setdefault(each["name"], []).append(each["us"])
    rows = [
        {
            "name": name,
            "count": len(us) / num_steps,
            "median_us": median(us),
            "step_us": sum(us) / num_steps,
        }
        for name, us in times.items()
    ]
    return sorted(rows, key=lambda row: -row["step_us"])


def _times(event: Event, begin: float) -> dict[str, float]:
    return {"start_us": round(event["ts"] - begin, 1), "us": round(event["dur"], 1)}


def _named(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: object, **options: object) -> Any:  # noqa: ANN401 - whatever it returns
        with record_function(PREFIX + part):
            return call(*arguments, **options)

    return run


def record(core: EngineCore, batch: int, num_steps: int) -> dict[str, list[dict[str, Any]]]:
    """Decode ``batch`` requests and return the timeline of steady steps."""
    vocab_size = core.runner.model_config.vocab_size
    prompts = np.random.default_rng(0).integers(vocab_size, size=(batch, PROMPT_TOKENS)).tolist()
    params = SamplingParams(temperature=0, max_tokens=4 * WARM_STEPS, ignore_eos=True)
    requests = [core.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    while any(not request.output_token_ids for request in requests):
        core.step()
    for _ in range(WARM_STEPS):
        core.step()

    def run() -> None:
        for _ in range(WARM_STEPS + num_steps + 2):
            core.step()

    with ExitStack() as patches:
        for part, (owner, name) in PARTS.items():
            named = _named(part, getattr(owner, name))
            patches.enter_context(patch.object(owner, name, named))
        return timeline(profiled(run), num_steps)


def main(arguments: Sequence[str] | None = None) -> None:
    """Record and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--commit", help="commit of the source; default: ask git")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    options = parser.parse_args(arguments)
    device = resolve_device("cuda")
    bench = EngineBench(
        shape=options.shape,
        batches=(options.batch,),
        prompt_tokens=PROMPT_TOKENS,
        tensor_parallel_size=options.tensor_parallel_size,
    )
    core, _ = start_engine(bench, device, max_model_len=1024)
    try:
        recorded = record(core, options.batch, options.steps)
    finally:
        core.runner.close()
    result = {
        "op": "timeline", "schema": 1, "shape": options.shape, "weights": bench.weights,
        **provenance(device, options.commit),
        "conditions": {
            "batch": options.batch, "prompt_tokens": PROMPT_TOKENS, "warm_steps": 2 * WARM_STEPS,
            "tensor_parallel_size": options.tensor_parallel_size,
            "recorded": "by torch's profiler, which makes the host's calls slow",
        },
        **recorded,
    }  # fmt: skip
    options.output.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(f"{len(recorded['gpu'])} kernels and copies, {len(recorded['host'])} calls")
    for row in by_kernel(recorded["gpu"], options.steps):
        print("{count:7.1f} x {median_us:8.1f} = {step_us:9.1f} us  {name:.80}".format(**row))


if __name__ == "__main__":
    main()
