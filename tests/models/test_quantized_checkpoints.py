"""Compressed checkpoints equal what the library that wrote them decompresses, whole and in parts.

The library is compressed-tensors; the oracle of a model is transformers with those weights.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.pack_quantized import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization
from safetensors.torch import load_file

from mrv1.device import kernel_path
from mrv1.errors import ConfigError
from mrv1.kernels.layers.quantized import QuantizedWeight
from mrv1.kernels.registry import Ops, select_ops
from mrv1.models import (
    DecoderModel,
    ModelConfig,
    ParallelContext,
    Weight,
    checkpoint_places,
    load_model,
    memory_of,
)
from mrv1.models.quantization import ModulePart, read_quantization, shared_rows
from tests.models.driver import PagedDriver, blocks_needed
from tests.models.families import expected_logits, tiny_config
from tests.models.quantized import SCHEMES, calibrate, group, save_compressed
from tests.thread_ranks import on_ranks

PROMPT = [(7 * i) % 160 for i in range(40)]
SIZES = {"intermediate_size": 128}
"""Of models whose MLP two ranks share, in groups of 32 and 64."""


def load(path: Path, parallel: ParallelContext | None = None, **options: Any) -> DecoderModel:
    settings = {"device": "cpu", "dtype": torch.float64, "ops": select_ops("reference")}
    return load_model(path, **(settings | options), progress=False, parallel=parallel)


def logits_of(model: DecoderModel) -> torch.Tensor:
    """Return the logits of the prompt, in chunks of 24 tokens."""
    blocks = blocks_needed([PROMPT], 16)
    return PagedDriver(model, block_size=16, num_blocks=blocks).logits([PROMPT], 24)[0]


def compressed(
    name: str, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]:
    """Return a module's stored tensors, their decompressed values, and its ``config.json``."""
    generator = torch.Generator().manual_seed(0)
    module = torch.nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)
    module.weight.data.normal_(0.1, 1.0, generator=generator)
    scheme = QuantizationScheme(**SCHEMES[name])
    module.quantization_scheme = scheme
    initialize_module_for_quantization(module, scheme)
    calibrate(module)
    form = infer_module_format(torch.nn.Linear, scheme).value
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(dict(module.state_dict()), scheme)
    values = compressor.decompress(stored, scheme)["weight"]
    groups = {"group_0": {**deepcopy(SCHEMES[name]), "format": form}}
    raw = {"quant_method": "compressed-tensors", "config_groups": groups}
    return stored, values, {"quantization_config": raw, "dtype": str(dtype).split(".")[1]}


def read_part(
    stored: dict[str, torch.Tensor],
    raw: dict[str, Any],
    shape: tuple[int, int],
    dtype: torch.dtype,
    rows: slice,
    inputs: slice,
) -> QuantizedWeight:
    """Return the part of a module that a rank reads, in steps of 5 stored rows."""
    form = read_quantization(raw, {}).module("model.layers.0.mlp.up_proj")
    part = ModulePart(name="up_proj", shape=shape, rows=rows, inputs=inputs)
    num_rows = rows.stop - rows.start
    shared = shared_rows([form], [num_rows], is_cut=num_rows < shape[0])
    weight = form.empty(
        [num_rows], inputs.stop - inputs.start, rows_per_scale=shared, dtype=dtype, device="cpu"
    )
    places = form.places(part, weight)
    assert places.keys() == stored.keys()
    for name, place in sorted(places.items(), key=lambda each: not each[1].is_small):
        values = stored[name]
        assert place.fits(values.shape), name
        assert values.dtype in place.dtypes, name
        assert place.problem is None or place.problem(values) is None, name
        step = len(values) if place.is_one else 5
        for first in range(0, len(values), step):
            place.write(first, values[first : first + step])
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_module_has_the_bits_that_the_library_decompresses(name: str, dtype: torch.dtype):
    """Values are products in float32, rounded once to the scales' dtype, as the library's are."""
    shape = (200, 288)  # no multiples of a block, nor of the rows that a word has zeros of
    stored, values, raw = compressed(name, shape, dtype)
    weight = read_part(stored, raw, shape, dtype, slice(0, 200), slice(0, 288))
    assert torch.equal(weight.dense(), values)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_rank_has_the_bits_of_its_part(name: str):
    """Rows from the middle of a block and of a word; inputs that are whole groups."""
    shape, dtype = (200, 256), torch.float32
    stored, values, raw = compressed(name, shape, dtype)
    for rows, inputs in (
        (slice(0, 100), slice(0, 256)), (slice(100, 200), slice(0, 256)),
        (slice(60, 90), slice(0, 256)), (slice(0, 200), slice(128, 256)),
    ):  # fmt: skip
        weight = read_part(stored, raw, shape, dtype, rows, inputs)
        assert torch.equal(weight.dense(), values[rows, inputs]), (rows, inputs)


