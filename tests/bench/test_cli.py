"""``mrv1 bench generate`` and ``mrv1 bench runner``: the file, the tables, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cli.app import _runner_tables
from benchmarks.engines import runner
from tests.cli.conftest import Mrv1

SMALL = ("--device", "cpu", "--prompt-tokens", "8", "--output-tokens", "4", "--repeats", "1")
SHAPE_NAMES = (
    "qwen3-0.6b, llama3-8b, llama3.2-1b, llama3.2-3b, llama3-70b, qwen3-30b-a3b, ernie-21b-a3b, "
    "gpt-oss-20b, granite-3-8b, "
    "gemma2-9b, olmo2-7b, phi4-mini, tiny-random, tiny-experts"
)


def test_file_and_table_have_the_same_figures(run_bench: Mrv1, tmp_path: Path):
    target = tmp_path / "result.json"
    result = run_bench(
        "generate", "--shape", "tiny-random", *SMALL, "--batch", "1", "--batch", "3",
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


def test_a_checkpoint_can_replace_a_shape(run_bench: Mrv1, checkpoint: str, tmp_path: Path):
    target = tmp_path / "result.json"
    result = run_bench(
        "generate", "--model", checkpoint, *SMALL, "--batch", "2", "--output", target
    )
    assert result.exit_code == 0
    written = json.loads(target.read_text("utf-8"))
    assert (written["shape"], written["weights"]) == (checkpoint, "checkpoint")


def test_cache_options_reach_the_engine(run_bench: Mrv1, tmp_path: Path):
    """Per vector a scale of 4 bytes and 32 codes of 1 byte, instead of 32 floats of 4 bytes."""
    results = {}
    for dtype in ("auto", "fp8_e4m3"):
        target = tmp_path / f"{dtype}.json"
        result = run_bench(
            "generate", "--shape", "tiny-random", *SMALL, "--batch", "1",
            "--output", target, "--kv-cache-dtype", dtype,
        )  # fmt: skip
        assert result.exit_code == 0
        assert f"KV cache {dtype}, attention by" in " ".join(result.stdout.split())
        results[dtype] = json.loads(target.read_text("utf-8"))
    plain, fp8 = (results[dtype]["results"][0]["kv_bytes"] for dtype in ("auto", "fp8_e4m3"))
    assert fp8 / plain == (32 + 4) / (32 * 4)
    assert results["fp8_e4m3"]["conditions"]["kv_scale"] == "token"


def test_engine_options_reach_the_file_and_the_table(run_bench: Mrv1, tmp_path: Path):
    target = tmp_path / "result.json"
    result = run_bench(
        "generate", "--shape", "tiny-random", *SMALL, "--batch", "1", "--output", target,
        "--deterministic", "--no-overlap", "--no-cuda-graphs", "--enable-prefix-caching",
    )  # fmt: skip
    assert result.exit_code == 0
    conditions = json.loads(target.read_text("utf-8"))["conditions"]
    assert (conditions["deterministic"], conditions["enable_prefix_caching"]) == (True, True)
    assert (conditions["overlap"], conditions["cuda_graphs"]) == (False, False)
    said = " ".join(result.stdout.split())
    assert "deterministic=True, overlap=False, cuda_graphs=False" in said


# --- the runner ----------------------------------------------------------------------------------

RUNNER = ("runner", "--device", "cpu", "--prompt-tokens", "4", "--steps", "2")


@pytest.fixture
def _few_warm_steps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "WARM_STEPS", 1)


@pytest.mark.usefixtures("_few_warm_steps")
def test_the_runner_benchmark_on_a_cpu_uses_a_tiny_shape_and_prints_its_tables(
    run_bench: Mrv1, tmp_path: Path
):
    target = tmp_path / "result.json"
    result = run_bench(*RUNNER, "--output", target)
    assert result.exit_code == 0
    written = json.loads(target.read_text("utf-8"))
    assert written["shape"] == "tiny-random"
    assert [entry["batch"] for entry in written["results"]] == [1, 4]
    assert [entry["waiting"] for entry in written["waiting"]] == [0, 100]
    for entry in written["results"]:
        assert f"{entry['step_ms']:.3f}" in result.stdout
        assert f"{entry['deterministic_over_default']:.2f}x" in result.stdout
        assert f"{entry['rank_invariant_over_default']:.2f}x" in result.stdout
    for entry in written["results"] + written["waiting"]:
        assert f"{entry['host']['execute_us']:,.1f}" in result.stdout
    assert "times mean nothing" in result.stderr
    assert f"written to {target}" in result.stderr


@pytest.mark.usefixtures("_few_warm_steps")
def test_runner_options_reach_the_benchmark(run_bench: Mrv1, tmp_path: Path, checkpoint: str):
    target = tmp_path / "result.json"
    result = run_bench(
        *RUNNER, "--model", checkpoint, "--batch", "2", "--waiting", "3", "--no-overlap",
        "--no-compare-deterministic", "--output", target,
    )  # fmt: skip
    assert result.exit_code == 0
    written = json.loads(target.read_text("utf-8"))
    assert (written["shape"], written["conditions"]["overlap"]) == (checkpoint, False)
    assert [entry["batch"] for entry in written["results"]] == [2]
    assert [(entry["batch"], entry["waiting"]) for entry in written["waiting"]] == [(2, 3)]
    assert written["results"][0]["deterministic_step_ms"] is None


def runner_result(batches: list[int], figures: dict[str, Any]) -> dict[str, Any]:
    """Return a result of these batches on a GPU, without waiting requests."""
    conditions = {
        "prompt_tokens": 4, "steps": 2, "deterministic": False, "overlap": True,
        "cuda_graphs": True, "kv_cache_dtype": "auto", "attention_backend": "mrv1",
    }  # fmt: skip
    return {
        "shape": "tiny-random", "weights": "random", "dtype": "bfloat16", "path": "kernels",
        "device": {"name": "GPU X"}, "conditions": conditions, "waiting": [],
        "results": [{"batch": batch, **figures} for batch in batches],
    }  # fmt: skip


def test_the_host_table_shows_tenths_of_a_microsecond():
    names = ("total", "mean_total", "quietest", "schedule", "execute", "read", "update")
    host = {f"{name}_us": 3.14 * 10**power for power, name in enumerate(names)}
    result = runner_result([32], {"host": host, "trace": None})
    result["waiting"] = [{"batch": 32, "waiting": 10_000, "host": host | {"read_us": 0.06}}]
    table = _runner_tables(result)[-1]
    tenths = ["3.1", "31.4", "314.0", "3,140.0", "31,400.0", "314,000.0", "3,140,000.0"]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    assert [[*cells] for cells in rows] == [
        ["32", "none", *tenths], ["32", "10,000", *tenths[:5], "0.1", tenths[6]],
    ]  # fmt: skip


def test_the_trace_table_shows_every_figure():
    """Only the table is tested: the figures of a trace come from a GPU."""
    trace = {
        "step_us": 699.3, "idle_share": 0.0346, "idle_between_launches_share": 0.0315,
        "graph_launches": 1.0, "kernel_launches": 0.25,
        "host_to_device_copies": 1.5, "device_to_host_copies": 2.0, "event_waits": 0.75,
        "other_waits": 0.0,
    }  # fmt: skip
    table = _runner_tables(runner_result([32], {"trace": trace}))[-1]
    assert [(column.header, *column.cells) for column in table.columns] == [
        ("batch", "32"), ("us per step", "699"), ("GPU idle", "3.5%"),
        ("between launches", "3.1%"), ("copies up", "1.50"), ("copies down", "2.00"),
        ("graphs", "1.00"), ("other kernels", "0.25"), ("event waits", "0.75"),
        ("other waits", "0.00"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "1"], "steps: expected >= 2, got 1"),
        (["--waiting", "2", "--waiting", "2"], "waiting: expected different numbers >= 0"),
        (["--shape", "gpt-5"], f"shape: expected one of {SHAPE_NAMES}, got 'gpt-5'"),
        (["--device", "tpu"], "device: expected"),
        (["--output", "/no/x.json"], "--output: expected an existing"),
    ],
)
def test_a_mistake_with_the_runner_is_one_line(
    run_bench: Mrv1, arguments: list[str], message: str
):
    result = run_bench(*RUNNER, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"error: {message}" in result.stderr


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attention-backend", "fa3"], "attention_backend: expected one of"),
        (["--kv-cache-dtype", "fp8"], "kv_cache_dtype: expected one of"),
        (["--shape", "gpt-5"], f"shape: expected one of {SHAPE_NAMES}, got 'gpt-5'"),
        (["--shape", "tiny-random", "--model", "x"], "shape, model: expected one of the two"),
        (["--model", "/nowhere"], "model: expected a checkpoint directory"),
        (["--shape", "tiny-random", "--batch", "0"], "batch: expected different sizes >= 1"),
        (["--shape", "tiny-random", "--output", "/no/x.json"], "--output: expected an existing"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    run_bench: Mrv1, arguments: list[str], message: str
):
    result = run_bench("generate", *SMALL, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"error: {message}" in result.stderr
