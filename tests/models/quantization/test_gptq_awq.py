"""GPTQ and AWQ checkpoints equal transformers on their dequantized values; ranks, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrv1 import LLM, ConfigError, SamplingParams
from mrv1.kernels.registry import select_ops
from mrv1.models import ModelConfig, load_model
from mrv1.models.parallel import ParallelContext
from tests.models.driver import PagedDriver, blocks_needed
from tests.models.families import expected_logits, tiny_config
from tests.models.quantization.checkpoints import save_quantized
from tests.thread_ranks import on_ranks

PROMPT = [(7 * i) % 160 for i in range(40)]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
GPTQ: dict[str, Any] = {
    "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True,
}  # fmt: skip
ORDERED = GPTQ | {"desc_act": True, "sym": False}
AWQ: dict[str, Any] = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
}  # fmt: skip


def logits_of(path: Path, parallel: ParallelContext | None = None) -> torch.Tensor:
    model = load_model(
        path, device="cpu", dtype=torch.float64, ops=select_ops("reference"),
        progress=False, parallel=parallel,
    )  # fmt: skip
    blocks = blocks_needed([PROMPT], 16)
    return PagedDriver(model, block_size=16, num_blocks=blocks).logits([PROMPT], 24)[0]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", GPTQ),
        ("qwen2", ORDERED),
        ("qwen2", GPTQ | {"bits": 8, "sym": False, "checkpoint_format": "gptq_v2"}),
        pytest.param("llama", GPTQ | {"bits": 8, "group_size": -1}, marks=pytest.mark.full),
        pytest.param("llama", ORDERED | {"bits": 8}, marks=pytest.mark.full),
        ("llama", GPTQ | {"sym": False, "lm_head": True}),
        ("qwen2", AWQ),
        pytest.param("llama", AWQ | {"group_size": -1}, marks=pytest.mark.full),
    ],
)
def test_logits_equal_transformers(tmp_path, family, settings):
    """On two ranks, too; with desc_act there can be only one."""
    oracle = save_quantized(tmp_path, tiny_config(family, **SIZES), settings)
    expected = expected_logits(oracle, PROMPT)
    found = logits_of(tmp_path)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)  # their rope is in float32
    if settings.get("desc_act"):
        with pytest.raises(ConfigError, match="tensor_parallel_size: expected 1 with desc_act"):
            on_ranks(2, lambda parallel: logits_of(tmp_path, parallel))
        return
    for of_rank in on_ranks(2, lambda parallel: logits_of(tmp_path, parallel)):
        torch.testing.assert_close(of_rank, found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("settings", [ORDERED, AWQ])
def test_greedy_tokens_equal_transformers(tmp_path, settings):
    oracle = save_quantized(tmp_path, tiny_config("llama", **SIZES), settings)
    with LLM(tmp_path, dtype="float64", max_num_seqs=2, max_model_len=128) as llm:
        params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
        found = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids
    expected = oracle.generate(
        torch.tensor([PROMPT]), max_new_tokens=64, min_new_tokens=64, do_sample=False
    )
    assert list(found) == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("settings", [GPTQ, AWQ | {"group_size": 128}])
def test_memory_is_that_of_the_file(tmp_path, settings):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    save_quantized(tmp_path, tiny_config("llama", **sizes), settings)
    model = load_model(
        tmp_path, device="cpu", dtype=torch.float16, ops=select_ops("reference"), progress=False
    )
    stored = load_file(tmp_path / "model.safetensors")
    layer = {name: each.nbytes for name, each in stored.items() if ".layers.0." in name}
    weights = model.weights.layers[0]
    in_memory = sum(each.nbytes for each in (weights.qkv, weights.o, *weights.mlp))
    assert in_memory <= 1.02 * sum(layer.values())


def change(path: Path, name: str, edit: Any) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = edit(tensors[name])
    save_file({n: t.contiguous() for n, t in tensors.items()}, file)


@pytest.mark.parametrize(
    ("settings", "last", "edit", "message"),
    [
        (
            GPTQ,
            "scales",
            lambda t: t * float("nan"),
            "expected finite values other than 0, got nan",
        ),
        (AWQ, "scales", lambda t: t * 0, "expected finite values other than 0, got 0"),
        (GPTQ, "g_idx", lambda t: t + 1, "expected groups from 0 to 1, got 1 to 2"),
        (GPTQ, "g_idx", lambda t: t[:-1], r"expected shape \[64\], got \[63\]"),
        (GPTQ, "qzeros", lambda t: t + 1, "expected zero points 8 where sym is true, got 9"),
        (GPTQ, "qweight", lambda t: t[:-1], r"expected shape \[8, 128\], got \[7, 128\]"),
        (AWQ, "qweight", lambda t: t.float(), "expected dtype I32, got F32"),
    ],
)
def test_damaged_tensors_are_refused_by_name(tmp_path, settings, last, edit, message):
    save_quantized(tmp_path, tiny_config("llama", num_hidden_layers=1, **SIZES), settings)
    name = f"model.layers.0.mlp.up_proj.{last}"
    change(tmp_path, name, edit)
    with pytest.raises(ConfigError, match=f"{name}: {message}"):
        logits_of(tmp_path)


def test_a_banner_names_the_format(tmp_path):
    save_quantized(tmp_path, tiny_config("llama", num_hidden_layers=1, **SIZES), ORDERED)
    quantization = ModelConfig.from_pretrained(tmp_path).quantization
    assert quantization is not None
    assert quantization.describe() == (
        "gptq: INT4 weights, a scale per group of 32 inputs, zero points, inputs in an order of "
        "their own"
    )


def test_new_weights_are_those_of_the_other_checkpoint(tmp_path):
    """An order of inputs is written before the codes that it sorts, whatever comes first."""
    config = tiny_config("qwen2", num_hidden_layers=1, **SIZES)
    for seed in (0, 1):
        save_quantized(tmp_path / str(seed), config, ORDERED, seed=seed)
    new = load_file(tmp_path / "1" / "model.safetensors")
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    options = {"dtype": "float64", "max_num_seqs": 1, "max_model_len": 64, "num_kv_blocks": 8}
    tokens = []
    for seed in (0, 1):
        with LLM(tmp_path / str(seed), **options) as llm:
            if seed == 0:
                llm.update_weights(dict(sorted(new.items(), reverse=True)))
            outputs = llm.generate([PROMPT], params, use_tqdm=False)
            tokens.append(outputs[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1]


# --- as published ---


def stored_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def save_stored(path: Path, stored: dict[str, torch.Tensor]) -> None:
    save_file(stored, path / "model.safetensors")


def test_zero_biases_of_a_model_without_biases_are_left_out(tmp_path):
    """AutoGPTQ stores one for every module: so do Qwen2.5's and most of Llama's checkpoints."""
    oracle = save_quantized(tmp_path, tiny_config("qwen2", num_hidden_layers=1, **SIZES), GPTQ)
    stored = stored_of(tmp_path)
    modules = [name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")]
    zeros = {f"{each}.bias": torch.zeros(stored[f"{each}.scales"].shape[1]) for each in modules}
    save_stored(tmp_path, zeros | stored)
    torch.testing.assert_close(
        logits_of(tmp_path), expected_logits(oracle, PROMPT), rtol=0, atol=2e-5
    )
    options = {"dtype": "float64", "max_num_seqs": 1, "max_model_len": 64, "num_kv_blocks": 8}
    name = "model.layers.0.mlp.down_proj.bias"
    with LLM(tmp_path, **options) as llm:
        llm.update_weights(zeros | stored)
        with pytest.raises(ConfigError, match=f"{name}: expected the name of a tensor of"):
            llm.update_weights({**zeros, **stored, name: zeros[name] + 1})
    save_stored(tmp_path, zeros | stored | {name: zeros[name] + 1})
    with pytest.raises(ConfigError, match=f"{name}: expected zeros, .*, got 64 other values"):
        logits_of(tmp_path)
    save_stored(tmp_path, stored | {"model.layers.0.mlp.down.bias": zeros[name]})
    with pytest.raises(ConfigError, match=r"down.bias: surplus"):
        logits_of(tmp_path)


@pytest.mark.parametrize("settings", [GPTQ, AWQ])
def test_scales_of_integers_may_be_negative(tmp_path, settings):
    """Where a group's largest weight is positive, AutoRound's symmetric scale is negative."""
    config = tiny_config("llama", num_hidden_layers=1, **SIZES)
    oracle = save_quantized(tmp_path, config, settings)
    change(tmp_path, "model.layers.0.mlp.up_proj.scales", torch.neg)
    with torch.no_grad():
        oracle.model.layers[0].mlp.up_proj.weight.neg_()
    torch.testing.assert_close(
        logits_of(tmp_path), expected_logits(oracle, PROMPT), rtol=0, atol=2e-5
    )


def test_a_plain_head_beside_a_quantized_one_is_refused(tmp_path):
    """It is not the embedding's, which only a tied head stands for."""
    config = tiny_config("llama", num_hidden_layers=1, **SIZES)
    save_quantized(tmp_path, config, GPTQ | {"lm_head": True})
    stored = stored_of(tmp_path)
    head = torch.ones_like(stored["model.embed_tokens.weight"])
    options = {"dtype": "float64", "max_num_seqs": 1, "max_model_len": 64, "num_kv_blocks": 8}
    with (
        LLM(tmp_path, **options) as llm,
        pytest.raises(ConfigError, match=r"lm_head.weight: expected the name of a tensor of"),
    ):
        llm.update_weights({"lm_head.weight": head}, partial=True)
    save_stored(tmp_path, stored | {"lm_head.weight": head})
    with pytest.raises(ConfigError, match=r"lm_head.weight: surplus"):
        logits_of(tmp_path)
