"""Calls that repeat the launches of the call before."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import HeadRole, reference
from mrv1.kernels._base.launches import RepeatedCall, launch_kernel
from mrv1.testing.strategies import LayoutCase, PagedCase, RaggedBatch, build_paged_cache
from tests.kernels.paged_attention import (
    Result,
    assert_equal,
    assert_in_budget,
    empty_outputs,
    exact,
    make_plan,
    make_queries,
    make_splits,
    run_decode,
    run_prefill,
)


@dataclass
class Descriptor:
    """Like Triton's: a tensor, and how it is read."""

    base: Any
    factor: int


class Kernel:
    """Stands in for a compiled function of Triton: ``out = factor * x + y[0]``, y may be None."""

    arg_names = ("out", "x", "y", "FACTOR")

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.compiled: Kernel | None = self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self._run, grid)

    def _run(
        self, grid: tuple[int, ...], out: Any, x: Any, y: Any, FACTOR: int, num_warps: int = 4
    ) -> Kernel | None:
        self.grids.append(grid)
        out.copy_(FACTOR * x.factor * x.base.view(out.shape) + (0 if y is None else y[0]))
        return self.compiled


class Op:
    """An op of one launch that counts how often it ran with its checks."""

    def __init__(self) -> None:
        self.kernel = Kernel()
        self.num_runs = 0

    def __call__(self, x: torch.Tensor, y: Any, out: torch.Tensor, factor: int) -> None:
        self.num_runs += 1
        described = Descriptor(x.view(-1), 3)
        launch_kernel(self.kernel, (len(x),), out, described, y, FACTOR=factor, num_warps=2)


forms = st.tuples(
    st.sampled_from([(4, 8), (8, 4)]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 4),  # elements before the tensor: only 0 and 4 float32 are aligned
)
steps = st.lists(st.tuples(forms, st.integers(0, 2), st.booleans()), max_size=12)


@given(steps=steps)
def test_repeated_launches_equal_the_op_and_its_checks_run_for_every_new_form(steps):
    op, repeated = Op(), RepeatedCall()
    objects = [object() for _ in range(3)]
    before, num_runs = None, 0
    for number, ((shape, dtype, first), same, transposed) in enumerate(steps):
        flat = torch.arange(first + 32, dtype=dtype) + number
        x = flat[first:].view(shape)
        out = torch.empty(shape[::-1], dtype=dtype).T if transposed else torch.empty_like(x)
        y = torch.tensor([100.0 * number, 1.0])
        factor = same + 2
        repeated(partial(op, x, y, out, factor), (x, y, out), objects[same])
        form = shape, dtype, x.data_ptr() % 16 == 0, out.data_ptr() % 16 == 0, same, transposed
        num_runs += form != before
        before = form
        assert torch.equal(out, 3 * factor * x + y[0])
        assert op.num_runs == num_runs


@pytest.mark.parametrize(
    ("shape", "dtype", "start", "is_transposed"),
    [
        ((8, 4), torch.float32, 0, False),
        ((4, 8), torch.float64, 0, False),
        ((4, 8), torch.float32, 1, False),
        ((4, 8), torch.float32, 0, True),
    ],
    ids=["shape", "dtype", "alignment", "stride"],
)
def test_each_difference_of_form_runs_the_op(shape, dtype, start, is_transposed):
    op, repeated, y = Op(), RepeatedCall(), torch.ones(2)
    for number, of in enumerate([((4, 8), torch.float32, 0, False)] * 2, start=1):
        _call_and_compare(op, repeated, y, *of)
        assert op.num_runs == 1, number
    _call_and_compare(op, repeated, y, shape, dtype, start, is_transposed)
    assert op.num_runs == 2


def _call_and_compare(
    op: Op,
    repeated: RepeatedCall,
    y: torch.Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    start: int,
    is_transposed: bool,
) -> None:
    x = torch.rand(start + 32, dtype=dtype)[start:].view(shape)
    out = torch.empty(shape[::-1], dtype=dtype).T if is_transposed else torch.empty_like(x)
    repeated(partial(op, x, y, out, 2), (x, y, out))
    assert torch.equal(out, 6 * x + 1)


