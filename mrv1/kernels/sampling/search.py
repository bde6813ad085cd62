"""Find the value above which a row's tokens are kept: a search over values, without a sort.

Every filter keeps the tokens above some value, its *floor*: ``kept = {x > floor}``. Let
``enough(v)`` = "at least k tokens are above v" (top-k), or "the tokens above v have at least the
target mass" (top-p). A floor is the largest v with enough(v), or a lower value with the same
tokens above it. A search keeps a bracket, enough(low) and not enough(high), and ends when all its
tokens have one value.
"""

from __future__ import annotations

from typing import NamedTuple

from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.sampling.groups import shard_ptr

_VALUE_STEPS = tl.constexpr(16)
"""Halvings of the bracket by value; then by the order of floats (keys), which ends within 32."""
_VALUE_PASSES = tl.constexpr(4)
"""Passes over the row that divide the bracket by value; later passes divide it by key."""


class Row(NamedTuple):
    """A row to draw from; the pointers point to its first elements.

    With shards, ``logits_ptr`` is a tuple of all ranks' pointers to their first row.
    """

    logits_ptr: tl.tensor
    group_max_ptr: tl.tensor
    group_sum_ptr: tl.tensor
    scratch_ptr: tl.tensor  # or None: no row has a filter
    top: tl.tensor  # the largest logit
    temperature: tl.tensor
    vocab_size: tl.tensor
    num_groups: tl.tensor
    shard_size: tl.tensor  # or None: the logits are of the whole vocabulary
    shard_start: tl.tensor  # of the row in a shard; or None


class Tiles(NamedTuple):
    """See ``SampleTokensConfig``. Build it in a call: assigned to a name, it becomes tensors."""

    GROUP: tl.constexpr
    TILE_GROUPS: tl.constexpr
    FEW_GROUPS: tl.constexpr
    LANES: tl.constexpr
    COLUMNS: tl.constexpr
    DEPTH: tl.constexpr
    PIVOTS: tl.constexpr
    LISTED: tl.constexpr
    NUM_STAGES: tl.constexpr


@triton.jit
def logit_ptrs(row, token, of_group):
    """Return where the logits of tokens are.

    ``of_group``: any token of each token's group, all in one shard, in a shape that broadcasts.
    """
    if row.shard_size is None:
        ptrs = row.logits_ptr + token
    else:
        ptrs = shard_ptr(row.logits_ptr, row.shard_size, of_group) + row.shard_start + token
    return ptrs


