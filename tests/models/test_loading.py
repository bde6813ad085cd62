"""Each weight is loaded into its place, and all problems of a checkpoint are in one message."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from mrv1.errors import ConfigError
from mrv1.kernels.registry import select_ops
from mrv1.models import Checkpoint, ModelConfig, load_model
from mrv1.models.loading import load_weights
from mrv1.models.parallel import ParallelContext
from mrv1.models.weights import ModelWeights, checkpoint_tensors
from tests.models.families import EXPERTS, FAMILIES, save_checkpoint, tiny_checkpoint, tiny_config

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"


def load(directory: Path, dtype: torch.dtype = torch.float32) -> ModelWeights:
    config = ModelConfig.from_pretrained(directory)
    return load_weights(
        Checkpoint.at(directory), config, device="cpu", dtype=dtype, progress=False
    )


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a safetensors file."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_index(directory: Path, change: Callable[[dict[str, str]], None]) -> None:
    """Change the weight map of a sharded checkpoint."""
    content = json.loads((directory / INDEX).read_text())
    change(content["weight_map"])
    (directory / INDEX).write_text(json.dumps(content))


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """Return a tiny checkpoint in one file."""
    tiny_checkpoint(tmp_path, "qwen3")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Return the same checkpoint in several shards; the last shard has several tensors."""
    save_checkpoint(tmp_path, tiny_config("qwen3"), max_shard_size="120KB")
    *shards, last = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) >= 2
    assert len(load_file(last)) >= 2
    return tmp_path


