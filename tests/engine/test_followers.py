"""Several outputs of one prompt: which request computes the prompt, which wait, which fail."""

from __future__ import annotations

import pytest

from mrv1 import RequestError, SamplingParams, StepError
from mrv1.engine.request import Request
from mrv1.engine.scheduler import Scheduler
from tests.engine.scheduler_model import (
    BLOCK_SIZE,
    drain,
    expected_output,
    make_request,
    make_runner,
    make_scheduler,
    output_of,
    prompt_of,
)

NUM_OUTPUTS = 4
FOLLOWERS = tuple(("r", child) for child in range(1, NUM_OUTPUTS))
"""Request ids of the followers."""


def family_of(scheduler: Scheduler, num_prompt_tokens: int, **params: object) -> list[Request]:
    """Add a request with several outputs; return it and its followers."""
    params = {"n": NUM_OUTPUTS, "max_tokens": 6, "ignore_eos": True} | params
    request = make_request("r", prompt_of(num_prompt_tokens), **params)
    scheduler.add(request)
    return [request, *request.followers]


@pytest.mark.parametrize(("num_outputs", "num_copies"), [(1, 0), (2, 1), (5, 1)])
def test_all_followers_share_one_checked_copy_of_the_parameters(
    monkeypatch, num_outputs, num_copies
):
    """To check a copy takes longer than the rest of an admission: followers share one copy."""
    checks = []
    check = SamplingParams.__post_init__
    monkeypatch.setattr(
        SamplingParams, "__post_init__", lambda params: (checks.append(params), check(params))
    )
    request = make_request("r", prompt_of(5), n=num_outputs, prompt_logprobs=2)
    assert len(request.followers) == num_outputs - 1
    assert len(checks) == 1 + num_copies
    assert all(each.params.prompt_logprobs is None for each in request.followers)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [4, 32])
def test_the_full_blocks_of_a_prompt_are_computed_once(depth, budget):
    scheduler = make_scheduler(
        enable_prefix_caching=True, max_steps_in_flight=depth, max_num_batched_tokens=budget
    )
    num_prompt_tokens = 5 * BLOCK_SIZE + 2
    family = family_of(scheduler, num_prompt_tokens)
    plans = drain(scheduler, make_runner(scheduler))
    num_prefilled = num_prompt_tokens + (NUM_OUTPUTS - 1) * 2
    num_decoded = NUM_OUTPUTS * (6 - 1)  # the last token is never computed
    assert sum(plan.num_scheduled_tokens.sum() for plan in plans) == num_prefilled + num_decoded
    outputs = [request.output_token_ids for request in family]
    assert outputs == [expected_output(request)[0] for request in family]
    assert len(set(map(tuple, outputs))) == NUM_OUTPUTS
    assert [request.num_cached_tokens for request in family] == [0] + [5 * BLOCK_SIZE] * 3


@pytest.mark.parametrize(
    ("caching", "num_prompt_tokens"), [(False, 5 * BLOCK_SIZE), (True, BLOCK_SIZE)]
)
def test_followers_do_not_wait_where_no_block_can_be_shared(caching, num_prompt_tokens):
    scheduler = make_scheduler(enable_prefix_caching=caching, max_num_batched_tokens=100)
    family_of(scheduler, num_prompt_tokens)
    assert scheduler.schedule().req_ids == ("r", *FOLLOWERS)


def test_other_requests_overtake_followers_only_while_they_wait():
    scheduler = make_scheduler(enable_prefix_caching=True, max_num_seqs=9, max_steps_in_flight=1)
    family_of(scheduler, 2 * BLOCK_SIZE)
    for name in "ab":
        scheduler.add(make_request(name, prompt_of(3), max_tokens=9, ignore_eos=True))
    assert scheduler.num_waiting == 6
    plan = scheduler.schedule()
    assert plan.req_ids == ("r", "a", "b")
    scheduler.add(make_request("c", prompt_of(3), max_tokens=9, ignore_eos=True))
    assert scheduler.num_waiting == 4
    scheduler.update(output_of(plan, (5,), (5,), (5,)))
    assert scheduler.schedule().req_ids == ("r", "a", "b", *FOLLOWERS, "c")


def test_a_follower_that_fails_leaves_the_other_outputs():
    scheduler = make_scheduler(enable_prefix_caching=True, max_steps_in_flight=1)
    family = family_of(scheduler, 2 * BLOCK_SIZE)
    runner = make_runner(scheduler)
    runner.execute(scheduler.schedule())
    scheduler.update(runner.result())
    runner.execute(scheduler.schedule())
    scheduler.update(runner.result(fail_rows=frozenset([2])))
    drain(scheduler, runner)
    assert [r.finish_reason for r in family] == ["length", "length", "error", "length"]
    assert isinstance(family[2].error, RequestError)
    for request in (*family[:2], family[3]):
        assert request.output_token_ids == expected_output(request)[0]


@pytest.mark.parametrize("how", ["abort", "fail"])
def test_followers_run_when_the_first_request_ends_before_its_first_token(how):
    scheduler = make_scheduler(
        enable_prefix_caching=True, max_num_batched_tokens=BLOCK_SIZE, max_steps_in_flight=1
    )
    family = family_of(scheduler, 3 * BLOCK_SIZE)
    runner = make_runner(scheduler)
    plan = scheduler.schedule()
    if how == "abort":
        runner.execute(plan)
        scheduler.abort("r")
        scheduler.update(runner.result())
    else:
        runner.execute(plan, fails=True)
        failed = scheduler.fail_step(plan, StepError("boom", step_id=0))
        assert failed == family[:1]
    drain(scheduler, runner)
    assert [r.finish_reason for r in family] == [how.replace("fail", "error"), *["length"] * 3]
    assert [r.output_token_ids for r in family[1:]] == [expected_output(r)[0] for r in family[1:]]


def test_a_follower_that_waits_for_the_prompt_can_be_aborted():
    scheduler = make_scheduler(enable_prefix_caching=True)
    family = family_of(scheduler, 2 * BLOCK_SIZE)
    assert scheduler.abort(("r", 2)) is family[2]
    assert scheduler.abort(("r", 2)) is None
    drain(scheduler, make_runner(scheduler))
    assert [r.finish_reason for r in family] == ["length", "length", "abort", "length"]
    assert not scheduler.has_unfinished_requests


@pytest.mark.parametrize("first", ["family", "others"])
def test_no_request_id_of_a_caller_collides_with_a_follower(first):
    """Callers' ids that look like followers' ids, added before and after the followers."""
    scheduler = make_scheduler(max_num_seqs=16)
    names = ["r#1", "r#2", "('r', 1)", "r 1", "1"]

    def others() -> list[Request]:
        return [make_request(name, (1,), max_tokens=2) for name in names]

    waiting = others() if first == "others" else []
    for request in waiting:
        scheduler.add(request)
    family = family_of(scheduler, 3)
    for request in others() if first == "family" else ():
        scheduler.add(request)
        waiting.append(request)
    with pytest.raises(RequestError, match=r"request_id: expected an id .* got 'r'"):
        family_of(scheduler, 3)
    drain(scheduler, make_runner(scheduler))
    for request in (*family, *waiting):
        assert request.error is None
        assert request.output_token_ids == expected_output(request)[0]
    assert {request.name for request in family} == {"r"}


def test_the_plan_carries_the_child_index_of_each_output():
    scheduler = make_scheduler()
    family = family_of(scheduler, 3)
    assert [request.child for request in scheduler.schedule().new] == [0, 1, 2, 3]
    assert {request.seed for request in family} == {0}
