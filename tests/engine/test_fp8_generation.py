"""Generation over an fp8 KV cache: tokens against transformers over a rounded cache."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from mrv1 import LLM, SamplingParams
from mrv1.config import checkpoint_dir
from mrv1.kernels import reference
from tests.engine.test_llm import random_prompts
from tests.models.families import tiny_checkpoint
from tests.models.quantizing_cache import QuantizingCache
from tests.models.test_fp8_cache import HEAD_SCALES, add_tensors, scale_tensors
from tests.models.test_tiny_checkpoint import CORPUS, _recall_prompt

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A tiny model with static scales in its checkpoint."""
    path = tmp_path_factory.mktemp("qwen3")
    model = tiny_checkpoint(path, "qwen3")
    add_tensors(path, scale_tensors(0))
    return path, model


def greedy_over_a_rounded_cache(
    model: PreTrainedModel,
    prompt: list[int],
    head_scales: torch.Tensor | None,
    num_tokens: int,
    quarter: int | None = None,
) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=QuantizingCache(head_scales, quarter),
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_scale", ["token", "head"])
def test_greedy_tokens_equal_transformers_over_a_rounded_cache(checkpoint, device, kv_scale):
    path, model = checkpoint
    scales = HEAD_SCALES if kv_scale == "head" else None
    prompts = random_prompts((1, 15, 16, 17, 70))
    model.to(device)
    expected = [greedy_over_a_rounded_cache(model, prompt, scales, 16) for prompt in prompts]
    for chunk, block_size in ((7, 32), (64, 16)):
        with LLM(
            str(path),
            dtype="float32",
            kv_cache_dtype="fp8_e4m3",
            kv_scale=kv_scale,
            block_size=block_size,
            max_num_batched_tokens=chunk,
            max_num_seqs=8,
            num_kv_blocks=64,
        ) as llm:
            reference.calls.clear()
            outputs = llm.generate(prompts, GREEDY)
            assert bool(reference.calls) == (llm._engine.runner.path == "reference")
        assert [list(o.outputs[0].token_ids) for o in outputs] == expected, (chunk, block_size)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64])
def test_greedy_tokens_with_quarter_scales_equal_transformers(checkpoint, device, block_size):
    """Whole prompts, then token by token: the order in which transformers fills its cache."""
    path, model = checkpoint
    prompts = random_prompts((1, 15, 16, 17, 70))
    model.to(device)
    expected = [
        greedy_over_a_rounded_cache(model, prompt, None, 16, quarter=block_size // 4)
        for prompt in prompts
    ]
    with LLM(
        str(path),
        dtype="float32",
        kv_cache_dtype="fp8_e4m3",
        kv_scale="quarter",
        enable_prefix_caching=False,
        block_size=block_size,
        max_num_batched_tokens=128,
        max_num_seqs=8,
        num_kv_blocks=64,
    ) as llm:
        outputs = llm.generate(prompts, GREEDY)
    assert [list(o.outputs[0].token_ids) for o in outputs] == expected


def test_the_embedded_model_recalls_a_fact_over_an_fp8_cache():
    """It recalls a fact from 1024 tokens back, through rounded K and V of every layer."""
    tokenizer = Tokenizer.from_file(str(checkpoint_dir("tiny") / "tokenizer.json"))
    text = CORPUS.read_text(encoding="utf-8")
    source = random.Random(0)
    tasks = [_recall_prompt(tokenizer, text[len(text) * 9 // 10 :], source) for _ in range(6)]
    with LLM(
        "tiny", device="cpu", kv_cache_dtype="fp8_e4m3", block_size=64, num_kv_blocks=120
    ) as llm:
        outputs = llm.generate(
            [prompt.tolist() for prompt, _ in tasks],
            SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
        )
    answers = [output.outputs[0].token_ids[0] for output in outputs]
    assert answers == [answer for _, answer in tasks]
