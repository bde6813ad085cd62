"""The weighted sum of a token's experts, with the residual and the norm that follow."""

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
    assert_in_budget,
    in_a_wider_row,
    normal,
    seeds,
)

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

EPS = 1e-5


def test_the_oracle_equals_a_loop():
    products = normal((6, 5), torch.float64, "cpu")
    weights = normal((2, 3), torch.float32, "cpu", 1)
    residual = normal((2, 5), torch.float64, "cpu")
    got = reference.combine_experts(products, weights, residual=residual)
    for token in range(2):
        for col in range(5):
            terms = [products[3 * token + i, col] * weights[token, i].item() for i in range(3)]
            assert got[token, col].item() == pytest.approx(sum(terms, residual[token, col]).item())


@given(
    num_tokens=st.sampled_from([1, 3, 17]),
    chosen=st.integers(1, 9),
    num_cols=st.sampled_from([8, 96, 1100]),
    dtype=st.sampled_from(DTYPES),
    has_residual=st.booleans(),
    has_norm=st.booleans(),
    is_wide=st.booleans(),
    seed=seeds,
)
def test_combination_is_as_exact_as_torch(
    device, num_tokens, chosen, num_cols, dtype, has_residual, has_norm, is_wide, seed
):
    products = normal((num_tokens * chosen, num_cols), dtype, device, seed)
    weights = normal((num_tokens, chosen), torch.float32, device, seed + 1).abs()
    is_none = normal((num_tokens, chosen), torch.float32, device, seed + 2) > 1
    weights[is_none] = 0
    products[is_none.flatten()] = math.nan  # pairs without an expert have no product
    shape = (num_tokens, num_cols)
    residual = in_a_wider_row(normal(shape, dtype, device, seed + 3), 8, 8)
    out_dtype = torch.float32 if is_wide and not has_norm else dtype
    out = in_a_wider_row(torch.zeros(shape, dtype=out_dtype, device=device), 0, 16)
    fused = {"residual": residual} if has_residual else {}
    norm_weight = normal((num_cols,), dtype, device, seed + 4)
    normed, normed_torch = (torch.empty(shape, dtype=dtype, device=device) for _ in "ab")
    if has_norm:
        fused |= {"norm_weight": norm_weight, "eps": EPS}
    outs = (out, out.clone())
    for op, into, normed_out in zip(
        (kernels.combine_experts, reference.combine_experts), outs, (normed, normed_torch),
        strict=True,
    ):  # fmt: skip
        more = {"normed_out": normed_out} if has_norm else {}
        assert op(products, weights, out=into, **fused, **more) is into
    terms = products.double().nan_to_num() * weights.double().flatten()[:, None]
    exact = terms.view(num_tokens, chosen, num_cols).sum(1)
    magnitude = terms.abs().view(num_tokens, chosen, num_cols).sum(1)
    if has_residual:
        exact, magnitude = exact + residual.double(), magnitude + residual.double().abs()
    # Large terms that cancel: float32 sums err by their size, whatever the result's.
    slack = 2 * torch.finfo(torch.float32).eps * (chosen + 1) * magnitude
    rounding = torch.finfo(out.dtype)
    for found in outs:
        error = (found.double() - exact).abs()
        least = exact.abs().clamp(min=rounding.smallest_normal)  # steps get no smaller below it
        assert (error <= slack + rounding.eps * least).all()
    assert_gaps_untouched(out)
    if has_norm:
        rounded = out.double()
        scale = (rounded.square().mean(-1, keepdim=True) + EPS).rsqrt()
        want = rounded * scale * norm_weight.double()
        assert_in_budget(normed, reference.rms_norm(out, norm_weight, EPS), want)


@given(num_tokens=st.sampled_from([2, 9]), dtype=st.sampled_from(DTYPES), seed=seeds)
def test_a_token_has_the_same_bits_alone_and_in_a_batch(device, num_tokens, dtype, seed):
    products = normal((num_tokens * 4, 200), dtype, device, seed)
    weights = normal((num_tokens, 4), torch.float32, device, seed + 1)
    want = kernels.combine_experts(products, weights)
    for token in range(num_tokens):
        alone = kernels.combine_experts(products[4 * token : 4 * token + 4], weights[token, None])
        assert torch.equal(alone[0], want[token])


@given(
    num_tokens=st.sampled_from([1, 5]),
    chosen=st.integers(1, 5),
    num_cols=st.sampled_from([8, 200]),
    dtype=st.sampled_from(DTYPES),
    seed=seeds,
)
def test_leaves_of_ranks_add_up_to_those_of_one(device, num_tokens, chosen, num_cols, dtype, seed):
    """A rank's sum is a subtree; what follows the sum of all is as without leaves."""
    products = normal((8, num_tokens * chosen, num_cols), torch.float32, device, seed)
    weights = normal((num_tokens, chosen), torch.float32, device, seed + 1).abs()
    weights[normal((num_tokens, chosen), torch.float32, device, seed + 2) > 1] = 0
    products[:, (weights == 0).flatten()] = math.nan
    residual = normal((num_tokens, num_cols), dtype, device, seed + 3)
    norm_weight = normal((num_cols,), dtype, device, seed + 4)
    for op in (kernels.combine_experts, reference.combine_experts):
        want = op(products, weights)
        assert want.dtype == torch.float32
        for size in (2, 4, 8):
            parts = [op(part.contiguous(), weights) for part in products.chunk(size)]
            while len(parts) > 1:
                parts = [a + b for a, b in zip(parts[0::2], parts[1::2], strict=True)]
            assert torch.equal(parts[0], want)
        normed = torch.empty_like(residual)
        out = op(products, weights, residual=residual, norm_weight=norm_weight, eps=EPS,
                 normed_out=normed)  # fmt: skip
        assert torch.equal(out, (want + residual.float()).to(dtype))
        ops = kernels if op is kernels.combine_experts else reference
        assert torch.equal(normed, ops.rms_norm(out, norm_weight, EPS))


@pytest.mark.parametrize("op", [kernels.combine_experts, reference.combine_experts])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"products": torch.ones(5, 8)}, ValueError, r"products: expected shape \[4, 8\]"),
        ({"topk_weights": torch.ones(2, 2).half()}, TypeError, "topk_weights: expected dtype"),
        ({"residual": torch.ones(2, 9)}, ValueError, r"residual: expected shape \[2, 8\]"),
        ({"norm_weight": torch.ones(8)}, ValueError, "norm_weight, normed_out: expected both or"),
        ({"out": torch.ones(2, 8).half()}, TypeError, "out: expected dtype torch.float32"),
        ({"products": torch.ones(3, 4, 8)}, ValueError, "leaves: expected 1, 2, 4 or 8, got 3"),
        ({"products": torch.ones(2, 4, 8).half()}, TypeError, "products: expected dtype torch.fl"),
    ],
)
def test_bad_arguments_are_named(device, op, change, error, message):
    given = {"products": torch.ones(4, 8), "topk_weights": torch.ones(2, 2)} | change
    with pytest.raises(error, match=message):
        op(**{name: value.to(device) for name, value in given.items()})
