"""Checkpoints of gpt-oss whose experts are MXFP4 blocks, against transformers.

The oracle dequantizes stored blocks by transformers' own function.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.quantizers.quantizers_utils import should_convert_module

from mrv1 import LLM, ConfigError, SamplingParams
from mrv1.kernels.layers.quantized import QuantizedWeight
from mrv1.kernels.registry import select_ops
from mrv1.models import (
    DecoderModel,
    ModelConfig,
    ParallelContext,
    checkpoint_places,
    load_model,
    memory_of,
)
from mrv1.models.quantization import MXFP4
from tests.models.driver import PagedDriver, blocks_needed
from tests.models.families import (
    SLIDING,
    expected_logits,
    random_model,
    save_checkpoint,
    tiny_config,
)
from tests.thread_ranks import on_ranks

PROMPT = [(7 * i) % 160 for i in range(40)]
SKIPPED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
           "lm_head"]  # fmt: skip
"""``modules_to_not_convert`` of the published checkpoints."""
SETTINGS = {"intermediate_size": 128, **SLIDING["gpt_oss"]}
EXPERTS = "model.layers.1.mlp.experts"


def save_mxfp4(folder: Path, *, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """Write a random checkpoint with MXFP4 experts; return its model, in float64."""
    config = tiny_config("gpt_oss", **SETTINGS | settings)
    model = random_model(config, seed=seed).double()
    generator = torch.Generator().manual_seed(seed)
    stored = {}
    for name, tensor in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor.float()
            continue
        num_experts, num_in, num_out = tensor.shape
        lead = (num_experts, num_out, num_in // 32)
        blocks = torch.randint(256, (*lead, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, lead, generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.get_parameter(name).data = convert_moe_packed_tensors(
            blocks, scales, dtype=torch.float64
        )
    folder.mkdir(exist_ok=True, parents=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, model)
    return model


def write_config(
    folder: Path, model: PreTrainedModel, dtype: str | None = "float32", **settings: Any
) -> None:
    method = {"quant_method": "mxfp4", "modules_to_not_convert": SKIPPED, **settings}
    values = model.config.to_dict() | {"dtype": dtype, "quantization_config": method}
    (folder / "config.json").write_text(json.dumps(values))


def load(
    folder: Path, parallel: ParallelContext | None = None, dtype: torch.dtype = torch.float64
) -> DecoderModel:
    return load_model(
        folder, device="cpu", dtype=dtype, ops=select_ops("reference"), progress=False,
        parallel=parallel,
    )  # fmt: skip


def logits(model: DecoderModel, chunk: int | None) -> torch.Tensor:
    driver = PagedDriver(model, block_size=16, num_blocks=blocks_needed([PROMPT], 16))
    return driver.logits([PROMPT], chunk)[0]


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of the second layer's experts; None = without it."""
    file = folder / "model.safetensors"
    stored = load_file(file) | {f"{EXPERTS}.{name}": each for name, each in tensors.items()}
    kept = {name: each for name, each in stored.items() if each is not None}
    save_file(kept, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mxfp4") / "model"
    return folder, save_mxfp4(folder)


def test_logits_equal_those_of_transformers(checkpoint):
    folder, theirs = checkpoint
    model = load(folder)
    for chunk in (5, None):
        torch.testing.assert_close(
            logits(model, chunk), expected_logits(theirs, PROMPT), rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("size", [2, 4])
def test_logits_of_ranks_equal_those_of_one(checkpoint, size):
    """With 4 ranks each has one group of the inputs of ``down_proj``."""
    folder, _ = checkpoint
    expected = logits(load(folder), None)
    for found in on_ranks(size, lambda parallel: logits(load(folder, parallel), None)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_greedy_tokens_equal_those_of_transformers(checkpoint):
    """Twice: the second time the prompt is in the prefix cache."""
    folder, theirs = checkpoint
    ids = list(PROMPT)
    for _ in range(64):
        ids.append(int(expected_logits(theirs, ids)[-1].argmax()))
    with LLM(folder, dtype="float64", device="cpu", num_kv_blocks=64, block_size=16) as llm:
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
        for _ in range(2):
            (output,) = llm.generate({"prompt_token_ids": PROMPT}, params)
            assert list(output.outputs[0].token_ids) == ids[len(PROMPT) :]


def test_values_and_memory_are_those_that_are_stored(checkpoint):
    folder, theirs = checkpoint
    model = load(folder, dtype=torch.bfloat16)
    for layer, expected in zip(model.weights.layers, theirs.model.layers, strict=True):
        experts, own = layer.experts, expected.mlp.experts
        assert isinstance(experts.gate_up, QuantizedWeight)
        assert isinstance(experts.down, QuantizedWeight)
        in_turns = own.gate_up_proj.transpose(1, 2).bfloat16()
        gates_first = torch.cat((in_turns[:, 0::2], in_turns[:, 1::2]), 1)
        assert torch.equal(experts.gate_up.dense(), gates_first)
        assert torch.equal(experts.down.dense(), own.down_proj.transpose(1, 2).bfloat16())
    memory = memory_of(checkpoint_places(model.config, model.weights).values())
    stored = load_file(folder / "model.safetensors")
    codes = [each for each in stored.values() if each.dtype == torch.uint8]
    assert sum(each.nbytes for each in memory if each.dtype == torch.uint8) == sum(
        each.nbytes for each in codes
    )


def test_new_weights_are_blocks_with_their_scales(checkpoint, tmp_path):
    """A stack's blocks and scales together, as they are stored."""
    folder, _ = checkpoint
    other = save_mxfp4(tmp_path / "other", seed=3)
    new = load_file(tmp_path / "other" / "model.safetensors")
    with LLM(folder, dtype="float64", device="cpu", num_kv_blocks=64, block_size=16) as llm:
        blocks = f"{EXPERTS}.down_proj_blocks"
        with pytest.raises(ConfigError, match=r"down_proj_scales: expected a tensor for it, as f"):
            llm.update_weights({blocks: new[blocks]}, partial=True)
        llm.update_weights(new)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
        (output,) = llm.generate({"prompt_token_ids": PROMPT}, params)
    ids = list(PROMPT)
    for _ in range(4):
        ids.append(int(expected_logits(other, ids)[-1].argmax()))
    assert list(output.outputs[0].token_ids) == ids[len(PROMPT) :]


@pytest.mark.parametrize("size", [2, 4])
def test_made_up_weights_of_ranks_are_those_of_one(checkpoint, size):
    folder, _ = checkpoint

    def made_up(parallel: ParallelContext | None) -> torch.Tensor:
        model = load_model(
            folder, device="cpu", dtype=torch.float64, ops=select_ops("reference"),
            progress=False, parallel=parallel, load_format="dummy",
        )  # fmt: skip
        return logits(model, None)

    expected = made_up(None)
    assert expected.std() > 0.1
    for found in on_ranks(size, made_up):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("down_proj_scales", None, r"experts\.down_proj_scales: missing"),
        ("gate_up_proj_blocks", torch.zeros(8, 256, 3, 16, dtype=torch.uint8),
         r"experts\.gate_up_proj_blocks: expected shape \[8, 256, 2, 16\], got \[8, 256, 3, 16\]"),
        ("down_proj_blocks", torch.zeros(7, 64, 4, 16, dtype=torch.uint8),
         r"down_proj_blocks: expected shape \[8, 64, 4, 16\], got \[7, 64, 4, 16\]"),
        ("down_proj_scales", torch.zeros(8, 64, 4), r"down_proj_scales: expected dtype U8, got F"),
        ("down_proj_scales", torch.full((8, 64, 4), 255, dtype=torch.uint8),
         r"down_proj_scales: expected exponents of numbers, 0 to 254, got 255, which is NaN"),
        ("down_proj", torch.zeros(8, 128, 64), r"experts\.down_proj: surplus"),
        ("gate_up_proj_bias", torch.zeros(8, 255), r"gate_up_proj_bias: expected shape \[8, 256"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_match_are_named(tmp_path, name, tensor, message):
    save_mxfp4(tmp_path)
    change(tmp_path, **{name: tensor})
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_ranks_have_whole_groups(tmp_path):
    save_mxfp4(tmp_path, intermediate_size=96)
    message = "expected ranks with whole groups of 32 of the 96 inputs of .*experts.down_proj"
    for error in on_ranks(2, lambda parallel: _error(tmp_path, parallel)):
        with pytest.raises(ConfigError, match=message):
            raise error


def _error(folder: Path, parallel: ParallelContext) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        load(folder, parallel)
    return error.value


def test_settings_that_are_not_read(checkpoint, tmp_path):
    folder, model = checkpoint
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    write_config(tmp_path, model, dequantize=True)
    with pytest.raises(ConfigError, match=r"quantization_config\.dequantize: expected none, got"):
        load(tmp_path)
    write_config(tmp_path, model, modules_to_not_convert=["model.layers.1.mlp"])
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts\.down_proj: missing"):
        load(tmp_path)


def test_other_families_have_no_such_experts(tmp_path):
    save_checkpoint(tmp_path, tiny_config("llama"))
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="expected another than 'mxfp4', which is that of gpt-o"):
        load(tmp_path)


def test_experts_are_not_quantized_while_they_load(tmp_path):
    save_checkpoint(tmp_path, tiny_config("gpt_oss"))
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj: expected full precision"):
        load_model(
            tmp_path, device="cpu", dtype=torch.float32, ops=select_ops("reference"),
            progress=False, quantization="fp8",
        )  # fmt: skip


def test_the_format_is_named(checkpoint):
    folder, _ = checkpoint
    quantization = ModelConfig.from_pretrained(folder, quantization="mxfp4").quantization
    assert quantization is not None
    assert quantization.describe() == "mxfp4: MXFP4 weights, a scale per group of 32 inputs"


# --- what the published checkpoints leave open -------------------------------------------------


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_dtype_that_config_json_does_not_name_is_that_of_the_embedding(tmp_path, is_tied):
    """gpt-oss's config.json has none; scales, norms or sinks may be stored in another one."""
    model = save_mxfp4(tmp_path, tie_word_embeddings=is_tied)
    stored = load_file(tmp_path / "model.safetensors")
    embed = stored.pop("model.embed_tokens.weight").bfloat16()
    # Of tensors that are one, safetensors keeps the alphabet's first name.
    stored["lm_head.weight" if is_tied else "model.embed_tokens.weight"] = embed
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for dtype, expected in ((None, torch.bfloat16), ("float16", torch.float16)):
        write_config(tmp_path, model, dtype=dtype)
        assert ModelConfig.from_pretrained(tmp_path).torch_dtype == expected
    write_config(tmp_path, model, dtype=None)
    (tmp_path / "model.safetensors").unlink()
    assert ModelConfig.from_pretrained(tmp_path).torch_dtype == torch.float32


def test_layers_with_experts_in_full_precision_are_of_another_kind(checkpoint, tmp_path):
    """Kernels are compiled for one layer of each kind."""
    _, model = checkpoint
    write_config(tmp_path, model, modules_to_not_convert=["model.layers.1.mlp"])
    skipped = ModelConfig.from_pretrained(tmp_path)
    assert skipped.with_layers((1, 1)).kind(0) == skipped.with_layers((1, 1)).kind(1)
    same_window = replace(skipped, layer_windows=(-1, -1))
    assert same_window.kind(0) != same_window.kind(1)


@pytest.mark.parametrize("pattern", ["mlp.experts", r"model.layers.\d.mlp.experts", "experts"])
def test_stacks_are_skipped_by_the_name_of_their_module(pattern):
    """As transformers, in which a layer's experts are one module."""
    name = f"{EXPERTS}.down_proj"
    skips = not should_convert_module(EXPERTS, [pattern])
    assert (MXFP4(skipped=(pattern,)).module(name) is None) == skips
    assert MXFP4(skipped=("down_proj",)).module(name) is not None
