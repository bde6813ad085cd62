"""Random weights as a checkpoint on disk, for engines that read nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

from mrv1.models import ModelConfig, random_weights
from mrv1.models.architectures import ARCHITECTURES
from mrv1.models.weights import checkpoint_tensors

BenchQuantization = Literal["fp8", "fp8-block", "int4"]
QUANTIZATIONS: dict[BenchQuantization, dict[str, object]] = {
    "fp8": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                "input_activations": {
                    "num_bits": 8, "type": "float", "strategy": "token", "dynamic": True,
                },
            }
        },
        "ignore": ["lm_head"],
    },
    "fp8-block": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    },
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
            }
        },
        "ignore": ["lm_head"],
    },
}  # fmt: skip
"""What ``config.json`` says of a shape whose weights are made up as codes."""


def write_checkpoint(
    folder: Path,
    config: ModelConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Write a shape with random weights as a Hugging Face checkpoint without a tokenizer.

    Args:
        folder: an existing directory.
        config: a shape in full precision.
        device: where the weights are made.
        dtype: dtype of every tensor.
        seed: as for ``random_weights``, which makes the same values.
    """
    weights = checkpoint_tensors(
        config, random_weights(config, device=device, dtype=dtype, seed=seed)
    )
    # Query, key and value are views of one tensor, and a file has no views.
    copies = {
        name: tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in weights.items()
    }
    save_file(copies, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, config, dtype)


def write_config(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    quantization: BenchQuantization | None = None,
) -> None:
    """Write only a checkpoint's ``config.json``, for ``load_format="dummy"``."""
    raw = raw_config(config, dtype)
    if config.quantization is not None:
        raw["quantization_config"] = {"quant_method": config.quantization.method}
    if quantization is not None:
        raw["quantization_config"] = _quantization(config, quantization)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")


def _quantization(config: ModelConfig, name: BenchQuantization) -> dict[str, object]:
    """Return what ``config.json`` says of a shape's codes; routers have none."""
    raw = QUANTIZATIONS[name]
    key = "ignore" if "ignore" in raw else "modules_to_not_convert"
    layers = config.experts.layers if config.experts is not None else ()
    routers = [f"model.layers.{i}.mlp.gate" for i, routes in enumerate(layers) if routes]
    return {**raw, key: ["lm_head", *routers]}


def raw_config(config: ModelConfig, dtype: torch.dtype) -> dict[str, object]:
    """Return what a config.json says of a shape in full precision."""
    return {
        "architectures": [config.architecture],
        "model_type": ARCHITECTURES[config.architecture].model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_model_len,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "rope_parameters": _raw_rope(config),
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": str(dtype).removeprefix("torch."),
        **_raw_experts(config),
        **_raw_multipliers(config),
        **_raw_windows(config),
    }


def _raw_rope(config: ModelConfig) -> dict[str, object]:
    """Return the settings of a rope: a default one, Llama 3's or yarn's."""
    rope = config.rope
    raw: dict[str, object] = {"rope_type": rope.rope_type, "rope_theta": rope.theta}
    if rope.rotary_dim < config.head_dim:
        raw["partial_rotary_factor"] = rope.rotary_dim / config.head_dim
    scaling = ("factor", "original_max_position_embeddings")
    names = {
        "llama3": (*scaling, "low_freq_factor", "high_freq_factor"),
        "yarn": (*scaling, "beta_fast", "beta_slow", "truncate"),
    }
    return raw | {name: getattr(rope, name) for name in names.get(rope.rope_type, ())}


def _raw_windows(config: ModelConfig) -> dict[str, object]:
    """Return what a config.json says of windows, which some layers have."""
    windows = {window for window in config.layer_windows if window != -1}
    if not windows:
        return {}
    (window,) = windows
    kinds = {window: "sliding_attention", -1: "full_attention"}
    return {"sliding_window": window, "layer_types": [kinds[w] for w in config.layer_windows]}


def _raw_multipliers(config: ModelConfig) -> dict[str, object]:
    """Return what Granite's config.json says of scales."""
    if not ARCHITECTURES[config.architecture].has_multipliers:
        return {}
    return {
        "embedding_multiplier": (config.embed_scale or 1.0) * config.residual_scale,
        "attention_multiplier": config.softmax_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": config.logits_divisor,
    }


def _raw_experts(config: ModelConfig) -> dict[str, object]:
    """Return a family's settings of experts, which the last layers have, or all."""
    experts, family = config.experts, ARCHITECTURES[config.architecture].experts
    if experts is None or family is None:
        return {}
    first = experts.layers.index(True)
    return {
        **{
            name: getattr(experts.routing, field)
            for field, name in family.routing.items()
            if isinstance(name, str) and field != "scores"
        },
        family.intermediate_size: experts.intermediate_size,
        "moe_layer_start_index": first,  # each family reads its own of these
        "first_k_dense_replace": first,
        "mlp_only_layers": [*range(first)],
        "use_bias": config.mlp_bias,
    }
