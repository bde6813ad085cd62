"""Paged prefill attention: ragged chunks of queries attend to their requests' caches.

    out[i, h] = sum_k softmax_k(softmax_scale * q[i, h] . K[k, h // group]) V[k, h // group]

over the keys ``k`` that ``kv_layout`` lets the query see: causal, window and sink per KV head. One
launch; a program owns a tile of TILE_QUERIES queries times the query heads of one KV head. Request
``r`` owns the tiles from::

    first_tile(r) = query_start_loc[r] // TILE_QUERIES + r

which ascends strictly and leaves every request enough of them, as floor(a + b) >= floor(a) +
floor(b), so the grid follows from shapes alone and a tile finds its request by bisection.

Source: FlashAttention (arXiv:2205.14135) for the online softmax; the tile map is the one vLLM's
Triton kernels use for ragged batches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mrv1.device import device_info
from mrv1.kernels._checks import FLOAT_DTYPES, check_launchable
from mrv1.kernels._paged import (
    LOG2_E,
    MIN_DOT_ROWS,
    attend_keys,
    dot_precision,
    load_head_role,
    natural_lse,
    normalized,
    visible_range,
)
from mrv1.kernels._paged_checks import (
    check_head_dim,
    check_paged_attention,
    check_query_start_loc,
)
from mrv1.kernels._scales import cache_arguments, fp8_constexprs, product_dtype
from mrv1.kernels._triton import INTERPRET, tl, triton
from mrv1.kernels.kv_layout import KVLayout
from mrv1.kernels.kv_scales import KVScales

_BIG_SHARED_MEMORY = ((9, 0), (10, 0), (10, 3))
"""Compute capabilities with 227 KiB of shared memory per program; others have 64 to 163."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAttentionConfig:
    """Launch choices of one prefill attention."""

    tile_rows: int
    """(query, query head) rows per program, a power of two >= 16."""
    tile_tokens: int
    """Keys per step of a program."""
    num_warps: int
    num_stages: int

    @classmethod
    def default_for(
        cls, head_dim: int, dtype: torch.dtype, capability: tuple[int, int] | None
    ) -> PrefillAttentionConfig:
        """Return the choice for a head dimension, cache dtype and CUDA compute capability."""
        if INTERPRET:  # the interpreter pays by program and by operation, hardly by size
            return cls(tile_rows=256, tile_tokens=128, num_warps=1, num_stages=1)
        if dtype == torch.float32:
            # Exact products have no tensor core: a thread holds whole rows of K in registers.
            num_warps = 4 if head_dim > 128 else 8
            return cls(tile_rows=16, tile_tokens=16, num_warps=num_warps, num_stages=1)
        if dtype == torch.float8_e4m3fn:
            # Codes widen to fp16 in registers: with more keys at once they spill. 64 rows would
            # take wgmma on sm_90, where triton 3.6 gave wrong rows at head_dim 16.
            stages = 2 if head_dim > 128 else 3  # two spill on sm_89 at 128, three on sm_80 at 256
            return cls(tile_rows=32, tile_tokens=32, num_warps=4, num_stages=stages)
        if head_dim > 128:
            # One stage keeps within gfx942's 64 KiB; 8 warps because 4 spill on sm_89.
            stages = 2 if capability in _BIG_SHARED_MEMORY else 1
            return cls(tile_rows=64, tile_tokens=32, num_warps=8, num_stages=stages)
        if capability in _BIG_SHARED_MEMORY:
            return cls(tile_rows=128, tile_tokens=64, num_warps=8, num_stages=3)
        tile_tokens = 32 if head_dim > 64 else 64  # 64 spills on sm_89
        return cls(tile_rows=64, tile_tokens=tile_tokens, num_warps=4, num_stages=2)

    def fit_rows(self, group: int, max_query_len: int) -> PrefillAttentionConfig:
        """Return the same choice with room for one query, and for no more than there can be."""
        one = max(MIN_DOT_ROWS, triton.next_power_of_2(group))
        needed = max(one, triton.next_power_of_2(group * max_query_len))
        if needed < self.tile_rows:
            return replace(self, tile_rows=needed, num_warps=min(self.num_warps, 4))
        return replace(self, tile_rows=max(one, self.tile_rows))


@triton.jit
def _find_request(query_start_loc_ptr, tile, num_reqs, TILE_QUERIES: tl.constexpr):
    """Return the last request whose first tile is not behind ``tile``, and that first tile."""
    low = tl.zeros([], dtype=tl.int32)
    high = low + num_reqs
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = tl.load(query_start_loc_ptr + middle) // TILE_QUERIES + middle
        low = tl.where(first_tile <= tile, middle, low)
        high = tl.where(first_tile <= tile, high, middle)
    return low, tl.load(query_start_loc_ptr + low) // TILE_QUERIES + low


