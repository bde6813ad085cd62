"""GGUF files equal transformers: each family, rope and quantization; split files; each refusal.

The files are written by the gguf package, with the names and the order of rows of llama.cpp.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from mrv1 import LLM, ConfigError, SamplingParams
from mrv1.config import checkpoint_dir
from mrv1.kernels.registry import select_ops
from mrv1.models import Checkpoint, ModelConfig, load_model
from mrv1.models.gguf_file import open_gguf
from tests.models.driver import PagedDriver, blocks_needed
from tests.models.families import (
    ROPES,
    expected_logits,
    random_model,
    ropes_of,
    tiny_config,
)
from tests.models.quantization.blocks import usable_blocks

gguf = pytest.importorskip("gguf", reason="not run: the package gguf is not installed")

ARCHITECTURE = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "smollm3": "smollm3", "granite": "granite", "seed_oss": "seed_oss",
    "glm4": "glm4", "olmo2": "olmo2", "phi3": "phi3", "gemma2": "gemma2", "gemma3_text": "gemma3",
    "ernie4_5": "ernie4_5", "qwen3_moe": "qwen3moe", "mixtral": "llama", "olmoe": "olmoe",
    "ernie4_5_moe": "ernie4_5-moe",
}  # fmt: skip
LAYERS: dict[str, dict[str, Any]] = {
    "smollm3": {"num_hidden_layers": 5, "no_rope_layer_interval": 4},
    "gemma2": {
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24,
        "query_pre_attn_scalar": 32, "final_logit_softcapping": 11.0, "tie_word_embeddings": True,
    },
    "qwen3_moe": {"mlp_only_layers": [], "norm_topk_prob": True},
    "gemma3_text": {
        "num_hidden_layers": 6, "sliding_window": 24, "query_pre_attn_scalar": 32,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    },
}  # fmt: skip
"""Which layers have rope, or windows, is fixed in llama.cpp; so is the scale of Gemma's scores,
and which layers of Qwen3-MoE have experts."""
QUANTIZATIONS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""The quantizations that gguf writes for rows of 64 and 96 values, too."""
PROMPT = [(7 * i) % 160 for i in range(90)]
TINY = checkpoint_dir("tiny")
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    quantization: str | Callable[[str], str] = "F32",
    tokenizer: Path | None = None,
    edit: Callable[[Any], None] = lambda writer: None,
) -> None:
    """Write ``model`` as llama.cpp does; the model gets the values that the file has.

    ``quantization`` is that of all matrices but routers, or returns that of one by its name.
    """
    config = model.config
    name = ARCHITECTURE[config.model_type]
    writer = gguf.GGUFWriter(path, name)
    writer.add_name("a test")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    ropes = config.rope_parameters
    share = ropes.get("full_attention", ropes).get("partial_rotary_factor", 1)
    writer.add_rope_dimension_count(int(config.head_dim * share))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _write_rope(writer, config)
    has_windows = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if has_windows or (name == "phi3" and config.sliding_window is not None):
        writer.add_sliding_window(config.sliding_window)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None) is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if name == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    _write_experts(writer, config)
    if tokenizer is not None:
        _write_tokenizer(writer, tokenizer)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    with torch.no_grad():
        for key, tensor in _matrices(model):
            if key == "lm_head.weight" and config.tie_word_embeddings:
                continue
            kind = quantization if isinstance(quantization, str) else quantization(key)
            kind = gguf.GGMLQuantizationType["F32" if key.endswith("mlp.gate.weight") else kind]
            is_matrix = tensor.dim() > 1
            data = _stored(tensor, kind) if is_matrix else tensor.numpy()
            if is_matrix:
                shape = tuple(tensor.shape)
                tensor.copy_(torch.from_numpy(gguf.dequantize(data, kind).reshape(shape).copy()))
            if name.startswith("gemma") and "norm" in key:
                data = data + 1
            if name in ("llama", "smollm3", "granite") and (
                ".q_proj." in key or ".k_proj." in key
            ):
                heads = config.num_attention_heads if ".q_" in key else config.num_key_value_heads
                data = _permuted(data, heads)
            writer.add_tensor(
                names.get_name(key, try_suffixes=(".weight", ".bias")),
                np.ascontiguousarray(data),
                raw_dtype=kind if is_matrix else None,
            )
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _matrices(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors and views with names that gguf knows: gates and ups of experts apart."""
    for key, tensor in model.state_dict().items():
        if key.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                yield key.replace("gate_up_proj", f"{part}_proj.weight"), half
        elif key.endswith("experts.down_proj"):
            yield f"{key}.weight", tensor
        elif key.endswith("e_score_correction_bias"):
            name = key.replace("mlp.gate.", "mlp.").replace("correction_bias", "correction.bias")
            yield name, tensor.flatten()
        else:
            yield key, tensor


def _write_experts(writer: Any, config: Any) -> None:
    """Write what llama.cpp's conversion script does of experts."""
    routing = {
        "qwen3_moe": ("num_experts", "num_experts_per_tok"),
        "mixtral": ("num_local_experts", "num_experts_per_tok"),
        "olmoe": ("num_experts", "num_experts_per_tok"),
        "ernie4_5_moe": ("moe_num_experts", "moe_k"),
    }.get(config.model_type)
    if routing is None:
        return
    writer.add_expert_count(getattr(config, routing[0]))
    writer.add_expert_used_count(getattr(config, routing[1]))
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "ernie4_5_moe":
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)


