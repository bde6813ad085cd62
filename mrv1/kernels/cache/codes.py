"""Device functions of page formats with codes: codes to and from floats, scales of vectors.

``CODEC`` is the tag that ``PageFormat.codec`` gives for a format and a device. Codes of e4m3fn (no
infinity, NaN is 0x7F) are converted by the hardware or, with the same bits, by integer arithmetic
(see ``mrv1.device.fp8_path``).

A code of 4 bits is a subnormal fp16 as it is: code ``c`` in bits 0 to 3 reads c * 2^-24, in bits 4
to 7 c * 2^-20. Tensor cores multiply these exactly, so that an AND widens two codes of a 32-bit
word, and the scale of a score takes the power of two back (``nibble_factor``). AMD's matrix cores
may flush them to zero: there codes are converted to normal numbers with the same ratios.

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
NIBBLES = tl.constexpr(formats.INT4.tag("hardware"))
NIBBLES_INTEGER = tl.constexpr(formats.INT4.tag("integer"))
LARGEST_NIBBLE = tl.constexpr(float(formats.LARGEST_NIBBLE))
ZERO_MASK = tl.constexpr((1 << formats.ZERO_BITS) - 1)
SCALE_MASK = tl.constexpr(-(1 << formats.ZERO_BITS))
ZERO_STEPS = tl.constexpr(formats.ZERO_STEPS)
NAN_SCALE = tl.constexpr(formats.NAN_SCALE)
_ROUNDER = tl.constexpr(1.5 * 2.0**23)
"""Added to a float32 from 0 to 2^22, it leaves the nearest integer, ties to even, as low bits."""
_ROUNDER_BITS = tl.constexpr(0x4B400000)


@triton.constexpr_function
def is_nibbles(codec: str | None) -> bool:
    """Return whether a tag is that of 4-bit codes."""
    return codec in (NIBBLES.value, NIBBLES_INTEGER.value)


@triton.constexpr_function
def codes_in_byte(codec: str | None) -> int:
    """Return how many codes of a tag a byte holds."""
    return 2 if codec in (NIBBLES.value, NIBBLES_INTEGER.value) else 1


@triton.constexpr_function
def codes_in_word(codec: str | None) -> int:
    """Return how many codes of a tag decode attention reads in an int16; 1 = there are none."""
    return 1 if codec is None else 2 * codes_in_byte(codec)


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
def scale_of_parts(parts, CODEC: tl.constexpr):
    """Return the scale of each vector, float32 with a last axis of size 1; ``parts`` is a tuple.

    The elements of a vector are those along the last axes of all parts.
    """
    if is_nibbles(CODEC):
        axis: tl.constexpr = len(parts[0].shape) - 1
        lowest = tl.zeros_like(tl.min(parts[0].to(tl.float32), axis=axis, keep_dims=True))
        highest = lowest
        poison = lowest  # 0, or NaN if an element is not finite
        for index in tl.static_range(len(parts)):
            x = parts[index].to(tl.float32)
            lowest = tl.minimum(lowest, tl.min(x, axis=axis, keep_dims=True))
            highest = tl.maximum(highest, tl.max(x, axis=axis, keep_dims=True))
            poison += tl.sum(x * 0.0, axis=axis, keep_dims=True)
        fifteenth: tl.constexpr = 1.0 / LARGEST_NIBBLE
        scale = divide_exactly(highest, LARGEST_NIBBLE, fifteenth, 2)
        scale -= divide_exactly(lowest, LARGEST_NIBBLE, fifteenth, 2)
        scale = tl.maximum(scale, SMALLEST_SCALE)
        steps = tl.div_rn(-lowest, scale) * ZERO_STEPS + _ROUNDER
        bits = scale.to(tl.int32, bitcast=True) & SCALE_MASK
        bits |= steps.to(tl.int32, bitcast=True) & ZERO_MASK
        bits = tl.where(poison == 0.0, bits, NAN_SCALE)
        scale = bits.to(tl.float32, bitcast=True)
    else:
        absmax = finite_absmax(parts[0].to(tl.float32))
        for index in tl.static_range(1, len(parts)):
            absmax = tl.maximum(absmax, finite_absmax(parts[index].to(tl.float32)))
        scale = scale_of(absmax, CODEC)
    return scale


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
    if is_nibbles(CODEC):
        return _quantize_nibbles(wide, scale)
    if OWN_SCALE:
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        CORRECTIONS: tl.constexpr = 2 if x.dtype == tl.float32 else 1
        quotient = divide_exactly(wide, scale, inverse, CORRECTIONS)
    else:
        quotient = tl.div_rn(wide, tl.broadcast_to(scale, x.shape))
    return to_codes(quotient, CODEC)


@triton.jit
def _quantize_nibbles(x, scale):
    """Return the 4-bit codes of float32 vectors by their own scales, uint8, one in each."""
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    scaled = divide_exactly(x, scale, inverse, 2) + zero_of(scale)
    scaled = tl.minimum(tl.maximum(scaled, 0.0), LARGEST_NIBBLE)
    code = (scaled + _ROUNDER).to(tl.int32, bitcast=True) - _ROUNDER_BITS
    return tl.where(scale == scale, code, 0).to(tl.uint8)


@triton.jit
def zero_of(scale):
    """Return the code that stands for 0, which a 4-bit vector's scale holds, float32."""
    return (scale.to(tl.int32, bitcast=True) & ZERO_MASK).to(tl.float32) * (1.0 / ZERO_STEPS)


