"""The benchmark of quantized products: its contenders multiply right, its bytes are counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import quantized
from mrv1.kernels import reference


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take oracles for kernels, and a small layer."""
    monkeypatch.setattr(quantized, "kernels", reference)
    monkeypatch.setattr(quantized, "resolve_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(quantized, "products", lambda shape: {"a": (256, 512), "b": (512, 256)})
    monkeypatch.setattr(quantized, "copy_bandwidth", lambda device: 1e12)


@pytest.mark.usefixtures("on_cpu")
def test_a_row_for_each_contender_and_its_bytes(tmp_path: Path) -> None:
    output = tmp_path / "quantized.json"
    quantized.main([str(output), "--tokens", "1,3", "--repeats", "1", "--commit", "x"])
    result = json.loads(output.read_text())
    rows = {(row["contender"], row.get("tokens")): row for row in result["results"]}
    codes = 2 * 256 * 512
    assert rows["bfloat16", 1]["bytes"] == 2 * codes
    assert rows["int4", 3]["bytes"] == codes // 2 + 2 * codes // 128
    assert rows["mxfp4", 3]["bytes"] == codes // 2 + codes // 32
    assert rows["e4m3", 1]["bytes"] == codes + 4 * (256 + 512)
    assert rows["marlin", None]["error"]  # vLLM, or a GPU, is missing
    row = rows["q4_0", 1]
    assert row["share_of_copy_bandwidth"] == pytest.approx(row["bytes"] / row["us"] / 1e6)


@pytest.mark.usefixtures("on_cpu")
def test_a_wrong_product_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = quantized.by_plain_weights

    def wrong(*shape: object) -> quantized.Contender:
        contender = right(*shape)
        return quantized.Contender(
            multiply=lambda x: 1.1 * contender.multiply(x), num_bytes=1, values=contender.values
        )

    monkeypatch.setattr(quantized, "CONTENDERS", {"wrong": wrong})
    with pytest.raises(quantized.WrongResultError, match="expected a difference <= "):
        quantized.measure_layer({"a": (256, 384)}, [1], 1, torch.device("cpu"))