def test_a_call_inside_another_is_part_of_it():
    first, inner, last = Op(), Op(), Op()
    outer, nested = RepeatedCall(), RepeatedCall()
    for number in range(3):
        x, y = torch.full((4, 4), float(number)), torch.full((2,), float(10 * number))
        outs = [torch.empty(4, 4) for _ in range(3)]

        def op(x: Any = x, y: Any = y, outs: Any = outs) -> None:
            first(x, y, outs[0], 1)
            nested(partial(inner, x, y, outs[1], 2), (x, y, outs[1]))
            last(x, y, outs[2], 3)

        outer(op, (x, y, *outs))
        for factor, out in enumerate(outs, start=1):
            assert torch.equal(out, 3 * factor * x + y[0])
    assert [first.num_runs, inner.num_runs, last.num_runs] == [1, 1, 1]


def test_a_call_without_compiled_kernels_is_never_repeated():
    op, repeated = Op(), RepeatedCall()
    op.kernel.compiled = None  # the interpreter
    x, y, out = torch.ones(4, 4), torch.ones(2), torch.empty(4, 4)
    for _ in range(3):
        repeated(partial(op, x, y, out, 2), (x, y, out))
    assert op.num_runs == 3
    for _ in range(2):
        repeated(lambda: None, (x, y, out))
    assert torch.equal(out, 6 * x + 1)


def test_a_call_that_copies_a_tensor_is_never_repeated():
    # Its launches have the copy's address, not the tensor's.
    op, repeated = Op(), RepeatedCall()
    for number in range(3):
        x, y, out = torch.full((4, 4), float(number)), torch.ones(2), torch.empty(4, 4)
        repeated(partial(op, x.clone(), y, out, 2), (x, y, out))
        assert torch.equal(out, 6 * x + 1)
    assert op.num_runs == 3


def test_an_absent_tensor_is_a_form_of_its_own():
    op, repeated = Op(), RepeatedCall()
    x, out = torch.ones(4, 4), torch.empty(4, 4)
    for y in (None, None, torch.ones(2), torch.full((2,), 2.0), None):
        repeated(partial(op, x, y, out, 2), (x, y, out))
        assert torch.equal(out, 6 * x + (0 if y is None else y[0]))
    assert op.num_runs == 3


def test_what_is_forgotten_is_not_kept_alive():
    op, repeated, step = Op(), RepeatedCall(), Op()
    x, y, out = torch.ones(4, 4), torch.ones(2), torch.empty(4, 4)
    alive = weakref.ref(step)
    repeated(partial(op, x, y, out, 2), (x, y, out), step)
    del step
    assert alive() is not None
    repeated.forget()
    assert alive() is None
    repeated(partial(op, x, y, out, 2), (x, y, out), None)
    assert op.num_runs == 2


def test_a_failed_call_leaves_nothing_to_repeat():
    op, repeated = Op(), RepeatedCall()
    x, y, out = torch.ones(4, 4), torch.ones(2), torch.empty(4, 4)
    repeated(partial(op, x, y, out, 2), (x, y, out))
    with pytest.raises(RuntimeError):
        repeated(partial(op, x, y, torch.empty(3), 2), (x, y, out), "other")
    repeated(partial(op, x, y, out, 2), (x, y, out), "other")
    assert op.num_runs == 3
    assert torch.equal(out, 6 * x + 1)


