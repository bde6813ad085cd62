"""Blocks of a GGUF file that are kept: the values of the dequantized file, in the file's bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrv1 import LLM, ConfigError, SamplingParams
from mrv1.config import QuantizationName, checkpoint_dir
from mrv1.kernels import QuantizedWeight
from mrv1.kernels.registry import select_ops
from mrv1.models import (
    Checkpoint,
    DecoderModel,
    ModelConfig,
    checkpoint_places,
    load_model,
    memory_of,
)
from mrv1.models import checkpoint as models_checkpoint
from mrv1.models.parallel import ParallelContext
from mrv1.models.quantization import GGUFBlocks
from tests.models.driver import PagedDriver, blocks_needed
from tests.models.families import expected_logits, random_model, tiny_config
from tests.models.smollm2 import needs_smollm2
from tests.models.test_gguf import LAYERS, write_gguf
from tests.thread_ranks import on_ranks

pytest.importorskip("gguf", reason="not run: the package gguf is not installed")

PROMPT = [(7 * i) % 160 for i in range(40)]
SMALL = {"intermediate_size": 128}
SUPER = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64}
"""Sizes with whole blocks and super-blocks on each of two ranks."""


def load(
    path: Path,
    parallel: ParallelContext | None = None,
    quantization: QuantizationName | None = "gguf",
    dtype: torch.dtype = torch.float64,
) -> DecoderModel:
    return load_model(
        path, device="cpu", dtype=dtype, ops=select_ops("reference"), progress=False,
        parallel=parallel, quantization=quantization,
    )  # fmt: skip


def logits_of(*args: Any) -> torch.Tensor:
    blocks = blocks_needed([PROMPT], 16)
    return PagedDriver(load(*args), block_size=16, num_blocks=blocks).logits([PROMPT], 24)[0]


def mixed(name: str) -> str:
    """As llama.cpp's Q4_K_M: values and second products of some layers have more bits."""
    if "embed" in name or "lm_head" in name:
        return "Q6_K"
    return "Q6_K" if "layers.0" in name and ("v_proj" in name or "down_" in name) else "Q4_K"


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("Q4_0", "llama"),
        ("Q4_1", "qwen2"),
        ("Q8_0", "qwen2"),
        ("MXFP4", "llama"),
        ("Q4_K", "llama"),
        ("Q5_K", "qwen2"),
        ("Q6_K", "llama"),
        ("Q8_0", "glm4"),  # its gate and up are one tensor in the file
        (mixed, "qwen2"),
        ("Q4_0", "granite"),
        ("Q8_0", "qwen3_moe"),
        ("Q4_0", "mixtral"),
        ("MXFP4", "olmoe"),
        (mixed, "mixtral"),
        ("Q4_1", "ernie4_5_moe"),  # its experts are beside shared ones: dequantized
    ],
)
def test_logits_equal_transformers(tmp_path, kind, family):
    """On two ranks, too, each of which has whole blocks of all inputs."""
    path, has_super_blocks = tmp_path / "model.gguf", callable(kind) or kind.endswith("_K")
    settings = LAYERS.get(family, {}) | (SUPER if has_super_blocks else SMALL)
    if family.endswith("_moe"):
        settings["moe_intermediate_size"] = 64
    oracle = random_model(tiny_config(family, **settings))
    write_gguf(path, oracle, quantization=kind)
    oracle = oracle.double()
    if "moe" in family or family == "mixtral":
        oracle.set_experts_implementation("eager")  # the grouped one has no float64
    expected = expected_logits(oracle, PROMPT)
    found = logits_of(path)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)  # their rope is in float32
    torch.testing.assert_close(found, logits_of(path, None, "dequantize"), rtol=0, atol=1e-9)
    for of_rank in on_ranks(2, lambda parallel: logits_of(path, parallel)):
        torch.testing.assert_close(of_rank, found, rtol=0, atol=1e-9)


