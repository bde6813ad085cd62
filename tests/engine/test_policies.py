"""Which request is next: priorities, turns, long prompts, and prefixes that others compute."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import LLM, ConfigError, RequestError, SamplingParams, StepError
from mrv1.config import EngineConfig
from mrv1.engine import EngineCore, waiting_queue
from mrv1.engine.prefix_waits import PrefixWaits
from mrv1.engine.request import Request
from mrv1.engine.scheduler import Scheduler
from tests.engine.fake_llm import make_llm
from tests.engine.scheduler_model import (
    drain,
    expected_output,
    make_request,
    make_runner,
    make_scheduler,
    num_free_slots,
    output_of,
    prompt_of,
    scheduled,
)
from tests.engine.test_llm import random_prompts
from tests.models.families import tiny_checkpoint


def admitted(scheduler: Scheduler) -> list[str]:
    """Run everything; return the names of the requests in order of admission."""
    return [r.req_id for plan in drain(scheduler, make_runner(scheduler)) for r in plan.new]


@given(priorities=st.lists(st.integers(-3, 3), min_size=1, max_size=20))
def test_lower_priorities_go_first_and_arrival_decides_ties(priorities):
    """One request runs at a time; a request arrives before every second step."""
    scheduler = make_scheduler(max_num_seqs=1, max_steps_in_flight=1, scheduling_policy="priority")
    runner, order, waiting, expected = make_runner(scheduler), [], [], []
    arrivals = list(enumerate(priorities))
    for step in range(4 * len(priorities)):
        if arrivals and step % 2 == 0:
            name, priority = arrivals.pop(0)
            scheduler.add(
                make_request(str(name), (1,), max_tokens=3, ignore_eos=True, priority=priority)
            )
            waiting.append((priority, name))
        if num_free_slots(scheduler) and waiting:
            waiting.sort()
            expected.append(str(waiting.pop(0)[1]))
        plan = scheduler.schedule()
        if plan is not None:
            order += [r.req_id for r in plan.new]
            runner.execute(plan)
            scheduler.update(runner.result())
    assert order == expected == [*dict.fromkeys(expected)]
    assert len(order) == len(priorities)


def test_the_least_urgent_request_is_preempted_first():
    """The urgent one was admitted last: first come, first served would preempt it."""
    scheduler = make_scheduler(
        num_blocks=16, max_num_batched_tokens=64, max_steps_in_flight=1,
        scheduling_policy="priority",
    )  # fmt: skip
    requests = {}
    for name, priority in (("a", 1), ("b", 2), ("urgent", 0)):
        requests[name] = make_request(
            name, prompt_of(15, priority), max_tokens=20, ignore_eos=True, priority=priority
        )
        scheduler.add(requests[name])
        plan = scheduler.schedule()
        scheduler.update(output_of(plan, *[(5,)] * len(plan.req_ids)))
    assert scheduled(plan) == {"a": 1, "b": 1, "urgent": 15}
    while not any(r.num_preemptions for r in requests.values()):
        plan = scheduler.schedule()
        scheduler.update(output_of(plan, *[(5,)] * len(plan.req_ids)))
    assert [name for name, r in requests.items() if r.num_preemptions] == ["b"]


def turns(queues: dict[str, list[int]], quantum: int) -> list[str]:
    """Deficit round robin in plain Python: the ids in the order in which they are served."""
    credits, ring, served = dict.fromkeys(queues, quantum), [*queues], []
    while any(queues.values()):
        key = ring[0]
        if not queues[key]:
            ring.pop(0)
        elif credits[key] <= 0:
            credits[key] += quantum
            ring.append(ring.pop(0))
        else:
            credits[key] -= queues[key].pop(0)
            served.append(key)
    return served


@given(seed=st.integers(0, 2**32))
def test_fairness_ids_take_turns_by_tokens(seed):
    """The order is that of deficit round robin, and nobody with requests waiting falls behind."""
    source = random.Random(seed)
    sizes = {key: [source.randint(1, 90) for _ in range(15)] for key in "abc"}
    scheduler = make_scheduler(
        max_num_seqs=1, max_num_batched_tokens=99, scheduling_policy="priority"
    )
    arrivals = [(key, n) for key in sizes for n in range(len(sizes[key]))]
    source.shuffle(arrivals)
    order = dict.fromkeys(key for key, _ in arrivals)
    next_of = {key: iter(sizes[key]) for key in sizes}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(waiting_queue, "QUANTUM", 50)
        for name, (key, _) in enumerate(arrivals):
            prompt = prompt_of(next(next_of[key]))
            scheduler.add(make_request(f"{key}{name}", prompt, max_tokens=1, fairness_id=key))
        served = [name[0] for name in admitted(scheduler)]
    # Each request is charged one token of output when it ends, before the next one is chosen.
    charged = {key: [size + 1 for size in sizes[key]] for key in order}
    left = {key: charged[key].copy() for key in order}
    assert served == turns(left, 50)
    done = dict.fromkeys(sizes, 0)
    for key in served:
        if not all(charged.values()):
            break
        done[key] += charged[key].pop(0)
        assert max(done.values()) - min(done.values()) <= 2 * 50 + 91


def test_an_id_pays_the_debt_of_its_output():
    """Both send one prompt token a request; greedy gets 30 output tokens each time, modest 1."""
    scheduler = make_scheduler(max_num_seqs=1, max_steps_in_flight=1, scheduling_policy="priority")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(waiting_queue, "QUANTUM", 4)
        for n in range(20):
            for key, max_tokens in (("greedy", 30), ("modest", 1)):
                request = make_request(
                    f"{key}{n}", (1,), max_tokens=max_tokens, ignore_eos=True, fairness_id=key
                )
                scheduler.add(request)
        order = admitted(scheduler)
    second = order.index("greedy2")
    assert sum(name.startswith("modest") for name in order[:second]) >= 20


def steps_until_token(prompts: list[int], threshold: int, budget: int) -> tuple[list[int], int]:
    """Return the step in which each prompt is computed, and the most rows that decoded."""
    scheduler = make_scheduler(
        num_blocks=2000, max_num_seqs=32, max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
    )  # fmt: skip
    for name, size in enumerate(prompts):
        scheduler.add(make_request(str(name), prompt_of(size), max_tokens=300, ignore_eos=True))
    runner, left, found = make_runner(scheduler), dict(enumerate(prompts)), {}
    for step in range(1, 400):
        plan = scheduler.schedule()
        assert max(plan.num_scheduled_tokens) <= (threshold or budget)
        for req_id, count in scheduled(plan).items():
            left[int(req_id)] -= count
            if left[int(req_id)] <= 0:
                found.setdefault(int(req_id), step)
        runner.execute(plan)
        scheduler.update(runner.result())
        if len(found) == len(prompts):
            return [found[name] for name in range(len(prompts))], len(prompts)
    raise AssertionError("every prompt is computed")


@given(
    prompts=st.lists(st.integers(1, 30) | st.integers(100, 400), min_size=1, max_size=10),
    threshold=st.integers(4, 30),
    spare=st.integers(1, 40),
)
def test_a_long_prompt_delays_others_like_a_prompt_of_the_threshold(prompts, threshold, spare):
    """The bound: as if each step had the threshold's tokens less, and one less for each decode."""
    budget = threshold + len(prompts) + spare
    found, num_rows = steps_until_token(prompts, threshold, budget)
    ahead = 0
    for size, step in zip(prompts, found, strict=True):
        ahead += min(size, threshold)
        if size <= threshold:
            assert step <= -(-ahead // (budget - threshold - num_rows))


def test_without_a_threshold_a_long_prompt_goes_before_those_that_arrived_later():
    assert steps_until_token([500, 3], 0, 40)[0] == [13, 13]
    assert steps_until_token([500, 3], 16, 40)[0] == [32, 1]


def test_several_long_prompts_share_what_short_ones_leave():
    """The first long prompt keeps the threshold's tokens, the second gets the rest."""
    scheduler = make_scheduler(
        num_blocks=500, max_num_batched_tokens=20, max_steps_in_flight=1, max_num_seqs=8,
        long_prefill_token_threshold=8,
    )  # fmt: skip
    for name, size in (("long", 100), ("longer", 200)):
        scheduler.add(make_request(name, prompt_of(size), max_tokens=1, ignore_eos=True))
    runner, rows = make_runner(scheduler), []
    for step in range(4):
        if step == 2:
            scheduler.add(make_request("short", prompt_of(7), max_tokens=9, ignore_eos=True))
        plan = scheduler.schedule()
        rows.append(scheduled(plan))
        runner.execute(plan)
        scheduler.update(runner.result())
    assert rows == [
        {"long": 8, "longer": 8},
        {"long": 8, "longer": 8},
        {"long": 8, "longer": 5, "short": 7},
        {"long": 8, "longer": 8, "short": 1},
    ]


# --- common prefixes -----------------------------------------------------------------------------


def start_sharing(**options: object) -> tuple[Scheduler, dict[str, Request]]:
    """Queue three requests with 24 common tokens, and plan the step that computes the first."""
    given = {
        "max_num_batched_tokens": 32,
        "max_steps_in_flight": 1,
        "enable_prefix_caching": True,
        "least_shared_tokens": 8,
    }
    scheduler = make_scheduler(**given | options)
    requests = {
        name: make_request(name, (*prompt_of(24), *own), max_tokens=3, ignore_eos=True)
        for name, own in (("first", (1, 2)), ("second", (3,)), ("third", (4, 5, 6)))
    }
    for request in requests.values():
        scheduler.add(request)
    return scheduler, requests


def test_a_prefix_in_flight_is_computed_once():
    scheduler, requests = start_sharing()
    scheduler.add(make_request("other", prompt_of(3, 9), max_tokens=1, ignore_eos=True))
    plans = drain(scheduler, make_runner(scheduler))
    assert [scheduled(plan) for plan in plans[:2]] == [
        {"first": 26, "other": 3},
        {"first": 1, "second": 1, "third": 3},
    ], "another request overtakes those that wait"
    assert (scheduler.admission.num_prefix_waits, scheduler.admission.prefix_hit_tokens) == (2, 48)
    for request in requests.values():
        assert request.output_token_ids == expected_output(request)[0]


def test_the_wait_ends_with_the_common_blocks_and_not_with_the_prompt():
    scheduler = make_scheduler(
        max_steps_in_flight=1, enable_prefix_caching=True, least_shared_tokens=8,
        long_prefill_token_threshold=16,
    )  # fmt: skip
    scheduler.add(make_request("long", (*prompt_of(24), *prompt_of(80, 7)), max_tokens=1))
    scheduler.add(make_request("short", (*prompt_of(24), 1, 2), max_tokens=1))
    plans = drain(scheduler, make_runner(scheduler))
    assert [scheduled(plan) for plan in plans[:3]] == [
        {"long": 16}, {"long": 16}, {"long": 16, "short": 2},
    ]  # fmt: skip
    assert len(plans) == 7


@pytest.mark.parametrize("end", ["abort", "failed row", "failed step", "preempt", "reset", "own"])
def test_a_wait_ends_with_the_request_that_it_is_for(end):
    scheduler, requests = start_sharing(num_blocks=32)
    runner = make_runner(scheduler)
    plan = scheduler.schedule()
    runner.execute(plan)
    assert scheduled(plan) == {"first": 26}
    assert all(requests[name] in scheduler.admission.prefix_waits for name in ("second", "third"))
    if end == "abort":
        scheduler.abort("first")
    elif end == "preempt":
        scheduler._preempt(requests["first"])
    elif end == "reset":
        scheduler.reset_prefix_cache()
    elif end == "own":
        scheduler.abort("second")
    if end == "failed step":
        runner.result(fails=True)
        scheduler.fail_step(plan, StepError("boom", step_id=0, req_ids=plan.req_ids))
    else:
        scheduler.update(runner.result(fail_rows=frozenset([0] if end == "failed row" else [])))
    assert not scheduler.admission.prefix_waits
    order = {"preempt": ["first", "second"], "own": ["third"]}.get(end, ["second", "third"])
    assert [*scheduler.waiting][: len(order)] == order
    drain(scheduler, runner)
    ended = {"abort": "first", "failed row": "first", "failed step": "first", "own": "second"}
    for name, request in requests.items():
        if name == ended.get(end):
            assert request.finish_reason in ("abort", "error")
        else:
            assert request.output_token_ids == expected_output(request)[0]
    assert not scheduler.admission.prefix_waits._computing


def test_no_more_requests_wait_than_slots_are_free():
    """Or one step would look up a whole queue of requests that begin alike."""
    scheduler, _ = start_sharing(max_num_seqs=3)
    for name in range(5):
        scheduler.add(make_request(str(name), (*prompt_of(24), 7), max_tokens=1, ignore_eos=True))
    plan = scheduler.schedule()
    assert scheduled(plan) == {"first": 26}
    assert (num_free_slots(scheduler), len(scheduler.admission.prefix_waits)) == (2, 2)
    assert [*scheduler.waiting] == ["0", "1", "2", "3", "4"]
    scheduler.update(output_of(plan, (5,)))
    assert scheduled(scheduler.schedule()) == {"first": 1, "second": 1, "third": 3}


def test_an_urgent_request_takes_the_slot_of_one_that_waits():
    scheduler = make_scheduler(
        max_num_seqs=2, enable_prefix_caching=True, least_shared_tokens=8,
        scheduling_policy="priority",
    )  # fmt: skip
    for name, priority, prompt in (
        ("first", 1, (*prompt_of(24), 1)), ("waits", 1, (*prompt_of(24), 2)),
        ("later", 1, prompt_of(3, 5)), ("urgent", 0, prompt_of(4, 9)),
    ):  # fmt: skip
        if name == "urgent":  # it arrives when the others have been looked at
            plan = scheduler.schedule()
            assert scheduled(plan) == {"first": 25}
            assert len(scheduler.admission.prefix_waits) == 1
        request = make_request(name, prompt, max_tokens=2, ignore_eos=True, priority=priority)
        scheduler.add(request)
    runner = make_runner(scheduler)
    runner.execute(plan)
    urgent = scheduler.schedule()
    assert scheduled(urgent) == {"first": 1, "urgent": 4}
    runner.execute(urgent)
    drain(scheduler, runner)
    assert not scheduler.has_unfinished_requests


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_after_an_interrupt_those_that_waited_are_queued(policy):
    scheduler, requests = start_sharing(scheduling_policy=policy)
    scheduler.schedule()
    error = StepError("interrupted", step_id=0)
    assert scheduler.abandon(error) == [requests["first"]]
    assert [*scheduler.waiting] == ["second", "third"]
    drain(scheduler, make_runner(scheduler))
    assert [requests[name].finish_reason for name in ("second", "third")] == ["length"] * 2


def test_nobody_waits_for_a_prefix_that_is_short():
    scheduler, _ = start_sharing(least_shared_tokens=25)
    assert scheduled(scheduler.schedule()) == {"first": 26, "second": 6}


def test_nobody_waits_for_a_request_that_is_less_urgent():
    """It may get no tokens for long, because more urgent ones come first."""
    for second, num_waits in ((0, 0), (1, 1), (2, 1)):
        scheduler = make_scheduler(
            enable_prefix_caching=True, least_shared_tokens=8, scheduling_policy="priority"
        )
        for name, priority in (("first", 1), ("second", second)):
            request = make_request(name, (*prompt_of(24), 1, 2), max_tokens=1, priority=priority)
            scheduler.add(request)
            scheduler.schedule()
        assert scheduler.admission.num_prefix_waits == num_waits


def sharing(name: str, **params: object) -> Request:
    """Return a request for 16 tokens in blocks of 4, whose digests are known."""
    request = make_request(name, prompt_of(16), max_tokens=1, **params)
    request.block_digests = [bytes([block]) for block in range(4)]
    return request


def test_a_request_waits_once_and_only_for_blocks_that_it_can_use():
    """One that lacks log-probabilities of its prompt computes it, as a preempted one does."""
    slots = SimpleNamespace(num_landed=np.zeros(1, dtype=np.int64))
    waits = PrefixWaits(slots, 4, 8)
    leader, other, lacking = sharing("a"), sharing("b"), sharing("c", prompt_logprobs=0)
    leader.slot = 0
    waits.enter(leader, 0)
    assert not waits.try_wait(lacking, 0)
    lacking.prompt_logprobs = [[None] * 15]
    assert waits.try_wait(lacking, 0)
    assert waits.try_wait(other, 0)
    assert waits.leave(leader) == [lacking, other]
    waits.enter(leader, 0)
    assert not waits.try_wait(other, 0)
    assert len(waits) == 0


def test_a_request_whose_wait_was_in_vain_does_not_wait_again():
    scheduler, requests = start_sharing(scheduling_policy="priority", max_num_batched_tokens=64)
    runner = make_runner(scheduler)
    runner.execute(scheduler.schedule())
    assert scheduler.admission.num_prefix_waits == 2
    scheduler.abort("first")
    scheduler.update(runner.result())
    urgent = make_request("urgent", (*prompt_of(24), 9), max_tokens=1, priority=-1)
    scheduler.add(urgent)
    plan = scheduler.schedule()
    assert scheduled(plan) == {"urgent": 25, "second": 25, "third": 14}
    runner.execute(plan)
    drain(scheduler, runner)
    assert scheduler.admission.num_prefix_waits == 2
    for name in ("second", "third"):
        assert requests[name].output_token_ids == expected_output(requests[name])[0]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_preempted_request_is_admitted_before_those_that_never_ran(policy):
    scheduler = make_scheduler(
        num_blocks=12, max_num_seqs=2, max_steps_in_flight=1, scheduling_policy=policy
    )
    for name in ("a", "b", "c", "d"):
        scheduler.add(make_request(name, prompt_of(15), max_tokens=20, ignore_eos=True))
    plans = drain(scheduler, make_runner(scheduler))
    entered = []
    for plan in plans:
        entering = {request.req_id for request in plan.entering}
        entered += [req_id for req_id in plan.req_ids if req_id in entering]
    assert scheduler.num_preemptions > 0
    assert entered[:4] == ["a", "b", "b", "c"]


def test_a_preempted_request_goes_to_the_front_of_its_id_and_priority():
    queue = waiting_queue.PriorityQueue()
    requests = {
        name: make_request(name, prompt_of(3), max_tokens=1, fairness_id=key, priority=priority)
        for name, key, priority in (
            ("a", "x", 1), ("b", "x", 1), ("c", "x", 1), ("d", "y", 1), ("e", "x", 0),
        )
    }  # fmt: skip
    for request in requests.values():
        queue.add(request, holds_followers=False)
    for name in ("e", "a", "b"):
        queue.take(requests[name])
    for name in ("b", "a"):
        queue.add_first(requests[name])
    found = []
    while queue:
        found.append(queue.peek().req_id)
        queue.take(queue.peek())
    assert found == ["a", "b", "c", "d"]


def test_debts_are_void_where_nobody_waits():
    """And nothing is kept of ids that have gone, of which a server may see any number."""
    queue = waiting_queue.PriorityQueue()

    def add(name: str, key: str) -> Request:
        request = make_request(name, prompt_of(3), max_tokens=1, fairness_id=key)
        queue.add(request, holds_followers=False)
        return request

    first = add("first", "a")
    queue.charge(first, 10 * waiting_queue.QUANTUM)
    queue.take(first)
    assert (queue._lanes, queue._sizes) == ({}, {})
    queue.charge(first, 10 * waiting_queue.QUANTUM)  # its output; nobody waits for a turn
    assert queue._lanes == {}
    again, other = add("again", "a"), add("other", "b")
    assert queue.peek() is again
    queue.charge(again, 10 * waiting_queue.QUANTUM)
    queue.take(again)
    add("once more", "a")
    assert queue.peek() is other


# --- engines -------------------------------------------------------------------------------------


def check_random_schedules(folder: Path, **options: object) -> None:
    """No output changes by priorities, turns, long prompts, fit chunks, prefixes, preemption."""
    tiny_checkpoint(folder, "qwen3")
    source = random.Random(4)
    common = [random_prompts((300,), seed=seed)[0] for seed in range(2)]
    prompts = [
        [*source.choice(common)[: source.choice([0, 270, 300])], *own]
        for own in random_prompts(tuple(source.randint(1, 60) for _ in range(9)), seed=3)
    ]
    params = [
        SamplingParams(
            temperature=source.choice([0, 1]), seed=seed, max_tokens=20, ignore_eos=True
        )
        for seed in range(len(prompts))
    ]
    options |= {"num_kv_blocks": 34}
    with LLM(str(folder), **options) as llm:
        alone = [llm.generate(*each)[0].outputs[0] for each in zip(prompts, params, strict=True)]
    with LLM(
        str(folder), max_num_seqs=5, max_num_batched_tokens=400, scheduling_policy="priority",
        long_prefill_token_threshold=64, max_mixed_prefill_tokens=24, **options,
    ) as llm:  # fmt: skip
        row_of = {}
        for row in source.sample(range(len(prompts)), len(prompts)):
            req_id = llm.add_request(
                prompts[row],
                params[row],
                priority=source.randint(-1, 1),
                fairness_id=source.choice("ab"),
            )
            row_of[req_id] = row
        outputs = {}
        while llm.has_unfinished_requests():
            outputs |= {row_of[each.request_id]: each.outputs[0] for each in llm.step()}
        assert [outputs[row] for row in range(len(prompts))] == alone
        metrics = llm.metrics()
        assert metrics["num_prefix_waits"] > 0
        assert metrics["num_preemptions"] > 0


def test_random_schedules_give_the_outputs_of_sequential_runs(tmp_path):
    """In float64, so that no tie can flip."""
    check_random_schedules(tmp_path, device="cpu", dtype="float64")


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_random_schedules_give_the_outputs_of_sequential_runs_on_a_gpu(tmp_path):
    options = {"device": "cuda", "dtype": "bfloat16", "deterministic": True}
    check_random_schedules(tmp_path, **options)


def test_generate_and_stream_take_priorities_and_fairness_ids(monkeypatch):
    llm = make_llm(monkeypatch, max_num_seqs=1, num_kv_blocks=64, scheduling_policy="priority")
    prompts = [list(prompt_of(size)) for size in (3, 4, 5, 6)]
    params = SamplingParams(max_tokens=2, ignore_eos=True)

    def order(**options: object) -> list[int]:
        outputs = llm.generate(prompts, params, use_tqdm=False, **options)
        assert not any(output.error for output in outputs)
        ends = [output.metrics.finish_time for output in outputs]
        return sorted(range(len(ends)), key=ends.__getitem__)

    assert order() == order(priority=None) == [0, 1, 2, 3]
    assert order(priority=[3, 1, 2, 0]) == [3, 1, 2, 0]
    assert order(priority=7, fairness_id="a") == [0, 1, 2, 3]
    monkeypatch.setattr(waiting_queue, "QUANTUM", 1)
    assert order(fairness_id=["a", "a", "a", "b"]) == [0, 3, 1, 2]
    (*_, last) = llm.stream(prompts[0], params, priority=-5, fairness_id="c")
    assert last.finished
    with pytest.raises(RequestError, match="priority: expected one, or 4 for 4 prompts, got 2"):
        llm.generate(prompts, params, priority=[1, 2])
    llm.close()


def test_a_priority_may_be_any_integer_type():
    core = EngineCore(
        EngineConfig(model="tiny", device="cpu", num_kv_blocks=8, scheduling_policy="priority"),
        progress=False,
    )
    request = core.add_request("a", [1, 2], SamplingParams(), priority=np.int64(-3))
    assert (request.priority, type(request.priority)) == (-3, int)
    core.runner.close()


def test_priorities_that_come_and_go_leave_nothing_behind():
    """A thousand urgent requests come and are aborted while one of priority -1 waits."""
    queue = waiting_queue.PriorityQueue()
    first = make_request("first", prompt_of(3), max_tokens=1, priority=-1)
    queue.add(first, holds_followers=False)
    for number in range(1000):
        other = make_request(f"{number}", prompt_of(3), max_tokens=1, priority=number)
        queue.add(other, holds_followers=False)
        assert queue.peek() is first
        queue.remove(other)
    assert len(queue._priorities) < 50
    queue.take(first)
    last = make_request("last", prompt_of(3), max_tokens=1, priority=500)
    queue.add(last, holds_followers=False)
    assert queue.peek() is last


@given(
    added=st.lists(st.tuples(st.integers(-2, 2), st.sampled_from("ab")), max_size=12),
    removed=st.sets(st.integers(0, 11)),
    count=st.integers(0, 14),
)
def test_the_first_of_a_queue_have_the_lowest_priority_values(added, removed, count):
    for queue in (waiting_queue.WaitingQueue(), waiting_queue.PriorityQueue()):
        requests = []
        for number, (priority, fairness_id) in enumerate(added):
            options = {"priority": priority, "fairness_id": fairness_id}
            requests.append(make_request(str(number), (1,), max_tokens=1, **options))
            queue.add(requests[-1], holds_followers=False)
        for number in removed & {*range(len(added))}:
            queue.take(requests[number])
        waiting = [each for number, each in enumerate(requests) if number not in removed]
        found = [*queue.first(count)]
        assert len({*found}) == len(found) == min(count, len(waiting))
        if isinstance(queue, waiting_queue.PriorityQueue):
            waiting.sort(key=lambda request: request.priority)
            priorities = [request.priority for request in waiting[:count]]
            assert [request.priority for request in found] == priorities
        else:
            assert found == waiting[:count]


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("priority", {"priority": 1.5}, r"priority: expected an integer in \[-2147483647, "),
        ("priority", {"priority": True}, r"priority: expected an integer .*, got True"),
        ("priority", {"priority": 2**31}, r"priority: expected an integer .*, got 2147483648"),
        ("priority", {"fairness_id": 5}, "fairness_id: expected a string of at most 256 char"),
        ("priority", {"fairness_id": "x" * 257}, "fairness_id: expected a string of at most 256"),
        ("fcfs", {"priority": 1}, "priority: expected 0 with scheduling_policy='fcfs', got 1; ch"),
        ("fcfs", {"fairness_id": "a"}, "fairness_id: expected '' with scheduling_policy='fcfs'"),
    ],
)
def test_a_wrong_priority_or_fairness_id_names_itself(monkeypatch, policy, options, message):
    llm = make_llm(monkeypatch, scheduling_policy=policy)
    params = SamplingParams(max_tokens=2)
    with pytest.raises(RequestError, match=message):
        llm.add_request([1], params, **options)
    assert not llm.has_unfinished_requests()
    usual = {"priority": 0, "fairness_id": ""}
    lists = {name: [value, usual[name]] for name, value in options.items()}
    bad, good = llm.generate([[1], [1]], params, use_tqdm=False, **lists)
    assert bad.error is not None
    assert good.error is None
    llm.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"scheduling_policy": "fair"},
            r"scheduling_policy: expected one of \('fcfs', 'priority'",
        ),
        (
            {"long_prefill_token_threshold": -1},
            "long_prefill_token_threshold: expected an integer",
        ),
        ({"long_prefill_token_threshold": 1.0}, "long_prefill_token_threshold: expected an integ"),
    ],
)
def test_a_wrong_option_names_itself(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="tiny", **options)
