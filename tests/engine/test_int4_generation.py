"""Generation over a 4-bit KV cache: tokens against transformers over a rounded cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from mrv1 import LLM, SamplingParams
from mrv1.errors import ConfigError
from mrv1.kernels import reference
from tests.engine.test_llm import random_prompts
from tests.models.families import CACHE, SLIDING, tiny_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
INT4 = {"dtype": "float32", "kv_cache_dtype": "int4", "max_num_seqs": 8, "num_kv_blocks": 64}


class NibbleCache(DynamicCache):
    """transformers' own cache of keys, mixed within the halves of a head, and values, rounded."""

    def update(
        self,
        key_states: torch.Tensor,  # [batch, kv_heads, tokens, head_dim], rotated
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Round the new keys and values, then store them as the base class does."""
        channel = torch.arange(key_states.shape[-1], device=key_states.device)
        half = len(channel) // 2
        shared = channel[:, None] & channel & (half - 1)
        parity = sum(shared >> bit & 1 for bit in range(8)) % 2
        matrix = torch.where(channel[:, None] // half == channel // half, 1.0 - 2.0 * parity, 0.0)
        matrix = (matrix * half**-0.5).to(key_states.dtype)
        keys = rounded(key_states @ matrix) @ matrix  # symmetric, its own inverse
        return super().update(keys, rounded(value_states), layer_idx, *args, **kwargs)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return vectors rounded to 16 values between their lowest and highest element and 0."""
    low, high = x.amin(-1, keepdim=True).clamp_max(0), x.amax(-1, keepdim=True).clamp_min(0)
    scale = ((high - low) / 15).clamp_min(1e-12)
    zero = (-low / scale * 16).round() / 16
    return ((x / scale + zero).round().clamp(0, 15) - zero) * scale


@torch.no_grad()
def greedy_over_a_rounded_cache(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=GREEDY.max_tokens,
        eos_token_id=None,
        pad_token_id=0,
        **{CACHE: NibbleCache()},
    )
    return output[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp("qwen3")
    return path, tiny_checkpoint(path, "qwen3")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 32, "max_num_batched_tokens": 7},
        {"speculative": {"method": "ngram", "num_tokens": 3}},
        {"head_policy": "ratio=0.5,window=128,sink=16"},
    ],
    ids=lambda options: next(reversed(options)),
)
def test_greedy_tokens_equal_transformers_over_a_rounded_cache(checkpoint, device, options):
    """Also of a prompt whose blocks are cached, and of heads whose window is not full."""
    path, model = checkpoint
    prompts = random_prompts((1, 15, 16, 17, 70))
    model.to(device)
    expected = [greedy_over_a_rounded_cache(model, prompt) for prompt in prompts]
    with LLM(str(path), device=device.type, **INT4 | options) as llm:
        reference.calls.clear()
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.generate(prompts, GREEDY)
            assert [list(o.outputs[0].token_ids) for o in outputs] == expected
        assert bool(reference.calls) == (llm.engine.runner.path == "reference")
        report = llm.kv_report()
    assert report["dtype"] == "int4"
    config = model.config
    vectors = 2 * config.num_hidden_layers * config.num_key_value_heads
    assert report["token_bytes"] == vectors * (config.head_dim // 2 + 4)


@pytest.mark.gpu
def test_rings_whose_pages_are_written_over(tmp_path, device):
    """A window of 24 tokens in the second layer, in chunks that are shorter than a block."""
    model = tiny_checkpoint(tmp_path, "qwen3", **SLIDING["qwen3"]).to(device)
    prompts = random_prompts((17, 70))
    expected = [greedy_over_a_rounded_cache(model, prompt) for prompt in prompts]
    with LLM(str(tmp_path), device=device.type, max_num_batched_tokens=7, **INT4) as llm:
        assert [group["window"] for group in llm.kv_report()["groups"]] == [-1, 24]
        outputs = llm.generate(prompts, GREEDY)
    assert [list(o.outputs[0].token_ids) for o in outputs] == expected


def test_what_4_bits_cannot_store_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"kv_scale: expected 'token' .* got 'quarter'"):
        LLM("tiny", device="cpu", kv_cache_dtype="int4", kv_scale="quarter")
    tiny_checkpoint(tmp_path, "qwen3", head_dim=48)
    with pytest.raises(ConfigError, match=r"multiple of 32 dimensions with 'int4', got 48"):
        LLM(str(tmp_path), device="cpu", kv_cache_dtype="int4")
