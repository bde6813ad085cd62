"""The values of quantized weights: kernel against oracle."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import reference
from tests.kernels.elementwise import seeds
from tests.kernels.quantized_weights import KINDS, random_weight

module = importlib.import_module("mrv1.kernels.layers.dequantize")

pytestmark = [pytest.mark.interp, pytest.mark.gpu]


@given(
    kind=st.sampled_from(KINDS),
    shape=st.sampled_from([(1, 512), (40, 1024), (129, 768)]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    gpu=st.booleans(),
    seed=seeds,
)
def test_values_are_those_of_the_oracle(device, kind, shape, dtype, gpu, seed):
    weight = random_weight(kind, *shape, dtype, seed=seed, device=device)
    with pytest.MonkeyPatch.context() as patch:
        if gpu:
            patch.setattr(module, "INTERPRET", False)
        got = kernels.dequantize(weight)
    assert torch.equal(got, reference.dequantize(weight))


@pytest.mark.parametrize(("kind", "num_in"), [("e4m3_row", 70), ("int4", 300), ("mxfp4", 96)])
def test_inputs_that_fill_no_tile(device, kind, num_in):
    weight = random_weight(kind, 7, num_in, torch.bfloat16, seed=1, device=device)
    assert torch.equal(kernels.dequantize(weight), weight.dense())


def test_the_smallest_and_the_largest_exponents(device):
    weight = random_weight("mxfp4", 8, 256, torch.bfloat16, seed=0, device=device)
    scales = torch.arange(64, dtype=torch.uint8, device=device).view(8, 8)
    for first in (0, 187):
        some = replace(weight, scales=scales + first)
        assert torch.equal(kernels.dequantize(some), some.dense())


def test_experts_are_refused(device):
    weight = random_weight("int4", 8, 256, torch.bfloat16, seed=0, device=device)
    experts = replace(weight, codes=weight.codes[None], scales=weight.scales[None])
    with pytest.raises(ValueError, match=r"weight: expected shape \[any, any\]"):
        kernels.dequantize(experts)
