"""The script that measures what features cost."""

from __future__ import annotations

import json

import pytest

from benchmarks import multimodal


def run(tmp_path, *options: str) -> dict:
    output = tmp_path / "result.json"
    sizes = "--batches 1,2 --output-tokens 3 --rows 40 --repeats 1"
    multimodal.main(
        [str(output), "--shape", "tiny-random", *sizes.split(), "--commit", "abc", *options]
    )
    return json.loads(output.read_text())


def test_every_variant_is_measured(tmp_path, capsys):
    result = run(tmp_path, "--device", "cpu")
    assert [row["batch"] for row in result["text"]] == [1, 2]
    for row in result["text"]:
        first, second = row["orders"].values()
        assert [*row["orders"]] == ["with_features_first", "without_features_first"]
        both = first["with_over_without"] * second["with_over_without"]
        assert row["with_over_without"] == pytest.approx(both**0.5)
        for order in (first, second):
            samples = order["samples_s"]  # one run: the ratio of the rates is that of the times
            (without,), (own,) = samples["without_features"], samples["with_features"]
            assert order["with_over_without"] == pytest.approx(without / own)
    assert [*result["prefill"]] == ["text", "gpu", "pinned"]
    for row in result["prefill"].values():
        assert (row["num_steps"], row["gpu_over_text"]) == (1, None)
    assert result["prefill"]["text"]["first_token_over_text"] == 1
    assert "pinned: " in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_on_a_gpu_every_step_is_a_graph(tmp_path, device):
    for row in run(tmp_path)["prefill"].values():
        assert row["num_graph_steps"] == row["num_steps"] == 1
        assert row["gpu_over_text"] > 0


def test_variants_that_differ_end_the_benchmark():
    with pytest.raises(RuntimeError, match="pinned: expected the tokens of text, got others"):
        multimodal._check_equal({"text": [(1,)], "gpu": [(1,)], "pinned": [(2,)]})
