"""Paged decode attention: the last 1 to 8 tokens of each request attend to its cache.

    out[i, h] = sum_k softmax_k(softmax_scale * q[i, h] . K[k, h // group]) V[k, h // group]

over the keys ``k`` that ``kv_layout`` lets the query see. Two launches::

    split   grid (requests, kv_heads, splits): an equal share of the *visible* keys each, found on
            the device; the queries of a request times the query heads of a KV head fill one tile
    merge   grid (rows, q_heads): weighs the splits by their log-sum-exp

The grids follow from shapes alone, so a captured graph serves any lengths. With one split there is
no second launch.

Source: FlashAttention (arXiv:2205.14135) for the online softmax, Flash-Decoding (Dao et al., 2023,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html) for the split over keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from mrv1.device import device_info
from mrv1.kernels._checks import FLOAT_DTYPES, check_launchable
from mrv1.kernels._paged import (
    LN_2,
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
    check_num_kv_splits,
    check_paged_attention,
    check_query_len,
)
from mrv1.kernels._scales import cache_arguments, fp8_constexprs, product_dtype
from mrv1.kernels._triton import INTERPRET, tl, triton
from mrv1.kernels.kv_layout import KVLayout
from mrv1.kernels.kv_scales import KVScales

MERGE_TILE_SPLITS = 16
"""Splits the merge kernel reads at once: 16 x 256 fp32 partials are 32 registers a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAttentionConfig:
    """Launch choices of one decode attention."""

    tile_tokens: int
    """Keys per step of a program."""
    num_warps: int
    num_stages: int
    programs_per_sm: int
    """Programs the split count aims at, per streaming multiprocessor."""
    max_splits: int
    """Bound on the split count the launcher chooses."""

    @classmethod
    def default_for(
        cls,
        head_dim: int,
        dtype: torch.dtype,
        tile_rows: int,
        capability: tuple[int, int] | None = None,
    ) -> DecodeAttentionConfig:
        """Return the choice for a head dimension, cache dtype and number of rows in a tile.

        The CUDA compute capability counts beside an fp8 cache; None = unknown, or AMD's.

        Shared memory stays within 80 KiB (NVIDIA) and 64 KiB (gfx942); no target of the compile
        lane spills. H200, bf16, 64 requests x 8192 keys x 8 heads of 128: 98% of the measured copy
        bandwidth with 2 splits (what 4 programs per SM come to), 88% with 1; a third stage costs
        up to 10% at 4 splits, because fewer programs fit an SM.
        """
        if INTERPRET:  # the interpreter pays by program and by operation, hardly by size
            return cls(tile_tokens=128, num_warps=1, num_stages=1, programs_per_sm=0, max_splits=1)
        if dtype == torch.float32:
            # Exact products have no tensor core: a thread holds whole rows of K in registers.
            tile_tokens, num_warps, num_stages = (16 if head_dim > 128 else 32), 8, 1
        elif dtype == torch.float8_e4m3fn:
            # Codes widen to fp16 in registers: 64 tokens spill before sm_90, 2 warps on it too.
            small = capability is None or capability < (9, 0)
            small = small or head_dim > 128 or tile_rows > MIN_DOT_ROWS
            tile_tokens, num_warps, num_stages = (32 if small else 64), 4, 2
        else:
            # Block ids are prefetched only if a tile has one for each of 128 threads; more rows
            # need their registers for scores.
            tile_tokens, num_warps, num_stages = (64 if head_dim > 128 else 128), 4, 2
            if tile_rows > MIN_DOT_ROWS:
                tile_tokens //= 2
        return cls(
            tile_tokens=tile_tokens,
            num_warps=num_warps,
            num_stages=num_stages,
            programs_per_sm=4,
            max_splits=64,
        )

    def choose_splits(self, num_programs: int, max_keys: int, num_sms: int) -> int:
        """Return how many splits fill the device, from shapes alone.

        Args:
            num_programs: requests times KV heads.
            max_keys: tokens a block-table row can name.
            num_sms: streaming multiprocessors.
        """
        wanted = -(-self.programs_per_sm * num_sms // max(num_programs, 1))
        useful = -(-max_keys // self.tile_tokens)
        return max(1, min(wanted, useful, self.max_splits))


@triton.jit
def _paged_decode_attention_kernel(
    out_ptr,  # [num_reqs * QUERY_LEN, q_heads, (splits,) HEAD_DIM], unit last stride
    stride_out_row,
    stride_out_head,
    stride_out_split,
    lse_ptr,  # [num_reqs * QUERY_LEN, q_heads, (splits)] fp32, or None
    stride_lse_row,
    stride_lse_head,
    stride_lse_split,
    q_ptr,  # [num_reqs * QUERY_LEN, q_heads, HEAD_DIM], unit last stride
    stride_q_row,
    stride_q_head,
    k_cache_ptr,  # one layer's keys, flat
    v_cache_ptr,  # one layer's values, flat
    k_scale_ptr,  # float32, flat, or None
    v_scale_ptr,
    scale_base_ptr,  # [kv_heads] int64, elements, or None
    scale_block_stride_ptr,  # [kv_heads] int64, elements, or None
    block_table_ptr,  # [num_reqs, row_width] int32, unit last stride
    stride_table_row,
    seq_lens_ptr,  # [num_reqs] int32
    head_base_ptr,  # [kv_heads] int64, elements
    block_stride_ptr,  # [kv_heads] int64, elements
    table_offset_ptr,  # [kv_heads] int32
    window_ptr,  # [kv_heads] int32
    sink_ptr,  # [kv_heads] int32
    ring_blocks_ptr,  # [kv_heads] int32
    token_stride,  # elements
    softmax_scale,
    QUERY_LEN: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_RING: tl.constexpr,
    IS_PARTIAL: tl.constexpr,  # a merge follows: rows that saw no key need no output
    TILE_ROWS: tl.constexpr,  # power of two >= max(16, QUERY_LEN * GROUP)
    TILE_TOKENS: tl.constexpr,
    TILE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8_PATH: tl.constexpr,  # None = not an fp8 cache
    TOKEN_SCALES: tl.constexpr,
):
    """Grid (num_reqs, kv_heads, splits): one split of one KV head of one request."""
    req = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + req)
    table_offset, window, sink, ring_blocks = load_head_role(
        head, table_offset_ptr, window_ptr, sink_ptr, ring_blocks_ptr, HAS_WINDOW, HAS_RING
    )
    first_position = seq_len - QUERY_LEN
    sink_end, start, num_visible = visible_range(first_position, seq_len, window, sink, HAS_WINDOW)
    num_tiles = tl.cdiv(num_visible, TILE_TOKENS)
    share = tl.cdiv(num_tiles, tl.num_programs(2)) * TILE_TOKENS
    first_work = split.to(tl.int32) * share
    end_work = tl.minimum(first_work + share, num_visible)

    row = tl.arange(0, TILE_ROWS)
    in_tile = row < QUERY_LEN * GROUP
    query = row // GROUP
    query_position = tl.where(in_tile, first_position + query, -1)
    out_row = req * QUERY_LEN + query
    q_head = (head * GROUP + row % GROUP).to(tl.int64)
    dims = tl.arange(0, TILE_DIM)
    mask = in_tile[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = (out_row * stride_q_row + q_head * stride_q_head)[:, None] + dims[None, :]
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
        block_table_ptr + req * stride_table_row,
        first_work,
        end_work,
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
    out_offsets = out_row * stride_out_row + q_head * stride_out_head + split * stride_out_split
    out = normalized(acc, total).to(out_ptr.dtype.element_ty)
    if IS_PARTIAL:
        mask &= (total != 0.0)[:, None]
    tl.store(out_ptr + out_offsets[:, None] + dims[None, :], out, mask=mask)
    if lse_ptr is not None:
        lse_offsets = (
            out_row * stride_lse_row + q_head * stride_lse_head + split * stride_lse_split
        )
        tl.store(lse_ptr + lse_offsets, natural_lse(top, total), mask=in_tile)


@triton.jit
def _merge_splits_kernel(
    out_ptr,  # [num_rows, q_heads, HEAD_DIM], unit last stride
    stride_out_row,
    stride_out_head,
    lse_ptr,  # [num_rows, q_heads] fp32, or None
    stride_lse_row,
    stride_lse_head,
    partial_ptr,  # [num_rows, q_heads, NUM_SPLITS, HEAD_DIM] fp32, contiguous
    partial_lse_ptr,  # [num_rows, q_heads, NUM_SPLITS] fp32, contiguous; -inf = nothing seen
    NUM_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ALL_SPLITS: tl.constexpr,  # power of two >= NUM_SPLITS
    TILE_SPLITS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """Grid (num_rows, q_heads): out = sum_s exp(lse_s - lse) partial_s over the splits s."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    first_split = (row * tl.num_programs(1) + head) * NUM_SPLITS
    all_splits = tl.arange(0, TILE_ALL_SPLITS)
    all_lse = tl.load(
        partial_lse_ptr + first_split + all_splits,
        mask=all_splits < NUM_SPLITS,
        other=float("-inf"),
    )
    top = tl.max(all_lse, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2((all_lse - shift) * LOG2_E), axis=0)
    total = tl.where(total == 0.0, 1.0, total)  # nothing seen: zeros, and lse = top = -inf

    dims = tl.arange(0, TILE_DIM)
    in_head = dims < HEAD_DIM
    acc = tl.zeros([TILE_DIM], dtype=tl.float32)
    for tile_start in range(0, NUM_SPLITS, TILE_SPLITS):
        split = tile_start + tl.arange(0, TILE_SPLITS)
        lse = tl.load(
            partial_lse_ptr + first_split + split, mask=split < NUM_SPLITS, other=float("-inf")
        )
        seen = lse != float("-inf")  # a split without keys has written no partial
        weight = tl.exp2((lse - shift) * LOG2_E) / total
        partial = tl.load(
            partial_ptr + (first_split + split)[:, None] * HEAD_DIM + dims[None, :],
            mask=seen[:, None] & in_head[None, :],
            other=0.0,
        )
        acc += tl.sum(weight[:, None] * partial, axis=0)
    out_offset = row * stride_out_row + head * stride_out_head
    tl.store(out_ptr + out_offset + dims, acc.to(out_ptr.dtype.element_ty), mask=in_head)
    if lse_ptr is not None:
        lse_offset = row * stride_lse_row + head * stride_lse_head
        tl.store(lse_ptr + lse_offset, top + tl.log2(total) * LN_2)


def _split_launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: KVLayout,
    config: DecodeAttentionConfig,
    tile_rows: int,
    *,
    softmax_scale: float,
    query_len: int,
    num_kv_splits: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scales: KVScales | None,
) -> None:
    """Launch the split kernel; ``out, lse [rows, q_heads, splits, ...]``."""
    _paged_decode_attention_kernel[(seq_lens.shape[0], layout.num_kv_heads, num_kv_splits)](
        out,
        out.stride(0),
        out.stride(1),
        out.stride(2),
        lse,
        *((0, 0, 0) if lse is None else lse.stride()),
        q,
        q.stride(0),
        q.stride(1),
        *cache_arguments(k_cache, v_cache, scales),
        table,
        table.stride(0),
        seq_lens,
        layout.head_base,
        layout.block_stride,
        layout.table_offset,
        layout.window,
        layout.sink,
        layout.ring_blocks,
        layout.token_stride,
        softmax_scale,
        QUERY_LEN=query_len,
        GROUP=q.shape[1] // layout.num_kv_heads,
        HEAD_DIM=layout.head_dim,
        BLOCK_SIZE=layout.block_size,
        HAS_WINDOW=layout.has_window,
        HAS_RING=layout.has_ring,
        IS_PARTIAL=num_kv_splits > 1,
        TILE_ROWS=tile_rows,
        TILE_TOKENS=config.tile_tokens,
        TILE_DIM=triton.next_power_of_2(layout.head_dim),
        PRECISION=dot_precision(q.dtype),
        **fp8_constexprs(scales, q.device),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _merge_launch(
    states: torch.Tensor,
    states_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Launch the merge of ``states [rows, q_heads, splits, dim]`` and their log-sum-exps."""
    num_rows, num_q_heads, num_splits, head_dim = states.shape
    _merge_splits_kernel[(num_rows, num_q_heads)](
        out,
        out.stride(0),
        out.stride(1),
        lse,
        *((0, 0) if lse is None else lse.stride()),
        states,
        states_lse,
        NUM_SPLITS=num_splits,
        HEAD_DIM=head_dim,
        TILE_ALL_SPLITS=triton.next_power_of_2(num_splits),
        TILE_SPLITS=min(MERGE_TILE_SPLITS, triton.next_power_of_2(num_splits)),
        TILE_DIM=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: KVLayout,
    *,
    softmax_scale: float,
    query_len: int = 1,
    num_kv_splits: int | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Attend from the last ``query_len`` tokens of each request to its paged cache.

    Query ``j`` of request ``r`` is row ``r * query_len + j`` of ``q`` and sits at position
    ``seq_lens[r] - query_len + j``; it sees the keys that ``kv_layout`` says. Full and streaming
    heads, with tables of their own or shared ones, go in the same launch.

    Args:
        q: ``[num_reqs * query_len, q_heads, head_dim]`` fp16, bf16 or fp32; any row and head
            stride, unit last stride. ``q_heads`` is a multiple of the layout's KV heads.
        k_cache: one layer's key buffer, any shape, contiguous, dtype of ``q``, or with ``scales``
            float8_e4m3fn or its uint8 view; addressed flat by ``layout``. Pages that no query may
            see are not read, and may hold NaN.
        v_cache: one layer's value buffer, likewise.
        block_table: ``[num_reqs, row_width]`` int32 in batch-row order, or contiguous per-head
            ``[num_reqs * kv_heads, max_blocks]``; -1 = no page, its keys are skipped.
        seq_lens: ``[num_reqs]`` int32, tokens including the queries; 0 = padding row.
        layout: where the pages lie and what each head may see.
        softmax_scale: factor of the scores, usually ``head_dim ** -0.5``.
        query_len: queries per request, 1 to 8.
        num_kv_splits: programs that share one request's keys, 1 to 256; None = as many as fill the
            device, chosen from shapes alone. Changes the result by rounding only.
        out: like ``q``; *written*. None = a new tensor.
        lse: ``[num_reqs * query_len, q_heads]`` fp32, *written* if given: the natural log-sum-exp
            of the scaled scores.
        scales: of an fp8 cache, else None. Pages that are not read may have NaN for scales too.

    Returns:
        ``out``. A row that sees no key is zero, its ``lse`` -inf.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, device, stride or count, or a head dimension without a kernel.
        UnsupportedDeviceError: the tensors are where this process cannot launch.

    Numerics:
        Products accumulate in fp32 (fp32 inputs: no TF32), the softmax is fp32, its weights are
        rounded to the cache's dtype before the product with V. Tier B. An fp8 cache is multiplied
        in fp16 (fp32 if ``q`` is), its scales go into scores and weights in fp32.

    Stream:
        One or two launches on the current stream, grids from shapes alone: CUDA-graph safe. With
        more than one split a fp32 scratch ``[rows, q_heads, splits, head_dim]`` is allocated.

    Source:
        arXiv:2205.14135 and Flash-Decoding, as in the module docstring.
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
    num_reqs = seq_lens.shape[0]
    check_query_len(q, query_len, num_reqs)
    check_num_kv_splits(num_kv_splits)
    check_head_dim(layout)
    check_launchable("q", q)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if num_reqs == 0:
        return out
    tile_rows = triton.next_power_of_2(query_len * (q.shape[1] // layout.num_kv_heads))
    tile_rows = max(MIN_DOT_ROWS, tile_rows)
    info = device_info(q.device)
    config = DecodeAttentionConfig.default_for(
        layout.head_dim, product_dtype(q, scales), tile_rows, info.capability
    )
    if num_kv_splits is None:
        num_kv_splits = config.choose_splits(
            num_reqs * layout.num_kv_heads,
            block_table.shape[1] * layout.block_size,
            info.num_sms,
        )
    launch = partial(
        _split_launch,
        q,
        k_cache,
        v_cache,
        table,
        seq_lens,
        layout,
        config,
        tile_rows,
        softmax_scale=softmax_scale,
        query_len=query_len,
        num_kv_splits=num_kv_splits,
        scales=scales,
    )
    if num_kv_splits == 1:
        launch(out=out.unsqueeze(2), lse=None if lse is None else lse.unsqueeze(2))
        return out
    shape = (*q.shape[:2], num_kv_splits, q.shape[2])
    states = torch.empty(shape, dtype=torch.float32, device=q.device)
    states_lse = torch.empty(shape[:3], dtype=torch.float32, device=q.device)
    launch(out=states, lse=states_lse)
    _merge_launch(states, states_lse, out, lse)
    return out
