"""The documented claims about the embedded model's recall, against the committed measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recall
from benchmarks.report.files import ResultFile
from benchmarks.report.policies import recall_table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "recall-tiny.json"
CACHES = ("auto", "fp8_e4m3")
RECALL_HEAD = [3, 0]


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return json.loads(RESULTS.read_text("utf-8"))


def entries(result: dict[str, Any], cache: str, kind: str, budget: float) -> list[dict[str, Any]]:
    found = [
        entry
        for entry in result["results"]
        if (entry["kv_cache_dtype"], entry["kind"], entry["budget"]) == (cache, kind, budget)
    ]
    assert all(len(entry["full_heads"]) == 16 * budget for entry in found)
    assert all(entry["num_answers"] >= 500 for entry in found)
    return found


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("budget", [0.5, 0.25])
def test_a_calibrated_policy_keeps_recall_and_text_loss(result, cache, budget):
    (full,) = entries(result, cache, "full", 1.0)
    (calibrated,) = entries(result, cache, "greedy", budget)
    (leading,) = entries(result, cache, "leading heads stream", budget)
    random = entries(result, cache, "random", budget)
    assert len(random) == 5
    mean = sum(entry["recall_accuracy"] for entry in random) / len(random)
    assert full["recall_accuracy"] >= 0.99
    assert calibrated["recall_accuracy"] >= 0.99 * full["recall_accuracy"]
    assert calibrated["recall_accuracy"] >= mean + 0.2
    assert calibrated["recall_accuracy"] >= leading["recall_accuracy"] + 0.9
    assert calibrated["text_nats"] <= 1.01 * full["text_nats"]


@pytest.mark.parametrize("cache", CACHES)
def test_recall_depends_on_one_head(result, cache):
    for entry in result["results"]:
        recalls = entry["recall_accuracy"] > 0.9
        assert recalls == (RECALL_HEAD in entry["full_heads"])
    (one,) = entries(result, cache, "greedy", 1 / 16)
    assert one["full_heads"] == [RECALL_HEAD]


def test_recall_was_measured_far_beyond_the_windows_of_streaming_heads(result):
    conditions = result["conditions"]
    assert conditions["distance"] == 1024 > 10 * (conditions["window"] + conditions["sink"])
    assert RESULTS.with_suffix(".png").is_file()


def test_table_and_picture_show_the_measurement(result, tmp_path):
    table = recall_table(ResultFile(RESULTS.name, result))
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 2 * (1 + 4 + 4 + 2 + 2)
    (full,) = entries(result, "auto", "full", 1.0)
    (fp8,) = entries(result, "fp8_e4m3", "greedy", 0.25)
    rise = fp8["text_nats"] / full["text_nats"] - 1
    expected = f"{fp8['recall_accuracy']:.1%} | {fp8['text_nats']:.4f} | {rise:+.2%} |"
    assert f"| calibrated | FP8 | 4 of 16 | {expected}" in rows
    recall.plot(result, tmp_path / "recall.png")
    assert (tmp_path / "recall.png").read_bytes().startswith(b"\x89PNG")
