"""The arguments of a prefill attention that the launches of its Hopper kernels share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels.attention.prefill.choice import WARP_GROUP_ROWS
from mrv1.kernels.cache.kv_layout import KVLayout

Descriptor = TypeVar("Descriptor")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCall:
    """The checked arguments of one ``paged_prefill_attention``."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    layout: KVLayout
    softmax_scale: float
    soft_cap: float | None
    sinks: torch.Tensor | None
    full_only: bool  # whether the launch computes full heads alone
    out: torch.Tensor
    lse: torch.Tensor | None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.layout.num_kv_heads

    @property
    def heads(self) -> tuple[torch.Tensor | None, int]:
        """The launch's KV heads, None if they are all of the layout's, and their number."""
        if not self.full_only:
            return None, self.layout.num_kv_heads
        return self.layout.full_heads, len(self.layout.full_heads)

    @property
    def has_window(self) -> bool:
        """Whether some head of the launch has a window."""
        return self.layout.has_window and not self.full_only

    @property
    def num_pairs(self) -> int:
        """Tiles of the batch, with room for one more of each request, times heads."""
        num_tiles = self.q.shape[0] // (WARP_GROUP_ROWS // self.group) + self.seq_lens.shape[0]
        return num_tiles * self.heads[1]

    def outputs(self) -> tuple[object, ...]:
        """Return a kernel's first arguments, for output and log-sum-exps."""
        return *with_strides(self.out), *with_strides(self.lse)

    def caches(
        self, describe: Callable[[torch.Tensor, int, int], tuple[Descriptor, Descriptor | None]]
    ) -> tuple[Descriptor | None, ...]:
        """Return descriptors of keys and of values, each of both parts of the dimensions."""
        shape = self.layout.block_size, self.layout.head_dim
        return *describe(self.k_cache, *shape), *describe(self.v_cache, *shape)

    def batch(self) -> tuple[object, ...]:
        """Return a kernel's arguments from the block table to the logit sinks."""
        layout = self.layout
        windows = (layout.window, layout.sink) if self.has_window else (None, None)
        rings = layout.ring_blocks if self.has_window and layout.has_ring else None
        return (
            *(self.block_table, self.block_table.stride(0), self.query_start_loc),
            *(self.seq_lens, self.seq_lens.shape[0], *self.heads, layout.head_base),
            *(layout.block_stride, layout.table_offset, *windows, rings),
            *(self.softmax_scale, self.soft_cap, self.sinks),
        )

    def constexprs(self, tile: tuple[int, int]) -> dict[str, int]:
        """Return the constants of a kernel with so many keys in a tile, and tiles in memory."""
        return {
            "DIM": self.layout.head_dim, "GROUP": self.group, "BLOCK_SIZE": self.layout.block_size,
            "TILE_TOKENS": tile[0], "STAGES": tile[1],
        }  # fmt: skip
