"""The linear layer with quantized weights: few tokens by codes, many by widened weights."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import QuantizedWeight, reference
from mrv1.kernels._base.triton import INTERPRET
from mrv1.kernels.layers import linear_codes
from mrv1.kernels.layers.linear_codes import CodesConfig, scaling_of
from tests.kernels.elementwise import SENTINEL, assert_gaps_untouched, normal, seeds
from tests.kernels.linear_layers import (
    FEATURES,
    assert_linear_in_budget,
    library_calls,
    linear_arguments,
)
from tests.kernels.quantized_weights import KINDS, random_weight

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

DTYPES = (torch.float16, torch.bfloat16)
TOKENS = (1, 2, 9, 17, 33, 65)
SIZES = ((512, 8), (768, 72), (2304, 20))  # inputs, outputs


@contextmanager
def _tiled_calls():
    """Yield a list that gets an entry for every call of tiles, which round as the library does."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        if not INTERPRET:  # else there is no compiler, and no tiles
            from mrv1.kernels.layers import linear_code_tiles as tiles

            launch = tiles.launch_code_tiles

            def listening(call, *rest, **options):
                calls.append(call)
                return launch(call, *rest, **options)

            patch.setattr(tiles, "launch_code_tiles", listening)
        yield calls


@contextmanager
def _as_on(*, gpu: bool):
    """Cut weights as the interpreter does, or as a GPU does."""
    with pytest.MonkeyPatch.context() as patch:
        if gpu:
            patch.setattr(linear_codes, "INTERPRET", False)
        yield


def _arguments(kind, num_tokens, size, dtype, device, features=(), seed=0):
    """Return the arguments of a call, and the same with the weight's values."""
    dense = linear_arguments(num_tokens, *size, dtype, device, features, seed)
    num_rows = len(dense["weight"])
    weight = random_weight(kind, num_rows, size[0], dtype, seed=seed, device=device)
    return dense | {"weight": weight}, dense | {"weight": weight.dense()}


@given(
    kind=st.sampled_from(KINDS),
    num_tokens=st.sampled_from(TOKENS),
    size=st.sampled_from(SIZES),
    dtype=st.sampled_from(DTYPES),
    features=st.sampled_from(FEATURES),
    gpu=st.booleans(),
    seed=seeds,
)
def test_results_are_in_the_budget(device, kind, num_tokens, size, dtype, features, gpu, seed):
    arguments, dense = _arguments(kind, num_tokens, size, dtype, device, features, seed)
    with _as_on(gpu=gpu), library_calls() as calls, _tiled_calls() as tiled:
        got = kernels.linear(**arguments)
    assert_in_budget(got, arguments["weight"], by_library=bool(calls or tiled), **dense)


def assert_in_budget(got, quantized, *, by_library, **dense):
    """Fail unless results err by no more than roundings explain, also those of the weights.

    Where scales are applied to sums, weights are not rounded to the dtype, and the products of
    zero points cancel.
    """
    exact = replace(quantized, dtype=torch.float64).dense()
    roundings = (dense["weight"].double() - exact).square()
    x = dense["x"]
    if "norm_weight" in dense:
        x = reference.rms_norm(x, dense["norm_weight"], dense["eps"])
    spread = 4 * (x.double().square() @ roundings.T).sqrt()
    if quantized.zeros is not None:
        steps = replace(quantized, zeros=torch.zeros_like(quantized.zeros), dtype=torch.float64)
        spread = spread + 2.0**-20 * (x.double().abs() @ steps.dense().abs().T)
    assert_linear_in_budget(got, **dense, by_library=by_library, spread=spread)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["e4m3_row", "int4", "q4_1"])
