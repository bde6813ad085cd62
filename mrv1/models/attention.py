"""Who attends in a forward pass: one interface, and mrv1's own kernels behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from mrv1.kernels.decode_plan import DecodePlan
from mrv1.kernels.ops import Ops
from mrv1.models.batch import AttentionBatch, LayerCache


class AttentionBackend(Protocol):
    """Attention over the paged cache: planned once a step, run once a layer."""

    def plan(
        self,
        batch: AttentionBatch,
        caches: Sequence[LayerCache],
        query_lens: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
    ) -> None:
        """Prepare for the layers of one step.

        Args:
            batch: what every layer of the step will be given.
            caches: of the layers.
            query_lens: ``[num_reqs]``, tokens of each row, as the host knows them.
            seq_lens: ``[num_reqs]``, the host's copy of ``batch.seq_lens``.
        """
        ...

    def attend(self, q: torch.Tensor, batch: AttentionBatch, cache: LayerCache) -> torch.Tensor:
        """Return what the batch's queries, ``[num_tokens, q_heads, head_dim]``, see in a layer.

        The keys and values of the batch's own tokens are in the cache already.
        """
        ...


class KernelBackend:
    """``ops.paged_decode_attention`` and ``ops.paged_prefill_attention``.

    They read lengths and tables on the device. Without a plan every layer of a decode step makes
    its own.

    Args:
        ops: what ``select_ops`` returned for the device.
        num_q_heads: query heads of every layer.
        dtype: of the queries.
        softmax_scale: factor of the scores.
    """

    def __init__(
        self, ops: Ops, *, num_q_heads: int, dtype: torch.dtype, softmax_scale: float
    ) -> None:
        self._ops = ops
        self._num_q_heads = num_q_heads
        self._dtype = dtype
        self._softmax_scale = softmax_scale
        self._plans: dict[int, DecodePlan] = {}
        """Of a decode step, by the identity of the layout that layers share."""

    def plan(
        self,
        batch: AttentionBatch,
        caches: Sequence[LayerCache],
        query_lens: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
    ) -> None:
        """Plan a decode step, once for all layers of a layout; a prefill needs no plan."""
        self._plans = {}
        if batch.query_len is None:
            return
        for cache in {id(cache.layout): cache for cache in caches}.values():
            plan = DecodePlan.allocate(
                max_reqs=batch.num_reqs,
                max_keys=batch.block_table.shape[1] * cache.layout.block_size,
                layout=cache.layout,
                num_q_heads=self._num_q_heads,
                dtype=self._dtype,
                query_len=batch.query_len,
                is_fp8=cache.scales is not None,
            )
            self._ops.plan_decode_attention(batch.seq_lens, cache.layout, plan)
            self._plans[id(cache.layout)] = plan

    def attend(self, q: torch.Tensor, batch: AttentionBatch, cache: LayerCache) -> torch.Tensor:
        """Decode if all rows have the same 1 to 8 queries, else prefill."""
        if batch.query_len is not None:
            return self._ops.paged_decode_attention(
                q,
                cache.k,
                cache.v,
                batch.block_table,
                batch.seq_lens,
                cache.layout,
                softmax_scale=self._softmax_scale,
                query_len=batch.query_len,
                plan=self._plans.get(id(cache.layout)),
                scales=cache.scales,
            )
        return self._ops.paged_prefill_attention(
            q,
            cache.k,
            cache.v,
            batch.block_table,
            batch.query_start_loc,
            batch.seq_lens,
            cache.layout,
            softmax_scale=self._softmax_scale,
            max_query_len=batch.max_query_len,
            scales=cache.scales,
        )