def test_gates_and_ups_of_experts_of_different_types_are_dequantized(tmp_path):
    """In that layer alone."""

    def kinds(name: str) -> str:
        return "Q8_0" if "layers.1" in name and "experts.up_proj" in name else "Q4_0"

    path, oracle = tmp_path / "model.gguf", random_model(tiny_config("mixtral", **SMALL))
    write_gguf(path, oracle, quantization=kinds)
    oracle = oracle.double()
    oracle.set_experts_implementation("eager")
    expected = expected_logits(oracle, PROMPT)
    torch.testing.assert_close(logits_of(path), expected, rtol=0, atol=2e-5)
    experts = [layer.experts for layer in load(path).weights.layers]
    assert [isinstance(each.gate_up, QuantizedWeight) for each in experts] == [True, False]


def test_greedy_tokens_equal_transformers(tmp_path):
    path = tmp_path / "model.gguf"
    oracle = random_model(tiny_config("llama", **SUPER))
    write_gguf(path, oracle, quantization=mixed)
    with LLM(path, dtype="float64", quantization="gguf", max_num_seqs=2, max_model_len=128) as llm:
        params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
        found = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids
    expected = oracle.double().generate(
        torch.tensor([PROMPT]), max_new_tokens=64, min_new_tokens=64, do_sample=False
    )
    assert list(found) == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("is_tied", [False, True])
def test_matrices_take_the_bytes_of_the_file(tmp_path, is_tied):
    path, config = tmp_path / "model.gguf", tiny_config("llama", **SUPER)
    config.tie_word_embeddings = is_tied
    write_gguf(path, random_model(config), quantization=mixed)
    model = load(path, None, "gguf", torch.bfloat16)
    headers = Checkpoint.open(path).scan(quantization=model.config.quantization).tensors
    stored = sum(np.prod(t.shape) for name, t in headers.items() if name.endswith(".blocks"))
    places = checkpoint_places(model.config, model.weights)
    tensors = memory_of(each for name, each in places.items() if name.endswith(".blocks"))
    assert sum(tensor.nbytes for tensor in tensors) == stored
    assert (model.weights.lm_head.matrix is model.weights.embed) == is_tied
    assert [name for name in places if not name.endswith((".blocks", "norm.weight"))] == []


@pytest.mark.parametrize("is_tied", [False, True])
def test_ranks_divide_a_vocabulary_in_blocks(tmp_path, is_tied):
    """The last of two has padding."""
    path = tmp_path / "model.gguf"
    config = tiny_config("qwen3", tie_word_embeddings=is_tied, vocab_size=163, **SMALL)
    oracle = random_model(config)
    write_gguf(path, oracle, quantization="Q8_0")
    expected = expected_logits(oracle.double(), PROMPT)
    for of_rank in on_ranks(2, lambda parallel: logits_of(path, parallel)):
        torch.testing.assert_close(of_rank, expected, rtol=0, atol=2e-5)


def test_an_embedding_of_a_type_without_a_lookup_is_dequantized(tmp_path):
    path, oracle = tmp_path / "model.gguf", random_model(tiny_config("llama", **SMALL))
    write_gguf(path, oracle, quantization="MXFP4")
    assert isinstance(load(path).weights.embed, torch.Tensor)


def test_blocks_are_kept_where_devices_of_a_type_keep_them(tmp_path, monkeypatch):
    """So far nowhere, unless ``quantization="gguf"`` says so."""
    path = tmp_path / "model.gguf"
    write_gguf(path, random_model(tiny_config("llama")), quantization="Q4_1")
    checkpoint = Checkpoint.open(path)
    assert checkpoint.quantization_on(None, "cuda") is None
    assert checkpoint.quantization_on("gguf", "cpu") == "gguf"
    monkeypatch.setattr(models_checkpoint, "KEPT_ON", ("cuda",))
    assert checkpoint.quantization_on(None, "cuda") == "gguf"
    assert checkpoint.quantization_on("dequantize", "cuda") == "dequantize"
    assert checkpoint.quantization_on(None, "cpu") is None
    assert ModelConfig.from_pretrained(path).quantization is None
    config = ModelConfig.from_pretrained(path, quantization="gguf")
    assert isinstance(config.quantization, GGUFBlocks)
    write_gguf(tmp_path / "plain.gguf", random_model(tiny_config("llama")), quantization="F16")
    assert Checkpoint.open(tmp_path / "plain.gguf").quantization_on(None, "cuda") is None


