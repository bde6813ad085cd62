"""Sort the pairs of a token and an expert by expert, for products of many tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import INTERPRET, tl, triton

SCANNED = 4096
"""Most pairs that a program looks at together."""


class SortedPairs(NamedTuple):
    """Pairs, by index into the flattened ids, in the order of their experts."""

    order: torch.Tensor
    """[pairs] int32; pairs without an expert are left out, the rest of the list is undefined."""
    starts: torch.Tensor
    """[experts + 1] int32: an expert's pairs are ``order[starts[e] : starts[e + 1]]``."""


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_pairs_kernel(
    order_ptr,  # [num_pairs] int32
    starts_ptr,  # [num_experts + 1] int32
    ids_ptr,  # [num_pairs] int32, -1 = no expert
    num_pairs,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,  # see dependent_launch
):
    """Grid (num_experts + 1,): one expert's pairs, in their order; the last finds only the end."""
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    expert = tl.program_id(0)
    lane = tl.arange(0, TILE)
    before = tl.zeros([TILE], tl.int32)
    own = tl.zeros([TILE], tl.int32)
    for first in tl.range(0, num_pairs, TILE, loop_unroll_factor=2):  # loads of two tiles
        ids = tl.load(ids_ptr + first + lane, mask=first + lane < num_pairs, other=-1)
        before += ((ids >= 0) & (ids < expert)).to(tl.int32)
        own += (ids == expert).to(tl.int32)
    start = tl.sum(before, axis=0)
    tl.store(starts_ptr + expert, start)
    if tl.sum(own, axis=0) > 0:
        ids = tl.load(ids_ptr + lane, mask=lane < num_pairs, other=-1)
        for first in range(0, num_pairs, TILE):
            pair = first + lane
            is_own = (ids == expert).to(tl.int32)
            ids = tl.load(ids_ptr + pair + TILE, mask=pair + TILE < num_pairs, other=-1)
            place = start + tl.cumsum(is_own, axis=0) - 1
            tl.store(order_ptr + place, pair, mask=is_own != 0)
            start += tl.sum(is_own, axis=0)


def sort_pairs(topk_ids: torch.Tensor, num_experts: int) -> SortedPairs:
    """Return the pairs of ``topk_ids`` (contiguous int32, -1 = none), sorted by expert."""
    num_pairs = topk_ids.numel()
    order = topk_ids.new_empty(num_pairs)
    starts = topk_ids.new_empty(num_experts + 1)
    tile = min(SCANNED, triton.next_power_of_2(num_pairs)) if INTERPRET else SCANNED
    _sort_pairs_kernel[(num_experts + 1,)](
        *(order, starts, topk_ids, num_pairs),
        TILE=tile,
        num_warps=8,
        **overlap_options(topk_ids.device),
    )
    return SortedPairs(order, starts)
