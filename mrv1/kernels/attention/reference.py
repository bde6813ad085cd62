"""Oracles of the attention ops, in plain torch; see :mod:`mrv1.kernels.reference`."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from itertools import pairwise

import torch

from mrv1.kernels._base.oracle import ORACLE_DTYPES, counted, wide
from mrv1.kernels.attention.contracts import (
    check_attn_mask_offsets,
    check_merge_states,
    check_num_kv_splits,
    check_paged_attention,
    check_query_len,
    check_query_start_loc,
)
from mrv1.kernels.attention.decode.plan import (
    DecodePlan,
    Item,
    check_plan,
    check_plan_options,
    first_key,
    num_pieces,
)
from mrv1.kernels.attention.prefill.choice import PrefillSplits, check_splits
from mrv1.kernels.cache.contracts import table_columns
from mrv1.kernels.cache.kv_layout import KVLayout
from mrv1.kernels.cache.kv_scales import KVScales
from mrv1.kernels.cache.reference import gather_kv

_QUERY_TILE = 256  # queries computed at once, which bounds the memory of the scores


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    softmax_scale: float,
    soft_cap: float,
    sinks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(q k^T * scale) v over the visible keys, and its natural log-sum-exp.

    ``q`` [queries, q_heads, head_dim], ``k, v`` [kv_heads, keys, head_dim], ``visible``
    [kv_heads, queries, keys], ``sinks`` [q_heads], -inf = none; ``soft_cap`` 0 = none. Masked keys
    and values may be NaN.
    """
    num_queries, num_q_heads, _ = q.shape
    num_kv_heads, num_keys, _ = k.shape
    packed = wide(q).unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
    hidden = ~visible[:, None]
    scores = ((packed @ k.mT) * softmax_scale).view(num_kv_heads, -1, num_queries, num_keys)
    if soft_cap:
        scores = soft_cap * (scores / soft_cap).tanh()
    scores = scores.masked_fill(hidden, -torch.inf)
    logit_sink = sinks.to(scores.dtype).view(num_kv_heads, -1, 1, 1)
    top = scores.amax(-1, keepdim=True).maximum(logit_sink)
    top = top.masked_fill(top == -torch.inf, 0.0)  # a row that sees nothing
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True) + (logit_sink - top).exp()
    v = v.masked_fill(~visible.any(1)[:, :, None], 0.0)  # 0 * NaN is NaN
    out = (weights.flatten(1, 2) @ v).view(*total.shape[:3], -1)
    out = out / total.masked_fill(total == 0, 1.0)
    lse = (top + total.log()).squeeze(-1)
    return (
        out.permute(2, 0, 1, 3).reshape(num_queries, num_q_heads, -1),
        lse.permute(2, 0, 1).reshape(num_queries, num_q_heads),
    )


