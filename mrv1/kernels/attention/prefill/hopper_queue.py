"""Paged prefill attention for Hopper (sm_90) by programs that stay and take tiles from a queue.

The same attention as ``hopper``, whose products, softmax and tiles these are. There a
program computes one tile, and nothing overlaps its first loads and its last stores: about 5 us of
15 for a prompt of 2,048 tokens. Here each multiprocessor has one program with four groups of
warps, which go through the same tiles, each at its own pace::

    scheduler, 1 warp      takes the next tile from a counter and describes it
    producer, 1 warp       queries, and K and V pages, by bulk copy (TMA), as stages become free
    consumer 0, 4 warps    rows 0 to 63: scores, softmax, weights times V, output
    consumer 1, 4 warps    rows 64 to 127, on the same keys

The scheduler takes a tile when the producer begins with the last pages of the tile before, no
sooner, so that a program with much to do leaves tiles to others. Which program computes a tile
changes no bit of it.

Source: FlashAttention-3 (arXiv:2407.08608) for programs that stay and take tiles as they end.
"""

from __future__ import annotations

import torch

from mrv1.device import device_info
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
from mrv1.kernels.attention.prefill.choice import WARP_GROUP_TILES, PrefillSplits
from mrv1.kernels.attention.prefill.hopper import (
    BOX_DIM,
    CONSUMER_REGISTERS,
    LN_2,
    LOG2_E,
    PRODUCER_REGISTERS,
    ROWS,
    _find_request,
    _hide_missing,
    _scores,
    _softmax,
    _step,
    copy_pages,
    describe,
    heads_of_launch,
    product_layout,
    rows_layout,
)
from mrv1.kernels.cache.kv_layout import KVLayout

L2_BYTES = gl.constexpr(1 << 25)
"""Keys and values that stay in the L2 cache."""
SCAN_BLOCKS = gl.constexpr(512)
WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
WIDE_WARP = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))
SLOTS = gl.constexpr(2)
"""Items in shared memory: the one in work and the next one. Their int32 fields:"""
NUM_TILES = gl.constexpr(0)  # of keys; 0 = no more items
NUM_MASKED = gl.constexpr(1)  # the last of them
HAS_GAPS = gl.constexpr(2)
TABLE_ROW = gl.constexpr(3)  # offset of the head's columns in the block table
LAST_COLUMN = gl.constexpr(4)
HEAD_ROW = gl.constexpr(5)  # of the caches' rows of DIM elements
BLOCK_ROWS = gl.constexpr(6)
HEAD = gl.constexpr(7)
QUERY_START = gl.constexpr(8)
FIRST_QUERY = gl.constexpr(9)
END_QUERY = gl.constexpr(10)
CONTEXT_LEN = gl.constexpr(11)
SEQ_LEN = gl.constexpr(12)
FIELDS = gl.constexpr(13)


@gluon.constexpr_function
def halfway_layout(dim):
    """Return a product's layout with one of ``store_layout``'s exchanges of lanes done."""
    wide = [[0, 1 << bit] for bit in range(5, dim.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], [0, 16], *wide],
        lane_bases=[[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, dim],
    )


@gluon.constexpr_function
def store_layout(dim):
    """Return a product's layout with 16 bytes of a row in a lane."""
    wide = [[0, 1 << bit] for bit in range(5, dim.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *wide],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, dim],
    )


@gluon.jit
def _write(items, slot, FIELD: gl.constexpr, value):
    """Write a field of a slot's item, as the only warp."""
    items.index(slot * FIELDS + FIELD).store(gl.full([1], value, gl.int32, WARP))


