"""The launches of rank 0, which tells the other ranks of each before it makes its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import TypeVar

from mrv1.kernels._base.peers import PeerError
from mrv1.runner.cuda_graph import Forwarded
from mrv1.runner.device_step import DeviceStep
from mrv1.runner.input_batch import InputBatch
from mrv1.runner.kv_listener import HeardStep
from mrv1.runner.launches import LayersLaunch, SampledReports, SamplingLaunch
from mrv1.runner.ranks.processes import Ranks
from mrv1.runner.rows import StepShape
from mrv1.runner.step import SlotRequest
from mrv1.sampler import SamplingParams

Result = TypeVar("Result")


PARAMS = fields(SamplingParams)


def _sendable(heard: HeardStep) -> HeardStep:
    """Return a step for other ranks: its requests without grammars and features."""

    def stripped(request: SlotRequest) -> SlotRequest:
        values = {each.name: getattr(request.sampling_params, each.name) for each in PARAMS}
        params = SamplingParams(**values | {"structured_output": None})
        items = tuple(item.without_features() for item in request.multimodal)
        return replace(request, sampling_params=params, multimodal=items)

    plan = heard.plan
    return replace(
        heard,
        plan=replace(
            plan,
            new=tuple(map(stripped, plan.new)),
            resumed=tuple(map(stripped, plan.resumed)),
            staged_features=tuple(
                replace(each, item=each.item.without_features()) for each in plan.staged_features
            ),
        ),
    )


class Leader:
    """``Launches`` on all ranks; each raises PeerError if a rank has failed, now or before.

    ``end`` is called with the error of a launch, after which no rank runs any more.
    """

    def __init__(
        self, step: DeviceStep, ranks: Ranks, end: Callable[[BaseException], None]
    ) -> None:
        self._step, self._ranks, self._end = step, ranks, end

    def replay(self, shape: StepShape, heard: HeardStep | None = None) -> Forwarded | None:
        """Launch the graph of a step, or of its layers."""
        number = self._step.graphs.number(shape)

        def tell() -> None:
            self._ranks.replay(number)
            if heard is not None:
                self._ranks.send("hear", _sendable(heard))

        return self._on_all_ranks(tell, partial(self._step.replay, shape))

    def launch_layers(
        self,
        launch: LayersLaunch,
        *,
        check: Callable[[InputBatch], None] | None = None,
        on_kv_written: Callable[[int], None] | None = None,
    ) -> Forwarded:
        """Launch the layers of a step, kernel by kernel."""
        heard = None if launch.heard is None else _sendable(launch.heard)
        tell = partial(self._ranks.send, "launch_layers", replace(launch, heard=heard))
        own = partial(self._step.launch_layers, launch, check=check, on_kv_written=on_kv_written)
        return self._on_all_ranks(tell, own)

    def launch_sampling(self, launch: SamplingLaunch, forwarded: Forwarded) -> SampledReports:
        """Launch the sampling after the layers."""
        tell = partial(self._ranks.send, "launch_sampling", launch)
        if launch.tail is not None and launch.num_masks is None and not launch.prompts:
            number = self._step.graphs.number(launch.shape, launch.tail)
            tell = partial(self._ranks.replay, number)
        return self._on_all_ranks(tell, partial(self._step.launch_sampling, launch, forwarded))

    def give_up(self) -> None:
        """Let the next step take the ring slot of a step that was launched only in part."""
        self._step.give_up()
        if self._ranks.failure is None:
            next_slot = self._step.outputs.next_slot
            self._on_all_ranks(partial(self._ranks.send, "give_up", next_slot), lambda: None)

    def _on_all_ranks(self, tell: Callable[[], None], own: Callable[[], Result]) -> Result:
        cause: BaseException = PeerError("a rank has failed before")
        if self._ranks.failure is None:
            try:
                with self._ranks.waiting("a launch"):
                    tell()
                    return own()
            except BaseException as error:  # an interrupt, too, leaves the ranks at unlike points
                cause = error
        self._end(cause)
        if not isinstance(cause, Exception):
            raise cause
        raise PeerError(f"tensor_parallel_size: {self._ranks.failure}") from cause
