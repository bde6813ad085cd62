"""Engines with quantized weights: tokens, updates, sleep, what they say of themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from mrv1 import LLM, ConfigError, EngineConfig, SamplingParams
from mrv1.device import DeviceInfo
from mrv1.kernels.layers import quantized
from mrv1.kernels.registry import select_ops
from mrv1.models import checkpoint_places, load_model, memory_of
from mrv1.runner.ranks import control, parallel_runner
from mrv1.runner.runner_reports import describe_products
from tests.models.families import random_model, tiny_checkpoint, tiny_config
from tests.models.quantized import SCHEMES, save_compressed
from tests.models.test_fp8_checkpoints import save_fp8, with_rounded_rows
from tests.models.test_fp8_experts import save as save_fp8_experts
from tests.models.test_mxfp4_checkpoints import save_mxfp4
from tests.thread_ranks import ThreadRanks

PROMPTS = [[5, 9, 23, 41, 77] * 8, [11, 30]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SIZES = {"intermediate_size": 128}
STATIC = {
    "block": None, "static": True,
    "names": {"weight_scale_inv": "weight_scale", "activation_scale": "input_scale"},
}  # fmt: skip
METHODS = ("int4", "blocks", "static", "online")


def save(path: Path, method: str, seed: int) -> PreTrainedModel:
    """Write a checkpoint; return transformers' model of its values, in float64."""
    if method == "int4":
        config = tiny_config("llama", **SIZES)
        return save_compressed(path, config, {"group_0": SCHEMES["int4-group-zeros"]}, seed=seed)
    if method == "online":
        tiny_checkpoint(path, "qwen3", seed=seed)
        return with_rounded_rows(random_model(tiny_config("qwen3"), seed=seed))
    return save_fp8(
        path, "qwen3", **(STATIC if method == "static" else {"block": (32, 64)}), seed=seed
    )


def make_llm(path: Path, method: str, **options: Any) -> LLM:
    settings = {
        "dtype": "float32", "device": "cpu", "num_kv_blocks": 40, "max_num_seqs": 4,
        "max_model_len": 128, "quantization": "fp8" if method == "online" else None,
    }  # fmt: skip
    return LLM(str(path), **(settings | options))


def memory(llm: LLM) -> list[torch.Tensor]:
    model = llm.engine.runner.model
    return memory_of(checkpoint_places(model.config, model.weights).values())


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_64_greedy_tokens_equal_transformers(tmp_path: Path, method: str, device: torch.device):
    """In float32: other dtypes may flip a choice that is nearly a tie."""
    oracle = save(tmp_path, method, 0)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with make_llm(tmp_path, method, device=str(device)) as llm:
        for output, prompt in zip(llm.generate(PROMPTS, params), PROMPTS, strict=True):
            ids = torch.tensor([prompt])
            expected = oracle.generate(ids, max_new_tokens=64, do_sample=False, eos_token_id=None)
            assert output.outputs[0].token_ids == tuple(expected[0, len(prompt) :].tolist())


@pytest.fixture(params=METHODS)
def checkpoints(request, tmp_path: Path) -> tuple[str, Path, dict[str, torch.Tensor]]:
    """Return a method, a checkpoint of it, and the tensors of another one."""
    for seed in (0, 1):
        save(tmp_path / str(seed), request.param, seed)
    return request.param, tmp_path, load_file(tmp_path / "1" / "model.safetensors")


def test_an_update_gives_the_tokens_and_bits_of_the_new_checkpoint(checkpoints, monkeypatch):
    """In order of names, codes before scales; on two ranks in pieces that part rows."""
    method, path, new = checkpoints
    monkeypatch.setattr(control, "SHARED_BYTES", 4096)
    monkeypatch.setattr(parallel_runner, "Ranks", ThreadRanks)
    with (
        make_llm(path / "1", method) as other,
        make_llm(path / "0", method) as llm,
        make_llm(path / "0", method, tensor_parallel_size=2) as several,
    ):
        expected, at = tokens(other), [tensor.data_ptr() for tensor in memory(llm)]
        assert tokens(llm) == tokens(several) != expected
        for each in (llm, several):
            each.update_weights(dict(sorted(new.items())))
            assert tokens(each) == expected
        assert [tensor.data_ptr() for tensor in memory(llm)] == at
        for own, wanted in zip(memory(llm), memory(other), strict=True):
            assert torch.equal(own.view(torch.uint8), wanted.view(torch.uint8))


