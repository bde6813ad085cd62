"""The activation that ``silu_and_mul`` and ``linear`` share."""

from __future__ import annotations

from mrv1.kernels._base.triton import tl, triton


@triton.jit
def silu(x):
    """Return ``silu(x)`` of float32 ``x``: 0 where exp(-x) is infinite, also at -inf."""
    is_least = x == -float("inf")  # -inf / inf would be NaN
    return tl.where(is_least, -1.0, x) / (1.0 + tl.exp(-x))
