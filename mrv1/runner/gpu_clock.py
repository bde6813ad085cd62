"""Measures how long the GPU has worked on steps, at almost no cost per step."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class GpuClock:
    """Sums the time from each launch that finds the GPU idle to the end of the steps that follow.

    Only the steps' end events are needed, one with timing in ``ends`` for each slot of their ring.
    A gap shorter than the launch that follows it counts as work.
    """

    def __init__(self, ends: Sequence[torch.cuda.Event]) -> None:
        self._ends = ends
        self._begin = torch.cuda.Event(enable_timing=True)
        self._num_steps = 0
        """Steps since ``_begin`` was recorded."""
        self._seconds = 0.0
        """Time of the steps before ``_begin``."""

    def start(self, slot: int) -> None:
        """Measure on the current stream if the GPU is idle; the step in ``slot`` comes next."""
        last = self._ends[slot - 1]
        if self._num_steps and not last.query():
            return
        if self._num_steps:
            self._seconds += self._seconds_until(last)
        self._num_steps = 0
        self._begin.record()

    def end(self, slot: int) -> None:
        """Record, on the current stream, the end of the step in ``slot`` of the ring."""
        self._ends[slot].record()
        self._num_steps += 1

    def seconds(self, next_slot: int) -> float:
        """Return the time of the finished steps; ``next_slot`` is the slot of the next step.

        A lost GPU no longer reports when its last steps ended: their time is left out.
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
