"""New weights give the tokens of transformers' model with them; wrong weights change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from mrv1 import LLM, ConfigError, SamplingParams
from mrv1.config import checkpoint_dir
from mrv1.models.weights import checkpoint_tensors
from tests.models.families import random_model, tiny_checkpoint, tiny_config

PROMPTS = [[5, 9, 23, 41, 77] * 8, [11, 30]]
NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, prompt_logprobs=0)
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"

Weights = dict[str, torch.Tensor]


def make_llm(path: Path | str, **options: object) -> LLM:
    settings = {"dtype": "float32", "num_kv_blocks": 40, "max_num_seqs": 4, "max_model_len": 128}
    return LLM(str(path), **(settings | options))


def own_weights(llm: LLM) -> Weights:
    model = llm.engine.runner.model
    return checkpoint_tensors(model.config, model.weights)


def addresses(llm: LLM) -> list[int]:
    return [tensor.data_ptr() for tensor in own_weights(llm).values()]


@torch.no_grad()
def assert_equals(llm: LLM, model: PreTrainedModel) -> None:
    """Greedy tokens are transformers', and log-probabilities of the prompt within rounding."""
    model = model.to(llm.engine.runner.device)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False), strict=True):
        drawn = output.outputs[0].token_ids
        ids = torch.tensor([*prompt, *drawn], device=model.device)
        logits = model(ids[None, :-1]).logits[0]
        assert drawn == tuple(logits[len(prompt) - 1 :].argmax(-1).tolist())
        expected = logits.log_softmax(-1).gather(1, ids[1:, None])[: len(prompt) - 1, 0].tolist()
        told = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        assert [each[token].logprob for token, each in told] == pytest.approx(expected, abs=5e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "tied"),
    [("qwen2", True), ("qwen3", False)],
)
def test_new_weights_equal_transformers(tmp_path, family, tied):
    """All of them, in another dtype and with gradients; then one layer alone, then one tensor.

    Prompts are the same each time: a prefix of the old weights would give other tokens.
    """
    options = {"tie_word_embeddings": tied}
    tiny_checkpoint(tmp_path, family, **options)
    with make_llm(tmp_path) as llm:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        at = addresses(llm)
        model = random_model(tiny_config(family, **options), seed=1)
        llm.update_weights((name, p.double()) for name, p in model.named_parameters())
        assert_equals(llm, model)
        state = model.state_dict()  # a tied head is in it
        assert HEAD in state
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.mul_(1.5 if ".layers.1." in name else 1.0)
        llm.update_weights(
            {name: tensor for name, tensor in state.items() if ".layers.1." in name}, partial=True
        )
        assert_equals(llm, model)
        with torch.no_grad():
            state[Q_PROJ].neg_()
        llm.update_weights({Q_PROJ: state[Q_PROJ]}, partial=True)
        assert_equals(llm, model)
        if tied:  # under one of the two names, as safetensors' ``save_model`` writes it
            with torch.no_grad():
                state[EMBED].mul_(1.25)
            for partial in (False, True):
                one = {n: t for n, t in state.items() if n == HEAD or (not partial and n != EMBED)}
                llm.update_weights(one, partial=partial)
                assert_equals(llm, model)
        for name, tensor in state.items():  # one by one, as trainers do
            llm.update_weights({name: tensor}, partial=True)
        assert_equals(llm, model)
        assert addresses(llm) == at, "CUDA graphs hold them"


