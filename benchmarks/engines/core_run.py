"""mrv1's engine in the place of vLLM's: ``bench vllm``'s mode that has nothing of vLLM."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.engines.serving_run import CoreServed
from benchmarks.measure.child import Send
from benchmarks.peers.vllm_engine import Job, Prompts
from mrv1.engine import EngineCore
from mrv1.sampler import SamplingParams


def measure_core(job: Job, send: Send) -> None:
    """Send what ``measure_engine`` sends, of an engine with the options of ``EngineConfig``."""
    served = CoreServed(job.engine)
    try:
        send(served.start_s)
        send(served.first_tokens(job.probes))
        for prompts in job.runs:
            send(time_core(served.core, prompts, job.output_tokens))
    finally:
        served.close()


def time_core(core: EngineCore, prompts: Prompts, output_tokens: int) -> dict[str, Any]:
    """Return the seconds of one run, as ``time_run`` does of vLLM's engine.

    Raises:
        RuntimeError: a request has not all of its tokens.
        Mrv1Error: the error of a request that failed.
    """
    params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    first_s: dict[str, float] = {}
    start = time.perf_counter()
    requests = [core.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    while core.has_unfinished_requests:
        for request in core.step():
            first_s.setdefault(request.name, time.perf_counter() - start)
    whole_s = time.perf_counter() - start
    for request in requests:
        if request.error is not None:
            raise request.error
        if len(request.output_token_ids) != output_tokens:
            found = len(request.output_token_ids)
            raise RuntimeError(f"output tokens: expected {output_tokens}, got {found}")
    return {"first_s": [first_s[request.name] for request in requests], "whole_s": whole_s}
