"""bfloat16 and the 8-bit floats in numpy: exact decoding, encoding rounded to nearest even.

Codes are ``uint16`` for bfloat16 and ``uint8`` for the 8-bit formats, named as Triton names them.
Encoding saturates the 8-bit formats, infinities included, as the GPU's ``cvt.rn.satfinite`` does;
NaN stays NaN.

Source: OCP 8-bit Floating Point Specification (e4m3, e5m2) and the fnuz variants of AMD CDNA3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Float8:
    mantissa_bits: int
    bias: int
    largest: int  # code of the largest finite value
    nans: tuple[int, ...]
    infinities: tuple[int, ...] = ()  # codes of +inf and -inf
    unsigned_zero: bool = False  # fnuz: no negative zero


_FLOAT8 = {
    "fp8e4nv": _Float8(3, 7, 0x7E, nans=(0x7F, 0xFF)),
    "fp8e5": _Float8(
        2, 15, 0x7B, nans=(0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), infinities=(0x7C, 0xFC)
    ),
    "fp8e4b8": _Float8(3, 8, 0x7F, nans=(0x80,), unsigned_zero=True),
    "fp8e5b16": _Float8(2, 16, 0x7F, nans=(0x80,), unsigned_zero=True),
}

PACKED = ("bf16", *_FLOAT8)
"""Formats numpy has no dtype for, so that the interpreter keeps them as integers."""


def _decode_table(fmt: _Float8) -> NDArray[np.float32]:
    codes = np.arange(256)
    mantissa = (codes & ((1 << fmt.mantissa_bits) - 1)) * 2.0**-fmt.mantissa_bits
    exponent = (codes & 0x7F) >> fmt.mantissa_bits
    value = np.where(
        exponent == 0,
        mantissa * 2.0 ** (1 - fmt.bias),
        (1 + mantissa) * 2.0 ** (exponent.astype(np.float64) - fmt.bias),
    )
    value = np.where(codes & 0x80, -value, value)
    value[list(fmt.nans)] = np.nan
    if fmt.infinities:
        value[list(fmt.infinities)] = np.inf, -np.inf
    return value.astype(np.float32)


_DECODED = {name: _decode_table(fmt) for name, fmt in _FLOAT8.items()}


def decode(codes: Array, name: str) -> NDArray[np.float32]:
    """Return the float32 values of ``codes``; formats numpy knows are simply cast."""
    if name == "bf16":
        widened: NDArray[np.float32] = (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return widened
    if name in _DECODED:
        return _DECODED[name][codes]
    return codes.astype(np.float32)


def encode(values: Array, name: str, *, toward_zero: bool = False) -> Array:
    """Return the codes of ``values``: ``fp16`` as numpy's own, ``bf16`` and fp8 as integers."""
    values = np.asarray(values, dtype=np.float32, order="C")
    if name == "fp16":
        return _encode_float16(values, toward_zero=toward_zero)
    if name == "bf16":
        return _encode_bfloat16(values, toward_zero=toward_zero)
    return _encode_float8(values, _FLOAT8[name], toward_zero=toward_zero)


def _encode_float16(values: Array, *, toward_zero: bool) -> Array:
    with np.errstate(all="ignore"):
        rounded = values.astype(np.float16)
        if not toward_zero:
            return rounded
        away = np.abs(rounded).astype(np.float32) > np.abs(values)
        return np.where(away, np.nextafter(rounded, np.float16(0)), rounded)


def _encode_bfloat16(values: Array, *, toward_zero: bool) -> Array:
    bits = values.view(np.uint32)
    if not toward_zero:
        bits = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    codes = (bits >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), codes)


def _encode_float8(values: Array, fmt: _Float8, *, toward_zero: bool) -> Array:
    bits = values.view(np.uint32)
    magnitude_bits = bits & np.uint32(0x7FFFFFFF)
    codes = _normal_codes(magnitude_bits, fmt, toward_zero=toward_zero)
    with np.errstate(invalid="ignore"):  # a signalling NaN warns
        magnitude = magnitude_bits.view(np.float32).astype(np.float64)
    subnormal = magnitude < 2.0 ** (1 - fmt.bias)
    steps = np.where(subnormal, magnitude, 0.0) * 2.0 ** (fmt.bias + fmt.mantissa_bits - 1)
    steps = np.trunc(steps) if toward_zero else np.rint(steps)
    codes = np.where(subnormal, steps.astype(np.int64), codes)
    codes = np.minimum(codes, fmt.largest).astype(np.uint8)
    signed = codes | ((bits >> np.uint32(24)) & np.uint32(0x80)).astype(np.uint8)
    if fmt.unsigned_zero:
        signed = np.where(codes == 0, np.uint8(0), signed)
    return np.where(np.isnan(values), np.uint8(fmt.nans[0]), signed)


def _normal_codes(magnitude_bits: Array, fmt: _Float8, *, toward_zero: bool) -> Array:
    """Round float32 magnitudes in place of their own mantissa: a carry moves into the exponent."""
    shift = np.uint32(23 - fmt.mantissa_bits)
    if not toward_zero:
        half_below = np.uint32((1 << (22 - fmt.mantissa_bits)) - 1)
        magnitude_bits = magnitude_bits + (half_below + ((magnitude_bits >> shift) & np.uint32(1)))
    return (magnitude_bits >> shift).astype(np.int64) - ((127 - fmt.bias) << fmt.mantissa_bits)
