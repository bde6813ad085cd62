"""The tensors of a layer's experts, and the tensors of a checkpoint that fill them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch

from mrv1.errors import ConfigError
from mrv1.kernels.layers.quantized import QuantizedWeight
from mrv1.models.architectures import ARCHITECTURES
from mrv1.models.config import ModelConfig
from mrv1.models.experts import ExpertFamily, ExpertsConfig
from mrv1.models.parallel import ParallelContext
from mrv1.models.quantization import ModuleFormat, ModulePart

GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""Stacks of a layer's experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The experts of a layer, routed ones first, then shared ones; all are equally wide.

    Shared experts are one MLP in a checkpoint. Their rows are neighbours here, too, so each of
    its tensors fills one view.
    """

    router: torch.Tensor
    """[routed, hidden], in the model's dtype or wider: see ``Routing.rounds_logits``."""
    router_bias: torch.Tensor | None = None
    """[routed] float32, or [1, routed]: it only chooses; None = none."""
    logits_bias: torch.Tensor | None = None
    """[routed], in the model's dtype: added to the router's logits; None = none."""
    gate_up: torch.Tensor | QuantizedWeight
    """[2, experts, intermediate, hidden]: all gates, then all ups. Or codes [experts, 2 *
    intermediate, hidden], gates, then ups."""
    gate_up_bias: torch.Tensor | None = None
    """[experts, 2, intermediate], a view of gates and ups in turns; None = none."""
    down: torch.Tensor | QuantizedWeight
    """[hidden, experts, intermediate]. Or codes [experts, hidden, intermediate]."""
    down_bias: torch.Tensor | None = None
    """[experts, hidden], the same on all ranks; None = none."""
    visual: ExpertWeights | None = None
    """Experts of tokens of images and videos, as many as are routed; None = they have the same."""

    @property
    def num_shared(self) -> int:
        """Shared experts."""
        return self.gate_up_of_experts.shape[0] - len(self.router)

    @property
    def values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``gate_up`` and ``down``; ValueError: they are codes."""
        if isinstance(self.gate_up, QuantizedWeight) or isinstance(self.down, QuantizedWeight):
            raise ValueError("experts: expected values, got codes")
        return self.gate_up, self.down

    @property
    def gate_up_of_experts(self) -> torch.Tensor | QuantizedWeight:
        """``gate_up`` as ``expert_linear`` takes it."""
        weight = self.gate_up
        return weight.movedim(1, 0) if isinstance(weight, torch.Tensor) else weight

    @property
    def down_of_experts(self) -> torch.Tensor | QuantizedWeight:
        """``down`` as ``expert_linear`` takes it."""
        weight = self.down
        return weight.movedim(1, 0) if isinstance(weight, torch.Tensor) else weight


def _experts_of(config: ModelConfig) -> tuple[ExpertsConfig, ExpertFamily]:
    experts, family = config.experts, ARCHITECTURES[config.architecture].experts
    if experts is None or family is None:
        raise ValueError(f"config: expected a model with experts, got {config.architecture}")
    return experts, family


def _block(layer: int, family: ExpertFamily) -> str:
    return f"model.layers.{layer}.{family.block}"


def _has_others(experts: ExpertsConfig) -> bool:
    """Return whether a layer has shared experts, or others for images."""
    return experts.routing.num_shared > 0 or experts.visual_size is not None


def _format(config: ModelConfig, layer: int, stack: str) -> ModuleFormat | None:
    """Return how a stack of a layer's experts is stored; None = in full precision.

    Experts that are modules of their own are all stored as the first one; those beside shared
    experts, or others for images, are not codes.
    """
    experts, family = _experts_of(config)
    if config.quantization is None or (_has_others(experts) and not experts.is_stacked):
        return None
    module = stack if experts.is_stacked else f"0.{_parts(family)[stack][0]}"
    return config.quantization.module(f"{_block(layer, family)}.experts.{module}")


def _parts(family: ExpertFamily) -> dict[str, tuple[str, ...]]:
    """Return the modules of an expert that are together in each stack."""
    gate, up, last = family.parts
    return {GATE_UP: (gate, up), DOWN: (last,)}


def empty_experts(
    config: ModelConfig, layer: int, *, device: torch.device | str, dtype: torch.dtype
) -> ExpertWeights:
    """Return uninitialised experts of a layer.

    ConfigError: a rank has a part of a group, or inputs have an order of their own.
    """
    experts, family = _experts_of(config)
    routing, width, hidden = experts.routing, experts.intermediate_size, config.hidden_size
    num_experts = routing.num_experts + routing.num_shared

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def router() -> dict[str, Any]:
        wide = dtype if routing.rounds_logits else torch.promote_types(dtype, torch.float32)
        tensors = {"router": empty(routing.num_experts, hidden, dtype=wide)}
        if family.bias is not None:
            shape = (1,) * (family.bias_dims - 1) + (routing.num_experts,)
            tensors["router_bias"] = empty(*shape, dtype=torch.float32)
        return tensors

    def codes(form: ModuleFormat, rows: int, num_in: int, unit: int) -> QuantizedWeight:
        if form.has_order:
            raise ConfigError(
                f"quantization_config: {_block(layer, family)}.experts: expected groups of "
                "neighbouring inputs, got an order of inputs (desc_act, or actorder 'group')"
            )
        # In a stack, and of two modules, rows share no scale.
        shared = 1 if experts.is_stacked else gcd(form.rows, unit)
        weight = form.empty(
            [num_experts * rows], num_in, rows_per_scale=shared, dtype=dtype, device=device
        )
        parts: dict[str, Any] = {
            name: each.unflatten(0, (num_experts, -1)) for name, each in weight.tensors.items()
        }
        return replace(weight, **parts)

    gate_up: torch.Tensor | QuantizedWeight
    down: torch.Tensor | QuantizedWeight
    if (form := _format(config, layer, GATE_UP)) is not None:
        gate_up = codes(form, 2 * width, hidden, width)
    elif experts.is_stacked:  # in turns, as in the checkpoint
        gate_up = empty(num_experts, width, 2, hidden).permute(2, 0, 1, 3)
    else:
        gate_up = empty(2, num_experts, width, hidden)
    if (form := _format(config, layer, DOWN)) is not None:
        down = codes(form, hidden, width, hidden)
    else:
        down = empty(hidden, num_experts, width)
    weights = ExpertWeights(gate_up=gate_up, down=down, **router())
    if experts.is_stacked:
        return replace(
            weights,
            logits_bias=empty(routing.num_experts),
            gate_up_bias=empty(num_experts, width, 2).transpose(1, 2),
            down_bias=empty(num_experts, hidden),
        )
    if (size := experts.visual_size) is not None:
        gate_up, down = (
            empty(2, routing.num_experts, size, hidden),
            empty(hidden, routing.num_experts, size),
        )
        return replace(weights, visual=ExpertWeights(gate_up=gate_up, down=down, **router()))
    return weights


def expert_tensors(
    config: ModelConfig, experts: ExpertWeights, layer: int
) -> dict[str, torch.Tensor]:
    """Return the tensor or view that each tensor of a layer's experts fills that is not codes."""
    _, family = _experts_of(config)
    block, num_routed = _block(layer, family), len(experts.router)
    if family.is_stacked:
        return _stacked_tensors(experts, block, family)
    gate, up, last = family.parts
    tensors: dict[str, torch.Tensor] = {}
    sets = [(experts, f"{family.router}.weight", family.bias)]
    if experts.visual is not None and family.visual is not None:
        sets.append((experts.visual, *family.visual))
    for first, (each, router, bias) in zip((0, num_routed), sets, strict=False):
        tensors[f"{block}.{router}"] = each.router
        if each.router_bias is not None:
            tensors[f"{block}.{bias}"] = each.router_bias
        gate_up, down = each.gate_up, each.down
        for expert in range(num_routed):
            name = f"{block}.experts.{first + expert}"
            if isinstance(gate_up, torch.Tensor):
                tensors[f"{name}.{gate}.weight"] = gate_up[0, expert]
                tensors[f"{name}.{up}.weight"] = gate_up[1, expert]
            if isinstance(down, torch.Tensor):
                tensors[f"{name}.{last}.weight"] = down[:, expert]
    if experts.num_shared:
        gate_up, down = experts.values
        name = f"{block}.shared_experts"
        tensors[f"{name}.{gate}.weight"] = gate_up[0, num_routed:].flatten(0, 1)
        tensors[f"{name}.{up}.weight"] = gate_up[1, num_routed:].flatten(0, 1)
        first = num_routed * down.shape[2]
        tensors[f"{name}.{last}.weight"] = down.flatten(1)[:, first:]
    return tensors


