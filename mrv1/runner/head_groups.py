"""The head policy of a runner, and which KV heads share blocks."""

from __future__ import annotations

from mrv1.config import EngineConfig, checkpoint_dir
from mrv1.errors import ConfigError
from mrv1.headwise import HeadGroups, HeadPolicy
from mrv1.models import ModelConfig
from mrv1.models.files import read_json
from mrv1.models.gguf_file import is_gguf


def resolve_head_groups(
    config: EngineConfig,
    model_config: ModelConfig,
    max_model_len: int,
    given: HeadPolicy | None,
    *,
    is_checkpoint: bool,
    per_head_ids: bool,
) -> HeadGroups:
    """Return the head groups: which tokens each KV head sees, and which heads share blocks.

    Args:
        config: the runner's configuration.
        model_config: the model's configuration.
        max_model_len: most tokens of a request.
        given: the policy that the caller passed; None = the configured policy, else the
            checkpoint's, else each head sees everything that its layer sees.
        is_checkpoint: whether the model comes from the checkpoint ``config.model``.
        per_head_ids: whether every head index is a group of its own.

    Raises:
        ConfigError: the policy cannot be read, or does not fit the model.
    """
    windows, num_kv_heads = model_config.layer_windows, model_config.num_kv_heads
    policy = given
    if policy is None and config.head_policy is not None:
        policy = HeadPolicy.load(config.head_policy)
    if policy is None and is_checkpoint:
        path = checkpoint_dir(config.model)
        if not is_gguf(path):
            raw = read_json(path / "config.json")
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
        return HeadGroups.shared(policy, **sizes)  # FlashInfer has one block table for all heads
    max_query_len = min(config.max_num_batched_tokens, max_model_len)
    return HeadGroups.of_roles(policy, **sizes, max_query_len=max_query_len)
