"""vLLM's models with full and streaming KV heads: each kind has its own KV cache group.

vLLM keeps one list of blocks for all KV heads of a layer. Here several attention layers with KV
heads of one kind each replace it, so that vLLM's scheduler frees the blocks that streaming heads
no longer see. They all have as many KV heads, the greatest common divisor of the numbers of full
and streaming heads in all layers of all ranks, so that blocks of all groups have the same bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from mrv1.errors import ConfigError
from mrv1.headwise import HeadPolicy, Visible
from mrv1.integrations.vllm.attention_backend import Mrv1AttentionImpl
from mrv1.integrations.vllm.head_order import dealt_order
from mrv1.integrations.vllm.model_options import HEAD_POLICY
from mrv1.integrations.vllm.streaming_cache import StreamingSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Part(NamedTuple):
    """The KV heads of one attention layer that vLLM sees."""

    seen: Visible
    heads: tuple[int, ...]
    """KV heads of the decoder layer, on this rank."""
    name: str
    """The same on every rank that has such a part: vLLM compares layers by their names."""


def parts_of(policy: HeadPolicy, rank: int = 0, ranks: int = 1) -> list[list[Part]]:
    """Return a rank's parts of each layer, all of one size, heads of the same kind in order.

    ``policy`` is that of all ranks, which take its heads in order (``HeadPolicy.slice``).
    """
    of_ranks = [policy.slice(each, ranks) for each in range(ranks)]
    counts = (
        count for each in of_ranks for layer in each.heads for count in Counter(layer).values()
    )
    size = math.gcd(*counts)
    layers = []
    for layer in of_ranks[rank].heads:
        parts = []
        for kind, seen in enumerate(policy.groups):
            heads = [head for head, each in enumerate(layer) if each == seen]
            parts += [
                Part(seen, tuple(heads[at : at + size]), f"part_{kind}_{at // size}")
                for at in range(0, len(heads), size)
            ]
        layers.append(parts)
    return layers


class StreamingAttention(Attention):  # type: ignore[misc]
    """vLLM's attention layer for heads with a window, whose spec and kernels know a sink."""

    def __init__(self, *args: Any, sink: int, **options: Any) -> None:  # noqa: ANN401 - vLLM's
        super().__init__(*args, **options)
        self.sink = self.impl.sink = sink

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> StreamingSpec:
        """Return the spec of a sliding window with a sink, in blocks of the configured size."""
        spec = super().get_kv_cache_spec(vllm_config)
        given = {field.name: getattr(spec, field.name) for field in fields(spec)}
        size = vllm_config.cache_config.block_size
        return StreamingSpec(**given | {"block_size": size, "sink": self.sink})


