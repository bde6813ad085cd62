"""The choice of a prefill kernel and its launch, and the buffers of programs that share tiles.

``CONFIGS`` says how the portable kernel is launched, ``KERNELS`` where another kernel is faster.
The first row of a table whose limits a launch keeps is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch

from mrv1.device import INTERPRET, device_info
from mrv1.kernels._base.arithmetic import cdiv, next_power_of_2
from mrv1.kernels.cache.formats import FP8, PageFormat
from mrv1.kernels.cache.kv_layout import KVLayout

MIN_DOT_ROWS = 16  # fewest rows that ``tl.dot`` accepts
MAX_SPLITS = 16
"""Most programs per tile whose partial results its last program merges, and that ``merge`` has in
registers at a time."""
MAX_MERGED_SPLITS = 32
"""Most programs per tile whose partial results ``merge`` merges: where few heads are full, so many
fill the device."""
MIN_MERGED_SPLITS = 4
"""Fewest programs per tile whose partial results ``merge`` merges. Of fewer, the last program to
finish does: a second launch also costs where contexts are too short to divide."""
PROGRAMS_PER_SM = 2
"""Programs that run at the same time on a multiprocessor, where programs share tiles."""
MIN_MIXED_QUERIES = 256
"""Fewest queries of the longest chunk that shares a launch with decodes: the fewest measured."""
ANY_QUERY_LEN = 1 << 24  # longer than every query: for one choice, whatever the batch
FOLDED_ROWS = 32
"""Rows of a deterministic tile, whose registers hold its piece and the pieces before; Hopper
holds twice as many, as its scores need no registers for operands."""

WARP_GROUP_CAPABILITY = (9, 0)  # GPUs of the kernels of warp groups
WARP_GROUP_ROWS = 128  # rows of their tiles
BOX_QUERIES = 16
"""Queries of a box, which has one query head and the rows of a warp: the tiles of ``hopper_queue``
are boxes where whole queries would not fill them."""
WARP_GROUP_TILES = {64: (128, 3), 80: (128, 4), 96: (128, 4), 128: (128, 3), 256: (64, 2)}
"""head_dim -> keys of a tile, and tiles of K and of V that they have in shared memory, which take
112, 180, 216, 224 and 192 KiB of 227 with the queries. A thread's registers hold (head_dim + keys)
/ 2 accumulators of output and scores, and the weights."""
SHORT_WINDOW = 1024  # tokens
SHORT_WINDOW_KEYS = 64
"""Keys of a tile where all windows are short: each row sees few of the keys at both edges, whose
masks cost as much as all else in a softmax. On an H200 windows of 128 took 0.75 of the time."""
THREE_CONSUMERS = (64,)
"""Head dimensions whose tiles in ``hopper_queue`` have 192 rows, for three consumers: the products
of so small heads are shorter than a softmax. Windows take registers that three do not have."""
COPY_BYTES = 16  # alignment of what a bulk copy reads

Division = Literal["tiles", "keys", "merged", "queue"]
"""How a launch is divided among programs: a tile each, a tile's keys, a tile's keys with a launch
that merges the partial results, or tiles from a queue."""

MASKS = ("causal", "window", "offsets")
"""What hides keys: each name stands for code that also serves the names before it."""


def short_window_tile(layout: KVLayout) -> tuple[int, int]:
    """Return the entry of ``WARP_GROUP_TILES`` for a launch, or smaller tiles of short windows."""
    keys, stages = WARP_GROUP_TILES[layout.head_dim]
    is_short = all(0 < role.window <= SHORT_WINDOW for role in layout.roles)
    if is_short and layout.block_size <= SHORT_WINDOW_KEYS < keys:
        return SHORT_WINDOW_KEYS, stages * keys // SHORT_WINDOW_KEYS
    return keys, stages


def consumers_for(layout: KVLayout) -> int:
    """Return the consumers of a program of ``hopper_queue``."""
    return 3 if layout.head_dim in THREE_CONSUMERS and not layout.has_window else 2


class PrefillLayer(NamedTuple):
    """What the prefills of a layer have in common."""

    layout: KVLayout
    dtype: torch.dtype  # of the queries
    page_format: PageFormat
    num_q_heads: int
    plain_scores: bool = True  # whether scores have no soft cap, and rows no logit sink

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.layout.num_kv_heads


@dataclass(frozen=True, slots=True)
class PrefillAttentionConfig:
    """Launch choices of one prefill attention."""

    tile_rows: int  # (query, query head) rows per program, a power of two >= 16
    tile_tokens: int  # keys per step of a program
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
        """Return the first row of ``CONFIGS`` that holds; ``capability`` None = AMD.

        ``dtype`` is a ``PageFormat.product_dtype``; ``has_offsets``: queries have ranges of keys.
        """
        if INTERPRET:  # interpreting costs time per program and operation, hardly per element
            return cls(tile_rows=256, tile_tokens=128, num_warps=1, num_stages=1)
        mask = "offsets" if has_offsets else "window" if has_window else "causal"
        # float64, which the reference alone computes in, has no rows of its own.
        element_bytes = 2 if dtype == torch.float64 else dtype.itemsize
        return next(
            row.config
            for row in CONFIGS
            if row.element_bytes == element_bytes
            and (row.gpus is None or capability in row.gpus)
            and head_dim <= row.head_dim
            and MASKS.index(mask) <= MASKS.index(row.mask)
        )

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


class ConfigRow(NamedTuple):
    """A row of ``CONFIGS``: its limits, and the configuration of launches that keep them."""

    element_bytes: int  # of the dtype; 1 = codes
    gpus: tuple[tuple[int, int] | None, ...] | None  # compute capabilities; None = any GPU
    head_dim: int  # the largest
    mask: str  # the last of ``MASKS``
    config: PrefillAttentionConfig


_AMD, _HOPPER, _ANY = (None,), (WARP_GROUP_CAPABILITY,), None
_BIG = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities with 227 KiB of shared memory per program; others have 64 to 163."""
_ANY_DIM = 1 << 30  # more than every head dimension

