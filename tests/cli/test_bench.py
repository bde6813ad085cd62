"""``mrv1 bench generate``: the file, the table, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Mrv1

SMALL = ("--device", "cpu", "--prompt-tokens", "8", "--output-tokens", "4", "--repeats", "1")


def test_file_and_table_say_the_same(mrv1: Mrv1, tmp_path: Path):
    target = tmp_path / "result.json"
    result = mrv1(
        "bench", "generate", "--shape", "tiny-random", *SMALL, "--batch", "1", "--batch", "3",
        "--output", target, "--commit", "abc",
    )  # fmt: skip
    assert result.exit_code == 0
    written = json.loads(target.read_text("utf-8"))
    assert [entry["batch"] for entry in written["results"]] == [1, 3]
    assert (written["shape"], written["commit"]) == ("tiny-random", "abc")
    for entry in written["results"]:
        assert f"{entry['tokens_per_s']:,.1f}" in result.stdout
        assert f"{entry['decode_step_ms']:.2f}" in result.stdout
    assert "8 prompt + 4 output tokens" in result.stdout
    assert f"written to {target}" in result.stderr


def test_a_checkpoint_takes_the_place_of_a_shape(mrv1: Mrv1, checkpoint: str, tmp_path: Path):
    target = tmp_path / "result.json"
    result = mrv1(
        "bench", "generate", "--model", checkpoint, *SMALL, "--batch", "2", "--output", target
    )
    assert result.exit_code == 0
    written = json.loads(target.read_text("utf-8"))
    assert (written["shape"], written["weights"]) == (checkpoint, "checkpoint")


def test_cache_options_reach_the_engine(mrv1: Mrv1, tmp_path: Path):
    """A scale of 4 bytes beside 32 codes, instead of 32 floats of 4 bytes."""
    results = {}
    for dtype in ("auto", "fp8_e4m3"):
        target = tmp_path / f"{dtype}.json"
        result = mrv1(
            "bench", "generate", "--shape", "tiny-random", *SMALL, "--batch", "1",
            "--output", target, "--kv-cache-dtype", dtype,
        )  # fmt: skip
        assert result.exit_code == 0
        assert f"KV cache {dtype}, attention by" in " ".join(result.stdout.split())
        results[dtype] = json.loads(target.read_text("utf-8"))
    plain, fp8 = (results[dtype]["results"][0]["kv_bytes"] for dtype in ("auto", "fp8_e4m3"))
    assert fp8 / plain == (32 + 4) / (32 * 4)
    assert results["fp8_e4m3"]["conditions"]["kv_scale"] == "token"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attention-backend", "fa3"], "attention_backend: expected one of"),
        (["--kv-cache-dtype", "fp8"], "kv_cache_dtype: expected one of"),
        (["--shape", "gpt-5"], "shape: expected one of qwen3-0.6b, tiny-random, got 'gpt-5'"),
        (["--shape", "tiny-random", "--model", "x"], "shape, model: expected one of the two"),
        (["--model", "/nowhere"], "model: expected a checkpoint directory"),
        (["--shape", "tiny-random", "--batch", "0"], "batch: expected different sizes >= 1"),
        (["--shape", "tiny-random", "--output", "/no/x.json"], "--output: expected an existing"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(mrv1: Mrv1, arguments: list[str], message: str):
    result = mrv1("bench", "generate", *SMALL, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"error: {message}" in result.stderr
