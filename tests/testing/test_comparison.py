"""``compare``: what it finds, what it lets pass, and what it says."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st

from mrv1.testing import compare

ROWS = st.builds(lambda rows, seed: torch.randn(
    rows, 4, generator=torch.Generator().manual_seed(seed)
), st.integers(1, 3), st.integers(0, 99))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Box:
    """A tensor within an argument."""

    inside: torch.Tensor


def arguments(x: torch.Tensor) -> dict[str, object]:
    return {"x": x, "out": torch.full_like(x, torch.nan), "more": [Box(x + 1)]}


def doubled(x, out, more):
    out[:] = 2 * x
    return out.sum(1)


def test_an_op_that_does_the_same_passes():
    compare(doubled, doubled, ROWS, arguments, max_examples=5)
    compare(torch.neg, torch.neg, ROWS, lambda x: (x,), device="cpu", max_examples=5)


def test_both_get_copies():
    seen = torch.ones(2, 4)
    compare(doubled, doubled, st.just(seen), lambda x: (x, x, []), max_examples=1)
    assert torch.equal(seen, torch.ones(2, 4))


def returns_more(x, out, more):
    return [doubled(x, out, more), x]


def returns_float64(x, out, more):
    return doubled(x, out, more).double()


def writes_its_input(x, out, more):
    result = doubled(x, out, more)
    x[0, 0] = 7
    return result


def writes_inside(x, out, more):
    more[0].inside[0, 0] = 7
    return doubled(x, out, more)


def leaves_nan(x, out, more):
    result = doubled(x, out, more)
    out[0, 0] = torch.nan
    return result


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (returns_more, "result: expected ['arguments.more[0].inside'"),
        (returns_float64, "result: expected [1] torch.float32, got [1] torch.float64"),
        (writes_its_input, "arguments.x: "),
        (writes_inside, "arguments.more[0].inside: "),
        (leaves_nan, "arguments.out: "),
    ],
)
def test_a_difference_is_named(op, message):
    one = st.just(torch.ones(1, 4))
    with pytest.raises(AssertionError, match=re.escape(message)):
        compare(op, doubled, one, arguments, max_examples=1, atol=1e-3)


def test_a_tolerance_is_a_tolerance_and_none_means_bytes():
    one = st.just(torch.ones(1, 4))
    compare(lambda x: x + 1e-4, torch.clone, one, lambda x: (x,), max_examples=1, atol=1e-3)
    compare(lambda x: x + 1e-4, torch.clone, one, lambda x: (x,), max_examples=1, rtol=1e-3)
    with pytest.raises(AssertionError, match="result: "):
        compare(lambda x: x + 1e-4, torch.clone, one, lambda x: (x,), max_examples=1)
    with pytest.raises(AssertionError, match="result: "):
        compare(lambda x: -x, torch.clone, st.just(torch.zeros(1)), lambda x: (x,), max_examples=1)


@pytest.mark.parametrize(
    ("result", "oracles"),
    [(3, 4), (True, False), (3.0, 3), ([1.0, 2.0], [1.0, 2.5]), (None, 1), ({"a": 1}, {"b": 1})],
)
def test_a_number_that_differs_is_found(result, oracles):
    with pytest.raises(AssertionError, match="result"):
        compare(lambda x: result, lambda x: oracles, ROWS, lambda x: (x,), max_examples=1)
    compare(lambda x: result, lambda x: result, ROWS, lambda x: (x,), max_examples=1)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"op": None}, TypeError, "op: expected a function, got None"),
        ({"oracle": 3}, TypeError, "oracle: expected a function, got 3"),
        ({"cases": [1]}, TypeError, "cases: expected a strategy of hypothesis, got [1]"),
        ({"arguments": None}, TypeError, "arguments: expected a function, got None"),
        ({"arguments": lambda x: x}, TypeError, "arguments: expected a sequence or a dict, got"),
        ({"arguments": lambda x: "x"}, TypeError, "arguments: expected a sequence or a dict, got"),
        ({"atol": -1}, ValueError, "atol: expected a finite number >= 0, got -1"),
        ({"rtol": float("nan")}, ValueError, "rtol: expected a finite number >= 0, got nan"),
        ({"atol": None}, ValueError, "atol: expected a finite number >= 0, got None"),
        ({"cases": st.just(3), "device": "cpu"}, TypeError, "device: expected cases with"),
        ({"op": lambda x: {*x}}, TypeError, "result: expected tensors and numbers to compare"),
        ({"op": lambda: None, "oracle": lambda: None, "arguments": lambda x: []}, TypeError,
         "arguments: expected a tensor or a result to compare, got none"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(changed, error, message):
    given = {"op": torch.neg, "oracle": torch.neg, "cases": ROWS, "arguments": lambda x: (x,)}
    with pytest.raises(error, match=re.escape(message)):
        compare(**given | changed, max_examples=1)