@triton.jit
def _paged_prefill_attention_kernel(
    out_ptr,  # [num_tokens, q_heads, HEAD_DIM], unit last stride
    stride_out_token,
    stride_out_head,
    lse_ptr,  # [num_tokens, q_heads] fp32, or None
    stride_lse_token,
    stride_lse_head,
    q_ptr,  # [num_tokens, q_heads, HEAD_DIM], unit last stride
    stride_q_token,
    stride_q_head,
    k_cache_ptr,  # one layer's keys, flat
    v_cache_ptr,  # one layer's values, flat
    k_scale_ptr,  # float32, flat, or None
    v_scale_ptr,
    scale_base_ptr,  # [kv_heads] int64, elements, or None
    scale_block_stride_ptr,  # [kv_heads] int64, elements, or None
    block_table_ptr,  # [num_reqs, row_width] int32, unit last stride
    stride_table_row,
    query_start_loc_ptr,  # [num_reqs + 1] int32
    seq_lens_ptr,  # [num_reqs] int32
    num_reqs,
    head_base_ptr,  # [kv_heads] int64, elements
    block_stride_ptr,  # [kv_heads] int64, elements
    table_offset_ptr,  # [kv_heads] int32
    window_ptr,  # [kv_heads] int32
    sink_ptr,  # [kv_heads] int32
    ring_blocks_ptr,  # [kv_heads] int32
    token_stride,  # elements
    softmax_scale,
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_RING: tl.constexpr,
    TILE_QUERIES: tl.constexpr,  # TILE_ROWS // GROUP
    TILE_ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8_PATH: tl.constexpr,  # None = not an fp8 cache
    TOKEN_SCALES: tl.constexpr,
):
    """Grid (num_tokens // TILE_QUERIES + num_reqs, kv_heads): one query tile of one KV head."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    req, first_tile = _find_request(query_start_loc_ptr, tile, num_reqs, TILE_QUERIES)
    query_start = tl.load(query_start_loc_ptr + req)
    query_len = tl.load(query_start_loc_ptr + req + 1) - query_start
    first_query = (tile - first_tile) * TILE_QUERIES
    if first_query >= query_len:
        return
    end_query = tl.minimum(first_query + TILE_QUERIES, query_len)
    context_len = tl.load(seq_lens_ptr + req) - query_len
    first_position = context_len + first_query
    end_position = context_len + end_query  # <= 0 in a padding row: nothing visible, no step
    table_offset, window, sink, ring_blocks = load_head_role(
        head, table_offset_ptr, window_ptr, sink_ptr, ring_blocks_ptr, HAS_WINDOW, HAS_RING
    )
    sink_end, start, num_visible = visible_range(
        first_position, end_position, window, sink, HAS_WINDOW
    )

    row = tl.arange(0, TILE_ROWS)
    query = first_query + row // GROUP
    in_tile = query < end_query
    query_position = tl.where(in_tile, context_len + query, -1)
    token = (query_start + query).to(tl.int64)
    q_head = (head * GROUP + row % GROUP).to(tl.int64)
    dims = tl.arange(0, TILE_DIM)
    mask = in_tile[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = (token * stride_q_token + q_head * stride_q_head)[:, None] + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=mask, other=0.0)

    acc, top, total = attend_keys(
        q,
        query_position,
        k_cache_ptr,
        v_cache_ptr,
        k_scale_ptr,
        v_scale_ptr,
        scale_base_ptr,
        scale_block_stride_ptr,
        head,
        head_base_ptr,
        block_stride_ptr,
        block_table_ptr + req.to(tl.int64) * stride_table_row,
        0,
        num_visible,
        sink_end,
        start,
        table_offset,
        window,
        sink,
        ring_blocks,
        token_stride,
        softmax_scale * LOG2_E,
        HEAD_DIM,
        BLOCK_SIZE,
        HAS_WINDOW,
        HAS_RING,
        TILE_ROWS,
        TILE_TOKENS,
        TILE_DIM,
        PRECISION,
        FP8_PATH,
        TOKEN_SCALES,
    )
    out_offsets = token * stride_out_token + q_head * stride_out_head
    out = normalized(acc, total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offsets[:, None] + dims[None, :], out, mask=mask)
    if lse_ptr is not None:
        lse_offsets = token * stride_lse_token + q_head * stride_lse_head
        tl.store(lse_ptr + lse_offsets, natural_lse(top, total), mask=in_tile)


def paged_prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: KVLayout,
    *,
    softmax_scale: float,
    max_query_len: int,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Attend from a ragged batch of chunks, decodes among them, to their paged caches.

    The queries of request ``r`` are rows ``query_start_loc[r]`` to ``query_start_loc[r + 1]`` of
    ``q``; the last one sits at position ``seq_lens[r] - 1``. Each sees the keys that ``kv_layout``
    says, so the chunk's own keys must be in the cache already.

    Args:
        q: ``[num_tokens, q_heads, head_dim]`` fp16, bf16 or fp32; any token and head stride, unit
            last stride. ``q_heads`` is a multiple of the layout's KV heads.
        k_cache: one layer's key buffer, any shape, contiguous, dtype of ``q``, or with ``scales``
            float8_e4m3fn or its uint8 view; addressed flat by ``layout``. Pages that no query may
            see may hold NaN.
        v_cache: one layer's value buffer, likewise.
        block_table: ``[num_reqs, row_width]`` int32 in batch-row order, or contiguous per-head
            ``[num_reqs * kv_heads, max_blocks]``; -1 = no page, its keys are skipped.
        query_start_loc: ``[num_reqs + 1]`` int32, ascending from 0 to at most ``num_tokens`` (also
            called ``cu_seqlens_q``). A request without queries is fine.
        seq_lens: ``[num_reqs]`` int32, tokens including the queries (also ``context_lens``).
        layout: where the pages lie and what each head may see.
        softmax_scale: factor of the scores, usually ``head_dim ** -0.5``.
        max_query_len: upper bound on a request's queries; bounds the tile, not the result. 0 says
            that there are none (``q`` may still have rows of padding).
        out: like ``q``; *written* in rows before ``query_start_loc[-1]``, untouched behind. None =
            a new tensor, whose rows behind are uninitialised.
        lse: ``[num_tokens, q_heads]`` fp32, *written* likewise if given: the natural
            log-sum-exp of the scaled scores.
        scales: of an fp8 cache, else None. Pages no query may see may have NaN for scales too.

    Returns:
        ``out``. A row that sees no key is zero, its ``lse`` -inf.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, device or stride, or a head dimension without a kernel.
        UnsupportedDeviceError: the tensors are where this process cannot launch.

    Numerics:
        As ``paged_decode_attention``: fp32 accumulation and softmax, weights rounded to the
        cache's dtype before the product with V. Tier B.

    Stream:
        One launch on the current stream, its grid from shapes alone: CUDA-graph safe, no scratch.

    Source:
        arXiv:2205.14135, as in the module docstring.
    """
    table = check_paged_attention(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        layout,
        FLOAT_DTYPES,
        out=out,
        lse=lse,
        scales=scales,
    )
    num_tokens, num_q_heads, _ = q.shape
    num_reqs = seq_lens.shape[0]
    check_query_start_loc(query_start_loc, num_reqs, max_query_len, q.device)
    group = num_q_heads // layout.num_kv_heads
    check_head_dim(layout)
    check_launchable("q", q)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if num_reqs == 0 or num_tokens == 0 or max_query_len == 0:
        return out
    capability = device_info(q.device).capability
    config = PrefillAttentionConfig.default_for(
        layout.head_dim, product_dtype(q, scales), capability
    )
    config = config.fit_rows(group, max_query_len)
    tile_queries = config.tile_rows // group
    num_tiles = num_tokens // tile_queries + num_reqs
    _paged_prefill_attention_kernel[(num_tiles, layout.num_kv_heads)](
        out,
        out.stride(0),
        out.stride(1),
        lse,
        *((0, 0) if lse is None else lse.stride()),
        q,
        q.stride(0),
        q.stride(1),
        *cache_arguments(k_cache, v_cache, scales),
        table,
        table.stride(0),
        query_start_loc,
        seq_lens,
        num_reqs,
        layout.head_base,
        layout.block_stride,
        layout.table_offset,
        layout.window,
        layout.sink,
        layout.ring_blocks,
        layout.token_stride,
        softmax_scale,
        GROUP=group,
        HEAD_DIM=layout.head_dim,
        BLOCK_SIZE=layout.block_size,
        HAS_WINDOW=layout.has_window,
        HAS_RING=layout.has_ring,
        TILE_QUERIES=tile_queries,
        TILE_ROWS=config.tile_rows,
        TILE_TOKENS=config.tile_tokens,
        TILE_DIM=triton.next_power_of_2(layout.head_dim),
        PRECISION=dot_precision(q.dtype),
        **fp8_constexprs(scales, q.device),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out
