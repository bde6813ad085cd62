"""What the engine can do, with models that have experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mrv1 import LLM, SamplingParams
from mrv1.runner.ranks import parallel_runner
from tests.engine.test_eight_ranks import SIZE
from tests.engine.test_eight_ranks import tokens as tokens_of_ranks
from tests.models.families import EXPERTS, random_model, save_checkpoint, tiny_config
from tests.thread_ranks import ThreadRanks

QUICK = "ernie4_5_moe"
"""The family of `make test`; others run in `make test-full`."""
FAMILIES = [
    pytest.param(family, marks=() if family == QUICK else pytest.mark.full) for family in EXPERTS
]
SHARED = [(11 * i) % 160 for i in range(34)]
PROMPTS = [[*SHARED, 5, 7], [3], [*SHARED, 9], [(3 * i + 1) % 160 for i in range(21)], SHARED]
TIGHT = {"num_kv_blocks": 9, "max_num_seqs": 4, "max_num_batched_tokens": 24}
"""Room for two of the requests: others are preempted, or wait."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp(family)
    save_checkpoint(path, tiny_config(family))
    return path


@pytest.fixture(scope="module")
def expected(checkpoint) -> list[tuple[int, ...]]:
    """Return the tokens of each prompt alone, in an engine that keeps no prefix."""
    with make_llm(checkpoint, enable_prefix_caching=False) as llm:
        return [tokens(llm, [prompt])[0] for prompt in PROMPTS]


def make_llm(checkpoint: Path, **options: object) -> LLM:
    settings = {"dtype": "float64", "device": "cpu", "num_kv_blocks": 40, "max_model_len": 128}
    return LLM(str(checkpoint), **(settings | options))


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [tuple(each.outputs[0].token_ids) for each in llm.generate(given, params)]


def test_prefixes_chunks_and_preemption_change_no_token(checkpoint, expected):
    with make_llm(checkpoint, **TIGHT) as llm:
        for _ in range(2):
            assert tokens(llm) == expected
        metrics = llm.metrics()
        assert metrics["num_preemptions"]
        assert metrics["prefix_hit_tokens"]


def test_log_probabilities_are_those_of_the_logits(checkpoint, family, expected):
    model = random_model(tiny_config(family)).double()
    params = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=3,
        prompt_logprobs=0,
    )  # fmt: skip
    with make_llm(checkpoint) as llm:
        (output,) = llm.generate({"prompt_token_ids": PROMPTS[0]}, params)
    ids = [*PROMPTS[0], *expected[0][:6]]
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    found = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    for position, (of_position, token) in enumerate(zip(found, ids[1:], strict=True)):
        value = float(logprobs[position, token])
        assert of_position[token].logprob == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize("level", [1, 2])
def test_experts_sleep_and_get_new_weights(checkpoint, expected, level):
    """After level 2, first those of all experts but one, under the names on disk."""
    state = load_file(checkpoint / "model.safetensors")
    of_one = (".experts.1.w2", ".experts.1.down", ".experts.down_proj")  # gpt-oss's are stacks
    last = next(name for name in state if any(each in name for each in of_one))
    with make_llm(checkpoint) as llm:
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            some = {name: tensor for name, tensor in state.items() if name != last}
            llm.update_weights(some, partial=True)
            with pytest.raises(RuntimeError, match=f"got none for 1 \\({last} ...\\) since sleep"):
                tokens(llm)
            llm.update_weights({last: state[last]}, partial=True)
        assert tokens(llm) == expected


def test_weights_of_an_expert_and_of_all_are_replaced_and_put_back(checkpoint, family, expected):
    """Names as on disk, of single experts mostly, and as in memory; some of them, or all."""
    state = load_file(checkpoint / "model.safetensors")
    of_one = (".experts.2.", ".experts.down_proj")  # gpt-oss's are stacks
    single = next(name for name in state if any(each in name for each in of_one))
    model = random_model(tiny_config(family))
    fused = model.state_dict()
    one = next(name for name in fused if name.endswith("experts.gate_up_proj"))
    with make_llm(checkpoint) as llm:
        for update, back in (
            ({single: -state[single]}, {single: state[single]}),
            ({one: fused[one].flip(0)}, {one: fused[one]}),
            ({one: fused[one].flip(0)}, fused),
        ):
            llm.update_weights(update, partial=True)
            assert tokens(llm) != expected
            llm.update_weights(back, partial=len(back) == 1)
            assert tokens(llm) == expected


@pytest.mark.parametrize(
    "policy",
    [
        "ratio=0.5,window=16,sink=4",
        pytest.param("ratio=1,window=32,sink=16", marks=pytest.mark.full),
    ],
)
def test_a_head_policy_sees_the_same_whatever_becomes_of_its_blocks(checkpoint, expected, policy):
    """Blocks outside a window are reused, or kept, or read and masked."""
    options = {"head_policy": policy, "max_num_batched_tokens": 24}
    found = []
    for more in ({}, {"window_recycling": False}, {"visit_masked_pages": True,
                                                   "window_recycling": False}):  # fmt: skip
        with make_llm(checkpoint, **options, **more) as llm:
            found.append(tokens(llm))
    assert found[0] == found[1] == found[2] != expected


@pytest.mark.full
def test_a_policy_with_a_wide_window_changes_nothing(checkpoint, expected):
    policy = "ratio=0.5,window=128,sink=16"
    with make_llm(checkpoint, head_policy=policy, num_kv_blocks=60) as llm:
        assert tokens(llm) == expected


# --- eight ranks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "num_kv_heads", "options"),
    [
        ("qwen3_moe", 4, {}),  # as Qwen3-30B-A3B has: pairs of ranks have the same head
        pytest.param("ernie4_5_moe", 4, {"kv_cache_dtype": "fp8_e4m3"}, marks=pytest.mark.full),
        pytest.param(
            "glm4_moe", 2, {"head_policy": "ratio=0.5,window=32,sink=16"}, marks=pytest.mark.full
        ),
        pytest.param("mixtral", 8, {}, marks=pytest.mark.full),
        pytest.param("olmoe", 8, {}, marks=pytest.mark.full),  # norms over all heads
        pytest.param(
            "ernie4_5_moe",
            4,
            {"deterministic": True, "rank_invariant": True},
            marks=pytest.mark.full,
        ),
    ],
)
def test_eight_ranks_give_the_tokens_of_one(tmp_path, monkeypatch, family, num_kv_heads, options):
    config = tiny_config(
        family, num_attention_heads=8, num_key_value_heads=num_kv_heads,
        head_dim=16, hidden_size=128, vocab_size=4 * 128 + 7,
    )  # fmt: skip
    save_checkpoint(tmp_path, config)
    monkeypatch.setattr(parallel_runner, "Ranks", ThreadRanks)
    expected = tokens_of_ranks(tmp_path, 1, **options)
    assert tokens_of_ranks(tmp_path, SIZE, **options) == expected
