"""Columns of features added to hidden states, against a loop over tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import reference
from tests.kernels.elementwise import DTYPES, normal, tiles

pytestmark = [pytest.mark.interp, pytest.mark.gpu]


@given(
    sources=st.lists(st.integers(-1, 4), max_size=33),
    num_more=st.integers(0, 3),
    is_read=st.booleans(),
    hidden_size=st.sampled_from([1, 48, 200]),
    layer=st.integers(0, 2),
    dtype=st.sampled_from(DTYPES),
    as_on_gpu=st.booleans(),
)
def test_columns_are_added_to_the_tokens_of_features(
    device, sources, num_more, is_read, hidden_size, layer, dtype, as_on_gpu
):
    """A source, none (-1), and tokens after the last source; other tokens keep every bit."""
    before = normal((len(sources) + num_more, hidden_size), dtype, "cpu", 1)
    rows = normal((5, 3 * hidden_size), dtype, "cpu", 2)
    source = torch.tensor([*sources, *[99] * 3], dtype=torch.int32)  # past the count: not read
    count = torch.tensor([len(sources) if is_read else 0], dtype=torch.int32)
    first, want = layer * hidden_size, before.clone()
    for token, row in enumerate(sources if is_read else []):
        if row >= 0:
            added = rows[row, first : first + hidden_size]
            want[token] = (before[token].double() + added.double()).to(dtype)
    for ops, where in ((kernels, device), (reference, torch.device("cpu"))):
        features = kernels.FeatureRows(rows.to(where), source.to(where), count.to(where))
        hidden = before.to(where, copy=True)
        with tiles("add_features", as_on_gpu=as_on_gpu):
            ops.add_features(hidden, features, first)
        assert torch.equal(hidden.cpu(), want)


ROWS, SOURCE, COUNT = torch.zeros(5, 12), torch.zeros(3).int(), torch.zeros(1).int()


@pytest.mark.parametrize(
    ("hidden", "features", "first_column", "error", "message"),
    [
        (torch.zeros(3), (ROWS, SOURCE, COUNT), 0, ValueError, r"hidden: expected shape \[any, a"),
        (torch.zeros(3, 4).long(), (ROWS, SOURCE, COUNT), 0, TypeError, "hidden: expected dtype"),
        (
            torch.zeros(3, 4),
            (ROWS, SOURCE, COUNT),
            9,
            ValueError,
            r"features\.rows: expected 4 columns from 9 on, got 12 columns",
        ),
        (torch.zeros(3, 4), (ROWS, SOURCE, COUNT), -1, ValueError, r"expected 4 columns from -1"),
        (torch.zeros(3, 4), (ROWS.half(), SOURCE, COUNT), 4, TypeError, r"features\.rows: expect"),
        (
            torch.zeros(3, 4),
            (ROWS, SOURCE.long(), COUNT),
            4,
            TypeError,
            r"features\.source: expect",
        ),
    ],
)
def test_wrong_arguments_are_named(device, hidden, features, first_column, error, message):
    moved = kernels.FeatureRows(*(value.to(device) for value in features))
    with pytest.raises(error, match=message):
        kernels.add_features(hidden.to(device), moved, first_column)
