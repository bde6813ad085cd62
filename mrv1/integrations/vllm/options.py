"""vLLM's configuration as mrv1's; what mrv1 cannot serve is refused at start, by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from mrv1.config import BLOCK_SIZES, EngineConfig, KVCacheDtypeName
from mrv1.errors import ConfigError
from mrv1.from_vllm import QUANTIZATIONS
from mrv1.integrations.vllm.attention_pages import CODES
from mrv1.integrations.vllm.model_options import RANK_INVARIANT
from mrv1.integrations.vllm.sampling import BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

REQUEST_CHECK = "mrv1.integrations.vllm:RequestCheck"
"""What ``--logits-processors`` must name, as vLLM spells a class."""

KV_CACHE_DTYPES = {
    "auto": "auto",
    **{name: cast("KVCacheDtypeName", codes.name) for name, codes in CODES.items()},
}
"""vLLM's ``kv_cache_dtype`` -> mrv1's."""

CONNECTORS = ("ExampleConnector",)
"""vLLM's KV connectors that index a layer's tensor; others copy whole blocks by their address."""

EXECUTORS = ("mp",)
"""Executors of several ranks: each worker is a process of this host, and the driver answers."""

LOAD_FORMATS = ("auto", "hf", "safetensors", "dummy")

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")


def engine_config(vllm_config: VllmConfig, device: torch.device) -> EngineConfig:
    """Return the runner's configuration; ConfigError names every option that cannot be served."""
    problems = [*_problems(vllm_config)]
    if problems:
        raise ConfigError(f"mrv1's worker: {'; '.join(problems)}")
    from vllm import envs

    model, cache = vllm_config.model_config, vllm_config.cache_config
    scheduler = vllm_config.scheduler_config
    lora = vllm_config.lora_config
    name = str(model.model) if model.revision is None else f"{model.model}@{model.revision}"
    return EngineConfig(
        model=name,
        load_format="dummy" if vllm_config.load_config.load_format == "dummy" else "auto",
        quantization=QUANTIZATIONS.get(model.quantization),
        dtype=model.dtype,
        device=str(device),
        tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
        kv_cache_dtype=KV_CACHE_DTYPES[cache.cache_dtype],
        block_size=cache.block_size,
        max_model_len=model.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        gpu_memory_utilization=cache.gpu_memory_utilization,
        kv_cache_memory_bytes=cache.kv_cache_memory_bytes,
        mm_cache_memory_bytes=0,  # text only
        window_recycling=False,  # vLLM's one group of full attention keeps every block
        enable_prefix_caching=bool(cache.enable_prefix_caching),
        overlap=bool(scheduler.async_scheduling),
        cuda_graphs=not model.enforce_eager,
        deterministic=bool(envs.VLLM_BATCH_INVARIANT),
        rank_invariant=vllm_config.additional_config.get(RANK_INVARIANT, False),
        max_bad_words_num=MAX_BAD_WORDS,
        bad_words_max_len=BAD_WORD_TOKENS,
        max_logit_bias=MAX_LOGIT_BIAS,
        max_logprobs=model.max_logprobs,
        logprobs_mode=model.logprobs_mode,
        enable_lora=lora is not None,
        max_loras=1 if lora is None else lora.max_loras,
        max_lora_rank=16 if lora is None else lora.max_lora_rank,
        generation_config=None,  # vLLM reads sampling defaults itself
        seed=model.seed or 0,
    )


def share_of_all(share: float, free_bytes: int, total_bytes: int) -> float:
    """Return mrv1's ``gpu_memory_utilization``, of all processes, from vLLM's, of one engine.

    ``free_bytes`` are before the engine takes any. ConfigError: less than ``share`` is free.
    """
    if free_bytes < share * total_bytes:
        raise ConfigError(
            "gpu_memory_utilization: expected at most the share of the GPU's memory that is free, "
            f"{free_bytes / total_bytes:.3f}, got {share:g}; other processes have the rest"
        )
    return min(1.0, share + 1 - free_bytes / total_bytes)


