"""Steps on a GPU: graphs against eager steps, no hidden wait, and the need for each guard."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from mrv1 import LLM, AsyncOutput, EngineConfig, HeadPolicy, SamplingParams
from mrv1.engine.block_pool import BlockPool
from mrv1.engine.core import EngineCore
from mrv1.engine.request import Request
from mrv1.headwise import FULL, Visible
from mrv1.runner.device_step import DeviceStep
from mrv1.runner.input_batch import InputBatch
from tests.forked_child import in_forked_child
from tests.models.families import tiny_checkpoint
from tests.models.test_decoder import no_waiting

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_only]

DELAY_CYCLES = 2_000_000  # about a millisecond: far longer than a step of the tiny model
SOAK_STEPS = int(os.environ.get("SOAK_STEPS", "2000"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    tiny_checkpoint(path, "qwen3", eos_token_id=2)
    return path


def make_core(
    checkpoint: Path, head_policy: HeadPolicy | None = None, **options: object
) -> EngineCore:
    config = EngineConfig(
        **(
            {
                "model": str(checkpoint), "dtype": "float32", "num_kv_blocks": 40,
                "max_num_seqs": 6, "max_num_batched_tokens": 64, "max_model_len": 256,
            }
            | options
        )
    )  # fmt: skip
    return EngineCore(config, head_policy=head_policy, progress=False)


def add_many(
    core: EngineCore,
    count: int,
    *,
    max_tokens: int = 40,
    seed: int = 0,
    features: bool = False,
    logprobs: bool = False,
) -> list[Request]:
    """Queue random requests; with ``features`` each has its own random sampling features."""
    rng = np.random.default_rng(seed)
    requests = []
    for index in range(count):
        prompt = rng.integers(3, 150, rng.integers(1, 90)).tolist()
        options = {
            "temperature": float(rng.choice([0.0, 1.0])),
            "seed": index,
            "max_tokens": int(rng.integers(1, max_tokens)),
            "stop_token_ids": rng.integers(3, 150, 3).tolist(),
        }
        if features:
            options |= random_features(rng, options["max_tokens"])
        if logprobs:
            options |= {"logprobs": int(rng.integers(0, 4)), "prompt_logprobs": 1}
        params = SamplingParams(**options)
        requests.append(core.add_request(f"{seed}-{index}", prompt, params))
    return requests


def random_features(rng: np.random.Generator, max_tokens: int) -> dict[str, object]:
    """Return a random subset of the sampling features, with random values."""
    every = {
        "top_k": int(rng.integers(1, 160)),
        "top_p": float(rng.choice([0.3, 0.9])),
        "min_p": float(rng.choice([0.02, 0.2])),
        "repetition_penalty": float(rng.choice([0.7, 1.4])),
        "frequency_penalty": float(rng.choice([-0.5, 0.5])),
        "presence_penalty": 0.8,
        "logit_bias": {int(token): 2.5 for token in set(rng.integers(0, 160, 9).tolist())},
        "allowed_token_ids": rng.integers(0, 160, 60).tolist(),
        "bad_words_token_ids": rng.integers(3, 150, (5, 1)).tolist(),
        "min_tokens": int(rng.integers(0, max_tokens)),
        "stop_token_sequences": rng.integers(3, 150, (3, 1)).tolist(),
    }
    return {name: value for name, value in every.items() if rng.random() < 0.3}


def run(core: EngineCore) -> int:
    steps = 0
    while core.scheduler.has_unfinished_requests:
        core.step()
        steps += 1
    return steps


def tokens(requests: list[Request]) -> list[list[int]]:
    assert [request.error for request in requests] == [None] * len(requests)
    return [request.output_token_ids for request in requests]


def test_graphs_and_overlap_change_no_token(checkpoint):
    """Tokens are equal whether steps are eager or captured, with one step in flight or two."""
    outputs = {}
    for overlap in (False, True):
        for cuda_graphs in (False, True):
            core = make_core(
                checkpoint, overlap=overlap, cuda_graphs=cuda_graphs, deterministic=True
            )
            requests = add_many(core, 15) + add_many(core, 16, seed=1, features=True)
            requests += add_many(core, 6, seed=2, features=True, logprobs=True)
            run(core)
            outputs[overlap, cuda_graphs] = tokens(requests)
            assert (core.metrics()["num_graph_steps"] > 0) == cuda_graphs
            core.runner.close()
    assert all(output == outputs[False, False] for output in outputs.values())


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_steady_decode_never_waits(checkpoint, cuda_graphs):
    """Between launches the only synchronisation is the wait for a result's event."""
    core = make_core(checkpoint, cuda_graphs=cuda_graphs)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    for index in range(4):
        core.add_request(str(index), [5, 6, 7 + index], params)
    for _ in range(10):
        core.step()
    with no_waiting():
        for _ in range(30):
            core.step()
    assert core.metrics()["num_running_requests"] == 4
    run(core)
    core.runner.close()


def test_no_kernel_is_compiled_while_requests_run(checkpoint):
    """Chunked prompts of all lengths, alone and batched with decodes; decodes down to one row."""
    core = make_core(checkpoint, max_num_seqs=40, num_kv_blocks=300)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    for index in range(4):
        core.add_request(str(index), [5, 6, 7 + index], params)
    for _ in range(10):
        core.step()
    compiled = core.metrics()["num_compilations"]
    add_many(core, 60, features=True)
    run(core)
    assert core.metrics()["num_compilations"] == compiled
    core.runner.close()


