"""Time launches on a device: in CUDA graphs, variants in turns, buffers rotated out of L2."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from mrv1.errors import Mrv1Error

Launch = Callable[[], object]

ROTATION_BYTES = 1 << 30
"""Bytes between two uses of one buffer: many times any GPU's L2 cache."""
MAX_ROTATION = 64
REPLAY_US = 2000.0
"""A replay lasts about this long, so that the gap around it is under a percent."""
MAX_LAUNCHES = 256


class WrongResultError(Mrv1Error, RuntimeError):
    """A kernel's result is wrong; the kernel is not timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Time of one launch. A sample is the mean over the launches of one replay."""

    median_us: float
    p20_us: float
    p80_us: float
    launches_per_sample: int
    samples_us: list[float]

    @classmethod
    def of(cls, samples_us: Sequence[float], launches_per_sample: int) -> Timing:
        """Return the statistics of the samples."""
        return cls(
            median_us=statistics.median(samples_us),
            p20_us=float(np.percentile(samples_us, 20)),
            p80_us=float(np.percentile(samples_us, 80)),
            launches_per_sample=launches_per_sample,
            samples_us=list(samples_us),
        )


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current device of launches and events; on a CPU do nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def rotation(bytes_moved: int, device: torch.device) -> int:
    """Return how many buffer sets to rotate, so that no set is still in L2 when its turn comes.

    At least two on a GPU; one on a CPU, whose times mean nothing anyway. Launches of a few KiB get
    the maximum, and all sets together fit L2: such a launch finds its buffers warm, as in a model.
    """
    if device.type != "cuda":
        return 1
    return min(MAX_ROTATION, max(2, math.ceil(ROTATION_BYTES / bytes_moved)))


def num_launches(num_sets: int, floor_us: float) -> int:
    """Return how many launches make one sample: whole rounds over the sets, about 2 ms."""
    wanted = min(MAX_LAUNCHES, math.ceil(REPLAY_US / max(floor_us, 1.0)))
    return num_sets * math.ceil(wanted / num_sets)


@dataclass(frozen=True, slots=True)
class Replay:
    """Launches that run one after the other, in order, on a device."""

    run: Launch
    num_launches: int
    launches: Sequence[Launch]
    """The captured launches: a graph itself does not keep the tensors alive that it reads."""


def capture(launches: Sequence[Launch], count: int, device: torch.device) -> Replay:
    """Return ``count`` launches, round and round over ``launches``, as one CUDA graph.

    Every launch runs once before, uncaptured, to compile and plan. On a CPU there is no graph, and
    one round is enough.
    """
    for launch in launches:
        launch()
    if device.type != "cuda":
        return Replay(lambda: [launch() for launch in launches], len(launches), launches)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            launches[index % len(launches)]()
    return Replay(graph.replay, count, launches)


def measure(
    replays: Mapping[str, Replay], repeats: int, device: torch.device
) -> dict[str, Timing]:
    """Return the time of a launch of each variant; the replays of the variants take turns.

    Args:
        replays: name of a variant -> its replay.
        repeats: samples of each variant, after one that is not counted.
        device: where they run. Waits for it.
    """
    clock = _by_events if device.type == "cuda" else _by_host_clock
    samples_ms: dict[str, list[float]] = clock(replays, repeats + 1)
    return {
        name: Timing.of(
            [ms * 1e3 / replays[name].num_launches for ms in samples[1:]],
            replays[name].num_launches,
        )
        for name, samples in samples_ms.items()
    }


def _by_events(replays: Mapping[str, Replay], rounds: int) -> dict[str, list[float]]:
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in replays}
    for _ in range(rounds):
        for name, replay in replays.items():
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            replay.run()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {n: [start.elapsed_time(end) for start, end in pairs] for n, pairs in events.items()}


def _by_host_clock(replays: Mapping[str, Replay], rounds: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(rounds):
        for name, replay in replays.items():
            start = time.perf_counter()
            replay.run()
            samples[name].append((time.perf_counter() - start) * 1e3)
    return samples