RENAMED = {
    "glm4": {
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
    "granitemoehybrid": {"shared_mlp.output_linear": "mlp.down_proj"},
}
"""Names of a layer's modules by family, and what other families with such modules call them."""


def expected_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the model's tensors under their usual names; fused ones in parts, some norms + 1."""
    tensors: dict[str, torch.Tensor] = {}
    config = model.config
    for name, parameter in model.named_parameters():
        layer = re.fullmatch(r"(model\.layers\.\d+)\.(.+)\.(weight|bias)", name)
        module = name if layer is None else layer[2]
        parts, rows = [module], [len(parameter)]
        if module == "self_attn.qkv_proj":
            heads = (config.num_attention_heads, *[config.num_key_value_heads] * 2)
            parts = [f"self_attn.{part}_proj" for part in "qkv"]
            rows = [num_heads * config.head_dim for num_heads in heads]
        elif module in ("mlp.gate_up_proj", "shared_mlp.input_linear"):
            parts, rows = ["mlp.gate_proj", "mlp.up_proj"], [len(parameter) // 2] * 2
        is_norm = config.model_type.startswith("gemma") and "norm" in name
        stored = parameter.detach() + 1 if is_norm else parameter.detach()
        for part, values in zip(parts, stored.split(rows), strict=True):
            usual = RENAMED.get(config.model_type, {}).get(part, part)
            tensors[name if layer is None else f"{layer[1]}.{usual}.{layer[3]}"] = values
    return tensors


@pytest.mark.parametrize("family", [each for each in FAMILIES if each not in EXPERTS])
@pytest.mark.parametrize("max_shard_size", ["1GB", "60KB"])
def test_every_tensor_is_loaded(tmp_path: Path, family: str, max_shard_size: str) -> None:
    config = tiny_config(family, tie_word_embeddings=family in ("qwen2", "ernie4_5"))
    model = save_checkpoint(tmp_path, config, max_shard_size=max_shard_size)
    loaded = checkpoint_tensors(ModelConfig.from_pretrained(tmp_path), load(tmp_path))
    expected = expected_tensors(model)
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, expected[name]), name


def test_projections_are_fused_in_order(single: Path) -> None:
    layer = load(single).layers[1]
    file = load_file(single / "model.safetensors")
    parts = [file[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"]
    assert torch.equal(layer.qkv.plain, torch.cat(parts))
    parts = [file[f"model.layers.1.mlp.{p}_proj.weight"] for p in ("gate", "up")]
    assert torch.equal(layer.gate_up.plain, torch.cat(parts))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_converted(single: Path, dtype: torch.dtype) -> None:
    weights = load(single, dtype)
    file = load_file(single / "model.safetensors")
    assert weights.layers[0].o.dtype == dtype
    assert torch.equal(weights.embed, file[EMBED].to(dtype))


def test_weights_own_their_memory(single: Path) -> None:
    """No tensor points into the memory-mapped file after loading."""
    weights = load(single)
    before = weights.embed.clone()
    file = single / "model.safetensors"
    file.write_bytes(b"\0" * file.stat().st_size)
    assert torch.equal(weights.embed, before)


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_loading_never_needs_twice_the_memory_of_the_model(
    tmp_path: Path, device: torch.device
) -> None:
    """At its peak, loading needs the memory of the weights and of one tensor in transfer."""
    save_checkpoint(tmp_path, tiny_config("qwen3", hidden_size=512, num_hidden_layers=8))
    config = ModelConfig.from_pretrained(tmp_path)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    checkpoint = Checkpoint.at(tmp_path)
    weights = load_weights(checkpoint, config, device=device, dtype=torch.bfloat16, progress=False)
    peak = torch.cuda.max_memory_allocated(device) - before
    after = torch.cuda.memory_allocated(device) - before
    largest = max(t.numel() for t in checkpoint_tensors(config, weights).values())
    assert peak <= after + 4 * largest + 2**16  # a float32 tensor in transfer, and rounding


def test_load_model_sets_device_and_dtype(single: Path) -> None:
    model = load_model(
        single,
        device="cpu",
        dtype=torch.bfloat16,
        ops=select_ops("reference"),
        progress=False,
    )
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.bfloat16)
    logits = model.compute_logits(torch.zeros(3, 64, dtype=torch.bfloat16))
    assert (logits.dtype, logits.shape) == (torch.float32, (3, 160))


def test_float64_logits_stay_float64(single: Path) -> None:
    model = load_model(
        single,
        device="cpu",
        dtype=torch.float64,
        ops=select_ops("reference"),
        progress=False,
    )
    assert model.compute_logits(torch.zeros(1, 64, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("progress", [True, False])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_only_if_stderr_is_a_terminal(
    single: Path,
    progress: bool,
    is_terminal: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = ModelConfig.from_pretrained(single)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    capsys.readouterr()
    load_weights(
        Checkpoint.at(single), config, device="cpu", dtype=torch.float32, progress=progress
    )
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("Loading weights" in captured.err) == (progress and is_terminal)


# --- tied embeddings, and tensors that are not weights ----------------------------------------


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """A checkpoint with tied embeddings, stored once."""
    tiny_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    assert HEAD not in load_file(tmp_path / "model.safetensors")
    return tmp_path


def test_tied_head_is_the_embedding(tied: Path) -> None:
    weights = load(tied)
    assert weights.lm_head.plain is weights.embed


def test_tied_head_may_be_stored_too(tied: Path) -> None:
    rewrite(tied / "model.safetensors", lambda t: t.update({HEAD: t[EMBED].clone()}))
    weights = load(tied)
    assert weights.lm_head.plain is weights.embed


@pytest.mark.parametrize("shape", [(160, 64), (160, 32)])
def test_tied_head_that_differs_is_refused(tied: Path, shape: tuple[int, int]) -> None:
    rewrite(tied / "model.safetensors", lambda t: t.update({HEAD: torch.zeros(shape)}))
    with pytest.raises(ConfigError, match=f"{HEAD}: tie_word_embeddings is true, but it differs"):
        load(tied)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_tied_head_stored_alone_is_the_embedding(tied: Path, sharded: bool) -> None:
    """As ``save_model`` of safetensors writes it, and as transformers reads it; of ranks too."""
    model = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float32)
    expected = model.get_input_embeddings().weight.detach().clone()
    save_model(model, str(tied / "model.safetensors"))
    stored = load_file(tied / "model.safetensors")
    assert HEAD in stored
    assert EMBED not in stored
    if sharded:
        (tied / "model.safetensors").unlink()
        files = dict.fromkeys(stored, "b.safetensors") | {HEAD: "a.safetensors"}
        for file in set(files.values()):
            save_file({n: t for n, t in stored.items() if files[n] == file}, tied / file)
        (tied / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    again = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float32)
    assert torch.equal(again.get_input_embeddings().weight, expected)
    weights = load(tied)
    assert weights.lm_head.plain is weights.embed
    assert torch.equal(weights.embed, expected)
    config = ModelConfig.from_pretrained(tied)
    parts = [
        load_weights(
            Checkpoint.at(tied),
            config,
            device="cpu",
            dtype=torch.float32,
            progress=False,
            parallel=rank,
        ).embed
        for rank in (
            ParallelContext(rank=i, size=2, all_reduce=lambda x: x, all_gather=lambda x: x)
            for i in range(2)
        )
    ]
    assert torch.equal(torch.cat(parts)[: len(expected)], expected)


def test_a_head_that_is_not_tied_must_be_stored(tmp_path: Path) -> None:
    """transformers would draw it at random, with a warning."""
    tiny_checkpoint(tmp_path, "qwen2", tie_word_embeddings=False)
    rewrite(tmp_path / "model.safetensors", lambda t: t.pop(HEAD))
    with pytest.raises(ConfigError, match=f": {HEAD}: missing$"):
        load(tmp_path)
    tiny_checkpoint(tmp_path, "qwen2", tie_word_embeddings=False)
    rewrite(tmp_path / "model.safetensors", lambda t: t.pop(EMBED))
    with pytest.raises(ConfigError, match=f": {EMBED}: missing$"):
        load(tmp_path)


def test_untied_head_must_be_stored(single: Path) -> None:
    rewrite(single / "model.safetensors", lambda t: t.pop(HEAD))
    with pytest.raises(ConfigError, match=f"{HEAD}: missing"):
        load(single)


def test_rope_buffers_are_ignored(single: Path) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    rewrite(single / "model.safetensors", lambda t: t.update(buffer))
    load(single)


# --- all problems in one message --------------------------------------------------------------


def test_all_wrong_tensors_are_in_one_message(single: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[Q_PROJ]
        tensors["model.norm.bias"] = torch.zeros(64)
        tensors[EMBED] = torch.zeros(161, 64)
        tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.int8)

    rewrite(single / "model.safetensors", change)
    with pytest.raises(ConfigError, match="4 problems") as caught:
        load(single)
    for line in (
        f"{Q_PROJ}: missing",
        "model.norm.bias: surplus, the model has no such tensor",
        f"{EMBED}: expected shape [160, 64], got [161, 64]",
        "model.norm.weight: expected dtype F64, F32, F16, BF16, got I8",
    ):
        assert f"  - {line}\n" in str(caught.value) + "\n"
    assert str(single) in str(caught.value)


@pytest.mark.parametrize("keep_bytes", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(single: Path, keep_bytes: int) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep_bytes])
    with pytest.raises(ConfigError, match=r"model\.safetensors: not a readable safetensors file"):
        load(single)


def test_a_checkpoint_without_weights_is_refused(single: Path) -> None:
    (single / "model.safetensors").unlink()
    message = "weights: expected model.safetensors or model.safetensors.index.json, got "
    with pytest.raises(ConfigError, match=message + "none"):
        load(single)
    (single / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=message + "pytorch_model.bin"):
        load(single)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", f"{INDEX}: expected a readable JSON file"),
        ("[]", f"{INDEX}: expected a JSON object, got list"),
        ("{}", f"{INDEX}: expected weight_map to name a file"),
        ('{"weight_map": {"a": 1}}', f"{INDEX}: expected weight_map to name a file"),
        ('{"weight_map": {"a": "../b.safetensors"}}', f"{INDEX}: expected weight_map to name"),
    ],
)
def test_a_corrupt_index_is_refused(sharded: Path, content: str, message: str) -> None:
    (sharded / INDEX).write_text(content)
    with pytest.raises(ConfigError, match=message):
        load(sharded)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=f"{shard.name}: named in {INDEX}, but there is no"):
        load(sharded)


