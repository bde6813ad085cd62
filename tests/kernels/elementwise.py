"""Shared by the tests of the small kernels: inputs, tile sizes and comparisons of floats."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import pytest
import torch
from hypothesis import strategies as st

from mrv1 import kernels

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SENTINEL = 7.0
"""The value of outputs, and of the gaps of strided views, before a launch."""

seeds = st.integers(0, 2**31 - 1)


@contextmanager
def tiles(op: str, *, as_on_gpu: bool) -> Iterator[None]:
    """Cut ``op`` into programs as the interpreter does, or as a GPU does: both must be right."""
    module = sys.modules[getattr(kernels, op).__module__]
    with pytest.MonkeyPatch.context() as patch:
        if as_on_gpu:
            patch.setattr(module, "INTERPRET", False)
        yield


def bundled(arguments: dict, **bundles: type) -> dict:
    """Return an op's flat ``arguments`` with the fields of each bundle packed into one argument.

    A field that is not given is None: the op must not read it.
    """
    flat = dict(arguments)
    made = {
        name: bundle(**{field.name: flat.pop(field.name, None) for field in fields(bundle)})
        for name, bundle in bundles.items()
    }
    return made | flat


def normal(shape: tuple[int, ...], dtype: torch.dtype, device, seed: int = 0) -> torch.Tensor:
    """Return standard normal values, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def in_a_wider_row(x: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """Return ``x`` as a view of rows that are ``before + after`` elements longer (sentinels)."""
    wide = x.new_full((*x.shape[:-1], before + x.shape[-1] + after), SENTINEL)
    view = wide[..., before : before + x.shape[-1]]
    return view.copy_(x)


def assert_gaps_untouched(view: torch.Tensor) -> None:
    """Fail unless every element of the view's storage outside the view is still a sentinel."""
    whole = view.new_empty(0).set_(view.untyped_storage())
    outside = torch.ones_like(whole, dtype=torch.bool)
    outside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
    assert bool((whole[outside] == SENTINEL).all())


def assert_in_budget(
    got: torch.Tensor,
    torch_result: torch.Tensor,
    exact: torch.Tensor,
    exponent: torch.Tensor | float = 0.0,
) -> None:
    """Fail unless ``got`` is at most twice as far from ``exact`` as torch, plus the floor.

    The floor is one rounding to the result's dtype and four roundings to float32 before it: torch
    may happen to be exact on one small row.

    Args:
        got: the kernel's result.
        torch_result: torch's result, computed in the same dtype.
        exact: the result in float64.
        exponent: magnitude of the argument of an exponential that is a factor of the result. The
            argument's rounding to float32 is a relative error of the result that grows with it.
    """
    assert got.dtype == torch_result.dtype
    assert exact.dtype == torch.float64
    assert torch.equal(got.isfinite(), exact.to(got.dtype).isfinite())
    keep = exact.isfinite() & got.isfinite()
    error = (got.double() - exact).abs()[keep]
    torch_error = (torch_result.double() - exact).abs()[keep]
    if not error.numel():
        return
    roundings = torch.finfo(got.dtype).eps + (4 + exponent) * torch.finfo(torch.float32).eps
    floor = (roundings * exact.abs())[keep] + torch.finfo(got.dtype).tiny
    excess = error - 2 * torch_error.max() - floor
    worst = excess.argmax()
    assert excess[worst] <= 0, (
        f"error {error[worst]:.3e} where torch's largest is {torch_error.max():.3e} "
        f"and the floor is {floor[worst]:.3e}"
    )


def with_strides(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy with the same strides: ``Tensor.to`` closes gaps between rows."""
    num_elements = value.untyped_storage().nbytes() // value.itemsize
    storage = value.as_strided((num_elements,), (1,), 0).to(device)
    return storage.as_strided(value.shape, value.stride(), value.storage_offset())
