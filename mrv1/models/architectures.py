"""A table of the differences between model families, read with a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mrv1.kernels.layers.contracts import Activation
from mrv1.models.experts import ExpertFamily, by_interval, by_sparse_step
from mrv1.models.fused import GATE_UP, QKV
from mrv1.models.rope import MRopeOrder
from mrv1.models.vision import VideoTime

NormOrder = Literal["before", "after", "both"]
"""Where a layer's RMS norms are: at attention's and the MLP's input, at their output, or both."""
QKNormKind = Literal["none", "head", "vector"]
"""RMS norms of queries and keys: of each head by itself, or of all heads as one vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How one family uses the common decoder; a bias may be the setting that decides."""

    model_type: str
    """``model_type`` in config.json, which is used if ``architectures`` is absent."""
    biases: tuple[bool | str, bool | str, bool | str] = (False, False, False)
    """Of the projections of queries, keys and values, of attention's output, and of the MLP."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Linear layers of a checkpoint that are several of a layer's: their parts, in order."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Modules of a layer under other names in a checkpoint: their usual names."""
    activation: Activation = "silu_and_mul"
    """The activation of an MLP's gates, which the family's configuration names."""
    norm_order: NormOrder = "before"
    """Where a layer's RMS norms are."""
    norms_add_one: bool = False
    """Whether norms multiply by 1 + their weights, in float32."""
    qk_norm: QKNormKind = "none"
    """RMS norms of queries and keys before rope."""
    qk_norm_setting: str | None = None
    """The setting that says whether there are such norms; None = always."""
    rope_interleaved: bool = False
    """Rope pairs (2i, 2i + 1) instead of (i, i + dim / 2)."""
    has_partial_rope: bool = False
    """Whether ``partial_rotary_factor`` says how much of a head rope turns."""
    rope_layers: str | None = None
    """The setting that has a 1 for each layer with rope, and a 0 for others; None = all have."""
    rope_switch: str | None = None
    """The setting that is "rope" if layers have rope; None = they have."""
    has_window_rope: bool = False
    """Whether ``rope_parameters`` has one rope for layers with a window and one for the others."""
    has_multipliers: bool = False
    """Whether settings scale embeddings, attention's scores, what layers add, and logits."""
    soft_caps: Literal["none", "logits", "scores_and_logits"] = "none"
    """What Gemma's settings cap. With any, a setting scales attention's scores, and embeddings are
    multiplied by the root of the hidden size."""
    windows: Literal["none", "all_layers", "layer_types"] = "none"
    """Where ``sliding_window`` applies; ``layer_types`` names each layer's kind."""
    mrope: MRopeOrder = "none"
    """How M-RoPE's axes share the pairs; "none" = a token has one position."""
    has_sinks: bool = False
    """Whether each query head has a logit sink."""
    video_time: VideoTime | None = None
    """Time in a video's positions; None = a model of text alone."""
    has_encoder: bool = True
    """Whether ``VisionEncoder`` has a vision family's encoder; else features come from outside."""
    intermediate_size: str = "intermediate_size"
    """The setting with the width of the MLP."""
    experts_setting: str | None = None
    """The setting that counts experts which mrv1 lacks; None = there is none."""
    experts: ExpertFamily | None = None
    """The experts of its layers; None = each layer has one MLP."""
    drafter: str | None = None
    """How names of tensors begin that only predict further tokens, which are not loaded; ``{}`` is
    the number of layers. None = checkpoints have none."""


_ATTENTION_BIASES = ("attention_bias", "attention_bias", False)
_ALL_BIASES = ("attention_bias", "attention_bias", "mlp_bias")
_QKV_BIASES = ("attention_bias", False, False)

_ROUTING: dict[str, Any] = {
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "renormalizes": True,
    "rounds_logits": True,
}
_ERNIE_EXPERTS = ExpertFamily(
    routing={
        "num_experts": "moe_num_experts",
        "top_k": "moe_k",
        "num_shared": "moe_num_shared_experts",
        "renormalizes": True,
        "least_sum": "moe_norm_min",
    },
    has_experts=by_interval,
    bias="moe_statics.e_score_correction_bias",
    bias_dims=2,
)