class HeadWiseAttention(nn.Module):
    """Attends with a layer for each part's heads; ``attn``, that of all, leaves vLLM's table."""

    order: torch.Tensor
    """[kv_heads] the decoder layer's heads, part by part."""
    places: torch.Tensor
    """[kv_heads] the inverse of ``order``."""

    def __init__(self, attn: Attention, parts: list[Part], vllm_config: VllmConfig) -> None:
        super().__init__()
        del vllm_config.compilation_config.static_forward_context[attn.layer_name]
        self.num_kv_heads = attn.num_kv_heads
        heads = [head for part in parts for head in part.heads]
        self.is_ordered = heads == sorted(heads)
        order = torch.tensor(heads)
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("places", order.argsort(), persistent=False)
        self.parts = nn.ModuleList(
            self._layer(attn, part, f"{attn.layer_name}.{part.name}", vllm_config)
            for part in parts
        )

    @staticmethod
    def _layer(attn: Attention, part: Part, name: str, vllm_config: VllmConfig) -> Attention:
        size = len(part.heads)
        options = {
            "num_heads": attn.num_heads // attn.num_kv_heads * size,
            "head_size": attn.head_size,
            "scale": attn.impl.scale,
            "num_kv_heads": size,
            "cache_config": vllm_config.cache_config,
            "quant_config": attn.quant_config,
            "attn_backend": attn.attn_backend,
            "prefix": name,
        }
        if part.seen.is_full:
            return Attention(**options)
        return StreamingAttention(
            per_layer_sliding_window=part.seen.window, sink=part.seen.sink, **options
        )

    def _arranged(self, tensor: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        """Return ``[tokens, kv_heads * ...]`` with its KV heads, and their queries, as given."""
        if self.is_ordered:
            return tensor
        by_head: torch.Tensor = tensor.unflatten(-1, (self.num_kv_heads, -1))
        return by_head.index_select(1, heads).flatten(1)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return ``[tokens, heads * head_size]``, as vLLM's attention layer does."""
        q, k, v = (
            self._arranged(tensor, self.order).chunk(len(self.parts), dim=-1)
            for tensor in (query, key, value)
        )
        found = [part(q[at], k[at], v[at]) for at, part in enumerate(self.parts)]
        return self._arranged(torch.cat(found, dim=-1), self.places)


def divide_heads(model: nn.Module, config: VllmConfig) -> dict[int, tuple[int, ...]] | None:
    """Give the kinds of KV heads of a new model attention layers of their own; None = no policy.

    Returns the order of the KV heads of each layer whose weights have to be read in another order
    than the checkpoint's. ``additional_config`` gets the policy, for vLLM's cache of models.
    ConfigError: it does not fit.
    """
    modules: list[Any] = [*model.modules()]
    owners = {
        extract_layer_index(module.attn.layer_name): module
        for module in modules
        if isinstance(getattr(module, "attn", None), Attention)
    }  # of this pipeline stage
    policy = _policy_of(config)
    if policy is None:
        return None
    _check_support(config, [module.attn for module in owners.values()])
    config.additional_config[f"{HEAD_POLICY}_heads"] = policy.heads
    ranks = get_tensor_model_parallel_world_size()
    orders = dealt_order(policy, ranks)
    dealt = HeadPolicy(
        tuple(
            tuple(layer[head] for head in order)
            for layer, order in zip(policy.heads, orders, strict=True)
        )
    )
    parts = parts_of(dealt, get_tensor_model_parallel_rank(), ranks)
    windows = [-1] * policy.num_layers
    for index, module in owners.items():
        windows[index] = module.attn.sliding_window or -1
    within = policy.within(windows)
    for index, module in owners.items():
        seen = dict(zip(policy.heads[index], within.heads[index], strict=True))
        own = [part._replace(seen=seen[part.seen]) for part in parts[index]]
        module.attn = HeadWiseAttention(module.attn, own, config)
    in_order = tuple(range(policy.num_kv_heads))
    return {index: order for index, order in enumerate(orders) if order != in_order}


def _check_support(config: VllmConfig, layers: list[Attention]) -> None:
    size = config.parallel_config.tensor_parallel_size
    for owner, name in ((config.model_config, "quantization"), (config, "lora_config")):
        if size != 1 and getattr(owner, name) is not None:
            raise ConfigError(
                f"{name}: expected None with a head policy and tensor_parallel_size={size}, which "
                "change the order of heads, got a value"
            )
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise ConfigError(
            "disable_hybrid_kv_cache_manager: expected False with a head policy, got True; blocks "
            "of streaming heads would never be freed"
        )
    if not all(isinstance(layer.impl, Mrv1AttentionImpl) for layer in layers):
        backends = {layer.attn_backend.get_name() for layer in layers}
        raise ConfigError(
            "attention_backend: expected CUSTOM (mrv1's) with a head policy, got "
            f"{', '.join(sorted(backends))}; start vLLM with --attention-backend CUSTOM"
        )


def _policy_of(config: VllmConfig) -> HeadPolicy | None:
    """Return the policy of the whole model; None = none."""
    model = config.model_config
    num_layers, num_kv_heads = model.get_total_num_hidden_layers(), model.get_total_num_kv_heads()
    path = config.additional_config.get(HEAD_POLICY)
    if path is not None:
        policy: HeadPolicy | None = HeadPolicy.load(path)
    else:
        policy = HeadPolicy.of_config(model.hf_config.to_dict(), num_layers, num_kv_heads)
    if policy is None:
        return None
    for what, expected, got in (
        ("KV heads", num_kv_heads, policy.num_kv_heads),
        ("layers", num_layers, policy.num_layers),
    ):
        if got != expected:
            raise ConfigError(
                f"head_policy: expected {expected} {what}, as the model has, got {got}"
            )
    return policy
