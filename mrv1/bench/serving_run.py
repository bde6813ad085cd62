"""One engine's part of ``bench serving``, in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mrv1.bench.child import Send
from mrv1.bench.client import Progress, ServedEngine, serve
from mrv1.bench.peers.vllm_serving import VLLMServed
from mrv1.bench.workload import Workload
from mrv1.config import EngineConfig
from mrv1.engine import EngineCore
from mrv1.engine.request import Request
from mrv1.sampler import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingJob:
    """What one process measures."""

    engine: str
    """``mrv1`` or ``vllm``."""
    options: dict[str, Any]
    """Arguments of ``EngineConfig``, or of vLLM's ``EngineArgs``."""
    sampling: dict[str, Any]
    """Arguments of either engine's ``SamplingParams``."""
    on_cpu: bool
    stream_outputs: bool
    """Whether a token leaves the engine when it is drawn, or with the finished output."""
    probes: Sequence[Sequence[int]]
    """Prompts whose first tokens are reported."""
    workload: Workload
    vocab_size: int
    runs: int
    """Runs of the workload; the first one is not counted."""


def measure_serving(job: ServingJob, send: Send) -> None:
    """Send the seconds of the engine's start, the probes' first tokens, and each counted run.

    The process that runs this can measure nothing else afterwards.
    """
    engine: ServedEngine
    if job.engine == "mrv1":
        engine = CoreServed(job.options, job.sampling)
    else:
        engine = VLLMServed(
            job.options, job.sampling, on_cpu=job.on_cpu, stream_outputs=job.stream_outputs
        )
    try:
        send(engine.start_s)
        send(engine.first_tokens(job.probes))
        for run in range(job.runs):
            served = serve(engine, job.workload.conversations(run, job.vocab_size))
            if run:
                send(served)
    finally:
        engine.close()


class CoreServed:
    """mrv1's engine as ``client.serve`` drives it.

    A step gives every token; ``LLM.generate`` runs the same steps, and makes finished outputs.
    """

    def __init__(self, options: dict[str, Any], sampling: dict[str, Any]) -> None:
        """Start the engine; for errors see ``EngineCore``."""
        start = time.perf_counter()
        self._core = EngineCore(EngineConfig(**options))
        self.start_s = time.perf_counter() - start
        self._sampling = sampling
        self._num_taken: dict[int, int] = {}
        """Request -> tokens that ``step`` has returned."""

    def add(self, request: int, prompt: Sequence[int], output_len: int) -> None:
        """Queue a request."""
        params = SamplingParams(**self._sampling, max_tokens=output_len, ignore_eos=True)
        self._core.add_request(str(request), prompt, params)
        self._num_taken[request] = 0

    def step(self) -> list[Progress]:
        """Run a step.

        Raises:
            Mrv1Error: a request has failed.
        """
        return [self._progress(request) for request in self._core.step()]

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
        return self._core.has_unfinished_requests

    def first_tokens(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return each prompt's first token, and its lead over the next best."""
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=2)
        requests = [
            self._core.add_request(f"probe {index}", prompt, params)
            for index, prompt in enumerate(prompts)
        ]
        while self._core.has_unfinished_requests:
            self._core.step()
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
        self._core.runner.close()
