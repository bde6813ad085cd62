"""Experts that are FP8 modules of their own, as Qwen3-30B-A3B-FP8 has them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from mrv1.errors import ConfigError
from mrv1.kernels.layers.quantized import QuantizedWeight
from mrv1.models import ModelConfig, empty_weights
from mrv1.models.quantization.online import quantize_rows
from tests.models.families import tiny_checkpoint
from tests.models.test_quantized_checkpoints import load, logits_of
from tests.thread_ranks import on_ranks

SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 64
}  # fmt: skip
SCALE = "weight_scale_inv"


def save(directory: Path, block: int, skipped: list[str]) -> dict[str, torch.Tensor]:
    """Quantize a random checkpoint's layers by transformers; return the restored tensors."""
    tiny_checkpoint(directory, "qwen3_moe", **SIZES)
    options = FineGrainedFP8Config(weight_block_size=(block, block), scale_fmt="float")
    quantizer = SimpleNamespace(quantization_config=options)
    stored, restored = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        module = name.rpartition(".")[0]
        stored[name] = restored[name] = tensor
        if not name.endswith("_proj.weight") or any(each in module for each in skipped):
            continue
        each = Fp8Quantize(quantizer).convert({name: tensor})
        stored |= {name: each[name], f"{module}.{SCALE}": each[f"{module}.{SCALE}"]}
        pair = {"weight": stored[name], SCALE: stored[f"{module}.{SCALE}"]}
        values = Fp8Dequantize(quantizer).convert(pair)["weight"]
        restored[name] = values[0] if isinstance(values, list) else values
    save_file(stored, directory / "model.safetensors")
    raw = json.loads((directory / "config.json").read_text())
    raw["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [block, block],
        "modules_to_not_convert": ["lm_head", "gate", *skipped],
    }
    (directory / "config.json").write_text(json.dumps(raw))
    return restored


def test_logits_equal_those_of_the_restored_weights(tmp_path: Path):
    """One rank and two."""
    restored = save(tmp_path / "codes", 32, [])
    layer = load(tmp_path / "codes").weights.layers[1]
    assert layer.experts is not None
    gate_up, down = layer.experts.gate_up, layer.experts.down
    assert isinstance(gate_up, QuantizedWeight)
    assert isinstance(down, QuantizedWeight)
    for expert in (0, 5):
        name = f"model.layers.1.mlp.experts.{expert}"
        both = [restored[f"{name}.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(gate_up.at(expert).dense(), torch.cat(both).to(gate_up.dtype))
        last = restored[f"{name}.down_proj.weight"]
        assert torch.equal(down.at(expert).dense(), last.to(down.dtype))
    tiny_checkpoint(tmp_path / "values", "qwen3_moe", **SIZES)
    save_file(restored, tmp_path / "values" / "model.safetensors")
    expected = logits_of(load(tmp_path / "values"))
    for size in (1, 2):
        for got in on_ranks(size, lambda p: logits_of(load(tmp_path / "codes", p))):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_codes_take_no_memory_of_values_while_they_are_made(tmp_path: Path):
    save(tmp_path, 32, [])
    config = ModelConfig.from_pretrained(tmp_path)
    wide = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.empty.memory_format and made.itemsize > 1:
                wide.append(made.numel())
            return made

    with Recorder():
        empty_weights(config, "meta", torch.bfloat16)
    assert config.experts is not None
    of_stack = config.experts.routing.num_experts * config.hidden_size
    assert 0 < max(wide) < of_stack * config.experts.intermediate_size


def test_experts_of_two_formats_are_named(tmp_path: Path):
    save(tmp_path, 64, ["layers.1.mlp.experts.3.up_proj"])
    message = r"^quantization_config: model\.layers\.1\.mlp\.experts\.3\.up_proj: expected what"
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_experts_are_quantized_while_they_load(tmp_path: Path):
    tiny_checkpoint(tmp_path, "qwen3_moe", **SIZES)
    stored = load_file(tmp_path / "model.safetensors")
    layer = load(tmp_path, quantization="fp8").weights.layers[1]
    assert layer.experts is not None
    for parts, weight in (
        (("gate_proj", "up_proj"), layer.experts.gate_up),
        (("down_proj",), layer.experts.down),
    ):
        assert isinstance(weight, QuantizedWeight)
        names = [f"model.layers.1.mlp.experts.3.{part}.weight" for part in parts]
        codes, scales = quantize_rows(torch.cat([stored[name] for name in names]))
        assert torch.equal(weight.at(3).dense(), (codes.float() * scales).to(weight.dtype))
