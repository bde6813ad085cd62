"""Log-probabilities, ranks and best tokens against Python's own floats and sort."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.errors import UnsupportedDeviceError
from mrv1.kernels import reference
from mrv1.kernels.sampling.contracts import MAX_LOGPROBS_VOCAB_SIZE, TopLogprobs
from mrv1.kernels.sampling.logprobs import TopLogprobsConfig
from tests.kernels.elementwise import (
    DTYPES,
    assert_gaps_untouched,
    in_a_wider_row,
    normal,
    seeds,
    tiles,
)

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

CLOSE = 1e-5
INF, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Case:
    logits: torch.Tensor
    """[rows, vocab], on the CPU."""
    token_ids: torch.Tensor
    num_top: int
    slots: tuple[int, ...] | None = None
    temperature: tuple[float, ...] | None = None
    """Per row, or per slot where ``slots`` is given."""
    row_num_top: tuple[int, ...] | None = None
    """As ``temperature``."""


def _run(ops, case: Case, device="cpu", *, as_on_gpu: bool = False) -> TopLogprobs:
    def vector(values: tuple | None, dtype: torch.dtype) -> torch.Tensor | None:
        if values is None:
            return None
        return torch.tensor([7, *values], dtype=dtype, device=device)[1:]

    logits = in_a_wider_row(case.logits.to(device), 3, 2)
    before = logits.clone()
    with tiles("top_logprobs", as_on_gpu=as_on_gpu):
        result = ops.top_logprobs(
            logits,
            in_a_wider_row(case.token_ids.to(device), 1, 1),
            case.num_top,
            idx_mapping=vector(case.slots, torch.int32),
            temperature=vector(case.temperature, torch.float32),
            row_num_top=vector(case.row_num_top, torch.int32),
        )
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    assert_gaps_untouched(logits)
    assert result.logprobs.dtype == result.top_logprobs.dtype == torch.float32
    assert result.ranks.dtype == result.top_token_ids.dtype == torch.int64
    return TopLogprobs(*(tensor.cpu() for tensor in result))


def _by_hand(case: Case) -> TopLogprobs:
    """Follow the contract in float64, token by token."""
    rows: list[tuple] = []
    for i, (row, asked) in enumerate(
        zip(case.logits.tolist(), case.token_ids.tolist(), strict=True)
    ):
        slot = i if case.slots is None else case.slots[i]
        if slot < 0:
            nothing = [-INF] * case.num_top
            rows.append(([-INF] * len(asked), [0] * len(asked), [-1] * case.num_top, nothing))
            continue
        scale = 1 / ((case.temperature[slot] if case.temperature else 1) or 1)
        largest = max(-INF if x != x else x for x in row)
        if any(x != x for x in row) or abs(largest) == INF:
            logprob = [NAN] * len(row)
        else:
            total = math.fsum(math.exp((x - largest) * scale) for x in row)
            logprob = [(x - largest) * scale - math.log(total) for x in row]
        best = sorted(range(len(row)), key=lambda v: (INF if row[v] != row[v] else -row[v], v))
        is_token = [0 <= v < len(row) for v in asked]
        count = case.num_top if case.row_num_top is None else max(case.row_num_top[slot], 0)
        top = best[: case.num_top][:count]
        num_left = case.num_top - len(top)
        rows.append(
            (
                [logprob[v] if ok else -INF for v, ok in zip(asked, is_token, strict=True)],
                [
                    1 + sum(x > row[v] for x in row) if ok else 0
                    for v, ok in zip(asked, is_token, strict=True)
                ],
                top + [-1] * num_left,
                [logprob[v] for v in top] + [-INF] * num_left,
            )
        )
    columns = list(zip(*rows, strict=True)) if rows else [[]] * 4
    n, num_rows = case.token_ids.shape[1], len(rows)
    dtypes = (torch.float32, torch.int64, torch.int64, torch.float32)
    shapes = ((num_rows, n), (num_rows, n), (num_rows, case.num_top), (num_rows, case.num_top))
    return TopLogprobs(
        *(
            torch.tensor(column, dtype=dtype).view(shape)
            for column, dtype, shape in zip(columns, dtypes, shapes, strict=True)
        )
    )


def _assert_equal(got: TopLogprobs, expected: TopLogprobs) -> None:
    assert torch.equal(got.ranks, expected.ranks)
    assert torch.equal(got.top_token_ids, expected.top_token_ids)
    for name in ("logprobs", "top_logprobs"):
        torch.testing.assert_close(
            getattr(got, name), getattr(expected, name), rtol=1e-6, atol=CLOSE, equal_nan=True
        )


@st.composite
def _rows(draw, vocab: int) -> torch.Tensor:
    """Draw a row of logits: plain, flat, tied, peaked, masked, or broken by NaN or infinity."""
    x = normal((vocab,), torch.float32, "cpu", draw(seeds)) * 4
    kind = draw(
        st.sampled_from(["plain", "flat", "ties", "peaked", "masked", "cut", "all", "broken"])
    )
    at = draw(st.integers(0, vocab - 1))
    if kind == "flat":
        x.fill_(draw(st.sampled_from([0.0, -3.5])))
        x[at] = -0.0
    elif kind == "ties":
        x = x.round() / 2
    elif kind == "peaked":
        x[at] = 60
    elif kind == "masked":
        x[torch.arange(vocab) % 8 != at % 8] = -torch.inf
    elif kind == "cut":
        x[:at] = -torch.inf
    elif kind == "all":
        x.fill_(-torch.inf)
    elif kind == "broken":
        x[at] = draw(st.sampled_from([torch.nan, torch.inf]))
    return x


@st.composite
def _cases(draw) -> Case:
    vocab = draw(st.sampled_from([1, 3, 127, 128, 129, 700]))
    num_rows, n = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    rows = [draw(_rows(vocab)) for _ in range(num_rows)]
    logits = torch.stack(rows) if rows else torch.zeros(0, vocab)
    token = st.one_of(st.integers(0, vocab - 1), st.sampled_from([-1, vocab, 2**40, -(2**40)]))
    asked = [[draw(token) for _ in range(n)] for _ in range(num_rows)]
    slots, temperature, row_num_top = None, None, None
    if draw(st.booleans()):
        slots = tuple(draw(st.integers(-1, 2)) for _ in range(num_rows))
    if draw(st.booleans()):
        values = st.sampled_from([0.0, 1.0, 0.6, 2.5])
        temperature = tuple(draw(values) for _ in range(num_rows if slots is None else 3))
    if draw(st.booleans()):
        counts = st.sampled_from([-1, 0, 1, 5, 32, 50, 10**9])
        row_num_top = tuple(draw(counts) for _ in range(num_rows if slots is None else 3))
    return Case(
        logits.to(draw(st.sampled_from(DTYPES))),
        torch.tensor(asked, dtype=torch.int64).view(num_rows, n),
        min(draw(st.sampled_from([0, 1, 5, 20, 33, 70])), vocab),
        slots,
        temperature,
        row_num_top,
    )


# --- oracle ------------------------------------------------------------------------------------


@given(case=_cases())
def test_the_oracle_equals_a_plain_loop(case):
    _assert_equal(_run(reference, case), _by_hand(case))


# --- properties --------------------------------------------------------------------------------


@given(case=_cases(), as_on_gpu=st.booleans())
def test_kernel_results_equal_a_plain_loop(device, case, as_on_gpu):
    _assert_equal(_run(kernels, case, device, as_on_gpu=as_on_gpu), _by_hand(case))


@given(case=_cases().filter(lambda case: len(case.logits)))
def test_a_row_does_not_depend_on_other_rows(device, case):
    together = _run(kernels, case, device, as_on_gpu=True)
    for i in {0, len(case.logits) - 1}:
        of_row = [
            values if case.slots is not None or not values else values[i : i + 1]
            for values in (case.temperature, case.row_num_top)
        ]
        alone = Case(
            case.logits[i : i + 1],
            case.token_ids[i : i + 1],
            case.num_top,
            None if case.slots is None else case.slots[i : i + 1],
            *of_row,
        )
        for whole, part in zip(
            together, _run(kernels, alone, device, as_on_gpu=True), strict=True
        ):
            assert torch.equal(whole[i : i + 1].nan_to_num(7), part.nan_to_num(7))


# --- edges -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab", "as_on_gpu"), [(5000, True), (32_000, False), (151_936, False), (600_000, False)]
)
def test_large_vocabularies(device, vocab, as_on_gpu):
    """Likely and unlikely tokens are asked for; the second row has ties."""
    logits = normal((2, vocab), torch.float32, "cpu") * 3
    logits[1] = (logits[1] * 4).round() / 4
    logits[0, 17] = -torch.inf
    logits[0, 256:1024] = -torch.inf  # groups of -inf only
    token_ids = torch.tensor([[17, 4], [vocab - 1, 250]])
    case = Case(logits, token_ids, 20, temperature=(0.7, 0.0))
    got = _run(kernels, case, device, as_on_gpu=as_on_gpu)
    # In float64: torch's float32 sum of 151,936 terms is off by 1.3e-5 on a CPU.
    expected = (logits.double() / torch.tensor([[0.7], [1.0]])).log_softmax(1).float()
    assert (got.top_logprobs - expected.gather(1, got.top_token_ids)).abs().max() <= CLOSE
    order = logits.sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(got.top_token_ids, order[:, :20])
    assert got.logprobs[0, 0] == -torch.inf
    torch.testing.assert_close(got.logprobs, expected.gather(1, token_ids), rtol=0, atol=CLOSE)
    better = logits[:, None] > logits.gather(1, token_ids)[:, :, None]
    assert torch.equal(got.ranks, 1 + better.sum(2))


@pytest.mark.parametrize("as_on_gpu", [False, True])
def test_num_top_may_be_the_whole_vocabulary(device, as_on_gpu):
    """Rounds are repeated until no token is left; some tokens are -inf."""
    logits = (normal((1, 200), torch.float32, "cpu") * 2).round()
    logits[0, 100:140] = -torch.inf
    case = Case(logits, torch.zeros(1, 0, dtype=torch.int64), 200)
    got = _run(kernels, case, device, as_on_gpu=as_on_gpu)
    _assert_equal(got, _by_hand(case))
    assert sorted(got.top_token_ids[0].tolist()) == list(range(200))


def test_equal_logits_share_a_rank(device):
    case = Case(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), torch.tensor([[0, 1, 2, 3]]), 2)
    for ops in (reference, kernels):
        got = _run(ops, case, device)
        assert got.ranks.tolist() == [[4, 1, 1, 3]]
        assert got.top_token_ids.tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("row", "order", "ranks"),
    [
        ([1.0, NAN, 3.0, -INF], [2, 0, 1, 3], [2, 1, 1, 3]),
        ([1.0, -NAN, 3.0, -INF], [2, 0, 1, 3], [2, 1, 1, 3]),
        ([1.0, INF, INF, -INF], [1, 2, 0, 3], [3, 1, 1, 4]),
        ([-INF] * 4, [0, 1, 2, 3], [1, 1, 1, 1]),
    ],
)
def test_rows_without_a_softmax_have_ranks_and_nan_logprobs(device, row, order, ranks):
    """A row with NaN or infinities has NaN logprobs but an order; the next row is not affected."""
    logits = torch.tensor([row, [0.0, 0.0, -INF, 0.0]])
    case = Case(logits, torch.arange(4).repeat(2, 1), 4)
    for ops in (reference, kernels):
        got = _run(ops, case, device)
        assert got.top_token_ids.tolist() == [order, [0, 1, 3, 2]]
        assert got.ranks.tolist() == [ranks, [1, 1, 4, 1]]
        assert got.logprobs[0].isnan().all()
        assert got.top_logprobs[0].isnan().all()
        third = -math.log(3)
        assert got.logprobs[1].tolist() == pytest.approx([third, third, -INF, third])


def test_logits_far_from_zero(device):
    """Only differences matter: 30,000 overflows no exponential and costs no digits in a sum."""
    logits = torch.tensor([[30_000.0, 30_001.0, -30_000.0], [-30_000.0, -30_001.0, -torch.inf]])
    got = _run(kernels, Case(logits, torch.tensor([[0], [1]]), 3), device)
    torch.testing.assert_close(got.logprobs[0], torch.tensor([-1.3132617]), rtol=0, atol=CLOSE)
    torch.testing.assert_close(got.logprobs[1], torch.tensor([-1.3132617]), rtol=0, atol=CLOSE)
    assert got.top_logprobs[1, 2] == -torch.inf


@pytest.mark.parametrize(
    ("num_rows", "n", "num_top"), [(0, 1, 1), (2, 0, 0), (2, 0, 1), (2, 1, 0)]
)
def test_empty_sizes_give_empty_results(device, num_rows, n, num_top):
    case = Case(torch.zeros(num_rows, 5), torch.zeros(num_rows, n, dtype=torch.int64), num_top)
    for ops in (reference, kernels):
        _assert_equal(_run(ops, case, device), _by_hand(case))


def test_a_captured_launch_follows_the_logits(device):
    if device.type != "cuda":
        pytest.skip("not run: no GPU")
    logits, token_ids = (
        torch.zeros(2, 1000, device=device),
        torch.tensor([[5], [6]], device=device),
    )
    kernels.top_logprobs(logits, token_ids, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = kernels.top_logprobs(logits, token_ids, 2)
    logits[0, 999], token_ids[1, 0] = 3.0, -1
    graph.replay()
    assert result.top_token_ids.tolist() == [[999, 0], [0, 1]]
    assert result.ranks.tolist() == [[2], [0]]


def test_configurations():
    """A program of the first launch takes up to 2048 ids, for any group size and any rows."""
    small, usual, largest = map(
        TopLogprobsConfig.default_for, (1000, 151_936, MAX_LOGPROBS_VOCAB_SIZE)
    )
    assert (small.tile_groups, usual.tile_groups, largest.tile_groups) == (8, 16, 8)
    assert (usual.num_row_warps, largest.num_row_warps) == (8, 16)
    assert TopLogprobsConfig.for_interpreter(MAX_LOGPROBS_VOCAB_SIZE).tile_groups == 2**18 // 256


# --- errors ------------------------------------------------------------------------------------

FLOATS = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": FLOATS.long()}, TypeError, r"logits: expected dtype torch\.float"),
        ({"logits": FLOATS[0]}, ValueError, r"logits: expected shape \[any, any\], got \[4\]"),
        ({"logits": FLOATS[:, :0]}, ValueError, r"logits: expected a vocabulary of 1 to 1048576"),
        ({"token_ids": FLOATS}, TypeError, r"token_ids: expected dtype torch\.int64, got"),
        ({"token_ids": FLOATS[:1].long()}, ValueError, r"token_ids: expected shape \[2, any\]"),
        ({"num_top": -1}, ValueError, r"num_top: expected 0 to 4, got -1"),
        ({"num_top": 5}, ValueError, r"num_top: expected 0 to 4, got 5"),
        ({"idx_mapping": FLOATS[:, 0]}, TypeError, r"idx_mapping: expected dtype torch\.int32"),
        ({"temperature": FLOATS[0]}, ValueError, r"temperature: expected shape \[2\], got \[4\]"),
        (
            {"temperature": FLOATS[:, 0].half()},
            TypeError,
            r"temperature: expected dtype torch\.fl",
        ),
    ],
)
def test_wrong_arguments_are_named(device, change, error, message):
    arguments = {"logits": FLOATS, "token_ids": torch.zeros(2, 1, dtype=torch.int64), "num_top": 2}
    arguments |= change
    on_device = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()
    }
    for ops in (reference, kernels):
        with pytest.raises(error, match=message):
            ops.top_logprobs(**on_device)


def test_a_vocabulary_that_is_too_large_is_named(device):
    logits = torch.zeros(1, MAX_LOGPROBS_VOCAB_SIZE + 1, dtype=torch.float16, device=device)
    token_ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    for ops in (reference, kernels):
        with pytest.raises(ValueError, match=r"logits: expected a vocabulary of 1 to 1048576 tok"):
            ops.top_logprobs(logits, token_ids, 1)


def test_a_cpu_tensor_needs_the_interpreter(monkeypatch):
    monkeypatch.setattr("mrv1.kernels._base.checks.INTERPRET", False)
    with pytest.raises(UnsupportedDeviceError, match="logits: "):
        kernels.top_logprobs(FLOATS, torch.zeros(2, 1, dtype=torch.int64), 1)
