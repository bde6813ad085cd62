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
from mrv1.kernels.attention.prefill.choice import (
    BOX_QUERIES,
    PrefillSplits,
    consumers_for,
    short_window_tile,
)
from mrv1.kernels.attention.prefill.warp_groups import CONSUMER_REGISTERS, PRODUCER_REGISTERS

L2_BYTES = gl.constexpr(1 << 25)  # keys and values that stay in the L2 cache
SCAN_BLOCKS = gl.constexpr(512)
WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
WIDE_WARP = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))
FIELDS = gl.constexpr(15)  # int32 numbers of an item, without those of a window
WINDOW_FIELDS = gl.constexpr(6)
EARLY_STEPS = gl.constexpr(3)
"""Steps before an item's end at which the next one is taken where windows make items short."""


SMALL_CONSUMER_REGISTERS = gl.constexpr(160)
SMALL_PRODUCER_REGISTERS = gl.constexpr(32)  # as of all groups of one warp; 512 in all


@gluon.constexpr_function
def box_queries(group, consumers):
    """Return the queries of a box, or 1: whole queries fill a tile's rows, see ``QueryTile``."""
    is_whole = 64 % min(group, 64) == 0 and 64 * consumers % group == 0
    return 1 if is_whole else BOX_QUERIES


@gluon.constexpr_function
def exchange_layout(dim, is_last):
    """Return a product's layout after the first, or both, of two exchanges among four lanes.

    They give a lane 16 bytes of a row to store; in the product's layout it has 4.
    """
    columns = [[0, 1 << bit] for bit in range(4, dim.bit_length() - 1)]
    regs, lane = [[8, 0], *columns], [0, 4]
    if is_last:  # for columns 16 apart, or rows 8 apart if there are no such columns
        exchanged = regs.pop(1 if columns else 0)
        regs, lane = [lane, *regs], exchanged
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], *regs],
        lane_bases=[[0, 8], lane, [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, dim],
    )


@aggregate
class Item:
    """A tile of queries and its keys, as the scheduler describes it to the other groups."""

    num_tiles: gl.tensor  # of keys; 0 = no more items
    num_masked: gl.tensor  # steps, see ``masked_steps``
    first_left: gl.tensor
    has_gaps: gl.tensor
    seq_len: gl.tensor
    pages: wg.Pages
    tile: wg.QueryTile