@triton.jit
def key_of(x):
    """Return int32 keys in the order of float32: neighbours differ by 1, both zeros are 0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def value_of(key):
    """Return the float32 of a key."""
    magnitude = tl.abs(key).to(tl.float32, bitcast=True)
    return tl.where(key < 0, -magnitude, magnitude)


@triton.jit
def before(x):
    """Return the largest float32 less than ``x``."""
    return value_of(key_of(x) - 1)


@triton.jit
def gap(low, high):
    """Return the number of float32 steps from ``low`` to ``high``, int64."""
    return key_of(high).to(tl.int64) - key_of(low).to(tl.int64)


@triton.jit
def middle(low, high, least, step):
    """Return a value strictly between two that are no neighbours; ``least`` replaces -inf."""
    by_value = 0.5 * tl.maximum(low, least) + 0.5 * high
    by_key = value_of(((key_of(low).to(tl.int64) + key_of(high)) >> 1).to(tl.int32))
    return tl.where((step < _VALUE_STEPS) & (by_value > low) & (by_value < high), by_value, by_key)


@triton.jit
def search_list(list_ptr, num_listed, k, top_p, top, scale, LISTED: tl.constexpr):
    """Return the floor of top-k, then top-p, by comparing every pair of the tokens in a list.

    ``list_ptr``: [2, LISTED] float32, all logits above some value, then scratch. k = 0 keeps all.
    """
    STEP: tl.constexpr = 16
    index, part = tl.arange(0, LISTED), tl.arange(0, STEP)
    x = tl.load(list_ptr + index, mask=index < num_listed, other=float("-inf"))
    larger = tl.zeros([STEP, LISTED], tl.int32)
    for first in range(0, num_listed, STEP):
        other = tl.load(
            list_ptr + first + part, mask=first + part < num_listed, other=float("-inf")
        )
        larger += (other[:, None] > x[None, :]).to(tl.int32)
    is_kept = (index < num_listed) & (tl.sum(larger, axis=0) < tl.where(k > 0, k, LISTED))
    if top_p < 1.0:
        weight = tl.where(is_kept, tl.exp2((x - top) * scale), 0.0)
        enough = top_p * tl.sum(weight, axis=0)
        tl.store(list_ptr + LISTED + index, weight)
        tl.debug_barrier()
        mass = tl.zeros([STEP, LISTED], tl.float32)
        for first in range(0, num_listed, STEP):
            other = tl.load(
                list_ptr + first + part, mask=first + part < num_listed, other=float("-inf")
            )
            its_weight = tl.load(list_ptr + LISTED + first + part)
            mass += tl.where(other[:, None] > x[None, :], its_weight[:, None], 0.0)
        is_kept = is_kept & ((tl.sum(mass, axis=0) < enough) | (x == top))
    return before(tl.min(tl.where(is_kept, x, float("inf")), axis=0))


@triton.jit
def search_block(x, low, high, fewest, most):
    """Return a value v with fewest <= num(v) <= most, and num(v), the elements of ``x`` above v.

    num(low) > most and num(high) = 0. If equal elements leave no such v, num(v) is above ``most``.
    """
    least = tl.min(tl.where(x > low, x, float("inf")))
    num_low = tl.sum((x > low).to(tl.int32))
    num_high = tl.full([], 0, tl.int32)
    step = 0
    while (num_high < fewest) & (gap(low, high) > 1):
        value = middle(low, high, least, step)
        num = tl.sum((x > value).to(tl.int32))
        is_low = num > most
        low = tl.where(is_low, value, low)
        num_low = tl.where(is_low, num, num_low)
        high = tl.where(is_low, high, value)
        num_high = tl.where(is_low, num_high, num)
        step += 1
    found = num_high >= fewest
    return tl.where(found, high, low), tl.where(found, num_high, num_low)


@triton.jit
def opaque_zero(x):
    """Return 0 for every number ``x``, unseen by the compiler.

    Loads at ``group | opaque_zero(x)`` compute addresses anew: kept ones spill, even if unused.
    """
    return (x != x).to(tl.int32)


@triton.jit
def list_groups(row, group, at):
    """Write the groups where ``at`` to the front of the scratch, in order, and return how many."""
    index = tl.cumsum(at.to(tl.int32), axis=0) - 1
    tl.debug_barrier()  # no thread reads an earlier list any more
    tl.store(row.scratch_ptr + index, group.to(tl.float32), mask=at)
    tl.debug_barrier()
    return tl.sum(at.to(tl.int32))


@triton.jit
def load_listed(row, index, num_listed):
    """Return the groups at indices of the list, 0 beyond its end."""
    return tl.load(row.scratch_ptr + index, mask=index < num_listed, other=0.0).to(tl.int32)


@triton.jit
def guess_floor(row, k, tiles):
    """Return a value that probably has at least k tokens above it, and few more, or -inf.

    It is the logit of some rank in a sample of groups evenly spread over the row: the k-th token's
    expected rank if tokens were shuffled, plus four standard deviations.
    """
    few = tl.arange(0, tiles.FEW_GROUPS)
    sampled = few * row.num_groups // tiles.FEW_GROUPS
    first = sampled[:, None] * tiles.GROUP
    token = first + tl.arange(0, tiles.GROUP)[None, :]
    x_ptr = logit_ptrs(row, token, first)
    x = tl.load(x_ptr, mask=token < row.vocab_size, other=float("-inf"))
    x = x.to(tl.float32)
    num_finite = tl.sum((x > float("-inf")).to(tl.int32))
    share = tiles.FEW_GROUPS * tiles.GROUP / row.vocab_size.to(tl.float32)
    rank = k.to(tl.float32) * share
    rank = (rank + 4.0 * tl.sqrt(rank) + 2.0).to(tl.int32)
    most = rank + rank // 8
    guess = tl.full([], float("-inf"), tl.float32)
    if most < num_finite:
        guess, _ = search_block(x, guess, tl.max(x), rank, most)
    return guess


@triton.jit
def _load_runs(row, group, run, num_runs, member, tiles):
    """Return the logits of runs of 128 tokens of the groups, -inf beyond the list of runs."""
    RUNS: tl.constexpr = tiles.GROUP // 128
    first = group * tiles.GROUP + run % RUNS * 128
    token = first[:, :, None, None] + member[None, None, :, :]
    is_token = (run < num_runs)[:, :, None, None] & (token < row.vocab_size)
    x_ptr = logit_ptrs(row, token, first[:, :, None, None])
    x = tl.load(x_ptr, mask=is_token, other=float("-inf"))
    return x.to(tl.float32)


@triton.jit
def _collect(row, low, high, tiles):
    """Write the row's logits in (low, high] to columns, and return the heights of the columns.

    The columns are [DEPTH, COLUMNS] float32 in the scratch, after the list of groups, one per
    thread, so that no thread needs the counts of another. A column that is higher than DEPTH lacks
    logits. Each tile of tokens is loaded while the tile before it is written.
    """
    ROWS: tl.constexpr = tiles.COLUMNS // 32
    UNROLL: tl.constexpr = 4 if tiles.TILE_GROUPS >= 64 else 1
    STEP: tl.constexpr = UNROLL * ROWS
    RUNS: tl.constexpr = tiles.GROUP // 128  # runs of 128 tokens in a group
    columns_ptr = row.scratch_ptr + tiles.TILE_GROUPS
    group = tl.arange(0, tiles.TILE_GROUPS) | opaque_zero(high)
    maximum = tl.load(row.group_max_ptr + group, mask=group < row.num_groups, other=float("-inf"))
    num_listed = list_groups(row, group, maximum > low)
    num_runs = num_listed * RUNS

    lane_row, lane = tl.arange(0, ROWS), tl.arange(0, 32)
    run = (tl.arange(0, UNROLL) * ROWS)[:, None] + lane_row[None, :]
    member = (lane * 4)[:, None] + tl.arange(0, 4)[None, :]
    column = lane_row[:, None] * 32 + lane[None, :]
    height = tl.zeros([ROWS, 32], tl.int32)
    group_next = load_listed(row, run // RUNS, num_listed)
    x_next = _load_runs(row, group_next, run, num_runs, member, tiles)
    run += STEP
    group_next = load_listed(row, run // RUNS, num_listed)
    for _ in range(0, num_runs, STEP):
        x = x_next
        x_next = _load_runs(row, group_next, run, num_runs, member, tiles)
        run += STEP
        group_next = load_listed(row, run // RUNS, num_listed)
        inside = (x > low) & (x <= high)
        count = inside.to(tl.int32)
        of_vector = tl.broadcast_to(tl.sum(count, axis=3)[:, :, :, None], (UNROLL, ROWS, 32, 4))
        above = tl.cumsum(of_vector, axis=0) - of_vector + tl.cumsum(count, axis=3) - 1
        place = (height[None, :, :, None] + above) * tiles.COLUMNS + column[None, :, :, None]
        tl.store(columns_ptr + place, x, mask=inside & (place < tiles.COLUMNS * tiles.DEPTH))
        height += tl.sum(tl.sum(count, axis=3), axis=0)
    tl.debug_barrier()
    return tl.reshape(height, [tiles.COLUMNS])


@triton.jit
def _sum_columns(row, heights, highest, low, high, by_mass, scale, tiles):
    """Return number, mass (0 if not ``by_mass``) and least of columns' logits in (low, high]."""
    STEP: tl.constexpr = 8
    depth, column = tl.arange(0, STEP)[:, None], tl.arange(0, tiles.COLUMNS)[None, :]
    columns_ptr = row.scratch_ptr + tiles.TILE_GROUPS
    num = tl.zeros([STEP, tiles.COLUMNS], tl.int32)
    mass = tl.zeros([STEP, tiles.COLUMNS], tl.float32)
    least = tl.full([STEP, tiles.COLUMNS], float("inf"), tl.float32)
    for first in range(0, highest, STEP):
        x = tl.load(
            columns_ptr + (first + depth) * tiles.COLUMNS + column,
            mask=first + depth < heights[None, :],
            other=float("-inf"),
        )
        inside = (x > low) & (x <= high)
        num += inside.to(tl.int32)
        least = tl.minimum(least, tl.where(inside, x, float("inf")))
        if by_mass != 0:
            mass += tl.where(inside, tl.exp2((x - row.top) * scale), 0.0)
    return tl.sum(num), tl.sum(mass), tl.min(least)


