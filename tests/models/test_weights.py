"""Random weights, rank context, and the choice of ops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mrv1 import kernels
from mrv1.errors import ConfigError
from mrv1.kernels import reference
from mrv1.kernels.layers.quantized import QuantizedWeight
from mrv1.kernels.registry import MODULE_OF_OP, select_ops
from mrv1.models import DecoderModel, ModelConfig, ParallelContext, Weight, random_weights
from mrv1.models.weights import checkpoint_tensors
from tests.models.driver import PagedDriver
from tests.models.families import FAMILIES, tiny_config


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_make_a_model_that_runs(family: str) -> None:
    config = ModelConfig.from_hf(tiny_config(family))
    weights = random_weights(config, device="cpu", dtype=torch.float32, seed=1)
    model = DecoderModel(config, weights, select_ops("reference"))
    (logits,) = PagedDriver(model, block_size=16, num_blocks=4).logits([list(range(40))], 16)
    # Rows of the head have norm 1 in the mean, and normed hidden states have norm sqrt(hidden).
    assert 0.5 < logits.std() < 2.0
    assert abs(logits.mean()) < 0.2


def test_random_weights_follow_from_the_seed() -> None:
    config = ModelConfig.from_hf(tiny_config("qwen2"))

    def tensors(seed: int) -> dict[str, torch.Tensor]:
        weights = random_weights(config, device="cpu", dtype=torch.bfloat16, seed=seed)
        return checkpoint_tensors(config, weights)

    first, same, other = tensors(1), tensors(1), tensors(2)
    for name, tensor in first.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, same[name]), name
        assert torch.equal(tensor, other[name]) == (tensor.dim() == 1), name
        if tensor.dim() == 2:
            assert tensor.float().std() == pytest.approx(tensor.shape[1] ** -0.5, rel=0.1), name


@pytest.mark.parametrize("groups", [1, 4])
def test_a_model_multiplies_by_codes_and_scales_as_by_their_products(groups: int) -> None:
    """Codes of 8 bits, one scale for a row or for each 16 columns."""
    config = ModelConfig.from_hf(tiny_config("qwen2"))
    weights = random_weights(config, device="cpu", dtype=torch.float32, seed=0)

    def logits(kind: str) -> torch.Tensor:
        layers = []
        for index, layer in enumerate(weights.layers):
            generator = torch.Generator().manual_seed(index)
            codes = torch.randint(-127, 128, layer.qkv.shape, generator=generator).to(torch.int8)
            scales = torch.rand(len(codes), groups, generator=generator) / 500
            dense = codes.float() * scales.repeat_interleave(codes.shape[1] // groups, 1)
            matrix = QuantizedWeight(
                code="int8",
                codes=codes,
                dtype=torch.float32,
                scales=scales,
                inputs_per_scale=codes.shape[1] // groups,
            )
            stored = {
                "dense": Weight(matrix=dense, bias=layer.qkv.bias),
                "scaled": Weight(matrix=matrix, bias=layer.qkv.bias),
            }
            assert stored[kind].dtype == torch.float32
            layers.append(replace(layer, qkv=stored[kind]))
        model = DecoderModel(
            config, replace(weights, layers=tuple(layers)), select_ops("reference")
        )
        return PagedDriver(model, block_size=16, num_blocks=4).logits([list(range(40))], 16)[0]

    assert torch.equal(logits("scaled"), logits("dense"))


def test_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    config = ModelConfig.from_hf(tiny_config("llama"))
    random_weights(config, device="cpu", dtype=torch.float32, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_select_ops_returns_the_ops_of_each_path() -> None:
    for path, source in (
        ("reference", reference), ("triton", kernels), ("interpreter", kernels)
    ):  # fmt: skip
        ops = select_ops(path)
        assert all(getattr(ops, name) is getattr(source, name) for name in MODULE_OF_OP)
    assert "linear" in MODULE_OF_OP


def test_collectives_of_one_rank_return_their_input() -> None:
    context = ParallelContext()
    tensor = torch.ones(2)
    assert context.all_reduce(tensor) is tensor
    assert context.all_gather(tensor) is tensor


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [
        (0, 2, "all_reduce, all_gather: expected collectives of 2 ranks, got none"),
        (1, 1, "rank, size: expected 0 <= rank < size, got rank 1 of 1"),
        (0, 0, "rank, size: expected 0 <= rank < size, got rank 0 of 0"),
    ],
)
def test_an_impossible_rank_is_refused(rank: int, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelContext(rank=rank, size=size)


def test_collectives_are_called_twice_per_layer_and_once_for_the_logits() -> None:
    """Two sums per layer (attention output, MLP down) and one gather of logits."""
    calls: list[tuple[str, tuple[int, ...]]] = []

    def record(name: str, tensor: torch.Tensor) -> torch.Tensor:
        calls.append((name, tuple(tensor.shape)))
        return tensor

    config = ModelConfig.from_hf(tiny_config("llama"))
    weights = random_weights(config, device="cpu", dtype=torch.float32, seed=0)
    context = ParallelContext(
        all_reduce=lambda t: record("all_reduce", t), all_gather=lambda t: record("all_gather", t)
    )
    model = DecoderModel(config, weights, select_ops("reference"), parallel=context)
    driver = PagedDriver(model, block_size=16, num_blocks=1, num_padding_rows=0)
    driver.logits([[1, 2, 3]], None)
    assert calls == [("all_reduce", (3, 64))] * 4 + [("all_gather", (3, 160))]