# Families that others are like.
_QWEN2 = Architecture(model_type="qwen2", biases=(True, False, False), windows="layer_types")
_QWEN3_VL = Architecture(
    model_type="qwen3_vl",
    biases=_ATTENTION_BIASES,
    qk_norm="head",
    mrope="interleaved",
    video_time="text",
)
_GLM = Architecture(
    model_type="glm",
    biases=_QKV_BIASES,
    fused={"mlp.gate_up_proj": GATE_UP},
    rope_interleaved=True,
    has_partial_rope=True,
)
_ERNIE = Architecture(
    model_type="ernie4_5", biases=("use_bias", "use_bias", "use_bias"), rope_interleaved=True
)
_GEMMA2 = Architecture(
    model_type="gemma2",
    biases=_ATTENTION_BIASES,
    activation="gelu_tanh_and_mul",
    norm_order="both",
    norms_add_one=True,
    soft_caps="scores_and_logits",
    windows="layer_types",
)
_OLMO2 = Architecture(
    model_type="olmo2", biases=_ATTENTION_BIASES, norm_order="after", qk_norm="vector"
)

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(model_type="llama", biases=_ALL_BIASES),
    "MistralForCausalLM": Architecture(model_type="mistral", windows="all_layers"),
    "MinistralForCausalLM": Architecture(model_type="ministral", windows="layer_types"),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": Architecture(
        model_type="qwen3", biases=_ATTENTION_BIASES, qk_norm="head", windows="layer_types"
    ),
    "SmolLM3ForCausalLM": Architecture(
        model_type="smollm3",
        biases=_ALL_BIASES,
        rope_layers="no_rope_layers",
        windows="layer_types",
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(
        _GLM,
        model_type="glm4",
        norm_order="both",
        renamed={
            "post_self_attn_layernorm": "post_attention_layernorm",
            "post_attention_layernorm": "pre_feedforward_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
        },
    ),
    "GraniteForCausalLM": Architecture(
        model_type="granite", biases=_ALL_BIASES, has_multipliers=True
    ),
    "GraniteMoeHybridForCausalLM": Architecture(
        model_type="granitemoehybrid",
        biases=_ATTENTION_BIASES,
        fused={"shared_mlp.input_linear": GATE_UP},
        renamed={"shared_mlp.output_linear": "mlp.down_proj"},
        rope_switch="position_embedding_type",
        has_multipliers=True,
        windows="layer_types",
        intermediate_size="shared_intermediate_size",
        experts_setting="num_local_experts",
    ),
    "SeedOssForCausalLM": Architecture(
        model_type="seed_oss", biases=("attention_bias", "attention_out_bias", "mlp_bias")
    ),
    "Ernie4_5ForCausalLM": _ERNIE,
    "Ernie4_5_MoeForCausalLM": replace(
        _ERNIE, model_type="ernie4_5_moe", experts=_ERNIE_EXPERTS, drafter="model.mtp_"
    ),
    "Qwen3MoeForCausalLM": Architecture(
        model_type="qwen3_moe",
        biases=_ATTENTION_BIASES,
        qk_norm="head",
        windows="all_layers",
        experts=ExpertFamily(
            routing=_ROUTING | {"renormalizes": "norm_topk_prob"},
            has_experts=by_sparse_step,
        ),
    ),
    "MixtralForCausalLM": Architecture(
        model_type="mixtral",
        windows="all_layers",
        experts=ExpertFamily(
            routing=_ROUTING | {"num_experts": "num_local_experts"},
            intermediate_size="intermediate_size",
            block="block_sparse_moe",
            parts=("w1", "w3", "w2"),
        ),
    ),
    "OlmoeForCausalLM": Architecture(
        model_type="olmoe",
        biases=_ATTENTION_BIASES,
        qk_norm="vector",
        experts=ExpertFamily(
            routing=_ROUTING | {"renormalizes": "norm_topk_prob"},
            intermediate_size="intermediate_size",
        ),
    ),
    "GptOssForCausalLM": Architecture(
        model_type="gpt_oss",
        biases=_ATTENTION_BIASES,
        windows="layer_types",
        has_sinks=True,
        experts=ExpertFamily(
            routing=_ROUTING | {"num_experts": "num_local_experts"},
            intermediate_size="intermediate_size",
            router="router",
            clamps={"alpha": "swiglu_alpha", "limit": "swiglu_limit"},
            is_stacked=True,
        ),
    ),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": replace(
        _GEMMA2,
        model_type="gemma3_text",
        qk_norm="head",
        soft_caps="logits",
        has_window_rope=True,
    ),
    "Phi3ForCausalLM": Architecture(
        model_type="phi3",
        fused={"self_attn.qkv_proj": QKV, "mlp.gate_up_proj": GATE_UP},
        has_partial_rope=True,
        windows="all_layers",
    ),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": replace(
        _OLMO2, model_type="olmo3", has_window_rope=True, windows="layer_types"
    ),
    "Glm4MoeForCausalLM": Architecture(
        model_type="glm4_moe",
        biases=_QKV_BIASES,
        qk_norm="head",
        qk_norm_setting="use_qk_norm",
        has_partial_rope=True,
        experts=ExpertFamily(
            routing={
                "num_experts": "n_routed_experts",
                "top_k": "num_experts_per_tok",
                "num_shared": "n_shared_experts",
                "scores": "sigmoid",
                "num_groups": "n_group",
                "kept_groups": "topk_group",
                "renormalizes": "norm_topk_prob",
                "least_sum": 1e-20,
                "scale": "routed_scaling_factor",
            },
            has_experts=lambda text, layer: layer >= text.first_k_dense_replace,
            bias="gate.e_score_correction_bias",
        ),
        drafter="model.layers.{}.",
    ),
    "Qwen2VLForConditionalGeneration": replace(
        _QWEN2, model_type="qwen2_vl", mrope="sections", video_time="frames"
    ),
    "Qwen2_5_VLForConditionalGeneration": replace(
        _QWEN2, model_type="qwen2_5_vl", mrope="sections", video_time="seconds"
    ),
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": replace(
        _QWEN3_VL,
        model_type="qwen3_vl_moe",
        experts=ExpertFamily(routing=_ROUTING, has_experts=by_sparse_step, may_be_turned=True),
    ),
    "Ernie4_5_VLMoeForConditionalGeneration": replace(
        _ERNIE,
        model_type="ernie4_5_vl_moe",
        mrope="alternating",
        video_time="frames",
        has_encoder=False,
        experts=replace(
            _ERNIE_EXPERTS,
            has_experts=lambda text, layer: text.mlp_layer_types[layer] == "sparse",
            bias="text_moe.gate.moe_statics.e_score_correction_bias",
            visual=("gate.weight_1", "vision_moe.gate.moe_statics.e_score_correction_bias"),
        ),
        drafter="model.mtp_",
    ),
}
ARCHITECTURES["Ernie4_5_VL_MoeForConditionalGeneration"] = ARCHITECTURES[
    "Ernie4_5_VLMoeForConditionalGeneration"  # the name before transformers 5.24
]
"""Supported checkpoints by the name in their ``architectures``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """A text model with a vision encoder that mrv1 has no path to: features come from outside."""

    model_type: str
    """``model_type`` in config.json."""
    texts: tuple[str, ...]
    """Keys in ``ARCHITECTURES`` of its text models; the first is that of a file that says none."""
    has_bidirectional_images: bool = False
    """Whether tokens of an image see each other in both directions."""


WRAPPERS: dict[str, Wrapper] = {
    "Gemma3ForConditionalGeneration": Wrapper(
        model_type="gemma3", texts=("Gemma3ForCausalLM",), has_bidirectional_images=True
    ),
    "Mistral3ForConditionalGeneration": Wrapper(
        model_type="mistral3", texts=("MistralForCausalLM", "MinistralForCausalLM")
    ),
}
"""Such models by the name in a checkpoint's ``architectures``."""

