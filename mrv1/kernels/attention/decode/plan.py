"""The decode plan: its launch choices, buffers and bounds, and their checks.

``plan_kernel`` explains how keys are cut and writes a plan, ``attention`` follows it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from mrv1.device import INTERPRET, DeviceInfo, device_info
from mrv1.kernels._base.arithmetic import cdiv, next_power_of_2
from mrv1.kernels._base.checks import check_tensor
from mrv1.kernels.attention.contracts import check_num_kv_splits
from mrv1.kernels.attention.prefill.choice import PrefillAttentionConfig
from mrv1.kernels.cache.formats import INT4, PageFormat
from mrv1.kernels.cache.kv_layout import KVLayout

ITEM_FIELDS = 16  # int32 values per item: an ``Item`` and padding, half a cache line
MAX_SEGMENTS = 1 << 16  # most requests times KV heads of a plan, both rounded up
MIN_TILE_ROWS = 8  # columns of the smallest tensor core product

PIECE_TOKENS = 128
"""Keys of each of the first 16 pieces of a deterministic result; every eight pieces that follow
are twice as long as the eight before (``first_key``). The cuts are the same for every query, and
few enough for one program to merge: 16 pieces of 2,048 keys, 64 of 131,072."""

SHARES_PER_SM = 1.75
"""Shares of all keys per multiprocessor; a deterministic plan cuts a segment of more than one.
With more segments than shares it is a half, as few segments are then that long."""

PARTS_OF_SM = 4
"""Parts of a multiprocessor, from sm_80 on, each with warps and registers of its own."""
REGISTERS_OF_PART = 1 << 14
MAX_REGISTERS = 256
"""No thread can have as many."""

LONG_PIECE = 1 << 20
"""Bytes of K and V from which on a piece is long, and halved where there are many segments. On an
H200, halving from 1 MiB on is 0 to 6% faster, from 512 KiB on 3 to 6% slower."""


class Item(NamedTuple):
    """A range of the keys that one KV head of one request sees: host ints, or tensors in kernels.

    In the order of the int32 values in a plan. Triton's key of a compiled kernel holds their
    number, not their order: if you change the order, change the kernels' source too.
    """

    req: Any
    head: Any
    first_work: Any  # first work index (see ``online_softmax``) of this piece
    end_work: Any
    pieces: Any  # number of pieces of the segment
    table_offset: Any
    sink_end: Any
    start: Any
    window: Any
    sink: Any
    ring_blocks: Any
    seq_len: Any
    piece: Any  # index of this piece in its segment


def first_key(piece: int) -> int:
    """Return the first work index of a deterministic piece, see PIECE_TOKENS."""
    octave, eighth = divmod(piece, 8)
    return PIECE_TOKENS * (eighth if octave == 0 else (8 + eighth) << (octave - 1))


def num_pieces(num_keys: int) -> int:
    """Return the deterministic pieces of ``num_keys`` keys, at least one."""
    return max(1, next(piece for piece in range(1 << 10) if first_key(piece) >= num_keys))


def padded_rows(rows: int) -> int:
    """Return the columns of a program's products for ``rows`` query rows of a KV head."""
    return max(MIN_TILE_ROWS, next_power_of_2(rows))


def padded_reqs(num_reqs: int) -> int:
    """Return the requests that a planning program reads at once: few sizes, few compilations."""
    size = 16
    while size < num_reqs:
        size *= 4 if size < 256 else 2
    return size


