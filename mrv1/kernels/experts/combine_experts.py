"""Add up the weighted products of each token's experts, then the residual, and norm the sum.

The sums are::

    out[t] = residual[t] + sum over i of topk_weights[t, i] * products[t * chosen + i]
    normed_out[t] = rms_norm(out[t], norm_weight)
"""

from __future__ import annotations

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.arithmetic import next_power_of_2
from mrv1.kernels._base.checks import check_launchable
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.experts.contracts import check_combination, check_float
from mrv1.kernels.layers.linear_call import normed
from mrv1.kernels.layers.norm import inverse_rms


@triton.jit
def _combine_kernel(
    out_ptr,  # [num_tokens, num_cols], unit last stride; may be the residual
    stride_out_token,
    normed_ptr,  # [num_tokens, num_cols], unit last stride, or None
    stride_normed_token,
    residual_ptr,  # [num_tokens, num_cols], unit last stride, or None
    stride_residual_token,
    products_ptr,  # [num_tokens * CHOSEN, num_cols]
    weights_ptr,  # [num_tokens, CHOSEN] float32
    norm_weight_ptr,  # [num_cols], or None
    num_cols,
    eps,
    CHOSEN: tl.constexpr,
    TILE_COLS: tl.constexpr,  # power of two; >= num_cols with a norm
    OVERLAP: tl.constexpr,  # see dependent_launch
):
    """Grid (num_tokens, cdiv(num_cols, TILE_COLS)): a tile of one token."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * TILE_COLS + tl.arange(0, TILE_COLS)
    inside = col < num_cols
    dtype = products_ptr.dtype.element_ty
    norm_weight = tl.zeros([TILE_COLS], dtype)
    if norm_weight_ptr is not None:
        norm_weight = tl.load(norm_weight_ptr + col, mask=inside, other=0.0)
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    total = tl.zeros([TILE_COLS], tl.float32)
    for index in tl.static_range(CHOSEN):
        weight = tl.load(weights_ptr + token * CHOSEN + index)
        row_ptr = products_ptr + (token * CHOSEN + index) * num_cols
        # A weight of 0 reads nothing: a pair without an expert has no product.
        product = tl.load(row_ptr + col, mask=inside & (weight != 0.0), other=0.0)
        total += product.to(tl.float32) * weight
    if residual_ptr is not None:
        residual_ptr += token * stride_residual_token + col
        total += tl.load(residual_ptr, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + token * stride_out_token + col, total.to(out_ptr.dtype.element_ty), mask=inside
    )
    if norm_weight_ptr is not None:
        rounded = total.to(dtype)
        wide = tl.where(inside, rounded.to(tl.float32), 0.0)
        scale = inverse_rms(tl.reshape(wide, [1, TILE_COLS]), num_cols, eps)
        tl.store(
            normed_ptr + token * stride_normed_token + col,
            normed(rounded, scale, norm_weight),
            mask=inside,
        )


def combine_experts(
    products: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    normed_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each token's products, plus the residual if there is one.

    Args:
        products: [tokens * chosen, n] float32 | float16 | bfloat16, contiguous: the result of
            ``expert_linear`` for each pair of a token and one of its experts.
        topk_weights: [tokens, chosen] float32, contiguous; where it is 0, no product is read.
        residual: [tokens, n], products' dtype, unit last stride.
        out: [tokens, n], products' dtype or float32, unit last stride, *written* and returned;
            may be ``residual``. Allocated if omitted, in products' dtype.
        norm_weight: [n], products' dtype, contiguous: the norm's; only with ``normed_out``.
        eps: added to the mean square in the norm.
        normed_out: [tokens, n], products' dtype, unit last stride, *written* with the RMS norm
            of each row of ``out``, rounded to its dtype.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: float32 sums in the order of the experts, then the residual; rounded once. The norm
        rounds as ``rms_norm`` does. A token's bits do not depend on other tokens. Tier B.
    Stream: current stream, no synchronisation, CUDA-graph safe.
    """
    check_float("products", products)
    num_tokens, num_cols = check_combination(
        products, topk_weights, residual, out, norm_weight, normed_out
    )
    check_launchable("products", products)
    if out is None:
        out = products.new_empty(num_tokens, num_cols)
    if num_tokens == 0:
        return out
    tile_cols = next_power_of_2(num_cols)
    if norm_weight is None:
        tile_cols = min(tile_cols, 1024)
    _combine_kernel[(num_tokens, -(-num_cols // tile_cols))](
        *with_strides(out, 1),
        *with_strides(normed_out, 1),
        *with_strides(residual, 1),
        *(products, topk_weights, norm_weight, num_cols, eps),
        CHOSEN=topk_weights.shape[1],
        TILE_COLS=tile_cols,
        num_warps=4 if tile_cols <= 2048 else 8,
        **overlap_options(products.device),
    )
    return out
