"""PEFT's folders: which modules have an adapter, its values, and what is refused by name."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mrv1.errors import ConfigError
from mrv1.models import Checkpoint, ModelConfig
from mrv1.models.lora import StoredAdapter, read_adapter
from mrv1.models.lora.settings import VARIANTS, read_settings
from tests.models.adapters import (
    LINEAR,
    merge,
    random_tensors,
    tiny_tensors,
    write_adapter,
    write_tiny,
)
from tests.models.families import expected_logits, save_checkpoint, tiny_checkpoint, tiny_config
from tests.thread_ranks import on_ranks

PROMPT = [(7 * i) % 160 for i in range(20)]
PEFT = importlib.util.find_spec("peft")  # not imported: that takes seconds


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("qwen2")
    tiny_checkpoint(path, "qwen2")
    return path


def read(folder: Path, base: Path, max_rank: int = 64) -> StoredAdapter:
    config = ModelConfig.from_pretrained(base)
    return read_adapter("a", folder, config, Checkpoint.open(base), max_rank=max_rank)


def targeted(**settings: Any) -> list[str]:
    """Return the names that settings give an adapter: layer and module."""
    found = read_settings({"peft_type": "LORA", **settings})
    names = [*LINEAR, "model.embed_tokens", "lm_head"]
    linear = [*LINEAR]
    return [
        name.removeprefix("model.layers.").replace("self_attn.", "").replace("mlp.", "")
        for name in names
        if found.targets(name, is_linear=name in linear)
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"target_modules": ["q_proj", "proj"]}, ["0.q_proj", "1.q_proj"]),
        ({"target_modules": ["embed_tokens", "lm_head"]}, ["model.embed_tokens", "lm_head"]),
        ({"target_modules": ["mlp.up_proj", "attn.q_proj"]}, ["0.up_proj", "1.up_proj"]),
        ({"target_modules": r"model\.layers\.1\..*(q|up)_proj"}, ["1.q_proj", "1.up_proj"]),
        ({"target_modules": "q_proj"}, []),  # an expression matches whole names
        ({"target_modules": ["k_proj"], "layers_to_transform": 1}, ["1.k_proj"]),
        ({"target_modules": ["k_proj"], "layers_to_transform": [0, 7]}, ["0.k_proj"]),
        ({"target_modules": ["k_proj"], "layers_to_transform": []}, ["0.k_proj", "1.k_proj"]),
        (
            {"target_modules": ["k_proj"], "layers_to_transform": [0], "layers_pattern": "layers"},
            ["0.k_proj"],
        ),
        ({"target_modules": ["k_proj"], "layers_to_transform": [0], "layers_pattern": ["h"]}, []),
        (  # a whole name is taken whatever the layers are
            {
                "target_modules": ["model.layers.1.mlp.up_proj", "k_proj"],
                "layers_to_transform": [0],
            },
            ["0.k_proj", "1.up_proj"],
        ),
        ({"target_modules": ["k_proj"], "exclude_modules": ["0.self_attn.k_proj"]}, ["1.k_proj"]),
        ({"target_modules": ["k_proj"], "exclude_modules": r".*\.1\..*"}, ["0.k_proj"]),
        ({"target_modules": ["k_proj", "lm_head"], "modules_to_save": ["lm_head", "0"]},
         ["1.k_proj"]),
    ],
)  # fmt: skip
def test_which_modules_have_an_adapter(settings, expected):
    assert targeted(**settings) == expected


def test_all_linear_is_all_but_the_head():
    assert len(targeted(target_modules="all-Linear")) == len(LINEAR)


def test_the_first_pattern_that_matches_counts_in_the_order_of_the_file():
    found = read_settings(
        {
            "peft_type": "LORA", "target_modules": ["q_proj"], "r": 9, "lora_alpha": 3,
            "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 2, "q_proj": 4, "up_pro": 5},
            "alpha_pattern": {"proj": 7, "q_proj|up_proj": 6, ".*up_proj": 8},
        }
    )  # fmt: skip
    layer = "model.layers.{}.{}"
    q, last, up = (
        layer.format(0, "self_attn.q_proj"), layer.format(1, "self_attn.q_proj"),
        layer.format(0, "mlp.up_proj"),
    )  # fmt: skip
    assert [found.rank(name) for name in (q, last, up)] == [4, 2, 9]
    assert [found.scaling(name) for name in (q, last, up)] == [6 / 4, 3.0, 6 / 9]
    assert found.scaling("model.layers.0.self_attn.k_proj") == 3 / 9


def test_a_stabilized_rank_divides_by_the_root():
    raw = {"peft_type": "LORA", "target_modules": ["q_proj"], "use_rslora": True}
    assert read_settings(raw | {"r": 4, "lora_alpha": 6}).scaling("q_proj") == 3.0
    assert read_settings(raw).scaling("q_proj") == 8 / math.sqrt(8)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_are_those_of_the_file_in_their_dtype(tmp_path, base, file, dtype):
    tensors = tiny_tensors("q_proj", "down_proj", dtype=dtype)
    write_adapter(tmp_path, tensors, file=file, target_modules=["q_proj", "down_proj"])
    adapter = read(tmp_path, base)
    assert (adapter.name, adapter.rank, len(adapter.parts)) == ("a", 4, 4)
    assert adapter.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    for name, part in adapter.parts.items():
        assert torch.equal(part.a, tensors[f"{name}.lora_A.weight"])
        assert torch.equal(part.b, tensors[f"{name}.lora_B.weight"])
        assert (part.scaling, part.rank, part.a.dtype) == (2.0, 4, dtype)


def test_a_fused_module_is_its_parts(tmp_path):
    tiny_checkpoint(tmp_path / "base", "phi3")
    name = "model.layers.1.self_attn.qkv_proj"
    tensors = random_tensors({name: (3, 64, 256)})
    write_adapter(tmp_path / "a", tensors, target_modules=[name], r=3)
    parts = read(tmp_path / "a", tmp_path / "base").parts
    b, start = tensors[f"{name}.lora_B.weight"], 0
    for letter, size in (("q", 128), ("k", 64), ("v", 64)):
        part = parts[f"model.layers.1.self_attn.{letter}_proj"]
        assert torch.equal(part.a, tensors[f"{name}.lora_A.weight"])
        assert torch.equal(part.b, b[start : start + size])
        start += size


def test_pinned_values_lie_as_a_device_has_them(tmp_path, base, monkeypatch):
    """Else copies go through memory that is not pinned, and the host waits for the device."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # there is no GPU
    write_tiny(tmp_path, "q_proj", "down_proj")
    plain = read(tmp_path, base)
    for dtype in (torch.float32, torch.bfloat16):
        pinned = plain.pinned(dtype)
        assert pinned.parts.keys() == plain.parts.keys()
        for name, part in plain.parts.items():
            own = pinned.parts[name]
            assert own.a.is_contiguous()
            assert own.b.T.is_contiguous()
            assert torch.equal(own.a, part.a.to(dtype))
            assert torch.equal(own.b, part.b.to(dtype))
            assert own.scaling == part.scaling


