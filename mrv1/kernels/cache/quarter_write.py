"""KV cache write with a scale per quarter of a block; ``kv_cache_write`` launches it.

One program owns a (quarter, head) for the launch and does all work on it. Let ``new`` be the new
tokens of the quarter, and ``old`` its stored scale, or 0 if its first token is new or the stored
scale is not positive::

    scale = max(old, absmax(new) / 448, 1e-12)
    code[t] = e4m3(x[t] / scale)                         new t
    code[t] = e4m3(value(code[t]) * old / scale)         other t, if scale > old > 0

The owner is the program of the quarter's first new token, in the order of the launch. Slots may be
in any order: to find out whether it is the owner, a program compares its slot with the slots of
all earlier tokens, and an owner also with the slots of all later tokens. This work is quadratic
in the launch's tokens: little for a decode step, much for a prefill of thousands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.cache.addresses import ALIGNED_CODES, split_slot
from mrv1.kernels.cache.fp8 import decode_e4m3, finite_absmax, quantize, scale_of
from mrv1.kernels.cache.kv_layout import KVLayout
from mrv1.kernels.cache.kv_scales import KVScales
from mrv1.kernels.cache.scale_arguments import (
    cache_arguments,
    fp8_constexprs,
    layout_constexprs,
    slot_arguments,
)

NO_TOKEN = tl.constexpr(2**31 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarterWriteConfig:
    """Launch choices of one write."""

    tile_rows: int
    """(token, head) rows per program."""
    tile_slots: int
    """Slots compared at once."""
    num_warps: int

    @classmethod
    def default_for(cls) -> QuarterWriteConfig:
        """Return the configuration, not tuned; with 8 warps the largest kernel spills on sm_90."""
        if INTERPRET:  # the interpreter pays by program and by operation, hardly by size
            return cls(tile_rows=128, tile_slots=64, num_warps=1)
        return cls(tile_rows=1, tile_slots=128, num_warps=4)


class Slots(NamedTuple):
    """The slots of the launch's tokens, in the head group of each row."""

    row_ptr: tl.tensor  # [TILE_ROWS]
    stride_token: tl.tensor
    num_tokens: tl.tensor


class Quarters(NamedTuple):
    """New tokens of each row's quarter, and whether this program owns or begins the quarter."""

    is_new: tl.tensor  # [TILE_ROWS, TOKENS, 1]
    is_owned: tl.tensor  # [TILE_ROWS, 1, 1], whether this program writes the quarter
    is_begun: tl.tensor  # [TILE_ROWS, 1, 1], whether the quarter's first token is new


@triton.jit
def _position_in_quarter(slots, other, first_slot):
    """Return the positions of tokens relative to each row's quarter: [0, TOKENS) is inside.

    ``other``, [TILE_SLOTS] int32, are tokens of the launch; ``first_slot``, [TILE_ROWS] int64, is
    the first slot of each row's quarter.
    """
    slot_ptr = slots.row_ptr[:, None] + other.to(tl.int64)[None, :] * slots.stride_token
    slot = tl.load(slot_ptr, mask=(other < slots.num_tokens)[None, :], other=-1)
    return slot - first_slot[:, None]


@triton.jit
def _write_quarters(
    cache_ptr, scale_ptr, x_ptr, quarters, HEAD_DIM: tl.constexpr, FP8_PATH: tl.constexpr
):
    """Write the codes and scales of quarters of K or of V.

    ``cache_ptr`` (pointers to codes) and ``x_ptr`` (to new vectors) are [TILE_ROWS, TOKENS, 1];
    ``scale_ptr`` (to float32) are [TILE_ROWS, 1, 1].
    """
    is_new, is_owned, is_begun = quarters
    dim = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, None, :]
    in_head = dim < HEAD_DIM
    x = tl.load(x_ptr + dim, mask=is_new & in_head, other=0.0).to(tl.float32)
    old = tl.load(scale_ptr, mask=is_owned & ~is_begun, other=0.0)
    old = tl.where(old > 0, old, 0.0)  # NaN: nothing was stored
    scale = tl.maximum(old, scale_of(tl.max(finite_absmax(x), axis=1, keep_dims=True)))
    has_grown = is_owned & (scale > old) & (old > 0)
    is_moved = has_grown & ~is_new
    code = tl.load(cache_ptr + dim, mask=is_moved & in_head, other=0)
    value = tl.where(is_new, x, decode_e4m3(code, FP8_PATH).to(tl.float32) * old)
    code = quantize(value, scale, False, FP8_PATH)
    tl.debug_barrier()  # all warps have read the old scale
    tl.store(scale_ptr, scale, mask=is_owned)
    tl.store(cache_ptr + dim, code, mask=(is_new | is_moved) & in_head)


