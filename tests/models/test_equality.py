"""Logits equal transformers' own, for every family and rope type, in ragged batches and chunks.

On a GPU the same tests run the Triton kernels; there, and in the interpreter, no oracle may run.
"""

from __future__ import annotations

import copy
import itertools
import random
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from mrv1.config import checkpoint_dir
from mrv1.device import kernel_path
from mrv1.kernels import reference
from mrv1.kernels.registry import select_ops
from mrv1.models import DecoderModel, load_model
from tests.models.driver import PagedDriver, blocks_needed
from tests.models.families import (
    EXPERTS,
    FAMILIES,
    ROPES,
    SLIDING,
    expected_logits,
    ropes_of,
    save_checkpoint,
    tiny_config,
)

TOLERANCE = 1e-4
BLOCK_SIZES = (16, 32, 64)
CHUNKS = (1, 7, 64, None)
SCHEDULES = list(itertools.product(BLOCK_SIZES, CHUNKS))


@pytest.fixture(scope="module", autouse=True)
def full_precision() -> Iterator[None]:
    """Keep TF32 out of float32 matrix products, ours and transformers'."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def random_prompts(seed: int, lens: list[int], vocab_size: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(n)] for n in lens]


def check_equal(
    config: PretrainedConfig,
    *,
    device: torch.device,
    lens: list[int],
    schedules: Iterable[tuple[int, int | None]] = SCHEDULES,
    seed: int = 0,
) -> None:
    """Write a checkpoint, load it, run ``lens`` tokens in pages, and compare every position."""
    prompts = random_prompts(seed, lens, config.vocab_size)
    with tempfile.TemporaryDirectory() as directory:
        oracle = save_checkpoint(Path(directory), config, seed=seed).to(device)
        model = load_float32(directory, device)
    check_model(model, oracle, prompts, schedules, seed)


def load_float32(directory: str | Path, device: torch.device) -> DecoderModel:
    ops = select_ops(kernel_path(device))
    return load_model(directory, device=device, dtype=torch.float32, ops=ops, progress=False)


def check_model(
    model: DecoderModel,
    oracle: PreTrainedModel,
    prompts: list[list[int]],
    schedules: Iterable[tuple[int, int | None]],
    seed: int,
) -> None:
    """Run ``prompts`` through pages under every schedule and compare with transformers' logits.

    The expected logits are in float64. Some random models amplify rounding: transformers' own
    float32 error is half of the tolerance and more, so twice that error is added to the tolerance.
    """
    exact = copy.deepcopy(oracle).double()
    expected = [expected_logits(exact, prompt) for prompt in prompts]
    theirs = [expected_logits(oracle, prompt).double() for prompt in prompts]
    errors = [float((a - b).abs().max()) for a, b in zip(theirs, expected, strict=True)]
    reference.calls.clear()
    for block_size, chunk in schedules:
        num_blocks = blocks_needed(prompts, block_size)
        driver = PagedDriver(model, block_size=block_size, num_blocks=num_blocks, seed=seed)
        logits = driver.logits(prompts, chunk)
        assert not driver.free_blocks
        for got, want, error in zip(logits, expected, errors, strict=True):
            torch.testing.assert_close(
                got.double(),
                want,
                rtol=0,
                atol=TOLERANCE + 2 * error,
                msg=lambda m, case=(block_size, chunk): f"block size, chunk = {case}: {m}",
            )
    assert bool(reference.calls) == (kernel_path(model.device) == "reference")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "rope", "block_sizes"),
    # Each pair with one block size by default, with the others in the long run.
    [
        pytest.param(
            *(family, rope, [size for size in BLOCK_SIZES if (size == own) != is_long]),
            id=f"{rope}-{family}-{'other' if is_long else own}",
            marks=[pytest.mark.full] if is_long else [],
        )
        for (rope, family), own in zip(
            itertools.product(ROPES, FAMILIES), itertools.cycle(BLOCK_SIZES), strict=False
        )
        if rope in ropes_of(family)
        for is_long in (False, True)
    ],
)
def test_every_family_with_every_rope_type_equals_transformers(
    family: str, rope: str, block_sizes: list[int], device: torch.device
) -> None:
    config = tiny_config(family, rope, **SLIDING.get(family, {}))
    schedules = list(itertools.product(block_sizes, CHUNKS))
    check_equal(config, device=device, lens=[90, 1, 33], schedules=schedules)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("qwen3", {"attention_bias": True, "num_key_value_heads": 1}),
        ("ernie4_5", {"use_bias": True, "tie_word_embeddings": True}),
        ("qwen2", SLIDING["qwen2"] | {"sliding_window": 1}),
    ],
)
def test_optional_settings_equal_transformers(
    family: str, settings: dict[str, Any], device: torch.device
) -> None:
    config = tiny_config(family, **settings)
    check_equal(config, device=device, lens=[40, 3], schedules=[(16, 1), (32, 7), (64, None)])


@st.composite
def configs(draw: st.DrawFn) -> PretrainedConfig:
    """Draw tiny configurations of any family that differ in the settings ``ModelConfig`` reads."""
    family = draw(st.sampled_from(sorted(FAMILIES.keys() - EXPERTS.keys())))
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    num_layers = draw(st.integers(1, 3))
    overrides = {
        "num_hidden_layers": num_layers,
        "num_key_value_heads": num_kv_heads,
        "num_attention_heads": num_kv_heads * draw(st.sampled_from([1, 2, 4])),
        "hidden_size": draw(st.sampled_from([48, 96])),
        "head_dim": draw(st.sampled_from([16, 48, 64])),
        "intermediate_size": draw(st.sampled_from([40, 64])),
        "vocab_size": draw(st.sampled_from([131, 256])),
        "tie_word_embeddings": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
    }
    bias = draw(st.booleans())
    if family in ("llama", "qwen3", "smollm3", "granite"):
        overrides["attention_bias"] = bias
    if family in ("llama", "smollm3", "granite"):
        overrides["mlp_bias"] = draw(st.booleans())
    if family == "ernie4_5":
        overrides["use_bias"] = bias
    if family in SLIDING and draw(st.booleans()):
        overrides |= SLIDING[family] | {"sliding_window": draw(st.integers(1, 40))}
        if family != "mistral":
            overrides["max_window_layers"] = draw(st.integers(0, num_layers))
    return tiny_config(family, draw(st.sampled_from(sorted(ropes_of(family)))), **overrides)


@pytest.mark.gpu
@settings(max_examples=max(settings.default.max_examples // 2, 8))  # each makes two models
@given(
    config=configs(),
    lens=st.lists(st.integers(1, 80), min_size=1, max_size=4),
    schedule=st.sampled_from(SCHEDULES),
    seed=st.integers(0, 2**16),
)
def test_any_config_and_schedule_equal_transformers(
    device: torch.device,
    config: PretrainedConfig,
    lens: list[int],
    schedule: tuple[int, int | None],
    seed: int,
) -> None:
    check_equal(config, device=device, lens=lens, schedules=[schedule], seed=seed)


@pytest.mark.interp
@pytest.mark.parametrize(
    ("family", "chunk"),
    # Each family with one chunk by default, with all of them in the long run.
    [
        pytest.param(family, chunk, marks=[] if index % 3 == at else [pytest.mark.full])
        for index, family in enumerate(FAMILIES)
        for at, chunk in enumerate((4, 1, None))
    ],
)
def test_interpreted_kernels_equal_transformers(
    family: str, chunk: int | None, device: torch.device
) -> None:
    sliding = SLIDING[family] | {"sliding_window": 5} if family in SLIDING else {}
    config = tiny_config(family, **sliding)
    check_equal(config, device=device, lens=[9, 3], schedules=[(16, chunk)])


@pytest.mark.gpu
def test_the_embedded_checkpoint_equals_transformers(device: torch.device) -> None:
    path = checkpoint_dir("tiny")
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
    prompts = random_prompts(0, [3, 70], oracle.config.vocab_size)
    check_model(load_float32(path, device), oracle, prompts, [(16, 1), (32, 7), (64, 64)], seed=0)
