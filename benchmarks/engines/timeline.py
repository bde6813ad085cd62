"""What the host and the GPU do in a few decode steps, on one clock, and the floor of each phase.

A recording by torch's profiler of steady steps: the host's calls (``schedule``, ``execute``,
``read``, which may wait for the GPU, and ``update``), and each kernel and copy on the GPU with the
step that launched it. The profiler makes the host's calls slow, so the times of the host are upper
bounds; ``mrv1 bench runner`` measures them. Of several GPUs the first is recorded.

A phase is the kernels from one product on, up to the next; attention is a phase, the cache write
before it included. Kernels overlap, so a phase takes the time from the end of the phase before it
to its own end: all phases together take the step.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch.profiler import record_function

from benchmarks.engines.engine import EngineBench, start_engine
from benchmarks.measure.floor import copy_bandwidth, step_kv_bytes, step_weight_bytes
from benchmarks.measure.trace import DEVICE_WORK, HOST_CALLS, Event, profiled
from mrv1.device import resolve_device
from mrv1.engine import EngineCore
from mrv1.engine.scheduler import Scheduler
from mrv1.errors import UnsupportedDeviceError
from mrv1.provenance import provenance
from mrv1.runner import ModelRunner
from mrv1.runner.async_output import AsyncOutput
from mrv1.sampler import SamplingParams

WARM_STEPS = 20
PREFIX = "timeline "
PARTS = {
    "schedule": (Scheduler, "schedule"),
    "execute": (ModelRunner, "execute"),
    "read": (AsyncOutput, "take"),
    "update": (Scheduler, "update"),
}
"""The host's part of a step, and the method that does it."""
ATTENTION = re.compile("decode_attention_kernel")
PRODUCT = re.compile("linear|code_tiles|router|expert|shrink|gemm|nvjet|cutlass", re.IGNORECASE)
"""Kernels of mrv1, and of the vendor's library."""
MLP = ("gate_up", "down")
LAYER = ("qkv", "attention", "o", *MLP, "mlp")
"""Phases of a layer; ``mlp`` is both products of one that is no chain of two, as with experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorBench(EngineBench):
    """Options: a few steps of each batch are recorded.

    Raises:
        ConfigError: a field is out of its range; the message names it.
    """

    batches: tuple[int, ...] = (1, 32)
    steps: int = 3
    """Recorded steps of each batch."""

    def __post_init__(self) -> None:
        """Check the fields that the engine does not check."""
        EngineBench.__post_init__(self)
        self.check_least(steps=2)


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


def _times(event: Event, begin: float) -> dict[str, float]:
    return {"start_us": round(event["ts"] - begin, 1), "us": round(event["dur"], 1)}


def _named(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: object, **options: object) -> Any:  # noqa: ANN401 - whatever it returns
        with record_function(PREFIX + part):
            return call(*arguments, **options)

    return run


def record(core: EngineCore, bench: FloorBench, batch: int) -> dict[str, Any]:
    """Decode ``batch`` requests and return the timeline of steady steps."""
    prompts = bench.prompts(batch, core.runner.model_config.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=_num_tokens(bench), ignore_eos=True)
    requests = [core.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    while any(not request.output_token_ids for request in requests):
        core.step()
    for _ in range(WARM_STEPS):
        core.step()

    def run() -> None:
        for _ in range(WARM_STEPS + bench.steps + 2):
            core.step()

    try:
        with ExitStack() as patches:
            for part, (owner, name) in PARTS.items():
                named = _named(part, getattr(owner, name))
                patches.enter_context(patch.object(owner, name, named))
            return timeline(profiled(run), bench.steps)
    finally:
        for request in requests:
            core.scheduler.abort(request.req_id)
        while core.scheduler.num_steps_in_flight:
            core.step()


def _num_tokens(bench: FloorBench) -> int:
    """Return enough outputs for the prefills of the others and the recorded steps."""
    prefills = -(-max(bench.batches) * bench.prompt_tokens // bench.max_num_batched_tokens)
    return 2 * prefills + 2 * WARM_STEPS + bench.steps + 8


def phases(kernels: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the phase of each kernel of one step, which are in the order of their launches.

    ``start`` comes before the first layer, ``head`` and ``sampling`` after the last one.
    """
    found = ["start"] * len(kernels)
    attentions = [i for i, each in enumerate(kernels) if ATTENTION.search(each["name"])]
    products = [
        i for i, each in enumerate(kernels) if PRODUCT.search(each["name"]) and i not in attentions
    ]
    for layer, begin in enumerate(attentions):
        end = (*attentions, len(kernels))[layer + 1]
        is_last = layer == len(attentions) - 1
        if layer == 0:
            qkv = [i for i in products if i < begin][-1:]
            found[qkv[0] if qkv else begin : begin] = ["qkv"] * (begin - qkv[0] if qkv else 0)
        own = [i for i in products if begin < i < end]
        is_chain = len(own) == 4 and not any("expert" in kernels[i]["name"] for i in own)
        names = ["o", *MLP] if is_chain else ["o", "mlp"][: len(own) - 1]
        starts = [begin, *own[: len(names)], *own[-1:]]
        names = ["attention", *names, "head" if is_last else "qkv"]
        for name, first, last in zip(names, starts, [*starts[1:], end], strict=False):
            found[first:last] = [name] * (last - first)
        if is_last and own:
            found[own[-1] + 1 :] = ["sampling"] * (end - own[-1] - 1)
    # What stands between a layer's qkv and its attention writes the cache for it.
    for i in range(len(found) - 1, 0, -1):
        if found[i - 1] == "qkv" and found[i] == "attention" and i - 1 not in products:
            found[i - 1] = "attention"
    return found


