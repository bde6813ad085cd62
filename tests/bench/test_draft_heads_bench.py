"""The benchmark of draft heads: drafts are accepted as often as it says, and tokens are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import draft_heads


def test_drafts_are_accepted_as_often_as_asked_for(tmp_path: Path) -> None:
    output = tmp_path / "heads.json"
    draft_heads.main(
        [
            str(output), "--shape", "tiny-random", "--device", "cpu", "--batches", "2",
            "--output-tokens", "40", "--repeats", "1", "--commit", "x",
        ]
    )  # fmt: skip
    (row,) = json.loads(output.read_text())["results"]
    assert row["num_steps"]["plain"] > 1.5 * row["num_steps"]["head"]
    assert 0.2 < row["accepted_share"] < 0.8


def test_the_mean_is_that_of_a_chain_of_draws() -> None:
    counts = draft_heads.accepted(0.7, 3)
    assert counts.double().mean() == pytest.approx(0.7 + 0.7**2 + 0.7**3, abs=0.02)
