"""Device functions of page formats with codes: codes to and from floats, scales of vectors.

``CODEC`` is the tag that ``PageFormat.codec`` gives for a format and a device. Codes of e4m3fn (no
infinity, NaN is 0x7F) are converted by the hardware or, with the same bits, by integer arithmetic
(see ``mrv1.device.fp8_path``).

Source: OCP 8-bit Floating Point Specification, revision 1.0 (E4M3).
"""

from __future__ import annotations

from mrv1.kernels._base.e4m3 import e4m3_codes, e4m3_pairs, e4m3_values
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.cache import formats

INTERPRETED = tl.constexpr(INTERPRET)
LARGEST_E4M3 = tl.constexpr(formats.FP8.largest)
SMALLEST_SCALE = tl.constexpr(formats.SMALLEST_SCALE)
E4M3_HARDWARE = tl.constexpr(formats.FP8.tag("hardware"))
E4M3_INTEGER = tl.constexpr(formats.FP8.tag("integer"))


@triton.jit
def to_codes(x, CODEC: tl.constexpr):
    """Return the codes of float32 ``x``, uint8: nearest, ties to even, saturated; NaN is 0x7F."""
    if CODEC == E4M3_HARDWARE and (INTERPRETED or x.numel > 1):
        code = e4m3_codes(x)
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        bounded = tl.minimum(magnitude, 0x43E00000)  # 448
        # Round to 3 mantissa bits, then move the exponent's bias from 127 to 7.
        normal = ((bounded + 0x7FFFF + ((bounded >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6: adding 2^14 puts the last mantissa bit at 2^-9, e4m3's smallest step.
        shifted = bounded.to(tl.float32, bitcast=True) + 16384.0
        subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(bounded < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)
        code = tl.where(magnitude > 0x7F800000, 0x7F, code).to(tl.uint8)
    return code


@triton.jit
def to_values(code, CODEC: tl.constexpr):
    """Return the values of codes in fp16, which represents every value exactly."""
    return e4m3_values(code, CODEC == E4M3_HARDWARE)


@triton.jit
def finite_absmax(x):
    """Return the largest finite magnitude of float32 ``x`` along its last axis, kept with size 1.

    Infinities and NaN times zero are NaN, which a GPU's maximum ignores: two instructions per
    element. If no element is finite, the result may be NaN, which ``scale_of`` ignores.
    """
    finite = tl.abs(tl.fma(x, 0.0, x))
    if INTERPRETED:  # the interpreter's maximum does not ignore NaN
        finite = tl.where(finite == finite, finite, 0.0)
    return tl.max(finite, axis=len(x.shape) - 1, keep_dims=True)


@triton.jit
def divide_exactly(x, divisor, inverse, CORRECTIONS: tl.constexpr):
    """Return float32 ``x / divisor``, rounded to nearest; ``inverse`` is 1 / divisor, so rounded.

    Faster than a division, which takes a subroutine. The second correction starts within a unit in
    the last place, so it ends with the nearest quotient (Markstein, IBM J. Res. Dev. 34(1), 1990),
    unless that over- or underflows. One correction is enough where ``quantize`` says so. 0 keeps
    its sign, infinity stays infinity.
    """
    first = x * inverse
    negated = x * -1.0  # folded into the multiply-add; "-x" is 0 - x, an instruction of its own
    inverse = inverse * -1.0
    quotient = tl.fma(tl.fma(first, divisor, negated), inverse, first)
    if CORRECTIONS == 2:
        quotient = tl.fma(tl.fma(quotient, divisor, negated), inverse, quotient)
    return tl.where(tl.abs(first) < float("inf"), quotient, first)  # inf - inf is NaN


@triton.jit
def scale_of(absmax, CODEC: tl.constexpr):
    """Return the scale of vectors of a largest magnitude: max(absmax / largest code, 1e-12)."""
    tl.static_assert((CODEC == E4M3_HARDWARE) | (CODEC == E4M3_INTEGER), "unknown codec")
    scale = divide_exactly(absmax, LARGEST_E4M3, 1.0 / LARGEST_E4M3, 2)
    return tl.maximum(scale, SMALLEST_SCALE)


@triton.jit
def quantize(x, scale, OWN_SCALE: tl.constexpr, CODEC: tl.constexpr):
    """Return the codes of ``x / scale``, divided in float32; ``scale`` has a last axis of size 1.

    OWN_SCALE says that ``scale`` is ``scale_of`` the vector itself: then no quotient overflows,
    quotients that underflow are far below the smallest code, and for the few significands of a
    16-bit type one correction gives the nearest quotient (a test tries them all).
    """
    wide = x.to(tl.float32)
    if OWN_SCALE:
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        CORRECTIONS: tl.constexpr = 2 if x.dtype == tl.float32 else 1
        quotient = divide_exactly(wide, scale, inverse, CORRECTIONS)
    else:
        quotient = tl.div_rn(wide, tl.broadcast_to(scale, x.shape))
    return to_codes(quotient, CODEC)


@triton.jit
def scale_index(token, BLOCK_SIZE: tl.constexpr, SCALES_PER_BLOCK: tl.constexpr):
    """Return the index of a token's scale in its block; no instruction with a scale per token."""
    return token // (BLOCK_SIZE // SCALES_PER_BLOCK)


@triton.jit
def product_query(q):
    """Return ``q`` as the products with fp8 keys take it, and the divisor of each row.

    fp16 and fp32 stay as they are. bf16 becomes fp16, to which keys convert cheaply, after a
    division by a power of two near the row's largest element: nothing overflows, and an element
    that underflows is at most 2^-25 of the largest.
    """
    unit = tl.full([q.shape[0]], 1.0, tl.float32)
    if q.dtype == tl.bfloat16:
        wide = q.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(wide), axis=1), 1e-30)
        unit = (largest.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        q = (wide / unit[:, None]).to(tl.float16)
    return q, unit


@triton.jit
def decode_pairs(codes, CODEC: tl.constexpr):
    """Return the values of the low and of the high code in each int16, in fp16, exactly."""
    return e4m3_pairs(codes, CODEC == E4M3_HARDWARE)


@triton.jit
def product_query_pairs(even, odd):
    """Return even and odd dimensions ``[dim / 2, rows]``, and divisors, as ``product_query``."""
    unit = tl.full([even.shape[1]], 1.0, tl.float32)
    if even.dtype == tl.bfloat16:
        even, odd = even.to(tl.float32), odd.to(tl.float32)
        largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=0)
        largest = tl.maximum(largest, 1e-30)
        unit = (largest.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        even, odd = (even / unit[None, :]).to(tl.float16), (odd / unit[None, :]).to(tl.float16)
    return even, odd, unit
