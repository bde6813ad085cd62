"""Tiny random checkpoints of every supported family and rope type, written by transformers."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
)

CACHE = (
    "cache"
    if "cache" in inspect.signature(Qwen3ForCausalLM.forward).parameters
    else "past_key_values"
)
"""A model's KV cache in transformers, as an argument and in outputs; ``cache`` since 5.24."""

FAMILIES: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "ernie4_5": Ernie4_5Config,
    "ernie4_5_moe": Ernie4_5_MoeConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "mixtral": MixtralConfig,
    "olmoe": OlmoeConfig,
    "glm4_moe": Glm4MoeConfig,
    "gpt_oss": GptOssConfig,
    "glm": GlmConfig,
    "glm4": Glm4Config,
    "granite": GraniteConfig,
    "granitemoehybrid": GraniteMoeHybridConfig,
    "ministral": MinistralConfig,
    "seed_oss": SeedOssConfig,
    "smollm3": SmolLM3Config,
    "olmo2": Olmo2Config,
    "olmo3": Olmo3Config,
    "phi3": Phi3Config,
    "gemma2": Gemma2Config,
    "gemma3_text": Gemma3TextConfig,
}
"""Configuration class by family name."""

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
"""``rope_parameters`` by rope type; tests run past the original context of 64."""


def ropes_of(family: str) -> list[str]:
    """Return the rope types of a family; Phi-3 has longrope, which ``test_longrope`` has."""
    return ["default"] if family == "phi3" else [*ROPES]


EXPERTS: dict[str, dict[str, Any]] = {
    "ernie4_5_moe": {
        "num_hidden_layers": 3,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 48,
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 48,
        "routed_scaling_factor": 1.7,
        "use_qk_norm": True,
    },
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
}
"""Settings of a family's experts; each has a layer with them, and all but two a dense one."""

WINDOW_ROPES = ("olmo3", "gemma3_text")
"""Families with another rope in layers with a window."""
WINDOW_ROPE = {"rope_type": "default", "rope_theta": 700.0}
"""That of their tiny configurations."""

SETTINGS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"layer_types": ["full_attention"] * 2, "query_pre_attn_scalar": 24},
    "granitemoehybrid": {
        "shared_intermediate_size": 96, "intermediate_size": 8, "num_local_experts": 0,
        "mamba_n_heads": 16, "layer_types": ["attention"], "position_embedding_type": "rope",
        "embedding_multiplier": 1.5, "attention_multiplier": 0.2, "residual_multiplier": 0.7,
        "logits_scaling": 1.25,
    },
    "gemma2": {"layer_types": ["full_attention"] * 2, "query_pre_attn_scalar": 24},
    "gpt_oss": {"layer_types": ["full_attention"] * 2},
    "granite": {
        "embedding_multiplier": 1.5, "attention_multiplier": 0.2, "residual_multiplier": 0.7,
        "logits_scaling": 1.25,
    },
    "phi3": {"pad_token_id": 0},
    "glm": {"pad_token_id": 0},
    "glm4": {"pad_token_id": 0},
    "mistral": {"sliding_window": None},  # its default is 4096
    "olmo3": {"layer_types": ["full_attention"] * 2},
    "smollm3": {"no_rope_layer_interval": 2, "pad_token_id": 0},
}  # fmt: skip
"""Settings by family that a tiny configuration needs, or that are what the family is about."""

