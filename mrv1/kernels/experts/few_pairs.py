"""Device functions that look through a step's few pairs for those of a program's expert."""

from __future__ import annotations

from mrv1.kernels._base.triton import tl, triton

_LAST = tl.constexpr(2**31 - 1)


@triton.jit
def own_pairs(
    ids_ptr,  # [num_pairs] int32, -1 = no expert
    num_pairs,
    BY_PAIR: tl.constexpr,  # programs are of pairs, the first pair of an expert has all
    LANES: tl.constexpr,  # power of two >= num_pairs
):
    """Return a program's expert, which of the LANES pairs are its own, and their number."""
    lane = tl.arange(0, LANES)
    ids = tl.load(ids_ptr + lane, mask=lane < num_pairs, other=-1)
    index = tl.program_id(0)
    expert = index
    if BY_PAIR:
        expert = tl.max(tl.where(lane == index, ids, -1), axis=0)
    is_own = ((ids == expert) & (expert >= 0)).to(tl.int32)
    count = tl.sum(is_own, axis=0)
    if BY_PAIR:  # an earlier pair of the same expert has its own programs
        before = tl.min(tl.where(is_own != 0, lane, _LAST), axis=0)
        count = tl.where(before == index, count, 0)
    return expert, is_own, count


@triton.jit
def pair_at(is_own, place, TILE: tl.constexpr):
    """Return [TILE] indices of the own pairs that are ``place`` to ``place + TILE - 1``; -1."""
    lane = tl.arange(0, is_own.shape[0])
    rank = tl.cumsum(is_own, axis=0) - 1 - place
    wanted = tl.arange(0, TILE)
    hit = (rank[None, :] == wanted[:, None]) & (is_own[None, :] != 0)
    return tl.max(tl.where(hit, lane[None, :], -1), axis=1)
