"""Who attends in a forward pass: one interface, and mrv1's own kernels behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from mrv1.device import kernel_path
from mrv1.kernels import DecodePlan, PrefillSplits
from mrv1.kernels.registry import Ops
from mrv1.models.batch import AttentionBatch, LayerCache

LONG_QUERY = 256
"""No prefill tile holds as many queries: from here on a batch's longest does not change tiles."""


class AttentionBackend(Protocol):
    """Attention over the paged cache: planned once a step, run once a layer."""

    def plan(
        self,
        batch: AttentionBatch,
        caches: Sequence[LayerCache],
        query_lens: npt.NDArray[np.int32] | None,
        seq_lens: npt.NDArray[np.int32] | None,
    ) -> None:
        """Prepare for the layers of one step.

        Args:
            batch: what every layer of the step will be given.
            caches: of the layers.
            query_lens: ``[num_reqs]``, tokens of each row, as the host knows them; None while a
                graph is captured.
            seq_lens: ``[num_reqs]``, the host's copy of ``batch.seq_lens``; None likewise.
        """
        ...

    def attend(self, q: torch.Tensor, batch: AttentionBatch, cache: LayerCache) -> torch.Tensor:
        """Return what the batch's queries, ``[num_tokens, q_heads, head_dim]``, see in a layer.

        The keys and values of the batch's own tokens are in the cache already.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """What a backend settled for the layers of one step."""

    batch: AttentionBatch
    num_decodes: int
    """Leading rows that the decode kernel takes."""
    plans: Mapping[int, DecodePlan]
    """Of the decode rows, by the identity of the layout that layers share; none on a CPU."""
    prefill_start_loc: torch.Tensor | None
    """``query_start_loc`` of the rows behind them; None if there are none."""
    splits: PrefillSplits | None = None
    """What programs of the rows behind them share; None = a tile of queries has one program."""


class KernelBackend:
    """``ops.paged_decode_attention`` and ``ops.paged_prefill_attention``.

    They read lengths and tables on the device. Rows of one token are decoded and the others
    prefilled, also where a step has both. Without a plan every layer of a decode step makes its
    own, and a step of both kinds is prefilled.

    Args:
        ops: what ``select_ops`` returned for the device.
        num_q_heads: query heads of every layer.
        dtype: of the queries.
        softmax_scale: factor of the scores.
        deterministic: whether a row's result is to depend on that row alone.
    """

    def __init__(
        self,
        ops: Ops,
        *,
        num_q_heads: int,
        dtype: torch.dtype,
        softmax_scale: float,
        deterministic: bool = False,
    ) -> None:
        self._ops = ops
        self._num_q_heads = num_q_heads
        self._dtype = dtype
        self._softmax_scale = softmax_scale
        self._deterministic = deterministic
        self._planned: _Planned | None = None

    def plan(
        self,
        batch: AttentionBatch,
        caches: Sequence[LayerCache],
        query_lens: npt.NDArray[np.int32] | None,
        seq_lens: npt.NDArray[np.int32] | None,
    ) -> None:
        """Plan the decode rows, once for all layers of a layout; a prefill needs no plan."""
        num_decodes = batch.num_decodes if batch.query_len is None else batch.num_reqs
        is_mixed = 0 < num_decodes < batch.num_reqs
        plans = {}
        if num_decodes and kernel_path(batch.seq_lens.device) != "reference":
            for cache in {id(cache.layout): cache for cache in caches}.values():
                plans[id(cache.layout)] = plan = DecodePlan.allocate(
                    max_reqs=num_decodes,
                    max_keys=batch.block_table.shape[1] * cache.layout.block_size,
                    layout=cache.layout,
                    num_q_heads=self._num_q_heads,
                    dtype=self._dtype,
                    query_len=batch.query_len or 1,
                    is_fp8=cache.scales is not None,
                    deterministic=self._deterministic,
                    read_early=True,  # the launch in front of a layer's attention is its KV write
                )
                self._ops.plan_decode_attention(batch.seq_lens[:num_decodes], cache.layout, plan)
        self._planned = _Planned(
            batch=batch,
            num_decodes=num_decodes,
            plans=plans,
            prefill_start_loc=batch.query_start_loc[num_decodes:] - num_decodes
            if is_mixed
            else None,
            splits=self._splits(batch, caches[0], num_decodes),
        )

    def _splits(
        self, batch: AttentionBatch, cache: LayerCache, num_decodes: int
    ) -> PrefillSplits | None:
        """Return what all layers share where a few short chunks cannot fill the device."""
        if num_decodes == batch.num_reqs or self._deterministic:
            return None
        return PrefillSplits.allocate(
            num_tokens=batch.num_tokens - num_decodes,
            num_reqs=batch.num_reqs - num_decodes,
            max_query_len=batch.max_query_len,
            layout=cache.layout,
            num_q_heads=self._num_q_heads,
            dtype=self._dtype,
            is_fp8=cache.scales is not None,
        )

    def attend(self, q: torch.Tensor, batch: AttentionBatch, cache: LayerCache) -> torch.Tensor:
        """Decode the rows of one token, or all if they have 2 to 8 alike, and prefill others."""
        planned = self._planned
        if planned is None or planned.batch is not batch:
            num_decodes = 0 if batch.query_len is None else batch.num_reqs
            planned = _Planned(
                batch=batch, num_decodes=num_decodes, plans={}, prefill_start_loc=None
            )
        plan, count = planned.plans.get(id(cache.layout)), planned.num_decodes
        if planned.prefill_start_loc is not None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            self._decode(q[:count], batch, cache, count, plan, out[:count])
            starts = planned.prefill_start_loc
            self._prefill(q[count:], batch, cache, count, starts, planned.splits, out[count:])
            return out
        if count:
            return self._decode(q, batch, cache, count, plan)
        return self._prefill(q, batch, cache, 0, batch.query_start_loc, planned.splits)

    def _decode(
        self,
        q: torch.Tensor,
        batch: AttentionBatch,
        cache: LayerCache,
        num_rows: int,
        plan: DecodePlan | None,
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
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._ops.paged_prefill_attention(
            q,
            cache.k,
            cache.v,
            batch.block_table[first_row:],
            query_start_loc,
            batch.seq_lens[first_row:],
            cache.layout,
            softmax_scale=self._softmax_scale,
            max_query_len=max(batch.max_query_len, LONG_QUERY)
            if self._deterministic
            else batch.max_query_len,
            splits=splits,
            out=out,
            scales=cache.scales,
        )
