"""Oracles of the paged cache's ops, in plain torch; see :mod:`mrv1.kernels.reference`."""

from __future__ import annotations

import math

import torch

from mrv1.kernels._base.checks import mrope_axes
from mrv1.kernels._base.oracle import ORACLE_DTYPES, counted, wide
from mrv1.kernels.cache.contracts import (
    PAGE_DTYPES,
    QKNorm,
    Rope,
    check_cache_write,
    check_copy_pages,
    check_qkv,
    table_columns,
)
from mrv1.kernels.cache.formats import QUARTERS, PageFormat
from mrv1.kernels.cache.kv_layout import KVLayout
from mrv1.kernels.cache.kv_scales import KVScales
from mrv1.kernels.layers.reference import apply_rope, rms_norm

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _pages(cache: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """Return a cache as rows of ``layout.address_unit`` elements, the unit of all addresses."""
    unit = layout.address_unit
    flat = cache.view(-1)
    return flat[: flat.numel() // unit * unit].view(-1, unit)


def _page_rows(layout: KVLayout, block: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Return the rows of :func:`_pages` that hold tokens of blocks.

    ``block`` (id >= 0) and ``token`` (offset in it) are [kv_heads, ...] int64 and broadcast; the
    result is [kv_heads, ..., head_dim / address_unit] int64.
    """
    per_head = (-1, *[1] * (block.dim() - 1))
    address = (
        layout.head_base.view(per_head)
        + block * layout.block_stride.view(per_head)
        + token * layout.token_stride
    )
    pieces = torch.arange(layout.head_dim // layout.address_unit, device=block.device)
    return (address // layout.address_unit)[..., None] + pieces


def _scale_rows(
    scales: KVScales, layout: KVLayout, block: torch.Tensor, token: torch.Tensor
) -> torch.Tensor:
    """Return the flat addresses of the scales of tokens in blocks, ``[kv_heads, ...]``."""
    per_head = (-1, *[1] * (block.dim() - 1))
    address = scales.base.view(per_head) + block * scales.block_stride.view(per_head)
    per_block = scales.page_format.scales_per_block(layout.block_size)
    return address + token * per_block // layout.block_size


def _grow_scales(
    page_format: PageFormat,
    pages: torch.Tensor,
    all_scales: torch.Tensor,
    quarter_rows: torch.Tensor,
    scale_rows: torch.Tensor,
    is_first: torch.Tensor,
    needed: torch.Tensor,
) -> None:
    """Raise the scales of quarters as their new vectors need; requantise the quarters' old codes.

    ``pages``, the cache's codes as rows, and ``all_scales``, flat, are *written*. For each new
    vector: ``quarter_rows`` [tokens, rows of a token] of its whole quarter, ``scale_rows`` the
    address of its scale, ``is_first`` in the quarter (the stored scale counts as 0), scale
    ``needed``.
    """
    old = all_scales.where(all_scales > 0, 0.0)  # NaN: nothing was stored
    old[scale_rows[is_first]] = 0.0
    new = old.scatter_reduce(0, scale_rows, needed, "amax")
    old, new = old[scale_rows], new[scale_rows]
    all_scales[scale_rows] = new
    grown = (new > old) & (old > 0)
    rows, old, new = quarter_rows[grown], old[grown, None], new[grown, None]
    codes = pages[rows].flatten(-2)  # [grown vectors, tokens, head_dim]
    held = page_format.decode(codes, old, torch.float32)
    pages[rows] = page_format.encode(held, new).unflatten(-1, (-1, pages.shape[1]))


@counted
def kv_cache_write(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: KVLayout,
    *,
    scales: KVScales | None = None,
) -> None:
    """Store new keys and values at their slots; see :func:`mrv1.kernels.kv_cache_write`."""
    check_cache_write(key, value, k_cache, v_cache, slot_mapping, layout, ORACLE_DTYPES, scales)
    slot = slot_mapping[layout.group_of_head.long()]  # [kv_heads, tokens]
    keep = slot >= 0
    block, token = slot // layout.block_size, slot % layout.block_size
    vectors = [x.transpose(0, 1)[keep] for x in (key, value)]
    if scales is not None:
        layout = layout.packed(scales.page_format.codes_per_element)
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        scale_rows = _scale_rows(scales, layout, block, token)[keep]
        for i, all_scales in enumerate((scales.k_scale.view(-1), scales.v_scale.view(-1))):
            if scales.granularity == "token":
                all_scales[scale_rows] = scales.page_format.scale(vectors[i])
            elif scales.granularity == "quarter":
                size = layout.block_size // QUARTERS
                position = token % size  # in its quarter
                first = (token - position)[:, :, None]
                quarter = _page_rows(
                    layout, block[:, :, None], first + torch.arange(size, device=key.device)
                )
                _grow_scales(
                    scales.page_format,
                    _pages((k_cache, v_cache)[i], layout),
                    all_scales,
                    quarter[keep],
                    scale_rows,
                    position[keep] == 0,
                    scales.page_format.scale(vectors[i]),
                )
            vectors[i] = scales.page_format.encode(vectors[i], all_scales[scale_rows])
    rows = _page_rows(layout, block, token)[keep]
    for cache, new in zip((k_cache, v_cache), vectors, strict=True):
        _pages(cache, layout)[rows] = new.unflatten(-1, (-1, layout.address_unit))


@counted
def qkv_cache_write(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: KVLayout,
    *,
    num_q_heads: int,
    rope: Rope | None = None,
    norm: QKNorm | None = None,
    hadamard: int = 0,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Norm and rotate, store, return q; see :func:`mrv1.kernels.qkv_cache_write`."""
    heads = check_qkv(
        qkv, num_q_heads, layout, rope, norm, hadamard, q_out, k_out, scales, ORACLE_DTYPES
    )
    key, value = heads[:, num_q_heads:].chunk(2, dim=1)
    check_cache_write(key, value, k_cache, v_cache, slot_mapping, layout, ORACLE_DTYPES, scales)
    q, k = heads[:, :num_q_heads].clone(), key.clone()
    if norm is not None:
        rms_norm(q, norm.q_weight, norm.eps, out=q)
        rms_norm(k, norm.k_weight, norm.eps, out=k)
    if rope is not None:
        cos_sin, positions = rope.cos_sin, rope.positions
        if positions is None:  # a row for each token
            positions = torch.arange(qkv.shape[0], device=qkv.device)
        if rope.mrope_section is not None:  # a table with a row per token, pairs by section
            axis = mrope_axes(rope.mrope_section, interleaved=rope.mrope_interleaved)
            axis = axis.to(qkv.device).repeat(2)
            cos_sin = cos_sin[positions.T[:, axis], torch.arange(axis.numel(), device=qkv.device)]
            positions = torch.arange(qkv.shape[0], device=qkv.device)
        apply_rope(q, k, cos_sin, positions, interleaved=rope.interleaved)
    if hadamard:
        q, k = (mix_channels(x, hadamard) for x in (q, k))
    kv_cache_write(k, value, k_cache, v_cache, slot_mapping, layout, scales=scales)
    if k_out is not None:
        k_out.copy_(k)
    return q if q_out is None else q_out.copy_(q)


def mix_channels(x: torch.Tensor, block: int) -> torch.Tensor:
    """Return ``x`` times an orthogonal Hadamard matrix in blocks of its last axis."""
    mixed: torch.Tensor = wide(x).unflatten(-1, (-1, block))
    for _ in range(block.bit_length() - 1):  # sums and differences of neighbours, apart
        even, odd = mixed[..., ::2], mixed[..., 1::2]
        mixed = torch.cat([even + odd, even - odd], dim=-1)
    mixed = mixed / math.sqrt(block)
    return mixed.flatten(-2).to(x.dtype)


def gather_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table_row: torch.Tensor,
    num_blocks: int,
    layout: KVLayout,
    scales: KVScales | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return one request's K and V ``[kv_heads, keys, head_dim]`` and which keys have a page."""
    if scales is not None:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        layout = layout.packed(scales.page_format.codes_per_element)
    block = table_row[table_columns(layout, num_blocks)].long()
    present = (block >= 0).repeat_interleave(layout.block_size, dim=1)
    token = torch.arange(layout.block_size, device=block.device)
    rows = _page_rows(layout, block.clamp_min(0)[:, :, None], token)  # -1: any page, masked later
    shape = (layout.num_kv_heads, num_blocks * layout.block_size, layout.head_dim)
    k, v = (
        _pages(cache, layout).index_select(0, rows.flatten()).view(shape)
        for cache in (k_cache, v_cache)
    )
    if scales is None:
        return k.to(dtype), v.to(dtype), present
    scale_rows = _scale_rows(scales, layout, block.clamp_min(0)[:, :, None], token[None, None])
    scale_rows = scale_rows.expand(*block.shape, -1).flatten(1)
    k, v = (
        scales.page_format.decode(codes, all_scales.view(-1)[scale_rows], dtype)
        for codes, all_scales in ((k, scales.k_scale), (v, scales.v_scale))
    )
    return k, v, present


@counted
def copy_pages(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    src_block_ids: torch.Tensor,
    dst_block_ids: torch.Tensor,
    layout: KVLayout,
    *,
    group: int | None = None,
    scales: KVScales | None = None,
) -> None:
    """Copy whole blocks onto others; see :func:`mrv1.kernels.copy_pages`."""
    dtypes = (*PAGE_DTYPES, torch.float64)
    check_copy_pages(k_cache, v_cache, src_block_ids, dst_block_ids, layout, group, dtypes, scales)
    if scales is not None:
        layout = layout.packed(scales.page_format.codes_per_element)
    kept = (src_block_ids >= 0) & (dst_block_ids >= 0)
    heads = slice(None) if group is None else layout.group_of_head == group
    token = torch.arange(layout.block_size, device=k_cache.device)
    src, dst = (ids[kept].long().view(1, -1, 1) for ids in (src_block_ids, dst_block_ids))
    source, target = (_page_rows(layout, ids, token)[heads] for ids in (src, dst))
    for cache in (k_cache, v_cache):
        pages = _pages(cache.view(_INTEGER_OF_SIZE[cache.itemsize]), layout)
        pages[target] = pages[source]
    if scales is not None and scales.granularity != "head":
        source, target = (_scale_rows(scales, layout, ids, token)[heads] for ids in (src, dst))
        for scale in (scales.k_scale, scales.v_scale):
            bits = scale.view(torch.int32).view(-1)
            bits[target] = bits[source]
