"""deterministic=True: a token's logits are the same bits in any batch, chunk, step or cache.

With rank_invariant=True, on 1, 2, 4 and 8 ranks too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from mrv1 import ConfigError, EngineConfig, ModelRunner, SamplingParams
from mrv1.engine.core import EngineCore
from mrv1.runner.ranks import parallel_runner
from tests.engine.test_llm import random_prompts
from tests.engine.test_overlap import EOS, MAX_LEN, VOCAB, drained, run, schedules
from tests.models.families import tiny_checkpoint
from tests.thread_ranks import ThreadRanks

Schedule = list[tuple[int, list[int], SamplingParams, int | None]]

NUM_TOKENS = 12
PROMPTS = [[(5 * i * i + 3 * i + n) % 60 + 3 for i in range(n)] for n in (1, 2, 17, 40, 66)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    tiny_checkpoint(path, "qwen3")
    return path


def logits_of(
    checkpoint: Path, device: torch.device, prompts: list[list[int]], **options: object
) -> tuple[list[list[int]], torch.Tensor]:
    """Return all output tokens, and the first prompt's logits ``[output tokens, vocab]``."""
    config = EngineConfig(
        **(
            {
                "model": str(checkpoint), "device": device.type, "num_kv_blocks": 256,
                "max_num_seqs": 40, "cuda_graphs": False, "enable_prefix_caching": False,
                "deterministic": True,
            }
            | options
        )
    )  # fmt: skip
    core = EngineCore(config, progress=False)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    requests = [core.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    slots: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []
    draw = core.runner.sampler.draw

    def watched(of_step, idx_mapping, *arguments, **keywords):
        rows = (idx_mapping == requests[0].slot).nonzero().flatten()
        slots.append(rows)
        logits.append(of_step[rows].clone())
        return draw(of_step, idx_mapping, *arguments, **keywords)

    core.runner.sampler.draw = watched  # type: ignore[method-assign]
    while core.scheduler.has_unfinished_requests:
        core.step()
    core.runner.close()
    return [request.output_token_ids for request in requests], torch.cat(logits)[:NUM_TOKENS]


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 5, 8, 12, 70])
def test_logits_of_a_short_prompt_are_the_same_bits_with_a_long_prompt_in_the_batch(
    checkpoint, device, length
):
    """The choice of kernel and tiles does not depend on the longest prompt of the batch."""
    prompts = random_prompts((length, 200, 3))
    _, logits = logits_of(checkpoint, device, prompts[:1], dtype="bfloat16")
    _, beside = logits_of(checkpoint, device, prompts, dtype="bfloat16")
    assert torch.equal(beside, logits)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_the_same_bits_in_any_batch(checkpoint, device, dtype):
    """Prompts of 1 to 39 tokens (one to three blocks), none of which is cut into chunks."""
    prompts = random_prompts((37, *range(1, 40)))
    tokens, logits = logits_of(checkpoint, device, prompts, dtype=dtype)
    for count in (1, 2, 17):
        fewer, alone = logits_of(checkpoint, device, prompts[:count], dtype=dtype)
        assert fewer == tokens[:count]
        assert torch.equal(alone, logits)


