"""Made-up weights: the same model for any number of ranks, at a scale that activations keep."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch

from benchmarks.measure.floor import active_experts
from mrv1 import LLM, ConfigError, EngineConfig, SamplingParams
from mrv1.kernels.registry import select_ops
from mrv1.models import ModelConfig, ParallelContext, dummy, load_model
from mrv1.models.architectures import ARCHITECTURES
from mrv1.models.weights import EMBED, HEAD, checkpoint_tensors
from tests.models.driver import PagedDriver, blocks_needed
from tests.models.families import EXPERTS, random_model, tiny_checkpoint, tiny_config
from tests.models.test_gguf import write_gguf
from tests.thread_ranks import on_ranks

OPTIONS = {"device": "cpu", "dtype": torch.float32, "ops": select_ops("reference")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a directory with a ``config.json`` and nothing else."""
    path = tmp_path_factory.mktemp("dummy")
    tiny_checkpoint(path, "qwen2", vocab_size=163)  # ranks pad it
    for file in path.iterdir():
        if file.name != "config.json":
            file.unlink()
    assert [file.name for file in path.iterdir()] == ["config.json"]
    return path


def tensors(folder: Path, parallel: ParallelContext | None = None) -> dict[str, torch.Tensor]:
    """Return the weights of a rank by the names of a checkpoint."""
    model = load_model(folder, **OPTIONS, parallel=parallel, load_format="dummy")
    return checkpoint_tensors(model.config, model.weights)


