"""More than a hundred requests through one small engine: no leak, no effect of other requests."""

from __future__ import annotations

import argparse
import gc
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mrv1 import LLM, SamplingParams
from tests.engine.soak import MAX_NUM_SEQS, Reading, Soak, check_books, growth, result
from tests.engine.test_llm import random_prompts
from tests.models.families import tiny_checkpoint

NUM_KINDS = 24
NUM_REQUESTS = 150


def num_live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


@pytest.mark.slow
def test_a_long_run_in_a_small_pool_leaks_nothing_and_changes_no_output(tmp_path):
    """Joins, aborts, stops, chunked prefill and preemption, in float64 so that no tie can flip."""
    tiny_checkpoint(tmp_path, "qwen3", sliding_window=24, use_sliding_window=True)
    source = random.Random(0)
    prompts = random_prompts(tuple(source.randint(1, 90) for _ in range(NUM_KINDS)), seed=1)
    params = [
        SamplingParams(
            temperature=source.choice([0.0, 1.0]),
            top_k=source.choice([0, 10]),
            seed=index,
            max_tokens=source.randint(1, 30),
            stop_token_ids=[source.randrange(160)],
        )
        for index in range(NUM_KINDS)
    ]
    options = {"dtype": "float64", "device": "cpu", "num_kv_blocks": 12}
    with LLM(str(tmp_path), **options) as llm:
        alone = [
            llm.generate(prompt, prompt_params)[0].outputs[0]
            for prompt, prompt_params in zip(prompts, params, strict=True)
        ]

    with LLM(str(tmp_path), max_num_seqs=6, max_num_batched_tokens=48, **options) as llm:
        kinds: dict[str, int] = {}
        llm.generate(prompts[0], params[0])
        tensors_after_warm_up = num_live_tensors()  # idle after a decode, as at the end
        num_finished = num_aborted = 0
        while len(kinds) < NUM_REQUESTS or llm.has_unfinished_requests():
            while len(kinds) < NUM_REQUESTS and source.random() < 0.5:
                kind = source.randrange(NUM_KINDS)
                kinds[llm.add_request(prompts[kind], params[kind])] = kind
            if kinds and source.random() < 0.02:
                llm.abort(source.choice(list(kinds)))
            for output in llm.step():
                got, expected = output.outputs[0], alone[kinds[output.request_id]]
                assert output.error is None
                assert got.token_ids == expected.token_ids[: len(got.token_ids)]
                if output.finished:
                    num_finished += 1
                    num_aborted += got.finish_reason == "abort"
                    if got.finish_reason != "abort":
                        assert got == expected
            if llm.metrics()["num_steps"] == 50:
                tensors_after_warm_up = num_live_tensors()
        metrics = llm.metrics()
        assert num_finished == NUM_REQUESTS
        assert num_aborted > 0
        assert metrics["num_preemptions"] > 0
        assert metrics["num_free_blocks"] == 12
        assert num_live_tensors() <= tensors_after_warm_up


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Soak]:
    soak = Soak(tmp_path_factory.mktemp("soak"), "cpu", ["plain"], num_requests=6)
    yield soak
    soak.close()


def test_cycles_of_a_soak_pass(soak: Soak):
    """Random load, level 2 of sleep, books, the fixed workload, and a rebuilt engine."""
    soak.sleep(soak.engines["plain"], 2)
    soak.cycle()
    soak.cycle()
    first, last = soak.readings
    assert last.num_requests == 12
    assert last.num_tensors <= first.num_tensors


@pytest.mark.slow
def test_a_cycle_of_every_engine_passes(tmp_path: Path):
    soak = Soak(tmp_path, "cpu")
    soak.cycle()
    soak.close()


@pytest.mark.parametrize("book", ["slots not free", "blocks not free", "feature rows lost"])
def test_the_books_of_a_soak_find_what_is_lost(soak: Soak, book: str, monkeypatch):
    llm = soak.engines["plain"]
    scheduler = llm.engine.scheduler
    check_books(llm)
    if book == "slots not free":
        monkeypatch.setattr(scheduler._slots, "free", [*range(MAX_NUM_SEQS - 1)])
    elif book == "blocks not free":
        monkeypatch.setattr(scheduler.pools[0], "num_blocks", scheduler.pools[0].num_blocks + 1)
    else:
        monkeypatch.setattr(scheduler.features, "num_rows", scheduler.features.num_rows + 1)
    with pytest.raises(AssertionError, match=f"'{book}': 1"):
        check_books(llm)


def test_the_readings_of_a_soak_are_no_leak(soak: Soak, monkeypatch):
    first = soak.measure(0.0)
    monkeypatch.setattr(soak, "readings", [*soak.readings, *(replace(first) for _ in range(1000))])
    assert abs(soak.measure(0.0).num_objects - first.num_objects) < 100


def test_the_result_of_a_soak_has_its_counts_and_every_tenth_reading(soak: Soak, monkeypatch):
    first = soak.measure(0.0)
    readings = [replace(first, seconds=float(cycle)) for cycle in range(25)]
    monkeypatch.setattr(soak, "readings", readings)
    found = growth(readings)
    options = argparse.Namespace(
        seconds=8.0, engines=["plain"], seed=3, device="cpu", commit="abc"
    )
    written = json.loads(json.dumps(result(soak, found, options)))
    (only,) = written["results"]
    assert (written["commit"], written["device"]["name"]) == ("abc", "cpu")
    assert (only["requests"], only["cycles"]) == (soak.num_requests, 25)
    assert [reading["seconds"] for reading in only["readings"]] == [0.0, 10.0, 20.0]
    assert (only["first_third"], only["last_third"]) == (found.first, found.last)
    assert only["problems"] == found.problems


def test_a_soak_tells_growth_from_noise():
    """A leak of one object, or one percent of time, a cycle is found; a busy moment is not."""
    base = Reading(
        seconds=0.0,
        num_requests=0,
        fixed_seconds=1.0,
        resident_bytes=10**9,
        device_bytes=0,
        num_tensors=100,
        num_objects=10_000,
        num_threads=2,
        num_files=9,
    )
    noisy = [
        replace(base, fixed_seconds=1.0 + i % 3, num_objects=10_000 + i % 7) for i in range(90)
    ]
    assert growth(noisy).problems == []
    slower = [replace(base, fixed_seconds=1.0 + 0.01 * i) for i in range(90)]
    assert ["fixed_seconds" in problem for problem in growth(slower).problems] == [True]
    for name, leaked in (("num_tensors", 1), ("num_objects", 9), ("resident_bytes", 10**6)):
        leaks = [replace(base, **{name: getattr(base, name) + leaked * i}) for i in range(90)]
        assert [problem.partition(":")[0] for problem in growth(leaks).problems] == [name]