def _stored(tensor: torch.Tensor, kind: Any) -> np.ndarray:
    if tensor.dim() == 3:
        return _stored(tensor.flatten(0, 1), kind).reshape(*tensor.shape[:2], -1)
    if kind.name in ("Q4_K", "Q5_K", "Q6_K"):  # which gguf does not write
        return usable_blocks((tensor.shape[0], tensor.shape[1]), kind.name)
    return gguf.quantize(tensor.numpy(), kind)


def _permuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """``LlamaModel.permute`` of llama.cpp's conversion script."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _write_rope(writer: Any, config: Any) -> None:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if (local := config.rope_parameters.get("sliding_attention")) is not None:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _write_tokenizer(writer: Any, directory: Path) -> None:
    content = json.loads((directory / "tokenizer.json").read_text("utf-8"))
    special = {token["content"] for token in content["added_tokens"] if token["special"]}
    vocab = content["model"]["vocab"] | {t["content"]: t["id"] for t in content["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_chat_template(CHAT)


def logits_of(path: Path, prompt: list[int] = PROMPT) -> torch.Tensor:
    model = load_model(
        path, device="cpu", dtype=torch.float32, ops=select_ops("reference"), progress=False
    )
    driver = PagedDriver(model, block_size=16, num_blocks=blocks_needed([prompt], 16), seed=0)
    return driver.logits([prompt], 32)[0]


def check_equal(path: Path, oracle: PreTrainedModel) -> None:
    torch.testing.assert_close(logits_of(path), expected_logits(oracle, PROMPT), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ARCHITECTURE)
@pytest.mark.parametrize("rope", ["default", "linear", "yarn"])
def test_every_family_equals_transformers(tmp_path, family, rope):
    if rope not in ropes_of(family):
        pytest.skip(f"{family} has no such rope")
    config = tiny_config(family, rope, **LAYERS.get(family, {}))
    oracle = random_model(config)
    write_gguf(tmp_path / "model.gguf", oracle)
    check_equal(tmp_path / "model.gguf", oracle)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("llama", {"head_dim": 16}),
        ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("qwen3", {"head_dim": 48}),
        ("smollm3", LAYERS["smollm3"] | {"attention_bias": True, "tie_word_embeddings": True}),
        ("granite", {"attention_bias": True, "mlp_bias": True}),
        ("granite", {"residual_multiplier": 0.22, "logits_scaling": 8.0}),
        ("seed_oss", {"attention_bias": False, "attention_out_bias": True}),
        ("glm4", {"attention_bias": False, "partial_rotary_factor": 0.75}),
        ("phi3", {"num_key_value_heads": 4, "partial_rotary_factor": 0.75}),
        ("phi3", {"sliding_window": 24}),
        ("gemma2", LAYERS["gemma2"] | {"attn_logit_softcapping": 3.0}),
        ("gemma3_text", LAYERS["gemma3_text"] | {"final_logit_softcapping": 7.0}),
        ("gemma3_text", {"query_pre_attn_scalar": 32}),
        ("ernie4_5", {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 16}),
        ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_num_shared_experts": 0}),
        ("ernie4_5_moe", {"num_hidden_layers": 4, "moe_layer_interval": 2}),
        ("qwen3_moe", LAYERS["qwen3_moe"] | {"num_experts_per_tok": 5}),
    ],
)
def test_optional_settings_equal_transformers(tmp_path, family, settings):
    oracle = random_model(tiny_config(family, **settings))
    write_gguf(tmp_path / "model.gguf", oracle)
    check_equal(tmp_path / "model.gguf", oracle)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_every_quantization_equals_transformers_own_load(tmp_path, quantization):
    """Once with the dequantized values in the model, once as transformers reads the file."""
    path = tmp_path / "model.gguf"
    oracle = random_model(tiny_config("llama"))
    write_gguf(path, oracle, quantization=quantization)
    check_equal(path, oracle)
    theirs = random_model(tiny_config("llama"), seed=1)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=theirs)["tensors"]
    theirs.load_state_dict(tensors)
    check_equal(path, theirs)


def test_the_factors_of_llama3_rope_become_its_settings(tmp_path):
    settings = ROPES["llama3"] | {"original_max_position_embeddings": 8192}
    config = tiny_config("llama", head_dim=64, rope_parameters=dict(settings))
    oracle = random_model(config)
    plain = settings["rope_theta"] ** -(np.arange(0, 64, 2) / 64)
    factors = (plain / oracle.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert len(set(factors.tolist())) > 3

    write_gguf(
        tmp_path / "model.gguf",
        oracle,
        edit=lambda writer: writer.add_tensor("rope_freqs.weight", factors),
    )
    assert ModelConfig.from_pretrained(tmp_path / "model.gguf").rope.factor == 8
    check_equal(tmp_path / "model.gguf", oracle)
    write_gguf(
        tmp_path / "other.gguf",
        oracle,
        edit=lambda writer: writer.add_tensor("rope_freqs.weight", factors + 0.1),
    )
    with pytest.raises(ConfigError, match=r"rope_freqs.weight: expected the factors of llama3"):
        ModelConfig.from_pretrained(tmp_path / "other.gguf")


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """The embedded model as a file with 8-bit weights and a tokenizer, and transformers' model."""
    path = tmp_path_factory.mktemp("gguf") / "tiny-q8.gguf"
    oracle = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    write_gguf(path, oracle, quantization="Q8_0", tokenizer=TINY)
    return path, oracle.eval()


