"""Compares an op with its oracle on cases that hypothesis draws."""

from __future__ import annotations

import copy
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

    Both get copies of the same arguments. What they return is compared, and so is every tensor
    that they were given, because either may have written it: a stray write is a difference.

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
    """

    def run(case: Case) -> None:
        if device is not None:
            case = case.to(device)  # type: ignore[attr-defined]
        given_once = arguments(case)
        calls = []
        for function in (op, oracle):
            own = copy.deepcopy(given_once)
            result = function(**own) if isinstance(own, Mapping) else function(*own)
            calls.append({"arguments": own, "result": result})
        got, expected = (dict(_tensors("", call)) for call in calls)
        if got.keys() != expected.keys():
            raise AssertionError(f"result: expected {sorted(expected)}, got {sorted(got)}")
        for name, tensor in got.items():
            _assert_close(name, tensor, expected[name], atol, rtol)

    changed: dict[str, Any] = {} if max_examples is None else {"max_examples": max_examples}
    drawn = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], **changed)
    drawn(given(cases)(run))()


def _tensors(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors within a value, each with a name for where it is."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(f"{name}.{key}".lstrip("."), each)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(f"{name}.{field.name}", getattr(value, field.name))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for index, each in enumerate(value):
            yield from _tensors(f"{name}[{index}]", each)


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
