"""Tells a listener when a step's keys and values of a layer are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mrv1.runner.step import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class KVReady:
    """Once ``event`` has passed, one layer's keys and values of a step are written."""

    plan: StepPlan
    """The step, its rows in any order. Each row writes the next ``num_scheduled_tokens`` positions
    of the request in its slot. Nothing is written for a request that had stopped, or that a custom
    processor refused."""
    block_ids: WrittenBlocks
    """Row by row of the plan, for each head group: the blocks in which these positions lie, in
    order; -1 = no page. None = the request took its slot before there was a listener."""
    layer: int
    event: torch.cuda.Event | None
    """Recorded after the write, or after the CUDA graph that contains the write: several layers
    may share one event. None on a CPU, where the write is over."""


WrittenBlocks = tuple[tuple[tuple[int, ...], ...] | None, ...]

KVListener = Callable[[KVReady], None]
"""Called once per layer, in order, on the thread that launches, during ``ModelRunner.execute`` or
``forward``. It must not wait; an exception fails the step. With a listener, a step with prompts
runs without a CUDA graph, and the calls come between its layers; a graph's calls come after it.

Once ``KVReady.event``, recorded on the stream of the launch, has passed, another stream may read
the keys, values and scales that the step wrote in that layer. They do not change until a step is
launched whose requests were allocated the same blocks; the reader must be done by then. Rejected
drafts, and everything with ``kv_scale="quarter"``, last only until the request's next step.
"""


def tell(
    listener: KVListener,
    plan: StepPlan,
    block_ids: WrittenBlocks,
    device: torch.device,
    *layers: int,
) -> None:
    """Tell ``listener`` of layers whose writes are on the current stream; they share an event."""
    event = None
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record()
    for layer in layers:
        listener(KVReady(plan=plan, block_ids=block_ids, layer=layer, event=event))