@triton.jit
def _search_columns(
    row, heights, low, high, num_high, mass_high, filters, by_mass, target, scale, tiles
):
    """Return the floor within a bracket; all of its logits are in the columns.

    ``num_high`` and ``mass_high`` are of the tokens above ``high``. A negative ``target`` is not
    known yet: the bracket then has all tokens that top-k keeps.
    """
    highest = tl.max(heights)
    num_low, mass_low, least = _sum_columns(
        row, heights, highest, low, high, by_mass, scale, tiles
    )
    num_low += num_high
    target = tl.where(target < 0.0, filters.top_p * mass_low, target)
    step = 0
    while (
        (num_low > num_high + 1) & (gap(low, high) > 1) & ((by_mass != 0) | (num_low > filters.k))
    ):
        value = middle(low, high, least, step)
        num, mass, _ = _sum_columns(row, heights, highest, value, high, by_mass, scale, tiles)
        num, mass = num_high + num, mass_high + mass
        enough = tl.where(by_mass != 0, mass >= target, num >= filters.k)
        low = tl.where(enough, value, low)
        num_low = tl.where(enough, num, num_low)
        high = tl.where(enough, high, value)
        num_high = tl.where(enough, num_high, num)
        mass_high = tl.where(enough, mass_high, mass)
        step += 1
    return low


