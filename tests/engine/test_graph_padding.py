"""How many prompt tokens a step has: sizes of CUDA graphs, and decodes that wait for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mrv1 import LLM, ConfigError
from mrv1.config import EngineConfig
from mrv1.engine import scheduler_config
from mrv1.engine.scheduler import Scheduler
from mrv1.engine.scheduler_config import (
    LEAST_PADDING,
    Padding,
    mixed_prefill_tokens,
    token_flops,
)
from mrv1.engine.step_budget import TokenRoom
from mrv1.runner.cuda_graph import prompt_sizes
from tests.engine.scheduler_model import (
    check_mixed,
    drain,
    expected_output,
    make_request,
    make_runner,
    make_scheduler,
    num_pending_tokens,
    prompt_of,
    scheduled,
)

SIZES = (8, 16, 32)


@given(
    sizes=st.sets(st.integers(1, 60), min_size=1, max_size=6),
    worth=st.integers(1, 20),
    num_tokens=st.integers(0, 70),
)
def test_the_surplus_is_what_no_smaller_graph_computes(sizes, worth, num_tokens):
    smaller = [size for size in sizes if size <= num_tokens]
    larger = [size for size in sizes if size >= num_tokens]
    expected = 0
    if smaller and larger and min(larger) - num_tokens >= worth:
        expected = num_tokens - max(smaller)
    assert Padding(tuple(sorted(sizes)), worth).surplus(num_tokens) == expected


@pytest.mark.parametrize(
    ("num_tokens", "of_8b", "of_0_6b"),
    [
        (500, 0, 0),  # of 512
        (1024, 0, 0),
        (1100, 76, 0),  # of 1,536: 436 tokens, 6.1 TFLOP of 8B, 0.4 of 0.6B
        (1300, 0, 0),  # 236
        (4200, 104, 104),  # of 6,144
        (9000, 0, 0),  # no graph
    ],
)
def test_padding_is_worth_a_step_by_its_operations(monkeypatch, num_tokens, of_8b, of_0_6b):
    found = []
    for flops in (14_000_000_000, 880_000_000):
        monkeypatch.setattr(scheduler_config, "token_flops", lambda _, flops=flops: flops)
        runner = SimpleNamespace(prompt_graph_sizes=tuple(prompt_sizes(8192)))
        found.append(Padding.for_runner(runner).surplus(num_tokens))
    assert found == [of_8b, of_0_6b]
    assert LEAST_PADDING == 256


def test_an_engine_without_graphs_cuts_no_step():
    with LLM("tiny", device="cpu", num_kv_blocks=16) as llm:
        runner = llm.engine.runner
        assert runner.prompt_graph_sizes == ()
        assert Padding.for_runner(runner) is None
        assert mixed_prefill_tokens(runner.config, runner) is None
        model = runner.model_config
        q_size, kv_size = (n * model.head_dim for n in (model.num_q_heads, model.num_kv_heads))
        of_a_layer = model.hidden_size * (2 * q_size + 2 * kv_size + 3 * model.intermediate_size)
        assert token_flops(runner) == 2 * model.num_layers * of_a_layer
    with LLM("tiny", device="cpu", num_kv_blocks=16, max_mixed_prefill_tokens=5) as llm:
        assert llm.engine.scheduler._config.max_mixed_prefill_tokens == 5


@pytest.mark.parametrize(
    ("flops", "budget", "expected"),
    [
        (14_000_000_000, 8192, 1024),  # 8B: 4 TFLOP are 285 tokens
        (880_000_000, 8192, 4096),  # 0.6B: 4,545 tokens, and the next graph has 6,144
        (880_000_000, 2048, 2048),  # no limit
        (14_000_000_000, 700, 700),
    ],
)
def test_decodes_wait_for_a_graph_of_four_tflop_or_1024_tokens(
    monkeypatch, flops, budget, expected
):
    monkeypatch.setattr(scheduler_config, "token_flops", lambda _: flops)
    runner = SimpleNamespace(prompt_graph_sizes=tuple(prompt_sizes(budget)))
    config = EngineConfig(model="tiny", max_num_batched_tokens=budget)
    assert mixed_prefill_tokens(config, runner) == expected
    assert mixed_prefill_tokens(replace(config, max_mixed_prefill_tokens=99), runner) == 99


def test_a_wrong_limit_names_itself():
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(ConfigError, match="max_mixed_prefill_tokens: expected an integer >="):
            EngineConfig(model="tiny", max_mixed_prefill_tokens=wrong)


@given(
    num_tokens=st.integers(1, 40),
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    least=st.integers(1, 12),
)
@example(num_tokens=3, counts=[8, 5], least=5)
def test_chunks_get_the_tokens_of_a_step_and_the_first_its_least(num_tokens, counts, least):
    room, taken = TokenRoom(num_tokens), 0
    assert not room.is_full
    for number, count in enumerate(counts):
        expected = min(count, max(num_tokens - taken, 0))
        if number == 0:
            expected = max(expected, min(count, least))
        assert room.fit(count, least) == expected
        room.take(expected)
        taken += expected
        assert room.is_full == (taken >= num_tokens)


def stepper(scheduler: Scheduler) -> Callable[[], dict[str, int]]:
    """Return a function that runs a step and returns the tokens of each request in it."""
    runner = make_runner(scheduler)

    def step() -> dict[str, int]:
        plan = scheduler.schedule()
        runner.execute(plan)
        scheduler.update(runner.result())
        return scheduled(plan)

    return step


def add(scheduler: Scheduler, name: str, length: int, max_tokens: int = 1, **options: Any) -> None:
    """Queue a request with a prompt of its own."""
    prompt = prompt_of(length, ord(name[0]))
    params = {"max_tokens": max_tokens, "ignore_eos": True}
    scheduler.add(make_request(name, prompt, **params, **options))


def test_padding_holds_up_no_short_prompt_behind_a_long_one():
    scheduler = make_scheduler(
        num_blocks=60, max_num_batched_tokens=40, long_prefill_token_threshold=16,
        padding=Padding((8, 16, 24), 2),
    )  # fmt: skip
    step = stepper(scheduler)
    add(scheduler, "long", 90)
    assert step() == {"long": 16}
    add(scheduler, "short", 6)
    assert step() == {"long": 10, "short": 6}  # of 22 tokens, padded to 24, 6 wait


def test_a_long_prompt_takes_half_of_what_decodes_wait_for():
    scheduler = make_scheduler(
        num_blocks=60, max_num_batched_tokens=64, long_prefill_token_threshold=30,
        max_mixed_prefill_tokens=20,
    )  # fmt: skip
    step = stepper(scheduler)
    add(scheduler, "decodes", 4, 40)
    step()
    add(scheduler, "long", 60)
    assert step() == {"decodes": 1, "long": 20}
    add(scheduler, "short", 6)
    assert step() == {"decodes": 1, "long": 14, "short": 6}  # 10, and what is left


@pytest.mark.parametrize("lacks", ["a prefix", "blocks", "urgency", "turns"])
def test_tokens_that_no_step_could_compute_do_not_lift_the_limit(lacks):
    """Where 40 tokens wait that count, a step has all that it can hold."""
    options = {
        "a prefix": {"enable_prefix_caching": True},
        "blocks": {"num_blocks": 20},
        "urgency": {"scheduling_policy": "priority", "max_num_seqs": 2},
        "turns": {"long_prefill_token_threshold": 5, "num_blocks": 60},
    }[lacks]
    scheduler = make_scheduler(
        **{"num_blocks": 40} | options, max_num_batched_tokens=32, max_mixed_prefill_tokens=10
    )
    step = stepper(scheduler)
    if lacks == "a prefix":
        add(scheduler, "chat", 28)
        step()
    add(scheduler, "decodes", 4, 40)
    step()
    if lacks == "a prefix":
        add(scheduler, "chat again", 40)  # 28 of them are known
        assert step() == {"decodes": 1, "chat again": 10}
    elif lacks == "blocks":
        add(scheduler, "a", 30)
        assert step() == {"decodes": 1, "a": 10}
        add(scheduler, "b", 70)
        assert step() == {"decodes": 1, "a": 10}
    elif lacks == "urgency":
        add(scheduler, "later", 40, priority=1)
        add(scheduler, "urgent", 20, priority=0)
        assert step() == {"decodes": 1, "urgent": 10}
    else:
        add(scheduler, "long", 90)
        assert step() == {"decodes": 1, "long": 5}
        add(scheduler, "a", 5)
        add(scheduler, "b", 5)
        add(scheduler, "c", 5)
        assert step() == {"decodes": 1, "long": 5, "a": 5}


def test_the_newest_chunks_wait_and_keep_a_block():
    scheduler = make_scheduler(max_num_batched_tokens=40, padding=Padding(SIZES, 4))
    runner = make_runner(scheduler)
    for name, length in (("a", 10), ("b", 6), ("c", 9), ("d", 2)):
        scheduler.add(make_request(name, prompt_of(length), max_tokens=1, ignore_eos=True))
    plan = scheduler.schedule()
    # Of 27 tokens, padded to 32, 11 wait: all of c and b but a block of each, and 4 of a.
    assert scheduled(plan) == {"a": 6, "b": 4, "c": 4, "d": 2}
    assert [len(ids) for (ids,) in plan.new_block_ids.values()] == [2, 1, 1, 1]
    runner.execute(plan)
    scheduler.update(runner.result())
    plan = scheduler.schedule()
    # Of 11 tokens 3 should wait for a graph of 8, but only c has more than a block, one token.
    assert scheduled(plan) == {"a": 4, "b": 2, "c": 5}
    runner.execute(plan)
    scheduler.update(runner.result())
    assert not scheduler.has_unfinished_requests


@pytest.mark.parametrize(
    ("budget", "spans", "worth"),
    [
        (27, ((), (), ()), 4),  # the step is full
        (40, ((), (), ()), 6),  # the padding is worth less than a step
        (40, (((0, 10),), (), ((2, 4),)), 4),  # the others cannot give 11 tokens
    ],
)
def test_a_step_stays_as_it_is(budget, spans, worth):
    scheduler = make_scheduler(max_num_batched_tokens=budget, padding=Padding(SIZES, worth))
    for name, length, unsplittable in zip("abc", (10, 8, 9), spans, strict=True):
        prompt = prompt_of(length)
        scheduler.add(make_request(name, prompt, max_tokens=1, unsplittable=unsplittable))
    assert scheduled(scheduler.schedule()) == {"a": 10, "b": 8, "c": 9}


def test_decodes_wait_for_few_tokens_unless_more_wait_than_a_step_holds():
    scheduler = make_scheduler(max_num_batched_tokens=32, max_mixed_prefill_tokens=10)
    step = stepper(scheduler)
    add(scheduler, "decodes", 20, 40)
    assert step() == {"decodes": 20}  # no decode waits
    add(scheduler, "a", 24)
    assert step() == {"decodes": 1, "a": 10}
    add(scheduler, "b", 7)
    assert step() == {"decodes": 1, "a": 10}  # 21 tokens wait
    assert step() == {"decodes": 1, "a": 4, "b": 6}
    add(scheduler, "c", 40)
    assert step() == {"decodes": 1, "b": 1, "c": 30}  # 41 tokens
    assert step() == {"decodes": 1, "c": 10}


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    depth=st.integers(1, 2),
    caching=st.booleans(),
    num_blocks=st.integers(20, 60),
)
def test_outputs_are_the_same_and_prompts_need_few_steps_more(lengths, depth, caching, num_blocks):
    plans = {}
    for padding in (None, Padding((4, 6, 8, 12, 16, 24, 32), 1)):
        scheduler = make_scheduler(
            num_blocks=num_blocks,
            max_num_batched_tokens=34,
            max_num_seqs=8,
            padding=padding,
            max_steps_in_flight=depth,
            enable_prefix_caching=caching,
        )
        requests = []
        for index, length in enumerate(lengths):
            prompt = prompt_of(length, 2 * index)
            requests.append(make_request(str(index), prompt, max_tokens=3, ignore_eos=True))
            scheduler.add(requests[-1])
        plans[padding is None] = drain(scheduler, make_runner(scheduler))
        assert [request.output_token_ids for request in requests] == [
            expected_output(request)[0] for request in requests
        ]
    with_prompts = [
        sum(plan.num_scheduled_tokens.max() > 1 for plan in plans[plain])
        for plain in (True, False)
    ]
    assert with_prompts[1] <= 2 * with_prompts[0] + 3


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), min_size=2, max_size=12),
    most=st.integers(1, 16),
    padding=st.sampled_from([None, Padding((2, 4, 8, 16), 2)]),
)
def test_no_decode_waits_for_more_tokens_than_asked_for(arrivals, most, padding):
    """Each request arrives some steps after the one before it."""
    scheduler = make_scheduler(
        num_blocks=200, max_num_seqs=6, max_num_batched_tokens=32,
        max_mixed_prefill_tokens=most, padding=padding,
    )  # fmt: skip
    runner, requests = make_runner(scheduler), []
    due = [step for step, _ in arrivals]
    while due or scheduler.has_unfinished_requests:
        while due and due[0] == 0:
            due.pop(0)
            prompt = prompt_of(arrivals[len(requests)][1], len(requests))
            name = str(len(requests))
            requests.append(make_request(name, prompt, max_tokens=6, ignore_eos=True))
            scheduler.add(requests[-1])
        if due:
            due[0] -= 1
        num_pending = num_pending_tokens(scheduler)
        plan = scheduler.schedule()
        if plan is None:
            continue
        if num_pending <= 32:
            check_mixed(scheduler, plan, most)
        runner.execute(plan)
        scheduler.update(runner.result())
    for request in requests:
        assert request.output_token_ids == expected_output(request)[0]
