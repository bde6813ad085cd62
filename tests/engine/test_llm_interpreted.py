"""Whole models on the Triton kernels: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from mrv1 import LLM, HeadPolicy, SamplingParams
from mrv1.headwise import FULL, Visible
from mrv1.kernels import reference
from tests.engine.test_bad_words import greedy_by_hand
from tests.engine.test_fp8_generation import greedy_over_a_rounded_cache
from tests.engine.test_head_policy import greedy_under
from tests.engine.test_llm import greedy_by_transformers, random_prompts
from tests.models.families import SLIDING, tiny_checkpoint
from tests.models.test_fp8_cache import HEAD_SCALES, add_tensors, scale_tensors

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

NUM_TOKENS = 8


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("qwen3", {}), ("mistral", SLIDING["mistral"]), ("ernie4_5", {"tie_word_embeddings": True})],
    ids=["qwen3", "mistral-sliding", "ernie4_5-tied"],
)
def test_greedy_tokens_equal_transformers_and_no_oracle_ran(tmp_path, device, family, overrides):
    """A chunked prefill in the same steps as decodes, through the kernels alone."""
    model = tiny_checkpoint(tmp_path, family, **overrides).to(device)
    prompts = random_prompts((3, 30))
    expected = [greedy_by_transformers(model, prompt, NUM_TOKENS) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    reference.calls.clear()
    with LLM(
        str(tmp_path), dtype="float32", max_num_seqs=4, max_num_batched_tokens=20, num_kv_blocks=16
    ) as llm:
        outputs = llm.generate(prompts, params)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert not reference.calls


def test_streaming_heads_free_pages_and_change_no_token(tmp_path, device):
    """Three roles of heads, rings that wrap more than once, full and streaming in one launch."""
    tiny_checkpoint(tmp_path, "qwen3")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, attn_implementation="eager"
    )
    policy = HeadPolicy(((Visible(8, 4), FULL), (Visible(20), Visible(8, 4))))
    prompts = random_prompts((100, 30))
    expected = [greedy_under(model, policy, prompt, NUM_TOKENS) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    reference.calls.clear()
    with LLM(
        str(tmp_path), dtype="float32", max_num_seqs=2, max_num_batched_tokens=20,
        num_kv_blocks=16, head_policy=policy, enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts, params)
        report = llm.kv_report()
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert [group["num_heads"] for group in report["groups"]] == [1, 2, 1]
    assert report["peak_held_bytes"] < 9 * report["block_bytes"], "130 tokens would be 9 blocks"
    assert not reference.calls


def test_bad_words_are_never_drawn(tmp_path, device):
    model = tiny_checkpoint(tmp_path, "qwen3").to(device)
    prompts = random_prompts((3, 30))
    free = [greedy_by_transformers(model, prompt, NUM_TOKENS) for prompt in prompts]
    banned = [[free[0][:1], free[0][2:4]], []]
    expected = [
        greedy_by_hand(model, prompt, words, match_prompt=False, num_tokens=NUM_TOKENS)
        for prompt, words in zip(prompts, banned, strict=True)
    ]
    params = [
        SamplingParams(
            temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, bad_words_token_ids=words
        )
        for words in banned
    ]
    reference.calls.clear()
    with LLM(str(tmp_path), dtype="float32", max_num_seqs=4, num_kv_blocks=16) as llm:
        outputs = llm.generate(prompts, params)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert expected[0] != free[0]
    assert not reference.calls


@pytest.mark.parametrize(("kv_scale", "budget"), [("token", 20), ("head", 20), ("quarter", 40)])
def test_an_fp8_cache_gives_the_tokens_of_transformers_over_a_rounded_cache(
    tmp_path, device, kv_scale, budget
):
    """A prefill in the same steps as decodes over e4m3 pages, through the kernels alone.

    Prompts come in chunks, except with a scale per quarter, where the bytes depend on the chunks.
    """
    model = tiny_checkpoint(tmp_path, "qwen3").to(device)
    add_tensors(tmp_path, scale_tensors(0))
    scales = HEAD_SCALES if kv_scale == "head" else None
    prompts = random_prompts((3, 30))
    quarter = 4 if kv_scale == "quarter" else None
    expected = [
        greedy_over_a_rounded_cache(model, prompt, scales, 4, quarter) for prompt in prompts
    ]
    reference.calls.clear()
    with LLM(
        str(tmp_path),
        dtype="float32",
        kv_cache_dtype="fp8_e4m3",
        kv_scale=kv_scale,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        num_kv_blocks=16,
    ) as llm:
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        )
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert not reference.calls


def test_a_seeded_draw_equals_the_reference_path(tmp_path, device, monkeypatch):
    """The same integer words of noise: of each step, kernel and oracle draw the same token."""
    tiny_checkpoint(tmp_path, "llama")
    prompt = random_prompts((10,))[0]
    params = SamplingParams(seed=7, top_k=30, top_p=0.95, max_tokens=NUM_TOKENS, ignore_eos=True)
    drawn: list[int] = []
    with LLM(
        str(tmp_path), dtype="float32", max_num_seqs=2, num_kv_blocks=8, cuda_graphs=False
    ) as llm:
        sampler = llm.engine.runner.sampler
        draw = sampler.draw

        def draw_twice(*arguments, **options):
            tokens = draw(*arguments, **options)
            with monkeypatch.context() as patch:
                patch.setattr(sampler, "_ops", reference)
                assert torch.equal(draw(*arguments, **options), tokens)
            drawn.extend(tokens.tolist())
            return tokens

        monkeypatch.setattr(sampler, "draw", draw_twice)
        (output,) = llm.generate([prompt], params)
    assert tuple(drawn[:NUM_TOKENS]) == output.outputs[0].token_ids
    assert len(set(drawn[:NUM_TOKENS])) > 1