def test_one_token_is_normed_by_each_program(device, kind, dtype, wide):
    features = ("norm", "wide", "gated") if wide else ("norm", "residual")
    arguments, dense = _arguments(kind, 1, (1024, 40), dtype, device, features)
    with _as_on(gpu=True):
        got = kernels.linear(**arguments)
    assert_in_budget(got, arguments["weight"], by_library=False, **dense)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_value_comes_from_its_place(device, kind, dtype):
    """A token that is 1 in one place, else 0, picks a column: every value exactly."""
    weight = random_weight(kind, 24, 512, dtype, seed=3, device=device)
    dense = weight.dense()
    for first in (0, 448):
        x = torch.zeros(64, 512, dtype=dtype, device=device)
        x[range(64), range(first, first + 64)] = 1
        with _as_on(gpu=True):
            got = kernels.linear(x, weight)
        assert torch.equal(got, dense[:, first : first + 64].T)


@given(
    kind=st.sampled_from(KINDS),
    num_tokens=st.sampled_from([1, 3, 17, 65]),
    features=st.sampled_from(FEATURES),
    dtype=st.sampled_from([*DTYPES, torch.float32]),
    seed=seeds,
)
def test_deterministic_results_are_those_of_the_values(
    device, kind, num_tokens, features, dtype, seed
):
    """However many tokens there are."""
    arguments, dense = _arguments(kind, num_tokens, (512, 24), dtype, device, features, seed)
    if arguments["weight"].order is not None:  # another order of the sum
        arguments["weight"] = replace(arguments["weight"], order=None)
        dense["weight"] = arguments["weight"].dense()
    got = kernels.linear(**arguments, deterministic=True)
    assert torch.equal(got, kernels.linear(**dense, deterministic=True))


@given(
    kind=st.sampled_from(["e4m3_row", "int4", "uint4_order", "q4_1"]),
    num_tokens=st.sampled_from(TOKENS),
    dtype=st.sampled_from(DTYPES),
    gpu=st.booleans(),
)
def test_the_residual_may_be_the_output(device, kind, num_tokens, dtype, gpu):
    arguments, _ = _arguments(kind, num_tokens, (512, 72), dtype, device, ("bias", "residual"))
    with _as_on(gpu=gpu):
        want = kernels.linear(**arguments)
        residual = arguments["residual"]
        assert kernels.linear(**arguments, out=residual) is residual
    assert torch.equal(residual, want)
    assert_gaps_untouched(residual)


