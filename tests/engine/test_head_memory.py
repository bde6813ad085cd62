"""Blocks that streaming heads free: counted one by one, poisoned at once, found as prefixes."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv1 import LLM, ConfigError, EngineConfig, HeadPolicy, ModelRunner, SamplingParams
from mrv1.engine import EngineCore
from mrv1.engine.request import Request
from mrv1.headwise import FULL, Visible
from mrv1.runner import SlotRequest, StepPlan
from tests.models.families import tiny_checkpoint

MAX_LEN = 2560
STREAMING = Visible(window=64, sink=16)
POLICY = HeadPolicy(((FULL, STREAMING), (STREAMING, STREAMING)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    tiny_checkpoint(path, "qwen3", max_position_embeddings=MAX_LEN)
    return path


def make_core(
    checkpoint: Path, policy: HeadPolicy | None = POLICY, **options: object
) -> EngineCore:
    """Return an engine in float64 on a CPU, where no near tie can flip with the batch."""
    given = {
        "dtype": "float64", "device": "cpu", "max_num_seqs": 4, "num_kv_blocks": 200,
        "max_num_batched_tokens": 64, "debug": True,
    } | options  # fmt: skip
    config = EngineConfig(model=str(checkpoint), **given)
    return EngineCore(config, head_policy=policy, progress=False)


def poison_free_pages(core: EngineCore) -> None:
    """Fill every page of every free block that is not cached with NaN."""
    for group, pool in enumerate(core.scheduler.pools):
        if not pool._free:
            continue
        blocks = torch.tensor(list(pool._free))
        for layer in core.runner.kv_cache.layers:
            layout = layer.layout
            for head, role in enumerate(layout.roles):
                if role.group != group:
                    continue
                starts = layout.head_base[head] + blocks * layout.block_stride[head]
                page = torch.arange(layout.block_size * layout.head_dim)
                for cache in (layer.k, layer.v):
                    cache.view(-1)[starts[:, None] + page] = torch.nan


def run(core: EngineCore, *, poisons: bool = False) -> None:
    """Step until all requests have ended."""
    while core.has_unfinished_requests:
        core.step()
        if poisons:
            poison_free_pages(core)


def random_prompt(seed: int, length: int) -> list[int]:
    return [random.Random(f"{seed}/{i}").randrange(3, 150) for i in range(length)]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def held_of(core: EngineCore, request: Request) -> list[int]:
    return [sum(block >= 0 for block in blocks) for blocks in request.block_ids]


# --- blocks in use -------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_a_steady_decode_uses_exactly_the_blocks_that_the_report_predicts(checkpoint, overlap):
    """Streaming heads hold the blocks of sink and window, full heads a block per 16 tokens.

    A step in flight keeps the blocks that it reads: with two steps the window is a token longer.
    """
    core = make_core(checkpoint, overlap=overlap, enable_prefix_caching=False)
    request = core.add_request("a", random_prompt(0, 200), greedy(150))
    report = core.kv_report()
    full, streaming = report["groups"]
    assert (full["window"], streaming["window"], streaming["sink"]) == (-1, 64, 16)
    assert (full["num_heads"], streaming["num_heads"]) == (1, 3)
    assert full["request_blocks"] is None
    lag = 1 if overlap else 0
    assert streaming["request_blocks"] == 1 + math.ceil((64 + lag - 1) / 16) + 1
    most = 0
    while core.has_unfinished_requests:
        core.step()
        if request.num_tokens < 202 or request.finished:
            continue
        in_full, in_streaming = held_of(core, request)
        slot = request.slot
        computed, landed = (
            int(x[slot])
            for x in (core.scheduler._slots.num_computed, core.scheduler._slots.num_landed)
        )
        assert in_full == math.ceil(computed / 16)
        assert in_streaming == 1 + math.ceil(computed / 16) - (landed - 63) // 16
        most = max(most, in_streaming)
        used = core.kv_report()
        assert used["held_blocks"] == [in_full, in_streaming]
        assert used["held_bytes"] == (
            in_full * full["block_bytes"] + in_streaming * streaming["block_bytes"]
        )
    assert request.error is None
    assert most == streaming["request_blocks"]
    report = core.kv_report()
    assert report["allocated_bytes"] == report["total_bytes"]
    assert report["total_bytes"] == sum(group["total_bytes"] for group in report["groups"])
    page = 2 * 16 * 32 * 8  # K and V of 16 tokens, each 32 float64 values
    assert [group["block_bytes"] for group in report["groups"]] == [page, 3 * page]
    assert report["free_share"] == 1.0


def test_the_free_share_is_a_fraction_not_a_count_of_whole_blocks(checkpoint):
    """3 free of 32 head-blocks are 0.09375, though no position has a free block for all heads."""
    core = make_core(
        checkpoint, HeadPolicy(((STREAMING, FULL), (FULL, FULL))), num_kv_blocks=8,
        enable_prefix_caching=False,
    )  # fmt: skip
    assert core.kv_report()["free_share"] == 1.0
    pools = [*core.scheduler.pools]
    assert [pool.num_blocks for pool in pools] == [8, 8]  # 3 heads and 1: 32 head-blocks
    pools[0].allocate(8 - 1)
    pools[1].allocate(8)
    assert core.kv_report()["free_share"] == 3 / 32 == 0.09375


@pytest.mark.parametrize("num_steps", [120, pytest.param(600, marks=pytest.mark.slow)])
def test_hundreds_of_steps_in_a_tiny_pool_leak_no_block(checkpoint, num_steps):
    """Joins, ends, chunked prompts, preemption; with and without overlap, poisoned at once."""
    outputs = {}
    for overlap in (False, True):
        core = make_core(
            checkpoint, overlap=overlap, num_kv_blocks=40, max_num_batched_tokens=48,
            enable_prefix_caching=False, debug=False,
        )  # fmt: skip
        source, requests, steps = random.Random(1), [], 0
        while steps < num_steps or core.has_unfinished_requests:
            if steps < num_steps and core.metrics()["num_waiting_requests"] < 2:
                prompt = random_prompt(len(requests), source.randint(1, 250))
                requests += [
                    core.add_request(f"{len(requests)}", prompt, greedy(source.randint(1, 150)))
                ]
            core.step()
            poison_free_pages(core)
            steps += 1
        assert core.metrics()["num_preemptions"] > 0
        assert core.scheduler.pools[0].num_blocks == 40
        assert all(pool.num_free == pool.num_blocks for pool in core.scheduler.pools)
        assert all(request.error is None for request in requests)
        outputs[overlap] = [request.output_token_ids for request in requests]
    shared = min(map(len, outputs.values()))
    assert outputs[True][:shared] == outputs[False][:shared]


# --- prefixes ------------------------------------------------------------------------------------


SHARED = random_prompt(5, 512)
FIRST, SECOND = ([*SHARED, *random_prompt(seed, 40)] for seed in (6, 7))
MEMORY = {
    "blocks": {},
    "plenty": {"num_kv_blocks": None},
    "asked for": {"num_kv_blocks": None, "streaming_cache_blocks": 400},
}


@pytest.fixture(scope="module")
def second_alone(checkpoint) -> list[int]:
    """Return the tokens that ``SECOND`` yields alone."""
    core = make_core(checkpoint, max_num_batched_tokens=256, enable_prefix_caching=False)
    request = core.add_request("b", SECOND, greedy(20))
    run(core)
    return request.output_token_ids


@pytest.mark.parametrize(
    ("memory", "num_before"),
    [
        ("blocks", 500),
        ("plenty", 150),  # the window of 64 is far behind, too
        ("asked for", 150),
        pytest.param("plenty", 500, marks=pytest.mark.full),
        pytest.param("asked for", 500, marks=pytest.mark.full),
    ],
)
def test_a_prefix_is_found_after_its_first_request_has_generated_hundreds_of_tokens(
    checkpoint, second_alone, memory, num_before
):
    """They share 512 tokens; the second is added when the first has generated 150 or 500 more."""
    core = make_core(
        checkpoint, max_num_batched_tokens=256, debug=False,
        **({"max_num_seqs": 1} | MEMORY[memory]),
    )  # fmt: skip
    first = core.add_request("a", FIRST, greedy(num_before + 10))
    while len(first.output_token_ids) < num_before:
        core.step()
    second = core.add_request("b", SECOND, greedy(20))
    run(core, poisons=True)
    assert second.num_cached_tokens >= 512 - 16
    assert first.error is None
    assert len(second.output_token_ids) == 20
    assert second.output_token_ids == second_alone


def test_a_prefix_whose_window_is_gone_is_computed_again(checkpoint):
    """Full heads still have its blocks, streaming heads do not: a hit needs every group."""
    prompt = random_prompt(5, 300)
    core = make_core(checkpoint, streaming_cache_blocks=0, max_num_seqs=1, num_kv_blocks=100)
    first = core.add_request("a", prompt, greedy(5))
    run(core)
    full, streaming = core.scheduler.pools
    assert streaming.num_blocks < 300 // 16 < full.num_blocks
    other = core.add_request("b", random_prompt(9, 400), greedy(5))
    run(core, poisons=True)
    again = core.add_request("c", prompt, greedy(5))
    run(core, poisons=True)
    assert again.num_cached_tokens == 0
    assert again.output_token_ids == first.output_token_ids
    assert other.error is None


# --- any policy ----------------------------------------------------------------------------------

seen = st.one_of(
    st.just(FULL), st.builds(Visible, window=st.integers(1, 90), sink=st.integers(0, 40))
)


@settings(max_examples=6)
@given(
    heads=st.tuples(*[st.tuples(seen, seen)] * 2),
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    num_blocks=st.sampled_from([12, 30]),
    budget=st.sampled_from([5, 16, 100]),
    caching=st.booleans(),
)
def test_recycling_changes_no_token(checkpoint, heads, lengths, num_blocks, budget, caching):
    """One table without recycling gives the same, with chunks, hits, preemption and any roles."""
    policy, outputs = HeadPolicy(heads), []
    for options in ({"window_recycling": False, "overlap": False}, {}):
        core = make_core(
            checkpoint, policy, num_kv_blocks=num_blocks, max_num_batched_tokens=budget,
            enable_prefix_caching=caching, max_model_len=180, **options,
        )  # fmt: skip
        requests = []
        for round_ in range(2):
            requests += [
                core.add_request(f"{round_}/{i}", random_prompt(1, n), greedy(20))
                for i, n in enumerate(lengths)
            ]
            run(core, poisons=True)
        outputs.append([request.output_token_ids for request in requests])
        assert all(request.error is None for request in requests)
        assert all(pool.num_held == pool.num_quarantined == 0 for pool in core.scheduler.pools)
    assert outputs[0] == outputs[1]


# --- sources of the policy -----------------------------------------------------------------------


def test_a_checkpoint_or_the_environment_can_set_the_policy(checkpoint, tmp_path, monkeypatch):
    """FastDeploy's fields in config.json; a file named by MRV1_HEAD_POLICY has precedence."""
    raw = json.loads((checkpoint / "config.json").read_text())
    for name in ("model.safetensors", "generation_config.json"):
        if (checkpoint / name).exists():
            (tmp_path / name).symlink_to(checkpoint / name)
    fields = {"head_wise_swa_ratio": 0.5, "window_size": 48, "sink_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(raw | fields))
    by_ratio = HeadPolicy.of_ratio(2, 2, 0.5, window=48, sink=16)
    runner = make_core(tmp_path, None).runner
    assert runner.head_policy == by_ratio
    assert "50% of the heads full, the others see 48 tokens and a sink of 16" in runner.describe()
    POLICY.save(tmp_path / "policy.json")
    monkeypatch.setenv("MRV1_HEAD_POLICY", str(tmp_path / "policy.json"))
    assert make_core(tmp_path, None).runner.head_policy == POLICY
    assert make_core(tmp_path, by_ratio).runner.head_policy == by_ratio
    monkeypatch.setenv("MRV1_HEAD_POLICY", str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match=r"head_policy: .*none\.json"):
        make_core(tmp_path, None)


def test_a_checkpoint_of_rtpurbo_gives_memory_back(checkpoint, tmp_path):
    """Its ``headwise_config`` in config.json, against the same policy given by the caller."""
    raw = json.loads((checkpoint / "config.json").read_text())
    for name in ("model.safetensors", "generation_config.json"):
        if (checkpoint / name).exists():
            (tmp_path / name).symlink_to(checkpoint / name)
    group = raw["num_attention_heads"] // 2
    fields = {
        "sink_token_num": 16, "swa_token_num": 47, "seqlen_threshold": 48,
        "0": [0] * group + [1] + [0] * (group - 1), "1": [0] * 2 * group,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw | {"headwise_config": fields}))
    seen = Visible(48, 16)
    policy = HeadPolicy(((seen, FULL), (seen, seen)))
    prompt, outputs = random_prompt(5, 300), []
    for core in (make_core(tmp_path, None), make_core(checkpoint, policy)):
        assert core.runner.head_policy == policy
        request = core.add_request("a", prompt, greedy(100))
        run(core)
        outputs.append(request.output_token_ids)
        full, streaming = core.kv_report()["groups"]
        assert (full["num_heads"], streaming["num_heads"]) == (1, 3)
        assert streaming["request_blocks"] < 300 // 16
        usage = core.kv_report()
        assert usage["peak_held_bytes"] < 25 * usage["block_bytes"]
    assert outputs[0] == outputs[1]


