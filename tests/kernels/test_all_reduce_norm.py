"""The sum over ranks with residual and norm; ranks are threads that share their memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import reference
from mrv1.kernels._base.peers import PeerBuffer, PeerError
from mrv1.kernels.layers.contracts import RING_ROWS, AllReduceBuffers
from mrv1.models import ParallelContext
from tests.kernels.elementwise import (
    DTYPES,
    assert_gaps_untouched,
    assert_in_budget,
    in_a_wider_row,
    normal,
    seeds,
    tiles,
)
from tests.thread_ranks import Meeting

Result = TypeVar("Result")

EPS = 1e-6


def on_peers(size: int, function: Callable[[ParallelContext], Result]) -> list[Result]:
    """Return what ``function`` returns for each rank; a rank that fails ends the others' waits."""
    meeting = Meeting(size)

    def run(context: ParallelContext) -> Result:
        try:
            return function(context)
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, meeting.contexts))


@dataclass(frozen=True)
class Call:
    """One call of all ranks."""

    num_tokens: int
    bias: bool = False
    residual: bool = True
    norm: bool = True
    in_place: bool = False
    gap: int = 0
    algorithm: str | None = None
    splits: int = 1


def partials(call: Call, size: int, hidden: int, wire: torch.dtype, seed: int) -> torch.Tensor:
    """Return [ranks, tokens, hidden]; of splits their float32 sum, a tree of pairs, rounded."""
    if call.splits == 1:
        return normal((size, call.num_tokens, hidden), wire, "cpu", seed)
    parts = splits(call, size, hidden, seed).unbind(1)
    while len(parts) > 1:
        parts = [even + odd for even, odd in zip(parts[0::2], parts[1::2], strict=True)]
    return parts[0].to(wire)


def splits(call: Call, size: int, hidden: int, seed: int) -> torch.Tensor:
    """Return [ranks, splits, tokens, hidden]."""
    return normal((size, call.splits, call.num_tokens, hidden), torch.float32, "cpu", seed)


def run_calls(op, parallel, calls, hidden, dtype, wire, seed):
    """Return (result, norm) of each call of one rank; every output is poisoned before."""
    buffers = AllReduceBuffers.allocate(parallel.peers, hidden, wire)
    results = []
    for index, call in enumerate(calls):
        partial = partials(call, parallel.size, hidden, wire, seed + index)[parallel.rank]
        partial = in_a_wider_row(partial, call.gap, call.gap)
        if call.splits > 1:
            partial = splits(call, parallel.size, hidden, seed + index)[parallel.rank]
        shape = (call.num_tokens, hidden)
        residual = in_a_wider_row(normal(shape, dtype, "cpu", seed - index - 1) * 3, 0, call.gap)
        out = residual if call.in_place else torch.full(shape, torch.nan, dtype=dtype)
        normed = in_a_wider_row(torch.full(shape, torch.nan, dtype=dtype), call.gap, 0)
        got = op(
            partial,
            buffers,
            bias=normal((hidden,), dtype, "cpu", seed) if call.bias else None,
            residual=residual if call.residual or call.in_place else None,
            out=out,
            norm_weight=normal((hidden,), dtype, "cpu", seed + 1) if call.norm else None,
            eps=EPS,
            normed_out=normed if call.norm else None,
            algorithm=call.algorithm,
        )
        assert got is out
        assert call.splits > 1 or not assert_gaps_untouched(partial)
        assert_gaps_untouched(normed)
        assert_gaps_untouched(residual)
        results.append((out.clone(), normed.clone() if call.norm else None))
    return results


def expected_sum(call, size, hidden, dtype, wire, seed, index):
    """Return the rounded result: pairs of ranks, pairs of pairs, then bias and residual."""
    wide = torch.float64 if wire == torch.float64 else torch.float32
    level = list(partials(call, size, hidden, wire, seed + index).to(wide))
    while len(level) > 1:
        level = [sum(level[i + 1 : i + 2], level[i]) for i in range(0, len(level), 2)]
    total = level[0]
    if call.bias:
        total = total + normal((hidden,), dtype, "cpu", seed).to(wide)
    if call.residual or call.in_place:
        shape = (call.num_tokens, hidden)
        total = (normal(shape, dtype, "cpu", seed - index - 1) * 3).to(wide) + total
    return total.to(dtype)


