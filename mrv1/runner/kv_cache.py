"""The paged KV cache: pages and scales, a view of them per layer, and the count of their bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mrv1.errors import CapacityError
from mrv1.headwise import HeadPolicy
from mrv1.kernels.kv_layout import KVLayout
from mrv1.kernels.kv_scales import KVScales, ScaleGranularity, scales_per_block
from mrv1.models.batch import LayerCache

CPU_KV_BYTES = 1 << 30
"""Most a CPU run takes for its KV cache unless ``num_kv_blocks`` says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """Shapes and dtypes of a cache's pages and scales; the only source of its bytes."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    """Tokens per block."""
    head_dim: int
    dtype: torch.dtype
    """Of the pages; float8_e4m3fn beside scales."""
    granularity: ScaleGranularity | None = None
    """What has a float32 scale of its own; None = a cache without scales."""

    def pages_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return ``[layers, 2, blocks, kv_heads, block_size, head_dim]``: keys, then values."""
        return (
            self.num_layers, 2, num_blocks, self.num_kv_heads, self.block_size, self.head_dim,
        )  # fmt: skip

    def scales_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return ``[layers, 2, ...]``, then what ``KVScales`` takes; ``[0]`` without scales."""
        match self.granularity:
            case None:
                return (0,)
            case "head":
                return (self.num_layers, 2, self.num_kv_heads)
            case "token" | "quarter" as granularity:
                per_block = scales_per_block(granularity, self.block_size)
                return (*self.pages_shape(num_blocks)[:-2], per_block)

    def scale_bytes(self, num_blocks: int) -> int:
        """Return the bytes of all scales of a cache of ``num_blocks`` blocks."""
        return math.prod(self.scales_shape(num_blocks)) * torch.float32.itemsize

    def nbytes(self, num_blocks: int) -> int:
        """Return the bytes of a cache of ``num_blocks`` blocks, pages and scales."""
        pages = math.prod(self.pages_shape(num_blocks)) * self.dtype.itemsize
        return pages + self.scale_bytes(num_blocks)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block and its scales over all layers and heads, K and V."""
        return self.nbytes(1) - self.nbytes(0)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token and its share of the scales over all layers and heads, K and V."""
        return self.block_bytes // self.block_size

    def blocks_in(self, num_bytes: int) -> int:
        """Return how many blocks a cache of at most ``num_bytes`` has; none if negative."""
        return max(0, num_bytes - self.nbytes(0)) // self.block_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)


def layer_layouts(spec: CacheSpec, policy: HeadPolicy, device: torch.device) -> list[KVLayout]:
    """Return each layer's layout on ``device``; layers whose heads see the same share theirs."""
    layouts = {
        policy.heads[layer]: KVLayout.hnd(
            spec.num_kv_heads,
            spec.block_size,
            spec.head_dim,
            roles=policy.roles(layer),
            device=device,
        )
        for layer in range(spec.num_layers)
    }
    return [layouts[heads] for heads in policy.heads]


class KVCache:
    """The pages and scales of a spec on the device, uninitialised but for static scales.

    Every page is written before it is read: kernels mask what lies past a request's length.
    """

    def __init__(
        self,
        spec: CacheSpec,
        num_blocks: int,
        layouts: Sequence[KVLayout],
        device: torch.device,
        head_scales: torch.Tensor | None = None,
    ) -> None:
        """Allocate.

        Args:
            spec: the cache's shape.
            num_blocks: blocks of every layer.
            layouts: of each layer, as ``layer_layouts`` returns them.
            device: where the cache lives.
            head_scales: ``[layers, 2, kv_heads]`` float32, the static scales that granularity
                ``head`` needs; None with any other.

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
        try:
            self._pages = torch.empty(
                spec.pages_shape(num_blocks), dtype=spec.dtype, device=device
            )
            self._scales = torch.empty(
                spec.scales_shape(num_blocks), dtype=torch.float32, device=device
            )
        except RuntimeError as error:  # a CPU has no OutOfMemoryError of its own
            raise CapacityError(
                f"KV cache: {num_blocks} blocks of {spec.block_bytes} bytes do not fit on "
                f"{device}; lower num_kv_blocks or gpu_memory_utilization"
            ) from error
        if head_scales is not None:
            self._scales.copy_(head_scales)
        self.layers = [
            LayerCache(
                k=self._pages[layer, 0],
                v=self._pages[layer, 1],
                layout=layout,
                scales=self._layer_scales(layer),
            )
            for layer, layout in enumerate(layouts)
        ]

    def _layer_scales(self, layer: int) -> KVScales | None:
        match self.spec.granularity:
            case None:
                return None
            case "head":
                return KVScales.per_head(*self._scales[layer])
            case "token":
                return KVScales.per_token(*self._scales[layer])
            case "quarter":
                return KVScales.per_quarter(*self._scales[layer])

    @property
    def nbytes(self) -> int:
        """Bytes of all pages and scales."""
        return self.spec.nbytes(self.num_blocks)
