"""A runner's start: its parts, built so that an error that can be known early fails early."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch

from mrv1.config import EngineConfig, dtype_name, resolve_max_model_len
from mrv1.device import Conversion, device_info, kernel_path, resolve_dtype
from mrv1.errors import ConfigError
from mrv1.headwise import HeadGroups, HeadPolicy
from mrv1.kernels.cache.formats import FORMATS
from mrv1.kernels.registry import Ops, select_ops
from mrv1.models import Checkpoint, DecoderModel, ModelConfig, ParallelContext, load_model
from mrv1.models.batch import check_codes
from mrv1.models.drafts import HeadConfig, head_config, load_head
from mrv1.runner.compile_ahead import KernelSet, compiled_beside
from mrv1.runner.cpu_threads import choose_threads
from mrv1.runner.debug import SyncedOps
from mrv1.runner.device_memory import within_memory
from mrv1.runner.device_step import DeviceStep, slot_fields
from mrv1.runner.features import FeatureBuffer
from mrv1.runner.head_groups import read_config, resolve_head_groups, resolve_policy
from mrv1.runner.kv_cache import CacheSpec, StreamingDemand
from mrv1.runner.profile import blocks_of_groups, empty_batch, warm_up
from mrv1.runner.report import StartClock
from mrv1.runner.slot_state import field_starts
from mrv1.runner.staging import HostMemory
from mrv1.sampler import LogitsProcessors


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerParts:
    """What a runner consists of, but for its KV cache."""

    config: EngineConfig
    """As configured, with the checkpoint's directory."""
    model_config: ModelConfig
    """Of the whole model, whatever part of it this rank has."""
    head_policy: HeadPolicy
    head_groups: HeadGroups
    """Of the whole model."""
    step: DeviceStep
    """The step on the device, with the model and this rank's head groups."""
    streaming_demand: StreamingDemand
    conversion: Conversion | None
    """How the GPU converts the cache's codes; None = the cache has none."""
    is_checkpoint: bool
    """Whether the model is that of the configured checkpoint, not one of the caller's."""


def build_parts(
    config: EngineConfig,
    device: torch.device,
    *,
    model: DecoderModel | None,
    model_config: ModelConfig | None,
    head_policy: HeadPolicy | None,
    processors: LogitsProcessors,
    parallel: ParallelContext,
    memory: HostMemory | None,
    clock: StartClock,
    progress: bool,
) -> RunnerParts:
    """Build all but the KV cache on the current device ``device``, as ``ModelRunner`` says."""
    if parallel.size != config.tensor_parallel_size:
        raise ConfigError(
            "tensor_parallel_size: expected a ParallelContext of as many ranks, "
            f"{config.tensor_parallel_size}, got {parallel.size}"
        )
    is_checkpoint = model is None
    codes = FORMATS.get(config.kv_cache_dtype)
    # Fails before anything loads.
    conversion = None if codes is None else codes.conversion(device)
    ops = select_ops(kernel_path(device))
    if config.debug_sync:
        ops = cast("Ops", SyncedOps(ops, device))
    # Small files come before the weights: an error in one fails at once, not minutes later.
    if model is not None:
        model_config = model.whole_config
    elif model_config is None:
        config, model_config = read_config(config, device, progress=progress)
    check_codes(config.kv_cache_dtype, model_config)
    # A model that cannot be divided fails here.
    parallel.shard(
        model_config, deterministic=config.deterministic, rank_invariant=config.rank_invariant
    )
    max_model_len = resolve_max_model_len(config.max_model_len, model_config.max_model_len)
    policy = resolve_policy(config, model_config, head_policy, is_checkpoint=is_checkpoint)
    _check_sums(policy, config, parallel)
    head = _draft_head(config, model_config, policy)
    if head is not None:
        config = replace(config, max_draft_tokens=config.num_head_drafts)
    cached = (
        policy
        if head is None
        else HeadPolicy.of_layer_windows(
            (*model_config.layer_windows, -1), model_config.num_kv_heads
        )
    )
    head_groups = resolve_head_groups(config, cached, max_model_len)
    groups = head_groups.slice(parallel.rank, parallel.size)
    head_scales = None
    if config.kv_scale == "head":
        head_scales = Checkpoint.open(config.model).kv_scales(
            model_config.num_layers, model_config.num_kv_heads, has_vision=model_config.has_vision
        )
        own_heads = (*head_scales.shape[:2], groups.policy.num_kv_heads)
        head_scales = head_scales[parallel.part(head_scales.shape, own_heads)]
    dtype = (
        resolve_dtype(dtype_name(config.dtype), model_config.torch_dtype, device)
        if model is None
        else model.dtype
    )
    # Sizes that can be known to be too large are refused before weights load.
    fields = slot_fields(config, model_config, groups, max_model_len)
    field_starts(config.max_num_seqs, fields)
    FeatureBuffer.rows_of(config, model_config, dtype)
    kernels = KernelSet(
        config=config,
        model_config=model_config,
        head_policy=policy,
        dtype=dtype,
        gpu=device_info(device),
        rank=parallel.rank,
        has_peers=parallel.peers is not None,
    )
    with compiled_beside(kernels, progress=progress):
        model = model or load_model(
            config.model,
            device=device,
            dtype=dtype,
            ops=ops,
            progress=progress,
            parallel=parallel,
            deterministic=config.deterministic,
            rank_invariant=config.rank_invariant,
            load_format=config.load_format,
            config=model_config,
        )
        draft_model = None
        if head is not None:
            with within_memory("speculative", "the draft head", device):
                draft_model = load_head(head, _head_path(config), model, ops)
        clock.lap("weights")
    clock.lap("kernels")
    for name in ("deterministic", "rank_invariant"):
        if getattr(model, name) != getattr(config, name):
            raise ConfigError(
                f"model: expected one with {name}={getattr(config, name)}, as configured"
            )
    if config.enable_lora:
        with within_memory("max_loras, max_lora_rank", "the adapters", device):
            model.enable_lora(config.max_loras, config.max_lora_rank)
    with within_memory("max_num_seqs", "the state of requests", device):
        step = DeviceStep(
            config,
            model,
            ops,
            CacheSpec.of(config, model, draft_layers=int(head is not None)),
            groups,
            max_model_len,
            head_scales=head_scales,
            processors=processors,
            memory=memory,
            draft_model=draft_model,
        )
    return RunnerParts(
        config=config,
        model_config=model_config,
        head_policy=policy,
        head_groups=head_groups,
        step=step,
        streaming_demand=StreamingDemand(config, max_model_len),
        conversion=conversion,
        is_checkpoint=is_checkpoint,
    )


