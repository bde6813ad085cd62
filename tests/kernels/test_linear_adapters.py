"""The linear layer with adapters (LoRA) of tokens."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import reference
from mrv1.kernels.layers.linear_registers import RegisterConfig
from tests.kernels.elementwise import DTYPES, seeds
from tests.kernels.linear_layers import EPS, linear_arguments, of_rows
from tests.kernels.lora_adapters import USES, added, lora_adapters, of_tokens
from tests.kernels.quantized_weights import random_weight

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

module = importlib.import_module("mrv1.kernels.layers.linear")

KINDS = {
    "plain": ((), (40, 12, 12)),
    "everything": (("bias", "norm", "gated", "residual"), (20, 20)),
    "gelu, gates and ups in one": (("gated", "gelu"), (40,)),
    "normed": (("residual", "normed"), (64,)),
}
"""Operations fused with the product, and the rows of the weight's parts."""


def arguments_of(kind, num_tokens, num_in, dtype, device, uses="mixed", seed=0):
    features, parts = KINDS[kind]
    num_out = sum(parts) // (2 if "gated" in features else 1)
    arguments = linear_arguments(num_tokens, num_in, num_out, dtype, device, features, seed)
    adapters = lora_adapters(num_tokens, num_in, parts, dtype, device, uses=uses, seed=seed)
    return arguments | {"adapters": adapters}


def in_float64(arguments):
    """Return the result in float64, with the adapters' products by their formula."""
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    adapters = wide.pop("adapters")
    x, norm_weight = wide["x"], wide.pop("norm_weight", None)
    if norm_weight is not None:
        x = reference.rms_norm(arguments["x"], arguments["norm_weight"], EPS).double()
    of_bias = wide.pop("bias", torch.zeros(len(wide["weight"]), dtype=torch.float64).to(x.device))
    y = x @ wide["weight"].T + added(x, adapters) + of_bias
    if "activation" in wide:
        op = getattr(reference, wide["activation"])
        y = op(y)
    return y + wide.get("residual", 0)


@given(
    kind=st.sampled_from(tuple(KINDS)),
    num_tokens=st.sampled_from([1, 17, 40]),
    num_in=st.sampled_from([64, 100]),
    dtype=st.sampled_from(DTYPES),
    uses=st.sampled_from(USES),
    deterministic=st.booleans(),
    seed=seeds,
)
def test_results_are_near_those_in_float64(
    device, kind, num_tokens, num_in, dtype, uses, deterministic, seed
):
    arguments = arguments_of(kind, num_tokens, num_in, dtype, device, uses, seed)
    want = in_float64(arguments)
    got = kernels.linear(**arguments, deterministic=deterministic)
    # A product of the library is rounded before adapters are added, and before the activation.
    eps = torch.finfo(dtype).eps * (4 if num_tokens > 32 and not deterministic else 1)
    sizes = 8 if dtype != torch.float32 else 64  # float32: sums of so many values of order one
    torch.testing.assert_close(got.double(), want, rtol=2 * eps, atol=sizes * eps)
    oracle = reference.linear(**arguments, deterministic=deterministic)
    torch.testing.assert_close(oracle.double(), want, rtol=2 * eps, atol=sizes * eps)


@settings(max_examples=max(settings.default.max_examples // 2, 8))  # of 24 kinds of calls
@given(
    kind=st.sampled_from(tuple(KINDS)),
    num_tokens=st.sampled_from([2, 40]),
    dtype=st.sampled_from(DTYPES),
    seed=seeds,
)
def test_deterministic_bits_do_not_depend_on_the_other_tokens(
    device, kind, num_tokens, dtype, seed
):
    arguments = arguments_of(kind, num_tokens, 64, dtype, device, seed=seed)
    many = kernels.linear(**arguments, deterministic=True)
    for row in (0, num_tokens - 1):
        rows = slice(row, row + 1)
        alone = of_rows(arguments, rows) | {"adapters": of_tokens(arguments["adapters"], rows)}
        assert torch.equal(kernels.linear(**alone, deterministic=True), many[rows])


@pytest.mark.parametrize("num_tokens", [2, 40])
def test_deterministic_adapters_keep_no_splits(device, num_tokens, monkeypatch):
    """Their number follows from the number of tokens: adapters would be added to the first."""
    monkeypatch.setattr(module, "INTERPRET", False)  # splits, as on a GPU
    arguments = arguments_of("plain", num_tokens, 1100, torch.bfloat16, device)
    out = torch.empty(num_tokens, 64, device=device)
    want = kernels.linear(**arguments, out=out, deterministic=True).clone()
    got = kernels.linear(**arguments, out=out, deterministic=True, keep_splits=True)
    assert got is out
    assert torch.equal(got, want)


@pytest.mark.parametrize("kernel", ["tiles", "registers, split", "codes", "library"])
def test_every_kernel_adds_the_same_values(device, kernel, monkeypatch):
    """A weight of zeros: results are the adapters' values, which all kernels must have alike."""
    dtype, kind = torch.float16, "normed" if "split" in kernel else "plain"
    tokens = 40 if kernel == "library" else 17
    arguments = arguments_of(kind, tokens, 64, dtype, device)
    arguments["weight"].zero_()
    arguments.pop("residual", None)
    if kernel == "tiles":
        monkeypatch.setattr(RegisterConfig, "for_interpreter", lambda *_: None)
        monkeypatch.setattr(RegisterConfig, "default_for", lambda *_, **__: None)
    if kernel == "codes":
        weight = random_weight("int8", 64, 64, dtype, seed=0, device=device)
        arguments["weight"] = replace(weight, codes=torch.zeros_like(weight.codes))
    got = kernels.linear(**arguments)
    adapters = arguments["adapters"]
    want = torch.zeros_like(got)
    kernels.add_adapters(want, kernels.shrink_adapters(arguments["x"], adapters), adapters)
    assert torch.equal(got, want)


def test_kept_splits_have_the_adapters_once(device):
    arguments = arguments_of("plain", 17, 64, torch.float16, device)
    got = kernels.linear(**arguments, keep_splits=True)
    got = got.sum(0) if got.dim() == 3 else got.float()
    want = in_float64(arguments)
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=8e-3)


def test_no_adapters_change_nothing(device):
    """No token uses one: the same bits as without."""
    for tokens in (1, 17, 40):
        arguments = arguments_of("everything", tokens, 64, torch.float16, device, "none")
        without = {k: v for k, v in arguments.items() if k != "adapters"}
        assert torch.equal(kernels.linear(**arguments), kernels.linear(**without))


def test_parts_that_are_not_gates_and_ups_are_refused(device):
    arguments = arguments_of("everything", 3, 64, torch.float16, device)
    adapters = lora_adapters(3, 64, (10, 30), torch.float16, device)
    with pytest.raises(
        ValueError, match=r"adapters.part_rows: expected \(20, 20\), gates and ups"
    ):
        kernels.linear(**arguments | {"adapters": adapters})
    short = replace(adapters, slots=adapters.slots[:2])
    with pytest.raises(ValueError, match=r"adapters.slots: expected shape \[3\]"):
        kernels.linear(**arguments | {"adapters": short})
