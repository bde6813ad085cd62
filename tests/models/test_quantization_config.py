"""Which modules a checkpoint quantizes, against the library's own choice; what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from compressed_tensors.utils.match import match_named_modules, match_targets
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mrv1.errors import ConfigError
from mrv1.models import ModelConfig
from mrv1.models.quantization import read_quantization
from tests.models.families import tiny_checkpoint, tiny_config
from tests.models.quantized import SCHEMES, group, save_compressed
from tests.models.test_quantized_checkpoints import load
from tests.thread_ranks import on_ranks

FP8 = group(8, "float", "channel")
INT4 = {**group(4, "int", "group", group_size=32), "format": "pack-quantized"}

# --- which modules ---

with torch.device("meta"):
    MODEL = AutoModelForCausalLM.from_config(tiny_config("llama"))
TARGETS = [
    "Linear", "Module", "Embedding", "LlamaMLP", "lm_head", "model.embed_tokens",
    "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.o_proj", "mlp.up_proj",
    "re:mlp", "re:.*mlp", "re:model.layers.0", r"re:.*layers\.1\.", "re:.*_proj$", "re:.*q_proj",
    "re:lm", "re:.*(gate|up)_proj",
]  # fmt: skip
NAMES = st.lists(st.sampled_from(TARGETS), max_size=3)


def library_groups(targets: list[list[str]], ignore: list[str]) -> dict[str, int]:
    """Return the group of each module that the library quantizes."""
    group_of = {target: index for index, each in enumerate(targets) for target in each}
    return {
        name: group_of[match_targets(name, module, group_of)[0]]
        for name, module in match_named_modules(MODEL, group_of, ignore)
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
    }


@given(targets=st.lists(NAMES, min_size=1, max_size=3), ignore=NAMES)
def test_modules_are_matched_as_the_library_matches_them(
    targets: list[list[str]], ignore: list[str]
):
    """Names, patterns from the beginning of a name, classes; the order of targets decides."""
    schemes = [dict(INT4["weights"], group_size=32 * (i + 1)) for i in range(len(targets))]
    groups = {
        f"group_{i}": {**INT4, "targets": each, "weights": scheme}
        for i, (each, scheme) in enumerate(zip(targets, schemes, strict=True))
    }
    raw = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ignore}
    quantization = read_quantization({"quantization_config": raw}, {})
    expected = library_groups(targets, ignore)
    for name, module in MODEL.named_modules():
        if isinstance(module, torch.nn.Linear):
            form = quantization.module(name)
            assert (None if form is None else form.inputs // 32 - 1) == expected.get(name), name
    for name, kind in (("lm_head", "Linear"), ("model.embed_tokens", "Embedding")):
        assert quantization.holds(name, kind) == (name in expected)


def test_names_of_a_vision_language_model_are_those_of_its_checkpoint():
    """Its layers begin with ``model.language_model.`` there."""
    raw = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {**INT4, "targets": ["Linear"]}},
        "ignore": ["re:.*visual", r"re:model\.language_model\.layers\.0\.", "lm_head"],
    }

    class Header:
        dtype = "BF16"

    headers = {"model.language_model.layers.0.mlp.up_proj.weight": Header()}
    quantization = read_quantization({"quantization_config": raw}, headers)
    assert quantization.module("model.layers.0.mlp.up_proj") is None
    assert quantization.module("model.layers.1.mlp.up_proj") is not None


# --- what is refused ---


def config_of(weights: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Return a ``quantization_config``: of a group, or its settings, with some of them changed."""
    each = {**INT4, "weights": {**INT4["weights"], **(weights or {})}}
    each |= settings.pop("group", {})
    raw = {"quant_method": "compressed-tensors", "config_groups": {"group_0": each}}
    return {**raw, "ignore": ["lm_head"], **settings}


