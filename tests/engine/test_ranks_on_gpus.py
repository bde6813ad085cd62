"""Ranks on GPUs: the tokens of one GPU, overlapped steps, and what is left when a rank fails."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
import torch

from mrv1 import LLM, SamplingParams, StepError
from mrv1.runner.compile_ahead import num_cpus
from mrv1.runner.ranks import processes
from tests.engine.test_tensor_parallel import is_alive

pytestmark = pytest.mark.multi_gpu(2)

PROMPTS = [
    {"prompt_token_ids": [3 + (7 * i + j * j) % 90 for j in range(5 + 9 * i)]} for i in range(12)
]


def make_llm(size: int, **options: object) -> LLM:
    return LLM(
        "tiny", device="cuda", dtype="float32", tensor_parallel_size=size, max_num_seqs=8,
        max_model_len=512, max_num_batched_tokens=256, kv_cache_memory_bytes=1 << 27,
        compile_processes=num_cpus(), use_tqdm_on_load=False, **options,
    )  # fmt: skip


def params(seed: int, length: int = 200) -> list[SamplingParams]:
    """Return greedy and sampled parameters, each with a length of its own."""
    rng = np.random.default_rng(seed)
    return [
        SamplingParams(
            temperature=0.0 if i % 3 == 0 else 0.8, seed=seed + i, top_p=0.9 if i % 2 else 1.0,
            max_tokens=int(rng.integers(length // 2, length)), ignore_eos=True,
        )
        for i in range(len(PROMPTS))
    ]  # fmt: skip


def tokens(llm: LLM, asked: list[SamplingParams]) -> list[tuple[int, ...]]:
    outputs = llm.generate(PROMPTS, asked, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs[0].token_ids for output in outputs]


def test_two_gpus_give_the_tokens_of_one_with_graphs_and_steps_in_flight():
    asked = params(0)
    with make_llm(1) as llm:
        expected = tokens(llm, asked)
    with make_llm(2) as llm:
        assert tokens(llm, asked) == expected
        runner = llm.engine.runner
        assert runner.num_graph_steps > 0.9 * llm.metrics()["num_steps"]
        assert runner.num_compilations == 0


def test_5000_overlapped_steps_equal_not_overlapped():
    outputs = []
    for overlap in (True, False):
        with make_llm(2, overlap=overlap) as llm:
            found, seed = [], 0
            while llm.metrics()["num_steps"] < 5000:
                found.append(tokens(llm, params(seed, 300)))
                seed += 100
            outputs.append(found)
    assert len(outputs[0]) == len(outputs[1])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("delay", [0.0, 0.01, 0.1])
def test_a_rank_that_is_killed_or_stopped_ends_the_engine(monkeypatch, number, delay):
    """Kernels of rank 0 wait for it; the next engine in the process works."""
    monkeypatch.setattr(processes, "TIMEOUT_SECONDS", 2.0)
    with make_llm(2) as llm:
        (member,) = llm.engine.runner._ranks._members
        stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True))
        next(stream)
        time.sleep(delay)
        os.kill(member.process.pid, number)
        start = time.monotonic()
        with pytest.raises(
            StepError, match=r"step \d+ .*tensor_parallel_size: rank 1: "
        ) as caught:
            for _ in stream:
                pass
        assert time.monotonic() - start < 10
        assert caught.value.device_lost
    assert not is_alive(member.process.pid)
    torch.cuda.synchronize()  # nothing waits any more
