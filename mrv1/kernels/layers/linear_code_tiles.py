"""The linear layer of many tokens and codes for Hopper (sm_90): each tile widens its codes once.

A program stays, and takes every so-many-th tile of tokens and rows of the weight::

    producer, 1 warp       bulk copies (TMA) of the next steps' tokens and codes
    consumer 0, 4 warps    half of the tile's rows, by all of its tokens
    consumer 1, 4 warps    the other half

Weights are the left operand of wgmma, which takes it from registers: there a consumer widens the
codes of 64 inputs while the tensor cores multiply those before. Four lanes share a row: each reads
all of a row's words, and takes its own two of eight inputs, so that tokens need no order of their
own. A consumer waits for all products before a loop's end; the other one multiplies meanwhile.

Values are rounded once, as ``QuantizedWeight.dense`` rounds them: a code has few bits, and its
product with a scale of the inputs' dtype is rounded once in that dtype too. Scales of whole rows
multiply results.
"""

# mypy: disable-error-code="no-redef"
# A constant of a kernel is annotated in every branch.

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from mrv1.device import device_info
from mrv1.kernels._base.arithmetic import cdiv
from mrv1.kernels._base.dependent_launch import overlap_options
from mrv1.kernels._base.gluon import (
    TensorDescriptor,
    copy_box,
    fence_async_shared,
    gl,
    gluon,
    let_next_start,
    mbarrier,
    wait_for_previous,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from mrv1.kernels.layers.linear_call import LinearCall
from mrv1.kernels.layers.linear_splits import empty_sums
from mrv1.kernels.layers.quantized import CODES, QuantizedWeight, fits_tiles

TILE_ROWS = gl.constexpr(128)
"""Rows of a tile: 64 for each consumer."""
STEP_IN = gl.constexpr(128)
"""Inputs of a step, which a copy brings."""
HALF_IN = gl.constexpr(64)
"""Inputs that are widened at once: 128 bytes of a token, the widest swizzle of a copy."""
TOKENS_TOGETHER = 2048
"""Tokens whose tiles follow each other: they stay in L2 while all rows pass."""
STEP_US = {64: 0.6, 128: 0.79, 256: 1.36}
"""Tokens of a tile, and the microseconds of a step of each on an H200."""
TILE_US = 2.0
"""The same of what a tile takes beside its steps."""
SPLIT_US = 2.0
"""The same of the launch that adds up splits."""
SUM_US = 1.5e-6
"""The same of a result of a split, which is written and read."""
SHARED_BYTES = 222 * 1024
"""Shared memory of a program's steps, beside its barriers and what results pass through."""
MOST_STAGES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTiles:
    """How a call is cut into programs."""

    tile_tokens: int  # a key of ``STEP_US``
    splits: int  # programs that share a tile's inputs
    stages: int  # steps in shared memory

    @classmethod
    def of(cls, tile_tokens: int, splits: int, *, words: int) -> CodeTiles:
        """Return it with as many stages as fit; ``words`` are those of a row's step."""
        step_bytes = 2 * tile_tokens * STEP_IN.value + 4 * TILE_ROWS.value * words
        stages = min(MOST_STAGES, SHARED_BYTES // step_bytes)
        return cls(tile_tokens=tile_tokens, splits=splits, stages=stages)

    @classmethod
    @lru_cache(maxsize=1024)
    def default_for(
        cls,
        num_tokens: int,
        num_in: int,
        num_rows: int,
        *,
        words: int,
        num_programs: int,
        may_split: bool,
        has_room: bool,
    ) -> CodeTiles:
        """Return the configuration of the shortest time by ``STEP_US``.

        ``has_room`` says that registers hold the numbers of a step beside a tile of 256 tokens.
        """
        steps = cdiv(num_in, STEP_IN.value)

        def microseconds(tile_tokens: int, splits: int) -> float:
            tiles = cdiv(num_tokens, tile_tokens) * cdiv(num_rows, TILE_ROWS.value)
            rounds = cdiv(tiles * splits, num_programs)
            of_tile = 2 * cdiv(steps, 2 * splits) * STEP_US[tile_tokens] + TILE_US
            of_sums = SPLIT_US + splits * num_tokens * num_rows * SUM_US
            return rounds * of_tile + (of_sums if splits > 1 else 0)

        tile_tokens, splits = min(
            (
                (tokens, splits)
                for tokens in STEP_US
                for splits in (1, 2, 4, 8)
                if (tokens < 256 or has_room) and (splits == 1 or may_split)
            ),
            key=lambda each: microseconds(*each),
        )
        return cls.of(tile_tokens, splits, words=words)


@gluon.jit
def _on_pairs(OPERATION: gl.constexpr, pairs, others, DTYPE: gl.constexpr):
    """Return pairs in 32 bits: of sums or products, each rounded once."""
    TYPE: gl.constexpr = ".rn.bf16x2" if gl.bfloat16 == DTYPE else ".rn.f16x2"
    return gl.inline_asm_elementwise(
        OPERATION + TYPE + " $0, $1, $2;", "=r,r,r", [pairs, others + gl.zeros_like(pairs)],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _nibbles(words, lane, CODE: gl.constexpr, DTYPE: gl.constexpr):
    """Return the two values of each lane's byte of a word, a pair in 32 bits.

    Bytes 0 and 2 are chosen: of the word, and of the word less 4 bits. See ``widening``.
    """
    CHOSEN: gl.constexpr = """{
        .reg .b32 bits, sign;
        shr.u32 bits, $1, 4;
        prmt.b32 bits, $1, bits, $2;
        """
    IS_BFLOAT16: gl.constexpr = gl.bfloat16 == DTYPE
    if CODE == "e2m1":
        MAGNITUDE: gl.constexpr = (
            "6; lop3.b32 bits, bits, 0x01C001C0"
            if IS_BFLOAT16
            else ("9; lop3.b32 bits, bits, 0x0E000E00")
        )
        pairs = gl.inline_asm_elementwise(
            CHOSEN + """
            shl.b32 sign, bits, 12;
            and.b32 sign, sign, 0x80008000;
            shl.b32 bits, bits, """ + MAGNITUDE + """, sign, 0xEA;
            mov.b32 $0, bits;
            }""",
            "=r,r,r", [words, lane | (4 + lane) << 8], dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        pairs = _on_pairs("mul", pairs, 0x7E807E80 if IS_BFLOAT16 else 0x74007400, DTYPE)
    else:
        UNIT: gl.constexpr = "0x43004300" if IS_BFLOAT16 else "0x64006400"
        pairs = gl.inline_asm_elementwise(
            CHOSEN + "lop3.b32 $0, bits, 0x000F000F, " + UNIT + ", 0xEA; }",
            "=r,r,r", [words, lane | (4 + lane) << 8], dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        # Less 136, or 1,032.
        pairs = _on_pairs("add", pairs, -0x3CF73CF8 if IS_BFLOAT16 else -0x1BF71BF8, DTYPE)
    return pairs


@gluon.jit
def _bytes(low, high, lane, CODE: gl.constexpr, DTYPE: gl.constexpr):
    """Return the values of each lane's two of eight bytes, a pair in 32 bits."""
    IS_BFLOAT16: gl.constexpr = gl.bfloat16 == DTYPE
    if CODE == "int8":
        if IS_BFLOAT16:
            WIDEN: gl.constexpr = """
                mov.b32 other, 0xBF80BF80;
                lop3.b32 top, bits, 0x00800080, 0x43004300, 0xEA;
                lop3.b32 bits, bits, 0x007F007F, 0x43004300, 0xEA;
                fma.rn.bf16x2 $0, top, other, bits; }"""
        else:
            WIDEN: gl.constexpr = """
                mov.b32 other, 0x64806480;
                lop3.b32 bits, bits, 0x00FF00FF, other, 0x6A;
                sub.rn.f16x2 $0, bits, other; }"""
    else:
        if IS_BFLOAT16:
            WIDEN: gl.constexpr = """
                mov.b32 other, 0x7B807B80;
                shl.b32 top, bits, 8;
                and.b32 top, top, 0x80008000;
                shl.b32 bits, bits, 4;
                lop3.b32 bits, bits, 0x07F007F0, top, 0xEA;
                mul.rn.bf16x2 $0, bits, other; }"""
        else:
            WIDEN: gl.constexpr = """
                prmt.b32 bits, bits, bits, 0x0020;
                mov.b32 {codes, none}, bits;
                cvt.rn.f16x2.e4m3x2 $0, codes; }"""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 bits, top, other; .reg .b16 codes, none; prmt.b32 bits, $1, $2, $3; " + WIDEN,
        "=r,r,r,r", [low, high, 2 * lane | (2 * lane + 1) << 8],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _scaled(pairs, scale, zero, CODE: gl.constexpr, KIND: gl.constexpr, DTYPE: gl.constexpr):
    """Return pairs less their zero points, times their scales, which are bits in int32."""
    if zero is not None:
        shift = (8 if CODE == "uint4" else 0) - zero
        shift = shift.to(DTYPE).to(gl.int16, bitcast=True).to(gl.int32)
        pairs = _on_pairs("add", pairs, (shift & 0xFFFF) * 0x10001, DTYPE)
    if gl.uint8 == KIND:  # exponents of powers of two
        scale = gl.where(scale == 0, 64, scale << 7)
    if gl.uint8 == KIND or KIND == DTYPE:
        pairs = _on_pairs("mul", pairs, (scale & 0xFFFF) * 0x10001, DTYPE)
    else:
        if gl.float16 == KIND:
            wide = scale.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        else:
            wide = scale.to(gl.float32, bitcast=True)
        pairs = gl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            shl.b32 low, $1, 16;
            and.b32 high, $1, 0xFFFF0000;
            mul.rn.f32 low, low, $2;
            mul.rn.f32 high, high, $2;
            cvt.rn.bf16x2.f32 $0, high, low;
            }""",
            "=r,r,f", [pairs, wide + gl.zeros_like(pairs).to(gl.float32)],
            dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return pairs


@gluon.jit
def _numbers(ptr, rows, place, GROUPS, GROUP: gl.constexpr):
    """Load the bits of a step's scales, or zero points, as int32: a tuple of 1, 2 or 4, by inputs.

    Steps past the end have the last ones.
    """
    COUNT: gl.constexpr = 1 if GROUP >= STEP_IN else STEP_IN // GROUP
    found = ()
    for at in gl.static_range(COUNT):
        group = gl.minimum(place * STEP_IN // GROUP + at, GROUPS - 1)
        number = gl.load(ptr + rows * GROUPS + group)
        if number.dtype == gl.int8 or number.dtype == gl.uint8:
            number = number.to(gl.int32)
        elif number.dtype == gl.float32:
            number = number.to(gl.int32, bitcast=True)
        else:
            number = number.to(gl.int16, bitcast=True).to(gl.int32)
        found += (number,)  # type: ignore[assignment]
    return found


@gluon.jit
def _of_half(numbers, HALF: gl.constexpr, L: gl.constexpr):
    """Return the numbers of half a step, [rows, words or 1, 1]."""
    if len(numbers) == 4:
        word = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
        first, second = numbers[2 * HALF][:, None, None], numbers[2 * HALF + 1][:, None, None]
        number = gl.where(word < 4, first, second)
    elif len(numbers) == 2:
        number = numbers[HALF][:, None, None]
    else:
        number = numbers[0][:, None, None]
    return number


@gluon.jit
def _values(
    codes, scales, zeros, HALF: gl.constexpr, CODE: gl.constexpr, DTYPE: gl.constexpr,
    KIND: gl.constexpr, L: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Return the values of half a step's codes, a left operand [rows, 64].

    ``codes`` are a step's words in shared memory, [rows, 16 or 32].
    """
    ROWS: gl.constexpr = codes.shape[0]
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    WORD: gl.constexpr = gl.SliceLayout(2, L)
    PER_WORD: gl.constexpr = 4 if (CODE == "e4m3") | (CODE == "int8") else 8
    WORDS: gl.constexpr = HALF_IN // PER_WORD
    # Four lanes have the same words of a row.
    LOADED: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4]] + ([[0, 8]] if WORDS == 16 else []) + [[8, 0]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[ROWS, WORDS],
    )  # fmt: skip
    words = codes.slice(HALF * WORDS, WORDS, dim=1).load(LOADED)
    if PER_WORD == 8:
        words = gl.convert_layout(words, WORD)[:, :, None]
        pairs = _nibbles(words + gl.zeros_like(lane), lane + gl.zeros_like(words), CODE, DTYPE)
    else:
        low, high = gl.split(gl.reshape(words, [ROWS, 8, 2]))
        low = gl.convert_layout(low, WORD)[:, :, None] + gl.zeros_like(lane)
        high = gl.convert_layout(high, WORD)[:, :, None] + gl.zeros_like(lane)
        pairs = _bytes(low, high, lane + gl.zeros_like(low), CODE, DTYPE)
    if scales is not None:
        zero = None
        if zeros is not None:
            zero = _of_half(zeros, HALF, L)
        pairs = _scaled(pairs, _of_half(scales, HALF, L), zero, CODE, KIND, DTYPE)
    first, second = pairs.to(gl.int16), (pairs >> 16).to(gl.int16)
    values = gl.reshape(gl.join(first, second), [ROWS, HALF_IN]).to(DTYPE, bitcast=True)
    return gl.convert_layout(values, A, assert_trivial=True)


@gluon.jit
def _place(tile, of_tokens, together, row_tiles, SPLITS):
    """Return a tile's token tile, split and row tile; those of some tokens come together."""
    group = tile // (together * SPLITS * row_tiles)
    within = tile % (together * SPLITS * row_tiles)
    count = gl.minimum(together, of_tokens - group * together)
    return group * together + within % count, within // count % SPLITS, within // count // SPLITS


@gluon.jit
def _consume(
    GROUP_OF_WARPS: gl.constexpr, out_ptr, stride_out_token, bias_ptr, scales_ptr, zeros_ptr,
    xs, codes, filled, free, num_tokens, num_out, num_tiles, of_tokens, together,
    row_tiles, COUNT, SPLITS, GROUPS, CODE: gl.constexpr, GROUP: gl.constexpr,
    ROWS_PER_SCALE: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Widen the codes of half of each tile's rows, multiply, and store the results."""
    STAGES: gl.constexpr = codes.shape[0]
    ROWS: gl.constexpr = TILE_ROWS // 2
    TOKENS: gl.constexpr = xs.shape[1]
    DTYPE: gl.constexpr = xs.dtype
    KIND: gl.constexpr = scales_ptr.dtype.element_ty
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TOKENS, 16]
    )
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    # [rows, 8 words of eight inputs, lanes of a row]
    L: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1, 0], [0, 2, 0], [0, 4, 0], [8, 0, 0]],
        lane_bases=[[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]], block_bases=[], shape=[ROWS, 8, 4],
    )  # fmt: skip
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
    RESULT_ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    if OVERLAP:
        wait_for_previous()
        let_next_start()
    at = gl.to_tensor(0)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        token_tile, split, row_tile = _place(tile, of_tokens, together, row_tiles, SPLITS)
        first_token = token_tile * TOKENS
        first_row = row_tile * (2 * ROWS) + GROUP_OF_WARPS * ROWS
        y = warpgroup_mma_init(gl.zeros([ROWS, TOKENS], gl.float32, ACC))
        rows = gl.minimum(first_row + gl.arange(0, ROWS, ROW), num_out - 1) // ROWS_PER_SCALE
        place = split * COUNT
        scales, zeros = None, None
        if GROUP != 0:
            scales = _numbers(scales_ptr, rows, place, GROUPS, GROUP)
            if zeros_ptr is not None:
                zeros = _numbers(zeros_ptr, rows, place, GROUPS, GROUP)
        for _ in range(0, COUNT, 2):
            for step in gl.static_range(2):
                stage = at % STAGES
                mbarrier.wait(filled.index(stage), (at // STAGES) & 1)
                mine = codes.index(stage).slice(GROUP_OF_WARPS * ROWS, ROWS, dim=0)
                own, own_zeros = scales, zeros
                place += 1
                if GROUP != 0:
                    scales = _numbers(scales_ptr, rows, place, GROUPS, GROUP)
                    if zeros_ptr is not None:
                        zeros = _numbers(zeros_ptr, rows, place, GROUPS, GROUP)
                first = _values(mine, own, own_zeros, 0, CODE, DTYPE, KIND, L, A)
                if step == 1:
                    y, _ = warpgroup_mma_wait(0, deps=(y, second))  # type: ignore[has-type]  # noqa: F821 - of step 0
                    mbarrier.arrive(free.index((at - 1) % STAGES), count=1)
                x = xs.index(2 * stage)
                y = warpgroup_mma(first, x.permute((1, 0)), y, is_async=True)
                second = _values(mine, own, own_zeros, 1, CODE, DTYPE, KIND, L, A)
                y, _ = warpgroup_mma_wait(0, deps=(y, first))
                x = xs.index(2 * stage + 1)
                y = warpgroup_mma(second, x.permute((1, 0)), y, is_async=True)
                at += 1
            y, _ = warpgroup_mma_wait(0, deps=(y, second))
            y = warpgroup_mma_init(y)
            mbarrier.arrive(free.index((at - 1) % STAGES), count=1)
        y = warpgroup_mma_wait(0, deps=(y,))
        row = first_row + gl.arange(0, ROWS, RESULT_ROW)
        if GROUP == 0:
            scale = gl.load(scales_ptr + gl.minimum(row, num_out - 1) // ROWS_PER_SCALE)
            y = y * scale.to(gl.float32)[:, None]
        if bias_ptr is not None:
            bias = gl.load(bias_ptr + row, mask=row < num_out, other=0.0)
            y = y + bias.to(gl.float32)[:, None]
        if out_ptr.dtype.element_ty == gl.float32:
            token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, ACC)).to(gl.int64)
            out = out_ptr + (split * num_tokens + token)[None, :] * stride_out_token
            inside = (row < num_out)[:, None] & (token < num_tokens)[None, :]
            gl.store(out + row[:, None], y, mask=inside)
        else:
            STORED: gl.constexpr = gl.BlockedLayout(
                [1, 8], [256 // ROWS, ROWS // 8], [4, 1], [1, 0]
            )
            z = gl.convert_layout(gl.permute(y.to(DTYPE), (1, 0)), STORED)
            token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(1, STORED)).to(gl.int64)
            row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, STORED))
            out = out_ptr + token[:, None] * stride_out_token + row[None, :]
            gl.store(out, z, mask=(token < num_tokens)[:, None] & (row < num_out)[None, :])