ONE = r"quantization_config\.config_groups\.group_0"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "quip"}, r"quantization_config\.quant_method: expected one of .*'quip'"),
    ({}, r"quantization_config\.quant_method: expected one of .*, got None"),
    (config_of(format="nvfp4-pack-quantized", group={"format": None}),
     rf"{ONE}\.format: expected one of .*, got 'nvfp4-pack-quantized'"),
    (config_of(group={"format": "marlin-24"}), rf"{ONE}\.format: expected one of .*'marlin-24'"),
    (config_of(sparsity_config={"format": "sparse-24-bitmask"}),
     r"sparsity_config\.format: expected 'dense', got 'sparse-24-bitmask'"),
    (config_of(transform_config={"config_groups": {"u": {}}}), "transform_config: expected none"),
    (config_of(quantization_status="calibration"), "quantization_status: expected one of 'compre"),
    ({"quant_method": ["fp8"]}, r"quantization_config\.quant_method: expected one of .*\['fp8'\]"),
    (config_of({"strategy": "block", "block_structure": "axb"}), "block_structure: expected two"),
    (config_of(group={"weights": None}), rf"{ONE}\.weights: expected a scheme, got None"),
    (config_of(group={"output_activations": {"num_bits": 8}}), rf"{ONE}\.output_activations: exp"),
    (config_of(group={"targets": "Linear"}), rf"{ONE}\.targets: expected a list of names"),
    (config_of(group={"targets": ["re:(("]}), r"expected a regular expression, got '\(\("),
    (config_of({"num_bits": 3}), rf"{ONE}\.weights\.num_bits: expected one of 4, 8, got 3"),
    (config_of({"num_bits": True}), rf"{ONE}\.weights\.num_bits: expected one of 4, 8, got True"),
    (config_of({"type": "float"}), rf"{ONE}\.weights\.type: expected 'int' in the format pack-"),
    (config_of({"group_size": 0}), rf"{ONE}\.weights\.group_size: expected a positive integer"),
    (config_of({"strategy": "attn_head"}), rf"{ONE}\.weights\.strategy: expected one of 'tensor'"),
    (config_of({"strategy": "block"}), rf"{ONE}\.weights\.block_structure: expected two positive"),
    (config_of({"symmetric": "no"}), rf"{ONE}\.weights\.symmetric: expected one of True, False"),
    (config_of(group={"input_activations": {"dynamic": "local"}}),
     rf"{ONE}\.input_activations\.dynamic: expected one of True, False, got 'local'"),
    (config_of(group={"input_activations": {"type": "fp", "dynamic": True}}),
     rf"{ONE}\.input_activations\.type: expected one of 'int', 'float', got 'fp'"),
    (config_of({"dynamic": True}), rf"{ONE}\.weights\.dynamic: expected none, got True"),
    (config_of({"strategy": "channel", "actorder": "group"}),
     rf"{ONE}\.weights\.actorder: expected"),
    (config_of({"num_bits": 4, "type": "float"}, group={"format": "float-quantized"}),
     rf"{ONE}\.weights\.num_bits: expected one of 8, got 4"),
    (config_of({"num_bits": 8, "type": "float", "symmetric": False},
               group={"format": "naive-quantized"}),
     rf"{ONE}\.weights\.symmetric: expected true for floating-point codes, got False"),
    (config_of(kv_cache_scheme={"type": "int", "num_bits": 8}), "kv_cache_scheme: expected one"),
    (config_of(config_groups={"W4A16": ["Linear"]}), r"config_groups\.W4A16: expected an object"),
    (config_of(ignore=[]), "lm_head: expected full precision"),
    (config_of(group={"targets": ["Embedding"]}), "embed_tokens: expected full precision"),
    (config_of({"group_size": 40}),
     rf"{ONE}\.weights\.group_size: expected a divisor of the 64 inputs of .*q_proj, got 40"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size: expected two posit"),
    (config_of({"group_size": 2}), r"q_proj: expected multiples of 4 inputs .*, got 64 and 2"),
    ({"quant_method": "fp8", "weight_block_size": [128, 21]},
     r"q_proj: expected multiples of 2 inputs and inputs per scale, got 64 and 21"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, r"\.fmt: expected one of 'e4m3', got 'e5m2'"),
    ({"quant_method": "fp8", "activation_scheme": "x"}, r"\.activation_scheme: expected one of"),
    ({"quant_method": "fp8", "modules_to_not_convert": ["a"]}, "lm_head: expected full precision"),
]  # fmt: skip


def write_raw(folder: Path, **settings: Any) -> None:
    """Write a ``config.json`` with further settings."""
    raw = {**tiny_config("llama").to_dict(), "architectures": ["LlamaForCausalLM"], **settings}
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(("raw", "message"), REFUSED)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, raw: dict[str, Any], message: str):
    """Before any tensor is read: there are none."""
    write_raw(tmp_path, quantization_config=raw)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, load_format="dummy")


