"""What a checkpoint's quantization says: which modules are stored how."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mrv1.models.quantization.formats import ModuleFormat

_LAYER = re.compile(r"^(model\.layers\.)(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization(ABC):
    """The quantization of a checkpoint, or of a model while it loads."""

    method: ClassVar[str]
    """As ``quant_method`` names it."""
    has_vocabulary: ClassVar[bool] = False
    """Whether the embedding and the head may be quantized."""
    quantizes: ClassVar[bool] = False
    """Whether the checkpoint is in full precision, and is quantized while it loads."""

    needs_stacks: ClassVar[bool] = False
    """Whether it is one of the stacks of experts, as gpt-oss has them."""
    has_zero_biases: ClassVar[bool] = False
    """Whether quantized modules are stored with biases, of zeros, also where a model has none."""

    layers: tuple[int, ...] | None = None
    """The checkpoint's numbers of the layers that a model has; None = it has all."""

    def module(self, name: str) -> ModuleFormat | None:
        """Return how a linear module's matrix is stored; None = in full precision.

        ``name`` is as in the checkpoint, without a vision model's prefix, such as
        ``model.layers.0.self_attn.q_proj``; the layer's number is the model's.
        """
        return self._module(self._of_checkpoint(name))

    def holds(self, name: str, kind: str) -> bool:
        """Whether a module of class ``kind`` is quantized: a head, an embedding, an expert."""
        return self._holds(self._of_checkpoint(name), kind)

    @abstractmethod
    def _module(self, name: str) -> ModuleFormat | None:
        """As ``module``, by the checkpoint's number of the layer."""

    def _holds(self, name: str, kind: str) -> bool:
        """As ``holds``, by the checkpoint's number of the layer."""
        return kind == "Linear" and self._module(name) is not None

    def _of_checkpoint(self, name: str) -> str:
        layers = self.layers
        if layers is None:
            return name
        return _LAYER.sub(lambda match: f"{match[1]}{layers[int(match[2])]}.", name)

    def renamed(self, name: str) -> str:
        """Return this method's name of a stored tensor that has several."""
        return name

    def of_layers(self, layers: Sequence[int]) -> Quantization:
        """Return the quantization of a model that has only these of the layers."""
        own = self.layers
        return replace(self, layers=tuple(layers if own is None else (own[i] for i in layers)))

    @property
    @abstractmethod
    def formats(self) -> tuple[ModuleFormat, ...]:
        """The formats of modules, each once."""

    def describe(self) -> str:
        """Return the method and the formats in words."""
        return f"{self.method}: {' and '.join(map(describe_format, self.formats))}"


def stored_name(name: str, prefix: str) -> str:
    """Return a module's name in a checkpoint whose layers' names begin with ``prefix``."""
    if name.startswith("model."):
        return prefix + name.removeprefix("model.")
    is_of_wrapper = prefix.endswith(".model.")  # the text model is one with a head of its own
    return prefix.removesuffix("model.") + name if is_of_wrapper else name


BITS = {"e4m3": "FP8 (e4m3)", "int8": "INT8", "int4": "INT4", "uint4": "INT4", "e2m1": "MXFP4"}
"""Codes in words."""


def describe_format(form: ModuleFormat) -> str:
    """Return a format in words: bits, and what shares a scale."""
    shared = "a scale per "
    if form.rows == 1:
        shared += f"group of {form.inputs} inputs" if form.inputs else "output"
    elif form.rows == 0 and form.inputs == 0:
        shared += "matrix"
    else:
        shared += f"block of {form.rows or 'all'} x {form.inputs or 'all'}"
    text = f"{BITS.get(form.code, form.code)} weights, {shared}"
    if form.zeros_dtype is not None:
        text += ", zero points"
    if form.has_order:
        text += ", inputs in an order of their own"
    return text
