"""The experts of a model: which layers have them, how tokens are routed, and their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mrv1.errors import ConfigError
from mrv1.kernels import ClampedSwiGLU, Routing
from mrv1.kernels.experts.contracts import ExpertActivation
from mrv1.models.files import not_positive, raise_problems
from mrv1.models.fused import Fused, OtherNames, Pieces


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
    intermediate_size: str = "moe_intermediate_size"
    """The setting with the width of an expert."""
    has_experts: Callable[[Any, int], bool] = lambda text, layer: True
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
        field, colon, rest = str(error).partition(":")
        raise ConfigError(f"{names.get(field, field)}{colon}{rest}") from error
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


def names_in_memory(experts: ExpertsConfig, family: ExpertFamily, hidden_size: int) -> OtherNames:
    """Return other names for a checkpoint's tensors: those of a transformers model in memory.

    There the experts of a layer are one tensor, and some modules have other names.
    """
    names, width = OtherNames(), experts.intermediate_size
    for layer in _layers_with(experts):
        mlp, block = f"{layer}.mlp", f"{layer}.{family.block}"
        if block != mlp:
            names.renamed[f"{mlp}.gate.weight"] = f"{block}.gate.weight"
        if family.bias is not None:
            names.renamed[f"{mlp}.gate.{family.bias}"] = f"{mlp}.{family.bias}"
        for kind, fused in _fused_experts(experts, family, block, 0, width, hidden_size).items():
            name, (count, rows, columns) = f"{mlp}.experts.{kind}", fused.shape
            names.fused[name] = fused
            if family.may_be_turned and rows != columns:
                names.turned[name] = (count, columns, rows)
    return names


def modal_names_in_memory(
    experts: ExpertsConfig, family: ExpertFamily, hidden_size: int
) -> OtherNames:
    """Return such names where images and videos have experts of their own, as in ERNIE-4.5-VL.

    A checkpoint has routers with a column for each expert, and one tensor with the biases of both;
    it counts the experts for images on from those for text.
    """
    names, count = OtherNames(), experts.routing.num_experts
    widths = zip(("text", "vision"), experts.widths, strict=True)
    kinds = [(mode, width, first * count) for first, (mode, width) in enumerate(widths)]
    for layer in _layers_with(experts):
        mlp = f"{layer}.mlp"
        routers = f"{mlp}.gate.weight", f"{mlp}.gate.weight_1"
        names.turned.update(dict.fromkeys(routers, (hidden_size, count)))
        for (mode, width, first), router in zip(kinds, routers, strict=True):
            names.renamed[f"{mlp}.{mode}_moe.gate.weight"] = router
            fused = _fused_experts(experts, family, mlp, first, width, hidden_size)
            for kind, each in fused.items():
                names.fused[f"{mlp}.{mode}_moe.experts.{kind}"] = each
        own = family.bias, family.visual and family.visual[1]
        biases: Pieces = {f"{mlp}.{bias}": (slice(i, i + 1),) for i, bias in enumerate(own)}
        names.fused[f"{mlp}.moe_statics.e_score_correction_bias"] = Fused((2, count), biases)
    return names


def _layers_with(experts: ExpertsConfig) -> list[str]:
    return [f"model.layers.{index}" for index, has in enumerate(experts.layers) if has]


def _fused_experts(
    experts: ExpertsConfig, family: ExpertFamily, block: str, first: int, width: int, hidden: int
) -> dict[str, Fused]:
    """Return a layer's experts of this width in one tensor of each kind, from the ``first`` on."""
    gate, up, down = family.parts
    count, gate_up, downs = experts.routing.num_experts, Pieces(), Pieces()
    for index in range(count):
        name = f"{block}.experts.{first + index}"
        gate_up[f"{name}.{gate}.weight"] = (index, slice(0, width))
        gate_up[f"{name}.{up}.weight"] = (index, slice(width, 2 * width))
        downs[f"{name}.{down}.weight"] = (index,)
    return {
        "gate_up_proj": Fused((count, 2 * width, hidden), gate_up),
        "down_proj": Fused((count, hidden, width), downs),
    }


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
