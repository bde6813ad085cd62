"""Tiles whose lines are shared by four lanes of a warp: loads, operands of the tensor cores, sums.

A *line* is what four lanes load of a row, 16 bytes each. Each warp has its own part of every row,
so operands stay in the registers that they are loaded into.
"""

from __future__ import annotations

from mrv1.kernels._base.triton import tl, triton


@triton.jit
def lane_rows(ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Return [ROWS * WARPS, 1]: the row of each line of a tile, see load_lanes."""
    line = tl.arange(0, ROWS * WARPS)[:, None]
    return line // (8 * WARPS) * 8 + line % 8


@triton.jit
def load_lanes(
    rows, first,
    END: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, WARP_IN: tl.constexpr,
    NUM_COLS: tl.constexpr,
):  # fmt: skip
    """Return [ROWS * WARPS, 32]: lines of 32 columns, four lanes each, from column ``first`` on.

    Eight lines are eight rows of one warp; the next eight are the same rows of the next warp,
    WARP_IN columns on. ``rows`` points to each line's row; END None = no column is past the end.
    Columns of a line from NUM_COLS on are zeros.
    """
    warp = tl.arange(0, ROWS * WARPS)[:, None] // 8 % WARPS
    col_of_line = tl.arange(0, 32)[None, :]
    col = first + warp * WARP_IN + col_of_line
    mask = rows.is_row & (col < END) if END is not None else rows.is_row
    if NUM_COLS < 32:
        mask = mask & (col_of_line < NUM_COLS)
    return tl.load(rows.ptr + col, mask=mask, other=0.0)


@triton.jit
def as_operand(lines, ROWS: tl.constexpr, WARPS: tl.constexpr, IN_ORDER: tl.constexpr):
    """Return the lines of load_lanes as [WARPS, ROWS, 32], columns in the tensor cores' order.

    A lane has eight columns. The tensor cores take sixteen at once and expect four from a lane:
    two neighbours, and the two that follow eight columns later. The sixteen are a half of each
    lane's columns; IN_ORDER the line's first or last sixteen, so lanes exchange halves.
    """
    if IN_ORDER:
        lines = tl.reshape(lines, [ROWS // 8, WARPS, 8, 2, 2, 2, 2, 2])
        lines = tl.permute(lines, (1, 0, 2, 3, 6, 5, 4, 7))
    else:
        lines = tl.reshape(lines, [ROWS // 8, WARPS, 8, 4, 2, 2, 2])
        lines = tl.permute(lines, (1, 0, 2, 4, 5, 3, 6))
    return tl.reshape(lines, [WARPS, ROWS, 32])


@triton.jit
def sum_in_order(y, WARPS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """Return [ROWS, TOKENS], the sum of [WARPS, ROWS, TOKENS] from the first warp to the last."""
    y = tl.reshape(tl.permute(y, (1, 2, 0)), [ROWS, TOKENS, WARPS // 4, 2, 2])
    even, odd = tl.split(y)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    if WARPS == 8:
        first, fifth = tl.split(first)
        second, sixth = tl.split(second)
        third, seventh = tl.split(third)
        fourth, eighth = tl.split(fourth)
        y = first + second + third + fourth + fifth + sixth + seventh + eighth
    else:
        y = first + second + third + fourth
    return tl.reshape(y, [ROWS, TOKENS])


@triton.jit
def sum_of_warps(y, WARPS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """Return [ROWS, TOKENS], the sum of [WARPS, ROWS, TOKENS] over warps, neighbours first."""
    y = tl.reshape(tl.permute(y, (1, 2, 0)), [ROWS, TOKENS, WARPS // 4, 2, 2])
    first, second = tl.split(y)
    first, second = tl.split(first + second)
    y = first + second
    if WARPS == 8:
        first, second = tl.split(y)
        y = first + second
    return tl.reshape(y, [ROWS, TOKENS])
