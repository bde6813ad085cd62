"""A live engine takes another head policy: its outputs and memory, against a new engine's."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv1 import (
    LLM,
    AsyncLLM,
    CapacityError,
    ConfigError,
    EngineConfig,
    HeadPolicy,
    ModelRunner,
    SamplingParams,
)
from mrv1.headwise import FULL, Visible
from mrv1.runner.ranks.parallel_runner import ParallelRunner
from tests.models.families import tiny_checkpoint

SEEN = Visible(48, 16)
HALF = HeadPolicy(((SEEN, FULL), (FULL, SEEN)))
FEW = HeadPolicy(((SEEN, Visible(20)), (FULL, SEEN)))
OPTIONS = {
    "device": "cpu", "dtype": "float64", "max_num_seqs": 3, "max_num_batched_tokens": 64,
    "max_model_len": 512, "kv_cache_memory_bytes": 2 << 20,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("qwen3")
    tiny_checkpoint(path, "qwen3", max_position_embeddings=512)
    return str(path)


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 150) for _ in range(length)] for length in (150, 7, 90, 210)]


def tokens(llm: LLM, seed: int) -> list[list[int]]:
    return [[*each.outputs[0].token_ids] for each in llm.generate(prompts(seed), PARAMS)]


def sizes(llm: LLM) -> dict[str, object]:
    """Return the report without what is in use."""
    report = llm.kv_report()
    return {name: value for name, value in report.items() if "held" not in name}


@settings(max_examples=3)
@given(
    policies=st.lists(st.sampled_from([None, HALF, FEW]), min_size=1, max_size=3),
    options=st.sampled_from(
        [
            {},
            {"window_recycling": False},
            {"kv_cache_dtype": "fp8_e4m3"},
            {"kv_cache_dtype": "int4"},
        ]
    ),
)
def test_a_live_engine_runs_as_a_new_one(checkpoint, policies, options):
    """Outputs, prefix hits and the division of memory, after any policies before."""
    with LLM(checkpoint, head_policy=FEW, **OPTIONS | options) as llm:
        tokens(llm, 0)
        for policy in policies:
            steps = llm.metrics()["num_generated_tokens"]
            llm.set_head_policy(policy)
            assert llm.kv_report()["held_blocks"] == [0] * len(llm.kv_report()["groups"])
            with LLM(checkpoint, head_policy=policy, **OPTIONS | options) as other:
                assert llm.describe() == other.describe()
                for seed in (0, 0, 1):
                    assert tokens(llm, seed) == tokens(other, seed)
                assert sizes(llm) == sizes(other)
                assert llm.engine.runner.head_policy == other.engine.runner.head_policy
            own = llm.metrics()
            assert own["num_generated_tokens"] == steps + 3 * 4 * 12
            assert own["prefix_hit_tokens"] > 0


def test_a_policy_is_also_a_rule_a_file_or_a_folder(checkpoint, tmp_path):
    HALF.save(tmp_path / "half.json")
    with LLM(checkpoint, **OPTIONS) as llm:
        full = tokens(llm, 0)
        for source, expected in (
            (tmp_path / "half.json", HALF),
            (str(tmp_path / "half.json"), HALF),
            ("ratio=0.5,window=48,sink=16", HeadPolicy.of_ratio(2, 2, 0.5, window=48, sink=16)),
            (None, HeadPolicy.full(2, 2)),
        ):
            llm.set_head_policy(source)
            assert llm.engine.runner.head_policy == expected
        assert tokens(llm, 0) == full


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (HeadPolicy.full(2, 4), "head_policy: expected 2 KV heads, as the model has, got 4"),
        (HeadPolicy.full(3, 2), "head_policy: expected 2 layers, as the model has, got 3"),
        ("ratio=0.5", "head_policy: expected a rule with window="),
        (Path("none.json"), "head_policy: expected a rule such as .* got 'none.json'"),
        (0.5, "head_policy: expected a HeadPolicy, a file, a folder or a rule, got 0.5"),
        ([HALF], "head_policy: expected a HeadPolicy, a file, a folder or a rule, got"),
    ],
)
def test_a_policy_for_another_model_changes_nothing(checkpoint, policy, message):
    with LLM(checkpoint, head_policy=HALF, **OPTIONS) as llm:
        before, said = tokens(llm, 0), llm.describe()
        cached = llm.metrics()["prefix_hit_tokens"]
        with pytest.raises(ConfigError, match=f"^{message}"):
            llm.set_head_policy(policy)
        assert llm.describe() == said
        assert tokens(llm, 0) == before
        assert llm.metrics()["prefix_hit_tokens"] > cached, "the prefix cache is still there"


@pytest.mark.parametrize("failure", [CapacityError, RuntimeError])
def test_a_cache_that_cannot_be_made_brings_the_former_one_back(checkpoint, monkeypatch, failure):
    """It does not fit, or a kernel does not compile for its heads."""
    from mrv1.runner import start

    with LLM(checkpoint, head_policy=HALF, **OPTIONS) as llm:
        before, said = tokens(llm, 0), llm.describe()
        divide = start.blocks_of_groups

        def too_many(step, demand):
            if step.head_groups.policy == FEW:
                raise failure("KV cache: too large")
            return divide(step, demand)

        monkeypatch.setattr(start, "blocks_of_groups", too_many)
        with pytest.raises(failure, match="too large"):
            llm.set_head_policy(FEW)
        assert llm.describe() == said
        assert tokens(llm, 0) == before
        runner = llm.engine.runner
        with pytest.raises(failure, match="too large"):
            runner.set_head_policy(FEW)
        with pytest.raises(RuntimeError, match="expected a KV cache, got none yet"):
            llm.generate(prompts(0)[0], PARAMS)
        monkeypatch.undo()
        llm.set_head_policy(FEW)
        with LLM(checkpoint, head_policy=FEW, **OPTIONS) as other:
            assert tokens(llm, 0) == tokens(other, 0)


def test_a_runner_without_a_cache_takes_a_policy_and_allocates(checkpoint):
    runner = ModelRunner(EngineConfig(model=checkpoint, **OPTIONS), allocates=False)
    assert not runner.has_kv_cache
    runner.set_head_policy(FEW)
    with LLM(checkpoint, head_policy=FEW, **OPTIONS) as llm:
        assert runner.describe() == llm.engine.runner.describe()
    assert runner.has_kv_cache
    runner.close()


def test_no_request_may_run_and_nothing_may_sleep(checkpoint):
    with LLM(checkpoint, head_policy=HALF, **OPTIONS) as llm:
        request_id = llm.add_request({"prompt_token_ids": prompts(0)[0]}, PARAMS)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="expected no unfinished requests, got 1"):
                llm.set_head_policy(FEW)
            llm.step()
        llm.abort(request_id)
        llm.sleep()
        with pytest.raises(RuntimeError, match="expected to be awake, got asleep"):
            llm.set_head_policy(FEW)
        llm.wake_up()
        llm.set_head_policy(FEW)
        llm.sleep()
        llm.wake_up()
        with LLM(checkpoint, head_policy=FEW, **OPTIONS) as other:
            assert tokens(llm, 0) == tokens(other, 0)


def test_a_listener_and_new_weights_stay(checkpoint):
    heard: list[tuple[tuple[int, ...], ...]] = []
    with LLM(checkpoint, head_policy=HALF, **OPTIONS) as llm, LLM(checkpoint, **OPTIONS) as other:
        llm.set_kv_listener(lambda ready: heard.append(ready.tokens[0].block_ids))
        hidden_size = llm.engine.runner.model_config.hidden_size
        weights = {"model.norm.weight": torch.full((hidden_size,), 0.5)}
        for engine in (llm, other):
            engine.update_weights(weights, partial=True)
            engine.set_head_policy(FEW)
        assert tokens(llm, 0) == tokens(other, 0)
        assert heard
        assert all(len(groups) == 3 for groups in heard)


def test_several_ranks_refuse_another_policy():
    runner = object.__new__(ParallelRunner)
    runner.config = EngineConfig(model="tiny", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="one rank, got tensor_parallel_size=2; make a new eng"):
        runner.set_head_policy(HALF)


def test_asyncio(checkpoint):
    async def run() -> list[int]:
        async with AsyncLLM(checkpoint, head_policy=HALF, **OPTIONS) as llm:
            await llm.set_head_policy(FEW)
            async for output in llm.generate({"prompt_token_ids": prompts(0)[0]}, PARAMS):
                last = output
            return [*last.outputs[0].token_ids]

    with LLM(checkpoint, head_policy=FEW, **OPTIONS) as llm:
        assert asyncio.run(run()) == tokens(llm, 0)[0]


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_graphs_of_another_policy():
    """On a GPU, where a step is a graph that reads tables and pages at fixed addresses."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 64 << 20}
    policy = "ratio=0.5,window=64,sink=16"
    with LLM("tiny", **options) as llm, LLM("tiny", head_policy=policy, **options) as other:
        tokens(llm, 0)
        llm.set_head_policy(policy)
        assert llm.describe() == other.describe()
        assert tokens(llm, 0) == tokens(other, 0)
        assert llm.metrics()["num_graph_steps"] > 0
