"""The benchmarks of quantized checkpoints: engines in turns, and the seconds of a load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import load_time, quantized_engines
from benchmarks.measure import shapes
from mrv1.models import ModelConfig


@pytest.fixture
def tiny() -> ModelConfig:
    """Return a shape whose modules are cut into groups of 128."""
    shape = shapes.SHAPES["llama3-8b"]
    return replace(
        shape, vocab_size=512, hidden_size=256, intermediate_size=384, num_layers=4,
        num_q_heads=4, num_kv_heads=2, head_dim=64, layer_windows=(-1,) * 4, max_model_len=512,
        rope=replace(shape.rope, rotary_dim=64),
    )  # fmt: skip


def test_both_checkpoints_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: ModelConfig
) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", tiny)
    output = tmp_path / "load.json"
    load_time.main(
        [str(output), "--shape", "tiny", "--device", "cpu", "--repeats", "1", "--commit", "x"]
    )
    plain, int4 = json.loads(output.read_text())["results"]
    assert plain["checkpoint"] == "full precision"
    assert int4["bytes"] < plain["bytes"] / 2
    assert len(int4["samples_s"]) == 1


def test_engines_of_a_shape_take_turns(tmp_path: Path) -> None:
    output = tmp_path / "engines.json"
    quantized_engines.main(
        [
            str(output), "--shape", "tiny-random", "--batches", "1,2", "--engines", "mrv1",
            "--repeats", "1", "--device", "cpu", "--commit", "x",
        ]
    )  # fmt: skip
    result = json.loads(output.read_text())
    assert not result["errors"]
    assert [(row["engine"], row["batch"]) for row in result["results"]] == [
        ("mrv1", 1),
        ("mrv1", 2),
    ]
