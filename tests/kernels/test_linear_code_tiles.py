"""Which calls tiles of codes take, and what they compute, on a GPU, in every configuration."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1.device import device_info
from mrv1.kernels import QuantizedWeight
from mrv1.kernels._base.triton import INTERPRET
from mrv1.kernels.layers.linear_call import LinearCall
from mrv1.kernels.layers.linear_splits import add_splits
from mrv1.kernels.layers.quantized import TILES_CAPABILITY
from tests.kernels.elementwise import seeds
from tests.kernels.quantized_weights import KINDS, random_weight

pytestmark = pytest.mark.skipif(INTERPRET, reason="not run: TRITON_INTERPRET=1 is set")

TILES = [64, 128, 256]
"""Tokens of a tile."""
TAKEN = {
    "e4m3_tensor", "e4m3_row", "e4m3_block", "int8", "int8_zeros", "q8_0", "int4", "int4_row",
    "uint4_zeros", "uint4_order", "q4_0", "mxfp4",
}  # fmt: skip
"""Kinds that tiles take in bfloat16: all but those with minima or super-blocks."""


def call_of(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None):
    out = x.new_empty(len(x), weight.shape[0])
    return LinearCall(
        x=x, weight=weight.codes, bias=bias, norm_weight=None, eps=0.0, residual=None, gate=0,
        out=out, out_norm_weight=None, normed_out=None, prefetch=None, order=None,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_that_tiles_take(kind):
    from mrv1.kernels.layers.linear_code_tiles import multiplies_code_tiles

    weight = random_weight(kind, 32, 512, torch.bfloat16, seed=0)
    x = torch.zeros(20, 512, dtype=torch.bfloat16)
    assert multiplies_code_tiles(call_of(x, weight), weight) == (kind in TAKEN)
    uneven = torch.zeros(20, 516, dtype=torch.bfloat16)[:, :512]
    assert not multiplies_code_tiles(call_of(uneven, weight), weight)
    # Products of float16 are rounded once by instructions of that dtype alone.
    half = random_weight(kind, 32, 512, torch.float16, seed=0)
    is_float16 = half.scales is not None and half.scales.dtype == torch.float16
    is_taken = kind in TAKEN and (is_float16 or half.group >= 512)
    assert multiplies_code_tiles(call_of(x.half(), half), half) == is_taken


@pytest.mark.parametrize(
    ("num_tokens", "size", "tile_tokens", "splits"),
    [
        (33, (4096, 6144), 64, 2), (64, (4096, 28672), 64, 1), (64, (14336, 4096), 64, 4),
        (256, (4096, 4096), 128, 2), (512, (4096, 28672), 256, 1), (1024, (4096, 6144), 128, 1),
        (8192, (14336, 4096), 256, 1),
    ],
)  # fmt: skip
def test_tiles_fill_the_programs(num_tokens, size, tile_tokens, splits):
    from mrv1.kernels.layers.linear_code_tiles import SHARED_BYTES, CodeTiles

    config = CodeTiles.default_for(
        num_tokens, *size, words=16, num_programs=132, may_split=True, has_room=True
    )
    assert (config.tile_tokens, config.splits) == (tile_tokens, splits)
    assert 3 <= config.stages <= SHARED_BYTES // (256 * tile_tokens + 8192)
    alone = CodeTiles.default_for(
        num_tokens, *size, words=32, num_programs=132, may_split=False, has_room=False
    )
    assert alone.splits == 1
    assert alone.tile_tokens < 256
    assert alone.stages >= 2


def product(x, weight, tile_tokens, splits, bias=None):
    """Return the product of one configuration."""
    from mrv1.kernels.layers import linear_code_tiles as module

    call = call_of(x, weight, bias)
    config = module.CodeTiles.of(tile_tokens, splits, words=module.step_words(weight))
    out, sums = module.launch_code_tiles(call, weight, config, num_programs=132)
    if sums is not None:
        add_splits(call, sums)
        return call.out
    return out


def skip_unless_hopper(device):
    if device_info(device).capability != TILES_CAPABILITY:
        pytest.skip("needs sm_90")


@pytest.mark.gpu
@pytest.mark.gpu_only
@given(
    kind=st.sampled_from(sorted(TAKEN - {"uint4_order"})),
    tile=st.sampled_from(TILES),
    splits=st.sampled_from([1, 2, 4]),
    more_tokens=st.integers(-31, 40),
    size=st.sampled_from([(512, 72), (1024, 384), (4096, 136)]),
    has_bias=st.booleans(),
    seed=seeds,
)
def test_products_are_those_of_the_values(
    device, kind, tile, splits, more_tokens, size, has_bias, seed
):
    skip_unless_hopper(device)
    if kind in ("q4_0", "q8_0", "int8", "int8_zeros"):
        tile = min(tile, 128)  # registers do not hold more beside their numbers
    weight = random_weight(kind, size[1], size[0], torch.bfloat16, seed=seed, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(tile + more_tokens, size[0], device=device, generator=generator).bfloat16()
    bias = None
    if has_bias:
        bias = torch.randn(size[1], device=device, generator=generator).bfloat16()
    got = product(x, weight, tile, splits, bias)
    want = x.double() @ weight.dense().double().T
    want = want if bias is None else want + bias.double()
    assert float((got.double() - want).abs().max() / want.abs().max()) < 0.006
    for _ in range(4):  # products that are still running read registers
        assert torch.equal(product(x, weight, tile, splits, bias), got)


@pytest.mark.gpu
@pytest.mark.gpu_only
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("kind", ["int4", "uint4_zeros", "mxfp4", "e4m3_row"])
def test_each_value_comes_from_its_place(device, kind, tile):
    """A token that is 1 in one place, else 0, picks a column: every value exactly."""
    skip_unless_hopper(device)
    weight = random_weight(kind, 264, 512, torch.bfloat16, seed=3, device=device)
    if weight.scales is not None and weight.scales.dtype == torch.float16:
        weight = replace(weight, scales=weight.scales.bfloat16())
    x = torch.eye(512, dtype=torch.bfloat16, device=device)
    assert torch.equal(product(x, weight, tile, 1), weight.dense().T)
