"""What a ``quantization_config`` of GPTQ or AWQ says of each module, and each refusal."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from mrv1 import ConfigError
from mrv1.models.quantization import ModulePart, read_quantization
from mrv1.models.quantization.scheme import Quantization

UP = "model.layers.1.mlp.up_proj"
GPTQ: dict[str, Any] = {
    "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True,
}  # fmt: skip
AWQ: dict[str, Any] = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
}  # fmt: skip


def method(config: dict[str, Any], **changes: Any) -> Quantization:
    raw = {"quantization_config": config | changes, "torch_dtype": "float16"}
    found = read_quantization(raw, {})
    assert found is not None
    return found


def code(quantization: Quantization, name: str = UP) -> str | None:
    form = quantization.module(name)
    return None if form is None else form.code


def check_places(quantization: Quantization, shape: tuple[int, int] = (64, 128)) -> None:
    form, (rows, inputs) = quantization.module(UP), shape
    assert form is not None
    weight = form.empty([rows], inputs, rows_per_scale=1, dtype=torch.float16, device="meta")
    part = ModulePart(name=UP, shape=shape, rows=slice(0, rows), inputs=slice(0, inputs))
    form.places(part, weight)


def test_symmetric_codes_have_no_zero_points():
    form = method(GPTQ).module(UP)
    assert form is not None
    assert (form.code, form.inputs, form.scale_dtype) == ("int4", 32, torch.float16)
    assert (form.zeros_dtype, form.has_order) == (None, False)
    form = method(GPTQ, sym=False, desc_act=True).module(UP)
    assert form is not None
    assert (form.code, form.zeros_dtype, form.has_order) == ("uint4", torch.uint8, True)
    form = method(GPTQ, bits=8, sym=False, group_size=-1, desc_act=True).module(UP)
    assert form is not None
    assert (form.code, form.zeros_dtype, form.inputs) == ("int8", torch.int8, 0)
    assert not form.has_order  # one group has all inputs


def test_modules_are_those_that_gptq_names():
    assert code(method(GPTQ), "lm_head") is None
    assert code(method(GPTQ, lm_head=True), "lm_head") == "int4"
    of_head = {"lm_head": {"bits": 8, "group_size": 32, "mse": 2.4}}  # as GPTQModel adds it
    assert code(method(GPTQ, lm_head=True, dynamic=of_head), "lm_head") == "int8"
    assert code(method(GPTQ, dynamic=of_head), "lm_head") is None
    some = method(GPTQ, modules_in_block_to_quantize=[["mlp.up_proj"], ["self_attn.q_proj"]])
    assert code(some) == "int4"
    assert code(some, "model.layers.1.mlp.down_proj") is None


def test_patterns_override_what_they_match_at_the_beginning_of_a_name():
    dynamic = {
        r"-:.*\.0\.": {},
        r"+:.*mlp\.up": {"bits": 8, "group_size": 64},
        r"mlp": {"bits": 8},  # matches no beginning
        r"model\.layers\.1\.self_attn": {"sym": False},
    }
    quantization = method(GPTQ, dynamic=dynamic)
    assert code(quantization, "model.layers.0.mlp.up_proj") is None
    form = quantization.module(UP)
    assert form is not None
    assert (form.code, form.inputs) == ("int8", 64)
    assert code(quantization, "model.layers.1.mlp.down_proj") == "int4"
    assert code(quantization, "model.layers.1.self_attn.q_proj") == "uint4"
    assert {form.code for form in quantization.formats} == {"int4", "int8", "uint4"}


def test_modules_are_those_whose_names_awq_does_not_leave_out():
    quantization = method(AWQ, modules_to_not_convert=["layers.1.self_attn", "gate"])
    assert code(quantization) == "uint4"
    assert code(quantization, "model.layers.1.self_attn.q_proj") is None
    assert code(quantization, "model.layers.2.mlp.gate_proj") is None
    assert code(quantization, "lm_head") is None


def test_awq_has_names_of_its_own_for_bits_and_groups():
    own = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}
    form = method(own).module(UP)
    assert form is not None
    assert form.inputs == 64


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (GPTQ, {"bits": 3}, "quantization_config.bits: expected one of 4, 8, got 3"),
        (GPTQ, {"bits": None}, "quantization_config.bits: expected one of 4, 8, got None"),
        (GPTQ, {"group_size": 0}, "quantization_config.group_size: expected a positive integer"),
        (GPTQ, {"group_size": 48}, f"expected a divisor of the 128 inputs of {UP}, got 48"),
        (GPTQ, {"checkpoint_format": "marlin"}, "checkpoint_format: expected one of 'gptq', "),
        (GPTQ, {"checkpoint_format": "gptq_v2", "format": "gptq"}, "expected 'gptq', as format"),
        (GPTQ, {"is_marlin_format": True}, "quantization_config.is_marlin_format: expected none"),
        (GPTQ, {"pack_dtype": "int64"}, "quantization_config.pack_dtype: expected one of 'int32'"),
        (GPTQ, {"desc_act": "yes"}, "quantization_config.desc_act: expected one of True, False"),
        (GPTQ, {"dynamic": {"(": {}}}, "dynamic.(: expected a regular expression, got '('"),
        (GPTQ, {"dynamic": {"a": {"bits": 2}}}, "quantization_config.dynamic.a.bits: expected"),
        (GPTQ, {"modules_in_block_to_quantize": 3}, "expected lists of names, got 3"),
        (GPTQ, {"modules_in_block_to_quantize": [3]}, "expected lists of names, got [3]"),
        (GPTQ, {"block_name_to_quantize": "h"}, "expected one of 'model.layers', got 'h'"),
        (AWQ, {"bits": 8}, "quantization_config.bits: expected one of 4, got 8"),
        (AWQ, {"w_bit": 3}, "quantization_config.w_bit: expected one of 4, got 3"),
        (AWQ, {"q_group_size": 64}, "quantization_config.q_group_size: expected one of 32, got"),
        (AWQ, {"lm_head": True}, "quantization_config.lm_head: expected none, got True"),
        (AWQ, {"dynamic": {"a": {"bits": 8}}}, "quantization_config.dynamic: expected none, got"),
        (AWQ, {"version": "gemv"}, "quantization_config.version: expected one of 'gemm', 'GEMM'"),
        (AWQ, {"zero_point": False}, "quantization_config.zero_point: expected one of True"),
        (AWQ, {"group_size": 96}, f"expected a divisor of the 128 inputs of {UP}, got 96"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name(config, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_places(method(config, **changes))


@pytest.mark.parametrize("config", [GPTQ, AWQ])
def test_a_matrix_whose_words_would_have_two_modules_is_refused(config):
    with pytest.raises(ConfigError, match=f"{UP}: expected a multiple of 8 rows, which share a"):
        check_places(method(config), (60, 128))
