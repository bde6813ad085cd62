"""Properties of a forward pass besides its values: dtypes, padding, no waiting, graph capture."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import PretrainedConfig

from mrv1.device import kernel_path
from mrv1.kernels.registry import select_ops
from mrv1.models import AttentionBatch, DecoderModel, ModelConfig, random_weights
from mrv1.models.weights import checkpoint_places, empty_weights
from tests.models.driver import PagedDriver, Request
from tests.models.families import SLIDING, expected_logits, random_model, tiny_config

PROMPTS = [list(range(3, 40)), [7], list(range(90, 70, -1))]


def decoder(
    config: PretrainedConfig, device: torch.device, dtype: torch.dtype, *, seed: int = 0
) -> DecoderModel:
    """Return the decoder with ``random_model``'s weights; no checkpoint is written."""
    oracle = random_model(config, seed=seed).state_dict()
    model_config = ModelConfig.from_hf(config)
    weights = empty_weights(model_config, device, dtype)
    for name, place in checkpoint_places(model_config, weights).items():
        place.fill(oracle[name])
    return DecoderModel(model_config, weights, select_ops(kernel_path(device)))


def run(model: DecoderModel, chunk: int | None = None, **settings: int) -> torch.Tensor:
    """Return the logits of all positions of all prompts, ``[tokens, vocab]``."""
    driver = PagedDriver(model, block_size=16, num_blocks=8, **settings)
    return torch.cat(driver.logits(PROMPTS, chunk))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "ernie4_5", "gemma2", "gemma3_text"])
def test_half_precision_errs_no_more_than_transformers(
    family: str, dtype: torch.dtype, device: torch.device
) -> None:
    config = tiny_config(family)
    exact = random_model(config).to(device, torch.float64)
    expected = torch.cat([expected_logits(exact, prompt) for prompt in PROMPTS])
    theirs = exact.to(dtype)
    their_error = torch.cat([expected_logits(theirs, p) for p in PROMPTS]).double() - expected
    logits = run(decoder(config, device, dtype))
    assert logits.dtype == torch.float32
    error = logits.double() - expected
    assert error.abs().mean() <= 1.5 * their_error.abs().mean()


@pytest.mark.parametrize("num_padding_rows", [0, 3])
@pytest.mark.parametrize("chunk", [1, 8, 9])
def test_padding_and_placement_of_blocks_change_no_logits(
    num_padding_rows: int, chunk: int
) -> None:
    """In float64, so that another order of summation cannot hide a wrong term."""
    config = tiny_config("qwen2", **SLIDING["qwen2"])
    model = decoder(config, torch.device("cpu"), torch.float64)
    expected = run(model, chunk=None, seed=0)
    assert expected.dtype == torch.float64
    logits = run(model, chunk=chunk, seed=5, num_padding_rows=num_padding_rows)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-11)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2"])
def test_deterministic_hidden_states_do_not_depend_on_the_batch(
    family: str, device: torch.device
) -> None:
    """Bit by bit, also for a batch of one token, which could use another kernel."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = decoder(tiny_config(family), device, dtype)
    model = DecoderModel(
        model.config, model.weights, select_ops(kernel_path(device)), deterministic=True
    )

    def hidden(token_ids: list[int]) -> torch.Tensor:
        driver = PagedDriver(model, block_size=16, num_blocks=8, num_padding_rows=0)
        batch = driver.batch([Request([token]) for token in token_ids], [1] * len(token_ids))
        return model.forward(batch, driver.caches)

    many = hidden([7, 90, 3, 41, 5])
    for row, token in enumerate([7, 90, 3, 41, 5]):
        assert torch.equal(hidden([token]), many[row : row + 1])


def test_forward_needs_one_cache_per_layer() -> None:
    model = decoder(tiny_config("llama"), torch.device("cpu"), torch.float32)
    driver = PagedDriver(model, block_size=16, num_blocks=1)
    batch = driver.batch([Request([1])], [1])
    with pytest.raises(ValueError, match="shorter"):
        model.forward(batch, driver.caches[:1])


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make every implicit wait for the GPU an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first use warns that this is a prototype feature
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.gpu_only
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [37, 1, 20]])
def test_forward_never_waits_for_the_gpu(query_lens: list[int], device: torch.device) -> None:
    model = decoder(tiny_config("qwen3"), device, torch.bfloat16)
    driver = PagedDriver(model, block_size=16, num_blocks=8)
    batch = driver.batch([Request(prompt) for prompt in PROMPTS], query_lens)
    model.compute_logits(model.forward(batch, driver.caches))  # compiles the kernels
    with no_waiting():
        model.compute_logits(model.forward(batch, driver.caches))
    with no_waiting(), pytest.raises(RuntimeError, match="synchronizing"):
        batch.seq_lens.sum().item()  # the check itself detects a wait


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_a_captured_decode_step_equals_an_eager_step(device: torch.device) -> None:
    """A captured step, replayed on the next tokens, gives the logits of an eager step."""
    model = decoder(tiny_config("qwen3"), device, torch.bfloat16)
    driver = PagedDriver(model, block_size=16, num_blocks=8)
    requests = [Request(prompt) for prompt in ([1, 2, 3], [4, 5, 6])]

    def step(batch: AttentionBatch) -> torch.Tensor:
        return model.compute_logits(model.forward(batch, driver.caches))

    first = driver.batch(requests, [1, 1])
    step(first)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(first)
    graph.replay()
    for request in requests:
        request.num_computed = 1
    second = driver.batch(requests, [1, 1])
    expected = step(second)
    for name in ("input_ids", "positions", "slot_mapping", "seq_lens", "block_table"):
        getattr(first, name).copy_(getattr(second, name))
    graph.replay()
    assert torch.equal(captured, expected)


@pytest.mark.gpu
@pytest.mark.gpu_only
def test_random_weights_on_a_gpu_repeat_with_the_seed(device: torch.device) -> None:
    config = ModelConfig.from_hf(tiny_config("qwen3"))
    first, second = (
        random_weights(config, device=device, dtype=torch.bfloat16, seed=3) for _ in range(2)
    )
    assert first.embed.device.type == "cuda"
    assert torch.equal(first.layers[1].down.plain, second.layers[1].down.plain)
