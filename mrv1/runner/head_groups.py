"""Which policy the KV heads of a runner have, and which of them share blocks."""

from __future__ import annotations

from mrv1.config import EngineConfig, checkpoint_dir
from mrv1.errors import ConfigError
from mrv1.headwise import HeadGroups, HeadPolicy
from mrv1.models import ModelConfig
from mrv1.models.files import read_json


def resolve_head_groups(
    config: EngineConfig,
    model_config: ModelConfig,
    max_model_len: int,
    given: HeadPolicy | None,
    *,
    is_checkpoint: bool,
    per_head_ids: bool,
) -> HeadGroups:
    """Return what each KV head sees, and which of them share blocks.

    Args:
        config: of the runner.
        model_config: of the model.
        max_model_len: tokens of a request, at most.
        given: the policy that the caller wants; None = the configured one, the checkpoint's, or
            that each head sees all that its layer does.
        is_checkpoint: whether the model is that of ``config.model``.
        per_head_ids: whether every head index is a group of its own.

    Raises:
        ConfigError: the policy cannot be read, or is not of this model.
    """
    windows, num_kv_heads = model_config.layer_windows, model_config.num_kv_heads
    policy = given
    if policy is None and config.head_policy is not None:
        policy = HeadPolicy.load(config.head_policy)
    if policy is None and is_checkpoint:
        raw = read_json(checkpoint_dir(config.model) / "config.json")
        policy = HeadPolicy.of_config(raw, len(windows), num_kv_heads)
    if policy is None:
        policy = HeadPolicy.of_layer_windows(windows, num_kv_heads)
    elif policy.num_kv_heads != num_kv_heads:
        raise ConfigError(
            f"head_policy: expected {num_kv_heads} KV heads, as the model has, got "
            f"{policy.num_kv_heads}"
        )
    else:
        policy = policy.within(windows)
    sizes = {"block_size": config.block_size, "max_model_len": max_model_len}
    if per_head_ids:
        return HeadGroups.of_heads(policy, **sizes)
    if not config.window_recycling or config.attention_backend == "flashinfer":
        return HeadGroups.shared(policy, **sizes)  # FlashInfer has one table for all
    max_query_len = min(config.max_num_batched_tokens, max_model_len)
    return HeadGroups.of_roles(policy, **sizes, max_query_len=max_query_len)
