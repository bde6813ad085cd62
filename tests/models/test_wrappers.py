"""Models with images that are loaded as their text models: Gemma-3 from 4B on, and Mistral-3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, Gemma3Config, Mistral3Config

from mrv1 import LLM, ConfigError, SamplingParams
from mrv1.errors import RequestError
from mrv1.kernels.registry import select_ops
from mrv1.models import ModelConfig, ParallelContext, load_model
from mrv1.models.architectures import ARCHITECTURES, WRAPPERS
from mrv1.models.quantization.scheme import stored_name
from mrv1.multimodal import VisionEncoder
from tests.models.driver import PagedDriver
from tests.models.families import expected_logits, fill_randomly
from tests.models.quantizing_cache import fp8_logits
from tests.thread_ranks import on_ranks

PROMPT = [(7 * i) % 160 for i in range(40)]
TEXT: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 512, "eos_token_id": 2,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
KINDS = ["full_attention", "sliding_attention", "sliding_attention"]
CASES: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        Gemma3Config,
        {"layer_types": KINDS, "sliding_window": 9, "query_pre_attn_scalar": 24},
        {
            "mm_tokens_per_image": 4, "eos_token_id": [2, 5], "tie_word_embeddings": True,
            "image_token_id": 150, "image_token_index": 150,
        },
    ),
    "mistral3": (
        Mistral3Config,
        {"model_type": "mistral", "sliding_window": 24, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
            "original_max_position_embeddings": 64}},
        {"tie_word_embeddings": False},
    ),
    "mistral3-ministral": (
        Mistral3Config,
        {"model_type": "ministral", "sliding_window": 9, "layer_types": KINDS},
        {"tie_word_embeddings": False},
    ),
}  # fmt: skip


def checkpoint(path: Path, case: str, **settings: Any) -> Any:
    """Write a random checkpoint, and return transformers' model in float64."""
    kind, text, options = CASES[case]
    text = text | settings
    vision = VISION if case == "gemma3" else VISION | {"model_type": "pixtral", "head_dim": 16}
    config = kind(text_config=TEXT | text, vision_config=vision, dtype="float32", **options)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    fill_randomly(model, 0).save_pretrained(path)
    return model.double()


def logits(path: Path, chunk: int | None, parallel: ParallelContext | None = None, **cache: Any):
    model = load_model(
        path, device="cpu", dtype=torch.float64, ops=select_ops("reference"), progress=False,
        parallel=parallel,
    )  # fmt: skip
    return PagedDriver(model, block_size=16, num_blocks=8, **cache).logits([PROMPT], chunk)[0]


@pytest.mark.parametrize("case", CASES)
def test_text_is_that_of_transformers(tmp_path, case):
    """Logits in chunks and on ranks, over a cache of fp8, and 64 tokens with a cached prefix."""
    model = checkpoint(tmp_path, case)
    expected, rounded = expected_logits(model, PROMPT), fp8_logits(model, PROMPT)
    for chunk in (7, None):
        torch.testing.assert_close(logits(tmp_path, chunk), expected, rtol=0, atol=1e-4)
    for found in on_ranks(2, lambda parallel: logits(tmp_path, 24, parallel)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    found = logits(tmp_path, None, granularity="token")
    assert (found - rounded).abs().mean() < 1e-3 * rounded.std()
    with LLM(tmp_path, dtype="float64", device="cpu", num_kv_blocks=64, block_size=16) as llm:
        tokens, cached = (
            list(llm.generate([PROMPT], greedy(count))[0].outputs[0].token_ids)
            for count in (64, 8)
        )
        assert llm.metrics()["prefix_hit_tokens"] == 32
    expected = expected_logits(model, PROMPT + tokens)[len(PROMPT) - 1 : -1].argmax(-1)
    assert tokens == expected.tolist()
    assert cached == tokens[:8]


@pytest.mark.parametrize("case", CASES)
def test_names_are_those_of_a_checkpoint_or_of_a_model_in_memory(tmp_path, case):
    model = checkpoint(tmp_path / "own", case)
    names = load_file(tmp_path / "own" / "model.safetensors").keys()
    assert any(name.startswith("language_model.model.layers.") for name in names)
    other = tmp_path / "other"
    other.mkdir()
    state = {name: each.float().contiguous() for name, each in model.state_dict().items()}
    if case == "gemma3":
        del state["lm_head.weight"]  # the embedding itself
    assert any(name.startswith("model.language_model.layers.") for name in state)
    save_file(state, other / "model.safetensors", metadata={"format": "pt"})
    (other / "config.json").write_text((tmp_path / "own" / "config.json").read_text())
    expected = expected_logits(model, PROMPT)
    torch.testing.assert_close(logits(other, None), expected, rtol=0, atol=1e-4)
    with LLM(tmp_path / "own", dtype="float64", device="cpu", num_kv_blocks=64) as llm:
        before = llm.generate([PROMPT], greedy(8))[0].outputs[0].token_ids
        llm.update_weights({"model.language_model.norm.weight": torch.zeros(64)}, partial=True)
        llm.update_weights(state)
        assert llm.generate([PROMPT], greedy(8))[0].outputs[0].token_ids == before


def test_what_wrappers_say_of_their_text_models(tmp_path):
    checkpoint(tmp_path, "gemma3")
    config = ModelConfig.from_pretrained(tmp_path, generation_config=None)
    assert (config.architecture, config.vision) == ("Gemma3ForCausalLM", None)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2, 5)
    assert config.wrapper == WRAPPERS["Gemma3ForConditionalGeneration"]
    for wrapper in WRAPPERS.values():
        assert set(wrapper.texts) <= ARCHITECTURES.keys()


