"""The tensors of a decoder, and the checkpoint tensor that each part of them comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mrv1.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer; all tensors in the model's dtype, biases None where the model has none."""

    input_norm: torch.Tensor
    """[hidden]."""
    qkv: torch.Tensor
    """[(q_heads + 2 kv_heads) * head_dim, hidden]: query rows, then key, then value."""
    qkv_bias: torch.Tensor | None
    """[(q_heads + 2 kv_heads) * head_dim]."""
    q_norm: torch.Tensor | None
    """[head_dim]."""
    k_norm: torch.Tensor | None
    """[head_dim]."""
    o: torch.Tensor
    """[hidden, q_heads * head_dim]."""
    o_bias: torch.Tensor | None
    """[hidden]."""
    mlp_norm: torch.Tensor
    """[hidden]."""
    gate_up: torch.Tensor
    """[2 * intermediate, hidden]: gate rows, then up."""
    gate_up_bias: torch.Tensor | None
    """[2 * intermediate]."""
    down: torch.Tensor
    """[hidden, intermediate]."""
    down_bias: torch.Tensor | None
    """[hidden]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """A whole decoder; ``lm_head`` is ``embed`` itself where the two are tied."""

    embed: torch.Tensor
    """[vocab, hidden]."""
    layers: tuple[LayerWeights, ...]
    """One entry per layer."""
    final_norm: torch.Tensor
    """[hidden]."""
    lm_head: torch.Tensor
    """[vocab, hidden]."""


def empty_weights(
    config: ModelConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    vocab_rows: int | None = None,
) -> ModelWeights:
    """Return uninitialised weights on ``device``; on device ``meta`` they have only shapes.

    Args:
        config: the model's shape; of several ranks, ``ParallelContext.shard``'s.
        device: where the weights are.
        dtype: dtype of every tensor.
        vocab_rows: rows of embedding and head; None = one for each token of the vocabulary.
    """

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def bias(size: int, present: bool) -> torch.Tensor | None:
        return empty(size) if present else None

    hidden, intermediate = config.hidden_size, config.intermediate_size
    vocab_rows = config.vocab_size if vocab_rows is None else vocab_rows
    q_size = config.num_q_heads * config.head_dim
    qkv_size = q_size + 2 * config.num_kv_heads * config.head_dim

    def layer() -> LayerWeights:
        return LayerWeights(
            input_norm=empty(hidden),
            qkv=empty(qkv_size, hidden),
            qkv_bias=bias(qkv_size, config.qkv_bias),
            q_norm=bias(config.head_dim, config.qk_norm),
            k_norm=bias(config.head_dim, config.qk_norm),
            o=empty(hidden, q_size),
            o_bias=bias(hidden, config.o_bias),
            mlp_norm=empty(hidden),
            gate_up=empty(2 * intermediate, hidden),
            gate_up_bias=bias(2 * intermediate, config.mlp_bias),
            down=empty(hidden, intermediate),
            down_bias=bias(hidden, config.mlp_bias),
        )

    embed = empty(vocab_rows, hidden)
    return ModelWeights(
        embed=embed,
        layers=tuple(layer() for _ in range(config.num_layers)),
        final_norm=empty(hidden),
        lm_head=embed if config.tie_word_embeddings else empty(vocab_rows, hidden),
    )


def checkpoint_tensors(config: ModelConfig, weights: ModelWeights) -> dict[str, torch.Tensor]:
    """Return the tensor, or view, that each tensor of a Hugging Face checkpoint fills, by name.

    A tied head has no entry of its own.
    """
    tensors = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.final_norm}
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = weights.lm_head
    for index, layer in enumerate(weights.layers):
        for name, tensor in _layer_tensors(config, layer):
            if tensor is not None:
                tensors[f"model.layers.{index}.{name}"] = tensor
    return tensors


def _layer_tensors(
    config: ModelConfig, layer: LayerWeights
) -> Iterator[tuple[str, torch.Tensor | None]]:
    q_size, kv_size = (n * config.head_dim for n in (config.num_q_heads, config.num_kv_heads))
    qkv = [
        (f"self_attn.{part}_proj", size)
        for part, size in zip("qkv", (q_size, kv_size, kv_size), strict=True)
    ]
    gate_up = [(f"mlp.{part}_proj", config.intermediate_size) for part in ("gate", "up")]
    yield "input_layernorm.weight", layer.input_norm
    yield from _slices(qkv, layer.qkv, layer.qkv_bias)
    yield "self_attn.q_norm.weight", layer.q_norm
    yield "self_attn.k_norm.weight", layer.k_norm
    yield "self_attn.o_proj.weight", layer.o
    yield "self_attn.o_proj.bias", layer.o_bias
    yield "post_attention_layernorm.weight", layer.mlp_norm
    yield from _slices(gate_up, layer.gate_up, layer.gate_up_bias)
    yield "mlp.down_proj.weight", layer.down
    yield "mlp.down_proj.bias", layer.down_bias


def _slices(
    parts: list[tuple[str, int]], weight: torch.Tensor, bias: torch.Tensor | None
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield the views of a fused projection that its parts, each ``(name, rows)``, fill."""
    start = 0
    for name, rows in parts:
        yield f"{name}.weight", weight[start : start + rows]
        yield f"{name}.bias", None if bias is None else bias[start : start + rows]
        start += rows


def random_weights(
    config: ModelConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> ModelWeights:
    """Return random weights made on ``device``, for benchmarks that need no checkpoint.

    Matrices are normal with standard deviation ``fan_in^-0.5``, so that activations and logits
    are about as large as a trained model's; norms are 1, biases 0.

    Args:
        config: the model's shape.
        device: where the weights are made and stay.
        dtype: dtype of every tensor.
        seed: seed of this call's own generator; the values also depend on the device type.
    """
    generator = torch.Generator(device).manual_seed(seed)
    weights = empty_weights(config, device, dtype)
    for name, tensor in checkpoint_tensors(config, weights).items():
        if tensor.dim() == 2:
            tensor.normal_(0.0, tensor.shape[1] ** -0.5, generator=generator)
        else:
            tensor.fill_(0.0 if name.endswith(".bias") else 1.0)
    return weights
