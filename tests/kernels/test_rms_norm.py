"""RMS norm, with and without a residual, on contiguous tensors and views of fused projections."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import reference
from mrv1.kernels.layers.rms_norm import RmsNormConfig
from tests.kernels.elementwise import (
    DTYPES,
    assert_gaps_untouched,
    assert_in_budget,
    in_a_wider_row,
    normal,
    seeds,
    tiles,
)

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

EPS = 1e-6
DIMS = (1, 16, 80, 96, 128, 576, 1000)  # 80, 96, 576 and 1000 leave part of a tile empty


def _exact(x, weight, eps=EPS):
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def _torch(x, weight, eps=EPS):
    """Return transformers' LlamaRMSNorm; with a float32 weight, its Gemma2RMSNorm."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (
        (weight * normed).to(x.dtype) if weight.dtype != x.dtype else weight * normed.to(x.dtype)
    )


# --- oracle ------------------------------------------------------------------------------------


def test_the_oracle_equals_the_formula():
    x, weight = normal((3, 5), torch.float64, "cpu"), normal((5,), torch.float64, "cpu", 1)
    residual = normal((3, 5), torch.float64, "cpu", 2)
    want, sums = torch.empty(3, 5).double(), torch.empty(3, 5).double()
    for row in range(3):
        for col in range(5):
            sums[row, col] = x[row, col].item() + residual[row, col].item()
        root = math.sqrt(sum(value**2 for value in sums[row].tolist()) / 5 + 0.25)
        for col in range(5):
            want[row, col] = sums[row, col].item() / root * weight[col].item()
    got = reference.rms_norm(x, weight, 0.25, residual=residual)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(residual, sums)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_the_oracle_rounds_as_transformers_does(dtype, wide):
    """As Llama, and with a float32 weight as Gemma."""
    x = normal((4, 96), dtype, "cpu")
    weight = normal((96,), torch.float32 if wide else dtype, "cpu", 1)
    assert torch.equal(reference.rms_norm(x, weight, EPS), _torch(x, weight))


# --- properties --------------------------------------------------------------------------------


@given(
    shape=st.sampled_from([(1,), (7,), (33,), (3, 4), (5, 1)]),
    dim=st.sampled_from(DIMS),
    dtype=st.sampled_from(DTYPES),
    wide=st.booleans(),
    gap=st.sampled_from([0, 8, 3]),
    as_on_gpu=st.booleans(),
    seed=seeds,
)
def test_rms_norm_is_as_exact_as_torch(device, shape, dim, dtype, wide, gap, as_on_gpu, seed):
    x = in_a_wider_row(normal((*shape, dim), dtype, device, seed), gap, 2 * gap)
    weight = normal((dim,), torch.float32 if wide else dtype, device, seed + 1)
    out = in_a_wider_row(torch.zeros_like(x), 2 * gap, gap)
    with tiles("rms_norm", as_on_gpu=as_on_gpu):
        assert kernels.rms_norm(x, weight, EPS, out=out) is out
    assert_in_budget(out, _torch(x, weight), _exact(x, weight))
    assert_gaps_untouched(out)
    assert_gaps_untouched(x)


@given(
    num_tokens=st.sampled_from([1, 2, 17]),
    dim=st.sampled_from(DIMS),
    dtype=st.sampled_from(DTYPES),
    gap=st.sampled_from([0, 8]),
    as_on_gpu=st.booleans(),
    seed=seeds,
)
def test_the_residual_becomes_the_rounded_sum(
    device, num_tokens, dim, dtype, gap, as_on_gpu, seed
):
    x = in_a_wider_row(normal((num_tokens, dim), dtype, device, seed), 0, gap)
    residual = in_a_wider_row(normal((num_tokens, dim), dtype, device, seed + 1) * 9, gap, gap)
    weight = normal((dim,), dtype, device, seed + 2)
    total = residual + x
    with tiles("rms_norm", as_on_gpu=as_on_gpu):
        out = kernels.rms_norm(x, weight, EPS, residual=residual)
    assert torch.equal(residual, total)
    assert_gaps_untouched(residual)
    assert_in_budget(out, _torch(total, weight), _exact(total, weight))


