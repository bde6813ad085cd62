"""Settings of the vision-language families, in the forms in which checkpoints are published."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from mrv1.errors import ConfigError
from mrv1.kernels import Routing
from mrv1.models import ModelConfig, RopeConfig
from mrv1.models.experts import ExpertsConfig
from mrv1.models.vision import VisionConfig

TEXT = {
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "vocab_size": 151936,
}
IDS = {
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "image_token_id": 151655,
    "video_token_id": 151656,
}
FLAT = TEXT | IDS | {
    "max_window_layers": 70,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}  # fmt: skip
"""The text model's settings beside the others, as older files have them."""

QWEN2_VL = FLAT | {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 2048, "patch_size": 14},
}
QWEN2_5_VL = FLAT | {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "vision_config": {"depth": 32, "tokens_per_second": 2, "out_hidden_size": 2048},
}
QWEN3_VL = IDS | {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "text_config": TEXT | {
        "attention_bias": False,
        "dtype": "bfloat16",
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "rope_scaling": {
            "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default",
        },
        "rope_theta": 5000000,
    },
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17], "depth": 24, "model_type": "qwen3_vl",
        "out_hidden_size": 2048, "spatial_merge_size": 2,
    },
}  # fmt: skip
QWEN3_VL_MOE = QWEN3_VL | {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "model_type": "qwen3_vl_moe",
    "text_config": QWEN3_VL["text_config"] | {
        "decoder_sparse_step": 1, "mlp_only_layers": [], "model_type": "qwen3_vl_moe_text",
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "vision_config": QWEN3_VL["vision_config"] | {"model_type": "qwen3_vl_moe"},
}  # fmt: skip
ERNIE_VL = {
    "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
    "dtype": "bfloat16",
    "image_token_id": 100295, "image_start_token_id": 101304, "image_end_token_id": 101305,
    "video_token_id": 103367, "video_start_token_id": 101306, "video_end_token_id": 101307,
    "model_type": "ernie4_5_vl_moe",
    "text_config": TEXT | {
        "hidden_size": 2560, "intermediate_size": 12288, "max_position_embeddings": 131072,
        "model_type": "ernie4_5_vl_moe_text", "moe_intermediate_size": [1536, 512], "moe_k": 6,
        "moe_norm_min": 1e-12, "moe_num_experts": 64, "moe_num_shared_experts": 2,
        "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "mlp_layer_types": ["dense"] + ["sparse"] * 27, "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "mrope_section": [22, 22, 20], "rope_theta": 500000, "rope_type": "default",
        },
        "vocab_size": 103424,
    },
    "tie_word_embeddings": True,
    "vision_config": {
        "depth": 32, "model_type": "ernie4_5_vl_moe_vision", "spatial_merge_size": 2,
        "temporal_merge_size": 2,
    },
}  # fmt: skip


def read(directory: Any, config: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    return ModelConfig.from_pretrained(directory)


@pytest.mark.parametrize("published", [QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE])
def test_published_files_are_read(tmp_path, published):
    config = read(tmp_path, published)
    is_qwen3 = published in (QWEN3_VL, QWEN3_VL_MOE)
    assert config.architecture == published["architectures"][0]
    assert (config.hidden_size, config.num_layers, config.head_dim) == (2048, 36, 128)
    assert (config.num_q_heads, config.num_kv_heads, config.vocab_size) == (16, 2, 151936)
    assert config.max_model_len == (262144 if is_qwen3 else 128000)
    assert config.torch_dtype == torch.bfloat16
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (151645,)
    assert (config.qkv_bias, config.qk_norm) == (not is_qwen3, "head" if is_qwen3 else "none")
    assert set(config.layer_windows) == {-1}
    assert config.rope.rope_type == "default"
    assert config.rope.theta == (5e6 if is_qwen3 else 1e6)
    assert config.rope.mrope_section == ((24, 20, 20) if is_qwen3 else (16, 24, 24))
    assert config.rope.mrope_interleaved == is_qwen3
    times = {"qwen2_vl": "frames", "qwen2_5_vl": "seconds"}
    assert config.vision == VisionConfig(
        image_token_id=151655,
        video_token_id=151656,
        spatial_merge_size=2,
        video_time=times.get(published["model_type"], "text"),
        tokens_per_second=2.0 if published is QWEN2_5_VL else 1.0,
        num_deepstack_layers=3 if is_qwen3 else 0,
    )
    assert config.feature_size == 2048 * (4 if is_qwen3 else 1)


def test_settings_for_code_of_the_checkpoint_are_named(tmp_path):
    """As ERNIE's are published: flat, with lists of both modalities' numbers."""
    own = ERNIE_VL | {
        "auto_map": {"AutoConfig": "configuration_ernie4_5_vl.Ernie4_5_VLMoEConfig"},
        "model_type": "ernie4_5_moe_vl",
    }
    with pytest.raises(
        ConfigError, match=r"model_type: expected 'ernie4_5_vl_moe', .* a revision"
    ):
        read(tmp_path, own)


@pytest.mark.parametrize("name", ["Ernie4_5_VLMoe", "Ernie4_5_VL_Moe"])
def test_a_published_file_of_ernie_is_read(tmp_path, name):
    """Under the name of transformers, and under that of its versions before 5.24."""
    config = read(tmp_path, ERNIE_VL | {"architectures": [f"{name}ForConditionalGeneration"]})
    rope = {"rope_theta": 500000, "rope_type": "default"}  # its section is a default
    text = ERNIE_VL["text_config"] | {"rope_parameters": rope}
    assert read(tmp_path, ERNIE_VL | {"text_config": text}).rope == config.rope
    assert (config.head_dim, config.num_kv_heads, config.rope_interleaved) == (128, 4, True)
    assert config.rope == RopeConfig(
        theta=500000, rotary_dim=128, mrope_section=(20, 22, 22), mrope_alternating=True
    )
    assert config.experts == ExpertsConfig(
        routing=Routing(num_experts=64, top_k=6, num_shared=2, renormalizes=True, least_sum=1e-12),
        intermediate_size=1536,
        visual_size=512,
        layers=(False, *[True] * 27),
    )
    assert config.vision == VisionConfig(
        image_token_id=100295,
        video_token_id=103367,
        spatial_merge_size=2,
        video_time="frames",
        temporal_merge_size=2,
        expert_token_ids=(100295, 101304, 101305, 103367, 101306, 101307),
        has_encoder=False,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 23]}},
            r"mrope_section: expected three integers >= 0 with sum 64, got \[16, 24, 23\]",
        ),
        ({"rope_scaling": None}, r"mrope_section: expected three integers .*, got None"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
        (
            {"quantization_config": {"quant_method": "quip"}},
            "quantization_config.quant_method: expected one of",
        ),
    ],
)
def test_unsupported_settings_are_named(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, QWEN2_VL | change)


def test_deepstack_needs_a_layer_for_each_feature(tmp_path):
    text = QWEN3_VL["text_config"] | {"num_hidden_layers": 2}
    with pytest.raises(ConfigError, match="deepstack_visual_indexes: expected at most 2"):
        read(tmp_path, QWEN3_VL | {"text_config": text})


def test_experts_of_a_published_file_are_read(tmp_path):
    experts = read(tmp_path, QWEN3_VL_MOE).experts
    assert experts == ExpertsConfig(
        routing=Routing(num_experts=128, top_k=8, renormalizes=True, rounds_logits=True),
        intermediate_size=768,
        layers=(True,) * 36,
    )
    assert read(tmp_path, QWEN3_VL).experts is None
