"""Scheduler against a runner that computes nothing, and its promises step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mrv1 import RequestError, SamplingParams, StepError
from mrv1.engine.request import Request, Status
from mrv1.engine.scheduler import Scheduler
from mrv1.runner import StepOutput, StepPlan

VOCAB = 50
EOS = 0


def next_token(prompt: tuple[int, ...], index: int) -> int:
    """The token a pretend model generates: a function of the request alone."""
    return (sum(prompt) * 31 + index * 7 + len(prompt)) % VOCAB


def expected_output(prompt: tuple[int, ...], params: SamplingParams, max_total: int) -> list[int]:
    """What a request must yield, from its definition."""
    output: list[int] = []
    while len(prompt) + len(output) < max_total:
        output.append(next_token(prompt, len(output)))
        if output[-1] in params.stop_token_ids or (output[-1] == EOS and not params.ignore_eos):
            break
    return output


@dataclass
class PretendRunner:
    """Follows plans with plain dicts and checks that each makes sense."""

    block_size: int
    num_blocks: int
    max_tokens: int
    slots: dict[int, dict] = field(default_factory=dict)

    def execute(self, plan: StepPlan, fail_rows: frozenset[int] = frozenset()) -> StepOutput:
        for slot in (*plan.preempted, *plan.finished):
            del self.slots[slot]
        for request in (*plan.new, *plan.resumed):
            assert request.slot not in self.slots, "a slot is given once"
            self.slots[request.slot] = {
                "req_id": request.req_id,
                "epoch": request.epoch,
                "prompt": tuple(request.token_ids[: request.prompt_len].tolist()),
                "num_tokens": len(request.token_ids),
                "computed": 0,
                "blocks": [],
            }
        assert 0 < plan.num_scheduled_tokens.sum() <= self.max_tokens
        assert len(set(plan.slots.tolist())) == len(plan.slots)
        tokens: list[tuple[int, ...]] = []
        for row, slot in enumerate(plan.slots.tolist()):
            state = self.slots[slot]
            assert (state["req_id"], state["epoch"]) == (plan.req_ids[row], plan.epochs[row])
            state["blocks"] += plan.new_block_ids[row][0]
            state["computed"] += int(plan.num_scheduled_tokens[row])
            assert plan.num_scheduled_tokens[row] >= 1
            assert state["computed"] <= state["num_tokens"]
            assert len(state["blocks"]) == -(-state["computed"] // self.block_size)
            if state["computed"] == state["num_tokens"]:
                index = state["num_tokens"] - len(state["prompt"])
                tokens.append((next_token(state["prompt"], index),))
                state["num_tokens"] += 1
            else:
                tokens.append(())
        held = [b for state in self.slots.values() for b in state["blocks"]]
        assert len(held) == len(set(held)), "no block belongs to two requests"
        assert all(0 <= b < self.num_blocks for b in held)
        return StepOutput(
            step_id=plan.step_id,
            req_ids=plan.req_ids,
            slots=plan.slots,
            epochs=plan.epochs,
            token_ids=tuple(tokens),
            errors={row: "no token" for row in fail_rows if row < len(tokens) and tokens[row]},
        )


def make_request(req_id: str, prompt: tuple[int, ...], **kwargs: object) -> Request:
    params = SamplingParams(**kwargs)
    assert params.max_tokens is not None
    return Request(
        req_id=req_id,
        prompt_token_ids=prompt,
        params=params,
        seed=0,
        max_total_tokens=len(prompt) + params.max_tokens,
    )


prompts = st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=40).map(tuple)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests arrive, run, abort and fail in any order, in a pool that is often too small."""

    @initialize(
        num_blocks=st.integers(4, 20),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 48),
    )
    def start(self, num_blocks, max_num_seqs, budget):
        self.block_size = 16
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            eos_token_ids=[EOS],
        )
        self.max_num_seqs, self.num_blocks = max_num_seqs, num_blocks
        self.runner = PretendRunner(self.block_size, num_blocks, budget)
        self.requests: dict[str, Request] = {}
        self.ended_by_hand: set[str] = set()

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 40),
        ignore_eos=st.booleans(),
        stops=st.lists(st.integers(0, VOCAB - 1), max_size=2),
    )
    def add(self, prompt, max_tokens, ignore_eos, stops):
        request = make_request(
            str(len(self.requests)),
            prompt,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            stop_token_ids=stops,
        )
        if -(-request.max_total_tokens // self.block_size) > self.num_blocks:
            with pytest.raises(RequestError, match="raise num_kv_blocks"):
                self.scheduler.add(request)
            return
        self.scheduler.add(request)
        self.requests[request.req_id] = request

    @rule(fail_row=st.none() | st.integers(0, 4))
    def step(self, fail_row):
        plan = self.scheduler.schedule()
        assert (plan is not None) == self.scheduler.has_unfinished_requests
        if plan is None:
            return
        fails = frozenset() if fail_row is None else frozenset([fail_row])
        output = self.runner.execute(plan, fails)
        self.ended_by_hand |= {plan.req_ids[row] for row in output.errors}
        self.scheduler.update(output)

    @rule()
    def step_fails(self):
        plan = self.scheduler.schedule()
        if plan is not None:
            self.runner.execute(plan)
            error = StepError("boom", step_id=plan.step_id, req_ids=plan.req_ids)
            failed = self.scheduler.fail_step(plan.req_ids, error)
            assert {r.req_id for r in failed} == set(plan.req_ids)
            self.ended_by_hand |= set(plan.req_ids)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        req_id = data.draw(st.sampled_from(sorted(self.requests)))
        was_finished = self.requests[req_id].finished
        aborted = self.scheduler.abort(req_id)
        assert (aborted is None) == was_finished
        assert self.scheduler.abort(req_id) is None, "aborting twice is harmless"
        if not was_finished:
            self.ended_by_hand.add(req_id)
            assert self.requests[req_id].finish_reason == "abort"

    @invariant()
    def nothing_leaks(self):
        if not hasattr(self, "scheduler"):
            return
        running = self.scheduler.running
        held = [b for r in running for b in r.block_ids]
        assert len(held) == len(set(held)) == self.scheduler.pool.num_held
        assert self.scheduler.num_free_slots + len(running) == self.max_num_seqs
        assert len({r.slot for r in running}) == len(running)
        assert all(r.status is Status.RUNNING for r in running)
        assert all(r.status is Status.WAITING for r in self.scheduler.waiting)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        num_steps = 0
        while (plan := self.scheduler.schedule()) is not None:
            self.scheduler.update(self.runner.execute(plan))
            num_steps += 1
            assert num_steps < 20_000, "the scheduler makes progress"
        assert self.scheduler.pool.num_free == self.num_blocks
        assert self.scheduler.num_free_slots == self.max_num_seqs
        for req_id, request in self.requests.items():
            expected = expected_output(
                request.prompt_token_ids, request.params, request.max_total_tokens
            )
            if req_id in self.ended_by_hand:
                assert request.output_token_ids == expected[: len(request.output_token_ids)]
            else:
                assert request.output_token_ids == expected


TestScheduler = SchedulerMachine.TestCase


def make_scheduler(**overrides: int) -> Scheduler:
    options = {
        "num_blocks": 64,
        "block_size": 16,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
    } | overrides
    return Scheduler(**options, eos_token_ids=[EOS])


def run(scheduler: Scheduler, runner: PretendRunner) -> list[StepPlan]:
    plans = []
    while (plan := scheduler.schedule()) is not None:
        plans.append(plan)
        scheduler.update(runner.execute(plan))
    return plans


def test_a_long_prompt_is_prefilled_in_chunks_beside_running_decodes():
    scheduler = make_scheduler(max_num_batched_tokens=10)
    scheduler.add(make_request("short", (5, 5), max_tokens=8, ignore_eos=True))
    scheduler.add(make_request("long", tuple(range(1, 26)), max_tokens=1))
    plans = run(scheduler, PretendRunner(16, 64, 10))
    rows = [dict(zip(p.req_ids, p.num_scheduled_tokens.tolist(), strict=True)) for p in plans]
    assert rows[0] == {"short": 2, "long": 8}
    assert rows[1] == {"short": 1, "long": 9}
    assert rows[2] == {"short": 1, "long": 8}
    assert all(row == {"short": 1} for row in rows[3:])


def test_first_come_first_served():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abcd":
        scheduler.add(make_request(name, (1,), max_tokens=3, ignore_eos=True))
    plans = run(scheduler, PretendRunner(16, 64, 32))
    entered = [r.req_id for p in plans for r in p.new]
    assert entered == list("abcd")


def test_preemption_takes_the_last_arrival_and_resumes_it_first():
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=64)
    for name in "abc":
        scheduler.add(make_request(name, tuple([1] * 16), max_tokens=20, ignore_eos=True))
    requests = {name: scheduler.get(name) for name in "abc"}
    plans = run(scheduler, PretendRunner(16, 4, 64))
    preempting = [p for p in plans if p.preempted]
    assert preempting[0].req_ids == ("a", "b"), "c gave its block to the older ones"
    assert [r.req_id for p in plans for r in p.resumed][-1] == "c"
    assert scheduler.num_preemptions == sum(r.num_preemptions for r in requests.values()) > 0
    for request in requests.values():
        assert request.output_token_ids == expected_output(
            request.prompt_token_ids, request.params, 36
        )


