"""The benchmark of products with adapters (LoRA): variants multiply right, bytes are counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import lora
from mrv1.kernels import reference

SHAPES = {"qkv": (64, 96), "o": (64, 64), "gate_up": (64, 128), "down": (64, 64)}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take oracles for kernels, and a small layer."""
    monkeypatch.setattr(lora, "kernels", reference)
    monkeypatch.setattr(lora, "resolve_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(lora, "products", lambda shape: SHAPES)
    monkeypatch.setattr(lora, "copy_bandwidth", lambda device: 1e12)


@pytest.mark.usefixtures("on_cpu")
def test_a_row_for_each_variant_and_its_bytes(tmp_path: Path) -> None:
    output = tmp_path / "lora.json"
    lora.main([str(output), "--tokens", "3", "--rank", "4", "--repeats", "1", "--commit", "x"])
    rows = {row["variant"]: row for row in json.loads(output.read_text())["results"]}
    assert [*rows] == [*lora.VARIANTS]
    weights = 2 * sum(num_in * num_out for num_in, num_out in SHAPES.values())
    one = 2 * 4 * sum(
        lora.PARTS[name] * num_in + num_out for name, (num_in, num_out) in SHAPES.items()
    )  # fmt: skip
    found = [rows[variant]["bytes"] for variant in lora.VARIANTS]
    assert found == [weights, weights, weights + one, weights + 3 * one]
    assert rows["plain"]["share_of_plain_speed"] == 1
    assert rows["each"]["allowed_share"] == pytest.approx(weights / (weights + 3 * one))


@pytest.mark.usefixtures("on_cpu")
def test_a_wrong_product_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        @staticmethod
        def linear(*arguments: object, **fused: object) -> torch.Tensor:
            return 1.1 * reference.linear(*arguments, **fused)

    monkeypatch.setattr(lora, "kernels", Wrong)
    with pytest.raises(lora.WrongResultError, match="plain: expected a difference <= "):
        lora.measure_layer(SHAPES, 2, lora.parse(["x"]), torch.device("cpu"))
