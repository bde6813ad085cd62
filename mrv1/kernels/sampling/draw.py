"""The second launch of a draw: filter a row, draw one of its groups, then a token of the group."""

from __future__ import annotations

from typing import NamedTuple

from mrv1.kernels._base.dependent_launch import let_next_start, wait_for_previous
from mrv1.kernels._base.peer_flags import meet_peers
from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.sampling.groups import scale_of
from mrv1.kernels.sampling.philox import gumbel, philox_word
from mrv1.kernels.sampling.search import (
    Row,
    Tiles,
    before,
    guess_floor,
    list_groups,
    load_listed,
    logit_ptrs,
    opaque_zero,
    search_block,
    search_list,
    search_row,
)

_LN_2 = tl.constexpr(0.6931471805599453)
_TOKEN = tl.constexpr(0)  # purposes of random words; round r adds 2 r
_GROUP = tl.constexpr(1)
_LAST = tl.constexpr(2**31 - 1)


class _Filters(NamedTuple):
    """The values of ``FILTERS`` in a row."""

    k: tl.tensor  # top_k; 0 = off
    top_p: tl.tensor
    min_p: tl.tensor


class _Noise(NamedTuple):
    """The arguments of a row's random words, besides a group or token and a purpose."""

    seed: tl.tensor
    position: tl.tensor
    child: tl.tensor


@triton.jit
def _log(x):
    """Return log(x) for x >= 0, -inf for 0."""
    return tl.where(x > 0.0, tl.log(tl.where(x > 0.0, x, 1.0)), float("-inf"))


@triton.jit
def _gumbel(noise, index, purpose):
    """Return the Gumbel noise of groups or tokens."""
    return gumbel(philox_word(noise.seed, noise.position, index, purpose, noise.child))


@triton.jit
def _draw_group(group, log_weight, noise, purpose):
    """Return argmax(log_weight + noise), ties to the lowest group."""
    score = log_weight + _gumbel(noise, group, purpose)
    return tl.min(tl.where(score == tl.max(score, axis=0), group, _LAST), axis=0)


@triton.jit
def _draw_token(row, noise, group, floor, purpose, GROUP: tl.constexpr):
    """Return a group's token above ``floor``, drawn or the best if greedy, and its logit."""
    token = group * GROUP + tl.arange(0, GROUP)
    in_vocab = token < row.vocab_size
    x_ptr = logit_ptrs(row, token, group * GROUP)
    x = tl.load(x_ptr, mask=in_vocab, other=float("-inf")).to(tl.float32)
    score = x
    if row.temperature != 0.0:
        token_noise = _gumbel(noise, token, purpose)
        score = (x - row.top) * (scale_of(row.temperature) * _LN_2) + token_noise
        score = tl.where(x > floor, score, float("-inf"))
    is_best = in_vocab & (score == tl.max(score, axis=0))
    drawn = tl.min(tl.where(is_best, token, _LAST), axis=0)
    return drawn, tl.max(tl.where(token == drawn, x, float("-inf")), axis=0)


@triton.jit
def _load_groups(row, group, is_listed, tiles):
    """Return the logits of the groups that are listed, -inf for other groups."""
    first = group[:, None] * tiles.GROUP
    token = first + tl.arange(0, tiles.GROUP)[None, :]
    is_token = is_listed[:, None] & (token < row.vocab_size)
    x_ptr = logit_ptrs(row, token, first)
    x = tl.load(x_ptr, mask=is_token, other=float("-inf"))
    return x.to(tl.float32)


@triton.jit
def _sum_above(row, group, at, floor, scale, tiles):
    """Return each group's mass of tokens above ``floor``, 0 where not ``at``; sums are *written*.

    Each tile of groups is loaded while the tile before it is summed.
    """
    STEP: tl.constexpr = tiles.FEW_GROUPS
    part = tl.arange(0, STEP)
    num_listed = list_groups(row, group, at)
    group_next = load_listed(row, part, num_listed)
    x_next = _load_groups(row, group_next, part < num_listed, tiles)
    group_later = load_listed(row, STEP + part, num_listed)
    for first in range(0, num_listed, STEP):
        listed, x = group_next, x_next
        group_next = group_later
        x_next = _load_groups(row, group_next, first + STEP + part < num_listed, tiles)
        group_later = load_listed(row, first + 2 * STEP + part, num_listed)
        weight = tl.where(x > floor, tl.exp2((x - row.top) * scale), 0.0)
        tl.store(
            row.group_sum_ptr + listed, tl.sum(weight, axis=1), mask=first + part < num_listed
        )
    tl.debug_barrier()
    return tl.load(row.group_sum_ptr + (group | opaque_zero(floor)), mask=at, other=0.0)


