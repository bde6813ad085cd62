"""How many of torch's threads a model without a GPU runs with.

Two threads that share one core, with another program or under a container's quota, wait for each
other in every operation and are many times slower than one. Only a clock tells: the start runs the
first layers with one thread and with as many as there may be, for ``MOST_SECONDS`` together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress

import torch

from mrv1.device import core_counts, cpu_quota
from mrv1.environment import environment
from mrv1.models import DecoderModel
from mrv1.models.batch import AttentionBatch, LayerCache

logger = logging.getLogger(__name__)

MOST_SECONDS = 0.4
NUM_RUNS = 5
"""One that touches the weights, then each number of threads twice, in turns."""

_set_here: list[tuple[int, int]] = []
"""Torch's own number of threads, and the number that was set here last; empty at first."""


def usual_threads() -> int | None:
    """Return the most threads to take; None if the user has chosen: by a variable, or in torch."""
    current = torch.get_num_threads()
    if environment().keys() & {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}:
        return None
    if _set_here and current == _set_here[-1][1]:
        current = _set_here[-1][0]
    elif current == 1 or current not in core_counts():
        return None
    return min(current, cpu_quota() or current)


def describe_threads() -> str:
    """Return in words what a start on this CPU will do; for ``mrv1 doctor``."""
    most = usual_threads()
    if most is None:
        return f"{torch.get_num_threads()}, as torch or OMP_NUM_THREADS says"
    quota = cpu_quota()
    limit = "no quota" if quota is None else f"a quota of {quota}"
    timed = f"; a start times 1 and {most}, and takes the faster" if most > 1 else ""
    return f"up to {most} ({max(core_counts())} cores, {limit}){timed}"


@torch.inference_mode()
def choose_threads(
    model: DecoderModel, batch: AttentionBatch, caches: Sequence[LayerCache], *, timed: bool
) -> None:
    """Set torch's number of threads for a model on a CPU, unless the user has set one.

    ``timed``: choose between 1 thread and the most by the clock, with a ``batch`` of padding; else
    take the most.
    """
    most = usual_threads()
    if most is None:
        return
    chosen = most
    if timed and most > 1:
        seconds = {1: 0.0, most: 0.0}
        reached = _layer_times(model, batch, caches, 1, model.config.num_layers)
        for count in (1, most) * (NUM_RUNS // 2):
            times = _layer_times(model, batch, caches, count, len(reached))
            seconds[count] += times[-1] / len(times)
        chosen = min(seconds, key=lambda count: seconds[count])
        logger.info("seconds of two layers by threads: %s; %d taken", seconds, chosen)
    _set(chosen)


def _set(count: int) -> None:
    own = _set_here[-1][0] if _set_here else torch.get_num_threads()
    _set_here[:] = [(own, count)]
    torch.set_num_threads(count)


class _Reached(Exception):  # noqa: N818 - no error: it ends a step early
    pass


def _layer_times(
    model: DecoderModel,
    batch: AttentionBatch,
    caches: Sequence[LayerCache],
    num_threads: int,
    num_layers: int,
) -> list[float]:
    """Return the seconds until each layer has written its keys, up to a number or the time."""
    times: list[float] = []
    start = time.perf_counter()

    def on_kv_written(_: int) -> None:
        times.append(time.perf_counter() - start)
        if len(times) == num_layers or times[-1] > MOST_SECONDS / NUM_RUNS:
            raise _Reached

    _set(num_threads)
    with suppress(_Reached):
        model.forward(batch, caches, on_kv_written=on_kv_written)
    return times
