"""Device functions shared by the attention kernels: visible keys and the online softmax.

The keys that some query of a tile may see are ``[0, sink_end)`` and ``[start, end)``. A *work
index* ``i`` in ``[0, sink_end + end - start)`` counts these keys without the gap, so that a
streaming head's work, and the pages it reads, stay bounded however long the context is::

    position(i) = i                          if i < sink_end
                  i - sink_end + start       otherwise

The softmax runs in base 2 (``exp2`` is one instruction): scores have the factor
``softmax_scale * log2(e)``. A logit sink is a score that every row of its query head has, without
a key: only the first program of a row starts its softmax from it (``first_state``), so merged
partial results count it once.

Source: Milakov and Gimelshein (arXiv:1805.02867), FlashAttention (arXiv:2205.14135).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.cache.kv_layout import KVLayout
from mrv1.kernels.cache.kv_scales import KVScales
from mrv1.kernels.cache.scale_arguments import codec_constexprs

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
SMALLEST_UNIT = tl.constexpr(1e-30)
"""First value of the running unit of the V scales: below every scale, with a finite inverse."""


class Cache(NamedTuple):
    """Constants of the cache."""

    BLOCK_SIZE: int
    HAS_WINDOW: bool
    VISITS_MASKED: bool  # whether pages of keys that windows hide are read and masked
    HAS_RING: bool
    CODEC: str | None  # None = no codes, see codes.py
    SCALES_PER_BLOCK: int  # per head; 0 = one scale for all blocks


class HeadRows(NamedTuple):
    """A tensor ``[rows, q_heads, ...]`` with the strides that locate a (row, head) in it."""

    ptr: tl.tensor | None  # unit stride within a head
    stride_row: tl.tensor
    stride_head: tl.tensor


class Softmax(NamedTuple):
    """How scores become weights."""

    scale: tl.tensor  # float32, of the scores
    soft_cap: tl.tensor | None  # float32; None = no cap
    sinks_ptr: tl.tensor | None  # [q_heads], a logit each; None = no head has a logit sink


class States(NamedTuple):
    """Partial results (states) of programs that divide the keys of a segment or tile."""

    ptr: tl.tensor | None  # float32, contiguous, HEAD_DIM per state; None = no keys are divided
    lse_ptr: tl.tensor | None  # float32, one per state; -inf = no key seen
    arrivals_ptr: tl.tensor | None  # int32, partial results stored so far; 0 between launches


def dot_precision(dtype: torch.dtype) -> Literal["ieee", "tf32"]:
    """Return ``tl.dot``'s input precision: fp32 inputs keep all their bits."""
    return "ieee" if dtype == torch.float32 else "tf32"


def attention_constexprs(
    q: torch.Tensor, layout: KVLayout, scales: KVScales | None
) -> dict[str, object]:
    """Return the constexprs of heads, pages and products, which decode and prefill share."""
    return {
        "GROUP": q.shape[1] // layout.num_kv_heads,
        "HEAD_DIM": layout.head_dim,
        "BLOCK_SIZE": layout.block_size,
        "HAS_WINDOW": layout.has_window,
        "VISITS_MASKED": layout.has_window and layout.visits_masked,
        "HAS_RING": layout.has_ring,
        "PRECISION": dot_precision(q.dtype),
        **codec_constexprs(scales, layout, q.device),
    }


@triton.jit
def visible_range(first_position, end, window, sink, HAS_WINDOW: tl.constexpr):
    """Return (sink_end, start, num_visible) for queries at positions [first_position, end)."""
    sink_end = 0
    start = 0
    if HAS_WINDOW:
        sink_end = tl.where(window >= 0, tl.minimum(sink, end), 0)
        begin = tl.maximum(first_position - window + 1, sink_end)
        start = tl.where(window >= 0, tl.minimum(begin, end), 0)
    return sink_end, start, sink_end + end - start


@triton.jit
def work_position(work, sink_end, start, HAS_WINDOW: tl.constexpr):
    """Return the positions of work indices."""
    position = work
    if HAS_WINDOW:
        position = tl.where(work < sink_end, work, work - sink_end + start)
    return position


@triton.jit
def head_offset(rows, row, head):
    """Return the offsets of (row, head) pairs in ``HeadRows``, in elements."""
    return row * rows.stride_row + head * rows.stride_head


@triton.jit
def store_out(out, row, head, dims, value, mask):
    """Store the results of (row, query head) pairs."""
    target = out.ptr + head_offset(out, row, head)[:, None] + dims[None, :]
    tl.store(target, value.to(out.ptr.dtype.element_ty), mask=mask)


