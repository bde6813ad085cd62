"""Paged prefill attention for Hopper (sm_90) from e4m3 caches: codes are widened once a tile.

The attention of ``hopper`` on the same tiles, for caches of e4m3 codes with scales of any
granularity. A program has four groups of warps, which signal each other through barriers in
shared memory::

    producer, 1 warp       copies codes of K and V: one bulk copy (TMA) a page
    converter, 4 warps     reads scales, widens codes to fp16
    consumer 0, 4 warps    rows 0 to 63: scores, softmax, weights times V
    consumer 1, 4 warps    rows 64 to 127, on the same keys

fp16 holds every code exactly, and a bf16 query divided by a power of two. Scales stay out of the
products: a key's K scale multiplies its scores, and its V scale is part of its weights, because
the logarithm of the V scale is added to the scores::

    score[i, k]  = factor[k] * (q[i] . K[k]) + bias[k]    factor = softmax_scale * unit * K scale
    weight[i, k] = 2^(score[i, k] - shift[i])             bias = log2(V scale)
    out[i]       = sum_k weight[i, k] V[k] / sum_k weight[i, k] inverse[k]
                                                          inverse = 1 / V scale

A key without a page has the bias -inf and the inverse 0, hence no weight. Instructions seem to
limit the kernel, not bandwidth: five versions of it took longer on an H200 the more instructions a
tile had. So no product takes the V scales in; the bias comes with the factor.
"""

