"""Models under policies, against transformers' model with one mask per head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from mrv1 import ConfigError
from mrv1.calibration import PolicyModel, measure
from mrv1.device import kernel_path
from mrv1.headwise import FULL, HeadPolicy, RecallPrompt, Visible
from mrv1.kernels.registry import select_ops
from mrv1.models import DecoderModel, load_model
from tests.engine.test_int4_generation import NibbleCache
from tests.models.driver import PagedDriver
from tests.models.families import CACHE, SLIDING, tiny_checkpoint

NUM_TOKENS = 70
VOCAB_SIZE = 160


def load(path: Path, device: torch.device, dtype: torch.dtype) -> DecoderModel:
    ops = select_ops(kernel_path(device))
    return load_model(path, device=device, dtype=dtype, ops=ops, progress=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    tiny_checkpoint(path, "qwen3")
    return path


@pytest.fixture(scope="module")
def oracle(checkpoint, device) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float64, attn_implementation="eager"
    ).to(device)


@pytest.fixture(scope="module")
def model(checkpoint, device) -> PolicyModel:
    """Return one model for all policies, which therefore follow each other in its cache."""
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    return PolicyModel(load(checkpoint, device, dtype), NUM_TOKENS)


@torch.no_grad()
def masked_logits(
    oracle: PreTrainedModel,
    policy: HeadPolicy,
    tokens: list[int],
    ranges: Sequence[Sequence[int]] = (),
) -> torch.Tensor:
    """Return transformers' logits ``[len(tokens), vocab]`` under a policy.

    ``ranges``: the keys ``[lo, hi)`` that each of the first tokens sees; the others are causal.
    """
    causal = [(0, token + 1) for token in range(len(ranges), len(tokens))]
    low, high = torch.tensor([*ranges, *causal], device=oracle.device)[:, :, None].unbind(1)
    group = oracle.config.num_attention_heads // oracle.config.num_key_value_heads
    query = torch.arange(len(tokens), device=oracle.device)[:, None]
    key = query.T

    def mask(heads: tuple[Visible, ...]) -> torch.Tensor:
        masks = []
        for seen in heads:
            visible = (low <= key) & (key < high)
            if not seen.is_full:
                visible &= (key > query - seen.window) | (key < seen.sink)
            hidden = torch.zeros_like(visible, dtype=torch.float64)
            masks += [hidden.masked_fill(~visible, -torch.inf)] * group
        return torch.stack(masks)[None]

    handles = [
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs, heads=heads: (args, kwargs | {"attention_mask": mask(heads)}),
            with_kwargs=True,
        )
        for layer, heads in zip(oracle.model.layers, policy.heads, strict=True)
    ]
    try:
        ids = torch.tensor([tokens], device=oracle.device)
        return oracle(ids, use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()


SEEN = st.one_of(
    st.just(FULL), st.builds(Visible, window=st.integers(1, 40), sink=st.integers(0, 20))
)
POLICIES = st.tuples(*[st.tuples(SEEN, SEEN)] * 2).map(HeadPolicy)
TOKENS = st.lists(st.integers(3, VOCAB_SIZE - 1), min_size=NUM_TOKENS, max_size=NUM_TOKENS)


@pytest.mark.gpu
@settings(max_examples=10)
@given(policy=POLICIES, tokens=TOKENS)
def test_logits_equal_transformers_with_the_masks_of_the_policy(model, oracle, policy, tokens):
    expected = masked_logits(oracle, policy, tokens)
    logits = model.model.compute_logits(model.hidden(np.array(tokens), policy))
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.gpu
@settings(max_examples=5)
@given(
    policy=POLICIES,
    prompts=st.lists(
        st.tuples(TOKENS, st.sets(st.integers(1, NUM_TOKENS - 1), min_size=1)),
        min_size=1,
        max_size=3,
    ),
    with_text=st.booleans(),
)
def test_losses_are_means_over_all_answers_and_all_text(model, oracle, policy, prompts, with_text):
    recall, text, hits = [], [], []
    measured = []
    for tokens, answers in prompts:
        logits = masked_logits(oracle, policy, tokens).cpu()
        losses = functional.cross_entropy(
            logits[:-1], torch.tensor(tokens[1:]), reduction="none"
        ).tolist()
        for index in range(1, NUM_TOKENS):
            if index in answers:
                recall.append(losses[index - 1])
                hits.append(int(logits[index - 1].argmax()) == tokens[index])
            else:
                text.append(losses[index - 1])
        is_filler = np.array([index not in answers for index in range(NUM_TOKENS)])
        measured.append(
            RecallPrompt(
                tokens=np.array(tokens), answers=np.array(sorted(answers)), is_filler=is_filler
            )
        )
    if not text:
        with_text = False
    calls: list[None] = []
    found = measure(
        model, measured, policy, with_text=with_text, on_forward=lambda: calls.append(None)
    )
    assert found.recall == pytest.approx(np.mean(recall), abs=1e-4)
    assert found.accuracy == np.mean(hits)
    assert found.num_answers == len(recall)
    assert len(calls) == len(prompts)
    if with_text:
        assert found.text == pytest.approx(np.mean(text), abs=1e-4)
        assert found.total == found.recall + found.text
    else:
        assert found.text is None
        assert found.total == found.recall


@pytest.mark.gpu
def test_an_fp8_cache_has_scales_per_token(checkpoint, device):
    """Logits equal those of the test driver, which pages, scatters and pads differently."""
    decoder = load(checkpoint, device, torch.float32)
    tokens = np.random.default_rng(0).integers(3, VOCAB_SIZE, NUM_TOKENS)
    driver = PagedDriver(decoder, block_size=32, num_blocks=4, granularity="token")
    (expected,) = driver.logits([tokens.tolist()], None)
    model = PolicyModel(decoder, NUM_TOKENS, kv_cache_dtype="fp8_e4m3")
    logits = decoder.compute_logits(model.hidden(tokens, HeadPolicy.full(2, 2)))
    exact = PolicyModel(decoder, NUM_TOKENS).hidden(tokens, HeadPolicy.full(2, 2))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)
    assert (logits - decoder.compute_logits(exact)).abs().max() > 0.01


@torch.no_grad()
def test_a_4_bit_cache_is_that_of_transformers_rounded(checkpoint, oracle, device):
    tokens = np.random.default_rng(0).integers(3, VOCAB_SIZE, NUM_TOKENS)
    ids = torch.from_numpy(tokens)[None].to(device)
    decoder = load(checkpoint, device, torch.float32)
    model = PolicyModel(decoder, NUM_TOKENS, kv_cache_dtype="int4")
    logits = decoder.compute_logits(model.hidden(tokens, HeadPolicy.full(2, 2))).double()
    rounded = oracle(ids, **{CACHE: NibbleCache()}).logits[0]
    # A rounding error may decide between two codes: of later tokens more than of half of them.
    errors = [(logits - each).abs().amax(1).median() for each in (rounded, oracle(ids).logits[0])]
    assert errors[0] < 1e-3 < 1e-2 < errors[1]


def test_heads_that_codes_cannot_store_are_refused_by_name(tmp_path):
    tiny_checkpoint(tmp_path, "qwen3", head_dim=48)
    decoder = load(tmp_path, torch.device("cpu"), torch.float32)
    with pytest.raises(ConfigError, match=r"multiple of 32 dimensions with 'int4', got 48"):
        PolicyModel(decoder, NUM_TOKENS, kv_cache_dtype="int4")


def test_layers_keep_their_own_windows(tmp_path):
    oracle = tiny_checkpoint(tmp_path, "qwen3", **SLIDING["qwen3"]).double()
    decoder = load(tmp_path, torch.device("cpu"), torch.float64)
    assert decoder.config.layer_windows == (-1, 24)
    tokens = list(range(3, 3 + NUM_TOKENS))
    own = HeadPolicy(((FULL, Visible(9)), (Visible(24), Visible(24))))
    expected = masked_logits(oracle, own, tokens)
    policy = HeadPolicy(((FULL, Visible(9)), (FULL, FULL)))
    hidden = PolicyModel(decoder, NUM_TOKENS).hidden(np.array(tokens), policy)
    torch.testing.assert_close(decoder.compute_logits(hidden), expected, rtol=0, atol=1e-4)


def test_wrong_lengths_and_policies_are_refused(model):
    with pytest.raises(ConfigError, match=r"num_tokens: expected 1 to 512, .* got 513"):
        PolicyModel(model.model, 513)
    with pytest.raises(ConfigError, match=r"tokens: expected \[70\], got \[71\]"):
        model.hidden(np.zeros(71, dtype=np.int64), HeadPolicy.full(2, 2))
    for wrong, message in (((3, 2), "expected 2 layers"), ((2, 3), "expected 2 KV heads, got 3")):
        with pytest.raises(ConfigError, match=message):
            model.hidden(np.zeros(70, dtype=np.int64), HeadPolicy.full(*wrong))
