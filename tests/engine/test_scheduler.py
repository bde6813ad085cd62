"""Scheduler against a device in plain Python, and its guarantees one by one."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from operator import attrgetter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mrv1 import RequestError, StepError
from mrv1.engine.block_pool import BlockPool
from mrv1.engine.request import Request, Status
from mrv1.engine.scheduler import Scheduler
from mrv1.engine.scheduler_config import Padding
from mrv1.headwise import FULL, Visible
from mrv1.runner import StepOutput, StepPlan
from tests.engine.scheduler_model import (
    ADAPTERS,
    BLOCK_SIZE,
    EOS,
    MAX_KNOWN,
    VOCAB,
    DeviceError,
    KnownSpeculation,
    check_mixed,
    check_padding,
    drain,
    expected_output,
    make_request,
    make_runner,
    make_scheduler,
    new_scheduler,
    num_free_slots,
    num_pending,
    num_pending_tokens,
    output_of,
    prompt_of,
    scheduled,
)


def check_pool(scheduler: Scheduler) -> None:
    """Check reference counts; each unreferenced block is free, cached or quarantined, once."""
    for group, pool in enumerate(scheduler.pools):
        lists = [r.block_ids[group] for r in scheduler.running.values()]
        check_group(pool, Counter(b for blocks in lists for b in blocks if b >= 0))
        if not scheduler.num_steps_in_flight:
            assert pool.num_quarantined == 0


def check_group(pool: BlockPool, held: Counter[int]) -> None:
    assert pool._num_refs == [held[b] for b in range(pool.num_blocks)]
    unheld = [*pool._free, *pool._evictable, *pool._quarantine]
    assert sorted([*held, *unheld]) == list(range(pool.num_blocks))
    assert pool.num_held == len(held)
    assert {b: d for d, b in pool._cached.items()} == {
        b: d for b, d in enumerate(pool._digests) if d is not None
    }
    assert all(pool._digests[b] is None for b in pool._free)
    assert all(pool._digests[b] == d for b, d in pool._evictable.items())


class ForgetfulScheduler(Scheduler):
    """Plans every step and processes every output without anything kept from earlier steps."""

    def schedule(self) -> StepPlan | None:
        self.admission.blocked = None
        self._batch.version += 1
        return super().schedule()

    def update(self, output: StepOutput) -> list[Request]:
        self._batch.version += 1
        return super().update(output)


def how_far(request: Request) -> tuple[object, ...]:
    ended = (request.finish_reason, request.stop_reason)
    return request.req_id, request.output_token_ids, *ended


def check_same_plan(plan: StepPlan | None, other: StepPlan | None) -> None:
    if plan is None or other is None:
        assert plan is other
        return
    for name in ("slots", "epochs", "num_scheduled_tokens"):
        ours, theirs = getattr(plan, name), getattr(other, name)
        assert ours.dtype == theirs.dtype == np.int32
        assert ours.tolist() == theirs.tolist(), name
    for name in ("step_id", "req_ids", "preempted", "finished", "new_block_ids"):
        assert getattr(plan, name) == getattr(other, name), name
    for entering, other_entering in ((plan.new, other.new), (plan.resumed, other.resumed)):
        fields = attrgetter("req_id", "slot", "epoch", "num_computed_tokens", "adapter_slot")
        assert [*map(fields, entering)] == [*map(fields, other_entering)]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests arrive, run, abort and fail in any order, in a pool that is often too small.

    A second scheduler, which keeps nothing from one step to the next, must make the same plans.
    """

    @initialize(
        num_blocks=st.integers(4, 24),
        streaming=st.lists(
            st.tuples(st.integers(1, 20), st.integers(0, 9), st.integers(0, 6)), max_size=2
        ),
        all_stream=st.booleans(),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 32),
        depth=st.integers(1, 3),
        caching=st.booleans(),
        stops_on_device=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        threshold=st.sampled_from([0, 0, 1, 5]),
        least_shared=st.sampled_from([1, 1, 9, 256]),
        drafts=st.booleans(),
        padding=st.sampled_from([None, None, Padding((2, 8, 12), 2), Padding((4, 16), 5)]),
        mixed=st.sampled_from([None, None, 1, 5, 12]),
        max_loras=st.integers(1, 3),
    )
    def start(
        self, num_blocks, streaming, all_stream, max_num_seqs, budget, depth, caching,
        stops_on_device, policy, threshold, least_shared, drafts, padding, mixed, max_loras,
    ):  # fmt: skip
        keeps, pools = [Visible(window, sink) for window, sink, _ in streaming], []
        for seen, (_, _, spare) in zip(keeps, streaming, strict=True):
            pools.append(min(num_blocks, seen.num_blocks(BLOCK_SIZE, budget) + spare))
        if not (streaming and all_stream):
            keeps, pools = [FULL, *keeps], [num_blocks, *pools]
        self.keeps, self.pools = keeps, pools
        self.scheduler, self.forgetful = (
            new_scheduler(
                made,
                num_blocks=pools,
                keeps=keeps,
                block_size=BLOCK_SIZE,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                eos_token_ids=[EOS],
                max_steps_in_flight=depth,
                enable_prefix_caching=caching,
                scheduling_policy=policy,
                long_prefill_token_threshold=threshold,
                least_shared_tokens=least_shared,
                speculation=KnownSpeculation() if drafts else None,
                padding=padding,
                max_mixed_prefill_tokens=mixed,
                max_loras=max_loras,
            )
            for made in (Scheduler, ForgetfulScheduler)
        )
        self.padding, self.mixed = padding, mixed
        self.max_num_seqs, self.budget, self.max_loras = max_num_seqs, budget, max_loras
        self.runner = make_runner(self.scheduler, stops_on_device=stops_on_device)
        self.requests: dict[str, Request] = {}
        self.ended_by_hand: set[str] = set()
        self.plans: list[StepPlan] = []

    @rule(
        family=st.sampled_from([0, 0, 1, 2]),
        num_shared=st.sampled_from([20, 20, 40]) | st.integers(0, 40),
        own=st.lists(st.integers(1, VOCAB - 1), max_size=12),
        max_tokens=st.integers(1, 24),
        min_tokens=st.sampled_from([0, 0, 5]),
        n=st.sampled_from([1, 1, 3]),
        sequence=st.tuples(st.integers(0, 12), st.integers(1, 4)),
        ignore_eos=st.booleans(),
        stops=st.lists(st.integers(0, VOCAB - 1), max_size=2),
        span=st.none() | st.tuples(st.integers(0, 40), st.integers(1, 12)),
        cache_key=st.sampled_from([b"", b"", b"image"]),
        adapter=st.sampled_from([None, None, *ADAPTERS]),
        priority=st.integers(-1, 1),
        fairness_id=st.sampled_from(["", "a", "b"]),
    )
    def add(
        self, family, num_shared, own, max_tokens, min_tokens, n, sequence, ignore_eos, stops,
        span, cache_key, adapter, priority, fairness_id,
    ):  # fmt: skip
        cache_key = cache_key if adapter is None else adapter.key
        shared = [1 + (family + 7 * i) % (VOCAB - 1) for i in range(num_shared)]
        prompt = (*shared, *own) or (1,)
        spans = ()
        if span is not None and sum(span) <= len(prompt):
            cuts = sorted({span[0], span[0] + span[1] // 2, sum(span)})
            spans = tuple(pairwise(cuts))
        params = {
            "max_tokens": max_tokens,
            "min_tokens": min(min_tokens, max_tokens),
            "ignore_eos": ignore_eos,
            "stop_token_ids": stops,
        }
        free, _ = expected_output(make_request("", prompt, cache_key=cache_key, **params))
        start, length = sequence
        if found := free[start : start + length]:
            params["stop_token_sequences"] = [found, [VOCAB - 1, 1]]
        request, twin = (
            make_request(
                str(len(self.requests)),
                prompt,
                unsplittable=spans,
                cache_key=cache_key,
                adapter=adapter,
                priority=priority,
                fairness_id=fairness_id,
                n=n,
                **params,
            )
            for _ in range(2)
        )
        message = None
        if not self.could_ever_fit(request):
            message = "raise num_kv_blocks"
        elif any(end - start > self.budget for start, end in spans):
            message = "unsplittable: expected spans of at most"
        if message is not None:
            with pytest.raises(RequestError, match=message):
                self.scheduler.add(request)
            return
        self.scheduler.add(request)
        self.forgetful.add(twin)
        for member in (request, *request.followers):
            self.requests[member.req_id] = member
            self.runner.cache_keys[member.req_id] = cache_key
            self.runner.adapters_of[member.req_id] = adapter

    def could_ever_fit(self, request):
        """Return whether the blocks that a request needs at a time fit the pool of each group."""
        for seen, num_blocks in zip(self.keeps, self.pools, strict=True):
            needed = -(-request.max_total_tokens // BLOCK_SIZE)
            if not seen.is_full:
                needed = min(needed, seen.num_blocks(BLOCK_SIZE, self.budget))
            if needed > num_blocks:
                return False
        return True

    @precondition(
        lambda self: self.scheduler.num_steps_in_flight < self.scheduler.max_steps_in_flight
    )
    @rule(fails=st.integers(0, 12).map(lambda n: n == 0))
    def launch(self, fails):
        num_pending = num_pending_tokens(self.scheduler)
        plan = self.scheduler.schedule()
        check_same_plan(plan, self.forgetful.schedule())
        if plan is not None and self.mixed is not None and num_pending <= self.budget:
            check_mixed(self.scheduler, plan, self.mixed)
        if plan is not None and self.padding is not None:
            check_padding(self.scheduler, plan, self.padding)
        if plan is None:
            assert self.scheduler.num_steps_in_flight or not self.scheduler.has_unfinished_requests
            return
        self.check_spans(plan)
        self.runner.execute(plan, fails=fails)
        if fails:
            self.fail_step(plan)
        else:
            self.plans.append(plan)

    def check_spans(self, plan):
        for req_id, slot, count in zip(
            plan.req_ids, plan.slots.tolist(), plan.num_scheduled_tokens.tolist(), strict=True
        ):
            end = int(self.scheduler._slots.num_computed[slot])
            for span_start, span_end in self.requests[req_id].unsplittable:
                assert not span_start < end < span_end
                assert not span_start < end - count < span_end

    def fail_step(self, plan):
        error = StepError("boom", step_id=plan.step_id, req_ids=plan.req_ids)
        failed = self.scheduler.fail_step(plan, error)
        self.forgetful.fail_step(plan, error)
        assert {r.req_id for r in failed} <= set(plan.req_ids)
        assert all(r.finish_reason == "error" and r.error is error for r in failed)
        self.ended_by_hand |= {r.req_id for r in failed}

    @precondition(lambda self: self.plans)
    @rule(fail_row=st.integers(0, 30), fails=st.integers(0, 12).map(lambda n: n == 0))
    def deliver(self, fail_row, fails):
        plan = self.plans.pop(0)
        output = self.runner.result(fail_rows=frozenset([fail_row]), fails=fails)
        if output is None:
            self.fail_step(plan)
            return
        before = {r: len(request.output_token_ids) for r, request in self.requests.items()}
        first_times = {r: request.first_token_time for r, request in self.requests.items()}
        changed = self.scheduler.update(output)
        for req_id, first_time in first_times.items():
            assert first_time in (None, self.requests[req_id].first_token_time)
        same = self.forgetful.update(output)
        self.runner.poison_free(self.scheduler)
        assert list(map(how_far, changed)) == list(map(how_far, same))
        for request in changed:
            num_new = len(request.output_token_ids) - before[request.req_id]
            assert num_new in range(2 if not plan.draft_token_ids else 2 + MAX_KNOWN)
            if request.finish_reason == "error":
                self.ended_by_hand.add(request.req_id)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        req_id = data.draw(st.sampled_from(sorted(self.requests, key=str)))
        was_finished = self.requests[req_id].finished
        aborted = self.scheduler.abort(req_id)
        self.forgetful.abort(req_id)
        assert (aborted is None) == was_finished
        assert self.scheduler.abort(req_id) is None, "aborting twice is harmless"
        if not was_finished:
            self.ended_by_hand.add(req_id)
            assert self.requests[req_id].finish_reason == "abort"

    @rule(chance=st.integers(0, 5))
    def reset_prefix_cache(self, chance):
        if chance == 0:
            self.scheduler.reset_prefix_cache()
            self.forgetful.reset_prefix_cache()
            assert all(pool.num_cached == 0 for pool in self.scheduler.pools)

    @invariant()
    def nothing_leaks(self):
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        running = scheduler.running.values()
        check_pool(scheduler)
        for request in running:
            landed = int(scheduler._slots.num_landed[request.slot])
            for seen, blocks in zip(self.keeps, request.block_ids, strict=True):
                given_up = [index for index, block in enumerate(blocks) if block < 0]
                assert given_up == [*seen.freed_blocks(landed, BLOCK_SIZE)]
                assert given_up == [
                    index
                    for index in range(len(blocks))
                    if not seen.is_full
                    and index * BLOCK_SIZE >= seen.sink
                    and landed - ((index + 1) * BLOCK_SIZE - 1) >= seen.window
                ]
        for name in (
            "wasted_tokens", "num_preemptions", "admission.prefix_hit_tokens",
            "admission.num_prefix_waits",
        ):  # fmt: skip
            count = attrgetter(name)
            assert count(scheduler) == count(self.forgetful), name
        assert num_free_slots(scheduler) + len(running) == self.max_num_seqs
        assert len({r.slot for r in running}) == len(running)
        slot_of = {r.adapter: r.adapter_slot for r in running if r.adapter is not None}
        assert len(slot_of) == len({*slot_of.values()}) <= self.max_loras
        assert all(r.adapter_slot == slot_of.get(r.adapter, -1) for r in running)
        assert sum(scheduler.adapter_slots._users.values()) == sum(
            r.adapter is not None for r in running
        )
        assert all(r.status is Status.RUNNING for r in running)
        assert all(r.status is Status.WAITING for r in scheduler.waiting.values())
        held = [r for followers in scheduler.waiting.held.values() for r in followers]
        assert all(r.leader in scheduler.waiting.held and not r.leader.finished for r in held)
        waits = scheduler.admission.prefix_waits._leaders
        assert all(r.status is Status.WAITING and r not in waits.values() for r in waits)
        assert all(leader.status is Status.RUNNING for leader in waits.values())
        assert scheduler.num_waiting == len(scheduler.waiting) + len(held) + len(waits)
        for request in self.requests.values():
            pending = num_pending(scheduler, request)
            drafting = bool(self.plans and self.plans[-1].draft_token_ids)
            assert 0 <= pending <= scheduler.num_steps_in_flight + MAX_KNOWN * drafting
            assert not drafting or len(self.plans) == 1
            assert request.num_tokens + pending <= request.max_total_tokens
            expected, reason = expected_output(request)
            if request.finished and request.req_id not in self.ended_by_hand:
                assert request.output_token_ids == expected
                assert request.finish_reason == reason
            else:
                assert request.output_token_ids == expected[: len(request.output_token_ids)]
            assert (request.first_token_time is not None) == bool(request.output_token_ids)
            if request.finish_reason == "stop":
                sequence = request.stop_reason if isinstance(request.stop_reason, tuple) else ()
                assert list(sequence) == expected[len(expected) - len(sequence) :]

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        while self.plans:
            self.scheduler.update(self.runner.result())
            self.plans.pop(0)
        drain(self.scheduler, self.runner)
        self.forgetful = self.scheduler
        self.nothing_leaks()
        assert all(request.finished for request in self.requests.values())
        assert [pool.num_free for pool in self.scheduler.pools] == self.pools
        assert num_free_slots(self.scheduler) == self.max_num_seqs
        if not self.scheduler._config.enable_prefix_caching:
            assert all(pool.num_cached == 0 for pool in self.scheduler.pools)


TestScheduler = SchedulerMachine.TestCase


@given(seed=st.integers(0, 2**32))
def test_a_waiting_request_is_admitted_as_early_as_with_a_lookup_in_every_step(seed):
    """Pools are nearly always too small; running and waiting requests share prefixes.

    The other scheduler looks up the first waiting request in every step.
    """
    source = random.Random(seed)
    for _ in range(4):
        keeps = source.choice([(FULL,), (FULL, Visible(5, 4)), (Visible(9),)])
        budget = source.choice([6, 9, 16, 40])
        options = {
            "num_blocks": [
                11 if seen.is_full else min(11, seen.num_blocks(BLOCK_SIZE, budget) + 2)
                for seen in keeps
            ],
            "block_size": BLOCK_SIZE,
            "max_num_seqs": 4,
            "max_num_batched_tokens": budget,
            "keeps": keeps,
            "eos_token_ids": [EOS],
            "max_steps_in_flight": source.choice([1, 2]),
            "enable_prefix_caching": True,
            "scheduling_policy": source.choice(["fcfs", "priority"]),
            "long_prefill_token_threshold": source.choice([0, 5]),
            "least_shared_tokens": source.choice([4, 256]),
            "padding": source.choice([None, Padding((2, 8, 12, 24), 2)]),
            "max_mixed_prefill_tokens": source.choice([None, 3, 9]),
        }
        scheduler, forgetful = (
            new_scheduler(made, **options) for made in (Scheduler, ForgetfulScheduler)
        )
        runner = make_runner(scheduler)
        requests = []
        for name in range(12):
            prompt = prompt_of(source.randint(1, 30), source.choice([0, 0, 9]))
            params = {
                "max_tokens": source.randint(1, 10),
                "priority": source.choice([0, 0, 1]),
                "fairness_id": source.choice("ab"),
            }
            for each in (scheduler, forgetful):
                requests.append(make_request(str(name), prompt, ignore_eos=True, **params))
                each.add(requests[-1])
        while scheduler.has_unfinished_requests:
            chance = source.random()
            for each in (scheduler, forgetful):
                if chance < 0.02:
                    each.reset_prefix_cache()
                elif chance < 0.04:
                    each.abort(min(each._requests))
            plan = None
            if scheduler.num_steps_in_flight < scheduler.max_steps_in_flight:
                plan = scheduler.schedule()
                check_same_plan(plan, forgetful.schedule())
            if plan is not None:
                runner.execute(plan)
            elif scheduler.num_steps_in_flight:
                output = runner.result()
                scheduler.update(output)
                forgetful.update(output)
        for request in requests:
            if request.finish_reason != "abort":
                assert request.output_token_ids == expected_output(request)[0]


# --- order, chunks, ends -------------------------------------------------------------------------


def test_a_long_prompt_is_prefilled_in_chunks_batched_with_decodes():
    scheduler = make_scheduler(max_num_batched_tokens=10, max_steps_in_flight=1)
    scheduler.add(make_request("short", (5, 5), max_tokens=8, ignore_eos=True))
    scheduler.add(make_request("long", prompt_of(25), max_tokens=1))
    rows = [scheduled(plan) for plan in drain(scheduler, make_runner(scheduler))]
    assert rows[0] == {"short": 2, "long": 8}
    assert rows[1] == {"short": 1, "long": 9}
    assert rows[2] == {"short": 1, "long": 8}
    assert rows[3:] == [{"short": 1}] * 5


def test_first_come_first_served():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abcd":
        scheduler.add(make_request(name, (1,), max_tokens=3, ignore_eos=True))
    plans = drain(scheduler, make_runner(scheduler))
    assert [r.req_id for p in plans for r in p.new] == list("abcd")


def stop_in_output(count: int) -> tuple[tuple[int, ...], list[int]]:
    """Return a prompt and its ``count`` output tokens: the last one is new, none is EOS."""
    for first in range(VOCAB):
        request = make_request("r", prompt_of(3, first), max_tokens=count, ignore_eos=True)
        output, _ = expected_output(request)
        if output[-1] not in output[:-1] and EOS not in output:
            return request.prompt_token_ids, output
    raise AssertionError("no such prompt")


def test_a_plan_names_the_step_it_continues():
    """A plan continues a step whose rows all sample if no request enters, leaves or sits out."""
    scheduler = make_scheduler(max_num_batched_tokens=8, max_steps_in_flight=1)

    def claims(count: int) -> list[int | None]:
        plans = []
        for _ in range(count):
            plans.append(scheduler.schedule())
            runner.execute(plans[-1])
            scheduler.update(runner.result())
        return [plan.continues for plan in plans]

    runner = make_runner(scheduler)
    scheduler.add(make_request("a", prompt_of(12), max_tokens=10, ignore_eos=True))
    assert claims(5) == [None, None, 1, 2, 3], "step 0 is the first chunk of the prompt"
    scheduler.add(make_request("b", (1,), max_tokens=3, ignore_eos=True))
    assert claims(5) == [None, 5, 6, None, 8], "b enters in step 5 and has left by step 8"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_token_has_precedence_over_length(depth):
    prompt, output = stop_in_output(3)
    scheduler = make_scheduler(max_steps_in_flight=depth)
    request = make_request("r", prompt, max_tokens=3, stop_token_ids=[output[-1]])
    scheduler.add(request)
    drain(scheduler, make_runner(scheduler))
    assert (request.finish_reason, request.stop_reason) == ("stop", output[-1])
    assert request.output_token_ids == output, "the stop token is kept"
    assert request.finish_time >= request.first_token_time >= request.arrival_time


def test_a_stop_by_the_caller_has_precedence_over_length():
    """The last permitted token completes a stop string."""
    scheduler = make_scheduler()
    request = make_request("r", prompt_of(3), max_tokens=1, ignore_eos=True)
    scheduler.add(request)
    drain(scheduler, make_runner(scheduler))
    assert (request.finish_reason, request.stop_reason) == ("length", None)
    scheduler.stop(request, "a stop string", len(request.output_token_ids))
    assert (request.finish_reason, request.stop_reason) == ("stop", "a stop string")


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_eos_ends_a_request_unless_ignored(ignore_eos):
    scheduler = make_scheduler()
    request = make_request("r", (3,), max_tokens=2, ignore_eos=ignore_eos)
    scheduler.add(request)
    first = scheduler.schedule()
    scheduler.update(output_of(first, (EOS,)))
    if ignore_eos:
        scheduler.update(output_of(scheduler.schedule(), (EOS,)))
    assert request.finish_reason == ("length" if ignore_eos else "stop")
    assert request.stop_reason is None
    assert request.output_token_ids == [EOS] * (1 + ignore_eos)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, (EOS,)),
        ({"ignore_eos": True}, ()),
        ({"stop_token_ids": [7, EOS, 7, 9]}, (7, EOS, 9)),
        ({"stop_token_ids": [7, 9], "ignore_eos": True}, (7, 9)),
    ],
)
def test_the_plan_carries_the_stop_tokens_and_the_maximum_length(params, expected):
    scheduler = make_scheduler()
    scheduler.add(make_request("r", (1, 2), max_tokens=5, **params))
    (entering,) = scheduler.schedule().new
    assert entering.stop_token_ids == expected
    assert entering.max_total_tokens == 7
    assert entering.num_computed_tokens == 0


