"""One layer's attention as calls of mrv1's ops, without vLLM: for its steps and a warm-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from mrv1.device import kernel_path
from mrv1.integrations.vllm.attention_pages import Pages, pages_of
from mrv1.kernels import DecodePlan, HeadRole, PageFormat, PrefillSplits
from mrv1.kernels.attention.prefill.choice import PrefillLayer
from mrv1.kernels.cache.kv_scales import format_of
from mrv1.kernels.registry import Ops, select_ops


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """What decides on the kernels of an attention layer, beside its batches."""

    num_heads: int
    head_size: int
    role: HeadRole
    codes: PageFormat | None
    """The format of the cache's codes; None = values as they are."""
    softmax_scale: float
    logits_soft_cap: float
    """0 = none."""

    def pages(self, kv_cache: torch.Tensor) -> Pages:
        """Return the pages of the layer's cache."""
        return pages_of(kv_cache, self.head_size, self.role, self.codes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """The first rows of a batch, with the same number of queries each."""

    num_tokens: int
    query_len: int
    block_table: torch.Tensor
    """[rows, row_width] int32."""
    seq_lens: torch.Tensor
    """[rows] int32; 0 = padding."""
    plans: Mapping[int, DecodePlan]
    """Buffers by the ``id`` of the layout; empty on the reference path."""
    planners: dict[int, BoundLayer] = field(default_factory=dict)
    """By the ``id`` of the layout, the first layer that attends: it plans whenever it attends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRows:
    """The rows of a batch that follow the decoded rows."""

    first_token: int
    end_token: int
    block_table: torch.Tensor
    """[rows, row_width] int32."""
    seq_lens: torch.Tensor
    """[rows] int32."""
    query_start_loc: torch.Tensor
    """[rows + 1] int32, from 0 on."""
    max_query_len: int
    splits: Mapping[int, PrefillSplits | None]
    """By the ``id`` of the layout; empty = one program per tile."""


class BoundLayer:
    """A layer with its cache, written and attended to; ``sinks`` are ``[heads]`` or None."""

    def __init__(
        self, layer: AttentionLayer, kv_cache: torch.Tensor, sinks: torch.Tensor | None
    ) -> None:
        self.layer, self.kv_cache, self.sinks = layer, kv_cache, sinks

    @cached_property
    def pages(self) -> Pages:
        """The cache's pages; for a new shape, numbers are copied to the device."""
        return self.layer.pages(self.kv_cache)

    @cached_property
    def ops(self) -> Ops:
        """The ops for the cache's device."""
        return select_ops(kernel_path(self.kv_cache.device))

    def allocate_plan(
        self, num_reqs: int, query_len: int, row_width: int, dtype: torch.dtype
    ) -> DecodePlan:
        """Return buffers for a plan of this layer's decode."""
        layout = self.pages.layout
        return DecodePlan.allocate(
            max_reqs=num_reqs,
            max_keys=row_width * layout.block_size,
            layout=layout,
            num_q_heads=self.layer.num_heads,
            dtype=dtype,
            query_len=query_len,
            page_format=format_of(dtype, self.pages.scales),
        )

    def allocate_splits(
        self, num_reqs: int, num_tokens: int, max_query_len: int, dtype: torch.dtype
    ) -> PrefillSplits | None:
        """Return buffers for this layer's prefill; None = one program per tile."""
        return PrefillSplits.allocate(
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            max_query_len=max_query_len,
            layout=self.pages.layout,
            num_q_heads=self.layer.num_heads,
            dtype=dtype,
            page_format=format_of(dtype, self.pages.scales),
        )

    def prefills(self, dtype: torch.dtype) -> PrefillLayer:
        """Return what the choice of a prefill kernel asks about the layer."""
        page_format = format_of(dtype, self.pages.scales)
        plain_scores = not self.layer.logits_soft_cap and self.sinks is None
        return PrefillLayer(
            self.pages.layout, dtype, page_format, self.layer.num_heads, plain_scores
        )

    def write(self, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values, ``[tokens, kv_heads, head_size]``; slot -1 = padding."""
        pages = self.pages
        self.ops.kv_cache_write(
            key, value, pages.k, pages.v, slot_mapping[None], pages.layout, scales=pages.scales
        )

    def plan(self, rows: DecodeRows) -> None:
        """Launch the plan of the decoded rows, if this is the first layer of its layout."""
        layout = self.pages.layout
        plan = rows.plans.get(id(layout))
        if plan is not None and rows.planners.setdefault(id(layout), self) is self:
            self.ops.plan_decode_attention(rows.seq_lens, layout, plan)

    def decode(self, rows: DecodeRows, q: torch.Tensor, out: torch.Tensor) -> None:
        """Attend from ``q`` to the cache, after ``plan``; *write* ``out`` of the same shape."""
        self._attend(
            self.ops.paged_decode_attention,
            rows,
            q,
            out,
            query_len=rows.query_len,
            plan=rows.plans.get(id(self.pages.layout)),
        )

    def prefill(self, rows: PrefillRows, q: torch.Tensor, out: torch.Tensor) -> None:
        """Attend from ``q`` to the cache; *write* ``out`` of the same shape."""
        self._attend(
            self.ops.paged_prefill_attention,
            rows,
            q,
            out,
            query_start_loc=rows.query_start_loc,
            max_query_len=rows.max_query_len,
            splits=rows.splits.get(id(self.pages.layout)),
        )

    def _attend(
        self,
        op: Callable[..., torch.Tensor],
        rows: DecodeRows | PrefillRows,
        q: torch.Tensor,
        out: torch.Tensor,
        **options: Any,  # noqa: ANN401 - of the op
    ) -> None:
        pages = self.pages
        op(
            q,
            pages.k,
            pages.v,
            block_table=rows.block_table,
            seq_lens=rows.seq_lens,
            layout=pages.layout,
            softmax_scale=self.layer.softmax_scale,
            logits_soft_cap=self.layer.logits_soft_cap,
            sinks=self.sinks,
            out=out,
            scales=pages.scales,
            **options,
        )
