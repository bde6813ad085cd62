"""Rank 0's runner of a model that is spread over several processes of one host.

Rank 0, the process of the engine, tells the others what it launches; all compute the same logits
and draw the same tokens. A rank that fails, dies or does not answer ends them all: the others are
at another point of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mrv1.config import EngineConfig
from mrv1.device import rank_devices
from mrv1.errors import CapacityError, ConfigError, StepError
from mrv1.headwise import HeadPolicy
from mrv1.kernels._base.peers import PeerError
from mrv1.models import DecoderModel
from mrv1.multimodal import MultimodalItem
from mrv1.runner.async_output import AsyncOutput
from mrv1.runner.head_groups import read_config
from mrv1.runner.model_runner import FORKED, ModelRunner
from mrv1.runner.ranks.control import ControlledRunner, RankControl
from mrv1.runner.ranks.leader import Leader
from mrv1.runner.ranks.processes import START_SECONDS, Ranks
from mrv1.runner.report import KVReport, report_of
from mrv1.runner.stand_in_device import stand_in_rank
from mrv1.runner.step import StepPlan
from mrv1.sampler import LogitsProcessor


class ParallelRunner(ControlledRunner):
    """Rank 0 of a runner that is spread over ``config.tensor_parallel_size`` processes.

    Once a call has failed on any rank, or was interrupted, no rank runs any more, and every step
    fails with the first rank's error.
    """

    LOST = (*ModelRunner.LOST, PeerError)

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
        if model is not None:
            raise ConfigError(f"model: expected none with tensor_parallel_size={size}, got one")
        devices = rank_devices(config.device, size)
        config, model_config = read_config(config, devices[0], progress=progress)
        stand_in_rank(0, size, devices[0], has_peers=False).shard(
            model_config,
            deterministic=config.deterministic,
            rank_invariant=config.rank_invariant,
        )
        self._ranks = Ranks(
            config, model_config, head_policy, devices, has_processors=bool(logits_processors)
        )
        self._own = RankControl(self)
        try:
            super().__init__(
                config,
                model_config=model_config,
                head_policy=head_policy,
                logits_processors=logits_processors,
                parallel=self._ranks.context,
                memory=self._ranks.memory,
                allocates=False,
                progress=progress,
            )
            self._ranks.connect()
            self._launches = Leader(self.device_step, self._ranks, self._end)
            self._waiting = self._wait_for_ranks
            self._start_clock.lap("ranks")
            with self._ranks.waiting("the start", START_SECONDS):
                self.allocate_kv_cache(progress=progress)
            self._ranks.await_ready()
            if (failed := self.device_step.take_late_error()) is not None:  # of a processor
                raise failed
            self._ranks.start_watch()
        except PeerError as error:
            self._end(error)
            raise RuntimeError(f"tensor_parallel_size: {self._ranks.failure}") from error
        except BaseException as error:
            self._end(error)
            raise

    def prepared(self, item: MultimodalItem) -> MultimodalItem:
        """Return an item, on the host, whose features go to every rank; see ``ModelRunner``."""
        return super().prepared(item.on_host())

    def execute(self, plan: StepPlan) -> AsyncOutput:
        """Launch one step on every rank; see ``ModelRunner.execute``."""
        self._stage_features(plan)
        return super().execute(plan)

    def forward(self, plan: StepPlan) -> None:
        """Launch one step up to the last layer on every rank; see ``ModelRunner.forward``."""
        self._stage_features(plan)
        super().forward(plan)

    def _stage_features(self, plan: StepPlan) -> None:
        """Let every rank have the features that a plan stages, or raise a StepError."""
        if not plan.staged_features or self._ranks.failure is not None:
            return
        self.check_usable()
        try:
            self._share_features(plan)
        except CapacityError as error:
            raise StepError(str(error), step_id=plan.step_id, req_ids=plan.req_ids) from error
        except RuntimeError:
            if self._ranks.failure is None:  # else the step fails with it
                raise

    @contextmanager
    def _wait_for_ranks(self, what: str) -> Iterator[None]:
        try:
            with self._ranks.waiting(what):
                yield
        except PeerError as error:
            self._end(error)
            raise

    def after_fork(self) -> None:
        """Refuse to run in this process, a forked child, which has no ranks."""
        self._ranks.failure = self._unusable = FORKED
        super().after_fork()

    def set_head_policy(self, policy: HeadPolicy | str | None) -> None:
        """Raise ConfigError: other heads change each rank's memory, which they share."""
        raise ConfigError(
            "set_head_policy: expected one rank, got tensor_parallel_size="
            f"{self.config.tensor_parallel_size}; make a new engine with head_policy="
        )

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
