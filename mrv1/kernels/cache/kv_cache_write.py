"""KV cache write: store the step's new keys and values in their pages.

    k_cache[head_base[h] + b * block_stride[h] + t * token_stride + d] = key[i, h, d]

with ``b, t = divmod(slot_mapping[group_of_head[h], i], block_size)``, and likewise for values.
A negative slot (padding, or a position whose page is gone) is skipped. A cache with a scale per
quarter of a block has kernels of its own, in ``quarter_write``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.checks import FLOAT_DTYPES, check_launchable
from mrv1.kernels._base.launches import launch_kernel
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.cache.addresses import ALIGNED_CODES, ALIGNED_ELEMENTS, split_slot
from mrv1.kernels.cache.codes import (
    codes_in_byte,
    is_nibbles,
    pack_nibbles,
    quantize,
    scale_of_parts,
)
from mrv1.kernels.cache.contracts import check_cache_write, check_head_dim
from mrv1.kernels.cache.kv_layout import KVLayout
from mrv1.kernels.cache.kv_scales import KVScales
from mrv1.kernels.cache.quarter_write import write_quarters
from mrv1.kernels.cache.scale_arguments import (
    cache_arguments,
    codec_constexprs,
    layout_constexprs,
    slot_arguments,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheWriteConfig:
    """Launch choices of one KV cache write."""

    tile_rows: int  # (token, head) rows per program
    num_warps: int

    @classmethod
    def default_for(
        cls, head_dim: int, dtype: torch.dtype, *, fp8: bool = False
    ) -> KVCacheWriteConfig:
        """Return the configuration: a thread moves 16 bytes of K and 16 of V, for fp8 32 of each.

        On an H200 16 beats 32 at every size; for fp8 32 become a store of 16 codes, and more
        elements share the work of finding a row's address and scale.
        """
        if INTERPRET:  # the interpreter pays by program and by operation, hardly by size
            return cls(tile_rows=1024, num_warps=1)
        row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
        return cls(tile_rows=max(1, (4096 if fp8 else 2048) // row_bytes), num_warps=4)


@triton.jit
def _quantized(x, scale_ptr, kept, CODEC: tl.constexpr, TOKEN_SCALES: tl.constexpr):
    """Return the codes of the rows of ``x``, by stored scales or, if TOKEN_SCALES, by new ones.

    ``scale_ptr`` (float32, *written* if TOKEN_SCALES) and ``kept`` are [TILE_ROWS, 1].
    """
    if TOKEN_SCALES:
        scale = scale_of_parts((x,), CODEC)
        tl.store(scale_ptr, scale, mask=kept)
    else:
        scale = tl.load(scale_ptr, mask=kept, other=1.0)
    codes = quantize(x, scale, TOKEN_SCALES, CODEC)
    if is_nibbles(CODEC):
        codes = pack_nibbles(codes)
    return codes


@triton.jit(do_not_specialize=["stride_slot_group", "num_rows"])  # one variant for any tokens
def _kv_cache_write_kernel(
    k_cache_ptr, v_cache_ptr,  # one layer's keys and values, flat
    k_scale_ptr, v_scale_ptr,  # float32, flat, or None
    scale_base_ptr, scale_block_stride_ptr,  # [NUM_KV_HEADS] int64, in elements, or None
    key_ptr, stride_key_token, stride_key_head,  # [tokens, heads, HEAD_DIM], unit last stride
    value_ptr, stride_value_token, stride_value_head,  # likewise
    slot_mapping_ptr, stride_slot_group, stride_slot_token,  # [groups, tokens] int64, < 0 = skip
    group_of_head_ptr,  # [NUM_KV_HEADS] int32
    head_base_ptr, block_stride_ptr,  # [NUM_KV_HEADS] int64, in elements
    token_stride,  # in elements
    num_rows,  # num_tokens * NUM_KV_HEADS
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,  # whether there is more than one head group
    BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr,
    CODEC: tl.constexpr,  # None = no codes, see codes.py
    SCALES_PER_BLOCK: tl.constexpr,  # per head: BLOCK_SIZE, or 0 = one scale for all blocks
):  # fmt: skip
    """Grid (cdiv(num_rows, TILE_ROWS),): one program moves TILE_ROWS (token, head) vectors."""
    ALIGNED: tl.constexpr = ALIGNED_ELEMENTS if CODEC is None else ALIGNED_CODES
    TOKEN_SCALES: tl.constexpr = SCALES_PER_BLOCK > 0
    PACKED: tl.constexpr = codes_in_byte(CODEC)
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    in_range = row < num_rows
    head = (row % NUM_KV_HEADS).to(tl.int64)
    token = (row // NUM_KV_HEADS).to(tl.int64)  # int64 before any multiply by a stride
    slot_ptr = slot_mapping_ptr + token * stride_slot_token
    if GROUPS:
        group = tl.load(group_of_head_ptr + head, mask=in_range, other=0).to(tl.int64)
        slot_ptr += group * stride_slot_group
    slot = tl.load(slot_ptr, mask=in_range, other=-1)
    kept = slot >= 0
    block, offset = split_slot(slot, BLOCK_SIZE)
    head_base = tl.load(head_base_ptr + head, mask=in_range, other=0)
    block_stride = tl.load(block_stride_ptr + head, mask=in_range, other=0)
    address = head_base + block * block_stride + offset * token_stride
    address = tl.multiple_of(address, [ALIGNED, ALIGNED])

    dim = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, :]
    in_row = in_range & (dim < HEAD_DIM)  # not "kept": these loads do not wait for the slot
    key_ptr += token * stride_key_token + head * stride_key_head
    value_ptr += token * stride_value_token + head * stride_value_head
    key = tl.load(key_ptr + dim, mask=in_row, other=0.0)
    value = tl.load(value_ptr + dim, mask=in_row, other=0.0)
    stored = kept & (dim < HEAD_DIM)
    if CODEC is not None:
        scale_address = tl.load(scale_base_ptr + head, mask=in_range, other=0)
        if TOKEN_SCALES:
            scale_block_stride = tl.load(scale_block_stride_ptr + head, mask=in_range, other=0)
            scale_address += block * scale_block_stride + offset
        if PACKED > 1:
            address = tl.multiple_of(address // PACKED, [ALIGNED, ALIGNED])
            dim = tl.arange(0, triton.next_power_of_2(HEAD_DIM) // PACKED)[None, :]
            stored = kept & (dim < HEAD_DIM // PACKED)
        key = _quantized(key, k_scale_ptr + scale_address, kept, CODEC, TOKEN_SCALES)
        tl.store(k_cache_ptr + address + dim, key, mask=stored)
        value = _quantized(value, v_scale_ptr + scale_address, kept, CODEC, TOKEN_SCALES)
        tl.store(v_cache_ptr + address + dim, value, mask=stored)
    else:
        tl.store(k_cache_ptr + address + dim, key, mask=stored)
        tl.store(v_cache_ptr + address + dim, value, mask=stored)


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
    """Store new keys and values at their slots of one layer's paged cache.

    Args:
        key: ``[num_tokens, kv_heads, head_dim]`` fp16, bf16 or fp32; any token and head stride
            (a view of a fused qkv is fine), unit last stride.
        value: like ``key``, with strides of its own.
        k_cache: one layer's key buffer, flat or of the layout's shape, contiguous, dtype of
            ``key`` or, for ``scales``, their codes' dtype or its uint8 view; addressed flat by
            ``layout`` (two 4-bit codes are one byte, and a last size is half of ``head_dim``).
            *Written* at the slots, untouched elsewhere.
        v_cache: one layer's value buffer, likewise. *Written*.
        slot_mapping: ``[groups, num_tokens]`` int64, ``block * block_size + position %
            block_size``; negative = skip the token for that group's heads. Slots of one group are
            distinct.
        layout: where the pages lie; its ``group_of_head`` picks the row of ``slot_mapping``.
        scales: the scales of a cache of codes, else None. Per token: *written* at the slots, as
            ``max(absmax / 448, 1e-12)`` of the head's vector, of 4-bit codes as
            ``max((highest - lowest) / 15, 1e-12)``, whose low 8 bits become the zero
            (``docs/cache-abi.md``). Per quarter of a block: *written*
            for every quarter with a new token, as the largest of the stored scale and the scales
            of the new vectors; if it grows, the quarter's other codes are *written* too,
            requantised once. The stored scale counts as 0 if the quarter's first slot is written
            or the scale is not positive. Per head: read.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: tier A, equal to the oracle bit for bit. Without ``scales`` bytes are moved, never
        converted. With ``scales``, ``x / scale`` is rounded to e4m3, ties to even, and saturates
        at +-448, infinities too; NaN stays NaN. A vector's absmax ignores elements that are not
        finite. For 4 bits, ``x / scale + zero`` is rounded to 0 to 15, ties to even; a vector
        with an element that is not finite becomes NaN as a whole. With a scale per quarter, bytes
        depend on which tokens were written before, and which together.
    Stream: one launch on the current stream; no allocation, no synchronisation, CUDA-graph safe.
        With a scale per quarter and more than 256 tokens, three launches and one allocation.
    Source: the slot rule is vLLM's ``reshape_and_cache``.
    """
    check_cache_write(key, value, k_cache, v_cache, slot_mapping, layout, FLOAT_DTYPES, scales)
    check_head_dim(layout)
    check_launchable("key", key)
    num_rows = key.shape[0] * layout.num_kv_heads
    if num_rows == 0:
        return
    if scales is not None and scales.granularity == "quarter":
        write_quarters(key, value, k_cache, v_cache, slot_mapping, layout, scales)
        return
    config = KVCacheWriteConfig.default_for(layout.head_dim, key.dtype, fp8=scales is not None)
    launch_kernel(
        _kv_cache_write_kernel, (triton.cdiv(num_rows, config.tile_rows),),
        *cache_arguments(k_cache, v_cache, scales), *with_strides(key), *with_strides(value),
        *slot_arguments(slot_mapping, layout), num_rows,
        GROUPS=layout.num_groups > 1, TILE_ROWS=config.tile_rows, **layout_constexprs(layout),
        **codec_constexprs(scales, layout, key.device), num_warps=config.num_warps,
    )  # fmt: skip
