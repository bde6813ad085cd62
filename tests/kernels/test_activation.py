"""The elementwise parts of SwiGLU and GeGLU."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import reference
from mrv1.kernels._base.triton import INTERPRET
from mrv1.kernels.layers.activation import tile_for
from tests.kernels.elementwise import (
    DTYPES,
    assert_gaps_untouched,
    assert_in_budget,
    in_a_wider_row,
    normal,
    seeds,
    tiles,
)
from tests.kernels.linear_layers import gelu_exponent

pytestmark = [pytest.mark.interp, pytest.mark.gpu]


OPS = st.sampled_from(["silu_and_mul", "gelu_tanh_and_mul"])
NAMES = pytest.mark.parametrize("op", ["silu_and_mul", "gelu_tanh_and_mul"])


def _exponent(op, gate):
    """Return what the exponential of an activation is of."""
    return gate if op == "silu_and_mul" else 2 * gelu_exponent(gate)


def _exact(op, x):
    gate, up = x.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-_exponent(op, gate))) * up


def _activation(op, gate):
    if op == "silu_and_mul":
        return torch.nn.functional.silu(gate)
    return torch.nn.functional.gelu(gate, approximate="tanh")


def _torch(op, x):
    gate, up = x.chunk(2, dim=-1)
    return _activation(op, gate) * up


# --- oracle ------------------------------------------------------------------------------------


@NAMES
def test_the_oracle_equals_the_formula(op):
    def activation(x):
        if op == "silu_and_mul":
            return x / (1 + math.exp(-x))
        return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    x = normal((3, 8), torch.float64, "cpu")
    want = [
        [activation(gate) * up for gate, up in zip(row[:4], row[4:], strict=True)]
        for row in x.tolist()
    ]
    found = getattr(reference, op)(x)
    torch.testing.assert_close(found, torch.tensor(want, dtype=torch.float64))


# --- properties --------------------------------------------------------------------------------


@given(
    op=OPS,
    num_tokens=st.sampled_from([1, 3, 40]),
    num_cols=st.sampled_from([1, 80, 96, 1024, 1500]),  # 1500: a second, partial tile on a GPU
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1.0, 20.0]),
    gap=st.sampled_from([0, 8, 3]),
    as_on_gpu=st.booleans(),
    seed=seeds,
)
def test_an_activation_is_as_exact_as_torch(
    device, op, num_tokens, num_cols, dtype, scale, gap, as_on_gpu, seed
):
    x = normal((num_tokens, 2 * num_cols), dtype, device, seed) * scale
    x = in_a_wider_row(x, gap, 2 * gap)
    out = in_a_wider_row(torch.zeros_like(x[:, :num_cols]), gap, gap)
    activate = getattr(kernels, op)
    with tiles("silu_and_mul", as_on_gpu=as_on_gpu):
        assert activate(x, out=out) is out
    exponent = _exponent(op, x[:, :num_cols].double()).abs()
    assert_in_budget(out, _torch(op, x), _exact(op, x), exponent=exponent)
    assert_gaps_untouched(out)
    assert torch.equal(activate(x), out)


@given(
    op=OPS,
    num_tokens=st.sampled_from([2, 9, 83]),
    num_cols=st.sampled_from([1, 8, 80, 1500]),
    dtype=st.sampled_from(DTYPES),
    gap=st.sampled_from([0, 8, 3]),
    as_on_gpu=st.booleans(),
    seed=seeds,
)
def test_a_token_has_the_same_bits_alone_and_in_a_batch(
    device, op, num_tokens, num_cols, dtype, gap, as_on_gpu, seed
):
    x = in_a_wider_row(normal((num_tokens, 2 * num_cols), dtype, device, seed), gap, gap)
    activate = getattr(kernels, op)
    with tiles("silu_and_mul", as_on_gpu=as_on_gpu):
        want = activate(x)
        for token in {0, num_tokens // 2, num_tokens - 1}:
            alone = slice(token, token + 1)
            assert torch.equal(activate(x[alone]), want[alone])


@given(op=OPS, order=st.permutations(range(6)), seed=seeds)
def test_a_row_does_not_depend_on_other_rows(device, op, order, seed):
    x = normal((6, 160), torch.bfloat16, device, seed)
    activate = getattr(kernels, op)
    want = activate(x)[list(order)]
    assert torch.equal(activate(x[list(order)]), want)


# --- edges -------------------------------------------------------------------------------------


@NAMES
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_far_from_zero_saturate(device, dtype, op):
    gate = torch.tensor([-1e4, -104.0, 0.0, 104.0, 1e4, torch.inf, torch.nan])
    x = torch.cat([gate, torch.full_like(gate, 2.0)])[None].to(dtype).to(device)
    got = getattr(kernels, op)(x)[0].cpu()
    want = _activation(op, gate.to(dtype)) * 2
    assert torch.equal(got[2:5], want[2:5])
    assert torch.equal(got[:2].float(), torch.zeros(2))
    assert got[5] == torch.inf
    assert got[6].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "op",
    [
        kernels.silu_and_mul,
        reference.silu_and_mul,
        kernels.gelu_tanh_and_mul,
        reference.gelu_tanh_and_mul,
    ],
)
def test_the_most_negative_gates_give_zero(device, op, dtype):
    """Zero is the limit; torch gives NaN at -inf. With an infinite up, 0 * inf is NaN."""
    least = torch.finfo(dtype).min
    gate = torch.tensor([-torch.inf, least, least / 2, -1e4, -200.0], dtype=dtype)
    up = torch.tensor([2.0, -2.0, 0.0, least, -least, torch.inf, -torch.inf, torch.nan])
    pairs = torch.cartesian_prod(gate, up.to(dtype))
    got = op(pairs.T.reshape(1, -1).contiguous().to(device)).view(len(gate), len(up)).cpu()
    assert torch.equal(got[:, :5].float(), torch.zeros(len(gate), 5))
    assert got[:, 5:].isnan().all()


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_empty_inputs_give_empty_outputs(device, shape):
    out = kernels.silu_and_mul(torch.ones(shape, device=device))
    assert out.shape == (shape[0], shape[1] // 2)


def test_tile():
    assert tile_for(1000, 3000) == ((64, 4096) if INTERPRET else (1, 1024))


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(8)}, ValueError, r"x: expected shape \[any, any\], got \[8\]"),
        ({"x": torch.ones(2, 8).long()}, TypeError, r"x: expected dtype .*, got torch\.int64"),
        ({"x": torch.ones(8, 2).T}, ValueError, r"x: expected unit last stride"),
        ({"x": torch.ones(2, 7)}, ValueError, r"x: expected an even last size .*, got 7"),
        ({"out": torch.ones(2, 8)}, ValueError, r"out: expected shape \[2, 4\], got \[2, 8\]"),
        ({"out": torch.ones(2, 4).half()}, TypeError, r"out: expected dtype torch\.float32"),
    ],
)
def test_wrong_arguments_are_named(device, change, error, message):
    arguments = {"x": torch.ones(2, 8)} | change
    for op in (kernels.silu_and_mul, kernels.gelu_tanh_and_mul):
        with pytest.raises(error, match=message):
            op(**{name: value.to(device) for name, value in arguments.items()})
