"""The corrections of Triton's stock interpreter give right results; the checks catch faults.

The corrections hold for the process. The checks would slow down and fail other tests of this
process, so each check runs in a child process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1.kernels._base.triton import tl, triton
from mrv1.testing import interpreter

pytestmark = pytest.mark.interp

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NARROW = (torch.bfloat16, torch.float16)
ROOT = Path(__file__).parents[2]


def _random(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- conversions -------------------------------------------------------------------------------


@triton.jit
def _convert_kernel(out_ptr, x_ptr, TILE: tl.constexpr):
    index = tl.arange(0, TILE)
    x = tl.load(x_ptr + index)
    tl.store(out_ptr + index, x.to(out_ptr.dtype.element_ty))


def _convert(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    _convert_kernel[(1,)](out, x, TILE=x.numel())
    return out


@pytest.mark.parametrize("dtype", FLOAT8)
def test_all_fp8_codes_convert_both_ways(dtype):
    codes = torch.arange(256).to(torch.uint8).view(dtype)
    torch.testing.assert_close(_convert(codes, torch.float32), codes.float(), equal_nan=True)
    finite = codes[codes.float().isfinite()][:128]
    assert torch.equal(_convert(finite.float(), dtype).view(torch.uint8), finite.view(torch.uint8))


@pytest.mark.parametrize(
    ("value", "want"), [(1.998, 2.0), (1e4, 448.0), (-torch.inf, -448.0), (2.0**-10, 0.0)]
)
def test_fp8_carries_saturates_and_rounds_to_even(value, want):
    """The stock interpreter gives 1, 320, -256 and a subnormal."""
    got = _convert(torch.full((16,), value), torch.float8_e4m3fn).float()
    assert got.tolist() == [want] * 16


@pytest.mark.parametrize("dtype", NARROW)
@given(seed=st.integers(0, 1000), exponent=st.integers(-140, 120))
def test_narrowing_rounds_to_even(dtype, seed, exponent):
    """Ties and subnormals included: one value in eight is a tie."""
    x = _random(seed, 256, dtype=torch.float32) * 2.0**exponent
    ties = x[:32].to(dtype).view(torch.int16).float()  # any values of the narrow dtype
    ties = ties.to(dtype).float() * (1 + torch.finfo(dtype).eps / 2)
    x[:32] = ties
    got, want = _convert(x, dtype), x.to(dtype)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    assert torch.equal(_convert(want, torch.float32), want.float())


# --- bfloat16 arithmetic -----------------------------------------------------------------------


@triton.jit
def _arithmetic_kernel(out_ptr, x_ptr, y_ptr, TILE: tl.constexpr):
    index = tl.arange(0, TILE)
    x, y = tl.load(x_ptr + index), tl.load(y_ptr + index)
    tl.store(out_ptr + index, x + y)
    tl.store(out_ptr + TILE + index, x * y)
    tl.store(out_ptr + 2 * TILE + index, tl.where(x < y, x - y, x))
    tl.store(out_ptr + 3 * TILE + index, tl.maximum(x, y))
    tl.store(out_ptr + 4 * TILE + index, tl.cumsum(x, axis=0))
    tl.store(out_ptr + 5 * TILE + index, tl.clamp(x, -y.abs(), y.abs()))
    tl.store(out_ptr + 6 * TILE + index, tl.fma(x, y, x))
    tl.store(out_ptr + 7 * TILE + index, tl.zeros_like(x) + tl.sum(x, axis=0))


@triton.jit
def _fma_kernel(out_ptr, x_ptr, y_ptr, z_ptr, TILE: tl.constexpr):
    index = tl.arange(0, TILE)
    x, y, z = tl.load(x_ptr + index), tl.load(y_ptr + index), tl.load(z_ptr + index)
    tl.store(out_ptr + index, tl.fma(x, y, z))


def test_float32_multiply_add_rounds_once():
    """float64 would round twice: it takes 1 + 2^-23 + 2^-24 - 2^-70, below a tie, for the tie."""
    x, y, z = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    z[128:] = -(x * y)[128:]  # the result is the product's own rounding error
    x[0], y[0], z[0] = 2.0**-24 * (1 + 2.0**-23), 1 - 2.0**-23, 1 + 2.0**-23
    x[1], y[1], z[1] = 3e38, 3e38, -torch.inf
    out = torch.empty(256)
    _fma_kernel[(1,)](out, x, y, z, TILE=256)
    assert out[0] == 1 + 2.0**-23
    assert out[1] == -torch.inf
    for factor, other, term, got in zip(*(t[2:].tolist() for t in (x, y, z, out)), strict=True):
        exact = Fraction(factor) * Fraction(other) + Fraction(term)
        near = np.nextafter(np.float32(got), np.array([-np.inf, np.inf], np.float32))
        error = abs(exact - Fraction(got))
        assert all(error <= abs(exact - Fraction(float(n))) for n in near)


@given(seed=st.integers(0, 1000))
def test_bfloat16_arithmetic_is_float32_rounded_once(seed):
    x, y = _random(seed, 2, 64)
    out = torch.empty(8, 64, dtype=torch.bfloat16)
    _arithmetic_kernel[(1,)](out, x, y, TILE=64)
    a, b = x.float(), y.float()
    want = torch.stack(
        [
            a + b,
            a * b,
            torch.where(a < b, a - b, a),
            torch.maximum(a, b),
            a.cumsum(0),
            torch.clamp(a, -b.abs(), b.abs()),
            a * b + a,
            a.sum().expand(64),
        ]
    ).to(torch.bfloat16)
    exact = [0, 1, 2, 3, 5, 6]  # a sum may associate differently: one rounding
    assert torch.equal(out[exact], want[exact])
    torch.testing.assert_close(out, want, rtol=2.0**-7, atol=2.0**-7)


@triton.jit
def _dot_kernel(out_ptr, x_ptr, y_ptr, TILE: tl.constexpr):
    index = tl.arange(0, TILE)
    square = index[:, None] * TILE + index[None, :]
    tl.store(out_ptr + square, tl.dot(tl.load(x_ptr + square), tl.load(y_ptr + square)))


@pytest.mark.parametrize("dtype", [*NARROW, *FLOAT8])
def test_dot_accumulates_in_float32(dtype):
    x, y = (_random(seed, 32, 32, dtype=dtype) for seed in (0, 1))
    out = torch.empty(32, 32)
    _dot_kernel[(1,)](out, x, y, TILE=32)
    torch.testing.assert_close(out.double(), x.double() @ y.double(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
def test_a_dot_of_a_row_that_is_not_finite_is_nan_in_the_row_only(dtype):
    """Padding rows may hold any values; numpy would warn, and a warning is an error here."""
    x, y = (_random(seed, 32, 32, dtype=dtype) for seed in (0, 1))
    x[3, :2] = torch.tensor([torch.inf, -torch.inf])
    x[7] = torch.nan
    signalling = torch.tensor([torch.inf], dtype=dtype)
    signalling.view(torch.int16 if dtype.itemsize == 2 else torch.int32)[0] += 1
    x[11] = signalling  # numpy warns of a signaling NaN in a cast, too
    y[0], y[1] = 1, 1
    rows = [3, 7, 11]
    out = torch.empty(32, 32)
    _dot_kernel[(1,)](out, x, y, TILE=32)
    assert out[rows].isnan().all()
    others = [row for row in range(32) if row not in rows]
    torch.testing.assert_close(
        out[others].double(), x[others].double() @ y.double(), rtol=1e-5, atol=1e-4
    )


@triton.jit
def _any_dot_kernel(
    out_ptr, x_ptr, y_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr
):
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)
    total = tl.zeros([M, N], tl.float32)
    for first in tl.static_range(0, K, STEP):
        k = first + tl.arange(0, STEP)
        x = tl.load(x_ptr + m * K + k[None, :])
        y = tl.load(y_ptr + k[:, None] * N + n[None, :])
        total = tl.dot(x, y, total)
    tl.store(out_ptr + m * N + n[None, :], total)


def _any_dot(x: torch.Tensor, y: torch.Tensor, step: int | None = None) -> torch.Tensor:
    out = torch.empty(len(x), y.shape[1])
    sizes = {"M": len(x), "N": y.shape[1], "K": len(y)}
    _any_dot_kernel[(1,)](out, x, y, **sizes, STEP=step or len(y))
    return out


def _chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return ``x @ y`` in float32, rounded after every 16 products of 16-bit values."""
    total = torch.zeros(len(x), y.shape[1])
    step = 16 if x.dtype.itemsize == 2 else len(y)
    for some_x, some_y in zip(x.double().split(step, 1), y.double().split(step), strict=True):
        total = (total + some_x @ some_y).float()
    return total


