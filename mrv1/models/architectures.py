"""A table of the differences between model families, read with a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mrv1.kernels.layers.contracts import Activation
from mrv1.models.experts import (
    ExpertFamily,
    after_dense,
    by_interval,
    by_layer_type,
    by_sparse_step,
    every_layer,
)
from mrv1.models.fused import GATE_UP, QKV
from mrv1.models.rope import MRopeOrder
from mrv1.models.vision import VideoTime

NormOrder = Literal["before", "after", "both"]
"""Where a layer's RMS norms are: at attention's and the MLP's input, at their output, or both."""
QKNormKind = Literal["none", "head", "vector"]
"""RMS norms of queries and keys: of each head by itself, or of all heads as one vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How one family uses the common decoder; a bias may name the setting that decides."""

    model_type: str
    """``model_type`` in config.json, which is used if ``architectures`` is absent."""
    qkv_bias: bool | str = False
    """Bias of the query, key and value projections."""
    o_bias: bool | str = False
    """Bias of the attention output projection."""
    mlp_bias: bool | str = False
    """Bias of the gate, up and down projections."""
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


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        model_type="llama", qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"
    ),
    "MistralForCausalLM": Architecture(model_type="mistral", windows="all_layers"),
    "MinistralForCausalLM": Architecture(model_type="ministral", windows="layer_types"),
    "Qwen2ForCausalLM": Architecture(model_type="qwen2", qkv_bias=True, windows="layer_types"),
    "Qwen3ForCausalLM": Architecture(
        model_type="qwen3",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        windows="layer_types",
    ),
    "SmolLM3ForCausalLM": Architecture(
        model_type="smollm3",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        rope_layers="no_rope_layers",
        windows="layer_types",
    ),
    "GlmForCausalLM": Architecture(
        model_type="glm",
        qkv_bias="attention_bias",
        fused={"mlp.gate_up_proj": GATE_UP},
        rope_interleaved=True,
        has_partial_rope=True,
    ),
    "Glm4ForCausalLM": Architecture(
        model_type="glm4",
        qkv_bias="attention_bias",
        norm_order="both",
        renamed={
            "post_self_attn_layernorm": "post_attention_layernorm",
            "post_attention_layernorm": "pre_feedforward_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
        },
        fused={"mlp.gate_up_proj": GATE_UP},
        rope_interleaved=True,
        has_partial_rope=True,
    ),
    "GraniteForCausalLM": Architecture(
        model_type="granite",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        has_multipliers=True,
    ),
    "GraniteMoeHybridForCausalLM": Architecture(
        model_type="granitemoehybrid",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        fused={"shared_mlp.input_linear": GATE_UP},
        renamed={"shared_mlp.output_linear": "mlp.down_proj"},
        rope_switch="position_embedding_type",
        has_multipliers=True,
        windows="layer_types",
        intermediate_size="shared_intermediate_size",
        experts_setting="num_local_experts",
    ),
    "SeedOssForCausalLM": Architecture(
        model_type="seed_oss",
        qkv_bias="attention_bias",
        o_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
    "Ernie4_5ForCausalLM": Architecture(
        model_type="ernie4_5",
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        rope_interleaved=True,
    ),
    "Ernie4_5_MoeForCausalLM": Architecture(
        model_type="ernie4_5_moe",
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        rope_interleaved=True,
        experts=ExpertFamily(
            routing={
                "num_experts": "moe_num_experts",
                "top_k": "moe_k",
                "num_shared": "moe_num_shared_experts",
                "renormalizes": True,
                "least_sum": "moe_norm_min",
            },
            intermediate_size="moe_intermediate_size",
            has_experts=by_interval,
            bias="moe_statics.e_score_correction_bias",
            bias_dims=2,
        ),
        drafter="model.mtp_",
    ),
    "Qwen3MoeForCausalLM": Architecture(
        model_type="qwen3_moe",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        windows="all_layers",
        experts=ExpertFamily(
            routing={
                "num_experts": "num_experts",
                "top_k": "num_experts_per_tok",
                "renormalizes": "norm_topk_prob",
                "rounds_logits": True,
            },
            intermediate_size="moe_intermediate_size",
            has_experts=by_sparse_step,
        ),
    ),
    "MixtralForCausalLM": Architecture(
        model_type="mixtral",
        windows="all_layers",
        experts=ExpertFamily(
            routing={
                "num_experts": "num_local_experts",
                "top_k": "num_experts_per_tok",
                "renormalizes": True,
                "rounds_logits": True,
            },
            intermediate_size="intermediate_size",
            has_experts=every_layer,
            block="block_sparse_moe",
            parts=("w1", "w3", "w2"),
        ),
    ),
    "OlmoeForCausalLM": Architecture(
        model_type="olmoe",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="vector",
        experts=ExpertFamily(
            routing={
                "num_experts": "num_experts",
                "top_k": "num_experts_per_tok",
                "renormalizes": "norm_topk_prob",
                "rounds_logits": True,
            },
            intermediate_size="intermediate_size",
            has_experts=every_layer,
        ),
    ),
    "GptOssForCausalLM": Architecture(
        model_type="gpt_oss",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        windows="layer_types",
        has_sinks=True,
        experts=ExpertFamily(
            routing={
                "num_experts": "num_local_experts",
                "top_k": "num_experts_per_tok",
                "renormalizes": True,
                "rounds_logits": True,
            },
            intermediate_size="intermediate_size",
            has_experts=every_layer,
            router="router",
            clamps={"alpha": "swiglu_alpha", "limit": "swiglu_limit"},
            is_stacked=True,
        ),
    ),
    "Gemma2ForCausalLM": Architecture(
        model_type="gemma2",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        activation="gelu_tanh_and_mul",
        norm_order="both",
        norms_add_one=True,
        soft_caps="scores_and_logits",
        windows="layer_types",
    ),
    "Gemma3ForCausalLM": Architecture(
        model_type="gemma3_text",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        activation="gelu_tanh_and_mul",
        norm_order="both",
        norms_add_one=True,
        qk_norm="head",
        soft_caps="logits",
        has_window_rope=True,
        windows="layer_types",
    ),
    "Phi3ForCausalLM": Architecture(
        model_type="phi3",
        fused={"self_attn.qkv_proj": QKV, "mlp.gate_up_proj": GATE_UP},
        has_partial_rope=True,
        windows="all_layers",
    ),
    "Olmo2ForCausalLM": Architecture(
        model_type="olmo2",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norm_order="after",
        qk_norm="vector",
    ),
    "Olmo3ForCausalLM": Architecture(
        model_type="olmo3",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norm_order="after",
        qk_norm="vector",
        has_window_rope=True,
        windows="layer_types",
    ),
    "Glm4MoeForCausalLM": Architecture(
        model_type="glm4_moe",
        qkv_bias="attention_bias",
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
            intermediate_size="moe_intermediate_size",
            has_experts=after_dense,
            bias="gate.e_score_correction_bias",
        ),
        drafter="model.layers.{}.",
    ),
    "Qwen2VLForConditionalGeneration": Architecture(
        model_type="qwen2_vl",
        qkv_bias=True,
        windows="layer_types",
        mrope="sections",
        video_time="frames",
    ),
    "Qwen2_5_VLForConditionalGeneration": Architecture(
        model_type="qwen2_5_vl",
        qkv_bias=True,
        windows="layer_types",
        mrope="sections",
        video_time="seconds",
    ),
    "Qwen3VLForConditionalGeneration": Architecture(
        model_type="qwen3_vl",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        mrope="interleaved",
        video_time="text",
    ),
    "Qwen3VLMoeForConditionalGeneration": Architecture(
        model_type="qwen3_vl_moe",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        mrope="interleaved",
        video_time="text",
        experts=ExpertFamily(
            routing={
                "num_experts": "num_experts",
                "top_k": "num_experts_per_tok",
                "renormalizes": True,
                "rounds_logits": True,
            },
            intermediate_size="moe_intermediate_size",
            has_experts=by_sparse_step,
            may_be_turned=True,
        ),
    ),
    "Ernie4_5_VLMoeForConditionalGeneration": Architecture(
        model_type="ernie4_5_vl_moe",
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        rope_interleaved=True,
        mrope="alternating",
        video_time="frames",
        has_encoder=False,
        experts=ExpertFamily(
            routing={
                "num_experts": "moe_num_experts",
                "top_k": "moe_k",
                "num_shared": "moe_num_shared_experts",
                "renormalizes": True,
                "least_sum": "moe_norm_min",
            },
            intermediate_size="moe_intermediate_size",
            has_experts=by_layer_type,
            bias="text_moe.gate.moe_statics.e_score_correction_bias",
            bias_dims=2,
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
