"""The pages of a KV cache tensor of vLLM, as mrv1's kernels address them.

vLLM's ``[blocks, kv_heads, block_size, content]`` leaves the bytes of a block and head to a
backend. mrv1's kernels read whole pages: ``[block_size, head_size]`` of K, then of V, and for
codes ``[block_size]`` float32 scales of K, then of V. ``content`` is ``2 * head_size`` elements,
and for the formats of ``CODES`` twice the bytes of a head's codes and of a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from mrv1.kernels import HeadRole, KVLayout, KVScales, PageFormat
from mrv1.kernels.cache.formats import FP8

CODES = {"fp8_per_token_head": FP8}
"""Page formats by the names that vLLM gives to a scale for each token and head."""

SCALE_BYTES = torch.float32.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """One layer's cache, in the form that the kernels take."""

    k: torch.Tensor
    """Flat: from the layer's first K page on."""
    v: torch.Tensor
    """Flat, of the same size: from the layer's first V page on."""
    layout: KVLayout
    """Shared by all layers of the same shape whose heads see the same."""
    scales: KVScales | None
    """The scales of codes; None = values as they are."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What differs between layers of one layout."""
        if self.scales is None:
            return self.k, self.v
        return self.k, self.v, self.scales.k_scale, self.scales.v_scale


def content_size(head_size: int, codes: PageFormat | None) -> int:
    """Return a token's and head's K, V and their scales: in elements, or with codes in bytes."""
    return 2 * (head_size if codes is None else codes.vector_bytes(head_size) + SCALE_BYTES)


def pages_of(
    kv_cache: torch.Tensor, head_size: int, role: HeadRole, codes: PageFormat | None
) -> Pages:
    """Return views of a layer's KV cache, without a copy.

    ``kv_cache`` is ``[blocks, kv_heads, block_size, content]`` with any block and head stride;
    ``codes``, uint8, have a scale per token, None = no codes. ValueError: another shape, or gaps
    (NHD).
    """
    content = content_size(head_size, codes)
    if kv_cache.dim() != 4 or kv_cache.shape[3] != content:
        raise ValueError(
            f"kv_cache: expected shape [blocks, kv_heads, block_size, {content}], "
            f"got {list(kv_cache.shape)}"
        )
    num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    block_stride, head_stride, *inner = kv_cache.stride()
    if inner != [content, 1]:
        raise ValueError(
            f"kv_cache: expected pages without gaps (strides {[content, 1]} in a page, vLLM's HND "
            f"layouts), got strides {list(kv_cache.stride())}"
        )
    page = block_size * head_size
    end = (num_blocks - 1) * block_stride + (num_kv_heads - 1) * head_stride + block_size * content
    flat = kv_cache.as_strided((end,), (1,))
    scales = None
    if codes is not None:
        floats = flat.view(torch.float32)
        scales = KVScales.build(
            floats[:-block_size],
            floats[block_size:],
            granularity="token",
            base=[(h * head_stride + 2 * page) // SCALE_BYTES for h in range(num_kv_heads)],
            block_stride=[block_stride // SCALE_BYTES] * num_kv_heads,
            codes=codes,
        )
    layout = _layout(
        num_kv_heads, block_size, head_size, head_stride, block_stride, role, kv_cache.device
    )
    return Pages(k=flat[:-page], v=flat[page:], layout=layout, scales=scales)


@lru_cache(maxsize=64)
def _layout(
    num_kv_heads: int,
    block_size: int,
    head_size: int,
    head_stride: int,
    block_stride: int,
    role: HeadRole,
    device: torch.device,
) -> KVLayout:
    return KVLayout.build(
        block_size=block_size,
        head_dim=head_size,
        token_stride=head_size,
        head_base=[head * head_stride for head in range(num_kv_heads)],
        block_stride=[block_stride] * num_kv_heads,
        roles=[role] * num_kv_heads,
        device=device,
    )
