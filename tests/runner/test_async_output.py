"""AsyncOutput: its own batch, one result, failed rows, time-outs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv1 import AsyncOutput, StepError, StepPlan


def make_plan(num_rows: int) -> StepPlan:
    return StepPlan(
        step_id=7,
        req_ids=tuple("abcd"[:num_rows]),
        slots=np.arange(num_rows, dtype=np.int32),
        epochs=np.full(num_rows, 3, dtype=np.int32),
        num_scheduled_tokens=np.ones(num_rows, dtype=np.int32),
        new_block_ids=(((),),) * num_rows,
    )


def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream() if device.type == "cuda" else None


@pytest.mark.gpu
def test_rows_that_sampled_have_their_token_and_the_others_none(device):
    tokens = torch.tensor([11, -1, 13], device=device)
    output = AsyncOutput(make_plan(4), [0, 1, 3], tokens, copy_stream(device))
    result = output.result()
    assert result.token_ids == ((11,), (), (), (13,))
    assert list(result.errors) == [1]
    assert "no selectable token" in result.errors[1]
    assert (result.step_id, result.req_ids) == (7, ("a", "b", "c", "d"))
    assert result.epochs.tolist() == [3] * 4
    assert output.result() is result
    assert output.ready()


class StuckEvent:
    """An event that never passes, or that brings the error of a kernel."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error


def test_a_time_out_is_no_result_and_may_be_tried_again():
    output = AsyncOutput(make_plan(1), [0], torch.tensor([5]), None)
    output._event = StuckEvent()
    assert not output.ready()
    with pytest.raises(TimeoutError, match=r"step 7: not finished within 0.01 s"):
        output.result(timeout=0.01)
    output._event = None
    assert output.result(timeout=0.01).token_ids == ((5,),)


def test_an_error_on_the_device_names_the_step_and_its_requests():
    output = AsyncOutput(make_plan(2), [0, 1], torch.tensor([5, 6]), None)
    output._event = StuckEvent(RuntimeError("CUDA error: an illegal memory access"))
    with pytest.raises(StepError, match=r"step 7 \(2 requests\): CUDA error") as caught:
        output.result()
    assert (caught.value.step_id, caught.value.req_ids) == (7, ("a", "b"))


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_the_copy_waits_for_the_step_and_the_tokens_outlive_it():
    """With the copy stream held up, new allocations do not get the tokens' memory."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
    output = AsyncOutput(make_plan(2), [0, 1], torch.tensor([5, 6], device="cuda"), stream)
    assert not output.ready()
    for _ in range(100):
        torch.full((2,), 99, device="cuda")
    assert output.result().token_ids == ((5,), (6,))
