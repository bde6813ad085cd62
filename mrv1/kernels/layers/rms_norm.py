"""Root-mean-square norm over the last dimension, with an optional residual add before it.

    residual <- round(residual + x)                    (if a residual is given; the sum replaces x)
    out       = round(x / sqrt(mean(x^2) + eps)) * weight
    out       = onto + round(out)                      (if ``onto`` is given)

The normalised value is rounded before the weight multiplies it, as in transformers'
``LlamaRMSNorm``; but not before a float32 weight does, as in ``Gemma2RMSNorm``. Source: Zhang and
Sennrich, "Root Mean Square Layer Normalization" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.checks import FLOAT_DTYPES, check_launchable, check_tensor
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.layers.contracts import check_norm_weight
from mrv1.kernels.layers.norm import inverse_rms

MOST_AT_ONCE = 2
"""Most programs whose next kernel may start together with them, to load weights: a layer of
OLMo-2-7B's products and norms takes 101.5 us for one token on an H200, instead of 103.5."""


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    out_ptr,  # [num_rows / num_heads, num_heads, dim], unit last stride; may be x
    stride_out_token, stride_out_head,
    residual_ptr, stride_residual_token,  # [num_rows, dim], unit last stride, updated; or None
    onto_ptr, stride_onto_token,  # [num_rows, dim], unit last stride, may be out; or None
    x_ptr, stride_x_token,  # [num_rows / num_heads, num_heads, dim], unit last stride
    stride_x_head,
    weight_ptr,  # [dim]
    second_weight_ptr,  # [dim], of the second head; or None = the same
    num_rows, num_heads, dim, eps,
    TILE_ROWS: tl.constexpr,
    TILE_DIM: tl.constexpr,  # power of two >= dim
    NEXT_AT_ONCE: tl.constexpr,  # see MOST_AT_ONCE
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (cdiv(num_rows, TILE_ROWS),): one program normalises TILE_ROWS whole rows."""
    let_next_start(OVERLAP and NEXT_AT_ONCE)
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    col = tl.arange(0, TILE_DIM)[None, :]
    in_row = (row < num_rows) & (col < dim)
    token, head = row // num_heads, row % num_heads
    weight = tl.load(weight_ptr + col, mask=col < dim, other=0.0)
    if second_weight_ptr is not None:
        second_weight = tl.load(second_weight_ptr + col, mask=col < dim, other=0.0)
        weight = tl.where(head == 1, second_weight, weight)
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP and not NEXT_AT_ONCE)

    x_offset = token * stride_x_token + head * stride_x_head + col
    x = tl.load(x_ptr + x_offset, mask=in_row, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    if residual_ptr is not None:
        residual_offset = token * stride_residual_token + col
        residual = tl.load(residual_ptr + residual_offset, mask=in_row, other=0.0)
        rounded = (residual.to(tl.float32) + x).to(dtype)
        tl.store(residual_ptr + residual_offset, rounded, mask=in_row)
        x = rounded.to(tl.float32)

    scale = inverse_rms(x, dim, eps)
    normed = x * scale[:, None]
    if weight.dtype != tl.float32:
        normed = normed.to(dtype).to(tl.float32)
    if onto_ptr is not None:
        onto = tl.load(onto_ptr + token * stride_onto_token + col, mask=in_row, other=0.0)
        # A plain product becomes one of 16 bits, which is fused with the sum and not rounded.
        normed = tl.fma(normed, weight.to(tl.float32), tl.zeros(normed.shape, tl.float32))
        normed = onto.to(tl.float32) + normed.to(dtype).to(tl.float32)
    else:
        normed *= weight.to(tl.float32)
    out_offset = token * stride_out_token + head * stride_out_head + col
    tl.store(out_ptr + out_offset, normed.to(dtype), mask=in_row)


@dataclass(frozen=True, slots=True)
class RmsNormConfig:
    """How the norm is cut into programs."""

    tile_rows: int  # rows of one program
    num_warps: int

    @classmethod
    @lru_cache(maxsize=256)
    def default_for(cls, dim: int) -> RmsNormConfig:
        """Return the configuration for a GPU, one for any number of rows: the bits follow from it.

        A thread should hold eight elements, one 16-byte load of a 16-bit dtype: short rows (the
        q/k norm of one head) share a program of 1024 elements, long rows get more warps.
        """
        tile_dim = triton.next_power_of_2(dim)
        tile_rows = max(1, 1024 // tile_dim)
        return cls(tile_rows, num_warps=min(max(tile_rows * tile_dim // 256, 4), 16))

    @classmethod
    def for_interpreter(cls, num_rows: int, dim: int) -> RmsNormConfig:
        """Return one program for all rows, up to 2^18 elements: each program costs time there."""
        most = max(1, 2**18 // triton.next_power_of_2(dim))
        return cls(min(triton.next_power_of_2(num_rows), most), num_warps=1)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    second_weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    onto: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``x`` divided by its root mean square over the last dimension, times ``weight``.

    Args:
        x: [tokens, dim] or [tokens, heads, dim] float32 | float16 | bfloat16, unit last stride; a
            view of a fused projection will do.
        weight: [dim], x's dtype or float32, contiguous. Read before earlier launches have ended:
            none that may still run may write it.
        second_weight: as ``weight``, for the second of x's two heads; None = it has the same.
        eps: added to the mean square.
        residual: [tokens, dim] (x two-dimensional), x's dtype, unit last stride. *Written*:
            becomes ``residual + x``, and that sum is normalised.
        onto: [tokens, dim] (x two-dimensional), x's dtype, unit last stride: added to the norm.
        out: x's shape and dtype, unit last stride, *written*, returned; may be ``x`` or ``onto``;
            None = new.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: float32 inside; the sum is rounded to the dtype before its mean square is taken, the
        normalised value before a weight of x's dtype multiplies it, and the norm before it is
        added to ``onto`` (in float32, both may be fused). Tier B; the bits of a row do
        not depend on the other rows, nor on their number, nor on strides and alignment of any
        tensor but ``weight``.
    Stream: current stream, no synchronisation, CUDA-graph safe.
    """
    _check(x, weight, residual, onto, out)
    if second_weight is not None:
        if x.dim() != 3 or x.shape[1] != 2:
            raise ValueError(
                f"second_weight: expected None for x of shape {list(x.shape)}, not "
                "[tokens, 2, dim], got a tensor"
            )
        check_tensor(
            "second_weight", second_weight, shape=weight.shape, dtype=weight.dtype,
            device=x.device, contiguous=True,
        )  # fmt: skip
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_heads = x.shape[1] if x.dim() == 3 else 1
    dim = x.shape[-1]
    num_rows = x.shape[0] * num_heads
    if num_rows == 0:
        return out
    if INTERPRET:
        config = RmsNormConfig.for_interpreter(num_rows, dim)
    else:
        config = RmsNormConfig.default_for(dim)
    num_programs = triton.cdiv(num_rows, config.tile_rows)
    _rms_norm_kernel[(num_programs,)](
        out, out.stride(0), out.stride(-2), *with_strides(residual, 1), *with_strides(onto, 1),
        x, x.stride(0), x.stride(-2), weight, second_weight, num_rows, num_heads, dim, eps,
        TILE_ROWS=config.tile_rows, TILE_DIM=triton.next_power_of_2(dim),
        NEXT_AT_ONCE=num_programs <= MOST_AT_ONCE, num_warps=config.num_warps,
        **overlap_options(x.device),
    )  # fmt: skip
    return out


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    onto: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    check_tensor("x", x, dtype=FLOAT_DTYPES, unit_last_stride=True)
    if x.dim() not in (2, 3) or x.shape[-1] == 0:
        raise ValueError(
            f"x: expected shape [tokens, dim] or [tokens, heads, dim] with dim >= 1, "
            f"got {list(x.shape)}"
        )
    check_launchable("x", x)
    check = partial(check_tensor, dtype=x.dtype, device=x.device)
    check_norm_weight("weight", weight, x)
    for name, tensor in (("residual", residual), ("onto", onto), ("out", out)):
        if tensor is None:
            continue
        if name != "out" and x.dim() != 2:
            raise ValueError(
                f"{name}: expected None for a three-dimensional x, got shape {list(tensor.shape)}"
            )
        check(name, tensor, shape=x.shape, unit_last_stride=True)
