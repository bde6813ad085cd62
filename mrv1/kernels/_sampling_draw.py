"""The second launch of a draw: what is kept of a row, one of its groups, one token of that."""

from __future__ import annotations

from mrv1.kernels._overlap import let_next_start, wait_for_previous
from mrv1.kernels._philox import gumbel, philox_word
from mrv1.kernels._sampling_groups import scale_of
from mrv1.kernels._sampling_search import (
    before,
    search_groups,
    search_list,
    search_row,
    total,
)
from mrv1.kernels._triton import tl, triton

_LN_2 = tl.constexpr(0.6931471805599453)
_TOKEN = tl.constexpr(0)  # purposes of random words
_GROUP = tl.constexpr(1)
_LAST = tl.constexpr(2**31 - 1)


@triton.jit
def _log(x):
    """Return log(x) of what is not negative, -inf of 0."""
    return tl.where(x > 0.0, tl.log(tl.where(x > 0.0, x, 1.0)), float("-inf"))


@triton.jit
def _draw_group(group, log_weight, seed, position, child):
    """Return argmax(log_weight + noise), the lowest of equal ones."""
    score = log_weight + gumbel(philox_word(seed, position, group, _GROUP, child))
    return tl.min(tl.where(score == tl.max(score, axis=0), group, _LAST), axis=0)


