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
    out: torch.Tensor
    lse: torch.Tensor | None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.layout.num_kv_heads

    @property
    def heads(self) -> tuple[torch.Tensor | None, int]:
        """The layout's full heads, None if all heads are full, and their number."""
        if not self.layout.has_window:
            return None, self.layout.num_kv_heads
        return self.layout.full_heads, len(self.layout.full_heads)

    @property
    def num_pairs(self) -> int:
        """Tiles of the batch, with room for one more of each request, times heads."""
        num_tiles = self.q.shape[0] // (WARP_GROUP_ROWS // self.group) + self.seq_lens.shape[0]
        return num_tiles * self.heads[1]

    def outputs(self) -> tuple[object, ...]:
        """Return a kernel's first arguments, for output and log-sum-exps."""
        return *with_strides(self.out), *with_strides(self.lse)

    def caches(
        self, describe: Callable[[torch.Tensor, int, int], Descriptor]
    ) -> tuple[Descriptor, Descriptor]:
        """Return descriptors of keys and values."""
        shape = self.layout.block_size, self.layout.head_dim
        return describe(self.k_cache, *shape), describe(self.v_cache, *shape)

    def batch(self) -> tuple[object, ...]:
        """Return a kernel's arguments from the block table to the softmax scale."""
        return (
            *(self.block_table, self.block_table.stride(0), self.query_start_loc),
            *(self.seq_lens, self.seq_lens.shape[0], *self.heads, self.layout.head_base),
            *(self.layout.block_stride, self.layout.table_offset, self.softmax_scale),
        )

    def constexprs(self, tile: tuple[int, int]) -> dict[str, int]:
        """Return the constants of a kernel with so many keys in a tile, and tiles in memory."""
        return {
            "DIM": self.layout.head_dim, "GROUP": self.group, "BLOCK_SIZE": self.layout.block_size,
            "TILE_TOKENS": tile[0], "STAGES": tile[1],
        }  # fmt: skip