MISSING: dict[str, tuple[str, ...]] = {
    "state-space layers": (
        "bamba", "falcon-h1", "falcon_h1", "falcon_mamba", "granitehybrid", "jamba", "mamba",
        "mamba2", "nemotron_h", "nemotron_h_moe", "plamo2", "zamba", "zamba2",
        "mamba_d_state", "ssm_state_size",
    ),
    "linear-attention layers": (
        "arwkv7", "bailing_hybrid", "kimi-linear", "kimi_linear", "minimax", "olmo_hybrid",
        "qwen35", "qwen35moe", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text",
        "qwen3_next", "qwen3next", "rwkv", "rwkv6", "rwkv6qwen2", "rwkv7",
        "linear_num_value_heads",
    ),
    "recurrent layers": ("recurrent_gemma", "xlstm"),
    "short-convolution layers": ("lfm2", "lfm2_moe", "lfm2moe"),
    "multi-head latent attention (MLA)": (
        "deepseek2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm-dsa", "glm4_moe_lite",
        "glm_moe_dsa", "kimi_k2", "longcat_flash", "minicpm3", "mistral4",
        "kv_lora_rank",
    ),
    "an encoder beside the decoder": (
        "bart", "longt5", "mbart", "mt5", "pegasus", "switch_transformers",
        "t5", "t5gemma", "umt5", "whisper", "is_encoder_decoder",
    ),
    "embeddings of each layer": ("gemma3n",),
    "heads of several sizes": ("gemma4",),
    "queries scaled by their position": ("llama4", "llama4_text", "ministral3"),
}  # fmt: skip
"""What mrv1 lacks, and the models that need it: ``model_type`` or GGUF's architecture; last, the
settings by which others are known."""


def missing_feature(*signs: object) -> str:
    """Return what a model needs that mrv1 lacks, to end a message; "" = unknown.

    ``signs``: its types, and the names of settings that it has.
    """
    for feature, names in MISSING.items():
        if any(name in names for name in signs):
            return f": it needs {feature}, which mrv1 lacks"
    return ""
