"""min-p, top-k and top-p against a plain-Python statement of their meaning."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1.kernels.reference import kept_tokens

EDGE = 1e-9  # closer to top_p or min_p than this, rounding decides


def kept_by_hand(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int] | None:
    """Return the ids that are kept, or None if rounding decides."""
    alive = list(range(len(row)))
    if min_p:
        ratios = [math.exp((x - max(row)) / temperature) for x in row]
        if any(abs(ratio / min_p - 1) < EDGE for ratio in ratios if ratio < 1):
            return None
        alive = [i for i in alive if ratios[i] >= min_p]
    if top_k:
        kth = sorted((row[i] for i in alive), reverse=True)[min(top_k, len(alive)) - 1]
        alive = [i for i in alive if row[i] >= kth]
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


def kept(rows: torch.Tensor, *filters: list[float]) -> list[set[int]]:
    top_k, top_p, min_p = filters
    found = kept_tokens(
        rows,
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor(min_p, dtype=torch.float64),
    )
    return [set(row.nonzero().flatten().tolist()) for row in found]


@given(
    row=logits_rows,
    temperature=st.sampled_from([0.25, 1.0, 3.0]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.25, 1.0]),
)
def test_the_kept_tokens_follow_the_definitions(row, temperature, top_k, top_p, min_p):
    expected = kept_by_hand(row, temperature, top_k, top_p, min_p)
    if expected is None:
        return
    scaled = torch.tensor([row], dtype=torch.float64) / temperature
    finite = {i for i, x in enumerate(row) if x > -math.inf}
    assert kept(scaled, [top_k], [top_p], [min_p]) == [expected & finite]


def test_every_row_has_its_own_parameters():
    rows = torch.tensor([[1.0, 2.0, 3.0, 3.0]], dtype=torch.float64).expand(5, 4)
    found = kept(rows, [1, 3, 0, 0, 0], [1, 1, 0.2, 1, 1], [0, 0, 0, 0.3, 0])
    assert found == [{2, 3}, {1, 2, 3}, {2, 3}, {1, 2, 3}, {0, 1, 2, 3}]


@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_a_row_without_tokens_keeps_no_token(top_p):
    rows = torch.full((1, 5), -torch.inf, dtype=torch.float64)
    assert kept(rows, [0], [top_p], [0.0]) == [set()]
