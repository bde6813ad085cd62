"""top-k and top-p against a plain-Python statement of their meaning."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1.sampler import filter_logits

EDGE = 1e-9  # how close a cumulative probability may come to top_p before rounding decides


def kept_by_hand(
    row: list[float], temperature: float, top_k: int, top_p: float
) -> set[int] | None:
    """Return the ids that stay, or None if a rounding of the cumulative sum decides."""
    if temperature == 0:
        return set(range(len(row)))
    if top_k:
        kth = sorted(row, reverse=True)[min(top_k, len(row)) - 1]
        alive = [i for i, x in enumerate(row) if x >= kth]
    else:
        alive = list(range(len(row)))
    if top_p == 1.0:
        return {i for i in alive if row[i] > -math.inf}
    top = max(row)
    weight = {i: math.exp((row[i] - top) / temperature) for i in alive}
    total = math.fsum(weight.values())
    mass, last = 0.0, top
    for i in sorted(alive, key=lambda i: -row[i]):
        if abs(mass / total - top_p) < EDGE:
            return None
        if mass / total >= top_p:
            break
        mass += weight[i]
        last = row[i]
    return {i for i in alive if row[i] >= last and row[i] > -math.inf}


logits_rows = st.lists(
    st.one_of(st.integers(-4, 4).map(float), st.floats(-8, 8, width=16), st.just(-math.inf)),
    min_size=1,
    max_size=12,
).filter(lambda row: max(row) > -math.inf)


@given(
    row=logits_rows,
    temperature=st.sampled_from([0.0, 0.25, 1.0, 3.0]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.99, 1.0]),
)
def test_what_stays_is_what_the_definition_says(row, temperature, top_k, top_p):
    expected = kept_by_hand(row, temperature, top_k, top_p)
    if expected is None:
        return
    logits = torch.tensor([row], dtype=torch.float64)
    out = filter_logits(
        logits,
        torch.tensor([temperature]),
        torch.tensor([top_k], dtype=torch.int32),
        torch.tensor([top_p], dtype=torch.float64),
    )
    finite = {i for i, x in enumerate(row) if x > -math.inf}
    assert {i for i, x in enumerate(out[0].tolist()) if x > -math.inf} == expected & finite
    assert all(out[0, i] == logits[0, i] for i in expected)


def test_every_row_has_its_own_parameters():
    logits = torch.tensor([[1.0, 2.0, 3.0, 3.0]]).expand(4, 4)
    out = filter_logits(
        logits,
        torch.tensor([1.0, 1.0, 0.0, 1.0]),
        torch.tensor([1, 3, 1, 0], dtype=torch.int32),
        torch.tensor([1.0, 1.0, 0.1, 0.2]),
    )
    kept = [[i for i in range(4) if row[i] > -torch.inf] for row in out.tolist()]
    assert kept == [[2, 3], [1, 2, 3], [0, 1, 2, 3], [2, 3]]


@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_a_row_without_any_token_stays_empty(top_p):
    logits = torch.full((1, 5), -torch.inf)
    out = filter_logits(
        logits, torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.tensor([top_p])
    )
    assert (out == -torch.inf).all()
