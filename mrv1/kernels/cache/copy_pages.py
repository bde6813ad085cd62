"""Copy pages: duplicate whole blocks of one layer's KV cache before one of their owners writes.

K and V of each listed block, and its scales if it has any, for all KV heads or the heads of one
head group; ``kv_layout`` and ``kv_scales`` have the addresses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mrv1.kernels._base.checks import check_launchable
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.cache.codes import scale_index
from mrv1.kernels.cache.contracts import PAGE_DTYPES, check_copy_pages, check_head_dim
from mrv1.kernels.cache.kv_layout import ALIGNMENT_BYTES, KVLayout
from mrv1.kernels.cache.kv_scales import KVScales
from mrv1.kernels.cache.scale_arguments import layout_constexprs

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By size in bytes. Pages move as integers: any GPU can copy any dtype, and no NaN is quieted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPagesConfig:
    """Launch choices of one copy."""

    tile_rows: int  # (block, head, token) vectors per program
    num_warps: int

    @classmethod
    def default_for(cls, head_dim: int, itemsize: int) -> CopyPagesConfig:
        """Return the configuration for a head dimension and the bytes of a cache element."""
        if INTERPRET:  # the interpreter pays by program and by operation, hardly by size
            return cls(tile_rows=1024, num_warps=1)
        # 4 KiB each of K and V per program: four 16-byte loads in flight per thread of 4 warps.
        row_bytes = triton.next_power_of_2(head_dim) * itemsize
        return cls(tile_rows=max(1, 4096 // row_bytes), num_warps=4)


@triton.jit(do_not_specialize=["group", "num_vectors"])
def _copy_pages_kernel(
    k_cache_ptr, v_cache_ptr,  # one layer's keys and values, flat
    k_scale_ptr, v_scale_ptr,  # one layer's scales as int32, flat, or None
    scale_base_ptr, scale_block_stride_ptr,  # [NUM_KV_HEADS] int64, in elements, or None
    src_block_ids_ptr, dst_block_ids_ptr,  # [num_copies] int32 | int64, negative = skip
    group_of_head_ptr,  # [NUM_KV_HEADS] int32
    head_base_ptr, block_stride_ptr,  # [NUM_KV_HEADS] int64, in elements
    token_stride,  # in elements
    group,  # head group to copy, -1 = all heads
    num_vectors,  # num_copies * NUM_KV_HEADS * BLOCK_SIZE
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SCALES_PER_BLOCK: tl.constexpr,  # per head
    PACKED: tl.constexpr,  # codes in an element of the cache
    ALIGNMENT: tl.constexpr, TILE_ROWS: tl.constexpr,  # elements; divides every address
):  # fmt: skip
    """Grid (cdiv(num_vectors, TILE_ROWS),): TILE_ROWS (block, head, token) vectors a program."""
    vector = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    in_range = vector < num_vectors
    token = vector % BLOCK_SIZE
    head = vector // BLOCK_SIZE % NUM_KV_HEADS
    copy = vector // (BLOCK_SIZE * NUM_KV_HEADS)
    src = tl.load(src_block_ids_ptr + copy, mask=in_range, other=-1).to(tl.int64)
    dst = tl.load(dst_block_ids_ptr + copy, mask=in_range, other=-1).to(tl.int64)
    head_group = tl.load(group_of_head_ptr + head, mask=in_range, other=-1)
    kept = (src >= 0) & (dst >= 0) & ((group < 0) | (head_group == group))
    head_base = tl.load(head_base_ptr + head, mask=kept, other=0)
    block_stride = tl.load(block_stride_ptr + head, mask=kept, other=0)
    page_offset = head_base + token * token_stride
    source, target = page_offset + src * block_stride, page_offset + dst * block_stride
    if PACKED > 1:
        source, target = source // PACKED, target // PACKED
    source, target = tl.multiple_of(source, ALIGNMENT), tl.multiple_of(target, ALIGNMENT)

    dims = tl.arange(0, triton.next_power_of_2(HEAD_DIM // PACKED))[None, :]
    mask = kept[:, None] & (dims < HEAD_DIM // PACKED)
    k = tl.load(k_cache_ptr + source[:, None] + dims, mask=mask, other=0)
    v = tl.load(v_cache_ptr + source[:, None] + dims, mask=mask, other=0)
    tl.store(k_cache_ptr + target[:, None] + dims, k, mask=mask)
    tl.store(v_cache_ptr + target[:, None] + dims, v, mask=mask)
    if k_scale_ptr is not None:
        kept &= token % (BLOCK_SIZE // SCALES_PER_BLOCK) == 0  # the first token of a scale
        scale_offset = scale_index(token, BLOCK_SIZE, SCALES_PER_BLOCK)
        scale_offset += tl.load(scale_base_ptr + head, mask=kept, other=0)
        block_stride = tl.load(scale_block_stride_ptr + head, mask=kept, other=0)
        k_scale = tl.load(k_scale_ptr + scale_offset + src * block_stride, mask=kept, other=0)
        v_scale = tl.load(v_scale_ptr + scale_offset + src * block_stride, mask=kept, other=0)
        tl.store(k_scale_ptr + scale_offset + dst * block_stride, k_scale, mask=kept)
        tl.store(v_scale_ptr + scale_offset + dst * block_stride, v_scale, mask=kept)


def _scale_arguments(scales: KVScales | None) -> tuple[torch.Tensor | None, ...]:
    """Return K and V scales, bases and block strides; all None if blocks have no own scales."""
    if scales is None or scales.granularity == "head":
        return None, None, None, None
    bits = (scale.view(torch.int32) for scale in (scales.k_scale, scales.v_scale))
    return *bits, scales.base, scales.block_stride


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
    """Copy whole blocks of one layer's paged cache onto other blocks: K, V and their scales.

    Args:
        k_cache: one layer's key buffer, flat or of the layout's shape, contiguous, fp16, bf16,
            fp32, float8_e4m3fn or uint8; addressed flat by ``layout`` (with ``scales`` of 4-bit
            codes, two of which are a byte, half of its elements). *Written* in the pages of
            ``dst_block_ids``, untouched elsewhere.
        v_cache: one layer's value buffer, dtype and size of ``k_cache``. *Written*.
        src_block_ids: ``[num_copies]`` int32 or int64, contiguous: the blocks to copy, in the id
            space of ``group``; -1 = skip the pair. An id may occur more than once.
        dst_block_ids: ``[num_copies]`` int32 or int64, contiguous: the block that each source is
            copied to; -1 = skip the pair. Ids must be distinct, and none may be in
            ``src_block_ids``: copies run in any order. Values on the device are not checked.
        layout: where the pages lie.
        group: the head group whose heads are copied: a block id is valid in its group only.
            None = all heads, which must then be one group.
        scales: the scales of a cache of codes, else None. Per token or quarter: *written* for
            every page that is written. Per head: not copied, as no block has scales of its own.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: bytes are moved, never converted: tier A, equal to the oracle bit for bit, NaN too.
    Stream: one launch on the current stream; no allocation, no synchronisation, CUDA-graph safe.
    Source: copy-on-write blocks are vLLM's (arXiv:2309.06180, section 4.4).
    """
    check_copy_pages(
        k_cache, v_cache, src_block_ids, dst_block_ids, layout, group, PAGE_DTYPES, scales
    )
    check_head_dim(layout)
    check_launchable("k_cache", k_cache)
    num_vectors = src_block_ids.shape[0] * layout.num_kv_heads * layout.block_size
    if num_vectors == 0:
        return
    itemsize = k_cache.itemsize
    bits = _INTEGER_OF_SIZE[itemsize]
    packed = 1 if scales is None else scales.page_format.codes_per_element
    config = CopyPagesConfig.default_for(layout.head_dim // packed, itemsize)
    _copy_pages_kernel[(triton.cdiv(num_vectors, config.tile_rows),)](
        k_cache.view(bits), v_cache.view(bits), *_scale_arguments(scales),
        *(src_block_ids, dst_block_ids, layout.group_of_head),
        *(layout.head_base, layout.block_stride, layout.token_stride),
        -1 if group is None else group, num_vectors,
        SCALES_PER_BLOCK=0 if scales is None
        else scales.page_format.scales_per_block(layout.block_size),
        PACKED=packed, TILE_ROWS=config.tile_rows,
        ALIGNMENT=math.gcd(layout.address_unit // packed, ALIGNMENT_BYTES // itemsize),
        **layout_constexprs(layout), num_warps=config.num_warps,
    )  # fmt: skip