@torch.inference_mode()
def poison(captured: list[tuple[InputBatch, torch.Tensor]]) -> None:
    """Overwrite the tensors that graphs have written, on the stream that graphs run on."""
    for batch, hidden in captured:
        attention = batch.attention
        attention.seq_lens.fill_(2**30)
        attention.input_ids.fill_(-7)
        attention.positions.fill_(2**40)
        attention.slot_mapping.fill_(2**40)
        attention.block_table.fill_(2**30)
        batch.logits_rows.fill_(2**40)
        hidden.fill_(torch.nan)


def test_a_replay_rewrites_every_tensor_that_it_reads(checkpoint, monkeypatch):
    """A graph's batch tensors and hidden states, poisoned between replays, change no token."""
    captured = []
    forward = DeviceStep.forward

    def recorded(*args, **options):
        made = forward(*args, **options)
        if torch.cuda.is_current_stream_capturing():
            captured.append(made)
        return made

    monkeypatch.setattr(DeviceStep, "forward", recorded)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    outputs = []
    for poisoned in (False, True):
        captured.clear()
        core = make_core(checkpoint)
        requests = [core.add_request(str(i), [5, 6, 7 + i], params) for i in range(3)]
        while core.scheduler.has_unfinished_requests:
            core.step()
            if poisoned:
                poison(captured)
        outputs.append(tokens(requests))
        assert core.metrics()["num_graph_steps"] > 50
        assert len(captured) >= len(core.runner._step.graphs.shapes)
        core.runner.close()
    assert outputs[0] == outputs[1]


class UnguardedPool(BlockPool):
    """Frees blocks at once, even while steps in flight still use them."""

    def free(self, blocks, *, last_step=None):
        super().free(blocks)


@pytest.mark.parametrize("guarded", [True, False])
def test_a_block_is_free_only_when_every_step_that_used_it_is_over(
    checkpoint, guarded, monkeypatch
):
    """No step on the GPU may still use a free block: another stream may overwrite it at once.

    The compute stream is held up before each step. Without the quarantine some block is free too
    early, so the quarantine is needed and this test can fail.
    """
    core = make_core(checkpoint, enable_prefix_caching=False)
    pool_type = BlockPool if guarded else UnguardedPool
    pool = pool_type(core.scheduler.pools[0].num_blocks)
    core.scheduler.pools._pools = (pool,)
    launched: list[tuple[frozenset[int], AsyncOutput]] = []
    execute = core.runner.execute

    def held_up(plan):
        torch.cuda._sleep(DELAY_CYCLES)
        output = execute(plan)
        running = core.scheduler.running.values()
        blocks = [r.block_ids[0] for r in running if r.slot in plan.slots]
        launched.append((frozenset().union(*blocks), output))
        return output

    monkeypatch.setattr(core.runner, "execute", held_up)
    add_many(core, 25)
    too_early = 0
    while core.scheduler.has_unfinished_requests:
        core.step()
        held = {b for r in core.scheduler.running.values() for b in r.block_ids[0]}
        free = set(range(pool.num_blocks)) - held - set(pool._quarantine)
        launched = [(blocks, output) for blocks, output in launched if not output.ready()]
        too_early += sum(bool(free & blocks) for blocks, _ in launched)
    assert (too_early == 0) == guarded
    core.runner.close()


def test_window_recycling_changes_no_token_on_a_gpu(checkpoint):
    """Streaming heads with rings, or with a table of all blocks: the same graphs and kernels.

    In deterministic mode, as otherwise the rounding of a matrix product depends on its batch.
    """
    policy = HeadPolicy(((Visible(24, 8), FULL), (Visible(24, 8), Visible(60))))
    outputs = {}
    for recycles in (False, True):
        core = make_core(
            checkpoint, policy, window_recycling=recycles, deterministic=True,
            enable_prefix_caching=False, num_kv_blocks=200,
        )  # fmt: skip
        requests = add_many(core, 40, max_tokens=150)
        run(core)
        outputs[recycles] = tokens(requests)
        assert all(pool.num_free == pool.num_blocks for pool in core.scheduler.pools)
        core.runner.close()
    assert outputs[True] == outputs[False]


def test_overlap_equals_no_overlap_over_a_long_run(checkpoint):
    """Requests join and stop over thousands of steps.

    In deterministic mode, as otherwise the rounding of a matrix product depends on its batch.
    """
    outputs, steps = {}, 0
    for overlap in (False, True):
        core = make_core(
            checkpoint, overlap=overlap, deterministic=True, enable_prefix_caching=False,
            num_kv_blocks=200, max_num_batched_tokens=600,
        )  # fmt: skip
        outputs[overlap] = []
        steps = rounds = 0
        while steps < SOAK_STEPS:
            requests = add_many(core, 30, max_tokens=150, seed=rounds, features=rounds % 2 == 1)
            steps += run(core)
            outputs[overlap] += tokens(requests)
            rounds += 1
        assert core.scheduler.pools[0].num_free == core.scheduler.pools[0].num_blocks
        core.runner.close()
    assert outputs[True][: len(outputs[False])] == outputs[False][: len(outputs[True])]


def test_a_forked_child_refuses_requests_and_leaves_the_gpu_to_its_parent():
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    llm = LLM("tiny", device="cuda", num_kv_blocks=16, max_model_len=64)
    (expected,) = llm.generate([[5, 6, 7]], params)

    def check() -> None:
        with pytest.raises(RuntimeError, match="got one in a forked child"):
            llm.generate([[5, 6, 7]], params)
        assert llm.metrics()["num_running_requests"] == 0
        llm.close()

    in_forked_child(check)
    (output,) = llm.generate([[5, 6, 7]], params)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    llm.close()
