"""MXFP4 experts, as gpt-oss stores them, as codes that the kernels read.

The experts of a layer, ``[experts, out, in]``, are ``NAME_blocks`` ``[experts, out, in / 32, 16]``
uint8, whose bytes have neighbouring inputs, the even one low, each an e2m1 code; and
``NAME_scales`` ``[experts, out, in / 32]`` uint8, exponents: ``2^(scale - 127)``. Rows of
``gate_up_proj`` are gates and ups in turns; here all gates come first.

Source: transformers 5 (Mxfp4Config, ``convert_moe_packed_tensors``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from mrv1.errors import ConfigError
from mrv1.kernels.layers.quantized import QuantizedWeight
from mrv1.models.places import Place
from mrv1.models.quantization.formats import ModuleFormat, ModulePart
from mrv1.models.quantization.fp8 import is_skipped, skipped_names
from mrv1.models.quantization.scheme import Quantization
from mrv1.models.quantization.settings import Settings

METHOD = "mxfp4"
GROUP = 32
"""Inputs that share an exponent."""
NAN = 255
"""The exponent that stands for NaN."""
_STACK = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(gate_up_proj|down_proj)")


def exponent_problem(scales: torch.Tensor) -> str | None:
    """Say what is wrong with exponents: one may stand for NaN."""
    count = int((scales == NAN).sum())
    if not count:
        return None
    return (
        f"expected exponents of numbers, 0 to 254, got 255, which is NaN "
        f"({count} of {scales.numel()})"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MXFP4Format(ModuleFormat):
    """A stack of experts: a ``ModulePart`` is a rank's part of each of them."""

    separator: ClassVar[str] = "_"

    def places(self, part: ModulePart, weight: QuantizedWeight) -> dict[str, Place]:
        """Return the places of a stack's blocks and scales; see ``ModuleFormat``."""
        (num_out, num_in), scales = part.shape, weight.tensors["scales"]
        if num_in % GROUP:
            raise ConfigError(
                f"{part.name}: expected a multiple of {GROUP} inputs, which share an exponent, "
                f"got {num_in}"
            )
        in_turns = part.name.endswith("gate_up_proj")
        lead = (weight.shape[0], num_out, num_in // GROUP)
        own = (slice(0, lead[0]), part.rows, part.groups(GROUP))
        new = partial(Place, dtypes=(torch.uint8,), module=part.name)
        num_bytes = GROUP // 2
        return {
            "scales": new(
                target=_in_turns(scales) if in_turns else scales,
                shape=lead, part=own, problem=exponent_problem,
                convert=partial(_rows, in_turns=in_turns),
            ),
            "blocks": new(
                target=_in_turns(weight.codes) if in_turns else weight.codes,
                shape=(*lead, num_bytes), part=(*own, slice(0, num_bytes)),
                convert=partial(_rows, in_turns=in_turns, are_blocks=True),
            ),
        }  # fmt: skip


def _in_turns(rows: torch.Tensor) -> torch.Tensor:
    """Return a view of gates and ups, ``[experts, 2 * n, any]``, as [experts, n, 2, any]."""
    halves: torch.Tensor = rows.unflatten(1, (2, -1))
    return halves.transpose(1, 2)


def _rows(values: torch.Tensor, *, in_turns: bool, are_blocks: bool = False) -> torch.Tensor:
    """Return stored experts as the target of a place has them."""
    rows = values.flatten(-2) if are_blocks else values  # the same bytes
    return rows.unflatten(1, (-1, 2)) if in_turns else rows


@dataclass(frozen=True, slots=True, kw_only=True)
class MXFP4(Quantization):
    """``quantization_config`` of gpt-oss: stacks of experts are quantized, nothing else is."""

    method: ClassVar[str] = METHOD
    needs_stacks: ClassVar[bool] = True

    skipped: tuple[str, ...] = ()
    """``modules_to_not_convert``."""

    @property
    def formats(self) -> tuple[MXFP4Format, ...]:
        """The one format."""
        return (MXFP4Format(code="e2m1", inputs=GROUP, scale_dtype=torch.uint8),)

    def _module(self, name: str) -> MXFP4Format | None:
        """Return the format of a stack of experts, which are a module together."""
        is_stack = _STACK.fullmatch(name) is not None
        experts = name.rpartition(".")[0]
        return self.formats[0] if is_stack and not is_skipped(experts, self.skipped) else None


def read_mxfp4(config: Settings, *, scale_dtype: torch.dtype, prefix: str) -> MXFP4:
    """Return a checkpoint's quantization; ConfigError: something that is not read."""
    del scale_dtype, prefix
    config.choice("quant_method", (METHOD,))
    config.refuse("dequantize")
    return MXFP4(skipped=skipped_names(config, "modules_to_not_convert"))
