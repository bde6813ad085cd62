"""The activations of gates that ``linear`` and the ops for them alone share."""

from __future__ import annotations

from mrv1.kernels._base.triton import tl, triton

SILU = tl.constexpr(1)
"""Kind of a gate: silu. 0 is no gate."""
GELU_TANH = tl.constexpr(2)
"""Kind of a gate: gelu by tanh."""
CLAMPED_SWIGLU = tl.constexpr(3)
"""Kind of a gate: ``clamped_swiglu``."""
TWO_ROOT_TWO_OVER_PI = tl.constexpr(1.5957691216057308)
"""2 sqrt(2 / pi)."""


@triton.jit
def silu(x):
    """Return ``silu(x)`` of float32 ``x``: 0 where exp(-x) is infinite, also at -inf."""
    is_least = x == -float("inf")  # -inf / inf would be NaN
    return tl.where(is_least, -1.0, x) / (1.0 + tl.exp(-x))


@triton.jit
def gelu_tanh(x):
    """Return gelu by tanh of float32 ``x``, 0 at -inf: ``0.5 x (1 + tanh(u)) = x / (1 + e^-2u)``.

    u is ``sqrt(2 / pi) (x + 0.044715 x^3)``.
    """
    is_least = x == -float("inf")
    twice_u = TWO_ROOT_TWO_OVER_PI * (x + 0.044715 * (x * x * x))
    return tl.where(is_least, -1.0, x) / (1.0 + tl.exp(-twice_u))


@triton.jit
def clamped_swiglu(gate, up, alpha, limit):
    """Return ``(up + 1) * gate * sigmoid(alpha * gate)`` of float32 values within the limit."""
    gate = tl.where(gate > limit, limit, gate)  # a NaN stays NaN
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))


@triton.jit
def gated(gate, up, KIND: tl.constexpr):
    """Return ``up`` times the activation of ``gate``, both float32; KIND: SILU or GELU_TANH."""
    activated = gelu_tanh(gate) if KIND == GELU_TANH else silu(gate)
    return activated * up
