"""Device functions of fp8 caches: e4m3 codes to and from floats, scales of (token, head) vectors.

Codes are ``uint8`` (e4m3fn: no infinity, NaN is 0x7F), so that no kernel argument has a type which
a GPU without e4m3 lacks. ``PATH`` says who converts: ``"hardware"`` or, with the same bits,
``"integer"`` arithmetic (see ``mrv1.device.fp8_path``).

Source: OCP 8-bit Floating Point Specification, revision 1.0 (E4M3).
"""

from __future__ import annotations

from mrv1.kernels._triton import tl, triton
from mrv1.kernels.kv_scales import LARGEST_E4M3 as LARGEST_E4M3_VALUE
from mrv1.kernels.kv_scales import SMALLEST_SCALE as SMALLEST_SCALE_VALUE

LARGEST_E4M3 = tl.constexpr(LARGEST_E4M3_VALUE)
SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE_VALUE)


@triton.jit
def encode_e4m3(x, PATH: tl.constexpr):
    """Return the codes of float32 ``x``: nearest, ties to even; +-448 beyond; NaN is 0x7F."""
    if PATH == "hardware":
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
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
def decode_e4m3(code, PATH: tl.constexpr):
    """Return the values of ``code`` in fp16, which holds them all exactly."""
    if PATH == "hardware":
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        bits = code.to(tl.uint16)
        magnitude = bits & 0x7F
        # As fp16 bits the code's exponent and mantissa are value / 2^8, subnormals too.
        small = ((bits & 0x80) << 8) | (magnitude << 7)
        value = small.to(tl.uint16).to(tl.float16, bitcast=True) * 256.0
        value = value.to(tl.float16).to(tl.uint16, bitcast=True)
        value = tl.where(magnitude == 0x7F, 0x7E00, value).to(tl.uint16)
        value = value.to(tl.float16, bitcast=True)
    return value


@triton.jit
def vector_scale(x):
    """Return max(absmax / 448, 1e-12) of each row of float32 ``x``; only finite ones count."""
    magnitude = tl.abs(x)
    finite = magnitude < float("inf")  # false of NaN
    largest = tl.max(tl.where(finite, magnitude, 0.0), axis=1)
    scale = tl.div_rn(largest, tl.full(largest.shape, LARGEST_E4M3, tl.float32))
    return tl.maximum(scale, SMALLEST_SCALE)


@triton.jit
def quantize(x, scale, PATH: tl.constexpr):
    """Return the codes of float32 ``x [rows, dim] / scale [rows]``."""
    return encode_e4m3(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)), PATH)


@triton.jit
def product_query(q):
    """Return ``q`` as the products with fp8 keys take it, and the factor per row it lost.

    fp16 and fp32 are taken as they are. bf16 goes to fp16, that the keys convert to cheaply, in
    units of a power of two near its row's largest element: nothing overflows, and what underflows
    is 2^-25 of the largest.
    """
    unit = tl.full([q.shape[0]], 1.0, tl.float32)
    if q.dtype == tl.bfloat16:
        wide = q.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(wide), axis=1), 1e-30)
        unit = (largest.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        q = (wide / unit[:, None]).to(tl.float16)
    return q, unit