@triton.jit
def pack_nibbles(codes):
    """Return the bytes of pairs of 4-bit codes, neighbours along the last axis."""
    rank: tl.constexpr = len(codes.shape)
    half: tl.constexpr = codes.shape[rank - 1] // 2
    if rank == 2:
        low, high = tl.split(tl.reshape(codes, [codes.shape[0], half, 2]))
    else:
        low, high = tl.split(tl.reshape(codes, [codes.shape[0], codes.shape[1], half, 2]))
    return low | (high << 4)


@triton.jit
def nibble_rows(packed, scale):
    """Return ``code - zero`` of bytes [tokens, dim / 2] as [tokens, dim] fp16, exactly.

    A code c in bits 4 to 7 of an fp16 between 64 and 128, whose last bit is 1/16, makes it 64 + c;
    a zero in bits 0 to 7 makes it 64 + zero.
    """
    bits = packed.to(tl.uint16)
    low = ((bits << 4) & 0xF0) | 0x5400
    high = (bits & 0xF0) | 0x5400
    both = tl.reshape(tl.join(low, high), [packed.shape[0], 2 * packed.shape[1]])
    zero = (scale.to(tl.uint32, bitcast=True) & ZERO_MASK).to(tl.uint16) | 0x5400
    both = both.to(tl.uint16).to(tl.float16, bitcast=True)
    return (both - zero.to(tl.uint16).to(tl.float16, bitcast=True)[:, None]).to(tl.float16)


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
def decode_parts(words, CODEC: tl.constexpr):
    """Return the codes in each int16 as a tuple, lowest bits first, in fp16, exactly.

    Two values of e4m3, or four 4-bit codes, each times its factor (see ``part_factor``).
    """
    if is_nibbles(CODEC):
        parts = _decode_nibbles(words, CODEC)
    else:
        parts = e4m3_pairs(words, CODEC == E4M3_HARDWARE)
    return parts


@triton.jit
def part_factor(PART: tl.constexpr, CODEC: tl.constexpr):
    """Return what the values in a part of ``decode_parts`` are to be multiplied by, float32."""
    factor = tl.full([], 1.0, tl.float32)
    if CODEC == NIBBLES:
        factor = tl.full([], 2.0**24 if PART % 2 == 0 else 2.0**20, tl.float32)
    if CODEC == NIBBLES_INTEGER:
        factor = tl.full([], 1.0 if PART % 2 == 0 else 2.0**-4, tl.float32)
    return factor


@triton.jit
def product_query_parts(parts, CODEC: tl.constexpr):
    """Return ``[dim / parts, rows]`` parts of queries for products, their rows' divisors and sums.

    Products with ``decode_parts`` have one factor, that of part 1, and are to be multiplied by
    ``part_factor`` of it. The divisor is as ``product_query``'s, of fp16 too for 4-bit codes, and
    the sum is that of the row as it is multiplied, in units of the divisor.
    """
    IS_NIBBLES: tl.constexpr = is_nibbles(CODEC)
    unit = tl.full([parts[0].shape[1]], 1.0, tl.float32)
    total = tl.zeros([parts[0].shape[1]], tl.float32)
    if parts[0].dtype == tl.bfloat16 or (IS_NIBBLES and parts[0].dtype == tl.float16):
        largest = tl.full([parts[0].shape[1]], 1e-30, tl.float32)
        for part in tl.static_range(len(parts)):
            row_largest = tl.max(tl.abs(parts[part].to(tl.float32)), axis=0)
            largest = tl.maximum(largest, row_largest)
        unit = (largest.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        rounded = ()
        for part in tl.static_range(len(parts)):
            x = (parts[part].to(tl.float32) / unit[None, :]).to(tl.float16)
            rounded += (x,)  # type: ignore[assignment]
        parts = rounded
    if IS_NIBBLES:
        for part in tl.static_range(4):
            total += tl.sum(parts[part].to(tl.float32), axis=0)
        # Rounded already, so that sixteen times a subnormal is exact.
        parts = (parts[0] * 16.0, parts[1], parts[2] * 16.0, parts[3])
    return parts, unit, total


@triton.jit
def _decode_nibbles(words, CODEC: tl.constexpr):
    """Return the four codes in each int16, lowest bits first, as fp16 with a factor each.

    Of the second and the fourth it is 16 times that of the others, 1 / ``nibble_factor``.
    """
    if CODEC == NIBBLES_INTEGER:
        first, third = (words & 15).to(tl.float16), ((words >> 8) & 15).to(tl.float16)
        second, fourth = ((words >> 4) & 15).to(tl.float16), ((words >> 12) & 15).to(tl.float16)
        second, fourth = second * 16.0, fourth * 16.0
    elif INTERPRETED:
        first = (words & 0x0F).to(tl.float16, bitcast=True)
        second = (words & 0xF0).to(tl.float16, bitcast=True)
        third = ((words >> 8) & 0x0F).to(tl.float16, bitcast=True)
        fourth = ((words >> 8) & 0xF0).to(tl.float16, bitcast=True)
    else:  # five instructions for eight codes
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{
            .reg .b32 upper;
            and.b32 $0, $4, 0x000f000f;
            and.b32 $1, $4, 0x00f000f0;
            shr.b32 upper, $4, 8;
            and.b32 $2, upper, 0x000f000f;
            and.b32 $3, upper, 0x00f000f0;
            }""",
            "=r,=r,=r,=r,r", [words], dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    return first, second, third, fourth
