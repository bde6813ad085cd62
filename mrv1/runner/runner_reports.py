"""The reports of a runner: counts of its steps, its start-up line, its memory."""

from __future__ import annotations

from collections import Counter

from mrv1.config import EngineConfig
from mrv1.device import KernelPath
from mrv1.headwise import HeadPolicy
from mrv1.models import DecoderModel
from mrv1.runner.async_output import OutputRing
from mrv1.runner.device_step import DeviceStep
from mrv1.runner.features import FeatureBuffer
from mrv1.runner.kv_cache import KVCache
from mrv1.runner.report import KVReport, StartClock, describe_runner, report_of
from mrv1.runner.start import RunnerParts


class RunnerReports:
    """The reports of a ``ModelRunner``; its counts go on when its parts are replaced."""

    config: EngineConfig
    path: KernelPath
    model: DecoderModel
    head_policy: HeadPolicy
    kv_cache: KVCache
    features: FeatureBuffer
    _parts: RunnerParts
    _step: DeviceStep
    _outputs: OutputRing
    _start_clock: StartClock
    _compilations: Counter[str]
    _num_warm_up_compilations: int

    def __init__(self) -> None:
        self.num_graph_steps = 0
        """Steps that ran as CUDA graphs, sampling included."""
        self._former_waits, self._former_seconds = 0, 0.0

    def count_former_steps(self) -> None:
        """Keep the counts of steps whose ring of outputs is about to be replaced."""
        self._former_waits, self._former_seconds = self.num_staging_waits, self.gpu_seconds

    @property
    def num_staging_waits(self) -> int:
        """How often a launch waited for the older step that used the same pinned buffers."""
        return self._former_waits + self._outputs.num_waits

    @property
    def gpu_seconds(self) -> float:
        """Seconds that the GPU has worked on finished steps; 0 on a CPU."""
        return self._former_seconds + self._outputs.gpu_seconds

    @property
    def start_seconds(self) -> dict[str, float]:
        """Seconds of each part of the start: weights, kernels, ranks, memory, graphs, warm-up."""
        return dict(self._start_clock.seconds)

    @property
    def num_compilations(self) -> int:
        """How often Triton has compiled or loaded a kernel since the runner was built."""
        return self._compilations.total() - self._num_warm_up_compilations

    def describe(self) -> str:
        """Return one line: device, path, dtypes, blocks and their bytes."""
        num_graphs = len(self._step.graphs.shapes) if self._step.is_capturable else 0
        return describe_runner(
            self.config,
            self.path,
            self.model,
            self.kv_cache,
            self._parts.conversion,
            num_graphs,
            self.head_policy,
            self.kv_report()["total_bytes"],
        )

    def kv_report(self) -> KVReport:
        """Return the KV cache's sizes in bytes."""
        return report_of(self.kv_cache, self._parts.streaming_demand, self.features.nbytes)