@triton.jit
def soft_capped(scores, soft_cap):
    """Return soft_cap * tanh(score / soft_cap) in base 2; scores have a factor of 2 / soft_cap.

    tanh(x) = (1 - e) / (1 + e) with e = exp(-2 |x|), negated below 0. The sign comes last: a
    product there would be fused with the subtraction of the maximum, see prefill attention.
    """
    small = tl.exp2(-tl.abs(scores))
    size = soft_cap * LOG2_E * ((1.0 - small) / (1.0 + small))
    return tl.where(scores < 0.0, -size, size)


@triton.jit
def load_logit_sink(sinks_ptr, q_head, mask):
    """Return the logit sink of each row in base 2, -inf outside the mask; None without sinks."""
    logit_sink = None
    if sinks_ptr is not None:
        logit_sink = tl.load(sinks_ptr + q_head, mask=mask, other=float("-inf"))
        logit_sink = logit_sink.to(tl.float32) * LOG2_E
    return logit_sink


@triton.jit
def first_state(logit_sink, ROWS: tl.constexpr):
    """Return (top, total) of rows before their first key, see ``load_logit_sink``."""
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    if logit_sink is not None:
        total = tl.where(logit_sink == top, 0.0, 1.0)  # 1 for NaN, which must stay NaN
        top = logit_sink
    return top, total


@triton.jit
def arrives_last(arrivals_ptr, programs):
    """Count this program in; the last of ``programs`` resets the count and gets True.

    The atomic add releases this program's partial result, stored before the barrier, and acquires
    those of the programs that arrived earlier.
    """
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu")
    is_last = arrived == programs - 1
    if is_last:
        tl.store(arrivals_ptr, 0)
    return is_last


@triton.jit
def add_states(acc, top, total, part, lse):
    """Return (acc, top, total) with a partial result added to each row by its base-2 lse."""
    new_top = tl.maximum(top, lse)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf is NaN
    weight = tl.exp2(lse - shift)
    rescale = tl.exp2(top - shift)
    acc = acc * rescale[:, None] + weight[:, None] * part
    return acc, new_top, total * rescale + weight


@triton.jit
def halves(weights, DTYPE: tl.constexpr):
    """Return float32 weights as a sum of two: rounded to the dtype, and the rounded rest."""
    rounded = weights.to(DTYPE)
    return rounded, (weights - rounded.to(tl.float32)).to(DTYPE)


@triton.jit
def base_2_lse(top, total):
    """Return the base-2 log-sum-exp of a base-2 (top, total); -inf where nothing was visible."""
    seen = total != 0.0  # true for NaN, which must stay NaN
    return tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))


@triton.jit
def fold_state(folded, folded_top, folded_total, part, lse, AXIS: tl.constexpr):
    """Return (folded, top, total) with a partial result added by its base-2 lse.

    A deterministic result is the fold of its pieces in order, whichever programs compute them.
    Each rounding is spelled out, as the compiler may fuse a sum of products in two ways. The fold
    of one piece is the piece. AXIS is the axis that ``lse`` lacks.
    """
    new_top = tl.maximum(folded_top, lse)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf is NaN
    weight = tl.exp2(lse - shift)
    rescale = tl.exp2(folded_top - shift)
    folded *= tl.expand_dims(rescale, AXIS)
    folded = tl.fma(part, tl.expand_dims(weight, AXIS), folded)
    return folded, new_top, tl.fma(folded_total, rescale, weight)


@triton.jit
def fold_piece(folded, folded_top, folded_total, acc, top, total, AXIS: tl.constexpr):
    """Return (folded, top, total) with a piece (acc, top, total) of an online softmax added."""
    part = acc / tl.expand_dims(tl.where(total == 0.0, 1.0, total), AXIS)
    lse = base_2_lse(top, total)
    return fold_state(folded, folded_top, folded_total, part, lse, AXIS)


@triton.jit
def next_piece(cut, size):
    """Return where the piece after the one from ``cut`` on begins, and its size; see ``plan``."""
    cut += size
    return cut, tl.where(cut >= 16 * size, 2 * size, size)


@triton.jit
def natural_lse(top, total):
    """Return the natural log-sum-exp, as ``base_2_lse``."""
    seen = total != 0.0  # true for NaN, which must stay NaN
    return tl.where(seen, (top + tl.log2(tl.where(seen, total, 1.0))) * LN_2, float("-inf"))


@triton.jit
def normalized(acc, total):
    """Return acc / total by row, zeros where nothing was visible."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]
