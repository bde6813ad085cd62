"""From the fused qkv projection to attention's inputs: norm, rotate, store, in one launch.

Per token, with ``[q, k, v] = qkv``::

    q, k = rms_norm(q), rms_norm(k)                  (if weights are given)
    q, k = apply_rope(q), apply_rope(k)              (if a table of angles is given)
    q, k = q @ H, k @ H                              (if blocks of a Hadamard matrix are given)
    kv_cache_write(k, v)
    q_out = q

Norm and rotation are those of ``rms_norm`` and ``apply_rope``, and round to the dtype as they do.

Multimodal rope (M-RoPE) gives a token three positions: in time, height and width. A pair turns by
one of them: in three consecutive sections (Qwen2-VL, Qwen2.5-VL), or in turn (Qwen3-VL).

The Hadamard matrix leaves all scores as they are and spreads a key's few large channels over all
of a block, so that codes of 4 bits lose less.

Source: Wang et al., "Qwen2-VL" (2024), section 2.1, for M-RoPE; Ashkboos et al., "QuaRot"
(arXiv:2404.00456), for Hadamard matrices before keys are quantised.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from mrv1.kernels._base.arguments import with_strides
from mrv1.kernels._base.checks import FLOAT_DTYPES, check_launchable
from mrv1.kernels._base.dependent_launch import let_next_start, overlap_options, wait_for_previous
from mrv1.kernels._base.mrope import load_mrope_positions
from mrv1.kernels._base.triton import INTERPRET, tl, triton
from mrv1.kernels.cache.addresses import ALIGNED_CODES, ALIGNED_ELEMENTS, split_slot
from mrv1.kernels.cache.codes import (
    codes_in_byte,
    is_nibbles,
    pack_nibbles,
    quantize,
    scale_of_parts,
)
from mrv1.kernels.cache.contracts import QKNorm, Rope, check_cache_write, check_head_dim, check_qkv
from mrv1.kernels.cache.kv_layout import KVLayout
from mrv1.kernels.cache.kv_scales import KVScales
from mrv1.kernels.cache.quarter_write import write_quarters
from mrv1.kernels.cache.scale_arguments import (
    cache_arguments,
    codec_constexprs,
    layout_constexprs,
    slot_arguments,
)

OVERLAPPED_PROGRAMS = 4096
"""Most programs of a launch that starts early: on an H200 an early start saves 0.5 us of 3.7 at
256 tokens (1,536 programs) and costs 0.8 us of 14.8 at 2,048 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QKVCacheWriteConfig:
    """How the work is cut into programs: each program has heads of one kind, q, k or v."""

    tile_tokens: int  # tokens of one program
    tile_heads: int  # heads of one program
    num_warps: int

    @classmethod
    @lru_cache(maxsize=256)
    def default_for(cls, head_dim: int, dtype: torch.dtype) -> QKVCacheWriteConfig:
        """Return the configuration for a GPU: one token and few heads, for parallel small decodes.

        A thread loads 16 bytes of each half of a head. On an H200, 8 bytes are 6% slower from
        2,048 tokens on, 32 bytes 7 to 15% slower up to 256 tokens.
        """
        row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
        return cls(tile_tokens=1, tile_heads=max(1, 2048 // row_bytes), num_warps=2)

    @classmethod
    def for_interpreter(
        cls, num_tokens: int, num_heads: int, head_dim: int
    ) -> QKVCacheWriteConfig:
        """Return one program for all q, one for k and one for v, up to 2^18 elements each."""
        heads = triton.next_power_of_2(num_heads)
        most = max(1, 2**18 // (heads * triton.next_power_of_2(head_dim)))
        tokens = min(triton.next_power_of_2(num_tokens), most)
        return cls(tile_tokens=tokens, tile_heads=heads, num_warps=1)


# A head has three parts: both elements of each pair (a, b), and the rest, not turned by rope.


@triton.jit
def _load_head(
    row_ptr, in_row, NUM_PAIRS: tl.constexpr, NUM_REST: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Return (a, b, rest) of each head; ``rest`` is a placeholder if NUM_REST is 0.

    ``row_ptr`` (pointers to the heads) and ``in_row`` are [TILE_TOKENS, TILE_HEADS, 1].
    """
    TILE_TOKENS: tl.constexpr = row_ptr.shape[0]
    TILE_HEADS: tl.constexpr = row_ptr.shape[1]
    TILE_PAIRS: tl.constexpr = triton.next_power_of_2(NUM_PAIRS)
    if INTERLEAVED:  # one contiguous load, then even and odd elements apart
        col = tl.arange(0, 2 * TILE_PAIRS)[None, None, :]
        pairs = tl.load(row_ptr + col, mask=in_row & (col < 2 * NUM_PAIRS), other=0.0)
        a, b = tl.split(tl.reshape(pairs, [TILE_TOKENS, TILE_HEADS, TILE_PAIRS, 2]))
    else:
        pair = tl.arange(0, TILE_PAIRS)[None, None, :]
        in_pairs = in_row & (pair < NUM_PAIRS)
        a = tl.load(row_ptr + pair, mask=in_pairs, other=0.0)
        b = tl.load(row_ptr + NUM_PAIRS + pair, mask=in_pairs, other=0.0)
    if NUM_REST > 0:
        col = tl.arange(0, triton.next_power_of_2(NUM_REST))[None, None, :]
        rest = tl.load(row_ptr + 2 * NUM_PAIRS + col, mask=in_row & (col < NUM_REST), other=0.0)
    else:
        rest = tl.zeros([TILE_TOKENS, TILE_HEADS, 1], a.dtype)
    return a, b, rest


@triton.jit
def _store_head(
    row_ptr, parts, in_row,
    NUM_PAIRS: tl.constexpr, NUM_REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Store ``parts``, the (a, b, rest) that _load_head loads."""
    a, b, rest = parts
    TILE_PAIRS: tl.constexpr = triton.next_power_of_2(NUM_PAIRS)
    if INTERLEAVED:
        col = tl.arange(0, 2 * TILE_PAIRS)[None, None, :]
        pairs = tl.reshape(tl.join(a, b), [a.shape[0], a.shape[1], 2 * TILE_PAIRS])
        tl.store(row_ptr + col, pairs, mask=in_row & (col < 2 * NUM_PAIRS))
    else:
        pair = tl.arange(0, TILE_PAIRS)[None, None, :]
        in_pairs = in_row & (pair < NUM_PAIRS)
        tl.store(row_ptr + pair, a, mask=in_pairs)
        tl.store(row_ptr + NUM_PAIRS + pair, b, mask=in_pairs)
    if NUM_REST > 0:
        col = tl.arange(0, triton.next_power_of_2(NUM_REST))[None, None, :]
        tl.store(row_ptr + 2 * NUM_PAIRS + col, rest, mask=in_row & (col < NUM_REST))


@triton.jit
def _square(x):
    x = x.to(tl.float32)
    return x * x


@triton.jit
def _scaled(x, scale, weight):
    """Return ``x * scale * weight``, rounded where ``rms_norm`` rounds."""
    dtype: tl.constexpr = x.dtype
    normed = x.to(tl.float32) * scale
    if weight.dtype != tl.float32:
        normed = normed.to(dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(dtype)


@triton.jit
def _store_packed(
    row_ptr, codes, in_row,
    NUM_PAIRS: tl.constexpr, NUM_REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Store the 4-bit codes of a head's parts, of which neighbours share a byte."""
    a, b, rest = codes
    if NUM_REST > 0:
        rest = pack_nibbles(rest)
    if INTERLEAVED:
        pair = tl.arange(0, triton.next_power_of_2(NUM_PAIRS))[None, None, :]
        tl.store(row_ptr + pair, a | (b << 4), mask=in_row & (pair < NUM_PAIRS))
        if NUM_REST > 0:
            col = tl.arange(0, triton.next_power_of_2(NUM_REST) // 2)[None, None, :]
            tl.store(row_ptr + NUM_PAIRS + col, rest, mask=in_row & (col < NUM_REST // 2))
    else:
        parts = pack_nibbles(a), pack_nibbles(b), rest
        _store_head(row_ptr, parts, in_row, NUM_PAIRS // 2, NUM_REST // 2, False)


@triton.jit
def _mixed(x, BLOCK: tl.constexpr):
    """Return float32 ``x`` times a Hadamard matrix in blocks of BLOCK along the last axis.

    Each stage adds and subtracts neighbours, and places sums before differences: after log2(BLOCK)
    stages all elements are back in their places. Without the factor BLOCK ** -0.5.
    """
    TOKENS: tl.constexpr = x.shape[0]
    HEADS: tl.constexpr = x.shape[1]
    WIDTH: tl.constexpr = x.shape[2]
    x = tl.reshape(x, [TOKENS * HEADS, WIDTH // BLOCK, BLOCK])
    for _ in tl.static_range(_log2(BLOCK)):
        even, odd = tl.split(tl.reshape(x, [TOKENS * HEADS, WIDTH // BLOCK, BLOCK // 2, 2]))
        both = tl.permute(tl.join(even + odd, even - odd), (0, 1, 3, 2))
        x = tl.reshape(both, [TOKENS * HEADS, WIDTH // BLOCK, BLOCK])
    return tl.reshape(x, [TOKENS, HEADS, WIDTH])


@triton.constexpr_function
def _log2(power_of_two: int) -> int:
    return power_of_two.bit_length() - 1


@triton.jit(do_not_specialize=["num_tokens"])
def _qkv_cache_write_kernel(
    k_cache_ptr, v_cache_ptr,  # one layer's keys and values, flat
    k_scale_ptr, v_scale_ptr,  # float32, flat, or None
    scale_base_ptr, scale_block_stride_ptr,  # [NUM_KV_HEADS] int64, in elements, or None
    # [tokens, heads, HEAD_DIM], unit last strides: q, maybe the one in qkv; k, or None; q, k and v
    q_out_ptr, stride_q_out_token, stride_q_out_head,
    k_out_ptr, stride_k_out_token, stride_k_out_head,
    qkv_ptr, stride_qkv_token, stride_qkv_head,
    q_norm_ptr, k_norm_ptr,  # [HEAD_DIM], or None
    eps,
    cos_sin_ptr,  # [rows, 2 * NUM_PAIRS] float32: cosines, then sines; or None
    positions_ptr,  # [num_tokens] or [3, num_tokens] int64, rows of cos_sin; None = one per token
    stride_positions_axis,
    slot_mapping_ptr, stride_slot_group, stride_slot_token,  # [groups, tokens] int64, < 0 = skip
    group_of_head_ptr,  # [NUM_KV_HEADS] int32
    head_base_ptr, block_stride_ptr,  # [NUM_KV_HEADS] int64, in elements
    token_stride,  # in elements
    num_tokens,
    NUM_Q_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,  # HEAD_DIM / 2 without rope
    HADAMARD: tl.constexpr,  # channels of a block of the Hadamard matrix, 0 = none
    SECTION: tl.constexpr, MROPE_INTERLEAVED: tl.constexpr,  # of M-RoPE; None = one position
    GROUPS: tl.constexpr,  # whether there is more than one head group
    BLOCK_SIZE: tl.constexpr, TILE_TOKENS: tl.constexpr, TILE_HEADS: tl.constexpr,
    CODEC: tl.constexpr,  # None = no codes, see codes.py
    SCALES_PER_BLOCK: tl.constexpr,  # per head: BLOCK_SIZE, 0 = one scale; else k, v not stored
    OVERLAP: tl.constexpr,  # see dependent_launch
):  # fmt: skip
    """Grid (cdiv(num_tokens, TILE_TOKENS), NUM_Q_TILES + 2 * NUM_KV_TILES): a tile of q, k or v.

    All loads come first, so that a load waits for nothing but its address; a program masks the
    loads that its kind (q, k or v) does not need. Writing q in place is safe: a thread stores the
    elements that it has loaded.
    """
    NUM_Q_TILES: tl.constexpr = (NUM_Q_HEADS + TILE_HEADS - 1) // TILE_HEADS
    NUM_KV_TILES: tl.constexpr = (NUM_KV_HEADS + TILE_HEADS - 1) // TILE_HEADS
    NUM_REST: tl.constexpr = HEAD_DIM - 2 * NUM_PAIRS
    ALIGNED: tl.constexpr = ALIGNED_ELEMENTS if CODEC is None else ALIGNED_CODES
    TOKEN_SCALES: tl.constexpr = SCALES_PER_BLOCK == BLOCK_SIZE
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    token = tl.program_id(0).to(tl.int64) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)[:, None, None]
    tile = tl.program_id(1)
    is_token = token < num_tokens
    is_q = tile < NUM_Q_TILES
    is_v = tile >= NUM_Q_TILES + NUM_KV_TILES
    pair = tl.arange(0, triton.next_power_of_2(NUM_PAIRS))[None, None, :]
    position = token
    if positions_ptr is not None:
        position_ptr = positions_ptr + token
        is_turned = is_token & (not is_v)
        if SECTION is None:
            position = tl.load(position_ptr, mask=is_turned, other=0)
        else:
            position = load_mrope_positions(
                position_ptr, stride_positions_axis, pair, is_turned, SECTION, MROPE_INTERLEAVED
            )
    first_tile = tl.where(is_v, NUM_Q_TILES + NUM_KV_TILES, tl.where(is_q, 0, NUM_Q_TILES))
    first_head = tl.where(is_v, NUM_Q_HEADS + NUM_KV_HEADS, tl.where(is_q, 0, NUM_Q_HEADS))
    head = (tile - first_tile) * TILE_HEADS + tl.arange(0, TILE_HEADS)[None, :, None]
    head = head.to(tl.int64)
    in_row = is_token & (head < tl.where(is_q, NUM_Q_HEADS, NUM_KV_HEADS))
    row_ptr = qkv_ptr + token * stride_qkv_token + (first_head + head) * stride_qkv_head

    is_cached = (head < NUM_KV_HEADS) & (not is_q)
    slot_ptr = slot_mapping_ptr + token * stride_slot_token
    if GROUPS:
        group = tl.load(group_of_head_ptr + head, mask=is_cached, other=0).to(tl.int64)
        slot_ptr += group * stride_slot_group
    a, b, rest = _load_head(row_ptr, in_row, NUM_PAIRS, NUM_REST, INTERLEAVED)
    if q_norm_ptr is not None:
        # One pointer per head, here and below: the loaded tiles then have the layout of a and b.
        norm_ptr = tl.broadcast_to(tl.where(is_q, q_norm_ptr, k_norm_ptr), in_row.shape)
        weight_a, weight_b, weight_rest = _load_head(
            norm_ptr, in_row & (not is_v), NUM_PAIRS, NUM_REST, INTERLEAVED
        )
    head_base = tl.load(head_base_ptr + head, mask=is_cached, other=0)
    block_stride = tl.load(block_stride_ptr + head, mask=is_cached, other=0)
    if CODEC is not None:
        scale_base = tl.load(scale_base_ptr + head, mask=is_cached, other=0)
        scale_block_stride = tl.load(scale_block_stride_ptr + head, mask=is_cached, other=0)
    is_kv_row = in_row & (not is_q)
    slot = tl.load(slot_ptr, mask=is_kv_row, other=-1)
    if cos_sin_ptr is not None:
        has_angle = in_row & (not is_v) & (pair < NUM_PAIRS)
        angle_ptr = cos_sin_ptr + position * (2 * NUM_PAIRS) + pair
        angle_ptr = tl.broadcast_to(angle_ptr, a.shape)
        cos = tl.load(angle_ptr, mask=has_angle, other=0.0)
        sin = tl.load(angle_ptr + NUM_PAIRS, mask=has_angle, other=0.0)

    tl.debug_barrier()  # loads stay above; work on only some of them stays below, in its branch
    if not is_v:
        if q_norm_ptr is not None:
            squares = tl.sum(_square(a) + _square(b), axis=2, keep_dims=True)
            if NUM_REST > 0:
                squares += tl.sum(_square(rest), axis=2, keep_dims=True)
            factor = tl.rsqrt(squares / HEAD_DIM + eps)
            a = _scaled(a, factor, weight_a)
            b = _scaled(b, factor, weight_b)
            rest = _scaled(rest, factor, weight_rest)
        if cos_sin_ptr is not None:
            x, y = a.to(tl.float32), b.to(tl.float32)
            a = (x * cos - y * sin).to(a.dtype)
            b = (y * cos + x * sin).to(b.dtype)
        if HADAMARD > 0:
            dtype: tl.constexpr = a.dtype
            norm: tl.constexpr = HADAMARD**-0.5
            x, y = a.to(tl.float32), b.to(tl.float32)
            if INTERLEAVED:  # neighbours are a and b
                x, y = x + y, x - y
                a = (_mixed(x, HADAMARD // 2) * norm).to(dtype)
                b = (_mixed(y, HADAMARD // 2) * norm).to(dtype)
            else:
                a = (_mixed(x, HADAMARD) * norm).to(dtype)
                b = (_mixed(y, HADAMARD) * norm).to(dtype)
            if NUM_REST > 0:
                rest = (_mixed(rest.to(tl.float32), HADAMARD) * norm).to(dtype)

    if k_out_ptr is not None:
        k_row_ptr = k_out_ptr + token * stride_k_out_token + head * stride_k_out_head
        is_k_row = is_kv_row & (not is_v)
        _store_head(k_row_ptr, (a, b, rest), is_k_row, NUM_PAIRS, NUM_REST, INTERLEAVED)
    kept = slot >= 0
    block, offset = split_slot(slot, BLOCK_SIZE)
    address = head_base + block * block_stride + offset * token_stride
    address = tl.multiple_of(address, [ALIGNED, ALIGNED, ALIGNED])
    cache_ptr = tl.where(is_v, v_cache_ptr, k_cache_ptr)
    target_ptr = q_out_ptr
    target = token * stride_q_out_token + head * stride_q_out_head
    stored = in_row & is_q
    if CODEC is None:
        target_ptr = tl.where(is_q, q_out_ptr, cache_ptr)
        target = tl.where(is_q, target, address)
        stored |= kept
    _store_head(target_ptr + target, (a, b, rest), stored, NUM_PAIRS, NUM_REST, INTERLEAVED)
    if CODEC is not None and (TOKEN_SCALES or SCALES_PER_BLOCK == 0):
        scale_ptr = tl.where(is_v, v_scale_ptr, k_scale_ptr) + scale_base
        if not is_q:
            if TOKEN_SCALES:
                scale = scale_of_parts((a, b, rest), CODEC)
                tl.store(scale_ptr + block * scale_block_stride + offset, scale, mask=kept)
            else:
                scale = tl.load(scale_ptr, mask=is_cached, other=1.0)
            code_ptr = cache_ptr + address // codes_in_byte(CODEC)
            a_code = quantize(a, scale, TOKEN_SCALES, CODEC)
            b_code = quantize(b, scale, TOKEN_SCALES, CODEC)
            codes = a_code, b_code, quantize(rest, scale, TOKEN_SCALES, CODEC)
            if is_nibbles(CODEC):
                _store_packed(code_ptr, codes, kept, NUM_PAIRS, NUM_REST, INTERLEAVED)
            else:
                _store_head(code_ptr, codes, kept, NUM_PAIRS, NUM_REST, INTERLEAVED)


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
    """Norm and rotate q and k of a fused projection, store k and v in their pages, return q.

    Args:
        qkv: ``[num_tokens, (num_q_heads + 2 * kv_heads) * head_dim]`` fp16, bf16 or fp32, or its
            three-dimensional view; unit last stride, any other strides.
        k_cache: one layer's key buffer, as ``kv_cache_write`` takes it. *Written* at the slots.
        v_cache: one layer's value buffer, likewise.
        slot_mapping: ``[groups, num_tokens]`` int64; negative = nothing is stored for the token in
            that group's heads, but its q is returned.
        layout: where the pages lie.
        num_q_heads: number of query heads, which come before the key heads in ``qkv``.
        rope: how q and k are rotated; None = no rotation.
        norm: the norms of query heads and key heads, before the rotation; None = no norm.
        hadamard: channels of each block of the orthogonal Hadamard matrix that q and k are
            multiplied by after the rotation; 0 = none, else a power of two that divides halves
            of the rotated channels, and the others (``hadamard_block`` gives the largest).
        q_out: ``[num_tokens, num_q_heads, head_dim]``, qkv's dtype, unit last stride, *written*;
            may be the view of q in ``qkv``, but overlap with nothing else. Allocated if omitted.
        k_out: ``[num_tokens, kv_heads, head_dim]``, qkv's dtype, unit last stride, *written* with
            all tokens' normed, rotated and mixed keys, not quantised. For debugging; None = not
            stored.
        scales: the scales of a cache of codes, else None, as ``kv_cache_write`` takes them. Per
            quarter, the store is a launch of its own, and ``k_out`` is allocated if omitted.

    Raises:
        TypeError, ValueError, UnsupportedDeviceError: an argument is not as described.

    Numerics: cache bytes and scales equal those of ``kv_cache_write`` on ``k_out`` and on qkv's
        view of v (tier A). q and k are rounded where ``rms_norm`` and ``apply_rope`` round, and
        once more after the Hadamard matrix, whose sums are fp32; only the norm's sum of squares
        may be added in another order. Tier B; k within two bf16 units in the last place of the
        oracle.
    Stream: one launch on the current stream, and those of ``kv_cache_write`` with a scale per
        quarter; no synchronisation, CUDA-graph safe.
    """
    heads = check_qkv(
        qkv, num_q_heads, layout, rope, norm, hadamard, q_out, k_out, scales, FLOAT_DTYPES
    )
    key, value = heads[:, num_q_heads:].chunk(2, dim=1)
    check_cache_write(key, value, k_cache, v_cache, slot_mapping, layout, FLOAT_DTYPES, scales)
    check_head_dim(layout)
    check_launchable("qkv", qkv)
    num_tokens, _, head_dim = heads.shape
    if q_out is None:
        q_out = qkv.new_empty((num_tokens, num_q_heads, head_dim))
    if num_tokens == 0:
        return q_out
    num_kv_heads = layout.num_kv_heads
    quarters = scales if scales is not None and scales.granularity == "quarter" else None
    if quarters is not None and k_out is None:
        k_out = qkv.new_empty((num_tokens, num_kv_heads, head_dim))
    most_heads = max(num_q_heads, num_kv_heads)
    if INTERPRET:
        config = QKVCacheWriteConfig.for_interpreter(num_tokens, most_heads, head_dim)
    else:
        config = QKVCacheWriteConfig.default_for(head_dim, qkv.dtype)
    q_tiles = triton.cdiv(num_q_heads, config.tile_heads)
    kv_tiles = triton.cdiv(num_kv_heads, config.tile_heads)
    token_tiles = triton.cdiv(num_tokens, config.tile_tokens)
    num_tiles = q_tiles + (2 if quarters is None else 1) * kv_tiles  # no programs for v
    _qkv_cache_write_kernel[(token_tiles, num_tiles)](
        *cache_arguments(k_cache, v_cache, scales),
        *with_strides(q_out), *with_strides(k_out), *with_strides(heads),
        *((None, None, 0.0) if norm is None else (norm.q_weight, norm.k_weight, norm.eps)),
        *((None, None, 0) if rope is None else (rope.cos_sin, *with_strides(rope.positions, 1))),
        *slot_arguments(slot_mapping, layout), num_tokens,
        NUM_Q_HEADS=num_q_heads, GROUPS=layout.num_groups > 1, HADAMARD=hadamard,
        TILE_TOKENS=config.tile_tokens, TILE_HEADS=config.tile_heads,
        **_rope_constexprs(rope, head_dim), **layout_constexprs(layout),
        **codec_constexprs(scales, layout, qkv.device),
        **overlap_options(qkv.device, worthwhile=token_tiles * num_tiles <= OVERLAPPED_PROGRAMS),
        num_warps=config.num_warps,
    )  # fmt: skip
    if quarters is not None and k_out is not None:
        write_quarters(k_out, value, k_cache, v_cache, slot_mapping, layout, quarters)
    return q_out


def _rope_constexprs(rope: Rope | None, head_dim: int) -> dict[str, object]:
    """Return the constexprs of the rotation; without ``rope`` a head is all pairs."""
    return {
        "NUM_PAIRS": head_dim // 2 if rope is None else rope.cos_sin.shape[1] // 2,
        "INTERLEAVED": rope is not None and rope.interleaved,
        "SECTION": None if rope is None else rope.mrope_section,
        "MROPE_INTERLEAVED": rope is not None and rope.mrope_interleaved,
    }