def test_a_request_id_in_use_is_refused():
    scheduler = make_scheduler()
    scheduler.add(make_request("r", (1,), max_tokens=1))
    with pytest.raises(RequestError, match=r"request_id: expected an id .* got 'r'"):
        scheduler.add(make_request("r", (1,), max_tokens=1))


def test_a_request_too_large_for_a_pool_is_refused_with_the_group_and_the_count():
    """Blocks of 4: heads with a window of 8 need 19 for a chunk of 64, 7 for a chunk of 16."""
    options = {"block_size": 4, "keeps": (FULL, Visible(8)), "max_num_seqs": 1}
    request = make_request("r", tuple(range(1, 101)), max_tokens=4)
    scheduler = make_scheduler(num_blocks=[40, 12], max_num_batched_tokens=64, **options)
    with pytest.raises(
        RequestError, match="at most 12 blocks of heads with a window of 8 tokens, got 19 for"
    ):
        scheduler.add(request)
    scheduler = make_scheduler(num_blocks=[25, 12], max_num_batched_tokens=16, **options)
    with pytest.raises(RequestError, match=r"expected at most 100 tokens .* got up to 104"):
        scheduler.add(request)
    make_scheduler(num_blocks=[26, 12], max_num_batched_tokens=16, **options).add(request)