@triton.jit
def _pick(values, index, at):
    """Return the element of a block at a run-time index."""
    return tl.sum(tl.where(index == at, values, tl.zeros_like(values)), axis=0)


@triton.jit
def search_row(
    row, filters, low,
    guess,  # may be above the k-th token: not lower than low, or -inf for none
    by_mass,  # whether top-k is done or off, so that mass decides
    collect,  # whether few tokens are likely to be above low, or above the guess
    least,  # finite and near the logits of most tokens: the smallest finite group maximum
    scale, tiles,
):  # fmt: skip
    """Return the floor of top-k, then top-p, for any number of tokens.

    Columns are searched once a bracket fits; passes over the row divide it at PIVOTS values.
    """
    lane = tl.arange(0, tiles.LANES)
    pivot_index = tl.arange(0, tiles.PIVOTS)
    k, top_p, top = filters.k, filters.top_p, row.top
    high = top
    num_high = 0
    mass_high = 0.0
    target = -1.0  # mass that is enough for top-p; < 0: not known yet
    heights = tl.zeros([tiles.COLUMNS], tl.int32)
    has_columns = 0  # whether the columns have all tokens in (low, high]
    num_passes = 0
    is_open = 1
    while is_open != 0:
        if gap(low, high) <= 1:  # tokens of one value are left
            if (by_mass != 0) | (top_p >= 1.0):
                is_open = 0
            else:
                by_mass, high, num_high, mass_high, num_passes = 1, top, 0, 0.0, 0
        elif collect != 0:
            if has_columns == 0:
                start = tl.maximum(low, guess)
                guess = tl.full([], float("-inf"), tl.float32)
                heights = _collect(row, start, high, tiles)
                num_found = tl.sum(heights)
                if (start > low) & (num_found < k):  # the guess is too high
                    high, num_high, collect = start, num_found, 0
                else:
                    low = start
                    collect = (tl.max(heights) <= tiles.DEPTH).to(tl.int32)
            if collect != 0:
                low = _search_columns(
                    row, heights, low, high, num_high, mass_high, filters, by_mass, target, scale,
                    tiles,
                )  # fmt: skip
                if (by_mass != 0) | (top_p >= 1.0):
                    is_open = 0
                else:
                    has_columns = (high == top).to(tl.int32)  # they have all that top-k keeps
                    by_mass, high, num_high, mass_high, num_passes = 1, top, 0, 0.0, 0
        else:
            start = tl.where(low > float("-inf"), low, high - 2.0 * (top - least) - 1.0)
            by_value = start + (high - start) * (pivot_index.to(tl.float32) / tiles.PIVOTS)
            by_key = key_of(low) + gap(low, high) * pivot_index // tiles.PIVOTS
            pivot = tl.where(num_passes < _VALUE_PASSES, by_value, value_of(by_key.to(tl.int32)))
            pivot = tl.where(pivot_index == 0, low, tl.minimum(pivot, high))
            num = tl.zeros([tiles.PIVOTS, tiles.LANES], tl.int32)
            mass = tl.zeros([tiles.PIVOTS, tiles.LANES], tl.float32)
            for first in tl.range(0, row.vocab_size, tiles.LANES, num_stages=tiles.NUM_STAGES):
                token = first + lane
                x_ptr = logit_ptrs(row, token, token)
                x = tl.load(x_ptr, mask=token < row.vocab_size, other=float("-inf"))
                x = x.to(tl.float32)
                weight = tl.exp2((x - top) * scale)
                above = x[None, :] > pivot[:, None]
                num += above.to(tl.int32)
                mass += tl.where(above, weight[None, :], 0.0)
            nums, masses = tl.sum(num, axis=1), tl.sum(mass, axis=1)
            if (by_mass != 0) & (target < 0.0):
                target = top_p * _pick(masses, pivot_index, 0)
            enough = tl.where(by_mass != 0, masses >= target, nums >= k)
            num_enough = tl.sum(enough.to(tl.int32), axis=0)
            num_passes += 1
            if num_enough == 0:  # all tokens above low are kept
                high = low
            else:
                low = _pick(pivot, pivot_index, num_enough - 1)
                if num_enough < tiles.PIVOTS:
                    high = _pick(pivot, pivot_index, num_enough)
                    num_high = _pick(nums, pivot_index, num_enough)
                    mass_high = _pick(masses, pivot_index, num_enough)
                in_bracket = _pick(nums, pivot_index, num_enough - 1) - num_high
                collect = (in_bracket <= tiles.COLUMNS * tiles.DEPTH // 2).to(tl.int32)
    return low
