"""Two steps in flight give the tokens of one while requests join, stop, leave or are preempted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv1 import EngineConfig, SamplingParams, StepError
from mrv1.engine.core import EngineCore
from mrv1.engine.request import Request
from mrv1.kernels.registry import select_ops
from mrv1.models import load_model
from tests.engine.scheduler_model import num_free_slots
from tests.models.families import tiny_checkpoint

EOS = 2
VOCAB = 160
MAX_LEN = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a model in float64, where no near tie can flip with the composition of a batch."""
    path = tmp_path_factory.mktemp("qwen3")
    tiny_checkpoint(path, "qwen3", eos_token_id=EOS)
    ops = select_ops("reference")
    return path, load_model(path, device="cpu", dtype=torch.float64, ops=ops, progress=False)


def make_core(model, **options: object) -> EngineCore:
    path, decoder = model
    config = EngineConfig(
        **(
            {
                "model": str(path), "dtype": "float64", "device": "cpu", "num_kv_blocks": 12,
                "max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": MAX_LEN,
            }
            | options
        )
    )  # fmt: skip
    return EngineCore(config, model=decoder, progress=False)


@st.composite
def schedules(draw) -> list[tuple[int, list[int], SamplingParams, int | None]]:
    """Draw requests: the step at which each joins, prompt, parameters, the step of its abort."""
    shared = draw(st.lists(st.integers(3, VOCAB - 1), min_size=0, max_size=40))
    requests = []
    for index in range(draw(st.integers(1, 7))):
        tail = draw(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=20))
        prefix = shared if draw(st.booleans()) else []
        greedy = draw(st.booleans())
        params = SamplingParams(
            temperature=0 if greedy else 1.5,
            seed=index,
            max_tokens=draw(st.integers(1, 24)),
            stop_token_ids=draw(st.lists(st.integers(3, VOCAB - 1), max_size=12)),
            top_k=draw(st.sampled_from([0, 0, 5])),
        )
        joins = draw(st.integers(0, 12))
        aborted = draw(st.none() | st.integers(0, 20))
        requests.append((joins, [*prefix, *tail], params, aborted and joins + aborted))
    return requests


def run(core: EngineCore, schedule) -> list[Request]:
    """Step until all requests have ended; return them in the schedule's order."""
    requests: dict[int, Request] = {}
    for step in range(600):
        for index, (joins, prompt, params, _) in enumerate(schedule):
            if joins == step:
                requests[index] = core.add_request(str(index), prompt, params)
        for index, (_, _, _, aborted) in enumerate(schedule):
            if aborted == step and index in requests:
                core.scheduler.abort(str(index))
        core.step()
        if len(requests) == len(schedule) and not core.scheduler.has_unfinished_requests:
            break
    else:
        raise AssertionError("the engine does not come to an end")
    return [requests[index] for index in range(len(schedule))]


def drained(core: EngineCore) -> None:
    """Check that all blocks and slots are free once the steps in flight have ended."""
    core.step()
    core.step()
    assert not core._in_flight
    assert core.scheduler.pools[0].num_free == core.scheduler.pools[0].num_blocks
    assert num_free_slots(core.scheduler) == core.config.max_num_seqs