# --- steps in flight -----------------------------------------------------------------------------


def test_the_next_step_is_scheduled_while_a_token_is_pending():
    scheduler = make_scheduler(max_steps_in_flight=3)
    request = make_request("r", (1, 2, 3), max_tokens=9, ignore_eos=True)
    scheduler.add(request)
    plans = [scheduler.schedule() for _ in range(3)]
    assert [scheduled(plan) for plan in plans] == [{"r": 3}, {"r": 1}, {"r": 1}]
    assert (num_pending(scheduler, request), request.num_tokens) == (3, 3)
    assert [plan.new_block_ids for plan in plans] == [{0: ((0,),)}, {}, {0: ((1,),)}]
    for step, plan in enumerate(plans):
        scheduler.update(output_of(plan, (5 + step,)))
    assert request.output_token_ids == [5, 6, 7]
    assert num_pending(scheduler, request) == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_a_length_stop_costs_no_extra_step(depth, max_tokens):
    scheduler = make_scheduler(max_steps_in_flight=depth)
    scheduler.add(make_request("r", (1, 2, 3), max_tokens=max_tokens, ignore_eos=True))
    plans = drain(scheduler, make_runner(scheduler))
    assert [scheduled(plan)["r"] for plan in plans] == [3] + [1] * (max_tokens - 1)
    assert scheduler.wasted_tokens == 0


