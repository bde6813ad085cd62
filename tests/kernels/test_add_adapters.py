"""The second product of adapters (LoRA), added to a result."""

from __future__ import annotations

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
from tests.kernels.lora_adapters import USES, lora_adapters, of_tokens

pytestmark = [pytest.mark.interp, pytest.mark.gpu]


def shrunk_of(adapters, num_tokens, device, seed):
    """Return values for every rank that is there, and NaN for the others."""
    matrices = adapters.matrices
    parts = len(matrices.part_rows)
    values = normal((num_tokens, parts, matrices.max_rank), torch.float32, device, seed)
    ranks = matrices.ranks[adapters.slots.clamp(min=0).long()]
    has_rank = torch.arange(matrices.max_rank, device=device) < ranks[..., None]
    has_rank &= (adapters.slots >= 0)[:, None, None]
    return values.masked_fill(~has_rank, torch.nan).flatten(1)


@given(
    num_tokens=st.sampled_from([1, 3, 18, 40]),
    parts=st.sampled_from([(70,), (33, 33), (40, 7, 7)]),
    max_rank=st.sampled_from([1, 8, 12]),
    dtype=st.sampled_from(DTYPES),
    wide=st.booleans(),
    uses=st.sampled_from(USES),
    as_on_gpu=st.booleans(),
    seed=seeds,
)
def test_values_are_the_oracles(
    device, num_tokens, parts, max_rank, dtype, wide, uses, as_on_gpu, seed
):
    """Up to the difference between a fused and a plain addition; other tokens stay as they are."""
    adapters = lora_adapters(
        num_tokens, 16, parts, dtype, device, max_rank=max_rank, uses=uses, seed=seed
    )
    shrunk = shrunk_of(adapters, num_tokens, device, seed + 1)
    out_dtype = torch.float32 if wide else dtype
    before = normal((num_tokens, sum(parts)), out_dtype, device, seed + 2)
    got, want = in_a_wider_row(before, 8, 8), before.clone()
    with tiles("add_adapters", as_on_gpu=as_on_gpu):
        kernels.add_adapters(got, shrunk, adapters)
    reference.add_adapters(want, shrunk, adapters)
    eps = torch.finfo(out_dtype).eps
    torch.testing.assert_close(got, want, rtol=2 * eps, atol=64 * torch.finfo(torch.float32).eps)
    without = adapters.slots < 0
    assert torch.equal(got[without], before[without])
    assert_gaps_untouched(got)


@given(num_tokens=st.sampled_from([2, 20]), dtype=st.sampled_from(DTYPES), seed=seeds)
def test_bits_do_not_depend_on_the_other_tokens(device, num_tokens, dtype, seed):
    adapters = lora_adapters(num_tokens, 16, (20, 30), dtype, device, seed=seed)
    shrunk = shrunk_of(adapters, num_tokens, device, seed + 1)
    many = normal((num_tokens, 50), dtype, device, seed + 2)
    alone = many.clone()
    kernels.add_adapters(many, shrunk, adapters)
    for row in (0, num_tokens - 1):
        rows = slice(row, row + 1)
        kernels.add_adapters(alone[rows], shrunk[rows], of_tokens(adapters, rows))
        assert torch.equal(alone[rows], many[rows])


@pytest.mark.parametrize("splits", [1, 2, 4, 8, 16])
def test_splits_are_added_neighbours_first(device, splits):
    adapters = lora_adapters(5, 16, (20, 30), torch.float16, device)
    shrunk = torch.stack([shrunk_of(adapters, 5, device, seed) for seed in range(splits)], dim=-1)
    got, want = (normal((5, 50), torch.float32, device) for _ in range(2))
    kernels.add_adapters(got, shrunk, adapters)
    while shrunk.shape[-1] > 1:
        shrunk = shrunk[..., 0::2] + shrunk[..., 1::2]
    kernels.add_adapters(want, shrunk[..., 0].contiguous(), adapters)
    assert torch.equal(got, want)


def test_wrong_arguments_are_refused(device):
    adapters = lora_adapters(3, 16, (8, 4), torch.float16, device)
    out = normal((3, 12), torch.float16, device)
    shrunk = torch.zeros(3, 16, device=device)
    with pytest.raises(ValueError, match=r"out: expected shape \[any, 12\]"):
        kernels.add_adapters(out[:, :11], shrunk, adapters)
    with pytest.raises(ValueError, match=r"shrunk: expected shape \[3, 16\]"):
        kernels.add_adapters(out, shrunk[:, :8], adapters)
    with pytest.raises(ValueError, match=r"shrunk: expected splits of \(1, 2, 4, 8, 16\), got 3"):
        kernels.add_adapters(out, shrunk[..., None].repeat(1, 1, 3), adapters)
    with pytest.raises(TypeError, match="shrunk: expected dtype"):
        kernels.add_adapters(out, shrunk.half(), adapters)
    with pytest.raises(ValueError, match=r"adapters.slots: expected shape \[2\]"):
        kernels.add_adapters(out[:2], shrunk[:2], adapters)