def phase_times(gpu: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each phase's kernels and microseconds in a step, means of all but the first step.

    A step begins where the one before it ends. ``layer`` counts from 0; None = of no layer.
    """
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for each in gpu:
        by_step.setdefault(each["step"], []).append(each)
    times: dict[str, list[float]] = {}
    kernels: dict[str, int] = {}
    end = max(each["start_us"] + each["us"] for each in by_step.pop(min(by_step)))
    for own in by_step.values():
        for name, each in zip(phases(own), own, strict=True):
            reached = max(end, each["start_us"] + each["us"])
            times.setdefault(name, []).append(reached - end)
            kernels[name] = kernels.get(name, 0) + 1
            end = reached
    count = len(by_step)
    return [
        {"phase": name, "kernels": kernels[name] / count, "us": sum(us) / count}
        for name, us in times.items()
    ]


def middle_layer(gpu: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the kernels of the middle layer of the last step, with their phases, from 0 us on."""
    own = [each for each in gpu if each["step"] == gpu[-1]["step"]]
    names = phases(own)
    firsts = [i for i, name in enumerate(names) if name == "qkv" and names[i - 1] != "qkv"]
    if not firsts:
        return []
    begin = firsts[len(firsts) // 2]
    end = next((i for i in firsts if i > begin), len(own))
    layer = [i for i in range(begin, end) if names[i] in LAYER]
    return [
        {
            "phase": names[i],
            "name": own[i]["name"],
            "start_us": own[i]["start_us"] - own[begin]["start_us"],
            "us": own[i]["us"],
        }
        for i in layer
    ]


def phase_bytes(core: EngineCore, bench: FloorBench, batch: int) -> dict[str, float]:
    """Return the least bytes that each phase reads in a step: its weights, or keys and values."""
    model, config, runner = core.runner.model, core.runner.model_config, core.runner
    layers = model.weights.layers
    own: dict[str, float] = {
        "qkv": sum(layer.qkv.nbytes for layer in layers),
        "attention": step_kv_bytes(
            runner.spec, config.layer_windows, batch=batch, prompt_tokens=bench.prompt_tokens,
            output_tokens=3 * WARM_STEPS,
        ),
        "o": sum(layer.o.nbytes for layer in layers),
        "head": model.weights.lm_head.nbytes,
    }  # fmt: skip
    if config.experts is None:
        pairs = [layer.mlp for layer in layers]
        each = [sum(pair[part].nbytes for pair in pairs) for part in (0, 1)]
        return own | dict(zip(MLP, each, strict=True)) | {"mlp": sum(each)}
    whole = step_weight_bytes(model.config, model.dtype, bench.tensor_parallel_size, batch=batch)
    return own | {"mlp": whole - own["qkv"] - own["o"] - own["head"]}


def run_floor(bench: FloorBench, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Record steps of every batch and return the result, ready for JSON.

    Raises:
        ConfigError: an option or the checkpoint is wrong.
        UnsupportedDeviceError: there is no GPU.
        CapacityError: the KV cache does not fit.
    """
    device = resolve_device(bench.device)
    bandwidth = copy_bandwidth(device)
    if bandwidth is None:
        raise UnsupportedDeviceError(f"device: expected a GPU, got {device}")
    core, _ = start_engine(bench, device, max_model_len=bench.prompt_tokens + _num_tokens(bench))
    results, recorded = [], dict[str, Any]()
    try:
        say(core.runner.describe())
        for batch in bench.batches:
            recorded = record(core, bench, batch)
            num_bytes = phase_bytes(core, bench, batch)
            rows = phase_times(recorded["gpu"])
            for row in rows:
                row["bytes"] = num_bytes.get(row["phase"])
                floor_us = None if row["bytes"] is None else row["bytes"] / bandwidth * 1e6
                row["share_of_floor"] = floor_us and floor_us / row["us"]
            results.append({
                "batch": batch, "step_us": sum(row["us"] for row in rows), "phases": rows,
                "layer": middle_layer(recorded["gpu"]),
            })  # fmt: skip
    finally:
        core.runner.close()
    return {
        "op": "timeline",
        "schema": 1,
        "shape": bench.shape or bench.model,
        "weights": bench.weights,
        **provenance(device, bench.commit),
        "copy_bandwidth_bytes_per_s": bandwidth,
        "conditions": bench.conditions(device)
        | {
            "batch": bench.batches[-1],
            "warm_steps": 2 * WARM_STEPS,
            "recorded": "by torch's profiler, which makes the host's calls slow",
        },
        "results": results,
        **recorded,
    }