@pytest.mark.gpu
def test_the_embedded_model_equals_transformers_after_one_layers_update():
    model = AutoModelForCausalLM.from_pretrained(str(checkpoint_dir("tiny")), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".layers.2.mlp" in name:
                parameter.mul_(-2)
    changed = {n: p for n, p in model.named_parameters() if ".layers.2.mlp" in n}
    assert len(changed) == 3
    with make_llm("tiny") as llm:
        llm.update_weights(changed, partial=True)
        assert_equals(llm, model)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny_checkpoint(path, "llama", tie_word_embeddings=True)
    return path


@pytest.fixture(scope="module")
def llm(checkpoint):
    with make_llm(checkpoint, device="cpu") as llm:
        yield llm


@pytest.fixture
def new() -> Weights:
    return random_model(tiny_config("llama", tie_word_embeddings=True), seed=1).state_dict()


def test_values_are_converted_as_at_load(checkpoint, new):
    with make_llm(checkpoint, device="cpu", dtype="bfloat16") as llm:
        llm.update_weights(new)
        for name, tensor in own_weights(llm).items():
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(tensor, new[name].to(tensor.dtype)), name
            assert not tensor.requires_grad


def without(name: str) -> Callable[[Weights], object]:
    return lambda weights: {n: t for n, t in weights.items() if n != name}


def replaced(name: str, tensor: object) -> Callable[[Weights], object]:
    return lambda weights: weights | {name: tensor}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (without(NORM), rf"update_weights: {NORM}: expected a tensor for it, got none \(partial"),
        (lambda _: {}, "named_tensors: expected at least one tensor, got none"),
        (
            replaced("model.layers.2.mlp.up_proj.weight", torch.ones(2)),
            r"model.layers.2.mlp.up_proj.weight: expected the name of a tensor of the model, got",
        ),
        (
            replaced(Q_PROJ, torch.ones(64, 128)),
            rf"{Q_PROJ}: expected shape \[128, 64\], got \[64, 128\]; no weight was changed$",
        ),
        (replaced(NORM, torch.ones(64, 1)), rf"{NORM}: expected shape \[64\], got \[64, 1\]"),
        (replaced(NORM, torch.ones(64, dtype=torch.int8)), rf"{NORM}: .*, got torch.int8"),
        (replaced(NORM, torch.ones(64, dtype=torch.complex64)), ".*, got torch.complex64"),
        (replaced(NORM, np.ones(64)), rf"{NORM}: expected a plain torch.Tensor, got ndarray"),
        (
            replaced(NORM, torch.ones(64, device="meta")),
            "expected a dense tensor, got one without",
        ),
        (
            replaced(NORM, torch.ones(64).to_sparse()),
            "expected a dense tensor, got torch.sparse_c",
        ),
        (
            replaced(HEAD, torch.ones(160, 64)),
            f"{HEAD}: expected {EMBED}, to which it is tied, got",
        ),
        (replaced(HEAD, torch.ones(64)), rf"{HEAD}: expected shape \[160, 64\], got \[64\]"),
        (lambda weights: [*weights.items(), *weights.items()], f"once, got '{EMBED}' twice"),
        (lambda weights: list(weights), r"expected \(name, tensor\) pairs, got str at index 0"),
        (lambda weights: [(3, weights[NORM])], r"got a tuple of \(int, Tensor\) at index 0"),
        (lambda _: 3, r"expected a dict or an iterable of \(name, tensor\) pairs, got int"),
        (
            lambda weights: {"a": weights[NORM], "b": 1} | without(NORM)(weights),
            r"update_weights: a: expected the name .* \(and 2 more problems\); no weight was",
        ),
    ],
)
def test_a_wrong_update_changes_no_weight(llm, new, made, message):
    before = {name: tensor.clone() for name, tensor in own_weights(llm).items()}
    with pytest.raises(ConfigError, match=message) as caught:
        llm.update_weights(made(new))
    assert "\n" not in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in own_weights(llm).items())


def test_a_wrong_update_keeps_the_prefix_cache_and_a_right_one_does_not(llm, new):
    def hits() -> int:
        before = llm.metrics()["prefix_hit_tokens"]
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=1))
        return llm.metrics()["prefix_hit_tokens"] - before

    hits()
    with pytest.raises(ConfigError):
        llm.update_weights({NORM: new[NORM]})
    assert hits() > 0
    llm.update_weights({NORM: new[NORM]}, partial=True)
    assert hits() == 0


def test_an_iterator_that_fails_changes_no_weight(llm, new):
    def tensors():
        yield NORM, new[NORM]
        raise KeyError("a trainer's error")

    before = own_weights(llm)[NORM].clone()
    with pytest.raises(KeyError, match="a trainer's error"):
        llm.update_weights(tensors(), partial=True)
    assert torch.equal(own_weights(llm)[NORM], before)
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)


def test_what_a_checkpoint_has_beside_weights_is_ignored(llm, new):
    beside = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3),
        "model.layers.0.self_attn.k_scale": torch.ones(1),
    }
    llm.update_weights(new | beside)
    llm.update_weights(beside, partial=True)
    assert torch.equal(own_weights(llm)[NORM], new[NORM])


def test_after_an_interrupted_update_requests_wait_for_its_tensors(llm, new, monkeypatch):
    """Nothing is generated from weights that are half old, half new."""
    copy, names = torch.Tensor.copy_, [NORM, Q_PROJ]

    def interrupted(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if source.data_ptr() == new[Q_PROJ].data_ptr():
            raise KeyboardInterrupt
        return copy(self, source)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.update_weights({name: new[name] for name in names}, partial=True)
    with pytest.raises(RuntimeError, match=rf"got none for 2 \({NORM} ...\) since .* interrupted"):
        llm.generate(PROMPTS, GREEDY)
    llm.update_weights({Q_PROJ: new[Q_PROJ]}, partial=True)
    with pytest.raises(RuntimeError, match="got none for 1"):
        llm.generate(PROMPTS, GREEDY)
    llm.update_weights(new)
    assert_equals(llm, load(new))


def load(weights: Weights) -> PreTrainedModel:
    model = random_model(tiny_config("llama", tie_word_embeddings=True))
    model.load_state_dict(weights)
    return model
