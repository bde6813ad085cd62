"""The scales of an fp8 KV cache: their granularities and their addresses.

An fp8 cache holds e4m3 codes; the value of a code is ``code * scale``. Scales are float32 in side
tensors, one for K and one for V, with the same addresses. Element address of the scale of token
``t`` of block ``b`` for KV head ``h``::

    token    base[h] + b * block_stride[h] + t
    quarter  base[h] + b * block_stride[h] + t * 4 // block_size
    head     base[h]

``token``: one per (token, head), written with the token. ``quarter``: one per head and quarter of
a block; the scale grows with the largest value in the quarter, so codes depend on the order of
writes (see ``kv_cache_write``). ``head``: one per head, static, given by the caller.

Source: the shape of ``quarter`` scales, ``[blocks, kv_heads, 4]``, is FastDeploy's (PR 7949);
their meaning is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from mrv1.kernels.cache.kv_layout import ALIGNMENT_BYTES, HeadRole

ScaleGranularity = Literal["token", "quarter", "head"]

QUARTERS = 4
"""Scales per block and head with granularity ``quarter``."""

LARGEST_E4M3 = 448.0
"""Largest finite e4m3 value: a vector's largest element is stored as this value."""

SMALLEST_SCALE = 1e-12
"""Lower bound of a computed scale, so that a vector of zeros is not divided by zero."""


def scales_per_block(granularity: ScaleGranularity, block_size: int) -> int:
    """Return how many scales a block has per head; 0 = blocks have no scales of their own."""
    return {"token": block_size, "quarter": QUARTERS, "head": 0}[granularity]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVScales:
    """One layer's K and V scales; build with :meth:`per_token`, :meth:`head_groups`, ..."""

    granularity: ScaleGranularity
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

    @classmethod
    def build(
        cls,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        *,
        granularity: ScaleGranularity,
        base: Sequence[int],
        block_stride: Sequence[int],
    ) -> KVScales:
        """Return scales with the given bases and block strides, in elements, one per KV head.

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
            granularity=granularity,
            k_scale=k_scale,
            v_scale=v_scale,
            base=torch.tensor(list(base), dtype=torch.int64, device=k_scale.device),
            block_stride=torch.tensor(
                list(block_stride), dtype=torch.int64, device=k_scale.device
            ),
            last_base=max(base, default=0),
        )

    @classmethod
    def per_token(cls, k_scale: torch.Tensor, v_scale: torch.Tensor) -> KVScales:
        """Return scales ``[blocks, kv_heads, block_size]`` for HND, NHD or per-head-id pages.

        Raises:
            ValueError: not three-dimensional.
        """
        if k_scale.dim() != 3:
            raise ValueError(
                "k_scale: expected shape [blocks, kv_heads, block_size], "
                f"got {list(k_scale.shape)}"
            )
        return cls._side_by_side(k_scale, v_scale, "token")

    @classmethod
    def per_quarter(cls, k_scale: torch.Tensor, v_scale: torch.Tensor) -> KVScales:
        """Return scales ``[blocks, kv_heads, 4]`` for HND, NHD or per-head-id pages.

        Raises:
            ValueError: another shape.
        """
        if k_scale.dim() != 3 or k_scale.shape[2] != QUARTERS:
            raise ValueError(
                f"k_scale: expected shape [blocks, kv_heads, 4], got {list(k_scale.shape)}"
            )
        return cls._side_by_side(k_scale, v_scale, "quarter")

    @classmethod
    def _side_by_side(
        cls, k_scale: torch.Tensor, v_scale: torch.Tensor, granularity: ScaleGranularity
    ) -> KVScales:
        """Return scales ``[blocks, kv_heads, scales of a block]``."""
        _, num_kv_heads, per_block = k_scale.shape
        return cls.build(
            k_scale,
            v_scale,
            granularity=granularity,
            base=[head * per_block for head in range(num_kv_heads)],
            block_stride=[num_kv_heads * per_block] * num_kv_heads,
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
    ) -> KVScales:
        """Return scales per token or quarter for ``KVLayout.head_groups``, in flat buffers.

        Group ``g`` starts at element ``group_base[g]`` and is ``[blocks of g, heads of g,
        block_size]``, or with ``quarter`` ``[blocks of g, heads of g, 4]``.

        Raises:
            ValueError: a head's group has no base, or granularity ``head``.
        """
        if granularity == "head":
            raise ValueError("granularity: expected 'token' or 'quarter', got 'head'")
        per_block = scales_per_block(granularity, block_size)
        size = [sum(role.group == g for role in roles) for g in range(len(group_base))]
        seen = [0] * len(group_base)
        base, block_stride = [], []
        for head, role in enumerate(roles):
            if role.group >= len(group_base):
                raise ValueError(
                    f"group of head {head}: expected < {len(group_base)}, got {role.group}"
                )
            base.append(group_base[role.group] + seen[role.group] * per_block)
            block_stride.append(size[role.group] * per_block)
            seen[role.group] += 1
        return cls.build(
            k_scale, v_scale, granularity=granularity, base=base, block_stride=block_stride
        )

    @classmethod
    def per_head(cls, k_scale: torch.Tensor, v_scale: torch.Tensor) -> KVScales:
        """Return static scales ``[kv_heads]`` for pages of any layout."""
        heads = range(k_scale.numel())
        return cls.build(
            k_scale, v_scale, granularity="head", base=heads, block_stride=[0] * len(heads)
        )