def test_ranks_have_the_parts_of_their_weights(tmp_path, base):
    """Each rank's product is its part of the whole: of outputs, or of a sum over inputs."""
    sizes = {"model.embed_tokens": (4, 160, 64), "lm_head": (4, 64, 160)}
    tensors = random_tensors(sizes) | tiny_tensors("proj")
    names = [*sizes, *(f"{each}_proj" for each in ("q", "k", "v", "o", "gate", "up", "down"))]
    write_adapter(tmp_path, tensors, target_modules=names)
    whole, config = read(tmp_path, base), ModelConfig.from_pretrained(base)
    assert whole.parts.keys() == {*LINEAR, *sizes}
    for size in (1, 2, 4):  # of 2 KV heads: with 4 ranks, two have the same one
        found = on_ranks(size, lambda parallel: whole.of_rank(config, parallel))
        for name, part in whole.parts.items():
            parts = [each.parts[name] for each in found]
            if name.endswith(("k_proj", "v_proj")):
                parts = parts[:: max(size // 2, 1)]
            if name == "model.embed_tokens":
                assert torch.equal(torch.cat([each.a for each in parts], dim=1), part.a)
            elif name.endswith(("o_proj", "down_proj")):
                assert torch.equal(torch.cat([each.a for each in parts], dim=1), part.a)
                assert all(torch.equal(each.b, part.b) for each in parts)
            else:
                assert torch.equal(torch.cat([each.b for each in parts]), part.b)


# --- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_refused_by_name(tmp_path, base, name):
    write_tiny(tmp_path, "q_proj", **{name: ["a"] if name == "target_parameters" else True})
    with pytest.raises(ConfigError, match=rf"adapter 'a' .*{name}: expected none, as mrv1 lacks"):
        read(tmp_path, base)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type: expected 'LORA', got 'IA3'"),
        ({"peft_type": None}, "peft_type: expected 'LORA', got None"),
        ({"task_type": "SEQ_CLS"}, "task_type: expected 'CAUSAL_LM', got 'SEQ_CLS'"),
        ({"r": 0}, "r: expected an integer >= 1, got 0"),
        ({"r": True}, "r: expected an integer >= 1, got True"),
        ({"lora_alpha": "8"}, "lora_alpha: expected a finite number, got '8'"),
        ({"lora_alpha": 10**400}, "lora_alpha: expected a finite number, got 1000"),
        ({"use_rslora": 1}, "use_rslora: expected true or false, got 1"),
        ({"rank_pattern": {"q_proj": 2.0}}, "rank_pattern: expected an integer >= 1, got"),
        ({"alpha_pattern": {"(": 2}}, "alpha_pattern: expected regular expressions"),
        ({"alpha_pattern": {"(?i)Q_proj": 2}}, "alpha_pattern: expected regular expressions"),
        ({"alpha_pattern": [1]}, "alpha_pattern: expected values by patterns of names"),
        ({"target_modules": None}, "target_modules: expected a list of names or a regular"),
        ({"target_modules": "("}, "target_modules: expected regular expressions"),
        ({"target_modules": [1]}, "target_modules: expected a list of names or a regular"),
        ({"target_modules": ["x_proj"]}, "target_modules: expected modules of the model"),
        ({"modules_to_save": ["("]}, "modules_to_save: expected regular expressions"),
        ({"modules_to_save": ["(?i)X"]}, "modules_to_save: expected regular expressions"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform: expected indices of layers"),
        ({"layers_pattern": "h"}, "layers_to_transform: expected layers with layers_pattern"),
        (
            {"target_modules": ".*q_proj", "layers_to_transform": 0},
            "layers_to_transform: expected none where target_modules is a pattern",
        ),
        ({"bias": "some"}, "bias: expected 'none', 'all' or 'lora_only', got 'some'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: expected an adapter of the"),
        ({"use_new_lora": {"a": 1}}, "use_new_lora: expected no setting that mrv1 does not know"),
        ({"r": 128}, "expected a rank of at most 64 .max_lora_rank., got 128; raise max_lora"),
        ({"rank_pattern": {"q_proj": 65}}, "expected a rank of at most 64 .*, got 65"),
    ],
)
def test_settings_that_are_wrong_or_not_served(tmp_path, base, settings, message):
    given = {"target_modules": ["q_proj"]} | settings
    write_adapter(tmp_path, tiny_tensors("q_proj"), **given)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, base)


