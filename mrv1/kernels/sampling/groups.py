"""The first launch of draws and log-probabilities: the maximum and sum of each group of logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.arithmetic import cdiv, next_power_of_2
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.sampling.contracts import group_size
from mrv1.kernels.sampling.shards import VocabShards, check_shards

_LOG2_E = tl.constexpr(1.4426950408889634)
_LARGEST = tl.constexpr(3.4028234663852886e38)


def padded_groups(vocab_size: int) -> int:
    """Return the number of groups of a row, rounded up to a power of two."""
    return next_power_of_2(cdiv(vocab_size, group_size(vocab_size)))


@triton.jit
def scale_of(temperature):
    """Return log2(e) / temperature, for exp2; bounded, as 0 * inf would be NaN."""
    return tl.minimum(tl.div_rn(_LOG2_E, temperature), _LARGEST)


@triton.jit
def shard_ptr(shard_ptrs, shard_size, token):
    """Return the address of token 0 in a shard that begins where ``token``'s shard does.

    Plus a token of that shard, it is the address of the token's logit in the first row.
    ``shard_ptrs``: a tuple, of each rank [rows, shard_size].
    """
    ptr = shard_ptrs[0]
    for rank in tl.static_range(1, len(shard_ptrs)):
        first_token = rank * shard_size
        ptr = tl.where(token >= first_token, shard_ptrs[rank] - first_token, ptr)
    return ptr


@triton.jit(
    # a value that differs from batch to batch must not compile another kernel
    do_not_specialize=["stride_token_ids_row", "num_tokens"],
    do_not_specialize_on_alignment=["idx_mapping_ptr", "temperature_ptr", "token_ids_ptr"],
)
def group_sums_kernel(
    group_max_ptr,  # [num_rows, num_groups] float32
    group_sum_ptr,  # [num_rows, num_groups] float32
    logits_ptr, stride_logits_row,  # [num_rows, vocab_size], unit last stride
    idx_mapping_ptr,  # [num_rows] int32, -1 = padding; None: temperature is in row order
    temperature_ptr,  # [num_rows or slots] float32, 0 = greedy; None = 1
    vocab_size, num_groups, num_parts,
    GROUP: tl.constexpr, TILE_GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,  # see dependent_launch
    SUM_GREEDY: tl.constexpr = False,  # greedy rows have sums too, at temperature 1
    num_better_ptr=None,  # [num_rows, num_tokens, num_parts] int32, with token_ids_ptr
    token_ids_ptr=None,  # [num_rows, num_tokens] int64, any id outside the vocabulary = none
    stride_token_ids_row=0, num_tokens=0,
    shard_size=None,  # ids of a rank; then pointers to maxima, sums, counts, logits are tuples
    calls_ptr=None,  # [2] int32, as VocabShards.calls; with shard_size
    stride_sums_call=0, stride_better_call=0,
    RANK: tl.constexpr = 0,
):  # fmt: skip
    """Grid (num_rows * num_parts,): maxima, and sums of exp((x - maximum) / temperature).

    A sum is NaN if its group has NaN, or has +inf and the row is not greedy; 0 if the whole group
    is -inf; meaningless otherwise in a greedy row. For each token asked for, the program also
    counts its tokens with a greater logit. With shards, the groups are those of the rank, and the
    results go to every rank.

    A group is a block of four quarters, so that most of its reduction is within a thread. The
    order of a sum depends on the tile's shape and the warps, never on the number of rows.
    """
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    QUARTER: tl.constexpr = GROUP // 4
    program = tl.program_id(0)
    row = (program // num_parts).to(tl.int64)
    part = program % num_parts
    group = part * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
    end_token, end_group = vocab_size, num_groups
    if shard_size is None:
        logits_row_ptr = logits_ptr + row * stride_logits_row
    else:
        first_token = RANK * shard_size
        end_token = tl.minimum(first_token + shard_size, vocab_size)
        group += first_token // GROUP
        end_group = tl.minimum((first_token + shard_size) // GROUP, num_groups)
        logits_row_ptr = logits_ptr[RANK] - first_token + row * stride_logits_row
        call = tl.load(calls_ptr) + 1  # the second launch of a call counts it as ended
        if program == 0:
            tl.store(calls_ptr + 1, call)
    slot = row
    if idx_mapping_ptr is not None:
        slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
    is_row = slot >= 0
    temperature = tl.full([], 1.0, tl.float32)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + slot, mask=is_row, other=0.0)
    divisor = tl.where(temperature != 0.0, temperature, 1.0)
    scale = scale_of(divisor)
    if SUM_GREEDY:
        temperature = divisor
    offset = (tl.arange(0, 4) * QUARTER)[None, :, None] + tl.arange(0, QUARTER)[None, None, :]
    token = group[:, None, None] * GROUP + offset
    in_row = (token < end_token) & is_row
    x = tl.load(logits_row_ptr + token, mask=in_row, other=float("-inf")).to(tl.float32)
    if token_ids_ptr is not None:
        for column in range(num_tokens):  # loads of their logits overlap the load of x
            token_id = tl.load(token_ids_ptr + row * stride_token_ids_row + column)
            is_token = is_row & (token_id >= 0) & (token_id < vocab_size)
            logit_ptr = logits_row_ptr + token_id
            if shard_size is not None:
                logit_ptr = shard_ptr(logits_ptr, shard_size, token_id) + token_id
                logit_ptr += row * stride_logits_row
            logit = tl.load(logit_ptr, mask=is_token, other=float("inf"))
            num_better = tl.sum((x > logit.to(tl.float32)).to(tl.int32))  # over all axes
            output = row * num_tokens + column
            if shard_size is None:
                tl.store(num_better_ptr + output * num_parts + part, num_better)
            else:
                SIZE: tl.constexpr = len(num_better_ptr)
                place = (output * SIZE + RANK) * num_parts + part
                place += (call & 1) * stride_better_call
                for rank in tl.static_range(SIZE):
                    tl.store(num_better_ptr[rank] + place, num_better)
    # Backends differ in the maximum of values with NaN: -inf takes the place of NaN.
    maximum = tl.max(tl.max(tl.where(x == x, x, float("-inf")), axis=1), axis=1)
    base = tl.where(maximum == float("-inf"), 0.0, maximum)[:, None, None]
    if temperature != 0.0:
        terms = tl.exp2((x - base) * scale)
    else:
        terms = tl.where(x == x, 0.0, float("nan"))
    total = tl.sum(tl.sum(terms, axis=1), axis=1)
    output = row * num_groups + group
    if shard_size is None:
        tl.store(group_max_ptr + output, maximum, mask=group < num_groups)
        tl.store(group_sum_ptr + output, total, mask=group < num_groups)
    else:
        output += (call & 1) * stride_sums_call
        for rank in tl.static_range(len(group_max_ptr)):
            tl.store(group_max_ptr[rank] + output, maximum, mask=group < end_group)
            tl.store(group_sum_ptr[rank] + output, total, mask=group < end_group)


class GroupSums(NamedTuple):
    """What ``sum_groups`` has launched, and its results, of all groups."""

    maxima: torch.Tensor  # [rows, groups] float32; with shards the memory of both halves
    sums: torch.Tensor  # as ``maxima``
    size: int  # ids in a group
    num_groups: int


def sum_groups(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor | None,
    temperature: torch.Tensor | None,
    tile_groups: int,
    num_warps: int,
    shards: VocabShards | None = None,
    **ranked: Any,  # noqa: ANN401 - the kernel's later arguments, without the count of parts
) -> GroupSums:
    """Launch ``group_sums_kernel`` with ``tile_groups`` groups of a row in a program."""
    num_rows, vocab_size = logits.shape[0], check_shards(logits, shards)
    size = group_size(vocab_size)
    num_groups = cdiv(vocab_size, size)
    if shards is None:
        num_parts = cdiv(num_groups, tile_groups)
        maxima, sums = logits.new_empty((2, num_rows, num_groups), dtype=torch.float32)
        memory: tuple[Any, ...] = (maxima, sums, *with_strides(logits, 1))
    else:
        num_parts = cdiv(shards.shard_size // size, tile_groups)
        maxima, sums = shards.sums.own[:, 0], shards.sums.own[:, 1]
        halves = [tuple(part[:, index] for part in shards.sums.parts) for index in range(2)]
        memory = (*halves, shards.logits.parts, logits.stride(0))
        ranked |= {
            "shard_size": shards.shard_size,
            "calls_ptr": shards.calls,
            "stride_sums_call": maxima.stride(0),
            "stride_better_call": shards.num_better.own.stride(0),
            "RANK": shards.rank,
        }
    group_sums_kernel[(num_rows * num_parts,)](
        *memory, idx_mapping, temperature, vocab_size, num_groups, num_parts,
        GROUP=size, TILE_GROUPS=tile_groups, num_warps=num_warps, **ranked,
        **overlap_options(logits.device),
    )  # fmt: skip
    return GroupSums(maxima, sums, size, num_groups)


def second_launch(shards: VocabShards) -> dict[str, Any]:
    """Return the arguments of a second launch that are for shards only."""
    return {
        "shard_size": shards.shard_size,
        "flag_ptrs": shards.flags.parts,
        "calls_ptr": shards.calls,
        "abort_ptr": shards.abort,
        "stride_sums_call": shards.sums.own.stride(0),
        "RANK": shards.rank,
    }
