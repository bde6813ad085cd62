"""Device functions that widen the codes of quantized weights.

Codes are taken as int16: an element has four codes of 4 bits, or two of 8. Two elements fill a
register of a GPU. The same code of both is a pair of values, which one or two instructions make
out of bits: with the exponent of 128 (bfloat16) or 1,024 (float16) above a code's bits, the number
is that power of two plus the code. Pairs come from ``mma``'s operands in the same order, so no
byte is moved.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mrv1.device import fp8_path
from mrv1.kernels._base.e4m3 import INTERPRETED, e4m3_pairs
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.layers.quantized import CODES, SUPER_BLOCK, QuantizedWeight

BLOCK_IN = tl.constexpr(SUPER_BLOCK)


class Matrix(NamedTuple):
    """The tensors of a quantized weight, contiguous; see ``QuantizedWeight``."""

    codes: tl.tensor  # [out, IN / codes per element] int16
    scales: tl.tensor  # [scales, GROUPS], or None
    zeros: tl.tensor  # as scales, or None
    mins: tl.tensor  # as scales, or None
    heads: tl.tensor  # [out, IN / 256, 4] int32, or of q6_k [out, IN / 256, 9] int16, or None
    high: tl.tensor  # q5_k: [out, IN / 32] int32; q6_k: [out, IN / 16] int32; or None


def has_pairs() -> bool:
    """Return whether this process compiles for NVIDIA's GPUs, whose registers hold pairs."""
    return not INTERPRET and torch.version.hip is None


def converts_e4m3(device: torch.device) -> bool | None:
    """Return ``widen``'s HARDWARE for a device."""
    return fp8_path(device).path == "hardware" if has_pairs() else None


def codes_per_element(weight: QuantizedWeight) -> int:
    """Return the codes in 16 bits."""
    return 2 * CODES[weight.code].per_byte