from __future__ import annotations

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.gluon import (
    TensorDescriptor,
    as_boxes,
    copy_box,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from mrv1.kernels._base.launches import launch_kernel
from mrv1.kernels.attention.prefill.choice import PROGRAMS_PER_SM, PrefillSplits
from mrv1.kernels.attention.prefill.hopper import (
    LN_2,
    LOG2_E,
    MIN_SHARED_TILES,
    ROWS,
    VECTOR,
    _count_tiles,
    _find_request,
    _merge_tile,
    _scores,
    heads_of_launch,
    product_layout,
    rows_layout,
)
from mrv1.kernels.cache.kv_layout import KVLayout
from mrv1.kernels.cache.kv_scales import KVScales

DIM = gl.constexpr(128)
ROWS_LAYOUT = gl.constexpr(rows_layout(128))
OUT_LAYOUT = gl.constexpr(product_layout(128))
TILE_TOKENS = 128
STAGES = gl.constexpr(2)
"""Tiles of fp16 keys and values in shared memory: 2 * (32 + 32) KiB, and 32 KiB of queries."""
SLOTS = gl.constexpr(3)
"""Tiles of codes in shared memory, of K and V in turns: 3 * 16 KiB."""
COLUMN_STAGES = gl.constexpr(3)
"""Tiles of factors, biases and inverses. When the keys of a tile are free, its columns are still
read, but not the columns of the tile before."""
CONSUMER_REGISTERS = gl.constexpr(208)
CONVERTER_REGISTERS = gl.constexpr(56)
PRODUCER_REGISTERS = gl.constexpr(40)
"""With two consumers 512 in all, a multiprocessor's 65,536."""
CLEARED_ROWS = gl.constexpr(32)
"""Rows of values that are cleared at a time, so that they fit the converter's registers."""
LIFT = gl.constexpr(14)
"""Weights are at most 2^14, so that fp16 holds weights down to 2^-38 of the largest."""
QUERY_EXPONENT = gl.constexpr(14)
"""A program's largest bf16 query element becomes an fp16 number in [2^14, 2^15)."""
CODES_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
WIDE_LAYOUT = gl.constexpr(
    gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
)
COLUMN_LAYOUT = gl.constexpr(gl.SharedLinearLayout([[1], [8], [2], [4], [16], [32], [64]]))
"""A thread has keys 2 i and 2 i + 1 of every 8 scores; here two such pairs are 16 bytes."""
SIZE_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


@gluon.jit
def _copy_codes(
    desc, codes_smem, codes_ready, codes_free, at, tile,
    table_row_ptr, head_row, block_rows, last_column,
    BLOCK_SIZE: gl.constexpr, TILE_TOKENS: gl.constexpr,
):  # fmt: skip
    """Copy the pages of one tile of K or V into the slot of the ``at``-th copy."""
    PAGES: gl.constexpr = TILE_TOKENS // BLOCK_SIZE
    rows = ()
    for page in gl.static_range(PAGES):
        # Past the last column any page will do: its keys are masked, its values cleared.
        block = gl.load(table_row_ptr + gl.minimum(tile * PAGES + page, last_column))
        # No page: a row before the first one, for which the copy writes zeros.
        row = gl.where(block < 0, -BLOCK_SIZE, head_row + block * block_rows)
        rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005 - Triton has no stars
    slot = at % SLOTS
    pages = as_boxes(codes_smem.index(slot), desc, PAGES)
    mbarrier.wait(codes_free.index(slot), ((at // SLOTS) & 1) ^ 1)
    mbarrier.expect(codes_ready.index(slot), TILE_TOKENS * DIM)
    for page in gl.static_range(PAGES):
        copy_box(desc, [rows[page], 0], codes_ready.index(slot), pages.index(page))


@gluon.jit
def _produce(
    k_desc, v_desc, codes_smem, codes_ready, codes_free,
    table_row_ptr, head_row, block_rows, end_tile, num_tiles, last_column,
    BLOCK_SIZE: gl.constexpr, TILE_TOKENS: gl.constexpr,
):  # fmt: skip
    """Copy the codes of the last ``num_tiles`` tiles: K, K V, K V, ..., V, as they are needed."""
    at = 0
    for step in range(num_tiles + 1):
        tile = end_tile - 1 - step
        if step < num_tiles:
            _copy_codes(
                k_desc, codes_smem, codes_ready, codes_free, at, tile,
                table_row_ptr, head_row, block_rows, last_column, BLOCK_SIZE, TILE_TOKENS,
            )  # fmt: skip
            at += 1
        if step > 0:
            _copy_codes(
                v_desc, codes_smem, codes_ready, codes_free, at, tile + 1,
                table_row_ptr, head_row, block_rows, last_column, BLOCK_SIZE, TILE_TOKENS,
            )  # fmt: skip
            at += 1


@gluon.jit
def _widened(codes):
    """Return the values of e4m3 codes in fp16, which represents them exactly."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r",
        [codes],
        dtype=gl.float16,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _clear_rows(values, num_live, TILE_TOKENS: gl.constexpr):
    """Clear the values of the keys after the last query: they may be NaN, and 0 * NaN is NaN."""
    for first in gl.static_range(0, TILE_TOKENS, CLEARED_ROWS):
        part = values.slice(first, CLEARED_ROWS)
        key = first + gl.arange(0, CLEARED_ROWS, layout=gl.SliceLayout(1, ROWS_LAYOUT))
        value = part.load(ROWS_LAYOUT)
        part.store(gl.where((key < num_live)[:, None], value, gl.zeros_like(value)))


@gluon.jit
def _query_exponent(sizes):
    """Return the biased exponent of the program's largest finite query element (bf16).

    Queries are divided by that power of two, so that fp16 holds them; an element that underflows
    is at most 2^-39 of the largest.
    """
    first = gl.max(sizes.index(0).load(VECTOR), 0)
    largest = gl.maximum(first, gl.max(sizes.index(1).load(VECTOR), 0))
    return gl.maximum(largest, 1e-30).to(gl.int32, bitcast=True) >> 23


@gluon.jit
def _load_blocks(
    table_row_ptr, tile, end_position, BLOCK_SIZE: gl.constexpr, TILE_TOKENS: gl.constexpr
):
    """Return the block of each key of a tile, -1 where it has no page or no row sees it."""
    position = tile * TILE_TOKENS + gl.arange(0, TILE_TOKENS, layout=VECTOR)
    seen = (position >= 0) & (position < end_position)
    return gl.load(table_row_ptr + position // BLOCK_SIZE, mask=seen, other=-1)


@gluon.jit
def _load_scales(
    block, tile, k_scale_ptr, v_scale_ptr, scale_base, scale_block_stride,
    tokens_per_scale, BLOCK_SIZE: gl.constexpr, TILE_TOKENS: gl.constexpr,
):  # fmt: skip
    """Return the K and V scale of each key of a tile, 0 and 1 where ``block`` is -1."""
    token = (tile * TILE_TOKENS + gl.arange(0, TILE_TOKENS, layout=VECTOR)) % BLOCK_SIZE
    address = scale_base + block.to(gl.int64) * scale_block_stride + token // tokens_per_scale
    k_scale = gl.load(k_scale_ptr + address, mask=block >= 0, other=0.0)
    v_scale = gl.load(v_scale_ptr + address, mask=block >= 0, other=1.0)
    return k_scale, v_scale


@gluon.jit
def _convert(
    codes_smem, k_smem, v_smem, factors, biases, inverses, sizes, sized,
    codes_ready, codes_free, k_ready, v_ready, k_free, v_free,
    k_scale_ptr, v_scale_ptr, scale_base, scale_block_stride, tokens_per_scale,
    table_row_ptr, end_position, end_tile, num_tiles, scale,
    DIVIDED: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE_TOKENS: gl.constexpr,
):  # fmt: skip
    """Widen the last ``num_tiles`` tiles in the order of the copies; write the keys' columns.

    ``DIVIDED`` says that the queries are bf16, divided by a power of two.
    """
    # Blocks are looked up two tiles ahead and scales one, so that no tile waits for them.
    block = _load_blocks(table_row_ptr, end_tile - 1, end_position, BLOCK_SIZE, TILE_TOKENS)
    next_block = _load_blocks(table_row_ptr, end_tile - 2, end_position, BLOCK_SIZE, TILE_TOKENS)
    k_scale, v_scale = _load_scales(
        block, end_tile - 1, k_scale_ptr, v_scale_ptr, scale_base, scale_block_stride,
        tokens_per_scale, BLOCK_SIZE, TILE_TOKENS,
    )  # fmt: skip
    if DIVIDED:
        mbarrier.wait(sized, 0)
        scale *= ((_query_exponent(sizes) - QUERY_EXPONENT) << 23).to(gl.float32, bitcast=True)
    at = 0
    for step in range(num_tiles + 1):
        tile = end_tile - 1 - step
        if step < num_tiles:
            slot = at % SLOTS
            stage = step % STAGES
            columns = step % COLUMN_STAGES
            factor = k_scale * scale
            bias = gl.where(block >= 0, gl.log2(v_scale), float("-inf"))
            inverse = gl.where(block >= 0, 1.0 / v_scale, 0.0)
            block = next_block
            next_block = _load_blocks(
                table_row_ptr, tile - 2, end_position, BLOCK_SIZE, TILE_TOKENS
            )
            k_scale, v_scale = _load_scales(
                block, tile - 1, k_scale_ptr, v_scale_ptr, scale_base, scale_block_stride,
                tokens_per_scale, BLOCK_SIZE, TILE_TOKENS,
            )  # fmt: skip
            mbarrier.wait(codes_ready.index(slot), (at // SLOTS) & 1)
            mbarrier.wait(k_free.index(stage), ((step // STAGES) & 1) ^ 1)
            k_smem.index(stage).store(_widened(codes_smem.index(slot).load(ROWS_LAYOUT)))
            factors.index(columns).store(factor)
            biases.index(columns).store(bias)
            inverses.index(columns).store(inverse)
            fence_async_shared()
            mbarrier.arrive(k_ready.index(stage), count=1)
            mbarrier.arrive(codes_free.index(slot), count=1)
            at += 1
        if step > 0:
            slot = at % SLOTS
            stage = (step - 1) % STAGES
            num_live = end_position - (tile + 1) * TILE_TOKENS
            mbarrier.wait(codes_ready.index(slot), (at // SLOTS) & 1)
            mbarrier.wait(v_free.index(stage), (((step - 1) // STAGES) & 1) ^ 1)
            v_smem.index(stage).store(_widened(codes_smem.index(slot).load(ROWS_LAYOUT)))
            if num_live < TILE_TOKENS:
                _clear_rows(v_smem.index(stage), num_live, TILE_TOKENS)
            fence_async_shared()
            mbarrier.arrive(v_ready.index(stage), count=1)
            mbarrier.arrive(codes_free.index(slot), count=1)
            at += 1


@gluon.jit
def _softmax(
    scores, top, total, factors, biases, inverses, step, visible_keys,
    MASKED: gl.constexpr, TILE_TOKENS: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Return (weights, top, total, rescale); a row sees the first ``visible_keys`` of the tile."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    columns = step % COLUMN_STAGES
    factor = gl.expand_dims(factors.index(columns).load(COLUMNS), 0)
    bias = gl.expand_dims(biases.index(columns).load(COLUMNS), 0)
    scores = gl.fma(scores, factor.broadcast_to(scores.shape), bias.broadcast_to(scores.shape))
    if MASKED:
        key = gl.arange(0, TILE_TOKENS, layout=COLUMNS)
        scores = gl.where(key[None, :] < visible_keys[:, None], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1))
    shift = gl.where(new_top == float("-inf"), 0.0, new_top) - LIFT  # -inf - -inf is NaN
    rescale = gl.exp2(top - LIFT - shift)
    weights = gl.exp2(scores - shift[:, None])
    inverse = inverses.index(columns).load(COLUMNS)
    total = total * rescale + gl.sum(weights * inverse[None, :], 1)
    return weights, new_top, total, rescale


@gluon.jit
def _step(
    q_smem, k_smem, v_smem, factors, biases, inverses, k_ready, v_ready, k_free, v_free,
    weights, acc, top, total, step, tile, query_position,
    GROUP_OF_ROWS: gl.constexpr, MASKED: gl.constexpr, TILE_TOKENS: gl.constexpr,
    SCORES: gl.constexpr,
):  # fmt: skip
    """Multiply this tile's keys beside the previous tile's values; return the new weights."""
    stage = step % STAGES
    mbarrier.wait(k_ready.index(stage), (step // STAGES) & 1)
    scores = _scores(q_smem, k_smem, stage, GROUP_OF_ROWS, SCORES)
    previous = step - 1
    v_stage = previous % STAGES
    mbarrier.wait(v_ready.index(v_stage), (previous // STAGES) & 1)
    acc = warpgroup_mma(weights, v_smem.index(v_stage), acc, is_async=True)
    visible_keys = query_position + 1 - tile * TILE_TOKENS
    # Operands of the wait, or ptxas moves their computation behind it.
    if MASKED:
        scores, visible_keys = warpgroup_mma_wait(1, deps=(scores, visible_keys))
    else:
        scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_free.index(stage), count=1)
    exact, top, total, rescale = _softmax(
        scores, top, total, factors, biases, inverses, step, visible_keys, MASKED, TILE_TOKENS,
        SCORES,
    )  # fmt: skip
    weights = gl.convert_layout(exact.to(gl.float16), gl.DotOperandLayout(0, OUT_LAYOUT, 2))
    acc, weights, total = warpgroup_mma_wait(0, deps=(acc, weights, total))
    mbarrier.arrive(v_free.index(v_stage), count=1)
    rescale = gl.convert_layout(rescale, gl.SliceLayout(1, OUT_LAYOUT))
    return weights, acc * rescale[:, None], top, total


@gluon.jit
def _consume(
    GROUP_OF_ROWS: gl.constexpr, q_smem, k_smem, v_smem, factors, biases, inverses, sizes, sized,
    k_ready, v_ready, k_free, v_free, q_ptr, stride_q_token, stride_q_head,
    out_ptr, stride_out_token, stride_out_head,
    lse_ptr, stride_lse_token, stride_lse_head, states_ptr, states_lse_ptr, first_state,
    num_q_heads, query_start, first_query, end_query, context_len, head, end_tile, num_tiles,
    GROUP: gl.constexpr, TILE_TOKENS: gl.constexpr,
):  # fmt: skip
    """Attend from 64 of the program's rows to the ``num_tiles`` tiles before ``end_tile``."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_TOKENS, 16]
    )
    row = GROUP_OF_ROWS * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS_LAYOUT))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, ROWS_LAYOUT))
    query = first_query + row // GROUP
    token = (query_start + query).to(gl.int64)
    q_head = (head * GROUP + row % GROUP).to(gl.int64)
    q_offset = token * stride_q_token + q_head * stride_q_head
    q = gl.load(
        q_ptr + q_offset[:, None] + dim[None, :], mask=(query < end_query)[:, None], other=0.0
    )
    if q.dtype == gl.bfloat16:
        wide = q.to(gl.float32)
        size = gl.abs(wide)
        largest = gl.max(gl.max(gl.where(size < float("inf"), size, 0.0), 1), 0)
        sizes.index(GROUP_OF_ROWS).store(gl.full([1], largest, gl.float32, VECTOR))
        mbarrier.arrive(sized, count=1)
        mbarrier.wait(sized, 0)
        exponent = 254 + QUERY_EXPONENT - _query_exponent(sizes)
        q = (wide * (exponent << 23).to(gl.float32, bitcast=True)).to(gl.float16)
    q_smem.index(GROUP_OF_ROWS).store(q)
    fence_async_shared()

    num_inner = (context_len + first_query + 1) // TILE_TOKENS - (end_tile - num_tiles)
    num_masked = gl.minimum(gl.maximum(num_tiles - num_inner, 1), num_tiles)
    row = GROUP_OF_ROWS * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    query_position = context_len + gl.minimum(first_query + row // GROUP, end_query - 1)
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([64, DIM], gl.float32, OUT_LAYOUT)

    mbarrier.wait(k_ready.index(0), 0)
    scores = _scores(q_smem, k_smem, 0, GROUP_OF_ROWS, SCORES)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_free.index(0), count=1)
    visible_keys = query_position + 1 - (end_tile - 1) * TILE_TOKENS
    exact, top, total, _ = _softmax(
        scores, top, total, factors, biases, inverses, 0, visible_keys, True, TILE_TOKENS, SCORES
    )
    weights = gl.convert_layout(exact.to(gl.float16), gl.DotOperandLayout(0, OUT_LAYOUT, 2))
    for step in range(1, num_masked):
        weights, acc, top, total = _step(
            q_smem, k_smem, v_smem, factors, biases, inverses, k_ready, v_ready, k_free, v_free,
            weights, acc, top, total, step, end_tile - 1 - step, query_position,
            GROUP_OF_ROWS, True, TILE_TOKENS, SCORES,
        )  # fmt: skip
    for step in range(num_masked, num_tiles):
        weights, acc, top, total = _step(
            q_smem, k_smem, v_smem, factors, biases, inverses, k_ready, v_ready, k_free, v_free,
            weights, acc, top, total, step, end_tile - 1 - step, query_position,
            GROUP_OF_ROWS, False, TILE_TOKENS, SCORES,
        )  # fmt: skip
    last = num_tiles - 1
    v_stage = last % STAGES
    mbarrier.wait(v_ready.index(v_stage), (last // STAGES) & 1)
    acc = warpgroup_mma(weights, v_smem.index(v_stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))

    seen = total != 0.0  # true of NaN, which must come out as NaN
    total = gl.where(seen, total, 1.0)
    divisor = gl.convert_layout(1.0 / total, gl.SliceLayout(1, OUT_LAYOUT))
    lse = gl.where(seen, (top - LIFT + gl.log2(total)) * LN_2, float("-inf"))
    query = first_query + row // GROUP
    in_tile = query < end_query
    token = (query_start + query).to(gl.int64)
    q_head = (head * GROUP + row % GROUP).to(gl.int64)
    out_row = GROUP_OF_ROWS * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT_LAYOUT))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, OUT_LAYOUT))
    out_query = first_query + out_row // GROUP
    mask = (out_query < end_query)[:, None]
    out_token = (query_start + out_query).to(gl.int64)
    out_head = (head * GROUP + out_row % GROUP).to(gl.int64)
    value = acc * divisor[:, None]
    is_whole = True
    if states_ptr is not None:
        is_whole = first_state < 0
        if first_state >= 0:
            state = first_state + token * num_q_heads + q_head
            gl.store(states_lse_ptr + state, lse, mask=in_tile)
            state = first_state + out_token * num_q_heads + out_head
            gl.store(states_ptr + state[:, None] * DIM + dim[None, :], value, mask=mask)
    if is_whole:
        if lse_ptr is not None:
            lse_offset = token * stride_lse_token + q_head * stride_lse_head
            gl.store(lse_ptr + lse_offset, lse, mask=in_tile)
        # By way of shared memory, for stores of 16 bytes.
        staged = q_smem.index(GROUP_OF_ROWS)
        staged.store(value.to(out_ptr.dtype.element_ty).to(gl.float16, bitcast=True))
        whole_row = GROUP_OF_ROWS * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS_LAYOUT))
        whole_dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, ROWS_LAYOUT))
        whole_query = first_query + whole_row // GROUP
        offset = (query_start + whole_query).to(gl.int64) * stride_out_token
        offset += (head * GROUP + whole_row % GROUP).to(gl.int64) * stride_out_head
        gl.store(
            out_ptr + offset[:, None] + whole_dim[None, :],
            staged.load(ROWS_LAYOUT).to(out_ptr.dtype.element_ty, bitcast=True),
            mask=(whole_query < end_query)[:, None],
        )


