"""The elementwise parts of SwiGLU and GeGLU, ``silu(gate) * up`` and ``gelu_tanh(gate) * up``.

    silu(x) = x / (1 + exp(-x)),    silu(-inf) = 0
    gelu_tanh(x) = x / (1 + exp(-2u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), 0 at -inf

Source: Shazeer, "GLU Variants Improve Transformer" (2020).
"""

from __future__ import annotations

from functools import partial

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.checks import FLOAT_DTYPES, check_launchable, check_tensor
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.layers.contracts import GATES, Activation
from mrv1.kernels.layers.silu import gated


@triton.jit(do_not_specialize=["num_tokens"])
def _silu_and_mul_kernel(
    out_ptr, stride_out_token,  # [num_tokens, num_cols], unit last stride
    x_ptr, stride_x_token,  # [num_tokens, 2 * num_cols], unit last stride: gate, then up
    num_tokens, num_cols,
    GATED: tl.constexpr,  # a kind of gate
    TILE_TOKENS: tl.constexpr, TILE_COLS: tl.constexpr,
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (cdiv(num_tokens, TILE_TOKENS), cdiv(num_cols, TILE_COLS)): one output tile each."""
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)[:, None]
    col = tl.program_id(1) * TILE_COLS + tl.arange(0, TILE_COLS)[None, :]
    inside = (token < num_tokens) & (col < num_cols)
    gate_ptr = x_ptr + token * stride_x_token + col
    gate = tl.load(gate_ptr, mask=inside, other=0.0)
    up = tl.load(gate_ptr + num_cols, mask=inside, other=0.0).to(tl.float32)
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    result = gated(gate, up, GATED)
    tl.store(out_ptr + token * stride_out_token + col, result.to(dtype), mask=inside)


def tile_for(num_tokens: int, num_cols: int) -> tuple[int, int]:
    """Return the tokens and the output columns of one program.

    On a GPU a thread has eight elements, in 16 bits one 16-byte load; interpreted, a program has
    whole rows, up to 2^18 elements.
    """
    if not INTERPRET:
        return 1, 1024
    tile_cols = min(triton.next_power_of_2(num_cols), 2**18)
    return min(triton.next_power_of_2(num_tokens), max(1, 2**18 // tile_cols)), tile_cols


def silu_and_mul(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``silu(x[:, :n]) * x[:, n:]``.

    Args:
        x: [tokens, 2 * n] float32 | float16 | bfloat16, unit last stride: gate, then up.
        out: [tokens, n], x's dtype, unit last stride, *written* and returned; None = new.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: float32 inside, rounded once (torch in 16 bits also rounds ``silu(gate)``). The silu
        of a gate of -inf is zero, so the result is NaN only if up is infinite or NaN (torch:
        always). Tier B.
    Stream: current stream, no synchronisation, CUDA-graph safe.
    """
    return _activate(x, out, "silu_and_mul")


def gelu_tanh_and_mul(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``gelu_tanh(x[:, :n]) * x[:, n:]``; gelu is approximated by tanh, as in Gemma.

    Args:
        x: [tokens, 2 * n] float32 | float16 | bfloat16, unit last stride: gate, then up.
        out: [tokens, n], x's dtype, unit last stride, *written* and returned; None = new.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: as ``silu_and_mul``.
    Stream: current stream, no synchronisation, CUDA-graph safe.
    """
    return _activate(x, out, "gelu_tanh_and_mul")


def _activate(x: torch.Tensor, out: torch.Tensor | None, kind: Activation) -> torch.Tensor:
    check_tensor("x", x, shape=(None, None), dtype=FLOAT_DTYPES, unit_last_stride=True)
    check_launchable("x", x)
    num_tokens, num_cols = x.shape[0], x.shape[1] // 2
    if x.shape[1] % 2:
        raise ValueError(f"x: expected an even last size (gate, then up), got {x.shape[1]}")
    if out is None:
        out = torch.empty((num_tokens, num_cols), dtype=x.dtype, device=x.device)
    else:
        check = partial(check_tensor, dtype=x.dtype, device=x.device)
        check("out", out, shape=(num_tokens, num_cols), unit_last_stride=True)
    if out.numel() == 0:
        return out
    tile_tokens, tile_cols = tile_for(num_tokens, num_cols)
    grid = (triton.cdiv(num_tokens, tile_tokens), triton.cdiv(num_cols, tile_cols))
    _silu_and_mul_kernel[grid](
        *with_strides(out, 1), *with_strides(x, 1), num_tokens, num_cols,
        GATED=GATES[kind], TILE_TOKENS=tile_tokens, TILE_COLS=tile_cols, num_warps=4,
        **overlap_options(x.device),
    )  # fmt: skip
    return out