@given(
    num_tokens=st.sampled_from([1, 2, 17]),
    dim=st.sampled_from(DIMS),
    dtype=st.sampled_from(DTYPES),
    wide=st.booleans(),
    in_place=st.booleans(),
    as_on_gpu=st.booleans(),
    seed=seeds,
)
def test_a_norm_is_rounded_and_added(
    device, num_tokens, dim, dtype, wide, in_place, as_on_gpu, seed
):
    x = in_a_wider_row(normal((num_tokens, dim), dtype, device, seed), 0, 8)
    onto = in_a_wider_row(normal((num_tokens, dim), dtype, device, seed + 1) * 9, 8, 8)
    weight = normal((dim,), torch.float32 if wide else dtype, device, seed + 2)
    with tiles("rms_norm", as_on_gpu=as_on_gpu):
        want = onto + kernels.rms_norm(x, weight, EPS)
        out = kernels.rms_norm(x, weight, EPS, onto=onto, out=onto if in_place else None)
    if dtype == torch.float32:  # the product with the weight and the sum may be fused
        torch.testing.assert_close(out, want, rtol=1e-6, atol=2e-6)
    else:
        assert torch.equal(out, want)
    assert (out is onto) == in_place
    assert_gaps_untouched(onto)
    oracle = reference.rms_norm(x, weight, EPS, onto=torch.zeros_like(x))
    assert torch.equal(oracle, reference.rms_norm(x, weight, EPS))


@given(
    num_tokens=st.sampled_from([1, 5]),
    dim=st.sampled_from(DIMS),
    dtype=st.sampled_from(DTYPES),
    as_on_gpu=st.booleans(),
    seed=seeds,
)
def test_two_heads_may_have_a_weight_each(device, num_tokens, dim, dtype, as_on_gpu, seed):
    qkv = in_a_wider_row(normal((num_tokens, 2 * dim), dtype, device, seed), 0, 8)
    heads = qkv.unflatten(1, (2, dim))
    first, second = (normal((dim,), dtype, device, seed + i) for i in (1, 2))
    with tiles("rms_norm", as_on_gpu=as_on_gpu):
        want = [
            kernels.rms_norm(heads[:, index].contiguous(), weight, EPS)
            for index, weight in enumerate((first, second))
        ]
        kernels.rms_norm(heads, first, EPS, second_weight=second, out=heads)
    oracle = reference.rms_norm(heads, first, EPS, second_weight=second)
    assert torch.equal(oracle[:, 1], reference.rms_norm(heads[:, 1], second, EPS))
    assert torch.equal(heads, torch.stack(want, dim=1))
    assert_gaps_untouched(qkv)


@given(dtype=st.sampled_from(DTYPES), exponent=st.integers(1, 4), seed=seeds)
def test_a_power_of_two_cancels(device, dtype, exponent, seed):
    x, weight = normal((4, 80), dtype, device, seed), torch.ones(80, dtype=dtype, device=device)
    want = kernels.rms_norm(x, weight, 0.0)
    assert torch.equal(kernels.rms_norm(x * 2.0**exponent, weight, 0.0), want)


@given(order=st.permutations(range(9)), seed=seeds)
def test_a_row_does_not_depend_on_other_rows(device, order, seed):
    x, weight = normal((9, 96), torch.bfloat16, device, seed), normal((96,), DTYPES[2], device)
    want = kernels.rms_norm(x, weight, EPS)
    assert torch.equal(kernels.rms_norm(x[list(order)], weight, EPS), want[list(order)])