def test_greedy_tokens_and_text_equal_transformers(tiny_gguf):
    path, oracle = tiny_gguf
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    prompts = ["ROMEO:", "What is the matter?", "\nKING HENRY:\nI"]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(str(path), device="cpu", max_num_seqs=4, num_kv_blocks=32) as llm:
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        expected = oracle.generate(
            ids, max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None
        )[0, ids.shape[1] :]
        assert list(output.outputs[0].token_ids) == expected.tolist()
        assert output.outputs[0].text == tokenizer.decode(expected.tolist())


def test_other_files_of_the_folder_do_not_count(tiny_gguf, tmp_path):
    """A tokenizer.json beside a GGUF file is another model's."""
    path = shutil.copy(tiny_gguf[0], tmp_path / "model.gguf")
    alone = Checkpoint.at(path).tokenizer()
    other = json.loads((TINY / "tokenizer.json").read_text("utf-8"))
    other["model"]["merges"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(other), "utf-8")
    settings = {"eos_token": "x", "chat_template": "other"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "config.json").write_text("{}")
    beside = Checkpoint.at(path).tokenizer()
    assert beside.encode("What is the matter?") == alone.encode("What is the matter?")
    assert beside.chat_template == alone.chat_template == CHAT
    assert beside.eos_token == alone.eos_token == "<|endoftext|>"
    assert ModelConfig.from_pretrained(path).eos_token_ids == (0,)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_of_another_time_and_the_same_size_is_read_again(tmp_path, is_replaced):
    """Whether it is written over or replaced."""
    ropes = [ROPES["default"], ROPES["default"] | {"rope_theta": 500000.0}]
    path, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    for number, rope in enumerate(ropes):
        oracle = random_model(tiny_config("llama", rope_parameters=dict(rope)), seed=number)
        write_gguf(other if is_replaced else path, oracle)
        if is_replaced:
            other.replace(path)
        os.utime(path, ns=(number, number))
        check_equal(path, oracle)
    assert open_gguf(path) is open_gguf(path)


