"""Ranks on GPUs: the tokens of one GPU, overlapped steps, and what is left when a rank fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from mrv1 import LLM, SamplingParams, StepError
from mrv1.runner.compile_ahead import num_cpus
from mrv1.runner.ranks import processes

pytestmark = pytest.mark.multi_gpu(2)

NUM_STEPS = 5000
PROMPTS = [
    {"prompt_token_ids": [3 + (7 * i + j * j) % 90 for j in range(5 + 9 * i)]} for i in range(12)
]


def make_llm(size: int, **options: object) -> LLM:
    """Return an engine of the embedded model in float32, where rounding flips no choice."""
    return LLM(
        "tiny", device="cuda", dtype="float32", tensor_parallel_size=size, max_num_seqs=8,
        max_model_len=512, max_num_batched_tokens=128, kv_cache_memory_bytes=1 << 27,
        compile_processes=num_cpus(), use_tqdm_on_load=False, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def overlapped() -> Iterator[LLM]:
    with make_llm(2) as llm:
        yield llm


@pytest.fixture(scope="module")
def alternating() -> Iterator[LLM]:
    """Return the process's second engine of ranks, whose steps do not overlap."""
    with make_llm(2, overlap=False) as llm:
        yield llm


def tokens(llm: LLM, seed: int) -> list[tuple[int, ...]]:
    """Return what greedy and sampled requests of different lengths get."""
    rng = np.random.default_rng(seed)
    params = [
        SamplingParams(
            temperature=0.0 if i % 3 == 0 else 0.8, seed=seed + i, top_p=0.9 if i % 2 else 1.0,
            max_tokens=int(rng.integers(150, 300)), ignore_eos=True,
        )
        for i in range(len(PROMPTS))
    ]  # fmt: skip
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs[0].token_ids for output in outputs]


def test_two_gpus_give_the_tokens_of_one_with_graphs_and_steps_in_flight(overlapped):
    runner = overlapped.engine.runner
    found = tokens(overlapped, 0)
    assert runner.num_graph_steps > 0.9 * overlapped.metrics()["num_steps"]
    assert runner.num_compilations == 0
    with make_llm(1) as llm:
        assert tokens(llm, 0) == found


@pytest.mark.multi_gpu(4)
def test_four_gpus_give_the_tokens_of_one():
    with make_llm(1) as one, make_llm(4) as four:
        assert tokens(four, 0) == tokens(one, 0)


def test_5000_overlapped_steps_equal_not_overlapped(overlapped, alternating):
    before = overlapped.metrics()["num_steps"]
    seed = 100
    while overlapped.metrics()["num_steps"] - before < NUM_STEPS:
        assert tokens(overlapped, seed) == tokens(alternating, seed)
        seed += 100


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_stopped_ends_the_engine(
    overlapped, alternating, monkeypatch, number
):
    """Kernels of rank 0 wait for it, and give up."""
    monkeypatch.setattr(processes, "TIMEOUT_SECONDS", 2.0)
    check_failure(overlapped if number == signal.SIGKILL else alternating, number)


def check_failure(llm: LLM, number: signal.Signals) -> None:
    """Check that a signal to rank 1 within a step ends the engine, and every wait."""
    (member,) = llm.engine.runner._ranks._members
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    time.sleep(0.05)
    os.kill(member.process.pid, number)
    start = time.monotonic()
    with pytest.raises(StepError, match=r"step \d+ .*tensor_parallel_size: rank 1: ") as caught:
        list(stream)
    assert time.monotonic() - start < 10
    assert ("SIGKILL" in str(caught.value)) == (number == signal.SIGKILL)
    assert caught.value.device_lost
    assert member.process.poll() is not None
    with pytest.raises(StepError, match="make a new engine"):
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=4))
    torch.cuda.synchronize()  # nothing waits any more


def test_gpus_that_do_not_reach_each_other_give_the_tokens_of_one(monkeypatch, caplog):
    """By NCCL alone, which also ends when a rank does."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: False)
    with make_llm(1) as one, make_llm(2) as several:
        assert several.engine.runner.describe().endswith("2 ranks over NCCL")
        assert "(peer access): NCCL adds up and gathers" in caplog.text
        assert tokens(several, 0) == tokens(one, 0)
        assert several.engine.runner.num_graph_steps > 0.9 * several.metrics()["num_steps"]
        monkeypatch.setattr(processes, "TIMEOUT_SECONDS", 2.0)
        check_failure(several, signal.SIGKILL)


def test_an_engine_after_one_that_failed_works():
    with make_llm(2) as llm:
        assert len(tokens(llm, 0)[0]) >= 150
