"""bfloat16 and the 8-bit floats in numpy, against torch's own conversions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1.kernels._base.interpreter.number_formats import decode, encode

FLOAT8 = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
ALL = {**FLOAT8, "bf16": torch.bfloat16, "fp16": torch.float16}
floats = st.lists(st.floats(width=32), min_size=1, max_size=50)


def _codes(dtype: torch.dtype) -> torch.Tensor:
    """Return every code of ``dtype``, as ``dtype``."""
    if dtype.itemsize == 1:
        return torch.arange(256).to(torch.uint8).view(dtype)
    return torch.arange(2**16).to(torch.uint16).view(dtype)


def _numpy(x: torch.Tensor) -> np.ndarray:
    if x.dtype == torch.float16:
        return x.numpy()
    return x.view(torch.uint8 if x.dtype.itemsize == 1 else torch.uint16).numpy()


def _near(dtype: torch.dtype) -> torch.Tensor:
    """Return all finite values, all ties between two values, and the floats next to both."""
    values = _codes(dtype).float()
    values = values[values.isfinite()].unique().double()
    points = torch.cat([values, (values[1:] + values[:-1]) / 2]).float()
    steps = [torch.nextafter(points, torch.tensor(toward)) for toward in (-1e38, 1e38)]
    return torch.cat([points, *steps])


def _saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return torch's conversion, 8-bit formats clamped: beyond the range torch versions differ."""
    largest = torch.finfo(dtype).max
    return (x.clamp(-largest, largest) if dtype.itemsize == 1 else x).to(dtype)


def _assert_same(codes: np.ndarray, want: torch.Tensor) -> None:
    """Compare bits; any NaN equals any NaN."""
    want_nan = want.float().isnan().numpy()
    view = codes.view(np.uint16) if codes.dtype == np.float16 else codes
    bits = _numpy(want)
    bits = bits.view(np.uint16) if bits.dtype == np.float16 else bits
    assert np.array_equal(view[~want_nan], bits[~want_nan])
    assert np.array_equal(want_nan, np.isnan(decode(codes, _name(want.dtype))))


def _name(dtype: torch.dtype) -> str:
    return next(name for name, value in ALL.items() if value == dtype)


@pytest.mark.parametrize("name", ALL)
def test_every_code_decodes(name):
    codes = _codes(ALL[name])
    want = codes.float().numpy()
    assert np.array_equal(decode(_numpy(codes), name), want, equal_nan=True)


@pytest.mark.parametrize("name", ALL)
def test_values_ties_and_neighbours_round_to_even(name):
    points = _near(ALL[name])
    _assert_same(encode(points.numpy(), name), _saturated(points, ALL[name]))


@pytest.mark.parametrize("name", ALL)
@given(values=floats)
def test_any_float_rounds_as_torch_rounds(name, values):
    x = torch.tensor(values)
    _assert_same(encode(x.numpy(), name), _saturated(x, ALL[name]))


@pytest.mark.parametrize("name", FLOAT8)
def test_overflow_saturates_and_nan_stays(name):
    largest = torch.finfo(FLOAT8[name]).max
    x = np.array([1e4, 1e6, np.inf, -1e6, -np.inf, np.nan], dtype=np.float32)
    got = decode(encode(x, name), name)
    assert got[2:5].tolist() == [largest, -largest, -largest]
    assert got[1] == largest
    assert np.isnan(got[5])


@pytest.mark.parametrize("name", ALL)
def test_rounding_toward_zero_never_grows(name):
    points = _near(ALL[name])
    values = _codes(ALL[name]).float()
    values = values[values.isfinite()].abs().unique().numpy()
    x = points[points.abs() <= float(values[-1])].numpy()
    got = decode(encode(x, name, toward_zero=True), name)
    want = values[np.searchsorted(values, np.abs(x), side="right") - 1]
    assert np.array_equal(np.abs(got), want)
    assert bool(((np.sign(got) == np.sign(x)) | (got == 0)).all())


def test_float16_toward_zero_saturates_but_keeps_infinity():
    x = np.array([7e4, -7e4, np.inf], dtype=np.float32)
    assert encode(x, "fp16", toward_zero=True).tolist() == [65504.0, -65504.0, np.inf]