def split_gguf(directory: Path, model: PreTrainedModel, count: int = 3) -> list[Path]:
    """Write ``model`` into several files: all settings in the first, no tensor in the last."""
    paths = [directory / f"m-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    for number, path in enumerate(paths):

        def part(writer: Any, number: int = number) -> None:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", count)
            tensors = writer.tensors[0]
            writer.add_int32("split.tensors.count", len(tensors))
            for at, name in enumerate(list(tensors)):
                if at % (count - 1) != number:
                    del tensors[name]
            if number:
                for key in [key for key in writer.kv_data[0] if not key.startswith("split.")]:
                    del writer.kv_data[0][key]

        write_gguf(path, model, edit=part)
    return paths


def test_a_split_model_loads_from_any_of_its_files(tmp_path):
    oracle = random_model(tiny_config("llama"))
    for path in split_gguf(tmp_path, oracle):
        check_equal(path, oracle)


def test_files_of_a_split_model_that_do_not_fit_are_named(tmp_path):
    first, second, third = split_gguf(tmp_path, random_model(tiny_config("llama")))
    alone = shutil.copy(first, tmp_path / "alone.gguf")
    check_refused(
        alone, "alone.gguf: expected split.no 0 and split.count 1 by its name, got 0 and 3"
    )
    content = second.read_bytes()
    second.unlink()
    message = "m-00002-of-00003.gguf, one of 3 files of a split model: not a readable GGUF file"
    check_refused(first, message)
    check_refused(third, message)
    shutil.copy(third, second)
    check_refused(first, "m-00002-of-00003.gguf: expected split.no 1 and .* got 2 and 3")
    second.write_bytes(content)
    write_gguf(third, random_model(tiny_config("llama")))
    check_refused(first, "m-00003-of-00003.gguf: expected split.no 2 and .* got None and None")


@pytest.mark.parametrize(
    ("family", "parameters", "edit"),
    [
        (
            "llama",
            ROPES["yarn"] | {"beta_fast": 20.0, "beta_slow": 2.0},
            {"scaling.yarn_beta_fast": 20.0, "scaling.yarn_beta_slow": 2.0},
        ),
        (
            "qwen2",
            ROPES["yarn"] | {"attention_factor": 1.5 * (0.1 * np.log(4) + 1)},
            {"scaling.attn_factor": 1.5},
        ),
        (
            "qwen3",
            ROPES["yarn"] | {"mscale": 1.0, "mscale_all_dim": 0.5},
            {"scaling.yarn_log_multiplier": 0.5},
        ),
        ("llama", ROPES["linear"], {"scaling.type": None}),
        (
            "llama",
            ROPES["linear"],
            {"scaling.type": None, "scaling.factor": None, "scale_linear": 4.0},
        ),
        ("qwen2", ROPES["default"], {"scaling.type": "none", "scaling.factor": 4.0}),
        ("qwen2", ROPES["default"], {"scaling.factor": 0.0, "scaling.finetuned": True}),
    ],
)
def test_every_setting_of_rope_counts(tmp_path, family, parameters, edit):
    oracle = random_model(tiny_config(family, rope_parameters=dict(parameters)))
    write_gguf(tmp_path / "model.gguf", oracle, edit=lambda writer: set_rope(writer, edit))
    check_equal(tmp_path / "model.gguf", oracle)


def set_rope(writer: Any, settings: dict[str, Any]) -> None:
    """Set settings of rope; None = none."""
    add = {float: writer.add_float32, bool: writer.add_bool, str: writer.add_string}
    for name, value in settings.items():
        key = f"{writer.arch}.rope.{name}"
        writer.kv_data[0].pop(key, None)
        if value is not None:
            add[type(value)](key, value)


def test_a_file_names_its_end_tokens_and_dtype(tiny_gguf, tmp_path):
    config = ModelConfig.from_pretrained(tiny_gguf[0])
    assert config.eos_token_ids == (0,)
    assert config.torch_dtype == torch.bfloat16
    write_gguf(tmp_path / "f16.gguf", random_model(tiny_config("llama")), quantization="F16")
    assert ModelConfig.from_pretrained(tmp_path / "f16.gguf").torch_dtype == torch.float16


def test_a_file_without_a_tokenizer_takes_token_ids(tmp_path):
    write_gguf(tmp_path / "model.gguf", random_model(tiny_config("llama")))
    with LLM(str(tmp_path / "model.gguf"), device="cpu", num_kv_blocks=16) as llm:
        output = llm.generate([1, 2, 3], SamplingParams(max_tokens=2))[0]
        assert len(output.outputs[0].token_ids) == 2
        with pytest.raises(ValueError, match=r"model.gguf' has no tokenizer, got text"):
            llm.generate("text")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.add_expert_count(8), "llama.expert_used_count: expected a number, got None"),
        (lambda w: w.add_sliding_window(64), "sliding_window: expected 512 or 0 or none, got 64"),
        (
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
            "llama.rope.scaling.type: expected none, linear or yarn, got 'longrope'",
        ),
        (
            lambda w: w.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32)),
            "blk.0.attn_sinks.weight: surplus",
        ),
        (
            lambda w: w.add_tensor("blk.0.x.weight", np.zeros(4, np.int8)),
            "quantizations that the gguf package can dequantize, got I8",
        ),
        (
            lambda w: w.add_tensor("rope_freqs.weight", np.ones(8, np.float32)),
            "rope_freqs.weight: surplus",
        ),
        (lambda w: set_value(w, "attention.head_count", 2**31 - 1), "num_attention_heads|heads"),
        (lambda w: set_value(w, "attention.head_count_kv", 2**31 - 1), "num_kv_heads"),
        (lambda w: set_value(w, "feed_forward_length", 2**31 - 1), "gate_proj.weight: expected"),
        (lambda w: set_value(w, "context_length", 2**31 - 1), "max_model_len: expected 16777216"),
    ],
)
def test_a_file_that_cannot_run_is_refused(tmp_path, edit, message):
    """A damaged count is refused before memory is taken for it."""
    path = tmp_path / "model.gguf"
    config = tiny_config("qwen2" if "rope_freqs" in message else "llama")
    write_gguf(path, random_model(config), edit=edit)
    check_refused(path, message)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.causal", False, "got False"),
        ("attention.scale", 0.5, "got 0.5"),
        ("attention.temperature_scale", 0.5, "expected none, got 0.5"),
        ("attn_logit_softcapping", 30.0, "got 30.0"),
        ("classifier.output_labels", ["yes"], r"expected none, got \['yes'\]"),
        ("embedding_scale", 2.0, "got 2.0"),
        ("logit_scale", 0.5, "got 0.5"),
        ("nextn_predict_layers", 1, "got 1"),
        ("rope.dimension_count", 8, "expected 32 or none, got 8"),
        ("rope.dimension_sections", [2, 3, 3, 0], "expected none, got"),
        ("rope.freq_base", float("nan"), "expected a number, got nan"),
        ("rope.scaling.alpha", 2.0, "got 2.0"),
        ("rope.scaling.attn_factor", 2.0, "expected 1 or none, got 2.0"),
        ("rope.scaling.yarn_attn_factor", 2.0, "expected 1 or none, got 2.0"),
        ("rope.scaling.yarn_beta_fast", 2.0, "expected none, got 2.0"),
        ("rope.scaling.yarn_ext_factor", 0.0, "got 0.0"),
        ("block_count", 2**31 - 1, "expected 2 or none, got 2147483647"),
        ("block_count", 1, "expected 2 or none, got 1"),
        ("embedding_length", 2**32 - 1, "expected 64 or none, got 4294967295"),
        ("attention.head_count", 0, "expected an integer >= 1, got 0"),
        ("attention.key_length", 2**31 - 1, "value_length: expected 2147483647 or none, got 32"),
    ],
)
def test_a_setting_that_counts_is_refused_by_name(tmp_path, key, value, message):
    path = tmp_path / "model.gguf"
    write_gguf(
        path, random_model(tiny_config("llama")), edit=lambda writer: set_value(writer, key, value)
    )
    with pytest.raises(ConfigError, match=f"llama.{key.partition('.')[0]}.*{message}") as caught:
        ModelConfig.from_pretrained(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_count", 7, r"mlp.gate.weight: expected shape \[7, 64\]"),
        ("expert_count", 9, r"mlp.gate.weight: expected shape \[9, 64\]"),
        ("expert_used_count", 9, "num_experts_per_tok: expected 1 to 8"),
        ("expert_feed_forward_length", 40, r"gate_proj.weight: expected shape \[40, 64\]"),
        ("expert_gating_func", 2, "qwen3moe.expert_gating_func: expected 1 or none, got 2"),
        ("expert_weights_norm", False, "expert_weights_norm: expected True or none, got False"),
        ("expert_weights_scale", 2.5, "expert_weights_scale: expected 0 or 1 or none, got 2.5"),
        ("expert_group_count", 4, "expert_group_count: expected 0 or none, got 4"),
        ("expert_shared_count", 1, "expert_shared_count: expected none, got 1"),
    ],
)
def test_settings_of_experts_that_cannot_run_are_named(tmp_path, key, value, message):
    path = tmp_path / "model.gguf"
    oracle = random_model(tiny_config("qwen3_moe", **LAYERS["qwen3_moe"]))
    write_gguf(path, oracle, edit=lambda writer: set_value(writer, key, value))
    check_refused(path, message)