def _visible(
    positions: torch.Tensor,
    present: torch.Tensor,
    layout: KVLayout,
    ranges: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [kv_heads, queries, keys], visible or not; ``ranges`` [queries, 2]: not causal."""
    query = positions[None, :, None]
    key = torch.arange(present.shape[1], device=present.device)
    if ranges is None:
        allowed = key <= query
    else:
        allowed = ((key >= ranges[:, :1]) & (key < ranges[:, 1:]))[None]
    visible = allowed & present[:, None]
    if layout.has_window:
        window, sink = layout.window[:, None, None], layout.sink[:, None, None]
        visible &= (window < 0) | (key > query - window) | (key < sink)
    return visible


def _attend_requests(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    query_starts: list[int],
    seq_lens: list[int],
    layout: KVLayout,
    softmax_scale: float,
    soft_cap: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scales: KVScales | None,
    visited: torch.Tensor | None,
    attn_mask_offsets: torch.Tensor | None = None,
    *,
    deterministic: bool,
) -> torch.Tensor:
    """Run attention request by request, so that no row can depend on another's length or pages.

    If deterministic, also head by head: products of all heads are summed as their number demands.
    """
    if sinks is None:
        sinks = torch.full(q.shape[1:2], -torch.inf, device=q.device)
    group = q.shape[1] // layout.num_kv_heads
    for row, seq_len in enumerate(seq_lens):
        begin, end = query_starts[row], query_starts[row + 1]
        num_blocks = -(-seq_len // layout.block_size)
        k, v, present = gather_kv(
            k_cache, v_cache, table[row], num_blocks, layout, scales, wide(q[:0]).dtype
        )
        for first in range(begin, end, _QUERY_TILE):
            last = min(first + _QUERY_TILE, end)
            positions = torch.arange(first, last, device=q.device) + (seq_len - end)
            ranges, end_key = None, seq_len - end + last
            if attn_mask_offsets is not None:
                ranges, end_key = attn_mask_offsets[first:last].clamp(max=seq_len), seq_len
            keys = slice(-(-max(end_key, 0) // layout.block_size) * layout.block_size)
            if keys.stop == 0:
                out[first:last] = 0
                if lse is not None:
                    lse[first:last] = sinks
                continue
            visible = _visible(positions, present[:, keys], layout, ranges)
            for head in range(0, q.shape[1], 1 if deterministic else q.shape[1]):
                own = slice(head, head + 1) if deterministic else slice(None)
                kv = slice(head // group, head // group + 1) if deterministic else slice(None)
                out[first:last, own], tile_lse = _attend(
                    q[first:last, own], k[kv, keys], v[kv, keys], visible[kv],
                    softmax_scale, soft_cap, sinks[own],
                )  # fmt: skip
                if lse is not None:
                    lse[first:last, own] = tile_lse
            if visited is not None:
                if layout.visits_masked:
                    unmasked = replace(layout, has_window=False)
                    visible = _visible(positions, present[:, keys], unmasked, ranges)
                pages = visible.any(1).unflatten(1, (-1, layout.block_size)).any(2)
                head, block = pages.nonzero(as_tuple=True)
                visited[row, head, table_columns(layout, num_blocks)[head, block]] = 1
    return out


def _equal_size(tiles: list[int], plan: DecodePlan, most_items: int) -> int:
    """Return the smallest size within ``most_items`` items; short segments count by tiles."""

    def fits(size: int) -> bool:
        short = [t for t in tiles if 2 * t <= size]
        pieces = sum(-(-t // size) for t in tiles if 2 * t > size)
        counted = pieces - (-sum(short) // size)
        return counted <= most_items and pieces + len(short) <= plan.max_items

    longest = max(tiles, default=1)
    sizes = range(min(plan.config.min_tiles, longest), longest + 1)
    return sizes[bisect_left(sizes, True, key=fits)]


@counted
def plan_decode_attention(seq_lens: torch.Tensor, layout: KVLayout, plan: DecodePlan) -> None:
    """Cut the keys into items; see :func:`mrv1.kernels.plan_decode_attention`."""
    check_plan(plan, seq_lens, layout)
    tile = plan.config.tile_tokens
    segments = []
    for req, seq_len in enumerate(seq_lens.tolist()):
        for head, role in enumerate(layout.roles):
            window, sink = role.window, role.sink
            hides = window >= 0 and not layout.visits_masked
            sink_end = min(sink, seq_len) if hides else 0
            first = max(seq_len - plan.query_len - window + 1, sink_end)
            start = min(first, seq_len) if hides else 0
            whole = Item(
                req=req, head=head, first_work=0, end_work=sink_end + seq_len - start, pieces=1,
                table_offset=role.table_offset, sink_end=sink_end, start=start, window=window,
                sink=sink, ring_blocks=role.ring_blocks, seq_len=seq_len, piece=0,
            )  # fmt: skip
            segments.append(whole)
    tiles = [max(1, -(-segment.end_work // tile)) for segment in segments]
    longest = max(tiles, default=1)
    if plan.num_kv_splits is not None:
        size = -(-longest // plan.num_kv_splits)
    elif plan.deterministic:
        size = max(sum(tiles) // plan.most_items, plan.config.min_tiles)
    else:
        size = _equal_size(tiles, plan, plan.most_items)
        if size >= plan.long_tiles:
            size = _equal_size(tiles, plan, plan.fine_items)
        by_length = sorted(zip(segments, tiles, strict=True), key=lambda each: 2 * each[1] <= size)
        segments, tiles = [each for each, _ in by_length], [count for _, count in by_length]
    items: list[Item] = []
    for whole, num_tiles in zip(segments, tiles, strict=True):
        pieces = -(-num_tiles // size)
        if plan.deterministic:
            pieces = num_pieces(num_tiles * tile) if num_tiles > size else 1
        for piece in range(pieces):
            if plan.deterministic and pieces > 1:
                begin, end = first_key(piece) // tile, first_key(piece + 1) // tile
                end = min(end, num_tiles)
            else:  # the first pieces have one tile more
                share, longer = divmod(num_tiles, pieces)
                begin = piece * share + min(piece, longer)
                end = begin + share + (piece < longer)
            end_work = min(end * tile, whole.end_work)
            item = whole._replace(
                first_work=begin * tile, end_work=end_work, pieces=pieces, piece=piece
            )
            items.append(item)
    if items:
        found = torch.tensor(items, dtype=torch.int32, device=plan.items.device)
        plan.items[: len(items), : found.shape[1]] = found
    plan.num_items.fill_(len(items))
    plan.arrivals[: len(items)] = 0


@counted
def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    layout: KVLayout,
    *,
    softmax_scale: float,
    logits_soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    query_len: int = 1,
    num_kv_splits: int | None = None,
    deterministic: bool = False,
    plan: DecodePlan | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    scales: KVScales | None = None,
    visited: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from the last tokens; see :func:`mrv1.kernels.paged_decode_attention`.

    Options of how keys are cut are checked and have no effect here.
    """
    table = check_paged_attention(
        q, k_cache, v_cache, block_table, seq_lens, layout, ORACLE_DTYPES,
        softmax_scale=softmax_scale, logits_soft_cap=logits_soft_cap, sinks=sinks,
        out=out, lse=lse, scales=scales, visited=visited,
    )  # fmt: skip
    num_reqs = seq_lens.shape[0]
    check_query_len(q, query_len, num_reqs)
    check_num_kv_splits(num_kv_splits)
    check_plan_options(plan, num_kv_splits, deterministic)
    if plan is not None:
        check_plan(plan, seq_lens, layout, num_q_heads=q.shape[1], query_len=query_len)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    starts = list(range(0, (num_reqs + 1) * query_len, query_len))
    return _attend_requests(
        q, k_cache, v_cache, table, starts, seq_lens.tolist(), layout, softmax_scale,
        logits_soft_cap, sinks, out, lse, scales, visited,
        deterministic=deterministic or (plan is not None and plan.deterministic),
    )  # fmt: skip


@counted
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
    logits_soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    attn_mask_offsets: torch.Tensor | None = None,
    splits: PrefillSplits | None = None,
    deterministic: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    scales: KVScales | None = None,
    visited: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from a ragged batch of chunks; see :func:`mrv1.kernels.paged_prefill_attention`.

    Raises (besides the kernel's errors):
        ValueError: ``query_start_loc`` is not an ascending list of rows of ``q``, or a request has
            more than ``max_query_len`` queries.
    """
    table = check_paged_attention(
        q, k_cache, v_cache, block_table, seq_lens, layout, ORACLE_DTYPES,
        softmax_scale=softmax_scale, logits_soft_cap=logits_soft_cap, sinks=sinks,
        out=out, lse=lse, scales=scales, visited=visited,
    )  # fmt: skip
    check_query_start_loc(query_start_loc, seq_lens.shape[0], max_query_len, q.device)
    check_attn_mask_offsets(attn_mask_offsets, q)
    check_splits(splits, q, deterministic)
    starts = query_start_loc.tolist()
    lengths = [end - begin for begin, end in pairwise(starts)]
    if starts[0] != 0 or starts[-1] > q.shape[0] or min(lengths, default=0) < 0:
        raise ValueError(
            f"query_start_loc: expected to ascend from 0 to at most {q.shape[0]}, got {starts}"
        )
    if max(lengths, default=0) > max_query_len:
        raise ValueError(f"max_query_len: expected at least {max(lengths)}, got {max_query_len}")
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    return _attend_requests(
        q, k_cache, v_cache, table, starts, seq_lens.tolist(), layout, softmax_scale,
        logits_soft_cap, sinks, out, lse, scales, visited, attn_mask_offsets,
        deterministic=deterministic,
    )  # fmt: skip


@counted
def merge_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Merge two partial results; see :func:`mrv1.kernels.merge_states`."""
    check_merge_states(out_a, lse_a, out_b, lse_b, ORACLE_DTYPES, out=out, lse=lse)
    sums = torch.stack([lse_a, lse_b])
    unseen = sums == -torch.inf
    top = sums.amax(0)
    weights = (sums - top.masked_fill(top == -torch.inf, 0.0)).exp()
    total = weights.sum(0)
    parts = wide(torch.stack([out_a, out_b])).masked_fill(unseen[..., None], 0.0)
    weighed = (parts * weights[..., None]).sum(0) / total.masked_fill(total == 0, 1.0)[..., None]
    exact = torch.where(unseen[0, ..., None], parts[1], parts[0])  # keeps the sign of a zero
    merged = torch.where(unseen.any(0)[..., None], exact, weighed).to(out_a.dtype)
    if lse is not None:
        lse.copy_(top + total.masked_fill(total == 0, 1.0).log())
    return merged if out is None else out.copy_(merged)