def _stacked_tensors(
    experts: ExpertWeights, block: str, family: ExpertFamily
) -> dict[str, torch.Tensor]:
    """Return views of ``expert_tensors``: stacks that are stored by input, and biases."""
    tensors = {f"{block}.{family.router}.weight": experts.router}
    if experts.logits_bias is not None:
        tensors[f"{block}.{family.router}.bias"] = experts.logits_bias
    gate_up, down = experts.gate_up, experts.down
    if isinstance(gate_up, torch.Tensor):
        in_turns = gate_up.permute(1, 2, 0, 3).flatten(1, 2)
        tensors[f"{block}.experts.{GATE_UP}"] = in_turns.transpose(1, 2)
    if isinstance(down, torch.Tensor):
        tensors[f"{block}.experts.{DOWN}"] = down.permute(1, 2, 0)
    if experts.gate_up_bias is not None:
        in_turns = experts.gate_up_bias.transpose(1, 2).flatten(1)
        tensors[f"{block}.experts.{GATE_UP}_bias"] = in_turns
    if experts.down_bias is not None:
        tensors[f"{block}.experts.{DOWN}_bias"] = experts.down_bias
    return tensors


def quantized_experts(
    config: ModelConfig,
    experts: ExpertWeights,
    layer: int,
    *,
    whole: ModelConfig,
    parallel: ParallelContext,
) -> Iterator[tuple[ModuleFormat, ModulePart, QuantizedWeight]]:
    """Yield each quantized module of a layer's experts: its format, a rank's part, its weight.

    A stored stack is a module: a part has its rows, with gates and ups in turns, of each expert;
    the weight has first gates. Else each expert has modules of its own.
    """
    own, family = _experts_of(config)
    of_whole, hidden = _experts_of(whole)[0].intermediate_size, config.hidden_size
    width = own.intermediate_size
    block, num_gated = _block(layer, family), 2 if own.is_stacked else 1
    shapes = {
        GATE_UP: ((num_gated * of_whole, hidden), (num_gated * width, hidden)),
        DOWN: ((hidden, of_whole), (hidden, width)),
    }
    for name, weight in ((GATE_UP, experts.gate_up), (DOWN, experts.down)):
        form = _format(config, layer, name)
        if form is None or not isinstance(weight, QuantizedWeight):
            continue
        shape, part = shapes[name]
        rows, inputs = parallel.part(shape, part)
        if own.is_stacked:
            module = f"{block}.experts.{name}"
            yield form, ModulePart(name=module, shape=shape, rows=rows, inputs=inputs), weight
            continue
        flat: dict[str, Any] = {key: each.flatten(0, 1) for key, each in weight.tensors.items()}
        all_rows, first = replace(weight, **flat), 0
        for expert in range(len(experts.router)):
            for last in _parts(family)[name]:
                module = f"{block}.experts.{expert}.{last}"
                own_part = ModulePart(name=module, shape=shape, rows=rows, inputs=inputs)
                yield form, own_part, all_rows.rows(first, first + part[0])
                first += part[0]


def full_precision_modules(config: ModelConfig, layer: int) -> list[str]:
    """Return modules of a layer's experts that can only be stored in full precision.

    Routers are not among them: configurations need not name them, as they are not ``Linear`` in
    transformers, and quantizers pass them by. What a file has of them tells.
    """
    experts, family = _experts_of(config)
    block = _block(layer, family)
    if not experts.is_stacked:
        return [f"{block}.experts.0.{family.parts[0]}"] if _has_others(experts) else []
    if config.quantization is None or config.quantization.needs_stacks:
        return []
    return [f"{block}.experts.{name}" for name in (GATE_UP, DOWN)]


def mixed_experts(config: ModelConfig, layer: int) -> list[str]:
    """Return modules of a layer's experts that are not stored as those of the first expert."""
    experts, family = _experts_of(config)
    quantization = config.quantization
    if quantization is None or experts.is_stacked or _has_others(experts):
        return []
    return [
        name
        for stack, parts in _parts(family).items()
        for expert in range(experts.routing.num_experts)
        for part in parts
        if quantization.module(name := f"{_block(layer, family)}.experts.{expert}.{part}")
        != _format(config, layer, stack)
    ]