@gluon.jit
def _read(items, slot, FIELD: gl.constexpr):
    """Return a field of a slot's item."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(items.index(slot * FIELDS + FIELD).load(layout), axis=0)


@gluon.jit
def _schedule(
    items, item_ready, item_free, wanted, ticket_ptr,
    block_table_ptr, stride_table_row, query_start_loc_ptr, seq_lens_ptr, num_reqs,
    heads_ptr, num_heads, head_base_ptr, block_stride_ptr, table_offset_ptr,
    DIM: gl.constexpr, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, TILE_TOKENS: gl.constexpr,
):  # fmt: skip
    """Take items from the launch's counter and describe them to the other warps."""
    TILE_QUERIES: gl.constexpr = ROWS // GROUP
    L2_KEYS: gl.constexpr = L2_BYTES // (4 * DIM)
    end = gl.load(query_start_loc_ptr + num_reqs)
    num_items = (end // TILE_QUERIES + num_reqs) * num_heads
    ticket = gl.program_id(0)
    count = gl.to_tensor(0)
    while ticket < num_items:
        slot = count % SLOTS
        mbarrier.wait(item_free.index(slot), ((count // SLOTS) & 1) ^ 1)
        # The last request first, and its tiles from the last one, which has the most keys. Heads
        # side by side, as many as the L2 cache holds the keys and values of.
        pair = num_items - 1 - ticket
        tile = pair // num_heads
        req = _find_request(query_start_loc_ptr, tile, num_reqs, TILE_QUERIES, WARP)
        query_start = gl.load(query_start_loc_ptr + req)
        query_len = gl.load(query_start_loc_ptr + req + 1) - query_start
        seq_len = gl.load(seq_lens_ptr + req)
        context_len = seq_len - query_len
        tiles = gl.maximum(gl.cdiv(query_len, TILE_QUERIES), 1)
        together = gl.minimum(gl.maximum(L2_KEYS // gl.maximum(seq_len, 1), 1), num_heads)
        rest = pair - (query_start // TILE_QUERIES + req) * num_heads
        is_tile = rest < tiles * num_heads  # some requests have room for one tile more
        first_head = rest // (tiles * together) * together
        rest -= first_head * tiles
        together = gl.maximum(gl.minimum(together, num_heads - first_head), 1)
        first_query = rest // together * TILE_QUERIES
        head = first_head + rest % together
        if is_tile & (first_query < query_len):
            if heads_ptr is not None:
                head = gl.load(heads_ptr + head)
            end_query = gl.minimum(first_query + TILE_QUERIES, query_len)
            # A padding row has queries and no keys: one tile, in which it sees none.
            end_position = gl.maximum(context_len + end_query, 0)
            num_tiles = gl.maximum(gl.cdiv(end_position, TILE_TOKENS), 1)
            table_row = req * stride_table_row + gl.load(table_offset_ptr + head)
            head_row = (gl.load(head_base_ptr + head) // DIM).to(gl.int32)
            block_rows = (gl.load(block_stride_ptr + head) // DIM).to(gl.int32)
            last_column = gl.maximum(gl.cdiv(end_position, BLOCK_SIZE) - 1, 0)
            # A page that is missing among those that every row sees makes all tiles masked ones.
            lowest = gl.full([SCAN_BLOCKS], 0, gl.int32, WIDE_WARP)
            for first in range(0, last_column + 1, SCAN_BLOCKS):
                column = first + gl.arange(0, SCAN_BLOCKS, layout=WIDE_WARP)
                block = gl.load(
                    block_table_ptr + table_row + column, mask=column <= last_column, other=0
                )
                lowest = gl.minimum(lowest, block)
            has_gaps = gl.min(lowest, axis=0) < 0
            num_inner = (context_len + first_query + 1) // TILE_TOKENS
            num_masked = gl.where(has_gaps, num_tiles, gl.maximum(num_tiles - num_inner, 1))

            _write(items, slot, NUM_TILES, num_tiles)
            _write(items, slot, NUM_MASKED, gl.minimum(num_masked, num_tiles))
            _write(items, slot, HAS_GAPS, has_gaps.to(gl.int32))
            _write(items, slot, TABLE_ROW, table_row)
            _write(items, slot, LAST_COLUMN, last_column)
            _write(items, slot, HEAD_ROW, head_row)
            _write(items, slot, BLOCK_ROWS, block_rows)
            _write(items, slot, HEAD, head)
            _write(items, slot, QUERY_START, query_start)
            _write(items, slot, FIRST_QUERY, first_query)
            _write(items, slot, END_QUERY, end_query)
            _write(items, slot, CONTEXT_LEN, context_len)
            _write(items, slot, SEQ_LEN, seq_len)
            thread_barrier()
            mbarrier.arrive(item_ready.index(slot), count=1)
            mbarrier.wait(wanted, count & 1)
            count += 1
        taken = gl.atomic_add(ticket_ptr, 1, sem="relaxed", scope="gpu")
        if taken == num_items - 1:  # each item adds one, so nobody will add any more
            gl.store(ticket_ptr, 0)
        ticket = gl.num_programs(0) + taken
    slot = count % SLOTS
    mbarrier.wait(item_free.index(slot), ((count // SLOTS) & 1) ^ 1)
    _write(items, slot, NUM_TILES, 0)
    thread_barrier()
    mbarrier.arrive(item_ready.index(slot), count=1)


@gluon.jit
def _copy_tile(desc, smem, ready, free, copy, rows):
    """Copy the pages that begin at ``rows`` to the stage of tile ``copy``, once it is free."""
    STAGES: gl.constexpr = smem.shape[0]
    stage = copy % STAGES
    mbarrier.wait(free.index(stage), ((copy // STAGES) & 1) ^ 1)
    copy_pages(desc, smem.index(stage), ready.index(stage), rows)


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_ready, k_ready, v_ready,
    q_free, k_free, v_free, items, item_ready, item_free, wanted, block_table_ptr,
    GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Copy the queries of each item, and the pages of its tiles from the last to the first."""
    TILE_TOKENS: gl.constexpr = k_smem.shape[1]
    DIM: gl.constexpr = k_smem.shape[2]
    PAGES: gl.constexpr = TILE_TOKENS // BLOCK_SIZE
    PARTS: gl.constexpr = DIM // BOX_DIM
    item = gl.to_tensor(0)
    copy = gl.to_tensor(0)  # tiles of keys of all items
    mbarrier.wait(item_ready.index(0), 0)
    num_tiles = _read(items, 0, NUM_TILES)
    while num_tiles > 0:
        slot = item % SLOTS
        table_row_ptr = block_table_ptr + _read(items, slot, TABLE_ROW)
        head_row = _read(items, slot, HEAD_ROW)
        block_rows = _read(items, slot, BLOCK_ROWS)
        last_column = _read(items, slot, LAST_COLUMN)
        first_token = _read(items, slot, QUERY_START) + _read(items, slot, FIRST_QUERY)
        first_head = _read(items, slot, HEAD) * GROUP
        mbarrier.arrive(item_free.index(slot), count=1)
        for step in range(num_tiles):
            if step == num_tiles - 1:
                mbarrier.arrive(wanted, count=1)
            first_column = (num_tiles - 1 - step) * PAGES
            rows = ()
            for page in gl.static_range(PAGES):
                # Past the last column any page will do: its keys are masked, its values cleared.
                block = gl.load(table_row_ptr + gl.minimum(first_column + page, last_column))
                # No page: a row before the first one, for which the copy writes zeros.
                row = gl.where(block < 0, -BLOCK_SIZE, head_row + block * block_rows)
                rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005 - Triton has no stars
            _copy_tile(k_desc, k_smem, k_ready, k_free, copy, rows)
            if q_desc is not None:  # noqa: SIM102
                if step == 0:
                    for consumer in gl.static_range(2):
                        boxes = as_boxes(q_smem.index(consumer), q_desc, PARTS)
                        bar = q_ready.index(consumer)
                        token = first_token + consumer * 64 // GROUP
                        q_head = first_head + consumer * 64 % GROUP
                        mbarrier.wait(q_free.index(consumer), (item & 1) ^ 1)
                        mbarrier.expect(bar, 64 * DIM * 2)
                        for part in gl.static_range(PARTS):
                            copy_box(
                                q_desc, [token, q_head, part * BOX_DIM], bar, boxes.index(part)
                            )
            _copy_tile(v_desc, v_smem, v_ready, v_free, copy, rows)
            copy += 1
        item += 1
        slot = item % SLOTS
        mbarrier.wait(item_ready.index(slot), (item // SLOTS) & 1)
        num_tiles = _read(items, slot, NUM_TILES)


@gluon.jit
def _store_rows(
    out_ptr, stride_out_token, stride_out_head, value, query_start, first_query, end_query, head,
    GROUP_OF_ROWS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Store 64 rows of output, 16 bytes a lane; in the products' layout it would be 4."""
    STORE_LAYOUT: gl.constexpr = store_layout(DIM)
    # Two exchanges among four lanes, by shuffles: in one step it would take shared memory.
    value = gl.convert_layout(value.to(out_ptr.dtype.element_ty), halfway_layout(DIM))
    value = gl.convert_layout(value.to(gl.int16, bitcast=True), STORE_LAYOUT)
    value = value.to(out_ptr.dtype.element_ty, bitcast=True)
    row = GROUP_OF_ROWS * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, STORE_LAYOUT))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, STORE_LAYOUT))
    query = first_query + row // GROUP
    token = (query_start + query).to(gl.int64)
    q_head = (head * GROUP + row % GROUP).to(gl.int64)
    offset = token * stride_out_token + q_head * stride_out_head
    mask = (query < end_query)[:, None] & (dim < DIM)[None, :]
    gl.store(out_ptr + offset[:, None] + dim[None, :], value, mask=mask)


@gluon.jit
def _load_queries(
    q_ptr, stride_q_token, stride_q_head, smem, items, slot,
    GROUP_OF_ROWS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Copy 64 rows of an item, which no box holds, through registers."""
    DIM: gl.constexpr = smem.shape[1]
    ROWS_LAYOUT: gl.constexpr = rows_layout(DIM)
    row = GROUP_OF_ROWS * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS_LAYOUT))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, ROWS_LAYOUT))
    query = _read(items, slot, FIRST_QUERY) + row // GROUP
    token = (_read(items, slot, QUERY_START) + query).to(gl.int64)
    q_head = (_read(items, slot, HEAD) * GROUP + row % GROUP).to(gl.int64)
    offset = token * stride_q_token + q_head * stride_q_head
    mask = (query < _read(items, slot, END_QUERY))[:, None] & (dim < DIM)[None, :]
    smem.store(gl.load(q_ptr + offset[:, None] + dim[None, :], mask=mask, other=0.0))
    fence_async_shared()


@gluon.jit
def _attend(
    GROUP_OF_ROWS: gl.constexpr, q_smem, k_smem, v_smem, q_ready, k_ready, v_ready,
    q_free, k_free, v_free, cleared, items, slot, item, num_tiles, copy, num_clears,
    block_table_ptr, q_ptr, stride_q_token, stride_q_head,
    out_ptr, stride_out_token, stride_out_head, lse_ptr, stride_lse_token, stride_lse_head, scale,
    GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Attend from 64 rows of an item; return how often the consumers have cleared values.

    Fields are read again where they are needed: kept in registers, they would take those of the
    loops.
    """
    STAGES: gl.constexpr = k_smem.shape[0]
    TILE_TOKENS: gl.constexpr = k_smem.shape[1]
    DIM: gl.constexpr = k_smem.shape[2]
    ROWS_LAYOUT: gl.constexpr = rows_layout(DIM)
    OUT_LAYOUT: gl.constexpr = product_layout(DIM)
    SCORES: gl.constexpr = product_layout(TILE_TOKENS)
    row = GROUP_OF_ROWS * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    query = gl.minimum(
        _read(items, slot, FIRST_QUERY) + row // GROUP, _read(items, slot, END_QUERY) - 1
    )
    query_position = _read(items, slot, CONTEXT_LEN) + query
    last_tile = num_tiles - 1
    table_row_ptr = block_table_ptr + _read(items, slot, TABLE_ROW)
    last_column = _read(items, slot, LAST_COLUMN)
    has_gaps = _read(items, slot, HAS_GAPS) != 0
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([64, DIM], gl.float32, OUT_LAYOUT)

    stage = copy % STAGES
    phase = (copy // STAGES) & 1
    if q_ptr is None:
        mbarrier.wait(q_ready.index(GROUP_OF_ROWS), item & 1)
    else:
        _load_queries(
            q_ptr, stride_q_token, stride_q_head, q_smem.index(GROUP_OF_ROWS), items, slot,
            GROUP_OF_ROWS, GROUP,
        )  # fmt: skip
    mbarrier.wait(k_ready.index(stage), phase)
    scores = _scores(q_smem, k_smem, stage, GROUP_OF_ROWS, SCORES)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_free.index(stage), count=1)
    if has_gaps:
        scores = _hide_missing(
            scores, table_row_ptr, last_tile, last_column, BLOCK_SIZE, TILE_TOKENS, SCORES
        )
    visible_keys = query_position + 1 - last_tile * TILE_TOKENS
    exact, top, total, _ = _softmax(
        scores, top, total, scale, visible_keys, True, TILE_TOKENS, SCORES
    )
    weights = gl.convert_layout(exact.to(q_smem.dtype), gl.DotOperandLayout(0, OUT_LAYOUT, 2))

    # Values after the last token may be NaN, and 0 * NaN is NaN: each consumer clears its half.
    mbarrier.wait(v_ready.index(stage), phase)
    num_live = _read(items, slot, SEQ_LEN) - last_tile * TILE_TOKENS
    if num_live < TILE_TOKENS:
        HALF: gl.constexpr = TILE_TOKENS // 2
        values = v_smem.index(stage).slice(GROUP_OF_ROWS * HALF, HALF)
        key = GROUP_OF_ROWS * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, ROWS_LAYOUT))
        value = values.load(ROWS_LAYOUT)
        values.store(gl.where((key < num_live)[:, None], value, gl.zeros_like(value)))
        fence_async_shared()
        mbarrier.arrive(cleared, count=1)
        mbarrier.wait(cleared, num_clears & 1)
        num_clears += 1

    num_masked = _read(items, slot, NUM_MASKED)
    for step in range(1, num_masked):
        weights, acc, top, total = _step(
            q_smem, k_smem, v_smem, k_ready, v_ready, k_free, v_free, table_row_ptr, last_column,
            has_gaps, weights, acc, top, total, copy + step, last_tile - step, scale,
            query_position, GROUP_OF_ROWS, True, BLOCK_SIZE, TILE_TOKENS, SCORES,
        )  # fmt: skip
    for step in range(num_masked, num_tiles):
        weights, acc, top, total = _step(
            q_smem, k_smem, v_smem, k_ready, v_ready, k_free, v_free, table_row_ptr, last_column,
            has_gaps, weights, acc, top, total, copy + step, last_tile - step, scale,
            query_position, GROUP_OF_ROWS, False, BLOCK_SIZE, TILE_TOKENS, SCORES,
        )  # fmt: skip
    mbarrier.arrive(q_free.index(GROUP_OF_ROWS), count=1)
    v_stage = (copy + last_tile) % STAGES
    acc = warpgroup_mma(weights, v_smem.index(v_stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_free.index(v_stage), count=1)

    seen = total != 0.0  # true of NaN, which must come out as NaN
    total = gl.where(seen, total, 1.0)
    factor = gl.convert_layout(1.0 / total, gl.SliceLayout(1, OUT_LAYOUT))
    query_start = _read(items, slot, QUERY_START)
    first_query = _read(items, slot, FIRST_QUERY)
    end_query = _read(items, slot, END_QUERY)
    head = _read(items, slot, HEAD)
    _store_rows(
        out_ptr, stride_out_token, stride_out_head, acc * factor[:, None],
        query_start, first_query, end_query, head, GROUP_OF_ROWS, GROUP, DIM,
    )  # fmt: skip
    if lse_ptr is not None:
        lse = gl.where(seen, (top + gl.log2(total)) * LN_2, float("-inf"))
        query = first_query + row // GROUP
        token = (query_start + query).to(gl.int64)
        q_head = (head * GROUP + row % GROUP).to(gl.int64)
        lse_offset = token * stride_lse_token + q_head * stride_lse_head
        gl.store(lse_ptr + lse_offset, lse, mask=query < end_query)
    return num_clears


@gluon.jit
def _consume(
    GROUP_OF_ROWS: gl.constexpr, q_smem, k_smem, v_smem, q_ready, k_ready, v_ready,
    q_free, k_free, v_free, cleared, items, item_ready, item_free,
    block_table_ptr, q_ptr, stride_q_token, stride_q_head,
    out_ptr, stride_out_token, stride_out_head, lse_ptr, stride_lse_token, stride_lse_head, scale,
    GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Attend from 64 of the rows of each item."""
    item = gl.to_tensor(0)
    copy = gl.to_tensor(0)  # tiles of keys of all items before
    num_clears = gl.to_tensor(0)
    mbarrier.wait(item_ready.index(0), 0)
    num_tiles = _read(items, 0, NUM_TILES)
    while num_tiles > 0:
        slot = item % SLOTS
        num_clears = _attend(
            GROUP_OF_ROWS, q_smem, k_smem, v_smem, q_ready, k_ready, v_ready,
            q_free, k_free, v_free, cleared, items, slot, item, num_tiles, copy, num_clears,
            block_table_ptr, q_ptr, stride_q_token, stride_q_head,
            out_ptr, stride_out_token, stride_out_head,
            lse_ptr, stride_lse_token, stride_lse_head, scale, GROUP, BLOCK_SIZE,
        )  # fmt: skip
        mbarrier.arrive(item_free.index(slot), count=1)
        copy += num_tiles
        item += 1
        slot = item % SLOTS
        mbarrier.wait(item_ready.index(slot), (item // SLOTS) & 1)
        num_tiles = _read(items, slot, NUM_TILES)


@gluon.jit(
    do_not_specialize=["num_reqs", "num_heads", "stride_lse_token", "stride_lse_head"],
    # Behind decode rows they begin anywhere.
    do_not_specialize_on_alignment=["block_table_ptr", "query_start_loc_ptr", "seq_lens_ptr"],
)
def _prefill_queue_kernel(
    out_ptr,  # [num_tokens, q_heads, DIM], unit last stride
    stride_out_token,
    stride_out_head,
    lse_ptr,  # [num_tokens, q_heads] fp32, or None
    stride_lse_token,
    stride_lse_head,
    ticket_ptr,  # [1] int32, 0 before and after a launch
    q_desc,  # [num_tokens, q_heads, DIM], boxes of 64 (query, query head) rows of BOX_DIM, or None
    q_ptr,  # the same without boxes, if there is no descriptor, or None
    stride_q_token,
    stride_q_head,
    k_desc,  # [elements / DIM, DIM] of one layer's keys, boxes of [BLOCK_SIZE, BOX_DIM]
    v_desc,
    block_table_ptr,  # [num_reqs, row_width] int32, unit last stride
    stride_table_row,
    query_start_loc_ptr,  # [num_reqs + 1] int32
    seq_lens_ptr,  # [num_reqs] int32
    num_reqs,
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
):
    """Grid: any number of programs; one a multiprocessor runs at a time."""
    q_smem = gl.allocate_shared_memory(k_desc.dtype, [2, 64, DIM], k_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, TILE_TOKENS, DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, TILE_TOKENS, DIM], v_desc.layout)
    FIELD: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    items = gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], FIELD)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    item_ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    item_free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    wanted = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    cleared = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for part in gl.static_range(2):
        mbarrier.init(q_ready.index(part), count=1)
        mbarrier.init(q_free.index(part), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(item_ready.index(slot), count=1)
        mbarrier.init(item_free.index(slot), count=3)
    mbarrier.init(wanted, count=1)
    mbarrier.init(cleared, count=2)
    fence_async_shared()
    scale = softmax_scale * LOG2_E
    gl.warp_specialize(
        [
            (_consume, (
                0, q_smem, k_smem, v_smem, q_ready, k_ready, v_ready, q_free, k_free, v_free,
                cleared, items, item_ready, item_free,
                block_table_ptr, q_ptr, stride_q_token, stride_q_head,
                out_ptr, stride_out_token, stride_out_head,
                lse_ptr, stride_lse_token, stride_lse_head, scale, GROUP, BLOCK_SIZE,
            )),
            (_consume, (
                1, q_smem, k_smem, v_smem, q_ready, k_ready, v_ready, q_free, k_free, v_free,
                cleared, items, item_ready, item_free,
                block_table_ptr, q_ptr, stride_q_token, stride_q_head,
                out_ptr, stride_out_token, stride_out_head,
                lse_ptr, stride_lse_token, stride_lse_head, scale, GROUP, BLOCK_SIZE,
            )),
            (_produce, (
                q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_ready, k_ready, v_ready,
                q_free, k_free, v_free, items, item_ready, item_free, wanted, block_table_ptr,
                GROUP, BLOCK_SIZE,
            )),
            (_schedule, (
                items, item_ready, item_free, wanted, ticket_ptr,
                block_table_ptr, stride_table_row, query_start_loc_ptr, seq_lens_ptr,
                num_reqs, heads_ptr, num_heads, head_base_ptr, block_stride_ptr, table_offset_ptr,
                DIM, GROUP, BLOCK_SIZE, TILE_TOKENS,
            )),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


QUERY_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


def describe_queries(q: torch.Tensor, group: int) -> TensorDescriptor:
    """Return the queries, copied in boxes of 64 (query, query head) pairs and 64 dimensions."""
    box = [max(64 // group, 1), min(group, 64), BOX_DIM.value]
    return TensorDescriptor.from_tensor(q, box, QUERY_LAYOUT)


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
    splits: PrefillSplits,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Launch the kernel on checked arguments of ``paged_prefill_attention``."""
    num_tokens, num_q_heads, _ = q.shape
    num_reqs = seq_lens.shape[0]
    group = num_q_heads // layout.num_kv_heads
    tile_tokens, stages = WARP_GROUP_TILES[layout.head_dim]
    is_boxed = ROWS.value % group == 0
    heads, num_heads = heads_of_launch(layout)
    num_items = (num_tokens // (ROWS.value // group) + num_reqs) * num_heads
    launch_kernel(
        _prefill_queue_kernel,
        (min(num_items, device_info(q.device).num_sms),),
        *with_strides(out),
        *with_strides(lse),
        splits.ticket,
        describe_queries(q, group) if is_boxed else None,
        *with_strides(None if is_boxed else q),
        describe(k_cache, layout.block_size, layout.head_dim),
        describe(v_cache, layout.block_size, layout.head_dim),
        table,
        table.stride(0),
        query_start_loc,
        seq_lens,
        num_reqs,
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
        num_warps=4,
    )
