"""Experts that are modules of their own, in GPTQ's and AWQ's words; routers are never codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrv1 import ConfigError
from mrv1.kernels.layers.quantized import QuantizedWeight
from mrv1.models import ModelConfig
from tests.models.families import tiny_checkpoint
from tests.models.quantization import packers
from tests.models.quantization.checkpoints import quantized
from tests.models.quantization.test_gptq_awq import AWQ, GPTQ, ORDERED
from tests.models.test_fp8_experts import save as save_fp8
from tests.models.test_quantized_checkpoints import load, logits_of
from tests.thread_ranks import on_ranks

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
PLAIN = ("gate", "lm_head", "embed_tokens")


def save(folder: Path, family: str, settings: dict[str, Any]) -> None:
    """Write a random checkpoint's codes, all but routers, head and embedding, and its values."""
    sizes = SIZES | ({"moe_intermediate_size": 128} if family == "qwen3_moe" else {})
    for name in ("codes", "values"):
        tiny_checkpoint(folder / name, family, **sizes)
    stored, values = {}, {}
    for name, tensor in load_file(folder / "values" / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if tensor.dim() != 2 or module.rpartition(".")[2] in PLAIN:
            stored[name] = values[name] = tensor
            continue
        group = torch.arange(tensor.shape[1]) // settings["group_size"]
        parts = quantized(tensor, settings["bits"], group, symmetric=settings.get("sym", False))
        codes, zeros, scales = parts
        values[name] = (codes - zeros[:, group]).float() * scales.float()[:, group]
        if settings["quant_method"] == "awq":
            words = packers.awq(*parts)
        else:
            words = packers.gptq(*parts, settings["bits"], version=1) | {"g_idx": group.int()}
        stored |= {f"{module}.{last}": each for last, each in words.items()}
    save_file(stored, folder / "codes" / "model.safetensors")
    save_file(values, folder / "values" / "model.safetensors")
    set_quantization(folder / "codes", settings)


def set_quantization(folder: Path, settings: dict[str, Any]) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": settings}))


@pytest.mark.parametrize(
    ("family", "settings"), [("qwen3_moe", GPTQ | {"sym": False}), ("mixtral", AWQ)]
)
def test_logits_equal_those_of_the_values(tmp_path: Path, family: str, settings: dict[str, Any]):
    """One rank and two. No setting says that routers are plain: the libraries pass them by."""
    save(tmp_path, family, settings)
    layer = load(tmp_path / "codes").weights.layers[1]
    assert layer.experts is not None
    for stack in (layer.experts.gate_up, layer.experts.down):
        assert isinstance(stack, QuantizedWeight)
    expected = logits_of(load(tmp_path / "values"))
    for size in (1, 2):
        for got in on_ranks(size, lambda p: logits_of(load(tmp_path / "codes", p))):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


def test_experts_have_no_order_of_inputs_of_their_own(tmp_path: Path):
    tiny_checkpoint(tmp_path, "mixtral", **SIZES)
    set_quantization(tmp_path, ORDERED)
    message = r"config: model\.layers\.0\.block_sparse_moe\.experts: expected groups of neighbour"
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_routers_need_not_be_named(tmp_path: Path):
    """transformers quantizes modules of the class ``Linear``; a router is none."""
    save_fp8(tmp_path, 64, [])
    expected = logits_of(load(tmp_path))
    raw = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    set_quantization(tmp_path, raw | {"modules_to_not_convert": None})
    assert torch.equal(logits_of(load(tmp_path)), expected)


def test_a_router_of_codes_is_refused_by_name(tmp_path: Path):
    save_fp8(tmp_path, 64, [])
    stored, router = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.gate"
    stored[f"{router}.weight"] = stored[f"{router}.weight"].to(torch.float8_e4m3fn)
    stored[f"{router}.weight_scale_inv"] = torch.ones(1, 2)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert f"{router}.weight: expected dtype F64, F32, F16, BF16, got F8_E4M3" in str(caught.value)
    assert f"{router}.weight_scale_inv: surplus" in str(caught.value)


def test_layers_whose_experts_differ_are_of_another_kind(tmp_path: Path):
    """Kernels are compiled for one layer of each kind."""
    tiny_checkpoint(tmp_path, "mixtral", **SIZES)
    set_quantization(tmp_path, GPTQ)
    config = ModelConfig.from_pretrained(tmp_path)
    assert config.kind(0) == config.kind(1)
    set_quantization(tmp_path, GPTQ | {"dynamic": {r".*\.1\..*\.w2": {"bits": 8}}})
    config = ModelConfig.from_pretrained(tmp_path)
    assert config.kind(0) != config.kind(1)
