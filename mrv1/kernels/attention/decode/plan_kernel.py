"""The decode plan: which program attends to which keys, decided on the device.

Decode attention is bound by memory, so every program should stream an equal share of the *visible*
keys. A *segment* is the visible keys of one KV head of one request, in tiles of TILE_TOKENS keys;
a plan cuts the segments into *items*, each the work of one program::

    pieces(i) = ceil(tiles(i) / size)              at least one: a row that sees nothing is written
    piece p of segment i = its tiles [p * tiles(i) / pieces(i), (p + 1) * tiles(i) / pieces(i))

``size`` is the smallest with at most as many items as programs run at the same time: one wave, no
tail. Many segments of long pieces (``LONG_PIECE``) may have twice as many items, which evens out
the run times. A batch with more segments than programs keeps them whole, except the few that are
much longer than an equal share; short segments (``min_tiles``) are not cut at all.

The items of segments of at most half a ``size`` (heads with a window, short requests among long
ones) come last and count by their tiles, as several run in the time of one item of ``size``: the
long segments get the programs. Lengths are read on the device and bounds follow from shapes alone,
so a captured graph serves any lengths. A deterministic plan cuts long segments at fixed keys and
leaves the others whole: their one program folds the same pieces. One plan serves all layers of the
same roles.

Source: FlashInfer (arXiv:2501.01005) for a plan apart from the run, there made on the host;
Stream-K (arXiv:2301.03598) for equal shares over the device.
"""

from __future__ import annotations

import torch

from mrv1.device import device_info
from mrv1.kernels._base.checks import check_launchable
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.launches import launch_kernel
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.attention.decode.plan import (
    ITEM_FIELDS,
    PIECE_TOKENS,
    DecodePlan,
    Item,
    check_plan,
    padded_reqs,
)
from mrv1.kernels.attention.online_softmax import visible_range
from mrv1.kernels.cache.kv_layout import KVLayout
from mrv1.kernels.cache.scale_arguments import role_arguments

REQS_PER_PROGRAM = 4  # requests whose items one program lists

