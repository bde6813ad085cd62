"""The decode plan: which program attends to which keys, decided on the device.

Decode attention is bound by memory, so every program should stream an equal share of the *visible*
keys. A *segment* is the visible keys of one KV head of one request, in tiles of TILE_TOKENS keys;
a plan cuts the segments into *items*, each the work of one program::

    pieces(i) = ceil(tiles(i) / size)              at least one: a row that sees nothing is written
    piece p of segment i = its tiles [p * tiles(i) / pieces(i), (p + 1) * tiles(i) / pieces(i))

and lists the segments with several pieces. Their partial results are merged by the segment's last
program to finish or, where pieces may be many, by a second launch. ``size`` is the smallest with
at most as many items as programs run at the same time: one wave of programs, no tail. Where pieces
are long (``LONG_PIECE``) and segments many, there may be twice as many items, which evens out the
programs' run times. A batch with more segments than programs keeps them whole, except the few that
are much longer than an equal share, and short segments are not cut at all (``min_tiles``).

The items of segments of at most half a ``size`` (heads with a window, short requests among long
ones) come last and count by their tiles: several run one after the other in the time of one item
of ``size``, so the long segments get the programs. Lengths are read on the device and bounds
follow from shapes alone: a captured graph serves any lengths. A deterministic plan cuts long
segments at fixed keys, the same in any batch, and leaves the others whole: their one program folds
the same pieces. One plan serves all layers of the same roles.

Source: FlashInfer (arXiv:2501.01005) for a plan apart from the run, which FlashInfer makes on the
host; Stream-K (arXiv:2301.03598) for equal shares over the device.
"""

from __future__ import annotations

import torch

from mrv1.kernels._base.checks import check_launchable
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.attention.online_softmax import visible_range
from mrv1.kernels.attention.plan import (
    ITEM_FIELDS,
    PIECE_TOKENS,
    DecodePlan,
    Item,
    Merge,
    check_plan,
    padded_reqs,
)
from mrv1.kernels.cache.kv_layout import KVLayout

_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)


