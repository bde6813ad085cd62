"""KV cache write with a scale per quarter of a block; ``kv_cache_write`` launches it.

One program owns a (quarter, head) for the launch and does all work on it. Let ``new`` be the new
tokens of the quarter, and ``old`` its stored scale, or 0 if its first token is new or the stored
scale is not positive::

    scale = max(old, absmax(new) / 448, 1e-12)
    code[t] = e4m3(x[t] / scale)                         new t
    code[t] = e4m3(value(code[t]) * old / scale)         other t, if scale > old > 0

Slots may be in any order, so a program has to find the new tokens of its quarter among all tokens.
A small launch compares slots: the owner is the program of the quarter's first new token in the
order of the launch, found by looking at all slots, which is quadratic work. A larger launch has
two small kernels before it, of linear work. The first stores each token's index in the first bytes
of its key's row in the cache, for one head of each group. The second looks at the rows of a
token's quarter: an index found there is a new token if that token's slot is this very row, which
the bytes of an older key cannot fake, as no new token has its slot. The new token with the lowest
slot enters the quarter into its group's list, in any order, which the programs of each head share.

On an H200 with 8 heads of 128 and blocks of 16, 16,384 tokens in the order of their slots, as an
engine writes them, take 47.2 us, half of the copy bandwidth; in random order 314 us.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from mrv1.device import device_info
from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.cache.addresses import ALIGNED_CODES, PagedKV, split_slot
from mrv1.kernels.cache.codes import finite_absmax, quantize, scale_of, to_values
from mrv1.kernels.cache.formats import QUARTERS
from mrv1.kernels.cache.kv_layout import KVLayout
from mrv1.kernels.cache.kv_scales import KVScales
from mrv1.kernels.cache.scale_arguments import (
    cache_arguments,
    codec_constexprs,
    layout_constexprs,
    slot_arguments,
)

NO_TOKEN = tl.constexpr(2**31 - 1)

COMPARED_TOKENS = 256
"""Most tokens of a launch that compares slots: on an H200 it takes 9.9 us for 256 tokens and 17.6
us for 512; the three launches with a list take 16.5 us and 17.5 us."""
LARGE_TOKENS = 8192
"""Fewest tokens of a launch with large tiles: on an H200 16,384 tokens take 47.2 us with tiles of
16 quarters and 55.8 us with 4, and 2,048 tokens 16.8 us and 15.0 us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarterWriteConfig:
    """Launch choices of one write."""

    compares: bool
    """Whether the launch compares slots; else two kernels find the new tokens of each quarter."""
    tile_rows: int  # (token, head) rows per program
    tile_slots: int  # slots compared at once, or tokens per program of the two kernels
    num_warps: int
    programs_per_sm: int
    """Programs of a launch that writes listed quarters, per streaming multiprocessor."""

    @classmethod
    def default_for(cls, num_tokens: int, quarter_elements: int) -> QuarterWriteConfig:
        """Return the configuration, tuned on an H200 for a head of 128 and blocks of 16."""
        compares = num_tokens <= COMPARED_TOKENS
        if INTERPRET:  # the interpreter pays by program and by operation, hardly by size
            return cls(
                compares=compares, tile_rows=128, tile_slots=64, num_warps=1, programs_per_sm=1
            )
        size = triton.next_power_of_2(quarter_elements)
        elements = 2048
        if num_tokens >= LARGE_TOKENS:
            # With 8,192, quarters of other sizes spill on sm_90 and sm_120.
            elements = 8192 if size == 512 else 4096
        return cls(
            compares=compares, tile_rows=1 if compares else max(1, elements // size),
            tile_slots=128, num_warps=4, programs_per_sm=16,
        )  # fmt: skip


class Slots(NamedTuple):
    """The slots of the launch's tokens, in the head group of each row."""

    row_ptr: tl.tensor  # [TILE_ROWS]
    stride_token: tl.tensor
    num_tokens: tl.tensor


class Vectors(NamedTuple):
    """New keys or values, [num_tokens, NUM_KV_HEADS, HEAD_DIM]."""

    ptr: tl.tensor
    stride_token: tl.tensor
    stride_head: tl.tensor


class Quarters(NamedTuple):
    """New tokens of each row's quarter, and whether this program owns or begins the quarter."""

    is_new: tl.tensor  # [TILE_ROWS, TOKENS, 1]
    is_owned: tl.tensor  # [TILE_ROWS, 1, 1], whether this program writes the quarter
    is_begun: tl.tensor  # [TILE_ROWS, 1, 1], whether the quarter's first token is new


@triton.jit
def _position_in_quarter(slots, other, first_slot):
    """Return the positions of tokens ``other`` [TILE_SLOTS] in each row's quarter [TILE_ROWS].

    [0, TOKENS) is inside; the quarter begins at ``first_slot``.
    """
    slot_ptr = slots.row_ptr[:, None] + other.to(tl.int64)[None, :] * slots.stride_token
    slot = tl.load(slot_ptr, mask=(other < slots.num_tokens)[None, :], other=-1)
    return slot - first_slot[:, None]


@triton.jit
def _compared_members(slots, token, slot, first_slot, TOKENS: tl.constexpr, TILE: tl.constexpr):
    """Return the new tokens [TILE_ROWS, TOKENS] int32 of each row's quarter by comparing slots.

    -1 = this position is not new, or another program owns the quarter.
    """
    first_new = tl.full([token.shape[0], TILE], NO_TOKEN, tl.int32)
    for begin in range(0, tl.max(token, axis=0) + 1, TILE):
        other = begin + tl.arange(0, TILE)
        position = _position_in_quarter(slots, other, first_slot)
        is_member = (position >= 0) & (position < TOKENS)
        first_new = tl.minimum(first_new, tl.where(is_member, other[None, :], NO_TOKEN))
    is_owned = (slot >= 0) & (tl.min(first_new, axis=1) == token)
    first_owned = tl.min(tl.where(is_owned, token, NO_TOKEN), axis=0)
    member = tl.full([token.shape[0], TOKENS], -1, tl.int32)
    for begin in range(first_owned, slots.num_tokens, TILE):
        other = begin + tl.arange(0, TILE)
        position = _position_in_quarter(slots, other, first_slot)
        is_here = position[:, :, None] == tl.arange(0, TOKENS)[None, None, :]
        members = tl.where(is_here & is_owned[:, None, None], other[None, :, None], -1)
        member = tl.maximum(member, tl.max(members, axis=1))
    return member


@triton.jit
def _marked_head(group_of_head_ptr, head_base_ptr, block_stride_ptr, NUM_KV_HEADS: tl.constexpr):
    """Return base and block stride of the first head of this program's group, and its index.

    The group is the second program id; the index is NUM_KV_HEADS if the group has no head here.
    """
    heads = tl.arange(0, triton.next_power_of_2(NUM_KV_HEADS))
    group = tl.load(group_of_head_ptr + heads, mask=heads < NUM_KV_HEADS, other=-1)
    head = tl.min(tl.where(group == tl.program_id(1), heads, NUM_KV_HEADS), axis=0)
    has_head = head < NUM_KV_HEADS
    head_base = tl.load(head_base_ptr + head, mask=has_head, other=0)
    return head_base, tl.load(block_stride_ptr + head, mask=has_head, other=0), head


@triton.jit(do_not_specialize=["stride_slot_group", "num_tokens"])
def _mark_tokens_kernel(
    counts_ptr,  # [groups] int32, *written*: 0
    k_cache_ptr,  # one layer's keys, flat, as int32
    slot_mapping_ptr, stride_slot_group, stride_slot_token,  # [groups, tokens] int64, < 0 = skip
    group_of_head_ptr,  # [NUM_KV_HEADS] int32
    head_base_ptr, block_stride_ptr,  # [NUM_KV_HEADS] int64, in codes
    token_stride,  # in codes
    num_tokens,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(num_tokens, TILE_TOKENS), groups): store each token's index in its row."""
    if tl.program_id(0) == 0:
        tl.store(counts_ptr + tl.program_id(1), 0)
    head_base, block_stride, head = _marked_head(
        group_of_head_ptr, head_base_ptr, block_stride_ptr, NUM_KV_HEADS
    )
    token = tl.program_id(0) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    slot_ptr = slot_mapping_ptr + tl.program_id(1).to(tl.int64) * stride_slot_group
    slot_ptr += token.to(tl.int64) * stride_slot_token
    slot = tl.load(slot_ptr, mask=token < num_tokens, other=-1)
    block, offset = split_slot(slot, BLOCK_SIZE)
    address = head_base + block * block_stride + offset * token_stride
    tl.store(k_cache_ptr + address // 4, token, mask=(slot >= 0) & (head < NUM_KV_HEADS))


@triton.jit(do_not_specialize=["stride_slot_group", "num_tokens"])
def _list_quarters_kernel(
    counts_ptr,  # [groups] int32, quarters listed so far
    first_slots_ptr,  # [groups, num_tokens] int64, *written*: first slot of each quarter
    members_ptr,  # [groups, num_tokens, TOKENS] int32, *written*: its new tokens
    k_cache_ptr,  # one layer's keys, flat, as int32, with the indices of the new tokens
    slot_mapping_ptr, stride_slot_group, stride_slot_token,  # [groups, tokens] int64, < 0 = skip
    group_of_head_ptr,  # [NUM_KV_HEADS] int32
    head_base_ptr, block_stride_ptr,  # [NUM_KV_HEADS] int64, in codes
    token_stride,  # in codes
    num_tokens,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, TILE_TOKENS: tl.constexpr,  # of a quarter, of a program
):  # fmt: skip
    """Grid (cdiv(num_tokens, TILE_TOKENS), groups): list the quarters with new tokens.

    The new token at the lowest position of a quarter lists it; -1 = no new token at a position.
    """
    head_base, block_stride, head = _marked_head(
        group_of_head_ptr, head_base_ptr, block_stride_ptr, NUM_KV_HEADS
    )
    token = tl.program_id(0) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    group = tl.program_id(1).to(tl.int64)
    slot_row_ptr = slot_mapping_ptr + group * stride_slot_group
    slot_ptr = slot_row_ptr + token.to(tl.int64) * stride_slot_token
    slot = tl.load(slot_ptr, mask=token < num_tokens, other=-1)
    is_new = (slot >= 0) & (head < NUM_KV_HEADS)
    first_slot = tl.where(slot >= 0, slot // TOKENS * TOKENS, 0)
    position = tl.arange(0, TOKENS)[None, :]
    block, first_offset = split_slot(first_slot, BLOCK_SIZE)
    offset = first_offset[:, None] + position
    address = (head_base + block * block_stride)[:, None] + offset * token_stride
    found = tl.load(k_cache_ptr + address // 4, mask=is_new[:, None], other=-1)
    is_index = (found >= 0) & (found < num_tokens)
    found_ptr = slot_row_ptr + found.to(tl.int64) * stride_slot_token
    found_slot = tl.load(found_ptr, mask=is_index, other=-1)
    is_member = found_slot == first_slot[:, None] + position
    lowest = tl.min(tl.where(is_member, position, TOKENS), axis=1)
    is_listed = is_new & (slot - first_slot == lowest)
    place = tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
    num_listed = tl.sum(is_listed.to(tl.int32), axis=0)
    place += tl.atomic_add(counts_ptr + group, num_listed, sem="relaxed")
    index = group * num_tokens + place
    tl.store(first_slots_ptr + index, first_slot, mask=is_listed)
    member_ptr = members_ptr + index[:, None] * TOKENS + position
    tl.store(member_ptr, tl.where(is_member, found, -1), mask=is_listed[:, None])


@triton.jit
def _write_quarters(
    cache_ptr, scale_ptr, x_ptr, quarters, HEAD_DIM: tl.constexpr, CODEC: tl.constexpr
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
    absmax = tl.max(finite_absmax(x), axis=1, keep_dims=True)
    scale = tl.maximum(old, scale_of(absmax, CODEC))
    has_grown = is_owned & (scale > old) & (old > 0)
    is_moved = has_grown & ~is_new
    code = tl.load(cache_ptr + dim, mask=is_moved & in_head, other=0)
    value = tl.where(is_new, x, to_values(code, CODEC).to(tl.float32) * old)
    code = quantize(value, scale, False, CODEC)
    tl.debug_barrier()  # all warps have read the old scale
    tl.store(scale_ptr, scale, mask=is_owned)
    tl.store(cache_ptr + dim, code, mask=(is_new | is_moved) & in_head)


@triton.jit
def _write_rows(
    pages, scales, key, value, head, first_slot, member, is_owned,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
    CODEC: tl.constexpr,
):  # fmt: skip
    """Write K and V of the quarters at ``first_slot`` of the heads ``head``, [TILE_ROWS] int64.

    ``member``, [TILE_ROWS, TOKENS] int32, are their new tokens, -1 = not new.
    """
    position = tl.arange(0, TOKENS)[None, :]
    is_begun = tl.max(tl.where(position == 0, member, -1), axis=1) >= 0
    block, first_offset = split_slot(first_slot, BLOCK_SIZE)
    head_base = tl.load(pages.base_ptr + head, mask=is_owned, other=0)
    block_stride = tl.load(pages.block_stride_ptr + head, mask=is_owned, other=0)
    offset = first_offset[:, None] + position
    address = (head_base + block * block_stride)[:, None] + offset * pages.token_stride
    address = tl.multiple_of(address, [ALIGNED_CODES, ALIGNED_CODES])[:, :, None]
    scale_base = tl.load(scales.base_ptr + head, mask=is_owned, other=0)
    scale_block_stride = tl.load(scales.block_stride_ptr + head, mask=is_owned, other=0)
    scale_address = scale_base + block * scale_block_stride + first_offset // TOKENS
    scale_address = scale_address[:, None, None]
    member = member.to(tl.int64)[:, :, None]
    head = head[:, None, None]
    quarters = Quarters(member >= 0, is_owned[:, None, None], is_begun[:, None, None])
    x_ptr = key.ptr + member * key.stride_token + head * key.stride_head
    _write_quarters(
        pages.k_ptr + address, scales.k_ptr + scale_address, x_ptr, quarters, HEAD_DIM, CODEC
    )
    x_ptr = value.ptr + member * value.stride_token + head * value.stride_head
    _write_quarters(
        pages.v_ptr + address, scales.v_ptr + scale_address, x_ptr, quarters, HEAD_DIM, CODEC
    )


@triton.jit(do_not_specialize=["stride_slot_group", "num_tokens"])
def _write_quarters_kernel(
    k_cache_ptr, v_cache_ptr,  # one layer's keys and values, flat
    k_scale_ptr, v_scale_ptr,  # float32, flat
    scale_base_ptr, scale_block_stride_ptr,  # [NUM_KV_HEADS] int64, in elements
    key_ptr, stride_key_token, stride_key_head,  # [tokens, heads, HEAD_DIM], unit last stride
    value_ptr, stride_value_token, stride_value_head,  # likewise
    slot_mapping_ptr, stride_slot_group, stride_slot_token,  # [groups, tokens] int64, < 0 = skip
    group_of_head_ptr,  # [NUM_KV_HEADS] int32
    head_base_ptr, block_stride_ptr,  # [NUM_KV_HEADS] int64, in elements
    token_stride,  # in elements
    num_tokens,
    counts_ptr,  # [groups] int32, quarters in each group's list; or None = programs compare slots
    first_slots_ptr,  # [groups, num_tokens] int64, first slot of each quarter; or None
    members_ptr,  # [groups, num_tokens, TOKENS] int32, its new tokens, -1 = not new; or None
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_SLOTS: tl.constexpr,
    CODEC: tl.constexpr, SCALES_PER_BLOCK: tl.constexpr,  # per head
):  # fmt: skip
    """Grid (cdiv(num_tokens * NUM_KV_HEADS, TILE_ROWS),): a program writes quarters it owns.

    With lists (any number, NUM_KV_HEADS): the programs of a head share its group's quarters.
    """
    TOKENS: tl.constexpr = BLOCK_SIZE // SCALES_PER_BLOCK
    pages = PagedKV(k_cache_ptr, v_cache_ptr, head_base_ptr, block_stride_ptr, token_stride)
    scales = PagedKV(k_scale_ptr, v_scale_ptr, scale_base_ptr, scale_block_stride_ptr, 1)
    key = Vectors(key_ptr, stride_key_token, stride_key_head)
    value = Vectors(value_ptr, stride_value_token, stride_value_head)
    if counts_ptr is None:
        row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        token = row // NUM_KV_HEADS
        head = (row % NUM_KV_HEADS).to(tl.int64)
        in_range = token < num_tokens
        group = tl.load(group_of_head_ptr + head, mask=in_range, other=0).to(tl.int64)
        slot_row_ptr = slot_mapping_ptr + group * stride_slot_group
        slot_ptr = slot_row_ptr + token.to(tl.int64) * stride_slot_token
        slot = tl.load(slot_ptr, mask=in_range, other=-1)
        first_slot = tl.where(slot >= 0, slot // TOKENS * TOKENS, 0)
        slots = Slots(slot_row_ptr, stride_slot_token, num_tokens)
        member = _compared_members(slots, token, slot, first_slot, TOKENS, TILE_SLOTS)
        last_member = tl.max(member, axis=1)
        if tl.max(last_member, axis=0) < 0:
            return
        _write_rows(
            pages, scales, key, value, head, first_slot, member, last_member >= 0,
            HEAD_DIM, BLOCK_SIZE, TOKENS, CODEC,
        )  # fmt: skip
    else:
        head = tl.full([TILE_ROWS], tl.program_id(1), tl.int64)
        group = tl.load(group_of_head_ptr + tl.program_id(1)).to(tl.int64)
        count = tl.load(counts_ptr + group)
        position = tl.arange(0, TOKENS)[None, :]
        first, step = tl.program_id(0) * TILE_ROWS, tl.num_programs(0) * TILE_ROWS
        for begin in range(first, count, step):
            quarter = begin + tl.arange(0, TILE_ROWS)
            is_owned = quarter < count
            index = group * num_tokens + quarter
            first_slot = tl.load(first_slots_ptr + index, mask=is_owned, other=0)
            member_ptr = members_ptr + index[:, None] * TOKENS + position
            member = tl.load(member_ptr, mask=is_owned[:, None], other=-1)
            _write_rows(
                pages, scales, key, value, head, first_slot, member, is_owned,
                HEAD_DIM, BLOCK_SIZE, TOKENS, CODEC,
            )  # fmt: skip


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
    quarter_tokens = layout.block_size // QUARTERS
    config = QuarterWriteConfig.default_for(num_tokens, quarter_tokens * layout.head_dim)
    if config.compares:
        lists: tuple[torch.Tensor | None, ...] = (None, None, None)
        grid: tuple[int, ...] = (triton.cdiv(num_tokens * layout.num_kv_heads, config.tile_rows),)
    else:
        lists = _list_quarters(k_cache, slot_mapping, layout, quarter_tokens, config)
        num_programs = config.programs_per_sm * device_info(key.device).num_sms
        grid = (max(1, num_programs // layout.num_kv_heads), layout.num_kv_heads)
    _write_quarters_kernel[grid](
        *cache_arguments(k_cache, v_cache, scales), *with_strides(key), *with_strides(value),
        *slot_arguments(slot_mapping, layout), num_tokens, *lists,
        **layout_constexprs(layout), **codec_constexprs(scales, layout, key.device),
        TILE_ROWS=config.tile_rows, TILE_SLOTS=config.tile_slots, num_warps=config.num_warps,
    )  # fmt: skip


def _list_quarters(
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    layout: KVLayout,
    quarter_tokens: int,
    config: QuarterWriteConfig,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each group's quarters with new tokens: number, first slots, new tokens.

    ``k_cache`` is *written* at the slots, whose new keys come after.
    """
    groups, num_tokens = slot_mapping.shape
    counts = slot_mapping.new_empty(groups, dtype=torch.int32)
    first_slots = slot_mapping.new_empty((groups, num_tokens))
    members = slot_mapping.new_empty((groups, num_tokens, quarter_tokens), dtype=torch.int32)
    codes = k_cache.view(-1).view(torch.uint8)
    words = codes[: codes.numel() // 4 * 4].view(torch.int32)
    grid = (triton.cdiv(num_tokens, config.tile_slots), groups)
    constexprs = {
        "NUM_KV_HEADS": layout.num_kv_heads, "BLOCK_SIZE": layout.block_size,
        "TILE_TOKENS": config.tile_slots, "num_warps": 4,
    }  # fmt: skip
    slots = slot_arguments(slot_mapping, layout)
    _mark_tokens_kernel[grid](counts, words, *slots, num_tokens, **constexprs)
    _list_quarters_kernel[grid](
        counts, first_slots, members, words, *slots, num_tokens, TOKENS=quarter_tokens,
        **constexprs,
    )  # fmt: skip
    return counts, first_slots, members