ODD: dict[str, list[dict[str, Any]]] = {
    "glm": [{"attention_bias": False, "num_key_value_heads": 1}],
    "glm4": [
        {
            "attention_bias": False, "tie_word_embeddings": True, "head_dim": 48,
            "rope_parameters": dict(ROPES["yarn"]), "partial_rotary_factor": 0.75,
            "rms_norm_eps": 1e-2,
        },
        {"partial_rotary_factor": 1.0},
    ],
    "granitemoehybrid": [
        {
            "attention_bias": True, "tie_word_embeddings": True, "position_embedding_type": None,
            "embedding_multiplier": 12, "attention_multiplier": 0.015625,
            "residual_multiplier": 0.22, "logits_scaling": 10, "rms_norm_eps": 1e-2,
            "shared_intermediate_size": 40,
        },
    ],
    "granite": [
        {
            "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
            "embedding_multiplier": 12, "attention_multiplier": 0.015625,
            "residual_multiplier": 0.22, "logits_scaling": 8, "rms_norm_eps": 1e-2,
        },
    ],
    "ministral": [
        {
            "sliding_window": 9, "head_dim": 48, "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ],
    "seed_oss": [
        {
            "attention_bias": False, "attention_out_bias": True, "mlp_bias": True,
            "tie_word_embeddings": True, "head_dim": 48,
        },
        {"attention_bias": True, "head_dim": None},
    ],
    "smollm3": [
        {
            "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
            "num_hidden_layers": 3, "no_rope_layers": [0, 1, 0, 1],
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "use_sliding_window": True, "sliding_window": 9,
        },
    ],
    "olmo2": [
        {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ],
    "phi3": [
        {
            "tie_word_embeddings": True, "num_key_value_heads": 4, "sliding_window": 9,
            "partial_rotary_factor": 0.75, "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4,
                "short_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0],
                "long_factor": [1.0, 3.0, 4.0, 5.0, 7.0, 9.0],
            },
            "head_dim": 16,
        },
    ],
    "gpt_oss": [
        {
            "attention_bias": False, "tie_word_embeddings": True, "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 9, "head_dim": 48, "swiglu_alpha": 0.9, "swiglu_limit": 0.5,
            "rope_parameters": ROPES["yarn"] | {
                "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0,
            },
        },
    ],
    "gemma2": [
        {
            "attention_bias": True, "tie_word_embeddings": True, "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 9, "query_pre_attn_scalar": 5,
            "attn_logit_softcapping": 2.5, "final_logit_softcapping": 7.0,
        },
        {
            "attn_logit_softcapping": None, "final_logit_softcapping": None,
            "query_pre_attn_scalar": 100,
        },
    ],
    "gemma3_text": [
        {
            "attention_bias": True, "tie_word_embeddings": True, "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 9, "query_pre_attn_scalar": 5, "final_logit_softcapping": 7.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ],
    "olmo3": [
        {
            "attention_bias": True, "tie_word_embeddings": True, "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 9,
            "rope_parameters": {
                "full_attention": ROPES["yarn"] | {"attention_factor": 1.2},
                "sliding_attention": {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0},
            },
        },
    ],
}  # fmt: skip
"""Every setting of a family that changes what it computes, with another value than usual."""

SLIDING: dict[str, dict[str, Any]] = {
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24},
    "gemma3_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 24,
    },
    "gemma2": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24},
    "phi3": {"sliding_window": 24},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24},
    "mistral": {"sliding_window": 24},
    "ministral": {"sliding_window": 24},
    "smollm3": {"use_sliding_window": True, "sliding_window": 24},
    "mixtral": {"sliding_window": 24},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 24},
    "qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
}
"""Settings that turn sliding windows on, for the families that have them."""

_TINY: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


def tiny_config(family: str, rope: str = "default", **overrides: Any) -> PretrainedConfig:
    """Return a small configuration of ``family``; ``overrides`` are transformers' settings.

    Every family attends to the full context unless ``**SLIDING[family]`` is among them.
    """
    settings = _TINY | {"rope_parameters": dict(ROPES[rope])} | EXPERTS.get(family, {})
    if family in WINDOW_ROPES:
        ropes = {"full_attention": dict(ROPES[rope]), "sliding_attention": dict(WINDOW_ROPE)}
        settings["rope_parameters"] = ropes
    settings |= SETTINGS.get(family, {})
    settings |= overrides
    if "layer_types" in settings:  # in turn
        kinds, count = settings["layer_types"], settings["num_hidden_layers"]
        settings["layer_types"] = [kinds[i % len(kinds)] for i in range(count)]
    return FAMILIES[family](**settings)


def random_model(config: PretrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """Return transformers' model of ``config``, in float32, with weights from ``seed`` alone.

    The standard deviation of 0.2 keeps logits far apart, so that no greedy choice is a tie that
    rounding could decide.
    """
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    if config.model_type in EXPERTS:
        model.set_experts_implementation("eager")  # the grouped one has no float64
    if config.model_type == "gpt_oss":  # transformers before 5.24 has these two as constants
        for layer in model.model.layers:
            layer.mlp.experts.alpha = getattr(config, "swiglu_alpha", 1.702)
            layer.mlp.experts.limit = getattr(config, "swiglu_limit", 7.0)
    return fill_randomly(model, seed)


def fill_randomly(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Return ``model`` with weights from ``seed`` alone, ready to be evaluated."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.normal_(mean, 0.2, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0.0, 0.2, generator=generator)
    return model.eval()


def save_checkpoint(
    directory: Path, config: PretrainedConfig, *, seed: int = 0, max_shard_size: str = "1GB"
) -> PreTrainedModel:
    """Write ``random_model(config, seed)`` into ``directory`` and return it."""
    model = random_model(config, seed=seed)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def tiny_checkpoint(
    directory: Path, family: str, rope: str = "default", *, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """Write a tiny random checkpoint of ``family`` into ``directory`` and return its model."""
    return save_checkpoint(directory, tiny_config(family, rope, **overrides), seed=seed)


@torch.no_grad()
def expected_logits(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """Return transformers' logits ``[len(prompt), vocab]`` for every position of ``prompt``."""
    logits: torch.Tensor = model(torch.tensor([prompt], device=model.device)).logits[0]
    return logits