sizes = st.sampled_from([1, 2, 4, 16, 64])


@given(
    shape=st.tuples(sizes, sizes, st.sampled_from([1, 8, 64, 512])),
    dtype=st.sampled_from([torch.float32, *NARROW]),
    part=st.tuples(sizes, sizes),
    seed=st.integers(0, 1000),
)
def test_a_dot_sums_in_the_same_order_for_every_shape(shape, dtype, part, seed):
    """A BLAS picks an order for each shape and CPU, so bits would depend on the batch."""
    (m, n, k), (some_m, some_n) = shape, part
    x, y = _random(seed, m, k, dtype=dtype), _random(seed + 1, k, n, dtype=dtype)
    want = _any_dot(x, y)
    torch.testing.assert_close(want, _chain(x, y), rtol=1e-6, atol=1e-5)
    few = _any_dot(x[-some_m:].contiguous(), y[:, -some_n:].contiguous())
    assert torch.equal(few, want[-some_m:, -some_n:])


@pytest.mark.parametrize("dtype", NARROW)
def test_a_long_dot_has_the_bits_of_a_chain_of_short_ones(dtype):
    """As on tensor cores: how a kernel cuts the inputs into steps changes no bit."""
    x, y = _random(0, 16, 256, dtype=dtype), _random(1, 256, 64, dtype=dtype)
    want = _any_dot(x, y)
    assert torch.equal(want, _chain(x, y))
    for step in (16, 32, 128):
        assert torch.equal(_any_dot(x, y, step), want)


