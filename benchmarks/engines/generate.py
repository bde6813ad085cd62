"""Whole-engine generation: tokens per second, time of a decode step, and the floor under it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks.engines.active import count_active_experts
from benchmarks.engines.engine import EngineBench, start_engine
from benchmarks.engines.sample import Sample, run_once
from benchmarks.measure.floor import (
    active_experts,
    copy_bandwidth,
    step_kv_bytes,
    step_weight_bytes,
)
from mrv1.config import EngineConfig
from mrv1.device import resolve_device
from mrv1.engine import EngineCore
from mrv1.models import DecoderModel
from mrv1.provenance import provenance
from mrv1.sampler import SamplingParams

SCHEMA = 2
"""Version of the result's layout; raised when a field changes its meaning or goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateBench(EngineBench):
    """Options: whole generations are measured; all requests of a batch are added at once.

    Raises:
        ConfigError: a field is out of its range; the message names it.
    """

    output_tokens: int = 256
    """Tokens to generate per request, >= 2; end-of-sequence tokens do not end a request."""
    repeats: int = 3
    """Counted runs per batch, after one uncounted run."""

    def __post_init__(self) -> None:
        """Check the fields that the engine does not check."""
        EngineBench.__post_init__(self)
        self.check_least(output_tokens=2, repeats=1)


def run_generate(
    bench: GenerateBench, say: Callable[[str], None] = lambda _: None
) -> dict[str, object]:
    """Measure every batch and return the result, ready for JSON.

    Args:
        bench: the options.
        say: receives messages about the progress, one line each.

    Raises:
        ConfigError: an option or the checkpoint is wrong.
        UnsupportedDeviceError: the device is not there or cannot run mrv1.
        CapacityError: the KV cache does not fit.
        StepError: a step failed.
    """
    device = resolve_device(bench.device)
    bandwidth = copy_bandwidth(device)  # first: the engine takes all free memory
    max_model_len = bench.prompt_tokens + bench.output_tokens
    core, start = start_engine(bench, device, max_model_len=max_model_len)
    try:
        say(core.runner.describe())
        model, config = core.runner.model, core.runner.config
        batches = [_measure_batch(core, bench, batch, bandwidth, say) for batch in bench.batches]
        result: dict[str, object] = {
            "op": "generate",
            "schema": SCHEMA,
            "shape": bench.shape or bench.model,
            "weights": bench.weights,
            "dtype": str(core.runner.model.dtype).removeprefix("torch."),
            "path": core.runner.path,
            **provenance(device, bench.commit),
            "copy_bandwidth_bytes_per_s": bandwidth,
            "start": asdict(start),
            "conditions": _conditions(bench, device),
            "results": batches,
        }
    finally:
        core.runner.close()
    for entry in batches:  # the memory of the measured engine's cache is free now
        entry |= _experts_of(model, config, bench, int(str(entry["batch"])), say)
    return result


def _experts_of(
    model: DecoderModel,
    config: EngineConfig,
    bench: GenerateBench,
    batch: int,
    say: Callable[[str], None],
) -> dict[str, float | None]:
    """Return how many experts a layer reads in a decode step, and what ``weight_bytes`` counts."""
    prompts = bench.prompts(batch, model.config.vocab_size, 1)
    active = count_active_experts(model, config, prompts, bench.output_tokens)
    expected = active_experts(model.config, batch) if model.config.experts is not None else None
    if active is not None and expected is not None:
        say(f"batch {batch}: {active:.1f} active experts a layer, {expected:.1f} if spread evenly")
    return {"active_experts": active, "expected_experts": expected}


def _conditions(bench: GenerateBench, device: torch.device) -> dict[str, object]:
    return {
        **bench.conditions(device),
        "output_tokens": bench.output_tokens,
        "repeats": bench.repeats,
        "warm_up_runs": 1,
    }


def _measure_batch(
    core: EngineCore,
    bench: GenerateBench,
    batch: int,
    bandwidth: float | None,
    say: Callable[[str], None],
) -> dict[str, object]:
    params = SamplingParams(temperature=0, max_tokens=bench.output_tokens, ignore_eos=True)
    vocab_size = core.runner.model_config.vocab_size
    samples = []
    for repeat in range(bench.repeats + 1):
        sample = run_once(core, bench.prompts(batch, vocab_size, repeat), params)
        counted = f"run {repeat} of {bench.repeats}" if repeat else "warm-up, not counted"
        say(
            f"batch {batch}, {counted}: {sample.tokens_per_s:.1f} tokens/s, "
            f"{sample.decode_step_ms:.2f} ms per decode step"
        )
        samples.append(sample)
    return _summary(core, bench, batch, bandwidth, samples[1:])


def _summary(
    core: EngineCore,
    bench: GenerateBench,
    batch: int,
    bandwidth: float | None,
    samples: Sequence[Sample],
) -> dict[str, object]:
    """Return one batch's entry: medians over the runs, the floor, and the runs themselves."""

    def median(name: str) -> float:
        return float(statistics.median(getattr(sample, name) for sample in samples))

    config, dtype = core.runner.model_config, core.runner.model.dtype
    weight_bytes = step_weight_bytes(config, dtype, bench.tensor_parallel_size, batch=batch)
    kv_bytes = step_kv_bytes(
        core.runner.spec, config.layer_windows, batch=batch,
        prompt_tokens=bench.prompt_tokens, output_tokens=bench.output_tokens,
    )  # fmt: skip
    floor_ms = None if bandwidth is None else (weight_bytes + kv_bytes) / bandwidth * 1e3
    on_gpu = core.runner.device.type == "cuda"
    return {
        "batch": batch,
        "tokens_per_s": median("tokens_per_s"),
        "decode_step_ms": median("decode_step_ms"),
        "prefill_ms": median("prefill_ms"),
        # On a CPU a launch is the computation itself: its time says nothing about the host.
        "host_ms": median("host_ms") if on_gpu else None,
        "gpu_ms": median("gpu_ms") if on_gpu else None,
        "num_steps": samples[0].num_steps,
        "num_graph_steps": samples[0].num_graph_steps,
        "num_preemptions": sum(sample.num_preemptions for sample in samples),
        "weight_bytes": weight_bytes,
        "kv_bytes": kv_bytes,
        "floor_ms": floor_ms,
        "share_of_floor": None if floor_ms is None else floor_ms / median("decode_step_ms"),
        "samples": [asdict(sample) for sample in samples],
    }
