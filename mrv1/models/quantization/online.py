"""``quantization="fp8"``: matrices become e4m3 codes while a checkpoint loads.

    scale = max |w| / 448 of a row,  code = e4m3(w / scale)

Every row (output) of a matrix has a scale of its own, where vLLM gives a matrix one scale: a
row's codes depend on nothing else, so that ranks and updates of some tensors have the same.
Embedding, head, norms and biases stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mrv1.kernels.layers.quantized import QuantizedWeight
from mrv1.models.places import FLOAT_DTYPES, Place
from mrv1.models.quantization.formats import ModuleFormat, ModulePart
from mrv1.models.quantization.packing import LAYERS
from mrv1.models.quantization.scheme import Quantization

LARGEST = torch.finfo(torch.float8_e4m3fn).max
ROWS = 4096
"""Rows that are quantized at once: their float32 takes 64 MiB with 4,096 inputs."""


def quantize_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the e4m3 codes ``[n, in]`` and float32 scales ``[n, 1]`` of rows; of zeros: 1."""
    wide = values.float()
    scales = wide.abs().amax(1, keepdim=True) / LARGEST
    scales = torch.where(scales == 0, 1.0, scales)
    codes = (wide / scales).clamp_(-LARGEST, LARGEST)
    return codes.to(torch.float8_e4m3fn), scales


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizingPlace(Place):
    """The place of a matrix that is quantized when it is written: ``target`` has its codes."""

    scales: torch.Tensor
    """[rows, 1], filled too."""
    inputs: slice
    """The rank's inputs; scales follow from all of them."""

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """Codes and scales."""
        return () if self.target is None else (self.target, self.scales)

    @torch.no_grad()
    def fill(self, values: torch.Tensor, first: int = 0) -> None:
        """Quantize and write rows, from row ``first`` of this rank's part on."""
        for rows in values.split(ROWS):
            codes, scales = quantize_rows(rows.to(self.scales.device))
            own = slice(first, first + len(rows))
            self.target[own].copy_(codes[:, self.inputs])  # type: ignore[index]
            self.scales[own].copy_(scales)
            first += len(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineFormat(ModuleFormat):
    """A matrix that is stored in full precision."""

    def places(self, part: ModulePart, weight: QuantizedWeight) -> dict[str, Place]:
        """Return the place of the matrix."""
        place = QuantizingPlace(
            target=weight.codes,
            shape=part.shape,
            part=(part.rows, slice(0, part.shape[1])),
            dtypes=FLOAT_DTYPES,
            scales=weight.tensors["scales"],
            inputs=part.inputs,
        )
        return {"weight": place}


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineFP8(Quantization):
    """Linear modules quantized to FP8 while they load."""

    method: ClassVar[str] = "fp8"
    quantizes: ClassVar[bool] = True

    @property
    def formats(self) -> tuple[OnlineFormat, ...]:
        """The one format."""
        return (OnlineFormat(code="e4m3", activations="token"),)

    def _holds(self, name: str, kind: str) -> bool:
        """Whether a module is linear and in a layer."""
        return kind == "Linear" and name.startswith(LAYERS)

    def _module(self, name: str) -> OnlineFormat | None:
        """Return the one format for modules of layers."""
        return self.formats[0] if self._holds(name, "Linear") else None

    def describe(self) -> str:
        """Return the format in words."""
        return f"quantized while loading: {Quantization.describe(self)}"