# --- reductions and scans ----------------------------------------------------------------------


@triton.jit
def _sum_kernel(out_ptr, x_ptr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr):
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    total = tl.sum(tl.load(x_ptr + m * N + n), axis=AXIS, keep_dims=True)
    tl.store(out_ptr + (n if AXIS == 0 else m), total)


def _sum(x: torch.Tensor, axis: int) -> torch.Tensor:
    out = torch.empty(x.shape[1 - axis])
    _sum_kernel[(1,)](out, x.contiguous(), M=x.shape[0], N=x.shape[1], AXIS=axis)
    return out


@given(
    shape=st.tuples(sizes, st.sampled_from([1, 8, 64, 512])),
    axis=st.sampled_from([0, 1]),
    part=sizes,
    seed=st.integers(0, 1000),
)
def test_a_sum_has_the_same_order_for_every_number_of_rows(shape, axis, part, seed):
    rows = _random(seed, *shape, dtype=torch.float32)
    x, few = (rows, rows[-part:]) if axis == 1 else (rows.T, rows[-part:].T)
    want = _sum(x, axis)
    torch.testing.assert_close(want.double(), rows.double().sum(1), rtol=1e-6, atol=1e-5)
    assert torch.equal(_sum(few, axis), want[-part:])


@triton.jit
def _compose(scale_a, shift_a, scale_b, shift_b):
    """Apply map a, then map b: associative, not commutative."""
    return scale_a * scale_b, shift_a * scale_b + shift_b


