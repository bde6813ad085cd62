"""``ModelConfig`` reads transformers' settings, and reports every setting it cannot run."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, MistralConfig, PretrainedConfig, Qwen2Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from mrv1.errors import ConfigError
from mrv1.models import ModelConfig, RopeConfig, architectures
from mrv1.models.architectures import MISSING
from mrv1.models.hf_config import model_fields
from mrv1.models.rope import attention_factor
from tests.models.families import FAMILIES, ROPES, SLIDING, tiny_config

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "ministral": "MinistralForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
}
QK_NORMS = {
    "qwen3": "head",
    "qwen3_moe": "head",
    "olmoe": "vector",
    "glm4_moe": "head",
    "olmo2": "vector",
    "olmo3": "vector",
    "gemma3_text": "head",
}


KV_CACHE_ONLY = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False},
}


def write_config(directory: Path, family: str = "qwen3", **changes: Any) -> Path:
    """Write a tiny config.json with ``changes`` in its JSON."""
    content = tiny_config(family).to_dict() | {"architectures": [ARCHITECTURES[family]]} | changes
    (directory / "config.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_architecture_follows_from_the_model_type(family: str) -> None:
    config = ModelConfig.from_hf(tiny_config(family))
    assert config.architecture == ARCHITECTURES[family]
    assert (config.num_q_heads, config.num_kv_heads) == (4, 2)
    assert config.num_layers == (3 if family == "ernie4_5_moe" else 2)
    head_dim = 16 if family == "olmoe" else 32
    rotary_dim = head_dim // 2 if family.startswith("glm") else head_dim
    assert (config.head_dim, config.rope.rotary_dim) == (head_dim, rotary_dim)
    assert config.qk_norm == QK_NORMS.get(family, "none")
    assert config.rope_interleaved == (family.startswith("ernie4_5") or family in ("glm", "glm4"))
    assert config.torch_dtype == torch.float32


WITHOUT_EFFECT = {
    *("attention_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop"),  # of training
    *("initializer_range", "pretraining_tp"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    *("use_cache", "bos_token_id", "pad_token_id"),  # of transformers' generate
    "num_nextn_predict_layers",  # tensors of Architecture.drafter
    # transformers makes other settings of them: layer_types, sliding_window, no_rope_layers, and
    # rope_parameters
    *("max_window_layers", "use_sliding_window", "no_rope_layer_interval"),
    "_sliding_window_pattern",
    *("partial_rotary_factor", "original_max_position_embeddings"),
    "num_local_experts",  # another name of num_experts
}
OF_GRANITE_4 = {
    *("num_experts_per_tok", "intermediate_size"),  # of experts, which are refused
    "time_step_limit",  # of state-space layers, which are refused
    *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv"),
    *("mamba_expand", "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_setting_of_a_family_is_read_or_known_to_have_no_effect(family: str) -> None:
    """Those of its class in transformers; what changes the model must not be ignored."""

    class Recorded:
        def __init__(self) -> None:
            self.names: set[str] = set()

        def __getattr__(self, name: str) -> Any:
            self.names.add(name)
            return getattr(hf, name)

    hf, recorded = tiny_config(family), Recorded()
    model_fields(recorded)
    own = hf.to_dict().keys() - PretrainedConfig().to_dict().keys()
    more = OF_GRANITE_4 if family == "granitemoehybrid" else set()
    assert own - recorded.names <= WITHOUT_EFFECT | more


@pytest.mark.parametrize(
    ("family", "settings", "biases"),
    [
        ("llama", {}, (False, False, False)),
        ("llama", {"attention_bias": True}, (True, True, False)),
        ("llama", {"mlp_bias": True}, (False, False, True)),
        ("mistral", {}, (False, False, False)),
        ("qwen2", {}, (True, False, False)),
        ("qwen3", {"attention_bias": True}, (True, True, False)),
        ("ernie4_5", {"use_bias": True}, (True, True, True)),
        ("smollm3", {"attention_bias": True}, (True, True, False)),
        ("smollm3", {"mlp_bias": True}, (False, False, True)),
        ("glm", {}, (True, False, False)),
        ("glm4", {"attention_bias": False}, (False, False, False)),
        ("granite", {"attention_bias": True}, (True, True, False)),
        ("granitemoehybrid", {"attention_bias": True}, (True, True, False)),
        ("granite", {"mlp_bias": True}, (False, False, True)),
        ("seed_oss", {}, (True, False, False)),
        ("seed_oss", {"attention_bias": False, "attention_out_bias": True}, (False, True, False)),
        ("seed_oss", {"mlp_bias": True}, (True, False, True)),
    ],
)
def test_biases_follow_from_the_family_and_its_settings(
    family: str, settings: dict[str, Any], biases: tuple[bool, ...]
) -> None:
    config = ModelConfig.from_hf(tiny_config(family, **settings))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases


@pytest.mark.parametrize(
    ("family", "settings", "windows"),
    [
        ("llama", {"sliding_window": 8}, (-1, -1)),
        ("mistral", {"sliding_window": 8}, (8, 8)),
        ("mistral", {"sliding_window": None}, (-1, -1)),
        ("mistral", {"sliding_window": 511}, (511, 511)),
        ("mistral", {"sliding_window": 512}, (-1, -1)),  # as many tokens as the context
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8}, (-1, -1)),
        ("qwen2", SLIDING["qwen2"], (-1, 24)),
        ("qwen3", SLIDING["qwen3"] | {"max_window_layers": 0}, (24, 24)),
        ("qwen3", SLIDING["qwen3"] | {"max_window_layers": 2}, (-1, -1)),
        (
            "qwen3",
            SLIDING["qwen3"] | {"layer_types": ["sliding_attention", "full_attention"]},
            (24, -1),
        ),
        ("ministral", {"sliding_window": 8}, (8, 8)),
        (
            "ministral",
            {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
            (-1, 8),
        ),
        ("ministral", {"sliding_window": 512}, (-1, -1)),
        ("gemma3_text", {"sliding_window": 512, "layer_types": ["sliding_attention"]}, (512, 512)),
        ("smollm3", SLIDING["smollm3"], (-1, 24)),
        ("smollm3", SLIDING["smollm3"] | {"use_sliding_window": False}, (-1, -1)),
    ],
)
def test_layer_windows_follow_from_the_sliding_window_settings(
    family: str, settings: dict[str, Any], windows: tuple[int, ...]
) -> None:
    assert ModelConfig.from_hf(tiny_config(family, **settings)).layer_windows == windows


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"no_rope_layer_interval": 4, "num_hidden_layers": 5}, (True, True, True, False, True)),
        ({"no_rope_layers": [0, 1, 0]}, (False, True)),
    ],
)
def test_layers_without_rope_follow_from_their_setting(
    settings: dict[str, Any], expected: tuple[bool, ...]
) -> None:
    assert ModelConfig.from_hf(tiny_config("smollm3", **settings)).rope_layers == expected


@pytest.mark.parametrize("value", [[1], [1, 2], None])
def test_other_lists_of_layers_without_rope_are_refused(value: list[int] | None) -> None:
    config = tiny_config("smollm3")
    config.no_rope_layers = value
    with pytest.raises(ConfigError, match="no_rope_layers: expected 1 or 0 for each of 2 layers"):
        ModelConfig.from_hf(config)


def test_a_window_that_a_configuration_both_asks_for_and_turns_off_is_refused() -> None:
    kinds = ["full_attention", "sliding_attention"]
    config = tiny_config("smollm3", sliding_window=24, layer_types=kinds)
    with pytest.raises(ConfigError, match=r"expected full_attention \(sliding_window is None\)"):
        ModelConfig.from_hf(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"layer_types": ["attention", "mamba"]},
            "layer_types: expected full_attention .*, got linear_attention: it needs "
            "state-space, linear-attention or convolution layers, which mrv1 lacks",
        ),
        ({"num_local_experts": 4}, "num_local_experts: expected none, as the .*, got 4"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type: expected rope, nope or"),
    ],
)
def test_a_granite_4_that_is_not_dense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(tiny_config("granitemoehybrid", **settings))


@pytest.mark.parametrize("value", [0, -1.0, 10**400])
def test_multipliers_that_are_no_numbers_above_0_are_refused(value: object) -> None:
    config = tiny_config("granite")
    for name in ("residual_multiplier", "logits_scaling"):
        setattr(config, name, value)
    expected = "residual_multiplier: expected a number > 0, .*logits_scaling: expected a number"
    with pytest.raises(ConfigError, match=expected):
        ModelConfig.from_hf(config)


def test_a_model_of_some_layers_keeps_what_they_are() -> None:
    config = ModelConfig.from_hf(tiny_config("smollm3", num_hidden_layers=4, **SLIDING["smollm3"]))
    assert [config.kind(i) for i in range(4)] == [(-1, False, True), (24, False, False)] * 2
    few = config.with_layers([0, 3])
    assert [few.kind(i) for i in range(2)] == [(-1, False, True), (24, False, False)]


def test_head_dim_defaults_to_a_share_of_the_hidden_size() -> None:
    config = ModelConfig.from_hf(
        Qwen2Config(hidden_size=96, num_attention_heads=6, num_key_value_heads=2)
    )
    assert (config.head_dim, config.rope.rotary_dim) == (16, 16)


@pytest.mark.parametrize(
    ("rope", "max_position_embeddings", "expected"),
    [("default", 100, 100), ("linear", 100, 100), ("yarn", 100, 256), ("yarn", 512, 512)],
)
def test_yarn_extends_the_context_and_linear_rope_does_not(
    rope: str, max_position_embeddings: int, expected: int
) -> None:
    config = tiny_config("qwen2", rope, max_position_embeddings=max_position_embeddings)
    assert ModelConfig.from_hf(config).max_model_len == expected


@pytest.mark.parametrize(
    "setting",
    [
        {"rope_scaling": {"rope_type": "yarn"}, "rope_theta": 1e6},
        {"rope_scaling": {"type": "yarn"}, "rope_theta": 1e6},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}},
    ],
)
@pytest.mark.parametrize("factor", [None, 1.5])
def test_qwen3_takes_yarn_as_its_page_says(
    tmp_path: Path, setting: dict[str, Any], factor: float | None
) -> None:
    """Four times the context, in the spelling of any version; with the factor of cos and sin."""
    content = tiny_config("qwen3", max_position_embeddings=40960).to_dict()
    del content["rope_parameters"]
    content |= copy.deepcopy(setting) | {"architectures": ["Qwen3ForCausalLM"]}
    rope = content.get("rope_scaling") or content["rope_parameters"]
    rope |= {"factor": 4.0, "original_max_position_embeddings": 32768}
    rope |= {} if factor is None else {"attention_factor": factor}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = ModelConfig.from_pretrained(tmp_path)
    assert config.max_model_len == 131072
    assert config.rope == RopeConfig(
        rope_type="yarn", theta=1e6, rotary_dim=32, factor=4.0,
        original_max_position_embeddings=32768, attention_factor=factor,
    )  # fmt: skip
    expected = 0.1 * math.log(4) + 1 if factor is None else factor
    assert attention_factor(config.rope) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [
        (2, None, (2,)),
        ([5, 3], [3, 9], (5, 3, 9)),
        (None, 7, (7,)),
        (None, None, ()),
    ],
)
def test_eos_ids_come_from_both_files(
    tmp_path: Path, own: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    write_config(tmp_path, eos_token_id=own)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == expected


def test_generation_config_is_optional(tmp_path: Path) -> None:
    assert ModelConfig.from_pretrained(write_config(tmp_path)).eos_token_ids == (2,)


def test_config_files_of_older_transformers_are_read(tmp_path: Path) -> None:
    """Before version 5 rope was spread over three settings, and the dtype had another name."""
    content = tiny_config("llama").to_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": 500000.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "torch_dtype": "bfloat16",
    }
    del content["rope_parameters"], content["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = ModelConfig.from_pretrained(tmp_path)
    assert (config.rope.rope_type, config.rope.theta, config.rope.factor) == (
        "linear",
        500000.0,
        4.0,
    )
    assert config.torch_dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping: expected a number >"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping: expected a numb"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: expected a number > 0"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation: expected 'gelu_pytorch_tan"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: expected"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: expected none"),
    ],
)
def test_settings_of_gemma_that_cannot_be_are_refused(
    family: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(tiny_config(family, **settings))


def test_a_config_object_of_an_unsupported_architecture_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"architectures: .*, got None \(model_type 'gpt2'\)"):
        ModelConfig.from_hf(GPT2Config())


def test_rope_that_differs_by_layer_is_refused() -> None:
    config = tiny_config("qwen3")
    config.rope_parameters = {"full_attention": ROPES["default"]}
    with pytest.raises(ConfigError, match="rope_parameters: expected one rope for all layers"):
        ModelConfig.from_hf(config)


def test_a_config_without_heads_is_refused() -> None:
    config = Qwen2Config(hidden_size=64, num_key_value_heads=2)
    config.num_attention_heads = 0
    with pytest.raises(ConfigError, match="num_q_heads: expected >= 1, got 0"):
        ModelConfig.from_hf(config)


def test_plain_weights_with_a_calibrated_kv_cache_are_not_refused_as_quantized(
    tmp_path: Path,
) -> None:
    quantized = write_config(tmp_path, quantization_config=KV_CACHE_ONLY)
    assert ModelConfig.from_pretrained(quantized) == ModelConfig.from_hf(tiny_config("qwen3"))


def test_a_missing_directory_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a checkpoint directory"):
        ModelConfig.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"expected a config\.json"):
        ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "expected a readable JSON file, got"),
        (b'{"a": "\xff"}', "expected a readable JSON file, got"),
        (b"[1]", "expected a JSON object, got list"),
    ],
)
def test_a_corrupt_config_file_is_refused_and_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (write_config(tmp_path) / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name}: {message}"):
        ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"architectures: expected one of LlamaForCausalLM, .*, got \['GPT2LMHeadModel'\]",
        ),
        (
            {"architectures": "LlamaForCausalLM"},
            "architectures: expected .*, got LlamaForCausalLM",
        ),
        (
            {"quantization_config": {"quant_method": "quip"}},
            r"quantization_config\.quant_method: expected one of .*fp8.*, got 'quip'",
        ),
        (
            {"quantization_config": KV_CACHE_ONLY | {"config_groups": {"group_0": {}}}},
            r"quantization_config\.config_groups\.group_0\.format: expected one of .*, got None",
        ),
        (
            {"quantization_config": KV_CACHE_ONLY | {"kv_cache_scheme": None}},
            r"quantization_config\.config_groups: expected at least one group, got",
        ),
        (
            {"text_config": {"quantization_config": {"quant_method": "quip"}}},
            r"text_config\.quantization_config\.quant_method: expected one of .*, got 'quip'",
        ),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
        ({"dtype": "int8"}, "dtype: expected one of .*, got torch.int8"),
        ({"hidden_size": "wide"}, "config.json is not valid: .*hidden_size"),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}},
            "config.json is not valid: .*no code of a checkpoint is run",
        ),
        ({"head_dim": 24}, "head_dim: expected a multiple of 16 from 16 to 256, got 24"),
        ({"head_dim": 512}, "head_dim: expected a multiple of 16 from 16 to 256, got 512"),
        (
            {"num_key_value_heads": 3},
            "num_kv_heads: expected a divisor of 4 query heads, got 3",
        ),
        ({"vocab_size": 0}, "vocab_size: expected >= 1, got 0"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type: expected one of .*, got 'dynamic'",
        ),
        (
            SLIDING["qwen3"] | {"sliding_window": 0},
            "sliding_window: expected >= 1 token, got 0",
        ),
        (
            {"layer_types": ["sliding_attention", "full_attention"]},
            r"layer_types: expected full_attention \(sliding_window is None\), "
            "got sliding_attention",
        ),
        (
            SLIDING["qwen3"] | {"layer_types": ["chunked_attention", "full_attention"]},
            r"layer_types: expected full_attention or sliding_attention \(sliding_window is 24\), "
            "got chunked_attention",
        ),
    ],
)
def test_unsupported_settings_are_refused_and_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfig.from_pretrained(write_config(tmp_path, **changes))
    assert str(tmp_path) in str(caught.value)


SIGNS = {
    *("mamba_d_state", "ssm_state_size", "linear_num_value_heads", "kv_lora_rank"),
    "is_encoder_decoder",
}
"""Settings among the signs of a missing feature."""


@pytest.mark.parametrize(
    ("feature", "sign"),
    [(feature, sign) for feature, signs in MISSING.items() for sign in signs],
)
def test_a_feature_that_is_missing_is_named(tmp_path: Path, feature: str, sign: str) -> None:
    """As the model's own type or setting, and as that of the text model within."""
    content: dict[str, Any] = {"architectures": ["X"], "model_type": sign}
    if sign in SIGNS:
        content |= {"model_type": "x", sign: 64}
    for raw in (content, {"architectures": ["X"], "model_type": "x", "text_config": content}):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        with pytest.raises(ConfigError) as caught:
            ModelConfig.from_pretrained(tmp_path)
        assert str(caught.value).endswith(f": it needs {feature}, which mrv1 lacks")


