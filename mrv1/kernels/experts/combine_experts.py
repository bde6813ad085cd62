"""Add up the weighted products of each token's experts, then the residual, and norm the sum.

The sums are::

    out[t] = residual[t] + sum over i of topk_weights[t, i] * products[t * chosen + i]
    normed_out[t] = rms_norm(out[t], norm_weight)

Of products with leaves, each leaf has its sum over i; a tree adds those up, neighbours first.
"""

from __future__ import annotations

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.arithmetic import next_power_of_2
from mrv1.kernels._base.checks import FLOAT_DTYPES, check_launchable, check_tensor
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.experts.contracts import check_combination
from mrv1.kernels.layers.linear_call import normed
from mrv1.kernels.layers.norm import inverse_rms


@triton.jit
def _add_expert(total, row_ptr, weights_ptr, inside, num_cols, index):
    """Return ``total`` plus a weighted product; a weight of 0 reads none, as none is there."""
    weight = tl.load(weights_ptr + index)
    product = tl.load(row_ptr + index * num_cols, mask=inside & (weight != 0.0), other=0.0)
    return tl.fma(product.to(tl.float32), weight, total)


@triton.jit
def _weighted_sum(
    row_ptr, weights_ptr, inside, num_cols, stride_leaf,
    CHOSEN: tl.constexpr, LEAVES: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """Return the weighted sum of LEAVES leaves, a power of two: of the halves, summed alike."""
    if LEAVES == 1:
        total = tl.zeros(inside.shape, tl.float32)
        if UNROLLED:
            for index in tl.static_range(CHOSEN):
                total = _add_expert(total, row_ptr, weights_ptr, inside, num_cols, index)
        else:  # the loads of all leaves at once would spill
            for index in range(CHOSEN):
                total = _add_expert(total, row_ptr, weights_ptr, inside, num_cols, index)
    else:
        HALF: tl.constexpr = LEAVES // 2
        total = _weighted_sum(
            row_ptr, weights_ptr, inside, num_cols, stride_leaf, CHOSEN, HALF, UNROLLED
        )
        total += _weighted_sum(
            row_ptr + HALF * stride_leaf, weights_ptr, inside, num_cols, stride_leaf,
            CHOSEN, HALF, UNROLLED,
        )  # fmt: skip
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def _combine_kernel(
    out_ptr, stride_out_token,  # [num_tokens, num_cols], unit last stride; may be the residual
    normed_ptr, stride_normed_token,  # [num_tokens, num_cols], unit last stride, or None
    residual_ptr, stride_residual_token,  # [num_tokens, num_cols], unit last stride, or None
    products_ptr,  # [LEAVES, num_tokens * CHOSEN, num_cols]
    weights_ptr,  # [num_tokens, CHOSEN] float32
    norm_weight_ptr,  # [num_cols], or None
    num_tokens, num_cols, eps,
    CHOSEN: tl.constexpr, LEAVES: tl.constexpr,
    TILE_COLS: tl.constexpr,  # power of two; >= num_cols with a norm
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (num_tokens, cdiv(num_cols, TILE_COLS)): a tile of one token."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * TILE_COLS + tl.arange(0, TILE_COLS)
    inside = col < num_cols
    if norm_weight_ptr is not None:
        norm_weight = tl.load(norm_weight_ptr + col, mask=inside, other=0.0)
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    total = _weighted_sum(
        products_ptr + token * CHOSEN * num_cols + col, weights_ptr + token * CHOSEN, inside,
        num_cols, num_tokens.to(tl.int64) * CHOSEN * num_cols, CHOSEN, LEAVES, LEAVES == 1,
    )  # fmt: skip
    if residual_ptr is not None:
        residual_ptr += token * stride_residual_token + col
        total += tl.load(residual_ptr, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + token * stride_out_token + col, total.to(out_ptr.dtype.element_ty), mask=inside
    )
    if norm_weight_ptr is not None:
        rounded = total.to(normed_ptr.dtype.element_ty)
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
            ``expert_linear`` for each pair of a token and one of its experts; or [leaves, tokens *
            chosen, n] float32, its result with leaves. What follows then has the dtype of
            ``residual``, else of ``normed_out``, else of ``out``.
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

    Numerics: float32 sums in the order of the experts, then the residual; rounded once. Leaves are
        added in a tree, neighbours first: those of N ranks with 8 / N leaves each, added so, are
        the bits of one rank with 8. The norm rounds as ``rms_norm`` does. A token's bits do not
        depend on other tokens. Tier B.
    Stream: current stream, no synchronisation, CUDA-graph safe.
    """
    check_tensor("products", products, dtype=FLOAT_DTYPES)
    num_tokens, num_cols, dtype = check_combination(
        products, topk_weights, residual, out, norm_weight, normed_out
    )
    check_launchable("products", products)
    if out is None:
        out = products.new_empty(num_tokens, num_cols, dtype=dtype)
    if num_tokens == 0:
        return out
    tile_cols = next_power_of_2(num_cols)
    if norm_weight is None:
        tile_cols = min(tile_cols, 1024)
    _combine_kernel[(num_tokens, -(-num_cols // tile_cols))](
        *with_strides(out, 1), *with_strides(normed_out, 1), *with_strides(residual, 1),
        products, topk_weights, norm_weight, num_tokens, num_cols, eps,
        CHOSEN=topk_weights.shape[1], LEAVES=len(products) if products.dim() == 3 else 1,
        TILE_COLS=tile_cols, num_warps=4 if tile_cols <= 2048 else 8,
        **overlap_options(products.device),
    )  # fmt: skip
    return out