@given(
    kind=st.sampled_from(["e4m3_block", "uint4_zeros", "q4_k"]),
    num_tokens=st.sampled_from(TOKENS),
    features=st.sampled_from(FEATURES),
    gpu=st.booleans(),
)
def test_nan_stays_in_its_row(device, kind, num_tokens, features, gpu):
    arguments, _ = _arguments(kind, num_tokens, (512, 24), torch.float16, device, features)
    with _as_on(gpu=gpu):
        want = kernels.linear(**arguments)
        arguments["x"][num_tokens // 2, 7] = torch.nan
        got = kernels.linear(**arguments)
    others = [row for row in range(num_tokens) if row != num_tokens // 2]
    assert got[num_tokens // 2].isnan().all()
    assert torch.equal(got[others], want[others])


# --- edges -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "num_in"), [("e4m3_row", 70), ("e4m3_block", 300), ("int4_row", 100), ("mxfp4", 224)]
)
@pytest.mark.parametrize("num_tokens", [1, 20])
def test_inputs_that_fill_no_line(device, kind, num_in, num_tokens):
    for dtype in DTYPES:
        arguments, dense = _arguments(kind, num_tokens, (num_in, 130), dtype, device)
        with _as_on(gpu=True):
            got = kernels.linear(**arguments)
        assert_in_budget(got, arguments["weight"], by_library=False, **dense)


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_every_result_is_written(device, num_tokens):
    codes = torch.full((130, 256), 0x99, dtype=torch.uint8, device=device)
    weight = QuantizedWeight(
        code="int4", codes=codes, dtype=torch.bfloat16, inputs_per_scale=128,
        scales=torch.ones(130, 4, dtype=torch.bfloat16, device=device),
    )  # fmt: skip
    x = torch.ones(num_tokens, 512, dtype=torch.bfloat16, device=device)
    out = torch.full((num_tokens, 130), SENTINEL, device=device)
    assert (kernels.linear(x, weight, out=out) == 512).all()


@pytest.mark.parametrize("kind", ["int4", "q6_k"])
def test_no_tokens(device, kind):
    weight = random_weight(kind, 6, 512, torch.bfloat16, seed=0, device=device)
    x = torch.empty(0, 512, dtype=torch.bfloat16, device=device)
    assert kernels.linear(x, weight).shape == (0, 6)
    assert reference.linear(x, weight).shape == (0, 6)


def test_splits_are_kept(device):
    """A caller that adds up splits gets them unscaled by anything but the weight's scales."""
    arguments, dense = _arguments("int4", 2, (4096, 16), torch.bfloat16, device)
    with _as_on(gpu=True):
        got = kernels.linear(**arguments, keep_splits=True)
    assert got.dim() == 3
    got = got.sum(0).to(torch.bfloat16)
    assert_in_budget(got, arguments["weight"], by_library=False, **dense)


@pytest.mark.parametrize("num_rows", [1, 1024, 6144, 28672, 151_936])
@pytest.mark.parametrize("num_elements", [16, 1024, 2048, 7168])
@pytest.mark.parametrize(("scaling", "per_element"), [("end", 2), ("step", 4), ("values", 4)])
def test_configurations(num_elements, num_rows, scaling, per_element):
    for num_tokens in (1, 8, 9, 16, 17, 64):
        config = CodesConfig.default_for(
            num_tokens, num_elements, num_rows, is_gated=False, scaling=scaling,
            per_element=per_element, adds_tokens=False, has_room=True,
        )  # fmt: skip
        steps = -(-num_elements // (32 * config.num_warps))
        assert 1 <= config.splits <= 8
        assert config.splits == 1 or steps >= config.splits * config.depth


def test_scales_are_applied_where_they_cost_least():
    want = {
        "e4m3_tensor": "end", "e4m3_row": "end", "e4m3_block": "step", "int8": "step",
        "int8_zeros": "values", "q8_0": "values", "int4": "step", "int4_row": "end",
        "uint4_zeros": "step", "uint4_order": "step", "q4_0": "values", "q4_1": "values",
        "mxfp4": "values", "q4_k": "values", "q5_k": "values", "q6_k": "values",
    }  # fmt: skip
    got = {kind: scaling_of(random_weight(kind, 4, 512, torch.bfloat16, seed=0)) for kind in KINDS}
    assert got == want


@pytest.mark.parametrize(("kind", "num_in"), [("int8_zeros", 72), ("q4_1", 112), ("mxfp4", 48)])
def test_values_are_scaled_only_where_rows_begin_at_16_bytes(kind, num_in):
    """A lane loads one scale for 16 bytes of codes, which else are not all its own."""
    weight = random_weight(kind, 4, num_in, torch.bfloat16, seed=0)
    assert scaling_of(weight) is None
    aligned = random_weight(kind, 4, 512, torch.bfloat16, seed=0)
    room = aligned.codes.new_empty(aligned.codes.numel() + 2)
    moved = replace(aligned, codes=room[2:].view_as(aligned.codes).copy_(aligned.codes))
    assert (scaling_of(aligned), scaling_of(moved)) == ("values", None)


# --- errors ------------------------------------------------------------------------------------


def test_weights_that_do_not_fit_are_refused(device):
    weight = random_weight("int4", 8, 512, torch.bfloat16, seed=0, device=device)
    x = normal((2, 512), torch.bfloat16, device)
    experts = replace(weight, codes=weight.codes[None], scales=weight.scales[None])
    strided = replace(weight, codes=weight.codes.T.contiguous().T)
    odd = replace(
        random_weight("e4m3_row", 8, 511, torch.bfloat16, seed=0, device=device), order=None
    )
    for x, weight, error, message in (  # noqa: B020
        (x[:, :256], weight, ValueError, "weight: expected 256 inputs, got 512"),
        (x.half(), weight, TypeError, "weight: expected codes of torch.float16 values"),
        (x, experts, ValueError, "weight: expected shape [any, any], got [1, 8, 512]"),
        (x, strided, ValueError, "weight.codes: expected a contiguous tensor"),
        (x[:, :511], odd, ValueError, "weight: expected multiples of 2 inputs"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            kernels.linear(x, weight)
