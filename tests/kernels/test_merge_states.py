"""Merging partial attention results: against float64, and against attention over all the keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from mrv1 import kernels
from mrv1.kernels import reference
from mrv1.kernels.attention.merge_states import MergeStatesConfig
from mrv1.testing.strategies import LayoutCase, RaggedBatch, build_paged_cache
from tests.kernels.elementwise import (
    DTYPES,
    SENTINEL,
    assert_gaps_untouched,
    in_a_wider_row,
    normal,
    seeds,
)
from tests.kernels.paged_attention import exact, make_queries, max_error, run_decode

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

BOTH = pytest.mark.parametrize("ops", [kernels, reference], ids=["kernel", "oracle"])
FLOAT32_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class State:
    """A partial result: out [rows, q_heads, head_dim], lse [rows, q_heads]."""

    out: torch.Tensor
    lse: torch.Tensor

    def double(self) -> State:
        return State(self.out.double(), self.lse.double())

    def to(self, device) -> State:
        return State(self.out.to(device), self.lse.to(device))


def _merge(ops, a: State, b: State) -> State:
    """Merge into strided outputs and check that the gaps keep their values."""
    out = in_a_wider_row(torch.full_like(a.out, SENTINEL), 8, 3)
    lse = torch.full_like(a.lse.T, SENTINEL).T
    assert ops.merge_states(a.out, a.lse, b.out, b.lse, out=out, lse=lse) is out
    assert_gaps_untouched(out)
    return State(out, lse)


def _assert_same(a: State, b: State) -> None:
    """Fail unless numbers are equal and NaN is in the same places."""
    for got, want in ((a.out, b.out), (a.lse, b.lse)):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def _assert_in_budget(got: State, oracle: State, want: State, *inputs: State) -> None:
    """Fail unless errors are at most twice the oracle's plus the last and eight float32 roundings.

    A merge may cancel: the size of the float32 roundings follows the inputs, not the result.
    """
    largest = max((x.out.abs().max().item() for x in inputs if x.out.numel()), default=0.0)
    floor = torch.finfo(got.out.dtype).eps * largest + 8 * FLOAT32_EPS * largest
    error, oracle_error = (max_error(x.out, want.out) for x in (got, oracle))
    assert error <= 2 * oracle_error + floor, f"out: {error:.3g}, the oracle's {oracle_error:.3g}"
    finite = want.lse[want.lse.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    error, oracle_error = (max_error(x.lse, want.lse) for x in (got, oracle))
    floor = 8 * FLOAT32_EPS * (1 + largest)
    assert error <= 2 * oracle_error + floor, f"lse: {error:.3g}, the oracle's {oracle_error:.3g}"


@st.composite
def states(draw: DrawFn, count: int) -> list[State]:
    """Draw partial results of one shape: near and far log-sum-exps, some -inf."""
    shape = (draw(st.integers(0, 5)), draw(st.integers(1, 4)))
    head_dim = draw(st.sampled_from([1, 16, 80, 128]))
    dtype = draw(st.sampled_from(DTYPES))
    lse = st.sampled_from([-math.inf, 0.0, 3.0, -1e4, 88.0]) | st.floats(-20, 20, width=32)
    drawn = []
    for _ in range(count):
        sums = [draw(lse) for _ in range(math.prod(shape))]
        out = normal((*shape, head_dim), dtype, "cpu", seed=draw(seeds))
        drawn.append(State(out, torch.tensor(sums).view(shape)))
    return drawn


# --- oracle ------------------------------------------------------------------------------------


@given(parts=states(2))
def test_kernel_agrees_with_the_oracle(device, parts):
    a, b = (part.to(device) for part in parts)
    want = _merge(reference, a.double(), b.double())
    _assert_in_budget(_merge(kernels, a, b), _merge(reference, a, b), want, a, b)


@given(parts=states(2))
def test_several_programs(device, parts):
    a, b = (part.to(device) for part in parts)
    with pytest.MonkeyPatch.context() as patch:
        small = MergeStatesConfig(tile_rows=4, num_warps=1)
        patch.setattr(MergeStatesConfig, "default_for", lambda *_: small)
        _assert_same(_merge(kernels, a, b), _merge(kernels, a, b))
        got = _merge(kernels, a, b)
    _assert_same(got, _merge(kernels, a, b))


@given(lse_a=st.floats(-30, 30), lse_b=st.floats(-30, 30), a=st.floats(-9, 9), b=st.floats(-9, 9))
def test_the_oracle_equals_the_formula(lse_a, lse_b, a, b):
    def state(out: float, lse: float) -> State:
        return State(
            torch.full((1, 1, 1), out, dtype=torch.float64),
            torch.full((1, 1), lse, dtype=torch.float64),
        )

    got = _merge(reference, state(a, lse_a), state(b, lse_b))
    total = math.exp(lse_a) + math.exp(lse_b)
    assert got.out.item() == pytest.approx(
        (a * math.exp(lse_a) + b * math.exp(lse_b)) / total, abs=1e-12
    )
    assert got.lse.item() == pytest.approx(math.log(total), abs=1e-12)


# --- edges -------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("swap", [False, True])
def test_a_part_without_keys_changes_no_bit(device, ops, dtype, swap):
    """The output of a part without keys is never read and may be NaN."""
    out = normal((3, 2, 16), dtype, device)
    out[0, 0, :4] = torch.tensor([-0.0, 0.0, torch.inf, -torch.inf])
    part = State(out, normal((3, 2), torch.float32, device, seed=1))
    nothing = State(torch.full_like(out, torch.nan), torch.full_like(part.lse, -torch.inf))
    got = _merge(ops, nothing, part) if swap else _merge(ops, part, nothing)
    assert torch.equal(got.out.contiguous().view(torch.uint8), out.view(torch.uint8))
    assert torch.equal(got.lse, part.lse)


@BOTH
def test_two_parts_without_keys_give_zeros(device, ops):
    nothing = State(
        torch.full((2, 3, 16), torch.nan, device=device),
        torch.full((2, 3), -torch.inf, device=device),
    )
    got = _merge(ops, nothing, nothing)
    assert (got.out == 0).all()
    assert (got.lse == -torch.inf).all()


@BOTH
def test_nan_stays_in_its_row(device, ops):
    a, b = (State(normal((2, 1, 16), torch.float32, device, seed=s), None) for s in (1, 2))
    lse = torch.zeros(2, 1, device=device)
    a = State(a.out, torch.tensor([[torch.nan], [1.0]], device=device))
    got = _merge(ops, a, State(b.out, lse))
    assert got.out[0].isnan().all()
    assert got.lse[0].isnan().all()
    assert got.out[1].isfinite().all()
    assert got.lse[1].isfinite().all()


@BOTH
def test_of_two_distant_parts_the_larger_is_the_result(device, ops):
    """No overflow and no NaN: the result is the part with the larger log-sum-exp."""
    a = State(torch.ones(1, 3, 16, device=device), torch.tensor([[3e38, 1e4, 0.0]], device=device))
    b = State(-a.out, torch.tensor([[-3e38, -1e4, 200.0]], device=device))
    got = _merge(ops, a, b)
    assert torch.equal(got.out[0, :, 0].cpu(), torch.tensor([1.0, 1.0, -1.0]))
    assert torch.equal(got.lse[0].cpu(), torch.tensor([3e38, 1e4, 200.0]))


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target", [0, 1])
def test_in_place(device, ops, dtype, target):
    parts = [
        State(normal((40, 3, 80), dtype, device, seed=s), normal((40, 3), torch.float32, device))
        for s in (1, 2)
    ]
    want = _merge(ops, *parts)
    a, b = parts
    into = parts[target]
    got = ops.merge_states(a.out, a.lse, b.out, b.lse, out=into.out, lse=into.lse)
    assert got is into.out
    _assert_same(into, want)


@BOTH
def test_strided_inputs_and_optional_outputs(device, ops):
    wide = normal((4, 7, 80), torch.float16, device)
    sums = normal((2, 3, 4), torch.float32, device, seed=1)
    a = State(wide[:, :3], sums[0].T)
    b = State(in_a_wider_row(wide[:, 3:6], 8, 8), sums[1].T.contiguous())
    got = ops.merge_states(a.out, a.lse, b.out, b.lse)
    assert got.is_contiguous()
    assert torch.equal(got, _merge(ops, a, b).out)
    packed = [State(x.out.contiguous(), x.lse.contiguous()) for x in (a, b)]
    assert torch.equal(got, _merge(ops, *packed).out)


# --- properties --------------------------------------------------------------------------------


@BOTH
@given(parts=states(2))
def test_order_changes_no_bit(device, ops, parts):
    a, b = (part.to(device) for part in parts)
    _assert_same(_merge(ops, a, b), _merge(ops, b, a))


@given(parts=states(2))
def test_a_row_has_the_same_bits_alone(device, parts):
    a, b = (part.to(device) for part in parts)
    want = _merge(kernels, a, b)
    for row in range(len(a.out)):
        x, y, both = (State(s.out[row : row + 1], s.lse[row : row + 1]) for s in (a, b, want))
        _assert_same(_merge(kernels, x, y), both)


def _alone(out, lse):
    return State(torch.tensor([[[out]]]), torch.tensor([[lse]]))


@given(parts=states(3))
@example(parts=[_alone(out, -1e4) for out in (-2.3104, -0.2177, -0.3113)])
def test_grouping_changes_rounding_only(device, parts):
    a, b, c = (part.to(device) for part in parts)
    wide = [x.double() for x in (a, b, c)]
    want = _merge(reference, _merge(reference, *wide[:2]), wide[2])
    got, oracles = (
        [_merge(ops, _merge(ops, a, b), c), _merge(ops, a, _merge(ops, b, c))]
        for ops in (kernels, reference)
    )
    # A sum of -1e4 is rounded by up to 5e-4, in another direction in each grouping.
    for each, oracle in zip(got, oracles, strict=True):
        _assert_in_budget(each, oracle, want, a, b, c)


@pytest.mark.parametrize("cut", range(4))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merged_parts_equal_attention_over_all_keys(device, dtype, cut):
    """Decode attention over the first ``cut`` blocks and over the rest, merged, is decode."""
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=16, max_seq_len=48)
    batch = RaggedBatch(query_lens=(2, 2), seq_lens=(48, 20))
    case = build_paged_cache(layout, batch, dtype=dtype).to(device)
    q = make_queries(case, 2)
    parts = []
    for first in (True, False):
        kept = (torch.arange(layout.row_width, device=device) < cut) == first
        part = run_decode(kernels, case, q, block_table=case.block_table.where(kept, -1))
        parts.append(State(part.out, part.lse))
    whole = run_decode(kernels, case, q)
    want = exact(case, q)
    _assert_in_budget(
        _merge(kernels, *parts), State(whole.out, whole.lse), State(want.out, want.lse), *parts
    )


# --- errors ------------------------------------------------------------------------------------


WRONG = [
    ("out_a", lambda _: 1, TypeError, "out_a: expected a torch.Tensor"),
    ("out_a", lambda x: x.long(), TypeError, "out_a: expected dtype"),
    ("out_a", lambda x: x[0], ValueError, r"out_a: expected shape \[any, any, any\]"),
    ("out_a", lambda x: x.mT, ValueError, "out_a: expected unit last stride"),
    (
        "out_a",
        lambda x: x.new_zeros(5, 2, 257),
        ValueError,
        "out_a: expected a last size of 1 to 256, got 257",
    ),
    ("out_b", lambda x: x.half(), TypeError, "out_b: expected dtype torch.float32"),
    ("out_b", lambda x: x[:4], ValueError, r"out_b: expected shape \[5, 2, 16\], got \[4"),
    ("out_b", lambda x: x.to("meta"), ValueError, "out_b: expected device"),
    ("out", lambda x: x[:, :1], ValueError, r"out: expected shape \[5, 2, 16\], got \[5, 1"),
    ("out", lambda x: x.half(), TypeError, "out: expected dtype torch.float32"),
    ("lse_a", lambda x: x.half(), TypeError, "lse_a: expected dtype torch.float32"),
    ("lse_b", lambda x: x.T, ValueError, r"lse_b: expected shape \[5, 2\], got \[2, 5\]"),
    ("lse_b", lambda x: x.to("meta"), ValueError, "lse_b: expected device"),
    ("lse", lambda x: x.double(), TypeError, "lse: expected dtype torch.float32"),
    ("lse", lambda x: x[:4], ValueError, r"lse: expected shape \[5, 2\], got \[4, 2\]"),
]


@BOTH
@pytest.mark.parametrize(
    ("name", "change", "error", "message"), WRONG, ids=[f"{i}-{w[0]}" for i, w in enumerate(WRONG)]
)
def test_errors_name_the_argument_and_write_nothing(device, ops, name, change, error, message):
    arguments = {key: torch.ones(5, 2, 16, device=device) for key in ("out_a", "out_b", "out")}
    arguments |= {key: torch.ones(5, 2, device=device) for key in ("lse_a", "lse_b", "lse")}
    out, lse = arguments["out"].fill_(SENTINEL), arguments["lse"].fill_(SENTINEL)
    arguments[name] = change(arguments[name])
    with pytest.raises(error, match=message):
        ops.merge_states(**arguments)
    assert (out == SENTINEL).all()
    assert (lse == SENTINEL).all()
