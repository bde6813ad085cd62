"""What a rank but 0 does in a step: it launches what rank 0 launches.

It has no plans, requests or block tables on the host: rank 0 writes each upload to memory that all
ranks share, and their kernels read it there. A step of rank 0 is over only once every rank has
taken part in its sums, and so has read its upload: the next one may replace it.
"""

from __future__ import annotations

import torch

from mrv1.runner.cuda_graph import Forwarded
from mrv1.runner.device_step import NEXT_UPLOAD
from mrv1.runner.kv_listener import HeardStep
from mrv1.runner.launches import LayersLaunch, SamplingLaunch
from mrv1.runner.model_runner import ModelRunner


class Follower:
    """Launches on one rank what rank 0 says by the names of these methods, on one stream."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self._step = runner, runner.device_step
        step = self._step
        self._forwarded: Forwarded | None = None
        self._number = 0
        """Of the graph that was launched last."""
        self._done = torch.cuda.Event() if step.device.type == "cuda" else None
        self._reports: object = None

    def replay(self, number: int) -> None:
        """Launch the graph of a number."""
        self._number = number
        forwarded = self._step.graphs.replay_number(number)
        if forwarded is not None:
            self._forwarded = forwarded
        self._mark()

    def launch_layers(self, launch: LayersLaunch) -> None:
        """Launch the layers of a step without a graph."""
        on_kv_written = self._runner.listening.calls(launch.heard)
        self._forwarded = self._step.launch_layers(launch, on_kv_written=on_kv_written)
        self._mark()

    def hear(self, heard: HeardStep) -> None:
        """Tell the listener of the layers of the graph that was launched last."""
        calls = self._runner.listening.calls(heard)
        if calls is not None:
            calls.after_graph(self._step.graphs.shape_of(self._number))

    def launch_sampling(self, launch: SamplingLaunch) -> None:
        """Launch the sampling of the step whose layers were launched last."""
        if self._forwarded is None:
            raise RuntimeError("launch_sampling: expected layers before it, got none")
        # Rank 0 reports: what is copied to the host here only has to live until the next step.
        self._reports = self._step.launch_sampling(launch, self._forwarded)
        self._mark()

    def give_up(self, next_slot: int) -> None:
        """Let the next step take the ring slot of one that was launched only in part."""
        self._step.slots[NEXT_UPLOAD].fill_(next_slot)

    def check(self) -> None:
        """Raise the error of a kernel that has failed, without a wait."""
        if self._done is not None:
            self._done.query()

    def _mark(self) -> None:
        if self._done is not None:
            self._done.record()