def with_policy(
    parts: RunnerParts, policy: HeadPolicy | str | None, parallel: ParallelContext
) -> RunnerParts:
    """Return parts for another head policy, with a step of their own around the same model.

    ``policy`` is a policy, the text that names one, or None = the one without ``head_policy``.
    ConfigError: the policy cannot be read, is not for this model, or does not go with the backend,
    with a draft head or with ``rank_invariant``. CapacityError: the state of requests does
    not fit.
    """
    step, model_config = parts.step, parts.model_config
    given = policy if isinstance(policy, HeadPolicy) else None
    config = replace(parts.config, head_policy=policy if isinstance(policy, str) else None)
    new = resolve_policy(config, model_config, given, is_checkpoint=parts.is_checkpoint)
    _check_sums(new, config, parallel)
    if step.drafts is not None:
        _draft_head(config, model_config, new)
        return parts  # all heads are full, as before
    head_groups = resolve_head_groups(config, new, step.max_model_len)
    with within_memory("max_num_seqs", "the state of requests", step.device):
        own = head_groups.slice(parallel.rank, parallel.size)
        return replace(
            parts,
            config=config,
            head_policy=new,
            head_groups=head_groups,
            step=step.with_heads(own),
        )


def _check_sums(policy: HeadPolicy, config: EngineConfig, parallel: ParallelContext) -> None:
    """Raise ConfigError if ranks would not add as one does, because of the policy."""
    mixes = any(len({seen.is_full for seen in layer}) > 1 for layer in policy.heads)
    if config.rank_invariant and parallel.size > 1 and mixes:
        raise ConfigError(
            "head_policy: expected layers of full or of streaming heads alone with "
            f"rank_invariant=True and tensor_parallel_size={parallel.size}, as sums follow from a "
            "rank's heads, got both in a layer"
        )


def _head_path(config: EngineConfig) -> str:
    """Return where a draft head's checkpoint is; an MTP block is in the model's own."""
    speculation = config.speculation
    return (speculation and speculation.model) or config.model


def _draft_head(
    config: EngineConfig, model_config: ModelConfig, policy: HeadPolicy
) -> HeadConfig | None:
    """Return the draft head that is configured; ConfigError: it does not go with the model."""
    speculation = config.speculation
    if speculation is None or not speculation.has_head:
        return None
    if model_config.vision is not None:
        raise ConfigError("speculative: expected a model of text alone with a draft head")
    if any(not seen.is_full for layer in policy.heads for seen in layer):
        raise ConfigError(
            "speculative: expected a model without windows, and no head_policy, with a draft "
            "head, got heads that see a window"
        )
    return head_config(speculation.method, _head_path(config), model_config)


def allocate_cache(
    parts: RunnerParts,
    num_kv_blocks: int | None,
    *,
    parallel: ParallelContext,
    clock: StartClock,
    progress: bool,
) -> None:
    """Allocate a step's cache, capture, compile, as ``ModelRunner.allocate_kv_cache`` says."""
    step, demand = parts.step, parts.streaming_demand
    with within_memory("max_num_batched_tokens", "the largest step", step.device):
        num_blocks = (
            blocks_of_groups(step, demand)
            if num_kv_blocks is None
            else demand.divide(step.head_groups, num_kv_blocks)
        )
        step.kv_cache = step.new_kv_cache(parallel.least(num_blocks))
        clock.lap("memory")
        step.capture(progress=progress)
        clock.lap("graphs")
        if step.device.type == "cuda" and step.config.attention_backend == "triton":
            warm_up(step)
            clock.lap("warm-up")
        if kernel_path(step.device) == "reference" and parallel.size == 1:
            batch, timed = empty_batch(step, [1]), not step.config.deterministic
            choose_threads(step.model, batch, step.kv_cache.layers, timed=timed)
            clock.lap("threads")
