"""Tells a listener when a step's keys and values of a layer are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mrv1.models.batch import LayerCache
from mrv1.runner.block_table import BlockTables
from mrv1.runner.rows import StepShape
from mrv1.runner.step import Int32Array, RequestId, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTokens:
    """Tokens of a request that a step adds to those whose keys and values are in its blocks."""

    req_id: RequestId
    slot: int
    start: int
    """Position of the first token; 0 in the step in which the request enters."""
    stop: int
    """Position after the last token: the request's next step starts here."""
    num_cached: int
    """Leading tokens from the prefix cache; a streaming head has those of its sink and window."""
    block_ids: tuple[tuple[int, ...], ...] | None
    """For each head group: the blocks in which these positions lie, in order; -1 = no page. None =
    the request took its slot before there was a listener."""


@dataclass(frozen=True, slots=True)
class EachRank:
    """A listener for each of several ranks, which are processes of their own.

    A pickle of this object goes to each rank. It is a process that does not import the caller's
    main module: ``make`` is a function of a module that can be imported, or a ``partial`` of one.
    """

    make: Callable[[int], KVListener]
    """Returns the listener of a rank, which is given; called in the rank's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVReady:
    """Once ``event`` has passed, one layer's keys and values of a step are written."""

    plan: StepPlan
    """The step, its rows in any order: each writes the next ``num_scheduled_tokens`` positions of
    its request, but for one that had stopped or that a custom processor refused."""
    tokens: tuple[KVTokens, ...]
    """By row of the plan: its positions and blocks, with the prefix cache's at entry."""
    layer: int
    cache: LayerCache
    """The layer's pages, their layout, and the scales of a cache of codes. A 4-bit cache has two
    of a layout's elements in a byte, and keys that are mixed (``PageFormat.mixes_keys``)."""
    heads: range
    """The KV heads of the model that ``cache`` has, in their order; of several ranks a part."""
    event: torch.cuda.Event | None
    """Recorded after the write; in a decode step after its CUDA graph, and then all layers of the
    step share one event. None on a CPU, where the write is over. A graph of a step with prompts
    records the same events whenever it runs, so an event may have come to stand for a later step:
    it has passed no earlier than that of this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeardStep:
    """What listeners are told of a step, on every rank."""

    plan: StepPlan
    tokens: tuple[KVTokens, ...]
    """By row of the plan."""


KVListener = Callable[[KVReady], None]
"""Called once per layer, in order, on the thread that launches, during ``ModelRunner.execute`` or
``forward``. It must not wait. An exception fails the step: its requests end with a ``StepError``,
others go on; of several ranks, each has a listener of its own (``EachRank``), and the step runs to
its end first. Where a step is a CUDA graph, the calls come after its launch. With prompts each
layer has an event of its own, which the graph records; a decode step's layers share one event
after it. The first listener has the graphs captured again, with the events.

Once ``KVReady.event``, recorded on the stream of the launch, has passed, another stream may read
the keys, values and scales that the step wrote in that layer. They do not change until a step is
launched whose requests were allocated the same blocks; the reader must be done by then, or the
stream of the launch must wait for it. Rejected drafts, and everything with
``kv_scale="quarter"``, last only until the request's next step.
"""


class LayerEvents:
    """The events that graphs of steps with prompts record, one after each layer's write.

    They are recorded on a stream beside that of the layers, where no kernel waits for them.
    """

    def __init__(self) -> None:
        self.are_wanted = False
        """Whether graphs that are captured from now on record them."""
        self._beside: torch.cuda.Stream | None = None
        self._events: dict[StepShape, list[torch.cuda.Event]] = {}

    @contextmanager
    def recorded(self, shape: StepShape) -> Iterator[Callable[[int], None] | None]:
        """Yield what is called after each layer's write on the current stream; None = nothing."""
        if not self.are_wanted or shape.query_len is not None:
            yield None
            return
        current, events = torch.cuda.current_stream(), list[torch.cuda.Event]()
        beside = self._beside = self._beside or torch.cuda.Stream()

        def record(layer: int) -> None:
            del layer
            beside.wait_stream(current)
            events.append(torch.cuda.Event(external=True))
            events[-1].record(beside)

        yield record
        current.wait_stream(beside)
        self._events[shape] = events

    def of(self, shape: StepShape) -> Sequence[torch.cuda.Event] | None:
        """Return the events of a graph's layers; None = it records none."""
        return self._events.get(shape)


def tokens_of(plan: StepPlan, num_before: Int32Array, tables: BlockTables) -> tuple[KVTokens, ...]:
    """Return the tokens that each row of a staged plan adds to its ``num_before [rows]``."""
    cached = {request.slot: request.num_computed_tokens for request in plan.entering}
    found = []
    for req_id, slot, before, count in zip(
        plan.req_ids,
        plan.slots.tolist(),
        num_before.tolist(),
        plan.num_scheduled_tokens.tolist(),
        strict=True,
    ):
        num_cached = cached.get(slot, 0)
        start, stop = before - num_cached, before + count
        found.append(
            KVTokens(
                req_id=req_id,
                slot=slot,
                start=start,
                stop=stop,
                num_cached=num_cached,
                block_ids=tables.ids_of(slot, start, stop),
            )
        )
    return tuple(found)
