"""Find the value above which a row's tokens are kept: a search over values, without a sort.

Every filter keeps the tokens above some value, its *floor*: ``kept = {x > floor}``. Let
``enough(v)`` = "at least k tokens are above v" (top-k), or "the tokens above v have at least the
target mass" (top-p). A floor is the largest v with enough(v), or a lower value with the same
tokens above it. A search keeps a bracket, enough(low) and not enough(high), and ends when all
tokens in the bracket have one value.
"""

from __future__ import annotations

from typing import NamedTuple

from mrv1.kernels._base.triton import tl, triton

_VALUE_STEPS = tl.constexpr(16)
"""Halvings of the bracket by value; then by the order of floats (keys), which ends within 32."""
_VALUE_PASSES = tl.constexpr(4)
"""Passes over the row that divide the bracket by value; later passes divide it by key."""


class Row(NamedTuple):
    """A row to draw from; the pointers point to its first elements."""

    logits_ptr: tl.tensor
    group_max_ptr: tl.tensor
    group_sum_ptr: tl.tensor
    scratch_ptr: tl.tensor  # or None: no row has a filter
    top: tl.tensor  # the largest logit
    temperature: tl.tensor
    vocab_size: tl.tensor
    num_groups: tl.tensor


class Filters(NamedTuple):
    """The filters of a row."""

    k: tl.tensor  # 0 = all
    top_p: tl.tensor
    min_p: tl.tensor


class Tiles(NamedTuple):
    """See ``SampleTokensConfig``. Build it in a call: assigned to a name, it becomes tensors."""

    GROUP: tl.constexpr
    TILE_GROUPS: tl.constexpr
    FEW_GROUPS: tl.constexpr
    LANES: tl.constexpr
    DEPTH: tl.constexpr
    PIVOTS: tl.constexpr
    LISTED: tl.constexpr
    NUM_STAGES: tl.constexpr


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
    """Return a value strictly between ``low`` and ``high``, which are not neighbours.

    ``least`` is a finite value that takes the place of a lower ``low``, such as -inf.
    """
    by_value = 0.5 * tl.maximum(low, least) + 0.5 * high
    by_key = value_of(((key_of(low).to(tl.int64) + key_of(high)) >> 1).to(tl.int32))
    return tl.where((step < _VALUE_STEPS) & (by_value > low) & (by_value < high), by_value, by_key)


@triton.jit
def total(tile):
    """Return the sum of a two-dimensional block, without a reshape."""
    return tl.sum(tl.sum(tile, axis=0), axis=0)


@triton.jit
def search_tile(x, weight, low, high, num_high, mass_high, k, target, BY_MASS: tl.constexpr):
    """Return the floor within a bracket, all of whose tokens are in the tile ``x``.

    ``weight`` is exp((x - row maximum) / temperature). ``num_high`` and ``mass_high`` are the
    number and mass of the tokens above ``high``, which are not in the tile. ``k`` tokens are
    enough, or a mass of ``target`` if BY_MASS.
    """
    num_high = tl.full([], 0, tl.int32) + num_high
    mass_high = tl.full([], 0.0, tl.float32) + mass_high
    inside = (x > low) & (x <= high)
    least = tl.min(tl.min(tl.where(inside, x, float("inf")), axis=0), axis=0)
    num_low = num_high + total(inside.to(tl.int32))
    step = 0
    is_open = num_low > num_high + 1
    if not BY_MASS:
        is_open = is_open & (num_low > k)
    while is_open:
        value = middle(low, high, least, step)
        above = (x > value) & (x <= high)
        num = num_high + total(above.to(tl.int32))
        mass = mass_high
        if BY_MASS:
            mass = mass_high + total(tl.where(above, weight, 0.0))
            enough = mass >= target
        else:
            enough = num >= k
        low = tl.where(enough, value, low)
        num_low = tl.where(enough, num, num_low)
        high = tl.where(enough, high, value)
        num_high = tl.where(enough, num_high, num)
        mass_high = tl.where(enough, mass_high, mass)
        step += 1
        is_open = (num_low > num_high + 1) & (gap(low, high) > 1)
        if not BY_MASS:
            is_open = is_open & (num_low > k)
    return low


@triton.jit
def search_list(list_ptr, num_listed, k, top_p, top, scale, LISTED: tl.constexpr):
    """Return the floor of top-k, then top-p, by comparing every pair of the tokens in a list.

    ``list_ptr`` points to [2, LISTED] float32: the logits of all tokens above some value, 1 to
    LISTED, then scratch. k = 0 keeps all.
    """
    STEP: tl.constexpr = 16
    index, part = tl.arange(0, LISTED), tl.arange(0, STEP)
    x = tl.load(list_ptr + index, mask=index < num_listed, other=float("-inf"))
    larger = tl.zeros([STEP, LISTED], tl.int32)
    for first in range(0, num_listed, STEP):
        other = tl.load(
            list_ptr + first + part,
            mask=first + part < num_listed,
            other=float("-inf"),
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
                list_ptr + first + part,
                mask=first + part < num_listed,
                other=float("-inf"),
            )
            its_weight = tl.load(list_ptr + LISTED + first + part)
            mass += tl.where(other[:, None] > x[None, :], its_weight[:, None], 0.0)
        is_kept = is_kept & ((tl.sum(mass, axis=0) < enough) | (x == top))
    return before(tl.min(tl.where(is_kept, x, float("inf")), axis=0))


