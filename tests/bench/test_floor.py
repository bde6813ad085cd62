"""Bytes of a step against closed forms, and the copy bandwidth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.engines.checkpoint import write_config
from benchmarks.measure.floor import (
    active_experts,
    copy_bandwidth,
    rank_config,
    step_kv_bytes,
    step_weight_bytes,
)
from benchmarks.measure.shapes import SHAPES, shape_config
from mrv1.errors import ConfigError
from mrv1.kernels.cache.formats import PageFormat
from mrv1.models import ModelConfig, random_weights
from mrv1.models.weights import Weight
from mrv1.runner.kv_cache import CacheSpec

QWEN3 = shape_config("qwen3-0.6b")
TINY = shape_config("tiny-random")


def test_weight_bytes_of_qwen3_equal_the_closed_form():
    hidden, mlp, q_size, kv_size = 1024, 3072, 16 * 128, 8 * 128
    layer = hidden * (q_size + 2 * kv_size) + q_size * hidden + 3 * hidden * mlp
    layer += 2 * hidden + 2 * 128  # the norms
    elements = 28 * layer + hidden + 151_936 * hidden
    assert elements == 596_049_920
    assert step_weight_bytes(QWEN3, torch.bfloat16) == 2 * elements
    assert step_weight_bytes(QWEN3, torch.float32) == 4 * elements


def test_ranks_share_the_bytes_of_a_step():
    llama = shape_config("llama3-70b")
    hidden, mlp, size = 8192, 28_672, 4
    layer = (hidden * (64 + 2 * 8) * 128 + 64 * 128 * hidden + 3 * hidden * mlp) // size
    elements = 80 * (layer + 2 * hidden) + hidden + 250 * 128 * hidden  # groups of 128 tokens
    assert 250 * 128 * size < 128_256 <= 251 * 128 * size
    elements += 128 * hidden
    own = rank_config(llama, size)
    assert (own.num_q_heads, own.num_kv_heads, own.intermediate_size) == (16, 2, 7168)
    assert step_weight_bytes(own, torch.bfloat16, size) == 2 * elements
    assert rank_config(llama, 1) == llama


def test_an_untied_embedding_is_not_counted_as_read():
    untied = replace(QWEN3, tie_word_embeddings=False)
    assert step_weight_bytes(untied, torch.bfloat16) == step_weight_bytes(QWEN3, torch.bfloat16)


def test_bytes_of_biases_are_counted():
    biased = replace(TINY, qkv_bias=True, mlp_bias=True)
    per_layer = (4 + 2 * 2) * 32 + 2 * 96 + 64
    added = step_weight_bytes(biased, torch.float32) - step_weight_bytes(TINY, torch.float32)
    assert added == 2 * per_layer * 4


def test_weight_bytes_equal_those_of_the_loaded_tensors():
    weights = random_weights(TINY, device="cpu", dtype=torch.float32, seed=0)
    parts = [weights.embed, weights.final_norm]
    parts += [getattr(layer, name) for layer in weights.layers for name in layer.__slots__]
    tensors = [each.plain if isinstance(each, Weight) else each for each in parts]
    tensors += [each.bias for each in parts if isinstance(each, Weight)]
    num_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    assert step_weight_bytes(TINY, torch.float32) == num_bytes


def qwen3_cache(dtype: torch.dtype, **scales: str) -> CacheSpec:
    return CacheSpec(
        num_layers=28, num_kv_heads=8, block_size=16, head_dim=128,
        page_format=PageFormat(name="", dtype=dtype, **scales),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "vector_bytes"),
    [
        (qwen3_cache(torch.bfloat16), 256),
        (qwen3_cache(torch.float8_e4m3fn, granularity="token"), 128 + 4),
        (qwen3_cache(torch.float8_e4m3fn, granularity="head"), 128),
    ],
)
def test_kv_bytes_of_qwen3_equal_the_closed_form(spec: CacheSpec, vector_bytes: int):
    """The mean of 129 .. 383 visible tokens is 256; a token is 28 * 2 * 8 vectors."""
    found = step_kv_bytes(spec, [-1] * 28, batch=256, prompt_tokens=128, output_tokens=256)
    assert found == 256 * 256 * 28 * 2 * 8 * vector_bytes


def test_windows_bound_the_kv_bytes_that_are_read():
    spec = CacheSpec(
        num_layers=2,
        num_kv_heads=2,
        block_size=16,
        head_dim=32,
        page_format=PageFormat.plain(torch.float32),
    )
    found = step_kv_bytes(spec, [-1, 10], batch=3, prompt_tokens=8, output_tokens=5)
    steps = [9, 10, 11, 12]
    visible = sum(steps) / 4 + sum(min(step, 10) for step in steps) / 4
    assert found == 3 * visible * 2 * 2 * 32 * 4


def test_a_step_reads_the_experts_of_its_tokens():
    config = shape_config("qwen3-30b-a3b")
    assert active_experts(config, 1) == 8
    assert 110 < active_experts(config, 32) < 113
    one = 3 * 768 * 2048 * 48  # an expert's weights in all layers
    alone, together = (step_weight_bytes(config, torch.int8, batch=n) for n in (1, 32))
    assert together - alone == pytest.approx(one * (active_experts(config, 32) - 8), abs=1)


def test_a_step_reads_the_codes_of_its_tokens_experts():
    """17 bytes for 32 weights, and biases in bfloat16."""
    config = shape_config("gpt-oss-20b")
    one = (3 * 2880 * 2880 * 17 // 32 + 2 * 3 * 2880) * 24
    alone, together = (step_weight_bytes(config, torch.bfloat16, batch=n) for n in (1, 8))
    more = active_experts(config, 8) - active_experts(config, 1)
    assert together - alone == pytest.approx(one * more, abs=1)


@pytest.mark.parametrize("name", SHAPES)
def test_the_config_json_of_a_shape_says_what_the_shape_is(tmp_path: Path, name: str):
    write_config(tmp_path, SHAPES[name], SHAPES[name].torch_dtype)
    assert ModelConfig.from_pretrained(tmp_path) == SHAPES[name]


def test_unknown_shape_is_refused():
    names = r"qwen3-0\.6b, llama3-8b, llama3\.2-1b, llama3\.2-3b, llama3-70b, "
    names += "qwen3-30b-a3b, ernie-21b-a3b, gpt-oss-20b, "
    names += "granite-3-8b, gemma2-9b, olmo2-7b, phi4-mini, tiny-random, tiny-experts"
    with pytest.raises(ConfigError, match=rf"shape: expected one of {names}, got"):
        shape_config("llama")


def test_no_copy_bandwidth_on_a_cpu():
    assert copy_bandwidth(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_copy_bandwidth_of_a_gpu_is_plausible_and_its_memory_free_again():
    device = torch.device("cuda", 0)
    before = torch.cuda.memory_allocated(device)
    bandwidth = copy_bandwidth(device)
    assert bandwidth is not None
    assert 1e11 < bandwidth < 2e13  # bytes per second: any GPU from 2020 to well past today
    assert torch.cuda.memory_allocated(device) == before
