"""The argument checks of the paged cache's ops and the rule of table columns, without triton.

Launchers and oracles share them. A check raises TypeError for a wrong type or dtype, else
ValueError.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from mrv1.kernels._base.checks import (
    FLOAT_DTYPES,
    check_mrope_section,
    check_rotary_dim,
    check_tensor,
)
from mrv1.kernels.cache.formats import FORMATS
from mrv1.kernels.cache.kv_layout import ALIGNMENT_BYTES, KVLayout
from mrv1.kernels.cache.kv_scales import KVScales

MIN_HEAD_DIM = 16
MAX_HEAD_DIM = 256

CODE_DTYPES = tuple({each.dtype for each in FORMATS.values()} - {torch.uint8})
"""Dtypes of caches that need scales. Bytes may be codes whose scales the caller moves."""
PAGE_DTYPES = (*FLOAT_DTYPES, *CODE_DTYPES, torch.uint8)
"""Dtypes of a cache whose pages are moved without reading their values."""


def check_head_dim(layout: KVLayout) -> None:
    """Raise unless the kernels have tiles for the layout's head dimension."""
    dim = layout.head_dim
    if dim % MIN_HEAD_DIM or not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM:
        raise ValueError(f"layout.head_dim: expected a multiple of 16 from 16 to 256, got {dim}")


