"""Paged prefill attention for Hopper (sm_90): warp groups that multiply beside one that copies.

The same attention as ``prefill_attention``, which launches this kernel where ``fits_warp_groups``
allows: for the full heads of 16-bit caches of contiguous pages of 64, 128 or 256 dimensions, with
causal masks. One program computes a tile of 128 (query, query head) rows of one KV head with three
groups of warps, which signal each other through barriers in shared memory::

    producer, 1 warp       K and V pages of the next tiles: bulk copies (TMA) of 64 dimensions
    consumer 0, 4 warps    rows 0 to 63: scores, softmax, weights times V
    consumer 1, 4 warps    rows 64 to 127, on the same keys

While one consumer computes its softmax, the other one multiplies. Keys go from the last tile to
the first, so that the masked tiles come first and the loop over the others has no mask.

Gluon, not Triton: Triton 3.6 to 3.9 has no way to say which warps copy and which multiply, and
its own pipelining keeps the two products of a step and the softmax in one order.

Source: FlashAttention-3 (arXiv:2407.08608) for the division among warp groups.
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
from mrv1.kernels.attention.prefill.choice import PROGRAMS_PER_SM, WARP_GROUP_TILES, PrefillSplits
from mrv1.kernels.cache.kv_layout import KVLayout

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(128)
"""(query, query head) rows of a program: 64 for each consumer."""
BOX_DIM = gl.constexpr(64)
"""Dimensions of a bulk copy: 64 16-bit elements are 128 bytes, the widest that it swizzles."""
CONSUMER_REGISTERS = gl.constexpr(232)
"""Registers of a consumer's thread: accumulators of scores and output, and weights."""
PRODUCER_REGISTERS = gl.constexpr(40)
"""The rest of a multiprocessor's. With 24, the pages' rows spill for blocks of 16 tokens."""
SCAN_REQS = gl.constexpr(128)
SCAN_BLOCKS = gl.constexpr(1024)
MERGED_ROWS = gl.constexpr(16)
"""Rows that are merged at a time, so that they fit registers."""
VECTOR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
WIDE_VECTOR = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


