"""vLLM's engine with adapters (LoRA) of random values, which it reads from PEFT's folders."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.measure.child import Send
from benchmarks.peers.vllm_engine import Prompts, start_engine, time_run
from mrv1.models import ModelConfig
from mrv1.models.lora.stored import PLACES
from mrv1.models.weights import part_rows


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


def write_adapters(
    folder: Path, config: ModelConfig, rank: int, count: int, dtype: torch.dtype
) -> None:
    """Write ``count`` adapters of all linear modules, ``1``, ``2`` and so on, as PEFT does.

    All have the values of one file, which is linked: each is a slot of its own all the same.
    """
    tensors = {}
    for layer in range(config.num_layers):
        sizes = part_rows(config, layer)
        for module, (field, part) in PLACES.items():
            rows, num_in = sizes[field]
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, num_in, dtype=dtype)
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows[part], rank, dtype=dtype)
    for tensor in tensors.values():
        tensor.mul_(tensor.shape[1] ** -0.5)
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [module.rpartition(".")[2] for module in PLACES],
        "bias": "none",
    }
    for number in range(1, count + 1):
        own = folder / str(number)
        own.mkdir()
        (own / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
        if number == 1:
            save_file(tensors, own / "adapter_model.safetensors")
        else:
            os.link(folder / "1" / "adapter_model.safetensors", own / "adapter_model.safetensors")


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
