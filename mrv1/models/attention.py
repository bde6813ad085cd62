"""The attention of a forward pass: its interface, and the backend of mrv1's own kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from mrv1.device import kernel_path
from mrv1.kernels import DecodePlan, PrefillSplits
from mrv1.kernels.attention.prefill.choice import (
    LaunchChoice,
    PrefillAttentionConfig,
    PrefillLayer,
    choose_config,
    choose_launch,
)
from mrv1.kernels.registry import Ops
from mrv1.models.batch import AttentionBatch, LayerCache


class AttentionBackend(Protocol):
    """Attention over the paged cache: planned once per step, run once per layer."""

    def plan(
        self,
        batch: AttentionBatch,
        caches: Sequence[LayerCache],
        query_lens: npt.NDArray[np.int32] | None,
        seq_lens: npt.NDArray[np.int32] | None,
    ) -> None:
        """Prepare for the layers of one step, which all get ``batch``.

        ``query_lens`` and ``seq_lens`` are the host's copies, ``[num_reqs]``: the tokens of each
        row, and ``batch.seq_lens``. They are None while a graph is captured.
        """
        ...

    def attend(
        self,
        q: torch.Tensor,
        batch: AttentionBatch,
        cache: LayerCache,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from ``[tokens, q_heads, head_dim]``; the cache has their keys already.

        ``sinks`` are the layer's logit sinks, ``[q_heads]``; None = it has none.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """The plan of one step, which all its layers use."""

    batch: AttentionBatch
    num_decodes: int
    """Leading rows that the decode kernel takes."""
    plans: Mapping[int, DecodePlan]
    """Plan of the decode rows, by the ``id`` of its layout; empty on the reference path."""
    prefill_start_loc: torch.Tensor | None
    """``query_start_loc`` of the prefill rows if the step has decode rows too; else None."""
    splits: PrefillSplits | None = None
    """Buffers of programs that share a prefill tile; None = each tile has one program."""


class KernelBackend:
    """Attention by ``ops.paged_decode_attention`` and ``ops.paged_prefill_attention``.

    The kernels read lengths and tables on the device. Rows of one token are decoded and other rows
    prefilled, on a GPU side by side in a step that has both, so that neither launch waits for the
    last programs of the other. Without ``plan``, every layer of a decode step makes its own plan,
    and all rows of a step that has both are prefilled. With ``deterministic``, a token's result
    depends on its prefix alone.
    """

    def __init__(
        self,
        ops: Ops,
        *,
        num_q_heads: int,
        dtype: torch.dtype,
        softmax_scale: float,
        soft_cap: float | None = None,
        has_sinks: bool = False,
        deterministic: bool = False,
    ) -> None:
        self._ops = ops
        self._num_q_heads = num_q_heads
        self._dtype = dtype
        self._softmax_scale = softmax_scale
        self._soft_cap = soft_cap or 0.0
        """Of scores; 0 = none."""
        self._has_sinks = has_sinks
        self._deterministic = deterministic
        self._planned: _Planned | None = None
        self._beside: torch.cuda.Stream | None = None
        """The stream of prefills beside decodes; None on a CPU."""

    def plan(
        self,
        batch: AttentionBatch,
        caches: Sequence[LayerCache],
        query_lens: npt.NDArray[np.int32] | None,
        seq_lens: npt.NDArray[np.int32] | None,
    ) -> None:
        """Plan the decode rows, once per layout that layers share; allocate prefill's splits."""
        num_decodes = batch.num_decodes if batch.query_len is None else batch.num_reqs
        is_mixed = 0 < num_decodes < batch.num_reqs
        device = batch.seq_lens.device
        if is_mixed and device.type == "cuda" and self._beside is None:
            self._beside = torch.cuda.Stream(device)
        plans = {}
        if num_decodes and kernel_path(device) != "reference":
            for cache in {id(cache.layout): cache for cache in caches}.values():
                plans[id(cache.layout)] = plan = DecodePlan.allocate(
                    max_reqs=num_decodes,
                    max_keys=batch.block_table.shape[1] * cache.layout.block_size,
                    layout=cache.layout,
                    num_q_heads=self._num_q_heads,
                    dtype=self._dtype,
                    query_len=batch.query_len or 1,
                    page_format=cache.page_format,
                    deterministic=self._deterministic,
                    read_early=True,  # the previous launch is the layer's qkv_cache_write
                )
                self._ops.plan_decode_attention(batch.seq_lens[:num_decodes], cache.layout, plan)
        starts = batch.query_start_loc[num_decodes:] - num_decodes if is_mixed else None
        self._planned = _Planned(
            batch=batch,
            num_decodes=num_decodes,
            plans=plans,
            prefill_start_loc=starts,
            splits=self._splits(batch, caches, num_decodes),
        )

    def _splits(
        self, batch: AttentionBatch, caches: Sequence[LayerCache], num_decodes: int
    ) -> PrefillSplits | None:
        """Return splits for all layers if the prefill tiles alone cannot fill the device."""
        is_masked = batch.attn_mask_offsets is not None
        if num_decodes == batch.num_reqs or self._deterministic or is_masked:
            return None
        fewest = _with_fewest_full_heads(caches)
        return PrefillSplits.allocate(
            num_tokens=batch.num_tokens - num_decodes,
            num_reqs=batch.num_reqs - num_decodes,
            max_query_len=batch.max_query_len,
            layout=fewest.layout,
            num_q_heads=self._num_q_heads,
            dtype=self._dtype,
            page_format=fewest.page_format,
        )

    def prefill_choices(
        self, caches: Sequence[LayerCache], max_query_len: int, num_tokens: int
    ) -> tuple[LaunchChoice, ...]:
        """Return what decides on a causal prefill's kernels, per layout; decodes do not count."""
        if self._deterministic:  # one kernel for all
            return ()
        fewest = _with_fewest_full_heads(caches)
        return tuple(
            choose_launch(self._layer(cache), self._layer(fewest), max_query_len, num_tokens)
            for cache in {id(cache.layout): cache for cache in caches}.values()
        )

    def masked_choices(
        self, caches: Sequence[LayerCache], max_query_len: int
    ) -> tuple[PrefillAttentionConfig, ...]:
        """Return what decides on the kernels of a prefill whose tokens have ranges of keys."""
        return tuple(
            choose_config(self._layer(cache), max_query_len, has_offsets=True)
            for cache in {id(cache.layout): cache for cache in caches}.values()
        )

    def _layer(self, cache: LayerCache) -> PrefillLayer:
        return PrefillLayer(
            cache.layout, self._dtype, cache.page_format, self._num_q_heads,
            plain_scores=not self._soft_cap and not self._has_sinks,
        )  # fmt: skip

    def attend(
        self,
        q: torch.Tensor,
        batch: AttentionBatch,
        cache: LayerCache,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode rows of one token, or all rows if all have the same 2 to 8; prefill others."""
        planned = self._planned
        if planned is None or planned.batch is not batch:
            num_decodes = 0 if batch.query_len is None else batch.num_reqs
            planned = _Planned(
                batch=batch, num_decodes=num_decodes, plans={}, prefill_start_loc=None
            )
        plan, count = planned.plans.get(id(cache.layout)), planned.num_decodes
        if planned.prefill_start_loc is not None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            starts, splits = planned.prefill_start_loc, planned.splits
            try:
                with self._beside_decodes():
                    self._prefill(
                        q[count:], batch, cache, count, starts, splits, sinks, out[count:]
                    )
                self._decode(q[:count], batch, cache, count, plan, sinks, out[:count])
            finally:  # even if a launch fails: memory of ``out`` is reused on the current stream
                self._join()
            return out
        if count:
            return self._decode(q, batch, cache, count, plan, sinks)
        return self._prefill(q, batch, cache, 0, batch.query_start_loc, planned.splits, sinks)

    @contextmanager
    def _beside_decodes(self) -> Iterator[None]:
        """Launch on a stream of its own, until ``_join``. Nothing may be allocated inside."""
        if self._beside is None:
            yield
            return
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            yield

    def _join(self) -> None:
        if self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)

    def _decode(
        self,
        q: torch.Tensor,
        batch: AttentionBatch,
        cache: LayerCache,
        num_rows: int,
        plan: DecodePlan | None,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._ops.paged_decode_attention(
            q,
            cache.k,
            cache.v,
            batch.block_table[:num_rows],
            batch.seq_lens[:num_rows],
            cache.layout,
            softmax_scale=self._softmax_scale,
            logits_soft_cap=self._soft_cap,
            sinks=sinks,
            query_len=batch.query_len or 1,
            deterministic=self._deterministic,
            plan=plan,
            out=out,
            scales=cache.scales,
        )

    def _prefill(
        self,
        q: torch.Tensor,
        batch: AttentionBatch,
        cache: LayerCache,
        first_row: int,
        query_start_loc: torch.Tensor,
        splits: PrefillSplits | None,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        ranges = batch.attn_mask_offsets
        return self._ops.paged_prefill_attention(
            q,
            cache.k,
            cache.v,
            batch.block_table[first_row:],
            query_start_loc,
            batch.seq_lens[first_row:],
            cache.layout,
            softmax_scale=self._softmax_scale,
            logits_soft_cap=self._soft_cap,
            sinks=sinks,
            max_query_len=batch.max_query_len,
            attn_mask_offsets=None if ranges is None else ranges[first_row:],
            splits=splits,
            deterministic=self._deterministic,
            out=out,
            scales=cache.scales,
        )


def _with_fewest_full_heads(caches: Sequence[LayerCache]) -> LayerCache:
    """Return the layer whose splits serve all: the fewer full heads, the more programs a tile."""
    return min(caches, key=lambda cache: len(cache.layout.full_heads) or math.inf)