@gluon.jit
def _produce(
    x_desc, codes_desc, xs, codes, filled, free, num_tiles, of_tokens, together, row_tiles, COUNT,
    SPLITS, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Copy the steps of each tile in turn; the first tile's codes before the last kernel ends."""
    STAGES: gl.constexpr = codes.shape[0]
    ROWS: gl.constexpr = codes.shape[1]
    WORDS: gl.constexpr = codes.shape[2]
    TOKENS: gl.constexpr = xs.shape[1]
    STEP_BYTES: gl.constexpr = 2 * TOKENS * STEP_IN + 4 * ROWS * WORDS
    early = gl.minimum(COUNT, STAGES)
    token_tile, split, row_tile = _place(gl.program_id(0), of_tokens, together, row_tiles, SPLITS)
    for step in range(early):
        ready = filled.index(step)
        mbarrier.expect(ready, STEP_BYTES)
        box = [row_tile * ROWS, (split * COUNT + step) * WORDS]
        copy_box(codes_desc, box, ready, codes.index(step))
    if OVERLAP:
        wait_for_previous()
        let_next_start()
    at = gl.to_tensor(0)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        token_tile, split, row_tile = _place(tile, of_tokens, together, row_tiles, SPLITS)
        for step in range(COUNT):
            stage = at % STAGES
            ready = filled.index(stage)
            place = split * COUNT + step
            if at >= early:
                mbarrier.wait(free.index(stage), ((at // STAGES) & 1) ^ 1)
                mbarrier.expect(ready, STEP_BYTES)
                box = [row_tile * ROWS, place * WORDS]
                copy_box(codes_desc, box, ready, codes.index(stage))
            for half in gl.static_range(2):
                box = [token_tile * TOKENS, place * STEP_IN + half * HALF_IN]
                copy_box(x_desc, box, ready, xs.index(2 * stage + half))
            at += 1


@gluon.jit(
    do_not_specialize=[
        "num_tokens", "num_tiles", "of_tokens", "together", "row_tiles", "COUNT", "SPLITS",
        "GROUPS",
    ]
)  # fmt: skip
def _code_tiles_kernel(
    out_ptr, stride_out_token,  # [num_tokens, num_out], unit last stride; of several splits
    # [SPLITS, num_tokens, num_out] float32, contiguous
    bias_ptr,  # [num_out], or None
    scales_ptr, zeros_ptr,  # see QuantizedWeight
    x_desc,  # [num_tokens, inputs] in boxes [TOKENS, HALF_IN]
    codes_desc,  # [num_out, words] int32 in boxes of a tile's rows and a step's words
    num_tokens, num_out,
    num_tiles,  # of all splits
    of_tokens,  # tiles of tokens
    together,  # of them that follow each other
    row_tiles,
    COUNT,  # steps of a split, an even number
    SPLITS,
    GROUPS,  # of a row of scales
    CODE: gl.constexpr,
    GROUP: gl.constexpr,  # inputs of a scale; 0 = all of a row
    ROWS_PER_SCALE: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid: any number of programs; one a multiprocessor runs at a time."""
    TOKENS: gl.constexpr = x_desc.block_shape[0]
    ROWS: gl.constexpr = codes_desc.block_shape[0]
    WORDS: gl.constexpr = codes_desc.block_shape[1]
    xs = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, TOKENS, HALF_IN], x_desc.layout)
    codes = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, WORDS], codes_desc.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize([
        (_consume, (
            0, out_ptr, stride_out_token, bias_ptr, scales_ptr, zeros_ptr, xs, codes,
            filled, free, num_tokens, num_out, num_tiles, of_tokens, together, row_tiles, COUNT,
            SPLITS, GROUPS, CODE, GROUP, ROWS_PER_SCALE, OVERLAP,
        )),
        (_consume, (
            1, out_ptr, stride_out_token, bias_ptr, scales_ptr, zeros_ptr, xs, codes,
            filled, free, num_tokens, num_out, num_tiles, of_tokens, together, row_tiles, COUNT,
            SPLITS, GROUPS, CODE, GROUP, ROWS_PER_SCALE, OVERLAP,
        )),
        (_produce, (
            x_desc, codes_desc, xs, codes, filled, free, num_tiles, of_tokens, together,
            row_tiles, COUNT, SPLITS, OVERLAP,
        )),
    ], [4, 1], [232, 40])  # fmt: skip


def multiplies_code_tiles(call: LinearCall, weight: QuantizedWeight) -> bool:
    """Return whether the kernel multiplies by this weight."""
    x = call.x
    if call.order is not None or x.data_ptr() % 16 or x.stride(0) * x.element_size() % 16:
        return False
    return fits_tiles(weight)


def multiply_code_tiles(
    call: LinearCall, weight: QuantizedWeight
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the product with its bias, or the sums of splits, as ``add_splits`` takes them."""
    num_rows, num_in = weight.shape
    scales = weight.tensors["scales"]
    is_narrow = scales.dtype in (call.x.dtype, torch.uint8)
    num_programs = device_info(call.x.device).num_sms
    config = CodeTiles.default_for(
        call.num_tokens, num_in, num_rows, words=step_words(weight), num_programs=num_programs,
        may_split=not call.is_gated,
        has_room=weight.code != "int8" and (is_narrow or weight.group > 32),
    )  # fmt: skip
    return launch_code_tiles(call, weight, config, num_programs=num_programs)


def step_words(weight: QuantizedWeight) -> int:
    """Return the words, of 32 bits, of a row's step."""
    return int(STEP_IN.value // (4 * CODES[weight.code].per_byte))


def describe(
    x: torch.Tensor, codes: torch.Tensor, tile_tokens: int, words: int
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return tokens in boxes of half a step, and codes, as int32, in those of a step's words."""
    x_layout = gl.NVMMASharedLayout(128, 16, rank=2)
    codes_layout = gl.NVMMASharedLayout(4 * words, 32, rank=2)
    return (
        TensorDescriptor.from_tensor(x, [tile_tokens, HALF_IN.value], x_layout),
        TensorDescriptor.from_tensor(codes, [TILE_ROWS.value, words], codes_layout),
    )


def launch_code_tiles(
    call: LinearCall, weight: QuantizedWeight, config: CodeTiles, *, num_programs: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Compute with a configuration; see ``multiply_code_tiles``."""
    num_rows, num_in = weight.shape
    tile_tokens, splits = config.tile_tokens, config.splits
    is_whole = weight.group >= num_in
    sums = empty_sums(call, splits)
    out = call.out
    if call.is_gated or call.residual is not None:
        out = call.out.new_empty((call.num_tokens, num_rows))
    target = out if sums is None else sums
    of_tokens, row_tiles = cdiv(call.num_tokens, tile_tokens), cdiv(num_rows, TILE_ROWS.value)
    num_tiles = of_tokens * row_tiles * splits
    _code_tiles_kernel[(min(num_tiles, num_programs),)](
        target, target.stride(-2), call.bias if sums is None else None,
        weight.scales, weight.zeros,
        *describe(call.x, weight.codes.view(torch.int32), tile_tokens, step_words(weight)),
        call.num_tokens, num_rows, num_tiles, of_tokens,
        min(of_tokens, TOKENS_TOGETHER // tile_tokens), row_tiles,
        2 * cdiv(cdiv(num_in, STEP_IN.value), 2 * splits), splits,
        cdiv(num_in, weight.group),
        CODE=weight.code, GROUP=0 if is_whole else weight.group,
        ROWS_PER_SCALE=weight.rows_per_scale, STAGES=config.stages, num_warps=4,
        **overlap_options(call.x.device),
    )  # fmt: skip
    return (out, None) if sums is None else (None, sums)