def check_calls(op, size, calls, hidden, dtype, wire, seed):
    """Check what all ranks have after each call."""
    of_ranks = on_peers(
        size, lambda parallel: run_calls(op, parallel, calls, hidden, dtype, wire, seed)
    )
    weight = normal((hidden,), dtype, "cpu", seed + 1)
    for index, call in enumerate(calls):
        want = expected_sum(call, size, hidden, dtype, wire, seed, index)
        first, first_norm = of_ranks[0][index]
        for results in of_ranks:
            assert torch.equal(results[index][0], want)
            assert not call.norm or torch.equal(results[index][1], first_norm)
        if call.norm and call.num_tokens:
            root = (first.double().square().mean(-1, keepdim=True) + EPS).sqrt()
            torch_norm = reference.rms_norm(first, weight, EPS)
            assert_in_budget(first_norm, torch_norm, first.double() / root * weight.double())


def calls_of(num_tokens: list[int], max_size: int) -> st.SearchStrategy[list[Call]]:
    """Draw calls that follow each other."""
    call = st.builds(
        Call,
        num_tokens=st.sampled_from(num_tokens),
        bias=st.booleans(),
        residual=st.booleans(),
        norm=st.booleans(),
        in_place=st.booleans(),
        gap=st.sampled_from([0, 8, 3]),
        algorithm=st.sampled_from([None, "one_shot", "two_shot"]),
        splits=st.sampled_from([1, 1, 2, 4]),
    )
    return st.lists(call, min_size=1, max_size=max_size)


calls = calls_of([0, 1, 2, 7, 33, 128, RING_ROWS, RING_ROWS + 1, 300], 5)
formats = st.sampled_from([(each, each) for each in DTYPES] + [(torch.bfloat16, torch.float32)])


# --- oracle ------------------------------------------------------------------------------------


def test_the_oracle_equals_a_loop():
    call = Call(3, bias=True)
    shape, seed = (3, 5), 4
    of_ranks = on_peers(
        3,
        lambda parallel: run_calls(
            reference.all_reduce_norm, parallel, [call], 5, torch.float64, torch.float64, seed
        ),
    )
    parts = partials(call, 3, 5, torch.float64, seed)
    bias, weight = (normal((5,), torch.float64, "cpu", seed + i) for i in range(2))
    residual = normal(shape, torch.float64, "cpu", seed - 1) * 3
    for out, normed in (results[0] for results in of_ranks):
        for row in range(3):
            sums = [
                residual[row, col].item()
                + (sum(parts[rank, row, col].item() for rank in range(3)) + bias[col].item())
                for col in range(5)
            ]
            root = (sum(x * x for x in sums) / 5 + EPS) ** 0.5
            for col in range(5):
                assert out[row, col].item() == pytest.approx(sums[col])
                assert normed[row, col].item() == pytest.approx(
                    sums[col] / root * weight[col].item()
                )


@given(
    size=st.sampled_from([1, 2, 3, 4, 8]),
    calls=calls,
    hidden=st.sampled_from([1, 16, 80, 130]),
    formats=st.sampled_from([*[(each, each) for each in DTYPES], (torch.float64,) * 2]),
    seed=seeds,
)
def test_the_oracle_adds_pairs_of_ranks(size, calls, hidden, formats, seed):
    if torch.float64 in formats:  # splits are float32
        calls = [replace(call, splits=1) for call in calls]
    check_calls(reference.all_reduce_norm, size, calls, hidden, *formats, seed)


def test_the_oracle_stops_waiting_for_a_rank_that_has_ended():
    meeting = Meeting(2)

    def allocate(context):
        return AllReduceBuffers.allocate(context.peers, 8, torch.float32)

    with ThreadPoolExecutor(2) as pool:
        buffers, _ = pool.map(allocate, meeting.contexts)
        waiting = pool.submit(reference.all_reduce_norm, torch.ones(2, 8), buffers)
        meeting.abort()
        with pytest.raises(PeerError, match="all_reduce_norm: another rank has ended"):
            waiting.result(10)


