"""The first launch of a draw: one read of the logits leaves each group's maximum and sum."""

from __future__ import annotations

from mrv1.kernels._overlap import let_next_start, wait_for_previous
from mrv1.kernels._triton import tl, triton

MAX_GROUPS = 4096
"""Of a row: what the second launch holds at once."""

_LOG2_E = tl.constexpr(1.4426950408889634)
_LARGEST = tl.constexpr(3.4028234663852886e38)


def group_size(vocab_size: int) -> int:
    """Return how many consecutive token ids are one group: 128, beyond 524,288 ids more."""
    size = 128
    while size * MAX_GROUPS < vocab_size:
        size *= 2
    return size


@triton.jit
def scale_of(temperature):
    """Return log2(e) / temperature: exp2(x * scale) = exp(x / temperature).

    Bounded, so that 0 times it is 0 whatever the temperature.
    """
    return tl.minimum(tl.div_rn(_LOG2_E, temperature), _LARGEST)


@triton.jit
def group_sums_kernel(
    group_max_ptr,  # [num_rows, num_groups] float32
    group_sum_ptr,  # [num_rows, num_groups] float32
    logits_ptr,  # [num_rows, vocab_size], unit last stride
    stride_logits_row,
    idx_mapping_ptr,  # [num_rows] int32, -1 = padding; None: temperature is in row order
    temperature_ptr,  # [num_rows or slots] float32, 0 = greedy
    vocab_size,
    num_groups,
    num_parts,
    GROUP: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,  # see _overlap
):
    """Grid (num_rows * num_parts,): maxima, and sums of exp((x - maximum) / temperature).

    A sum is NaN where its group holds NaN, or +inf in a row that is drawn; 0 where all is -inf;
    and has no other meaning in a greedy row.

    A group lies as quarters behind each other, so that most of its reduction is within a thread:
    the order of a sum depends on the tile's shape and the warps, never on the number of rows.
    """
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    QUARTER: tl.constexpr = GROUP // 4
    program = tl.program_id(0)
    row = (program // num_parts).to(tl.int64)
    group = (program % num_parts) * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
    logits_row_ptr = logits_ptr + row * stride_logits_row
    slot = row
    if idx_mapping_ptr is not None:
        slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
    is_row = slot >= 0
    temperature = tl.load(temperature_ptr + slot, mask=is_row, other=0.0)
    scale = scale_of(tl.where(temperature != 0.0, temperature, 1.0))
    offset = (tl.arange(0, 4) * QUARTER)[None, :, None] + tl.arange(0, QUARTER)[None, None, :]
    token = group[:, None, None] * GROUP + offset
    in_row = (token < vocab_size) & is_row
    x = tl.load(logits_row_ptr + token, mask=in_row, other=float("-inf")).to(tl.float32)
    # What a maximum is where there is NaN differs from backend to backend.
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
