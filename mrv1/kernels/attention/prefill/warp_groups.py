"""The frame of the Hopper (sm_90) kernels of prefill attention: warp groups and their channels.

A program computes a tile of 128 (query, query head) rows of one KV head with groups of warps that
have tasks of their own, and signal each other through barriers in shared memory::

    producer, 1 warp       bulk copies (TMA) of the next tiles' pages
    consumer 0, 4 warps    rows 0 to 63: scores, softmax, weights times V
    consumer 1, 4 warps    rows 64 to 127, on the same keys

While one consumer computes its softmax, the other one multiplies; small heads have three of them
in ``hopper_queue``. Keys go from the last tile to the first: the masked tiles come first, and the
loop over the others has no mask. ``hopper`` and ``hopper_queue`` add the order of tiles,
``hopper_fp8`` a group of warps that widens codes.

Gluon, not Triton: Triton 3.6 to 3.9 has no way to say which warps copy and which multiply, and
its own pipelining keeps the two products of a step and the softmax in one order.

Source: FlashAttention-3 (arXiv:2407.08608) for warp groups and for programs that take tiles as
they end; Triton's Gluon example of attention for channels as aggregates.
"""

from __future__ import annotations

import torch

from mrv1.kernels._base.gluon import (
    TensorDescriptor,
    aggregate,
    as_boxes,
    copy_box,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from mrv1.kernels.attention.prefill.choice import WARP_GROUP_ROWS
from mrv1.kernels.cache import addresses
from mrv1.kernels.cache.addresses import TableRow

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
NO_WINDOW = gl.constexpr(1 << 30)  # larger than every context
table_column = gluon.jit(addresses.table_column.fn)
ROWS = gl.constexpr(WARP_GROUP_ROWS)  # (query, query head) rows of a program: 64 for each consumer
CONSUMER_REGISTERS = gl.constexpr(232)
"""Registers of a consumer's thread: accumulators of scores and output, and weights."""
PRODUCER_REGISTERS = gl.constexpr(40)
"""The rest of a multiprocessor's. With 24, the pages' rows spill for blocks of 16 tokens."""
SCAN_REQS = gl.constexpr(128)
VECTOR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


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
def first_tile(
    query_start, req, GROUP: gl.constexpr, BLOCK: gl.constexpr, TILE_ROWS: gl.constexpr
):  # fmt: skip
    """Return a request's first tile, which leaves room for all tiles of the requests before.

    Its TILE_ROWS are whole queries (BLOCK 1) or boxes of BLOCK queries of a head: ``QueryTile``.
    """
    if BLOCK == 1:
        tile = query_start // (TILE_ROWS // GROUP)
    else:
        tile = (query_start // BLOCK + req) * GROUP // (TILE_ROWS // BLOCK)
    return tile + req


@gluon.jit
def find_request(
    query_start_loc_ptr, tile, num_reqs, GROUP: gl.constexpr, BLOCK: gl.constexpr = 1,
    TILE_ROWS: gl.constexpr = ROWS, LAYOUT: gl.constexpr = VECTOR,
):  # fmt: skip
    """Return the last request whose first tile does not come after ``tile``."""
    req = -1
    for first in range(0, num_reqs, SCAN_REQS):
        other = first + gl.arange(0, SCAN_REQS, layout=LAYOUT)
        in_batch = other < num_reqs
        query_start = gl.load(query_start_loc_ptr + other, mask=in_batch, other=0)
        begun = in_batch & (first_tile(query_start, other, GROUP, BLOCK, TILE_ROWS) <= tile)
        req += gl.sum(begun.to(gl.int32), axis=0)
    return req


@gluon.jit
def count_tiles(query_start_loc_ptr, num_reqs, TILE_QUERIES: gl.constexpr):
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
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return barriers that so many arrivals complete; a fence must follow."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(barriers.index(index), count=ARRIVALS)
    return barriers


@gluon.constexpr_function
def part_dims(dim):
    """Return the parts of a head's dimensions, powers of two: all, or 64 and the rest."""
    return (dim,) if dim & (dim - 1) == 0 else (64, dim - 64)


@gluon.constexpr_function
def box_layout(columns, size, rank):
    """Return the layout of copies of so many columns of ``size`` bytes: they swizzle up to 128."""
    return gl.NVMMASharedLayout(min(columns * size, 128), 8 * size, rank=rank)


@gluon.constexpr_function
def tile_bytes(tiles, rests):
    """Return the bytes of a tile."""
    columns = tiles.shape[2] + (0 if rests is None else rests.shape[2])
    return tiles.shape[1] * columns * tiles.dtype.primitive_bitwidth // 8


@aggregate
class Boxes:
    """What bulk copies read: descriptors of both parts of the dimensions, see ``part_dims``."""

    desc: gl.tensor
    rest: gl.tensor  # or None


@aggregate
class Channel:
    """Tiles in shared memory that one group of warps fills in turns, and others read.

    The ``at``-th tile of a program is in stage ``at % STAGES``, which is free once all readers of
    the tile before in it have released that.
    """

    tiles: gl.shared_memory_descriptor  # of the first part of the dimensions
    rests: gl.shared_memory_descriptor  # of the rest, or None
    filled: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.jit
    def tile(self, at):
        """Return the memory of a tile, the first part of its dimensions."""
        return self.tiles.index(at % self.tiles.shape[0])

    @gluon.jit
    def rest(self, at):
        """Return the memory of the rest of a tile's dimensions."""
        return self.rests.index(at % self.rests.shape[0])

    @gluon.jit
    def wait_filled(self, at):
        """Wait until a tile has arrived."""
        STAGES: gl.constexpr = self.tiles.shape[0]
        mbarrier.wait(self.filled.index(at % STAGES), (at // STAGES) & 1)

    @gluon.jit
    def wait_free(self, at):
        """Wait until a tile may be written."""
        STAGES: gl.constexpr = self.tiles.shape[0]
        mbarrier.wait(self.free.index(at % STAGES), ((at // STAGES) & 1) ^ 1)

    @gluon.jit
    def release(self, at):
        """Say that this group has read a tile."""
        mbarrier.arrive(self.free.index(at % self.tiles.shape[0]), count=1)

    @gluon.jit
    def fill(self, at):
        """Say that a tile, which this group has stored, has arrived."""
        mbarrier.arrive(self.filled.index(at % self.tiles.shape[0]), count=1)

    @gluon.jit
    def copy(self, boxes, rows, at):
        """Begin to copy the pages at ``rows`` of a cache to a tile, once it is free."""
        TILE_TOKENS: gl.constexpr = self.tiles.shape[1]
        DIM: gl.constexpr = self.tiles.shape[2]
        PAGES: gl.constexpr = TILE_TOKENS // boxes.desc.block_shape[0]
        BOX_DIM: gl.constexpr = boxes.desc.block_shape[1]
        PARTS: gl.constexpr = DIM // BOX_DIM
        filled = self.filled.index(at % self.tiles.shape[0])
        memory = as_boxes(self.tile(at), boxes.desc, PARTS * PAGES)
        self.wait_free(at)
        mbarrier.expect(filled, tile_bytes(self.tiles, self.rests))
        for page in gl.static_range(PAGES):
            for part in gl.static_range(PARTS):
                box = memory.index(part * PAGES + page)
                copy_box(boxes.desc, [rows[page], part * BOX_DIM], filled, box)
        if self.rests is not None:
            rest = as_boxes(self.rest(at), boxes.rest, PAGES)
            for page in gl.static_range(PAGES):
                copy_box(boxes.rest, [rows[page], DIM], filled, rest.index(page))


@gluon.jit
def make_channel(
    dtype: gl.constexpr, layout: gl.constexpr, STAGES: gl.constexpr, TILE_TOKENS: gl.constexpr,
    DIM: gl.constexpr, READERS: gl.constexpr,
):  # fmt: skip
    """Return a channel of ``STAGES`` tiles [TILE_TOKENS, DIM]; a fence must follow.

    Without readers it has no barriers: each group of warps reads what it has stored.
    """
    PARTS: gl.constexpr = part_dims(DIM)
    tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE_TOKENS, PARTS[0]], layout)
    rests = None
    if len(PARTS) > 1:
        REST: gl.constexpr = box_layout(PARTS[1], 2, 2)
        rests = gl.allocate_shared_memory(dtype, [STAGES, TILE_TOKENS, PARTS[1]], REST)
    filled = None
    free = None
    if READERS > 0:
        filled = make_barriers(STAGES, 1)
        free = make_barriers(STAGES, READERS)
    return Channel(tiles, rests, filled, free)


@aggregate
class Window:
    """The window of a program's head, and the tiles of keys that its rows may see.

    The tiles that are visited have *places*, counted from the first key on::

        sink | gap, not visited | left edge of the window | seen by every row | right edge

    A head without a window, in a launch of heads that have one, has a window of ``NO_WINDOW``.
    """

    size: gl.tensor  # tokens that a row sees, its own among them
    sink: gl.tensor  # first tokens that all rows see too
    first_block: gl.tensor  # of the window's pages; those between the sink's and it are not read
    ring_blocks: gl.tensor  # as in ``kv_layout``, or None: no head has a ring
    sink_tiles: gl.tensor
    gap: gl.tensor  # tiles

    @gluon.jit
    def sees_block(self, logical, BLOCK_SIZE: gl.constexpr):
        """Return whether some row may see a key of a block up to the program's last one."""
        return (logical >= self.first_block) | (logical * BLOCK_SIZE < self.sink)

    @gluon.jit
    def hides(self, first_live, tile, TILE_TOKENS: gl.constexpr):
        """Return whether a tile has keys before ``first_live`` that are not of the sink."""
        first = tile * TILE_TOKENS
        return (first < first_live) & (first + TILE_TOKENS > self.sink)


@gluon.jit
def find_window(
    window_ptr, sink_ptr, ring_blocks_ptr, head, first_position, end_position,
    BLOCK_SIZE: gl.constexpr, TILE_TOKENS: gl.constexpr,
):  # fmt: skip
    """Return the ``Window`` of queries at positions [first_position, end_position)."""
    size = gl.load(window_ptr + head)
    size = gl.where(size < 0, NO_WINDOW, size)
    sink = gl.minimum(gl.load(sink_ptr + head), end_position)
    ring_blocks = None
    if ring_blocks_ptr is not None:
        ring_blocks = gl.load(ring_blocks_ptr + head)
    start = gl.minimum(gl.maximum(first_position + 1 - size, sink), end_position)
    sink_tiles = gl.cdiv(sink, TILE_TOKENS)
    gap = gl.maximum(start // TILE_TOKENS - sink_tiles, 0)
    return Window(size, sink, start // BLOCK_SIZE, ring_blocks, sink_tiles, gap)


@gluon.jit
def tile_at(place, window):
    """Return the tile of keys at a place."""
    tile = place
    if window is not None:
        tile += gl.where(place >= window.sink_tiles, window.gap, 0)
    return tile


@gluon.jit
def masked_steps(tile, window, end_place, num_tiles, has_gaps, TILE_TOKENS: gl.constexpr):
    """Return (num_masked, first_left) of the ``num_tiles`` steps down from ``end_place``.

    Steps before ``num_masked`` have keys after some row, those from ``first_left`` on keys before
    some row's window. A gap makes all steps masked ones.
    """
    first_tile = end_place - num_tiles
    first_left = num_tiles
    if window is not None:
        first_tile += window.gap
        end_key = tile.context_len + tile.end_query
        left = gl.cdiv(gl.maximum(end_key - window.size, 0), TILE_TOKENS)
        first_left = end_place + window.gap - left
    num_inner = (tile.context_len + tile.first_query + 1) // TILE_TOKENS - first_tile
    num_masked = gl.where(has_gaps, num_tiles, gl.maximum(num_tiles - num_inner, 1))
    return gl.minimum(num_masked, num_tiles), first_left


@aggregate
class Pages:
    """Where a request's pages of one head are in the caches."""

    table_row_ptr: gl.tensor  # of the head's columns
    last_column: gl.tensor  # with a page that some row sees: the last logical block
    head_row: gl.tensor  # of the caches' rows of one head's elements
    block_rows: gl.tensor
    window: Window | None
    BLOCK_SIZE: gl.constexpr

    @gluon.jit
    def column(self, logical):
        """Return the columns of logical blocks."""
        column = logical
        if self.window is not None:  # noqa: SIM102
            if self.window.ring_blocks is not None:
                row = TableRow(None, 0, self.window.sink, self.window.ring_blocks)
                column = table_column(logical, row, self.BLOCK_SIZE)
        return column

    @gluon.jit
    def rows(self, tile, TILE_TOKENS: gl.constexpr):
        """Return the first row of each page of a tile."""
        PAGES: gl.constexpr = TILE_TOKENS // self.BLOCK_SIZE
        rows = ()
        for page in gl.static_range(PAGES):
            # Past the last column any page will do: its keys are masked, its values cleared.
            logical = gl.minimum(tile * PAGES + page, self.last_column)
            block = gl.load(self.table_row_ptr + self.column(logical))
            if self.window is not None:  # a page that no row sees may hold anything
                block = gl.where(self.window.sees_block(logical, self.BLOCK_SIZE), block, -1)
            # No page: a row before the first one, for which the copy writes zeros.
            row = gl.where(block < 0, -self.BLOCK_SIZE, self.head_row + block * self.block_rows)
            rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005 - Triton has no stars
        return rows

    @gluon.jit
    def have_gaps(self, first_column, SCAN_BLOCKS: gl.constexpr, LAYOUT: gl.constexpr):
        """Return whether a page that some row sees is missing from ``first_column`` on."""
        lowest = gl.full([SCAN_BLOCKS], 0, gl.int32, LAYOUT)
        if self.window is not None:
            if first_column * self.BLOCK_SIZE < self.window.sink:
                for first in range(0, gl.cdiv(self.window.sink, self.BLOCK_SIZE), SCAN_BLOCKS):
                    lowest = gl.minimum(lowest, self.load(first, SCAN_BLOCKS, LAYOUT))
            first_column = gl.maximum(first_column, self.window.first_block)
        for first in range(first_column, self.last_column + 1, SCAN_BLOCKS):
            lowest = gl.minimum(lowest, self.load(first, SCAN_BLOCKS, LAYOUT))
        return gl.min(lowest, axis=0) < 0

    @gluon.jit
    def load(self, first, SCAN_BLOCKS: gl.constexpr, LAYOUT: gl.constexpr):
        """Return the blocks of ``SCAN_BLOCKS`` logical blocks, 0 past the last that rows see."""
        logical = first + gl.arange(0, SCAN_BLOCKS, layout=LAYOUT)
        seen = logical <= self.last_column
        if self.window is not None:
            seen &= self.window.sees_block(logical, self.BLOCK_SIZE)
        return gl.load(self.table_row_ptr + self.column(logical), mask=seen, other=0)


@aggregate
class QueryTile:
    """The rows of a program: queries of one request, with the query heads of one KV head.

    With BLOCK 1, rows are all heads of a query, then of the next one: as many queries as fit. Else
    they are boxes of BLOCK queries of a head, in order of (block of queries, head): boxes fill the
    rows for every GROUP, and a bulk copy brings one.
    """

    query_start: gl.tensor  # the request's first token
    first_query: gl.tensor
    end_query: gl.tensor
    context_len: gl.tensor  # keys before the request's first query
    head: gl.tensor
    first_member: gl.tensor  # of the group, which the first box has; 0 with BLOCK 1
    GROUP: gl.constexpr  # query heads per KV head
    BLOCK: gl.constexpr

    @gluon.jit
    def query(self, row):
        """Return the query of a row, of the request, and which query head of the group it has."""
        box = self.first_member + row // self.BLOCK
        query = self.first_query + box // self.GROUP * self.BLOCK + row % self.BLOCK
        return query, box % self.GROUP

    @gluon.jit
    def places(self, first_row, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
        """Return (token, query head, whether there is such a query) of ``COUNT`` rows."""
        query, member = self.query(first_row + gl.arange(0, COUNT, layout=LAYOUT))
        token = (self.query_start + query).to(gl.int64)
        q_head = (self.head * self.GROUP + member).to(gl.int64)
        return token, q_head, query < self.end_query


@aggregate
class Matrix:
    """[num_tokens, q_heads, DIM] in global memory, unit last stride."""

    ptr: gl.tensor  # or None
    stride_token: gl.tensor
    stride_head: gl.tensor

    @gluon.jit
    def load(self, tile, PART: gl.constexpr, DIM: gl.constexpr, FIRST_DIM: gl.constexpr = 0):
        """Return a consumer's rows of a tile, 0 where there is no query."""
        LAYOUT: gl.constexpr = rows_layout(DIM)
        token, q_head, exists = tile.places(PART * 64, 64, gl.SliceLayout(1, LAYOUT))
        offset = (token * self.stride_token + q_head * self.stride_head)[:, None]
        dim = FIRST_DIM + gl.arange(0, DIM, layout=gl.SliceLayout(0, LAYOUT))
        return gl.load(self.ptr + offset + dim[None, :], mask=exists[:, None], other=0.0)

    @gluon.jit
    def store(self, value, places, FIRST_DIM: gl.constexpr = 0):
        """Store rows, their dimensions from ``FIRST_DIM`` on."""
        token, q_head, exists = places
        offset = (token * self.stride_token + q_head * self.stride_head)[:, None]
        dim = FIRST_DIM + gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, value.type.layout))
        value = value.to(self.ptr.dtype.element_ty)
        gl.store(self.ptr + offset + dim[None, :], value, mask=exists[:, None])

    @gluon.jit
    def store_vector(self, value, places):
        """Store a number for each row, if there is a pointer."""
        if self.ptr is not None:
            token, q_head, exists = places
            offset = token * self.stride_token + q_head * self.stride_head
            gl.store(self.ptr + offset, value, mask=exists)


@aggregate
class Outputs:
    """Where a program's rows go: to the output, or to the partial results of one of its splits."""

    out: Matrix
    lse: Matrix
    states_ptr: gl.tensor  # of all programs, or None: there are no splits
    states_lse_ptr: gl.tensor
    first_state: gl.tensor  # this split's; negative = the program writes the output
    num_q_heads: gl.tensor

    @gluon.jit
    def store(self, parts, lse, tile, PART: gl.constexpr, staged):
        """Store a consumer's rows, by way of ``staged``, 16-bit shared memory, or directly."""
        NUMBERS: gl.constexpr = lse.type.layout
        numbers = tile.places(PART * 64, 64, NUMBERS)
        is_whole = True
        if self.states_ptr is not None:
            is_whole = self.first_state < 0
            if self.first_state >= 0:
                state = self.first_state + numbers[0] * self.num_q_heads + numbers[1]
                gl.store(self.states_lse_ptr + state, lse, mask=numbers[2])
                for part in gl.static_range(len(parts)):
                    self.store_state(parts, part, tile, PART)
        if is_whole:
            self.lse.store_vector(lse, numbers)
            for part in gl.static_range(len(parts)):
                self.store_out(parts, part, tile, PART, staged)

    @gluon.jit
    def store_state(self, parts, AT: gl.constexpr, tile, PART: gl.constexpr):
        """Store one part of the dimensions as a partial result."""
        LAYOUT: gl.constexpr = parts[AT].type.layout
        DIM: gl.constexpr = parts[0].shape[1] + (parts[1].shape[1] if len(parts) > 1 else 0)
        rows = tile.places(PART * 64, 64, gl.SliceLayout(1, LAYOUT))
        state = self.first_state + rows[0] * self.num_q_heads + rows[1]
        dim = gl.arange(0, parts[AT].shape[1], layout=gl.SliceLayout(0, LAYOUT))
        offset = state[:, None] * DIM + AT * parts[0].shape[1]
        gl.store(self.states_ptr + offset + dim[None, :], parts[AT], mask=rows[2][:, None])

    @gluon.jit
    def store_out(self, parts, AT: gl.constexpr, tile, PART: gl.constexpr, staged):
        """Store one part of the dimensions to the output."""
        value = parts[AT]
        FIRST_DIM: gl.constexpr = AT * parts[0].shape[1]
        if staged is None:
            rows = tile.places(PART * 64, 64, gl.SliceLayout(1, value.type.layout))
            self.out.store(value, rows, FIRST_DIM)
        else:  # for stores of 16 bytes
            WHOLE: gl.constexpr = rows_layout(value.shape[1])
            dtype: gl.constexpr = self.out.ptr.dtype.element_ty
            staged.store(value.to(dtype).to(staged.dtype, bitcast=True))
            whole = staged.load(WHOLE).to(dtype, bitcast=True)
            rows = tile.places(PART * 64, 64, gl.SliceLayout(1, WHOLE))
            self.out.store(whole, rows, FIRST_DIM)


@gluon.jit
def _tanh(x):
    """Return tanh(x) with a relative error of at most 2^-11, by one instruction."""
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@aggregate
class Softmax:
    """How scores become weights."""

    scale: gl.tensor  # of scores, or of the tanh of capped ones, for exponents of 2
    cap_scale: gl.tensor  # of what the tanh is taken of, or None: no cap
    sinks_ptr: gl.tensor  # [q_heads], logit sinks, or None

    @gluon.jit
    def logit_sinks(self, tile, PART: gl.constexpr, TILE_TOKENS: gl.constexpr):
        """Return the logit sink of each of a consumer's rows in base 2, or None.

        It is -inf where there is no query.
        """
        logit_sinks = None
        if self.sinks_ptr is not None:
            LAYOUT: gl.constexpr = gl.SliceLayout(1, product_layout(TILE_TOKENS))
            _, q_head, exists = tile.places(PART * 64, 64, LAYOUT)
            logit_sinks = gl.load(self.sinks_ptr + q_head, mask=exists, other=float("-inf"))
            logit_sinks = logit_sinks.to(gl.float32) * LOG2_E
        return logit_sinks


@gluon.jit
def make_softmax(softmax_scale, soft_cap, sinks_ptr):
    """Return the ``Softmax`` of a launch; ``soft_cap`` and ``sinks_ptr`` may be None."""
    scale = softmax_scale * LOG2_E
    cap_scale = None
    if soft_cap is not None:
        cap_scale = softmax_scale / soft_cap
        scale = soft_cap * LOG2_E
    return Softmax(scale, cap_scale, sinks_ptr)


@gluon.jit
def lane_sums(weights):
    """Return [rows, 4]: of each row, the sums of the columns that each of its four lanes has.

    So that lanes exchange them once in the end, not at every tile of keys.
    """
    COLUMNS: gl.constexpr = [weights.shape[0], weights.shape[1] // 8, 4, 2]
    return gl.sum(gl.sum(weights.reshape(COLUMNS), 3), 1)


@gluon.jit
def of_lanes(numbers, sums):
    """Return each row's number for its lanes, to go with ``lane_sums``."""
    return gl.convert_layout(numbers, gl.SliceLayout(1, sums.type.layout))[:, None]


@aggregate
class PlainKeys:
    """How products of 16-bit queries and keys become weights."""

    pages: Pages
    softmax: Softmax
    has_gaps: gl.tensor

    @gluon.jit
    def no_weights(self, TILE_TOKENS: gl.constexpr):
        """Return the total of no weights."""
        return lane_sums(gl.zeros([64, TILE_TOKENS], gl.float32, product_layout(TILE_TOKENS)))

    @gluon.jit
    def weigh(
        self, scores, top, total, at, tile, visible_keys, at_right, at_left, MASKED: gl.constexpr
    ):
        """Return (weights, top, total, rescale); a row sees ``visible_keys`` of the tile.

        With a window they begin before the tile, unless the tile is ``at_left``, and all rows see
        all keys to the end of the tile, unless it is ``at_right``. ``total`` is of ``lane_sums``.
        """
        KEYS: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        TILE_TOKENS: gl.constexpr = scores.shape[1]
        scale = self.softmax.scale
        if self.softmax.cap_scale is not None:
            scores = _tanh(scores * self.softmax.cap_scale)
        if MASKED:  # the compiler knows this condition, the program the next one
            if self.has_gaps:
                key = tile * TILE_TOKENS + gl.arange(0, TILE_TOKENS, layout=KEYS)
                logical = gl.minimum(key // self.pages.BLOCK_SIZE, self.pages.last_column)
                has_page = gl.load(self.pages.table_row_ptr + self.pages.column(logical)) >= 0
                scores = gl.where(has_page[None, :], scores, float("-inf"))
            key = gl.arange(0, TILE_TOKENS, layout=KEYS)
            window = self.pages.window
            if window is None:
                at_right = True
            else:
                if at_left:
                    first_key = (visible_keys - window.size)[:, None]
                    in_sink = key < window.sink - tile * TILE_TOKENS
                    visible = (key[None, :] >= first_key) | in_sink[None, :]
                    scores = gl.where(visible, scores, float("-inf"))
            if at_right:
                scores = gl.where(key[None, :] < visible_keys[:, None], scores, float("-inf"))
        new_top = gl.maximum(top, gl.max(scores, 1) * scale)
        shift = new_top
        if MASKED:
            shift = gl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf is NaN
        weights = gl.exp2(scores * scale - shift[:, None])
        rescale = gl.exp2(top - shift)
        total = total * of_lanes(rescale, total) + lane_sums(weights)
        return weights, new_top, total, rescale


@gluon.jit
def clear_rows(values, first, num_live, sink=None, first_live=None):
    """Clear a tile's values from ``num_live`` on: they may be NaN, and 0 * NaN is NaN.

    With a window also those between its sink and ``first_live``.
    """
    LAYOUT: gl.constexpr = rows_layout(values.shape[1])
    key = first + gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    is_live = key < num_live
    if sink is not None:
        is_live &= (key < sink) | (key >= first_live)
    value = values.load(LAYOUT)
    values.store(gl.where(is_live[:, None], value, gl.zeros_like(value)))


@aggregate
class Buffers:
    """What the groups of warps have in shared memory."""

    queries: Channel  # [2, 64, DIM]; with barriers if further tiles of queries follow
    keys: Channel
    values: Channel
    cleared: gl.shared_memory_descriptor  # barrier, if consumers have to clear values, or None


@gluon.jit
def wait_all(weights, total, acc):
    """Wait for all products; ptxas moves no computation of what is returned behind the wait."""
    done = warpgroup_mma_wait(0, deps=acc + (weights, total))  # noqa: RUF005 - as in ``rows``
    return done[-2], done[-1], done[:-2]


@gluon.jit
def scaled(acc, factor):
    """Return each part of ``acc`` with its rows multiplied."""
    parts = ()
    for at in gl.static_range(len(acc)):
        part = acc[at] * spread(factor, acc[at].shape[1])
        parts = parts + (part,)  # type: ignore[assignment]  # noqa: RUF005 - as in ``rows``
    return parts


@gluon.jit
def spread(factor, DIM: gl.constexpr):
    """Return factors of rows for a product of DIM columns."""
    return gl.convert_layout(factor, gl.SliceLayout(1, product_layout(DIM)))[:, None]


@aggregate
class Consumer:
    """Four warps that attend from 64 rows to tiles of keys, from the last one to the first."""

    PART: gl.constexpr  # which rows: from 64 * PART on
    buffers: Buffers
    scores: PlainKeys  # or others whose ``weigh`` turns products into weights
    window: Window | None

    @gluon.jit
    def multiply(self, at):
        """Begin the product of the queries with a tile of keys."""
        TILE_TOKENS: gl.constexpr = self.buffers.keys.tiles.shape[1]
        zeros = gl.zeros([64, TILE_TOKENS], gl.float32, product_layout(TILE_TOKENS))
        queries = self.buffers.queries.tile(self.PART)
        keys = self.buffers.keys.tile(at).permute((1, 0))
        scores = warpgroup_mma(queries, keys, zeros, use_acc=False, is_async=True)
        if self.buffers.keys.rests is not None:
            queries = self.buffers.queries.rest(self.PART)
            keys = self.buffers.keys.rest(at).permute((1, 0))
            scores = warpgroup_mma(queries, keys, scores, is_async=True)
        return scores

    @gluon.jit
    def zeros(self):
        """Return the output before any key: a tuple of its parts, see ``part_dims``."""
        FIRST: gl.constexpr = self.buffers.values.tiles.shape[2]
        acc = (gl.zeros([64, FIRST], gl.float32, product_layout(FIRST)),)
        if self.buffers.values.rests is not None:
            REST: gl.constexpr = self.buffers.values.rests.shape[2]
            rest = gl.zeros([64, REST], gl.float32, product_layout(REST))
            acc = acc + (rest,)  # type: ignore[assignment]  # noqa: RUF005 - as in ``rows``
        return acc

    @gluon.jit
    def accumulate(self, weights, at, acc):
        """Begin the products of weights with a tile of values."""
        sums = (warpgroup_mma(weights, self.buffers.values.tile(at), acc[0], is_async=True),)
        if self.buffers.values.rests is not None:
            values = self.buffers.values.rest(at)
            OPERAND: gl.constexpr = gl.DotOperandLayout(0, product_layout(values.shape[1]), 2)
            weights = gl.convert_layout(weights, OPERAND)
            rest = warpgroup_mma(weights, values, acc[1], is_async=True)
            sums = sums + (rest,)  # type: ignore[assignment]  # noqa: RUF005 - as in ``rows``
        return sums

    @gluon.jit
    def clear(self, at, tile, num_live, first_live, num_clears):
        """Clear a tile's values from the ``num_live``-th on, and those that a window hides.

        Returns the number of clears, of which the first two consumers do a half each.
        """
        TILE_TOKENS: gl.constexpr = self.buffers.keys.tiles.shape[1]
        HALF: gl.constexpr = TILE_TOKENS // 2
        sink = None
        is_hiding = num_live < TILE_TOKENS
        if self.window is not None:
            is_hiding |= self.window.hides(first_live, tile, TILE_TOKENS)
            sink = self.window.sink - tile * TILE_TOKENS
            first_live -= tile * TILE_TOKENS
        if is_hiding:
            if self.PART < 2:
                half = self.buffers.values.tile(at).slice(self.PART * HALF, HALF)
                clear_rows(half, self.PART * HALF, num_live, sink, first_live)
                if self.buffers.values.rests is not None:
                    half = self.buffers.values.rest(at).slice(self.PART * HALF, HALF)
                    clear_rows(half, self.PART * HALF, num_live, sink, first_live)
            fence_async_shared()
            mbarrier.arrive(self.buffers.cleared.index(0), count=1)
            mbarrier.wait(self.buffers.cleared.index(0), num_clears & 1)
            num_clears += 1
        return num_clears

    @gluon.jit
    def step(
        self, weights, acc, top, total, at, tile, position, at_right, at_left, first_live,
        num_clears, MASKED: gl.constexpr,
    ):  # fmt: skip
        """Multiply this tile's keys beside the previous tile's values; return the new weights."""
        CLEARS: gl.constexpr = self.buffers.cleared is not None
        OUT_LAYOUT: gl.constexpr = product_layout(self.buffers.keys.tiles.shape[2])
        values = self.buffers.values
        self.buffers.keys.wait_filled(at)
        scores = self.multiply(at)
        if not CLEARS:
            values.wait_filled(at - 1)
        acc = self.accumulate(weights, at - 1, acc)
        visible_keys = position + 1 - tile * self.buffers.keys.tiles.shape[1]
        # Operands of the wait, or ptxas moves their computation behind it.
        if MASKED:
            scores, visible_keys = warpgroup_mma_wait(len(acc), deps=(scores, visible_keys))
        else:
            scores = warpgroup_mma_wait(len(acc), deps=(scores,))
        self.buffers.keys.release(at)
        exact, top, total, rescale = self.scores.weigh(
            scores, top, total, at, tile, visible_keys, at_right, at_left, MASKED
        )
        if CLEARS:  # the first values were waited for before the loops
            # Its loop keeps ptxas from moving the softmax behind the wait for the product.
            values.wait_filled(at)
            if MASKED and self.window is not None:
                TILE_TOKENS: gl.constexpr = self.buffers.keys.tiles.shape[1]
                num_clears = self.clear(at, tile, TILE_TOKENS, first_live, num_clears)
        exact = exact.to(self.buffers.queries.tiles.dtype)
        weights = gl.convert_layout(exact, gl.DotOperandLayout(0, OUT_LAYOUT, 2))
        weights, total, acc = wait_all(weights, total, acc)
        values.release(at - 1)
        return weights, scaled(acc, rescale), top, total, num_clears

    @gluon.jit
    def attend(
        self, tile, first_at, last_place, num_masked, first_left, num_tiles, num_live, num_clears,
        logit_sinks=None, LIFT: gl.constexpr = 0,
    ):  # fmt: skip
        """Attend to ``num_tiles`` tiles of keys, from the one at ``last_place`` down.

        See ``masked_steps`` for ``num_masked`` and ``first_left``. The first tile is the program's
        ``first_at``-th, and its values from the ``num_live``-th on may be NaN. Weights are
        2^(LIFT + score - top). Returns (output, log-sum-exp, number of clears).
        """
        TILE_TOKENS: gl.constexpr = self.buffers.keys.tiles.shape[1]
        OUT_LAYOUT: gl.constexpr = product_layout(self.buffers.values.tiles.shape[2])
        VECTOR_OF_ROWS: gl.constexpr = gl.SliceLayout(1, product_layout(TILE_TOKENS))
        keys, values, cleared = self.buffers.keys, self.buffers.values, self.buffers.cleared
        row = self.PART * 64 + gl.arange(0, 64, layout=VECTOR_OF_ROWS)
        query, _ = tile.query(row)
        position = tile.context_len + gl.minimum(query, tile.end_query - 1)
        first_live = None
        if self.window is not None:  # the first key that the request's first query sees
            first_live = tile.context_len + 1 - self.window.size
        top = gl.full([64], float("-inf"), gl.float32, VECTOR_OF_ROWS)
        total = self.scores.no_weights(TILE_TOKENS)
        if logit_sinks is not None:  # a quarter in each lane; for NaN too, which must stay
            quarter = gl.where(logit_sinks == top, 0.0, (1 << LIFT) / 4)
            total += of_lanes(quarter, total)
            top = logit_sinks
        acc = self.zeros()

        last_tile = tile_at(last_place, self.window)
        keys.wait_filled(first_at)
        scores = warpgroup_mma_wait(0, deps=(self.multiply(first_at),))
        keys.release(first_at)
        exact, top, total, _ = self.scores.weigh(
            scores, top, total, first_at, last_tile, position + 1 - last_tile * TILE_TOKENS,
            True, first_left <= 0, True,
        )  # fmt: skip
        exact = exact.to(self.buffers.queries.tiles.dtype)
        weights = gl.convert_layout(exact, gl.DotOperandLayout(0, OUT_LAYOUT, 2))
        if cleared is not None:
            values.wait_filled(first_at)
            num_clears = self.clear(first_at, last_tile, num_live, first_live, num_clears)
        for step in range(1, num_masked):
            weights, acc, top, total, num_clears = self.step(
                weights, acc, top, total, first_at + step, tile_at(last_place - step, self.window),
                position, True, step >= first_left, first_live, num_clears, True,
            )  # fmt: skip
        end_inner = num_tiles
        if self.window is not None:
            end_inner = gl.minimum(gl.maximum(first_left, num_masked), num_tiles)
        for step in range(num_masked, end_inner):
            weights, acc, top, total, num_clears = self.step(
                weights, acc, top, total, first_at + step, tile_at(last_place - step, self.window),
                position, False, False, first_live, num_clears, False,
            )  # fmt: skip
        if self.window is not None:
            for step in range(end_inner, num_tiles):
                weights, acc, top, total, num_clears = self.step(
                    weights, acc, top, total, first_at + step,
                    tile_at(last_place - step, self.window), position, False, True, first_live,
                    num_clears, True,
                )  # fmt: skip
        if self.buffers.queries.free is not None:
            self.buffers.queries.release(self.PART)
        last_at = first_at + num_tiles - 1
        if cleared is None:
            values.wait_filled(last_at)
        weights, total, acc = wait_all(weights, total, self.accumulate(weights, last_at, acc))
        if self.buffers.queries.free is not None:
            values.release(last_at)

        if len(total.shape) > 1:
            total = gl.convert_layout(gl.sum(total, 1), VECTOR_OF_ROWS)
        seen = total != 0.0  # true of NaN, which must come out as NaN
        total = gl.where(seen, total, 1.0)
        lse = gl.where(seen, (top - LIFT + gl.log2(total)) * LN_2, float("-inf"))
        return scaled(acc, 1.0 / total), lse, num_clears


def describe(
    cache: torch.Tensor, block_size: int, head_dim: int
) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """Return a cache as rows of a head, codes as uint8, in boxes of a page and 128 bytes.

    The second descriptor has boxes of the rest of the dimensions, if there is one.
    """
    size = cache.element_size()  # no copy swizzles more than 128 bytes
    rows = (cache.view(torch.uint8) if size == 1 else cache).view(-1, head_dim)
    first, *rest = part_dims(head_dim)
    boxes = [
        TensorDescriptor.from_tensor(rows, [block_size, columns], box_layout(columns, size, 2))
        for columns in (min(first, 128 // size), *rest)
    ]
    return boxes[0], boxes[1] if rest else None
