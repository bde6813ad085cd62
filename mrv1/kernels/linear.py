"""A linear layer, with what stands before and behind it in a decoder.

    x' = rms_norm(x, norm_weight)                   (if norm_weight is given)
    y  = x' @ weight.T + bias
    y  = silu(y[:, :n]) * y[:, n:]                  (if activation is "silu_and_mul")
    out = residual + y                              (if residual is given)

A decode step multiplies few rows by weights that are read once: it lasts as long as the weights
take to arrive. They depend on no other kernel, so where launches overlap (see ``_overlap``) a
program asks for weights before it waits for the kernel in front.

Three ways, by the number of tokens: one token goes to ``_linear_vector``; up to MOST_TOKENS, and
any number where bits must not depend on it, go to ``_linear_tiles``; more are multiplied by the
GPU vendor's library, with the norm and the activation in kernels of their own.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch

from mrv1.device import device_info
from mrv1.kernels._checks import FLOAT_DTYPES, check_launchable, check_tensor
from mrv1.kernels._linear_call import LinearCall
from mrv1.kernels._linear_tiles import TileConfig, multiply_tiles
from mrv1.kernels._linear_vector import VectorConfig, multiply_vector
from mrv1.kernels._triton import INTERPRET
from mrv1.kernels.activation import silu_and_mul
from mrv1.kernels.rms_norm import rms_norm

Activation = Literal["silu_and_mul"]

MOST_TOKENS = 32
"""Most tokens of a product that the library does not do. On an H200 in bfloat16 the four products
of a Qwen3-0.6B layer, norms, activation and residuals with them, take 24 us at 32 tokens (27.6 by
the library), at 64 tokens 31 us (28.5)."""
PRODUCTS_FROM_SHARED_MEMORY: tuple[tuple[int, int] | None, ...] = ((9, 0), (10, 0))
"""Compute capabilities whose tensor cores take both operands from shared memory, of which a
program has 227 KiB: large tiles do not go through registers."""


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    activation: Activation | None = None,
    out: torch.Tensor | None = None,
    deterministic: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return ``residual + activation(rms_norm(x) @ weight.T + bias)``, each part if it is given.

    Args:
        x: ``[tokens, in]`` float32 | float16 | bfloat16, unit last stride.
        weight: ``[out, in]``, x's dtype, contiguous; in, out >= 1. No launch that may still be
            under way when this one begins writes it: it is read before the launches in front of
            this one have ended. So for ``bias`` and ``norm_weight``.
        bias: ``[out]``, x's dtype, contiguous.
        norm_weight: ``[in]``, x's dtype, contiguous: weight of an RMS norm over each row of x.
        eps: of the norm.
        residual: ``[tokens, n]``, x's dtype, unit last stride, where n is out, or out / 2 with an
            activation.
        activation: ``"silu_and_mul"``: weight has the gate's rows, then the up projection's, and
            the result is ``silu(gate) * up``.
        out: ``[tokens, n]``, the result's dtype, unit last stride, *written*; may be
            ``residual``, and overlap with nothing else. Allocated if omitted.
        deterministic: whether a row's bits must depend on that row alone, not on how many tokens
            there are: one kind of product, one order of the inputs.
        out_dtype: the result's dtype: x's (None), or float32.

    Returns:
        ``out``.

    Raises:
        TypeError, ValueError: an argument is not as described.
        UnsupportedDeviceError: a CPU tensor while not interpreting, or the reverse.

    Numerics: products add up in float32; bias, activation and residual are float32 too, and the
        result is rounded once. The norm rounds as ``rms_norm`` does. Where the vendor's library
        multiplies (from 33 tokens on, unless deterministic), an activation's two inputs are
        rounded to the dtype. Tier B.
    Stream: current stream, no synchronisation, CUDA-graph safe.
    """
    num_out = _check(x, weight, bias, norm_weight, residual, activation, out, out_dtype)
    if out is None:
        out = x.new_empty((x.shape[0], num_out), dtype=out_dtype or x.dtype)
    call = LinearCall(
        x=x,
        weight=weight,
        bias=bias,
        norm_weight=norm_weight,
        eps=eps,
        residual=residual,
        is_gated=activation is not None,
        out=out,
    )
    if call.num_tokens == 1 and not deterministic:
        multiply_vector(call, _vector_config(call))
    elif not deterministic and call.num_tokens > MOST_TOKENS and _library_can(call):
        _multiply_by_library(call)
    elif call.num_tokens:
        multiply_tiles(call, _tile_config(call, deterministic))
    return out


