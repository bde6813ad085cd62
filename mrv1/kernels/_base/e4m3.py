"""Device functions that convert codes of e4m3fn (no infinity, NaN is 0x7F) to fp16, and back.

HARDWARE says whether the hardware converts them; integer arithmetic gives the same bits (see
``mrv1.device.fp8_path``).

Source: OCP 8-bit Floating Point Specification, revision 1.0 (E4M3).
"""

from __future__ import annotations

from mrv1.kernels._base.triton import INTERPRET, tl, triton

INTERPRETED = tl.constexpr(INTERPRET)


@triton.jit
def e4m3_values(code, HARDWARE: tl.constexpr):
    """Return the values of codes in fp16, which represents every value exactly."""
    if HARDWARE:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        bits = code.to(tl.uint16)
        magnitude = bits & 0x7F
        # As fp16 bits, a code's exponent and mantissa mean value / 2^8, also for subnormals.
        small = ((bits & 0x80) << 8) | (magnitude << 7)
        value = small.to(tl.uint16).to(tl.float16, bitcast=True) * 256.0
        value = value.to(tl.float16).to(tl.uint16, bitcast=True)
        value = tl.where(magnitude == 0x7F, 0x7E00, value).to(tl.uint16)
        value = value.to(tl.float16, bitcast=True)
    return value


@triton.jit
def e4m3_codes(x):
    """Return the codes of float32 ``x``, uint8, by the hardware: nearest, ties to even, saturated.

    Before 3.9, Triton's own cast for sm_89 goes through fp16, and so rounds twice.
    """
    if INTERPRETED:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,r,r",
            [x], dtype=tl.uint8, is_pure=True, pack=2,
        )  # fmt: skip
    return code


@triton.jit
def e4m3_pairs(codes, HARDWARE: tl.constexpr):
    """Return the values of the low and of the high code in each int16, in fp16, exactly.

    As pairs in 16-bit elements, codes are moved, transposed and passed to the tensor cores like
    any 16-bit type; single bytes would have to be shuffled into place one by one.
    """
    if not HARDWARE:
        low = _decode_high_byte(codes << 8)
        high = _decode_high_byte(codes)
    elif INTERPRETED:
        low = e4m3_values((codes & 0xFF).to(tl.uint8), HARDWARE)
        high = e4m3_values(((codes >> 8) & 0xFF).to(tl.uint8), HARDWARE)
    else:  # a shuffle and two conversions per four codes; Triton's own casts need twice that
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return low, high


@triton.jit
def _decode_high_byte(codes):
    """Return the value of the high byte's code, which as fp16 bits reads value / 2^8."""
    magnitude = codes & 0x7F00
    small = ((codes & -0x8000) | (magnitude >> 1)).to(tl.int16).to(tl.float16, bitcast=True)
    value = (small * 256.0).to(tl.float16)
    return tl.where(magnitude == 0x7F00, float("nan"), value)
