"""A rank's KV listener, and its calls for the layers of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from mrv1.errors import ConfigError
from mrv1.runner.device_step import DeviceStep
from mrv1.runner.kv_listener import EachRank, HeardStep, KVListener, KVReady, tokens_of
from mrv1.runner.rows import StepShape
from mrv1.runner.step import StepPlan


class ListenerError(RuntimeError):
    """A listener raised the exception that is the cause."""


class LayerCalls:
    """Tells a listener of the layers of a step; of several ranks, until the listener fails."""

    def __init__(
        self, listener: KVListener, heard: HeardStep, step: DeviceStep, num_kv_heads: int
    ) -> None:
        """Take the step, and the number of KV heads of the whole model."""
        self._listener, self._step = listener, step
        own = step.spec.num_kv_heads
        (heads,) = step.model.parallel.part([num_kv_heads], [own])
        self._ready = partial(
            KVReady, plan=heard.plan, tokens=heard.tokens, heads=range(heads.start, heads.stop)
        )
        self._has_failed = False

    def __call__(self, layer: int) -> None:
        """Tell of a layer that was written last; ListenerError: one rank's listener raised."""
        self._tell_all({layer: self._event()})

    def after_graph(self, shape: StepShape) -> None:
        """Tell of all layers of the graph of a shape that was launched last; as ``__call__``."""
        events = self._step.layer_events.of(shape)
        self._tell_all(dict(enumerate(events or [self._event()] * self._step.spec.num_layers)))

    def _event(self) -> torch.cuda.Event | None:
        if self._step.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _tell_all(self, events: Mapping[int, torch.cuda.Event | None]) -> None:
        try:
            for layer, event in events.items() if not self._has_failed else ():
                self._tell(layer, event)
        except ListenerError as error:
            if self._step.model.parallel.size == 1:
                raise
            self._has_failed = True
            self._step.fail_late(error)

    def _tell(self, layer: int, event: torch.cuda.Event | None) -> None:
        cache = self._step.kv_cache.layers[layer]
        try:
            self._listener(self._ready(layer=layer, cache=cache, event=event))
        except Exception as error:  # of any type: it is the caller's code
            raise ListenerError(f"KV listener, layer {layer}: {error!r}") from error


class Listening:
    """Who listens to the steps of a rank."""

    def __init__(
        self, step: DeviceStep, num_kv_heads: int, capture_again: Callable[[], None]
    ) -> None:
        """Let nobody listen; other arguments as in ``LayerCalls``."""
        self._step, self._num_kv_heads = step, num_kv_heads
        self._capture_again = capture_again
        self.listener: KVListener | None = None

    def __bool__(self) -> bool:
        """Whether there is a listener."""
        return self.listener is not None

    def set(self, listener: KVListener | EachRank | None) -> None:
        """Let a listener, None = nobody, listen to the next steps.

        The first one has the graphs captured again, with an event for each layer.

        ConfigError: there is a draft head, of whose keys and values nobody is told.
        CapacityError: the graphs do not fit any more; nobody listens, and steps have no graphs.
        """
        if listener is not None and self._step.drafts is not None:
            raise ConfigError("listener: expected none with a draft head, got one")
        if isinstance(listener, EachRank):
            listener = listener.make(self._step.model.parallel.rank)
        events = self._step.layer_events
        if listener is not None and not events.are_wanted:
            events.are_wanted = True
            try:
                self._capture_again()
            except BaseException:
                events.are_wanted = False
                raise
        self.listener = listener
        self._step.block_tables.keep_ids(listener is not None)

    def move_to(self, step: DeviceStep) -> None:
        """Let the same listener listen to another step, which has no graphs yet."""
        step.layer_events.are_wanted = self._step.layer_events.are_wanted
        self._step = step
        step.block_tables.keep_ids(bool(self))

    def heard(self, plan: StepPlan) -> HeardStep | None:
        """Return what listeners are told of a staged plan; None = there is none."""
        if self.listener is None:
            return None
        step = self._step
        tokens = tokens_of(plan, step.state.num_before(plan), step.block_tables)
        return HeardStep(plan=plan, tokens=tokens)

    def calls(self, heard: HeardStep | None) -> LayerCalls | None:
        """Return what is called with the layers of a step; None = nobody listens."""
        if heard is None or self.listener is None:
            return None
        return LayerCalls(self.listener, heard, self._step, self._num_kv_heads)
