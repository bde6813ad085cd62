"""How long the GPU has worked on steps, for next to nothing a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class GpuClock:
    """Adds up the time from each launch that finds the GPU idle to the end of the steps behind it.

    While steps follow on each other only their ends are recorded, which the host needs anyway, and
    nothing is computed before someone asks. A step that ends while the next one is being launched
    counts as followed on: the gap, shorter than that launch, is taken for work.

    Args:
        ends: an event with timing for each slot of a ring that steps take in turns.
    """

    def __init__(self, ends: Sequence[torch.cuda.Event]) -> None:
        self._ends = ends
        self._begin = torch.cuda.Event(enable_timing=True)
        self._num_steps = 0
        """Since ``_begin`` was recorded."""
        self._seconds = 0.0
        """Of what came before it."""

    def start(self, slot: int) -> None:
        """Note that the step of ``slot`` is launched now, on the current stream."""
        last = self._ends[slot - 1]
        if self._num_steps and not last.query():
            return
        if self._num_steps:
            self._seconds += self._seconds_until(last)
        self._num_steps = 0
        self._begin.record()

    def end(self, slot: int) -> None:
        """Record the end of the step of ``slot`` on the current stream."""
        self._ends[slot].record()
        self._num_steps += 1

    def seconds(self, next_slot: int) -> float:
        """Return the time of the steps that are over, ``next_slot`` being the next step's.

        A GPU that is lost no longer tells when its last steps ended: they do not count.
        """
        try:
            for age in range(1, min(self._num_steps, len(self._ends)) + 1):
                end = self._ends[next_slot - age]
                if end.query():
                    return self._seconds + self._seconds_until(end)
        except RuntimeError:
            pass
        return self._seconds

    def _seconds_until(self, end: torch.cuda.Event) -> float:
        milliseconds: float = self._begin.elapsed_time(end)
        return milliseconds * 1e-3