@pytest.mark.parametrize("name", ["int4-group", "int4-group-zeros", "int8-packed-group"])
def test_inputs_in_an_order_of_their_own_have_the_scales_of_their_groups(name: str):
    """As ``weight_g_idx`` says, which older releases wrote: ``actorder`` is ``group``.

    What it decompresses of the inputs group by group are the values of the same inputs in place.
    """
    shape, dtype = (200, 256), torch.float32
    stored, values, raw = compressed(name, shape, dtype)
    raw["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    place = order.argsort()
    bits = raw["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"]
    codes = unpack_from_int32(stored["weight_packed"], bits, torch.Size(shape))
    size = 256 // stored["weight_scale"].shape[1]
    stored = {
        **stored,
        "weight_packed": pack_to_int32(codes[:, place], bits),
        "weight_g_idx": (place // size).to(torch.int32),
    }
    weight = read_part(stored, raw, shape, dtype, slice(0, 200), slice(0, 256))
    assert torch.equal(weight.dense(), values[:, place])
    part = ModulePart(name="up_proj", shape=shape, rows=slice(0, 200), inputs=slice(0, 128))
    with pytest.raises(ConfigError, match="expected one rank for the packed up_proj, got inputs"):
        read_quantization(raw, {}).module("model.layers.0.mlp.up_proj").places(part, weight)
    group_of = stored["weight_g_idx"].clone()
    old = int(group_of[0])
    group_of[0] = (old + 1) % (256 // size)
    first = min(old, int(group_of[0]))
    found = read_quantization(raw, {}).module("model.layers.0.mlp.up_proj")
    whole = ModulePart(name="up_proj", shape=shape, rows=slice(0, 200), inputs=slice(0, 256))
    problem = found.places(whole, weight)["weight_g_idx"].problem
    assert problem(stored["weight_g_idx"]) is None
    count = size - 1 if first == old else size + 1
    assert problem(group_of) == (
        f"expected {size} inputs in each group, got {count} in group {first}"
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_equal_transformers_with_decompressed_weights(tmp_path: Path, name: str):
    """One rank, and two: in float64, in chunks."""
    family = ("llama", "qwen3")[len(name) % 2]
    config = tiny_config(family, **SIZES, attention_bias=True)
    oracle = save_compressed(tmp_path, config, {"group_0": SCHEMES[name]})
    expected = expected_logits(oracle, PROMPT)
    for size in (1, 2):
        for got in on_ranks(size, lambda parallel: logits_of(load(tmp_path, parallel))):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def widened(model: DecoderModel, ops: Ops) -> DecoderModel:
    """Return the same model with plain matrices, rounded to its dtype."""

    def plain(weight: Weight) -> Weight:
        parts = [p.dense() if isinstance(p, QuantizedWeight) else p for p in weight.parts]
        return replace(weight, matrix=torch.cat(parts))

    layers = [
        replace(
            layer,
            **{name: plain(getattr(layer, name)) for name in ("qkv", "o", "gate_up", "down")},
        )
        for layer in model.weights.layers
    ]
    return DecoderModel(model.config, replace(model.weights, layers=tuple(layers)), ops)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCHEMES)
def test_codes_cost_no_precision(tmp_path: Path, name: str, device: torch.device):
    """In bfloat16, token by token and several tokens: no further from float64 than plain ones."""
    save_compressed(tmp_path, tiny_config("qwen3", **SIZES), {"group_0": SCHEMES[name]})
    expected = logits_of(load(tmp_path))
    ops = select_ops(kernel_path(device))
    model = load(tmp_path, device=device, dtype=torch.bfloat16, ops=ops)
    plain = widened(model, ops)
    for chunk in (1, 24):
        errors = []
        for each in (model, plain):
            driver = PagedDriver(each, block_size=16, num_blocks=blocks_needed([PROMPT], 16))
            (logits,) = driver.logits([PROMPT], chunk)
            errors.append((logits.cpu().double() - expected).square().mean().sqrt().item())
        assert errors[0] <= 1.5 * errors[1] + 1e-3, (chunk, errors)


@pytest.mark.parametrize("name", ["fp8-channel", "fp8-block", "int4-group", "int8-packed-group"])
def test_a_model_takes_the_memory_of_its_file(tmp_path: Path, name: str):
    """Within 2%, with scales in bfloat16; 4 bits a weight are not 8."""
    config = tiny_config("llama", hidden_size=256, intermediate_size=512, vocab_size=32)
    save_compressed(tmp_path, config, {"group_0": SCHEMES[name]}, dtype=torch.bfloat16)
    model = load(tmp_path, dtype=torch.bfloat16)
    nbytes = sum(
        t.nbytes for t in memory_of(checkpoint_places(model.config, model.weights).values())
    )
    assert nbytes == pytest.approx((tmp_path / "model.safetensors").stat().st_size, rel=0.02)


@pytest.mark.parametrize("name", ["fp8-tensor-static", "fp8-channel"])
def test_scales_are_those_that_products_of_quantized_tokens_take(tmp_path: Path, name: str):
    """float32, one for each row, whatever the file has."""
    config = tiny_config("qwen3", **SIZES)
    save_compressed(tmp_path, config, {"group_0": SCHEMES[name]}, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    for index, layer in enumerate(load(tmp_path).weights.layers):
        weight = layer.o.matrix
        assert isinstance(weight, QuantizedWeight)
        assert weight.activations is not None
        own = stored[f"model.layers.{index}.self_attn.o_proj.weight_scale"]
        assert own.dtype == torch.bfloat16
        scales = own.float().expand(len(weight.codes), 1)
        torch.testing.assert_close(weight.tensors["scales"], scales, rtol=0, atol=0)


def test_parts_of_a_layer_that_differ_are_several_matrices(tmp_path: Path):
    """Scales per matrix of q, k and v become those of rows; up in 8 bits stays beside gate."""
    groups = {
        "group_0": {**SCHEMES["fp8-tensor-static"], "targets": [r"re:.*self_attn\..*_proj"]},
        "group_1": {**SCHEMES["int4-group"], "targets": [r"re:.*mlp\.(gate|down)_proj"]},
        "group_2": {**SCHEMES["int8-packed-zeros"], "targets": ["model.layers.1.mlp.up_proj"]},
    }
    oracle = save_compressed(tmp_path, tiny_config("qwen3", **SIZES), groups)
    model = load(tmp_path)
    first, second = model.weights.layers
    qkv = first.qkv.matrix
    assert isinstance(qkv, QuantizedWeight)
    assert qkv.rows_per_scale == 1
    assert len(qkv.scales.unique()) == 3
    assert [getattr(part, "code", None) for part in first.gate_up.parts] == ["int4", None]
    assert [part.code for part in second.gate_up.parts] == ["int4", "int8"]
    expected = expected_logits(oracle, PROMPT)
    for size in (1, 2):
        for got in on_ranks(size, lambda parallel: logits_of(load(tmp_path, parallel))):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_the_configuration_names_the_quantization(tmp_path: Path):
    save_compressed(tmp_path, tiny_config("llama"), {"group_0": group(8, "float", "channel")})
    quantization = ModelConfig.from_pretrained(tmp_path).quantization
    assert quantization is not None
    assert quantization.describe() == (
        "compressed-tensors: FP8 (e4m3) weights, a scale per output"
    )


@pytest.mark.parametrize("name", ["fp8-block", "int4-group-zeros", "int8-packed-zeros"])
def test_made_up_codes_are_the_same_on_ranks(tmp_path: Path, name: str):
    """They make weights about as large as made-up ones in full precision."""
    config = tiny_config("llama", hidden_size=128, intermediate_size=256)
    save_compressed(tmp_path, config, {"group_0": SCHEMES[name]})
    (tmp_path / "model.safetensors").unlink()

    def down(parallel: ParallelContext) -> torch.Tensor:
        model = load(tmp_path, parallel, load_format="dummy")
        return model.weights.layers[1].down.matrix.dense()

    (whole,) = on_ranks(1, down)
    assert whole.std().item() == pytest.approx(256**-0.5, rel=0.1)
    assert torch.equal(torch.cat(on_ranks(2, down), 1), whole)