def test_without_recycling_all_heads_share_one_table(checkpoint):
    core = make_core(checkpoint, window_recycling=False)
    (group,) = core.kv_report()["groups"]
    assert (group["window"], group["num_heads"], group["num_blocks"]) == (-1, 4, 200)
    assert (
        "25% of the heads full, the others see 64 tokens and a sink of 16, "
        "but no block is recycled"
    ) in core.runner.describe()


def test_layers_with_their_own_windows_free_blocks_too(tmp_path):
    tiny_checkpoint(tmp_path, "mistral", sliding_window=32)
    with LLM(str(tmp_path), device="cpu", num_kv_blocks=40, enable_prefix_caching=False) as llm:
        llm.generate([[5] * 300], greedy(100))
        report = llm.kv_report()
    (group,) = report["groups"]
    assert (group["window"], group["request_blocks"]) == (32, 1 + math.ceil(32 / 16))
    in_prompt = math.ceil(300 / 16)
    assert report["peak_held_bytes"] <= (in_prompt + 1) * report["block_bytes"]


# --- pages by head -------------------------------------------------------------------------------


def test_a_caller_may_manage_the_pages_of_each_head(checkpoint):
    """FastDeploy's form: one list of block ids per KV head, each shuffled by itself."""
    prompt, num_tokens = random_prompt(3, 70), 20
    core = make_core(checkpoint)
    expected = core.add_request("a", prompt, greedy(num_tokens))
    run(core)
    config = EngineConfig(
        model=str(checkpoint), dtype="float64", device="cpu", num_kv_blocks=12, debug=True,
        per_head_ids=True,
    )  # fmt: skip
    runner = ModelRunner(config, head_policy=POLICY, progress=False)
    assert len(runner.kv_report()["groups"]) == 2
    ids = [random.Random(head).sample(range(12), 6) for head in range(2)]
    assert ids[0] != ids[1]
    tokens, computed = list(prompt), 0
    for step in range(num_tokens):
        needed, held = math.ceil(len(tokens) / 16), math.ceil(computed / 16)
        new = SlotRequest(
            req_id="a", slot=0, epoch=0, token_ids=np.array(prompt, dtype=np.int32),
            prompt_len=len(prompt), sampling_params=greedy(num_tokens), seed=0,
            max_total_tokens=len(prompt) + num_tokens,
        )  # fmt: skip
        fresh = tuple(tuple(own[held:needed]) for own in ids)
        plan = StepPlan(
            step_id=step,
            new=(new,) if step == 0 else (),
            req_ids=("a",),
            slots=np.zeros(1, dtype=np.int32),
            epochs=np.zeros(1, dtype=np.int32),
            num_scheduled_tokens=np.array([len(tokens) - computed], dtype=np.int32),
            new_block_ids={0: fresh} if needed > held else {},
        )
        computed = len(tokens)
        tokens += runner.execute(plan).result().token_ids[0]
    runner.close()
    assert tokens == [*prompt, *expected.output_token_ids]