def test_the_banner_names_what_is_kept_and_what_is_not(tmp_path):
    path = tmp_path / "model.gguf"

    def kinds(name: str) -> str:
        if "lm_head" in name or "embed" in name:
            return "Q5_1"
        return "Q5_0" if "o_proj" in name else "Q4_0"

    write_gguf(path, random_model(tiny_config("llama")), quantization=kinds)
    config = ModelConfig.from_pretrained(path, quantization="gguf")
    assert config.quantization is not None
    assert config.quantization.describe() == (
        "gguf: blocks of Q4_0; 2 tensors of Q5_1 (0.0 MiB) dequantized; 2 tensors of Q5_0 "
        "(0.0 MiB) dequantized"
    )


def test_what_is_asked_for_is_refused_by_name(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, random_model(tiny_config("llama", num_hidden_layers=1)), quantization="F16")
    with pytest.raises(ConfigError, match="expected None or 'fp8' with a checkpoint in full prec"):
        load(path)
    write_gguf(path, random_model(tiny_config("llama", num_hidden_layers=1)), quantization="Q4_0")
    with pytest.raises(ConfigError, match="expected None or 'fp8' with a checkpoint in full prec"):
        load(path, None, "awq")
    with pytest.raises(ConfigError, match="'gguf' or 'dequantize' with this file, got 'gptq'"):
        load(path, None, "gptq")
    with pytest.raises(
        ConfigError, match=r"whole groups of 32 of the 96 inputs of model.layers.0"
    ):
        on_ranks(2, lambda parallel: load(path, parallel))
    config = tiny_config("llama", num_hidden_layers=1, **SUPER | {"intermediate_size": 256})
    write_gguf(path, random_model(config), quantization="Q4_K")
    with pytest.raises(ConfigError, match=r"whole groups of 256 inputs of a matrix in q4_k"):
        on_ranks(2, lambda parallel: load(path, parallel))


def test_a_scale_that_is_no_number_is_refused_by_name(tmp_path):
    path, model = tmp_path / "model.gguf", random_model(tiny_config("llama", num_hidden_layers=1))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 5] = torch.inf
    with np.errstate(all="ignore"):
        write_gguf(path, model, quantization="Q8_0")
    with pytest.raises(
        ConfigError, match=r"model.layers.0.mlp.up_proj.blocks: expected finite scales of blocks"
    ):
        load(path)


def test_an_update_with_a_scale_that_is_no_number_changes_nothing(tmp_path):
    path, name = tmp_path / "model.gguf", "model.layers.0.mlp.up_proj.blocks"
    write_gguf(path, random_model(tiny_config("llama", num_hidden_layers=1)), quantization="Q8_0")
    checkpoint = Checkpoint.open(path)
    tensors = dict(
        checkpoint.read(checkpoint.scan(quantization=checkpoint.quantization()).tensors)
    )
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    tensors[name] = tensors[name].clone()
    tensors[name][3, 1, :2] = torch.tensor([0, 0x7C], dtype=torch.uint8)  # infinite
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    options = {"dtype": "float64", "max_num_seqs": 1, "max_model_len": 64, "num_kv_blocks": 8}
    with LLM(path, quantization="gguf", **options) as llm:
        before = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids
        with pytest.raises(ConfigError, match=f"{name}: expected finite scales of blocks.*no wei"):
            llm.update_weights(tensors)
        after = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids
    assert after == before