@gluon.constexpr_function
def rows_layout(dim):
    """Return the layout of whole rows, 16 bytes a lane."""
    return gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def product_layout(columns):
    """Return the layout of a consumer's product of so many columns."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.jit
def _find_request(
    query_start_loc_ptr, tile, num_reqs, TILE_QUERIES: gl.constexpr, LAYOUT: gl.constexpr = VECTOR
):
    """Return the last request whose first tile does not come after ``tile``."""
    req = -1
    for first in range(0, num_reqs, SCAN_REQS):
        other = first + gl.arange(0, SCAN_REQS, layout=LAYOUT)
        in_batch = other < num_reqs
        query_start = gl.load(query_start_loc_ptr + other, mask=in_batch, other=0)
        begun = in_batch & (query_start // TILE_QUERIES + other <= tile)
        req += gl.sum(begun.to(gl.int32), axis=0)
    return req


@gluon.jit
def _count_tiles(query_start_loc_ptr, num_reqs, TILE_QUERIES: gl.constexpr):
    """Return how many tiles come before the padding after the last token, at least one."""
    end = gl.load(query_start_loc_ptr + num_reqs)
    last_req = -1
    last_start = 0
    for first in range(0, num_reqs, SCAN_REQS):
        other = first + gl.arange(0, SCAN_REQS, layout=VECTOR)
        query_start = gl.load(query_start_loc_ptr + other, mask=other < num_reqs, other=2147483647)
        has_tokens = query_start < end
        last_req += gl.sum(has_tokens.to(gl.int32), axis=0)
        last_start = gl.maximum(last_start, gl.max(gl.where(has_tokens, query_start, 0), axis=0))
    first_tile = last_start // TILE_QUERIES + last_req
    return gl.maximum(first_tile + gl.cdiv(end - last_start, TILE_QUERIES), 1)


@gluon.jit
def copy_pages(desc, smem, ready, rows):
    """Begin to copy the pages at ``rows`` of a cache to one tile."""
    TILE_TOKENS: gl.constexpr = smem.shape[0]
    DIM: gl.constexpr = smem.shape[1]
    BLOCK_SIZE: gl.constexpr = desc.block_shape[0]
    PAGES: gl.constexpr = TILE_TOKENS // BLOCK_SIZE
    PARTS: gl.constexpr = DIM // BOX_DIM
    boxes = as_boxes(smem, desc, PARTS * PAGES)
    mbarrier.expect(ready, TILE_TOKENS * DIM * 2)
    for page in gl.static_range(PAGES):
        for part in gl.static_range(PARTS):
            copy_box(desc, [rows[page], part * BOX_DIM], ready, boxes.index(part * PAGES + page))


@gluon.jit
def _produce(
    k_desc, v_desc, k_smem, v_smem, k_ready, v_ready, k_free, v_free,
    table_row_ptr, head_row, block_rows, first_tile, num_tiles, last_column,
    BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Copy the pages of ``num_tiles`` tiles, from the last to ``first_tile``."""
    STAGES: gl.constexpr = k_smem.shape[0]
    TILE_TOKENS: gl.constexpr = k_smem.shape[1]
    PAGES: gl.constexpr = TILE_TOKENS // BLOCK_SIZE
    for step in range(num_tiles):
        first_column = (first_tile + num_tiles - 1 - step) * PAGES
        stage = step % STAGES
        phase = ((step // STAGES) & 1) ^ 1
        rows = ()
        for page in gl.static_range(PAGES):
            # Past the last column any page will do: its keys are masked, its values cleared.
            block = gl.load(table_row_ptr + gl.minimum(first_column + page, last_column))
            # No page: a row before the first one, for which the copy writes zeros.
            row = gl.where(block < 0, -BLOCK_SIZE, head_row + block * block_rows)
            rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005 - Triton has no stars
        mbarrier.wait(k_free.index(stage), phase)
        copy_pages(k_desc, k_smem.index(stage), k_ready.index(stage), rows)
        mbarrier.wait(v_free.index(stage), phase)
        copy_pages(v_desc, v_smem.index(stage), v_ready.index(stage), rows)


@gluon.jit
def _scores(q_smem, k_smem, stage, GROUP_OF_ROWS: gl.constexpr, SCORES: gl.constexpr):
    """Begin the product of this consumer's queries with a stage's keys."""
    TILE_TOKENS: gl.constexpr = k_smem.shape[1]
    zeros = gl.zeros([64, TILE_TOKENS], gl.float32, SCORES)
    keys = k_smem.index(stage).permute((1, 0))
    return warpgroup_mma(q_smem.index(GROUP_OF_ROWS), keys, zeros, use_acc=False, is_async=True)


@gluon.jit
def _softmax(
    scores, top, total, scale, visible_keys,
    MASKED: gl.constexpr, TILE_TOKENS: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Return (weights, top, total, rescale); a row sees the first ``visible_keys`` of the tile."""
    if MASKED:
        key = gl.arange(0, TILE_TOKENS, layout=gl.SliceLayout(0, SCORES))
        scores = gl.where(key[None, :] < visible_keys[:, None], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1) * scale)
    shift = new_top
    if MASKED:
        shift = gl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf is NaN
    weights = gl.exp2(scores * scale - shift[:, None])
    rescale = gl.exp2(top - shift)
    return weights, new_top, total * rescale + gl.sum(weights, 1), rescale


@gluon.jit
def _hide_missing(
    scores, table_row_ptr, tile, last_column,
    BLOCK_SIZE: gl.constexpr, TILE_TOKENS: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Hide the keys of a tile that have no page."""
    key = tile * TILE_TOKENS + gl.arange(0, TILE_TOKENS, layout=gl.SliceLayout(0, SCORES))
    block = gl.load(table_row_ptr + gl.minimum(key // BLOCK_SIZE, last_column))
    return gl.where((block >= 0)[None, :], scores, float("-inf"))


@gluon.jit
def _step(
    q_smem, k_smem, v_smem, k_ready, v_ready, k_free, v_free, table_row_ptr, last_column, has_gaps,
    weights, acc, top, total, step, tile, scale, query_position,
    GROUP_OF_ROWS: gl.constexpr, MASKED: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    TILE_TOKENS: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Multiply this tile's keys beside the previous tile's values; return the new weights.

    The previous tile's values have arrived; when it returns, this tile's have too.
    """
    STAGES: gl.constexpr = k_smem.shape[0]
    DIM: gl.constexpr = k_smem.shape[2]
    OUT_LAYOUT: gl.constexpr = product_layout(DIM)
    stage = step % STAGES
    mbarrier.wait(k_ready.index(stage), (step // STAGES) & 1)
    scores = _scores(q_smem, k_smem, stage, GROUP_OF_ROWS, SCORES)
    previous = step - 1
    v_stage = previous % STAGES
    acc = warpgroup_mma(weights, v_smem.index(v_stage), acc, is_async=True)
    visible_keys = query_position + 1 - tile * TILE_TOKENS
    # Operands of the wait, or ptxas moves their computation behind it.
    if MASKED:
        scores, visible_keys = warpgroup_mma_wait(1, deps=(scores, visible_keys))
    else:
        scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_free.index(stage), count=1)
    if MASKED:  # noqa: SIM102 - the compiler knows this condition, the program the next one
        if has_gaps:
            scores = _hide_missing(
                scores, table_row_ptr, tile, last_column, BLOCK_SIZE, TILE_TOKENS, SCORES
            )
    exact, top, total, rescale = _softmax(
        scores, top, total, scale, visible_keys, MASKED, TILE_TOKENS, SCORES
    )
    # Its loop keeps ptxas from moving the softmax behind the wait for the product.
    mbarrier.wait(v_ready.index(stage), (step // STAGES) & 1)
    weights = gl.convert_layout(exact.to(q_smem.dtype), gl.DotOperandLayout(0, OUT_LAYOUT, 2))
    acc, weights, total = warpgroup_mma_wait(0, deps=(acc, weights, total))
    mbarrier.arrive(v_free.index(v_stage), count=1)
    rescale = gl.convert_layout(rescale, gl.SliceLayout(1, OUT_LAYOUT))
    return weights, acc * rescale[:, None], top, total


@gluon.jit
def _consume(
    GROUP_OF_ROWS: gl.constexpr, q_smem, k_smem, v_smem, k_ready, v_ready, k_free, v_free, cleared,
    q_ptr, stride_q_token, stride_q_head, out_ptr, stride_out_token, stride_out_head,
    lse_ptr, stride_lse_token, stride_lse_head, states_ptr, states_lse_ptr, first_state,
    num_q_heads, query_start, first_query, end_query, context_len, head, first_tile, num_tiles,
    scale, table_row_ptr, last_column,
    GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE_TOKENS: gl.constexpr,
):  # fmt: skip
    """Attend from 64 of the program's rows to tiles [first_tile, first_tile + num_tiles)."""
    DIM: gl.constexpr = k_smem.shape[2]
    STAGES: gl.constexpr = k_smem.shape[0]
    ROWS_LAYOUT: gl.constexpr = rows_layout(DIM)
    OUT_LAYOUT: gl.constexpr = product_layout(DIM)
    SCORES: gl.constexpr = product_layout(TILE_TOKENS)
    row = GROUP_OF_ROWS * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS_LAYOUT))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, ROWS_LAYOUT))
    query = first_query + row // GROUP
    token = (query_start + query).to(gl.int64)
    q_head = (head * GROUP + row % GROUP).to(gl.int64)
    q_offset = token * stride_q_token + q_head * stride_q_head
    q = gl.load(
        q_ptr + q_offset[:, None] + dim[None, :], mask=(query < end_query)[:, None], other=0.0
    )
    q_smem.index(GROUP_OF_ROWS).store(q)
    fence_async_shared()

    # A page that is missing among those that every row sees makes all tiles masked ones.
    lowest = gl.full([SCAN_BLOCKS], 0, gl.int32, WIDE_VECTOR)
    first_column = first_tile * TILE_TOKENS // BLOCK_SIZE
    for first in range(first_column, last_column + 1, SCAN_BLOCKS):
        column = first + gl.arange(0, SCAN_BLOCKS, layout=WIDE_VECTOR)
        block = gl.load(table_row_ptr + column, mask=column <= last_column, other=0)
        lowest = gl.minimum(lowest, block)
    has_gaps = gl.min(lowest, axis=0) < 0
    end_tile = first_tile + num_tiles
    num_inner = (context_len + first_query + 1) // TILE_TOKENS - first_tile
    num_masked = gl.where(has_gaps, num_tiles, gl.maximum(num_tiles - num_inner, 1))
    num_masked = gl.minimum(num_masked, num_tiles)

    row = GROUP_OF_ROWS * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    query_position = context_len + gl.minimum(first_query + row // GROUP, end_query - 1)
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([64, DIM], gl.float32, OUT_LAYOUT)

    mbarrier.wait(k_ready.index(0), 0)
    scores = _scores(q_smem, k_smem, 0, GROUP_OF_ROWS, SCORES)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_free.index(0), count=1)
    if has_gaps:
        scores = _hide_missing(
            scores, table_row_ptr, end_tile - 1, last_column, BLOCK_SIZE, TILE_TOKENS, SCORES
        )
    visible_keys = query_position + 1 - (end_tile - 1) * TILE_TOKENS
    exact, top, total, _ = _softmax(
        scores, top, total, scale, visible_keys, True, TILE_TOKENS, SCORES
    )
    weights = gl.convert_layout(exact.to(q_smem.dtype), gl.DotOperandLayout(0, OUT_LAYOUT, 2))

    # Values after the last query may be NaN, and 0 * NaN is NaN: each consumer clears its half.
    num_live = context_len + end_query - (end_tile - 1) * TILE_TOKENS
    mbarrier.wait(v_ready.index(0), 0)
    if num_live < TILE_TOKENS:
        HALF: gl.constexpr = TILE_TOKENS // 2
        values = v_smem.index(0).slice(GROUP_OF_ROWS * HALF, HALF)
        key = GROUP_OF_ROWS * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, ROWS_LAYOUT))
        value = values.load(ROWS_LAYOUT)
        values.store(gl.where((key < num_live)[:, None], value, gl.zeros_like(value)))
        fence_async_shared()
        mbarrier.arrive(cleared, count=1)
        mbarrier.wait(cleared, 0)

    for step in range(1, num_masked):
        weights, acc, top, total = _step(
            q_smem, k_smem, v_smem, k_ready, v_ready, k_free, v_free, table_row_ptr, last_column,
            has_gaps, weights, acc, top, total, step, end_tile - 1 - step, scale, query_position,
            GROUP_OF_ROWS, True, BLOCK_SIZE, TILE_TOKENS, SCORES,
        )  # fmt: skip
    for step in range(num_masked, num_tiles):
        weights, acc, top, total = _step(
            q_smem, k_smem, v_smem, k_ready, v_ready, k_free, v_free, table_row_ptr, last_column,
            has_gaps, weights, acc, top, total, step, end_tile - 1 - step, scale, query_position,
            GROUP_OF_ROWS, False, BLOCK_SIZE, TILE_TOKENS, SCORES,
        )  # fmt: skip
    last = num_tiles - 1
    v_stage = last % STAGES
    acc = warpgroup_mma(weights, v_smem.index(v_stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))

    seen = total != 0.0  # true of NaN, which must come out as NaN
    total = gl.where(seen, total, 1.0)
    factor = gl.convert_layout(1.0 / total, gl.SliceLayout(1, OUT_LAYOUT))
    lse = gl.where(seen, (top + gl.log2(total)) * LN_2, float("-inf"))
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
    value = acc * factor[:, None]
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
        out_offset = out_token * stride_out_token + out_head * stride_out_head
        out_value = value.to(out_ptr.dtype.element_ty)
        gl.store(out_ptr + out_offset[:, None] + dim[None, :], out_value, mask=mask)


