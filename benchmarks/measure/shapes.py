"""Model shapes to measure with random weights, named after their public models."""

from __future__ import annotations

from dataclasses import replace

import torch

from mrv1.errors import ConfigError
from mrv1.models import ModelConfig, RopeConfig

QWEN3_0_6B = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_q_heads=16,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    max_model_len=40_960,
    tie_word_embeddings=True,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm="head",
    rope=RopeConfig(theta=1e6, rotary_dim=128),
    rope_interleaved=False,
    layer_windows=(-1,) * 28,
    torch_dtype=torch.bfloat16,
)

SHAPES = {
    "qwen3-0.6b": QWEN3_0_6B,
    "llama3-8b": replace(
        QWEN3_0_6B,
        architecture="LlamaForCausalLM",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_q_heads=32,
        rms_norm_eps=1e-5,
        max_model_len=8192,
        tie_word_embeddings=False,
        qk_norm="none",
        rope=RopeConfig(theta=5e5, rotary_dim=128),
        layer_windows=(-1,) * 32,
    ),
    "llama3-70b": replace(
        QWEN3_0_6B,
        architecture="LlamaForCausalLM",
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_layers=80,
        num_q_heads=64,
        rms_norm_eps=1e-5,
        max_model_len=8192,
        tie_word_embeddings=False,
        qk_norm="none",
        rope=RopeConfig(theta=5e5, rotary_dim=128),
        layer_windows=(-1,) * 80,
    ),
    "tiny-random": replace(
        QWEN3_0_6B,
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_model_len=512,
        rope=RopeConfig(theta=1e4, rotary_dim=32),
        layer_windows=(-1, -1),
        torch_dtype=torch.float32,
    ),
}
"""Configuration by name; ``tiny-random`` is for trying the benchmark itself on a CPU."""


def shape_config(name: str) -> ModelConfig:
    """Return the configuration of a named shape.

    Raises:
        ConfigError: there is no such shape.
    """
    if name not in SHAPES:
        raise ConfigError(f"shape: expected one of {', '.join(SHAPES)}, got {name!r}")
    return SHAPES[name]