def test_experts_beside_shared_ones_must_be_in_full_precision(tmp_path: Path):
    raw = {**tiny_config("ernie4_5_moe").to_dict(), "architectures": ["Ernie4_5_MoeForCausalLM"]}
    raw["quantization_config"] = config_of()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"mlp\.experts\.0\.gate_proj: expected full precision"):
        load(tmp_path, load_format="dummy")
    raw.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    message = r"^quantization: (.|\n)*mlp\.experts\.0\.gate_proj: expected full .*; pass None$"
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, load_format="dummy", quantization="fp8")


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("phi3", ["self_attn.qkv_proj", "mlp.gate_up_proj"]),
        ("glm4", ["mlp.gate_up_proj"]),
        ("granitemoehybrid", ["shared_mlp.input_linear"]),
    ],
)
def test_several_modules_in_one_must_be_in_full_precision(
    tmp_path: Path, family: str, names: list[str]
):
    """While loading they may be quantized: they are several modules then."""
    tiny_checkpoint(tmp_path, family)
    raw = json.loads((tmp_path / "config.json").read_text())
    load(tmp_path, quantization="fp8")
    raw["quantization_config"] = config_of()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="full precision") as caught:
        load(tmp_path)
    for name in names:
        assert f"model.layers.0.{name}: expected full precision" in str(caught.value)


def test_settings_in_several_places_must_agree(tmp_path: Path):
    """``compression_config`` is the old name; ModelOpt's file is beside ``config.json``."""
    quantization = config_of()
    write_raw(tmp_path, compression_config=quantization)
    own = ModelConfig.from_pretrained(tmp_path).quantization
    write_raw(tmp_path, quantization_config=quantization, compression_config=quantization)
    assert ModelConfig.from_pretrained(tmp_path).quantization == own
    other = config_of({"group_size": 16})
    write_raw(tmp_path, quantization_config=quantization, compression_config=other)
    with pytest.raises(ConfigError, match="compression_config: expected the same as quantization"):
        ModelConfig.from_pretrained(tmp_path)
    write_raw(tmp_path, quantization_config=quantization)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}}))
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json: expected the same as quant"):
        ModelConfig.from_pretrained(tmp_path)
    write_raw(tmp_path)
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json\.quant_method: expected one of"):
        ModelConfig.from_pretrained(tmp_path)


Q = "model.layers.0.self_attn.q_proj"
Stored = dict[str, torch.Tensor]


def without(name: str) -> Callable[[Stored], None]:
    return lambda stored: stored.pop(name)


def filled(name: str, value: float, at: int = 0) -> Callable[[Stored], None]:
    def change(stored: Stored) -> None:
        stored[name].flatten()[at] = value

    return change


def replaced(name: str, new: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Stored], None]:
    return lambda stored: stored.update({name: new(stored[name]).clone()})


