"""Which blocks each slot holds, per head group, on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mrv1.runner.step import HostArrays, StepPlan

NO_PAGE = -1
"""Entry of a block table that names no page; kernels skip it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupColumns:
    """The columns of a table row that belong to one head group."""

    offset: int
    """First column."""
    width: int
    """Columns."""
    sink: int = 0
    """Leading tokens kept by a streaming group; 0 for a full group."""
    ring_blocks: int = 0
    """Ring width in blocks; 0 = a column is the logical block."""


class BlockTables:
    """Rows of concatenated segments, one per head group, in slot order.

    The device table is written on the runner's stream; ``num_blocks_np`` is the host's count of
    each segment's valid columns.
    """

    def __init__(
        self, max_num_reqs: int, groups: Sequence[GroupColumns], device: torch.device
    ) -> None:
        self.groups = tuple(groups)
        self.row_width = sum(group.width for group in groups)
        self.table = torch.full(
            (max_num_reqs, self.row_width), NO_PAGE, dtype=torch.int32, device=device
        )
        """[max_num_reqs, row_width] int32, -1 = no page."""
        self.num_blocks_np = np.zeros((max_num_reqs, len(self.groups)), dtype=np.int32)

        def per_group(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.group_table_offset = per_group([g.offset for g in groups])
        self.group_sink = per_group([g.sink for g in groups])
        self.group_ring_blocks = per_group([g.ring_blocks for g in groups])

    def stage(self, plan: StepPlan, num_pool_blocks: int) -> HostArrays:
        """Count the plan's new blocks on the host; return where their ids go.

        Raises:
            ValueError: an id outside the pool, or more blocks in a row than its segment has
                columns.
        """
        for request in plan.entering:
            self.num_blocks_np[request.slot] = 0
        indices: list[int] = []
        block_ids: list[int] = []
        for slot, per_group in zip(plan.slots.tolist(), plan.new_block_ids, strict=True):
            for index, (group, ids) in enumerate(zip(self.groups, per_group, strict=True)):
                if not ids:
                    continue
                start = int(self.num_blocks_np[slot, index])
                if start + len(ids) > group.width:
                    raise ValueError(
                        f"new_block_ids: expected at most {group.width} blocks in slot {slot}, "
                        f"got {start + len(ids)}"
                    )
                if not 0 <= min(ids) <= max(ids) < num_pool_blocks:
                    raise ValueError(
                        f"new_block_ids: expected ids in [0, {num_pool_blocks}), got {ids}"
                    )
                first = slot * self.row_width + group.offset + start
                indices.extend(range(first, first + len(ids)))
                block_ids.extend(ids)
                self.num_blocks_np[slot, index] = start + len(ids)
        return {
            "table_indices": np.array(indices, dtype=np.int64),
            "table_block_ids": np.array(block_ids, dtype=np.int32),
        }

    def apply(self, staged: Mapping[str, torch.Tensor]) -> None:
        """Forget the pages of slots that were taken, then write the new block ids."""
        if staged["entering_slots"].numel():
            self.table.index_fill_(0, staged["entering_slots"], NO_PAGE)
        if staged["table_indices"].numel():
            self.table.view(-1).index_copy_(0, staged["table_indices"], staged["table_block_ids"])

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the table in batch-row order, ``[rows, row_width]`` int32."""
        return self.table.index_select(0, slots)
