"""Compares an op with its oracle on cases that hypothesis draws."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch

try:
    from hypothesis import HealthCheck, given, settings
    from hypothesis.strategies import SearchStrategy
except ImportError as error:
    raise ModuleNotFoundError(
        "mrv1.testing.comparison: expected the package hypothesis to be installed, "
        f"got {error}; pip install -e '.[dev]'",
        name="hypothesis",
    ) from error

from mrv1.errors import short

Case = TypeVar("Case")


def compare(
    op: Callable[..., Any],
    oracle: Callable[..., Any],
    cases: SearchStrategy[Case],
    arguments: Callable[[Case], Sequence[Any] | Mapping[str, Any]],
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    device: torch.device | str | None = None,
    max_examples: int | None = None,
) -> None:
    """Draw cases, and call ``op`` and ``oracle`` with each; call it in a test.

    Both get copies of the same arguments. What they return is compared, tensors and numbers, and
    so is every tensor that they were given, because either may have written it: a stray write is
    a difference.

    Args:
        op: the function to test, for example the launcher of a Triton kernel.
        oracle: another one with the same arguments, for example in plain torch.
        cases: where cases come from, such as :func:`mrv1.testing.paged_caches`.
        arguments: returns a case's arguments: a sequence by position, or a dict by name.
        atol: absolute difference that a number may have.
        rtol: the same as a share of the oracle's number. With both 0 the bytes must be equal.
        device: where a case is moved by its method ``to``; None = it stays where it is.
        max_examples: number of cases; None = as hypothesis's profile says.

    Raises:
        AssertionError: a tensor differs; the message names it, and hypothesis adds the case.
        TypeError, ValueError: an argument is wrong, or a result holds what is not compared.
    """
    functions: dict[str, object] = {"op": op, "oracle": oracle, "arguments": arguments}
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"{name}: expected a function, got {short(function)}")
    strategy: object = cases
    if not isinstance(strategy, SearchStrategy):
        raise TypeError(f"cases: expected a strategy of hypothesis, got {short(cases)}")
    tolerances: dict[str, object] = {"atol": atol, "rtol": rtol}
    for name, value in tolerances.items():
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{name}: expected a finite number >= 0, got {short(value)}")

    def run(case: Case) -> None:
        if device is not None:
            if not hasattr(case, "to"):
                raise TypeError(f"device: expected cases with a method to, got {short(case)}")
            case = case.to(device)
        given_once: Any = arguments(case)
        if not isinstance(given_once, Mapping | Sequence) or isinstance(given_once, str):
            raise TypeError(f"arguments: expected a sequence or a dict, got {short(given_once)}")
        calls = []
        for function in (op, oracle):
            own = copy.deepcopy(given_once)
            result = function(**own) if isinstance(own, Mapping) else function(*own)
            written = dict(_tensors("arguments", own))
            calls.append(written | dict(_tensors("result", result, is_result=True)))
        got, expected = calls
        if not expected:
            raise TypeError("arguments: expected a tensor or a result to compare, got none")
        if got.keys() != expected.keys():
            raise AssertionError(f"result: expected {sorted(expected)}, got {sorted(got)}")
        for name, tensor in got.items():
            _assert_close(name, tensor, expected[name], atol, rtol)

    changed: dict[str, Any] = {} if max_examples is None else {"max_examples": max_examples}
    drawn = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], **changed)
    drawn(given(cases)(run))()


def _tensors(
    name: str, value: object, *, is_result: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors within a value, with names for where they are; of a result, all."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(f"{name}.{key}", each, is_result=is_result)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            each = getattr(value, field.name)
            yield from _tensors(f"{name}.{field.name}", each, is_result=is_result)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for index, each in enumerate(value):
            yield from _tensors(f"{name}[{index}]", each, is_result=is_result)
    elif is_result and isinstance(value, int | float):
        dtype = torch.float64 if isinstance(value, float) else None
        yield name, torch.tensor(value, dtype=dtype)
    elif is_result and value is not None:
        raise TypeError(f"{name}: expected tensors and numbers to compare, got {short(value)}")


def _assert_close(
    name: str, got: torch.Tensor, expected: torch.Tensor, atol: float, rtol: float
) -> None:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise AssertionError(
            f"{name}: expected {list(expected.shape)} {expected.dtype}, "
            f"got {list(got.shape)} {got.dtype}"
        )
    if got.dtype.itemsize == 1 or atol == rtol == 0:
        got, expected = (x.contiguous().view(-1).view(torch.uint8) for x in (got, expected))
        atol = rtol = 0.0
    torch.testing.assert_close(
        got, expected, atol=atol, rtol=rtol, equal_nan=True, msg=lambda text: f"{name}: {text}"
    )
