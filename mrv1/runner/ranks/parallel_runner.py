"""Rank 0's runner of a model that is spread over several processes of one host.

Rank 0, the process of the engine, sends the calls of its runner to the others. All compute the
same logits from the parts that they gather, and draw the same tokens. A rank that fails, dies or
does not answer ends them all: the others are at another point of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mrv1.config import EngineConfig, checkpoint_dir
from mrv1.device import rank_devices
from mrv1.errors import CapacityError, ConfigError, StepError
from mrv1.headwise import HeadPolicy
from mrv1.models import DecoderModel, ModelConfig, NamedTensors, ParallelContext
from mrv1.runner.async_output import AsyncOutput
from mrv1.runner.kv_listener import EachRank, KVListener
from mrv1.runner.model_runner import FORKED, ModelRunner
from mrv1.runner.ranks.control import Controls
from mrv1.runner.ranks.failure import PeerError
from mrv1.runner.ranks.groups import Gloo
from mrv1.runner.ranks.processes import START_SECONDS, Ranks
from mrv1.runner.report import KVReport, report_of
from mrv1.runner.step import SlotRequest, StepPlan
from mrv1.sampler import LogitsProcessor, SamplingParams

PARAMS = fields(SamplingParams)

Result = TypeVar("Result")


def _sendable(plan: StepPlan) -> StepPlan:
    """Return a plan for other ranks: masks and features come by themselves."""
    if (
        all(
            type(each.sampling_params) is SamplingParams
            and each.sampling_params.structured_output is None
            and not each.multimodal
            for each in plan.entering
        )
        and not plan.staged_features
    ):
        return plan

    def stripped(request: SlotRequest) -> SlotRequest:
        values = {each.name: getattr(request.sampling_params, each.name) for each in PARAMS}
        params = SamplingParams(**values | {"structured_output": None})
        items = tuple(item.without_features() for item in request.multimodal)
        return replace(request, sampling_params=params, multimodal=items)

    return replace(
        plan,
        new=tuple(map(stripped, plan.new)),
        resumed=tuple(map(stripped, plan.resumed)),
        staged_features=tuple(
            replace(staged, item=staged.item.without_features()) for staged in plan.staged_features
        ),
    )


class ParallelRunner(ModelRunner):
    """Rank 0 of a runner that is spread over ``config.tensor_parallel_size`` processes.

    Once a call has failed on any rank, or was interrupted, no rank runs
    any more, and every step fails with the first rank's error.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: DecoderModel | None = None,
        head_policy: HeadPolicy | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        progress: bool = True,
    ) -> None:
        """Start the ranks, load the model's parts and allocate the KV cache on each.

        Arguments and errors are those of ``ModelRunner``; ConfigError also if an option does not
        work with several ranks, or the model cannot be divided among them.
        """
        size = config.tensor_parallel_size
        for name, given in (("model", model), ("logits_processors", logits_processors)):
            if given:
                raise ConfigError(
                    f"{name}: expected none with tensor_parallel_size={size}, got one"
                )
        devices = rank_devices(config.device, size)
        if devices[0].type != "cpu":
            raise ConfigError(
                f"tensor_parallel_size: expected 1 on {devices[0]}, got {size}; several ranks run "
                "on device='cpu' only so far"
            )
        config = replace(config, model=str(checkpoint_dir(config.model, progress=progress)))
        unlinked = Gloo(0, size, timeout=0.0)  # a context of several ranks has collectives
        ParallelContext(
            size=size, all_reduce=unlinked.all_reduce, all_gather=unlinked.all_gather
        ).shard(ModelConfig.from_pretrained(config.model))
        self._ranks = Ranks(config, head_policy, devices)
        self._controls = Controls(self, self._ranks, self._end)
        try:
            super().__init__(
                config,
                head_policy=head_policy,
                parallel=self._ranks.context,
                allocates=False,
                progress=progress,
            )
            self._ranks.connect()
            self._start_clock.lap("ranks")
            with self._ranks.waiting("the start", START_SECONDS):
                self.allocate_kv_cache(progress=progress)
            self._ranks.await_ready()
        except PeerError as error:
            raise RuntimeError(f"tensor_parallel_size: {self._ranks.end(error)}") from error
        except BaseException as error:
            self._ranks.end(error)
            raise

    def execute(self, plan: StepPlan) -> AsyncOutput:
        """Launch one step on every rank; see ``ModelRunner.execute``."""
        self._stage_features(plan)
        return self._on_all_ranks(plan, super().execute, plan)

    def forward(self, plan: StepPlan) -> None:
        """Launch one step up to the last layer on every rank; see ``ModelRunner.forward``."""
        self._stage_features(plan)
        self._on_all_ranks(plan, super().forward, plan)

    def sample(
        self, bitmask: npt.NDArray[np.int32] | None = None, rows: Sequence[int] = ()
    ) -> AsyncOutput:
        """Launch the sampling of the step of ``forward``; see ``ModelRunner.sample``."""
        if self._pending is None:
            return super().sample(bitmask, rows)
        return self._on_all_ranks(self._pending.plan, super().sample, bitmask, rows)

    def _stage_features(self, plan: StepPlan) -> None:
        """Let every rank have the features that a plan stages, or raise a StepError."""
        if not plan.staged_features or self._ranks.failure is not None:
            return
        self.check_usable()
        try:
            self._controls.stage_features(plan)
        except CapacityError as error:
            raise StepError(str(error), step_id=plan.step_id, req_ids=plan.req_ids) from error
        except RuntimeError:
            if self._ranks.failure is None:  # else the step fails with it
                raise

    def _on_all_ranks(self, plan: StepPlan, call: Callable[..., Result], *args: object) -> Result:
        """Have every rank make a call of the step ``plan``, and return this rank's result."""
        cause: BaseException = PeerError("a rank has failed before")
        if self._ranks.failure is None:
            self.check_usable()
            try:
                sent = (_sendable(plan),) if len(args) == 1 else args
                self._ranks.send(call.__name__, *sent)
                result, failure = self._controls.joined(call, *args)
                if failure is None:
                    return result
                self._ranks.send("drop", replace(plan, new=(), resumed=(), staged_features=()))
                self.drop(plan)
            except BaseException as error:  # an interrupt, too, leaves the ranks at unlike points
                cause = error
            else:
                raise StepError(failure, step_id=plan.step_id, req_ids=plan.req_ids)
        self._end(cause)
        if not isinstance(cause, Exception):
            raise cause
        raise StepError(
            f"tensor_parallel_size: {self._ranks.failure}",
            step_id=plan.step_id,
            req_ids=plan.req_ids,
            device_lost=True,
        ) from cause

    def _end(self, error: BaseException) -> None:
        """End all ranks after a call that failed on one."""
        self._unusable = f"tensor_parallel_size: {self._ranks.end(error)}; make a new engine"

    def _waiting(self, what: str) -> AbstractContextManager[None]:
        return self._ranks.waiting(what)

    def discard(self) -> None:
        """Give up a step on every rank; see ``ModelRunner.discard``."""
        if self._ranks.failure is None and not self._closed:
            try:
                self._ranks.send("discard")
            except BaseException as error:
                self._end(error)
                if not isinstance(error, Exception):
                    raise
        super().discard()

    def after_fork(self) -> None:
        """Refuse to run in this process, a forked child, which has no ranks."""
        self._ranks.failure = self._unusable = FORKED
        super().after_fork()

    def set_kv_listener(self, listener: KVListener | EachRank | None) -> None:
        """Let each rank tell a listener of its own; see ``ModelRunner.set_kv_listener``."""
        self._controls.set_kv_listener(listener)

    def sleep(self, level: int = 1) -> None:
        """Free memory on every rank; see ``ModelRunner.sleep``."""
        self._controls.sleep(level)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Allocate the memory of every rank again; see ``ModelRunner.wake_up``."""
        self._controls.wake_up(tags)

    def update_weights(self, named_tensors: NamedTensors, *, partial: bool = False) -> None:
        """Overwrite each rank's part of the weights; see ``ModelRunner.update_weights``."""
        self._controls.update_weights(named_tensors, partial=partial)

    def kv_report(self) -> KVReport:
        """Return the sizes in bytes of the KV caches of all ranks together."""
        parts, size = self._parts, self.config.tensor_parallel_size
        ranks = [parts.head_groups.slice(rank, size) for rank in range(size)]
        return report_of(self.kv_cache, parts.streaming_demand, self.features.nbytes, ranks)

    def describe(self) -> str:
        """Return one line about all ranks: ``ModelRunner.describe``'s, and how they are linked."""
        size, links = self.config.tensor_parallel_size, self._ranks.describe()
        return f"{super().describe()}, {size} ranks over {links}"

    def close(self) -> None:
        """End the other ranks and free this one's memory; the runner cannot be used afterwards."""
        super().close()
        self._ranks.close()
