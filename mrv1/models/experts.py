"""The experts of a model: which layers have them, how tokens are routed, and their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mrv1.errors import ConfigError
from mrv1.kernels import ClampedSwiGLU, Routing
from mrv1.kernels.experts.contracts import ExpertActivation
from mrv1.models.files import not_positive, raise_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The experts of a model's layers; the MLP of other layers is dense."""

    routing: Routing
    intermediate_size: int
    """Width of each expert, shared ones included."""
    visual_size: int | None = None
    """Width of each expert that only tokens of images and videos have; None = they have those of
    text."""
    layers: tuple[bool, ...]
    """Per layer: whether it has experts."""
    activation: ExpertActivation = "silu_and_mul"
    """The activation of their gates."""
    is_stacked: bool = False
    """As in ``ExpertFamily``."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of experts of all kinds."""
        sizes = (self.intermediate_size, self.visual_size)
        return tuple(size for size in sizes if size is not None)

    def of_ranks(self, size: int) -> ExpertsConfig:
        """Return a rank's part of each expert, of as many ranks."""
        visual = self.visual_size and self.visual_size // size
        return replace(self, intermediate_size=self.intermediate_size // size, visual_size=visual)


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
    visual: tuple[str, str] | None = None
    """Of experts for tokens of images and videos, which follow those of text: the names of their
    router and its bias, in the block. The setting of widths has two, text's first. None = there
    are none."""
    may_be_turned: bool = False
    """Whether checkpoints have an expert's inputs before its outputs where experts are fused."""
    router: str = "gate"
    """The name of the router, in the block."""
    clamps: Mapping[str, str] | None = None
    """The settings of a ``ClampedSwiGLU`` by its fields; None = the activation is SwiGLU."""
    is_stacked: bool = False
    """Whether experts and router have biases, and the experts of a layer are one tensor of each
    kind: ``gate_up_proj`` [experts, hidden, 2 * width], gates and ups in turns, and ``down_proj``
    [experts, width, hidden]."""


_LAYER = re.compile(r"model\.layers\.\d+")
_FUSED = re.compile(r"(model\.layers\.\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")
_MODAL = re.compile(
    r"(model\.layers\.\d+)\.mlp\.(text|vision)_moe\.experts\.(gate_up_proj|down_proj)"
)

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
    widths = getattr(text, family.intermediate_size)
    if family.visual is None:
        widths = [widths]
    elif not isinstance(widths, list) or len(widths) != 2:
        raise ConfigError(f"{family.intermediate_size}: expected two widths, got {widths!r}")
    for name, value in [*((names[f], v) for f, v in given.items()),
                        *((family.intermediate_size, width) for width in widths)]:  # fmt: skip
        if not isinstance(value, int | float):
            problems.append(f"{name}: expected a number, got {value!r}")
    raise_problems("experts", problems)
    for width in widths:
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
        intermediate_size=widths[0],
        visual_size=None if family.visual is None else widths[1],
        layers=layers,
        activation=_activation(text, family),
        is_stacked=family.is_stacked,
    )


def _activation(text: Any, family: ExpertFamily) -> ExpertActivation:  # noqa: ANN401
    if family.clamps is None:
        return "silu_and_mul"
    settings = {field: getattr(text, name, None) for field, name in family.clamps.items()}
    given = {field: value for field, value in settings.items() if value is not None}
    raise_problems(
        "experts", not_positive({family.clamps[field]: value for field, value in given.items()})
    )
    return ClampedSwiGLU(**given)


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
        return self._pieces(found[1], found[2], self._experts.intermediate_size)

    def _pieces(
        self, layer: str, kind: str, width: int, first: int = 0
    ) -> dict[str, tuple[int | slice, ...]]:
        """Return the pieces of experts from the ``first`` on, of this width."""
        block = f"{layer}.{self._family.block}.experts"
        gate, up, down = self._family.parts
        pieces: dict[str, tuple[int | slice, ...]] = {}
        for index in range(self._experts.routing.num_experts):
            name = f"{block}.{first + index}"
            if kind == "down_proj":
                pieces[f"{name}.{down}.weight"] = (index,)
            else:
                pieces[f"{name}.{gate}.weight"] = (index, slice(0, width))
                pieces[f"{name}.{up}.weight"] = (index, slice(width, 2 * width))
        return pieces

    def fused_shape(self, name: str, hidden_size: int) -> tuple[int, ...]:
        """Return the shape of a fused tensor."""
        return self._fused_shape(name, hidden_size, self._experts.intermediate_size)

    def _fused_shape(self, name: str, hidden_size: int, width: int) -> tuple[int, ...]:
        num_experts = self._experts.routing.num_experts
        if name.endswith("down_proj"):
            return num_experts, hidden_size, width
        return num_experts, 2 * width, hidden_size

    def is_turned(self, name: str, shape: tuple[int, ...], hidden_size: int) -> bool:
        """Return whether the last two dimensions of a tensor are in the other order."""
        if not self._family.may_be_turned or not _FUSED.fullmatch(name):
            return False
        expected = self.fused_shape(name, hidden_size)
        return shape != expected and shape == (expected[0], expected[2], expected[1])


class ModalExpertNames(ExpertNames):
    """Names where tokens of images and videos have experts of their own, as in ERNIE-4.5-VL.

    A checkpoint has routers with a column for each expert, and one tensor with the biases of both;
    it counts the experts for images on from those for text.
    """

    def stored(self, name: str) -> str:
        """Return the name in a checkpoint of a tensor that is not fused."""
        for own, usual in (("text_moe.gate.weight", "gate.weight"),
                           ("vision_moe.gate.weight", "gate.weight_1")):  # fmt: skip
            if name.endswith(f".mlp.{own}"):
                return name.removesuffix(own) + usual
        return name

    def pieces(self, name: str) -> dict[str, tuple[int | slice, ...]] | None:
        """Return a fused tensor's pieces: each one's name, and where it is; None = not fused."""
        bias = self._family.bias or ""
        both = "mlp.moe_statics.e_score_correction_bias"
        if name.endswith(f".{both}"):
            layer, visual = name.removesuffix(both), (self._family.visual or ("", ""))[1]
            return {f"{layer}mlp.{bias}": (slice(0, 1),), f"{layer}mlp.{visual}": (slice(1, 2),)}
        found = _MODAL.fullmatch(name)
        if found is None:
            return None
        layer, modality, kind = found.groups()
        first = 0 if modality == "text" else self._experts.routing.num_experts
        return self._pieces(layer, kind, self._width(modality), first)

    def fused_shape(self, name: str, hidden_size: int) -> tuple[int, ...]:
        """Return the shape of a fused tensor."""
        found = _MODAL.fullmatch(name)
        if found is None:  # the biases
            return 2, self._experts.routing.num_experts
        return self._fused_shape(name, hidden_size, self._width(found[2]))

    def is_turned(self, name: str, shape: tuple[int, ...], hidden_size: int) -> bool:
        """Return whether the last two dimensions of a tensor are in the other order."""
        is_router = name.endswith((".mlp.gate.weight", ".mlp.gate.weight_1"))
        return is_router and shape == (hidden_size, self._experts.routing.num_experts)

    def _width(self, modality: str) -> int:
        widths = self._experts.intermediate_size, self._experts.visual_size or 0
        return widths[modality != "text"]


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


def by_layer_type(text: Any, layer: int) -> bool:  # noqa: ANN401
    """Whether a layer has experts in ERNIE-4.5-VL: a list says so."""
    return bool(text.mlp_layer_types[layer] == "sparse")


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
