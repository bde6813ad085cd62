"""Random queries and paged caches for one cell, and the exact result for some of its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mrv1.bench.attention_case import AttentionCase
from mrv1.kernels import DecodePlan, HeadRole, KVLayout, KVScales, PrefillSplits
from mrv1.kernels.reference import quantize_e4m3, token_scale

QUANTIZED_ROWS = 1 << 18
"""Vectors quantised at once: the float32 they come from is 128 MiB for heads of 128."""
NUM_CHECKED_REQUESTS = 4
NUM_CHECKED_QUERIES = 8
"""Of each checked request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The heads of one role: pages of their own, and a segment of every block-table row."""

    heads: list[int]
    sink_blocks: int
    ring_blocks: int
    """0 = a column per logical block."""
    first_column: int
    num_columns: int
    base: int
    """Element of the buffers where the pages start."""
    num_blocks: int

    def column(self, positions: torch.Tensor, block_size: int) -> torch.Tensor:
        """Return the block-table columns that hold token positions."""
        logical = positions // block_size
        if self.ring_blocks:
            turn = self.sink_blocks + (logical - self.sink_blocks) % self.ring_blocks
            logical = torch.where(logical < self.sink_blocks, logical, turn)
        return self.first_column + logical


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One of the rotated buffer sets: what one layer of a model has for itself."""

    q: torch.Tensor
    """[tokens, q_heads, head_dim]."""
    k: torch.Tensor
    """Flat; a uniform case's is [blocks, kv_heads, block_size, head_dim]."""
    v: torch.Tensor
    out: torch.Tensor
    """Like ``q``."""
    scales: KVScales | None
    """Of an fp8 case; flat, a scale for each vector of ``k`` and ``v`` in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionData:
    """A cell on a device; tables and lengths serve all layers, as in a model."""

    case: AttentionCase
    layout: KVLayout
    pools: list[Pool]
    block_table: torch.Tensor
    """[batch, columns] int32, ids in random order."""
    seq_lens: torch.Tensor
    """[batch] int32."""
    query_start_loc: torch.Tensor
    """[batch + 1] int32."""
    layers: list[Layer]

    @property
    def softmax_scale(self) -> float:
        """Factor of the scores."""
        return float(self.case.head_dim**-0.5)

    def new_plan(self, deterministic: bool) -> DecodePlan:
        """Return the buffers of a plan for one query per request."""
        case = self.case
        return DecodePlan.allocate(
            max_reqs=case.cell.batch,
            max_keys=self.block_table.shape[1] * case.block_size,
            layout=self.layout,
            num_q_heads=case.num_q_heads,
            dtype=case.dtype,
            is_fp8=case.is_fp8,
            deterministic=deterministic,
        )

    def new_splits(self) -> PrefillSplits | None:
        """Return what programs of a prefill share, None where a tile has one, or in a decode."""
        case = self.case
        if case.query_len == 1:
            return None
        return PrefillSplits.allocate(
            num_tokens=case.num_tokens,
            num_reqs=case.cell.batch,
            max_query_len=case.query_len,
            layout=self.layout,
            num_q_heads=case.num_q_heads,
            dtype=case.dtype,
            is_fp8=case.is_fp8,
        )


def buffer_elements(case: AttentionCase) -> int:
    """Return the elements of K, or of V, that one layer holds."""
    last = _pools(case)[-1]
    return last.base + last.num_blocks * len(last.heads) * case.block_size * case.head_dim


def _pools(case: AttentionCase) -> list[Pool]:
    """Return the full heads' pool and the streaming heads', whichever there are."""
    pools: list[Pool] = []
    base = first_column = 0
    for full in (True, False):
        heads = [head for head in range(case.num_kv_heads) if case.is_full(head) == full]
        if not heads:
            continue
        sink_blocks = 0 if full else math.ceil(case.sink / case.block_size)
        # A prefill writes all its chunk first, so only a decode can keep its window in a ring.
        ring = 0 if full or case.query_len > 1 else -(-(case.window - 1) // case.block_size) + 1
        columns = sink_blocks + ring if ring else math.ceil(case.cell.context / case.block_size)
        pools.append(
            Pool(
                heads=heads, sink_blocks=sink_blocks, ring_blocks=ring, first_column=first_column,
                num_columns=columns, base=base, num_blocks=case.cell.batch * columns,
            )
        )  # fmt: skip
        first_column += columns
        base += pools[-1].num_blocks * len(heads) * case.block_size * case.head_dim
    return pools


def make_data(
    case: AttentionCase, num_layers: int, device: torch.device, seed: int
) -> AttentionData:
    """Return random data for a cell: normal K, V and q, pages in random order.

    Every page of the pools belongs to a request; ``out`` is NaN until it is written.
    """
    generator = torch.Generator(device).manual_seed(seed)
    pools = _pools(case)
    batch = case.cell.batch

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=case.dtype, device=device).normal_(generator=generator)

    def ids(pool: Pool) -> torch.Tensor:
        order = torch.randperm(pool.num_blocks, generator=generator, device=device)
        return order.view(batch, pool.num_columns)

    size = buffer_elements(case)
    q_shape = (case.num_tokens, case.num_q_heads, case.head_dim)
    layers = []
    for _ in range(num_layers):
        q = normal(*q_shape)
        out = torch.full_like(q, torch.nan)
        if case.is_fp8:
            (k, k_scale), (v, v_scale) = (_codes(size, case.head_dim, generator) for _ in "kv")
            scales = _scales(case, pools, k_scale, v_scale)
        else:
            k, v, scales = normal(size), normal(size), None
        layers.append(Layer(q=q, k=k, v=v, out=out, scales=scales))
    return AttentionData(
        case=case,
        layout=_layout(case, pools, device),
        pools=pools,
        block_table=torch.cat([ids(pool) for pool in pools], dim=1).to(torch.int32),
        seq_lens=torch.full((batch,), case.cell.context, dtype=torch.int32, device=device),
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device=device) * case.query_len,
        layers=layers,
    )


def _codes(
    size: int, head_dim: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return normal vectors as flat e4m3 codes, and the scale of each vector."""
    device = generator.device
    codes = torch.empty((size // head_dim, head_dim), dtype=torch.uint8, device=device)
    scales = torch.empty(len(codes), dtype=torch.float32, device=device)
    parts = zip(codes.split(QUANTIZED_ROWS), scales.split(QUANTIZED_ROWS), strict=True)
    for part, scale in parts:
        x = torch.empty(part.shape, device=device).normal_(generator=generator)
        scale.copy_(token_scale(x))
        part.copy_(quantize_e4m3(x, scale))
    return codes.view(torch.float8_e4m3fn).flatten(), scales


def _layout(case: AttentionCase, pools: Sequence[Pool], device: torch.device) -> KVLayout:
    if case.is_uniform:
        return KVLayout.hnd(case.num_kv_heads, case.block_size, case.head_dim, device=device)
    bases = [pool.base for pool in pools]
    return KVLayout.head_groups(
        _roles(case, pools), bases, case.block_size, case.head_dim, device=device
    )


def _scales(
    case: AttentionCase, pools: Sequence[Pool], k_scale: torch.Tensor, v_scale: torch.Tensor
) -> KVScales:
    bases = [pool.base // case.head_dim for pool in pools]
    return KVScales.head_groups(k_scale, v_scale, _roles(case, pools), bases, case.block_size)


def _roles(case: AttentionCase, pools: Sequence[Pool]) -> list[HeadRole]:
    """Return each KV head's role with its place in a block-table row."""
    roles = [case.role_of(head) for head in range(case.num_kv_heads)]
    for group, pool in enumerate(pools):
        for head in pool.heads:
            roles[head] = replace(
                roles[head], ring_blocks=pool.ring_blocks, table_offset=pool.first_column,
                group=group,
            )  # fmt: skip
    return roles


def relative_error(data: AttentionData, layer: Layer) -> float:
    """Return the largest ``|out - exact| / |exact|`` of a head's vector in some rows of ``out``.

    The exact rows are a dense softmax in float64 over keys (of an fp8 case code times scale)
    gathered page by page, without the address formula that the kernels share. Rows: the first and
    last query and some between them, of the first and last request and some between them. A NaN
    in ``out`` makes the result NaN.
    """
    case = data.case
    errors = []
    queries = _spread(case.query_len, NUM_CHECKED_QUERIES)
    for req in _spread(case.cell.batch, NUM_CHECKED_REQUESTS):
        rows = torch.tensor(queries, device=layer.q.device) + req * case.query_len
        positions = rows - req * case.query_len + case.cell.context - case.query_len
        for pool in data.pools:
            for index, head in enumerate(pool.heads):
                exact = _exact_rows(data, layer, pool, index, req, rows, positions)
                group = slice(
                    *(n * case.num_q_heads // case.num_kv_heads for n in (head, head + 1))
                )
                got = layer.out[rows, group].double()
                errors.append(((got - exact).norm(dim=-1) / exact.norm(dim=-1)).max())
    return float(torch.stack(errors).max())


def _spread(count: int, wanted: int) -> list[int]:
    """Return up to ``wanted`` of ``range(count)``, the first and the last among them."""
    if count <= wanted:
        return list(range(count))
    return [index * (count - 1) // (wanted - 1) for index in range(wanted)]


def _exact_rows(
    data: AttentionData,
    layer: Layer,
    pool: Pool,
    index: int,
    req: int,
    rows: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Return ``[rows, group, head_dim]`` float64 for the pool's head number ``index``."""
    case, head = data.case, pool.heads[index]
    role = case.role_of(head)
    keys = torch.arange(case.cell.context, device=rows.device)
    visible = keys <= positions[:, None]
    if role.window >= 0:
        visible &= (keys > positions[:, None] - role.window) | (keys < role.sink)
    seen = visible.any(dim=0)
    keys, visible = keys[seen], visible[:, seen]
    blocks = data.block_table[req, pool.column(keys, case.block_size)].long()

    def gather(vectors: torch.Tensor) -> torch.Tensor:
        shape = (pool.num_blocks, len(pool.heads), case.block_size)
        start = pool.base // case.head_dim
        pages = vectors[start : start + math.prod(shape)].view(*shape, *vectors.shape[1:])
        return pages[blocks, index, keys % case.block_size]

    k, v = (gather(x.view(-1, case.head_dim)).double() for x in (layer.k, layer.v))
    if layer.scales is not None:
        k *= gather(layer.scales.k_scale)[:, None]
        v *= gather(layer.scales.v_scale)[:, None]
    group = case.num_q_heads // case.num_kv_heads
    q = layer.q[rows, head * group : (head + 1) * group].double()
    scores = (q @ k.T) * data.softmax_scale
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    return scores.softmax(dim=-1) @ v
