"""Eight ranks: one KV head each, or heads that two, four or all have; each has its part alone."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from mrv1 import LLM, EngineConfig, SamplingParams
from mrv1.engine.core import EngineCore
from mrv1.models import ModelConfig
from mrv1.models.weights import checkpoint_tensors, empty_weights
from mrv1.runner.ranks import parallel_runner
from tests.models.families import tiny_checkpoint, tiny_config
from tests.thread_ranks import ThreadRanks

SIZE = 8
OPTIONS = {
    "plain": {},
    # Of a replicated head all ranks have the same role, and the group of streaming heads.
    "policy": {"head_policy": "ratio=0.5,window=32,sink=16"},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "drafts": {"speculative": {"method": "ngram", "num_tokens": 3, "prompt_lookup_min": 1}},
}  # fmt: skip


def checkpoint(folder: Path, num_kv_heads: int) -> Path:
    """Write a model of 8 query heads, with a vocabulary that fills five of eight parts."""
    tiny_checkpoint(
        folder, "qwen3", num_attention_heads=8, num_key_value_heads=num_kv_heads, head_dim=16,
        vocab_size=4 * 128 + 7,
    )  # fmt: skip
    return folder


def prompts(vocab_size: int) -> list[list[int]]:
    """Return prompts of one to 40 tokens, two of which begin alike."""
    generator = np.random.default_rng(0)
    made = [generator.integers(3, vocab_size, size=size).tolist() for size in (1, 7, 40, 16)]
    return [*made, [*made[2][:32], 5]]


def tokens(path: Path, size: int, **options: object) -> list[list[list[int]]]:
    """Return the tokens of requests that run twice, so that their prefixes are found cached."""
    config = EngineConfig(
        model=str(path), dtype="float64", device="cpu", num_kv_blocks=20, max_num_seqs=4,
        max_num_batched_tokens=24, max_model_len=128, tensor_parallel_size=size, **options,
    )  # fmt: skip
    core = EngineCore(config, progress=False)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    found = []
    try:
        for turn in range(2):
            requests = [
                core.add_request(f"{turn} {index}", prompt, params)
                for index, prompt in enumerate(prompts(519))
            ]
            while core.has_unfinished_requests:
                core.step()
            assert [request.error for request in requests] == [None] * len(requests)
            found.append([request.output_token_ids for request in requests])
    finally:
        core.runner.close()
    return found


@pytest.mark.parametrize(
    ("num_kv_heads", "case"),
    [
        (4, "plain"),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (
                *((heads, "plain") for heads in (1, 2, 8)),
                *((heads, "policy") for heads in (2, 4, 8)),
                (1, "fp8"),
                (8, "fp8"),
                (2, "drafts"),
            )
        ),
    ],
)
def test_eight_ranks_give_the_tokens_of_one(tmp_path, monkeypatch, num_kv_heads, case):
    path = checkpoint(tmp_path, num_kv_heads)
    monkeypatch.setattr(parallel_runner, "Ranks", ThreadRanks)
    expected = tokens(path, 1, **OPTIONS[case])
    assert tokens(path, SIZE, **OPTIONS[case]) == expected


def resident_bytes() -> int:
    """Return the memory of this process in use, without what malloc keeps of freed blocks."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.slow
def test_rank_0_holds_its_part_of_a_model(tmp_path):
    """Eight processes over gloo give one rank's tokens; the caller's has an eighth of the weights.

    In float64, where rounding flips no choice, all ranks have 360 MB of weights together.
    """
    tiny_config(
        "llama", hidden_size=1024, intermediate_size=3072, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, vocab_size=1024,
    ).save_pretrained(tmp_path)  # fmt: skip
    config = ModelConfig.from_pretrained(tmp_path)
    whole = checkpoint_tensors(config, empty_weights(config, "meta", torch.float64))
    num_bytes = sum(tensor.nbytes for tensor in whole.values())
    assert num_bytes > 300e6
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in prompts(1024)]
    options = {
        "load_format": "dummy", "dtype": "float64", "num_kv_blocks": 20, "max_num_seqs": 4,
        "device": "cpu",
    }  # fmt: skip
    before = resident_bytes()
    with LLM(tmp_path, **options, tensor_parallel_size=SIZE) as llm:
        found = [each.outputs[0].token_ids for each in llm.generate(given, params)]
        grown = resident_bytes() - before
    assert grown < num_bytes / 2
    with LLM(tmp_path, **options) as llm:
        expected = [each.outputs[0].token_ids for each in llm.generate(given, params)]
        assert resident_bytes() - before > num_bytes / 2  # so the first figure says something
    assert found == expected
