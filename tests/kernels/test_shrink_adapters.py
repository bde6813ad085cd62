"""The first product of adapters (LoRA): each token with the A of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import reference
from mrv1.kernels.layers.lora import LoraMatrices
from tests.kernels.elementwise import (
    DTYPES,
    assert_gaps_untouched,
    in_a_wider_row,
    normal,
    seeds,
    tiles,
)
from tests.kernels.lora_adapters import USES, added, lora_adapters, of_tokens

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

PARTS = ((48,), (16, 8), (8, 4, 4))


def test_the_oracles_equal_the_formula():
    for parts in PARTS:
        adapters = lora_adapters(5, 12, parts, torch.float64, "cpu")
        x, out = normal((5, 12), torch.float64, "cpu"), torch.zeros(5, sum(parts)).double()
        shrunk = reference.shrink_adapters(x, adapters)
        reference.add_adapters(out, shrunk, adapters)
        torch.testing.assert_close(out, added(x, adapters))


@given(
    num_tokens=st.sampled_from([1, 2, 17, 40]),
    num_in=st.sampled_from([16, 100, 300]),
    parts=st.sampled_from(PARTS),
    max_rank=st.sampled_from([1, 8, 12, 16]),
    dtype=st.sampled_from(DTYPES),
    uses=st.sampled_from(USES),
    as_on_gpu=st.booleans(),
    seed=seeds,
)
def test_sums_are_within_their_error_budget(
    device, num_tokens, num_in, parts, max_rank, dtype, uses, as_on_gpu, seed
):
    """Unused slots and ranks are NaN: none is read, and what has no adapter is 0."""
    adapters = lora_adapters(
        num_tokens, num_in, parts, dtype, device, max_rank=max_rank, uses=uses, seed=seed
    )
    x = in_a_wider_row(normal((num_tokens, num_in), dtype, device, seed), 8, 16)
    with tiles("shrink_adapters", as_on_gpu=as_on_gpu):
        got = kernels.shrink_adapters(x, adapters)
    want = reference.shrink_adapters(x.double(), of_doubles(adapters))
    assert got.dtype == torch.float32
    terms = reference.shrink_adapters(x.double().abs(), of_doubles(adapters, positive=True))
    slack = 8 * torch.finfo(torch.float32).eps * (1 + terms)
    assert ((got - want).abs() <= slack).all()
    assert torch.equal(got == 0, want == 0)
    assert_gaps_untouched(x)


def of_doubles(adapters, *, positive: bool = False):
    """Return the adapters in float64; ``positive``: with the size of each value."""
    of = torch.abs if positive else (lambda each: each)
    matrices = adapters.matrices
    wide = {name: of(getattr(matrices, name).double()) for name in ("a", "b", "scaling")}
    return replace(adapters, matrices=replace(matrices, **wide))


@given(
    num_tokens=st.sampled_from([2, 17, 33]),
    dtype=st.sampled_from(DTYPES),
    uses=st.sampled_from(("mixed", "one")),
    seed=seeds,
)
def test_bits_do_not_depend_on_the_other_tokens(device, num_tokens, dtype, uses, seed):
    adapters = lora_adapters(num_tokens, 100, (8, 8), dtype, device, uses=uses, seed=seed)
    x = normal((num_tokens, 100), dtype, device, seed)
    many = kernels.shrink_adapters(x, adapters)
    for row in {0, num_tokens // 2, num_tokens - 1}:
        rows = slice(row, row + 1)
        assert torch.equal(kernels.shrink_adapters(x[rows], of_tokens(adapters, rows)), many[rows])


def test_no_token_is_nothing(device):
    adapters = lora_adapters(0, 16, (8,), torch.float16, device)
    x = torch.empty(0, 16, dtype=torch.float16, device=device)
    assert kernels.shrink_adapters(x, adapters).shape == (0, 8)


def test_wrong_arguments_are_refused(device):
    adapters = lora_adapters(3, 16, (8, 4), torch.float16, device)
    x, matrices = normal((3, 16), torch.float16, device), adapters.matrices

    def refuses(error, message, of=matrices, slots=adapters.slots, x=x):
        with pytest.raises(error, match=message):
            kernels.shrink_adapters(x, replace(adapters, matrices=of, slots=slots))

    refuses(TypeError, r"adapters.b: expected dtype torch.float32", x=x.float())
    refuses(ValueError, r"adapters.a: expected shape \[5, 16, 15\]", x=x[:, :15])
    refuses(ValueError, r"adapters.slots: expected shape \[2\]", x=x[:2])
    refuses(TypeError, "adapters.slots: expected dtype torch.int32", slots=adapters.slots.long())
    refuses(TypeError, "adapters.ranks", of=replace(matrices, ranks=matrices.ranks.long()))
    refuses(TypeError, "adapters.scaling", of=replace(matrices, scaling=matrices.scaling.half()))
    refuses(ValueError, "adapters.a: expected", of=replace(matrices, part_rows=(6, 3, 3)))
    refuses(ValueError, "adapters.part_rows: expected 1 to 3 parts", of=replace(
        matrices, part_rows=(3, 3, 3, 3)
    ))  # fmt: skip


def test_empty_matrices_have_no_adapter(device):
    matrices = LoraMatrices.empty(3, 4, 16, (8, 4), device=device, dtype=torch.bfloat16)
    assert (matrices.max_rank, matrices.part_starts) == (4, (0, 8))
    assert not matrices.ranks.any()
    assert matrices.nbytes == 3 * (8 * 16 * 2 + 4 * 12 * 2 + 2 * 4 + 2 * 4)
