"""Log-probabilities of some tokens of each row, their ranks, and the best tokens of the row.

    logprob(v) = (x_v - m) / T - log(sum_u exp((x_u - m) / T)),   m = max_u x_u
    rank(v)    = 1 + #{u : x_u > x_v}

The first launch reads the logits once. It writes the maximum and the sum of exponentials of each
group of 128 consecutive ids (more if the vocabulary is beyond 524,288) and counts, for each token
asked for, the better tokens. The second launch, one program per row, adds them up, and reads the k
groups with the best maxima: they contain the k best tokens, because each has a token at least as
good as any token outside. No log-softmax is materialised and no row is sorted.

The best tokens are found one after the other, each as the maximum of the tokens left. A logit and
its id form one integer key, so that no two are equal and ties go to the lowest id::

    key = (the logit's bits, ordered as integers) << 32 | (2^31 - 1 - id)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.checks import FLOAT_DTYPES, check_launchable
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.peer_flags import meet_peers
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.sampling.contracts import TopLogprobs, check_top_logprobs, group_size
from mrv1.kernels.sampling.groups import padded_groups, second_launch, shard_ptr, sum_groups
from mrv1.kernels.sampling.shards import VocabShards, check_asked, check_shards

_ROUND = tl.constexpr(32)  # best tokens found together, in the same number of groups
_NO_KEY = tl.constexpr(-(2**63))  # below every key: a token or group that is taken
_LOW_BITS = tl.constexpr(2**31 - 1)


@triton.jit
def _keys(x, index):
    """Return int64 keys in the order of (x, -index); NaN counts as -inf, and -0 as 0."""
    x = tl.where(x == x, x, float("-inf"))
    x = tl.where(x == 0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (index ^ _LOW_BITS).to(tl.int64)


@triton.jit
def _index_of(key):
    """Return the index that ``_keys`` put into a key, int64."""
    return (key & _LOW_BITS) ^ _LOW_BITS


@triton.jit
def _logit_of(key):
    """Return the logit that ``_keys`` put into a key."""
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _inverse_temperature(temperature_ptr, slot):
    """Return 1 / T; T = 1 for greedy rows (0) and without temperatures (None)."""
    inverse = 1.0
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + slot)
        inverse = tl.div_rn(1.0, tl.where(temperature == 0.0, 1.0, temperature))
    return inverse


@triton.jit(
    # a value that differs from batch to batch must not compile another kernel
    do_not_specialize=["stride_token_ids_row", "num_tokens", "num_top"],
    do_not_specialize_on_alignment=[
        "token_ids_ptr",
        "idx_mapping_ptr",
        "temperature_ptr",
        "row_num_top_ptr",
    ],
)
def _top_logprobs_kernel(
    logprobs_ptr,  # [num_rows, num_tokens] float32, contiguous
    ranks_ptr,  # [num_rows, num_tokens] int64, contiguous
    top_token_ids_ptr,  # [num_rows, num_top] int64, contiguous
    top_logprobs_ptr,  # [num_rows, num_top] float32, contiguous
    group_max_ptr,  # [num_rows, num_groups] float32, without NaN
    group_sum_ptr,  # [num_rows, num_groups] float32
    num_better_ptr,  # [num_rows, num_tokens, num_parts] int32
    logits_ptr, stride_logits_row,  # [num_rows, vocab_size], unit last stride
    token_ids_ptr, stride_token_ids_row,  # [num_rows, num_tokens] int64, -1 = none
    idx_mapping_ptr,  # [num_rows] int32, -1 = padding; None: temperature is in row order
    temperature_ptr,  # [num_rows or slots] float32, or None
    row_num_top_ptr,  # [num_rows or slots] int32, or None: num_top
    num_tokens, num_top, vocab_size, num_groups, num_parts,
    GROUP: tl.constexpr,
    TILE_GROUPS: tl.constexpr,  # power of two >= num_groups
    TILE_PARTS: tl.constexpr,  # power of two >= num_parts
    OVERLAP: tl.constexpr,  # see dependent_launch
    shard_size=None,  # and what follows: as in draw_kernel
    flag_ptrs=None, calls_ptr=None, abort_ptr=None, stride_sums_call=0, stride_better_call=0,
    RANK: tl.constexpr = 0,
):  # fmt: skip
    """Grid (num_rows,): one program scores the tokens asked for, then finds the best tokens."""
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    if shard_size is not None:
        call = tl.load(calls_ptr + 1)
        if row == 0:
            tl.store(calls_ptr, call)
        meet_peers(flag_ptrs, call, abort_ptr, RANK)  # after a failure nobody reads the results
        group_max_ptr += (call & 1) * stride_sums_call
        group_sum_ptr += (call & 1) * stride_sums_call
        num_better_ptr += (call & 1) * stride_better_call
    slot = row
    if idx_mapping_ptr is not None:
        slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
    if slot < 0:
        for column in range(num_tokens):
            tl.store(logprobs_ptr + row * num_tokens + column, float("-inf"))
            tl.store(ranks_ptr + row * num_tokens + column, 0)
        for i in range(num_top):
            tl.store(top_token_ids_ptr + row * num_top + i, -1)
            tl.store(top_logprobs_ptr + row * num_top + i, float("-inf"))
        return

    if shard_size is None:
        logits_row_ptr = logits_ptr + row * stride_logits_row
    inverse = _inverse_temperature(temperature_ptr, slot)
    num_found = num_top
    if row_num_top_ptr is not None:
        num_found = tl.maximum(tl.minimum(tl.load(row_num_top_ptr + slot), num_top), 0)
    group = tl.arange(0, TILE_GROUPS)
    in_row = group < num_groups
    row_group = row * num_groups + group
    group_max = tl.load(group_max_ptr + row_group, mask=in_row, other=float("-inf"))
    group_sum = tl.load(group_sum_ptr + row_group, mask=in_row, other=0.0)
    best = tl.max(group_max, axis=0)
    log_sum = tl.log(tl.sum(group_sum * tl.exp((group_max - best) * inverse), axis=0))

    part = tl.arange(0, TILE_PARTS)
    for column in range(num_tokens):
        token = tl.load(token_ids_ptr + row * stride_token_ids_row + column)
        is_token = (token >= 0) & (token < vocab_size)
        if shard_size is None:
            x_ptr = logits_row_ptr + token
        else:
            x_ptr = shard_ptr(logits_ptr, shard_size, token) + row * stride_logits_row + token
        x = tl.load(x_ptr, mask=is_token, other=float("-inf")).to(tl.float32)
        output = row * num_tokens + column
        better_ptr = num_better_ptr + output * num_parts + part
        rank = 1 + tl.sum(tl.load(better_ptr, mask=part < num_parts, other=0), axis=0)
        logprob = tl.where(is_token, (x - best) * inverse - log_sum, float("-inf"))
        tl.store(logprobs_ptr + output, logprob)
        tl.store(ranks_ptr + output, tl.where(is_token, rank, 0).to(tl.int64))

    # Groups in the order of the best token left in each, ties to the first group: the next n best
    # tokens are in the first n groups.
    group_keys = _keys(group_max, group)
    lane = tl.arange(0, GROUP)[None, :]
    last = tl.full([], 2**63 - 1, tl.int64)  # the key taken last
    nth = tl.arange(0, _ROUND)
    for start in range(0, num_found, _ROUND):
        size = tl.minimum(num_found - start, _ROUND)
        chosen = tl.full([_ROUND], -1, tl.int64)
        for i in range(size):
            key = tl.max(group_keys, axis=0)
            chosen = tl.where(nth == i, _index_of(key), chosen)
            group_keys = tl.where(group_keys == key, _NO_KEY, group_keys)
        candidate = chosen[:, None] * GROUP + lane
        is_token = (chosen[:, None] >= 0) & (candidate < vocab_size)
        if shard_size is None:
            y_ptr = logits_row_ptr + candidate
        else:
            y_ptr = shard_ptr(logits_ptr, shard_size, chosen[:, None] * GROUP)
            y_ptr += row * stride_logits_row + candidate
        y = tl.load(y_ptr, mask=is_token, other=float("-inf"))
        keys = _keys(y.to(tl.float32), candidate)
        keys = tl.where(is_token & (keys < last), keys, _NO_KEY)
        best_keys = tl.full([_ROUND], _NO_KEY, tl.int64)
        for i in range(size):
            last = tl.max(keys)  # over both axes
            best_keys = tl.where(nth == i, last, best_keys)
            keys = tl.where(keys == last, _NO_KEY, keys)
        logprob = (_logit_of(best_keys) - best) * inverse - log_sum
        output = row * num_top + start + nth
        tl.store(top_token_ids_ptr + output, _index_of(best_keys), mask=nth < size)
        tl.store(top_logprobs_ptr + output, logprob, mask=nth < size)
        if start + _ROUND < num_found:  # new keys for the chosen groups
            left = tl.max(keys, axis=1)
            left_keys = tl.where(left == _NO_KEY, _NO_KEY, _keys(_logit_of(left), chosen))
            for i in range(size):
                key = tl.max(tl.where(nth == i, left_keys, _NO_KEY), axis=0)
                index = tl.max(tl.where(nth == i, chosen, -1), axis=0)
                group_keys = tl.where(group == index, key, group_keys)
    if row_num_top_ptr is not None:
        for start in range(num_found, num_top, _ROUND):
            is_left = start + nth < num_top
            output = row * num_top + start + nth
            tl.store(top_token_ids_ptr + output, tl.full([_ROUND], -1, tl.int64), mask=is_left)
            nothing = tl.full([_ROUND], float("-inf"), tl.float32)
            tl.store(top_logprobs_ptr + output, nothing, mask=is_left)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobsConfig:
    """How both launches divide a row, the same in all batches: it may change a sum's last bits."""

    tile_groups: int  # groups of one program of the first launch
    num_warps: int  # warps of a program of the first launch
    num_row_warps: int  # warps of a program of the second launch

    @classmethod
    @lru_cache(maxsize=64)
    def default_for(cls, vocab_size: int) -> TopLogprobsConfig:
        """Return the configuration for a GPU.

        The first launch is divided like a draw's, 16 elements per thread. Two programs of the
        second launch fit a multiprocessor, so that 256 rows run at once.
        """
        size, num_groups = group_size(vocab_size), padded_groups(vocab_size)
        return cls(
            tile_groups=min(2048 // size, num_groups),
            num_warps=4,
            num_row_warps=8 if num_groups <= 2048 else 16,
        )

    @classmethod
    def for_interpreter(cls, vocab_size: int) -> TopLogprobsConfig:
        """Return the configuration for the interpreter: up to 2^18 ids per program."""
        size, num_groups = group_size(vocab_size), padded_groups(vocab_size)
        return cls(tile_groups=min(num_groups, 2**18 // size), num_warps=1, num_row_warps=1)


def top_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_top: int,
    *,
    idx_mapping: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    row_num_top: torch.Tensor | None = None,
    shards: VocabShards | None = None,
) -> TopLogprobs:
    """Return log-probabilities and ranks of given tokens, and the best tokens of each row.

    Args:
        logits: [rows, vocab] float32 | float16 | bfloat16, unit last stride, at most 2^20 tokens;
            raw, or after penalties and masks.
        token_ids: [rows, n] int64, unit last stride: the tokens asked for, such as the sampled
            token; -1 (any id outside the vocabulary) = none.
        num_top: number of best tokens, 0 to vocab. The time grows with it: 32 are found together.
        idx_mapping: [rows] int32, contiguous: the slot of each row; -1 = padding row, whose logits
            are not read. ``temperature`` and ``row_num_top`` are then in slot order, [slots]. None
            = they are in row order.
        temperature: [rows] float32 >= 0, contiguous: divides the logits; 0 (greedy) or None = 1.
        row_num_top: [rows] int32, contiguous: number of best tokens of each row, if fewer than
            ``num_top``; the row's later columns are as in padding rows. None = ``num_top``.
        shards: as in ``sample_tokens``; the ranks have met since they wrote their logits, in a
            draw or in a sum over ranks. n is at most ``MAX_ASKED``.

    Returns:
        logprobs [rows, n] float32; ranks [rows, n] int64: 1 + the number of tokens with a strictly
        greater logit, so that equal logits share a rank; top_token_ids [rows, num_top] int64, best
        first, ties to the lowest id, and their top_logprobs [rows, num_top] float32. A token at
        -inf has logprob -inf. Where no token is asked for, the logprob is -inf and the rank 0; in
        padding rows, top_token_ids are also -1 and top_logprobs -inf. In a row with NaN or +inf,
        or with no logit but -inf, logprobs are NaN; top_token_ids order NaN like -inf.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: float32, within 1e-5 of torch's log_softmax; ranks and top_token_ids are exact. A
        row's results do not depend on the other rows.
    Stream: two launches on the current stream (none if nothing is asked for), no synchronisation,
        CUDA-graph safe. Allocates the results, 8 bytes for each 128 logits, and for each token
        asked for 4 bytes per program of its row (of 2048 logits on a GPU).
    """
    vocab_size = check_shards(logits, shards)
    num_rows, num_tokens = check_top_logprobs(
        logits, vocab_size, token_ids, num_top, idx_mapping, temperature, row_num_top, FLOAT_DTYPES
    )
    if shards is not None:
        check_asked(num_tokens)
    check_launchable("logits", logits)
    empty = partial(torch.empty, device=logits.device)
    results = TopLogprobs(
        empty((num_rows, num_tokens), dtype=torch.float32),
        empty((num_rows, num_tokens), dtype=torch.int64),
        empty((num_rows, num_top), dtype=torch.int64),
        empty((num_rows, num_top), dtype=torch.float32),
    )
    if num_rows == 0 or num_tokens + num_top == 0:
        return results
    if INTERPRET:
        config = TopLogprobsConfig.for_interpreter(vocab_size)
    else:
        config = TopLogprobsConfig.default_for(vocab_size)
    of_shards: dict[str, Any] = {}
    better_of_ranks: torch.Tensor | tuple[torch.Tensor, ...]
    if shards is None:
        num_groups = triton.cdiv(vocab_size, group_size(vocab_size))
        num_parts = triton.cdiv(num_groups, config.tile_groups)
        num_better = empty((num_rows, num_tokens, num_parts), dtype=torch.int32)
        better_of_ranks = num_better
    else:
        num_groups = shards.shard_size // group_size(vocab_size)
        num_parts = shards.size * triton.cdiv(num_groups, config.tile_groups)
        num_better, better_of_ranks = shards.num_better.own, shards.num_better.parts
        of_shards = second_launch(shards) | {"stride_better_call": num_better.stride(0)}
    groups = sum_groups(
        *(logits, idx_mapping, temperature, config.tile_groups, config.num_warps, shards),
        SUM_GREEDY=True,
        num_better_ptr=better_of_ranks,
        token_ids_ptr=token_ids,
        stride_token_ids_row=token_ids.stride(0),
        num_tokens=num_tokens,
    )
    _top_logprobs_kernel[(num_rows,)](
        *results, groups.maxima, groups.sums, num_better,
        logits if shards is None else shards.logits.parts, logits.stride(0),
        *with_strides(token_ids, 1), idx_mapping, temperature, row_num_top,
        num_tokens, num_top, vocab_size, groups.num_groups, num_parts,
        GROUP=groups.size, TILE_GROUPS=padded_groups(vocab_size),
        TILE_PARTS=triton.next_power_of_2(num_parts), num_warps=config.num_row_warps, **of_shards,
        **overlap_options(logits.device),
    )  # fmt: skip
    return results
