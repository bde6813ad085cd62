"""Tiny random checkpoints of the vision-language families, written by transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForImageTextToText,
    Ernie4_5_VLMoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from tests.models.families import fill_randomly

IMAGE, VIDEO, VISION_START, VISION_END = 150, 151, 152, 153
"""Token ids."""

_TEXT: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_IDS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_PATCHES: dict[str, Any] = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "mlp_only_layers": [1],
}

IMAGE_START, IMAGE_END = 154, 155
"""Of ERNIE, which has others around a video."""
_ERNIE_IDS: dict[str, Any] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "image_start_token_id": IMAGE_START,
    "image_end_token_id": IMAGE_END,
    "video_start_token_id": VISION_START,
    "video_end_token_id": VISION_END,
    "tie_word_embeddings": False,
    "dtype": "float32",
}

VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Families whose encoder ``VisionEncoder`` has."""
FEATURE_FAMILIES = (*VISION_FAMILIES, "ernie4_5_vl_moe")
"""All families that take features of images and videos."""


def tiny_vision_config(family: str, **overrides: Any) -> PretrainedConfig:
    """Return a small configuration; ``overrides`` are settings of the text model."""
    if family == "qwen2_vl":
        vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, **_PATCHES}
        text = _TEXT | {"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]}} | overrides
        return Qwen2VLConfig(text_config=text, vision_config=vision, **_IDS)
    if family == "ernie4_5_vl_moe":
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
                  "patch_size": 4, "spatial_merge_size": 2, "temporal_merge_size": 2}  # fmt: skip
        text = _TEXT | {
            "num_hidden_layers": 3, "moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 2,
            "moe_intermediate_size": [48, 16],
            "rope_parameters": _ROPE | {"mrope_section": [3, 3, 2]},
        } | overrides  # fmt: skip
        return Ernie4_5_VLMoeConfig(text_config=text, vision_config=vision, **_ERNIE_IDS)
    if family == "qwen2_5_vl":
        vision = {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "num_heads": 2,
            "tokens_per_second": 3,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            **_PATCHES,
        }
        text = _TEXT | {"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]}} | overrides
        return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_IDS)
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "num_heads": 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
        **_PATCHES,
    }
    rope = _ROPE | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text = _TEXT | {"head_dim": 32, "num_hidden_layers": 3, "rope_parameters": rope}
    if family == "qwen3_vl_moe":  # layers with experts, of which one has deepstack's features
        text |= _EXPERTS | overrides
        return Qwen3VLMoeConfig(text_config=text, vision_config=vision, **_IDS)
    return Qwen3VLConfig(text_config=text | overrides, vision_config=vision, **_IDS)


def random_vision_model(config: PretrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """Return transformers' model of ``config`` in float32, with weights from ``seed`` alone."""
    model = AutoModelForImageTextToText.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    if config.model_type.endswith("_moe"):
        model.set_experts_implementation("eager")  # the grouped one has no float64
    return fill_randomly(model, seed)
