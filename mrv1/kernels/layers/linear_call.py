"""The arguments of one call of ``linear``, and the arithmetic that its kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.layers.lora import Adapters
from mrv1.kernels.layers.lora_values import LoraPointers, adapter_values, lora_arguments
from mrv1.kernels.layers.silu import gated
from mrv1.kernels.layers.sum_order import SumOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCall:
    """The checked arguments of one call."""

    x: torch.Tensor
    weight: torch.Tensor  # of a quantized weight its codes, until it is widened
    bias: torch.Tensor | None
    norm_weight: torch.Tensor | None
    eps: float
    residual: torch.Tensor | None
    gate: int
    """The kind of gate, of ``GATES``; the weight has the rows of gates, then the rows of ups."""
    out: torch.Tensor
    out_norm_weight: torch.Tensor | None
    normed_out: torch.Tensor | None
    prefetch: torch.Tensor | None  # weights that a later launch reads
    order: SumOrder | None  # the order of a deterministic sum; None = any
    keeps_splits: bool = False  # whether the caller adds up the sums of splits
    adapters: Adapters | None = None  # low-rank adapters of tokens
    shrunk: torch.Tensor | None = None  # the adapters' first product, of ``shrink_adapters``

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


class Results(NamedTuple):
    """Where a program's results go, and what is added to them; see the kernels' arguments."""

    out_ptr: tl.tensor
    stride_out_token: tl.tensor
    sums_ptr: tl.tensor | None
    residual_ptr: tl.tensor | None
    stride_residual_token: tl.tensor
    bias_ptr: tl.tensor | None
    lora: LoraPointers | None


@triton.jit
def store_results(
    results, y, split, token, is_token, col, is_out, inside, num_tokens, num_out,
    GATED: tl.constexpr, LORA: tl.constexpr,
):  # fmt: skip
    """Store a tile's results, or the sums of a split: those of ``y``, [rows, tokens] float32.

    With GATED its rows are gates, then ups. ``token`` is int64, [1, tokens], ``col`` [results, 1].
    """
    if results.sums_ptr is not None:
        sums_ptr = results.sums_ptr + (split * num_tokens + token) * num_out
        tl.store(sums_ptr + col, y, mask=inside)
    else:
        if GATED:
            halves = tl.reshape(y, [2, y.shape[0] // 2, y.shape[1]])
            y, up = tl.split(tl.permute(halves, (1, 2, 0)))
            if results.lora is not None:
                of_up = LORA.ROWS // 2 + col
                up += adapter_values(results.lora, token, is_token, of_up, LORA)
            if results.bias_ptr is not None:
                up_bias = tl.load(results.bias_ptr + num_out + col, mask=is_out, other=0.0)
                up += up_bias.to(tl.float32)
        if results.lora is not None:
            y += adapter_values(results.lora, token, is_token, col, LORA)
        if results.bias_ptr is not None:
            y += tl.load(results.bias_ptr + col, mask=is_out, other=0.0).to(tl.float32)
        if GATED:
            y = gated(y, up, GATED)
        if results.residual_ptr is not None:
            residual = results.residual_ptr + token * results.stride_residual_token + col
            y += tl.load(residual, mask=inside, other=0.0).to(tl.float32)
        y = y.to(results.out_ptr.dtype.element_ty)
        tl.store(results.out_ptr + token * results.stride_out_token + col, y, mask=inside)