@pytest.mark.parametrize("stops_on_device", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_stop_token_costs_at_most_the_steps_in_flight(depth, stops_on_device):
    prompt, output = stop_in_output(3)
    scheduler = make_scheduler(max_steps_in_flight=depth)
    request = make_request("r", prompt, max_tokens=20, stop_token_ids=[output[-1]])
    scheduler.add(request)
    plans = drain(scheduler, make_runner(scheduler, stops_on_device=stops_on_device))
    assert request.output_token_ids == output, "the late rows' tokens are not delivered"
    assert len(plans) == 3 + (depth - 1)
    assert scheduler.wasted_tokens == depth - 1


def test_outputs_are_accepted_once_and_in_launch_order():
    scheduler = make_scheduler()
    scheduler.add(make_request("r", (1,), max_tokens=9, ignore_eos=True))
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(RuntimeError, match="expected fewer than 2 steps in flight"):
        scheduler.schedule()
    with pytest.raises(RuntimeError, match=r"expected the output of step 0, .* got step 1"):
        scheduler.update(output_of(second, (5,)))
    with pytest.raises(RuntimeError, match=r"expected 1 rows, .* got 2"):
        scheduler.update(output_of(first, (5,), (5,)))
    scheduler.update(output_of(first, (5,)))
    with pytest.raises(RuntimeError, match=r"expected the output of step 1, .* got step 0"):
        scheduler.update(output_of(first, (5,)))
    scheduler.update(output_of(second, (6,)))
    with pytest.raises(RuntimeError, match="expected the output of step None"):
        scheduler.update(output_of(second, (6,)))
    assert scheduler.get("r").output_token_ids == [5, 6]


def test_output_of_an_aborted_request_is_dropped():
    scheduler = make_scheduler()
    request = make_request("r", (1,), max_tokens=5)
    scheduler.add(request)
    plan = scheduler.schedule()
    scheduler.abort("r")
    assert scheduler.update(output_of(plan, (5,))) == []
    assert request.output_token_ids == []
    assert scheduler.wasted_tokens == 1


def test_output_of_a_slots_former_request_is_dropped():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("r", (1,), max_tokens=5))
    late = scheduler.schedule()
    scheduler.abort("r")
    again = make_request("r", (2,), max_tokens=5)  # same request id and slot, another epoch
    scheduler.add(again)
    plan = scheduler.schedule()
    assert plan.finished == (0,)
    assert late.slots.tolist() == plan.slots.tolist() == [again.slot]
    assert scheduler.update(output_of(late, (5,))) == []
    assert scheduler.update(output_of(plan, (6,))) == [again]
    assert again.output_token_ids == [6]


