"""Steps that leave tokens to the next one, so that a smaller CUDA graph runs them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import LLM
from mrv1.engine import padding as padding_module
from mrv1.engine.padding import LEAST_PADDING, Padding
from mrv1.runner.cuda_graph import prompt_sizes
from tests.engine.scheduler_model import (
    drain,
    expected_output,
    make_request,
    make_runner,
    make_scheduler,
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
        work = SimpleNamespace(of=lambda _, flops=flops: SimpleNamespace(token_flops=flops))
        monkeypatch.setattr(padding_module, "StepWork", work)
        runner = SimpleNamespace(prompt_graph_sizes=tuple(prompt_sizes(8192)))
        found.append(Padding.of(runner).surplus(num_tokens))
    assert found == [of_8b, of_0_6b]
    assert LEAST_PADDING == 256


def test_an_engine_without_graphs_cuts_no_step():
    with LLM("tiny", device="cpu", num_kv_blocks=16) as llm:
        assert llm._core.runner.prompt_graph_sizes == ()
        assert Padding.of(llm._core.runner) is None


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
