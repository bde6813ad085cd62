"""A checkpoint's configuration, reduced to what the decoder needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mrv1.config import QuantizationName
from mrv1.errors import ConfigError
from mrv1.kernels.layers.contracts import Activation
from mrv1.models.architectures import ARCHITECTURES, NormOrder, QKNormKind, Wrapper
from mrv1.models.checkpoint import Checkpoint
from mrv1.models.experts import ExpertsConfig, modal_names_in_memory, names_in_memory
from mrv1.models.files import raise_problems
from mrv1.models.fused import GATE_UP, QKV, OtherNames, fused_names
from mrv1.models.hf_config import model_fields, token_ids
from mrv1.models.quantization import Quantization, as_asked
from mrv1.models.rope import RopeConfig
from mrv1.models.vision import VisionConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HEAD_DIMS = range(16, 257, 16)
"""Head sizes the attention kernels take."""
MAX_CONTEXT = 1 << 24
"""Tokens; published models have 10 million at most. Tables are made for all positions."""

MODULES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
)
"""Linear modules of a layer, and stacks of experts."""

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_q_heads",
    "num_kv_heads",
    "max_model_len",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and options of a decoder-only model; ConfigError: contradictory, unsupported.

    Fields without a description are those of ``Architecture`` (its ``biases`` are three here), or
    named as in transformers.
    """

    architecture: str
    """Key of ``mrv1.models.architectures.ARCHITECTURES``."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    """KV heads; divides ``num_q_heads``."""
    head_dim: int
    """Elements of a head: a multiple of 16 from 16 to 256."""
    rms_norm_eps: float
    """Added to the mean square in every norm."""
    max_model_len: int
    """Most tokens of a context that the model is made for."""
    tie_word_embeddings: bool
    """Whether the output head is the embedding."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: QKNormKind
    activation: Activation = "silu_and_mul"
    norm_order: NormOrder = "before"
    norms_add_one: bool = False
    rope: RopeConfig
    window_rope: RopeConfig | None = None
    """Rotary embedding of layers with a window; None = ``rope``."""
    rope_interleaved: bool
    rope_layers: tuple[bool, ...] | None = None
    """Per layer: whether rope turns its queries and keys; None = all layers."""
    embed_scale: float | None = None
    """Factor of embeddings; None = 1."""
    scales_features: bool = False
    """Whether features that replace embeddings have that factor, too."""
    residual_scale: float = 1.0
    """Factor of what each layer adds. The decoder keeps the sum divided by it, which saves the
    products: ``embed_scale`` is divided by it already."""
    logits_divisor: float = 1.0
    """Logits are divided by it."""
    softmax_scale: float | None = None
    """Factor of attention's scores; None = ``head_dim**-0.5``."""
    rounds_embed_scale: bool = False
    """Whether the factor of embeddings is rounded to the model's dtype."""
    attention_soft_cap: float | None = None
    """Cap of attention's scores s, ``cap * tanh(s / cap)``; None = none."""
    logits_soft_cap: float | None = None
    """The same for logits."""
    has_sinks: bool = False
    layer_windows: tuple[int, ...]
    """Per layer: visible tokens including the current one, -1 = full context."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a text, from config.json and generation_config.json."""
    experts: ExpertsConfig | None = None
    """Experts of some layers; None = each layer has one MLP."""
    quantization: Quantization | None = None
    """How matrices of layers are stored; None = in full precision."""
    vision: VisionConfig | None = None
    """Images and videos in prompts; None = a model of text alone."""
    wrapper: Wrapper | None = None
    """The model that this text model is a part of; None = none, or ``vision`` has it."""
    torch_dtype: torch.dtype = torch.float32
    """Dtype that config.json names, or else that of the stored embedding; float32 if neither is
    there."""

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in place of one MLP."""
        return self.experts is not None and self.experts.layers[layer]

    def has_rope(self, layer: int) -> bool:
        """Whether rope turns a layer's queries and keys."""
        return self.rope_layers is None or self.rope_layers[layer]

    def kind(self, layer: int) -> tuple[object, ...]:
        """Return what decides on a layer's kernels."""
        kind = self.layer_windows[layer], self.has_experts(layer), self.has_rope(layer)
        if self.quantization is None:
            return kind
        modules: tuple[str, ...] = MODULES
        family = ARCHITECTURES[self.architecture].experts
        if self.has_experts(layer) and family is not None:  # all of them are as the first
            modules += tuple(f"{family.block}.experts.0.{part}" for part in family.parts)
        return *kind, *(self.quantization.module(f"model.layers.{layer}.{m}") for m in modules)

    def with_layers(self, layers: Sequence[int]) -> ModelConfig:
        """Return the configuration of a model that has only these of the layers."""
        experts, ropes = self.experts, self.rope_layers
        return replace(
            self,
            num_layers=len(layers),
            layer_windows=tuple(self.layer_windows[i] for i in layers),
            rope_layers=ropes and tuple(ropes[i] for i in layers),
            experts=experts and replace(experts, layers=tuple(experts.layers[i] for i in layers)),
            quantization=self.quantization and self.quantization.of_layers(layers),
        )

    def for_context(self, requested: int | None) -> ModelConfig:
        """Return the configuration for requests of up to so many tokens; None = as many as usual.

        Only with longrope it is another one. There the usual context is the original one, as in
        vLLM: the factors for longer contexts are worse for short texts.
        """
        if self.rope.rope_type != "longrope":
            return self
        longest = requested or int(self.rope.original_max_position_embeddings)
        return self if longest > self.max_model_len else replace(self, max_model_len=longest)

    @property
    def other_names(self) -> OtherNames | None:
        """Names of fused tensors, and of experts in memory; None = a checkpoint has neither."""
        family = ARCHITECTURES[self.architecture]
        if self.experts is not None and family.experts is not None:
            if family.experts.is_stacked:  # its names are the same in memory
                return None
            is_modal = family.experts.visual is not None
            names_of = modal_names_in_memory if is_modal else names_in_memory
            return names_of(self.experts, family.experts, self.hidden_size)
        if not family.fused and not family.renamed:
            return None
        sizes = (self.num_q_heads, self.num_kv_heads, self.num_kv_heads)
        rows = dict(zip(QKV, (size * self.head_dim for size in sizes), strict=True))
        rows |= dict.fromkeys(GATE_UP, self.intermediate_size)
        fused = {name: {p: rows[p] for p in parts} for name, parts in family.fused.items()}
        return fused_names(self.num_layers, self.hidden_size, fused, family.renamed)

    def is_of_drafter(self, name: str) -> bool:
        """Whether a checkpoint's tensor only predicts further tokens: it is not loaded."""
        drafter = ARCHITECTURES[self.architecture].drafter
        return drafter is not None and name.startswith(drafter.format(self.num_layers))

    @property
    def has_vision(self) -> bool:
        """Whether a checkpoint has a vision encoder, so that its text model's names differ."""
        return self.vision is not None or self.wrapper is not None

    @property
    def feature_size(self) -> int:
        """Columns of a row of features: the embedding, and what is added after first layers."""
        layers = 0 if self.vision is None else self.vision.num_deepstack_layers
        return self.hidden_size * (1 + layers)

    def __post_init__(self) -> None:
        """Check that the sizes fit together."""
        sizes = {name: getattr(self, name) for name in _SIZES}
        problems = [f"{name}: expected >= 1, got {n}" for name, n in sizes.items() if n < 1]
        for wrong, problem in (
            (not problems and self.num_q_heads % self.num_kv_heads,
             f"num_kv_heads: expected a divisor of {self.num_q_heads} query heads, "
             f"got {self.num_kv_heads}"),
            (self.max_model_len > MAX_CONTEXT,
             f"max_model_len: expected {MAX_CONTEXT} tokens at most, got {self.max_model_len}"),
            (self.head_dim not in HEAD_DIMS,
             f"head_dim: expected a multiple of 16 from 16 to 256, got {self.head_dim}"),
            (any(window != -1 and window < 1 for window in self.layer_windows),
             f"layer_windows: expected -1 or >= 1, got {self.layer_windows}"),
            (self.experts and self.norm_order != "before",
             f"norm_order: expected 'before' with experts, got {self.norm_order!r}"),
            (self.experts and self.activation != "silu_and_mul",
             f"activation: expected 'silu_and_mul' with experts, got {self.activation!r}"),
            (self.experts and self.mlp_bias, "mlp_bias: expected none with experts, got one"),
        ):  # fmt: skip
            if wrong:
                problems.append(problem)
        for name, entries in (
            ("layer_windows", self.layer_windows),
            ("rope_layers", self.rope_layers),
        ):
            if entries is not None and len(entries) != self.num_layers:
                problems.append(f"{name}: expected {self.num_layers} entries, got {len(entries)}")
        raise_problems("model config", problems)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        generation_config: str | Path | None = "auto",
        quantization: QuantizationName | None = None,
    ) -> ModelConfig:
        """Read the configuration of a model, which is whatever ``EngineConfig.model`` may be.

        No code of the checkpoint runs. ``generation_config`` says, as in ``EngineConfig``, where
        to read end-of-sequence tokens from in addition to config.json, and ``quantization`` which
        one is expected.

        Raises:
            ConfigError: the checkpoint or one of its files cannot be read, or the model is not
                supported; the message lists every reason.
        """
        checkpoint = Checkpoint.open(path)
        generation_file, generation = checkpoint.generation_config(generation_config)
        try:
            more = token_ids(generation.get("eos_token_id"))
        except ConfigError as error:
            raise ConfigError(f"{generation_file}: {error}") from error
        hf_config = checkpoint.hf_config()
        try:
            config = cls.from_hf(hf_config)
        except ConfigError as error:
            raise ConfigError(f"{checkpoint.where}: {error}") from error
        except (AttributeError, TypeError) as error:  # fields of a family other than model_type's
            raise ConfigError(
                f"{checkpoint.where}: config.json contradicts itself: {error}"
            ) from error
        return replace(
            config,
            eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + more)),
            quantization=as_asked(checkpoint.quantization(), quantization),
        )

    @classmethod
    def from_hf(cls, hf_config: PretrainedConfig) -> ModelConfig:
        """Return a transformers (>= 5) object's configuration; ConfigError: not supported."""
        return cls(**model_fields(hf_config))