def test_threads_note_their_own_launches():
    gate = threading.Barrier(2, timeout=10)

    def noted(op: Op, number: float) -> None:
        x, y, out = torch.full((4, 4), number), torch.ones(2), torch.empty(4, 4)

        def run() -> None:
            gate.wait()  # both threads are noting
            op(x, y, out, 2)
            gate.wait()

        own = RepeatedCall()
        own(run, (x, y, out))
        other = torch.full((4, 4), number + 1)
        own(run, (other, y, out))
        assert len(op.kernel.grids) == 2  # of the op and of its repetition, not the other thread's
        results.append(torch.equal(out, 6 * other + 1))

    results: list[bool] = []
    threads = [threading.Thread(target=noted, args=(Op(), float(n))) for n in (10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True, True]


# --- the ops on a GPU ----------------------------------------------------------------------------


def _layers(query_lens: tuple[int, ...], granularity: Any, device: Any) -> list[PagedCase]:
    """Return the caches of three layers with the same block table, and other keys and values."""
    layout = LayoutCase.head_groups(
        roles=[HeadRole(), HeadRole()], head_dim=128, max_seq_len=1024, max_query_len=300
    )
    batch = RaggedBatch(query_lens=query_lens, seq_lens=(900, 300))
    options: dict[str, Any] = {"dtype": torch.bfloat16, "granularity": granularity}
    return [build_paged_cache(layout, batch, seed=seed, **options).to(device) for seed in range(3)]


def _tensors(case: PagedCase) -> tuple[torch.Tensor, ...]:
    scales = case.scales
    pages = case.k_cache, case.v_cache
    return pages if scales is None else (*pages, scales.k_scale, scales.v_scale)


def _assert_repeats(call: Callable[[PagedCase, torch.Tensor, Result], None], cases: Any) -> None:
    """Call for every layer; only the first call may run the op, and all results are the op's."""
    num_runs, repeated, step = 0, RepeatedCall(), object()
    for seed, case in enumerate(cases):
        q = make_queries(case, 4, seed)
        want, got = Result(*empty_outputs(q)), Result(*empty_outputs(q))
        call(case, q, want)

        def op(case: PagedCase = case, q: torch.Tensor = q, got: Result = got) -> None:
            nonlocal num_runs
            num_runs += 1
            call(case, q, got)

        repeated(op, (q, got.out, got.lse, *_tensors(case)), step)
        assert_equal(got, want)
        assert_in_budget(got, run_prefill(reference, case, q), exact(case, q), case)
    assert num_runs == 1


granularities = pytest.mark.parametrize("granularity", [None, "token"])


@pytest.mark.gpu
@pytest.mark.gpu_only
@granularities
@pytest.mark.parametrize("num_splits", [None, 1, 4], ids=["chosen", "queue", "shared"])
@pytest.mark.parametrize("query_lens", [(300, 70), (3, 5)], ids=["long", "short"])
def test_prefills_of_all_layers_repeat_the_first(device, query_lens, num_splits, granularity):
    cases = _layers(query_lens, granularity, device)
    splits = make_splits(cases[0], make_queries(cases[0], 4), num_splits)

    def call(case: PagedCase, q: torch.Tensor, result: Result) -> None:
        run_prefill(kernels, case, q, splits=splits, out=result.out, lse=result.lse)

    _assert_repeats(call, cases)


@pytest.mark.gpu
@pytest.mark.gpu_only
@granularities
@pytest.mark.parametrize("query_len", [1, 4])
def test_decodes_of_all_layers_repeat_the_first(device, query_len, granularity):
    cases = _layers((query_len, query_len), granularity, device)
    plan = make_plan(cases[0], make_queries(cases[0], 4))
    kernels.plan_decode_attention(cases[0].seq_lens, cases[0].layout, plan)

    def call(case: PagedCase, q: torch.Tensor, result: Result) -> None:
        run_decode(kernels, case, q, plan=plan, out=result.out, lse=result.lse)

    _assert_repeats(call, cases)


@pytest.mark.gpu
@pytest.mark.gpu_only
@granularities
def test_writes_of_all_layers_repeat_the_first(device, granularity):
    num_runs, repeated = 0, RepeatedCall()
    cases = _layers((300, 70), granularity, device)
    slots = cases[0].slot_mapping
    for case in cases:
        scales = case.scales_before
        k_cache, v_cache = case.k_cache_before, case.v_cache_before

        def op(case: PagedCase = case) -> None:
            nonlocal num_runs
            num_runs += 1
            kernels.kv_cache_write(
                case.key, case.value, case.k_cache_before, case.v_cache_before, slots,
                case.layout, scales=case.scales_before,
            )  # fmt: skip

        tensors = (case.key, case.value, k_cache, v_cache)
        repeated(
            op, tensors if scales is None else (*tensors, scales.k_scale, scales.v_scale), slots
        )
        assert_same_bytes(k_cache, case.k_cache)
        assert_same_bytes(v_cache, case.v_cache)
    assert num_runs == 1


def assert_same_bytes(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
