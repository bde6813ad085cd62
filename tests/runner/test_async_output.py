"""AsyncOutput and its ring: its own batch, one result, failed rows, time-outs, guards."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mrv1 import AsyncOutput, StepError, StepPlan
from mrv1.runner.async_output import OutputRing

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


def fill(ring: OutputRing, slot: int, tokens: list[int], counts: list[int] | None = None) -> None:
    device = ring.tokens.device
    ring.tokens[slot, : len(tokens), 0] = torch.tensor(tokens, device=device)
    counts = counts or [1] * len(tokens)
    ring.num_output[slot, : len(tokens)] = torch.tensor(counts, dtype=torch.int32, device=device)


@pytest.mark.gpu
def test_rows_that_sampled_have_their_token_and_the_others_none(device):
    ring = OutputRing(MAX_REQS, 1, DEPTH, device)
    slot = ring.acquire()
    fill(ring, slot, [11, 12, 99, 13], [1, -1, 0, 1])
    output = ring.deliver(slot, make_plan(4))
    result = output.result()
    assert result.token_ids == ((11,), (), (), (13,))
    assert list(result.errors) == [1]
    assert "no selectable token" in result.errors[1]
    assert (result.step_id, result.req_ids) == (7, ("a", "b", "c", "d"))
    assert result.epochs.tolist() == [3] * 4
    assert output.result() is result
    assert output.ready()


def test_rows_come_back_in_the_plans_order():
    ring = OutputRing(MAX_REQS, 1, DEPTH, torch.device("cpu"))
    slot = ring.acquire()
    fill(ring, slot, [12, 10, 11], [-1, 1, 1])
    order = np.array([2, 0, 1])  # the device's rows are the plan's rows 2, 0 and 1
    result = ring.deliver(slot, make_plan(3), order).result()
    assert result.token_ids == ((10,), (11,), ())
    assert list(result.errors) == [2]


class StuckEvent:
    """An event that never passes, or that brings the error of a kernel."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error


def output_of(tokens: list[int], event: StuckEvent | None) -> AsyncOutput:
    counts = np.ones(len(tokens), dtype=np.int32)
    events = None if event is None else SimpleNamespace(copied=event)
    return AsyncOutput(make_plan(len(tokens)), counts, np.array(tokens)[:, None], events)


def test_a_time_out_is_no_result_and_may_be_tried_again():
    output = output_of([5], StuckEvent())
    assert not output.ready()
    with pytest.raises(TimeoutError, match=r"step 7: not finished within 0.01 s"):
        output.result(timeout=0.01)
    output._events = None
    assert output.result(timeout=0.01).token_ids == ((5,),)


def test_an_error_on_the_device_names_the_step_and_its_requests():
    output = output_of([5, 6], StuckEvent(RuntimeError("CUDA error: an illegal memory access")))
    for _ in range(2):  # it stays an error
        with pytest.raises(StepError, match=r"step 7 \(2 requests\): CUDA error") as caught:
            output.result()
        assert (caught.value.step_id, caught.value.req_ids) == (7, ("a", "b"))


@pytest.mark.gpu
def test_a_late_reader_finds_its_own_tokens(device):
    """More steps than the ring has slots, no result taken: each takes its own in time."""
    ring = OutputRing(MAX_REQS, 1, DEPTH, device)
    outputs = []
    for step in range(3 * DEPTH):
        slot = ring.acquire()
        fill(ring, slot, [step, step + 100])
        outputs.append(ring.deliver(slot, make_plan(2, step)))
    for step, output in enumerate(outputs):
        assert output.result().token_ids == ((step,), (step + 100,))


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_a_slot_is_not_rewritten_before_its_copy_has_run():
    """The copy stream is held up: without the wait on the device the next step overtakes it."""
    ring = OutputRing(MAX_REQS, 1, DEPTH, torch.device("cuda"))
    with torch.cuda.stream(ring._stream):
        torch.cuda._sleep(200_000_000)
    outputs = []
    for step in range(DEPTH + 1):
        slot = ring.acquire()
        fill(ring, slot, [step])
        outputs.append(ring.deliver(slot, make_plan(1, step)))
    assert not outputs[0].ready()
    torch.cuda.current_stream().wait_event(ring._events[ring._next].copied)  # what acquire() does
    ring.tokens[ring._next].fill_(99)
    for _ in range(100):
        torch.full((2,), 99, device="cuda")
    assert [output.result().token_ids for output in outputs] == [((s,),) for s in range(DEPTH + 1)]