@given(
    shape=st.sampled_from([(2,), (9,), (83,), (5, 3)]),
    dim=st.sampled_from([8, *DIMS]),
    dtype=st.sampled_from(DTYPES),
    gap=st.sampled_from([0, 8, 3]),
    has_residual=st.booleans(),
    as_on_gpu=st.booleans(),
    seed=seeds,
)
def test_a_token_has_the_same_bits_alone_and_in_a_batch(
    device, shape, dim, dtype, gap, has_residual, as_on_gpu, seed
):
    x = in_a_wider_row(normal((*shape, dim), dtype, device, seed), gap, 2 * gap)
    weight = normal((dim,), dtype, device, seed + 1)
    residual = None
    if has_residual and x.dim() == 2:
        residual = normal((*shape, dim), dtype, device, seed + 2)

    def norm(rows):
        added = None if residual is None else residual[rows].clone()
        return kernels.rms_norm(x[rows], weight, EPS, residual=added)

    with tiles("rms_norm", as_on_gpu=as_on_gpu):
        want = norm(slice(None))
        for row in {0, shape[0] // 2, shape[0] - 1}:
            assert torch.equal(norm(slice(row, row + 1)), want[row : row + 1])


@given(
    dim=st.sampled_from([8, 32, *DIMS]),
    dtype=st.sampled_from(DTYPES),
    gaps=st.tuples(*[st.sampled_from([(0, 0), (8, 16), (3, 6), (1, 15)])] * 3),
    has_residual=st.booleans(),
    as_on_gpu=st.booleans(),
    seed=seeds,
)
def test_bits_do_not_depend_on_strides_and_addresses(
    device, dim, dtype, gaps, has_residual, as_on_gpu, seed
):
    rows, weight = normal((83, dim), dtype, device, seed), normal((dim,), dtype, device, seed + 1)
    added = normal((83, dim), dtype, device, seed + 2) if has_residual else None

    def norm(some, x_gap, residual_gap, out_gap):
        x, out = in_a_wider_row(rows[some], *x_gap), in_a_wider_row(rows[some], *out_gap)
        residual = None if added is None else in_a_wider_row(added[some], *residual_gap)
        return kernels.rms_norm(x, weight, EPS, residual=residual, out=out)

    with tiles("rms_norm", as_on_gpu=as_on_gpu):
        want = norm(slice(None), *[(0, 0)] * 3)
        assert torch.equal(norm(slice(None), *gaps), want)
        assert torch.equal(norm(slice(82, 83), *gaps), want[82:])


@given(
    dim=st.sampled_from([8, 64, 1024]),
    level=st.integers(1, 9),
    gaps=st.sampled_from([(0, 0), (8, 16), (3, 6)]),
    num_rows=st.sampled_from([1, 83]),
    seed=seeds,
)
def test_squares_are_added_neighbours_first(device, dim, level, gaps, num_rows, seed):
    """Exchanged halves of a block leave a sum of pairs alone, and other orders not."""
    block = 2 ** min(level, dim.bit_length() - 2)
    exponents = torch.randint(
        -6, 7, (num_rows, dim), generator=torch.Generator().manual_seed(seed)
    )
    x = normal((num_rows, dim), torch.float32, device, seed) * 2.0 ** exponents.to(device)
    weight = torch.ones(dim, device=device)

    def exchanged(rows: torch.Tensor) -> torch.Tensor:
        return rows.view(num_rows, -1, 2, block).flip(2).reshape(num_rows, dim)

    def norm(rows: torch.Tensor) -> torch.Tensor:
        return kernels.rms_norm(in_a_wider_row(rows, *gaps), weight, EPS)

    assert torch.equal(norm(exchanged(x)), exchanged(norm(x)))


# --- edges -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_normalised_value_is_rounded_before_the_weight(device, dtype):
    """The mean square of 1 and 7 is 25: 7 / 5 = 1.4 is rounded before the weight is applied."""
    x = torch.tensor([1.0, 7.0] * 64, dtype=dtype, device=device)[None]
    weight = 1 + torch.arange(128, dtype=torch.float32, device=device).to(dtype) / 128
    want = _torch(x, weight)
    assert torch.equal(kernels.rms_norm(x, weight, 0.0), want)
    assert not torch.equal(want, _exact(x, weight, 0.0).to(dtype))  # a single rounding differs


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place(device, dtype):
    x, weight = normal((5, 3, 80), dtype, device), normal((80,), dtype, device, 1)
    want = kernels.rms_norm(x, weight, EPS)
    assert kernels.rms_norm(x, weight, EPS, out=x) is x
    assert torch.equal(x, want)


def test_heads_of_a_fused_projection(device):
    qkv = normal((6, 8, 64), torch.float16, device)
    before, weight = qkv.clone(), normal((64,), torch.float16, device, 1)
    q = qkv[:, 2:5]
    kernels.rms_norm(q, weight, EPS, out=q)
    assert torch.equal(qkv[:, :2], before[:, :2])
    assert torch.equal(qkv[:, 5:], before[:, 5:])
    assert_in_budget(q, _torch(before[:, 2:5], weight), _exact(before[:, 2:5], weight))


def test_a_row_of_zeros_stays_zero(device):
    x = torch.zeros(2, 96, device=device)
    assert not kernels.rms_norm(x, torch.ones(96, device=device), EPS).any()


def test_nan_stays_in_its_row(device):
    x = normal((3, 96), torch.float32, device)
    want = kernels.rms_norm(x, torch.ones(96, device=device), EPS)
    x[1, 5] = torch.nan
    got = kernels.rms_norm(x, torch.ones(96, device=device), EPS)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], want[[0, 2]])


