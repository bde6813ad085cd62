"""Vision-language families with experts, in float64 and with unusual settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrv1.config import EngineConfig
from mrv1.engine.core import EngineCore
from mrv1.errors import ConfigError
from tests.models.families import CACHE
from tests.models.quantizing_cache import QuantizingCache
from tests.models.vision_families import random_vision_model, tiny_vision_config
from tests.multimodal.test_vision_models import (
    VOCAB,
    Prompt,
    Visual,
    by_token,
    check,
    expected,
    generate,
    make_prompt,
)

PARTS: list[int | Visual] = [
    3, Visual((1, 4, 6)), 5, Visual((2, 4, 4), is_video=True), 4, Visual((1, 6, 2)), 2,
]  # fmt: skip
ODD: dict[str, list[dict[str, Any]]] = {
    "qwen3_vl_moe": [
        {},
        {
            "attention_bias": True, "head_dim": 48, "num_key_value_heads": 1, "num_experts": 5,
            "num_experts_per_tok": 3, "decoder_sparse_step": 2, "mlp_only_layers": [],
            "rms_norm_eps": 1e-2, "moe_intermediate_size": 40,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 500.0, "mrope_section": [10, 7, 7],
                "mrope_interleaved": True,
            },
        },
    ],
}  # fmt: skip
CASES = pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param(family, settings, id=f"{family}-{index}")
        for family, several in ODD.items()
        for index, settings in enumerate(several)
    ],
)


def checkpoint(path: Path, family: str, settings: dict[str, Any]) -> tuple[Any, Prompt]:
    """Write a checkpoint; return transformers' model in float64, and a prompt."""
    oracle = random_vision_model(tiny_vision_config(family, **settings))
    oracle.save_pretrained(path)
    oracle = oracle.double()
    return oracle, make_prompt(family, oracle, PARTS)


def engine(path: Path, **options: Any) -> EngineCore:
    """Return an engine in float64."""
    config = {
        "model": str(path), "device": "cpu", "dtype": "float64", "num_kv_blocks": 64,
        "max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 256,
        "max_logprobs": -1, "mm_cache_memory_bytes": 1 << 20,
    }  # fmt: skip
    return EngineCore(EngineConfig(**(config | options)), progress=False)


@CASES
def test_logits_and_tokens_equal_those_of_transformers(tmp_path, family, settings):
    """At once, and in chunks after a prefix that is cached."""
    oracle, prompt = checkpoint(tmp_path, family, settings)
    count = 24 if settings else 64
    in_prompt, tokens, in_output = expected(oracle, prompt, count)
    core = engine(tmp_path)
    (request,) = generate(core, [prompt], count, prompt_logprobs=VOCAB)
    check(request, (in_prompt, tokens, in_output), of_prompt=True)
    core = engine(tmp_path, max_num_batched_tokens=7)
    for round in range(2):
        (request,) = generate(core, [prompt], 8, round=round)
        check(request, (in_prompt, tokens[:8], in_output[:8]), of_prompt=False)
    assert core.scheduler.admission.prefix_hit_tokens >= 32


@CASES
@torch.no_grad()
def test_logits_over_an_fp8_cache_are_those_of_transformers(tmp_path, family, settings):
    """transformers' cache quantizes alike; a code may turn by the last bit of a rope."""
    oracle, prompt = checkpoint(tmp_path, family, settings)
    ids = torch.tensor([prompt.token_ids])
    theirs = oracle(ids, **{CACHE: QuantizingCache()}, **prompt.inputs).logits[0].log_softmax(-1)
    core = engine(tmp_path, kv_cache_dtype="fp8_e4m3", max_num_batched_tokens=9)
    (request,) = generate(core, [prompt], 1, prompt_logprobs=VOCAB)
    error = (by_token(request.prompt_logprobs) - theirs[:-1]).abs()
    assert error.mean() <= 1e-3 * theirs.std()


# --- fused experts -----------------------------------------------------------------------------


def turned(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with an expert's inputs first, as Qwen publishes them."""
    return {
        name: tensor.mT.contiguous() if ".experts." in name else tensor
        for name, tensor in state.items()
    }


def test_fused_experts_load_with_inputs_first_or_last(tmp_path):
    oracle, prompt = checkpoint(tmp_path / "own", "qwen3_vl_moe", {})
    answer = expected(oracle, prompt, 8)
    published = tmp_path / "published"
    published.mkdir()
    state = turned(load_file(tmp_path / "own" / "model.safetensors"))
    save_file(state, published / "model.safetensors", metadata={"format": "pt"})
    (published / "config.json").write_text((tmp_path / "own" / "config.json").read_text())
    core = engine(published)
    check(generate(core, [prompt], 8)[0], answer, of_prompt=False)
    for tensors in (oracle.state_dict(), state):
        core.update_weights({"lm_head.weight": torch.zeros(VOCAB, 64)}, partial=True)
        core.update_weights(tensors)
        check(generate(core, [prompt], 8)[0], answer, of_prompt=False)


def test_fused_experts_of_another_shape_are_refused(tmp_path):
    checkpoint(tmp_path, "qwen3_vl_moe", {})
    file, name = tmp_path / "model.safetensors", "language_model.layers.0.mlp.experts.down_proj"
    state = load_file(file)
    state[f"model.{name}"] = torch.zeros(8, 48, 60)
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"down_proj: expected shape \[8, 64, 48\], got"):
        engine(tmp_path)


def test_a_router_that_does_not_renormalize_is_refused(tmp_path):
    checkpoint(tmp_path, "qwen3_vl_moe", {})
    content = json.loads((tmp_path / "config.json").read_text())
    content["text_config"]["norm_topk_prob"] = False
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="norm_topk_prob: expected None or True, as the family"):
        engine(tmp_path)