CONFIGS = (
    # (rows and keys of a tile, warps, stages[, registers])
    # Exact products run outside tensor cores: a thread holds whole rows of K in registers.
    ConfigRow(4, _ANY, _ANY_DIM, "offsets", PrefillAttentionConfig(16, 16, 4, 1)),
    # Codes are widened to fp16 in registers, which spill with more keys at once.
    ConfigRow(1, _HOPPER, 128, "causal", PrefillAttentionConfig(64, 64, 4, 2)),
    ConfigRow(1, _HOPPER, 128, "offsets", PrefillAttentionConfig(64, 32, 4, 2)),
    ConfigRow(1, _ANY, 128, "offsets", PrefillAttentionConfig(32, 32, 4, 2)),
    # 8 warps spill on gfx942.
    ConfigRow(1, _AMD, _ANY_DIM, "offsets", PrefillAttentionConfig(32, 32, 4, 2)),
    # 4 warps spill on sm_89.
    ConfigRow(1, _ANY, _ANY_DIM, "offsets", PrefillAttentionConfig(32, 32, 8, 2)),
    # With 128 registers two programs share a multiprocessor: one computes its softmax while
    # the other multiplies. The code for windows spills a little at 64 keys, but is an eighth
    # faster than at 32 where some heads see far; the code for mask offsets spills even at 32.
    ConfigRow(2, _HOPPER, 128, "window", PrefillAttentionConfig(128, 64, 8, 2, 128)),
    ConfigRow(2, _BIG, 128, "window", PrefillAttentionConfig(128, 64, 8, 3)),
    # 64 keys spill on sm_100.
    ConfigRow(2, _BIG, 128, "offsets", PrefillAttentionConfig(128, 32, 8, 3)),
    ConfigRow(2, _ANY, 64, "offsets", PrefillAttentionConfig(64, 64, 4, 2)),
    # 64 keys spill on sm_89.
    ConfigRow(2, _ANY, 128, "offsets", PrefillAttentionConfig(64, 32, 4, 2)),
    ConfigRow(2, _BIG, _ANY_DIM, "offsets", PrefillAttentionConfig(64, 32, 8, 2)),
    # One stage fits in gfx942's 64 KiB of shared memory; 4 warps spill on sm_89.
    ConfigRow(2, _ANY, _ANY_DIM, "offsets", PrefillAttentionConfig(64, 32, 8, 1)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarpGroupKernel:
    """A row of ``KERNELS``: a kernel of warp groups, and the launches for which it is faster.

    Without ``has_masks`` it computes full heads alone; streaming heads get a launch of the
    portable kernel. It copies whole pages in bulk, so a page must be contiguous and start at a
    multiple of ``head_dim`` elements. Its programs take longer to start than the portable ones.
    """

    module: str  # its module in this folder
    dtypes: tuple[torch.dtype, ...]  # of the pages' elements; the queries have 16 bits
    head_dims: tuple[int, ...]
    divisions: tuple[Division, ...]
    max_odd_group: int = 0
    """Most query heads per KV head that do not divide a tile's rows: so many fill most of them."""
    min_rows: int = 0  # fewest queries of the longest chunk, times the query heads of a KV head
    min_queries: int = 0  # fewest queries of the longest chunk
    has_masks: bool = False  # whether it knows windows, soft caps and logit sinks
    min_window: int = 0  # least longest window where no head is full: programs have few keys

    def takes_windows(self, layout: KVLayout) -> bool:
        """Return whether it computes a layout's streaming heads too."""
        return self.has_masks and not layout.visits_masked

    def _suits_windows(self, layout: KVLayout) -> bool:
        """Return whether there are full heads, or windows with enough keys for a program."""
        longest = max(role.window for role in layout.roles)
        is_long = self.takes_windows(layout) and longest >= self.min_window
        return len(layout.full_heads) > 0 or is_long

    def runs(self, layer: PrefillLayer) -> bool:
        """Return whether device, pages and heads have the form that the kernel takes."""
        layout, dtype, page_format, _, plain_scores = layer
        return (
            device_info(layout.head_base.device).capability == WARP_GROUP_CAPABILITY
            and dtype in (torch.float16, torch.bfloat16)
            and page_format.dtype in self.dtypes
            and layout.head_dim in self.head_dims
            and layout.block_size <= WARP_GROUP_TILES[layout.head_dim][0]
            and layout.token_stride == layout.address_unit == layout.head_dim
            and self._suits_windows(layout)
            and (plain_scores or self.has_masks)
            and (WARP_GROUP_ROWS % layer.group == 0 or layer.group <= self.max_odd_group)
        )


_OF_16_BITS = partial(
    WarpGroupKernel, dtypes=(torch.float16, torch.bfloat16),
    head_dims=tuple(WARP_GROUP_TILES), max_odd_group=32, has_masks=True,
)  # fmt: skip
KERNELS = (
    # Speeds relative to the portable kernel, on an H200, heads of 128 dimensions.
    # 1.3 to 2.4 from 256 rows on, the fewest that were measured.
    WarpGroupKernel(
        module="hopper",
        dtypes=(FP8.dtype,),
        head_dims=(128,),
        divisions=("tiles", "keys", "queue"),  # a queue it leaves alone
        min_rows=256,
    ),
    # 1.2 to 2.5 from 64 rows on, 0.6 with 16 rows; 1.3 with windows of 1,024, the only ones that
    # were measured.
    _OF_16_BITS(module="hopper", divisions=("keys",), min_rows=64, min_window=1024),
    # 1.4 and 1.8 with 4 and 32 rows after 20,000 and 8,000 tokens.
    _OF_16_BITS(module="hopper", divisions=("merged",)),
    # 1.1 to 1.2, also with 128 queries after 4,096 tokens; of prompts of 8,192 tokens 1.1 to 1.4
    # with windows, 1.1 with sinks, 1.6 with a soft cap, and 4.2 with that and 256 dimensions.
    _OF_16_BITS(module="hopper_queue", divisions=("queue",), min_queries=128),
    # 1.1 to 1.2 from 4,096 queries on, but 0.8 for requests of 512 tokens.
    _OF_16_BITS(module="hopper", divisions=("tiles",), min_queries=4096, min_window=1024),
)


def choose_kernel(
    layer: PrefillLayer, max_query_len: int, division: Division
) -> WarpGroupKernel | None:
    """Return the kernel for a causal launch, or its full heads; None = the portable kernel."""
    for kernel in KERNELS:
        if (
            division in kernel.divisions
            and layer.group * max_query_len >= kernel.min_rows
            and max_query_len >= kernel.min_queries
            and kernel.runs(layer)
        ):
            return kernel
    return None


def _has_queue(layer: PrefillLayer) -> bool:
    """Return whether some kernel takes the layer's tiles from a queue."""
    return any(kernel.divisions == ("queue",) and kernel.runs(layer) for kernel in KERNELS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSplits:
    """Buffers of the programs that divide a launch's work; make them with :meth:`allocate`.

    Launches that use the same buffers must be on one stream.
    """

    num_splits: int
    """Most programs per tile; fewer where one would have under ``MIN_SPLIT_STEPS`` steps. 1 =
    tiles are not divided: programs take whole ones from a queue."""
    num_programs: int
    """Programs of all tiles together: the more tiles a batch has, the fewer programs each gets."""
    states: torch.Tensor | None
    """[num_splits, num_tokens, q_heads, head_dim] float32 scratch: partial results. None where
    tiles are not divided, as the next two."""
    states_lse: torch.Tensor | None
    """[num_splits, num_tokens, q_heads] float32 scratch: their log-sum-exps."""
    arrivals: torch.Tensor | None
    """[tiles * kv_heads] int32, programs that have stored partial results; 0 between launches."""
    counts: torch.Tensor | None
    """[num_tokens, kv_heads] int32 scratch: partial results of each query, for ``merge``. None
    where the last program of a tile merges them."""
    ticket: torch.Tensor
    """[1] int32, tiles that programs of ``hopper_queue`` have taken; 0 between launches."""

    @property
    def arguments(self) -> tuple[torch.Tensor | int | None, ...]:
        """The arguments of a kernel whose programs divide a tile's keys."""
        return self.states, self.states_lse, self.arrivals, self.num_splits

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
        page_format: PageFormat | None = None,
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
            page_format: how the cache stores values; None = as they are, like the queries.
            num_splits: programs per tile, 1 to 32; None = as many as fill the device, of all
                tiles of the batch together.

        Returns:
            The buffers; None where every tile has one program of its own.

        Raises:
            ValueError: ``num_splits`` is out of range.
        """
        if num_splits is not None and not 1 <= num_splits <= MAX_MERGED_SPLITS:
            raise ValueError(
                f"num_splits: expected None or 1 to {MAX_MERGED_SPLITS}, got {num_splits}"
            )
        layer = PrefillLayer(layout, dtype, page_format or PageFormat.plain(dtype), num_q_heads)
        device = layout.head_base.device
        tile_queries = choose_config(layer, max_query_len).tile_rows // layer.group
        num_tiles = num_tokens // tile_queries + num_reqs
        if num_splits is None:
            num_programs = PROGRAMS_PER_SM * device_info(device).num_sms
            num_splits = _choose_num_splits(layer, max_query_len, num_tokens)
        else:
            num_programs = num_splits * num_tiles * layout.num_kv_heads
        if num_tokens == 0 or (num_splits < 2 and not _has_queue(layer)):
            return None
        if num_splits < 2:
            ticket = torch.zeros(1, dtype=torch.int32, device=device)
            return cls(
                num_splits=1, num_programs=num_programs, states=None, states_lse=None,
                arrivals=None, counts=None, ticket=ticket,
            )  # fmt: skip
        shape = (num_splits, num_tokens, num_q_heads)
        num_pairs = num_tiles * layout.num_kv_heads
        is_merged = _division(layer, max_query_len, num_splits) == "merged"
        num_counts = num_tokens * layout.num_kv_heads if is_merged else 0
        # Counts begin at 16 bytes: kernels are compiled for the alignment of their arguments.
        first_count = 4 * cdiv(num_pairs + 1, 4)
        counters = torch.zeros(first_count + num_counts, dtype=torch.int32, device=device)
        counts = counters[first_count:].view(-1, layout.num_kv_heads) if num_counts else None
        return cls(
            num_splits=num_splits, num_programs=num_programs,
            states=torch.empty(*shape, layout.head_dim, device=device),
            states_lse=torch.empty(shape, device=device),
            arrivals=counters[:num_pairs], counts=counts,
            ticket=counters[num_pairs : num_pairs + 1],
        )  # fmt: skip


def choose_config(
    layer: PrefillLayer, max_query_len: int, has_offsets: bool = False
) -> PrefillAttentionConfig:
    """Return the configuration for a prefill launch: tiles no larger than its chunks need."""
    layout, dtype, page_format, *_ = layer
    config = PrefillAttentionConfig.default_for(
        layout.head_dim,
        page_format.product_dtype(dtype),
        device_info(layout.head_base.device).capability,
        layout.has_window,
        has_offsets,
    )
    return config.fit_rows(layer.group, max(max_query_len, 1))


def _choose_num_splits(layer: PrefillLayer, max_query_len: int, num_tokens: int) -> int:
    """Return programs per tile so that those of all tiles fill the device; 0 and 1 = one."""
    layout = layer.layout
    tile_queries = choose_config(layer, max_query_len).tile_rows // layer.group
    # Streaming heads have few keys beside long contexts: their programs do not count.
    num_heads = len(layout.full_heads) or layout.num_kv_heads
    fewest = max(num_tokens // tile_queries, 1) * num_heads
    num_sms = device_info(layout.head_base.device).num_sms
    num_splits = min(num_sms // fewest, MAX_MERGED_SPLITS)  # of warp groups, which are larger
    if _division(layer, max_query_len, num_splits) != "merged":
        num_splits = min(PROGRAMS_PER_SM * num_sms // fewest, MAX_SPLITS)
    return num_splits


def _division(layer: PrefillLayer, max_query_len: int, num_splits: int) -> Division:
    """Return the division of tiles that have at most so many programs each."""
    is_many = num_splits >= MIN_MERGED_SPLITS and merges_layer(layer.layout)
    if is_many and choose_kernel(layer, max_query_len, "merged") is not None:
        return "merged"
    return "keys" if num_splits > 1 else "tiles"


def merges_layer(layout: KVLayout) -> bool:
    """Return whether ``merge`` may follow: streaming heads alone have few partial results."""
    return len(layout.full_heads) > 0 and not layout.visits_masked


def _in_layer(division: Division, layer: PrefillLayer) -> Division:
    """Return how a layer's launches are divided with splits that may be of another layer."""
    return "keys" if division == "merged" and not merges_layer(layer.layout) else division


class LaunchChoice(NamedTuple):
    """All that decides which kernels the causal launches of one layout have."""

    config: PrefillAttentionConfig
    division: Division
    kernel: WarpGroupKernel | None
    """The kernel that the addresses may suit, perhaps of full heads alone; None = the portable
    one."""
    merged_splits: int
    """Partial results of a query that ``merge`` takes at a time; 0 = it is not launched."""


def choose_launch(
    layer: PrefillLayer, split_layer: PrefillLayer, max_query_len: int, num_tokens: int
) -> LaunchChoice:
    """Return the choice for a launch; no choice comes back as queries or tokens grow.

    The launch's splits are those that ``PrefillSplits.allocate`` makes for ``split_layer``.
    """
    num_splits = _choose_num_splits(split_layer, max_query_len, num_tokens)
    division = _division(split_layer, max_query_len, num_splits)
    if division == "tiles" and _has_queue(split_layer):
        division = "queue"
    division = _in_layer(division, layer)
    kernel = choose_kernel(layer, max_query_len, division)
    merges = kernel is not None and division == "merged"
    return LaunchChoice(
        choose_config(layer, max_query_len), division, kernel,
        merged_splits=min(next_power_of_2(num_splits), MAX_SPLITS) if merges else 0,
    )  # fmt: skip


def prefills_of_each(
    choice: Callable[[int, int], object],
    shortest: int,
    max_query_len: int,
    max_reqs: int,
    max_tokens: int,
) -> list[list[int]]:
    """Return lengths of prompts, a list a launch, so that every kernel is launched.

    ``choice`` tells the kernels from the queries of the longest prompt, ``shortest`` at least, and
    the tokens of all: a ``LaunchChoice``, or those of several layouts.
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


def prefills_decodes_too(layer: PrefillLayer, max_query_len: int, num_tokens: int) -> bool:
    """Return whether one prefill launch is the faster one for a step's decodes and prefills.

    It is where programs take tiles from a queue: a decode's tile is computed in 0.7 of the time in
    which an H100's memory brings its keys, beside the products of other tiles. On an H100 one
    launch took 0.95 to 1.00 of the time of a decode launch and a prefill launch, and up to 1.9
    times that from an fp8 cache, whose codes are converted for all 128 rows of a tile.
    """
    choice = choose_launch(layer, layer, max_query_len, num_tokens)
    is_queued = choice.kernel is not None and choice.division == "queue"
    # Boxes of more heads are several tiles, each of which reads the decode's keys.
    most_heads = WARP_GROUP_ROWS // BOX_QUERIES
    has_one_tile = WARP_GROUP_ROWS % layer.group == 0 or layer.group <= most_heads
    is_long = max_query_len >= MIN_MIXED_QUERIES
    return is_queued and is_long and has_one_tile and not layer.layout.has_window


def kernel_for(
    layer: PrefillLayer,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    max_query_len: int,
    splits: PrefillSplits | None,
) -> WarpGroupKernel | None:
    """Return ``choose_kernel`` for a launch's tensors; None where no bulk copy reads its pages."""
    can_copy = all(
        cache.numel() % layer.layout.head_dim == 0 and cache.data_ptr() % COPY_BYTES == 0
        for cache in (k_cache, v_cache)
    )
    if INTERPRET or not can_copy:
        return None
    return choose_kernel(layer, max_query_len, _in_layer(division_of(splits, q), layer))


def division_of(splits: PrefillSplits | None, q: torch.Tensor) -> Division:
    """Return how a launch is divided: programs with a queue copy their queries in bulk."""
    if splits is None:
        return "tiles"
    if splits.num_splits > 1:
        return "keys" if splits.counts is None else "merged"
    strides = [stride * q.element_size() for stride in q.stride()[:2]]
    is_aligned = all(number % COPY_BYTES == 0 for number in (q.data_ptr(), *strides))
    return "queue" if is_aligned else "tiles"


def check_splits(splits: PrefillSplits | None, q: torch.Tensor, deterministic: bool) -> None:
    """Raise unless ``splits`` is None, or not ``deterministic`` and of ``q``'s rows and heads."""
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