def test_more_tokens_than_rows_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, random_model(tiny_config("llama")), tokenizer=TINY)
    check_refused(path, r"tokenizer.ggml.tokens: expected at most 160, .* got 2048")


def set_value(writer: Any, name: str, value: Any) -> None:
    """Set a setting of the architecture."""
    key = f"{writer.arch}.{name}"
    writer.kv_data[0].pop(key, None)
    add = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
    add.get(type(value), writer.add_array)(key, value)


def test_another_family_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    message = (
        "general.architecture: expected one of llama, qwen2, qwen3, smollm3, granite, seed_oss, "
        "glm4, olmo2, phi3, gemma2, gemma3, ernie4_5, qwen3moe, olmoe, ernie4_5-moe, got 'falcon'"
    )
    check_refused(tmp_path / "model.gguf", message)


def test_what_another_family_needs_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "granitehybrid")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    message = "got 'granitehybrid': it needs state-space layers, which mrv1 lacks"
    check_refused(tmp_path / "model.gguf", message)


def test_a_dense_granite_4_of_a_converter_for_hybrids_loads(tmp_path):
    """It lists KV heads by layer, and has settings of layers that the model does not have."""

    def edit(writer: Any) -> None:
        writer.add_rope_scaling_finetuned(True)
        writer.add_expert_shared_feed_forward_length(96)
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_state_size(256)
        writer.add_ssm_group_count(1)
        writer.add_ssm_inner_size(128)
        writer.add_ssm_time_step_rank(128)
        heads = gguf.GGUFValue([2, 2], gguf.GGUFValueType.ARRAY)
        writer.kv_data[0]["granite.attention.head_count_kv"] = heads

    oracle = random_model(tiny_config("granite"))
    write_gguf(tmp_path / "model.gguf", oracle, edit=edit)
    check_equal(tmp_path / "model.gguf", oracle)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.finetuned", False),
        ("attention.head_count_kv", [2, 0]),
        ("logit_scale", None),
    ],
)
def test_a_granite_that_cannot_run_is_refused(tmp_path, key, value):
    def edit(writer: Any) -> None:
        del writer.kv_data[0][f"granite.{key}"]
        if value is not None:
            set_value(writer, f"granite.{key}", value)

    def with_all(writer: Any) -> None:
        writer.add_rope_scaling_finetuned(True)
        edit(writer)

    write_gguf(tmp_path / "model.gguf", random_model(tiny_config("granite")), edit=with_all)
    check_refused(tmp_path / "model.gguf", f"granite.{key}: expected")