BROKEN: dict[str, tuple[str, Callable[[Stored], None], str]] = {
    "missing-scale": ("int4-group", without(f"{Q}.weight_scale"), r"weight_scale: missing"),
    "missing-zeros": (
        "int4-group-zeros", without(f"{Q}.weight_zero_point"), "zero_point: missing",
    ),
    "nan": ("int4-group", filled(f"{Q}.weight_scale", torch.nan), "weight_scale: expected finite"),
    "zero": ("fp8-block", filled(f"{Q}.weight_scale", 0.0), r"got 0 \(1 of 1\)"),
    "infinite": ("fp8-channel", filled(f"{Q}.weight_scale", torch.inf, 5), r"inf \(1 of 128\)"),
    "inputs": ("fp8-tensor-static", filled(f"{Q}.input_scale", -1.0), "input_scale: expected"),
    "scale-shape": (
        "int4-group", replaced(f"{Q}.weight_scale", lambda t: t[:, :1]),
        r"q_proj.weight_scale: expected shape \[128, 2\], got \[128, 1\]",
    ),
    "scale-dtype": (
        "int4-group", replaced(f"{Q}.weight_scale", torch.Tensor.double),
        "q_proj.weight_scale: expected dtype F32, F16, BF16, got F64",
    ),
    "packed-shape": (
        "int4-group", replaced(f"{Q}.weight_packed", lambda t: t[:, :4]),
        r"q_proj.weight_packed: expected shape \[128, 8\], got \[128, 4\]",
    ),
    "other-shape": ("int4-group", filled(f"{Q}.weight_shape", 32, 1), r"weight_shape: expected"),
    "dense": (
        "fp8-channel", replaced(f"{Q}.weight", torch.Tensor.float),
        "q_proj.weight: expected dtype F8_E4M3, got F32",
    ),
    "surplus": (
        "fp8-channel", lambda stored: stored.update({"lm_head.weight_packed": torch.zeros(1)}),
        "lm_head.weight_packed: surplus",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_tensors_are_refused_by_name(tmp_path: Path, case: str):
    """Before codes are read: scales are small, and read first."""
    scheme, change, message = BROKEN[case]
    save_compressed(tmp_path, tiny_config("llama"), {"group_0": SCHEMES[scheme]})
    stored = load_file(tmp_path / "model.safetensors")
    change(stored)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_two_names_of_one_scale_are_refused(tmp_path: Path):
    tiny_checkpoint(tmp_path, "llama")
    raw = json.loads((tmp_path / "config.json").read_text())
    write_raw(tmp_path, **raw, quantization_config={"quant_method": "fp8"})
    stored = load_file(tmp_path / "model.safetensors")
    for name in ("weight_scale", "weight_scale_inv"):
        stored[f"{Q}.{name}"] = torch.ones(1)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"{Q}.weight_scale_inv: stored twice"):
        load(tmp_path)


def test_groups_cut_by_ranks_are_refused_by_name(tmp_path: Path):
    save_compressed(tmp_path, tiny_config("llama"), {"group_0": SCHEMES["int4-group"]})
    message = "ranks with whole groups of 32 of the 96 inputs of .*down_proj, got inputs 0 to 48"

    def refused(parallel: Any) -> None:
        with pytest.raises(ConfigError, match=message if parallel.rank == 0 else "48 to 96"):
            load(tmp_path, parallel)

    on_ranks(2, refused)


def test_settings_of_older_versions_of_the_library_are_read():
    """As in the configuration of neuralmagic's first FP8 and INT8 models."""
    old = {"quantization_status": "frozen", "sparsity_config": {"format": "dense"}}
    raw = {**config_of(), **old, "global_compression_ratio": 1.24, "kv_cache_scheme": None}
    for setting in ("quantization_config", "compression_config"):
        quantization = read_quantization({setting: raw}, {})
        assert quantization.module("model.layers.0.mlp.up_proj").code == "int4"


def test_tokens_are_quantized_as_the_library_says():
    """A scale for each token, or, with blocks of 128 inputs, one for 128 inputs of it."""
    for name, kind in (("FP8_DYNAMIC", "token"), ("FP8_BLOCK", "group"), ("W4A16", None)):
        scheme = preset_name_to_scheme(name, ["Linear"]).model_dump(mode="json")
        scheme["format"] = "pack-quantized" if kind is None else "float-quantized"
        raw = {"quant_method": "compressed-tensors", "config_groups": {"group_0": scheme}}
        form = read_quantization({"quantization_config": raw}, {}).module(Q)
        assert form.activations == kind
        assert (
            form.empty(
                [256], 512, rows_per_scale=form.rows, dtype=torch.bfloat16, device="meta"
            ).activations
            == kind
        )


def test_both_lists_of_modules_in_full_precision_count():
    raw = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"], "ignored_layers": [Q]}
    assert read_quantization({"quantization_config": raw}, {}).module(Q) is None
    raw["ignored_layers"] = ["(?i)up_proj"]  # a flag within an expression
    with pytest.raises(ConfigError, match=r"ignored_layers: expected a regular expression, got"):
        read_quantization({"quantization_config": raw}, {})


def test_the_configuration_written_by_the_library_is_read():
    for name, scheme in SCHEMES.items():
        config = QuantizationConfig(
            config_groups={"group_0": {**scheme, "format": None}},
            quantization_status="compressed",
            format="pack-quantized" if "int4" in name or "packed" in name else "naive-quantized",
        )
        raw = {"quantization_config": json.loads(config.model_dump_json())}
        assert read_quantization(raw, {}).formats[0].code in ("e4m3", "int8", "int4", "uint4")
