"""longrope: its factors follow from the longest context that is served; against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mrv1 import LLM, ConfigError, SamplingParams
from mrv1.kernels.registry import select_ops
from mrv1.models import ModelConfig, ParallelContext, load_model
from mrv1.models.updating import checked_update
from mrv1.models.weights import checkpoint_places, empty_weights
from tests.models.driver import PagedDriver, blocks_needed
from tests.models.families import expected_logits, tiny_checkpoint, tiny_config

ORIGINAL = 32
FACTORS: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 4 for i in range(12)],
    "long_factor": [1.0 + i for i in range(12)],
}
SETTINGS: dict[str, Any] = {
    "hidden_size": 128,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": ORIGINAL,
    "rope_parameters": FACTORS,
}
PROMPT = [(7 * i) % 160 for i in range(40)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp("phi3")
    return path, tiny_checkpoint(path, "phi3", **SETTINGS).double()


def logits(path: Path, prompt: list[int], chunk: int, **options: Any) -> torch.Tensor:
    model = load_model(
        path, device="cpu", dtype=torch.float64, ops=select_ops("reference"), progress=False,
        **options,
    )  # fmt: skip
    blocks = blocks_needed([prompt], 16)
    return PagedDriver(model, block_size=16, num_blocks=blocks).logits([prompt], chunk)[0]


@pytest.mark.parametrize("chunk", [1, 24])
@pytest.mark.parametrize(
    ("num_tokens", "options"),
    [
        (ORIGINAL, {}),
        (ORIGINAL, {"max_model_len": ORIGINAL}),
        (ORIGINAL + 1, {"max_model_len": ORIGINAL + 1}),
        (40, {"max_model_len": 512}),
    ],
)
def test_texts_of_the_context_that_is_served_equal_transformers(
    checkpoint, num_tokens, options, chunk
):
    path, model = checkpoint
    expected = expected_logits(model, PROMPT[:num_tokens])
    found = logits(path, PROMPT[:num_tokens], chunk, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_a_short_text_in_a_long_context_has_the_long_factors(checkpoint):
    """As in vLLM; transformers would take the short ones. The first tokens of a long text show."""
    path, model = checkpoint
    expected = expected_logits(model, PROMPT)[:20]
    found = logits(path, PROMPT[:20], 24, max_model_len=512)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert (found - expected_logits(model, PROMPT[:20])).abs().max() > 0.1


@pytest.mark.parametrize(
    ("max_model_len", "longest", "said"),
    [
        (None, ORIGINAL, "longrope's short factors (max_model_len is 32, at most 32)"),
        (16, 16, "longrope's short factors (max_model_len is 16, at most 32)"),
        (512, 512, "longrope's long factors for all texts (max_model_len is 512)"),
    ],
)
def test_the_start_up_line_says_which_factors_there_are(checkpoint, max_model_len, longest, said):
    options = {"dtype": "float64", "device": "cpu", "num_kv_blocks": 64}
    with LLM(checkpoint[0], max_model_len=max_model_len, **options) as llm:
        assert llm.describe().endswith(f"no CUDA graphs, {said}")
        assert llm.engine.runner.max_model_len == longest


def test_greedy_tokens_of_a_long_context_equal_those_of_transformers(checkpoint):
    path, model = checkpoint
    ids = list(PROMPT)
    for _ in range(64):
        ids.append(int(expected_logits(model, ids)[-1].argmax()))
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
    options = {"dtype": "float64", "device": "cpu", "num_kv_blocks": 64}
    with LLM(path, max_model_len=256, **options) as llm:
        for _ in range(2):  # the second time, blocks of the prompt are cached
            (output,) = llm.generate([PROMPT], params)
            assert list(output.outputs[0].token_ids) == ids[len(PROMPT) :]


@pytest.mark.parametrize("attention_factor", [None, 1.3])
def test_factors_of_cos_and_sin_equal_transformers(tmp_path, attention_factor):
    given = FACTORS | {"factor": 3.0}
    if attention_factor is not None:
        given |= {"attention_factor": attention_factor}
    model = tiny_checkpoint(tmp_path, "phi3", **SETTINGS | {"rope_parameters": given}).double()
    expected = expected_logits(model, PROMPT)
    found = logits(tmp_path, PROMPT, 40, max_model_len=512)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"short_factor": [1.0] * 11}, r"short_factor: expected 12 numbers > 0, got \[1"),
        ({"long_factor": [0.0] * 12}, r"long_factor: expected 12 numbers > 0, got \[0"),
        ({"long_factor": None}, "long_factor: expected 12 numbers > 0, got None"),
        ({"attention_factor": -1.0}, "attention_factor: expected a number > 0, got -1"),
        (
            {"original_max_position_embeddings": 1},
            "original_max_position_embeddings: expected > 1",
        ),
    ],
)
def test_wrong_settings_are_refused_and_named(changes, message):
    config = tiny_config("phi3", **SETTINGS)
    config.rope_parameters = config.rope_parameters | changes
    if "original_max_position_embeddings" in changes:
        config.original_max_position_embeddings = 1
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(config)


def test_a_context_beyond_the_model_is_refused(checkpoint):
    with pytest.raises(ConfigError, match=r"max_model_len: expected <= 512 .*, got 513"):
        LLM(checkpoint[0], max_model_len=513, device="cpu")


def test_an_update_takes_fused_tensors(checkpoint):
    """As a model of transformers in memory has them."""
    path, model = checkpoint
    config = ModelConfig.from_pretrained(path)
    weights = empty_weights(config, "meta", torch.float64)
    places = checkpoint_places(config, weights, whole=config, parallel=ParallelContext())
    state = model.state_dict()
    found = checked_update(places, state, config=config, partial=False)
    assert found.keys() == places.keys()
    qkv = [found[f"model.layers.1.self_attn.{i}_proj.weight"] for i in "qkv"]
    assert torch.equal(torch.cat(qkv), state["model.layers.1.self_attn.qkv_proj.weight"])
    name = "model.layers.0.mlp.gate_up_proj.weight"
    with pytest.raises(ConfigError, match=rf"{name}: expected a tensor of shape \[192, 128\]"):
        checked_update(places, state | {name: state[name][1:]}, config=config, partial=False)