def murmur(bits: int) -> int:
    """Return MurmurHash3's finalizer of 32 bits."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ bits >> shift) * factor & 0xFFFFFFFF
    return bits ^ bits >> 16


def test_a_value_is_a_hash_of_its_name_row_and_column(folder):
    name = "model.layers.1.mlp.up_proj.weight"
    found = tensors(folder)[name]
    for row, column in ((0, 0), (5, 63), (95, 1), (64, 40)):
        bits = murmur(murmur(row ^ zlib.crc32(name.encode())) ^ column)
        signed = bits - 2**32 if bits >= 2**31 else bits
        expected = signed / 2**31 * (3 / found.shape[1]) ** 0.5
        assert float(found[row, column]) == pytest.approx(expected, rel=1e-6)


def test_matrices_are_uniform_and_unlike_each_other(folder):
    matrices = {name: each for name, each in tensors(folder).items() if each.dim() == 2}
    for name, matrix in matrices.items():
        bound = (3 / matrix.shape[1]) ** 0.5
        assert float(matrix.abs().max()) <= bound, name
        # Within five standard deviations of the mean and of the mean square.
        unit, count = matrix.double() / bound, matrix.numel()
        assert abs(float(unit.mean())) < 5 * (1 / 3 / count) ** 0.5, name
        assert abs(float(unit.square().mean()) - 1 / 3) < 5 * (4 / 45 / count) ** 0.5, name
        assert len(matrix.unique(dim=0)) == len(matrix), name
    first, second = (matrices[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(2))
    assert not (first == second).any()


def test_norms_are_1_and_biases_0(folder):
    vectors = {name: each for name, each in tensors(folder).items() if each.dim() == 1}
    assert {name for name in vectors if name.endswith("q_proj.bias")}
    for name, vector in vectors.items():
        assert (vector == (0.0 if name.endswith(".bias") else 1.0)).all(), name


@pytest.mark.parametrize("size", [2, 4])  # of 2 KV heads: with 4 ranks, two have the same one
def test_ranks_have_parts_of_one_model(folder, size, monkeypatch):
    whole = tensors(folder)
    monkeypatch.setattr(dummy, "CHUNK", 100)  # several chunks of a matrix, and of one row

    def of_rank(parallel: ParallelContext) -> dict[str, torch.Tensor]:
        found = tensors(folder, parallel)
        for name, own in found.items():
            if name not in (EMBED, HEAD):
                part = parallel.part(whole[name].shape, own.shape)
                assert torch.equal(own, whole[name][part]), name
        return found

    of_ranks = on_ranks(size, of_rank)
    for name in (EMBED, HEAD):
        joined = torch.cat([each[name] for each in of_ranks])
        assert torch.equal(joined[: len(whole[name])], whole[name])
        assert not joined[len(whole[name]) :].any()  # padding


def test_a_directory_needs_only_its_config(folder):
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    options = {"device": "cpu", "dtype": "float64", "load_format": "dummy", "num_kv_blocks": 8}
    with LLM(folder, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": [3, 1, 4, 1, 5]}], greedy)
    assert len(outputs[0].outputs[0].token_ids) == 8


def test_files_of_weights_are_not_read(tmp_path):
    tiny_checkpoint(tmp_path, "qwen2", vocab_size=163)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    config = ModelConfig.from_pretrained(tmp_path)
    assert (
        tensors(tmp_path).keys()
        == checkpoint_tensors(
            config, load_model(tmp_path, **OPTIONS, load_format="dummy").weights
        ).keys()
    )
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        load_model(tmp_path, **OPTIONS)


def test_what_needs_a_checkpoints_tensors_is_refused(tmp_path):
    write_gguf(tmp_path / "model.gguf", random_model(tiny_config("llama")))
    with pytest.raises(ConfigError, match="load_format: expected 'auto' with a GGUF file, got"):
        load_model(tmp_path / "model.gguf", **OPTIONS, load_format="dummy")
    with pytest.raises(ConfigError, match="load_format, kv_scale: expected not both"):
        EngineConfig(model="tiny", load_format="dummy", kv_cache_dtype="fp8_e4m3", kv_scale="head")
    with pytest.raises(ConfigError, match=r"load_format: expected one of .*, got 'random'"):
        EngineConfig(model="tiny", load_format="random")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family == "ernie4_5_moe" else pytest.mark.full)
        for family in EXPERTS
    ],
)
def test_made_up_weights_spread_tokens_over_experts_as_chance_does(tmp_path, monkeypatch, family):
    """Within a tenth of the expectation; no bias of a router draws all tokens.

    The layers' mean: tokens grow alike with depth, the more so the smaller the hidden size.
    """
    num_experts, top_k, batch = 64, 4, 16
    counts = {
        "ernie4_5_moe": {"moe_num_experts": num_experts, "moe_k": top_k},
        "gpt_oss": {"num_local_experts": num_experts, "num_experts_per_tok": top_k},
        "qwen3_moe": {"num_experts": num_experts, "num_experts_per_tok": top_k},
        "mixtral": {"num_local_experts": num_experts, "num_experts_per_tok": top_k},
        "olmoe": {"num_experts": num_experts, "num_experts_per_tok": top_k},
        "glm4_moe": {
            "n_routed_experts": num_experts, "num_experts_per_tok": top_k, "n_group": 1,
            "topk_group": 1,
        },
    }  # fmt: skip
    tiny_config(
        family, hidden_size=512, num_hidden_layers=6, vocab_size=4096, **counts[family],
        architectures=[name for name, each in ARCHITECTURES.items() if each.model_type == family],
    ).save_pretrained(tmp_path)  # fmt: skip
    ops = select_ops("reference")
    route, found = ops.route_experts, []

    def noted(*args, **kwargs):
        found.append(route(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(ops, "route_experts", noted)
    model = load_model(tmp_path, **(OPTIONS | {"ops": ops}), load_format="dummy")
    biases = [layer.experts.router_bias for layer in model.weights.layers if layer.experts]
    assert all(bias is None or not bias.any() for bias in biases)
    generator = torch.Generator().manual_seed(0)
    driver = PagedDriver(model, block_size=16, num_blocks=blocks_needed([[0] * 96] * 16, 16))
    prompts = torch.randint(4096, (16, 96), generator=generator).tolist()
    driver.logits(prompts, None)
    expected = active_experts(model.config, batch)
    active = []
    for ids, _ in found:
        # Batches of a token of each prompt, as in a decode step, each with a long context.
        rows = ids[: 16 * 96, :top_k].view(16, 96, top_k)[:, 48:].transpose(0, 1)
        active.append(sum(each.unique().numel() for each in rows) / len(rows))
    assert len(active) >= 5
    assert sum(active) / len(active) == pytest.approx(expected, rel=0.1)
