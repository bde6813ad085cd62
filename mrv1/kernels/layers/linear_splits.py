"""The last kernel of a split linear layer: it adds up the splits and norms the result."""

from __future__ import annotations

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.layers.linear_call import LinearCall, normed
from mrv1.kernels.layers.lora_values import adapter_values
from mrv1.kernels.layers.norm import inverse_rms

TILE_OUT = 512
"""Results of one program without a norm; a norm needs all results of a token in one program."""


@triton.jit
def sum_of_splits(ptr, mask, stride, COUNT: tl.constexpr):
    """Return the sum of COUNT splits, ``stride`` apart: of the halves, each summed alike."""
    HALF: tl.constexpr = triton.next_power_of_2(COUNT) // 2
    if COUNT == 1:
        y = tl.load(ptr, mask=mask, other=0.0)
    else:
        y = sum_of_splits(ptr, mask, stride, HALF)
        y += sum_of_splits(ptr + HALF * stride, mask, stride, COUNT - HALF)
    return y


@triton.jit(do_not_specialize=["num_tokens"])
def _add_splits_kernel(
    out_ptr, stride_out_token,  # [num_tokens, num_out], unit last stride; may be the residual
    normed_ptr, stride_normed_token,  # [num_tokens, num_out], unit last stride, or None
    sums_ptr,  # [SPLITS, num_tokens, num_out] float32
    residual_ptr, stride_residual_token,  # [num_tokens, num_out], unit last stride, or None
    bias_ptr,  # [num_out], or None
    norm_weight_ptr,  # [num_out], or None
    eps, num_tokens, num_out,
    SPLITS: tl.constexpr,
    TILE_OUT: tl.constexpr,  # with a norm at least num_out
    OVERLAP: tl.constexpr,  # see dependent_launch
    lora=None, LORA: tl.constexpr = None,  # adapters: LoraPointers, LoraConstants; None = none
):  # fmt: skip
    """Grid (num_tokens * cdiv(num_out, TILE_OUT),): results of one token."""
    let_next_start(OVERLAP)
    num_tiles = tl.cdiv(num_out, TILE_OUT)
    token = (tl.program_id(0) // num_tiles).to(tl.int64)
    col = (tl.program_id(0) % num_tiles) * TILE_OUT + tl.arange(0, TILE_OUT)
    inside = col < num_out
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + col, mask=inside, other=0.0)
    if norm_weight_ptr is not None:
        norm_weight = tl.load(norm_weight_ptr + col, mask=inside, other=0.0)
    wait_for_previous(OVERLAP)
    split_stride = num_tokens.to(tl.int64) * num_out
    y = sum_of_splits(sums_ptr + token * num_out + col, inside, split_stride, SPLITS)
    if lora is not None:
        tokens = token + tl.arange(0, 1)[:, None]
        added = adapter_values(lora, tokens, tokens >= 0, col[None, :], LORA)
        y += tl.reshape(added, [TILE_OUT])
    if bias_ptr is not None:
        y += bias.to(tl.float32)
    if residual_ptr is not None:
        residual_ptr += token * stride_residual_token + col
        y += tl.load(residual_ptr, mask=inside, other=0.0).to(tl.float32)
    out = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * stride_out_token + col, out, mask=inside)
    if norm_weight_ptr is not None:
        scale = inverse_rms(tl.reshape(out.to(tl.float32), [1, TILE_OUT]), num_out, eps)
        normed_ptr += token * stride_normed_token + col
        tl.store(normed_ptr, normed(out, scale, norm_weight), mask=inside)


def empty_sums(call: LinearCall, splits: int) -> torch.Tensor | None:
    """Return an empty buffer for the sums, as ``add_splits`` takes it; None for one split."""
    shape = (splits, call.num_tokens, call.num_out)
    return call.x.new_empty(shape, dtype=torch.float32) if splits > 1 else None


def add_splits(call: LinearCall, sums: torch.Tensor) -> None:
    """Compute the results from ``sums``, [splits, num_tokens, num_out] float32, contiguous."""
    has_norm = call.normed_out is not None
    tile_out = triton.next_power_of_2(call.num_out) if has_norm else TILE_OUT
    _add_splits_kernel[(call.num_tokens * triton.cdiv(call.num_out, tile_out),)](
        *with_strides(call.out, 1), *with_strides(call.normed_out, 1), sums,
        *with_strides(call.residual, 1), call.bias, call.out_norm_weight, call.eps,
        call.num_tokens, call.num_out,
        SPLITS=sums.shape[0], TILE_OUT=tile_out, num_warps=sum_warps(tile_out),
        **overlap_options(call.x.device), **call.lora_arguments(tile_out, sum_warps(tile_out)),
    )  # fmt: skip


def sum_warps(tile_out: int) -> int:
    """Return the number of warps for ``tile_out`` results: four per thread, a 16-byte load."""
    return min(max(tile_out // 128, 4), 16)