def test_a_failed_step_ends_the_requests_still_in_it():
    scheduler = make_scheduler(max_steps_in_flight=3)
    requests = {name: make_request(name, (1,), max_tokens=9) for name in "abc"}
    scheduler.add(requests["a"])
    scheduler.add(requests["b"])
    first = scheduler.schedule()
    scheduler.abort("b")
    scheduler.add(requests["c"])
    second = scheduler.schedule()
    error = StepError("boom", step_id=0, req_ids=first.req_ids)
    assert scheduler.fail_step(first, error) == [requests["a"]]
    assert requests["a"].error is error
    assert requests["b"].finish_reason == "abort"
    with pytest.raises(RuntimeError, match=r"expected one of the steps in flight, \[1\], got"):
        scheduler.fail_step(first, error)
    assert scheduler.update(output_of(second, (5,), (6,))) == [requests["c"]]
    assert requests["c"].output_token_ids == [6]
    assert requests["a"].output_token_ids == []


@pytest.mark.parametrize("tokens", [(), (1, 2)])
def test_a_row_with_the_wrong_number_of_tokens_fails_alone(tokens):
    scheduler = make_scheduler()
    good, bad = make_request("good", (1,), max_tokens=9), make_request("bad", (1,), max_tokens=9)
    scheduler.add(good)
    scheduler.add(bad)
    changed = scheduler.update(output_of(scheduler.schedule(), (5,), tokens))
    assert set(changed) == {good, bad}
    assert (good.finish_reason, bad.finish_reason) == (None, "error")
    with pytest.raises(RequestError, match="request 'bad': expected 1 tokens of step 0, got"):
        raise bad.error