def _problems(config: VllmConfig) -> Iterator[str]:
    yield from _unset(config, "speculative_config")
    if config.lora_config is not None:
        yield from _adapter_problems(config.lora_config, config.model_config.dtype)
    yield from _unset(config, "ec_transfer_config", "weight_transfer_config", "watermark_config")
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    for name in (
        "data_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        size = getattr(parallel, name, 1)
        if size != 1:
            yield f"{name}: expected 1, got {size}"
    yield from _rank_problems(config)
    yield from _flags_off(parallel, "enable_expert_parallel", "enable_eplb", "enable_dbo")
    if model.runner_type != "generate":
        yield f"runner: expected 'generate', got {model.runner_type!r}"
    if model.is_multimodal_model:
        yield f"model: expected one of text alone, got {model.architecture}"
    if model.is_encoder_decoder:
        yield f"model: expected a decoder, got {model.architecture}"
    if model.quantization is not None and model.quantization not in QUANTIZATIONS:
        expected = ", ".join(QUANTIZATIONS)
        yield f"quantization: expected one of {expected}, got {model.quantization!r}"
    yield from _flags_off(
        model, "enable_prompt_embeds", "enable_return_routed_experts", "disable_sliding_window",
        "is_diffusion", "return_sampling_mask",
    )  # fmt: skip
    if model.hf_overrides:
        yield f"hf_overrides: expected none, got {model.hf_overrides!r}"
    if model.logprobs_mode not in LOGPROBS_MODES:
        yield f"logprobs_mode: expected one of {LOGPROBS_MODES}, got {model.logprobs_mode!r}"
    yield from _processor_problems(model.logits_processors)
    if cache.cache_dtype not in KV_CACHE_DTYPES:
        yield (
            f"kv_cache_dtype: expected one of {tuple(KV_CACHE_DTYPES)}, got {cache.cache_dtype!r}"
        )
    if cache.block_size not in BLOCK_SIZES:
        yield f"block_size: expected one of {BLOCK_SIZES}, got {cache.block_size}"
    yield from _flags_off(cache, "kv_sharing_fast_prefill")
    if config.kv_transfer_config is not None:
        yield from _connector_problems(config.kv_transfer_config, cache.cache_dtype)
    load = config.load_config
    if load.load_format not in LOAD_FORMATS:
        yield f"load_format: expected one of {LOAD_FORMATS}, got {load.load_format!r}"
    yield from _unset(load, "download_dir")


def _rank_problems(config: Any) -> Iterator[str]:  # noqa: ANN401 - a VllmConfig
    parallel = config.parallel_config
    stages, size = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
    if stages != 1:
        yield (
            f"pipeline_parallel_size: expected 1, got {stages}; mrv1's attention backend runs "
            "with several stages (--attention-backend CUSTOM)"
        )
    if size == 1:
        return
    if parallel.nnodes != 1:
        yield f"nnodes: expected 1 with tensor_parallel_size={size}, got {parallel.nnodes}"
    executor = parallel.distributed_executor_backend
    if executor not in EXECUTORS:
        yield (
            f"distributed_executor_backend: expected one of {EXECUTORS} with "
            f"tensor_parallel_size={size}, got {executor!r}"
        )
    if config.kv_transfer_config is not None:
        yield f"kv_transfer_config: expected none with tensor_parallel_size={size}, got one"


def _adapter_problems(lora: Any, dtype: torch.dtype) -> Iterator[str]:  # noqa: ANN401 - vLLM's
    if lora.lora_dtype not in ("auto", dtype):
        yield f"lora_dtype: expected the model's, {dtype}, got {lora.lora_dtype}"
    yield from _unset(lora, "target_modules", "default_mm_loras", "max_lora_cls_labels")
    yield from _flags_off(lora, "enable_tower_connector_lora", "enable_moe_shared_loras")


def _unset(config: Any, *names: str) -> Iterator[str]:  # noqa: ANN401 - a part of vLLM's
    """Yield a problem for each option that has a value; not every version has every option."""
    for name in names:
        if getattr(config, name, None) is not None:
            yield f"{name}: expected None, which mrv1's worker supports, got a value"


def _flags_off(config: Any, *names: str) -> Iterator[str]:  # noqa: ANN401 - a part of vLLM's
    for name in names:
        if getattr(config, name, False):
            yield f"{name}: expected False, which mrv1's worker supports, got True"


def _connector_problems(transfer: Any, cache_dtype: str) -> Iterator[str]:  # noqa: ANN401 - vLLM's
    if transfer.kv_connector not in CONNECTORS and not transfer.kv_connector_module_path:
        yield (
            f"kv_connector: expected one of {CONNECTORS} or one with kv_connector_module_path, "
            f"got {transfer.kv_connector!r}, which copies pages of vLLM's layout"
        )
    if transfer.kv_load_failure_policy != "fail":
        yield (f"kv_load_failure_policy: expected 'fail', got {transfer.kv_load_failure_policy!r}")
    if cache_dtype != "auto":
        yield f"kv_cache_dtype: expected 'auto' with a KV connector, got {cache_dtype!r}"


def _processor_problems(processors: Any) -> Iterator[str]:  # noqa: ANN401 - texts or classes
    given = [*(processors or ())]
    names = [
        each if isinstance(each, str) else f"{each.__module__}:{each.__name__}" for each in given
    ]
    checks = {REQUEST_CHECK, f"{REQUEST_CHECK.split(':')[0]}.request_check:RequestCheck"}
    others = [name for name in names if name not in checks]
    if others:
        yield f"logits_processors: expected {REQUEST_CHECK} alone, got {others}"
    elif not given:
        yield (
            f"logits_processors: expected ['{REQUEST_CHECK}'], got none; start vLLM with "
            f"--logits-processors {REQUEST_CHECK}, so that a request which mrv1 cannot serve is "
            "refused alone"
        )