@triton.jit
def _compose_kernel(reduced_ptr, scanned_ptr, scale_ptr, shift_ptr, TILE: tl.constexpr):
    index = tl.arange(0, 2)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    maps = tl.load(scale_ptr + index), tl.load(shift_ptr + index)
    _, shift = tl.reduce(maps, 1, _compose)
    tl.store(reduced_ptr + tl.arange(0, 2), shift)
    _, shift = tl.associative_scan(maps, 1, _compose)
    tl.store(scanned_ptr + index, shift)


@given(seed=st.integers(0, 1000), tile=st.sampled_from([1, 2, 64]))
def test_custom_combines_keep_the_order(seed, tile):
    generator = torch.Generator().manual_seed(seed)
    scale, shift = torch.randint(-3, 4, (2, 2, tile), generator=generator, dtype=torch.int32)
    reduced, scanned = torch.empty(2, dtype=torch.int32), torch.empty(2, tile, dtype=torch.int32)
    _compose_kernel[(1,)](reduced, scanned, scale, shift, TILE=tile)
    want = torch.empty(2, tile, dtype=torch.int64)
    for row in range(2):
        value = 0
        for col in range(tile):
            value = value * int(scale[row, col]) + int(shift[row, col])
            want[row, col] = value
    wrapped = want.to(torch.int32)  # 64 factors of 3 overflow, in both alike
    assert torch.equal(scanned, wrapped)
    assert torch.equal(reduced, wrapped[:, -1])


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b)