def test_the_number_of_steps_in_flight_changes_no_output():
    """The same arrivals, with 1, 2 and 3 steps in flight, with and without prefix caching."""
    outputs = []
    for depth, caching in [(1, False), (2, False), (2, True), (3, True)]:
        source = random.Random(3)
        scheduler = make_scheduler(
            num_blocks=14, max_steps_in_flight=depth, enable_prefix_caching=caching
        )
        runner = make_runner(scheduler)
        requests = [
            make_request(
                str(i),
                prompt_of(source.randint(1, 30), source.randint(1, 2)),
                max_tokens=source.randint(1, 20),
                stop_token_ids=[source.randrange(VOCAB)],
            )
            for i in range(60)
        ]
        for request in requests:
            scheduler.add(request)
        drain(scheduler, runner)
        assert scheduler.num_preemptions > 0
        assert (scheduler.admission.prefix_hit_tokens > 0) == caching
        outputs.append(
            [(r.output_token_ids, r.finish_reason, r.stop_reason, r.error) for r in requests]
        )
    assert all(output == outputs[0] for output in outputs)


# --- blocks: quarantine, waiting, preemption -----------------------------------------------------


class UnguardedPool(BlockPool):
    """Frees blocks while steps in flight still use them."""

    def free(self, blocks, *, last_step=None):
        super().free(blocks)


def reuse_blocks_of_an_aborted_request(scheduler: Scheduler) -> StepPlan | None:
    """Abort a request whose step is in flight, and plan a step that needs its blocks."""
    runner = make_runner(scheduler)
    scheduler.add(make_request("a", prompt_of(12), max_tokens=4, ignore_eos=True))
    runner.execute(scheduler.schedule())
    scheduler.update(runner.result())
    runner.execute(scheduler.schedule())  # reads all of a's blocks
    scheduler.abort("a")
    scheduler.add(make_request("b", prompt_of(12, 5), max_tokens=4, ignore_eos=True))
    plan = scheduler.schedule()
    if plan is not None:
        runner.execute(plan)
    scheduler.update(runner.result())
    return plan


def test_a_freed_block_is_quarantined_while_a_step_in_flight_uses_it():
    scheduler = make_scheduler(num_blocks=4)
    assert reuse_blocks_of_an_aborted_request(scheduler) is None
    assert (scheduler.pools[0].num_free, scheduler.pools[0].num_quarantined) == (4, 0)
    assert scheduled(scheduler.schedule()) == {"b": 12}


def test_without_quarantine_a_step_in_flight_reads_another_requests_pages():
    scheduler = make_scheduler(num_blocks=4)
    scheduler.pools._pools = (UnguardedPool(4),)
    with pytest.raises(DeviceError, match=r"a: position . was overwritten"):
        reuse_blocks_of_an_aborted_request(scheduler)


def test_a_freed_block_is_quarantined_until_the_newest_step_in_flight_ends():
    scheduler = make_scheduler(num_blocks=2, max_steps_in_flight=2)
    scheduler.add(make_request("a", (1,), max_tokens=7, ignore_eos=True))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.abort("a")
    assert (scheduler.pools[0].num_free, scheduler.pools[0].num_quarantined) == (1, 1)
    scheduler.update(output_of(first, (5,)))
    assert (scheduler.pools[0].num_free, scheduler.pools[0].num_quarantined) == (1, 1)
    scheduler.update(output_of(second, (5,)))
    assert (scheduler.pools[0].num_free, scheduler.pools[0].num_quarantined) == (2, 0)


def test_a_step_that_fails_before_an_older_step_frees_no_block_of_the_older_step():
    scheduler = make_scheduler(num_blocks=2)
    scheduler.add(make_request("a", (1,), max_tokens=7, ignore_eos=True))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.fail_step(second, StepError("launch", step_id=1, req_ids=("a",)))
    assert (scheduler.pools[0].num_free, scheduler.pools[0].num_quarantined) == (1, 1)
    scheduler.update(output_of(first, (5,)))
    assert (scheduler.pools[0].num_free, scheduler.pools[0].num_quarantined) == (2, 0)


def test_preemption_takes_the_last_arrival_and_resumes_it_first():
    scheduler = make_scheduler(num_blocks=12, max_num_batched_tokens=64, max_steps_in_flight=1)
    requests = {
        name: make_request(name, prompt_of(16, i), max_tokens=20, ignore_eos=True)
        for i, name in enumerate("abc")
    }
    for request in requests.values():
        scheduler.add(request)
    plans = drain(scheduler, make_runner(scheduler))
    preempting = [p for p in plans if p.preempted]
    assert preempting[0].req_ids == ("a", "b"), "c gave its blocks to the older requests"
    assert [r.req_id for p in plans for r in p.resumed][-1] == "c"
    assert scheduler.num_preemptions == sum(r.num_preemptions for r in requests.values()) > 0
    for request in requests.values():
        assert request.output_token_ids == expected_output(request)[0]


