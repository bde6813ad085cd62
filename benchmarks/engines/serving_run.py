"""One engine's part of ``bench serving``, in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from benchmarks.engines.client import Progress, ServedEngine, serve
from benchmarks.engines.workload import Workload
from benchmarks.measure.child import Send
from benchmarks.peers.vllm_serving import VLLMServed
from mrv1.config import EngineConfig
from mrv1.engine import EngineCore
from mrv1.engine.request import Request
from mrv1.sampler import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRuns:
    """The runs of one workload."""

    workload: Workload
    sampling: dict[str, Any]
    """Arguments of either engine's ``SamplingParams``."""
    stream_outputs: bool
    """Whether a token leaves the engine when it is drawn, or with the finished output."""
    warm_up: bool
    """Whether a run that is not counted comes first."""
    repeats: int
    """Counted runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingJob:
    """What one process measures."""

    engine: str
    """A key of ``serving.ENGINES``."""
    options: dict[str, Any]
    """Arguments of ``EngineConfig``, or of vLLM's ``EngineArgs``."""
    on_cpu: bool
    probes: Sequence[Sequence[int]]
    """Prompts whose first tokens are reported."""
    workloads: Sequence[WorkloadRuns]
    """Served one after the other."""
    vocab_size: int


def measure_serving(job: ServingJob, send: Send) -> None:
    """Send the seconds of the start and the probes' first tokens; then each workload's runs.

    The counted runs of a workload follow the rate at which its conversations arrived. The process
    that runs this can measure nothing else afterwards.
    """
    engine: ServedEngine
    if job.engine == "vllm":
        engine = VLLMServed(job.options, on_cpu=job.on_cpu)
    else:
        engine = CoreServed(job.options)
    try:
        send(engine.start_s)
        send(engine.first_tokens(job.probes))
        numbers = count()  # so that no two runs share a prefix
        for runs in job.workloads:
            engine.configure(runs.sampling, stream_outputs=runs.stream_outputs)
            workload = runs.workload
            if runs.warm_up:
                served = serve(engine, workload.conversations(next(numbers), job.vocab_size))
                if workload.peak_share is not None:
                    duration = max(each.token_s[-1] for each in served)
                    rate = workload.peak_share * workload.num_conversations / duration
                    workload = replace(workload, request_rate=rate, peak_share=None)
            send(workload.request_rate)
            for _ in range(runs.repeats):
                send(serve(engine, workload.conversations(next(numbers), job.vocab_size)))
    finally:
        engine.close()


class CoreServed:
    """mrv1's engine as ``client.serve`` drives it.

    A step gives every token; ``LLM.generate`` runs the same steps, and makes finished outputs.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        """Start the engine; for errors see ``EngineCore``."""
        start = time.perf_counter()
        self.core = EngineCore(EngineConfig(**options))
        self.start_s = time.perf_counter() - start
        self._sampling: dict[str, Any] = {}
        self._num_taken: dict[int, int] = {}
        """Request -> tokens that ``step`` has returned."""

    def configure(self, sampling: dict[str, Any], *, stream_outputs: bool) -> None:
        """Set what the next requests ask for; tokens leave the engine when they are drawn."""
        del stream_outputs
        self._sampling = sampling

    def add(self, request: int, prompt: Sequence[int], output_len: int) -> None:
        """Queue a request."""
        params = SamplingParams(**self._sampling, max_tokens=output_len, ignore_eos=True)
        self.core.add_request(str(request), prompt, params)
        self._num_taken[request] = 0

    def step(self) -> list[Progress]:
        """Run a step.

        Raises:
            Mrv1Error: a request has failed.
        """
        return [self._progress(request) for request in self.core.step()]

    def _progress(self, request: Request) -> Progress:
        if request.error is not None:
            raise request.error
        number, total = int(request.name), len(request.output_token_ids)
        token_ids = request.output_token_ids[self._num_taken[number] :]
        self._num_taken[number] = total
        return Progress(number, token_ids, request.finished and bool(token_ids))

    @property
    def is_busy(self) -> bool:
        """Whether a request is unfinished."""
        return self.core.has_unfinished_requests

    def first_tokens(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return each prompt's first token, and its lead over the next best."""
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=2)
        requests = [
            self.core.add_request(f"probe {index}", prompt, params)
            for index, prompt in enumerate(prompts)
        ]
        while self.core.has_unfinished_requests:
            self.core.step()
        found: list[list[float]] = []
        for request in requests:
            if request.error is not None:
                raise request.error
            position = request.output_logprobs[0]
            # The drawn token is reported twice: alone, and as one of the likeliest.
            of_token = zip(
                position.token_ids[0].tolist(), position.logprobs[0].tolist(), strict=True
            )
            values = sorted(dict(of_token).values(), reverse=True)
            found.append([request.output_token_ids[0], values[0] - values[1]])
        return found

    def close(self) -> None:
        """Give the device's memory back."""
        self.core.runner.close()
