"""Merge the partial results of the programs that divide the keys of prefill's tiles.

    out = sum_s exp(lse_s - top) out_s / sum_s exp(lse_s - top)        top = max_s lse_s

A launch of its own, which many programs share: the partial results of a tile are up to 1 MiB, for
which the last program to finish takes longer alone than all programs take for the keys.

Source: Flash-Decoding and FlashAttention-3, whose combine kernel is a launch after the attention.
"""

from __future__ import annotations

from typing import NamedTuple

from mrv1.kernels._base.arithmetic import cdiv, next_power_of_2
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.launches import launch_kernel
from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.attention.online_softmax import LOG2_E, natural_lse, normalized
from mrv1.kernels.attention.prefill.call import PrefillCall
from mrv1.kernels.attention.prefill.choice import MAX_SPLITS, PrefillSplits

MERGED_VECTORS = 4
"""(token, query head) vectors of a program, one a warp."""


class Parts(NamedTuple):
    """The partial results of a program's vectors."""

    states_ptr: tl.tensor  # [num_splits, vectors, HEAD_DIM] fp32
    lse_ptr: tl.tensor  # [num_splits, vectors] fp32; -inf = no key seen
    num_splits: tl.tensor
    num_vectors: tl.tensor  # int64
    count: tl.tensor  # [TILE_VECTORS] int32: partial results that there are


@triton.jit
def _add_parts(
    acc, top, total, parts, vector, in_range, first,
    HEAD_DIM: tl.constexpr, TILE_DIM: tl.constexpr, TILE_SPLITS: tl.constexpr,
):  # fmt: skip
    """Return (acc, top, total) with the partial results ``first`` to ``first + TILE_SPLITS``.

    No load waits for another one: partial results that there are not are loaded too, not used.
    """
    dims = tl.arange(0, TILE_DIM)
    mask = in_range[:, None] & (dims < HEAD_DIM)[None, :]
    lses, values = (), ()
    for index in tl.static_range(TILE_SPLITS):
        split = first + index
        state = split * parts.num_vectors + vector
        is_state = in_range & (split < parts.num_splits)
        lse = tl.load(parts.lse_ptr + state, mask=is_state, other=float("-inf"))
        value_ptr = parts.states_ptr + state[:, None] * HEAD_DIM + dims[None, :]
        value = tl.load(value_ptr, mask=mask & (split < parts.num_splits), other=0.0)
        lses = lses + (lse * LOG2_E,)  # type: ignore[assignment]  # noqa: RUF005 - no stars in Triton
        values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005
    new_top = top
    for index in tl.static_range(TILE_SPLITS):
        is_part = first + index < parts.count
        new_top = tl.maximum(new_top, tl.where(is_part, lses[index], float("-inf")))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf is NaN
    rescale = tl.exp2(top - shift)
    acc *= rescale[:, None]
    total *= rescale
    for index in tl.static_range(TILE_SPLITS):
        is_part = first + index < parts.count
        weight = tl.where(is_part, tl.exp2(lses[index] - shift), 0.0)
        acc += weight[:, None] * tl.where(is_part[:, None], values[index], 0.0)  # may be NaN
        total += weight
    return acc, new_top, total


@triton.jit(do_not_specialize=["num_splits", "num_tokens", "num_reqs"])
def _merge_splits_kernel(
    out_ptr, stride_out_token, stride_out_head,  # [num_tokens, q_heads, HEAD_DIM]
    lse_ptr, stride_lse_token, stride_lse_head,  # [num_tokens, q_heads] fp32, or None
    states_ptr,  # [num_splits, num_tokens, q_heads, HEAD_DIM] fp32
    states_lse_ptr,  # [num_splits, num_tokens, q_heads] fp32; -inf = no key seen
    counts_ptr,  # [num_tokens, kv_heads] int32: partial results; 1 = written already
    num_splits,
    query_start_loc_ptr,  # [num_reqs + 1] int32
    num_tokens, num_reqs,
    NUM_Q_HEADS: tl.constexpr, GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    TILE_VECTORS: tl.constexpr, TILE_DIM: tl.constexpr,
    TILE_SPLITS: tl.constexpr,  # partial results that are in registers at a time
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (cdiv(num_tokens * q_heads, TILE_VECTORS),): a program merges TILE_VECTORS vectors."""
    vector = tl.program_id(0).to(tl.int64) * TILE_VECTORS + tl.arange(0, TILE_VECTORS)
    token, q_head = vector // NUM_Q_HEADS, vector % NUM_Q_HEADS
    in_range = token < num_tokens
    dims = tl.arange(0, TILE_DIM)
    mask = in_range[:, None] & (dims < HEAD_DIM)[None, :]
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    end = tl.load(query_start_loc_ptr + num_reqs)
    count_ptr = counts_ptr + token * (NUM_Q_HEADS // GROUP) + q_head // GROUP
    count = tl.load(count_ptr, mask=in_range, other=0)
    num_vectors = num_tokens.to(tl.int64) * NUM_Q_HEADS
    parts = Parts(states_ptr, states_lse_ptr, num_splits, num_vectors, count)
    top = tl.full([TILE_VECTORS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_VECTORS], tl.float32)
    acc = tl.zeros([TILE_VECTORS, TILE_DIM], tl.float32)
    acc, top, total = _add_parts(
        acc, top, total, parts, vector, in_range, 0, HEAD_DIM, TILE_DIM, TILE_SPLITS
    )
    most = tl.max(tl.where(token < end, count, 0), axis=0)  # of padding it may be any number
    for first in range(TILE_SPLITS, tl.minimum(most, num_splits), TILE_SPLITS):
        acc, top, total = _add_parts(
            acc, top, total, parts, vector, in_range, first, HEAD_DIM, TILE_DIM, TILE_SPLITS
        )
    is_merged = (count > 1) & (token < end)
    out = out_ptr + (token * stride_out_token + q_head * stride_out_head)[:, None] + dims[None, :]
    value = normalized(acc, total).to(out_ptr.dtype.element_ty)
    tl.store(out, value, mask=mask & is_merged[:, None])
    if lse_ptr is not None:
        target = lse_ptr + token * stride_lse_token + q_head * stride_lse_head
        tl.store(target, natural_lse(top, total), mask=is_merged)


def merge_splits(call: PrefillCall, splits: PrefillSplits) -> None:
    """Launch the merge of the queries that have several partial results."""
    num_tokens, num_q_heads, head_dim = call.q.shape
    launch_kernel(
        _merge_splits_kernel, (cdiv(num_tokens * num_q_heads, MERGED_VECTORS),),
        *call.outputs(), splits.states, splits.states_lse, splits.counts, splits.num_splits,
        call.query_start_loc, num_tokens, call.seq_lens.shape[0],
        NUM_Q_HEADS=num_q_heads, GROUP=call.group, HEAD_DIM=head_dim,
        TILE_VECTORS=MERGED_VECTORS, TILE_DIM=next_power_of_2(head_dim),
        TILE_SPLITS=min(next_power_of_2(splits.num_splits), MAX_SPLITS), num_warps=4,
        **overlap_options(call.q.device),
    )  # fmt: skip
