"""Launch choices of prefill attention, and the buffers of programs that share a tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from mrv1.device import INTERPRET, device_info
from mrv1.kernels._base.arithmetic import next_power_of_2
from mrv1.kernels.cache.kv_layout import KVLayout
from mrv1.kernels.cache.scale_arguments import product_dtype

MIN_DOT_ROWS = 16
"""Fewest rows that ``tl.dot`` accepts."""

MAX_SPLITS = 16
"""Most programs per tile: the last program to finish reads the partial results of the others."""

PROGRAMS_PER_SM = 2
"""Programs that run at the same time on a multiprocessor, where programs share tiles."""

ANY_QUERY_LEN = 1 << 24
"""Longer than every query: for one choice, whatever the batch."""
FOLDED_ROWS = 32
"""Rows of a deterministic tile, whose registers hold its piece and the pieces before it; Hopper
holds twice as many, as its scores need no registers for operands."""

WARP_GROUP_CAPABILITY = (9, 0)
WARP_GROUP_ROWS = 128
"""GPUs, and rows of a tile, of the kernels of warp groups."""
WARP_GROUP_TILES = {64: (128, 3), 128: (128, 3), 256: (64, 2)}
"""head_dim -> keys of a tile, and tiles of K and of V that they have in shared memory, which take
112, 224 and 192 KiB of 227 with the queries. A thread's registers hold (head_dim + keys) / 2
accumulators of output and scores, and the weights."""
WARP_GROUP_FP8_DIM = 128
MAX_ODD_GROUP = 32
"""Query heads per KV head, where they do not divide a tile's rows: so many fill most of them."""
COPY_BYTES = 16
"""Alignment of what a bulk copy reads."""
MIN_WARP_GROUP_QUERIES = 4096
MIN_QUEUED_QUERIES = 256
MIN_SHARED_ROWS = 64
MIN_FP8_ROWS = 256
"""Where the kernels of warp groups are faster: see ``fits_warp_groups``."""