@dataclass(frozen=True, slots=True)
class DecodeAttentionConfig:
    """Launch choices of one decode attention."""

    tile_tokens: int  # keys per step of a program
    num_warps: int
    num_stages: int
    programs_per_sm: int  # that run at the same time, or fewer: a plan aims at so many items
    min_tiles: int = 1  # fewest per piece with equal shares: a segment of no more stays whole
    max_registers: int | None = None  # most registers per thread; None = the compiler chooses

    def launch_options(self) -> dict[str, int]:
        """Return the compiler's options, without the constexprs."""
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
        """Return the configuration for these shapes; ``dtype`` is a ``PageFormat.product_dtype``.

        ``tile_rows`` are a program's padded query rows, ``num_segments`` requests times KV heads.
        """
        if INTERPRET:  # interpreting costs time per program and operation, hardly per element
            return cls(128, num_warps=1, num_stages=1, programs_per_sm=1)
        config = cls._tuned_for(head_dim, dtype, tile_rows, num_segments, has_window, device)
        # Without the bound, some group sizes take a few registers more, and one program fewer runs
        # at the same time: the plan's one wave becomes two (H200, 8 x 131072, full and streaming
        # heads: 396 us instead of 262). With it, nothing spills in a loop on sm_90 and sm_100; the
        # shared memory of sm_120 holds two programs, whatever their registers. Exact products of
        # 4-bit codes would spill on sm_100.
        end = (10, 0) if dtype == torch.float32 else (12, 0)
        is_bound = (9, 0) <= (device.capability or (0, 0)) < end
        most = config.max_registers or config.register_share
        return replace(config, max_registers=most) if is_bound else config

    @property
    def register_share(self) -> int | None:
        """Most registers per thread with which all of ``programs_per_sm`` fit; None = any."""
        warps = cdiv(self.num_warps * self.programs_per_sm, PARTS_OF_SM)
        share = REGISTERS_OF_PART // (32 * warps) // 8 * 8  # registers are allocated in eights
        return share if share < MAX_REGISTERS else None

    @classmethod
    def _tuned_for(
        cls,
        head_dim: int,
        dtype: torch.dtype,
        tile_rows: int,
        num_segments: int,
        has_window: bool,
        device: DeviceInfo,
    ) -> DecodeAttentionConfig:
        """Return ``default_for`` these shapes on a device, without its bound of registers."""
        is_amd = device.capability is None
        if dtype == torch.float32:
            # Exact products run outside tensor cores: a thread holds whole rows of K in registers.
            tile_tokens = 16 if head_dim > 128 or is_amd else 32
            num_warps = 4 if is_amd else 8
            return cls(tile_tokens, num_warps, num_stages=1, programs_per_sm=2)
        has_codes = dtype.itemsize == 1
        is_narrow = tile_rows == MIN_TILE_ROWS and device.capability == (9, 0)
        if has_codes and is_narrow and head_dim > 128:
            # H200, heads of 256: 256 x 512 in 146 us, in tiles of 32 keys 192 us.
            return cls(64, num_warps=4, num_stages=3, programs_per_sm=3)
        many = 2 * num_segments > device.num_sms
        if dtype == INT4.dtype and is_narrow and head_dim <= 128:
            # Programs of one warp have no barriers; a part of V has rows for two at most. H200,
            # 64 x 8,192 tokens, 32/8 heads of 128: 149 us; two warps with tiles of 128 keys 161,
            # with tiles of 64 174 to 198, four warps 212 (fp8 266). Masks of windows and of padded
            # dimensions take registers, which twelve programs do not leave.
            is_masked = has_window or next_power_of_2(head_dim) != head_dim
            fewest, programs = 4 if many else 2, 8 if is_masked else 12
            return cls(64, num_warps=1, num_stages=2, programs_per_sm=programs, min_tiles=fewest)
        if tile_rows == 2 * MIN_TILE_ROWS and head_dim <= 128 and device.capability == (9, 0):
            # H200, 12 query heads per KV head, 4,000 keys; in tiles of 32 keys before. By wgmma: 4
            # segments of 190 keys 4.6 us (4.8), 128 segments 69 (80). Codes by two warps, for
            # which Triton has no wgmma: 48 segments 25 us (37), 128 segments 45 (85).
            fewest = 4 if many else 1
            if not has_codes:
                return cls(64, num_warps=4, num_stages=2, programs_per_sm=3, min_tiles=fewest)
            if 3 * num_segments > device.num_sms:
                return cls(64, num_warps=2, num_stages=2, programs_per_sm=6, min_tiles=2)
        if tile_rows > MIN_TILE_ROWS or head_dim > 128 or is_amd:
            # Tiles too small for wgmma, which Triton would use from 64 keys and 16 rows on. One
            # stage where two exceed gfx942's 64 KiB of shared memory, or spill with over 32 rows.
            is_tight = tile_rows > 32 and device.capability in ((8, 6), (8, 9), (12, 0))
            is_tight |= is_amd and head_dim > 128
            stages, programs = 1 if is_tight else 2, 2 if tile_rows > 32 else 3
            # gfx942 widens 4-bit codes in registers, which spill with over 32 rows of 32 keys.
            tile_tokens = 16 if is_amd and dtype == INT4.dtype and tile_rows > 32 else 32
            return cls(tile_tokens, num_warps=4, num_stages=stages, programs_per_sm=programs)
        # H200, heads of 128, contexts of 190. Few segments: pieces of one tile, two warps each
        # (1 x 8 heads: 4.1 us, whole segments 5.6). With more than one segment per two
        # multiprocessors, segments of up to 256 keys stay whole, which four warps compute faster
        # (32 x 8: 11.4 us, in steps of 128 keys 12.9; 64 x 8: 17.2 us, in steps of 128 keys 21.5).
        if has_codes and is_narrow and not has_window and num_segments > 16 * device.num_sms:
            # Most segments stay whole, and each starts with a chain of loads: more programs of
            # fewer warps hide more of it. Eight programs, of 128 registers a thread, would spill;
            # seven leave no more registers than eight, as a part has three warps or four.
            return cls(
                64, num_warps=2, num_stages=2, programs_per_sm=6, min_tiles=4, max_registers=144
            )
        if has_codes:
            fewest = 2 if many else 1
            return cls(128, num_warps=4, num_stages=2, programs_per_sm=4, min_tiles=fewest)
        # The code for windows takes registers, of which two warps have none to spare.
        num_warps, fewest = 4 if many or has_window else 2, 4 if many else 1
        return cls(64, num_warps=num_warps, num_stages=2, programs_per_sm=4, min_tiles=fewest)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """Buffers of one plan and of the attention that follows it; make one with :meth:`allocate`.

    ``plan_decode_attention`` writes it once a step, ``paged_decode_attention`` reads it in every
    layer and uses its scratch: launches that share a plan must be on one stream.
    """

    config: DecodeAttentionConfig
    max_reqs: int
    num_kv_heads: int
    num_q_heads: int
    query_len: int
    num_kv_splits: int | None
    """Pieces of the longest segment; None = equal shares, or the cuts of a deterministic plan."""
    deterministic: bool
    """Whether a row has the same bits in any batch: cuts are at fixed keys (PIECE_TOKENS)."""
    max_items: int
    most_items: int
    """Bound on the items of equal shares, short segments counted by their tiles. If deterministic,
    the number of shares: a segment of at most one share stays whole."""
    fine_items: int
    """The same bound where pieces are long: more items even out the programs' run times."""
    long_tiles: int
    """Fewest tiles of a long piece."""
    max_pieces: int
    """Bound on the pieces of one segment."""
    may_split: bool
    """Whether a segment can have several pieces."""
    items: torch.Tensor
    """[max_items, ITEM_FIELDS] int32: an ``Item`` per row."""
    num_items: torch.Tensor
    """[1] int32: the number of items."""
    states: torch.Tensor
    """[max_items, rows, head_dim] float32 scratch: partial results; empty unless ``may_split``."""
    states_lse: torch.Tensor
    """[max_items, rows] float32 scratch: their log-sum-exps, to base 2."""
    arrivals: torch.Tensor
    """[max_items] int32: stored pieces of a group; 0 between launches; empty like ``states``."""
    read_early: bool
    """Whether attention may read plan, block table and layout before the previous kernel's end."""

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
        page_format: PageFormat | None = None,
        num_kv_splits: int | None = None,
        deterministic: bool = False,
        read_early: bool = False,
    ) -> DecodePlan:
        """Return buffers that hold any plan of these shapes, on the layout's device.

        Args:
            max_reqs: rows of ``seq_lens``, padding included.
            max_keys: tokens that a row of the block table has room for.
            layout: head roles and head dimension.
            num_q_heads: query heads, a multiple of the layout's KV heads.
            dtype: of the queries.
            query_len: queries per request, 1 to 8.
            page_format: how the cache stores values; None = as they are, like the queries.
            num_kv_splits: as in ``paged_decode_attention``.
            deterministic: as in ``paged_decode_attention``.
            read_early: whether attention may read plan, block table and layout while the previous
                launch still runs. The caller promises that the previous launch, wherever the plan
                is used, writes none of the three and lets the next one start only after its own
                wait for earlier launches: ``qkv_cache_write`` does, ``linear`` does not. Saves 0.5
                to 0.9 us a layer with short contexts (H200); no effect without overlap.

        Raises:
            ValueError: options out of range or in conflict, or more segments than a plan holds.
        """
        check_num_kv_splits(num_kv_splits)
        check_plan_options(None, num_kv_splits, deterministic)
        num_kv_heads = layout.num_kv_heads
        if padded_reqs(max_reqs) * next_power_of_2(num_kv_heads) > MAX_SEGMENTS:
            raise ValueError(
                f"seq_lens: expected fewer requests with {num_kv_heads} KV heads each (at most "
                f"{MAX_SEGMENTS} requests x heads, both rounded up), got {max_reqs}"
            )
        segments = max_reqs * num_kv_heads
        rows = query_len * (num_q_heads // num_kv_heads)
        device = layout.head_base.device
        info = device_info(device)
        page_format = page_format or PageFormat.plain(dtype)
        product_dtype = page_format.product_dtype(dtype)
        # Deterministic bits of codes follow from their tiles: one choice, whatever the batch.
        num_segments = 0 if deterministic and product_dtype.itemsize == 1 else segments
        config = DecodeAttentionConfig.default_for(
            layout.head_dim,
            product_dtype,
            padded_rows(rows),
            num_segments,
            layout.has_window,
            info,
        )
        if deterministic:
            config = _deterministic(config, layout, product_dtype, info)
        max_tiles = max(1, cdiv(max_keys, config.tile_tokens))
        key_bytes, long_piece = 2 * page_format.vector_bytes(layout.head_dim), LONG_PIECE
        if deterministic:
            max_pieces = num_pieces(max_keys)
            shares = int(SHARES_PER_SM * info.num_sms)
            shares = max(1, shares if segments <= shares else info.num_sms // 2)
            most_items = fine_items = 1 << 30 if page_format.has_scales else shares  # no folds
            num_cut = segments if page_format.has_scales else min(segments, shares)
            max_items = segments + num_cut * (max_pieces - 1)
        elif num_kv_splits is not None:
            max_pieces = min(num_kv_splits, max_tiles)
            max_items = most_items = fine_items = segments * max_pieces
        else:
            programs = config.programs_per_sm * info.num_sms
            most_items = programs if segments <= programs else segments + programs // 2
            is_many = 8 * segments > programs
            fine_items = 2 * programs if is_many and segments <= programs else most_items
            # A program takes longer for the bytes of codes. Where equal pieces leave a fifth of
            # the programs idle, shorter pieces gain more than they cost (H200, 192 segments of
            # 4,000 keys: 62 us, in two pieces each 63 to 65; 256 segments would lose 6%).
            if page_format.has_scales and 5 * (programs % max(1, segments)) > programs:
                long_piece //= 2
            longest = cdiv(max_tiles, config.min_tiles)
            # One segment may get nearly all items: short segments hardly count.
            max_pieces = min(fine_items, longest)
            # Spare items are for short segments. With few segments there are none: short segments
            # cost long segments at most an eighth of the items, and spare items start programs.
            spare = min(segments - 1, programs) if is_many else 0
            max_items = min(fine_items + spare, segments * max_pieces)
        may_split = max_items > segments
        num_states = max_items if may_split else 0
        return cls(
            config=config,
            max_reqs=max_reqs, num_kv_heads=num_kv_heads, num_q_heads=num_q_heads,
            query_len=query_len, num_kv_splits=num_kv_splits, deterministic=deterministic,
            max_items=max_items, most_items=most_items, fine_items=fine_items,
            long_tiles=max(1, long_piece // (key_bytes * config.tile_tokens)),
            max_pieces=max_pieces, may_split=may_split,
            items=torch.empty(max_items, ITEM_FIELDS, dtype=torch.int32, device=device),
            num_items=torch.empty(1, dtype=torch.int32, device=device),
            states=torch.empty(num_states, rows, layout.head_dim, device=device),
            states_lse=torch.empty(num_states, rows, device=device),
            arrivals=torch.empty(num_states, dtype=torch.int32, device=device),
            read_early=read_early,
        )  # fmt: skip


def _deterministic(
    config: DecodeAttentionConfig, layout: KVLayout, dtype: torch.dtype, device: DeviceInfo
) -> DecodeAttentionConfig:
    """Return the configuration with prefill's steps, on which bits depend; codes keep theirs."""
    if dtype.itemsize == 1:
        return replace(config, min_tiles=1)
    steps = PrefillAttentionConfig.default_for(
        layout.head_dim, dtype, device.capability, layout.has_window
    )
    # Its plan does not count on all programs at a time, and folds would spill.
    most = config.max_registers if layout.has_window else None
    return replace(config, tile_tokens=steps.tile_tokens, max_registers=most)


def check_plan_options(
    plan: DecodePlan | None, num_kv_splits: int | None, deterministic: bool
) -> None:
    """Raise (TypeError, ValueError) unless the options that decide how keys are cut agree."""
    if plan is not None and not isinstance(plan, DecodePlan):
        raise TypeError(f"plan: expected a DecodePlan or None, got {type(plan).__name__}")
    if num_kv_splits is not None and (deterministic or plan is not None):
        other = "a plan" if plan is not None else "deterministic=True"
        raise ValueError(f"num_kv_splits: expected None with {other}, got {num_kv_splits}")
    if plan is not None and deterministic and not plan.deterministic:
        raise ValueError("plan: expected a deterministic plan, got deterministic=False")


def check_plan(
    plan: DecodePlan,
    seq_lens: torch.Tensor,
    layout: KVLayout,
    *,
    num_q_heads: int | None = None,
    query_len: int | None = None,
) -> None:
    """Raise unless a plan was allocated for these requests, heads and queries (None = any)."""
    check_tensor("seq_lens", seq_lens, shape=(None,), dtype=torch.int32, contiguous=True)
    for what, expected, got in (
        ("requests", seq_lens.shape[0], plan.max_reqs),
        ("KV heads", layout.num_kv_heads, plan.num_kv_heads),
        ("query heads", num_q_heads, plan.num_q_heads),
        ("queries per request", query_len, plan.query_len),
    ):
        if expected is not None and got != expected:
            raise ValueError(f"plan: expected a plan for {expected} {what}, got a plan for {got}")
    for name, device in (("layout", layout.head_base.device), ("plan", plan.items.device)):
        if device != seq_lens.device:
            raise ValueError(f"{name}: expected device {seq_lens.device}, got {device}")