def _vector_config(call: LinearCall) -> VectorConfig:
    if INTERPRET:
        return VectorConfig.for_interpreter(call.num_in, call.num_out)
    return VectorConfig.default_for(
        call.num_in, call.x.dtype, has_norm=call.norm_weight is not None
    )


def _tile_config(call: LinearCall, deterministic: bool) -> TileConfig:
    num_rows = call.weight.shape[0]
    if INTERPRET:
        return TileConfig.for_interpreter(
            call.num_tokens, call.num_in, num_rows, deterministic=deterministic
        )
    return TileConfig.default_for(
        call.num_tokens,
        call.num_in,
        num_rows,
        call.x.dtype,
        is_gated=call.is_gated,
        has_norm=call.norm_weight is not None,
        deterministic=deterministic,
        from_shared_memory=device_info(call.x.device).capability in PRODUCTS_FROM_SHARED_MEMORY,
    )


def _library_can(call: LinearCall) -> bool:
    """Say whether the library rounds once: it adds one thing at most, and not in float32."""
    num_added = (call.bias is not None) + (call.residual is not None)
    if call.out.dtype != call.x.dtype:
        return call.x.device.type == "cuda" and num_added == 0 and not call.is_gated
    return num_added <= (0 if call.is_gated and call.residual is not None else 1)


def _multiply_by_library(call: LinearCall) -> None:
    x = call.x
    if call.norm_weight is not None:
        x = rms_norm(x, call.norm_weight, call.eps)
    added = call.bias if call.residual is None else call.residual
    product = None if call.is_gated else call.out
    if call.out.dtype != x.dtype:
        torch.mm(x, call.weight.T, out_dtype=call.out.dtype, out=call.out)
        return
    if added is None:
        product = torch.mm(x, call.weight.T, out=product)
    else:
        product = torch.addmm(added, x, call.weight.T, out=product)
    if call.is_gated:
        silu_and_mul(product, out=call.out)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: Activation | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> int:
    """Raise unless all is as ``linear`` says; return the result's columns."""
    check_tensor("x", x, shape=(None, None), dtype=FLOAT_DTYPES, unit_last_stride=True)
    check_launchable("x", x)
    num_tokens, num_in = x.shape
    check = partial(check_tensor, dtype=x.dtype, device=x.device)
    check("weight", weight, shape=(None, num_in), contiguous=True)
    if weight.numel() == 0:
        raise ValueError(f"weight: expected at least one row and column, got {list(weight.shape)}")
    num_rows = weight.shape[0]
    if bias is not None:
        check("bias", bias, shape=(num_rows,), contiguous=True)
    if norm_weight is not None:
        check("norm_weight", norm_weight, shape=(num_in,), contiguous=True)
    if activation not in (None, "silu_and_mul"):
        raise ValueError(f"activation: expected None or 'silu_and_mul', got {activation!r}")
    if activation is not None and num_rows % 2:
        raise ValueError(
            f"weight: expected an even number of rows (gate, then up), got {num_rows}"
        )
    if out_dtype not in (None, x.dtype, torch.float32):
        raise TypeError(f"out_dtype: expected None, {x.dtype} or torch.float32, got {out_dtype}")
    shape = (num_tokens, num_rows if activation is None else num_rows // 2)
    if residual is not None:
        check("residual", residual, shape=shape, unit_last_stride=True)
    if out is not None:
        check_tensor(
            "out",
            out,
            shape=shape,
            dtype=out_dtype or x.dtype,
            device=x.device,
            unit_last_stride=True,
        )
    return shape[1]
