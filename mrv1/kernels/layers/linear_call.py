"""The arguments of one call of ``linear``, and the arithmetic that its kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.layers.lora import Adapters
from mrv1.kernels.layers.lora_values import lora_arguments
from mrv1.kernels.layers.sum_order import SumOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCall:
    """The checked arguments of one call."""

    x: torch.Tensor
    weight: torch.Tensor
    """Of a quantized weight its codes, until it is widened."""
    bias: torch.Tensor | None
    norm_weight: torch.Tensor | None
    eps: float
    residual: torch.Tensor | None
    gate: int
    """The kind of gate, of ``GATES``; the weight has the rows of gates, then the rows of ups."""
    out: torch.Tensor
    out_norm_weight: torch.Tensor | None
    normed_out: torch.Tensor | None
    prefetch: torch.Tensor | None
    """Weights that a later launch reads."""
    order: SumOrder | None
    """The order of a deterministic sum; None = any."""
    keeps_splits: bool = False
    """Whether the caller adds up the sums of splits."""
    adapters: Adapters | None = None
    """Low-rank adapters of tokens."""
    shrunk: torch.Tensor | None = None
    """The adapters' first product, of ``shrink_adapters``."""

    @property
    def is_gated(self) -> bool:
        """Whether the weight has the rows of gates, then the rows of ups."""
        return self.gate != 0

    @property
    def is_followed(self) -> bool:
        """Whether a launch that follows anyway, for a norm or a sum over ranks, adds up splits."""
        return self.keeps_splits or self.normed_out is not None

    def lora_arguments(self, tile: int, num_warps: int) -> dict[str, Any]:
        """Return a kernel's arguments for adapters; a program writes ``tile`` results at once."""
        return lora_arguments(self.adapters, self.shrunk, tile, num_warps)

    @property
    def num_tokens(self) -> int:
        """Rows of x."""
        return self.x.shape[0]

    @property
    def num_in(self) -> int:
        """Columns of x."""
        return self.x.shape[1]

    @property
    def num_out(self) -> int:
        """Columns of the result."""
        return self.out.shape[1]


class Rows(NamedTuple):
    """The rows of weights, or of tokens, that a program multiplies."""

    ptr: tl.tensor  # [rows, 1] pointers
    is_row: tl.tensor  # [rows, 1]


@triton.jit
def normed(x, scale, norm_weight):
    """Return ``x * scale * norm_weight`` in x's dtype, rounded as by ``rms_norm``."""
    wide = x.to(tl.float32) * scale
    if norm_weight.dtype == tl.float32:
        y = (wide * norm_weight).to(x.dtype)
    else:
        y = wide.to(x.dtype) * norm_weight
    return y