def test_a_preempted_request_is_admitted_before_new_requests():
    """b arrived before c: b gave its blocks to a, and is admitted again before c."""
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=64, max_num_seqs=2)
    a, b, c = (
        make_request(name, prompt_of(11, first), max_tokens=12, ignore_eos=True)
        for first, name in enumerate("abc")
    )
    for request in (a, b, c):
        scheduler.add(request)
    plans = drain(scheduler, make_runner(scheduler))
    assert (a.num_preemptions, b.num_preemptions) == (0, 1)
    entered = [r.req_id for plan in plans for r in (*plan.resumed, *plan.new)]
    assert entered[:4] == ["a", "b", "b", "c"]
    assert b.finish_time < c.finish_time


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_abandoning_the_steps_in_flight_frees_all_their_blocks(num_in_flight):
    """Quarantined blocks are freed too: no result will report the end of their steps."""
    scheduler = make_scheduler(num_blocks=4, enable_prefix_caching=True)
    gone, running, waiting = (
        make_request(name, prompt_of(7, first), max_tokens=5, ignore_eos=True)
        for first, name in enumerate(("gone", "running", "waiting"))
    )
    for request in (gone, running, waiting):
        scheduler.add(request)
    for _ in range(num_in_flight):
        scheduler.schedule()
    scheduler.abort("gone")
    assert scheduler.pools[0].num_quarantined == 2
    error = StepError("interrupted", step_id=0)
    assert scheduler.abandon(error) == [running]
    assert scheduler.abandon(error) == [], "called again, as after an interrupt"
    assert (running.error, running.finish_reason) == (error, "error")
    check_pool(scheduler)
    assert (scheduler.pools[0].num_free, num_free_slots(scheduler)) == (4, 4)
    assert list(scheduler.waiting.values()) == list(scheduler.unfinished) == [waiting]
    plan = scheduler.schedule()
    assert (scheduled(plan), plan.finished) == ({"waiting": 7}, ())
    assert plan.epochs[0] > 0, "not the epoch of the slot's former request"


def test_a_preempted_requests_pending_token_is_dropped_and_computed_again():
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=64)
    a, b = (make_request(n, prompt_of(7), max_tokens=9, ignore_eos=True) for n in "ab")
    scheduler.add(a)
    scheduler.add(b)
    first = scheduler.schedule()
    second = scheduler.schedule()
    scheduler.update(output_of(first, (1,), (2,)))
    assert (num_pending(scheduler, a), num_pending(scheduler, b)) == (1, 1)
    assert scheduler.schedule() is None, "a waits for the blocks that b has just freed"
    assert (scheduler.num_preemptions, num_pending(scheduler, b)) == (1, 0)
    assert b.status is Status.WAITING
    scheduler.update(output_of(second, (3,), (4,)))
    assert (a.output_token_ids, b.output_token_ids) == ([1, 3], [2])
    assert scheduler.wasted_tokens == 1
    plan = scheduler.schedule()
    assert scheduled(plan) == {"a": 1}
    assert plan.preempted == (1,)
    scheduler.abort("a")
    assert scheduler.schedule() is None, "b waits for the blocks of the aborted a"
    scheduler.update(output_of(plan, (5,)))
    plan = scheduler.schedule()
    (resumed,) = plan.resumed
    assert resumed.token_ids.tolist() == [*prompt_of(7), 2]
    first_token_time = b.first_token_time
    scheduler.update(output_of(plan, (6,)))
    assert b.output_token_ids == [2, 6]
    assert b.first_token_time == first_token_time
    assert resumed.prompt_len == 7


def test_no_request_is_preempted_for_blocks_that_are_about_to_be_free():
    """c has ended: a waits for its block, which is quarantined until the step in flight ends."""
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=64)
    a = make_request("a", prompt_of(11), max_tokens=5, ignore_eos=True)
    c = make_request("c", prompt_of(3), max_tokens=1, ignore_eos=True)
    scheduler.add(a)
    scheduler.add(c)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert scheduled(second) == {"a": 1}, "a's twelfth token is its third block's last"
    scheduler.update(output_of(first, (5,), (6,)))
    assert c.output_token_ids == [6]
    assert scheduler.pools[0].num_quarantined == 1, "until the second step is over"
    assert scheduler.schedule() is None
    scheduler.update(output_of(second, (7,)))
    assert scheduled(scheduler.schedule()) == {"a": 1}
    assert scheduler.num_preemptions == 0


def test_a_request_whose_last_token_is_pending_is_not_preempted():
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=64)
    a = make_request("a", prompt_of(12), max_tokens=3, ignore_eos=True)
    c = make_request("c", prompt_of(3), max_tokens=1, ignore_eos=True)
    scheduler.add(a)
    scheduler.add(c)
    first = scheduler.schedule()  # c's last token is pending; a needs a fourth block next
    assert scheduler.schedule() is None
    assert (scheduler.num_preemptions, c.status) == (0, Status.RUNNING)
    scheduler.update(output_of(first, (5,), (6,)))
    assert scheduled(scheduler.schedule()) == {"a": 1}