@gluon.jit(
    do_not_specialize=[
        "num_splits", "num_programs", "num_tokens", "num_reqs", "num_heads", "tokens_per_scale"
    ],
    # Behind decode rows they begin anywhere.
    do_not_specialize_on_alignment=["block_table_ptr", "query_start_loc_ptr", "seq_lens_ptr"],
)  # fmt: skip
def _prefill_hopper_fp8_kernel(
    out_ptr,  # [num_tokens, q_heads, DIM], unit last stride
    stride_out_token,
    stride_out_head,
    lse_ptr,  # [num_tokens, q_heads] fp32, or None
    stride_lse_token,
    stride_lse_head,
    states_ptr,  # [num_splits, num_tokens, q_heads, DIM] fp32, or None: one program a tile
    states_lse_ptr,  # [num_splits, num_tokens, q_heads] fp32
    arrivals_ptr,  # [tiles * kv_heads] int32, 0 before and after a launch
    num_splits,  # programs of a tile, at most
    num_programs,  # of all that share tiles
    num_tokens,
    q_ptr,  # [num_tokens, q_heads, DIM], unit last stride
    stride_q_token,
    stride_q_head,
    k_desc,  # [codes / DIM, DIM] of one layer's keys, boxes of [BLOCK_SIZE, DIM]
    v_desc,
    k_scale_ptr,  # float32, flat
    v_scale_ptr,
    scale_base_ptr,  # [kv_heads] int64, elements
    scale_block_stride_ptr,  # [kv_heads] int64, elements
    tokens_per_scale,  # of a block
    block_table_ptr,  # [num_reqs, row_width] int32, unit last stride
    stride_table_row,
    query_start_loc_ptr,  # [num_reqs + 1] int32
    seq_lens_ptr,  # [num_reqs] int32
    num_reqs,
    num_kv_heads,
    heads_ptr,  # [num_heads] int32, KV heads of the launch, or None: all
    num_heads,
    head_base_ptr,  # [kv_heads] int64, elements
    block_stride_ptr,  # [kv_heads] int64, elements
    table_offset_ptr,  # [kv_heads] int32
    softmax_scale,
    GROUP: gl.constexpr,  # query heads per KV head
    BLOCK_SIZE: gl.constexpr,
    TILE_TOKENS: gl.constexpr,
    MIN_TILES: gl.constexpr,  # of a program that shares a tile
):
    """Grid (tiles * num_heads, and num_programs - num_heads more where programs share tiles)."""
    TILE_QUERIES: gl.constexpr = ROWS // GROUP
    pairs = gl.num_programs(0)
    if states_ptr is not None:
        pairs -= num_programs - num_heads
    pair = gl.program_id(0)
    split = gl.to_tensor(0)
    if states_ptr is not None:
        tiles = _count_tiles(query_start_loc_ptr, num_reqs, TILE_QUERIES)
        num_splits = gl.minimum(num_splits, num_programs // (tiles * num_heads))
        num_splits = gl.maximum(num_splits, 1)
        if pair >= pairs:
            split = 1 + (pair - pairs) // (tiles * num_heads)
            pair = (pair - pairs) % (tiles * num_heads)
            tile_of_batch = pair // num_heads
            head = pair % num_heads
        else:
            tile_of_batch = pairs // num_heads - 1 - pair // num_heads
            head = pair % num_heads
        if split >= num_splits:
            return
    else:
        # Head by head, so that the head's K and V stay in L2; the last tiles have the most keys.
        num_tiles = pairs // num_heads
        head = pair // num_tiles
        tile_of_batch = num_tiles - 1 - pair % num_tiles
    if heads_ptr is not None:
        head = gl.load(heads_ptr + head)
    req = _find_request(query_start_loc_ptr, tile_of_batch, num_reqs, TILE_QUERIES)
    query_start = gl.load(query_start_loc_ptr + req)
    query_len = gl.load(query_start_loc_ptr + req + 1) - query_start
    first_query = (tile_of_batch - (query_start // TILE_QUERIES + req)) * TILE_QUERIES
    if first_query >= query_len:
        return
    end_query = gl.minimum(first_query + TILE_QUERIES, query_len)
    seq_len = gl.load(seq_lens_ptr + req)
    context_len = seq_len - query_len
    # A padding row has queries and no keys: one tile, in which it sees none.
    end_position = gl.maximum(context_len + end_query, 0)
    end_tile = gl.maximum(gl.cdiv(end_position, TILE_TOKENS), 1)
    first_tile = gl.to_tensor(0)
    splits = 1
    if states_ptr is not None:
        share = gl.maximum(gl.cdiv(end_tile, num_splits), MIN_TILES)
        splits = gl.maximum(gl.cdiv(end_tile, share), 1)
        if split >= splits:
            return
        first_tile = split * share
        end_tile = gl.minimum(first_tile + share, end_tile)
    table_row_ptr = (
        block_table_ptr + req.to(gl.int64) * stride_table_row + gl.load(table_offset_ptr + head)
    )
    head_row = (gl.load(head_base_ptr + head) // DIM).to(gl.int32)
    block_rows = (gl.load(block_stride_ptr + head) // DIM).to(gl.int32)
    scale_base = gl.load(scale_base_ptr + head)
    scale_block_stride = gl.load(scale_block_stride_ptr + head)
    last_column = gl.maximum(gl.cdiv(end_position, BLOCK_SIZE) - 1, 0)
    last_column = gl.minimum(last_column, gl.cdiv(end_tile * TILE_TOKENS, BLOCK_SIZE) - 1)

    q_smem = gl.allocate_shared_memory(gl.float16, [2, 64, DIM], WIDE_LAYOUT)
    k_smem = gl.allocate_shared_memory(gl.float16, [STAGES, TILE_TOKENS, DIM], WIDE_LAYOUT)
    v_smem = gl.allocate_shared_memory(gl.float16, [STAGES, TILE_TOKENS, DIM], WIDE_LAYOUT)
    codes_smem = gl.allocate_shared_memory(k_desc.dtype, [SLOTS, TILE_TOKENS, DIM], k_desc.layout)
    factors = gl.allocate_shared_memory(gl.float32, [COLUMN_STAGES, TILE_TOKENS], COLUMN_LAYOUT)
    biases = gl.allocate_shared_memory(gl.float32, [COLUMN_STAGES, TILE_TOKENS], COLUMN_LAYOUT)
    inverses = gl.allocate_shared_memory(gl.float32, [COLUMN_STAGES, TILE_TOKENS], COLUMN_LAYOUT)
    sizes = gl.allocate_shared_memory(gl.float32, [2, 1], SIZE_LAYOUT)
    sized = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    codes_ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    codes_free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(codes_ready.index(slot), count=1)
        mbarrier.init(codes_free.index(slot), count=1)
    mbarrier.init(sized, count=2)
    fence_async_shared()
    scale = softmax_scale * LOG2_E
    DIVIDED: gl.constexpr = q_ptr.dtype.element_ty == gl.bfloat16
    num_tiles = end_tile - first_tile

    num_q_heads = num_kv_heads * GROUP
    first_state = gl.to_tensor(-1).to(gl.int64)  # no state: the program writes the output
    if states_ptr is not None:  # noqa: SIM102
        if splits > 1:
            first_state = split.to(gl.int64) * num_tokens * num_q_heads
    gl.warp_specialize(
        [
            (_consume, (
                0, q_smem, k_smem, v_smem, factors, biases, inverses, sizes, sized,
                k_ready, v_ready, k_free, v_free, q_ptr, stride_q_token, stride_q_head,
                out_ptr, stride_out_token, stride_out_head,
                lse_ptr, stride_lse_token, stride_lse_head, states_ptr, states_lse_ptr,
                first_state, num_q_heads, query_start, first_query, end_query, context_len, head,
                end_tile, num_tiles, GROUP, TILE_TOKENS,
            )),
            (_consume, (
                1, q_smem, k_smem, v_smem, factors, biases, inverses, sizes, sized,
                k_ready, v_ready, k_free, v_free, q_ptr, stride_q_token, stride_q_head,
                out_ptr, stride_out_token, stride_out_head,
                lse_ptr, stride_lse_token, stride_lse_head, states_ptr, states_lse_ptr,
                first_state, num_q_heads, query_start, first_query, end_query, context_len, head,
                end_tile, num_tiles, GROUP, TILE_TOKENS,
            )),
            (_convert, (
                codes_smem, k_smem, v_smem, factors, biases, inverses, sizes, sized,
                codes_ready, codes_free, k_ready, v_ready, k_free, v_free,
                k_scale_ptr, v_scale_ptr, scale_base, scale_block_stride, tokens_per_scale,
                table_row_ptr, end_position, end_tile, num_tiles, scale,
                DIVIDED, BLOCK_SIZE, TILE_TOKENS,
            )),
            (_produce, (
                k_desc, v_desc, codes_smem, codes_ready, codes_free,
                table_row_ptr, head_row, block_rows, end_tile, num_tiles, last_column,
                BLOCK_SIZE, TILE_TOKENS,
            )),
        ],
        [4, 4, 1],
        [CONSUMER_REGISTERS, CONVERTER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
    if states_ptr is not None:  # noqa: SIM102
        if splits > 1:
            arrival_ptr = arrivals_ptr + tile_of_batch * num_kv_heads + head
            thread_barrier()
            arrived = gl.atomic_add(arrival_ptr, 1, sem="acq_rel", scope="gpu")
            if arrived == splits - 1:
                gl.store(arrival_ptr, 0)
                _merge_tile(
                    out_ptr, stride_out_token, stride_out_head,
                    lse_ptr, stride_lse_token, stride_lse_head, states_ptr, states_lse_ptr,
                    num_tokens, num_q_heads, splits,
                    query_start, first_query, end_query, head, GROUP, DIM,
                )  # fmt: skip


def describe(codes: torch.Tensor, block_size: int) -> TensorDescriptor:
    """Return a cache of codes as rows of 128, copied in boxes of a page."""
    rows = codes.view(torch.uint8).view(-1, DIM.value)
    return TensorDescriptor.from_tensor(rows, [block_size, DIM.value], CODES_LAYOUT)


def launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: KVLayout,
    *,
    softmax_scale: float,
    splits: PrefillSplits | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scales: KVScales,
) -> None:
    """Launch the kernel on checked arguments of ``paged_prefill_attention``."""
    num_tokens, num_q_heads, _ = q.shape
    num_reqs = seq_lens.shape[0]
    group = num_q_heads // layout.num_kv_heads
    heads, num_heads = heads_of_launch(layout)
    num_programs = (num_tokens // (ROWS.value // group) + num_reqs) * num_heads
    per_block = scales.page_format.scales_per_block(layout.block_size)
    num_sharing = 0
    if splits is not None:  # whose programs are smaller: two of them fit a multiprocessor
        num_sharing = max(splits.num_programs // PROGRAMS_PER_SM, num_heads)
        num_programs += num_sharing - num_heads
    launch_kernel(
        _prefill_hopper_fp8_kernel,
        (num_programs,),
        *with_strides(out),
        *with_strides(lse),
        None if splits is None else splits.states,
        None if splits is None else splits.states_lse,
        None if splits is None else splits.arrivals,
        0 if splits is None else splits.num_splits,
        num_sharing,
        num_tokens,
        *with_strides(q),
        describe(k_cache, layout.block_size),
        describe(v_cache, layout.block_size),
        scales.k_scale,
        scales.v_scale,
        scales.base,
        scales.block_stride,
        layout.block_size // max(per_block, 1),
        table,
        table.stride(0),
        query_start_loc,
        seq_lens,
        num_reqs,
        layout.num_kv_heads,
        heads,
        num_heads,
        layout.head_base,
        layout.block_stride,
        layout.table_offset,
        softmax_scale,
        GROUP=group,
        BLOCK_SIZE=layout.block_size,
        TILE_TOKENS=TILE_TOKENS,
        MIN_TILES=MIN_SHARED_TILES,
        num_warps=4,
    )