@triton.jit
def _draw_nucleus(row, noise, filters, group_max, group_sum, tiles):
    """Return a token of a row that only top-p filters, drawn in rounds; the sums are *written*.

    The mass of the tokens above a drawn token, read in their groups only, decides if it is kept.
    """
    top = row.top
    scale = scale_of(row.temperature)
    group = tl.arange(0, tiles.TILE_GROUPS)
    log_mass = (group_max - top) * (scale * _LN_2) + _log(group_sum)
    target = filters.top_p * tl.sum(group_sum * tl.exp2((group_max - top) * scale), axis=0)
    floor = float("-inf")
    purpose = 0
    token = 0
    is_open = 1
    while is_open != 0:
        chosen = _draw_group(group, log_mass, noise, purpose + _GROUP)
        token, x = _draw_token(row, noise, chosen, floor, purpose + _TOKEN, tiles.GROUP)
        is_open = (x < top).to(tl.int32)
        if is_open != 0:
            floor = x
            mass = _sum_above(row, group, group_max > floor, floor, scale, tiles)
            log_mass = _log(mass)
            purpose += 2
            is_open = (tl.sum(mass, axis=0) >= target).to(tl.int32)
    return token


@triton.jit
def _draw_filtered_group(row, noise, filters, group_max, tiles):
    """Return a group, drawn by its mass of kept tokens, and the floor; the sums are *written*."""
    k, top_p, min_p = filters
    top = row.top
    scale = scale_of(row.temperature)
    group = tl.arange(0, tiles.TILE_GROUPS)
    member = tl.arange(0, tiles.GROUP)[None, :]
    few = tl.arange(0, tiles.FEW_GROUPS)
    base = tl.where(min_p > 0.0, top, float("-inf"))
    if min_p > 0.0:
        base = before(top + row.temperature * tl.log(min_p))

    # The groups to read: all groups that min_p leaves, or the groups with the largest maxima. Each
    # of these groups has at least one token above the floor: enough tokens for top-k.
    floor = base
    least = tl.min(tl.where(group_max > float("-inf"), group_max, float("inf")), axis=0)
    num_few = tl.sum((group_max > base).to(tl.int32))
    most = tl.where(
        k > tiles.FEW_GROUPS, tl.maximum(tl.minimum(k + k // 16, num_few - 1), k), tiles.FEW_GROUPS
    )
    if (num_few > most) & (k > 0):
        floor, num_few = search_block(group_max, base, top, k, most)

    chosen = 0
    is_done = False
    if num_few <= tiles.FEW_GROUPS:
        at = group_max > floor
        index = tl.cumsum(at.to(tl.int32), axis=0) - 1
        tl.store(row.scratch_ptr + index, group.to(tl.float32), mask=at)
        tl.debug_barrier()
        is_group = few < num_few
        listed = tl.load(row.scratch_ptr + few, mask=is_group, other=0.0).to(tl.int32)
        first = listed[:, None] * tiles.GROUP
        token = first + member
        x = tl.load(
            logit_ptrs(row, token, first),
            mask=is_group[:, None] & (token < row.vocab_size),
            other=float("-inf"),
        ).to(tl.float32)
        x = tl.where(x > floor, x, float("-inf"))
        is_in = (x > float("-inf")).to(tl.int32)
        in_group = tl.sum(is_in, axis=1)
        num = tl.sum(in_group, axis=0)
        is_done = num <= tiles.LISTED
        if is_done:
            rank = (tl.cumsum(in_group, axis=0) - in_group)[:, None] + tl.cumsum(is_in, axis=1)
            list_ptr = row.scratch_ptr + tiles.FEW_GROUPS
            tl.store(list_ptr + (rank - 1), x, mask=is_in != 0)
            tl.debug_barrier()
            floor = search_list(list_ptr, num, k, top_p, top, scale, tiles.LISTED)
            mass = tl.sum(tl.where(x > floor, tl.exp2((x - top) * scale), 0.0), axis=1)
            chosen = _draw_group(listed, _log(mass), noise, _GROUP)

    if not is_done:
        if (k > 0) | (top_p < 1.0):
            # The number of tokens above the floor, if tokens were shuffled.
            num_groups = row.num_groups.to(tl.float32)
            others = num_groups - num_few.to(tl.float32)
            num_above = num_groups * tl.log(num_groups / tl.maximum(others, 1.0))
            num_above = tl.where(others > 0.0, num_above, row.vocab_size.to(tl.float32))
            collect = num_above <= tiles.COLUMNS * tiles.DEPTH // 2
            guess = tl.full([], float("-inf"), tl.float32)
            if (k > 0) & (not collect):
                guess = guess_floor(row, k, tiles)
                collect = guess > float("-inf")
            by_mass = (k == 0).to(tl.int32)
            floor = search_row(
                row, filters, floor, guess, by_mass, collect.to(tl.int32), least, scale, tiles
            )
        mass = _sum_above(row, group, group_max > floor, floor, scale, tiles)
        chosen = _draw_group(group, _log(mass), noise, _GROUP)
    return chosen, floor


@triton.jit
def draw_kernel(
    out_ptr,  # [num_rows] int64
    logits_ptr, stride_logits_row,  # [num_rows, vocab_size], unit last stride
    group_max_ptr,  # [num_rows, num_groups] float32
    group_sum_ptr,  # [num_rows, num_groups] float32, *written* where a row filters
    scratch_ptr,  # [num_rows, SampleTokensConfig.scratch_size] float32; None if no row can filter
    stride_scratch_row,
    idx_mapping_ptr,  # [num_rows] int32, -1 = padding; None: the next inputs are in row order
    temperature_ptr,  # [num_rows or slots] float32, 0 = greedy
    seed_ptr,  # [num_rows or slots] int64
    position_ptr,  # [num_rows or slots] int64 or int32
    prompt_len_ptr,  # like position_ptr, subtracted from it; or None
    child_ptr,  # [num_rows or slots] int32; or None
    vocab_size, num_groups,
    top_k_ptr,  # [num_rows or slots] int32, 0 = off; or None
    top_p_ptr,  # [num_rows or slots] float32, 1 = off; or None
    min_p_ptr,  # [num_rows or slots] float32, 0 = off; or None
    GROUP: tl.constexpr,
    TILE_GROUPS: tl.constexpr,  # power of two >= num_groups
    FEW_GROUPS: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PIVOTS: tl.constexpr, LISTED: tl.constexpr, NUM_STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,  # see dependent_launch
    shard_size=None,  # ids of a rank; then logits_ptr is a tuple, and maxima and sums are halves
    flag_ptrs=None,  # a tuple, as VocabShards.flags; with shard_size
    calls_ptr=None,  # [2] int32, as VocabShards.calls
    abort_ptr=None,  # [1] int32
    stride_sums_call=0,
    RANK: tl.constexpr = 0,
):  # fmt: skip
    """Grid (num_rows,): one program draws one row's token.

    The launch before starts this one only after its own wait, so results of still earlier kernels
    which it does not write may be read before the wait.
    """
    row_index = tl.program_id(0).to(tl.int64)
    slot = row_index
    if idx_mapping_ptr is not None:
        slot = tl.load(idx_mapping_ptr + row_index).to(tl.int64)
    is_row = slot >= 0
    temperature = tl.load(temperature_ptr + slot, mask=is_row, other=0.0)
    seed = tl.load(seed_ptr + slot, mask=is_row, other=0)
    position = tl.load(position_ptr + slot, mask=is_row, other=0).to(tl.int64)
    if prompt_len_ptr is not None:
        position -= tl.load(prompt_len_ptr + slot, mask=is_row, other=0)
    child = (slot * 0).to(tl.int32)
    if child_ptr is not None:
        child = tl.load(child_ptr + slot, mask=is_row, other=0)
    k, top_p, min_p = child * 0, temperature * 0.0 + 1.0, temperature * 0.0
    if top_k_ptr is not None:
        k = tl.load(top_k_ptr + slot, mask=is_row, other=0)
        k = tl.where(k < vocab_size, k, 0)
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + slot, mask=is_row, other=1.0)
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + slot, mask=is_row, other=0.0)
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)

    group = tl.arange(0, TILE_GROUPS)
    group_max_row_ptr = group_max_ptr + row_index * num_groups
    group_sum_row_ptr = group_sum_ptr + row_index * num_groups
    if shard_size is not None:
        call = tl.load(calls_ptr + 1)
        if row_index == 0:
            tl.store(calls_ptr, call)
        if meet_peers(flag_ptrs, call, abort_ptr, RANK) == 0:
            tl.store(out_ptr + row_index, -2)
            return
        group_max_row_ptr += (call & 1) * stride_sums_call
        group_sum_row_ptr += (call & 1) * stride_sums_call
    group_max = tl.load(group_max_row_ptr + group, mask=group < num_groups, other=float("-inf"))
    group_sum = tl.load(group_sum_row_ptr + group, mask=group < num_groups, other=0.0)
    is_bad = group_sum != group_sum
    top = tl.max(tl.where(is_bad, float("inf"), group_max), axis=0)
    if top == float("-inf"):  # no token to draw, or padding
        tl.store(out_ptr + row_index, -1)
        return
    if top == float("inf"):  # noqa: SIM102 - the second test costs a reduction; NaN, or a logit of +inf, which a greedy row may take
        if tl.max(is_bad.to(tl.int32), axis=0) != 0:
            tl.store(out_ptr + row_index, -2)
            return

    scratch_row_ptr = scratch_ptr
    if scratch_ptr is not None:
        scratch_row_ptr += row_index * stride_scratch_row
    shard_start = None
    if shard_size is None:
        logits_row_ptr = logits_ptr + row_index * stride_logits_row
    else:
        logits_row_ptr, shard_start = logits_ptr, row_index * stride_logits_row
    row = Row(
        logits_row_ptr, group_max_row_ptr, group_sum_row_ptr, scratch_row_ptr, top, temperature,
        vocab_size, num_groups, shard_size, shard_start,
    )  # fmt: skip
    noise = _Noise(seed, position, child)
    filters = _Filters(k, top_p, min_p)
    if scratch_ptr is not None:  # noqa: SIM102 - decided when compiled
        if (temperature != 0.0) & (top_p < 1.0) & (k == 0) & (min_p <= 0.0):
            token = _draw_nucleus(
                row, noise, filters, group_max, group_sum,
                Tiles(
                    GROUP, TILE_GROUPS, FEW_GROUPS, LANES, COLUMNS, DEPTH, PIVOTS, LISTED,
                    NUM_STAGES,
                ),
            )  # fmt: skip
            tl.store(out_ptr + row_index, token.to(tl.int64))
            return

    floor = tl.where(is_row, float("-inf"), top)
    if temperature == 0.0:
        chosen = tl.min(tl.where(group_max == top, group, _LAST), axis=0)
    else:
        log_weight = (group_max - top) * (scale_of(temperature) * _LN_2) + _log(group_sum)
        if scratch_ptr is None:
            chosen = _draw_group(group, log_weight, noise, _GROUP)
        elif (k > 0) | (top_p < 1.0) | (min_p > 0.0):
            chosen, floor = _draw_filtered_group(
                row, noise, filters, group_max,
                Tiles(
                    GROUP, TILE_GROUPS, FEW_GROUPS, LANES, COLUMNS, DEPTH, PIVOTS, LISTED,
                    NUM_STAGES,
                ),
            )  # fmt: skip
        else:
            chosen = _draw_group(group, log_weight, noise, _GROUP)

    token, _ = _draw_token(row, noise, chosen, floor, _TOKEN, GROUP)
    tl.store(out_ptr + row_index, token.to(tl.int64))
