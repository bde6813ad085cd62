"""The first launch of draws and log-probabilities: the maximum and sum of each group of logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.arithmetic import cdiv, next_power_of_2
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.sampling.contracts import group_size

_LOG2_E = tl.constexpr(1.4426950408889634)
_LARGEST = tl.constexpr(3.4028234663852886e38)


def padded_groups(vocab_size: int) -> int:
    """Return the number of groups of a row, rounded up to a power of two."""
    return next_power_of_2(cdiv(vocab_size, group_size(vocab_size)))


@triton.jit
def scale_of(temperature):
    """Return log2(e) / temperature, for exp2; bounded, as 0 * inf would be NaN."""
    return tl.minimum(tl.div_rn(_LOG2_E, temperature), _LARGEST)


@triton.jit(
    # a value that differs from batch to batch must not compile another kernel
    do_not_specialize=["stride_token_ids_row", "num_tokens"],
    do_not_specialize_on_alignment=["idx_mapping_ptr", "temperature_ptr", "token_ids_ptr"],
)
def group_sums_kernel(
    group_max_ptr,  # [num_rows, num_groups] float32
    group_sum_ptr,  # [num_rows, num_groups] float32
    logits_ptr,  # [num_rows, vocab_size], unit last stride
    stride_logits_row,
    idx_mapping_ptr,  # [num_rows] int32, -1 = padding; None: temperature is in row order
    temperature_ptr,  # [num_rows or slots] float32, 0 = greedy; None = 1
    vocab_size,
    num_groups,
    num_parts,
    GROUP: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,  # see dependent_launch
    SUM_GREEDY: tl.constexpr = False,  # greedy rows have sums too, at temperature 1
    num_better_ptr=None,  # [num_rows, num_tokens, num_parts] int32, with token_ids_ptr
    token_ids_ptr=None,  # [num_rows, num_tokens] int64, any id outside the vocabulary = none
    stride_token_ids_row=0,
    num_tokens=0,
):
    """Grid (num_rows * num_parts,): maxima, and sums of exp((x - maximum) / temperature).

    A sum is NaN if its group has NaN, or has +inf and the row is not greedy; 0 if the whole group
    is -inf; meaningless otherwise in a greedy row. For each token asked for, the program also
    counts its tokens with a greater logit.

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
    logits_row_ptr = logits_ptr + row * stride_logits_row
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
    in_row = (token < vocab_size) & is_row
    x = tl.load(logits_row_ptr + token, mask=in_row, other=float("-inf")).to(tl.float32)
    if token_ids_ptr is not None:
        for column in range(num_tokens):  # loads of their logits overlap the load of x
            token_id = tl.load(token_ids_ptr + row * stride_token_ids_row + column)
            is_token = is_row & (token_id >= 0) & (token_id < vocab_size)
            logit = tl.load(logits_row_ptr + token_id, mask=is_token, other=float("inf"))
            num_better = tl.sum((x > logit.to(tl.float32)).to(tl.int32))  # over all axes
            tl.store(num_better_ptr + (row * num_tokens + column) * num_parts + part, num_better)
    # Backends differ in the maximum of values with NaN: -inf takes the place of NaN.
    maximum = tl.max(tl.max(tl.where(x == x, x, float("-inf")), axis=1), axis=1)
    base = tl.where(maximum == float("-inf"), 0.0, maximum)[:, None, None]
    if temperature != 0.0:
        terms = tl.exp2((x - base) * scale)
    else:
        terms = tl.where(x == x, 0.0, float("nan"))
    total = tl.sum(tl.sum(terms, axis=1), axis=1)
    output = row * num_groups + group
    tl.store(group_max_ptr + output, maximum, mask=group < num_groups)
    tl.store(group_sum_ptr + output, total, mask=group < num_groups)


class GroupSums(NamedTuple):
    """What ``sum_groups`` has launched, and its results."""

    maxima: torch.Tensor
    """[rows, groups] float32."""
    sums: torch.Tensor
    """[rows, groups] float32."""
    size: int
    """Ids in a group."""
    num_groups: int


def sum_groups(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor | None,
    temperature: torch.Tensor | None,
    tile_groups: int,
    num_warps: int,
    **ranked: Any,  # noqa: ANN401 - the kernel's later arguments, without the count of parts
) -> GroupSums:
    """Launch ``group_sums_kernel`` with ``tile_groups`` groups of a row in a program."""
    num_rows, vocab_size = logits.shape
    size = group_size(vocab_size)
    num_groups = cdiv(vocab_size, size)
    num_parts = cdiv(num_groups, tile_groups)
    maxima, sums = logits.new_empty((2, num_rows, num_groups), dtype=torch.float32)
    group_sums_kernel[(num_rows * num_parts,)](
        *(maxima, sums),
        *with_strides(logits, 1),
        *(idx_mapping, temperature, vocab_size, num_groups, num_parts),
        GROUP=size,
        TILE_GROUPS=tile_groups,
        num_warps=num_warps,
        **ranked,
        **overlap_options(logits.device),
    )
    return GroupSums(maxima, sums, size, num_groups)
