"""Paged prefill attention for Hopper (sm_90) by programs that stay and take tiles from a queue.

As ``hopper`` for 16-bit caches, where nothing overlaps a program's first loads and last stores:
about 5 us of 15 for a prompt of 2,048 tokens. Here each multiprocessor has one program with a
group of warps more than ``warp_groups`` tells, and all go through the same tiles, each at its own
pace::

    scheduler, 1 warp      takes the next tile from a counter and describes it
    producer, 1 warp       queries, and K and V pages, as stages become free
    consumers              as there, from queries to output

The scheduler takes a tile when the producer begins with the last pages of the tile before, no
sooner, so that a program with much to do leaves tiles to others. No bit depends on it.
"""

from __future__ import annotations

import torch

from mrv1.device import device_info
from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.gluon import (
    TensorDescriptor,
    aggregate,
    as_boxes,
    copy_box,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
)
from mrv1.kernels._base.launches import launch_kernel
from mrv1.kernels.attention.prefill import warp_groups as wg
from mrv1.kernels.attention.prefill.call import PrefillCall
from mrv1.kernels.attention.prefill.choice import WARP_GROUP_TILES, PrefillSplits
from mrv1.kernels.attention.prefill.warp_groups import (
    CONSUMER_REGISTERS,
    LOG2_E,
    PRODUCER_REGISTERS,
    ROWS,
)

L2_BYTES = gl.constexpr(1 << 25)  # keys and values that stay in the L2 cache
SCAN_BLOCKS = gl.constexpr(512)
WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
WIDE_WARP = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))
SLOTS = gl.constexpr(2)  # items in shared memory: the one in work and the next one
FIELDS = gl.constexpr(13)  # int32 numbers of an item