@settings(max_examples=max(settings.default.max_examples // 2, 8))  # each makes two engines
@given(schedule=schedules(), caching=st.booleans(), blocks=st.sampled_from([9, 12, 30]))
def test_overlap_changes_no_token(model, schedule, caching, blocks):
    """Tokens equal those of the engine with one step in flight; 9 blocks force preemption."""
    options = {"num_kv_blocks": blocks, "enable_prefix_caching": caching}
    outputs = {}
    for overlap in (False, True):
        core = make_core(model, overlap=overlap, **options)
        outputs[overlap] = run(core, schedule)
        drained(core)
    for request, other, (_, _, _, aborted) in zip(
        outputs[False], outputs[True], schedule, strict=True
    ):
        assert request.error is None
        assert other.error is None
        if aborted is None:
            assert other.output_token_ids == request.output_token_ids
            assert other.finish_reason == request.finish_reason
            assert other.stop_reason == request.stop_reason
        else:  # the abort comes some tokens earlier or later; until then tokens are equal
            shorter = min(len(request.output_token_ids), len(other.output_token_ids))
            assert other.output_token_ids[:shorter] == request.output_token_ids[:shorter]


def launches(core: EngineCore) -> Iterator[int]:
    """Run until all requests have ended; yield the number of rows of each step."""
    execute = core.runner.execute
    rows: list[int] = []

    def counted(plan):
        rows.append(len(plan.slots))
        return execute(plan)

    core.runner.execute = counted  # type: ignore[method-assign]
    while core.scheduler.has_unfinished_requests or core._in_flight:
        core.step()
    yield from rows


def test_a_stop_by_length_costs_no_extra_step(model):
    core = make_core(model)
    core.add_request("a", [5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True))
    assert list(launches(core)) == [1] * 6
    assert core.metrics()["wasted_tokens"] == 0


def test_a_stop_token_costs_at_most_one_step_that_does_nothing(model):
    """The step launched before the stop was known writes no K and V and delivers no token."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    core = make_core(model, overlap=False)
    free = core.add_request("a", [5, 6, 7], params)
    while core.scheduler.has_unfinished_requests:
        core.step()
    stop = free.output_token_ids[4]
    expected = free.output_token_ids[: free.output_token_ids.index(stop) + 1]

    core = make_core(model)
    request = core.add_request(
        "b", [5, 6, 7], SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop])
    )
    seen = []
    forward = core.runner.model.forward

    def watched(batch, *arguments):
        seen.append((batch.seq_lens.tolist(), batch.slot_mapping.tolist()))
        return forward(batch, *arguments)

    core.runner.model.forward = watched
    try:
        assert list(launches(core)) == [1] * (len(expected) + 1)
    finally:
        core.runner.model.forward = forward
    assert request.output_token_ids == expected
    assert (request.finish_reason, request.stop_reason) == ("stop", stop)
    assert core.metrics()["wasted_tokens"] == 1
    assert seen[-1] == ([0], [[-1]])


def test_the_step_that_ends_the_last_request_leaves_no_step_in_flight(model):
    """The caller may not step again: the step after the stop token is read, its blocks freed."""
    core = make_core(model)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    free = core.add_request("a", [5, 6, 7], params)
    while core.has_unfinished_requests:
        core.step()
    params = SamplingParams(
        temperature=0, max_tokens=20, stop_token_ids=[free.output_token_ids[4]]
    )
    request = core.add_request("b", [5, 6, 7], params)
    while core.has_unfinished_requests:
        core.step()
    assert request.finish_reason == "stop"
    assert core.metrics()["wasted_tokens"] == 1, "one step was launched after b's last"
    assert not core._in_flight
    assert core.metrics()["num_free_blocks"] == core.metrics()["num_kv_blocks"]


def test_a_launch_that_fails_ends_its_own_requests(model):
    """The step before it is delivered, in order; requests that are added later run."""
    core = make_core(model)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    first = core.add_request("a", [5, 6, 7], params)
    execute = core.runner.execute
    calls = []

    def fails_once(plan):
        calls.append(plan.step_id)
        if len(calls) == 2:
            raise StepError("out of luck", step_id=plan.step_id, req_ids=plan.req_ids)
        return execute(plan)

    core.runner.execute = fails_once  # type: ignore[method-assign]
    core.step()
    assert len(first.output_token_ids) == 1
    core.step()
    assert isinstance(first.error, StepError)
    assert first.finish_reason == "error"
    second = core.add_request("b", [5, 6, 7], params)
    while core.scheduler.has_unfinished_requests:
        core.step()
    assert second.error is None
    assert second.output_token_ids[0] == first.output_token_ids[0]
    drained(core)


def test_a_row_without_a_token_fails_alone(model):
    core = make_core(model)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    good, bad = (core.add_request(name, [9, ord(name), 7], params) for name in "ab")
    compute = core.runner.model.compute_logits
    calls = []

    def spoiled(hidden):
        logits = compute(hidden)
        calls.append(len(logits))
        if len(calls) == 3:
            logits[1] = torch.nan
        return logits

    core.runner.model.compute_logits = spoiled
    try:
        while core.scheduler.has_unfinished_requests:
            core.step()
    finally:
        core.runner.model.compute_logits = compute
    assert len(good.output_token_ids) == 5
    assert good.error is None
    assert len(bad.output_token_ids) == 2
    assert "its logits hold NaN" in str(bad.error)
    assert core.metrics()["num_nan_rows"] == 1
    drained(core)


def test_host_mirrors_equal_the_state_on_the_device(model):
    core = make_core(model)
    for name in "abc":
        prompt = np.arange(3, 3 + 10 * (1 + ord(name) - ord("a"))).tolist()
        core.add_request(name, prompt, SamplingParams(max_tokens=9, ignore_eos=True, seed=1))
    while core.scheduler.has_unfinished_requests:
        core.step()
        state = core.runner.state
        running = [r.slot for r in core.scheduler.running.values()]
        device = (
            state.slots.num_tokens[running].tolist(),
            state.slots.num_computed_tokens[running].tolist(),
        )
        host = (state.num_tokens_np[running], state.num_computed_tokens_np[running])
        assert device == tuple(x.tolist() for x in host)


def test_no_step_is_launched_after_a_launch_that_failed(model):
    """A request that has not entered yet does not fail with another request's step."""
    core = make_core(model, max_num_batched_tokens=8)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    first = core.add_request("a", [5] * 8, params)
    second = core.add_request("b", [6] * 8, params)
    execute = core.runner.execute

    def fails_once(plan):
        core.runner.execute = execute  # type: ignore[method-assign]
        raise StepError("out of luck", step_id=plan.step_id, req_ids=plan.req_ids)

    core.runner.execute = fails_once  # type: ignore[method-assign]
    while core.has_unfinished_requests:
        core.step()
    assert isinstance(first.error, StepError)
    assert second.error is None
    assert len(second.output_token_ids) == 4
    drained(core)


def test_an_interrupt_after_a_result_loses_no_finished_request(model, monkeypatch):
    """The next step returns the request that finished before the interrupt."""
    core = make_core(model, overlap=False)
    request = core.add_request("a", [5, 6, 7], SamplingParams(max_tokens=1))

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(core, "_drain", interrupted)
        with pytest.raises(KeyboardInterrupt):
            core.step()
    assert request.finished
    assert core.has_unfinished_requests
    assert core.step() == [request]
    assert not core.has_unfinished_requests
