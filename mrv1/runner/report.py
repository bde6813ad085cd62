"""What a runner reports: the seconds of its start, and the memory of its KV cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypedDict

from mrv1.device import KernelPath
from mrv1.headwise import HeadGroups
from mrv1.runner.kv_cache import KVCache, StreamingDemand

PATHS: dict[KernelPath, str] = {
    "triton": "Triton kernels",
    "interpreter": "Triton kernels in the CPU interpreter",
    "reference": "CPU reference (torch)",
}
"""Name of each kernel path for users."""


class KVGroupReport(TypedDict):
    """KV heads that share blocks."""

    window: int
    """Newest tokens of a context that are kept; -1 = all."""
    sink: int
    """First tokens of a context that are kept in addition to the window."""
    num_heads: int
    """Heads of all layers together."""
    num_blocks: int
    block_bytes: int
    """Bytes of a block and its scales, over all heads of the group."""
    total_bytes: int
    request_blocks: int | None
    """Most blocks of a decoding request of any length; None = one per ``block_size`` tokens."""


class KVReport(TypedDict):
    """The KV cache's sizes; of several ranks together: a head counts on each that has it."""

    dtype: str
    kv_scale: str | None
    """The part of the cache that shares one scale; None = a cache without scales."""
    block_size: int
    num_blocks: int
    """Blocks of the first group, which has the full heads, if there are any."""
    token_bytes: int
    """Bytes of a token and its scales over all layers, while every head keeps the token."""
    block_bytes: int
    """Bytes of a block and its scales over all layers, while every head keeps the block."""
    scale_bytes: int
    """Bytes of all scales, which ``total_bytes`` includes."""
    total_bytes: int
    """Bytes of all groups, calculated from the sizes."""
    allocated_bytes: int
    """Bytes of allocated memory: the same number, but only static scales while it sleeps."""
    groups: list[KVGroupReport]
    feature_bytes: int
    """Bytes of the feature buffer, not in ``total_bytes``; 0 = none yet, or the runner sleeps."""


class KVUsage(KVReport):
    """The KV cache's sizes, and how much of it requests use now."""

    held_blocks: list[int]
    """Blocks of each group that are in use by requests."""
    held_bytes: int
    peak_held_bytes: int
    """Sum over the groups of the most bytes that requests have used of each."""
    held_feature_bytes: int
    """Bytes of the feature buffer that running requests hold."""
    cached_feature_bytes: int
    """Bytes of features that no running request holds, kept for requests that bring them again."""
    free_share: float
    """Share of bytes that could be allocated now: free blocks and cached ones not in use."""


class StartClock:
    """The seconds of each part of a start, from the creation of the clock on."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """End a part; the next begins."""
        now = time.perf_counter()
        self.seconds[part], self._last = now - self._last, now

    def describe(self) -> str:
        """Return one line: the seconds of the start, and of its parts."""
        shown = {part: each for part, each in self.seconds.items() if each >= 0.05}
        parts = ", ".join(f"{part} {each:.1f} s" for part, each in shown.items())
        total = f"started in {sum(self.seconds.values()):.1f} s"
        return f"{total}: {parts}" if parts else total


def report_of(
    cache: KVCache,
    demand: StreamingDemand,
    feature_bytes: int,
    ranks: Sequence[HeadGroups] | None = None,
) -> KVReport:
    """Return the sizes in bytes of a cache, and of the buffer for features.

    ``ranks``: the head groups of each rank, to report the sum over caches that are like this one
    but for them; None = this cache alone.
    """
    spec, num_blocks = cache.spec, cache.num_blocks
    ranks = ranks or (cache.groups,)
    groups = []
    for index, (group, count) in enumerate(zip(cache.groups.groups, num_blocks, strict=True)):
        heads = [rank.groups[index].num_heads for rank in ranks]
        block_bytes = sum(map(spec.group_bytes, heads))
        is_full = group.keeps.is_full
        groups.append(
            KVGroupReport(
                window=group.keeps.window,
                sink=group.keeps.sink,
                num_heads=sum(map(sum, heads)),
                num_blocks=count,
                block_bytes=block_bytes,
                total_bytes=count * block_bytes,
                request_blocks=None if is_full else demand.request_blocks(group),
            )
        )
    total_bytes = sum(spec.nbytes(rank, num_blocks) for rank in ranks)
    is_awake = cache.allocated_bytes == cache.nbytes
    return KVReport(
        dtype=spec.page_format.element,
        kv_scale=spec.page_format.granularity,
        block_size=spec.block_size,
        num_blocks=num_blocks[0],
        token_bytes=spec.token_bytes * len(ranks),
        block_bytes=spec.block_bytes * len(ranks),
        scale_bytes=sum(spec.scale_bytes(rank, num_blocks) for rank in ranks),
        total_bytes=total_bytes,
        allocated_bytes=total_bytes if is_awake else cache.allocated_bytes * len(ranks),
        groups=groups,
        feature_bytes=feature_bytes * len(ranks),
    )
