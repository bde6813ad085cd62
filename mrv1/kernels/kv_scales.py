"""The scales of an fp8 KV cache: which there are, and where each lies.

An fp8 cache holds e4m3 codes; the value of a code is ``code * scale``. Scales are float32 in side
tensors, one for K and one for V, addressed alike. Element address of the scale of token ``t`` of
block ``b`` for KV head ``h``::

    token   base[h] + b * block_stride[h] + t     one per (token, head), written with the token
    head    base[h]                               one per head, static, given by the caller
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from mrv1.kernels.kv_layout import ALIGNMENT_BYTES, HeadRole

ScaleGranularity = Literal["token", "head"]

LARGEST_E4M3 = 448.0
"""Largest finite e4m3 value: a vector's largest element is stored as this."""

SMALLEST_SCALE = 1e-12
"""Lower bound of a computed scale, so that a vector of zeros has one to divide by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVScales:
    """One layer's K and V scales; build with :meth:`per_token`, :meth:`head_groups`, ..."""

    granularity: ScaleGranularity
    k_scale: torch.Tensor
    """float32, contiguous, addressed flat; *written* by ``kv_cache_write`` if per token."""
    v_scale: torch.Tensor
    """Likewise for values, of the same shape."""
    base: torch.Tensor
    """[kv_heads] int64, elements."""
    block_stride: torch.Tensor
    """[kv_heads] int64, elements; 0 if per head."""

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
        """Return scales addressed by plain numbers, elements per KV head.

        Raises:
            ValueError: an unknown granularity, unequal lengths, or for ``token`` a base or stride
                that is not a multiple of 16 bytes.
        """
        if granularity not in ("token", "head"):
            raise ValueError(f"granularity: expected 'token' or 'head', got {granularity!r}")
        if len(block_stride) != len(base):
            raise ValueError(
                f"block_stride: expected {len(base)} values like base, got {len(block_stride)}"
            )
        multiple = ALIGNMENT_BYTES // torch.float32.itemsize
        for name, values in (("base", base), ("block_stride", block_stride)):
            for value in values:
                if value < 0 or (granularity == "token" and value % multiple):
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
        )

    @classmethod
    def per_token(cls, k_scale: torch.Tensor, v_scale: torch.Tensor) -> KVScales:
        """Return scales ``[blocks, kv_heads, block_size]``, beside HND, NHD or per-head-id pages.

        Raises:
            ValueError: not three-dimensional.
        """
        if k_scale.dim() != 3:
            raise ValueError(
                "k_scale: expected shape [blocks, kv_heads, block_size], "
                f"got {list(k_scale.shape)}"
            )
        _, num_kv_heads, block_size = k_scale.shape
        return cls.build(
            k_scale,
            v_scale,
            granularity="token",
            base=[head * block_size for head in range(num_kv_heads)],
            block_stride=[num_kv_heads * block_size] * num_kv_heads,
        )

    @classmethod
    def head_groups(
        cls,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        roles: Sequence[HeadRole],
        group_base: Sequence[int],
        block_size: int,
    ) -> KVScales:
        """Return token scales beside ``KVLayout.head_groups``, in flat buffers.

        Group ``g`` starts at element ``group_base[g]`` and is ``[blocks of g, heads of g,
        block_size]``.

        Raises:
            ValueError: a head's group has no base.
        """
        size = [sum(role.group == g for role in roles) for g in range(len(group_base))]
        seen = [0] * len(group_base)
        base, block_stride = [], []
        for head, role in enumerate(roles):
            if role.group >= len(group_base):
                raise ValueError(
                    f"group of head {head}: expected < {len(group_base)}, got {role.group}"
                )
            base.append(group_base[role.group] + seen[role.group] * block_size)
            block_stride.append(size[role.group] * block_size)
            seen[role.group] += 1
        return cls.build(
            k_scale, v_scale, granularity="token", base=base, block_stride=block_stride
        )

    @classmethod
    def per_head(cls, k_scale: torch.Tensor, v_scale: torch.Tensor) -> KVScales:
        """Return static scales ``[kv_heads]``, beside pages of any layout."""
        heads = range(k_scale.numel())
        return cls.build(
            k_scale, v_scale, granularity="head", base=heads, block_stride=[0] * len(heads)
        )