_BIG_SHARED_MEMORY = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities with 227 KiB of shared memory per program; others have 64 to 163."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAttentionConfig:
    """Launch choices of one prefill attention."""

    tile_rows: int
    """(query, query head) rows per program, a power of two >= 16."""
    tile_tokens: int
    """Keys per step of a program."""
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Bound on a thread's registers (NVIDIA), so that more programs fit; None = the compiler's."""

    @classmethod
    def default_for(
        cls,
        head_dim: int,
        dtype: torch.dtype,
        capability: tuple[int, int] | None,
        has_window: bool = False,
        has_offsets: bool = False,
    ) -> PrefillAttentionConfig:
        """Return the configuration for a head, cache dtype, compute capability and mask."""
        if INTERPRET:  # interpreting costs time per program and operation, hardly per element
            return cls(tile_rows=256, tile_tokens=128, num_warps=1, num_stages=1)
        if dtype == torch.float32:
            # Exact products run outside tensor cores: a thread holds whole rows of K in registers.
            return cls(tile_rows=16, tile_tokens=16, num_warps=4, num_stages=1)
        if dtype == torch.float8_e4m3fn:
            # Codes are widened to fp16 in registers, which spill with more keys at once.
            if capability == (9, 0) and head_dim <= 128:
                tile_tokens = 32 if has_window or has_offsets else 64
                return cls(tile_rows=64, tile_tokens=tile_tokens, num_warps=4, num_stages=2)
            # Heads above 128: 4 warps spill on sm_89, 8 warps spill on gfx942.
            num_warps = 8 if head_dim > 128 and capability is not None else 4
            return cls(tile_rows=32, tile_tokens=32, num_warps=num_warps, num_stages=2)
        if head_dim > 128:
            # One stage fits in gfx942's 64 KiB of shared memory; 4 warps spill on sm_89.
            stages = 2 if capability in _BIG_SHARED_MEMORY else 1
            return cls(tile_rows=64, tile_tokens=32, num_warps=8, num_stages=stages)
        if capability == (9, 0):
            # With 128 registers two programs share a multiprocessor: one computes its softmax
            # while the other multiplies. The code for windows spills a little at 64 keys, but is
            # an eighth faster than at 32 where some heads see far; the code for mask offsets
            # spills even at 32.
            tile_tokens, stages = (32, 3) if has_offsets else (64, 2)
            return cls(
                tile_rows=128,
                tile_tokens=tile_tokens,
                num_warps=8,
                num_stages=stages,
                max_registers=None if has_offsets else 128,
            )
        if capability in _BIG_SHARED_MEMORY:
            tile_tokens = 32 if has_offsets else 64  # 64 spills on sm_100
            return cls(tile_rows=128, tile_tokens=tile_tokens, num_warps=8, num_stages=3)
        tile_tokens = 32 if head_dim > 64 else 64  # 64 spills on sm_89
        return cls(tile_rows=64, tile_tokens=tile_tokens, num_warps=4, num_stages=2)

    def launch_options(self) -> dict[str, int]:
        """Return the compiler's options, without the constexprs."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.max_registers is None else options | {"maxnreg": self.max_registers}

    def fit_rows(self, group: int, max_query_len: int) -> PrefillAttentionConfig:
        """Return this configuration with rows for 1 to ``max_query_len`` queries."""
        one = max(MIN_DOT_ROWS, next_power_of_2(group))
        needed = max(one, next_power_of_2(group * max_query_len))
        if needed < self.tile_rows:
            return replace(
                self, tile_rows=needed, num_warps=min(self.num_warps, 4), max_registers=None
            )
        return replace(self, tile_rows=max(one, self.tile_rows))

    def with_folds(self, group: int, capability: tuple[int, int] | None) -> PrefillAttentionConfig:
        """Return this configuration with room in registers for the fold of pieces."""
        is_hopper = capability == (9, 0)
        rows = max(2 * FOLDED_ROWS if is_hopper else FOLDED_ROWS, next_power_of_2(group))
        rows = min(self.tile_rows, rows)
        num_warps = 4 if is_hopper and rows < self.tile_rows else self.num_warps
        return replace(self, tile_rows=rows, num_warps=num_warps, max_registers=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSplits:
    """Buffers of the programs that divide a launch's work; make them with :meth:`allocate`.

    Launches that use the same buffers must be on one stream.
    """

    num_splits: int
    """Most programs per tile; fewer where a program would have under ``MIN_SPLIT_STEPS`` steps.
    1 = tiles are not divided: programs take whole ones from a queue."""
    num_programs: int
    """Programs of all tiles together: the more tiles a batch has, the fewer programs each gets."""
    states: torch.Tensor | None
    """[num_splits, num_tokens, q_heads, head_dim] float32 scratch: partial results. None where
    tiles are not divided, as the next two."""
    states_lse: torch.Tensor | None
    """[num_splits, num_tokens, q_heads] float32 scratch: their log-sum-exps."""
    arrivals: torch.Tensor | None
    """[tiles * kv_heads] int32, programs that have stored partial results; 0 between launches."""
    ticket: torch.Tensor
    """[1] int32, tiles that programs of ``hopper_queue`` have taken; 0 between launches."""

    @classmethod
    def allocate(
        cls,
        *,
        num_tokens: int,
        num_reqs: int,
        max_query_len: int,
        layout: KVLayout,
        num_q_heads: int,
        dtype: torch.dtype,
        is_fp8: bool = False,
        num_splits: int | None = None,
    ) -> PrefillSplits | None:
        """Return the buffers for a launch of these shapes, on the layout's device.

        Args:
            num_tokens: rows of ``q``.
            num_reqs: rows of ``seq_lens``.
            max_query_len: as in ``paged_prefill_attention``.
            layout: head roles and head dimension.
            num_q_heads: query heads, a multiple of the layout's KV heads.
            dtype: of the queries.
            is_fp8: whether the cache has scales.
            num_splits: programs per tile, 1 to 16; None = up to 16, so that the programs of
                all tiles of the batch together fill the device.

        Returns:
            The buffers; None where every tile has one program of its own.

        Raises:
            ValueError: ``num_splits`` is out of range.
        """
        if num_splits is not None and not 1 <= num_splits <= MAX_SPLITS:
            raise ValueError(f"num_splits: expected None or 1 to {MAX_SPLITS}, got {num_splits}")
        device = layout.head_base.device
        config = choose_config(layout, dtype, is_fp8, num_q_heads, max_query_len)
        tile_queries = config.tile_rows * layout.num_kv_heads // num_q_heads
        num_tiles = num_tokens // tile_queries + num_reqs
        if num_splits is None:
            num_programs = PROGRAMS_PER_SM * device_info(device).num_sms
            num_splits = _choose_num_splits(layout, tile_queries, num_tokens)
        else:
            num_programs = num_splits * num_tiles * layout.num_kv_heads
        if num_tokens == 0 or (num_splits < 2 and not _has_warp_groups(layout, is_fp8)):
            return None
        if num_splits < 2:
            ticket = torch.zeros(1, dtype=torch.int32, device=device)
            return cls(
                num_splits=1, num_programs=num_programs, states=None, states_lse=None,
                arrivals=None, ticket=ticket,
            )  # fmt: skip
        shape = (num_splits, num_tokens, num_q_heads)
        num_pairs = num_tiles * layout.num_kv_heads
        counters = torch.zeros(num_pairs + 1, dtype=torch.int32, device=device)
        return cls(
            num_splits=num_splits,
            num_programs=num_programs,
            states=torch.empty(*shape, layout.head_dim, device=device),
            states_lse=torch.empty(shape, device=device),
            arrivals=counters[:num_pairs],
            ticket=counters[num_pairs:],
        )


def choose_config(
    layout: KVLayout,
    dtype: torch.dtype,
    is_fp8: bool,
    num_q_heads: int,
    max_query_len: int,
    has_offsets: bool = False,
) -> PrefillAttentionConfig:
    """Return the configuration for a prefill launch: tiles no larger than its chunks need."""
    config = PrefillAttentionConfig.default_for(
        layout.head_dim,
        product_dtype(dtype, is_fp8),
        device_info(layout.head_base.device).capability,
        layout.has_window,
        has_offsets,
    )
    return config.fit_rows(num_q_heads // layout.num_kv_heads, max(max_query_len, 1))


def _choose_num_splits(layout: KVLayout, tile_queries: int, num_tokens: int) -> int:
    """Return programs per tile so that those of all tiles fill the device; 0 and 1 = one."""
    # Streaming heads have few keys beside long contexts: their programs do not count.
    num_heads = len(layout.full_heads) or layout.num_kv_heads
    fewest = max(num_tokens // tile_queries, 1) * num_heads
    num_programs = PROGRAMS_PER_SM * device_info(layout.head_base.device).num_sms
    return min(num_programs // fewest, MAX_SPLITS)


def _has_warp_groups(layout: KVLayout, is_fp8: bool) -> bool:
    """Return whether there are kernels of warp groups for the device and some of the heads."""
    head_dims = (WARP_GROUP_FP8_DIM,) if is_fp8 else WARP_GROUP_TILES
    return (
        device_info(layout.head_base.device).capability == WARP_GROUP_CAPABILITY
        and layout.head_dim in head_dims
        and layout.block_size <= WARP_GROUP_TILES[layout.head_dim][0]
        and len(layout.full_heads) > 0
    )


class LaunchChoice(NamedTuple):
    """All that decides which kernels the causal launches of one layout have."""

    config: PrefillAttentionConfig
    is_shared: bool
    """Whether programs share tiles."""
    has_warp_groups: bool
    """Whether warp groups compute the full heads, if dtype and addresses suit them."""


def choose_launch(
    layout: KVLayout,
    split_layout: KVLayout,
    dtype: torch.dtype,
    is_fp8: bool,
    num_q_heads: int,
    max_query_len: int,
    num_tokens: int,
) -> LaunchChoice:
    """Return the choice for a launch; no choice comes back as queries or tokens grow.

    Args:
        layout: the launch's layout.
        split_layout: the layout for which ``PrefillSplits.allocate`` makes the launch's splits.
        dtype: of the queries.
        is_fp8: whether the cache has scales.
        num_q_heads: query heads.
        max_query_len: as in ``paged_prefill_attention``.
        num_tokens: rows of ``q``.
    """
    of_splits = choose_config(split_layout, dtype, is_fp8, num_q_heads, max_query_len)
    tile_queries = of_splits.tile_rows * split_layout.num_kv_heads // num_q_heads
    is_shared = _choose_num_splits(split_layout, tile_queries, num_tokens) > 1
    group = num_q_heads // layout.num_kv_heads
    is_queued = not is_shared and _has_warp_groups(split_layout, is_fp8)
    return LaunchChoice(
        choose_config(layout, dtype, is_fp8, num_q_heads, max_query_len),
        is_shared,
        _has_warp_groups(layout, is_fp8)
        and _are_faster(group, max_query_len, is_fp8, is_shared, is_queued),
    )


def prefills_of_each(
    choice: Callable[[int, int], object],
    shortest: int,
    max_query_len: int,
    max_reqs: int,
    max_tokens: int,
) -> list[list[int]]:
    """Return lengths of prompts, a list a launch, so that every kernel is launched.

    Args:
        choice: what decides on the kernels, of the queries of the longest prompt and the tokens
            of all: a ``LaunchChoice``, or those of several layouts.
        shortest: fewest queries of a batch's longest prompt.
        max_query_len: most queries of a prompt.
        max_reqs: most prompts.
        max_tokens: most tokens of all.
    """

    def most_tokens(longest: int) -> int:
        return min(longest * max_reqs, max_tokens)

    found: dict[object, list[int]] = {}
    for longest in least_of_each(
        lambda longest: (choice(longest, longest), choice(longest, most_tokens(longest))),
        shortest,
        min(max_query_len, max_tokens),
    ):
        for num_tokens in least_of_each(partial(choice, longest), longest, most_tokens(longest)):
            full, rest = divmod(num_tokens, longest)
            lengths = [longest] * full + [max(rest, shortest)] * (rest > 0)
            found.setdefault(choice(longest, num_tokens), lengths)
    return list(found.values())


def least_of_each(choice: Callable[[int], object], first: int, last: int) -> list[int]:
    """Return the least of first..last for each choice, of which none comes back once left."""
    if first > last:
        return []
    if choice(first) == choice(last):
        return [first]
    middle = (first + last) // 2
    left = least_of_each(choice, first, middle)
    right = least_of_each(choice, middle + 1, last)
    return left + right[choice(left[-1]) == choice(right[0]) :]


def prefills_decodes_too(
    layout: KVLayout,
    dtype: torch.dtype,
    is_fp8: bool,
    num_q_heads: int,
    max_query_len: int,
    num_tokens: int,
) -> bool:
    """Return whether one prefill launch is the faster one for a step's decodes and prefills.

    It is where programs take tiles from a queue: a tile with one query of a decode is computed in
    0.7 of the time in which an H100's memory brings its keys, and that time passes beside the
    products of other tiles. On an H100 one launch took 0.95 to 1.00 of
    the time of a decode and a prefill launch one after the other, and up to 1.9 times that time
    from an fp8 cache, whose codes are converted for all 128 rows of a tile.

    Args:
        layout: the launch's layout.
        dtype: of the queries.
        is_fp8: whether the cache has scales.
        num_q_heads: query heads.
        max_query_len: of the step's requests.
        num_tokens: of all requests.
    """
    choice = choose_launch(layout, layout, dtype, is_fp8, num_q_heads, max_query_len, num_tokens)
    is_queued = choice.has_warp_groups and not choice.is_shared
    group = num_q_heads // layout.num_kv_heads
    is_queued = is_queued and _suits_warp_groups(layout, dtype, is_fp8, group)
    return is_queued and not is_fp8 and not layout.has_window


def _suits_warp_groups(layout: KVLayout, dtype: torch.dtype, is_fp8: bool, group: int) -> bool:
    """Return whether queries and pages have the form that the kernels of warp groups take."""
    return (
        dtype in (torch.float16, torch.bfloat16)
        and layout.token_stride == layout.address_unit == layout.head_dim
        and (WARP_GROUP_ROWS % group == 0 or (not is_fp8 and group <= MAX_ODD_GROUP))
    )


def _are_faster(
    group: int, max_query_len: int, is_fp8: bool, is_shared: bool, is_queued: bool
) -> bool:
    """Return whether warp groups are the faster kernel: see ``fits_warp_groups``."""
    if is_fp8:
        return group * max_query_len >= MIN_FP8_ROWS
    if is_shared:
        return group * max_query_len >= MIN_SHARED_ROWS
    return max_query_len >= (MIN_QUEUED_QUERIES if is_queued else MIN_WARP_GROUP_QUERIES)


def fits_warp_groups(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: KVLayout,
    max_query_len: int,
    splits: PrefillSplits | None,
    is_fp8: bool = False,
) -> bool:
    """Return whether warp groups can run a causal launch and are the faster kernel for it.

    They compute the full heads, of which there must be some; the streaming heads get a launch of
    the Triton kernel. They copy whole pages in bulk, so a page must be contiguous and start at a
    multiple of ``head_dim`` elements. Their programs take longer to start: on an H200 those of
    16-bit caches of 128 dimensions are 1.2 to 2.5 times as fast where programs share tiles of 64
    rows or more (0.6 times with 16 rows), 1.1 to 1.2 times where programs take tiles from a queue,
    and without a queue 1.1 to 1.2 times from 4,096 queries on, but 0.8 times as fast for requests
    of 512 tokens. ``hopper_fp8`` is 1.3 to 2.4 times as fast from 256 rows on, the fewest
    that were measured.
    """
    group = q.shape[1] // layout.num_kv_heads
    is_shared = splits is not None and splits.num_splits > 1
    return (
        _are_faster(group, max_query_len, is_fp8, is_shared, takes_turns(q, splits))
        and not INTERPRET
        and _has_warp_groups(layout, is_fp8)
        and _suits_warp_groups(layout, q.dtype, is_fp8, group)
        and all(
            cache.numel() % layout.head_dim == 0 and cache.data_ptr() % COPY_BYTES == 0
            for cache in (k_cache, v_cache)
        )
    )


def takes_turns(q: torch.Tensor, splits: PrefillSplits | None) -> bool:
    """Return whether programs take whole tiles from a queue, and copy queries in bulk."""
    if splits is None or splits.num_splits > 1:
        return False
    strides = [stride * q.element_size() for stride in q.stride()[:2]]
    return all(number % COPY_BYTES == 0 for number in (q.data_ptr(), *strides))


def check_splits(splits: PrefillSplits | None, q: torch.Tensor, deterministic: bool) -> None:
    """Raise unless ``splits`` is None or was allocated for the rows and heads of ``q``.

    Raises:
        TypeError: ``splits`` is neither ``PrefillSplits`` nor None.
        ValueError: ``splits`` was allocated for other shapes or on another device, or is given
            with ``deterministic``.
    """
    if splits is None:
        return
    if deterministic:
        raise ValueError("splits: expected None with deterministic=True, got PrefillSplits")
    if not isinstance(splits, PrefillSplits):
        raise TypeError(f"splits: expected PrefillSplits or None, got {type(splits).__name__}")
    if splits.ticket.device != q.device:
        raise ValueError(f"splits: expected buffers on {q.device}, got {splits.ticket.device}")
    expected, states = (splits.num_splits, *q.shape), splits.states
    if states is not None and states.shape != expected:
        raise ValueError(f"splits: expected states {expected}, got {tuple(states.shape)}")
