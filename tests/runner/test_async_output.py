"""AsyncOutput and OutputRing: each step's own result, failed rows, time-outs, reuse of slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import AsyncOutput, StepError, StepPlan
from mrv1.runner.async_output import OutputRing
from mrv1.runner.step import RowFailure

DEPTH, MAX_REQS = 2, 4


def make_plan(num_rows: int, step_id: int = 7) -> StepPlan:
    return StepPlan(
        step_id=step_id,
        req_ids=tuple("abcd"[:num_rows]),
        slots=np.arange(num_rows, dtype=np.int32),
        epochs=np.full(num_rows, 3, dtype=np.int32),
        num_scheduled_tokens=np.ones(num_rows, dtype=np.int32),
        new_block_ids={},
    )


def launch(
    ring: OutputRing,
    tokens: list[int],
    counts: list[int] | None = None,
    *,
    step_id: int = 7,
    on: str = "cpu",
    **options: object,
) -> AsyncOutput:
    """Do the work of a step: take a slot of the ring, write output to it, deliver the result."""
    slot = ring.acquire()
    ring.start()
    num_output, output = ring.views(len(tokens), 1)
    counts = counts or [1] * len(tokens)
    output[slot].copy_(torch.tensor(tokens, device=on)[:, None], non_blocking=True)
    num_output[slot].copy_(torch.tensor(counts, dtype=torch.int32, device=on), non_blocking=True)
    plan = make_plan(options.pop("num_planned", len(tokens)), step_id)
    result = AsyncOutput(plan, *ring.end(len(tokens)), **options)
    ring.deliver(result)
    return result


@pytest.mark.gpu
def test_rows_that_sampled_have_a_token_and_other_rows_have_none(device):
    ring = OutputRing(MAX_REQS, 1, DEPTH, device)
    output = launch(ring, [-1, -1, 99, 13], [-2, -1, 0, 1], on=device)
    result = output.result()
    assert result.token_ids == ((), (), (), (13,))
    assert result.errors == {0: RowFailure.NAN, 1: RowFailure.MASKED}
    assert (result.step_id, result.req_ids) == (7, ("a", "b", "c", "d"))
    assert result.epochs.tolist() == [3] * 4
    assert output.result() is result
    assert output.ready()


def test_rows_come_back_in_the_plans_order_without_padding():
    ring = OutputRing(MAX_REQS, 1, DEPTH, torch.device("cpu"))
    rows = np.array([1, 3, 0])  # where the plan's three rows are among the device's four
    result = launch(ring, [-1, 10, 99, 11], [-1, 1, 0, 1], num_planned=3, rows=rows).result()
    assert result.token_ids == ((10,), (11,), ())
    assert list(result.errors) == [2]
    padded = launch(ring, [1, 2, 99, 99], [1, 1, 0, 0], num_planned=2)
    assert padded.result().token_ids == ((1,), (2,))


@given(
    shapes=st.lists(
        st.tuples(st.integers(1, MAX_REQS), st.integers(1, 3), st.integers(0, MAX_REQS)),
        min_size=1,
        max_size=6,
    )
)
def test_a_row_may_have_several_tokens(shapes):
    """Rows and columns may differ from step to step; a row yields its first ``count`` tokens."""
    ring = OutputRing(MAX_REQS, 3, DEPTH, torch.device("cpu"))
    for num_rows, num_columns, first in shapes:
        counts = [(row + first) % (num_columns + 1) for row in range(num_rows)]
        slot = ring.acquire()
        num_output, output = ring.views(num_rows, num_columns)
        output[slot] = torch.arange(num_rows * num_columns).view(num_rows, num_columns) + first
        num_output[slot] = torch.tensor(counts)
        waiting = AsyncOutput(make_plan(num_rows), *ring.end(num_rows, num_columns))
        ring.deliver(waiting)
        result = waiting.result()
        assert result.token_ids == tuple(
            tuple(range(first + row * num_columns, first + row * num_columns + count))
            for row, count in enumerate(counts)
        )


class StuckEvent:
    """An event that never completes, or whose wait raises the error of a kernel."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error


def output_of(tokens: list[int], event: StuckEvent | None) -> AsyncOutput:
    counts = np.ones(len(tokens), dtype=np.int32)
    return AsyncOutput(make_plan(len(tokens)), counts, np.array(tokens)[:, None], event)


def test_a_result_can_be_asked_for_again_after_a_time_out():
    output = output_of([5], StuckEvent())
    assert not output.ready()
    with pytest.raises(TimeoutError, match=r"step 7: not finished within 0.01 s"):
        output.result(timeout=0.01)
    output._done = None
    assert output.result(timeout=0.01).token_ids == ((5,),)


def test_an_error_on_the_device_names_the_step_and_its_requests():
    output = output_of([5, 6], StuckEvent(RuntimeError("CUDA error: an illegal memory access")))
    for _ in range(2):  # the error is kept
        with pytest.raises(StepError, match=r"step 7 \(2 requests\): CUDA error") as caught:
            output.result()
        assert (caught.value.step_id, caught.value.req_ids) == (7, ("a", "b"))


@pytest.mark.gpu
def test_a_result_read_late_has_the_tokens_of_its_own_step(device):
    """More steps than ring slots, no result read: each result is saved before its slot's reuse."""
    ring = OutputRing(MAX_REQS, 1, DEPTH, device)
    outputs = [
        launch(ring, [step, step + 100], step_id=step, on=device) for step in range(3 * DEPTH)
    ]
    for step, output in enumerate(outputs):
        assert output.result().token_ids == ((step,), (step + 100,))


def test_a_step_that_was_not_launched_leaves_its_ring_slot_to_the_next_step():
    ring = OutputRing(MAX_REQS, 1, DEPTH, torch.device("cpu"))
    first = launch(ring, [1])
    lost = ring.acquire()
    assert ring.next_slot == lost
    ring.give_up()
    assert ring.acquire() == lost
    second = launch(ring, [2])
    assert (first.result().token_ids, second.result().token_ids) == (((1,),), ((2,),))


@pytest.mark.gpu
@pytest.mark.gpu_only
@pytest.mark.parametrize("guarded", [True, False])
def test_a_ring_slot_is_reused_only_when_its_step_is_over(guarded):
    """The stream is held up: without the wait the host overwrites an upload before it is read."""
    device = torch.device("cuda")
    ring = OutputRing(MAX_REQS, 1, DEPTH, device)
    upload = torch.zeros(ring.num_slots, dtype=torch.int32, pin_memory=True)
    torch.cuda._sleep(200_000_000)  # about 0.1 s
    seen = []
    for step in range(DEPTH + 2):
        if not guarded:
            ring._readers[ring.next_slot] = None
        slot = ring.acquire()
        ring.start()
        upload[slot] = step
        seen.append(upload.to(device, non_blocking=True)[slot])
        ring.deliver(AsyncOutput(make_plan(1, step), *ring.end(1)))
    assert ring.num_waits == guarded
    assert ([int(x) for x in seen] == list(range(DEPTH + 2))) == guarded


@pytest.mark.gpu
@pytest.mark.gpu_only
@pytest.mark.parametrize("guarded", [True, False])
def test_reuse_of_a_ring_slot_waits_for_the_launched_part_of_a_failed_step(guarded):
    ring = OutputRing(MAX_REQS, 1, DEPTH, torch.device("cuda"))
    upload = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    torch.cuda._sleep(200_000_000)
    ring.acquire()
    seen = upload.to("cuda", non_blocking=True)
    if guarded:
        ring.give_up()
    ring.acquire()
    upload[0] = 5
    assert (int(seen) == 0) == guarded
