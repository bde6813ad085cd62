"""Integer arithmetic for launch choices, in plain Python because contracts import no triton."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """Return ceil(a / b)."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two >= n."""
    return 1 << max(n - 1, 0).bit_length()