@triton.jit
def _reduce_all_kernel(out_ptr, x_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    index = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    x = tl.load(x_ptr + index)
    tl.store(out_ptr, tl.reduce(x, None, _maximum))
    kept = tl.reduce(x, 1, _maximum, keep_dims=True)
    tl.store(out_ptr + 1 + tl.arange(0, ROWS)[:, None], kept)


def test_reductions_over_everything_and_with_kept_dimensions():
    x = _random(0, 4, 8, dtype=torch.float32)
    out = torch.empty(5)
    _reduce_all_kernel[(1,)](out, x, ROWS=4, COLS=8)
    assert out[0] == x.max()
    assert torch.equal(out[1:], x.amax(1))


@triton.jit
def _fold_rows_kernel(sum_ptr, max_ptr, min_ptr, scan_ptr, x_ptr, TILE: tl.constexpr):
    row = tl.arange(0, TILE)
    index = row[:, None] * TILE + row[None, :]
    x = tl.load(x_ptr + index)
    tl.store(sum_ptr + row, tl.sum(x, axis=1))
    tl.store(max_ptr + row, tl.max(x, axis=1))
    tl.store(min_ptr + row, tl.min(x, axis=1))
    tl.store(scan_ptr + index, tl.cumsum(x, axis=1))


def test_padding_rows_may_overflow_and_hold_only_nan():
    """A GPU reports neither; numpy warns of both, and a warning is an error here."""
    x = _random(0, 4, 4, dtype=torch.float32)
    x[1], x[2, 0], x[3] = 3e38, torch.nan, torch.nan
    total, greatest, least, scanned = (torch.empty(n) for n in (4, 4, 4, 16))
    _fold_rows_kernel[(1,)](total, greatest, least, scanned, x, TILE=4)
    assert total[1].isposinf()
    assert total[2:].isnan().all()
    torch.testing.assert_close(total[0], x[0].sum())
    torch.testing.assert_close(scanned.view(4, 4)[:2], x[:2].cumsum(1))
    assert torch.equal(greatest[:3], torch.stack([x[0].max(), x[1, 0], x[2, 1:].max()]))
    assert torch.equal(least[:3], torch.stack([x[0].min(), x[1, 0], x[2, 1:].min()]))
    assert greatest[3].isnan()
    assert least[3].isnan()


@triton.jit
def _sort_kernel(x_ptr, TILE: tl.constexpr):
    index = tl.arange(0, TILE)
    tl.store(x_ptr + index, tl.sort(tl.load(x_ptr + index)))


def test_sort_is_right_and_quick_enough_to_use():
    x = _random(0, 2048, dtype=torch.float32)
    want = x.sort().values
    _sort_kernel[(1,)](x, TILE=2048)  # the stock interpreter takes many seconds
    assert torch.equal(x, want)


# --- arguments and integers --------------------------------------------------------------------


@triton.jit
def _count_kernel(out_ptr, n_ptr, negate):
    total = 0
    for i in range(tl.load(n_ptr)):
        total += i
    if negate:
        total = -total
    tl.store(out_ptr, total)


@pytest.mark.parametrize(("negate", "want"), [(False, 10), (True, -10)])
def test_loops_over_loaded_values_and_run_time_bools(negate, want):
    out, n = torch.zeros(1, dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    _count_kernel[(1,)](out, n, negate)
    assert out.item() == want


@triton.jit
def _invert_kernel(x_ptr, TILE: tl.constexpr):
    index = tl.arange(0, TILE)
    word = tl.load(x_ptr + index).to(tl.uint32)
    tl.store(x_ptr + index, (~word).to(tl.int64))


def test_inverted_unsigned_words_stay_unsigned():
    x = torch.tensor([0, 1, 2**31, 2**32 - 1])
    _invert_kernel[(1,)](x, TILE=4)
    assert x.tolist() == [2**32 - 1, 2**32 - 2, 2**31 - 1, 0]


def test_installing_again_changes_nothing():
    builder = triton.runtime.interpreter.interpreter_builder
    before = type(builder), builder.options
    interpreter.install()
    assert (type(builder), builder.options) == before


def test_kept_types_are_those_that_would_be_made():
    """Also the second time, and where a size is of another type or only equal to one."""
    pointers = [
        tl.pointer_type(tl.int8), tl.pointer_type(tl.int8, const=True),
        tl.pointer_type(tl.int8, address_space=3), tl.pointer_type(tl.pointer_type(tl.int8)),
    ]  # fmt: skip
    scalars = [tl.float32, tl.bfloat16, tl.int1, *pointers]
    for _ in range(2):
        for scalar in scalars:
            for sizes in ([4], [2, 4], [tl.constexpr(4), 2]):
                block = tl.block_type(scalar, sizes)
                values = [getattr(size, "value", size) for size in sizes]
                assert (block.scalar, block.shape.values) == (scalar, values)
                assert (block.numel, block.name) == (
                    np.prod(values), f"<{block.shape}, {scalar}>",
                )  # fmt: skip
                value = tl.tensor(None, block)
                assert (value.type, value.dtype) == (block, scalar)
                assert [size.value for size in value.shape] == values
                assert value.numel.value == np.prod(values)
            assert tl.tensor(None, scalar).numel.value == 1
            assert len(tl.tensor(None, scalar).shape) == 0
        for sizes, error in (([3], ValueError), ([4.0], TypeError), ([], TypeError)):
            with pytest.raises(error):
                tl.block_type(tl.float32, sizes)
    for scalar in scalars:
        itemsize = 8 if scalar in pointers else scalar.primitive_bitwidth // 8 or 1
        of_block = triton.runtime.interpreter._get_np_dtype(tl.block_type(scalar, [4]))
        assert of_block == triton.runtime.interpreter._get_np_dtype(scalar)
        assert of_block.itemsize == itemsize


# --- threads -----------------------------------------------------------------------------------


@triton.jit
def _take_turns_kernel(turn_ptr, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Add 1 to a number whenever it is this rank's and this program's turn."""
    mine = tl.program_id(0) * SIZE + RANK
    turn = tl.load(turn_ptr, volatile=True)
    while turn < mine:
        turn = tl.load(turn_ptr, volatile=True)
    tl.store(turn_ptr, turn + tl.num_programs(0) // 20)


def test_threads_interpret_at_the_same_time_and_wait_for_each_other():
    turn = torch.zeros(1, dtype=torch.int32)

    def run(rank: int) -> None:
        _take_turns_kernel[(20,)](turn, RANK=rank, SIZE=4)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    assert turn.item() == 80


# --- checks ------------------------------------------------------------------------------------


@triton.jit
def _shift_kernel(out_ptr, x_ptr, offset, num_kept, TILE: tl.constexpr):
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + index + offset, mask=index < num_kept, other=0)
    tl.store(out_ptr + index, x)


@triton.jit
def _count_up_kernel(out_ptr, offset):
    tl.atomic_add(out_ptr + offset, 1)


@triton.jit
def _square_kernel(x_ptr, TILE: tl.constexpr):
    index = tl.arange(0, TILE)
    x = tl.load(x_ptr + index)
    tl.device_assert(x >= 0, "negative")
    tl.store(x_ptr + index, x * x)


def _shift(offset: int, num_kept: int, num_out: int = 32) -> None:
    x, out = torch.arange(32), torch.zeros(num_out, dtype=torch.int64)
    _shift_kernel[(2,)](out, x, offset, num_kept, TILE=16)


def _square(*values: int) -> None:
    _square_kernel[(1,)](torch.tensor(values, dtype=torch.int32), TILE=len(values))


def _expect_index_error(message: str, call, *args) -> None:
    with pytest.raises(triton.runtime.errors.InterpreterError, match=message) as info:
        call(*args)
    cause = info.value.__cause__
    assert isinstance(cause, IndexError)


def _check_bounds() -> None:
    interpreter.install_bounds()
    interpreter.install_bounds()
    _shift(0, 32)
    _shift(8, 24)  # masked reads past the end are no reads
    _expect_index_error(r"load: 8 of 16 addresses .* program \(1, 0, 0\)", _shift, 8, 32)
    _expect_index_error(r"load: 3 of 16 addresses .* program \(0, 0, 0\)", _shift, -3, 32)
    _expect_index_error(r"store: 12 of 16 addresses .* program \(1, 0, 0\)", _shift, 0, 32, 20)
    counter = torch.zeros(1, dtype=torch.int32)
    _count_up_kernel[(3,)](counter, 0)
    assert counter.item() == 3
    _expect_index_error(r"atomic: 1 of 1 addresses", _count_up_kernel[(1,)], counter, 1)
    _square(3)


def _check_debug() -> None:
    _square(-3, 2)  # unchecked so far
    _square(2**17)
    interpreter.install(debug=True)
    interpreter.install()  # leaves the checks on
    _square(3, 4)
    for values, message in (((-3, 2), "negative"), ((2**17,), "overflow")):
        with pytest.raises(triton.runtime.errors.InterpreterError, match=message):
            _square(*values)


def _child(code: str) -> str:
    """Run ``code`` in an interpreting child process and return what it printed."""
    paths = os.pathsep.join([str(ROOT), *sys.path])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    child = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    return child.stdout


@pytest.mark.parametrize("check", ["_check_bounds", "_check_debug"])
def test_a_check_catches_its_faults(check):
    _child(f"from {__name__} import {check}; {check}()")


CHECKED_LANE = """
import sys, pytest
from mrv1.testing import interpreter
interpreter.install(debug=True)
interpreter.install_bounds()
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *{arguments!r}]))
"""


def _run_checked(*arguments: str) -> None:
    """Run tests with few examples: with checks each takes many times as long."""
    arguments += ("--hypothesis-profile=quick",)
    printed = _child(CHECKED_LANE.format(arguments=arguments))
    assert " passed" in printed
    assert "skipped" not in printed


@pytest.mark.parametrize(
    "kernels",
    [
        ["rms_norm", "rope", "activation", "gather_tokens"],
        pytest.param(["sample_tokens"], marks=pytest.mark.full),
    ],
)
def test_small_kernels_pass_with_every_check_on(kernels):
    _run_checked(
        *(f"tests/kernels/test_{kernel}.py" for kernel in kernels),
        "-m",
        "not full",
        "-k",
        "torch or oracle or words or spans or turns",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    ["kv_cache_write", "qkv_cache_write", "decode_attention", "prefill_attention", "fp8_cache"],
)
def test_attention_passes_with_every_check_on(kernel):
    _run_checked(f"tests/kernels/test_{kernel}.py", "-m", "not (slow or full or big)")