def test_a_head_of_its_own_is_read_although_the_wrapper_has_none_to_tell(tmp_path):
    """The default of Mistral-3 ties the head, and that of its text model does not."""
    checkpoint(tmp_path, "mistral3")
    content = json.loads((tmp_path / "config.json").read_text())
    del content["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert not ModelConfig.from_pretrained(tmp_path).tie_word_embeddings


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("gemma3", "encoder mrv1 has, got gemma3: .* as bidirectional multimodal items"),
        ("mistral3", "encoder mrv1 has, got mistral3: .* as multimodal items"),
    ],
)
def test_encoders_are_refused_by_name(tmp_path, case, message):
    checkpoint(tmp_path, case)
    with pytest.raises(ConfigError, match=message):
        VisionEncoder(tmp_path, device="cpu")


@pytest.mark.parametrize("window", [9, 24])
@torch.no_grad()
def test_gemma_takes_features_from_outside_as_items_whose_tokens_see_each_other(tmp_path, window):
    """In layers with a window, too, in which the image fits."""
    model = checkpoint(tmp_path, "gemma3", sliding_window=window)
    image = model.config.image_token_id
    ids = [3, 4, 5, *[image] * 4, 7, 8, 9, 10, *[image] * 4, *range(11, 31)]
    pixels = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(1)).double()
    types = torch.tensor([[int(token == image) for token in ids]])
    out = model(torch.tensor([ids]), pixel_values=pixels, token_type_ids=types)
    expected = out.logits[0].log_softmax(-1)
    features = model.get_image_features(pixels)
    features = getattr(features, "pooler_output", features)
    items = [
        {"features": each.clone(), "start": start, "bidirectional": True}
        for each, start in zip(features, (3, 11), strict=True)
    ]
    options = {"mm_cache_memory_bytes": 1 << 20, "max_logprobs": -1}
    params = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=160, detokenize=False, ignore_eos=True
    )
    with LLM(
        tmp_path,
        dtype="float64",
        device="cpu",
        num_kv_blocks=64,
        max_num_batched_tokens=9,
        **options,
    ) as llm:
        prompt = {"prompt_token_ids": ids, "multimodal": items}
        (output,) = llm.generate([prompt], params)
        for at, logprobs in enumerate(output.prompt_logprobs[1:]):
            for token, logprob in logprobs.items():
                assert logprob.logprob == pytest.approx(float(expected[at, token]), abs=1e-4)
        items[1]["bidirectional"] = False
        message = "image at token 11.: bidirectional: expected True, as tokens of an image"
        with pytest.raises(RequestError, match=message):
            llm.generate(prompt, params)


@pytest.mark.parametrize(
    ("model_type", "needs"),
    [
        ("ministral3", ": it needs queries scaled by their position, which mrv1 lacks"),
        ("mistral4", ": it needs multi-head latent attention (MLA), which mrv1 lacks"),
        ("llama", ""),
    ],
)
def test_other_text_models_are_refused_by_name(tmp_path, model_type, needs):
    content = {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
        "text_config": {"model_type": model_type},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_pretrained(tmp_path)
    expected = f"text_config.model_type: expected mistral or ministral, got {model_type!r}{needs}"
    assert str(caught.value).endswith(expected)


@pytest.mark.parametrize(
    ("name", "prefix", "expected"),
    [
        ("model.layers.0.mlp", "model.", "model.layers.0.mlp"),
        ("lm_head", "model.", "lm_head"),
        ("model.layers.0.mlp", "language_model.model.", "language_model.model.layers.0.mlp"),
        ("lm_head", "language_model.model.", "language_model.lm_head"),
        ("lm_head", "model.language_model.", "lm_head"),
    ],
)
def test_names_of_modules_that_a_checkpoint_leaves_in_full_precision(name, prefix, expected):
    assert stored_name(name, prefix) == expected


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