@pytest.mark.parametrize("kind", ["adapter", "mmproj", "imatrix", "vocab"])
def test_a_file_that_is_no_model_is_refused(tmp_path, kind):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_string("general.type", kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    check_refused(tmp_path / "model.gguf", f"general.type: expected model, got '{kind}'")


def test_the_other_byte_order_is_refused(tmp_path):
    """gguf swaps the metadata and then dequantizes float16 and blocks as they are."""
    other = gguf.GGUFEndian.BIG if sys.byteorder == "little" else gguf.GGUFEndian.LITTLE
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", endianess=other)
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    message = "model.gguf: not a readable GGUF file: expected the byte order of this machine"
    check_refused(tmp_path / "model.gguf", message)


def test_a_damaged_file_is_refused(tmp_path, tiny_gguf):
    content = tiny_gguf[0].read_bytes()
    path = tmp_path / "model.gguf"
    for damaged in (b"", b"no such format", content[:1000], content[: len(content) // 2]):
        path.write_bytes(damaged)
        check_refused(path, "model.gguf: not a readable GGUF file")
    check_refused(tmp_path / "none.gguf", "model: expected a GGUF file, got .*none.gguf")


def test_a_missing_gguf_package_is_named(tmp_path, monkeypatch):
    write_gguf(tmp_path / "model.gguf", random_model(tiny_config("llama")))
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it were not installed
    check_refused(
        tmp_path / "model.gguf",
        r"model: expected the package gguf to read model.gguf, got .*; run `pip install gguf`$",
    )


def check_refused(path: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(path), device="cpu", num_kv_blocks=16)