def test_names_of_missing_features_are_spelt_as_models_spell_them() -> None:
    gguf = pytest.importorskip("gguf", reason="not run: the package gguf is not installed")
    known = {*CONFIG_MAPPING_NAMES, *gguf.MODEL_ARCH_NAMES.values(), "kimi_k2", "plamo2"}
    known |= SIGNS
    known |= {"bailing_hybrid", "kimi_linear"}  # transformers 5.16 lacks them
    assert {name for names in MISSING.values() for name in names} <= known
    supported = {each.model_type for each in architectures.ARCHITECTURES.values()}
    assert supported.isdisjoint(name for names in MISSING.values() for name in names)


def test_all_problems_are_in_one_message(tmp_path: Path) -> None:
    write_config(
        tmp_path,
        architectures=["FalconForCausalLM"],
        quantization_config={"quant_method": "quip"},
    )
    with pytest.raises(ConfigError, match="2 problems") as caught:
        ModelConfig.from_pretrained(tmp_path)
    assert "FalconForCausalLM" in str(caught.value)
    assert "quip" in str(caught.value)
    config = MistralConfig(hidden_act="relu", sliding_window=-3, dtype="int8")
    with pytest.raises(ConfigError, match=r"(?s)3 problems.*hidden_act.*sliding_window.*dtype"):
        ModelConfig.from_hf(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_windows": (-1,)}, "layer_windows: expected 2 entries, got 1"),
        ({"rope_layers": (True,)}, "rope_layers: expected 2 entries, got 1"),
        ({"layer_windows": (-1, 0)}, r"layer_windows: expected -1 or >= 1, got \(-1, 0\)"),
        ({"num_kv_heads": 0}, "num_kv_heads: expected >= 1, got 0"),
    ],
)
def test_fields_that_contradict_are_refused(changes: dict[str, Any], message: str) -> None:
    config = ModelConfig.from_hf(tiny_config("llama"))
    with pytest.raises(ConfigError, match=message):
        replace(config, **changes)
