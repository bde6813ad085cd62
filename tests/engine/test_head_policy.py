"""Head policies in the engine, against transformers' model with one mask per head."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from mrv1 import LLM, ConfigError, HeadPolicy, SamplingParams
from mrv1.headwise import FULL, Visible
from tests.models.families import tiny_checkpoint

NUM_TOKENS = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    tiny_checkpoint(path, "qwen3")
    return path


@pytest.fixture(scope="module")
def model(checkpoint) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float64, attn_implementation="eager"
    )


def head_masks(policy: HeadPolicy, layer: int, group: int, length: int) -> torch.Tensor:
    """Return ``[1, query heads, length, length]``, 0 where a head sees and -inf elsewhere."""
    query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    masks = []
    for seen in policy.heads[layer]:
        visible = key <= query
        if not seen.is_full:
            visible &= (query - key < seen.window) | (key < seen.sink)
        mask = torch.zeros(length, length, dtype=torch.float64).masked_fill(~visible, -torch.inf)
        masks += [mask] * group
    return torch.stack(masks)[None]


def logits_under(
    model: PreTrainedModel, policy: HeadPolicy, tokens: Sequence[int]
) -> torch.Tensor:
    """Return transformers' logits ``[tokens, vocab]``, each head masked as the policy says."""
    config = model.config
    group = config.num_attention_heads // config.num_key_value_heads

    def masked(layer: int):
        def hook(_module, args, kwargs):
            mask = head_masks(policy, layer, group, len(tokens))
            return args, kwargs | {"attention_mask": mask}

        return hook

    handles = [
        layer.self_attn.register_forward_pre_hook(masked(index), with_kwargs=True)
        for index, layer in enumerate(model.model.layers)
    ]
    try:
        with torch.no_grad():
            return model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()


def greedy_under(
    model: PreTrainedModel, policy: HeadPolicy, prompt: Sequence[int], num_tokens: int
) -> list[int]:
    """Return greedy tokens under a policy."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(logits_under(model, policy, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def policies(model: PreTrainedModel) -> st.SearchStrategy[HeadPolicy]:
    config = model.config
    seen = st.one_of(
        st.just(FULL), st.builds(Visible, window=st.integers(1, 40), sink=st.integers(0, 20))
    )
    layer = st.tuples(*[seen] * config.num_key_value_heads)
    return st.tuples(*[layer] * config.num_hidden_layers).map(HeadPolicy)


@settings(max_examples=6)
@given(data=st.data())
def test_tokens_equal_a_model_that_masks_by_head(checkpoint, model, data):
    """Contexts shorter and longer than the windows, in chunks, batched, and as prefix hits."""
    policy = data.draw(policies(model))
    lengths = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    chunk = data.draw(st.sampled_from([7, 64]))
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 150) for _ in range(length)] for length in lengths]
    expected = [greedy_under(model, policy, prompt, NUM_TOKENS) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(
        str(checkpoint), device="cpu", dtype="float64", num_kv_blocks=32, head_policy=policy,
        max_num_batched_tokens=chunk,
    ) as llm:  # fmt: skip
        for _ in range(2):
            outputs = llm.generate(prompts, params)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        share = f"{policy.full_share:.0%} of the" if policy.full_share < 1 else "all"
        assert f"{share} heads full" in llm.describe()


@settings(max_examples=5)
@given(
    data=st.data(), chunk=st.sampled_from([7, 64]), num_blocks=st.sampled_from([7, 32]),
    lengths=st.lists(st.integers(1, 70), min_size=2, max_size=4),
)  # fmt: skip
def test_float32_logprobs_equal_a_model_that_masks_by_head(
    checkpoint, model, data, chunk, num_blocks, lengths
):
    """Prompts come in chunks, as prefix hits, and again where 7 blocks force preemption."""
    policy = data.draw(policies(model))
    shared = [random.Random(0).randrange(3, 150) for _ in range(40)]
    prompts = [[*shared, *range(3, 3 + length)][:length] for length in lengths]
    vocab_size = model.config.vocab_size
    params = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=vocab_size
    )
    with LLM(
        str(checkpoint), device="cpu", dtype="float32", num_kv_blocks=num_blocks,
        head_policy=policy, max_num_batched_tokens=chunk, max_logprobs=vocab_size,
    ) as llm:  # fmt: skip
        for output in llm.generate(prompts, params) + llm.generate(prompts, params):
            (answer,) = output.outputs
            tokens = [*output.prompt_token_ids, *answer.token_ids]
            want = logits_under(model, policy, tokens[:-1]).log_softmax(-1)[-NUM_TOKENS:]
            for row, logprobs in zip(want, answer.logprobs, strict=True):
                got = torch.tensor([logprobs[token].logprob for token in range(vocab_size)])
                torch.testing.assert_close(got.double(), row, rtol=0, atol=1e-4)


TABLES = {
    "discrete": {"per_head_ids": True},
    "uniform, skips": {"window_recycling": False},
    "uniform, masks": {"window_recycling": False, "visit_masked_pages": True},
    "discrete, masks": {"per_head_ids": True, "visit_masked_pages": True},
}


@settings(max_examples=2)
@given(data=st.data())
def test_tokens_do_not_depend_on_the_form_of_the_tables(checkpoint, model, data):
    """In chunks, batched, as prefix hits and, with 9 blocks, after preemptions."""
    policy = data.draw(policies(model))
    num_blocks = data.draw(st.sampled_from([9, 32]))
    prompts = [list(range(3, 3 + length)) for length in (60, 41, 5)]
    expected = [greedy_under(model, policy, prompt, NUM_TOKENS) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for name, options in TABLES.items():
        with LLM(
            str(checkpoint), device="cpu", dtype="float64", num_kv_blocks=num_blocks,
            head_policy=policy, max_num_batched_tokens=16, **options,
        ) as llm:  # fmt: skip
            groups = llm.kv_report()["groups"]
            assert len(groups) == (2 if "per_head_ids" in options else 1)
            assert all(group["window"] == -1 for group in groups)
            layout = llm.engine.runner.kv_cache.layers[0].layout
            assert layout.visits_masked == ("visit_masked_pages" in options)
            for _ in range(2):
                outputs = llm.generate(prompts, params)
                assert [list(each.outputs[0].token_ids) for each in outputs] == expected, name


def test_a_policy_can_come_from_a_file_and_must_fit_the_model(checkpoint, model, tmp_path):
    config = model.config
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    path = tmp_path / "policy.json"
    policy = HeadPolicy.of_ratio(layers, heads, 0.5, window=8, sink=4)
    policy.save(path)
    prompt = list(range(3, 60))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(
        str(checkpoint), device="cpu", dtype="float64", num_kv_blocks=32, head_policy=str(path)
    ) as llm:
        (output,) = llm.generate([prompt], params)
    assert list(output.outputs[0].token_ids) == greedy_under(model, policy, prompt, 8)
    for wrong, message in (
        (HeadPolicy.full(layers + 1, heads), f"expected {layers} layers"),
        (HeadPolicy.full(layers, heads + 1), f"expected {heads} KV heads"),
        (str(tmp_path / "none.json"), "head_policy: expected a rule"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(str(checkpoint), device="cpu", num_kv_blocks=32, head_policy=wrong)


def test_a_layer_with_its_own_window_keeps_that_window():
    policy = HeadPolicy.full(2, 2).within([-1, 30])
    assert policy == HeadPolicy.of_layer_windows([-1, 30], 2)
    with pytest.raises(ConfigError, match="full heads in layer 1, which has a window"):
        HeadPolicy.of_ratio(2, 2, 0.5, window=9).within([-1, 30])
