"""The last product of a token's experts, and their weighted sum, with what follows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import reference
from tests.kernels.elementwise import (
    DTYPES,
    assert_gaps_untouched,
    in_a_wider_row,
    normal,
    seeds,
    tiles,
)
from tests.kernels.quantized_weights import random_experts

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

EPS = 1e-5


def routed(num_tokens: int, chosen: int, num_experts: int, device, seed: int):
    """Return ids, no expert twice in a row and some -1, and weights, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :chosen]
    weights = torch.rand(num_tokens, chosen, generator=generator)
    ids[torch.rand(num_tokens, chosen, generator=generator) < 0.2] = -1
    weights[ids < 0] = 0
    weights[torch.rand(num_tokens, chosen, generator=generator) < 0.2] = 0
    return ids.int().contiguous().to(device), weights.to(device)


def test_the_oracle_equals_a_loop():
    x = normal((4, 3), torch.float64, "cpu")
    weight = normal((5, 2, 3), torch.float64, "cpu", 1)
    ids = torch.tensor([[4, 0], [-1, 2]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 2.0], [0.0, 1.5]])
    residual = normal((2, 2), torch.float64, "cpu", 2)
    found = reference.add_experts(x, weight, ids, weights, residual=residual)
    for token in range(2):
        for col in range(2):
            want = residual[token, col].item()
            for i, expert in enumerate(ids[token].tolist()):
                if expert >= 0:
                    terms = [a * b for a, b in zip(x[2 * token + i], weight[expert, col],
                                                   strict=True)]  # fmt: skip
                    want += weights[token, i].item() * sum(terms).item()
            assert found[token, col].item() == pytest.approx(want)


@given(
    num_tokens=st.sampled_from([1, 1, 3]),
    chosen=st.sampled_from([1, 2, 5]),
    num_in=st.sampled_from([24, 200, 520]),
    num_out=st.sampled_from([9, 64]),
    dtype=st.sampled_from(DTYPES),
    has_residual=st.booleans(),
    has_norm=st.booleans(),
    is_wide=st.booleans(),
    as_on_gpu=st.booleans(),
    seed=seeds,
)
def test_sums_are_as_exact_as_torch(
    device, num_tokens, chosen, num_in, num_out, dtype, has_residual, has_norm, is_wide,
    as_on_gpu, seed,
):  # fmt: skip
    """A weight of 0 and an expert -1 read nothing: their rows of x and of weights are NaN."""
    ids, weights = routed(num_tokens, chosen, 7, device, seed)
    is_none = (weights == 0).flatten()
    x = normal((num_tokens * chosen, num_in), dtype, device, seed)
    x[is_none] = math.nan
    x = in_a_wider_row(x, 8, 8)
    weight = normal((num_out, 7, num_in), dtype, device, seed + 1).movedim(1, 0) * num_in**-0.5
    for expert in set(range(7)) - set(ids.flatten()[~is_none].tolist()):
        weight[expert] = math.nan
    shape = (num_tokens, num_out)
    residual = in_a_wider_row(normal(shape, dtype, device, seed + 2), 8, 8)
    out_dtype = torch.float32 if is_wide and not has_norm else dtype
    out = in_a_wider_row(torch.zeros(shape, dtype=out_dtype, device=device), 0, 16)
    fused = {"residual": residual} if has_residual else {}
    normed = torch.empty(shape, dtype=dtype, device=device)
    norm_weight = normal((num_out,), dtype, device, seed + 3)
    if has_norm:
        fused |= {"norm_weight": norm_weight, "eps": EPS, "normed_out": normed}
    with tiles("add_experts", as_on_gpu=as_on_gpu):
        assert kernels.add_experts(x, weight, ids, weights, out=out, **fused) is out
    exact = torch.zeros(shape, dtype=torch.float64, device=device)
    magnitude, rounded = torch.zeros_like(exact), torch.zeros_like(exact)
    for pair in (~is_none).nonzero().flatten().tolist():
        terms = weight[int(ids.flatten()[pair])].double() * x[pair].double()
        share, token = weights.flatten()[pair].double(), pair // chosen
        exact[token] += share * terms.sum(1)
        magnitude[token] += share * terms.abs().sum(1)
        rounded[token] += share * terms.sum(1).abs()
    if has_residual:
        exact, magnitude = exact + residual.double(), magnitude + residual.double().abs()
    # Large terms that cancel: sums err by their size; several tokens' products are rounded.
    slack = 2 * torch.finfo(torch.float32).eps * (chosen + 8) * magnitude
    slack += torch.finfo(dtype).eps * rounded
    least = exact.abs().clamp(min=torch.finfo(out.dtype).smallest_normal)
    assert ((out.double() - exact).abs() <= slack + torch.finfo(out.dtype).eps * least).all()
    assert_gaps_untouched(out)
    if has_norm:
        assert torch.equal(normed, kernels.rms_norm(out, norm_weight, EPS))


@pytest.mark.parametrize("kind", ["mxfp4", "e4m3_row"])
def test_codes_and_biases_are_added(device, kind):
    """Where the kernel of one token cannot: then two ops do, and all of them agree."""
    weight = random_experts(kind, 3, 32, 64, torch.bfloat16, seed=0, device=device)
    x = normal((2, 64), torch.bfloat16, device)
    bias = normal((3, 32), torch.bfloat16, device, 1)
    ids = torch.tensor([[2, 0]], dtype=torch.int32, device=device)
    weights = torch.tensor([[0.5, 0.25]], device=device)
    found = kernels.add_experts(x, weight, ids, weights, bias=bias)
    want = kernels.combine_experts(kernels.expert_linear(x, weight, ids, bias=bias), weights)
    assert torch.equal(found, want)


@pytest.mark.parametrize("op", [kernels.add_experts, reference.add_experts])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(1, 8)}, ValueError, r"x: expected shape \[2, any\]"),
        ({"topk_weights": torch.ones(1, 3)}, ValueError, r"topk_weights: expected shape \[1, 2\]"),
        ({"topk_ids": torch.zeros(1, 2)}, TypeError, "topk_ids: expected dtype"),
        ({"residual": torch.ones(1, 5)}, ValueError, r"residual: expected shape \[1, 4\]"),
        ({"norm_weight": torch.ones(4)}, ValueError, "both or neither, got norm_weight"),
        ({"leaves": 2}, ValueError, "leaves: expected None"),
    ],
)
def test_wrong_arguments_are_named(device, op, change, error, message):
    arguments = {
        "x": torch.ones(2, 8),
        "weight": torch.ones(3, 4, 8),
        "topk_ids": torch.zeros(1, 2, dtype=torch.int32),
        "topk_weights": torch.ones(1, 2),
    } | change
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    with pytest.raises(error, match=message):
        op(**arguments)
