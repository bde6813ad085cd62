"""vLLM's engine on one checkpoint: its first tokens, then its times.

The engine is vLLM's ``LLMEngine``, which is also what vLLM's ``LLM`` runs. Requests are token ids
in and out, all added at once; a request's first token leaves the engine, then all others together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.measure.child import Send
from mrv1.environment import export

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one process measures."""

    engine: dict[str, Any]
    """Arguments of vLLM's ``EngineArgs``, where ``stream_interval`` is at least ``output_tokens``,
    or of ``EngineConfig``."""
    on_cpu: bool
    probes: Prompts
    """Prompts whose first tokens are reported."""
    near_tie: float
    """Largest lead of a first token that rounding can undo, as a log-probability."""
    runs: Sequence[Prompts]
    """The prompts of each run."""
    output_tokens: int


def measure_engine(job: Job, send: Send) -> None:
    """Send the seconds of the engine's start, the probes' first tokens, and the times of each run.

    The process that runs this can measure nothing else afterwards.
    """
    engine, start_s = start_engine(job.engine, on_cpu=job.on_cpu)
    try:
        send(start_s)
        send(first_tokens(engine, job.probes))
        for prompts in job.runs:
            send(time_run(engine, prompts, job.output_tokens))
    finally:
        engine.engine_core.shutdown()


def start_engine(options: dict[str, Any], *, on_cpu: bool) -> tuple[Any, float]:
    """Return vLLM's ``LLMEngine`` with these arguments of ``EngineArgs``, and its start's seconds.

    Imports are not included.
    """
    export(VLLM_NO_USAGE_STATS="1")
    if on_cpu:
        _use_cpu()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    start = time.perf_counter()
    engine = LLMEngine.from_engine_args(EngineArgs(**options), UsageContext.LLM_CLASS)
    return engine, time.perf_counter() - start


def _use_cpu() -> None:
    """Let vLLM run on a CPU, in this one process: its releases for GPUs find no platform there."""
    export(VLLM_ENABLE_V1_MULTIPROCESSING="0")
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms.current_platform = CpuPlatform()


def first_tokens(engine: Any, prompts: Prompts) -> list[list[float]]:  # noqa: ANN401 - vLLM's
    """Return for each prompt ``[token id, lead]`` of the first token.

    The lead is that of the best token's log-probability over the second best one's.
    """
    found = []
    for ((_, output),) in _generate(engine, prompts, max_tokens=1, logprobs=2):
        (token,) = output.token_ids
        values = sorted((one.logprob for one in output.logprobs[0].values()), reverse=True)
        found.append([token, values[0] - values[1]])
    return found


def time_run(
    engine: Any,  # noqa: ANN401 - vLLM's
    prompts: Prompts,
    output_tokens: int,
    adapters: Sequence[Any] = (),
) -> dict[str, Any]:
    """Return the seconds of one run.

    Args:
        engine: vLLM's ``LLMEngine``.
        prompts: token ids; all are added at once.
        output_tokens: of each request.
        adapters: each prompt's ``LoRARequest`` or None; empty = none has one.

    Returns:
        ``first_s``, for each request the seconds until its first token; ``whole_s``, the seconds
        until the last of all tokens.

    Raises:
        RuntimeError: a request has not its first token and then all others.
    """
    run = _generate(engine, prompts, adapters, max_tokens=output_tokens)
    found = {tuple(len(part.token_ids) for _, part in parts) for parts in run}
    expected = (1, output_tokens - 1)
    if found != {expected}:
        raise RuntimeError(f"output tokens: expected {expected} of each request, got {found}")
    return {
        "first_s": [first for (first, _), _ in run],
        "whole_s": max(last for _, (last, _) in run),
    }


def _generate(
    engine: Any,  # noqa: ANN401 - vLLM's
    prompts: Prompts,
    adapters: Sequence[Any] = (),
    **options: Any,  # noqa: ANN401 - as SamplingParams takes them
) -> list[list[tuple[float, Any]]]:
    """Return each prompt's parts of the output, with the seconds since the first prompt came."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        **options,
    )
    parts: list[list[tuple[float, Any]]] = [[] for _ in prompts]
    start = time.perf_counter()
    for index, prompt in enumerate(prompts):
        adapter = adapters[index] if adapters else None
        inputs = {"prompt_token_ids": [*prompt]}
        engine.add_request(str(index), inputs, params, lora_request=adapter)
    while engine.has_unfinished_requests():
        for done in engine.step():
            part = (time.perf_counter() - start, done.outputs[0])
            parts[int(done.request_id)].append(part)
    return parts
