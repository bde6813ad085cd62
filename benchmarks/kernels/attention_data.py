"""Random queries and paged caches for one cell, and the exact result for some of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.kernels.attention_case import AttentionCase
from mrv1.headwise import HeadGroups, HeadPolicy
from mrv1.kernels import DecodePlan, KVLayout, KVScales, PrefillSplits
from mrv1.runner.kv_cache import CacheSpec, KVCache

QUANTIZED_ROWS = 1 << 18
"""Vectors quantised at once: their float32 form takes 128 MiB for heads of 128."""
NUM_CHECKED_REQUESTS = 4
NUM_CHECKED_QUERIES = 8
"""Queries of each checked request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One of the rotated buffer sets: the tensors that each layer of a model has of its own."""

    q: torch.Tensor
    """[tokens, q_heads, head_dim]."""
    k: torch.Tensor
    """Flat; in a uniform case [blocks, kv_heads, block_size, head_dim]."""
    v: torch.Tensor
    out: torch.Tensor
    """Like ``q``."""
    scales: KVScales | None
    """Scales of ``k`` and ``v``, in their order; None without codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionData:
    """The data of a cell on a device; all layers share tables and lengths, as in a model."""

    case: AttentionCase
    cache: KVCache
    layout: KVLayout
    """The layout of every layer."""
    block_table: torch.Tensor
    """[batch, columns] int32, ids in random order."""
    seq_lens: torch.Tensor
    """[batch] int32, in random order."""
    query_start_loc: torch.Tensor
    """[batch + 1] int32."""
    layers: list[Layer]
    sinks: torch.Tensor | None
    """[q_heads] float32; None without logit sinks."""

    @property
    def block_of_page(self) -> torch.Tensor:
        """[batch, pages of the longest request] int32: ``block_table`` with the rings unrolled.

        All KV heads share it, so that they have to see the same.
        """
        (group,) = self.cache.groups.groups
        pages = torch.arange(-(-self.case.cell.context // self.case.block_size))
        if group.ring_blocks:
            turn = group.sink_blocks + (pages - group.sink_blocks) % group.ring_blocks
            pages = torch.where(pages < group.sink_blocks, pages, turn)
        return self.block_table[:, group.offset + pages.to(self.block_table.device)]

    def clear(self) -> None:
        """Fill every layer's ``out`` with NaN."""
        for layer in self.layers:
            layer.out.fill_(torch.nan)

    @property
    def softmax_scale(self) -> float:
        """Factor of the scores."""
        return float(self.case.head_dim**-0.5)

    @property
    def logits(self) -> dict[str, Any]:
        """Options of our kernels that change the scores."""
        scale, soft_cap = self.softmax_scale, self.case.soft_cap
        return {"softmax_scale": scale, "logits_soft_cap": soft_cap, "sinks": self.sinks}

    def new_plan(self, deterministic: bool) -> DecodePlan:
        """Return the buffers of a plan for one query per request."""
        case = self.case
        return DecodePlan.allocate(
            max_reqs=case.cell.num_requests,
            max_keys=self.block_table.shape[1] * case.block_size,
            layout=self.layout,
            num_q_heads=case.num_q_heads,
            dtype=case.dtype,
            page_format=case.page_format,
            deterministic=deterministic,
        )

    def new_splits(self) -> PrefillSplits | None:
        """Return the buffers of tiles with several programs; None in a decode or without them."""
        case = self.case
        if case.query_len == 1:
            return None
        return PrefillSplits.allocate(
            num_tokens=case.num_tokens,
            num_reqs=case.cell.num_requests,
            max_query_len=case.query_len,
            layout=self.layout,
            num_q_heads=case.num_q_heads,
            dtype=case.dtype,
            page_format=case.page_format,
        )


def cache_shape(
    case: AttentionCase, num_layers: int
) -> tuple[CacheSpec, HeadGroups, tuple[int, ...]]:
    """Return a cache's pages, its head groups, and the blocks of each group, all in use."""
    spec = CacheSpec(
        num_layers=num_layers,
        num_kv_heads=case.num_kv_heads,
        block_size=case.block_size,
        head_dim=case.head_dim,
        page_format=case.page_format,
    )
    heads = tuple(case.visible(head) for head in range(case.num_kv_heads))
    groups = HeadGroups.of_roles(
        HeadPolicy((heads,) * num_layers),
        block_size=case.block_size,
        max_model_len=case.cell.context,
        # A prefill writes its whole chunk before it reads: its ring must hold all of the chunk.
        max_query_len=1 if case.query_len == 1 else case.cell.context,
    )
    return spec, groups, tuple(case.cell.num_requests * group.width for group in groups.groups)


def make_data(
    case: AttentionCase, num_layers: int, device: torch.device, seed: int
) -> AttentionData:
    """Return random data for a cell: normal K, V and q, pages in random order.

    Every page belongs to a request; ``out`` is NaN until it is written.
    """
    generator = torch.Generator(device).manual_seed(seed)
    cache = KVCache(*cache_shape(case, num_layers), device)
    batch = case.cell.num_requests

    def ids(count: int) -> torch.Tensor:
        return torch.randperm(count, generator=generator, device=device).view(batch, -1)

    q_shape = (case.num_tokens, case.num_q_heads, case.head_dim)
    seq_lens = torch.tensor(case.cell.lengths, dtype=torch.int32, device=device)
    if (
        not case.cell.num_decodes
    ):  # all have as many queries, so that lengths may come in any order
        seq_lens = seq_lens[torch.randperm(batch, generator=generator, device=device)]
    query_lens = torch.tensor([0, *case.query_lens], dtype=torch.int32, device=device)
    layers = []
    for layer in cache.layers:
        k, v, scales = layer.k, layer.v, layer.scales
        q = torch.empty(q_shape, dtype=case.dtype, device=device).normal_(generator=generator)
        if scales is None:
            k.normal_(generator=generator)
            v.normal_(generator=generator)
        else:
            _fill_codes(case, k, scales.k_scale, generator)
            _fill_codes(case, v, scales.v_scale, generator)
        out = torch.full_like(q, torch.nan)
        layers.append(Layer(q=q, k=k, v=v, out=out, scales=scales))
    sinks = None
    if case.has_sinks:
        sinks = torch.randn(case.num_q_heads, generator=generator, device=device)
    return AttentionData(
        case=case,
        cache=cache,
        layout=cache.layers[0].layout,
        block_table=torch.cat([*map(ids, cache.num_blocks)], dim=1).to(torch.int32),
        seq_lens=seq_lens,
        query_start_loc=query_lens.cumsum(0, dtype=torch.int32),
        layers=layers,
        sinks=sinks,
    )


def _fill_codes(
    case: AttentionCase, codes: torch.Tensor, scales: torch.Tensor, generator: torch.Generator
) -> None:
    """Write normal vectors as codes, and the scale of each vector or of each quarter."""
    flat_scales = scales.view(-1)
    page_format = case.page_format
    stored = page_format.stored_dim(case.head_dim)
    vectors = codes.view(torch.uint8).view(len(flat_scales), -1, stored)
    parts = zip(vectors.split(QUANTIZED_ROWS), flat_scales.split(QUANTIZED_ROWS), strict=True)
    for part, scale in parts:
        shape = (*part.shape[:2], case.head_dim)
        x = torch.empty(shape, device=codes.device).normal_(generator=generator)
        scale.copy_(page_format.scale(x).amax(dim=1))
        part.copy_(page_format.encode(x, scale[:, None]))


def relative_error(data: AttentionData, layer: Layer) -> float:
    """Return the largest ``|out - exact| / |exact|`` of a head's vector in some rows of ``out``.

    The exact rows are a dense softmax in float64. Its keys (of codes, their values) are
    gathered page by page, without the address formula that the kernels share. The checked rows
    are the first and last query and some between them, of the first and last request and some
    between them. A NaN in ``out`` makes the result NaN.
    """
    case, lengths = data.case, data.seq_lens.tolist()
    starts = data.query_start_loc.tolist()
    errors = []
    for req in _spread(case.cell.num_requests, NUM_CHECKED_REQUESTS):
        queries = _spread(case.query_lens[req], NUM_CHECKED_QUERIES)
        rows = torch.tensor(queries, device=layer.q.device) + starts[req]
        positions = rows - starts[req + 1] + lengths[req]
        for head in range(case.num_kv_heads):
            exact = _exact_rows(data, layer, head, req, rows, positions)
            out = layer.out.view(len(layer.out), case.num_kv_heads, -1, case.head_dim)
            got = out[rows, head].double()
            errors.append(((got - exact).norm(dim=-1) / exact.norm(dim=-1)).max())
    return float(torch.stack(errors).max())


def _spread(count: int, wanted: int) -> list[int]:
    """Return up to ``wanted`` numbers of ``range(count)``, among them the first and the last."""
    if count <= wanted:
        return list(range(count))
    return [index * (count - 1) // (wanted - 1) for index in range(wanted)]


def _exact_rows(
    data: AttentionData,
    layer: Layer,
    head: int,
    req: int,
    rows: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Return ``[rows, group, head_dim]`` float64 for one KV head."""
    case, groups, of_head = data.case, data.cache.groups.groups, data.cache.groups.group_of_head[0]
    group = groups[of_head[head]]
    window, sink = case.visible(head)
    keys = torch.arange(int(positions.max()) + 1, device=rows.device)
    visible = keys <= positions[:, None]
    if window >= 0:
        visible &= (keys > positions[:, None] - window) | (keys < sink)
    seen = visible.any(dim=0)
    keys, visible = keys[seen], visible[:, seen]
    logical = keys // case.block_size
    if group.ring_blocks:
        turn = group.sink_blocks + (logical - group.sink_blocks) % group.ring_blocks
        logical = torch.where(logical < group.sink_blocks, logical, turn)
    blocks = data.block_table[req, group.offset + logical].long()
    index = of_head[:head].count(of_head[head])
    num_pages = [case.cell.num_requests * each.width * each.num_heads[0] for each in groups]

    def gather(vectors: torch.Tensor, per_block: int) -> torch.Tensor:
        page = (per_block, *vectors.shape[1:])
        pages: torch.Tensor = vectors.view(-1, *page).split(num_pages)[of_head[head]]
        places = keys % case.block_size * per_block // case.block_size
        return pages.view(-1, group.num_heads[0], *page)[blocks, index, places]

    stored = case.page_format.stored_dim(case.head_dim)
    k, v = (gather(x.view(-1, stored), case.block_size) for x in (layer.k, layer.v))
    if layer.scales is not None:
        per_block = case.page_format.scales_per_block(case.block_size)
        k_scale, v_scale = (
            gather(x.view(-1), per_block) for x in (layer.scales.k_scale, layer.scales.v_scale)
        )
        k = case.page_format.decode(k, k_scale, torch.float64)
        v = case.page_format.decode(v, v_scale, torch.float64)
    k, v = k.double(), v.double()
    q = layer.q.view(len(layer.q), case.num_kv_heads, -1, case.head_dim)[rows, head].double()
    scores = (q @ k.T) * data.softmax_scale
    if case.soft_cap:
        scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if data.sinks is not None:
        sinks = data.sinks.double().view(case.num_kv_heads, -1, 1)[head]
        scores = torch.cat([scores, sinks.expand(len(rows), -1, -1)], dim=-1)
    return scores.softmax(dim=-1)[..., : len(v)] @ v
