"""FP8 checkpoints of transformers, and FP8 made while a checkpoint loads.

The oracle of a checkpoint is transformers' own quantizer, there and back; that of a model
transformers with those weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config, PreTrainedModel
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.quantizers.quantizers_utils import should_convert_module

from mrv1.errors import ConfigError
from mrv1.kernels.layers.quantized import QuantizedWeight
from mrv1.models import ModelConfig, checkpoint_places, memory_of
from mrv1.models.quantization import read_quantization
from mrv1.models.quantization.online import quantize_rows
from tests.models.families import expected_logits, random_model, tiny_checkpoint, tiny_config
from tests.models.test_quantized_checkpoints import PROMPT, load, logits_of
from tests.thread_ranks import on_ranks

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
SCALE = "weight_scale_inv"


def save_fp8(
    directory: Path,
    family: str,
    block: tuple[int, int] | None,
    *,
    names: dict[str, str] | None = None,
    static: bool = False,
    seed: int = 0,
    **settings: Any,
) -> PreTrainedModel:
    """Write a random checkpoint that transformers has quantized; return its model, in float64.

    ``names`` are other names of a module's tensors, ``settings`` further ones of its
    ``quantization_config``.
    """
    options = FineGrainedFP8Config(
        weight_block_size=block, scale_fmt=settings.get("scale_fmt", "float")
    )
    quantizer = SimpleNamespace(quantization_config=options)
    config = tiny_config(family, **SIZES)
    model = random_model(config, seed=seed)
    stored = {}
    for name, tensor in model.state_dict().items():
        module, _, last = name.rpartition(".")
        if last != "weight" or not module.endswith("_proj"):
            stored[name] = tensor.clone()
            continue
        each = Fp8Quantize(quantizer).convert({name: tensor})
        codes, scales = each[name], each[f"{module}.{SCALE}"]
        restored = Fp8Dequantize(quantizer).convert({"weight": codes, SCALE: scales})
        values = restored["weight"]
        tensor.copy_(values[0] if isinstance(values, list) else values)  # a list before 5.24
        scales = scales.flatten()[0] if block is None else scales
        stored |= {name: codes, f"{module}.{(names or {}).get(SCALE, SCALE)}": scales}
        if static:
            last = (names or {}).get("activation_scale", "activation_scale")
            stored[f"{module}.{last}"] = torch.tensor(0.02)
    directory.mkdir(exist_ok=True)
    save_file(stored, directory / "model.safetensors")
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "static" if static else "dynamic",
        "weight_block_size": block,
        "modules_to_not_convert": ["lm_head"],
    }
    raw = {**config.to_dict(), "architectures": [type(model).__name__]}
    raw["quantization_config"] = quantization | settings
    (directory / "config.json").write_text(json.dumps(raw))
    return model.double()


CASES: dict[str, dict[str, Any]] = {
    "blocks": {"block": (128, 128), "modules_to_not_convert": None, "fmt": "e4m3"},
    "small-blocks": {"block": (32, 64)},
    "exponents": {"block": (64, 64), "scale_fmt": "ue8m0"},
    "matrix": {"block": None},
    "static": {"block": None, "static": True},
    "vllm": {
        "block": None, "static": True,
        "names": {SCALE: "weight_scale", "activation_scale": "input_scale"},
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_with_restored_weights(tmp_path: Path, case: str):
    """One rank and two; the head is in full precision with a list of skipped modules or without.

    Exponents of two are stored as such.
    """
    family = ("qwen3", "llama")[len(case) % 2]
    oracle = save_fp8(tmp_path, family, **CASES[case])
    model = load(tmp_path)
    for index, layer in enumerate(oracle.model.layers):
        down = model.weights.layers[index].down.matrix
        assert isinstance(down, QuantizedWeight)
        assert torch.equal(down.dense(), layer.mlp.down_proj.weight)
    expected = expected_logits(oracle, PROMPT)
    for size in (1, 2):
        for got in on_ranks(size, lambda parallel: logits_of(load(tmp_path, parallel))):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_scales_of_rows_are_fbgemms(tmp_path: Path):
    """``fbgemm_fp8`` has a scale for each output, and names no blocks."""
    tiny_checkpoint(tmp_path, "llama")
    stored = load_file(tmp_path / "model.safetensors")
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        stored[name], scales = quantize_rows(stored[name])
        stored[f"{name}_scale"] = scales
    save_file(stored, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] = {
        "quant_method": "fbgemm_fp8",
        "activation_scale_ub": 1200.0,
        "modules_to_not_convert": ["lm_head"],
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    layer = load(tmp_path, dtype=torch.float32).weights.layers[1]
    name = "model.layers.1.mlp.up_proj.weight"
    expected = stored[name].float() * stored[f"{name}_scale"]
    assert torch.equal(layer.mlp[0].rows(96, 192).dense(), expected)


PARTS = ["model", "layers", "0", "1", "10", "mlp", "gate", "gate_proj", "self_attn", "q_proj", "x"]
NAMES = st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map(".".join)
PATTERNS = st.one_of(NAMES, NAMES.map(lambda name: name.replace("0", r"\d")), st.just("layers.*"))


@given(name=NAMES, skipped=st.lists(PATTERNS, min_size=1, max_size=3))
def test_modules_are_skipped_as_transformers_skips_them(name: str, skipped: list[str]):
    raw = {"quant_method": "fp8", "modules_to_not_convert": skipped}
    quantization = read_quantization({"quantization_config": raw}, {})
    assert quantization.holds(name, "Linear") == should_convert_module(name, skipped)


# --- while loading ---


def with_rounded_rows(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model whose layers' matrices have the values of FP8 with a scale for each row."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("_proj.weight"):
                codes, scales = quantize_rows(tensor)
                tensor.copy_(codes.float() * scales)
    return model.double()


NUMBERS = st.floats(-(2.0**90), 2.0**90, width=32)


@given(rows=st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=4))
def test_rows_are_quantized_as_plain_python_does(rows: list[list[float]]):
    values = torch.tensor(rows)
    codes, scales = quantize_rows(values)
    for row, own, scale in zip(values, codes.float(), scales[:, 0], strict=True):
        largest = row.abs().max()
        assert scale == (largest / 448 if largest / 448 else 1.0)
        assert scale > 0
        if largest > 1e-30:  # scales of smaller ones are not exact
            assert own.abs().max() == 448
            assert bool(((own * scale - row).abs() <= row.abs() / 15 + scale * 2**-10).all())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_checkpoint_is_quantized_while_it_loads(tmp_path: Path, family: str):
    """Of the ranks' columns too, each row has one scale: logits of ranks are those of one."""
    tiny_checkpoint(tmp_path, family, **SIZES)
    oracle = with_rounded_rows(random_model(tiny_config(family, **SIZES)))
    expected = expected_logits(oracle, PROMPT)

    def logits(parallel: Any) -> torch.Tensor:
        model = load(tmp_path, parallel, quantization="fp8")
        assert isinstance(model.weights.lm_head.matrix, torch.Tensor)
        for layer in model.weights.layers:
            for weight in (layer.qkv, layer.o, *layer.mlp):
                assert isinstance(weight.matrix, QuantizedWeight)
                assert weight.matrix.activations == "token"
        return logits_of(model)

    for size in (1, 2):
        for got in on_ranks(size, logits):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_codes_take_half_of_the_memory(tmp_path: Path):
    tiny_checkpoint(tmp_path, "llama", hidden_size=256, intermediate_size=512, vocab_size=32)
    nbytes = []
    for quantization in (None, "fp8"):
        model = load(tmp_path, dtype=torch.bfloat16, quantization=quantization)
        places = checkpoint_places(model.config, model.weights)
        nbytes.append(sum(tensor.nbytes for tensor in memory_of(places.values())))
        assert model.config.quantization is None or "model.layers.0.mlp.up_proj.weight" in places
    plain = 2 * (2 * 32 * 256 + 5 * 256)
    assert (nbytes[1] - plain) / (nbytes[0] - plain) == pytest.approx(0.5, abs=0.02)


def test_what_is_asked_must_be_what_the_checkpoint_has(tmp_path: Path):
    save_fp8(tmp_path / "fp8", "llama", (32, 32))
    tiny_checkpoint(tmp_path / "plain", "llama")
    own = load(tmp_path / "fp8", quantization="fp8").config.quantization
    assert own == ModelConfig.from_pretrained(tmp_path / "fp8").quantization
    for folder, asked, message in (
        ("fp8", "compressed-tensors", "expected None or 'fp8', which the checkpoint has, got"),
        ("plain", "compressed-tensors", "expected None or 'fp8' with a checkpoint in full"),
    ):
        with pytest.raises(ConfigError, match=f"quantization: {message}"):
            load(tmp_path / folder, quantization=asked)