def test_the_last_arrival_is_spared_if_its_last_token_is_pending():
    scheduler = make_scheduler(num_blocks=4)
    requests = {
        name: make_request(name, prompt_of(num_tokens), max_tokens=max_tokens, ignore_eos=True)
        for name, num_tokens, max_tokens in [("a", 4, 5), ("x", 4, 5), ("b", 3, 5), ("c", 4, 1)]
    }
    for request in requests.values():
        scheduler.add(request)
    first = scheduler.schedule()
    assert scheduled(first) == {"a": 4, "x": 4, "b": 3, "c": 4}
    assert scheduler.schedule() is None, "a waits for c's block, and x for b's"
    assert [name for name, r in requests.items() if r.num_preemptions] == ["b"]
    scheduler.update(output_of(first, (5,), (5,), (5,), (5,)))
    assert requests["c"].finish_reason == "length"
    assert scheduled(scheduler.schedule()) == {"a": 1, "x": 1}


@pytest.mark.parametrize(
    ("token_ids", "errors", "failed", "message"),
    [
        (((5,), (6,)), {}, {"long"}, r"'long': expected 0 tokens of step 1, got \(6,\)"),
        (((5, 6), ()), {}, {"short"}, r"'short': expected 1 tokens of step 1, got \(5, 6\)"),
        (((), ()), {}, {"short"}, r"'short': expected 1 tokens of step 1, got \(\)"),
        (((5,), ()), {0: "NaN"}, {"short"}, "'short': NaN"),
        (((5,), ()), {1: "NaN"}, {"long"}, "'long': NaN"),
        (((5,), ()), {}, set(), None),
    ],
)
def test_a_row_with_other_tokens_than_planned_fails_alone(token_ids, errors, failed, message):
    """One row decodes, the other row is in the middle of its prefill."""
    scheduler = make_scheduler(max_num_batched_tokens=10, max_steps_in_flight=1)
    requests = {
        "short": make_request("short", (5, 5), max_tokens=8, ignore_eos=True),
        "long": make_request("long", prompt_of(25), max_tokens=1, ignore_eos=True),
    }
    for request in requests.values():
        scheduler.add(request)
    scheduler.update(output_of(scheduler.schedule(), (5,), ()))
    scheduler.update(output_of(scheduler.schedule(), *token_ids, errors=errors))
    assert {name for name, r in requests.items() if r.finish_reason == "error"} == failed
    for name in failed:
        with pytest.raises(RequestError, match=message):
            raise requests[name].error
    assert requests["short"].output_token_ids == [5] * (2 - ("short" in failed))
    assert requests["long"].output_token_ids == []


def test_a_failed_row_gets_no_token_in_a_step_where_every_row_samples():
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(make_request(name, (1, 2), max_tokens=9, ignore_eos=True))
    a, b = scheduler.get("a"), scheduler.get("b")
    scheduler.update(output_of(scheduler.schedule(), (5,), (6,), errors={1: "NaN"}))
    assert (a.output_token_ids, b.output_token_ids) == ([5], [])
    assert (a.finish_reason, b.finish_reason) == (None, "error")


@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=9),
    output=st.lists(st.integers(0, 9), max_size=9),
    bounds=st.tuples(st.integers(0, 18), st.none() | st.integers(0, 18)),
)
def test_token_ids_are_prompt_then_output(prompt, output, bounds):
    request = make_request("r", tuple(prompt), max_tokens=20)
    request.output_token_ids += output
    start, end = (None if n is None else min(n, request.num_tokens) for n in bounds)
    token_ids = request.token_ids(start, end)
    assert token_ids.dtype == np.int32
    assert token_ids.tolist() == [*prompt, *output][start:end]


# --- admission -----------------------------------------------------------------------------------


def test_a_request_is_admitted_when_all_its_known_tokens_have_blocks():
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=64)
    scheduler.add(make_request("a", prompt_of(9), max_tokens=2, ignore_eos=True))
    scheduler.add(make_request("b", prompt_of(13), max_tokens=2, ignore_eos=True))
    scheduler.add(make_request("c", (1,), max_tokens=2, ignore_eos=True))
    plan = scheduler.schedule()
    assert scheduled(plan) == {"a": 9}, "b lacks a block, and c does not overtake it"
    assert scheduler.pools[0].num_free == 3


def test_a_request_that_can_never_fit_is_refused():
    scheduler = make_scheduler(num_blocks=2)
    with pytest.raises(RequestError, match=r"expected at most 8 tokens .* got up to 9"):
        scheduler.add(make_request("r", (1,) * 5, max_tokens=4))
    scheduler.add(make_request("r", (1,) * 5, max_tokens=3))


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        (((0, 33),), "spans of at most 32 tokens .*, got 33 from 0 to 33; raise max_num_batched"),
        (((30, 41),), r"within the prompt's 40 tokens, got \[\(30, 41\)\]"),
        (((5, 5),), "ascending spans"),
        (((4, 8), (6, 9)), "ascending spans"),
    ],
)
def test_spans_that_cannot_be_kept_whole_are_refused(spans, message):
    scheduler = make_scheduler()
    with pytest.raises(RequestError, match=message):
        scheduler.add(make_request("r", prompt_of(40), max_tokens=1, unsplittable=spans))
    assert not scheduler.has_unfinished_requests


def test_a_chunk_ends_before_a_span_that_it_would_cut():
    scheduler = make_scheduler(max_num_batched_tokens=10)
    spans = ((4, 12), (12, 22), (30, 31))
    scheduler.add(make_request("r", prompt_of(35), max_tokens=1, unsplittable=spans))
    plans = drain(scheduler, make_runner(scheduler))
    assert [scheduled(plan)["r"] for plan in plans] == [4, 8, 10, 10, 3]


def test_a_span_waits_for_a_step_with_room():
    scheduler = make_scheduler(max_num_batched_tokens=10, max_steps_in_flight=1)
    scheduler.add(make_request("a", prompt_of(4), max_tokens=2, ignore_eos=True))
    scheduler.add(make_request("b", prompt_of(9), max_tokens=1, unsplittable=((0, 9),)))
    rows = [scheduled(plan) for plan in drain(scheduler, make_runner(scheduler))]
    assert rows == [{"a": 4}, {"a": 1, "b": 9}]