@triton.jit(do_not_specialize=["num_tokens"])
def _quarter_write_kernel(
    k_cache_ptr,  # one layer's keys, flat
    v_cache_ptr,  # one layer's values, flat
    k_scale_ptr,  # float32, flat
    v_scale_ptr,
    scale_base_ptr,  # [NUM_KV_HEADS] int64, in elements
    scale_block_stride_ptr,  # [NUM_KV_HEADS] int64, in elements
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
    head_base_ptr,  # [NUM_KV_HEADS] int64, in elements
    block_stride_ptr,  # [NUM_KV_HEADS] int64, in elements
    token_stride,  # in elements
    num_tokens,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_SLOTS: tl.constexpr,
    FP8_PATH: tl.constexpr,
    SCALES_PER_BLOCK: tl.constexpr,  # per head
):
    """Grid (cdiv(num_tokens * NUM_KV_HEADS, TILE_ROWS),): TILE_ROWS (token, head) rows a program.

    A program writes the quarters whose first new token is in one of its rows.
    """
    TOKENS: tl.constexpr = BLOCK_SIZE // SCALES_PER_BLOCK
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    token = row // NUM_KV_HEADS
    head = (row % NUM_KV_HEADS).to(tl.int64)
    in_range = token < num_tokens
    group = tl.load(group_of_head_ptr + head, mask=in_range, other=0).to(tl.int64)
    slot_row_ptr = slot_mapping_ptr + group * stride_slot_group
    slots = Slots(slot_row_ptr, stride_slot_token, num_tokens)
    slot_ptr = slot_row_ptr + token.to(tl.int64) * stride_slot_token
    slot = tl.load(slot_ptr, mask=in_range, other=-1)
    first_slot = tl.where(slot >= 0, slot // TOKENS * TOKENS, 0)

    first_new = tl.full([TILE_ROWS, TILE_SLOTS], NO_TOKEN, tl.int32)
    for begin in range(0, tl.max(token, axis=0) + 1, TILE_SLOTS):
        other = begin + tl.arange(0, TILE_SLOTS)
        position = _position_in_quarter(slots, other, first_slot)
        is_member = (position >= 0) & (position < TOKENS)
        first_new = tl.minimum(first_new, tl.where(is_member, other[None, :], NO_TOKEN))
    is_owned = (slot >= 0) & (tl.min(first_new, axis=1) == token)
    first_owned = tl.min(tl.where(is_owned, token, NO_TOKEN), axis=0)
    if first_owned == NO_TOKEN:
        return

    member = tl.full([TILE_ROWS, TOKENS], -1, tl.int32)
    for begin in range(first_owned, num_tokens, TILE_SLOTS):
        other = begin + tl.arange(0, TILE_SLOTS)
        position = _position_in_quarter(slots, other, first_slot)
        is_here = position[:, :, None] == tl.arange(0, TOKENS)[None, None, :]
        members = tl.where(is_here & is_owned[:, None, None], other[None, :, None], -1)
        member = tl.maximum(member, tl.max(members, axis=1))
    is_first = tl.arange(0, TOKENS)[None, :] == 0
    is_begun = tl.max(tl.where(is_first, member, -1), axis=1) >= 0

    block, first_offset = split_slot(first_slot, BLOCK_SIZE)
    head_base = tl.load(head_base_ptr + head, mask=is_owned, other=0)
    block_stride = tl.load(block_stride_ptr + head, mask=is_owned, other=0)
    offset = first_offset[:, None] + tl.arange(0, TOKENS)[None, :]
    address = (head_base + block * block_stride)[:, None] + offset * token_stride
    address = tl.multiple_of(address, [ALIGNED_CODES, ALIGNED_CODES])[:, :, None]
    scale_base = tl.load(scale_base_ptr + head, mask=is_owned, other=0)
    scale_block_stride = tl.load(scale_block_stride_ptr + head, mask=is_owned, other=0)
    scale_address = scale_base + block * scale_block_stride + first_offset // TOKENS
    scale_address = scale_address[:, None, None]
    member = member.to(tl.int64)[:, :, None]
    head = head[:, None, None]
    quarters = Quarters(member >= 0, is_owned[:, None, None], is_begun[:, None, None])
    x_ptr = key_ptr + member * stride_key_token + head * stride_key_head
    _write_quarters(
        k_cache_ptr + address, k_scale_ptr + scale_address, x_ptr, quarters, HEAD_DIM, FP8_PATH
    )
    x_ptr = value_ptr + member * stride_value_token + head * stride_value_head
    _write_quarters(
        v_cache_ptr + address, v_scale_ptr + scale_address, x_ptr, quarters, HEAD_DIM, FP8_PATH
    )


def write_quarters(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: KVLayout,
    scales: KVScales,
) -> None:
    """Store new keys and values for ``kv_cache_write``, which has checked the arguments."""
    num_tokens = key.shape[0]
    if num_tokens == 0:
        return
    config = QuarterWriteConfig.default_for()
    _quarter_write_kernel[(triton.cdiv(num_tokens * layout.num_kv_heads, config.tile_rows),)](
        *cache_arguments(k_cache, v_cache, scales),
        *with_strides(key),
        *with_strides(value),
        *slot_arguments(slot_mapping, layout),
        num_tokens,
        TILE_ROWS=config.tile_rows,
        TILE_SLOTS=config.tile_slots,
        **layout_constexprs(layout),
        **fp8_constexprs(scales, layout, key.device),
        num_warps=config.num_warps,
    )
