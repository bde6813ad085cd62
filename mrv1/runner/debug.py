"""Checks of a step for debugging: the host waits for the device, which costs time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mrv1.kernels.cache.block_ids import find_bad_block_ids
from mrv1.kernels.registry import Ops
from mrv1.runner.input_batch import InputBatch
from mrv1.runner.kv_cache import KVCache
from mrv1.runner.rows import DeviceRows
from mrv1.runner.step import StepPlan


class SyncedOps:
    """Another set's ops, each with a wait after it, so that an error names its kernel."""

    def __init__(self, ops: Ops, device: torch.device) -> None:
        self._ops = ops
        self._device = device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = getattr(self._ops, name)

        def awaited(*args: object, **kwargs: object) -> Any:  # noqa: ANN401 - whatever the op returns
            try:
                result = op(*args, **kwargs)
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
            except Exception as error:
                raise RuntimeError(f"kernel {name}: {error}") from error
            return result

        return awaited


def check_block_ids(plan: StepPlan, rows: DeviceRows, cache: KVCache, batch: InputBatch) -> None:
    """Raise ValueError, naming block id and request, if a step uses an id outside its pool."""
    attention, num_blocks = batch.attention, cache.num_blocks
    query_lens = torch.tensor(
        rows.placed(plan.num_scheduled_tokens), device=attention.seq_lens.device
    )
    for layout in {id(layer.layout): layer.layout for layer in cache.layers}.values():
        bad = find_bad_block_ids(
            attention.block_table, attention.seq_lens, query_lens, layout, num_blocks
        )
        if bad:
            first, row_of = bad[0], rows.placed(np.arange(len(plan.slots), dtype=np.int32))
            limit = num_blocks[layout.roles[first.head].group]
            raise ValueError(
                f"block table of request {plan.req_ids[row_of[first.row]]!r}, KV head "
                f"{first.head}: expected a block id in [0, {limit}) in column {first.column}, got "
                f"{first.block_id} ({len(bad)} such entries in the step)"
            )
