"""The scale of an RMS norm: kernels that share it give a row the same bits."""

from __future__ import annotations

from mrv1.kernels._base.triton import tl, triton


@triton.jit
def inverse_rms(x, dim, eps):
    """Return [rows], ``1 / sqrt(mean(x^2) + eps)`` of ``x``, [rows, columns] float32.

    A row has ``dim`` values, then zeros up to a power of two.
    """
    return tl.rsqrt(_sum_of_squares(x) / dim + eps)


@triton.jit
def _sum_of_squares(x):
    """Return [rows], the sums of the squares of each row.

    Neighbours are added first, then pairs of them,
    and so on: ``tl.sum`` adds in an order that follows the layout, and so the kernel.
    """
    ROWS: tl.constexpr = x.shape[0]
    COLS: tl.constexpr = x.shape[1]
    if COLS == 1:
        y = tl.reshape(x * x, [ROWS])
    else:
        even, odd = tl.split(tl.reshape(x, [ROWS, COLS // 2, 2]))
        # The compiler may fuse a square with the sum in one kernel and not in another.
        y = _sum_of_neighbours(tl.fma(even, even, odd * odd))
    return y


@triton.jit
def _sum_of_neighbours(x):
    """Return [rows], the sums of the values of each row."""
    ROWS: tl.constexpr = x.shape[0]
    COLS: tl.constexpr = x.shape[1]
    if COLS == 1:
        y = tl.reshape(x, [ROWS])
    else:
        y = _sum_of_neighbours(tl.sum(tl.reshape(x, [ROWS, COLS // 2, 2]), axis=2))
    return y
