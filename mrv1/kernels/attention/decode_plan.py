"""The plan of a decode step's attention: who attends to which keys, settled on the device.

Decode attention is bound by memory, so every program should stream an equal share of the *visible*
keys. A *segment* is what one KV head of one request sees, in tiles of TILE_TOKENS keys; a plan
cuts the segments into *items*, the work of one program each::

    pieces(i) = ceil(tiles(i) / size)              at least one: a row that sees nothing is written
    piece p of segment i = its tiles [p * tiles(i) / pieces(i), (p + 1) * tiles(i) / pieces(i))

and lists the segments with several pieces, whose partial results are merged: by the program that
ends last of a segment's, or where there may be many by a second launch. ``size`` is the smallest
with as many items as run at the same time, so that there is one wave of programs and no tail, or
with twice as many where pieces are long (``LONG_PIECE``) and segments many: what lengths leave
over then matters less. A batch with more segments than programs keeps them whole, except the few
that are much longer than an equal share, and short segments are not cut at all (``min_tiles``).
Segments of half a ``size`` or less (heads with a window, short requests beside long ones) come
last and count by their tiles: several follow each other where one of ``size`` runs, and they leave
its programs to the long ones. Lengths are read on the device and bounds follow from shapes alone:
a captured graph serves any lengths. A deterministic plan cuts each segment by its own length
alone, whatever else the batch holds. One plan serves every layer with the same head roles.

Source: the idea of a plan apart from the run is FlashInfer's (arXiv:2501.01005), made on the host
there; Stream-K (arXiv:2301.03598) for equal shares over the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrv1.device import DeviceInfo, device_info
from mrv1.kernels._base.checks import check_launchable, check_tensor
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.attention._paged import visible_range
from mrv1.kernels.attention._paged_checks import check_num_kv_splits
from mrv1.kernels.cache.kv_layout import KVLayout
from mrv1.kernels.cache.scale_arguments import product_dtype

ITEM_FIELDS = 16
"""int32 per item, a cache line's half: request, head, first and end work index, pieces of its
segment, sink_end, start, seq_len, table_offset, window, sink, ring_blocks, piece; the rest
is unused."""
MERGE_FIELDS = 4
"""int32 per merge: request, head, first item, pieces."""
MAX_SEGMENTS = 1 << 16
"""Requests times KV heads, heads rounded up to a power of two, requests to one of four."""

MIN_TILE_ROWS = 8
"""Columns of the tensor core's smallest product."""

SPLIT_TOKENS = 512
MAX_PIECES = 64
"""A deterministic plan cuts a segment every SPLIT_TOKENS keys, or twice as many and so on until
there are no more than MAX_PIECES pieces: by the segment's own length alone."""

LONG_PIECE = 1 << 20
"""Bytes of K and V from which on equal shares are halved where there are many segments: what is
left over of each then evens out. 2,048 keys in 16 bits; on an H200 that is 0 to 6% faster from
there on, 3 to 6% slower from half of it on."""

MERGED_PIECES = 16
"""Up to so many pieces of a segment, where all are alike, the last of its programs merges them. On
an H200 that saves 1.2 us of a launch where there are three or none, takes 0.9 us more for 24 and
4 us for 64. A deterministic plan keeps the launch: its pieces do not follow from the batch."""

_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)
_MERGE_FIELDS = tl.constexpr(MERGE_FIELDS)
_MAX_PIECES = tl.constexpr(MAX_PIECES)


