"""Model shapes to measure with random weights, named after their public models."""

from __future__ import annotations

from dataclasses import replace

import torch

from mrv1.errors import ConfigError
from mrv1.kernels import ClampedSwiGLU, Routing
from mrv1.models import ModelConfig, RopeConfig
from mrv1.models.experts import ExpertsConfig
from mrv1.models.quantization import MXFP4

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
    "qwen3-30b-a3b": replace(
        QWEN3_0_6B,
        architecture="Qwen3MoeForCausalLM",
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=48,
        num_q_heads=32,
        num_kv_heads=4,
        tie_word_embeddings=False,
        layer_windows=(-1,) * 48,
        experts=ExpertsConfig(
            routing=Routing(num_experts=128, top_k=8, renormalizes=True, rounds_logits=True),
            intermediate_size=768,
            layers=(True,) * 48,
        ),
    ),
    "ernie-21b-a3b": replace(
        QWEN3_0_6B,
        architecture="Ernie4_5_MoeForCausalLM",
        vocab_size=103_424,
        hidden_size=2560,
        intermediate_size=12_288,
        num_layers=28,
        num_q_heads=20,
        num_kv_heads=4,
        rms_norm_eps=1e-5,
        max_model_len=131_072,
        qk_norm="none",
        rope=RopeConfig(theta=5e5, rotary_dim=128),
        rope_interleaved=True,
        experts=ExpertsConfig(
            routing=Routing(
                num_experts=64, top_k=6, num_shared=2, renormalizes=True, least_sum=1e-12
            ),
            intermediate_size=1536,
            layers=(False, *[True] * 27),
        ),
    ),
    "gpt-oss-20b": replace(
        QWEN3_0_6B,
        architecture="GptOssForCausalLM",
        vocab_size=201_088,
        hidden_size=2880,
        intermediate_size=2880,
        num_layers=24,
        num_q_heads=64,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_model_len=131_072,
        tie_word_embeddings=False,
        qkv_bias=True,
        o_bias=True,
        qk_norm="none",
        has_sinks=True,
        rope=RopeConfig(
            rope_type="yarn",
            theta=150_000.0,
            rotary_dim=64,
            factor=32.0,
            truncate=False,
            original_max_position_embeddings=4096,
        ),
        layer_windows=(128, -1) * 12,
        experts=ExpertsConfig(
            routing=Routing(num_experts=32, top_k=4, renormalizes=True, rounds_logits=True),
            intermediate_size=2880,
            layers=(True,) * 24,
            activation=ClampedSwiGLU(),
            is_stacked=True,
        ),
        quantization=MXFP4(),
    ),
    "granite-3-8b": replace(
        QWEN3_0_6B,
        architecture="GraniteForCausalLM",
        vocab_size=49_155,
        hidden_size=4096,
        intermediate_size=12_800,
        num_layers=40,
        num_q_heads=32,
        rms_norm_eps=1e-5,
        max_model_len=131_072,
        qk_norm="none",
        rope=RopeConfig(theta=1e7, rotary_dim=128),
        layer_windows=(-1,) * 40,
        embed_scale=12 / 0.22,
        scales_features=True,
        softmax_scale=1 / 128,
        residual_scale=0.22,
        logits_divisor=16.0,
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
    "tiny-experts": replace(
        QWEN3_0_6B,
        architecture="Ernie4_5_MoeForCausalLM",
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=192,
        num_layers=3,
        num_q_heads=20,
        num_kv_heads=4,
        head_dim=16,
        max_model_len=512,
        tie_word_embeddings=True,
        qk_norm="none",
        rope=RopeConfig(theta=5e5, rotary_dim=16),
        rope_interleaved=True,
        layer_windows=(-1,) * 3,
        torch_dtype=torch.float32,
        experts=ExpertsConfig(
            routing=Routing(
                num_experts=64, top_k=6, num_shared=2, renormalizes=True, least_sum=1e-12
            ),
            intermediate_size=48,
            layers=(False, True, True),
        ),
    ),
}
"""Configuration by name; ``tiny-random`` and ``tiny-experts`` are for trials on a CPU."""


def shape_config(name: str) -> ModelConfig:
    """Return the configuration of a named shape.

    Raises:
        ConfigError: there is no such shape.
    """
    if name not in SHAPES:
        raise ConfigError(f"shape: expected one of {', '.join(SHAPES)}, got {name!r}")
    return SHAPES[name]
