"""A transformers (>= 5) configuration, already translated, as ``ModelConfig``'s fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mrv1.errors import ConfigError
from mrv1.kernels.layers.contracts import Activation
from mrv1.models.architectures import (
    ARCHITECTURES,
    WRAPPERS,
    Architecture,
    Wrapper,
    missing_feature,
)
from mrv1.models.experts import experts_config
from mrv1.models.files import not_positive, raise_problems
from mrv1.models.quantization import read_quantization
from mrv1.models.rope import RopeConfig
from mrv1.models.vision import VideoTime, VisionConfig, vision_config

WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Dtypes a model can be loaded in (float64: reference path only)."""


_STATEFUL = frozenset(("linear_attention", "mamba", "recurrent", "conv"))
_WINDOW = "sliding_attention"
_STATE = "state-space, linear-attention or convolution layers"
_ACTIVATIONS: dict[Activation, tuple[str, tuple[str, ...]]] = {
    "silu_and_mul": ("hidden_act", ("silu", "swish")),
    "gelu_tanh_and_mul": ("hidden_activation", ("gelu_pytorch_tanh",)),
}
"""The setting that names an activation, and its names there."""
_CAPS = {
    "attn_logit_softcapping": "attention_soft_cap",
    "final_logit_softcapping": "logits_soft_cap",
}
"""Settings of Gemma that cap, and their fields."""
_BIASES = ("qkv_bias", "o_bias", "mlp_bias")
_OWN_CODE = {"ernie4_5_moe_vl": "ernie4_5_vl_moe"}
"""A ``model_type`` whose settings only code of the checkpoint reads -> that of transformers."""


def support_problems(raw: Mapping[str, Any]) -> list[str]:
    """Return every reason why a checkpoint with this config.json cannot run at all."""
    problems = []
    try:
        architecture_name(raw)
    except ConfigError as error:
        problems.append(str(error))
    if isinstance(given := raw.get("model_type"), str) and given in _OWN_CODE:
        problems.append(
            f"model_type: expected {_OWN_CODE[given]!r}, with transformers' settings, got "
            f"{given!r}, whose settings only code of the checkpoint reads: take a revision with "
            "the others, see docs/multimodal.md"
        )
    text = raw.get("text_config")
    for name, part in (("", raw), ("text_config.", text if isinstance(text, Mapping) else {})):
        for key in ("dtype", "torch_dtype"):
            given = part.get(key)
            if isinstance(given, str) and not isinstance(getattr(torch, given, None), torch.dtype):
                problems.append(f"{name}{key}: expected one of {WEIGHT_DTYPES}, got {given!r}")
    try:
        read_quantization(raw, {})
    except ConfigError as error:
        problems.append(str(error))
    return problems


def architecture_name(raw: Mapping[str, Any]) -> str:
    """Return the key in ``ARCHITECTURES``, if need be by ``model_type``; ConfigError: none."""
    listed, model_type = raw.get("architectures"), raw.get("model_type")
    text = raw.get("text_config")
    settings = {**raw, **text} if isinstance(text, Mapping) else raw
    for name, architecture in ARCHITECTURES.items():
        if listed == [name] or (not listed and architecture.model_type == model_type):
            return name
    wrapper = wrapper_of(raw)
    if wrapper is not None:
        return _text_of(wrapper, text if isinstance(text, Mapping) else {})
    signs = [model_type, settings.get("model_type"), *(key for key in settings if settings[key])]
    raise ConfigError(
        f"architectures: expected one of {', '.join((*ARCHITECTURES, *WRAPPERS))}, got {listed} "
        f"(model_type {model_type!r}){missing_feature(*signs)}"
    )


def wrapper_of(raw: Mapping[str, Any]) -> Wrapper | None:
    """Return which model that loads as its text model a config.json describes; None = none."""
    listed, model_type = raw.get("architectures"), raw.get("model_type")
    for name, wrapper in WRAPPERS.items():
        if listed == [name] or (not listed and wrapper.model_type == model_type):
            return wrapper
    return None


def _text_of(wrapper: Wrapper, text: Mapping[str, Any]) -> str:
    """Return the key in ``ARCHITECTURES`` of the text model; ConfigError: there is none."""
    types = {ARCHITECTURES[name].model_type: name for name in wrapper.texts}
    model_type = text.get("model_type") or next(iter(types))
    if model_type not in types:
        raise ConfigError(
            f"text_config.model_type: expected {' or '.join(types)}, got {model_type!r}"
            f"{missing_feature(model_type)}"
        )
    return types[model_type]


