"""The last product of each token's experts, weighted and added up, then the residual and a norm.

    out[t] = residual[t] + sum over i of topk_weights[t, i] * (x[pair i of t] @ weight[id].T)

Of one token every warp computes two results, from two rows of each of its experts, in one launch:
no product is written. It loads the first experts' weights before the kernel before it has ended.
Other calls are ``expert_linear``, then ``combine_experts``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.arithmetic import cdiv, next_power_of_2
from mrv1.kernels._base.checks import FLOAT_DTYPES, check_launchable, check_tensor
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.experts.combine_experts import combine_experts
from mrv1.kernels.experts.contracts import check_added_experts, check_sum
from mrv1.kernels.experts.expert_linear import expert_linear
from mrv1.kernels.layers.linear_call import Rows
from mrv1.kernels.layers.quantized import QuantizedWeight

MOST_CHUNKS = 96
"""Most chunks of a row of weights, those of all experts together: each is code of its own."""
CHUNKS_AHEAD = 12
"""Chunks of two rows whose loads are under way: 96 registers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SumConfig:
    """How the rows of weights are cut into programs, and a row into chunks."""

    tile_rows: int  # pairs of rows of one program: one pair per warp
    tile_in: int  # inputs of one chunk, which a warp loads at once
    experts_ahead: int  # experts whose weights are loaded before those before them are multiplied
    num_warps: int

    @classmethod
    @lru_cache(maxsize=64)
    def default_for(cls, num_in: int, num_chosen: int, dtype: torch.dtype) -> SumConfig | None:
        """Return the configuration for a GPU; None = float32, or rows are too long."""
        tile_in = 256  # 16 bytes for each of a warp's 32 threads
        chunks = cdiv(num_in, tile_in)
        if dtype.itemsize > 2 or chunks > CHUNKS_AHEAD or chunks * num_chosen > MOST_CHUNKS:
            return None
        ahead = min(num_chosen, CHUNKS_AHEAD // chunks)
        return cls(tile_rows=4, tile_in=tile_in, experts_ahead=ahead, num_warps=4)

    @classmethod
    def for_interpreter(cls, num_in: int, num_out: int) -> SumConfig:
        """Return few large programs."""
        return cls(
            tile_rows=min(1024, next_power_of_2(cdiv(num_out, 2))),
            tile_in=next_power_of_2(cdiv(num_in, 2)),
            experts_ahead=1,
            num_warps=1,
        )


@triton.jit
def _load_chunks(rows, CHUNKS: tl.constexpr, IN: tl.constexpr, TILE_IN: tl.constexpr):
    """Return the chunks [rows, TILE_IN] of some rows."""
    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        col = chunk * TILE_IN + tl.arange(0, TILE_IN)[None, :]
        mask = rows.is_row if IN % TILE_IN == 0 else rows.is_row & (col < IN)
        loaded = tl.load(rows.ptr + col, mask=mask, other=0.0)
        chunks += (loaded,)  # type: ignore[assignment]
    return chunks


@triton.jit
def _load_expert(
    first,  # the first of a pair's rows, of expert 0
    second, stride_expert, ids_ptr, weights_ptr, index,
    CHUNKS: tl.constexpr, IN: tl.constexpr, TILE_IN: tl.constexpr,
):  # fmt: skip
    """Return a token's weight of an expert and the chunks of two of its rows, zeros if it is 0."""
    expert = tl.load(ids_ptr + index).to(tl.int64)
    weight = tl.load(weights_ptr + index)
    is_read = (expert >= 0) & (weight != 0.0)
    place = tl.maximum(expert, 0) * stride_expert
    firsts = Rows(first.ptr + place, first.is_row & is_read)
    seconds = Rows(second.ptr + place, second.is_row & is_read)
    return (
        tl.where(is_read, weight, 0.0),
        _load_chunks(firsts, CHUNKS, IN, TILE_IN),
        _load_chunks(seconds, CHUNKS, IN, TILE_IN),
    )


@triton.jit
def _product(weights, xs, CHUNKS: tl.constexpr):
    total = weights[0].to(tl.float32) * xs[0].to(tl.float32)
    for chunk in tl.static_range(1, CHUNKS):
        total += weights[chunk].to(tl.float32) * xs[chunk].to(tl.float32)
    return total


@triton.jit(do_not_specialize=["num_out"])
def _add_experts_kernel(
    out_ptr,  # [num_out]; may be the residual
    residual_ptr,  # [num_out], or None
    x_ptr, stride_x_row,  # [CHOSEN, IN], unit last stride
    weight_ptr, stride_weight_expert, stride_weight_row,  # [num_experts, num_out, IN]
    ids_ptr,  # [CHOSEN] int32, -1 = none
    weights_ptr,  # [CHOSEN] float32
    num_out,
    CHOSEN: tl.constexpr, IN: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_IN: tl.constexpr,
    AHEAD: tl.constexpr,  # experts, at most CHOSEN
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (cdiv(num_out, 2 * TILE_ROWS),): TILE_ROWS pairs of results, one per warp.

    The kernel before this one has waited for the router before it let this one start: ids and
    weights may be read at once.
    """
    CHUNKS: tl.constexpr = (IN + TILE_IN - 1) // TILE_IN
    let_next_start(OVERLAP)
    pair = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    col = 2 * pair
    is_first, is_second = col < num_out, col + 1 < num_out
    first = Rows(weight_ptr + col * stride_weight_row, is_first)
    second = Rows(weight_ptr + (col + 1) * stride_weight_row, is_second)
    experts = ()
    for index in tl.static_range(AHEAD):
        loaded = _load_expert(
            first, second, stride_weight_expert, ids_ptr, weights_ptr, index, CHUNKS, IN, TILE_IN
        )
        experts += (loaded,)  # type: ignore[assignment]
    wait_for_previous(OVERLAP)

    if residual_ptr is not None:
        first_residual = tl.load(residual_ptr + col, mask=is_first, other=0.0)
        second_residual = tl.load(residual_ptr + col + 1, mask=is_second, other=0.0)
    every = tl.zeros([TILE_ROWS, 1], tl.int32)
    first_y = tl.zeros([TILE_ROWS, TILE_IN], tl.float32)
    second_y = tl.zeros([TILE_ROWS, TILE_IN], tl.float32)
    for index in tl.static_range(CHOSEN):
        if index + AHEAD < CHOSEN:
            loaded = _load_expert(
                first, second, stride_weight_expert, ids_ptr, weights_ptr, index + AHEAD,
                CHUNKS, IN, TILE_IN,
            )  # fmt: skip
            experts += (loaded,)  # type: ignore[assignment]
        weight, firsts, seconds = experts[index]  # type: ignore[var-annotated]
        xs = _load_chunks(
            Rows(x_ptr + index * stride_x_row + every, (every == 0) & (weight != 0.0)),
            CHUNKS, IN, TILE_IN,
        )  # fmt: skip
        first_y = tl.fma(_product(firsts, xs, CHUNKS), weight, first_y)
        second_y = tl.fma(_product(seconds, xs, CHUNKS), weight, second_y)
    y = tl.sum(first_y, axis=1, keep_dims=True)
    second_y = tl.sum(second_y, axis=1, keep_dims=True)
    if residual_ptr is not None:
        y += first_residual.to(tl.float32)
        second_y += second_residual.to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + col, y.to(dtype), mask=is_first)
    tl.store(out_ptr + col + 1, second_y.to(dtype), mask=is_second)


def choose_sum(x: torch.Tensor, num_chosen: int, num_out: int) -> SumConfig | None:
    """Return the configuration of one token; None = its products are launches of their own."""
    if INTERPRET:
        return SumConfig.for_interpreter(x.shape[1], num_out)
    return SumConfig.default_for(x.shape[1], num_chosen, x.dtype)


def add_experts(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    normed_out: torch.Tensor | None = None,
    deterministic: bool = False,
    leaves: int | None = None,
    num_shared: int = 0,
) -> torch.Tensor:
    """Return the weighted sum of each token's products, plus the residual if there is one.

    Args:
        x: [tokens * chosen, in], as ``expert_linear`` takes it: a row for each pair.
        weight: as ``expert_linear`` takes it, without an activation. Read before earlier launches
            have ended, as are ``topk_ids`` and ``topk_weights``: none that may still run when the
            launch before this one ends its wait may write them, as ``expert_linear``'s does not.
        topk_ids: [tokens, chosen] int32, contiguous, as ``expert_linear`` takes them.
        topk_weights: [tokens, chosen] float32, contiguous; where it is 0, no product is read.
        bias: [experts, n], x's dtype: added to each product. With leaves the first one has it.
        residual: [tokens, n], x's dtype, unit last stride.
        out: [tokens, n], x's dtype or float32, unit last stride, *written* and returned; may be
            ``residual``. Allocated if omitted.
        norm_weight: [n], x's dtype, contiguous: the norm's; only with ``normed_out``.
        eps: added to the mean square in the norm.
        normed_out: [tokens, n], x's dtype, unit last stride, *written* with the RMS norm of each
            row of ``out``.
        deterministic: as ``expert_linear`` takes it.
        leaves: as ``expert_linear`` takes them.
        num_shared: as ``expert_linear`` takes it.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: as ``expert_linear``, then ``combine_experts``; but of one token, unless
        deterministic, products are not rounded before they are added. Tier B.
    Stream: current stream, no synchronisation, CUDA-graph safe; the host knows no counts.
    """
    check_tensor("x", x, dtype=FLOAT_DTYPES)
    num_pairs, num_out = check_added_experts(
        x, weight, topk_ids, topk_weights, bias,
        deterministic=deterministic, leaves=leaves, num_shared=num_shared,
    )  # fmt: skip
    if leaves is None:  # else the sum has another dtype
        check_sum(topk_weights, num_out, x.dtype, x.device, residual, out, norm_weight, normed_out)
    config = None
    is_alone = topk_ids.shape[0] == 1 and not deterministic
    if is_alone and bias is None and norm_weight is None:
        config = choose_sum(x, num_pairs, num_out)
    if config is not None and isinstance(weight, torch.Tensor):
        check_launchable("x", x)
        if out is None:
            out = x.new_empty(1, num_out)
        _add_experts_kernel[(cdiv(num_out, 2 * config.tile_rows),)](
            out, residual, *with_strides(x, 1), weight, weight.stride(0), weight.stride(1),
            topk_ids, topk_weights, num_out,
            CHOSEN=num_pairs, IN=x.shape[1], TILE_ROWS=config.tile_rows, TILE_IN=config.tile_in,
            AHEAD=config.experts_ahead, num_warps=config.num_warps, **overlap_options(x.device),
        )  # fmt: skip
        return out
    products = expert_linear(
        x, weight, topk_ids,
        bias=bias, deterministic=deterministic, leaves=leaves, num_shared=num_shared,
    )  # fmt: skip
    return combine_experts(
        products, topk_weights, residual=residual, out=out, norm_weight=norm_weight, eps=eps,
        normed_out=normed_out,
    )  # fmt: skip
