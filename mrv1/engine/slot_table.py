"""The progress of the request in each slot, in tokens and blocks: one numpy column per count."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from mrv1.runner.step import Int64Array


class SlotTable:
    """Counts of the request in each slot, and the slots that are free."""

    def __init__(self, num_slots: int, streaming_groups: Iterable[int]) -> None:
        def column() -> Int64Array:
            return np.zeros(num_slots, dtype=np.int64)

        self.epochs: npt.NDArray[np.int32] = np.zeros(num_slots, dtype=np.int32)  # times freed
        self.num_tokens = column()  # known and pending tokens; where a head drafts, at most
        self.num_computed = column()  # tokens with K and V once the launched steps are over
        self.prompt_len = column()
        self.max_computed = column()  # one less than its most tokens: the last is never computed
        self.capacity = column()  # tokens for which the request has blocks
        self.num_pending = column()  # most tokens that steps in flight append, where a head drafts
        self.num_landed = column()  # tokens whose K and V steps that are over and succeeded wrote
        self.num_cached_blocks = column()  # leading blocks that were offered to the prefix cache
        self.first_live = {group: column() for group in streaming_groups}
        """Group with a window -> the first logical block after the sink that is not freed yet."""
        self.free = deque(range(num_slots))  # in the order in which they are taken

    def give_back(self, slot: int) -> None:
        """Make a slot free; its next request has another epoch."""
        self.epochs[slot] += 1
        self.free.append(slot)

    def reset(self) -> None:
        """Make every slot free, each with a new epoch."""
        self.epochs += 1
        self.free = deque(range(len(self.epochs)))
