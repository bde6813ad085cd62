"""KV cache write: store the step's new keys and values in their pages.

    k_cache[head_base[h] + b * block_stride[h] + t * token_stride + d] = key[i, h, d]

with ``b, t = divmod(slot_mapping[group_of_head[h], i], block_size)``, and likewise for values.
A negative slot (padding, or a position whose page is gone) is skipped. The address formula and its
layouts are ``kv_layout``'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrv1.kernels._checks import FLOAT_DTYPES, check_launchable
from mrv1.kernels._fp8 import quantize, vector_scale
from mrv1.kernels._paged import ALIGNED_CODES, ALIGNED_ELEMENTS
from mrv1.kernels._paged_checks import check_cache_write, check_head_dim
from mrv1.kernels._scales import cache_arguments, fp8_constexprs
from mrv1.kernels._triton import INTERPRET, tl, triton
from mrv1.kernels.kv_layout import KVLayout
from mrv1.kernels.kv_scales import KVScales


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheWriteConfig:
    """Launch choices of one KV cache write."""

    tile_rows: int
    """(token, head) rows per program."""
    num_warps: int

    @classmethod
    def default_for(cls, head_dim: int, dtype: torch.dtype) -> KVCacheWriteConfig:
        """Return the choice for a head dimension and cache dtype."""
        if INTERPRET:  # the interpreter pays by program and by operation, hardly by size
            return cls(tile_rows=1024, num_warps=1)
        # 4 KiB each of K and V per program: four 16-byte pieces per thread of 4 warps in flight.
        row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
        return cls(tile_rows=max(1, 4096 // row_bytes), num_warps=4)


@triton.jit
def _kv_cache_write_kernel(
    k_cache_ptr,  # one layer's keys, flat
    v_cache_ptr,  # one layer's values, flat
    k_scale_ptr,  # float32, flat, or None
    v_scale_ptr,
    scale_base_ptr,  # [NUM_KV_HEADS] int64, elements, or None
    scale_block_stride_ptr,  # [NUM_KV_HEADS] int64, elements, or None
    key_ptr,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM], unit last stride
    stride_key_token,
    stride_key_head,
    value_ptr,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM], unit last stride
    stride_value_token,
    stride_value_head,
    slot_mapping_ptr,  # [groups, num_tokens] int64, negative = skip
    stride_slot_group,
    stride_slot_token,
    group_of_head_ptr,  # [NUM_KV_HEADS] int32
    head_base_ptr,  # [NUM_KV_HEADS] int64, elements
    block_stride_ptr,  # [NUM_KV_HEADS] int64, elements
    token_stride,  # elements
    num_rows,  # num_tokens * NUM_KV_HEADS
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_DIM: tl.constexpr,
    FP8_PATH: tl.constexpr,  # None = not an fp8 cache
    TOKEN_SCALES: tl.constexpr,  # a scale per (token, head), else per head
):
    """Grid (cdiv(num_rows, TILE_ROWS),): one program moves TILE_ROWS (token, head) vectors."""
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    in_range = row < num_rows
    head = row % NUM_KV_HEADS
    token = (row // NUM_KV_HEADS).to(tl.int64)  # int64 before any multiply by a stride
    group = tl.load(group_of_head_ptr + head, mask=in_range, other=0).to(tl.int64)
    slot = tl.load(
        slot_mapping_ptr + group * stride_slot_group + token * stride_slot_token,
        mask=in_range,
        other=-1,
    )
    kept = slot >= 0
    head_base = tl.load(head_base_ptr + head, mask=kept, other=0)
    block_stride = tl.load(block_stride_ptr + head, mask=kept, other=0)
    address = head_base + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride
    address = tl.multiple_of(address, ALIGNED_ELEMENTS if FP8_PATH is None else ALIGNED_CODES)

    dims = tl.arange(0, TILE_DIM)
    mask = kept[:, None] & (dims < HEAD_DIM)[None, :]
    head = head.to(tl.int64)
    key_row = token * stride_key_token + head * stride_key_head
    value_row = token * stride_value_token + head * stride_value_head
    key = tl.load(key_ptr + key_row[:, None] + dims[None, :], mask=mask, other=0.0)
    value = tl.load(value_ptr + value_row[:, None] + dims[None, :], mask=mask, other=0.0)
    if FP8_PATH is not None:
        key = key.to(tl.float32)
        value = value.to(tl.float32)
        scale_address = tl.load(scale_base_ptr + head, mask=kept, other=0)
        if TOKEN_SCALES:
            scale_block_stride = tl.load(scale_block_stride_ptr + head, mask=kept, other=0)
            scale_address += slot // BLOCK_SIZE * scale_block_stride + slot % BLOCK_SIZE
            key_scale = vector_scale(key)
            value_scale = vector_scale(value)
            tl.store(k_scale_ptr + scale_address, key_scale, mask=kept)
            tl.store(v_scale_ptr + scale_address, value_scale, mask=kept)
        else:
            key_scale = tl.load(k_scale_ptr + scale_address, mask=kept, other=1.0)
            value_scale = tl.load(v_scale_ptr + scale_address, mask=kept, other=1.0)
        key = quantize(key, key_scale, FP8_PATH)
        value = quantize(value, value_scale, FP8_PATH)
    target = address[:, None] + dims[None, :]
    tl.store(k_cache_ptr + target, key, mask=mask)
    tl.store(v_cache_ptr + target, value, mask=mask)


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
        k_cache: one layer's key buffer, any shape, contiguous, dtype of ``key`` or, for
            ``scales``, float8_e4m3fn or its uint8 view; addressed flat by ``layout``. *Written*
            at the slots, untouched elsewhere.
        v_cache: one layer's value buffer, likewise. *Written*.
        slot_mapping: ``[groups, num_tokens]`` int64, ``block * block_size + position %
            block_size``; negative = skip the token for that group's heads. Slots of one group are
            distinct.
        layout: where the pages lie; its ``group_of_head`` picks the row of ``slot_mapping``.
        scales: of an fp8 cache, else None. Per token: *written* at the slots, as
            ``max(absmax / 448, 1e-12)`` of the head's vector. Per head: read.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, device or stride, or a head dimension without a kernel.
        UnsupportedDeviceError: the tensors are where this process cannot launch.

    Numerics:
        Tier A, equal to the oracle bit for bit. Without ``scales`` bytes are moved, never
        converted. With them ``x / scale`` is rounded to e4m3, ties to even; beyond +-448 it
        saturates, infinities too; NaN stays NaN. A token's absmax ignores what is not finite.

    Stream:
        One launch on the current stream; no allocation, no synchronisation, CUDA-graph safe.

    Source:
        The slot rule is vLLM's ``reshape_and_cache``; the address formula is ``kv_layout``'s.
    """
    check_cache_write(key, value, k_cache, v_cache, slot_mapping, layout, FLOAT_DTYPES, scales)
    check_head_dim(layout)
    check_launchable("key", key)
    num_rows = key.shape[0] * layout.num_kv_heads
    if num_rows == 0:
        return
    config = KVCacheWriteConfig.default_for(layout.head_dim, key.dtype)
    _kv_cache_write_kernel[(triton.cdiv(num_rows, config.tile_rows),)](
        *cache_arguments(k_cache, v_cache, scales),
        key,
        key.stride(0),
        key.stride(1),
        value,
        value.stride(0),
        value.stride(1),
        slot_mapping,
        slot_mapping.stride(0),
        slot_mapping.stride(1),
        layout.group_of_head,
        layout.head_base,
        layout.block_stride,
        layout.token_stride,
        num_rows,
        NUM_KV_HEADS=layout.num_kv_heads,
        HEAD_DIM=layout.head_dim,
        BLOCK_SIZE=layout.block_size,
        TILE_ROWS=config.tile_rows,
        TILE_DIM=triton.next_power_of_2(layout.head_dim),
        **fp8_constexprs(scales, key.device),
        num_warps=config.num_warps,
    )
