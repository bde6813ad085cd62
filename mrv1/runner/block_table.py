"""Which blocks each slot holds, per head group, on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mrv1.runner.slot_state import Field, SlotState
from mrv1.runner.staging import StepUpload
from mrv1.runner.step import StepPlan

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

    Args:
        slots: holds the device's table.
        max_num_reqs: its rows.
        groups: columns of each head group.
        device: where the columns' description lives.
    """

    @staticmethod
    def fields(groups: Sequence[GroupColumns]) -> Mapping[str, Field]:
        """Return what a slot holds on the device."""
        return {"block_table": Field(width=sum(group.width for group in groups))}

    def __init__(
        self,
        slots: SlotState,
        max_num_reqs: int,
        groups: Sequence[GroupColumns],
        device: torch.device,
    ) -> None:
        self._slots = slots
        self.groups = tuple(groups)
        self.table = slots["block_table"]
        """[max_num_reqs, row_width] int32, -1 = no page."""
        self.num_blocks_np = np.zeros((max_num_reqs, len(self.groups)), dtype=np.int32)
        """[max_num_reqs, groups], the host's count of each segment's valid columns."""

        def per_group(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.group_table_offset = per_group([g.offset for g in groups])
        self.group_sink = per_group([g.sink for g in groups])
        self.group_ring_blocks = per_group([g.ring_blocks for g in groups])

    @property
    def row_width(self) -> int:
        """Columns of all groups."""
        return self.table.shape[1]

    def stage(self, plan: StepPlan, num_pool_blocks: int, upload: StepUpload) -> None:
        """Count the plan's new blocks on the host; add their ids, and -1 behind a new row's.

        Raises:
            ValueError: a slot without a row, an id outside the pool, or more blocks in a row than
                its segment has columns.
        """
        if plan.new_block_ids:
            self._check(plan, num_pool_blocks)
        entering = {request.slot for request in plan.entering}
        for slot in entering:
            self.num_blocks_np[slot] = 0
        for slot, per_group in plan.new_block_ids.items():
            for index, (group, ids) in enumerate(zip(self.groups, per_group, strict=True)):
                if ids:
                    self._append(slot, index, group, ids, upload)
        for slot in entering:
            for group, count in zip(self.groups, self.num_blocks_np[slot].tolist(), strict=True):
                first = self._slots.first_word("block_table", slot) + group.offset + count
                upload.fill(first, group.width - count)

    def _check(self, plan: StepPlan, num_pool_blocks: int) -> None:
        """Check slots, ids and counts before anything is noted."""
        foreign = plan.new_block_ids.keys() - set(plan.slots.tolist())
        if foreign:
            raise ValueError(
                f"new_block_ids: expected slots of the step's rows, got {sorted(foreign)}"
            )
        entering = {request.slot for request in plan.entering}
        for slot, per_group in plan.new_block_ids.items():
            held = (
                [0] * len(self.groups) if slot in entering else self.num_blocks_np[slot].tolist()
            )
            for group, ids, count in zip(self.groups, per_group, held, strict=True):
                if count + len(ids) > group.width:
                    raise ValueError(
                        f"new_block_ids: expected at most {group.width} blocks in slot {slot}, "
                        f"got {count + len(ids)}"
                    )
                if ids and not 0 <= min(ids) <= max(ids) < num_pool_blocks:
                    raise ValueError(
                        f"new_block_ids: expected ids in [0, {num_pool_blocks}), got {ids}"
                    )

    def _append(
        self, slot: int, index: int, group: GroupColumns, ids: Sequence[int], upload: StepUpload
    ) -> None:
        start = int(self.num_blocks_np[slot, index])
        first = self._slots.first_word("block_table", slot) + group.offset + start
        upload.put(first, ids)
        self.num_blocks_np[slot, index] = start + len(ids)