# --- properties --------------------------------------------------------------------------------


@pytest.mark.interp
@given(
    size=st.sampled_from([1, 2, 4, 8]),
    calls=calls,
    hidden=st.sampled_from([1, 16, 80, 128, 130]),
    formats=formats,
    seed=seeds,
)
def test_calls_of_all_sizes_follow_each_other(size, calls, hidden, formats, seed):
    check_calls(kernels.all_reduce_norm, size, calls, hidden, *formats, seed)


@pytest.mark.interp
@given(
    size=st.sampled_from([2, 3, 4]),
    calls=calls_of([0, 1, 2, 7, 8, 9, 21], 3),
    hidden=st.sampled_from([1, 128, 576, 1000]),
    formats=formats,
    seed=seeds,
)
def test_many_programs_take_turns(size, calls, hidden, formats, seed):
    """With a ring of few rows: what many programs do to a large one, in less time."""
    with tiles("all_reduce_norm", as_on_gpu=True), pytest.MonkeyPatch.context() as patch:
        for name in ("mrv1.kernels.layers.all_reduce_norm", "mrv1.kernels.layers.contracts"):
            patch.setattr(f"{name}.RING_ROWS", 8)
        check_calls(kernels.all_reduce_norm, size, calls, hidden, *formats, seed)


@pytest.mark.interp
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_algorithms_have_the_bits_of_rms_norm(dtype):
    """Also when a row is summed alone and when it is summed among others."""
    size, hidden, many = 4, 96, Call(40)

    def run(parallel):
        buffers = AllReduceBuffers.allocate(parallel.peers, hidden, dtype)
        partial = partials(many, size, hidden, dtype, 1)[parallel.rank]
        weight, outs = normal((hidden,), dtype, "cpu", 2), []
        for rows in (slice(None), slice(7, 8)):
            for algorithm in ("one_shot", "two_shot"):
                residual = normal((40, hidden), dtype, "cpu", 3)[rows].clone()
                normed = torch.empty_like(residual)
                kernels.all_reduce_norm(
                    partial[rows], buffers, residual=residual, out=residual, norm_weight=weight,
                    eps=EPS, normed_out=normed, algorithm=algorithm,
                )  # fmt: skip
                assert torch.equal(normed, kernels.rms_norm(residual, weight, EPS))
                outs.append((residual, normed))
        for (out, normed), (alone, normed_alone) in zip(outs[:2], outs[2:], strict=True):
            assert torch.equal(out[7:8], alone)
            assert torch.equal(normed[7:8], normed_alone)
        return outs[0]

    first, *others = on_peers(size, run)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.interp
@pytest.mark.parametrize("as_on_gpu", [False, True])
def test_a_small_call_clears_what_a_large_one_has_left(as_on_gpu):
    """After a program's turn, its slot of the turn before is as it was at first."""

    def run(parallel):
        buffers = AllReduceBuffers.allocate(parallel.peers, 130, torch.float32)
        for index, size in enumerate((40, 1, 1, 40, 3, 40, 40, 1, 2)):
            partial = torch.full((size, 130), float(index + parallel.rank))
            out = kernels.all_reduce_norm(partial, buffers)
            assert torch.equal(out, torch.full_like(out, 2.0 * index + 1))
            before = buffers.received.own[buffers.turn[0] - 2]
            assert not before[:, : 4 if as_on_gpu else RING_ROWS].any()

    with tiles("all_reduce_norm", as_on_gpu=as_on_gpu):
        on_peers(2, run)


# --- edges -------------------------------------------------------------------------------------

OPS = [reference.all_reduce_norm, pytest.param("kernel", marks=pytest.mark.interp)]