@aggregate
class Items:
    """The items of a program, and what all have in common."""

    channel: wg.Channel  # [SLOTS, fields] int32
    block_table_ptr: gl.tensor
    GROUP: gl.constexpr
    BLOCK: gl.constexpr  # see ``QueryTile``
    BLOCK_SIZE: gl.constexpr
    DIM: gl.constexpr
    TILE_ROWS: gl.constexpr
    TILE_TOKENS: gl.constexpr  # keys of a tile
    HAS_WINDOW: gl.constexpr
    HAS_RING: gl.constexpr

    @gluon.jit
    def write(self, at, FIRST: gl.constexpr, fields, COUNT: gl.constexpr):
        """Write ``COUNT`` fields of an item from ``FIRST`` on, as the only warp."""
        for field in gl.static_range(COUNT):
            number = gl.full([1], fields[field], gl.int32, WARP)
            self.channel.tile(at).slice(FIRST + field, 1).store(number)

    @gluon.jit
    def fields(self, at):
        """Return the fields of an item, of which the compiler reads those that are used."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        COUNT: gl.constexpr = FIELDS + (WINDOW_FIELDS if self.HAS_WINDOW else 0)
        fields = ()
        for field in gl.static_range(COUNT):
            number = self.channel.tile(at).slice(field, 1).load(LAYOUT)
            fields = fields + (gl.max(number, axis=0),)  # type: ignore[assignment]  # noqa: RUF005 - Triton has no stars
        return fields

    @gluon.jit
    def read(self, at):
        """Return an item."""
        fields = self.fields(at)
        window = None
        if self.HAS_WINDOW:
            ring_blocks = None
            if self.HAS_RING:
                ring_blocks = fields[20]
            window = wg.Window(
                fields[15], fields[16], fields[17], ring_blocks, fields[18], fields[19]
            )
        pages = wg.Pages(
            self.block_table_ptr + fields[5], fields[6], fields[7], fields[8], window,
            self.BLOCK_SIZE,
        )  # fmt: skip
        tile = wg.QueryTile(
            fields[9], fields[10], fields[11], fields[12], fields[13],
            fields[14] if self.BLOCK > 1 else 0, self.GROUP, self.BLOCK,
        )  # fmt: skip
        return Item(fields[0], fields[1], fields[2], fields[3] != 0, fields[4], pages, tile)

    @gluon.jit
    def next(self, at):
        """Wait for an item and return how many tiles it has."""
        self.channel.wait_filled(at)
        return self.fields(at)[0]


@gluon.jit
def _schedule(
    items, wanted, ticket_ptr, stride_table_row, query_start_loc_ptr, seq_lens_ptr, num_reqs,
    heads_ptr, num_heads, head_base_ptr, block_stride_ptr, table_offset_ptr,
    window_ptr, sink_ptr, ring_blocks_ptr,
):  # fmt: skip
    """Take items from the launch's counter and describe them to the other warps."""
    BLOCK_SIZE: gl.constexpr = items.BLOCK_SIZE
    GROUP: gl.constexpr = items.GROUP
    BLOCK: gl.constexpr = items.BLOCK
    DIM: gl.constexpr = items.DIM
    TILE_ROWS: gl.constexpr = items.TILE_ROWS
    TILE_TOKENS: gl.constexpr = items.TILE_TOKENS
    BOXES: gl.constexpr = TILE_ROWS // BLOCK
    L2_KEYS: gl.constexpr = L2_BYTES // (4 * DIM)
    end = gl.load(query_start_loc_ptr + num_reqs)
    num_items = wg.first_tile(end, num_reqs, GROUP, BLOCK, TILE_ROWS) * num_heads
    ticket = gl.program_id(0)
    count = gl.to_tensor(0)
    while ticket < num_items:
        items.channel.wait_free(count)
        # The last request first, and its tiles from the last one, which has the most keys. Heads
        # side by side, as many as the L2 cache holds the keys and values of.
        pair = num_items - 1 - ticket
        tile = pair // num_heads
        req = wg.find_request(query_start_loc_ptr, tile, num_reqs, GROUP, BLOCK, TILE_ROWS, WARP)
        query_start = gl.load(query_start_loc_ptr + req)
        query_len = gl.load(query_start_loc_ptr + req + 1) - query_start
        seq_len = gl.load(seq_lens_ptr + req)
        context_len = seq_len - query_len
        tiles = gl.maximum(gl.cdiv(gl.cdiv(query_len, BLOCK) * GROUP, BOXES), 1)
        together = gl.minimum(gl.maximum(L2_KEYS // gl.maximum(seq_len, 1), 1), num_heads)
        rest = pair - wg.first_tile(query_start, req, GROUP, BLOCK, TILE_ROWS) * num_heads
        is_tile = rest < tiles * num_heads  # some requests have room for one tile more
        first_head = rest // (tiles * together) * together
        rest -= first_head * tiles
        together = gl.maximum(gl.minimum(together, num_heads - first_head), 1)
        first_box = rest // together * BOXES
        first_query = first_box // GROUP * BLOCK
        head = first_head + rest % together
        if is_tile & (first_query < query_len):
            if heads_ptr is not None:
                head = gl.load(heads_ptr + head)
            end_query = (first_box + BOXES - 1) // GROUP * BLOCK + BLOCK
            end_query = gl.minimum(end_query, query_len)
            # A padding row has queries and no keys: one tile, in which it sees none.
            end_position = gl.maximum(context_len + end_query, 0)
            num_tiles = gl.maximum(gl.cdiv(end_position, TILE_TOKENS), 1)
            window = None
            if items.HAS_WINDOW:
                window = wg.find_window(
                    window_ptr, sink_ptr, ring_blocks_ptr, head, context_len + first_query,
                    end_position, BLOCK_SIZE, TILE_TOKENS,
                )  # fmt: skip
                num_tiles -= window.gap
                seen = window.size, window.sink, window.first_block, window.sink_tiles, window.gap
                items.write(count, FIELDS, seen, WINDOW_FIELDS - 1)
                if items.HAS_RING:
                    items.write(count, FIELDS + WINDOW_FIELDS - 1, (window.ring_blocks,), 1)
            table_row = req * stride_table_row + gl.load(table_offset_ptr + head)
            head_row = (gl.load(head_base_ptr + head) // DIM).to(gl.int32)
            block_rows = (gl.load(block_stride_ptr + head) // DIM).to(gl.int32)
            last_column = gl.maximum(gl.cdiv(end_position, BLOCK_SIZE) - 1, 0)
            fields = (
                seq_len, table_row, last_column, head_row, block_rows,
                query_start, first_query, end_query, context_len, head, first_box % GROUP,
            )  # fmt: skip
            items.write(count, 4, fields, FIELDS - 4)  # at once: the scan needs registers
            # A page that is missing among those that every row sees makes all tiles masked ones.
            row_ptr = items.block_table_ptr + table_row
            pages = wg.Pages(row_ptr, last_column, head_row, block_rows, window, BLOCK_SIZE)
            has_gaps = pages.have_gaps(0, SCAN_BLOCKS, WIDE_WARP)
            queries = wg.QueryTile(
                query_start, first_query, end_query, context_len, head, 0, GROUP, BLOCK
            )
            num_masked, first_left = wg.masked_steps(
                queries, window, num_tiles, num_tiles, has_gaps, TILE_TOKENS
            )
            steps = num_tiles, num_masked, first_left, has_gaps.to(gl.int32)
            items.write(count, 0, steps, 4)
            thread_barrier()
            items.channel.fill(count)
            mbarrier.wait(wanted.index(0), count & 1)
            count += 1
        taken = gl.atomic_add(ticket_ptr, 1, sem="relaxed", scope="gpu")
        if taken == num_items - 1:  # each item adds one, so nobody will add any more
            gl.store(ticket_ptr, 0)
        ticket = gl.num_programs(0) + taken
    items.channel.wait_free(count)
    items.write(count, 0, (0,), 1)
    thread_barrier()
    items.channel.fill(count)


@gluon.jit
def _copy_queries(q_boxes, queries, tile, item):
    """Begin to copy the queries of an item, once the consumers have read those before."""
    DIM: gl.constexpr = queries.tiles.shape[2]
    BOX_DIM: gl.constexpr = q_boxes.desc.block_shape[2]
    BOX_ROWS: gl.constexpr = q_boxes.desc.block_shape[0] * q_boxes.desc.block_shape[1]
    BOXES: gl.constexpr = 64 // BOX_ROWS
    CONSUMERS: gl.constexpr = queries.tiles.shape[0]
    for part in gl.static_range(CONSUMERS):
        filled = queries.filled.index(part)
        mbarrier.wait(queries.free.index(part), (item & 1) ^ 1)
        mbarrier.expect(filled, wg.tile_bytes(queries.tiles, queries.rests))
        for box in gl.static_range(BOXES):
            query, member = tile.query(part * 64 + box * BOX_ROWS)
            token = tile.query_start + query
            q_head = tile.head * tile.GROUP + member
            memory = as_boxes(queries.tile(part), q_boxes.desc, BOXES * (DIM // BOX_DIM))
            for at in gl.static_range(DIM // BOX_DIM):
                place = [token, q_head, at * BOX_DIM]
                copy_box(q_boxes.desc, place, filled, memory.index(at * BOXES + box))
            if queries.rests is not None:
                rest = as_boxes(queries.rest(part), q_boxes.rest, BOXES)
                copy_box(q_boxes.rest, [token, q_head, DIM], filled, rest.index(box))


@gluon.jit
def _produce(q_boxes, k_boxes, v_boxes, buffers, items, wanted):
    """Copy the queries of each item, and the pages of its tiles from the last to the first."""
    TILE_TOKENS: gl.constexpr = buffers.keys.tiles.shape[1]
    item = gl.to_tensor(0)
    copy = gl.to_tensor(0)  # tiles of keys of all items
    num_tiles = items.next(item)
    while num_tiles > 0:
        work = items.read(item)
        items.channel.release(item)
        wanted_at = num_tiles - 1
        if items.HAS_WINDOW:
            wanted_at = gl.maximum(num_tiles - EARLY_STEPS, 0)
        for step in range(num_tiles):
            if step == wanted_at:
                mbarrier.arrive(wanted.index(0), count=1)
            tile = wg.tile_at(num_tiles - 1 - step, work.pages.window)
            rows = work.pages.rows(tile, TILE_TOKENS)
            buffers.keys.copy(k_boxes, rows, copy)
            if step == 0:
                _copy_queries(q_boxes, buffers.queries, work.tile, item)
            buffers.values.copy(v_boxes, rows, copy)
            copy += 1
        item += 1
        num_tiles = items.next(item)


@gluon.jit
def _store(out, value, tile, PART: gl.constexpr, FIRST_DIM: gl.constexpr):
    """Store a consumer's rows. Lanes exchange by shuffles: at once it would take shared memory."""
    DIM: gl.constexpr = value.shape[1]
    dtype: gl.constexpr = out.ptr.dtype.element_ty
    value = gl.convert_layout(value.to(dtype), exchange_layout(DIM, False))
    value = gl.convert_layout(value.to(gl.int16, bitcast=True), exchange_layout(DIM, True))
    rows = tile.places(PART * 64, 64, gl.SliceLayout(1, value.type.layout))
    out.store(value.to(dtype, bitcast=True), rows, FIRST_DIM)


@gluon.jit
def _consume(PART: gl.constexpr, buffers, items, out, lse, softmax):
    """Attend from 64 rows of each item. Fields kept over the loops would take their registers."""
    TILE_TOKENS: gl.constexpr = buffers.keys.tiles.shape[1]
    item = gl.to_tensor(0)
    copy = gl.to_tensor(0)  # tiles of keys of all items before
    num_clears = gl.to_tensor(0)
    num_tiles = items.next(item)
    while num_tiles > 0:
        work = items.read(item)
        window = work.pages.window
        logit_sinks = softmax.logit_sinks(work.tile, PART, TILE_TOKENS)
        mbarrier.wait(buffers.queries.filled.index(PART), item & 1)
        num_live = work.seq_len - wg.tile_at(num_tiles - 1, window) * TILE_TOKENS
        scores = wg.PlainKeys(work.pages, softmax, work.has_gaps)
        value, row_lse, num_clears = wg.Consumer(PART, buffers, scores, window).attend(
            work.tile, copy, num_tiles - 1, work.num_masked, work.first_left, num_tiles, num_live,
            num_clears, logit_sinks,
        )  # fmt: skip
        tile = items.read(item).tile
        for part in gl.static_range(len(value)):
            _store(out, value[part], tile, PART, part * value[0].shape[1])
        NUMBERS: gl.constexpr = row_lse.type.layout
        lse.store_vector(row_lse, tile.places(PART * 64, 64, NUMBERS))
        items.channel.release(item)
        copy += num_tiles
        item += 1
        num_tiles = items.next(item)


@gluon.jit(
    do_not_specialize=["num_reqs", "num_heads", "stride_lse_token", "stride_lse_head"],
    # Behind decode rows they begin anywhere.
    do_not_specialize_on_alignment=["block_table_ptr", "query_start_loc_ptr", "seq_lens_ptr"],
)
def _prefill_queue_kernel(
    out_ptr, stride_out_token, stride_out_head,  # [num_tokens, q_heads, DIM], unit last stride
    lse_ptr, stride_lse_token, stride_lse_head,  # [num_tokens, q_heads] fp32, or None
    ticket_ptr,  # [1] int32, 0 before and after a launch
    q_desc, q_rest_desc,  # [num_tokens, q_heads, DIM] in boxes: see ``describe_queries``
    k_desc, k_rest_desc, v_desc, v_rest_desc,  # of one layer: see ``describe``
    block_table_ptr, stride_table_row,  # [num_reqs, row_width] int32, unit last stride
    query_start_loc_ptr,  # [num_reqs + 1] int32
    seq_lens_ptr, num_reqs,  # [num_reqs] int32
    heads_ptr, num_heads,  # [num_heads] int32, KV heads of the launch, or None: all
    head_base_ptr, block_stride_ptr,  # [kv_heads] int64, elements
    table_offset_ptr,  # [kv_heads] int32
    window_ptr, sink_ptr,  # the same, or None: no head has a window
    ring_blocks_ptr,  # the same, or None: no head has a ring
    softmax_scale,
    soft_cap,  # float32, or None
    sinks_ptr,  # [q_heads], or None
    DIM: gl.constexpr, GROUP: gl.constexpr,  # query heads per KV head
    BLOCK_SIZE: gl.constexpr, TILE_TOKENS: gl.constexpr,  # keys of a tile
    STAGES: gl.constexpr,  # tiles of K and of V in shared memory
    CONSUMERS: gl.constexpr,  # 2 or 3
):  # fmt: skip
    """Grid: any number of programs; one a multiprocessor runs at a time."""
    dtype: gl.constexpr = k_desc.dtype
    LAYOUT: gl.constexpr = k_desc.layout
    queries = wg.make_channel(dtype, LAYOUT, CONSUMERS, 64, DIM, 1)
    keys = wg.make_channel(dtype, LAYOUT, STAGES, TILE_TOKENS, DIM, CONSUMERS)
    values = wg.make_channel(dtype, LAYOUT, STAGES, TILE_TOKENS, DIM, CONSUMERS)
    buffers = wg.Buffers(queries, keys, values, wg.make_barriers(1, CONSUMERS))
    FIELD: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    HAS_WINDOW: gl.constexpr = window_ptr is not None
    SLOTS: gl.constexpr = 3 if HAS_WINDOW else 2
    fields = gl.allocate_shared_memory(gl.int32, [SLOTS, 32 if HAS_WINDOW else 16], FIELD)
    READERS: gl.constexpr = CONSUMERS + 1
    free = wg.make_barriers(SLOTS, READERS)
    channel = wg.Channel(fields, None, wg.make_barriers(SLOTS, 1), free)
    HAS_RING: gl.constexpr = ring_blocks_ptr is not None
    items = Items(
        channel, block_table_ptr, GROUP, box_queries(GROUP, CONSUMERS), BLOCK_SIZE, DIM,
        64 * CONSUMERS, TILE_TOKENS, HAS_WINDOW, HAS_RING,
    )  # fmt: skip
    wanted = wg.make_barriers(1, 1)
    fence_async_shared()
    out = wg.Matrix(out_ptr, stride_out_token, stride_out_head)
    lse = wg.Matrix(lse_ptr, stride_lse_token, stride_lse_head)
    softmax = wg.make_softmax(softmax_scale, soft_cap, sinks_ptr)
    copied = (
        wg.Boxes(q_desc, q_rest_desc), wg.Boxes(k_desc, k_rest_desc),
        wg.Boxes(v_desc, v_rest_desc), buffers, items, wanted,
    )  # fmt: skip
    scheduled = (
        items, wanted, ticket_ptr, stride_table_row, query_start_loc_ptr, seq_lens_ptr,
        num_reqs, heads_ptr, num_heads, head_base_ptr, block_stride_ptr, table_offset_ptr,
        window_ptr, sink_ptr, ring_blocks_ptr,
    )  # fmt: skip
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (0, buffers, items, out, lse, softmax)),
            (_consume, (1, buffers, items, out, lse, softmax)),
            (_produce, copied),
            (_schedule, scheduled),
        ], [4, 1, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (0, buffers, items, out, lse, softmax)),
            (_consume, (1, buffers, items, out, lse, softmax)),
            (_consume, (2, buffers, items, out, lse, softmax)),
            (_produce, copied),
            (_schedule, scheduled),
        ], [4, 4, 1, 1], [
            SMALL_CONSUMER_REGISTERS, SMALL_CONSUMER_REGISTERS, SMALL_PRODUCER_REGISTERS,
            SMALL_PRODUCER_REGISTERS,
        ])  # fmt: skip


def describe_queries(
    q: torch.Tensor, group: int, consumers: int
) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """Return the queries in boxes of (query, query head) pairs and 64 dimensions, and the rest."""
    block, rows = box_queries(group, consumers), min(group, 64)
    box = [64 // rows, rows] if block == 1 else [block, 1]
    _, *rest = wg.part_dims(q.shape[2])
    boxes = [
        TensorDescriptor.from_tensor(q, [*box, columns], wg.box_layout(columns, 2, 3))
        for columns in (64, *rest)
    ]
    return boxes[0], boxes[1] if rest else None


def launch(call: PrefillCall, splits: PrefillSplits) -> None:
    """Launch the kernel, whose programs count in ``splits``."""
    consumers = consumers_for(call.layout)
    launch_kernel(
        _prefill_queue_kernel, (min(call.num_pairs, device_info(call.q.device).num_sms),),
        *call.outputs(), splits.ticket, *describe_queries(call.q, call.group, consumers),
        *call.caches(wg.describe), *call.batch(),
        **call.constexprs(short_window_tile(call.layout)), CONSUMERS=consumers, num_warps=4,
    )  # fmt: skip