def test_a_part_of_a_module_or_a_wrong_scale_changes_nothing(checkpoints):
    method, path, new = checkpoints
    module = "model.layers.1.mlp.down_proj"
    own = {name: tensor for name, tensor in new.items() if name.startswith(f"{module}.")}
    with make_llm(path / "0", method) as llm:
        before = [tensor.clone() for tensor in memory(llm)]
        if method != "online":
            (scale,) = (name for name in own if "weight_scale" in name)
            with pytest.raises(ConfigError, match=rf"as for others of {module}, got none"):
                llm.update_weights({n: t for n, t in own.items() if n != scale}, partial=True)
            kind = "other than" if method == "int4" else ">"
            with pytest.raises(ConfigError, match=rf"{module}.*: expected finite values {kind} 0"):
                llm.update_weights({**own, scale: own[scale] * 0}, partial=True)
        with pytest.raises(ConfigError, match=r"expected a dtype of .*got torch\.int16"):
            llm.update_weights({n: t.to(torch.int16) for n, t in own.items()}, partial=True)
        for tensor, old in zip(memory(llm), before, strict=True):
            assert torch.equal(tensor.view(torch.uint8), old.view(torch.uint8))
        llm.update_weights(own, partial=True)
        changed = [
            not torch.equal(tensor.view(torch.uint8), old.view(torch.uint8))
            for tensor, old in zip(memory(llm), before, strict=True)
        ]
        assert any(changed)
        assert sum(changed) <= 3


@pytest.mark.parametrize("level", [1, 2])
def test_codes_and_scales_sleep_and_wake(checkpoints, level: int):
    method, path, _ = checkpoints
    with make_llm(path / "0", method) as llm:
        before, storages = tokens(llm), [tensor.untyped_storage() for tensor in memory(llm)]
        llm.sleep(level)
        assert level == 1 or not any(storage.nbytes() for storage in storages)
        llm.wake_up()
        if level == 2:
            with pytest.raises(RuntimeError, match="weights: expected a value for every tensor"):
                tokens(llm)
            llm.update_weights(load_file(path / "0" / "model.safetensors"))
        assert tokens(llm) == before


def test_the_banner_names_the_quantization(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    save(tmp_path, "int4", 0)
    with caplog.at_level(logging.INFO), make_llm(tmp_path, "int4"):
        pass
    assert (
        "compressed-tensors: INT4 weights, a scale per group of 16 inputs, zero points ("
        in caplog.text
    )


@pytest.mark.parametrize("method", ["static", "online", "int4"])
def test_the_banner_says_whether_tokens_are_quantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
):
    save(tmp_path, method, 0)
    name = "fp8" if method == "online" else None
    said = products_on_a_gpu(tmp_path, monkeypatch, quantization=name)
    more = "; more than 32 tokens are quantized to e4m3 too"
    stored = {
        "static": "read as stored for any number of tokens",
        # The second products of the layers have 96 inputs, no multiple of 64.
        "online": "read as stored for up to 64 tokens, 2 of 8 matrices widened for more",
        "int4": "read as stored for up to 64 tokens, widened for more",  # groups of 16
    }[method]
    assert said(torch.bfloat16) == stored + ("" if method == "int4" else more)
    assert said(torch.float16) == stored
    assert said(torch.float32) == "widened for each product by a kernel"
    assert said(torch.bfloat16, deterministic=True) == said(torch.float32)


def test_the_banner_says_how_products_of_experts_read_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Beside linear layers, with which not all is alike; or alone, as gpt-oss has them."""
    save_fp8_experts(tmp_path / "fp8", 64, [])
    said = products_on_a_gpu(tmp_path / "fp8", monkeypatch)
    how = "read as stored for any number of tokens"
    assert said(torch.bfloat16) == f"{how}; experts {how}"
    assert said(torch.float32) == f"widened for each product by a kernel; experts {how}"
    said = products_on_a_gpu(tmp_path / "fp8", monkeypatch, device="cpu")
    assert said(torch.bfloat16) == "widened for each product"
    save_mxfp4(tmp_path / "mxfp4")
    assert products_on_a_gpu(tmp_path / "mxfp4", monkeypatch)(torch.float32) == how


def products_on_a_gpu(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, device: str = "cuda", **options: Any
) -> Callable[..., str]:
    """Return what is said of a checkpoint's products on a GPU that is not here, by dtype."""
    gpu = DeviceInfo(
        device=torch.device("cuda", 0), name="GPU X", capability=(9, 0), num_sms=132,
        total_memory_bytes=2**36,
    )  # fmt: skip
    monkeypatch.setattr(quantized, "INTERPRET", False)
    monkeypatch.setattr(quantized, "device_info", lambda _: gpu)

    def said(dtype: torch.dtype, *, deterministic: bool = False) -> str:
        weights = load_model(
            path, device="cpu", dtype=dtype, ops=select_ops("reference"), progress=False, **options
        ).weights
        config = EngineConfig(model=str(path), deterministic=deterministic)
        return describe_products(config, weights, torch.device(device), dtype)

    return said