def test_settings_without_effect_are_taken(tmp_path, base):
    write_tiny(
        tmp_path, "q_proj", lora_dropout=0.1, fan_in_fan_out=True, revision="x", eva_config=None,
        use_new_lora=None, init_lora_weights="gaussian", use_dora=False, peft_version="9",
    )  # fmt: skip
    assert len(read(tmp_path, base).parts) == 2


def test_each_wrong_tensor_is_named(tmp_path, base):
    tensors = tiny_tensors("q_proj", "k_proj")
    q = "model.layers.0.self_attn.q_proj"
    tensors[f"{q}.lora_A.weight"] = torch.ones(5, 64)
    tensors[f"{q}.lora_magnitude_vector"] = torch.ones(128)
    tensors[f"{q}.lora_B.weight"] = torch.ones(128, 4, dtype=torch.int32)
    del tensors["model.layers.1.self_attn.k_proj.lora_B.weight"]
    tensors["model.layers.2.self_attn.q_proj.lora_A.weight"] = torch.ones(4, 64)
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.ones(96)
    write_adapter(tmp_path, tensors, target_modules=["q_proj", "k_proj"])
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, base)
    for line in (
        "6 problems",
        f"{q}.lora_A.weight: expected shape [4, 64], got [5, 64]",
        f"{q}.lora_B.weight: expected a floating dtype, got torch.int32",
        "model.layers.1.self_attn.k_proj.lora_B.weight: missing",
        f"{q}.lora_magnitude_vector: surplus, the settings name no such adapter",
        "model.layers.2.self_attn.q_proj.lora_A.weight: surplus",
        "model.layers.0.mlp.up_proj.bias: surplus, the model has no such tensor",
    ):
        assert line in str(caught.value)