@needs_smollm2
@pytest.mark.full
def test_smollm2_has_the_same_loss_in_blocks():
    """Within 0.1% on a text: in float32 it is the same number."""
    path = checkpoint_dir("smollm2")
    text = (Path(__file__).parents[3] / "training/data/tinyshakespeare.txt").read_text("utf-8")
    tokens = Checkpoint.open(path).tokenizer().encode(text[:2000])[:128]
    losses = {}
    for quantization in ("gguf", "dequantize"):
        model = load(path, None, quantization, torch.float32)
        blocks = blocks_needed([tokens], 16)
        logits = PagedDriver(model, block_size=16, num_blocks=blocks).logits([tokens], 64)[0]
        targets = torch.tensor(tokens[1:])
        losses[quantization] = torch.nn.functional.cross_entropy(logits[:-1], targets).item()
    assert losses["gguf"] == pytest.approx(losses["dequantize"], rel=1e-3)


@pytest.mark.gpu
@pytest.mark.gpu_only
@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("Q4_1", "llama"),
        ("Q8_0", "llama"),
        (mixed, "llama"),
        ("Q4_0", "olmoe"),
        (mixed, "mixtral"),
    ],
)
def test_a_gpu_keeps_blocks_and_makes_the_same_tokens(tmp_path, kind, family):
    """As many bytes of matrices as in the file, and float32 tokens of the dequantized model."""
    path, sizes = tmp_path / "model.gguf", SUPER if callable(kind) else SMALL
    write_gguf(path, random_model(tiny_config(family, **sizes)), quantization=kind)
    params, found = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True), {}
    for quantization in ("gguf", "dequantize"):
        with LLM(
            path, dtype="float32", device="cuda", quantization=quantization, max_num_seqs=2,
            max_model_len=128, num_kv_blocks=32,
        ) as llm:  # fmt: skip
            outputs = llm.generate([PROMPT], params, use_tqdm=False)
        found[quantization] = list(outputs[0].outputs[0].token_ids)
    assert found["gguf"] == found["dequantize"]


def test_new_weights_are_blocks_too(tmp_path):
    config = tiny_config("llama", num_hidden_layers=1, **SMALL)
    for seed in (0, 1):
        write_gguf(tmp_path / f"{seed}.gguf", random_model(config, seed=seed), quantization="Q4_1")
    checkpoint = Checkpoint.open(tmp_path / "1.gguf")
    scan = checkpoint.scan(quantization=checkpoint.quantization())
    tensors = dict(checkpoint.read(scan.tensors))
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    options = {"dtype": "float64", "max_num_seqs": 1, "max_model_len": 64, "num_kv_blocks": 8}
    tokens = []
    for seed in (0, 1):
        with LLM(tmp_path / f"{seed}.gguf", quantization="gguf", **options) as llm:
            if seed == 0:
                llm.update_weights(tensors)
            outputs = llm.generate([PROMPT], params, use_tqdm=False)
            tokens.append(outputs[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1]


@pytest.mark.gpu
@pytest.mark.interp
@pytest.mark.parametrize("kind", ["Q4_1", pytest.param(mixed, marks=pytest.mark.full)])
def test_kernels_give_the_logits_of_the_oracles(tmp_path, device, kind):
    """Those of the embedding's rows, of all layers and of the head, on 7 tokens and then on 1."""
    path, sizes = tmp_path / "model.gguf", SUPER if callable(kind) else SMALL
    config = tiny_config("llama", num_hidden_layers=1, **sizes)
    write_gguf(path, random_model(config), quantization=kind)
    found = []
    for name, where in (("triton", device), ("reference", torch.device("cpu"))):
        model = load_model(
            path, device=where, dtype=torch.float16, ops=select_ops(name), progress=False,
            quantization="gguf",
        )  # fmt: skip
        driver = PagedDriver(model, block_size=16, num_blocks=blocks_needed([PROMPT], 16))
        found.append(driver.logits([PROMPT[:8]], 7)[0].cpu())
    torch.testing.assert_close(*found, rtol=0, atol=0.02 * found[1].abs().max().item())
