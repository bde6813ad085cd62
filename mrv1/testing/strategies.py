"""Hypothesis strategies for paged KV caches, and the dense problem each one encodes.

- :func:`kv_layouts` draws where pages lie and what each KV head may see (:class:`LayoutCase`);
- :func:`ragged_batches` draws query and sequence lengths around every edge (:class:`RaggedBatch`);
- :func:`paged_caches` draws both and fills a cache (:class:`PagedCase`), NaN wherever no query may
  look, and gives the dense keys and values in it;
- :func:`build_paged_cache` is the last step alone, a plain function of its arguments.

This is a second, independent model of the cache's address and visibility rules, in plain numbers:
of :class:`mrv1.kernels.cache.kv_layout.KVLayout` it calls only the constructor, and it calls no
oracle. So ``PagedCase.attention`` judges kernels and oracles alike. Example::

    @given(case=paged_caches(uniform_query_len=1))
    def test_decode(case):
        out = paged_decode_attention(q, case.k_cache, case.v_cache, case.block_table, ...)
        expected, _ = case.attention(q, softmax_scale)

Needs ``hypothesis`` (the ``dev`` extra): without it, importing this module is a
``ModuleNotFoundError`` that says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

try:
    from hypothesis import strategies as st
    from hypothesis.strategies import DrawFn, SearchStrategy
except ImportError as error:
    raise ModuleNotFoundError(
        "mrv1.testing.strategies: expected the package hypothesis to be installed, "
        f"got {error}; pip install -e '.[dev]'",
        name="hypothesis",
    ) from error

from mrv1.errors import ConfigError
from mrv1.kernels._base.interpreter import number_formats as _number_formats
from mrv1.kernels.cache.formats import FP8, INT4, ScaleGranularity
from mrv1.kernels.cache.kv_layout import HeadRole, KVLayout
from mrv1.kernels.cache.kv_scales import KVScales

__all__ = [
    "LayoutCase",
    "PagedCase",
    "RaggedBatch",
    "build_paged_cache",
    "kv_layouts",
    "paged_caches",
    "ragged_batches",
]

Kind = Literal["hnd", "nhd", "head_groups", "per_head_ids", "padded"]
KINDS: tuple[Kind, ...] = ("hnd", "nhd", "head_groups", "per_head_ids", "padded")
"""``padded`` is HND with shuffled heads and gaps between heads, tokens and blocks."""
SPARE_BLOCKS = 3
"""Blocks per group that no request owns; they stay NaN."""
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_Pair = tuple[torch.Tensor, torch.Tensor]
Granularity = ScaleGranularity | Literal["nibbles"]
"""Of the scales of an fp8 cache, or 4-bit codes with a scale and a zero per token."""
_Scales = torch.Tensor | Literal["token", "nibbles"] | None
"""Scales given per head, a scale per token, or None: a cache of values as they are."""
LARGEST_CODE, SMALLEST_SCALE = np.float32(448), np.float32(1e-12)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCase:
    """One layer's KV layout as plain numbers, and the sizes it was drawn for."""

    kind: Kind
    block_size: int
    """Tokens per block."""
    head_dim: int
    token_stride: int
    """Elements."""
    head_base: tuple[int, ...]
    """Elements, per KV head."""
    block_stride: tuple[int, ...]
    """Elements, per KV head."""
    roles: tuple[HeadRole, ...]
    """Per KV head; heads of one group have one role."""
    num_blocks: tuple[int, ...]
    """Block ids per group."""
    row_width: int
    """Columns of a block-table row."""
    max_reqs: int
    """Requests the block ids suffice for."""
    max_seq_len: int
    """Tokens per request the table suffices for."""
    max_query_len: int
    """Longest chunk the rings suffice for."""

    @classmethod
    def head_groups(
        cls,
        *,
        roles: Sequence[HeadRole],
        head_dim: int,
        block_size: int = 16,
        max_seq_len: int,
        max_reqs: int = 3,
        max_query_len: int = 8,
    ) -> LayoutCase:
        """Return head groups in consecutive parts of a buffer; ``table_offset`` is filled in."""
        return _layout_case(
            "head_groups", roles, head_dim, block_size, max_seq_len, max_reqs, max_query_len
        )

    @classmethod
    def hnd(
        cls,
        *,
        num_kv_heads: int,
        head_dim: int,
        block_size: int = 16,
        max_seq_len: int,
        max_reqs: int = 3,
        role: HeadRole | None = None,
        own_ids: bool = False,
    ) -> LayoutCase:
        """Return ``[blocks, heads, block_size, head_dim]`` with one role (None = full).

        With ``own_ids`` each (full) head has block ids of its own.
        """
        kind: Kind = "per_head_ids" if own_ids else "hnd"
        roles = [role or HeadRole(group=head * own_ids) for head in range(num_kv_heads)]
        return _layout_case(kind, roles, head_dim, block_size, max_seq_len, max_reqs, 8)

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""
        return len(self.roles)

    @property
    def num_elements(self) -> int:
        """Elements of the K (or V) buffer."""
        return max(
            self.head_base[head]
            + (self.num_blocks[role.group] - 1) * self.block_stride[head]
            + (self.block_size - 1) * self.token_stride
            + self.head_dim
            for head, role in enumerate(self.roles)
        )

    def scale_addresses(self, per_block: int | None = None) -> tuple[list[int], list[int], int]:
        """Return heads' bases and block strides, and the number of scales; None = one a token."""
        size, heads = per_block or self.block_size, self.num_kv_heads
        if self.kind != "head_groups":
            count = max(self.num_blocks) * heads * size
            return [head * size for head in range(heads)], [heads * size] * heads, count
        return _group_addresses([role.group for role in self.roles], self.num_blocks, size)

    def layout(self, device: torch.device | str = "cpu") -> KVLayout:
        """Return the ``KVLayout`` of these numbers on ``device``."""
        return KVLayout.build(
            block_size=self.block_size,
            head_dim=self.head_dim,
            token_stride=self.token_stride,
            head_base=self.head_base,
            block_stride=self.block_stride,
            roles=self.roles,
            device=device,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedBatch:
    """A step's lengths; query ``j`` is at ``seq_len - query_len + j``, below 0 in padding rows."""

    query_lens: tuple[int, ...]
    """Rows of q per request, >= 0."""
    seq_lens: tuple[int, ...]
    """Tokens per request, its queries included; 0 = padding row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCase:
    """A filled paged cache, this step's inputs, and the dense problem they encode."""

    layout_case: LayoutCase
    batch: RaggedBatch
    k_cache: torch.Tensor
    """Flat: each key that some query of its request sees; NaN everywhere else."""
    v_cache: torch.Tensor
    """Likewise for values."""
    k_cache_before: torch.Tensor
    """As ``k_cache`` before this step's tokens were written: NaN in their slots."""
    v_cache_before: torch.Tensor
    """Likewise for values."""
    block_table: torch.Tensor
    """[num_reqs, row_width] int32, -1 = no page; some visible pages are missing on purpose."""
    slot_mapping: torch.Tensor
    """[groups, num_tokens] int64 of this step's tokens, -1 where there is no page."""
    key: torch.Tensor
    """[num_tokens, kv_heads, head_dim]: this step's keys, a row for each row of q."""
    value: torch.Tensor
    """Likewise for values."""
    keys: tuple[torch.Tensor, ...]
    """Per request, [seq_len, kv_heads, head_dim]: all its keys, dense."""
    values: tuple[torch.Tensor, ...]
    """Likewise for values."""
    visible: tuple[torch.Tensor, ...]
    """Per request, [kv_heads, query_len, seq_len] bool: role, causality and missing pages."""
    scales: KVScales | None = None
    """Of a case with codes: ``k_cache, v_cache`` are float8_e4m3fn, or uint8 of 4-bit codes, and
    ``keys, values`` the values of their codes, in float64. NaN where no token is."""
    scales_before: KVScales | None = None
    """As ``scales`` before this step's tokens were written."""

    @property
    def seq_lens(self) -> torch.Tensor:
        """[num_reqs] int32."""
        return torch.tensor(self.batch.seq_lens, dtype=torch.int32, device=self.key.device)

    @property
    def query_start_loc(self) -> torch.Tensor:
        """[num_reqs + 1] int32."""
        starts = np.cumsum([0, *self.batch.query_lens])
        return torch.tensor(starts, dtype=torch.int32, device=self.key.device)

    @property
    def layout(self) -> KVLayout:
        """The case's ``KVLayout``, its tensors on the case's device."""
        return self.layout_case.layout(self.key.device)

    def to(self, device: torch.device | str) -> PagedCase:
        """Return the case with every tensor on ``device``."""

        def moved(value: Any) -> Any:  # noqa: ANN401
            if isinstance(value, torch.Tensor):
                return value.to(device)
            if isinstance(value, tuple):
                return tuple(moved(item) for item in value)
            if isinstance(value, KVScales):
                return replace(
                    value, **{f.name: moved(getattr(value, f.name)) for f in fields(value)}
                )
            return value

        moved_fields: dict[str, Any] = {f.name: moved(getattr(self, f.name)) for f in fields(self)}
        return replace(self, **moved_fields)

    def attention(
        self,
        q: torch.Tensor,
        softmax_scale: float,
        *,
        logits_soft_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return plain dense attention over ``keys`` and ``values`` in float64, and log-sum-exp.

        ``q`` and the output are ``[num_tokens, q_heads, head_dim]``, ``sinks`` ``[q_heads]``
        scores without values; scores are soft-capped unless ``logits_soft_cap`` is 0. The natural
        log-sum-exp is ``[num_tokens, q_heads]``. Zeros and -inf (or the sink) where nothing is
        visible.
        """
        out, lse = [], []
        if sinks is None:
            sinks = torch.full(q.shape[1:2], -math.inf, device=q.device)
        group = q.shape[1] // self.layout_case.num_kv_heads
        rows = q.double().split(list(self.batch.query_lens))
        for request, k, v, visible in zip(rows, self.keys, self.values, self.visible, strict=True):
            k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", request, k) * softmax_scale
            if logits_soft_cap:
                scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
            mask = visible.repeat_interleave(group, dim=0)
            scores = scores.masked_fill(~mask, -math.inf)
            column = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, column], dim=-1)
            # The softmax of a row of -inf is NaN.
            weights = scores.softmax(-1)[..., :-1].nan_to_num(0.0)
            out.append(torch.einsum("hqk,khd->qhd", weights, v))
            lse.append(scores.logsumexp(-1).T)
        empty = q.new_empty((0, *q.shape[1:]), dtype=torch.float64)
        return torch.cat([empty, *out]), torch.cat([empty[..., 0], *lse])


# --- layouts -----------------------------------------------------------------------------------


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _segment_width(role: HeadRole, block_size: int, max_seq_len: int) -> int:
    if role.ring_blocks:
        return _blocks(role.sink, block_size) + role.ring_blocks
    return _blocks(max_seq_len, block_size)


@st.composite
def _head_roles(
    draw: DrawFn, block_size: int, max_seq_len: int, max_query_len: int, rings: bool
) -> HeadRole:
    """Draw window, sink and ring of one group; the caller places it."""
    if draw(st.booleans()):
        return HeadRole()
    edges = [1, 2, block_size - 1, block_size, block_size + 1]
    window = draw(st.sampled_from(edges) | st.integers(1, max(1, max_seq_len)))
    sink = draw(st.sampled_from([0, 1, 4, block_size - 1, block_size, block_size + 1]))
    ring = 0
    if rings and draw(st.booleans()):
        ring = _blocks(window + max_query_len - 2, block_size) + 1 + draw(st.integers(0, 1))
    return HeadRole(window=window, sink=sink, ring_blocks=ring)


def _draw_groups(draw: DrawFn, kind: Kind, num_kv_heads: int) -> list[int]:
    """Return each head's group; every group has a head."""
    if kind == "per_head_ids":
        return list(range(num_kv_heads))
    if kind != "head_groups":
        return [0] * num_kv_heads
    num_groups = draw(st.integers(1, min(3, num_kv_heads)))
    rest = st.integers(0, num_groups - 1)
    groups = [*range(num_groups), *(draw(rest) for _ in range(num_kv_heads - num_groups))]
    return draw(st.permutations(groups))


@st.composite
def kv_layouts(
    draw: DrawFn,
    *,
    kinds: Sequence[Kind] = KINDS,
    head_dims: Sequence[int] = (16, 64, 80),
    block_sizes: Sequence[int] = (16, 32),
    num_kv_heads: Sequence[int] = (1, 2, 3),
    max_reqs: int = 3,
    max_blocks: int = 4,
    max_query_len: int = 8,
    gap_elements: int = 8,
) -> LayoutCase:
    """Draw a :class:`LayoutCase` of any of the kinds and sizes, with random roles.

    ``head_dims`` are multiples of 8; a request without a ring has up to ``max_blocks`` blocks;
    gaps of ``padded`` are multiples of ``gap_elements``: take 16 for fp8 caches.
    """
    kind = draw(st.sampled_from(list(kinds)))
    head_dim = draw(st.sampled_from(list(head_dims)))
    block_size = draw(st.sampled_from(list(block_sizes)))
    heads = draw(st.sampled_from(list(num_kv_heads)))
    max_seq_len = max_blocks * block_size
    groups = _draw_groups(draw, kind, heads)
    role = _head_roles(block_size, max_seq_len, max_query_len, rings=kind != "per_head_ids")
    drawn = [draw(role) for _ in range(max(groups) + 1)]
    roles = [replace(drawn[group], group=group) for group in groups]
    case = _layout_case(kind, roles, head_dim, block_size, max_seq_len, max_reqs, max_query_len)
    return _draw_padding(draw, case, gap_elements) if kind == "padded" else case


def _layout_case(
    kind: Kind,
    roles: Sequence[HeadRole],
    head_dim: int,
    block_size: int,
    max_seq_len: int,
    max_reqs: int,
    max_query_len: int,
) -> LayoutCase:
    """Return the case of ``kind`` with table segments side by side, one per group."""
    group_roles = {role.group: role for role in roles}
    offsets, num_blocks, row_width = [], [], 0
    for group in sorted(group_roles):
        width = _segment_width(group_roles[group], block_size, max_seq_len)
        offsets.append(row_width)
        num_blocks.append(max_reqs * width + SPARE_BLOCKS)
        row_width += width
    base, block_stride, token_stride = _addresses(
        kind, head_dim, block_size, [role.group for role in roles], num_blocks
    )
    return LayoutCase(
        kind=kind,
        block_size=block_size,
        head_dim=head_dim,
        token_stride=token_stride,
        head_base=tuple(base),
        block_stride=tuple(block_stride),
        roles=tuple(replace(role, table_offset=offsets[role.group]) for role in roles),
        num_blocks=tuple(num_blocks),
        row_width=row_width,
        max_reqs=max_reqs,
        max_seq_len=max_seq_len,
        max_query_len=max_query_len,
    )


def _addresses(
    kind: Kind, head_dim: int, block_size: int, groups: Sequence[int], num_blocks: Sequence[int]
) -> tuple[list[int], list[int], int]:
    """Return (head_base, block_stride, token_stride) in elements."""
    num_heads = len(groups)
    page = block_size * head_dim
    if kind == "nhd":
        base = [head * head_dim for head in range(num_heads)]
        return base, [block_size * num_heads * head_dim] * num_heads, num_heads * head_dim
    if kind == "head_groups":
        base, block_stride, _ = _group_addresses(groups, num_blocks, page)
        return base, block_stride, head_dim
    return [head * page for head in range(num_heads)], [num_heads * page] * num_heads, head_dim


def _group_addresses(
    groups: Sequence[int], num_blocks: Sequence[int], page: int
) -> tuple[list[int], list[int], int]:
    """Return each head's base and block stride, and the size, of groups in consecutive parts."""
    members = [groups.count(g) for g in range(len(num_blocks))]
    sizes = [n * b * page for n, b in zip(members, num_blocks, strict=True)]
    base = [sum(sizes[:g]) + groups[:h].count(g) * page for h, g in enumerate(groups)]
    return base, [members[g] * page for g in groups], sum(sizes)


def _draw_padding(draw: DrawFn, case: LayoutCase, unit: int) -> LayoutCase:
    """Shuffle the heads of an HND case and put gaps between heads, tokens and blocks."""
    gap = st.integers(0, 3).map(lambda n: unit * n)
    token_stride = case.head_dim + draw(gap)
    head_stride = case.block_size * token_stride + draw(gap)
    order = draw(st.permutations(range(case.num_kv_heads)))
    first = draw(gap)
    block_stride = case.num_kv_heads * head_stride + draw(gap)
    return replace(
        case,
        token_stride=token_stride,
        head_base=tuple(first + place * head_stride for place in order),
        block_stride=(block_stride,) * case.num_kv_heads,
    )


# --- batches -----------------------------------------------------------------------------------


def _length_edges(layout: LayoutCase) -> list[int]:
    marks = {0, layout.block_size, layout.max_seq_len}
    for role in layout.roles:
        if role.window >= 0:
            marks |= {role.window, role.sink, role.sink + role.window}
    around = {mark + step for mark in marks for step in (-1, 0, 1)}
    return sorted(n for n in around if 0 <= n <= layout.max_seq_len)


@st.composite
def ragged_batches(
    draw: DrawFn,
    layout: LayoutCase,
    *,
    uniform_query_len: int | None = None,
    min_reqs: int = 0,
    padding: bool = True,
) -> RaggedBatch:
    """Draw a :class:`RaggedBatch` that fits ``layout``, around block, window and sink edges.

    ``uniform_query_len``: rows of q of every request, padding rows too; None = ragged.
    """
    edges = _length_edges(layout)
    least = uniform_query_len or 1
    seq_len = st.integers(least, layout.max_seq_len)
    if any(n >= least for n in edges):
        seq_len = st.sampled_from([n for n in edges if n >= least]) | seq_len
    if padding:
        seq_len = seq_len | st.just(0)
    seq_lens = draw(st.lists(seq_len, min_size=min_reqs, max_size=layout.max_reqs))
    query_lens = []
    for n in seq_lens:
        if uniform_query_len is not None:
            query_lens.append(uniform_query_len)
            continue
        longest = min(n, layout.max_query_len) if n else 1
        near = [q for q in (0, 1, 2, layout.block_size, longest - 1, longest) if 0 <= q <= longest]
        query_lens.append(draw(st.sampled_from(near) | st.integers(0, longest)))
    return RaggedBatch(query_lens=tuple(query_lens), seq_lens=tuple(seq_lens))


# --- caches ------------------------------------------------------------------------------------


def _table_column(role: HeadRole, logical: int, block_size: int) -> int:
    sink_blocks = _blocks(role.sink, block_size)
    if role.ring_blocks == 0 or logical < sink_blocks:
        return role.table_offset + logical
    return role.table_offset + sink_blocks + (logical - sink_blocks) % role.ring_blocks


def _sees(role: HeadRole, query: Ints, key: Ints) -> Bools:
    """Whether a query at one position sees a key at another, elementwise."""
    in_role = (role.window < 0) | (key > query - role.window) | (key < role.sink)
    return (key <= query) & in_role


def _token_slots(blocks: Ints, positions: Ints, block_size: int) -> Ints:
    """Return block * block_size + offset of each position, -1 where it has no page."""
    block = np.append(blocks, -1)[np.where(positions >= 0, positions // block_size, -1)]
    return np.where(block >= 0, block * block_size + positions % block_size, -1)


class _Pager:
    """Allocates shuffled block ids and writes them into the table."""

    def __init__(
        self, layout: LayoutCase, num_reqs: int, seed: int, block_seed: int, hole_rate: float
    ) -> None:
        self.layout = layout
        self.hole_rate = hole_rate
        # Two generators: the choice of missing pages must not depend on where pages lie.
        self.holes = np.random.default_rng(seed)
        self.free = [
            np.random.default_rng(block_seed).permutation(n).tolist() for n in layout.num_blocks
        ]
        self.table = np.full((num_reqs, layout.row_width), -1, dtype=np.int32)

    def place(self, row: int, role: HeadRole, seq_len: int, query_len: int) -> Ints:
        """Return ``row``'s block ids, -1 = no visible page; some unseen pages keep theirs."""
        size = self.layout.block_size
        keys = np.arange(seq_len)
        first_query = max(seq_len - max(query_len, 1), 0)
        live = _sees(role, np.maximum(keys, first_query), keys)
        blocks = np.full(_blocks(seq_len, size), -1)
        for logical in range(len(blocks)):
            luck = self.holes.random()
            column = _table_column(role, logical, size)
            if live[logical * size : (logical + 1) * size].any():
                if self.table[row, column] >= 0:
                    raise RuntimeError(f"column {column}: expected a ring that holds live blocks")
                if luck >= self.hole_rate:
                    blocks[logical] = self.table[row, column] = self.free[role.group].pop()
            elif role.ring_blocks == 0 and luck < 0.5:
                self.table[row, column] = self.free[role.group].pop()
        return blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vectors:
    """Keys or values of one request, ``[tokens, kv_heads, head_dim]``."""

    raw: torch.Tensor
    """As the model computes them."""
    stored: torch.Tensor
    """As they are in the cache: raw, e4m3 codes, or two 4-bit codes in each byte (uint8)."""
    dense: torch.Tensor
    """The values that ``stored`` stands for."""
    scale: torch.Tensor
    """[tokens, kv_heads] float32."""

    @classmethod
    def of(cls, raw: torch.Tensor, scales: _Scales) -> _Vectors:
        """Return ``raw`` as it is (None), or as codes with scales per token or as given."""
        if scales is None:
            return cls(raw=raw, stored=raw, dense=raw, scale=torch.empty(raw.shape[:2]))
        x = raw.float().numpy()
        if scales == "nibbles":
            return cls._of_nibbles(raw, x)
        if isinstance(scales, torch.Tensor):
            scale = np.broadcast_to(scales.numpy(), x.shape[:2])
        else:
            scale = np.maximum(np.abs(x).max(axis=-1) / LARGEST_CODE, SMALLEST_SCALE)
        return cls._of_codes(raw, _encode(x, scale), scale)

    @classmethod
    def of_quarters(
        cls, raw: torch.Tensor, held: Bools, num_new: int, tokens: int
    ) -> tuple[_Vectors, _Vectors]:
        """Return ``raw``, where ``held``, before and after its last ``num_new`` tokens."""
        x = raw.float().numpy()
        quarter = np.arange(len(x)) // tokens
        is_new = (np.arange(len(x)) >= len(x) - num_new)[:, None]

        def needed(members: Bools) -> npt.NDArray[np.float32]:
            """Return per token the scale that ``members`` in its quarter need; 0 without any."""
            largest = np.abs(x).max(axis=-1, initial=0) / LARGEST_CODE
            found = np.zeros((len(x), x.shape[1]), dtype=np.float32)
            scale = np.where(members, np.maximum(largest, SMALLEST_SCALE), np.float32(0))
            np.maximum.at(found, quarter, scale)
            return found[quarter]

        old = needed(held & ~is_new)
        new = np.maximum(old, needed(held & is_new))
        new = np.where(new > 0, new, SMALLEST_SCALE)  # in quarters that nobody reads
        was_held = held & ~is_new
        before = _encode(x, np.where(old > 0, old, new))
        kept = _number_formats.decode(before, "fp8e4nv") * old[..., None]
        after = np.where((new > old)[..., None], _encode(kept, new), before)
        after = np.where(was_held[..., None], after, _encode(x, new))
        return cls._of_codes(raw, before, old), cls._of_codes(raw, after, new)

    @classmethod
    def _of_nibbles(cls, raw: torch.Tensor, x: npt.NDArray[np.float32]) -> _Vectors:
        """Return finite vectors as 4-bit codes; a scale's low byte is the zero, in sixteenths."""
        lowest = np.minimum(x.min(axis=-1), np.float32(0))
        highest = np.maximum(x.max(axis=-1), np.float32(0))
        largest = np.float32(15)
        scale = np.maximum(highest / largest - lowest / largest, SMALLEST_SCALE)
        sixteenths = np.rint(-lowest / scale * np.float32(16)).astype(np.uint32)
        scale = ((scale.view(np.uint32) & np.uint32(0xFFFFFF00)) | sixteenths).view(np.float32)
        zero = (sixteenths.astype(np.float32) / np.float32(16))[..., None]
        codes = np.clip(np.rint(x / scale[..., None] + zero), 0, 15).astype(np.uint8)
        values = (codes - zero.astype(np.float64)) * scale[..., None]
        return cls(
            raw=raw,
            stored=torch.from_numpy(codes[..., 0::2] + 16 * codes[..., 1::2]),
            dense=torch.from_numpy(values),
            scale=torch.from_numpy(scale),
        )

    @classmethod
    def _of_codes(
        cls, raw: torch.Tensor, codes: npt.NDArray[np.uint8], scale: npt.NDArray[np.float32]
    ) -> _Vectors:
        values = _number_formats.decode(codes, "fp8e4nv").astype(np.float64)
        return cls(
            raw=raw,
            stored=torch.from_numpy(codes),
            dense=torch.from_numpy(values * scale[..., None]),
            scale=torch.from_numpy(np.array(scale)),
        )


def _encode(x: npt.NDArray[np.float32], scale: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Return the codes of vectors, each with its scale."""
    return _number_formats.encode(x / scale[..., None], "fp8e4nv")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Caches:
    """K and V buffers under construction; every element is NaN until it is written."""

    layout: LayoutCase
    k: torch.Tensor
    v: torch.Tensor
    scales: KVScales | None = None

    @classmethod
    def empty(cls, layout: LayoutCase, dtype: torch.dtype) -> _Caches:
        k, v = (torch.full((layout.num_elements,), math.nan, dtype=dtype) for _ in range(2))
        return cls(layout=layout, k=k, v=v)

    @classmethod
    def empty_codes(
        cls, layout: LayoutCase, granularity: Granularity, static: _Pair | None
    ) -> _Caches:
        """Return NaN codes and NaN scales, or the scales given per head."""
        is_nibbles = granularity == "nibbles"
        num_bytes = layout.num_elements // (2 if is_nibbles else 1)
        k, v = (torch.full((num_bytes,), 0x7F, dtype=torch.uint8) for _ in range(2))
        if static is not None:
            per_head = KVScales.per_head(static[0].clone(), static[1].clone())
            return cls(layout=layout, k=k, v=v, scales=per_head)
        base, block_stride, count = layout.scale_addresses(4 if granularity == "quarter" else None)
        scales = KVScales.build(
            torch.full((count,), math.nan),
            torch.full((count,), math.nan),
            granularity="token" if granularity == "nibbles" else granularity,
            base=base,
            block_stride=block_stride,
            codes=INT4 if is_nibbles else FP8,
        )
        return cls(layout=layout, k=k, v=v, scales=scales)

    def fill(
        self, head: int, slots: Ints, tokens: Bools, keys: _Vectors, values: _Vectors
    ) -> None:
        """Store the masked tokens' vectors of one head at their ``slots``."""
        slots = slots[tokens]
        block, offset = np.divmod(slots, self.layout.block_size)
        address = (
            self.layout.head_base[head]
            + block * self.layout.block_stride[head]
            + offset * self.layout.token_stride
        )
        width = keys.stored.shape[-1]
        address = address * width // self.layout.head_dim
        index = torch.from_numpy(address[:, None] + np.arange(width))
        self.k[index] = keys.stored[tokens, head]
        self.v[index] = values.stored[tokens, head]
        if self.scales is None or self.scales.granularity == "head":
            return
        is_quarter = self.scales.granularity == "quarter"
        base, block_stride, _ = self.layout.scale_addresses(4 if is_quarter else None)
        scale = offset * 4 // self.layout.block_size if is_quarter else offset
        place = torch.from_numpy(base[head] + block * block_stride[head] + scale)
        self.scales.k_scale[place] = keys.scale[tokens, head]
        self.scales.v_scale[place] = values.scale[tokens, head]

    @property
    def buffers(self) -> _Pair:
        """K and V as an op takes them."""
        if self.scales is None or self.scales.page_format.dtype == torch.uint8:
            return self.k, self.v
        return self.k.view(torch.float8_e4m3fn), self.v.view(torch.float8_e4m3fn)


def build_paged_cache(
    layout: LayoutCase,
    batch: RaggedBatch,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    block_seed: int = 0,
    hole_rate: float = 0.0,
    granularity: Granularity | None = None,
) -> PagedCase:
    """Return a cache on the CPU for ``batch``: shuffled blocks, NaN wherever no query may look.

    Args:
        layout: where pages lie and what each head sees.
        batch: lengths within the layout's limits.
        dtype: dtype of keys, values and caches.
        seed: seed of the keys and values (standard normal) and of the holes.
        block_seed: seed of the order in which blocks are allocated; it changes ``block_table``,
            the caches and ``slot_mapping``, but not the dense problem.
        hole_rate: share of visible blocks left out of the table (-1), hence not visible.
        granularity: of the scales of a cache of codes, whose vectors differ in size by up to 2^4;
            None = a cache of ``dtype``.

    Raises:
        ConfigError: a request is longer than the layout's ``max_seq_len``.
    """
    longest = max(batch.seq_lens, default=0)
    if longest > layout.max_seq_len:
        raise ConfigError(
            f"batch.seq_lens: expected at most max_seq_len = {layout.max_seq_len}, got {longest}"
        )
    pager = _Pager(layout, len(batch.seq_lens), seed, block_seed, hole_rate)
    generator = np.random.default_rng(seed)

    def normal(num_tokens: int) -> torch.Tensor:
        shape = (num_tokens, layout.num_kv_heads, layout.head_dim)
        drawn = generator.standard_normal(shape)
        if granularity is not None:
            drawn *= 2.0 ** generator.integers(-3, 2, shape[:2])[..., None]
        return torch.from_numpy(drawn).to(dtype)

    k_scales: _Scales = None if granularity is None else "token"
    if granularity == "nibbles":
        k_scales = "nibbles"
    v_scales, static = k_scales, None
    if granularity == "head":  # values with small scales saturate
        drawn = generator.uniform(0.002, 0.02, (2, layout.num_kv_heads)).astype(np.float32)
        static = k_scales, v_scales = torch.from_numpy(drawn[0]), torch.from_numpy(drawn[1])
    if granularity is None:
        full, before = _Caches.empty(layout, dtype), _Caches.empty(layout, dtype)
    else:
        full, before = (_Caches.empty_codes(layout, granularity, static) for _ in range(2))
    group_roles = {role.group: role for role in layout.roles}
    all_keys, all_values, all_visible = [], [], []
    new_keys, new_values = [normal(0)], [normal(0)]
    new_slots = [np.empty((len(layout.num_blocks), 0), dtype=np.int64)]
    for row, (n, query_len) in enumerate(zip(batch.seq_lens, batch.query_lens, strict=True)):
        raw_keys, raw_values = normal(n), normal(n)
        positions, queries = np.arange(n), np.arange(n - query_len, n)
        blocks = [
            pager.place(row, group_roles[group], n, query_len) for group in sorted(group_roles)
        ]
        visible = np.zeros((layout.num_kv_heads, query_len, n), dtype=bool)
        slots = [_token_slots(blocks[r.group], positions, layout.block_size) for r in layout.roles]
        for head, role in enumerate(layout.roles):
            visible[head] = (slots[head] >= 0) & _sees(role, queries[:, None], positions)
        seen = np.logical_or.reduce(visible, axis=1)
        if granularity == "quarter":
            size = layout.block_size // 4
            old_keys, keys = _Vectors.of_quarters(raw_keys, seen.T, query_len, size)
            old_values, values = _Vectors.of_quarters(raw_values, seen.T, query_len, size)
        else:
            old_keys = keys = _Vectors.of(raw_keys, k_scales)
            old_values = values = _Vectors.of(raw_values, v_scales)
        for head in range(layout.num_kv_heads):
            was_seen = seen[head] & (positions < n - query_len)
            full.fill(head, slots[head], seen[head], keys, values)
            before.fill(head, slots[head], was_seen, old_keys, old_values)
        new_slots.append(np.stack([_token_slots(b, queries, layout.block_size) for b in blocks]))
        unheld = normal(query_len)[: max(query_len - n, 0)]  # rows at negative positions
        new_keys += [unheld, keys.raw[max(n - query_len, 0) :]]
        new_values += [unheld, values.raw[max(n - query_len, 0) :]]
        all_keys.append(keys.dense)
        all_values.append(values.dense)
        all_visible.append(torch.from_numpy(visible))
    return PagedCase(
        layout_case=layout,
        batch=batch,
        k_cache=full.buffers[0],
        v_cache=full.buffers[1],
        k_cache_before=before.buffers[0],
        v_cache_before=before.buffers[1],
        block_table=torch.from_numpy(pager.table),
        slot_mapping=torch.from_numpy(np.concatenate(new_slots, axis=1)),
        key=torch.cat(new_keys),
        value=torch.cat(new_values),
        keys=tuple(all_keys),
        values=tuple(all_values),
        visible=tuple(all_visible),
        scales=full.scales,
        scales_before=before.scales,
    )


@st.composite
def paged_caches(
    draw: DrawFn,
    *,
    layouts: SearchStrategy[LayoutCase] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    uniform_query_len: int | None = None,
    min_reqs: int = 0,
    granularities: Sequence[Granularity | None] = (None,),
) -> PagedCase:
    """Draw a :class:`PagedCase`: a layout, a batch that fits it, and the cache of both.

    ``layouts`` None = :func:`kv_layouts` with its defaults; ``uniform_query_len`` as in
    :func:`ragged_batches`; of ``granularities``, None has no codes. Layouts of fp8 caches need
    ``gap_elements=16``, those of 4-bit caches 32.
    """
    layout = draw(kv_layouts() if layouts is None else layouts)
    batch = draw(ragged_batches(layout, uniform_query_len=uniform_query_len, min_reqs=min_reqs))
    return build_paged_cache(
        layout,
        batch,
        dtype=draw(st.sampled_from(list(dtypes))),
        seed=draw(st.integers(0, 2**32 - 1)),
        block_seed=draw(st.integers(0, 2**32 - 1)),
        hole_rate=draw(st.sampled_from([0.0, 0.0, 0.3])),
        granularity=draw(st.sampled_from(list(granularities))),
    )