@gluon.constexpr_function
def exchange_layout(dim, is_last):
    """Return a product's layout after the first, or both, of two exchanges among four lanes.

    They give a lane 16 bytes of a row to store; in the product's layout it has 4.
    """
    reg, lane = ([0, 4], [0, 16]) if is_last else ([8, 0], [0, 4])
    return gl.DistributedLinearLayout(
        reg_bases=[
            *([0, 1], [0, 2], reg, [8, 0] if is_last else [0, 16]),
            *([0, 1 << bit] for bit in range(5, dim.bit_length() - 1)),
        ],
        lane_bases=[[0, 8], lane, [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, dim],
    )


@aggregate
class Item:
    """A tile of queries and its keys, as the scheduler describes it to the other groups."""

    num_tiles: gl.tensor  # of keys; 0 = no more items
    num_masked: gl.tensor  # the last of them
    has_gaps: gl.tensor
    seq_len: gl.tensor
    pages: wg.Pages
    tile: wg.QueryTile


@gluon.jit
def _write(items, at, FIRST: gl.constexpr, fields, COUNT: gl.constexpr):
    """Write ``COUNT`` fields of an item from ``FIRST`` on, as the only warp."""
    for field in gl.static_range(COUNT):
        items.tile(at).slice(FIRST + field, 1).store(gl.full([1], fields[field], gl.int32, WARP))


@gluon.jit
def _fields(items, at):
    """Return the fields of an item, of which the compiler reads those that are used."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    fields = ()
    for field in gl.static_range(FIELDS):
        number = items.tile(at).slice(field, 1).load(LAYOUT)
        fields = fields + (gl.max(number, axis=0),)  # type: ignore[assignment]  # noqa: RUF005 - Triton has no stars
    return fields


@gluon.jit
def _read(items, at, block_table_ptr, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Return an item."""
    fields = _fields(items, at)
    pages = wg.Pages(block_table_ptr + fields[4], fields[5], fields[6], fields[7], BLOCK_SIZE)
    tile = wg.QueryTile(fields[8], fields[9], fields[10], fields[11], fields[12], GROUP)
    return Item(fields[0], fields[1], fields[2] != 0, fields[3], pages, tile)


@gluon.jit
def _next(items, at):
    """Wait for an item and return how many tiles it has."""
    items.wait_filled(at)
    return _fields(items, at)[0]


@gluon.jit
def _schedule(
    items, wanted, ticket_ptr,
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
        items.wait_free(count)
        # The last request first, and its tiles from the last one, which has the most keys. Heads
        # side by side, as many as the L2 cache holds the keys and values of.
        pair = num_items - 1 - ticket
        tile = pair // num_heads
        req = wg.find_request(query_start_loc_ptr, tile, num_reqs, TILE_QUERIES, WARP)
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
            fields = (
                seq_len, table_row, last_column, head_row, block_rows,
                query_start, first_query, end_query, context_len, head,
            )  # fmt: skip
            _write(items, count, 3, fields, FIELDS - 3)  # at once: the scan needs registers
            # A page that is missing among those that every row sees makes all tiles masked ones.
            row_ptr = block_table_ptr + table_row
            pages = wg.Pages(row_ptr, last_column, head_row, block_rows, BLOCK_SIZE)
            has_gaps = pages.have_gaps(0, SCAN_BLOCKS, WIDE_WARP)
            num_inner = (context_len + first_query + 1) // TILE_TOKENS
            num_masked = gl.where(has_gaps, num_tiles, gl.maximum(num_tiles - num_inner, 1))
            num_masked = gl.minimum(num_masked, num_tiles)
            _write(items, count, 0, (num_tiles, num_masked, has_gaps.to(gl.int32)), 3)
            thread_barrier()
            items.fill(count)
            mbarrier.wait(wanted.index(0), count & 1)
            count += 1
        taken = gl.atomic_add(ticket_ptr, 1, sem="relaxed", scope="gpu")
        if taken == num_items - 1:  # each item adds one, so nobody will add any more
            gl.store(ticket_ptr, 0)
        ticket = gl.num_programs(0) + taken
    items.wait_free(count)
    _write(items, count, 0, (0,), 1)
    thread_barrier()
    items.fill(count)


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, buffers, items, wanted, block_table_ptr,
    GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Copy the queries of each item, and the pages of its tiles from the last to the first."""
    TILE_TOKENS: gl.constexpr = buffers.keys.tiles.shape[1]
    DIM: gl.constexpr = buffers.keys.tiles.shape[2]
    BOX_DIM: gl.constexpr = k_desc.block_shape[1]
    item = gl.to_tensor(0)
    copy = gl.to_tensor(0)  # tiles of keys of all items
    num_tiles = _next(items, item)
    while num_tiles > 0:
        work = _read(items, item, block_table_ptr, GROUP, BLOCK_SIZE)
        first_token = work.tile.query_start + work.tile.first_query
        first_head = work.tile.head * GROUP
        items.release(item)
        for step in range(num_tiles):
            if step == num_tiles - 1:
                mbarrier.arrive(wanted.index(0), count=1)
            rows = work.pages.rows(num_tiles - 1 - step, TILE_TOKENS)
            buffers.keys.copy(k_desc, rows, copy)
            if q_desc is not None:  # noqa: SIM102
                if step == 0:
                    for part in gl.static_range(2):
                        boxes = as_boxes(buffers.queries.tile(part), q_desc, DIM // BOX_DIM)
                        filled = buffers.queries.filled.index(part)
                        token = first_token + part * 64 // GROUP
                        q_head = first_head + part * 64 % GROUP
                        mbarrier.wait(buffers.queries.free.index(part), (item & 1) ^ 1)
                        mbarrier.expect(filled, 64 * DIM * 2)
                        for box in gl.static_range(DIM // BOX_DIM):
                            at = [token, q_head, box * BOX_DIM]
                            copy_box(q_desc, at, filled, boxes.index(box))
            buffers.values.copy(v_desc, rows, copy)
            copy += 1
        item += 1
        num_tiles = _next(items, item)


@gluon.jit
def _consume(
    PART: gl.constexpr, buffers, items, block_table_ptr, q, out, lse, scale,
    GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Attend from 64 rows of each item. Fields kept over the loops would take their registers."""
    item = gl.to_tensor(0)
    copy = gl.to_tensor(0)  # tiles of keys of all items before
    num_clears = gl.to_tensor(0)
    num_tiles = _next(items, item)
    while num_tiles > 0:
        work = _read(items, item, block_table_ptr, GROUP, BLOCK_SIZE)
        if q.ptr is None:
            mbarrier.wait(buffers.queries.filled.index(PART), item & 1)
        else:
            rows = q.load(work.tile, PART, buffers.keys.tiles.shape[2])
            buffers.queries.tile(PART).store(rows)
            fence_async_shared()
        num_live = work.seq_len - (num_tiles - 1) * buffers.keys.tiles.shape[1]
        scores = wg.PlainKeys(work.pages, scale, work.has_gaps)
        value, row_lse, num_clears = wg.Consumer(PART, buffers, scores).attend(
            work.tile, copy, num_tiles - 1, work.num_masked, num_tiles, num_live, num_clears
        )
        # Exchanges among lanes by shuffles: in one step it would take shared memory.
        DIM: gl.constexpr = value.shape[1]
        dtype: gl.constexpr = out.ptr.dtype.element_ty
        value = gl.convert_layout(value.to(dtype), exchange_layout(DIM, False))
        value = gl.convert_layout(value.to(gl.int16, bitcast=True), exchange_layout(DIM, True))
        tile = _read(items, item, block_table_ptr, GROUP, BLOCK_SIZE).tile
        rows = tile.places(PART * 64, 64, gl.SliceLayout(1, value.type.layout))
        out.store(value.to(dtype, bitcast=True), rows)
        NUMBERS: gl.constexpr = row_lse.type.layout
        lse.store_vector(row_lse, tile.places(PART * 64, 64, NUMBERS))
        items.release(item)
        copy += num_tiles
        item += 1
        num_tiles = _next(items, item)


@gluon.jit(
    do_not_specialize=["num_reqs", "num_heads", "stride_lse_token", "stride_lse_head"],
    # Behind decode rows they begin anywhere.
    do_not_specialize_on_alignment=["block_table_ptr", "query_start_loc_ptr", "seq_lens_ptr"],
)
def _prefill_queue_kernel(
    out_ptr, stride_out_token, stride_out_head,  # [num_tokens, q_heads, DIM], unit last stride
    lse_ptr, stride_lse_token, stride_lse_head,  # [num_tokens, q_heads] fp32, or None
    ticket_ptr,  # [1] int32, 0 before and after a launch
    q_desc,  # [num_tokens, q_heads, DIM] in boxes: see ``describe_queries``, or None
    q_ptr, stride_q_token, stride_q_head,  # the same without boxes, or None
    k_desc, v_desc,  # of one layer: see ``describe``
    block_table_ptr, stride_table_row,  # [num_reqs, row_width] int32, unit last stride
    query_start_loc_ptr,  # [num_reqs + 1] int32
    seq_lens_ptr, num_reqs,  # [num_reqs] int32
    heads_ptr, num_heads,  # [num_heads] int32, KV heads of the launch, or None: all
    head_base_ptr, block_stride_ptr,  # [kv_heads] int64, elements
    table_offset_ptr,  # [kv_heads] int32
    softmax_scale,
    DIM: gl.constexpr, GROUP: gl.constexpr,  # query heads per KV head
    BLOCK_SIZE: gl.constexpr, TILE_TOKENS: gl.constexpr,  # keys of a tile
    STAGES: gl.constexpr,  # tiles of K and of V in shared memory
):  # fmt: skip
    """Grid: any number of programs; one a multiprocessor runs at a time."""
    dtype: gl.constexpr = k_desc.dtype
    LAYOUT: gl.constexpr = k_desc.layout
    queries = wg.make_channel(dtype, LAYOUT, 2, 64, DIM, 1)
    keys = wg.make_channel(dtype, LAYOUT, STAGES, TILE_TOKENS, DIM, 2)
    values = wg.make_channel(dtype, LAYOUT, STAGES, TILE_TOKENS, DIM, 2)
    buffers = wg.Buffers(queries, keys, values, wg.make_barriers(1, 2))
    FIELD: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    fields = gl.allocate_shared_memory(gl.int32, [SLOTS, 16], FIELD)
    items = wg.Channel(fields, wg.make_barriers(SLOTS, 1), wg.make_barriers(SLOTS, 3))
    wanted = wg.make_barriers(1, 1)
    fence_async_shared()
    q = wg.Matrix(q_ptr, stride_q_token, stride_q_head)
    out = wg.Matrix(out_ptr, stride_out_token, stride_out_head)
    lse = wg.Matrix(lse_ptr, stride_lse_token, stride_lse_head)
    scale = softmax_scale * LOG2_E
    gl.warp_specialize([
        (_consume, (0, buffers, items, block_table_ptr, q, out, lse, scale, GROUP, BLOCK_SIZE)),
        (_consume, (1, buffers, items, block_table_ptr, q, out, lse, scale, GROUP, BLOCK_SIZE)),
        (_produce, (
            q_desc, k_desc, v_desc, buffers, items, wanted, block_table_ptr, GROUP, BLOCK_SIZE
        )),
        (_schedule, (
            items, wanted, ticket_ptr,
            block_table_ptr, stride_table_row, query_start_loc_ptr, seq_lens_ptr, num_reqs,
            heads_ptr, num_heads, head_base_ptr, block_stride_ptr, table_offset_ptr,
            DIM, GROUP, BLOCK_SIZE, TILE_TOKENS,
        )),
    ], [4, 1, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


QUERY_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


def describe_queries(q: torch.Tensor, group: int) -> TensorDescriptor:
    """Return the queries, copied in boxes of 64 (query, query head) pairs and 64 dimensions."""
    box = [max(64 // group, 1), min(group, 64), 64]
    return TensorDescriptor.from_tensor(q, box, QUERY_LAYOUT)


def launch(call: PrefillCall, splits: PrefillSplits) -> None:
    """Launch the kernel, whose programs count in ``splits``."""
    is_boxed = ROWS.value % call.group == 0
    launch_kernel(
        _prefill_queue_kernel, (min(call.num_pairs, device_info(call.q.device).num_sms),),
        *call.outputs(), splits.ticket,
        describe_queries(call.q, call.group) if is_boxed else None,
        *with_strides(None if is_boxed else call.q), *call.caches(wg.describe),
        *call.batch(), **call.constexprs(WARP_GROUP_TILES[call.layout.head_dim]), num_warps=4,
    )  # fmt: skip
