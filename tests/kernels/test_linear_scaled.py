"""Many tokens and e4m3 codes: tokens are quantized, and the library multiplies."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mrv1 import kernels
from mrv1.device import device_info
from mrv1.kernels import reference
from mrv1.kernels.layers import linear_scaled
from mrv1.kernels.layers.linear_scaled import quantize_tokens
from mrv1.kernels.layers.quantized import E4M3_CAPABILITY
from tests.kernels.elementwise import SENTINEL, assert_gaps_untouched, seeds
from tests.kernels.linear_layers import FEATURES, linear_arguments
from tests.kernels.quantized_weights import random_weight

pytestmark = [pytest.mark.interp, pytest.mark.gpu]


def codes_of(x, group=0):
    """Return what ``quantize_tokens`` does, in torch."""
    num_in = x.shape[1]
    group = group or num_in
    groups = torch.nn.functional.pad(x.float(), (0, -num_in % group)).unflatten(1, (-1, group))
    scales = groups.abs().amax(2) / 448
    scales = torch.where(scales == 0, 1.0, scales)
    codes = (groups / scales[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    codes.view(torch.uint8)[codes.isnan()] = 0x7F  # without a sign
    return codes.flatten(1)[:, :num_in], scales


@given(
    num_tokens=st.sampled_from([1, 3, 70]),
    num_in=st.sampled_from([16, 100, 512]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    group=st.sampled_from([0, 128]),
    seed=seeds,
)
def test_codes_are_those_of_torch(device, num_tokens, num_in, dtype, group, seed):
    if device.type == "cuda" and (device_info(device).capability or (0, 0)) < E4M3_CAPABILITY:
        pytest.skip("needs e4m3")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, num_in + 8, generator=generator) * 3
    x[0] = 0
    x[-1, 0] = 300
    x = x.to(device, dtype)[:, :num_in]
    codes, scales = quantize_tokens(x, inputs_per_scale=group)
    # On a CPU: on a GPU torch multiplies by the reciprocal of 448.
    want_codes, want_scales = codes_of(x.cpu(), group)
    assert torch.equal(scales.cpu(), want_scales)
    assert torch.equal(codes.cpu().view(torch.uint8), want_codes.view(torch.uint8))


class Ops(TorchDispatchMode):
    """Notes the names of torch's ops."""

    names: set[str]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names = {*getattr(self, "names", ()), str(func)}
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("kind", ["e4m3_row", "e4m3_block"])
def test_a_call_is_a_launch_and_the_librarys_product(monkeypatch, kind):
    """Scales are taken as they are stored: views are all that torch makes beside the two."""
    x = torch.randn(40, 512).bfloat16()
    weight = random_weight(kind, 128, 512, torch.bfloat16, seed=0)
    weight = replace(weight, activations="token" if kind == "e4m3_row" else "group")
    tokens, result, taken = codes_of(x), x[:, :128].clone(), {}

    def scaled_mm(codes, matrix, **others):
        taken.update(others, matrix=matrix)
        return result

    monkeypatch.setattr(linear_scaled, "quantize_tokens", lambda *_, **__: tokens)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    with Ops() as ops:
        linear_scaled.multiply_scaled(SimpleNamespace(x=x, bias=None, num_tokens=40), weight)
    assert ops.names == {"aten.permute.default", "aten.slice.Tensor"}
    assert taken["matrix"].data_ptr() == weight.codes.data_ptr()
    assert taken["scale_b"].data_ptr() == weight.tensors["scales"].data_ptr()
    assert taken["scale_b"].dtype == torch.float32


@pytest.mark.gpu_only
def test_nan_stays_in_its_row(device):
    if (device_info(device).capability or (0, 0)) < E4M3_CAPABILITY:
        pytest.skip("needs e4m3")
    weight = random_weight("e4m3_row", 96, 512, torch.bfloat16, seed=0, device=device)
    weight = replace(weight, activations="token")
    x = torch.randn(40, 512, device=device).bfloat16()
    want = kernels.linear(x, weight)
    x[7, 9] = torch.nan
    got = kernels.linear(x, weight)
    assert got[7].isnan().all()
    others = [row for row in range(40) if row != 7]
    assert torch.equal(got[others], want[others])


@pytest.mark.gpu_only
@given(
    kind=st.sampled_from(["e4m3_row", "e4m3_block"]),
    num_tokens=st.sampled_from([33, 300]),
    features=st.sampled_from(FEATURES),
    seed=seeds,
)
def test_products_are_those_of_quantized_tokens(device, kind, num_tokens, features, seed):
    if (device_info(device).capability or (0, 0)) < E4M3_CAPABILITY:
        pytest.skip("needs e4m3")
    arguments = linear_arguments(num_tokens, 512, 128, torch.bfloat16, device, features, seed)
    num_rows = len(arguments["weight"])
    weight = random_weight(kind, num_rows, 512, torch.bfloat16, seed=seed, device=device)
    is_grouped = kind == "e4m3_block"
    weight = replace(weight, activations="group" if is_grouped else "token")
    got = kernels.linear(**arguments | {"weight": weight})
    x = arguments["x"]
    if "norm_weight" in arguments:
        x = reference.rms_norm(x, arguments["norm_weight"], arguments["eps"])
    group = 128 if is_grouped else 512
    codes, scales = codes_of(x, group)
    wide = {
        name: value.double() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
        if name not in ("norm_weight", "out", "normed_out", "out_norm_weight")
    }
    wide |= {
        "x": codes.double() * scales.double().repeat_interleave(group, 1),
        "weight": replace(weight, dtype=torch.float64, activations=None).dense(),
    }
    want = reference.linear(**wide)
    error = (got.double() - want).abs()
    assert float(error.max() / want.abs().max()) < 0.02
    plain = kernels.linear(**arguments | {"weight": weight}, deterministic=True)
    assert error.norm() < (got.double() - plain.double()).norm() / 2  # of tokens as they are


@pytest.mark.gpu_only
def test_results_go_where_they_are_wanted(device):
    if (device_info(device).capability or (0, 0)) < E4M3_CAPABILITY:
        pytest.skip("needs e4m3")
    weight = random_weight("e4m3_row", 96, 512, torch.bfloat16, seed=0, device=device)
    weight = replace(weight, activations="token")
    x = torch.randn(100, 512, device=device).bfloat16()
    want = kernels.linear(x, weight)
    room = torch.full((100, 128), SENTINEL, dtype=torch.bfloat16, device=device)
    assert kernels.linear(x, weight, out=room[:, :96]).data_ptr() == room.data_ptr()
    assert torch.equal(room[:, :96], want)
    assert_gaps_untouched(room[:, :96])
    residual = torch.randn(100, 96, device=device).bfloat16()
    sums = kernels.linear(x, weight, residual=residual)
    assert torch.equal(sums, want + residual)
    assert kernels.linear(x, weight, residual=residual, out=residual) is residual
    assert torch.equal(residual, sums)
