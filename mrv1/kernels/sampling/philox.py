"""Random words that are a pure function of a counter and a key, and Gumbel noise from them.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

from mrv1.kernels._base.triton import tl, triton

_MULTIPLIER_0 = tl.constexpr(0xD2511F53)
_MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
_KEY_STEP_0 = tl.constexpr(0x9E3779B9)
_KEY_STEP_1 = tl.constexpr(0xBB67AE85)

_SERIES_BELOW = tl.constexpr(2.0**-5)  # where five terms leave a relative error of 2^-27


@triton.jit
def _multiply_wide(a, b):
    """Return the (high, low) 32-bit words of the product of two 32-bit words."""
    product = a.to(tl.uint64) * b
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def philox_word(seed, position, index, purpose, child):
    """Return word 0 of philox4x32-10 for counter (position, index, purpose, child), key seed.

    ``seed``, ``position``: int64; ``index``: int32 block; others int32. Returns a uint32 block.
    """
    k0, k1 = seed.to(tl.uint32), (seed.to(tl.uint64) >> 32).to(tl.uint32)
    c0, c1, c3 = position.to(tl.uint32), index.to(tl.uint32), child.to(tl.uint32)
    c2 = c0 * 0 + purpose
    for _ in tl.static_range(10):
        high0, low0 = _multiply_wide(c0, _MULTIPLIER_0)
        high1, low1 = _multiply_wide(c2, _MULTIPLIER_1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = tl.add(k0, _KEY_STEP_0, sanitize_overflow=False)
        k1 = tl.add(k1, _KEY_STEP_1, sanitize_overflow=False)
    return c0


@triton.jit
def gumbel(word):
    """Return -log(-log(1 - w)) of uint32 words, to float32 precision at both ends.

    The largest variables decide a draw. Their w is small and 1 - w would lose its digits, so the
    inner logarithm is its series; at the other end 1 - w comes from the word's complement.
    """
    w = word.to(tl.float32) * 2.0**-32 + 2.0**-33
    rest = (~word).to(tl.float32) * 2.0**-32 + 2.0**-33
    series = w * (1.0 + w * (1.0 / 2 + w * (1.0 / 3 + w * (1.0 / 4 + w * (1.0 / 5)))))
    return -tl.log(tl.where(w < _SERIES_BELOW, series, -tl.log(rest)))