@triton.jit
def widen(codes, CODE: tl.constexpr, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """Return the values of the 4 or 2 codes in each int16, in order, each a tensor of DTYPE.

    HARDWARE says whether e4m3 is converted by the hardware; None = without NVIDIA's instructions.
    Values are exact: of uint4 and the K types the code less 8, else the code.
    """
    if HARDWARE is None:
        values = _widen_anywhere(codes, CODE, DTYPE)
    elif CODE == "e4m3":
        is_float16: tl.constexpr = tl.float16 == DTYPE
        values = e4m3_pairs(codes, HARDWARE) if is_float16 else _e4m3_pairs(codes)
    elif CODE == "int8":
        values = _int8_pairs(codes, DTYPE)
    elif CODE == "e2m1":
        values = _e2m1_pairs(codes, DTYPE)
    else:
        values = _nibble_pairs(codes, DTYPE)
    return values


@triton.jit
def _widen_anywhere(codes, CODE: tl.constexpr, DTYPE: tl.constexpr):
    wide = codes.to(tl.int32)
    if CODE == "e4m3":
        low, high = e4m3_pairs(codes, INTERPRETED)
        values = (low.to(DTYPE), high.to(DTYPE))
    elif CODE == "int8":
        values = (((wide << 24) >> 24).to(DTYPE), ((wide << 16) >> 24).to(DTYPE))
    else:
        values = (
            _nibble(wide, CODE, DTYPE),
            _nibble(wide >> 4, CODE, DTYPE),
            _nibble(wide >> 8, CODE, DTYPE),
            _nibble(wide >> 12, CODE, DTYPE),
        )  # type: ignore[assignment]
    return values


@triton.jit
def _nibble(wide, CODE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the value of the lowest four bits."""
    if CODE == "e2m1":
        # As fp16 bits, exponent and mantissa of a code mean value / 2^14, also for subnormals.
        bits = ((wide & 8) << 12) | ((wide & 7) << 9)
        small = bits.to(tl.int16).to(tl.float16, bitcast=True)
        value = (small.to(tl.float32) * 16384.0).to(DTYPE)
    else:
        value = ((wide & 15) - 8).to(DTYPE)
    return value


@triton.jit
def _e4m3_pairs(codes):
    """Return both codes in bfloat16, whose bits read value / 2^120, also for subnormals."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, sign, scale, zero;
        mov.b32 scale, 0x7B807B80;
        mov.b32 zero, 0x80008000;
        shl.b32 low, $2, 4;
        shl.b32 sign, $2, 8;
        and.b32 sign, sign, 0x80008000;
        lop3.b32 low, low, 0x07F007F0, sign, 0xEA;
        fma.rn.bf16x2 $0, low, scale, zero;
        shr.u32 high, $2, 4;
        and.b32 sign, $2, 0x80008000;
        lop3.b32 high, high, 0x07F007F0, sign, 0xEA;
        fma.rn.bf16x2 $1, high, scale, zero;
        }""",
        "=&r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _int8_pairs(codes, DTYPE: tl.constexpr):
    """Return both codes.

    bfloat16 has 7 bits below the leading one: 128 + the low 7 bits, less 128, or 256 if negative.
    """
    if tl.float16 == DTYPE:
        values = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high, offset;
            mov.b32 offset, 0x64806480;
            lop3.b32 low, $2, 0x00FF00FF, offset, 0x6A;
            sub.f16x2 $0, low, offset;
            shr.u32 high, $2, 8;
            lop3.b32 high, high, 0x00FF00FF, offset, 0x6A;
            sub.f16x2 $1, high, offset;
            }""",
            "=&r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        values = tl.inline_asm_elementwise(
            """{
            .reg .b32 bits, low, top, unit, negated;
            mov.b32 unit, 0x43004300;
            mov.b32 negated, 0xBF80BF80;
            lop3.b32 low, $2, 0x007F007F, unit, 0xEA;
            lop3.b32 top, $2, 0x00800080, unit, 0xEA;
            shr.u32 bits, $2, 8;
            fma.rn.bf16x2 $0, top, negated, low;
            lop3.b32 low, bits, 0x007F007F, unit, 0xEA;
            lop3.b32 top, bits, 0x00800080, unit, 0xEA;
            fma.rn.bf16x2 $1, top, negated, low;
            }""",
            "=&r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    return values


@triton.jit
def _nibble_pairs(codes, DTYPE: tl.constexpr):
    """Return the four codes less 8."""
    return _four_pairs(codes, _nibble_instructions(tl.float16 == DTYPE), DTYPE)


@triton.constexpr_function
def _nibble_instructions(is_float16: bool) -> str:
    if is_float16:
        names, value = "bits, unit, offset", "sub.f16x2 ${}, bits, offset;"
        lines = ["mov.b32 unit, 0x64006400;", "mov.b32 offset, 0x64086408;"]
    else:
        names, value = "bits, unit, one, offset", "fma.rn.bf16x2 ${}, bits, one, offset;"
        lines = ["mov.b32 unit, 0x43004300;", "mov.b32 one, 0x3F803F80;"]
        lines.append("mov.b32 offset, 0xC308C308;")
    for index in range(4):
        source = "bits" if index else "$4"
        if index:
            lines.append(f"shr.u32 bits, $4, {4 * index};")
        lines.append(f"lop3.b32 bits, {source}, 0x000F000F, unit, 0xEA;")
        lines.append(value.format(index))
    return "\n".join(["{", f".reg .b32 {names};", *lines, "}"])


@triton.jit
def _e2m1_pairs(codes, DTYPE: tl.constexpr):
    """Return the four codes; as bits they read value / 2^14 in float16, / 2^126 in bfloat16."""
    return _four_pairs(codes, _e2m1_instructions(tl.float16 == DTYPE), DTYPE)


@triton.constexpr_function
def _e2m1_instructions(is_float16: bool) -> str:
    if is_float16:
        names, value, place, mask = "", "mul.f16x2 ${}, bits, scale;", 9, "0x0E000E00"
        lines = ["mov.b32 scale, 0x74007400;"]
    else:
        names, value = ", zero", "fma.rn.bf16x2 ${}, bits, scale, zero;"
        place, mask = 6, "0x01C001C0"
        lines = ["mov.b32 scale, 0x7E807E80;", "mov.b32 zero, 0x80008000;"]
    for index in range(4):
        left = place - 4 * index
        lines.append(f"shl.b32 bits, $4, {left};" if left > 0 else f"shr.u32 bits, $4, {-left};")
        sign = "sign" if index < 3 else "$4"
        if index < 3:
            lines.append(f"shl.b32 sign, $4, {12 - 4 * index};")
        lines.append(f"and.b32 sign, {sign}, 0x80008000;")
        lines.append(f"lop3.b32 bits, bits, {mask}, sign, 0xEA;")
        lines.append(value.format(index))
    return "\n".join(["{", f".reg .b32 bits, sign, scale{names};", *lines, "}"])


@triton.jit
def _four_pairs(codes, INSTRUCTIONS: tl.constexpr, DTYPE: tl.constexpr):
    """Return what instructions make of the four codes in each int16 of two, in a 16-bit dtype."""
    if tl.float16 == DTYPE:
        values = tl.inline_asm_elementwise(
            INSTRUCTIONS, "=&r,=&r,=&r,=r,r", [codes],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        values = tl.inline_asm_elementwise(
            INSTRUCTIONS, "=&r,=&r,=&r,=r,r", [codes],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    return values


@triton.jit
def _bits(ptr, mask, PER_LANE: tl.constexpr):
    """Load numbers of up to 32 bits, [lines, elements], as int32.

    With PER_LANE each eight neighbours, which are one lane's, have one address and one mask: a
    single load brings the number for all of them, in whatever layout they are.
    """
    if PER_LANE and not INTERPRETED:
        address = tl.where(mask, ptr.to(tl.int64), 0)
        if ptr.dtype.element_ty.primitive_bitwidth == 8:
            bits = _load_per_lane(address, "u8")
        elif ptr.dtype.element_ty.primitive_bitwidth == 16:
            bits = _load_per_lane(address, "u16")
        else:
            bits = _load_per_lane(address, "b32")
    else:
        number = tl.load(ptr, mask=mask, other=0)
        if number.dtype.primitive_bitwidth == 16:
            number = number.to(tl.uint16, bitcast=True)
        elif number.dtype == tl.int8:
            number = number.to(tl.uint8, bitcast=True)
        bits = number.to(tl.int32, bitcast=number.dtype == tl.float32)
    return bits


@triton.jit
def _load_per_lane(address, KIND: tl.constexpr):
    """Return int32 [...]: of each eight elements of a thread what the first points to; 0 = 0."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred some;
        setp.ne.s64 some, $8, 0;
        mov.b32 $0, 0;
        @some ld.global.nc.""" + KIND + """ $0, [$8];
        mov.b32 $1, $0;
        mov.b32 $2, $0;
        mov.b32 $3, $0;
        mov.b32 $4, $0;
        mov.b32 $5, $0;
        mov.b32 $6, $0;
        mov.b32 $7, $0;
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l,l,l,l,l,l,l,l",
        [address], dtype=tl.int32, is_pure=True, pack=8,
    )  # fmt: skip


@triton.jit
def load_bits(ptr, mask):
    """Load numbers of up to 32 bits as int32; where the mask is false, zeros.

    Of 16 bits or 8, the load itself widens them: code that carries numbers to a later step need
    not wait for them.
    """
    WIDTH: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    if WIDTH < 32 and not INTERPRETED:
        bits = _load_wide(ptr, mask, "u8" if WIDTH == 8 else "u16")
    else:
        bits = _bits(ptr, mask, False)
    return bits


@triton.jit
def _load_wide(ptr, mask, KIND: tl.constexpr):
    """Return int32: what each pointer points to. Not pure, so that it stays in its place."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred some;
        setp.ne.s32 some, $2, 0;
        mov.b32 $0, 0;
        @some ld.global.nc.""" + KIND + """ $0, [$1];
        }""",
        "=&r,l,r", [ptr.to(tl.int64), mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def as_float(bits, DTYPE: tl.constexpr):
    """Return float32 numbers by their bits in DTYPE; uint8 = exponents of e8m0."""
    if tl.uint8 == DTYPE:
        # 2^-127, of the exponent 0, is subnormal.
        number = tl.where(bits == 0, 0x400000, bits << 23).to(tl.float32, bitcast=True)
    elif tl.float32 == DTYPE:
        number = bits.to(tl.float32, bitcast=True)
    elif tl.bfloat16 == DTYPE:
        number = (bits << 16).to(tl.float32, bitcast=True)
    else:
        number = bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return number


@triton.jit
def _byte(bits, at):
    """Return a byte of int32, without sign."""
    return (bits >> (8 * at)) & 255


@triton.jit
def dense_values(
    matrix, codes, row, element, mask,
    CODE: tl.constexpr, DTYPE: tl.constexpr, HARDWARE: tl.constexpr, IN: tl.constexpr,
    GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, PER_LANE: tl.constexpr,
):  # fmt: skip
    """Return the values of loaded codes as ``QuantizedWeight.dense`` rounds them, a tuple.

    ``row`` is [lines, 1], ``element`` an index of 16 bits in a row of codes, [1 or lines,
    elements]. PER_LANE says that each eight neighbours have the same scale.
    """
    PER: tl.constexpr = 2 if (CODE == "e4m3") | (CODE == "int8") else 4
    values = widen(codes, CODE, tl.float32 if HARDWARE is None else DTYPE, HARDWARE)
    # Of a lane's eight elements the first, where they share numbers.
    col = (element // 8 * 8 if PER_LANE else element) * PER
    shift = None
    offset = None
    IS_BFLOAT16: tl.constexpr = tl.bfloat16 == DTYPE
    EXPONENTS: tl.constexpr = (
        matrix.scales is not None and matrix.scales.dtype.element_ty == tl.uint8
    )
    IS_EXACT: tl.constexpr = HARDWARE is not None and IS_BFLOAT16 and EXPONENTS
    if matrix.heads is not None:
        block = row * (IN // BLOCK_IN) + col // BLOCK_IN
        if CODE == "q6_k":
            head = matrix.heads + block * 9
            pair = _bits(head + col % BLOCK_IN // 32, mask, PER_LANE)
            number = _byte(pair, element * PER % 32 // 16)
            number = ((number ^ 128) - 128).to(tl.float32)
            scale = as_float(_bits(head + 8, mask, PER_LANE), tl.float16) * number
            shift = -24.0
        else:
            head = matrix.heads + block * 4
            steps = _bits(head, mask, PER_LANE)
            at = col % BLOCK_IN // 32
            first = _byte(_bits(head + 1, mask, PER_LANE), at % 4)
            second = _byte(_bits(head + 2, mask, PER_LANE), at % 4)
            third = _byte(_bits(head + 3, mask, PER_LANE), at % 4)
            number = tl.where(at < 4, first & 63, (third & 15) | ((first >> 2) & 48))
            least = tl.where(at < 4, second & 63, (third >> 4) | ((second >> 2) & 48))
            scale = as_float(steps, tl.float16) * number.to(tl.float32)
            offset = -(as_float(steps >> 16, tl.float16) * least.to(tl.float32))
            shift = 8.0
    else:
        GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP
        at = (row // ROWS_PER_SCALE) * GROUPS + col // GROUP
        bits = _bits(matrix.scales + at, mask, PER_LANE)
        if IS_EXACT:
            factor = tl.where(bits == 0, 64, bits << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            scale = as_float(bits, matrix.scales.dtype.element_ty)
        if matrix.zeros is not None:
            zero = _bits(matrix.zeros + at, mask, PER_LANE)
            if matrix.zeros.dtype.element_ty == tl.int8:
                zero = (zero ^ 128) - 128
            shift = (8.0 if CODE == "uint4" else 0.0) - zero.to(tl.float32)
        elif CODE == "uint4":
            shift = 8.0
        if matrix.mins is not None:
            bits = _bits(matrix.mins + at, mask, PER_LANE)
            offset = as_float(bits, matrix.mins.dtype.element_ty)
    if CODE == "q5_k":
        word = _bits(matrix.high + row * (IN // 32) + col // 32, mask, PER_LANE)
        high = (word >> (element * PER % 32)) & 15
    if CODE == "q6_k":
        # A byte for each element; a lane's eight are two words.
        first = matrix.high + row * (IN // 16) + col // 16
        word = _bits(first, mask, PER_LANE)
        if PER_LANE:
            word = tl.where(element % 8 < 4, word, _bits(first + 1, mask, PER_LANE))
        high = _byte(word, element % 4)
    dense = ()
    for i in tl.static_range(PER):
        if IS_EXACT:  # powers of two
            value = values[i] * factor
        else:
            value = values[i].to(tl.float32)
            if shift is not None:
                value += shift
            if CODE == "q5_k":
                value += ((high << (4 - i)) & 16).to(tl.float32)
            if CODE == "q6_k":
                value += ((high << 4 >> (2 * i)) & 48).to(tl.float32)
            value *= scale
            if offset is not None:
                value += offset
        dense += (value.to(DTYPE),)  # type: ignore[assignment]
    return dense


def matrix_arguments(weight: QuantizedWeight) -> tuple[torch.Tensor | None, ...]:
    """Return the tensors of ``Matrix``."""
    heads, high = weight.heads, weight.high
    if heads is not None:
        heads = heads.view(torch.int16 if weight.code == "q6_k" else torch.int32)
    if high is not None:
        high = high.view(torch.int32)
    codes = weight.codes.view(torch.int16)
    return codes, weight.scales, weight.zeros, weight.mins, heads, high