@triton.jit
def _draw_filtered_group(
    logits_row_ptr,
    group_max_row_ptr,
    group_sum_row_ptr,  # *written*
    scratch_row_ptr,
    group_max,
    group_sum,
    top,
    temperature,
    seed,
    position,
    child,
    k,
    top_p,
    min_p,
    vocab_size,
    num_groups,
    GROUP: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    FEW_GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
    PIVOTS: tl.constexpr,
    LISTED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Return a group, drawn by what is kept of it, and the floor of what is kept."""
    scale = scale_of(temperature)
    group = tl.arange(0, TILE_GROUPS)
    member = tl.arange(0, GROUP)[None, :]
    few = tl.arange(0, FEW_GROUPS)
    base = tl.where(min_p > 0.0, top, float("-inf"))
    if min_p > 0.0:
        base = before(top + temperature * tl.log(min_p))

    # The groups to look into: all that min_p leaves, or those of the largest maxima. As many
    # tokens as there are such groups are above the floor at least, which is enough for top-k;
    # for top-p it has to be seen.
    floor = base
    is_sure = True
    least = tl.min(tl.where(group_max > float("-inf"), group_max, float("inf")), axis=0)
    target = -1.0
    if (k == 0) & (top_p < 1.0) & (min_p <= 0.0):
        target = top_p * tl.sum(group_sum * tl.exp2((group_max - top) * scale), axis=0)
    num_few = tl.sum((group_max > base).to(tl.int32))
    most = tl.where(k > FEW_GROUPS, tl.maximum(tl.minimum(k + k // 4, num_few - 1), k), FEW_GROUPS)
    if (num_few > most) & ((k > 0) | ((top_p < 1.0) & (min_p <= 0.0))):
        fewest = tl.where(k > 0, k, FEW_GROUPS // 2)
        floor, num_few = search_groups(group_max, base, top, fewest, most)
        is_sure = k > 0

    chosen = 0
    is_done = False
    if num_few <= FEW_GROUPS:
        at = group_max > floor
        index = tl.cumsum(at.to(tl.int32), axis=0) - 1
        tl.store(scratch_row_ptr + index, group.to(tl.float32), mask=at)
        tl.debug_barrier()
        is_group = few < num_few
        listed = tl.load(scratch_row_ptr + few, mask=is_group, other=0.0).to(tl.int32)
        token = listed[:, None] * GROUP + member
        x = tl.load(
            logits_row_ptr + token,
            mask=is_group[:, None] & (token < vocab_size),
            other=float("-inf"),
        ).to(tl.float32)
        x = tl.where(x > floor, x, float("-inf"))
        is_in = (x > float("-inf")).to(tl.int32)
        in_group = tl.sum(is_in, axis=1)
        num = tl.sum(in_group, axis=0)
        is_done = num <= LISTED
        if not is_sure:
            is_done = is_done & (total(tl.exp2((x - top) * scale)) >= target)
        if is_done:
            rank = (tl.cumsum(in_group, axis=0) - in_group)[:, None] + tl.cumsum(is_in, axis=1)
            list_ptr = scratch_row_ptr + FEW_GROUPS
            tl.store(list_ptr + (rank - 1), x, mask=is_in != 0)
            tl.debug_barrier()
            floor = search_list(list_ptr, num, k, top_p, target, top, scale, LISTED)
            mass = tl.sum(tl.where(x > floor, tl.exp2((x - top) * scale), 0.0), axis=1)
            chosen = _draw_group(listed, _log(mass), seed, position, child)

    if not is_done:
        if not is_sure:
            floor = base
        if (k > 0) | (top_p < 1.0):
            low = floor
            if target > 0.0:
                # Were every token below this, they had less than 1 - top_p of the mass.
                share = target * (1.0 - top_p) / (top_p * vocab_size)
                low = tl.minimum(top + temperature * (tl.log(share) - 1.0), before(top))
            floor = search_row(
                logits_row_ptr,
                scratch_row_ptr,
                low,
                (k == 0).to(tl.int32),
                ((k > 0) & (k <= LANES * DEPTH // 4) & (low > float("-inf"))).to(tl.int32),
                k,
                top_p,
                target,
                top,
                least,
                scale,
                vocab_size,
                LANES,
                DEPTH,
                PIVOTS,
                NUM_STAGES,
            )
        for first in range(0, num_groups, FEW_GROUPS):
            here = first + few
            maximum = tl.load(
                group_max_row_ptr + here, mask=here < num_groups, other=float("-inf")
            )
            token = here[:, None] * GROUP + member
            x = tl.load(
                logits_row_ptr + token,
                mask=(maximum > floor)[:, None] & (token < vocab_size),
                other=float("-inf"),
            ).to(tl.float32)
            weight = tl.where(x > floor, tl.exp2((x - top) * scale), 0.0)
            tl.store(group_sum_row_ptr + here, tl.sum(weight, axis=1), mask=here < num_groups)
        tl.debug_barrier()
        mass = tl.load(group_sum_row_ptr + group, mask=group < num_groups, other=0.0)
        chosen = _draw_group(group, _log(mass), seed, position, child)
    return chosen, floor


@triton.jit
def draw_kernel(
    out_ptr,  # [num_rows] int64
    logits_ptr,  # [num_rows, vocab_size], unit last stride
    stride_logits_row,
    group_max_ptr,  # [num_rows, num_groups] float32
    group_sum_ptr,  # [num_rows, num_groups] float32, *written* where a row filters
    scratch_ptr,  # [num_rows, SampleTokensConfig.scratch_size] float32; None if no row can filter
    stride_scratch_row,
    idx_mapping_ptr,  # [num_rows] int32, -1 = padding; None: what follows is in row order
    temperature_ptr,  # [num_rows or slots] float32, 0 = greedy
    seed_ptr,  # [num_rows or slots] int64
    position_ptr,  # [num_rows or slots] int64 or int32
    prompt_len_ptr,  # like position_ptr, subtracted from it; or None
    top_k_ptr,  # [num_rows or slots] int32, 0 = off; or None
    top_p_ptr,  # [num_rows or slots] float32, 1 = off; or None
    min_p_ptr,  # [num_rows or slots] float32, 0 = off; or None
    child_ptr,  # [num_rows or slots] int32; or None
    vocab_size,
    num_groups,
    GROUP: tl.constexpr,
    TILE_GROUPS: tl.constexpr,  # power of two >= num_groups
    FEW_GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
    PIVOTS: tl.constexpr,
    LISTED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,  # see _overlap
):
    """Grid (num_rows,): one program draws one row's token.

    The launch before this one lets it start only once it has waited itself: what earlier kernels
    wrote, and that one does not, may be read before the wait.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = row
    if idx_mapping_ptr is not None:
        slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
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
    group_max_row_ptr = group_max_ptr + row * num_groups
    group_sum_row_ptr = group_sum_ptr + row * num_groups
    group_max = tl.load(group_max_row_ptr + group, mask=group < num_groups, other=float("-inf"))
    group_sum = tl.load(group_sum_row_ptr + group, mask=group < num_groups, other=0.0)
    is_bad = group_sum != group_sum
    top = tl.max(tl.where(is_bad, float("inf"), group_max), axis=0)
    if top == float("-inf"):  # as for padding
        tl.store(out_ptr + row, -1)
        return
    if top == float("inf"):  # noqa: SIM102 - the second costs a reduction; NaN, or such a logit, which a greedy row may take
        if tl.max(is_bad.to(tl.int32), axis=0) != 0:
            tl.store(out_ptr + row, -2)
            return

    logits_row_ptr = logits_ptr + row * stride_logits_row
    floor = tl.where(is_row, float("-inf"), top)
    if temperature == 0.0:
        chosen = tl.min(tl.where(group_max == top, group, _LAST), axis=0)
    else:
        log_weight = (group_max - top) * (scale_of(temperature) * _LN_2) + _log(group_sum)
        if scratch_ptr is None:
            chosen = _draw_group(group, log_weight, seed, position, child)
        elif (k > 0) | (top_p < 1.0) | (min_p > 0.0):
            chosen, floor = _draw_filtered_group(
                logits_row_ptr,
                group_max_row_ptr,
                group_sum_row_ptr,
                scratch_ptr + row * stride_scratch_row,
                group_max,
                group_sum,
                top,
                temperature,
                seed,
                position,
                child,
                k,
                top_p,
                min_p,
                vocab_size,
                num_groups,
                GROUP,
                TILE_GROUPS,
                FEW_GROUPS,
                LANES,
                DEPTH,
                PIVOTS,
                LISTED,
                NUM_STAGES,
            )
        else:
            chosen = _draw_group(group, log_weight, seed, position, child)

    token = chosen * GROUP + tl.arange(0, GROUP)
    in_vocab = token < vocab_size
    x = tl.load(logits_row_ptr + token, mask=in_vocab, other=float("-inf")).to(tl.float32)
    score = x
    if temperature != 0.0:
        noise = gumbel(philox_word(seed, position, token, _TOKEN, child))
        score = (x - top) * (scale_of(temperature) * _LN_2) + noise
        score = tl.where(x > floor, score, float("-inf"))
    is_best = in_vocab & (score == tl.max(score, axis=0))
    tl.store(out_ptr + row, tl.min(tl.where(is_best, token, _LAST), axis=0).to(tl.int64))
