"""What the KV cache takes, by head group."""

from __future__ import annotations

from typing import TypedDict

from mrv1.runner.kv_cache import KVCache, StreamingDemand


class KVGroupReport(TypedDict):
    """KV heads that share blocks."""

    window: int
    """Tokens that are kept of a context, up to the newest; -1 = all."""
    sink: int
    """Leading tokens that are kept beside a window."""
    num_heads: int
    """Heads of all layers together."""
    num_blocks: int
    block_bytes: int
    """Of a block and its scales, over all of its heads."""
    total_bytes: int
    request_blocks: int | None
    """Most blocks that a decoding request holds, however long it is; None = one for every
    ``block_size`` tokens."""


class KVReport(TypedDict):
    """Where the KV cache's bytes are."""

    dtype: str
    kv_scale: str | None
    """What has a scale of its own; None = a cache without scales."""
    block_size: int
    num_blocks: int
    """Of the first group: heads that see everything, if there are any."""
    token_bytes: int
    """Of a token and its scales over all layers, where no head has left it behind."""
    block_bytes: int
    """Of a block and its scales over all layers, likewise."""
    scale_bytes: int
    """Of all scales, counted in ``total_bytes`` too."""
    total_bytes: int
    """Of all groups, by arithmetic."""
    allocated_bytes: int
    """Of the tensors: the same."""
    groups: list[KVGroupReport]


class KVUsage(KVReport):
    """Where they are, and what requests make of them now."""

    held_blocks: list[int]
    """Of each group, blocks that requests hold."""
    held_bytes: int
    peak_held_bytes: int
    """The sum of what requests have held most of each group."""
    free_share: float
    """Share of all bytes that requests could have now: free blocks, and those that only the prefix
    cache keeps."""


def report_of(cache: KVCache, demand: StreamingDemand) -> KVReport:
    """Return a cache's sizes in bytes."""
    spec = cache.spec
    groups = []
    for group, num_blocks in zip(cache.groups.groups, cache.num_blocks, strict=True):
        block_bytes = spec.group_bytes(group.num_heads)
        is_full = group.keeps.is_full
        groups.append(
            KVGroupReport(
                window=group.keeps.window,
                sink=group.keeps.sink,
                num_heads=sum(group.num_heads),
                num_blocks=num_blocks,
                block_bytes=block_bytes,
                total_bytes=num_blocks * block_bytes,
                request_blocks=None if is_full else demand.request_blocks(group, spec.block_size),
            )
        )
    return KVReport(
        dtype=str(spec.dtype).removeprefix("torch."),
        kv_scale=spec.granularity,
        block_size=spec.block_size,
        num_blocks=cache.num_blocks[0],
        token_bytes=spec.token_bytes,
        block_bytes=spec.block_bytes,
        scale_bytes=spec.scale_bytes(cache.groups, cache.num_blocks),
        total_bytes=cache.nbytes,
        allocated_bytes=cache.allocated_bytes,
        groups=groups,
    )
