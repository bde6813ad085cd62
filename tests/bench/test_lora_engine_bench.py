"""The benchmark of an engine with adapters: each variant runs, with the adapters that it says."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import lora_engine


def test_a_row_for_each_batch_and_variant(tmp_path: Path) -> None:
    output = tmp_path / "lora.json"
    lora_engine.main(
        [
            str(output), "--shape", "tiny-random", "--device", "cpu", "--batches", "2",
            "--adapters", "2", "--rank", "4", "--output-tokens", "3", "--repeats", "1",
            "--commit", "x",
        ]
    )  # fmt: skip
    rows = json.loads(output.read_text())["results"]
    assert [row["variant"] for row in rows] == [*lora_engine.VARIANTS]
    assert all(row["decode_step_ms"] > 0 for row in rows)
    assert rows[0]["share_of_plain_speed"] == 1


def test_each_request_has_another_adapter() -> None:
    each = lora_engine.adapters_of("each", 3, 2)
    assert [request and request.lora_int_id for request in each] == [1, 2, 1]
    assert lora_engine.adapters_of("none", 2, 2) == [None, None]
