"""The reports of a runner: counts of its steps, its start-up line, its memory."""

from __future__ import annotations

from collections import Counter

import torch

from mrv1.config import EngineConfig, KVScaleName
from mrv1.device import Conversion, KernelPath, device_info
from mrv1.headwise import HeadPolicy
from mrv1.kernels.layers.quantized import (
    EXPERTS_PATH,
    MOST_PLAIN_TOKENS,
    quantized_path,
    takes_codes,
)
from mrv1.models import DecoderModel, ModelConfig, ModelWeights
from mrv1.runner.async_output import OutputRing
from mrv1.runner.device_step import DeviceStep
from mrv1.runner.features import FeatureBuffer
from mrv1.runner.kv_cache import KVCache
from mrv1.runner.report import PATHS, KVReport, StartClock, report_of
from mrv1.runner.start import RunnerParts

_SCALED: dict[KVScaleName, str] = {
    "token": "token and head",
    "quarter": "quarter of a block and head",
    "head": "head",
}


class RunnerReports:
    """The reports of a ``ModelRunner``; its counts go on when its parts are replaced."""

    config: EngineConfig
    path: KernelPath
    model: DecoderModel
    head_policy: HeadPolicy
    kv_cache: KVCache
    features: FeatureBuffer
    _parts: RunnerParts
    _step: DeviceStep
    _outputs: OutputRing
    _start_clock: StartClock
    _compilations: Counter[str]
    _num_warm_up_compilations: int

    def __init__(self) -> None:
        self.num_graph_steps = 0
        """Steps that ran as CUDA graphs, sampling included."""
        self._former_waits, self._former_seconds = 0, 0.0

    def count_former_steps(self) -> None:
        """Keep the counts of steps whose ring of outputs is about to be replaced."""
        self._former_waits, self._former_seconds = self.num_staging_waits, self.gpu_seconds

    @property
    def num_staging_waits(self) -> int:
        """How often a launch waited for the older step that used the same pinned buffers."""
        return self._former_waits + self._outputs.num_waits

    @property
    def gpu_seconds(self) -> float:
        """Seconds that the GPU has worked on finished steps; 0 on a CPU."""
        return self._former_seconds + self._outputs.gpu_seconds

    @property
    def start_seconds(self) -> dict[str, float]:
        """Seconds of each part of the start: weights, kernels, ranks, memory, graphs, warm-up."""
        return dict(self._start_clock.seconds)

    @property
    def num_compilations(self) -> int:
        """How often Triton has compiled or loaded a kernel since the runner was built."""
        return self._compilations.total() - self._num_warm_up_compilations

    def describe(self) -> str:
        """Return one line: device, path, dtypes, roles of heads, blocks, their bytes, graphs."""
        config, model, cache = self.config, self.model, self.kv_cache
        dtype = str(model.dtype).removeprefix("torch.")
        if model.config.quantization is not None:
            how = describe_products(config, model.weights, model.device, model.dtype)
            dtype += f", {model.config.quantization.describe()} ({how})"
        if self.path == "reference":
            count = torch.get_num_threads()
            dtype += f", {count} thread{'s' * (count > 1)}"
        how = PATHS[self.path]
        if config.attention_backend == "flashinfer":
            how += ", attention by FlashInfer (one step in flight)"
        graphs = "no CUDA graphs"
        if self._step.is_capturable and self._step.graphs.shapes:
            graphs = f"CUDA graphs of {len(self._step.graphs.shapes)} step shapes"
        return (
            f"{model.config.architecture} on {device_info(model.device).name}: {how}, {dtype}, "
            f"KV {_describe_kv(config, cache, self._parts.conversion)}, "
            f"{_describe_heads(cache, self.head_policy)}, "
            f"{' + '.join(map(str, cache.num_blocks))} blocks of {cache.spec.block_size} tokens "
            f"({self.kv_report()['total_bytes'] / 2**20:.1f} MiB), {graphs}"
            f"{_describe_rope(model.config)}{_describe_adapters(model)}{_describe_bits(config)}"
        )

    def kv_report(self) -> KVReport:
        """Return the KV cache's sizes in bytes."""
        return report_of(self.kv_cache, self._parts.streaming_demand, self.features.nbytes)


def describe_products(
    config: EngineConfig, weights: ModelWeights, device: torch.device, dtype: torch.dtype
) -> str:
    """Return how products read quantized weights, and whether they quantize tokens."""
    as_values = config.deterministic or dtype.itemsize > 2
    linear, experts = weights.codes
    if experts and not linear and device.type != "cpu":
        return EXPERTS_PATH
    how = quantized_path(device, linear, as_values=as_values)
    if not as_values and any(takes_codes(weight, device, dtype) for weight in linear):
        how += f"; more than {MOST_PLAIN_TOKENS} tokens are quantized to e4m3 too"
    if experts and device.type != "cpu":
        how += f"; experts {EXPERTS_PATH}"
    return how


def _describe_adapters(model: DecoderModel) -> str:
    """Return how many adapters there is room for."""
    if model.lora is None:
        return ""
    size, rank = model.lora.nbytes / 2**20, model.lora.max_rank
    return f", room for {model.lora.max_loras} LoRA adapters of rank {rank} ({size:.1f} MiB)"


def _describe_bits(config: EngineConfig) -> str:
    """Return what the bits of a result do not follow from."""
    if not config.deterministic:
        return ""
    return ", deterministic" + " on any number of ranks" * config.rank_invariant


def _describe_rope(config: ModelConfig) -> str:
    """Return what a context decides on: longrope's factors, and what the other ones are for."""
    rope, longest = config.rope, config.max_model_len
    if rope.rope_type != "longrope":
        return ""
    original = rope.original_max_position_embeddings
    if longest > original:
        return f", longrope's long factors for all texts (max_model_len is {longest:,})"
    return f", longrope's short factors (max_model_len is {longest:,}, at most {original:,})"


def _describe_heads(cache: KVCache, policy: HeadPolicy) -> str:
    streaming = [seen for seen in policy.groups if not seen.is_full]
    if not streaming:
        return "all heads full"
    seen = ", ".join(
        f"{each.window} tokens" + (f" and a sink of {each.sink}" if each.sink else "")
        for each in streaming
    )
    recycles = any(not group.keeps.is_full for group in cache.groups.groups)
    kept = "" if recycles else ", but no block is recycled"
    return f"{policy.full_share:.0%} of the heads full, the others see {seen}{kept}"


def _describe_kv(config: EngineConfig, cache: KVCache, conversion: Conversion | None) -> str:
    """Return the cache's dtype, scales and what they switch off, and conversions in software."""
    dtype = cache.spec.page_format.element
    if conversion is None:
        return dtype
    converted = ""
    if conversion.path == "integer":
        converted = f", converted in integer arithmetic ({conversion.reason})"
    uncached = ""
    if config.enable_prefix_caching and not config.caches_prefixes:
        uncached = " (no prefix caching: its bytes depend on the order of writes)"
    return f"{dtype} with a scale per {_SCALED[config.kv_scale]}{uncached}{converted}"
