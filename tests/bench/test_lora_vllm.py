"""vLLM with adapters, measured: which engine runs what, in turns, and what its adapters hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import lora_vllm
from benchmarks.engines.checkpoint import write_checkpoint
from benchmarks.lora_vllm import write_adapters
from benchmarks.measure.shapes import shape_config
from benchmarks.peers.vllm_lora import AdaptedJob
from mrv1.models import Checkpoint
from mrv1.models.lora import read_adapter

OPTIONS = ["--shape", "tiny-random", "--device", "cpu", "--batches", "1,3", "--adapters", "2",
           "--rank", "4", "--output-tokens", "5", "--repeats", "2", "--commit", "x"]  # fmt: skip


def test_engines_take_turns_and_steps_are_compared(monkeypatch, tmp_path):
    """An engine with adapters needs 2 ms a step without one, and 1 ms more for each of them."""
    turns: list[tuple[bool, int, list[int]]] = []

    def run(function: Callable[..., None], job: AdaptedJob) -> Generator[Any]:
        assert (
            json.loads(Path(job.engine["model"], "config.json").read_text())["vocab_size"] == 320
        )
        has_lora = job.engine.get("enable_lora", False)
        yield 30.0
        for one in job.runs:
            turns.append((has_lora, len(one.prompts), [*one.adapters]))
            step_s = 1e-3 * ((2 if has_lora else 1) + len({*one.adapters}))
            yield {"first_s": [0.5] * len(one.prompts), "whole_s": 0.5 + 4 * step_s}

    monkeypatch.setattr(lora_vllm, "run_in_child", run)
    output = tmp_path / "lora-vllm.json"
    lora_vllm.main([str(output), *OPTIONS])
    of_one = [(False, 1, []), (True, 1, []), (True, 1, [1]), (True, 1, [1])]
    of_three = [(False, 3, []), (True, 3, []), (True, 3, [1] * 3), (True, 3, [1, 2, 1])]
    assert turns == of_one * 3 + of_three * 3
    result = json.loads(output.read_text())
    found = {(row["batch"], row["variant"]): row for row in result["results"]}
    for (batch, variant), step_ms in {
        (1, "plain"): 1, (1, "none"): 2, (3, "one"): 3, (3, "each"): 4,
    }.items():  # fmt: skip
        row = found[batch, variant]
        assert row["decode_step_ms"] == pytest.approx(step_ms)
        assert row["share_of_plain_speed"] == pytest.approx(1 / step_ms)
        assert len(row["samples_ms"]) == 2


def test_adapters_are_read_as_peft_s(tmp_path):
    config = shape_config("tiny-random")
    write_checkpoint(tmp_path, config, device="cpu", dtype=torch.float32, seed=0)
    write_adapters(tmp_path, config, 4, 2, torch.float32)
    base = Checkpoint.open(tmp_path)
    first, second = (
        read_adapter(name, tmp_path / name, config, base, max_rank=4) for name in "12"
    )
    assert len(first.parts) == 7 * config.num_layers
    for name, part in first.parts.items():
        assert part.a.shape[0] == part.b.shape[1] == 4
        assert part.scaling == 1
        assert torch.equal(part.b, second.parts[name].b)
