"""The ranges of keys that tokens see in steps where some token is not causal."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from mrv1.multimodal import Ranges, causal_ranges
from mrv1.runner.rows import DeviceRows
from mrv1.runner.staging import PinnedMemory
from mrv1.runner.step import Int32Array, StepPlan


class VisibleRanges:
    """The ranges of requests that have some, until their tokens are computed on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._memory = PinnedMemory(device)
        self._ranges: dict[int, Ranges] = {}
        """Slot -> ranges of its request's prompt tokens."""

    @property
    def has_requests(self) -> bool:
        """Whether some request has tokens with ranges to compute."""
        return bool(self._ranges)

    def enter(self, plan: StepPlan) -> None:
        """Bring the slots' ranges to the start of the step."""
        for slot in (*plan.preempted, *plan.finished):
            self._ranges.pop(slot, None)
        for request in plan.entering:
            self._ranges.pop(request.slot, None)
            if request.attn_mask_offsets is not None:
                self._ranges[request.slot] = request.attn_mask_offsets

    def masked_rows(self, plan: StepPlan, num_before: Int32Array) -> npt.NDArray[np.bool_] | None:
        """Return which rows of the plan have a token that is not causal; None = no row has any.

        ValueError: a token sees keys that the step does not compute.
        """
        masked = np.zeros(len(plan.slots), dtype=np.bool_)
        for row, slot in enumerate(map(int, plan.slots)):
            if slot not in self._ranges:
                continue
            start = int(num_before[row])
            end = start + int(plan.num_scheduled_tokens[row])
            ranges = self._ranges[slot][start:end]
            masked[row] = not np.array_equal(ranges, causal_ranges(start, start + len(ranges)))
            if len(ranges) and ranges[:, 1].max() > end:
                raise ValueError(
                    f"num_scheduled_tokens of {plan.req_ids[row]!r}: expected a chunk up to token "
                    f"{ranges[:, 1].max()}, which its tokens see, got one up to {end}"
                )
            if end >= len(self._ranges[slot]) and not masked[row]:
                del self._ranges[slot]
        return masked if masked.any() else None

    def of_step(self, plan: StepPlan, num_before: Int32Array, rows: DeviceRows) -> torch.Tensor:
        """Return a step's ranges ``[num_tokens, 2]`` int32 on the host, without padding."""
        pinned = self._memory.zeros(rows.shape.num_tokens, 2)
        ranges = np.asarray(pinned)
        for row, (slot, first) in enumerate(zip(plan.slots, rows.first_tokens, strict=True)):
            start, count = int(num_before[row]), int(plan.num_scheduled_tokens[row])
            own = ranges[first : first + count]
            own[:] = causal_ranges(start, start + count)
            given = self._ranges.get(int(slot))
            if given is not None:
                prompt = given[start : start + count]
                own[: len(prompt)] = prompt
        return pinned
