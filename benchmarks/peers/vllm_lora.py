"""vLLM's engine with adapters (LoRA) of random values, which it reads from PEFT's folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure.child import Send
from benchmarks.peers.vllm_engine import Prompts, start_engine, time_run


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedRun:
    """One run of a batch."""

    prompts: Prompts
    adapters: Sequence[int]
    """The number of each prompt's adapter, from 1 on; empty = none has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedJob:
    """What one process measures."""

    engine: dict[str, Any]
    """Arguments of vLLM's ``EngineArgs``."""
    on_cpu: bool
    folder: str
    """Of adapters, as ``write_adapters`` writes it."""
    runs: Sequence[AdaptedRun]
    output_tokens: int


def measure_adapted(job: AdaptedJob, send: Send) -> None:
    """Send the seconds of the engine's start, and then the times of each run."""
    engine, start_s = start_engine(job.engine, on_cpu=job.on_cpu)
    try:
        from vllm.lora.request import LoRARequest

        send(start_s)
        for run in job.runs:
            adapters = [
                LoRARequest(f"adapter-{number}", number, str(Path(job.folder, str(number))))
                for number in run.adapters
            ]
            send(time_run(engine, run.prompts, job.output_tokens, adapters))
    finally:
        engine.engine_core.shutdown()