def test_an_adapter_of_another_model_is_one_short_error(tmp_path, base):
    tiny_checkpoint(tmp_path / "other", "llama", hidden_size=32, num_hidden_layers=4)
    names = [name.replace("layers.", f"layers.{2 * i}") for i in range(2) for name in LINEAR]
    tensors = random_tensors(dict.fromkeys([*LINEAR, *names], (4, 32, 64)))
    write_adapter(tmp_path / "a", tensors, target_modules="all-linear")
    with pytest.raises(ConfigError, match="is it of another model") as caught:
        read(tmp_path / "a", base)
    assert str(caught.value).count("\n") < 12


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "expected a folder with adap"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "expected a readable"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "expected a JSON obj"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "found neither"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"abc"), "not a reada"),
        (
            lambda folder: (folder / "adapter_model.safetensors").rename(
                folder / "adapter_model.bin"
            ),
            "adapter_model.bin: expected tensors alone",
        ),
    ],
)
def test_damaged_folders(tmp_path, base, spoil, message):
    write_tiny(tmp_path, "q_proj")
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=f"adapter 'a' .*{message}"):
        read(tmp_path, base)


def test_no_code_of_a_pickle_runs(tmp_path, base):
    write_tiny(tmp_path, "q_proj")
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save({"base_model.model.x": Path("x")}, tmp_path / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model.bin: expected tensors alone"):
        read(tmp_path, base)
    torch.save({"x": torch.ones(1)}, tmp_path / "adapter_model.bin")
    with pytest.raises(ConfigError, match="expected names that begin with"):
        read(tmp_path, base)


@pytest.mark.parametrize("path", ["~nobody-has-this-name/a", "a\0b", "/"])
def test_no_folder(base, path):
    with pytest.raises(ConfigError, match="adapter 'a'"):
        read(Path(path), base)


def test_the_models_own_tensors_must_be_as_they_are(tmp_path, base):
    """PEFT stores the embedding beside its adapter, modules_to_save and biases."""
    own = Checkpoint.open(base)
    held = dict(own.read(own.scan().tensors))
    q = "model.layers.0.self_attn.q_proj"
    tensors = random_tensors({"model.embed_tokens": (4, 160, 64)}) | {
        "model.embed_tokens.base_layer.weight": held["model.embed_tokens.weight"].double(),
        "lm_head.weight": held["lm_head.weight"],
        f"{q}.bias": held[f"{q}.bias"].bfloat16(),
    }
    settings = {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"], "bias": "all"}
    write_adapter(tmp_path, tensors, **settings)
    assert read(tmp_path, base).parts.keys() == {"model.embed_tokens"}
    for name in ("model.embed_tokens.base_layer.weight", "lm_head.weight", f"{q}.bias"):
        write_adapter(tmp_path, tensors | {name: tensors[name] + 1}, **settings)
        with pytest.raises(ConfigError, match=rf"{name}: expected the model's own values"):
            read(tmp_path, base)


def test_experts_are_refused_by_name(tmp_path):
    tiny_checkpoint(tmp_path / "base", "qwen3_moe")
    write_tiny(tmp_path / "attention", "q_proj", "o_proj")
    assert len(read(tmp_path / "attention", tmp_path / "base").parts) == 4
    write_tiny(tmp_path / "all", "down_proj")
    with pytest.raises(ConfigError, match=r"down_proj \(and 7 more modules\): expected no adap"):
        read(tmp_path / "all", tmp_path / "base")


def test_merged_by_hand(tmp_path, base):
    """The helper of other tests, against this module's reader."""
    tensors = tiny_tensors("up_proj") | random_tensors({"model.embed_tokens": (4, 160, 64)})
    write_adapter(tmp_path / "a", tensors, target_modules=["up_proj", "embed_tokens"])
    merged = Checkpoint.open(merge(base, tmp_path / "a", tmp_path / "merged"))
    own, values = Checkpoint.open(base), dict(merged.read(merged.scan().tensors))
    before = dict(own.read(own.scan().tensors))
    for name, part in read(tmp_path / "a", base).parts.items():
        product = part.scaling * part.b @ part.a
        product = product.T if name == "model.embed_tokens" else product
        torch.testing.assert_close(
            values.pop(f"{name}.weight"), before.pop(f"{name}.weight") + product
        )
    assert all(torch.equal(values[name], before[name]) for name in before)


# --- PEFT itself --------------------------------------------------------------------------------

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.skipif(PEFT is None, reason="make test installs peft")
@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of what it saves, and why
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"target_modules": ALL}),
        ("llama", {"target_modules": "all-linear", "use_rslora": True, "lora_alpha": 3}),
        (
            "qwen3",
            {
                "target_modules": [*ALL, "embed_tokens", "lm_head"],
                "rank_pattern": {"gate_proj": 2, r"layers\.1\..*": 6, "q_proj": 3},
                "alpha_pattern": {"embed_tokens": 5, "self_attn.*": 7, "v_proj": 11},
            },
        ),
        (
            "qwen2",
            {"target_modules": ["q_proj", "model.layers.0.mlp.up_proj"], "bias": "lora_only",
             "layers_to_transform": [1], "layers_pattern": "layers"},
        ),
        ("qwen2", {"target_modules": r".*\.(q|up)_proj", "exclude_modules": r".*\.0\..*"}),
        ("qwen3", {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"]}),
        ("gemma3_text", {"target_modules": ["embed_tokens", "gate_proj"]}),
        ("phi3", {"target_modules": "all-linear", "rank_pattern": {"qkv_proj": 7}}),
        ("glm4", {"target_modules": "all-linear"}),
        ("granitemoehybrid", {"target_modules": "all-linear"}),
        ("qwen3_moe", {"target_modules": ["q_proj", "o_proj"]}),
    ],
)  # fmt: skip
def test_values_and_places_are_peft_s(tmp_path, family, settings):
    """The products, added to transformers' weights, give the logits of PEFT's own forward."""
    import peft

    model = save_checkpoint(tmp_path / "base", tiny_config(family)).double()
    lora = peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 8} | settings)
    adapted = peft.get_peft_model(copy.deepcopy(model), lora, autocast_adapter_dtype=False).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3, generator=generator)
    adapted.save_pretrained(tmp_path / "a")
    if "rank_pattern" in settings:  # PEFT sorts what it writes
        raw = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
        raw |= {name: settings.get(name, {}) for name in ("rank_pattern", "alpha_pattern")}
        (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(raw))
    expected = expected_logits(adapted, PROMPT)
    adapter = read(tmp_path / "a", tmp_path / "base")
    targets = ModelConfig.from_pretrained(tmp_path / "base")
    assert not torch.allclose(expected, expected_logits(model, PROMPT))
    _add(model, adapter, targets)
    torch.testing.assert_close(expected_logits(model, PROMPT), expected, rtol=0, atol=1e-9)


@torch.no_grad()
def _add(model: torch.nn.Module, adapter: StoredAdapter, config: ModelConfig) -> None:
    """Add an adapter's products to the weights of transformers' model."""
    from mrv1.models.lora.reading import modules_of

    for own, module in modules_of(config).items():
        for name, rows in module.rows.items():
            if name not in adapter.parts:
                continue
            part = adapter.parts[name]
            product = part.scaling * part.b.double() @ part.a.double()
            weight = model.get_submodule(own).weight
            weight[rows] += product.T if name == "model.embed_tokens" else product