def padded_rows(rows: int) -> int:
    """Return the columns of a program's products for so many query rows of a KV head."""
    padded: int = triton.next_power_of_2(rows)
    return max(MIN_TILE_ROWS, padded)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAttentionConfig:
    """Launch choices of one decode attention."""

    tile_tokens: int
    """Keys per step of a program."""
    num_warps: int
    num_stages: int
    programs_per_sm: int
    """Programs that run on a streaming multiprocessor at the same time, or fewer: a plan aims at
    as many items."""
    min_tiles: int = 1
    """Tiles that a plan of equal shares cuts a segment by, at least: no more are left whole."""
    max_registers: int | None = None
    """Most registers a thread may take; None = as the compiler finds best."""

    def launch_options(self) -> dict[str, int]:
        """Return what the compiler is told beside the constexprs."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.max_registers is None else options | {"maxnreg": self.max_registers}

    @classmethod
    def default_for(
        cls,
        head_dim: int,
        dtype: torch.dtype,
        tile_rows: int,
        num_segments: int,
        has_window: bool,
        device: DeviceInfo,
    ) -> DecodeAttentionConfig:
        """Return the choice for these shapes.

        Args:
            head_dim: of the cache.
            dtype: float8_e4m3fn for an fp8 cache with products in fp16, else that of ``q``.
            tile_rows: padded query rows of a program.
            num_segments: requests times KV heads.
            has_window: whether any head has a window (its code takes registers).
            device: whose multiprocessors; without a compute capability it is AMD's.
        """
        if INTERPRET:  # the interpreter pays by program and by operation, hardly by size
            return cls(tile_tokens=128, num_warps=1, num_stages=1, programs_per_sm=1)
        is_amd = device.capability is None
        if dtype == torch.float32:
            # Exact products have no tensor core: a thread holds whole rows of K in registers.
            tile_tokens = 16 if head_dim > 128 or is_amd else 32
            num_warps = 4 if is_amd else 8
            return cls(
                tile_tokens=tile_tokens, num_warps=num_warps, num_stages=1, programs_per_sm=2
            )
        if tile_rows > MIN_TILE_ROWS or head_dim > 128 or is_amd:
            # Tiles too small for wgmma, that Triton would take from 64 keys and 16 rows on. One
            # stage within gfx942's 64 KiB of shared memory, and where two of so many rows spill.
            is_tight = tile_rows > 32 and device.capability in ((8, 6), (8, 9), (12, 0))
            is_tight |= is_amd and head_dim > 128
            return cls(
                tile_tokens=32,
                num_warps=4,
                num_stages=1 if is_tight else 2,
                programs_per_sm=2 if tile_rows > 32 else 3,
            )
        # H200, heads of 128, contexts of 190. Few segments: pieces of one tile, two warps each
        # (1 x 8 heads: 4.1 us, 5.6 whole). From one segment on every other multiprocessor on they
        # stay whole up to 256 keys, which four warps take faster (32 x 8: 11.4 us, in steps of 128
        # keys 12.9; 64 x 8: 17.2, 21.5).
        many = 2 * num_segments > device.num_sms
        # The share of registers that lets four programs of four warps run at the same time, in
        # which nothing spills from sm_90 on: with a few more only three do, in two waves (8 x
        # 131072 mixed: 396 us instead of 262).
        share = 128 if (device.capability or (0, 0)) >= (9, 0) else None
        if dtype == torch.float8_e4m3fn:
            return cls(
                tile_tokens=128,
                num_warps=4,
                num_stages=2,
                programs_per_sm=4,
                min_tiles=2 if many else 1,
                max_registers=share,
            )
        return cls(
            tile_tokens=64,
            num_warps=4 if many or has_window else 2,
            num_stages=2,
            programs_per_sm=4,
            min_tiles=4 if many else 1,
            max_registers=share if has_window else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """Buffers of one plan and of the attention that follows it; make one with :meth:`allocate`.

    ``plan_decode_attention`` writes it once a step, ``paged_decode_attention`` reads it in every
    layer and uses its scratch: launches that share a plan belong on one stream.
    """

    config: DecodeAttentionConfig
    max_reqs: int
    num_kv_heads: int
    num_q_heads: int
    query_len: int
    num_kv_splits: int | None
    """Pieces of the longest segment; None = as many as give every program an equal share."""
    deterministic: bool
    """Whether the pieces of a segment follow from its own length, whatever the batch."""
    max_items: int
    most_items: int
    """Items that equal shares make, those of short segments counted by their tiles."""
    fine_items: int
    """As many instead where pieces are long: they even out what runs beside each other."""
    long_tiles: int
    """Tiles of a piece from which on it is long."""
    max_pieces: int
    """Bound on the pieces of one segment."""
    max_merges: int
    """Bound on the segments with several pieces; 0 = there can be none."""
    items: torch.Tensor
    """[max_items, ITEM_FIELDS] int32."""
    merges: torch.Tensor
    """[max_merges, MERGE_FIELDS] int32."""
    counts: torch.Tensor
    """[2] int32: items and merges there are."""
    states: torch.Tensor
    """[max_items, rows, head_dim] float32 scratch: partial results; empty without merges."""
    states_lse: torch.Tensor
    """[max_items, rows] float32 scratch: their log-sum-exps."""
    arrivals: torch.Tensor
    """[max_reqs * num_kv_heads] int32: pieces that are there; zeros but while a launch merges."""
    merge_in_items: bool
    """Whether the program that ends last of a segment's merges them, not a launch of its own."""
    read_early: bool
    """Whether attention reads plan and table while the kernel in front of it ends."""

    @classmethod
    def allocate(
        cls,
        *,
        max_reqs: int,
        max_keys: int,
        layout: KVLayout,
        num_q_heads: int,
        dtype: torch.dtype,
        query_len: int = 1,
        is_fp8: bool = False,
        num_kv_splits: int | None = None,
        deterministic: bool = False,
        read_early: bool = False,
    ) -> DecodePlan:
        """Return buffers that hold any plan of these shapes, on the layout's device.

        Args:
            max_reqs: rows of ``seq_lens``, padding included.
            max_keys: tokens a block-table row can name.
            layout: head roles and head dimension.
            num_q_heads: query heads, a multiple of the layout's KV heads.
            dtype: of the queries.
            query_len: queries per request, 1 to 8.
            is_fp8: whether the cache has scales.
            num_kv_splits: as in ``paged_decode_attention``.
            deterministic: as in ``paged_decode_attention``. Its scratch grows with ``max_keys``:
                up to 64 states for every request and query head.
            read_early: whether attention may read plan, block table and layout while the launch in
                front of it ends. The caller promises two things of that launch, wherever the plan
                is used: it writes none of the three, and it lets the next one start only after its
                own wait for what came before. ``qkv_cache_write`` does so, ``linear`` does not. On
                an H200 it saves 0.5 to 0.9 us a layer where contexts are short; where launches do
                not overlap nothing is read early.

        Raises:
            ValueError: options that contradict each other, or more segments than a plan holds.
        """
        check_num_kv_splits(num_kv_splits)
        check_plan_options(None, num_kv_splits, deterministic)
        num_kv_heads = layout.num_kv_heads
        if _tile_reqs(max_reqs) * triton.next_power_of_2(num_kv_heads) > MAX_SEGMENTS:
            raise ValueError(
                f"seq_lens: expected fewer requests with {num_kv_heads} KV heads each (at most "
                f"{MAX_SEGMENTS} of both, rounded up), got {max_reqs}"
            )
        segments = max_reqs * num_kv_heads
        rows = query_len * (num_q_heads // num_kv_heads)
        device = layout.head_base.device
        info = device_info(device)
        config = DecodeAttentionConfig.default_for(
            layout.head_dim,
            product_dtype(dtype, is_fp8),
            padded_rows(rows),
            0 if deterministic else segments,  # one choice, whatever the batch
            layout.has_window,
            info,
        )
        max_tiles = max(1, -(-max_keys // config.tile_tokens))
        key_bytes = 2 * layout.head_dim * (1 if is_fp8 else dtype.itemsize)
        if deterministic:
            max_pieces = max(1, min(-(-max_keys // SPLIT_TOKENS), MAX_PIECES))
            max_items = most_items = fine_items = segments * max_pieces
        elif num_kv_splits is not None:
            max_pieces = min(num_kv_splits, max_tiles)
            max_items = most_items = fine_items = segments * max_pieces
        else:
            programs = config.programs_per_sm * info.num_sms
            most_items = programs if segments <= programs else segments + programs // 2
            is_many = 8 * segments > programs
            fine_items = 2 * programs if is_many and segments <= programs else most_items
            longest = -(-max_tiles // config.min_tiles)
            # Of one segment all that the others leave: those may be short, and hardly count.
            max_pieces = min(fine_items, longest)
            # For short segments. A few of them cost an eighth at most where they have no room,
            # and every launch starts programs for it.
            spare = min(segments - 1, programs) if is_many else 0
            max_items = min(fine_items + spare, segments * max_pieces)
        # A split segment makes an item more at least than segments there are.
        max_merges = min(segments, max_items - segments) if max_pieces > 1 else 0
        num_states = max_items if max_merges else 0
        num_full = sum(role.window < 0 for role in layout.roles) or num_kv_heads
        usual_pieces = min(most_items // max(1, max_reqs * num_full), max_pieces)
        return cls(
            config=config,
            max_reqs=max_reqs,
            num_kv_heads=num_kv_heads,
            num_q_heads=num_q_heads,
            query_len=query_len,
            num_kv_splits=num_kv_splits,
            deterministic=deterministic,
            max_items=max_items,
            most_items=most_items,
            fine_items=fine_items,
            long_tiles=max(1, LONG_PIECE // (key_bytes * config.tile_tokens)),
            max_pieces=max_pieces,
            max_merges=max_merges,
            items=torch.empty(max_items, ITEM_FIELDS, dtype=torch.int32, device=device),
            merges=torch.empty(max_merges, MERGE_FIELDS, dtype=torch.int32, device=device),
            counts=torch.empty(2, dtype=torch.int32, device=device),
            states=torch.empty(num_states, rows, layout.head_dim, device=device),
            states_lse=torch.empty(num_states, rows, device=device),
            arrivals=torch.empty(segments, dtype=torch.int32, device=device),
            merge_in_items=not deterministic and max_merges > 0 and usual_pieces <= MERGED_PIECES,
            read_early=read_early,
        )


def _tile_reqs(num_reqs: int) -> int:
    """Return the requests a program of the plan reads at once: few sizes, few compilations."""
    size = 16
    while size < num_reqs:
        size *= 4
    return size


@triton.jit
def _segment_tiles(
    seq_len, window, sink, QUERY_LEN: tl.constexpr, TILE_TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Return how many tiles the keys fill that some query of a request sees, at least one."""
    _, _, num_visible = visible_range(seq_len - QUERY_LEN, seq_len, window, sink, HAS_WINDOW)
    return tl.maximum((num_visible + TILE_TOKENS - 1) // TILE_TOKENS, 1)


@triton.jit
def _sum(x):
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def _is_short(tiles, size):
    """Return whether segments are no more than half a piece."""
    return 2 * tiles <= size


@triton.jit
def _equal_size(tiles, is_segment, max_items, most_items, MIN_TILES: tl.constexpr):
    """Return the smallest size from MIN_TILES on that makes no more items than may be.

    No more than ``max_items``, or than ``most_items`` if short ones count as tiles / size. By
    bisection; at most every segment whole.
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
def _own_size(tiles, SPLIT_TILES: tl.constexpr):
    """Return the size of each segment's pieces that follows from its own tiles alone."""
    size = tl.full(tiles.shape, SPLIT_TILES, tl.int32)
    for _ in tl.static_range(16):  # beyond any int32 length
        size = tl.where(tiles > size * _MAX_PIECES, 2 * size, size)
    return size


@triton.jit(do_not_specialize=["num_reqs", "max_items", "most_items", "fine_items"])
def _plan_decode_kernel(
    items_ptr,  # [max_items, ITEM_FIELDS] int32
    merges_ptr,  # [max_merges, MERGE_FIELDS] int32
    counts_ptr,  # [2] int32
    arrivals_ptr,  # [num_reqs * NUM_KV_HEADS] int32
    seq_lens_ptr,  # [num_reqs] int32
    num_reqs,
    table_offset_ptr,  # [NUM_KV_HEADS] int32
    window_ptr,  # [NUM_KV_HEADS] int32
    sink_ptr,  # [NUM_KV_HEADS] int32
    ring_blocks_ptr,  # [NUM_KV_HEADS] int32
    max_items,  # rows of items_ptr
    most_items,  # that equal shares make, short segments counted by their tiles
    fine_items,  # as many instead of pieces of LONG_TILES or more
    NUM_KV_HEADS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    NUM_SPLITS: tl.constexpr,  # pieces of the longest segment; 0 = equal shares
    SPLIT_TILES: tl.constexpr,  # tiles of a piece, doubled for long segments; 0 = NUM_SPLITS
    MIN_TILES: tl.constexpr,  # of a piece, with equal shares
    LONG_TILES: tl.constexpr,  # of a piece that is halved
    TILE_REQS: tl.constexpr,  # power of two >= num_reqs
    TILE_HEADS: tl.constexpr,  # power of two >= NUM_KV_HEADS
    TILE_ITEMS: tl.constexpr,
    OVERLAP: tl.constexpr,  # see dependent_launch
):
    """Grid (cdiv(max_items, TILE_ITEMS),): one program lists TILE_ITEMS items.

    Each of them settles on the same size first; program 0 lists the merges too. Items are ordered
    by request, head and piece, those of short segments behind all others.
    """
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    EQUAL: tl.constexpr = (SPLIT_TILES == 0) and (NUM_SPLITS == 0)
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
    if SPLIT_TILES:
        size = _own_size(tiles, SPLIT_TILES)
    elif NUM_SPLITS:
        size = (tl.max(tl.max(tiles, axis=1), axis=0) + NUM_SPLITS - 1) // NUM_SPLITS
    else:
        size = _equal_size(tiles, is_segment, max_items, most_items, MIN_TILES)
        if size >= LONG_TILES:
            size = _equal_size(tiles, is_segment, max_items, fine_items, MIN_TILES)
    pieces = (tiles + size - 1) // size
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
        target = merges_ptr + merge * _MERGE_FIELDS
        tl.store(target, tl.broadcast_to(req[:, None], [TILE_REQS, TILE_HEADS]), mask=is_split)
        tl.store(
            target + 1, tl.broadcast_to(head[None, :], [TILE_REQS, TILE_HEADS]), mask=is_split
        )
        tl.store(target + 2, first, mask=is_split)
        tl.store(target + 3, pieces, mask=is_split)

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
    if SPLIT_TILES:
        size = _own_size(tiles, SPLIT_TILES)
    is_alike = (_is_short(tiles, size) & EQUAL) == of_short[:, None]
    pieces = tl.where(is_alike, (tiles + size - 1) // size, 0)
    end_of_head = tl.cumsum(pieces, axis=1)
    item_head = tl.sum((end_of_head <= index[:, None]).to(tl.int32), axis=1)
    is_mine = head[None, :] == item_head[:, None]
    piece = index - tl.sum(tl.where(is_mine, end_of_head - pieces, 0), axis=1)
    tiles = tl.sum(tl.where(is_mine, tiles, 0), axis=1)
    pieces = tl.maximum(tl.sum(tl.where(is_mine, pieces, 0), axis=1), 1)
    if SPLIT_TILES:
        size = tl.sum(tl.where(is_mine, size, 0), axis=1)
        first_tile = piece * size
        end_tile = tl.minimum(first_tile + size, tiles)
    else:
        share = tiles // pieces
        longer = tiles % pieces  # so many of the pieces have one tile more
        first_tile = piece * share + tl.minimum(piece, longer)
        end_tile = first_tile + share + (piece < longer).to(tl.int32)
    window = tl.load(window_ptr + item_head, mask=is_item, other=-1)
    sink = tl.load(sink_ptr + item_head, mask=is_item, other=0)
    sink_end, start, num_visible = visible_range(
        seq_len - QUERY_LEN, seq_len, window, sink, HAS_WINDOW
    )
    none = tl.zeros([TILE_ITEMS], tl.int32)
    target = items_ptr + item * _ITEM_FIELDS
    tl.store(target, item_req, mask=is_item)
    tl.store(target + 1, item_head, mask=is_item)
    tl.store(target + 2, first_tile * TILE_TOKENS, mask=is_item)
    tl.store(target + 3, tl.minimum(end_tile * TILE_TOKENS, num_visible), mask=is_item)
    tl.store(target + 4, pieces, mask=is_item)
    tl.store(target + 5, sink_end + none, mask=is_item)
    tl.store(target + 6, start + none, mask=is_item)
    tl.store(target + 7, seq_len, mask=is_item)
    table_offset = tl.load(table_offset_ptr + item_head, mask=is_item, other=0)
    tl.store(target + 8, table_offset, mask=is_item)
    tl.store(target + 9, window, mask=is_item)
    tl.store(target + 10, sink, mask=is_item)
    ring_blocks = tl.load(ring_blocks_ptr + item_head, mask=is_item, other=0)
    tl.store(target + 11, ring_blocks, mask=is_item)
    tl.store(target + 12, piece, mask=is_item)


def plan_decode_attention(seq_lens: torch.Tensor, layout: KVLayout, plan: DecodePlan) -> None:
    """Settle on the device which program attends to which keys in ``paged_decode_attention``.

    Args:
        seq_lens: ``[plan.max_reqs]`` int32, tokens including the queries; 0 = padding row.
        layout: the head roles that the attention will be launched with.
        plan: *written*: ``items``, ``merges`` and ``counts``.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape or device, or a plan for other shapes.
        UnsupportedDeviceError: the tensors are where this process cannot launch.

    Numerics:
        Tier A, equal to the oracle bit for bit as far as ``counts`` says.

    Stream:
        One launch on the current stream, its grid from shapes alone: CUDA-graph safe.

    Source:
        As in the module docstring.
    """
    check_plan(plan, seq_lens, layout)
    check_launchable("seq_lens", seq_lens)
    if plan.max_items == 0:
        return
    tile_reqs = _tile_reqs(plan.max_reqs)
    tile_heads = max(2, triton.next_power_of_2(plan.num_kv_heads))  # triton 3.6 fails to compile 1
    if INTERPRET:  # the interpreter pays by program
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
        SPLIT_TILES=SPLIT_TOKENS // plan.config.tile_tokens if plan.deterministic else 0,
        MIN_TILES=plan.config.min_tiles,
        LONG_TILES=plan.long_tiles,
        TILE_REQS=tile_reqs,
        TILE_HEADS=tile_heads,
        TILE_ITEMS=tile_items,
        num_warps=plan_warps(tile_reqs * tile_heads),
        **overlap_options(seq_lens.device),
    )


def items_per_program(tile_reqs: int) -> int:
    """Return how many items a program looks up: each is compared with every request."""
    return min(64, max(8, 8192 // tile_reqs))


def plan_warps(num_segments: int) -> int:
    """Return warps that hold so many segments in registers."""
    if num_segments <= 2048:
        return 4
    return 8 if num_segments <= 4096 else 16


def check_plan_options(
    plan: DecodePlan | None, num_kv_splits: int | None, deterministic: bool
) -> None:
    """Raise where two ways of cutting the keys are asked for.

    Raises:
        TypeError: the plan is none.
        ValueError: two ways.
    """
    if plan is not None and not isinstance(plan, DecodePlan):
        raise TypeError(f"plan: expected a DecodePlan or None, got {type(plan).__name__}")
    if num_kv_splits is not None and (deterministic or plan is not None):
        other = "a plan" if plan is not None else "deterministic=True"
        raise ValueError(f"num_kv_splits: expected None beside {other}, got {num_kv_splits}")
    if plan is not None and deterministic and not plan.deterministic:
        raise ValueError("plan: expected a deterministic one, got one of equal shares")


def check_plan(
    plan: DecodePlan,
    seq_lens: torch.Tensor,
    layout: KVLayout,
    *,
    num_q_heads: int | None = None,
    query_len: int | None = None,
) -> None:
    """Raise unless a plan was allocated for these requests, heads and queries (None = any).

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape or device, or a plan for others.
    """
    check_tensor("seq_lens", seq_lens, shape=(None,), dtype=torch.int32, contiguous=True)
    for what, expected, got in (
        ("requests", seq_lens.shape[0], plan.max_reqs),
        ("KV heads", layout.num_kv_heads, plan.num_kv_heads),
        ("query heads", num_q_heads, plan.num_q_heads),
        ("queries per request", query_len, plan.query_len),
    ):
        if expected is not None and got != expected:
            raise ValueError(f"plan: expected one for {expected} {what}, got one for {got}")
    for name, device in (("layout", layout.head_base.device), ("plan", plan.items.device)):
        if device != seq_lens.device:
            raise ValueError(f"{name}: expected device {seq_lens.device}, got {device}")
