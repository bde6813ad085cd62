"""What a runner reads of a checkpoint, its head policy, and which KV heads share blocks."""

from __future__ import annotations

from dataclasses import replace

import torch

from mrv1.config import EngineConfig
from mrv1.errors import ConfigError
from mrv1.headwise import HeadGroups, HeadPolicy, policy_source
from mrv1.models import Checkpoint, ModelConfig


def read_config(
    config: EngineConfig, device: torch.device, *, progress: bool = True
) -> tuple[EngineConfig, ModelConfig]:
    """Return the configuration with the checkpoint's directory, and the model's; or ConfigError.

    The directory is found once: that of a Hugging Face id may change between two calls.
    """
    checkpoint = Checkpoint.open(config.model, progress=progress)
    quantization = checkpoint.quantization_on(config.quantization, device)
    config = replace(config, model=str(checkpoint.path), quantization=quantization)
    model_config = ModelConfig.from_pretrained(
        config.model, generation_config=config.generation_config, quantization=quantization
    )
    return config, model_config.for_context(config.max_model_len)


def resolve_policy(
    config: EngineConfig,
    model_config: ModelConfig,
    given: HeadPolicy | None,
    *,
    is_checkpoint: bool,
) -> HeadPolicy:
    """Return which tokens each KV head of a model sees; ConfigError if it is unreadable or unfit.

    ``given``, else as configured, else of the checkpoint if the model is its, else all of its
    layer.
    """
    windows, num_kv_heads = model_config.layer_windows, model_config.num_kv_heads
    policy = given
    if policy is None and config.head_policy is not None:
        policy = policy_source(config.head_policy).of_model(len(windows), num_kv_heads)
    if policy is None and is_checkpoint:
        raw = Checkpoint.open(config.model).raw_config()
        policy = HeadPolicy.of_config(raw, len(windows), num_kv_heads)
    if policy is None:
        return HeadPolicy.of_layer_windows(windows, num_kv_heads)
    if policy.num_kv_heads != num_kv_heads:
        raise ConfigError(
            f"head_policy: expected {num_kv_heads} KV heads, as the model has, got "
            f"{policy.num_kv_heads}"
        )
    return policy.within(windows)


def resolve_head_groups(
    config: EngineConfig, policy: HeadPolicy, max_model_len: int
) -> HeadGroups:
    """Return which heads share blocks, in requests of ``max_model_len`` tokens."""
    sizes = {"block_size": config.block_size, "max_model_len": max_model_len}
    if config.per_head_ids:
        groups = HeadGroups.of_heads(policy, **sizes)
        return replace(groups, visits_masked=config.visit_masked_pages)
    if not config.window_recycling or config.attention_backend == "flashinfer":
        groups = HeadGroups.shared(policy, **sizes)  # FlashInfer has one table for all heads
        return replace(groups, visits_masked=config.visit_masked_pages)
    max_query_len = min(config.max_num_batched_tokens, max_model_len)
    return HeadGroups.of_roles(policy, **sizes, max_query_len=max_query_len)
