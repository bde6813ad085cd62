"""Whole-engine generation: tokens per second, time of a decode step, and the floor under it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from mrv1.bench.floor import copy_bandwidth, step_kv_bytes, step_weight_bytes
from mrv1.bench.provenance import provenance
from mrv1.bench.sample import Sample, run_once
from mrv1.bench.shapes import shape_config
from mrv1.config import (
    AttentionBackendName,
    DtypeName,
    EngineConfig,
    KVCacheDtypeName,
    KVScaleName,
    resolve_dtype,
)
from mrv1.device import kernel_path, resolve_device
from mrv1.engine import EngineCore
from mrv1.errors import ConfigError
from mrv1.kernels.ops import select_ops
from mrv1.models import DecoderModel, random_weights
from mrv1.sampler import SamplingParams

SCHEMA = 1
"""Version of the result's layout; raised when a field changes its meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateBench:
    """What to measure: greedy decoding of random prompts, all of one batch added at once.

    Raises:
        ConfigError: a field is out of its range; the message names it.
    """

    shape: str | None = "qwen3-0.6b"
    """Name in ``SHAPES``, run with random weights; None = the checkpoint ``model``."""
    model: str | None = None
    """Checkpoint directory to run instead of a shape."""
    batches: tuple[int, ...] = (1, 32, 256)
    """Concurrent requests, measured one after the other in one engine."""
    prompt_tokens: int = 128
    output_tokens: int = 256
    """Generated tokens of a request, end-of-sequence tokens ignored; >= 2."""
    repeats: int = 3
    """Measured runs a batch, after one that is not counted."""
    dtype: DtypeName = "auto"
    device: str = "auto"
    kv_cache_dtype: KVCacheDtypeName = "auto"
    kv_scale: KVScaleName = "token"
    block_size: int = 16
    max_num_batched_tokens: int = 8192
    attention_backend: AttentionBackendName = "triton"
    seed: int = 0
    """Of weights and prompts."""
    commit: str | None = None
    """Commit of the source; None asks git."""

    def __post_init__(self) -> None:
        """Check what the engine will not."""
        if (self.shape is None) == (self.model is None):
            raise ConfigError(
                f"shape, model: expected one of the two, got {self.shape!r} and {self.model!r}"
            )
        if not self.batches or min(self.batches) < 1 or len(set(self.batches)) < len(self.batches):
            raise ConfigError(f"batch: expected different sizes >= 1, got {list(self.batches)}")
        for name, least in (("prompt_tokens", 1), ("output_tokens", 2), ("repeats", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: expected >= {least}, got {getattr(self, name)}")


def run_generate(
    bench: GenerateBench, say: Callable[[str], None] = lambda _: None
) -> dict[str, object]:
    """Measure every batch and return the result, ready for JSON.

    Args:
        bench: what to measure.
        say: is told what goes on, one line each.

    Raises:
        ConfigError: an option or the checkpoint is wrong.
        UnsupportedDeviceError: the device is not there or cannot run mrv1.
        CapacityError: the KV cache does not fit.
        StepError: a step failed.
    """
    device = resolve_device(bench.device)
    bandwidth = copy_bandwidth(device)  # before the engine takes the memory
    core = _new_core(bench, device)
    try:
        say(core.runner.describe())
        batches = [_measure_batch(core, bench, batch, bandwidth, say) for batch in bench.batches]
        return {
            "op": "generate",
            "schema": SCHEMA,
            "shape": bench.shape or bench.model,
            "weights": "random" if bench.shape else "checkpoint",
            "dtype": str(core.runner.model.dtype).removeprefix("torch."),
            "path": core.runner.path,
            **provenance(device, bench.commit),
            "copy_bandwidth_bytes_per_s": bandwidth,
            "conditions": _conditions(bench, device),
            "results": batches,
        }
    finally:
        core.runner.close()


def _new_core(bench: GenerateBench, device: torch.device) -> EngineCore:
    """Build the one engine that all batches run in."""
    config = EngineConfig(
        model=bench.model or str(bench.shape),
        dtype=bench.dtype,
        device=str(device),
        kv_cache_dtype=bench.kv_cache_dtype,
        kv_scale=bench.kv_scale,
        attention_backend=bench.attention_backend,
        block_size=bench.block_size,
        max_model_len=bench.prompt_tokens + bench.output_tokens,
        max_num_seqs=max(bench.batches),
        max_num_batched_tokens=bench.max_num_batched_tokens,
    )
    if bench.shape is None:
        return EngineCore(config)
    shape = shape_config(bench.shape)
    dtype = resolve_dtype(bench.dtype, shape.torch_dtype, device)
    weights = random_weights(shape, device=device, dtype=dtype, seed=bench.seed)
    model = DecoderModel(shape, weights, select_ops(kernel_path(device)))
    return EngineCore(config, model=model)


def _conditions(bench: GenerateBench, device: torch.device) -> dict[str, object]:
    cpu = {"num_threads": torch.get_num_threads()} if device.type == "cpu" else {}
    return {
        "prompt_tokens": bench.prompt_tokens,
        "output_tokens": bench.output_tokens,
        "repeats": bench.repeats,
        "warm_up_runs": 1,
        "sampling": "greedy, end-of-sequence ignored",
        "prompts": "random token ids",
        "kv_cache_dtype": bench.kv_cache_dtype,
        "kv_scale": None if bench.kv_cache_dtype == "auto" else bench.kv_scale,
        "attention_backend": bench.attention_backend,
        "block_size": bench.block_size,
        "max_num_seqs": max(bench.batches),
        "max_num_batched_tokens": bench.max_num_batched_tokens,
        "seed": bench.seed,
        "clocks": "as found, not locked",
        **cpu,
    }


def _measure_batch(
    core: EngineCore,
    bench: GenerateBench,
    batch: int,
    bandwidth: float | None,
    say: Callable[[str], None],
) -> dict[str, object]:
    params = SamplingParams(temperature=0, max_tokens=bench.output_tokens, ignore_eos=True)
    generator = np.random.default_rng([bench.seed, batch])
    shape = (batch, bench.prompt_tokens)
    samples = []
    for repeat in range(bench.repeats + 1):
        prompts = generator.integers(core.runner.model_config.vocab_size, size=shape).tolist()
        sample = run_once(core, prompts, params)
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
    weight_bytes = step_weight_bytes(config, dtype)
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
        # On a CPU the launch is the computation: it says nothing about the host.
        "launch_ms": median("launch_ms") if on_gpu else None,
        "num_steps": samples[0].num_steps,
        "num_preemptions": sum(sample.num_preemptions for sample in samples),
        "weight_bytes": weight_bytes,
        "kv_bytes": kv_bytes,
        "floor_ms": floor_ms,
        "share_of_floor": None if floor_ms is None else floor_ms / median("decode_step_ms"),
        "samples": [asdict(sample) for sample in samples],
    }