_INTERPRETED = tl.constexpr(INTERPRET)
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
def _add(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _sums(x, y, z):
    """Return the sums of three tensors of one shape, which a GPU reduces together."""
    if _INTERPRETED:  # the interpreter would add number by number
        x, y, z = tl.sum(x), tl.sum(y), tl.sum(z)
    else:
        x, y, z = tl.reduce((x, y, z), None, _add)
    return x, y, z


@triton.jit
def _is_short(tiles, size):
    """Return whether segments have at most half of ``size`` tiles."""
    return 2 * tiles <= size


@triton.jit
def _pieces(tiles, size):
    """Return tiles / size, rounded up; unsigned division takes fewer instructions."""
    return ((tiles + size - 1).to(tl.uint32) // size.to(tl.uint32)).to(tl.int32)


@triton.jit
def _fits(size, tiles, heads, max_items, most_items):
    """Return whether pieces of ``size`` tiles give at most ``max_items`` items.

    And at most ``most_items``, where short segments together count as (their tiles / size) items.
    ``heads`` segments have ``tiles`` each.
    """
    is_short = _is_short(tiles, size)
    pieces = heads * _pieces(tiles, size)  # short segments: one each
    items, long_pieces, short_tiles = _sums(
        pieces, tl.where(is_short, 0, pieces), tl.where(is_short, heads * tiles, 0)
    )
    counted = long_pieces + _pieces(short_tiles, size)
    return (counted <= most_items) & (items <= max_items)


@triton.jit
def _equal_size(
    tiles, heads, max_items, most_items, fine_items,
    MIN_TILES: tl.constexpr, LONG_TILES: tl.constexpr,
):  # fmt: skip
    """Return the smallest piece size, in tiles, that ``_fits``, by bisection.

    It is at least MIN_TILES, and at most the longest segment, which leaves every segment whole.
    Where it would be LONG_TILES or more, ``fine_items`` replaces ``most_items``. The search starts
    between all tiles / items, the least that can fit, and twice that, which nearly always fits, as
    the items of segments that are not short are more than half full.
    """
    size = tl.max(tiles)
    if LONG_TILES > MIN_TILES:
        shorter = tl.full([], LONG_TILES - 1, tl.int32)
        is_long = not _fits(shorter, tiles, heads, max_items, most_items)
    else:
        is_long = size >= LONG_TILES
    most_items = tl.where(is_long, fine_items, most_items)
    too_small = tl.maximum(_pieces(tl.sum(heads * tiles), most_items), MIN_TILES) - 1
    while size - too_small > 1:
        middle = tl.minimum((too_small + size) // 2, 2 * too_small + 2)
        fits = _fits(middle, tiles, heads, max_items, most_items)
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


@triton.jit
def _cut(tiles, size, PIECE_TILES: tl.constexpr):
    """Return the pieces of segments: of ``size`` tiles, or the fixed ones of a longer segment."""
    pieces = _pieces(tiles, size)
    if PIECE_TILES:
        pieces = tl.where(tiles > size, _fixed_pieces(tiles, PIECE_TILES), pieces)
    return pieces


@triton.jit(do_not_specialize=["num_reqs", "num_kinds", "max_items", "most_items", "fine_items"])
def _plan_decode_kernel(
    items_ptr,  # [max_items, ITEM_FIELDS] int32, an Item each
    num_items_ptr,  # [1] int32
    arrivals_ptr,  # [max_items] int32, or None: no segment is split
    seq_lens_ptr, num_reqs,  # [num_reqs] int32
    kinds_ptr, num_kinds,  # [num_kinds, 3] int32: window, sink, heads
    table_offset_ptr, window_ptr, sink_ptr, ring_blocks_ptr,  # [NUM_KV_HEADS] int32
    max_items,  # rows of items_ptr
    most_items,  # of equal shares, short segments counted by their tiles; see DecodePlan
    fine_items,  # the same bound where pieces would have LONG_TILES or more
    NUM_KV_HEADS: tl.constexpr, QUERY_LEN: tl.constexpr, TILE_TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,  # whether windows hide keys from items
    NUM_SPLITS: tl.constexpr,  # pieces of the longest segment; 0 = equal shares
    PIECE_TILES: tl.constexpr,  # tiles of the first fixed pieces; 0 = see NUM_SPLITS
    MIN_TILES: tl.constexpr,  # fewest of a piece, with equal shares
    LONG_TILES: tl.constexpr,  # fewest of a long piece
    ALL_REQS: tl.constexpr, ALL_KINDS: tl.constexpr,  # powers of two >= num_reqs, num_kinds
    TILE_REQS: tl.constexpr, TILE_HEADS: tl.constexpr,  # powers of two, heads >= NUM_KV_HEADS
    TILE_PIECES: tl.constexpr,  # power of two
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (cdiv(num_reqs, TILE_REQS), any): a row of programs lists TILE_REQS requests' items.

    Every program computes the piece size for itself, once for the heads of a kind, and counts the
    items before its own: a few sums over the requests, in registers. Then the programs of a row
    take turns at TILE_PIECES pieces of each segment. Items are ordered by request, head and piece.
    """
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    EQUAL: tl.constexpr = (PIECE_TILES == 0) and (NUM_SPLITS == 0)
    # All loads are issued before any result is used.
    first_req = tl.program_id(0) * TILE_REQS
    segment = tl.arange(0, TILE_REQS * TILE_HEADS)
    req, head = first_req + segment // TILE_HEADS, segment % TILE_HEADS
    all_reqs = tl.arange(0, ALL_REQS)
    is_segment = (req < num_reqs) & (head < NUM_KV_HEADS)
    is_req = all_reqs < num_reqs
    is_before = (all_reqs < first_req)[None, :]
    seq_len = tl.load(seq_lens_ptr + req, mask=is_segment, other=0)
    window = tl.load(window_ptr + head, mask=is_segment, other=-1)
    sink = tl.load(sink_ptr + head, mask=is_segment, other=0)
    table_offset = tl.load(table_offset_ptr + head, mask=is_segment, other=0)
    ring_blocks = tl.load(ring_blocks_ptr + head, mask=is_segment, other=0)
    kind = tl.arange(0, ALL_KINDS)
    kind_ptr, is_kind = kinds_ptr + 3 * kind, kind < num_kinds
    all_lens = tl.load(seq_lens_ptr + all_reqs, mask=is_req, other=0)
    kind_window = tl.load(kind_ptr, mask=is_kind, other=-1)
    kind_sink = tl.load(kind_ptr + 1, mask=is_kind, other=0)
    heads = tl.load(kind_ptr + 2, mask=is_kind, other=0)

    heads = tl.where(is_req[None, :], heads[:, None], 0)
    all_tiles = _segment_tiles(
        all_lens[None, :], kind_window[:, None], kind_sink[:, None],
        QUERY_LEN, TILE_TOKENS, HAS_WINDOW,
    )  # fmt: skip
    all_tiles = tl.where(heads > 0, all_tiles, 0)
    if PIECE_TILES:
        size = tl.maximum(tl.sum(heads * all_tiles) // most_items, MIN_TILES)  # longer: cut
    elif NUM_SPLITS:
        size = (tl.max(all_tiles) + NUM_SPLITS - 1) // NUM_SPLITS
    else:
        size = _equal_size(
            all_tiles, heads, max_items, most_items, fine_items, MIN_TILES, LONG_TILES
        )
    all_pieces = _cut(all_tiles, size, PIECE_TILES)
    all_short = tl.where(_is_short(all_tiles, size) & EQUAL, heads, 0)
    all_long = heads * all_pieces - all_short
    long_before = tl.where(is_before, all_long, 0)
    num_long, num_short, long_before = _sums(all_long, all_short, long_before)
    short_before = tl.sum(tl.where(is_before, all_short, 0))

    tiles = _segment_tiles(seq_len, window, sink, QUERY_LEN, TILE_TOKENS, HAS_WINDOW)
    tiles = tl.where(is_segment, tiles, 0)
    pieces = _cut(tiles, size, PIECE_TILES)
    is_short = _is_short(tiles, size) & is_segment & EQUAL
    long = tl.where(is_short, 0, pieces)
    first_item = tl.where(
        is_short,
        num_long + short_before + tl.cumsum(is_short.to(tl.int32), axis=0) - 1,
        long_before + tl.cumsum(long, axis=0) - long,
    )
    if (tl.program_id(1) == 0) & (first_req == 0):
        tl.store(num_items_ptr, tl.minimum(num_long + num_short, max_items))

    sink_end, start, num_visible = visible_range(
        seq_len - QUERY_LEN, seq_len, window, sink, HAS_WINDOW
    )
    share = tiles // tl.maximum(pieces, 1)
    longer = tiles - share * pieces  # the first ``longer`` pieces have one tile more
    none = tl.zeros([TILE_REQS * TILE_HEADS, TILE_PIECES], tl.int32)
    for first_piece in range(
        tl.program_id(1) * TILE_PIECES, tl.max(pieces), tl.num_programs(1) * TILE_PIECES
    ):
        piece = first_piece + tl.arange(0, TILE_PIECES)[None, :] + none
        if PIECE_TILES:
            first_tile = _fixed_first_tile(piece, PIECE_TILES)
            end_tile = tl.minimum(_fixed_first_tile(piece + 1, PIECE_TILES), tiles[:, None])
            end_tile = tl.where(pieces[:, None] == 1, tiles[:, None], end_tile)
        else:
            first_tile = piece * share[:, None] + tl.minimum(piece, longer[:, None])
            end_tile = first_tile + share[:, None] + (piece < longer[:, None]).to(tl.int32)
        items = Item(
            req=req[:, None] + none,
            head=head[:, None] + none,
            first_work=first_tile * TILE_TOKENS,
            end_work=tl.minimum(end_tile * TILE_TOKENS, num_visible[:, None]),
            pieces=pieces[:, None] + none,
            sink_end=sink_end[:, None] + none if HAS_WINDOW else none,
            start=start[:, None] + none if HAS_WINDOW else none,
            seq_len=seq_len[:, None] + none,
            table_offset=table_offset[:, None] + none,
            window=window[:, None] + none,
            sink=sink[:, None] + none,
            ring_blocks=ring_blocks[:, None] + none,
            piece=piece,
        )
        item = first_item[:, None] + piece
        is_item = (piece < pieces[:, None]) & (item < max_items)  # no write past the buffer
        for field in tl.static_range(len(items)):
            tl.store(items_ptr + item * _ITEM_FIELDS + field, items[field], mask=is_item)
        if arrivals_ptr is not None:
            tl.store(arrivals_ptr + item, 0, mask=is_item)


def plan_decode_attention(seq_lens: torch.Tensor, layout: KVLayout, plan: DecodePlan) -> None:
    """Write, on the device, which program attends to which keys in ``paged_decode_attention``.

    Args:
        seq_lens: ``[plan.max_reqs]`` int32, tokens including the queries; 0 = padding row.
        layout: the head roles that the attention will be launched with.
        plan: ``items`` and ``num_items`` are *written*, the items' ``arrivals`` are zeroed.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: tier A: the items equal the oracle's bit for bit.
    Stream: one launch on the current stream, its grid from shapes alone: CUDA-graph safe.
    """
    check_plan(plan, seq_lens, layout)
    check_launchable("seq_lens", seq_lens)
    if plan.max_items == 0:
        return
    all_reqs = padded_reqs(plan.max_reqs)
    num_kinds = layout.kinds.shape[0]
    all_kinds = triton.next_power_of_2(num_kinds)
    tile_heads = triton.next_power_of_2(plan.num_kv_heads)
    if INTERPRET:  # interpreting costs time per program
        tile_reqs, tile_pieces, num_sms = all_reqs, 64, 1
    else:
        tile_reqs, tile_pieces = REQS_PER_PROGRAM, pieces_per_program(tile_heads)
        num_sms = device_info(seq_lens.device).num_sms
    rows = triton.cdiv(plan.max_reqs, tile_reqs)
    columns = max(1, min(num_sms // rows, triton.cdiv(plan.max_pieces, tile_pieces)))
    launch_kernel(
        _plan_decode_kernel, (rows, columns),
        plan.items, plan.num_items, plan.arrivals if plan.may_split else None,
        seq_lens, plan.max_reqs, layout.kinds, num_kinds, *role_arguments(layout),
        plan.max_items, plan.most_items, plan.fine_items,
        NUM_KV_HEADS=plan.num_kv_heads, QUERY_LEN=plan.query_len,
        TILE_TOKENS=plan.config.tile_tokens,
        HAS_WINDOW=layout.has_window and not layout.visits_masked,
        NUM_SPLITS=plan.num_kv_splits or 0,
        PIECE_TILES=PIECE_TOKENS // plan.config.tile_tokens if plan.deterministic else 0,
        MIN_TILES=plan.config.min_tiles, LONG_TILES=plan.long_tiles,
        ALL_REQS=all_reqs, ALL_KINDS=all_kinds,
        TILE_REQS=tile_reqs, TILE_HEADS=tile_heads, TILE_PIECES=tile_pieces,
        num_warps=plan_warps(all_reqs * all_kinds), **overlap_options(seq_lens.device),
    )  # fmt: skip


def pieces_per_program(tile_heads: int) -> int:
    """Return how many pieces of each of its segments a program lists at a time."""
    return max(1, 512 // (REQS_PER_PROGRAM * tile_heads))


def plan_warps(num_tiles: int) -> int:
    """Return the warps whose registers hold the tiles of all requests and kinds of heads."""
    if num_tiles <= 1024:
        return 4
    return 8 if num_tiles <= 4096 else 16
