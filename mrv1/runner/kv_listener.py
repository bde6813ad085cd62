"""Telling a listener that a layer's keys and values of a step are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mrv1.runner.step import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class KVReady:
    """One layer's keys and values of a step are written, as soon as the event has passed."""

    plan: StepPlan
    """The step, its rows in any order: row by row the next ``num_scheduled_tokens`` positions of
    the request in ``slots``, in the blocks that it has been given up to this plan. Nothing is
    written for a request that had stopped, or that a custom processor refused."""
    layer: int
    event: torch.cuda.Event | None
    """Recorded behind the write, or behind the CUDA graph that does it: several layers may share
    one. None on a CPU, where it is done."""


KVListener = Callable[[KVReady], None]
"""Is called once a layer, in order, on the thread that launches, during ``ModelRunner.execute`` or
``forward``, and must not wait; an exception fails the step. A step with prompts is then no CUDA
graph, and the calls come between its layers; those of a decode that is one come behind it.

Once ``KVReady.event``, recorded on the stream of the launch, has passed, another stream may read
what the step wrote in that layer's pages and scales. It stays as it is until a step is launched to
whose requests the blocks were given anew, and the reader is to be done by then. Of rejected
drafts, and with ``kv_scale="quarter"``, it stays until the next step of the same request.
"""


def tell(listener: KVListener, plan: StepPlan, device: torch.device, *layers: int) -> None:
    """Tell of layers whose writes the current stream has been given; they share an event."""
    event = None
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record()
    for layer in layers:
        listener(KVReady(plan=plan, layer=layer, event=event))