def test_tensors_on_which_index_and_shards_disagree_are_named(sharded: Path) -> None:
    first, *_, last = sorted(sharded.glob("model-*.safetensors"))
    moved = next(iter(load_file(last)))
    edit_index(sharded, lambda m: m.update({moved: first.name}))
    with pytest.raises(ConfigError, match="2 problems") as caught:
        load(sharded)
    assert f"{moved}: {INDEX} places it in {first.name}, which does not" in str(caught.value)
    assert f"{moved}: held by {last.name}, but {INDEX} does not" in str(caught.value)


def test_problems_of_every_kind_are_in_one_message(sharded: Path) -> None:
    """A missing shard, a truncated shard and a tensor that the index lacks, and nothing else."""
    lost, *_, cut, last = sorted(sharded.glob("model-*.safetensors"))
    lost.unlink()
    cut.write_bytes(cut.read_bytes()[:-8])
    forgotten = next(iter(load_file(last)))
    edit_index(sharded, lambda m: m.pop(forgotten))
    with pytest.raises(ConfigError, match="4 problems") as caught:
        load(sharded)
    for part in (
        f"{lost.name}: named in",
        f"{cut.name}: not a readable",
        f"{forgotten}: held by",
        f"{forgotten}: missing",
    ):
        assert part in str(caught.value)


def test_a_dtype_that_is_no_weight_dtype_is_refused(single: Path) -> None:
    with pytest.raises(ConfigError, match=r"dtype: expected one of .*, got torch\.int32"):
        load(single, torch.int32)
