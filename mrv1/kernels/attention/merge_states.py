"""Merge two partial attention results over disjoint sets of keys, by their log-sum-exp.

    w   = exp(lse_low - lse_high)                      high: the part with the larger log-sum-exp
    out = (out_high + w * out_low) / (1 + w)
    lse = lse_high + log(1 + w)

The larger part has the weight 1 exactly, so the order of the two arguments changes no bit. A part
that saw no key (log-sum-exp -inf) is not read: the other part comes out as it is.

Source: FlashInfer (arXiv:2501.01005) for attention states and their merge.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.checks import FLOAT_DTYPES, check_launchable
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.attention.contracts import check_merge_states
from mrv1.kernels.attention.online_softmax import LN_2, LOG2_E


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeStatesConfig:
    """Launch choices of one merge."""

    tile_rows: int  # (row, head) vectors per program
    num_warps: int

    @classmethod
    def default_for(cls, head_dim: int, dtype: torch.dtype) -> MergeStatesConfig:
        """Return the configuration for a head dimension and dtype."""
        if INTERPRET:  # interpreting costs time per program and operation, hardly per element
            return cls(tile_rows=1024, num_warps=1)
        # 4 KiB of each part per program: every thread of 4 warps loads two times 16 bytes.
        row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
        return cls(tile_rows=max(1, 4096 // row_bytes), num_warps=4)


@triton.jit(do_not_specialize=["num_vectors"])
def _merge_states_kernel(
    out_ptr, stride_out_row, stride_out_head,  # [num_rows, num_heads, HEAD_DIM]; may be a part
    lse_ptr, stride_lse_row, stride_lse_head,  # [num_rows, num_heads] fp32, may be a part's; None
    out_a_ptr, stride_a_row, stride_a_head,  # [num_rows, num_heads, HEAD_DIM]
    lse_a_ptr, stride_lse_a_row, stride_lse_a_head,  # [num_rows, num_heads] fp32; -inf = no key
    out_b_ptr, stride_b_row, stride_b_head,
    lse_b_ptr, stride_lse_b_row, stride_lse_b_head,
    num_vectors, num_heads,  # num_rows * num_heads
    HEAD_DIM: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_DIM: tl.constexpr,  # power of two >= HEAD_DIM
):  # fmt: skip
    """Grid (cdiv(num_vectors, TILE_ROWS),): one program merges TILE_ROWS (row, head) vectors."""
    vector = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    in_range = vector < num_vectors
    row, head = vector // num_heads, vector % num_heads
    lse_a_offset = row * stride_lse_a_row + head * stride_lse_a_head
    lse_b_offset = row * stride_lse_b_row + head * stride_lse_b_head
    lse_a = tl.load(lse_a_ptr + lse_a_offset, mask=in_range, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + lse_b_offset, mask=in_range, other=float("-inf"))

    dims = tl.arange(0, TILE_DIM)
    mask = in_range[:, None] & (dims < HEAD_DIM)[None, :]
    # A part that saw no key is not read, as it may hold anything; two such parts give zeros.
    in_a = mask & (lse_a != float("-inf"))[:, None]
    in_b = mask & (lse_b != float("-inf"))[:, None]
    a_offset = row * stride_a_row + head * stride_a_head
    b_offset = row * stride_b_row + head * stride_b_head
    a = tl.load(out_a_ptr + a_offset[:, None] + dims[None, :], mask=in_a, other=0.0)
    b = tl.load(out_b_ptr + b_offset[:, None] + dims[None, :], mask=in_b, other=0.0)
    dtype = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)

    b_is_high = lse_b > lse_a
    high, low = tl.where(b_is_high[:, None], b, a), tl.where(b_is_high[:, None], a, b)
    lse_high, lse_low = tl.where(b_is_high, lse_b, lse_a), tl.where(b_is_high, lse_a, lse_b)
    alone = lse_low == float("-inf")
    weight = tl.exp2((lse_low - lse_high) * LOG2_E)
    weight = tl.where(alone, 0.0, weight)  # -inf - -inf is NaN
    mixed = (high + weight[:, None] * low) / (1.0 + weight)[:, None]
    merged = tl.where(alone[:, None], high, mixed)  # -0.0 + 0.0 loses the sign
    lse = lse_high + tl.log2(1.0 + weight) * LN_2

    # In place, a thread may load an element that another thread stores: all threads load first.
    tl.debug_barrier()
    out_offset = row * stride_out_row + head * stride_out_head
    tl.store(out_ptr + out_offset[:, None] + dims[None, :], merged.to(dtype), mask=mask)
    if lse_ptr is not None:
        lse_offset = row * stride_lse_row + head * stride_lse_head
        tl.store(lse_ptr + lse_offset, lse, mask=in_range)


def merge_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention over the union of two disjoint sets of keys, from attention over each.

    Args:
        out_a: ``[rows, q_heads, head_dim]`` fp16, bf16 or fp32, head_dim 1 to 256: attention over
            the first set; any row and head stride, unit last stride.
        lse_a: ``[rows, q_heads]`` fp32, any strides: its natural log-sum-exp; -inf = this part saw
            no key, and its row of ``out_a`` is not read.
        out_b: shape and dtype of ``out_a``: attention over the second set, strides of its own.
        lse_b: like ``lse_a``.
        out: shape and dtype of ``out_a``, *written*; may be ``out_a`` or ``out_b`` itself, and
            must not overlap them otherwise. None = a new tensor.
        lse: like ``lse_a``, *written* if given: the log-sum-exp of the union; may alias ``lse_a``
            or ``lse_b`` as ``out`` does its parts.

    Returns:
        ``out``: zero, and ``lse`` -inf, where neither part saw a key.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: fp32 inside, rounded once. Commutative bit for bit, associative up to rounding. Tier
        B.
    Stream: one launch on the current stream, no synchronisation, CUDA-graph safe.
    """
    check_merge_states(out_a, lse_a, out_b, lse_b, FLOAT_DTYPES, out=out, lse=lse)
    check_launchable("out_a", out_a)
    if out is None:
        out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    num_rows, num_heads, head_dim = out_a.shape
    num_vectors = num_rows * num_heads
    if num_vectors == 0:
        return out
    config = MergeStatesConfig.default_for(head_dim, out_a.dtype)
    _merge_states_kernel[(triton.cdiv(num_vectors, config.tile_rows),)](
        *with_strides(out), *with_strides(lse),
        *with_strides(out_a), *with_strides(lse_a), *with_strides(out_b), *with_strides(lse_b),
        num_vectors, num_heads, HEAD_DIM=head_dim, TILE_ROWS=config.tile_rows,
        TILE_DIM=triton.next_power_of_2(head_dim), num_warps=config.num_warps,
    )  # fmt: skip
    return out
