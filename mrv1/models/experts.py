"""The experts of a model: which layers have them, how tokens are routed, and their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mrv1.errors import ConfigError
from mrv1.kernels import Routing
from mrv1.models.files import raise_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The experts of a model's layers; the MLP of other layers is dense."""

    routing: Routing
    intermediate_size: int
    """Width of each expert, shared ones included."""
    layers: tuple[bool, ...]
    """Per layer: whether it has experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFamily:
    """How a family names the settings of its experts in config.json, and their tensors."""

    routing: Mapping[str, Any]
    """By field of ``Routing``: a setting's name, or the value for the whole family."""
    intermediate_size: str
    """The setting with the width of an expert."""
    has_experts: Callable[[Any, int], bool]
    """Whether a layer of a configuration, by its index, has experts."""
    block: str = "mlp"
    """The name of a layer's experts among its tensors."""
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's matrices."""
    bias: str | None = None
    """The name of the bias that chooses, in the block; None = the family has none."""
    bias_dims: int = 1
    """Dimensions of that bias, of which all but the last are 1."""
    may_be_turned: bool = False
    """Whether checkpoints have an expert's inputs before its outputs where experts are fused."""


_LAYER = re.compile(r"model\.layers\.\d+")
_FUSED = re.compile(r"(model\.layers\.\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "moe_gate": (None, "topk", "top2_fused"),
    "n_group": (None, 0, 1),
    "topk_group": (None, 0, 1),
    "routed_scaling_factor": (None, 1),
    "n_shared_experts": (None, 0),
    "num_shared_experts": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
    "norm_topk_prob": (None, True),
    "clip_qkv": (None,),
}
"""Settings of routing that change what a model computes, and their values that change nothing; of
a family that has no such setting, other values are refused. The family decides on more of them."""


def experts_config(text: Any, family: ExpertFamily) -> ExpertsConfig:  # noqa: ANN401
    """Return the experts that a transformers configuration describes, or raise ConfigError."""
    fields = dict(family.routing)
    names = {field: value for field, value in fields.items() if isinstance(value, str)}
    scores = names.pop("scores", "softmax")
    method = "greedy" if family.bias is None else "noaux_tc"
    of_family = {
        "scoring_func": (None, scores), "moe_gate_act": (None, scores),
        "topk_method": (None, method),
    }  # fmt: skip
    problems = [
        f"{name}: expected {' or '.join(map(repr, neutral))}, as the family has no such routing, "
        f"got {getattr(text, name)!r}"
        for name, neutral in (_NEUTRAL | of_family).items()
        if name not in names.values() and getattr(text, name, None) not in neutral
    ]
    given = {field: getattr(text, name) for field, name in names.items()}
    width = getattr(text, family.intermediate_size)
    for name, value in [*((names[f], v) for f, v in given.items()),
                        (family.intermediate_size, width)]:  # fmt: skip
        if not isinstance(value, int | float):
            problems.append(f"{name}: expected a number, got {value!r}")
    raise_problems("experts", problems)
    if not isinstance(width, int) or width < 1:
        raise ConfigError(f"{family.intermediate_size}: expected >= 1, got {width!r}")
    try:
        layers = tuple(family.has_experts(text, i) for i in range(text.num_hidden_layers))
    except (TypeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"layers with experts: expected settings that name them, got {error}"
        ) from error
    try:
        routing = Routing(**fields | given | {"scores": scores})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{_setting(str(error), names)}") from error
    return ExpertsConfig(
        routing=routing,
        intermediate_size=width,
        layers=layers,
    )


class ExpertNames:
    """Other names for a checkpoint's tensors: those of a transformers model in memory.

    There the experts of a layer are one tensor, and some modules have other names.
    """

    def __init__(self, experts: ExpertsConfig, family: ExpertFamily) -> None:
        self._experts, self._family = experts, family

    def stored(self, name: str) -> str:
        """Return the name in a checkpoint of a tensor that is not fused."""
        layer, found, rest = name.partition(".mlp.")
        if not found or not _LAYER.fullmatch(layer):
            return name
        if self._family.block != "mlp" and rest.startswith("gate."):
            return f"{layer}.{self._family.block}.{rest}"
        if self._family.bias is not None and rest == f"gate.{self._family.bias}":
            return f"{layer}.mlp.{self._family.bias}"
        return name

    def pieces(self, name: str) -> dict[str, tuple[int | slice, ...]] | None:
        """Return a fused tensor's pieces: each one's name, and where it is; None = not fused."""
        found = _FUSED.fullmatch(name)
        if found is None:
            return None
        layer, kind = found.groups()
        block = f"{layer}.{self._family.block}.experts"
        gate, up, down = self._family.parts
        width = self._experts.intermediate_size
        pieces: dict[str, tuple[int | slice, ...]] = {}
        for expert in range(self._experts.routing.num_experts):
            if kind == "down_proj":
                pieces[f"{block}.{expert}.{down}.weight"] = (expert,)
            else:
                pieces[f"{block}.{expert}.{gate}.weight"] = (expert, slice(0, width))
                pieces[f"{block}.{expert}.{up}.weight"] = (expert, slice(width, 2 * width))
        return pieces

    def fused_shape(self, name: str, hidden_size: int) -> tuple[int, ...]:
        """Return the shape of a fused tensor."""
        num_experts, width = self._experts.routing.num_experts, self._experts.intermediate_size
        if name.endswith("down_proj"):
            return num_experts, hidden_size, width
        return num_experts, 2 * width, hidden_size

    def is_turned(self, shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
        """Return whether the last dimensions of a fused tensor are in the other order."""
        turned = (*expected[:-2], *reversed(expected[-2:]))
        return self._family.may_be_turned and shape != expected and shape == turned


def _setting(message: str, names: Mapping[str, str]) -> str:
    """Return a message about a field of ``Routing`` with the name of the setting instead."""
    field, colon, rest = message.partition(":")
    return f"{names.get(field, field)}{colon}{rest}"


def every_layer(text: Any, layer: int) -> bool:  # noqa: ANN401
    """Whether a layer has experts: each has."""
    return True


def by_interval(text: Any, layer: int) -> bool:  # noqa: ANN401
    """Whether a layer has experts in ERNIE: one of an interval, from a first to a last layer."""
    return bool(
        (layer + 1) % text.moe_layer_interval == 0
        and text.moe_layer_start_index <= layer <= text.moe_layer_end_index
    )


def by_sparse_step(text: Any, layer: int) -> bool:  # noqa: ANN401
    """Whether a layer has experts in Qwen3: one of a step, but for those that are listed."""
    return bool(
        layer not in text.mlp_only_layers
        and text.num_experts > 0
        and (layer + 1) % text.decoder_sparse_step == 0
    )


def after_dense(text: Any, layer: int) -> bool:  # noqa: ANN401
    """Whether a layer has experts in GLM: all do after the first dense ones."""
    return bool(layer >= text.first_k_dense_replace)
