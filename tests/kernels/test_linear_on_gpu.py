"""The linear layer at the sizes of models, too large for the interpreter."""

from __future__ import annotations

import pytest
import torch

from mrv1 import kernels
from mrv1.kernels.layers.sum_order import undivided_leaves
from tests.kernels.linear_layers import (
    EPS,
    FEATURES,
    assert_linear_in_budget,
    library_calls,
    linear_arguments,
    of_rank,
    of_rows,
    sum_of_ranks,
)

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_only]


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize(
    "size", [(1024, 4096), (1024, 3072), (2048, 1024), (3072, 1024), (4096, 1536)]
)
def test_deterministic_rows_do_not_depend_on_the_batch_at_model_sizes(device, size, features):
    arguments = linear_arguments(257, *size, torch.bfloat16, device, features)
    many = kernels.linear(**arguments, deterministic=True)
    assert_linear_in_budget(many, **arguments)
    for num_tokens in (1, 2, 15, 16, 17, 32, 33, 64, 65, 128, 255, 256):
        few = of_rows(arguments, slice(num_tokens))
        assert torch.equal(kernels.linear(**few, deterministic=True), many[:num_tokens])
        if "normed" in features:
            assert torch.equal(few["normed_out"], arguments["normed_out"][:num_tokens])
        few = of_rows(arguments, slice(num_tokens))
        with library_calls() as calls:
            got = kernels.linear(**few)
        assert_linear_in_budget(got, **few, by_library=bool(calls))


@pytest.mark.parametrize(
    ("num_in", "num_rows"),
    [(576, 1024), (1088, 17), (2048, 1024), (3072, 1024), (4096, 1024), (14_336, 1024)],
)
def test_leaves_of_ranks_add_up_at_model_sizes(device, num_in, num_rows):
    """Every kernel of every number of ranks.

    576 inputs have leaves that no bulk copy brings; 1088 have leaves that end within 16 inputs,
    which one and two ranks have in registers, and four and eight in tiles.
    """
    features = ("bias", "residual", "normed")
    arguments = linear_arguments(300, num_in, num_rows, torch.bfloat16, device, features)
    many = kernels.linear(**arguments, deterministic=True, leaves=8)
    assert_linear_in_budget(many, **arguments)
    for num_tokens in (1, 2, 16, 17, 33, 64, 65, 128, 129, 256, 300):
        few = of_rows(arguments, slice(num_tokens))
        assert torch.equal(kernels.linear(**few, deterministic=True, leaves=8), many[:num_tokens])
        assert torch.equal(few["normed_out"], arguments["normed_out"][:num_tokens])
        wide = torch.full((num_tokens, num_rows), torch.nan, device=device)
        kernels.linear(**of_rank(few, 0, 1), out=wide, deterministic=True, leaves=8)
        for num_ranks in (2, 4, 8):
            parts = [
                kernels.linear(
                    **of_rank(few, rank, num_ranks),
                    out=torch.full((num_tokens, num_rows), torch.nan, device=device),
                    deterministic=True,
                    leaves=8 // num_ranks,
                )
                for rank in range(num_ranks)
            ]
            got = sum_of_ranks(parts)
            assert torch.equal(got, wide)
            got = (got + few["bias"].float() + few["residual"].float()).bfloat16()
            assert torch.equal(got, many[:num_tokens])
            normed = kernels.rms_norm(got, few["out_norm_weight"], EPS)
            assert torch.equal(normed, few["normed_out"])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("size", [(896, 1024), (1024, 3072), (2560, 2048), (4096, 1536)])
def test_rows_of_ranks_have_the_bits_of_one_at_model_sizes(device, size, gated):
    features = ("bias", "gated") if gated else ("bias",)
    arguments = linear_arguments(257, *size, torch.bfloat16, device, features)
    options = {"deterministic": True, "leaves": undivided_leaves(size[0])}
    want = kernels.linear(**arguments, **options)
    for num_tokens in (1, 16, 33, 64, 65, 257):
        few = of_rows(arguments, slice(num_tokens))
        for num_ranks in (2, 4, 8):
            own = size[1] // num_ranks
            for rank in range(num_ranks):
                rows = {
                    name: torch.cat(
                        [half[rank * own :][:own] for half in arguments[name].chunk(1 + gated)]
                    )
                    for name in ("weight", "bias")
                }
                got = kernels.linear(**(few | rows), **options)
                assert torch.equal(got, want[:num_tokens, rank * own :][:, :own])


@pytest.mark.parametrize("num_tokens", [1, 16, 32, 64, 100])
@pytest.mark.parametrize("features", [(), ("gated",), ("residual", "normed")])
def test_prefetching_changes_nothing(device, num_tokens, features):
    arguments = linear_arguments(num_tokens, 1024, 1024, torch.bfloat16, device, features)
    want = kernels.linear(**arguments)
    for num_bytes in (1, 15, 16, 100_000, 20_000_000):
        later = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        assert torch.equal(kernels.linear(**arguments, prefetch=later), want)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 16, 17, 32, 33, 65])
@pytest.mark.parametrize(
    "size", [(300, 256), (1024, 1024), (4096, 1024), (4096, 6144), (14_336, 4096)]
)
def test_float32_errs_at_most_twice_as_much_as_torch(device, size, num_tokens, deterministic):
    """Errors are root mean squares, hardly moved by one unlucky sum; one rounding is added."""
    arguments = linear_arguments(num_tokens, *size, torch.float32, device)
    x, weight = arguments["x"], arguments["weight"]
    exact = x.double() @ weight.double().T
    got = kernels.linear(x, weight, deterministic=deterministic)
    errors = [
        (result.double() - exact).square().mean().sqrt().item()
        for result in (got, torch.nn.functional.linear(x, weight))
    ]
    rounding = torch.finfo(torch.float32).eps / 2 * exact.square().mean().sqrt().item()
    assert errors[0] <= 2 * errors[1] + rounding, errors