@triton.jit
def search_groups(group_max, low, high, fewest, most):
    """Return a value v with fewest <= num(v) <= most, and num(v), the group maxima above v.

    The caller ensures num(low) > most and num(high) = 0. If equal maxima leave no such v, num(v)
    of the value returned is above ``most``.
    """
    least = tl.min(tl.where(group_max > low, group_max, float("inf")))
    num_low = tl.sum((group_max > low).to(tl.int32))
    num_high = tl.full([], 0, tl.int32)
    step = 0
    while (num_high < fewest) & (gap(low, high) > 1):
        value = middle(low, high, least, step)
        num = tl.sum((group_max > value).to(tl.int32))
        is_low = num > most
        low = tl.where(is_low, value, low)
        num_low = tl.where(is_low, num, num_low)
        high = tl.where(is_low, high, value)
        num_high = tl.where(is_low, num_high, num)
        step += 1
    found = num_high >= fewest
    return tl.where(found, high, low), tl.where(found, num_high, num_low)


@triton.jit
def _pick(values, index, at):
    """Return the element of a block at a run-time index."""
    return tl.sum(tl.where(index == at, values, tl.zeros_like(values)), axis=0)


@triton.jit
def search_row(
    row,  # its scratch is [DEPTH, LANES] float32
    filters,
    low,
    by_mass,  # whether top-k is done or off, so that mass decides
    collect,  # whether few tokens are likely to be above low
    least,  # finite and near the logits of most tokens: the smallest finite group maximum
    scale,
    tiles,
):
    """Return the floor of top-k, then top-p, for any number of tokens.

    Passes over the row divide the bracket at PIVOTS values, until its tokens fit the scratch. A
    lane is every LANES-th token of the row, and has its own column of the scratch.
    """
    lane = tl.arange(0, tiles.LANES)
    depth = tl.arange(0, tiles.DEPTH)[:, None]
    pivot_index = tl.arange(0, tiles.PIVOTS)
    k, top_p, top = filters.k, filters.top_p, row.top
    high = top
    num_high = 0
    mass_high = 0.0
    target = -1.0  # mass that is enough for top-p; < 0: not known yet
    num_passes = 0
    is_open = 1
    while is_open != 0:
        if gap(low, high) <= 1:  # tokens of one value are left
            if (by_mass != 0) | (top_p >= 1.0):
                is_open = 0
            else:
                by_mass, high, num_high, mass_high, num_passes = 1, top, 0, 0.0, 0
        elif collect != 0:
            tl.debug_barrier()  # no thread reads the scratch of an earlier round any more
            height = tl.zeros([tiles.LANES], tl.int32)
            for first in tl.range(0, row.vocab_size, tiles.LANES, num_stages=tiles.NUM_STAGES):
                token = first + lane
                x = tl.load(
                    row.logits_ptr + token, mask=token < row.vocab_size, other=float("-inf")
                ).to(tl.float32)
                inside = (x > low) & (x <= high)
                place = row.scratch_ptr + height * tiles.LANES + lane
                tl.store(place, x, mask=inside & (height < tiles.DEPTH))
                height += inside.to(tl.int32)
            tl.debug_barrier()
            if tl.max(height) > tiles.DEPTH:
                collect = 0
            else:
                x = tl.load(
                    row.scratch_ptr + depth * tiles.LANES + lane[None, :],
                    mask=depth < height[None, :],
                    other=float("-inf"),
                )
                weight = tl.exp2((x - top) * scale)
                is_whole = high == top  # the tile has all tokens above low
                is_last = (by_mass != 0) | is_whole
                if by_mass == 0:
                    low = search_tile(x, weight, low, high, num_high, 0.0, k, 0.0, BY_MASS=False)
                    by_mass = 1
                if top_p >= 1.0:
                    is_open = 0
                elif is_last:
                    if target < 0.0:
                        target = top_p * total(tl.where(x > low, weight, 0.0))
                    low = search_tile(
                        x, weight, low, high, num_high, mass_high, 0, target, BY_MASS=True
                    )
                    is_open = 0
                else:
                    high, num_high, mass_high, num_passes = top, 0, 0.0, 0
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
                x = tl.load(
                    row.logits_ptr + token, mask=token < row.vocab_size, other=float("-inf")
                ).to(tl.float32)
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
                at_low = (pivot_index == num_enough - 1)[:, None]
                in_bracket = tl.sum(tl.where(at_low, num, 0), axis=0)
                low = _pick(pivot, pivot_index, num_enough - 1)
                if num_enough < tiles.PIVOTS:
                    at_high = (pivot_index == num_enough)[:, None]
                    in_bracket -= tl.sum(tl.where(at_high, num, 0), axis=0)
                    high = _pick(pivot, pivot_index, num_enough)
                    num_high = _pick(nums, pivot_index, num_enough)
                    mass_high = _pick(masses, pivot_index, num_enough)
                collect = (tl.max(in_bracket, axis=0) <= tiles.DEPTH).to(tl.int32)
    return low
