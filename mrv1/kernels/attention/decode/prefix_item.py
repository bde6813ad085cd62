"""Attention of many query rows to keys that they all see: the loop of a shared prefix's items.

The rows of a tensor core's product are query rows here, not keys as in decode's own loop: with as
many rows as the warps have, 16 each, a row's softmax stays in one warp, and its weights are
operands of the next product as they are. No key is hidden and every page is there, so nothing is
masked.
"""

from __future__ import annotations

from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.attention.online_softmax import (
    LOG2_E,
    SMALLEST_UNIT,
    first_state,
    soft_capped,
)
from mrv1.kernels.cache.addresses import ALIGNED_ELEMENTS, page_offset
from mrv1.kernels.cache.codes import decode_pairs, product_query_pairs, scale_index


@triton.jit
def attend_prefix(
    item, q_row_ptr, in_tile, pages, scales, table_ptr, block, softmax,
    HEAD_DIM: tl.constexpr, CACHE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_TOKENS: tl.constexpr, TILE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Run the online softmax over the keys [first_work, end_work) of an item, in whole tiles.

    Blocks are looked up one tile ahead, from ``table_ptr`` (``block``: the first tile's). For
    scales and pairs of codes see ``_attend_item`` of decode attention.

    Returns:
        (acc, top, total): ``[TILE_ROWS, TILE_DIM]`` sum of weights * v, and per row the largest
        scaled score in base 2 and the sum of weights.
    """
    IS_FP8: tl.constexpr = CACHE.CODEC is not None
    BLOCK_SIZE: tl.constexpr = CACHE.BLOCK_SIZE
    SCALES_PER_BLOCK: tl.constexpr = CACHE.SCALES_PER_BLOCK
    WIDTH: tl.constexpr = TILE_DIM // 2 if IS_FP8 else TILE_DIM  # elements of k_ptr in a row
    column_of = tl.arange(0, WIDTH)
    in_head = column_of < (HEAD_DIM // 2 if IS_FP8 else HEAD_DIM)
    query_mask = in_tile[:, None] & in_head[None, :]
    score_scale = softmax.scale * LOG2_E
    if softmax.soft_cap is not None:
        score_scale *= 2.0 / softmax.soft_cap
    if IS_FP8:
        pair_ptr = q_row_ptr[:, None] + 2 * column_of[None, :]
        q = tl.load(pair_ptr, mask=query_mask, other=0.0)
        q_odd = tl.load(pair_ptr + 1, mask=query_mask, other=0.0)
        q, q_odd, q_unit = product_query_pairs(tl.trans(q), tl.trans(q_odd))
        q, q_odd = tl.trans(q), tl.trans(q_odd)
        score_scale = (q_unit * score_scale)[:, None]
        acc_odd = tl.zeros([TILE_ROWS, WIDTH], dtype=tl.float32)
        v_unit = tl.full([], SMALLEST_UNIT, tl.float32)
        if SCALES_PER_BLOCK == 0:
            score_scale *= tl.load(scales.k_ptr)
            v_unit = tl.load(scales.v_ptr)
    else:
        q = tl.load(q_row_ptr[:, None] + column_of[None, :], mask=query_mask, other=0.0)
    acc = tl.zeros([TILE_ROWS, WIDTH], dtype=tl.float32)
    top, total = first_state(None, TILE_ROWS)
    lane = tl.arange(0, TILE_TOKENS)
    for tile_start in range(item.first_work, item.end_work, TILE_TOKENS):
        token = (tile_start + lane) % BLOCK_SIZE
        if TILE_TOKENS % BLOCK_SIZE == 0:
            token = lane % BLOCK_SIZE  # the same in every tile
        address = page_offset(block, pages.block_stride) + token * pages.token_stride
        address = tl.multiple_of(address, ALIGNED_ELEMENTS)
        offsets = address[:, None] + column_of[None, :]
        if HEAD_DIM != TILE_DIM:
            k = tl.load(pages.k_ptr + offsets, mask=in_head[None, :], other=0)
            v = tl.load(pages.v_ptr + offsets, mask=in_head[None, :], other=0)
        else:
            k = tl.load(pages.k_ptr + offsets)
            v = tl.load(pages.v_ptr + offsets)
        if SCALES_PER_BLOCK > 0:
            scale_address = page_offset(block, scales.block_stride)
            scale_address += scale_index(token, BLOCK_SIZE, SCALES_PER_BLOCK)
            k_scale = tl.load(scales.k_ptr + scale_address)
            v_scale = tl.load(scales.v_ptr + scale_address)
        key = tile_start + TILE_TOKENS + lane
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < item.end_work, other=0)
        if IS_FP8:
            k, k_odd = decode_pairs(k, CACHE.CODEC)
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
            scores = tl.dot(q_odd, tl.trans(k_odd.to(q.dtype)), scores, input_precision=PRECISION)
        else:
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores *= score_scale
        if SCALES_PER_BLOCK > 0:
            scores *= k_scale[None, :]
        if softmax.soft_cap is not None:
            scores = soft_capped(scores, softmax.soft_cap)
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        rescale = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * rescale + tl.sum(weights, axis=1)
        if SCALES_PER_BLOCK > 0:
            new_unit = tl.maximum(v_unit, tl.max(v_scale, axis=0))
            weights *= (v_scale / new_unit)[None, :]
            rescale *= v_unit / new_unit
            v_unit = new_unit
        weights = weights.to(q.dtype)
        acc *= rescale[:, None]
        if IS_FP8:
            v, v_odd = decode_pairs(v, CACHE.CODEC)
            acc = tl.dot(weights, v.to(q.dtype), acc, input_precision=PRECISION)
            acc_odd *= rescale[:, None]
            acc_odd = tl.dot(weights, v_odd.to(q.dtype), acc_odd, input_precision=PRECISION)
        else:
            acc = tl.dot(weights, v, acc, input_precision=PRECISION)
        top = new_top
    if IS_FP8:
        acc = tl.reshape(tl.join(acc, acc_odd), [TILE_ROWS, TILE_DIM]) * v_unit
    return acc, top, total