def check_caches(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    layout: KVLayout,
    like: torch.Tensor,
    scales: KVScales | None,
) -> None:
    """Raise unless the K and V caches fit the layout, the scales and the tensor ``like``.

    ``like`` gives the device and, without ``scales``, the dtype.
    """
    if scales is None and getattr(k_cache, "dtype", None) in CODE_DTYPES:
        raise TypeError(f"scales: expected KVScales for a {k_cache.dtype} k_cache, got None")
    if scales is not None and not isinstance(scales, KVScales):
        raise TypeError(f"scales: expected KVScales or None, got {type(scales).__name__}")
    dtype = (like.dtype,) if scales is None else (scales.page_format.dtype, torch.uint8)
    check_tensor("k_cache", k_cache, dtype=dtype, device=like.device, contiguous=True)
    check_tensor("v_cache", v_cache, dtype=dtype, device=like.device, contiguous=True)
    if v_cache.numel() != k_cache.numel():
        raise ValueError(
            f"v_cache: expected {k_cache.numel()} elements like k_cache, got {v_cache.numel()}"
        )
    if layout.head_base.device != like.device:
        raise ValueError(f"layout: expected device {like.device}, got {layout.head_base.device}")
    if scales is not None:
        _check_scales(scales, layout, k_cache)
    packed = 1 if scales is None else scales.page_format.codes_per_element
    shapes = [(*page[:2], page[2] // packed) for page in layout.page_shapes]
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        shape = tuple(cache.shape)
        if len(shape) == 4 and shapes and shape[1:] not in shapes:
            expected = " or ".join(f"[blocks, {', '.join(map(str, page))}]" for page in shapes)
            raise ValueError(f"{name}: expected shape {expected} by the layout, got {list(shape)}")
    if 0 < k_cache.numel() < layout.page_end // packed:
        raise ValueError(
            f"layout: expected pages within the {k_cache.numel()} elements of k_cache, got a page "
            f"of block 0 that ends at {layout.page_end // packed}"
        )


def _check_scales(scales: KVScales, layout: KVLayout, k_cache: torch.Tensor) -> None:
    codes = scales.page_format
    multiple = ALIGNMENT_BYTES * codes.codes_per_element // codes.dtype.itemsize
    if layout.address_unit % multiple:
        raise ValueError(
            f"layout: expected head_dim, bases and strides that are multiples of {multiple} "
            f"elements for a cache of {codes.name}, got a multiple of {layout.address_unit}"
        )
    heads, device = layout.num_kv_heads, k_cache.device
    shape: tuple[int | None, ...] = (None,)  # flat
    per_block = scales.page_format.scales_per_block(layout.block_size)
    if scales.granularity == "head":
        shape = (heads,)
    elif scales.k_scale.dim() > 1:
        num_blocks = k_cache.shape[0] if k_cache.dim() == 4 else None
        shape = (num_blocks, heads, per_block)
    check = partial(check_tensor, device=device, contiguous=True)
    check("scales.k_scale", scales.k_scale, shape=shape, dtype=torch.float32)
    check("scales.v_scale", scales.v_scale, shape=scales.k_scale.shape, dtype=torch.float32)
    end = scales.last_base + max(1, per_block)
    if 0 < scales.k_scale.numel() < end:
        raise ValueError(
            f"scales: expected block 0's scales within the {scales.k_scale.numel()} elements of "
            f"k_scale, got scales that end at {end}"
        )
    check("scales.base", scales.base, shape=(heads,), dtype=torch.int64)
    check("scales.block_stride", scales.block_stride, shape=(heads,), dtype=torch.int64)


def check_cache_write(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: KVLayout,
    dtypes: tuple[torch.dtype, ...],
    scales: KVScales | None,
) -> None:
    """Raise unless the arguments of ``kv_cache_write`` fit together."""
    shape = (None, layout.num_kv_heads, layout.head_dim)
    check_tensor("key", key, shape=shape, dtype=dtypes, unit_last_stride=True)
    check = partial(check_tensor, device=key.device)
    check("value", value, shape=key.shape, dtype=key.dtype, unit_last_stride=True)
    check_caches(k_cache, v_cache, layout, key, scales)
    slots_shape = (layout.num_groups, key.shape[0])
    check("slot_mapping", slot_mapping, shape=slots_shape, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Rope:
    """How ``qkv_cache_write`` rotates queries and keys."""

    cos_sin: torch.Tensor
    """``[max_positions, rotary_dim]`` float32, as ``apply_rope`` takes the table; or, without
    ``positions``, ``[num_tokens, rotary_dim]``, one row per token."""
    positions: torch.Tensor | None = None
    """``[num_tokens]`` int64, contiguous, in [0, max_positions): not checked on the device. With
    ``mrope_section`` ``[3, num_tokens]``, unit last stride. None = ``cos_sin`` has one row per
    token: worth it when many layers share these rows, as no load then waits for a position."""
    interleaved: bool = False
    """Pairs are neighbours (2i, 2i + 1), not halves (i, i + rotary_dim / 2)."""
    mrope_section: tuple[int, int, int] | None = None
    """Pairs that turn by the position in time, height and width: rotary_dim / 2 in all. None = one
    position per token."""
    mrope_interleaved: bool = False
    """The axes take the pairs in turn, as Qwen3-VL's, not in three consecutive sections."""


@dataclass(frozen=True, slots=True)
class QKNorm:
    """The RMS norms of ``qkv_cache_write``, over each head."""

    q_weight: torch.Tensor
    """``[head_dim]``, qkv's dtype or float32, contiguous: the weight for query heads."""
    k_weight: torch.Tensor
    """The same for key heads, in the same dtype."""
    eps: float = 1e-6


def check_qkv(
    qkv: torch.Tensor,
    num_q_heads: int,
    layout: KVLayout,
    rope: Rope | None,
    norm: QKNorm | None,
    hadamard: int,
    q_out: torch.Tensor | None,
    k_out: torch.Tensor | None,
    scales: KVScales | None,
    dtypes: tuple[torch.dtype, ...],
) -> torch.Tensor:
    """Return qkv as [tokens, heads, head_dim], or raise if the arguments do not fit together."""
    if num_q_heads < 1:
        raise ValueError(f"num_q_heads: expected >= 1, got {num_q_heads}")
    heads, dim = num_q_heads + 2 * layout.num_kv_heads, layout.head_dim
    check_tensor("qkv", qkv, dtype=dtypes, unit_last_stride=True)
    if tuple(qkv.shape[1:]) not in ((heads * dim,), (heads, dim)):
        raise ValueError(
            f"qkv: expected shape [any, {heads * dim}] or [any, {heads}, {dim}], "
            f"got {list(qkv.shape)}"
        )
    check = partial(check_tensor, dtype=qkv.dtype, device=qkv.device)
    for name, out, num_heads in (
        ("q_out", q_out, num_q_heads),
        ("k_out", k_out, layout.num_kv_heads),
    ):
        if out is not None:
            check(name, out, shape=(qkv.shape[0], num_heads, dim), unit_last_stride=True)
    if norm is not None:
        check = partial(check_tensor, device=qkv.device, shape=(dim,), contiguous=True)
        check("norm.q_weight", norm.q_weight, dtype=tuple({qkv.dtype: 0, torch.float32: 0}))
        check("norm.k_weight", norm.k_weight, dtype=norm.q_weight.dtype)
    if rope is not None:
        _check_rope(rope, qkv, dim)
    largest = hadamard_block(dim, None if rope is None else rope.cos_sin.shape[1])
    if hadamard and (hadamard < 2 or hadamard & hadamard - 1 or largest % hadamard):
        expected = f"0 or a power of two to {largest}" if largest > 1 else "0 with these channels"
        raise ValueError(f"hadamard: expected {expected}, got {hadamard}")
    is_packed = isinstance(scales, KVScales) and scales.page_format.codes_per_element > 1
    if is_packed and rope is not None and largest < 2:
        raise ValueError(
            "rope.cos_sin: expected a multiple of 4 rotated channels for packed codes, got "
            f"{rope.cos_sin.shape[1]}"
        )
    return qkv if qkv.dim() == 3 else qkv.unflatten(1, (heads, dim))


def hadamard_block(head_dim: int, rotary_dim: int | None) -> int:
    """Return the most channels of a block of the Hadamard matrix in ``qkv_cache_write``.

    A power of two that divides the halves of the rotated channels (None = no rotation), and the
    channels that are not rotated.
    """
    halves = (head_dim if rotary_dim is None else rotary_dim) // 2
    common = math.gcd(halves, head_dim - 2 * halves)
    return common & -common


def _check_rope(rope: Rope, qkv: torch.Tensor, head_dim: int) -> None:
    num_tokens, positions = qkv.shape[0], rope.positions
    section = rope.mrope_section
    check = partial(check_tensor, device=qkv.device)
    num_rows = num_tokens if positions is None else None
    check(
        "rope.cos_sin", rope.cos_sin, shape=(num_rows, None), dtype=torch.float32, contiguous=True
    )
    rotary_dim = check_rotary_dim("rope.cos_sin", rope.cos_sin, head_dim)
    if positions is None:  # a row for each token
        if section is not None:
            raise ValueError(f"rope.mrope_section: expected None without positions, got {section}")
        return
    if section is not None:
        check_mrope_section("rope.mrope_section", section, rotary_dim // 2)
    shape = (num_tokens,) if section is None else (3, num_tokens)
    check("rope.positions", positions, shape=shape, dtype=torch.int64, unit_last_stride=True)


def check_copy_pages(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    src_block_ids: torch.Tensor,
    dst_block_ids: torch.Tensor,
    layout: KVLayout,
    group: int | None,
    dtypes: tuple[torch.dtype, ...],
    scales: KVScales | None,
) -> None:
    """Raise unless the arguments of ``copy_pages`` fit together."""
    check_tensor("k_cache", k_cache, dtype=dtypes if scales is None else None)
    check_caches(k_cache, v_cache, layout, k_cache, scales)
    integers = (torch.int32, torch.int64)
    check = partial(check_tensor, dtype=integers, device=k_cache.device, contiguous=True)
    check("src_block_ids", src_block_ids, shape=(None,))
    check("dst_block_ids", dst_block_ids, shape=src_block_ids.shape)
    if group is None and layout.num_groups > 1:
        raise ValueError(f"group: expected one of {layout.num_groups} groups, got None")
    if group is not None and not 0 <= group < layout.num_groups:
        raise ValueError(f"group: expected None or 0 to {layout.num_groups - 1}, got {group}")


def table_columns(layout: KVLayout, num_blocks: int) -> torch.Tensor:
    """Return the block-table column of each logical block, ``[kv_heads, num_blocks]``."""
    logical = torch.arange(num_blocks, device=layout.sink.device)
    if not layout.has_ring:
        return layout.table_offset[:, None] + logical
    sink_blocks = ((layout.sink + layout.block_size - 1) // layout.block_size)[:, None]
    ring = layout.ring_blocks[:, None]
    in_ring = sink_blocks + (logical - sink_blocks) % ring.clamp_min(1)
    column = torch.where((ring == 0) | (logical < sink_blocks), logical, in_ring)
    return layout.table_offset[:, None] + column