def logprobs_of(
    checkpoint: Path, prompts: list[list[int]], **options: object
) -> tuple[list[object], EngineCore]:
    """Return the log-probabilities of every output, each a float of all of a token's logits."""
    config = EngineConfig(
        **(
            {
                "model": str(checkpoint), "device": "cuda", "num_kv_blocks": 256,
                "max_num_seqs": 16, "max_model_len": 300, "cuda_graphs": False,
                "enable_prefix_caching": False, "deterministic": True,
            }
            | options
        )
    )  # fmt: skip
    core = EngineCore(config, progress=False)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=2)
    for _ in range(1 + config.enable_prefix_caching):  # the second time every prompt is cached
        requests = [core.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
        while core.scheduler.has_unfinished_requests:
            core.step()
    core.runner.close()
    return [
        [(each.token_ids.tolist(), each.logprobs.tolist()) for each in request.output_logprobs]
        for request in requests
    ], core


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_logits_are_the_same_bits_in_any_chunks_with_hits_and_preemption(checkpoint):
    """Tokens are prefilled in one run and decoded in another; contexts have up to three pieces."""
    dtype = "bfloat16"
    prompts = random_prompts((150, 37, 230, 3, 90))
    want, _ = logprobs_of(checkpoint, prompts, dtype=dtype)
    assert [len(each) for each in want] == [60] * 5
    for size in (16, 50):
        got, _ = logprobs_of(checkpoint, prompts, dtype=dtype, max_num_batched_tokens=size)
        assert got == want
    got, core = logprobs_of(checkpoint, prompts, dtype=dtype, enable_prefix_caching=True)
    assert got == want
    assert core.scheduler.admission.prefix_hit_tokens >= 128
    got, core = logprobs_of(checkpoint, prompts, dtype=dtype, num_kv_blocks=24)
    assert got == want
    assert core.scheduler.num_preemptions > 0
    got, _ = logprobs_of(checkpoint, prompts[2:3], dtype=dtype)
    assert got == want[2:3]


def run_of(core: EngineCore, schedule: Schedule) -> list[tuple[object, ...]]:
    """Return what each request of a schedule got, with the log-probabilities of all its tokens."""
    asking = [(*first, replace(params, logprobs=3), end) for *first, params, end in schedule]
    return [
        (
            request.output_token_ids,
            [
                (each.token_ids.tolist(), each.logprobs.tolist())
                for each in request.output_logprobs
            ],
            request.error,
        )
        for request in run(core, asking)
    ]


@pytest.fixture(scope="module", params=[("float32", 2), ("bfloat16", 4), ("float64", 8)], ids=str)
def cores(request, tmp_path_factory) -> Iterator[tuple[EngineCore, EngineCore]]:
    """Return engines of one rank and of several, which are threads; 9 blocks to preempt."""
    dtype, size = request.param
    path = tmp_path_factory.mktemp("ranks")
    tiny_checkpoint(
        path, "qwen3", num_attention_heads=8, num_key_value_heads=4,
        vocab_size=VOCAB + 1, eos_token_id=EOS,
    )  # fmt: skip
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_runner, "Ranks", ThreadRanks)
        for ranks in (1, size):
            config = EngineConfig(
                model=str(path), device="cpu", dtype=dtype, num_kv_blocks=9, max_num_seqs=4,
                max_num_batched_tokens=24, max_model_len=MAX_LEN, deterministic=True,
                rank_invariant=True,
                speculative={"method": "ngram", "num_tokens": 3, "prompt_lookup_min": 1},
                tensor_parallel_size=ranks,
            )  # fmt: skip
            made.append(EngineCore(config, progress=False))
    yield made[0], made[1]
    for core in made:
        core.runner.close()


@settings(max_examples=max(settings.default.max_examples // 8, 2))  # each is many steps of ranks
@given(schedule=schedules())
def test_ranks_have_the_bits_of_one(cores, schedule):
    """Over chunks, batches, drafts, preemption and hits of cached prefixes."""
    one, several = cores
    expected = run_of(one, schedule)
    assert all(error is None for *_, error in expected)
    assert run_of(several, schedule) == expected
    drained(one)
    drained(several)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"head_policy": "ratio=0.5,window=32,sink=16"}),
        pytest.param(3, {"dtype": "float32"}, marks=pytest.mark.full),  # no number of leaves
    ],
)
def test_ranks_give_the_same_bits_in_any_batch(tmp_path, monkeypatch, size, options):
    """Without the bits of one rank: leaves that suit a rank's weights, and their own sum."""
    monkeypatch.setattr(parallel_runner, "Ranks", ThreadRanks)
    tiny_checkpoint(
        tmp_path, "qwen3", num_attention_heads=2 * size, num_key_value_heads=2 * size,
        intermediate_size=size * 30,
    )  # fmt: skip
    config = EngineConfig(
        **(
            {
                "model": str(tmp_path), "device": "cpu", "dtype": "bfloat16", "num_kv_blocks": 64,
                "max_num_seqs": 8, "max_model_len": 128, "deterministic": True,
                "enable_prefix_caching": False, "tensor_parallel_size": size,
            }
            | options
        )
    )  # fmt: skip
    core = EngineCore(config, progress=False)
    assert f", deterministic, {size} ranks" in core.runner.describe()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    together = [(index, prompt, params, None) for index, prompt in enumerate(PROMPTS)]
    of_all = run_of(core, together)
    assert [error for *_, error in of_all] == [None] * len(PROMPTS)
    assert [run_of(core, [(0, *rest)])[0] for _, *rest in together] == of_all
    core.runner.close()


def test_ranks_refuse_a_policy_that_mixes_heads_in_a_layer(checkpoint, monkeypatch):
    monkeypatch.setattr(parallel_runner, "Ranks", ThreadRanks)
    config = EngineConfig(
        model=str(checkpoint), num_kv_blocks=8, device="cpu", deterministic=True,
        rank_invariant=True, tensor_parallel_size=2, head_policy="ratio=0.5,window=32,sink=16",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="head_policy: expected layers of full or of streaming"):
        EngineCore(config, progress=False)


@pytest.mark.parametrize("name", ["deterministic", "rank_invariant"])
def test_a_model_loaded_without_an_option_is_refused(checkpoint, name):
    options = {"model": str(checkpoint), "num_kv_blocks": 8, "device": "cpu"}
    others = {} if name == "deterministic" else {"deterministic": True}
    runner = ModelRunner(EngineConfig(**options, **others), progress=False)
    with pytest.raises(ConfigError, match=f"model: expected one with {name}=True"):
        ModelRunner(
            EngineConfig(**options, **others | {name: True}), model=runner.model, progress=False
        )
    runner.close()
