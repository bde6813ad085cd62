"""The block tables on the device: the blocks of each slot, per head group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from mrv1.headwise import HeadGroup
from mrv1.kernels.step.contracts import SlotTables
from mrv1.runner.slot_state import Field, SlotState
from mrv1.runner.staging import StepUpload
from mrv1.runner.step import Int32Array, Int64Array, StepPlan

NO_PAGE = -1
"""Entry of a block table that names no page; kernels skip it."""


class BlockTables:
    """One row per slot on the device: a segment per head group; ``block_size`` is in tokens."""

    @staticmethod
    def fields(groups: Sequence[HeadGroup]) -> Mapping[str, Field]:
        """Return the fields that a slot has on the device."""
        return {"block_table": Field(width=sum(group.width for group in groups))}

    def __init__(
        self, slots: SlotState, max_num_reqs: int, groups: Sequence[HeadGroup], block_size: int
    ) -> None:
        self.groups = tuple(groups)
        table = slots["block_table"]
        self.row_width = table.shape[1]
        """Columns of a row, over all groups."""
        self._first_word = slots.first_word("block_table", 0)
        self.num_blocks_np = np.zeros((max_num_reqs, len(self.groups)), dtype=np.int32)
        """[max_num_reqs, groups], the host's count of each segment's logical blocks."""
        self._ids: dict[int, list[list[int]]] | None = None
        """Slot -> for each group, ids of all logical blocks; None = the host keeps none."""
        self._block_size = block_size
        self._spare_tokens = 0
        """Steady steps for which each row surely has a block."""

        def per_group(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=table.device)

        self.tables = SlotTables(
            block_tables=table,
            table_offset=per_group([g.offset for g in groups]),
            sink=per_group([g.keeps.sink if g.ring_blocks else 0 for g in groups]),
            ring_blocks=per_group([g.ring_blocks for g in groups]),
            block_size=block_size,
        )

    def stage(
        self,
        plan: StepPlan,
        num_computed_tokens: Int32Array,
        num_pool_blocks: Sequence[int],
        upload: StepUpload,
    ) -> None:
        """Count the plan's new blocks; add their ids to the upload, padded with -1 in a new row.

        ValueError: a slot without a row in the step, a wrong number of groups, an id outside the
        pool (but for ids that a ring overwrites at once), more blocks than the longest request
        needs, or no block for a token that a row computes; nothing is counted then.
        """
        num_blocks = self.num_blocks_np
        if plan.new_block_ids or plan.new or plan.resumed:
            num_blocks = self._counted(plan, num_pool_blocks, upload)
        if plan.continues is None or self._spare_tokens <= 0:
            self._spare_tokens = 1 + self._spare(plan, num_blocks, num_computed_tokens)
        self._spare_tokens -= 1
        if num_blocks is not self.num_blocks_np:
            self._keep(plan, num_blocks)

    def _counted(
        self, plan: StepPlan, num_pool_blocks: Sequence[int], upload: StepUpload
    ) -> Int32Array:
        """Return the blocks of each segment with the plan's; add their ids to the upload."""
        num_blocks = self.num_blocks_np.copy()
        entering = [request.slot for request in plan.entering]
        if entering:
            num_blocks[entering] = 0
        if plan.new_block_ids:
            slots = self._check(plan)
            first_words = self._first_word + slots * self.row_width
            per_group = zip(*plan.new_block_ids.values(), strict=True)
            for index, (group, ids) in enumerate(zip(self.groups, per_group, strict=True)):
                starts = num_blocks[slots, index]
                ends = starts + np.fromiter(map(len, ids), dtype=np.int32, count=len(ids))
                if ends.max() > group.max_blocks:
                    longest = ends.argmax()
                    raise ValueError(
                        f"new_block_ids: expected at most {group.max_blocks} blocks in slot "
                        f"{slots[longest]}, got {ends[longest]}"
                    )
                num_blocks[slots, index] = ends
                firsts = (first_words + group.offset).tolist()
                sent: list[int] = []
                for first, start, own in zip(firsts, starts.tolist(), ids, strict=True):
                    for column, piece in _pieces(group, start, own):
                        upload.put(first + column, piece)
                        sent += piece
                _check_ids(group, sent, num_pool_blocks[index])
        for index, group in enumerate(self.groups if entering else ()):
            for slot, count in zip(entering, num_blocks[entering, index].tolist(), strict=True):
                used = min(count, group.width)
                first = self._first_word + slot * self.row_width + group.offset + used
                upload.fill(first, group.width - used)
        return num_blocks

    def _spare(
        self, plan: StepPlan, num_blocks: Int32Array, num_computed_tokens: Int32Array
    ) -> int:
        """Return the tokens that all rows' blocks hold beyond the step's; ValueError if < 0."""
        blocks = num_blocks[plan.slots].min(axis=1)
        ends = num_computed_tokens[plan.slots] + plan.num_scheduled_tokens
        spare = blocks * self._block_size - ends
        if spare.min() < 0:
            row = int(spare.argmin())
            raise ValueError(
                f"new_block_ids: expected blocks for the {ends[row]} tokens of "
                f"{plan.req_ids[row]!r}, got {blocks[row]} blocks of {self._block_size}"
            )
        return int(spare.min())

    def _keep(self, plan: StepPlan, num_blocks: Int32Array) -> None:
        self.num_blocks_np = num_blocks
        if self._ids is not None:
            for request in plan.entering:
                self._ids[request.slot] = [[] for _ in self.groups]
            for slot in self._ids.keys() & plan.new_block_ids.keys():
                for known, ids in zip(self._ids[slot], plan.new_block_ids[slot], strict=True):
                    known.extend(ids)

    def keep_ids(self, keeps: bool) -> None:
        """Let the host keep the ids of the requests that enter from now on, or no ids."""
        if keeps != (self._ids is not None):
            self._ids = {} if keeps else None

    def ids_of(self, slot: int, start: int, stop: int) -> tuple[tuple[int, ...], ...] | None:
        """Return the blocks of positions ``start`` to ``stop`` - 1, as ``KVTokens.block_ids``."""
        if self._ids is None or slot not in self._ids:
            return None
        size = self._block_size
        return tuple(tuple(known[start // size : -(-stop // size)]) for known in self._ids[slot])

    def _check(self, plan: StepPlan) -> Int64Array:
        """Return the slots that get blocks; raise unless each has a row in the step."""
        slots = [*plan.new_block_ids]
        is_row = np.zeros(len(self.num_blocks_np), dtype=np.bool_)
        is_row[plan.slots] = True
        index = np.array(slots, dtype=np.int64)
        if min(slots) < 0 or max(slots) >= len(is_row) or not is_row[index].all():
            foreign = sorted(set(slots) - set(plan.slots.tolist()))
            raise ValueError(f"new_block_ids: expected slots of the step's rows, got {foreign}")
        return index


def _pieces(
    group: HeadGroup, start: int, ids: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield runs of ids, each with its first column, without ids that a ring overwrites at once.

    ``start`` is the logical block of the first id; ``ids`` are those of consecutive blocks.
    """
    sink, ring, end = group.sink_blocks, group.ring_blocks, start + len(ids)
    if not ring:
        if ids:
            yield start, ids
        return
    if start < min(sink, end):
        yield start, ids[: sink - start]
    first = max(start, sink, end - ring)
    while first < end:
        turn = (first - sink) % ring
        last = min(end, first + ring - turn)
        yield sink + turn, ids[first - start : last - start]
        first = last


def _check_ids(group: HeadGroup, ids: Sequence[int], num_pool_blocks: int) -> None:
    """Check that the ids which enter the table are in the group's pool."""
    least = 0 if group.keeps.is_full else NO_PAGE  # a prefix hit's blocks before the window are -1
    if ids and not least <= min(ids) <= max(ids) < num_pool_blocks:
        outside = tuple(block for block in ids if not least <= block < num_pool_blocks)
        raise ValueError(f"new_block_ids: expected ids in [0, {num_pool_blocks}), got {outside}")