@triton.jit
def _segment_tiles(
    seq_len, window, sink, QUERY_LEN: tl.constexpr, TILE_TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Return the number of tiles of keys that some query of a request sees, at least one."""
    _, _, num_visible = visible_range(seq_len - QUERY_LEN, seq_len, window, sink, HAS_WINDOW)
    return tl.maximum((num_visible + TILE_TOKENS - 1) // TILE_TOKENS, 1)


@triton.jit
def _store_fields(ptr, fields, mask):
    """Store the fields of items or merges, one after the other from ``ptr`` on."""
    for field in tl.static_range(len(fields)):
        tl.store(ptr + field, fields[field], mask=mask)


@triton.jit
def _sum(x):
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def _is_short(tiles, size):
    """Return whether segments have at most half of ``size`` tiles."""
    return 2 * tiles <= size


@triton.jit
def _equal_size(tiles, is_segment, max_items, most_items, MIN_TILES: tl.constexpr):
    """Return the smallest piece size, in tiles, that keeps two bounds on items, by bisection.

    There are at most ``max_items`` items, and at most ``most_items`` if all short segments
    together count as only (their tiles / size) items. The size is at least MIN_TILES, but at most
    the tiles of the longest segment: this size leaves every segment whole.
    """
    too_small = MIN_TILES - 1
    size = tl.max(tl.max(tiles, axis=1), axis=0)  # every segment whole
    while size - too_small > 1:
        middle = (too_small + size) // 2
        is_short = is_segment & _is_short(tiles, middle)
        pieces = _sum(tl.where(is_short, 0, (tiles + middle - 1) // middle))
        short_tiles = _sum(tl.where(is_short, tiles, 0))
        fits = pieces + (short_tiles + middle - 1) // middle <= most_items
        fits &= pieces + _sum(is_short.to(tl.int32)) <= max_items
        too_small = tl.where(fits, too_small, middle)
        size = tl.where(fits, middle, size)
    return size


@triton.jit
def _fixed_pieces(tiles, PIECE_TILES: tl.constexpr):
    """Return the deterministic pieces of segments: one more than the piece of their last tile."""
    unit = (tiles - 1) // PIECE_TILES
    size = tl.full(tiles.shape, 1, tl.int32)  # of that piece, in PIECE_TILES
    octave = tl.full(tiles.shape, 0, tl.int32)
    for _ in tl.static_range(24):  # enough for any int32 length
        is_after = unit >= 16 * size
        octave += is_after.to(tl.int32)
        size = tl.where(is_after, 2 * size, size)
    return 8 * octave + unit // size + 1


@triton.jit
def _fixed_first_tile(piece, PIECE_TILES: tl.constexpr):
    """Return the first tile of deterministic pieces; see ``plan.first_key``."""
    octave = tl.maximum(piece // 8 - 1, 0)
    return PIECE_TILES * ((piece - 8 * octave) << octave)


@triton.jit(do_not_specialize=["num_reqs", "max_items", "most_items", "fine_items"])
def _plan_decode_kernel(
    items_ptr,  # [max_items, ITEM_FIELDS] int32, an Item each
    merges_ptr,  # [max_merges, 4] int32, a Merge each
    counts_ptr,  # [2] int32
    arrivals_ptr,  # [num_reqs * NUM_KV_HEADS] int32
    seq_lens_ptr,  # [num_reqs] int32
    num_reqs,
    table_offset_ptr,  # [NUM_KV_HEADS] int32
    window_ptr,  # [NUM_KV_HEADS] int32
    sink_ptr,  # [NUM_KV_HEADS] int32
    ring_blocks_ptr,  # [NUM_KV_HEADS] int32
    max_items,  # rows of items_ptr
    most_items,  # of equal shares, short segments counted by their tiles; see DecodePlan
    fine_items,  # the same bound where pieces would have LONG_TILES or more
    NUM_KV_HEADS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    NUM_SPLITS: tl.constexpr,  # pieces of the longest segment; 0 = equal shares
    PIECE_TILES: tl.constexpr,  # tiles of the first fixed pieces; 0 = see NUM_SPLITS
    MIN_TILES: tl.constexpr,  # fewest of a piece, with equal shares
    LONG_TILES: tl.constexpr,  # fewest of a long piece
    TILE_REQS: tl.constexpr,  # power of two >= num_reqs
    TILE_HEADS: tl.constexpr,  # power of two >= NUM_KV_HEADS
    TILE_ITEMS: tl.constexpr,
    OVERLAP: tl.constexpr,  # see dependent_launch
):
    """Grid (cdiv(max_items, TILE_ITEMS),): one program lists TILE_ITEMS items.

    Every program first computes the piece sizes for itself; program 0 also lists the merges.
    Items are ordered by request, head and piece; the items of short segments come last.
    """
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    EQUAL: tl.constexpr = (PIECE_TILES == 0) and (NUM_SPLITS == 0)
    first_item = tl.program_id(0) * TILE_ITEMS
    req = tl.arange(0, TILE_REQS)
    head = tl.arange(0, TILE_HEADS)
    is_head = head < NUM_KV_HEADS
    is_segment = (req < num_reqs)[:, None] & is_head[None, :]
    seq_len = tl.load(seq_lens_ptr + req, mask=req < num_reqs, other=0)
    window = tl.load(window_ptr + head, mask=is_head, other=-1)
    sink = tl.load(sink_ptr + head, mask=is_head, other=0)
    tiles = _segment_tiles(
        seq_len[:, None], window[None, :], sink[None, :], QUERY_LEN, TILE_TOKENS, HAS_WINDOW
    )
    tiles = tl.where(is_segment, tiles, 0)
    if PIECE_TILES:
        size = tl.maximum(_sum(tiles) // most_items, MIN_TILES)  # longer segments are cut
    elif NUM_SPLITS:
        size = (tl.max(tl.max(tiles, axis=1), axis=0) + NUM_SPLITS - 1) // NUM_SPLITS
    else:
        size = _equal_size(tiles, is_segment, max_items, most_items, MIN_TILES)
        if size >= LONG_TILES:
            size = _equal_size(tiles, is_segment, max_items, fine_items, MIN_TILES)
    pieces = (tiles + size - 1) // size
    if PIECE_TILES:
        pieces = tl.where(tiles > size, _fixed_pieces(tiles, PIECE_TILES), pieces)
    is_short = is_segment & _is_short(tiles, size) & EQUAL
    long_pieces = tl.where(is_short, 0, pieces)
    req_long, req_short = tl.sum(long_pieces, axis=1), tl.sum(is_short.to(tl.int32), axis=1)
    end_of_long, end_of_short = tl.cumsum(req_long, axis=0), tl.cumsum(req_short, axis=0)
    num_long = tl.sum(req_long, axis=0)
    # No write past the buffer.
    num_items = tl.minimum(num_long + tl.sum(req_short, axis=0), max_items)

    if first_item == 0:
        segment = req[:, None] * NUM_KV_HEADS + head[None, :]
        tl.store(arrivals_ptr + segment, 0, mask=is_segment)
        is_split = pieces > 1
        splits = tl.sum(is_split.to(tl.int32), axis=1)
        tl.store(counts_ptr, num_items)
        tl.store(counts_ptr + 1, tl.sum(splits, axis=0))
        merge = (tl.cumsum(splits, axis=0) - splits)[:, None]
        merge = merge + tl.cumsum(is_split.to(tl.int32), axis=1) - 1
        first = (end_of_long - req_long)[:, None] + tl.cumsum(long_pieces, axis=1) - long_pieces
        every_req = tl.broadcast_to(req[:, None], [TILE_REQS, TILE_HEADS])
        every_head = tl.broadcast_to(head[None, :], [TILE_REQS, TILE_HEADS])
        segments = Merge(every_req, every_head, first, pieces)
        _store_fields(merges_ptr + merge * len(segments), segments, is_split)

    if first_item >= num_items:
        return
    item = first_item + tl.arange(0, TILE_ITEMS)
    is_item = item < num_items
    of_short = item >= num_long
    index = tl.where(of_short, item - num_long, item)
    end_of_req = tl.where(of_short[:, None], end_of_short[None, :], end_of_long[None, :])
    is_before = end_of_req <= index[:, None]
    item_req = tl.sum(is_before.to(tl.int32), axis=1)
    index -= tl.max(tl.where(is_before, end_of_req, 0), axis=1)
    seq_len = tl.load(seq_lens_ptr + item_req, mask=is_item, other=0)
    tiles = _segment_tiles(
        seq_len[:, None], window[None, :], sink[None, :], QUERY_LEN, TILE_TOKENS, HAS_WINDOW
    )
    tiles = tl.where(is_head[None, :], tiles, 0)
    is_alike = (_is_short(tiles, size) & EQUAL) == of_short[:, None]
    pieces = (tiles + size - 1) // size
    if PIECE_TILES:
        pieces = tl.where(tiles > size, _fixed_pieces(tiles, PIECE_TILES), pieces)
    pieces = tl.where(is_alike, pieces, 0)
    end_of_head = tl.cumsum(pieces, axis=1)
    item_head = tl.sum((end_of_head <= index[:, None]).to(tl.int32), axis=1)
    is_mine = head[None, :] == item_head[:, None]
    piece = index - tl.sum(tl.where(is_mine, end_of_head - pieces, 0), axis=1)
    tiles = tl.sum(tl.where(is_mine, tiles, 0), axis=1)
    pieces = tl.maximum(tl.sum(tl.where(is_mine, pieces, 0), axis=1), 1)
    if PIECE_TILES:
        first_tile = _fixed_first_tile(piece, PIECE_TILES)
        end_tile = tl.minimum(_fixed_first_tile(piece + 1, PIECE_TILES), tiles)
        end_tile = tl.where(pieces == 1, tiles, end_tile)
    else:
        share = tiles // pieces
        longer = tiles % pieces  # the first ``longer`` pieces have one tile more
        first_tile = piece * share + tl.minimum(piece, longer)
        end_tile = first_tile + share + (piece < longer).to(tl.int32)
    window = tl.load(window_ptr + item_head, mask=is_item, other=-1)
    sink = tl.load(sink_ptr + item_head, mask=is_item, other=0)
    sink_end, start, num_visible = visible_range(
        seq_len - QUERY_LEN, seq_len, window, sink, HAS_WINDOW
    )
    none = tl.zeros([TILE_ITEMS], tl.int32)
    items = Item(
        req=item_req,
        head=item_head,
        first_work=first_tile * TILE_TOKENS,
        end_work=tl.minimum(end_tile * TILE_TOKENS, num_visible),
        pieces=pieces,
        sink_end=sink_end + none,
        start=start + none,
        seq_len=seq_len,
        table_offset=tl.load(table_offset_ptr + item_head, mask=is_item, other=0),
        window=window,
        sink=sink,
        ring_blocks=tl.load(ring_blocks_ptr + item_head, mask=is_item, other=0),
        piece=piece,
    )
    _store_fields(items_ptr + item * _ITEM_FIELDS, items, is_item)


def plan_decode_attention(seq_lens: torch.Tensor, layout: KVLayout, plan: DecodePlan) -> None:
    """Write, on the device, which program attends to which keys in ``paged_decode_attention``.

    Args:
        seq_lens: ``[plan.max_reqs]`` int32, tokens including the queries; 0 = padding row.
        layout: the head roles that the attention will be launched with.
        plan: ``items``, ``merges`` and ``counts`` are *written*, ``arrivals`` is zeroed.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape or device, or a plan for other shapes.
        UnsupportedDeviceError: the tensors are where this process cannot launch.

    Numerics:
        Tier A: the items and merges that ``counts`` counts equal the oracle's bit for bit.

    Stream:
        One launch on the current stream, its grid from shapes alone: CUDA-graph safe.

    Source:
        As in the module docstring.
    """
    check_plan(plan, seq_lens, layout)
    check_launchable("seq_lens", seq_lens)
    if plan.max_items == 0:
        return
    tile_reqs = padded_reqs(plan.max_reqs)
    tile_heads = max(2, triton.next_power_of_2(plan.num_kv_heads))  # triton 3.6 fails to compile 1
    if INTERPRET:  # interpreting costs time per program
        tile_items = min(triton.next_power_of_2(plan.max_items), 2**20 // tile_reqs)
    else:
        tile_items = items_per_program(tile_reqs)
    _plan_decode_kernel[(triton.cdiv(plan.max_items, tile_items),)](
        plan.items,
        plan.merges,
        plan.counts,
        plan.arrivals,
        seq_lens,
        plan.max_reqs,
        layout.table_offset,
        layout.window,
        layout.sink,
        layout.ring_blocks,
        plan.max_items,
        plan.most_items,
        plan.fine_items,
        NUM_KV_HEADS=plan.num_kv_heads,
        QUERY_LEN=plan.query_len,
        TILE_TOKENS=plan.config.tile_tokens,
        HAS_WINDOW=layout.has_window,
        NUM_SPLITS=plan.num_kv_splits or 0,
        PIECE_TILES=PIECE_TOKENS // plan.config.tile_tokens if plan.deterministic else 0,
        MIN_TILES=plan.config.min_tiles,
        LONG_TILES=plan.long_tiles,
        TILE_REQS=tile_reqs,
        TILE_HEADS=tile_heads,
        TILE_ITEMS=tile_items,
        num_warps=plan_warps(tile_reqs * tile_heads),
        **overlap_options(seq_lens.device),
    )


def items_per_program(tile_reqs: int) -> int:
    """Return how many items a program looks up: each item is compared with every request."""
    return min(64, max(8, 8192 // tile_reqs))


def plan_warps(num_segments: int) -> int:
    """Return the warps whose registers hold ``num_segments`` segments."""
    if num_segments <= 2048:
        return 4
    return 8 if num_segments <= 4096 else 16