@pytest.mark.parametrize(
    ("params", "reason", "stop_reason", "num_tokens"),
    [
        ({"max_tokens": 3, "ignore_eos": True}, "length", None, 3),
        (
            {"max_tokens": 99, "stop_token_ids": [next_token((4,), 2)]},
            "stop",
            next_token((4,), 2),
            3,
        ),
    ],
)
def test_why_a_request_ends(params, reason, stop_reason, num_tokens):
    scheduler = make_scheduler()
    request = make_request("r", (4,), **params)
    scheduler.add(request)
    run(scheduler, PretendRunner(16, 64, 32))
    assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)
    assert len(request.output_token_ids) == num_tokens
    assert request.finish_time >= request.first_token_time >= request.arrival_time


@given(ignore_eos=st.booleans())
def test_eos_ends_a_request_unless_told_otherwise(ignore_eos):
    prompt = next(  # a prompt whose pretend continuation has EOS in the first 20 tokens
        (n,) for n in range(1, VOCAB) if EOS in [next_token((n,), i) for i in range(20)]
    )
    scheduler = make_scheduler()
    request = make_request("r", prompt, max_tokens=20, ignore_eos=ignore_eos)
    scheduler.add(request)
    run(scheduler, PretendRunner(16, 64, 32))
    assert request.finish_reason == ("length" if ignore_eos else "stop")
    assert (request.output_token_ids[-1] == EOS) or ignore_eos


def test_an_id_in_use_is_refused():
    scheduler = make_scheduler()
    scheduler.add(make_request("r", (1,), max_tokens=1))
    with pytest.raises(RequestError, match="request_id: 'r' is in use"):
        scheduler.add(make_request("r", (1,), max_tokens=1))


def test_output_of_an_aborted_request_is_dropped():
    scheduler = make_scheduler()
    request = make_request("r", (1,), max_tokens=5)
    scheduler.add(request)
    plan = scheduler.schedule()
    scheduler.abort("r")
    assert scheduler.update(PretendRunner(16, 64, 32).execute(plan)) == []
    assert request.output_token_ids == []
    assert scheduler.num_stale_outputs == 1


def test_output_of_a_slots_former_request_is_dropped():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("r", (1,), max_tokens=5))
    late = PretendRunner(16, 64, 32).execute(scheduler.schedule())
    scheduler.abort("r")
    again = make_request("r", (2,), max_tokens=5)  # the same id in the same slot, another epoch
    scheduler.add(again)
    assert scheduler.schedule() is not None
    assert scheduler.update(late) == []
    assert again.output_token_ids == []
    assert np.array_equal(late.slots, [again.slot])
