"""The engine that a benchmark runs: its options, how it is built, and how long that takes."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.engines.checkpoint import BenchQuantization, write_config
from benchmarks.measure.options import BenchOptions
from benchmarks.measure.shapes import shape_config
from mrv1.config import (
    AttentionBackendName,
    Dtype,
    EngineConfig,
    KVCacheDtypeName,
    KVScaleName,
    QuantizationName,
)
from mrv1.device import kernel_path
from mrv1.engine import EngineCore
from mrv1.errors import ConfigError
from mrv1.models import random_model


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBench(BenchOptions):
    """The engine to build, and the batches that it decodes: greedily, from random prompts.

    Raises:
        ConfigError: a field is out of its range; the message names it.
    """

    shape: str | None = "qwen3-0.6b"
    """Name in ``SHAPES``, run with random weights; None = the checkpoint ``model``."""
    model: str | None = None
    """Checkpoint directory to run instead of a shape."""
    batches: tuple[int, ...] = (1, 32, 256)
    """Concurrent requests; several sizes are measured one after the other in one engine."""
    prompt_tokens: int = 128
    tensor_parallel_size: int = 1
    """GPUs that share the model; with several, a shape's weights are those of
    ``load_format="dummy"``."""
    quantization: BenchQuantization | None = None
    """``fp8`` quantizes the weights while they load, with a scale for each output. A shape's
    weights are made up as codes: ``fp8``, ``fp8-block`` (blocks of 128 x 128) or ``int4`` (groups
    of 128 inputs)."""
    dtype: Dtype = "auto"
    kv_cache_dtype: KVCacheDtypeName = "auto"
    kv_scale: KVScaleName = "token"
    block_size: int = 16
    max_num_batched_tokens: int = 8192
    attention_backend: AttentionBackendName = "triton"
    deterministic: bool = False
    rank_invariant: bool = False
    overlap: bool = True
    cuda_graphs: bool = True
    enable_prefix_caching: bool = False
    """Off by default: random prompts have no prefix in common."""

    def __post_init__(self) -> None:
        """Check the fields that the engine does not check."""
        if (self.shape is None) == (self.model is None):
            raise ConfigError(
                f"shape, model: expected one of the two, got {self.shape!r} and {self.model!r}"
            )
        if not self.batches or min(self.batches) < 1 or len(set(self.batches)) < len(self.batches):
            raise ConfigError(f"batch: expected different sizes >= 1, got {list(self.batches)}")
        if self.model is not None and self.quantization not in (None, "fp8"):
            raise ConfigError(
                f"quantization: expected None or 'fp8' with a model, got {self.quantization!r}"
            )
        self.check_least(prompt_tokens=1, tensor_parallel_size=1)

    @property
    def weights(self) -> str:
        """Where the weights come from, for the result."""
        if self.shape is None:
            return "checkpoint"
        config = shape_config(self.shape)
        has_codes = self.quantization is not None or config.quantization is not None
        # Those of experts are what ``bench vllm`` gives to vLLM: the same experts are active.
        made_up = self.tensor_parallel_size > 1 or has_codes or config.experts is not None
        return "dummy" if made_up else "random"

    def prompts(self, batch: int, vocab_size: int, run: int = 0) -> list[list[int]]:
        """Return ``batch`` random prompts, different in every run."""
        generator = np.random.default_rng([self.seed, batch, run])
        shape = (batch, self.prompt_tokens)
        prompts: list[list[int]] = generator.integers(vocab_size, size=shape).tolist()
        return prompts

    def engine_options(self) -> dict[str, Any]:
        """Return the fields of ``EngineConfig`` that every engine of the benchmark has."""
        names = (
            "kv_cache_dtype", "kv_scale", "attention_backend", "deterministic", "rank_invariant",
            "overlap", "cuda_graphs", "enable_prefix_caching", "block_size",
            "max_num_batched_tokens", "tensor_parallel_size",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names} | {"max_num_seqs": max(self.batches)}

    def conditions(self, device: torch.device) -> dict[str, object]:
        """Return the conditions that the figures depend on, for the result."""
        cpu = {"num_threads": torch.get_num_threads()} if device.type == "cpu" else {}
        return {
            "prompt_tokens": self.prompt_tokens,
            "sampling": "greedy, end-of-sequence ignored",
            "prompts": "random token ids",
            **self.engine_options(),
            "quantization": self.quantization,
            "kv_scale": None if self.kv_cache_dtype == "auto" else self.kv_scale,
            "seed": self.seed,
            "clocks": "as found, not locked",
            **cpu,
        }


TritonCache = Literal["empty", "partly filled", "filled"]
"""What Triton's cache of compiled kernels had before a start: nothing, not all, all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How an engine started."""

    seconds: float
    """From nothing on the device to ready for requests: weights, memory profile, caches, graphs.
    Imports and the device's context are not included."""
    triton_cache: TritonCache | None
    """None = nothing is compiled."""


def start_engine(
    bench: EngineBench, device: torch.device, *, max_model_len: int
) -> tuple[EngineCore, Start]:
    """Build the one engine that runs all batches, and time its start.

    Raises:
        ConfigError: an option or the checkpoint is wrong.
        UnsupportedDeviceError: the device cannot run mrv1.
        CapacityError: the KV cache does not fit.
    """
    torch.zeros(1, device=device)  # creates the context
    before = num_cached(device)
    start = time.perf_counter()
    core = _new_core(bench, device, max_model_len)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    return core, Start(seconds=seconds, triton_cache=triton_cache(before, num_cached(device)))


def num_cached(device: torch.device) -> int | None:
    """Return the entries of Triton's cache; None = no kernels are compiled."""
    if kernel_path(device) != "triton":
        return None
    from mrv1.kernels._base.triton import triton

    folder = Path(triton.knobs.cache.dir)
    return len([*folder.iterdir()]) if folder.is_dir() else 0


def triton_cache(before: int | None, after: int | None) -> TritonCache | None:
    """Return what Triton's cache had, from its entries before and after a start."""
    if before is None:
        return None
    if before == 0:
        return "empty"
    return "filled" if after == before else "partly filled"


def _new_core(bench: EngineBench, device: torch.device, max_model_len: int) -> EngineCore:
    if bench.weights == "dummy":
        return _of_made_up_weights(bench, device, max_model_len)
    config = _config(bench, device, max_model_len)
    if bench.shape is None:
        asked: QuantizationName | None = None if bench.quantization is None else "fp8"
        return EngineCore(replace(config, quantization=asked))
    model = random_model(
        shape_config(bench.shape),
        bench.dtype,
        device,
        seed=bench.seed,
        deterministic=bench.deterministic,
        rank_invariant=bench.rank_invariant,
    )
    return EngineCore(config, model=model)


def _of_made_up_weights(
    bench: EngineBench, device: torch.device, max_model_len: int
) -> EngineCore:
    """Return an engine whose ranks, which are processes, read a shape from a ``config.json``."""
    shape = shape_config(str(bench.shape))
    with TemporaryDirectory(prefix="mrv1-bench-") as folder:
        write_config(Path(folder), shape, shape.torch_dtype, bench.quantization)
        config = _config(bench, device, max_model_len)
        return EngineCore(replace(config, model=folder, load_format="dummy"))


def _config(bench: EngineBench, device: torch.device, max_model_len: int) -> EngineConfig:
    return EngineConfig(
        model=bench.model or str(bench.shape),
        dtype=bench.dtype,
        device=str(device),
        max_model_len=max_model_len,
        **bench.engine_options(),
    )