def model_fields(hf: Any) -> dict[str, Any]:  # noqa: ANN401 - each family has its own class
    """Return ``ModelConfig``'s fields; ConfigError: every reason against the model."""
    names = ("architectures", "model_type", "quantization_config")
    raw = {name: getattr(hf, name, None) for name in names}
    if hasattr(hf, "text_config"):
        raw["text_config"] = {"model_type": hf.text_config.model_type}
    raise_problems("model config", support_problems(raw))
    name = architecture_name(raw)
    family = ARCHITECTURES[name]
    wrapper = wrapper_of(raw)
    text = hf if wrapper is None and family.video_time is None else hf.text_config
    # At least 1: a model without heads is refused with the other sizes, not by division by zero.
    num_heads = max(text.num_attention_heads, 1)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    problems = []
    setting, allowed = _ACTIVATIONS[family.activation]
    if (given := getattr(text, setting)) not in allowed:
        problems.append(f"{setting}: expected {allowed[0]!r}, got {given!r}")
    if family.experts_setting is not None and (count := getattr(text, family.experts_setting)):
        problems.append(
            f"{family.experts_setting}: expected none, as the family's experts are not supported, "
            f"got {count!r}"
        )
    read: dict[str, Any] = {}
    has_window_rope = (family.has_window_rope and _WINDOW in text.layer_types) or None
    for field, reader in (
        ("rope", lambda: _rope(text, head_dim, family, "full_attention")),
        ("window_rope", lambda: has_window_rope and _rope(text, head_dim, family, _WINDOW)),
        ("rope_layers", lambda: _rope_layers(text, family)),
        ("layer_windows", lambda: _layer_windows(text, family)),
        ("multipliers", lambda: _multipliers(text, family)),
        ("vision", lambda: family.video_time and _vision(hf, family.video_time, family)),
        ("torch_dtype", lambda: _dtype(hf.dtype or text.dtype)),
        ("experts", lambda: family.experts and experts_config(text, family.experts)),
    ):
        try:
            read[field] = reader()
        except ConfigError as error:
            problems.append(str(error))
    raise_problems("model config", problems)
    rope, max_model_len = read["rope"], text.max_position_embeddings
    if rope.rope_type == "yarn":  # that may be the original context
        max_model_len = max(
            max_model_len, int(rope.factor * rope.original_max_position_embeddings)
        )
    if not family.has_window_rope:  # a window that hides nothing would cost masks
        windows = (-1 if each >= max_model_len else each for each in read["layer_windows"])
        read["layer_windows"] = tuple(windows)
    return {
        **read.pop("multipliers"),
        **read,
        "architecture": name,
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": getattr(text, family.intermediate_size),
        "num_layers": text.num_hidden_layers,
        "num_q_heads": text.num_attention_heads,
        "num_kv_heads": text.num_key_value_heads,
        "head_dim": head_dim,
        "rms_norm_eps": text.rms_norm_eps,
        "max_model_len": max_model_len,
        # A wrapper's default may be another one than its text model's, whose head is stored then.
        "tie_word_embeddings": bool(hf.tie_word_embeddings)
        and (wrapper is None or text.tie_word_embeddings),
        **{name: _flag(text, each) for name, each in zip(_BIASES, family.biases, strict=True)},
        "qk_norm": family.qk_norm if _flag(text, family.qk_norm_setting or True) else "none",
        "activation": family.activation,
        "has_sinks": family.has_sinks,
        "norm_order": family.norm_order,
        "norms_add_one": family.norms_add_one,
        "rope_interleaved": family.rope_interleaved,
        "eos_token_ids": _eos_token_ids(hf, text),
        "wrapper": wrapper,
        "quantization": read_quantization(raw, {}),
    }


def token_ids(value: object) -> tuple[int, ...]:
    """Return an ``eos_token_id`` setting, which is an id, a list of ids or nothing, as ids."""
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ConfigError(f"eos_token_id: expected token ids, got {value!r}")
    return tuple(ids)


