"""``mrv1 bench attention`` and ``kv-write``: the file, the table, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Mrv1

SHAPE = ("--kv-heads", "2", "--q-heads", "4", "--head-dim", "16", "--repeats", "1")
ON_CPU = (*SHAPE, "--device", "cpu")


def test_attention_file_table_and_plot_have_the_same_figures(run_bench: Mrv1, tmp_path: Path):
    pytest.importorskip("matplotlib")
    target, picture = tmp_path / "result.json", tmp_path / "plot.png"
    result = run_bench(
        "attention", "--cells", "1x40,2x17", *ON_CPU, "--output", target,
        "--plot", picture, "--commit", "abc",
    )  # fmt: skip
    assert result.exit_code == 0
    written = json.loads(target.read_text("utf-8"))
    assert written["commit"] == "abc"
    assert [(entry["batch"], entry["context"]) for entry in written["results"]] == [
        (1, 40), (2, 17),
    ]  # fmt: skip
    for entry in written["results"]:
        for name, variant in entry["variants"].items():
            assert name in result.stdout
            assert f"{variant['median_us']:,.1f}" in result.stdout
    assert "peer flash-attn-3: not installed" in result.stderr
    assert "times our time, geometric mean" in result.stderr
    assert f"plotted to {picture}" in result.stderr
    assert picture.stat().st_size > 1000


def test_groups_are_rows_of_one_file(run_bench: Mrv1, tmp_path: Path):
    target = tmp_path / "result.json"
    result = run_bench(
        "attention", "--cells", "1x40", "--groups", "1,3", "--peers", "torch-sdpa", *ON_CPU,
        "--output", target,
    )  # fmt: skip
    assert result.exit_code == 0
    assert [each["group"] for each in json.loads(target.read_text("utf-8"))["results"]] == [1, 3]
    assert "1 x 40, group 3" in result.stdout
    assert "groups of 1, 3 query heads" in result.stdout
    assert "in our worst cell" in result.stderr


def test_prefill_and_roles_are_options(run_bench: Mrv1):
    result = run_bench(
        "attention", "--cells", "1x40", "--mode", "prefill", "--peers", "",
        "--query-len", "8", "--full-heads", "0.5", "--window", "16", "--sink", "4", *ON_CPU,
    )  # fmt: skip
    assert result.exit_code == 0
    assert "TFLOP/s" in result.stdout
    assert "1 x 8 of 40" in result.stdout
    assert "mrv1-uniform" in result.stdout


def test_an_fp8_cache_is_compared_with_a_cache_of_the_query_dtype(run_bench: Mrv1):
    """A reason that holds for all cells is printed once."""
    result = run_bench(
        "attention", "--cells", "1x40,2x17", "--kv-dtype", "fp8_e4m3",
        "--peers", "torch-sdpa", *ON_CPU,
    )  # fmt: skip
    assert result.exit_code == 0
    assert "KV cache fp8_e4m3" in result.stdout
    assert result.stdout.count("mrv1-auto") == 2
    assert "peer torch-sdpa everywhere: has no fp8_e4m3 cache\n" in result.stderr


def test_kv_write_file_and_table_have_the_same_figures(run_bench: Mrv1, tmp_path: Path):
    target = tmp_path / "result.json"
    result = run_bench("kv-write", "--tokens", "1,5", *ON_CPU, "--output", target)
    assert result.exit_code == 0
    written = json.loads(target.read_text("utf-8"))
    assert [entry["tokens"] for entry in written["results"]] == [1, 5]
    rows = [[cell.strip() for cell in line.split("│")] for line in result.stdout.splitlines()]
    for number, entry in enumerate(written["results"]):
        for name, variant in entry["variants"].items():
            row = [row for row in rows if row[2:3] == [name]][number]
            assert row[3:7] == [
                f"{variant['median_us']:,.2f}", f"{variant['p20_us']:.2f}",
                f"{variant['p80_us']:.2f}", f"{variant['bytes_moved'] / 1e6:.3f}",
            ]  # fmt: skip
    assert "peer vllm-triton: not installed" in result.stderr


def test_kv_write_measures_an_fp8_cache(run_bench: Mrv1):
    result = run_bench("kv-write", "--tokens", "5", "--kv-dtype", "fp8_e4m3", *ON_CPU)
    assert result.exit_code == 0
    assert "KV cache fp8_e4m3" in result.stdout
    assert "mrv1-fused" in result.stdout


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (
            "attention",
            ["--cells", "8"],
            "cells: expected BATCHxCONTEXT such as 8x4096, 8x100-4096 or 4x16384+60x2048, got '8'",
        ),
        ("attention", ["--mode", "x"], "mode: expected decode or prefill, got 'x'"),
        ("attention", ["--kv-dtype", "fp8"], "kv_dtype: expected one of auto, fp8_e4m3"),
        ("attention", ["--deterministic", "--mode", "prefill"], "deterministic: expected mode"),
        ("attention", ["--peers", "x"], "peers: expected some of flash-attn-3"),
        ("attention", ["--block-size", "24"], "block_size: expected one of (16, 32, 64, 128)"),
        ("attention", ["--plot", "/no/x.png"], "--plot: expected an existing directory, got /no"),
        ("attention", ["--output", "/no/x"], "--output: expected an existing directory, got /no"),
        ("kv-write", ["--tokens", "1,x"], "tokens: expected counts such as 1,256, got '1,x'"),
        ("kv-write", ["--kv-dtype", "fp8"], "kv_dtype: expected one of auto, fp8_e4m3"),
        ("kv-write", ["--peers", "x"], "peers: expected some of flashinfer, vllm-triton"),
        ("kv-write", ["--slot-order", "x"], "slot_order: expected one of tokens, blocks, got 'x'"),
        ("kv-write", ["--tokens", "0"], "tokens: expected different counts >= 1, got [0]"),
        ("kv-write", ["--block-size", "24"], "block_size: expected one of (16, 32, 64, 128)"),
        ("kv-write", ["--output", "/no/x"], "--output: expected an existing directory, got /no"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    run_bench: Mrv1, command: str, arguments: list[str], message: str
):
    result = run_bench(command, *ON_CPU, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"error: {message}" in result.stderr
