"""Kernel arguments for caches, slots and scales, as the launchers of the paged ops pass them."""

from __future__ import annotations

import torch

from mrv1.kernels.cache.kv_layout import KVLayout
from mrv1.kernels.cache.kv_scales import KVScales


def cache_arguments(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: KVScales | None,
    codes: torch.dtype = torch.uint8,
) -> tuple[torch.Tensor | None, ...]:
    """Return K and V cache (codes as ``codes``), K and V scales, scale bases, block strides."""
    if scales is None:
        return k_cache, v_cache, None, None, None, None
    return (
        k_cache.view(-1).view(codes), v_cache.view(-1).view(codes),
        scales.k_scale, scales.v_scale, scales.base, scales.block_stride,
    )  # fmt: skip


def slot_arguments(slot_mapping: torch.Tensor, layout: KVLayout) -> tuple[torch.Tensor | int, ...]:
    """Return slots and their strides, each head's group, base and block stride, token stride."""
    heads = layout.group_of_head, layout.head_base, layout.block_stride
    return slot_mapping, *slot_mapping.stride(), *heads, layout.token_stride


def role_arguments(layout: KVLayout) -> tuple[torch.Tensor, ...]:
    """Return the first column of each head's part of a table row, and what each head may see."""
    return layout.table_offset, layout.window, layout.sink, layout.ring_blocks


def layout_constexprs(layout: KVLayout) -> dict[str, int]:
    """Return the constexprs of a page's shape."""
    return {
        "NUM_KV_HEADS": layout.num_kv_heads,
        "HEAD_DIM": layout.head_dim,
        "BLOCK_SIZE": layout.block_size,
    }


def codec_constexprs(
    scales: KVScales | None, layout: KVLayout, device: torch.device
) -> dict[str, object]:
    """Return the constexprs of codes and scales' addresses; see ``PageFormat.conversion``."""
    if scales is None:
        return {"CODEC": None, "SCALES_PER_BLOCK": 0}
    return {
        "CODEC": scales.page_format.codec(device),
        "SCALES_PER_BLOCK": scales.page_format.scales_per_block(layout.block_size),
    }
