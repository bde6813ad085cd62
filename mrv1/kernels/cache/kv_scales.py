"""The scales of a KV cache whose pages hold codes: where they are.

Scales are float32 in side tensors, one for K and one for V, with the same addresses. Element
address of the scale of token ``t`` of block ``b`` for head ``h``, by granularity (``formats``)::

    token    base[h] + b * block_stride[h] + t
    quarter  base[h] + b * block_stride[h] + t * 4 // block_size
    head     base[h]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch

from mrv1.kernels.cache.formats import FP8, QUARTERS, PageFormat, ScaleGranularity
from mrv1.kernels.cache.kv_layout import ALIGNMENT_BYTES, HeadRole, group_addresses


@dataclass(frozen=True, slots=True, kw_only=True)
class KVScales:
    """One layer's K and V scales; build with :meth:`per_token`, :meth:`head_groups`, ..."""

    page_format: PageFormat
    """How pages store values: the codes that the scales belong to, and the granularity."""
    k_scale: torch.Tensor
    """float32, contiguous, addressed flat; *written* by ``kv_cache_write`` unless per head."""
    v_scale: torch.Tensor
    """The same for values, in the same shape."""
    base: torch.Tensor
    """[kv_heads] int64, in elements."""
    block_stride: torch.Tensor
    """[kv_heads] int64, in elements; 0 if per head."""
    last_base: int
    """The largest of ``base`` (host fact)."""

    @property
    def granularity(self) -> ScaleGranularity | None:
        """The part of the cache that shares one scale."""
        return self.page_format.granularity

    @classmethod
    def build(
        cls,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        *,
        granularity: ScaleGranularity,
        base: Sequence[int],
        block_stride: Sequence[int],
        codes: PageFormat = FP8,
    ) -> KVScales:
        """Return scales with the given bases and block strides, in elements, one per KV head.

        ``codes``: the page format with these codes, of any granularity.

        Raises:
            ValueError: an unknown granularity, unequal lengths, a negative number, a stride of
                2**31 or more, or, unless per head, one that is not a multiple of 16 bytes.
        """
        if granularity not in get_args(ScaleGranularity):
            raise ValueError(
                f"granularity: expected one of {get_args(ScaleGranularity)}, got {granularity!r}"
            )
        if len(block_stride) != len(base):
            raise ValueError(
                f"block_stride: expected {len(base)} values like base, got {len(block_stride)}"
            )
        if max(block_stride, default=0) >= 2**31:  # 32 bits in kernels
            raise ValueError(f"block_stride: expected < 2**31, got {max(block_stride)} elements")
        multiple = ALIGNMENT_BYTES // torch.float32.itemsize
        for name, values in (("base", base), ("block_stride", block_stride)):
            for value in values:
                if value < 0 or (granularity != "head" and value % multiple):
                    raise ValueError(
                        f"{name}: expected a multiple of {ALIGNMENT_BYTES} bytes "
                        f"({multiple} elements), got {value} elements"
                    )
        return cls(
            page_format=codes.per(granularity), k_scale=k_scale, v_scale=v_scale,
            base=torch.tensor(list(base), dtype=torch.int64, device=k_scale.device),
            block_stride=torch.tensor(
                list(block_stride), dtype=torch.int64, device=k_scale.device
            ),
            last_base=max(base, default=0),
        )  # fmt: skip

    @classmethod
    def per_token(
        cls, k_scale: torch.Tensor, v_scale: torch.Tensor, codes: PageFormat = FP8
    ) -> KVScales:
        """Return scales ``[blocks, kv_heads, block_size]`` for HND, NHD or per-head-id pages.

        Raises:
            ValueError: not three-dimensional.
        """
        if k_scale.dim() != 3:
            raise ValueError(
                "k_scale: expected shape [blocks, kv_heads, block_size], "
                f"got {list(k_scale.shape)}"
            )
        _, num_kv_heads, per_block = k_scale.shape
        roles = [HeadRole()] * num_kv_heads
        return cls.head_groups(
            k_scale, v_scale, roles, [0], per_block, granularity="token", codes=codes
        )

    @classmethod
    def per_quarter(
        cls, k_scale: torch.Tensor, v_scale: torch.Tensor, codes: PageFormat = FP8
    ) -> KVScales:
        """Return scales ``[blocks, kv_heads, 4]`` for HND, NHD or per-head-id pages.

        Raises:
            ValueError: another shape.
        """
        if k_scale.dim() != 3 or k_scale.shape[2] != QUARTERS:
            raise ValueError(
                f"k_scale: expected shape [blocks, kv_heads, 4], got {list(k_scale.shape)}"
            )
        roles = [HeadRole()] * k_scale.shape[1]
        return cls.head_groups(
            k_scale, v_scale, roles, [0], QUARTERS, granularity="quarter", codes=codes
        )

    @classmethod
    def head_groups(
        cls,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        roles: Sequence[HeadRole],
        group_base: Sequence[int],
        block_size: int,
        *,
        granularity: ScaleGranularity = "token",
        codes: PageFormat = FP8,
    ) -> KVScales:
        """Return scales per token or quarter for ``KVLayout.head_groups``, in flat buffers.

        Group ``g`` starts at element ``group_base[g]`` and is ``[blocks of g, heads of g,
        block_size]``, or with ``quarter`` ``[blocks of g, heads of g, 4]``.

        Raises:
            ValueError: a head's group has no base, or granularity ``head``.
        """
        if granularity == "head":
            raise ValueError("granularity: expected 'token' or 'quarter', got 'head'")
        per_block = codes.per(granularity).scales_per_block(block_size)
        base, block_stride = group_addresses(roles, group_base, per_block)
        return cls.build(
            k_scale, v_scale, granularity=granularity, base=base, block_stride=block_stride,
            codes=codes,
        )  # fmt: skip

    @classmethod
    def per_head(
        cls, k_scale: torch.Tensor, v_scale: torch.Tensor, codes: PageFormat = FP8
    ) -> KVScales:
        """Return static scales ``[kv_heads]`` for pages of any layout."""
        none = [0] * k_scale.numel()
        return cls.build(
            k_scale, v_scale, granularity="head", base=range(len(none)), block_stride=none,
            codes=codes,
        )  # fmt: skip


def format_of(dtype: torch.dtype, scales: KVScales | None) -> PageFormat:
    """Return the format of pages with these scales; without scales, values of ``dtype``."""
    return PageFormat.plain(dtype) if scales is None else scales.page_format