def test_float16_squares_do_not_overflow(device):
    x, weight = normal((2, 96), torch.float16, device) * 2e4, torch.ones(96, device=device).half()
    assert_in_budget(kernels.rms_norm(x, weight, EPS), _torch(x, weight), _exact(x, weight))


@pytest.mark.parametrize("shape", [(0, 64), (0, 4, 64), (3, 0, 64)])
def test_no_rows(device, shape):
    weight = torch.ones(64, device=device)
    assert kernels.rms_norm(torch.ones(shape, device=device), weight, EPS).shape == shape


@pytest.mark.parametrize("dim", [1, 64, 128, 1000, 4096, 16384])
def test_configurations_cover_the_row(dim):
    gpu, cpu = RmsNormConfig.default_for(dim), RmsNormConfig.for_interpreter(1000, dim)
    assert gpu.tile_rows >= 1
    assert gpu.num_warps in (4, 8, 16)
    assert cpu.tile_rows * dim <= 2**18


# --- errors ------------------------------------------------------------------------------------


STRIDED = object()  # a weight with a gap between elements, which a copy to a GPU would close


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, r"x: expected a torch\.Tensor, got list"),
        ({"x": torch.ones(2, 8).int()}, TypeError, r"x: expected dtype .*, got torch\.int32"),
        ({"x": torch.ones(8)}, ValueError, r"x: expected shape \[tokens, dim\] or .*, got \[8\]"),
        ({"x": torch.ones(2, 0)}, ValueError, r"x: expected shape .* dim >= 1, got \[2, 0\]"),
        ({"x": torch.ones(8, 2).T}, ValueError, r"x: expected unit last stride, got strides"),
        ({"weight": torch.ones(4)}, ValueError, r"weight: expected shape \[8\], got \[4\]"),
        ({"weight": torch.ones(8).half()}, TypeError, r"weight: expected dtype torch\.float32"),
        ({"weight": STRIDED}, ValueError, r"weight: expected a contiguous tensor"),
        ({"residual": torch.ones(1, 8)}, ValueError, r"residual: expected shape \[2, 8\]"),
        ({"out": torch.ones(2, 8).half()}, TypeError, r"out: expected dtype torch\.float32"),
        (
            {"x": torch.ones(2, 3, 8), "residual": torch.ones(2, 3, 8)},
            ValueError,
            r"residual: expected None for a three-dimensional x, got shape \[2, 3, 8\]",
        ),
        (
            {"x": torch.ones(2, 3, 8), "second_weight": torch.ones(8)},
            ValueError,
            r"second_weight: expected None for x of shape \[2, 3, 8\], not \[tokens, 2, dim\]",
        ),
        (
            {"x": torch.ones(2, 3, 8), "onto": torch.ones(2, 3, 8)},
            ValueError,
            r"onto: expected None for a three-dimensional x, got shape \[2, 3, 8\]",
        ),
    ],
)
def test_wrong_arguments_are_named(device, change, error, message):
    arguments = {"x": torch.ones(2, 8), "weight": torch.ones(8), "residual": None, "out": None}
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in (arguments | change).items()
    }
    if arguments["weight"] is STRIDED:
        arguments["weight"] = torch.ones(16, device=device)[::2]
    with pytest.raises(error, match=message):
        kernels.rms_norm(eps=EPS, **arguments)
