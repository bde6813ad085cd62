"""What a draft head is: its layer, and what of the target model it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from mrv1.errors import ConfigError, short
from mrv1.models.architectures import ARCHITECTURES
from mrv1.models.checkpoint import Checkpoint
from mrv1.models.config import ModelConfig
from mrv1.models.files import raise_problems, read_json

MTP_TENSORS = "model.mtp_"
"""How the tensors of an MTP block begin, in the checkpoint of its target."""
EAGLE3_LAYERS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""``model_type`` of an EAGLE-3 head's layer, and the architecture that has such layers."""
EAGLE3_TARGETS = ("LlamaForCausalLM", "Qwen3ForCausalLM")
"""Models that EAGLE-3 heads draft for."""

_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_DEFAULTS = {"norm_before_fc": False, "fc_norm": False, "norm_output": False}
"""Of flags that older files lack. ``norm_before_residual`` has none: readers disagree on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A draft head: one layer that predicts a token from the one before and a hidden state."""

    kind: Literal["mtp", "eagle3"]
    layer: ModelConfig
    """A model of the head's one layer; its vocabulary is the target's."""
    sums: tuple[int, ...] = ()
    """Target layers before which the residual sum is read, its number of layers = after the last;
    () = the hidden states after the final norm are read."""
    draft_vocab_size: int
    """Tokens that the head may draft."""
    norm_before_residual: bool = False
    """Whether the residual sum begins with the norm of the hidden state."""
    norm_before_fc: bool = False
    """Whether all that is read of the target is normed as one vector."""
    fc_norm: bool = False
    """Whether each sum that is read of the target is normed by itself."""
    norm_output: bool = False
    """Whether the head reads its own output after the norm, not the sum before it."""

    @property
    def num_features(self) -> int:
        """Numbers that the head reads of a token of the target."""
        return max(len(self.sums), 1) * self.layer.hidden_size


def mtp_config(target: ModelConfig) -> HeadConfig:
    """Return the configuration of a model's own MTP block; ConfigError: it has none."""
    family = ARCHITECTURES[target.architecture]
    if family.drafter != MTP_TENSORS:
        having = [name for name, each in ARCHITECTURES.items() if each.drafter == MTP_TENSORS]
        raise ConfigError(
            f"method: expected a model with an MTP block ({', '.join(having)}) for 'mtp', got "
            f"{target.architecture}"
        )
    layer = replace(
        target.with_layers([0]),
        architecture="Ernie4_5ForCausalLM",
        experts=None,
        quantization=None,
        tie_word_embeddings=False,
    )
    return HeadConfig(kind="mtp", layer=layer, draft_vocab_size=target.vocab_size)


def eagle3_config(checkpoint: Checkpoint, target: ModelConfig) -> HeadConfig:
    """Return the configuration of an EAGLE-3 head in speculators' format.

    ConfigError lists every setting that is wrong, or does not fit the target.
    """
    raw = read_json(checkpoint.path / "config.json")
    kind = raw.get("speculators_model_type")
    if kind != "eagle3":
        raise ConfigError(
            f"{checkpoint.where}: speculators_model_type: expected 'eagle3', got {short(kind)}"
        )
    problems = []
    flags: dict[str, bool] = {}
    for name in _FLAGS:
        value = raw.get(name, _DEFAULTS.get(name))
        if not isinstance(value, bool):
            problems.append(f"{name}: expected true or false, got {short(value)}")
        flags[name] = value is True
    if flags["norm_before_fc"] and flags["fc_norm"]:
        problems.append("norm_before_fc, fc_norm: expected not both, got both")
    if target.architecture not in EAGLE3_TARGETS:
        problems.append(
            f"model: expected one of {', '.join(EAGLE3_TARGETS)} for 'eagle3', got "
            f"{target.architecture}"
        )
    num_drafts = raw.get("draft_vocab_size")
    if type(num_drafts) is not int or not 1 <= num_drafts <= target.vocab_size:
        problems.append(
            f"draft_vocab_size: expected 1 to {target.vocab_size}, the target's vocabulary, got "
            f"{short(num_drafts)}"
        )
    wider = raw.get("target_hidden_size")
    if wider not in (None, target.hidden_size):
        problems.append(
            f"target_hidden_size: expected {target.hidden_size}, the target's hidden_size, got "
            f"{short(wider)}"
        )
    sums = _sums(raw.get("eagle_aux_hidden_state_layer_ids"), target.num_layers, problems)
    layer = _layer(raw.get("transformer_layer_config"), target, problems)
    raise_problems(checkpoint.where, problems)
    return HeadConfig(
        kind="eagle3", layer=layer, sums=sums, draft_vocab_size=int(str(num_drafts)), **flags
    )


def _sums(given: object, num_layers: int, problems: list[str]) -> tuple[int, ...]:
    if given is None:
        given = [2, num_layers // 2, num_layers - 3]
    ids = given if isinstance(given, list) else []
    if (
        not ids
        or not all(type(each) is int and 0 <= each <= num_layers for each in ids)
        or len(set(ids)) < len(ids)
    ):
        problems.append(
            f"eagle_aux_hidden_state_layer_ids: expected different layers, 0 to {num_layers}, got "
            f"{short(given)}"
        )
    return tuple(ids)


def _layer(given: object, target: ModelConfig, problems: list[str]) -> ModelConfig:
    """Return the model of the head's layer, the target's own if the settings are wrong."""
    from transformers import AutoConfig  # takes seconds to import: only loading pays for it

    where = "transformer_layer_config"
    settings: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    model_type = settings.get("model_type")
    if model_type not in EAGLE3_LAYERS:
        problems.append(
            f"{where}: expected model_type to be one of {', '.join(EAGLE3_LAYERS)}, got "
            f"{short(model_type)}"
        )
        return target
    try:
        own = {**settings, "architectures": [EAGLE3_LAYERS[model_type]]}
        config = ModelConfig.from_hf(AutoConfig.for_model(**own))
    except ConfigError as error:
        problems.append(f"{where}: {error}")
        return target
    except Exception as error:  # KeyError, ValueError and transformers' validation errors
        problems.append(f"{where}: expected settings of {model_type}, got {error}")
        return target
    if config.num_layers != 1:
        problems.append(f"{where}.num_hidden_layers: expected 1, got {config.num_layers}")
    if set(config.layer_windows) != {-1}:
        problems.append(f"{where}.sliding_window: expected none, got {config.layer_windows[0]}")
    for name, setting in (
        ("vocab_size", "vocab_size"),
        ("hidden_size", "hidden_size"),
        ("num_kv_heads", "num_key_value_heads"),  # of the cache that both write
        ("head_dim", "head_dim"),
    ):
        own_size, size = getattr(config, name), getattr(target, name)
        if own_size != size:
            problems.append(f"{where}.{setting}: expected {size}, the target's, got {own_size}")
    return replace(config, max_model_len=target.max_model_len, tie_word_embeddings=False)