def _op(op):
    return kernels.all_reduce_norm if op == "kernel" else op


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pattern_of_bits_travels(op, dtype):
    """The pattern of all ones, a NaN, stands for a word that is missing."""
    word = torch.int16 if dtype.itemsize == 2 else torch.int32
    if dtype.itemsize == 2:
        bits = torch.arange(-(2**15), 2**15).to(word).view(RING_ROWS, -1)
    else:
        bits = torch.tensor([[-1, 0, -(2**31), 0x7FFFFFFF, 0x7F800000, 1, 0x3F800000]], dtype=word)
    values = bits.view(dtype)

    def run(parallel):
        buffers = AllReduceBuffers.allocate(parallel.peers, values.shape[1], dtype)
        partial = values if parallel.rank == 1 else torch.full_like(values, -0.0)
        return _op(op)(partial, buffers)

    for out in on_peers(2, run):
        assert torch.equal(out.isnan(), values.isnan())
        there = ~values.isnan()
        assert torch.equal(out.view(word)[there], bits[there])  # signs of zeros included


@pytest.mark.parametrize("op", OPS)
def test_no_tokens(op):
    def run(parallel):
        buffers = AllReduceBuffers.allocate(parallel.peers, 8, torch.float32)
        assert _op(op)(torch.ones(0, 8), buffers).shape == (0, 8)
        return _op(op)(torch.ones(1, 8), buffers)

    assert all(torch.equal(out, torch.full((1, 8), 2.0)) for out in on_peers(2, run))


@pytest.mark.interp
def test_a_kernel_gives_up_when_a_rank_has_ended():
    meeting = Meeting(2)

    def allocate(context):
        return AllReduceBuffers.allocate(context.peers, 8, torch.float32)

    with ThreadPoolExecutor(2) as pool:
        buffers, _ = pool.map(allocate, meeting.contexts)
        waiting = pool.submit(kernels.all_reduce_norm, torch.ones(2, 8), buffers)
        threading.Event().wait(0.2)
        assert not waiting.done()
        meeting.abort()
        assert waiting.result(20).shape == (2, 8)


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.interp
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"partial": [1.0]}, TypeError, r"partial: expected a torch\.Tensor, got list"),
        ({"partial": torch.ones(2, 8).int()}, TypeError, r"partial: expected dtype .*int32"),
        (
            {"partial": torch.ones(2, 9)},
            ValueError,
            r"partial: expected shape \[tokens, 8\], .*, got torch\.float32 \[2, 9\]",
        ),
        (
            {"partial": torch.ones(2, 3, 8).transpose(0, 1)},
            ValueError,
            r"partial: expected contiguous splits, got shape \[3, 2, 8\] with strides \(8, 24",
        ),
        (
            {"partial": torch.ones(2, 8).half()},
            TypeError,
            r"partial: expected a dtype of 4 bytes, as its buffers have, got torch\.float16",
        ),
        ({"bias": torch.ones(7)}, ValueError, r"bias: expected shape \[8\], got \[7\]"),
        ({"residual": torch.ones(1, 8)}, ValueError, r"residual: expected shape \[2, 8\]"),
        (
            {"out": torch.ones(2, 8).half()},
            TypeError,
            r"residual: expected dtype torch\.float16, got torch\.float32",
        ),
        (
            {"norm_weight": torch.ones(8)},
            ValueError,
            r"norm_weight, normed_out: expected both or neither, got norm_weight",
        ),
        (
            {"norm_weight": torch.ones(8), "normed_out": torch.ones(2, 7)},
            ValueError,
            r"normed_out: expected shape \[2, 8\], got \[2, 7\]",
        ),
        ({"algorithm": "ring"}, ValueError, r"algorithm: expected .*, got 'ring'"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    received = PeerBuffer(0, (torch.zeros(3, 1, RING_ROWS, 8, dtype=torch.int32),))
    abort = torch.zeros(1, dtype=torch.int32)
    buffers = AllReduceBuffers(received, torch.zeros(RING_ROWS, dtype=torch.int32), abort)
    arguments = {"partial": torch.ones(2, 8), "residual": torch.ones(2, 8), "buffers": buffers}
    with pytest.raises(error, match=message):
        kernels.all_reduce_norm(**arguments | change)
