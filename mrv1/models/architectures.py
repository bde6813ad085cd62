"""A table of the differences between model families, read with a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    norm_order: NormOrder = "before"
    """Where a layer's RMS norms are."""
    qk_norm: QKNormKind = "none"
    """RMS norms of queries and keys before rope."""
    rope_interleaved: bool = False
    """Rope pairs (2i, 2i + 1) instead of (i, i + dim / 2)."""
    windows: Literal["none", "all_layers", "layer_types"] = "none"
    """Where ``sliding_window`` applies; ``layer_types`` names each layer's kind."""
    mrope: Literal["none", "sections", "interleaved"] = "none"
    """How M-RoPE's axes share the pairs; "none" = a token has one position."""
    video_time: VideoTime | None = None
    """Time in a video's positions; None = a model of text alone."""


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        model_type="llama",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "MistralForCausalLM": Architecture(
        model_type="mistral",
        windows="all_layers",
    ),
    "Qwen2ForCausalLM": Architecture(
        model_type="qwen2",
        qkv_bias=True,
        windows="layer_types",
    ),
    "Qwen3ForCausalLM": Architecture(
        model_type="qwen3",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="head",
        windows="layer_types",
    ),
    "Ernie4_5ForCausalLM": Architecture(
        model_type="ernie4_5",
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        rope_interleaved=True,
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
}
"""Supported checkpoints by the name in their ``architectures``."""