def _eos_token_ids(hf: Any, text: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Return the ids of the text model, and then of the model that it is a part of."""
    ids = token_ids(text.eos_token_id)
    return ids if text is hf else (*ids, *token_ids(getattr(hf, "eos_token_id", None)))


def _flag(hf: Any, setting: bool | str) -> bool:  # noqa: ANN401
    return bool(getattr(hf, setting)) if isinstance(setting, str) else setting


def _rope(hf: Any, head_dim: int, family: Architecture, kind: str) -> RopeConfig:  # noqa: ANN401
    """Return the rope of layers of a kind, as ``layer_types`` names it."""
    # As transformers' models do before they compute frequencies: while the object was made, it did
    # not have original_max_position_embeddings of the file's top level yet.
    hf.standardize_rope_params()
    parameters = hf.rope_parameters
    if family.has_window_rope and isinstance(parameters, Mapping):
        parameters = parameters.get(kind)
    is_one = isinstance(parameters, Mapping) and "rope_type" in parameters
    if not is_one or any(isinstance(value, Mapping) for value in parameters.values()):
        raise ConfigError(f"rope_parameters: expected one rope for all layers, got {parameters!r}")
    return RopeConfig.from_parameters(
        parameters,
        rotary_dim=head_dim,
        max_position_embeddings=hf.max_position_embeddings,
        mrope=family.mrope,
        may_be_partial=family.has_partial_rope,
    )


def _rope_layers(hf: Any, family: Architecture) -> tuple[bool, ...] | None:  # noqa: ANN401
    count = hf.num_hidden_layers
    if family.rope_switch is not None:
        kind = getattr(hf, family.rope_switch)
        if kind not in ("rope", "nope", None):
            raise ConfigError(f"{family.rope_switch}: expected rope, nope or none, got {kind!r}")
        return None if kind == "rope" else (False,) * count
    if family.rope_layers is None:
        return None
    given = getattr(hf, family.rope_layers)
    if not isinstance(given, list) or len(given) < count or any(i not in (0, 1) for i in given):
        raise ConfigError(
            f"{family.rope_layers}: expected 1 or 0 for each of {count} layers, got {given!r}"
        )
    return tuple(map(bool, given[:count]))


def _multipliers(hf: Any, family: Architecture) -> dict[str, Any]:  # noqa: ANN401
    """Return the fields that scale and cap, of a family that has settings for them."""
    if family.soft_caps != "none":
        return _soft_caps(hf, family)
    if not family.has_multipliers:
        return {}
    names = (
        "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"
    )  # fmt: skip
    values = [getattr(hf, name) for name in names]
    if problems := not_positive(dict(zip(names, values, strict=True))):
        raise ConfigError("; ".join(problems))
    embed, attention, residual, logits = map(float, values)
    return {
        "embed_scale": embed / residual,
        "scales_features": True,
        "softmax_scale": attention,
        "residual_scale": residual,
        "logits_divisor": logits,
    }


def _soft_caps(hf: Any, family: Architecture) -> dict[str, Any]:  # noqa: ANN401
    """Return the fields that scale and cap in Gemma."""
    caps = {name: getattr(hf, name) for name in _CAPS}
    given = {name: cap for name, cap in caps.items() if cap is not None}
    problems = not_positive(given | {"query_pre_attn_scalar": hf.query_pre_attn_scalar})
    if family.soft_caps == "logits" and hf.attn_logit_softcapping is not None:
        problems.append(  # Gemma-3's attention in transformers does not use it
            "attn_logit_softcapping: expected none, as the family's attention has no soft cap, "
            f"got {hf.attn_logit_softcapping!r}"
        )
    if hf.use_bidirectional_attention:
        problems.append(
            "use_bidirectional_attention: expected false, got "
            f"{hf.use_bidirectional_attention!r}: mrv1 has causal attention"
        )
    if problems:
        raise ConfigError("; ".join(problems))
    return {
        "embed_scale": hf.hidden_size**0.5,
        "rounds_embed_scale": True,
        "softmax_scale": hf.query_pre_attn_scalar**-0.5,
        **{field: caps[name] for name, field in _CAPS.items()},
    }


def _vision(hf: Any, video_time: VideoTime, family: Architecture) -> VisionConfig:  # noqa: ANN401
    has_experts = family.experts is not None and family.experts.visual is not None
    return vision_config(hf, video_time, has_encoder=family.has_encoder, has_experts=has_experts)


def _layer_windows(hf: Any, family: Architecture) -> tuple[int, ...]:  # noqa: ANN401
    """Return each layer's window; a query at p sees the keys k with p - window < k <= p."""
    num_layers: int = hf.num_hidden_layers
    window: int | None = getattr(hf, "sliding_window", None)
    if family.windows != "none" and window is not None and window < 1:
        raise ConfigError(f"sliding_window: expected >= 1 token, got {window}")
    if family.windows == "none":
        return (-1,) * num_layers
    if family.windows == "all_layers":
        return (window or -1,) * num_layers
    if not getattr(hf, "use_sliding_window", True):
        window = None
    by_type: dict[str, int | None] = {"full_attention": -1, _WINDOW: window}
    unknown = sorted({kind for kind in hf.layer_types if by_type.get(kind) is None})
    if unknown:
        usable = [kind for kind, value in by_type.items() if value is not None]
        raise ConfigError(
            f"layer_types: expected {' or '.join(usable)} (sliding_window is {window}), "
            f"got {', '.join(unknown)}"
            + (f": it needs {_STATE}, which mrv1 lacks" if _STATEFUL & {*unknown} else "")
        )
    return tuple(by_type[kind] or -1 for kind in hf.layer_types)


def _dtype(dtype: object) -> torch.dtype:
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    if dtype is None:
        return torch.float32
    if not isinstance(dtype, torch.dtype) or dtype not in WEIGHT_DTYPES:
        raise ConfigError(f"dtype: expected one of {WEIGHT_DTYPES}, got {dtype}")
    return dtype
