"""The paged KV cache: one allocation, a view per layer, and the count of its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mrv1.errors import CapacityError
from mrv1.kernels.kv_layout import KVLayout
from mrv1.models.batch import LayerCache

CPU_KV_BYTES = 1 << 30
"""Most a CPU run takes for its KV cache unless ``num_kv_blocks`` says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """Shape of a cache; the only source of its bytes."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    """Tokens per block."""
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers and heads, K and V."""
        elements = self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim
        return elements * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers and heads, K and V."""
        return self.block_bytes // self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)


class KVCache:
    """``[layers, 2, blocks, kv_heads, block_size, head_dim]`` on the device, uninitialised.

    Every page is written before it is read: kernels mask what lies past a request's length.
    """

    def __init__(
        self,
        spec: CacheSpec,
        num_blocks: int,
        layer_windows: Sequence[int],
        device: torch.device,
    ) -> None:
        """Allocate.

        Raises:
            CapacityError: fewer than one block fits, or the device has no room.
        """
        if num_blocks < 1:
            raise CapacityError(
                f"KV cache: no block of {spec.block_bytes} bytes fits; raise "
                "gpu_memory_utilization or num_kv_blocks"
            )
        self.spec = spec
        self.num_blocks = num_blocks
        shape = (
            spec.num_layers, 2, num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim,
        )  # fmt: skip
        try:
            self._buffer = torch.empty(shape, dtype=spec.dtype, device=device)
        except RuntimeError as error:  # a CPU has no OutOfMemoryError of its own
            raise CapacityError(
                f"KV cache: {num_blocks} blocks of {spec.block_bytes} bytes do not fit on "
                f"{device}; lower num_kv_blocks or gpu_memory_utilization"
            ) from error
        layouts = {
            window: KVLayout.hnd(
                spec.num_kv_heads, spec.block_size, spec.head_dim, window=window, device=device
            )
            for window in set(layer_windows)
        }
        self.layers = [
            LayerCache(k=self._buffer[layer, 0], v=self._buffer[layer, 1], layout=layouts[window])
            for layer, window in enumerate(layer_windows)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.num_blocks * self.spec.block_bytes