@gluon.jit
def _merge_tile(
    out_ptr, stride_out_token, stride_out_head, lse_ptr, stride_lse_token, stride_lse_head,
    states_ptr, states_lse_ptr, num_tokens, num_q_heads, splits,
    query_start, first_query, end_query, head, GROUP: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Weigh the states of a tile by their log-sum-exp, in order, and write its rows."""
    ROWS_LAYOUT: gl.constexpr = rows_layout(DIM)
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, ROWS_LAYOUT))
    for first_row in range(0, ROWS, MERGED_ROWS):
        row = first_row + gl.arange(0, MERGED_ROWS, layout=gl.SliceLayout(1, ROWS_LAYOUT))
        query = first_query + row // GROUP
        in_tile = query < end_query
        token = (query_start + query).to(gl.int64)
        q_head = (head * GROUP + row % GROUP).to(gl.int64)
        mask = in_tile[:, None] & (dim < DIM)[None, :]
        top = gl.full([MERGED_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, ROWS_LAYOUT))
        total = gl.zeros([MERGED_ROWS], gl.float32, gl.SliceLayout(1, ROWS_LAYOUT))
        acc = gl.zeros([MERGED_ROWS, DIM], gl.float32, ROWS_LAYOUT)
        for split in range(splits):
            state = (split * num_tokens + token) * num_q_heads + q_head
            part_lse = gl.load(states_lse_ptr + state, mask=in_tile, other=float("-inf")) * LOG2_E
            part = gl.load(states_ptr + state[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
            new_top = gl.maximum(top, part_lse)
            shift = gl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf is NaN
            weight = gl.exp2(part_lse - shift)
            rescale = gl.exp2(top - shift)
            acc = acc * rescale[:, None] + weight[:, None] * part
            total = total * rescale + weight
            top = new_top
        seen = total != 0.0
        value = acc / gl.where(seen, total, 1.0)[:, None]
        out_offset = token * stride_out_token + q_head * stride_out_head
        gl.store(
            out_ptr + out_offset[:, None] + dim[None, :],
            value.to(out_ptr.dtype.element_ty),
            mask=mask,
        )
        if lse_ptr is not None:
            lse = gl.where(seen, (top + gl.log2(gl.where(seen, total, 1.0))) * LN_2, float("-inf"))
            lse_offset = token * stride_lse_token + q_head * stride_lse_head
            gl.store(lse_ptr + lse_offset, lse, mask=in_tile)


@gluon.jit(
    do_not_specialize=["num_splits", "num_programs", "num_tokens", "num_reqs", "num_heads"],
    # Behind decode rows they begin anywhere.
    do_not_specialize_on_alignment=["block_table_ptr", "query_start_loc_ptr", "seq_lens_ptr"],
)
def _prefill_hopper_kernel(
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
    k_desc,  # [elements / DIM, DIM] of one layer's keys, boxes of [BLOCK_SIZE, BOX_DIM]
    v_desc,
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
    DIM: gl.constexpr,
    GROUP: gl.constexpr,  # query heads per KV head
    BLOCK_SIZE: gl.constexpr,
    TILE_TOKENS: gl.constexpr,  # and STAGES: see ``WARP_GROUP_TILES``
    STAGES: gl.constexpr,
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
    last_column = gl.maximum(gl.cdiv(end_position, BLOCK_SIZE) - 1, 0)
    last_column = gl.minimum(last_column, gl.cdiv(end_tile * TILE_TOKENS, BLOCK_SIZE) - 1)

    q_smem = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [2, 64, DIM], k_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, TILE_TOKENS, DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, TILE_TOKENS, DIM], v_desc.layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    cleared = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    mbarrier.init(cleared, count=2)
    fence_async_shared()
    scale = softmax_scale * LOG2_E
    num_tiles = end_tile - first_tile

    num_q_heads = num_kv_heads * GROUP
    first_state = gl.to_tensor(-1).to(gl.int64)  # no state: the program writes the output
    if states_ptr is not None:  # noqa: SIM102
        if splits > 1:
            first_state = split.to(gl.int64) * num_tokens * num_q_heads
    gl.warp_specialize(
        [
            (_consume, (
                0, q_smem, k_smem, v_smem, k_ready, v_ready, k_free, v_free, cleared,
                q_ptr, stride_q_token, stride_q_head, out_ptr, stride_out_token, stride_out_head,
                lse_ptr, stride_lse_token, stride_lse_head, states_ptr, states_lse_ptr,
                first_state, num_q_heads, query_start, first_query, end_query, context_len, head,
                first_tile, num_tiles, scale, table_row_ptr, last_column,
                GROUP, BLOCK_SIZE, TILE_TOKENS,
            )),
            (_consume, (
                1, q_smem, k_smem, v_smem, k_ready, v_ready, k_free, v_free, cleared,
                q_ptr, stride_q_token, stride_q_head, out_ptr, stride_out_token, stride_out_head,
                lse_ptr, stride_lse_token, stride_lse_head, states_ptr, states_lse_ptr,
                first_state, num_q_heads, query_start, first_query, end_query, context_len, head,
                first_tile, num_tiles, scale, table_row_ptr, last_column,
                GROUP, BLOCK_SIZE, TILE_TOKENS,
            )),
            (_produce, (
                k_desc, v_desc, k_smem, v_smem, k_ready, v_ready, k_free, v_free,
                table_row_ptr, head_row, block_rows, first_tile, num_tiles, last_column,
                BLOCK_SIZE,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
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


DESCRIPTOR_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
MIN_SHARED_TILES = 4
"""Tiles of a program that shares a query tile's keys with others, at least."""


def describe(cache: torch.Tensor, block_size: int, head_dim: int) -> TensorDescriptor:
    """Return a cache as rows of a head, copied in boxes of a page and 64 dimensions."""
    box = [block_size, BOX_DIM.value]
    return TensorDescriptor.from_tensor(cache.view(-1, head_dim), box, DESCRIPTOR_LAYOUT)


def heads_of_launch(layout: KVLayout) -> tuple[torch.Tensor | None, int]:
    """Return the full heads of a layout, None if all heads are full, and their number."""
    if not layout.has_window:
        return None, layout.num_kv_heads
    return layout.full_heads, len(layout.full_heads)


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
) -> None:
    """Launch the kernel on checked arguments of ``paged_prefill_attention``."""
    num_tokens, num_q_heads, _ = q.shape
    num_reqs = seq_lens.shape[0]
    group = num_q_heads // layout.num_kv_heads
    tile_tokens, stages = WARP_GROUP_TILES[layout.head_dim]
    heads, num_heads = heads_of_launch(layout)
    num_programs = (num_tokens // (ROWS.value // group) + num_reqs) * num_heads
    num_sharing = 0
    if splits is not None:  # whose programs are smaller: two of them fit a multiprocessor
        num_sharing = max(splits.num_programs // PROGRAMS_PER_SM, num_heads)
        num_programs += num_sharing - num_heads
    launch_kernel(
        _prefill_hopper_kernel,
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
        describe(k_cache, layout.block_size, layout.head_dim),
        describe(v_cache, layout.block_size, layout.head_dim),
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
        DIM=layout.head_dim,
        GROUP=group,
        BLOCK_SIZE=layout.block_size,
        TILE_TOKENS=tile_tokens,
        STAGES=stages,
        MIN_TILES=MIN_SHARED_TILES,
        num_warps=4,
    )
