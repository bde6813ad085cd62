"""GGUF's blocks, repacked, have the values that gguf's own ``dequantize`` gives, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1.kernels.layers.quantized import QuantizedWeight
from mrv1.models.quantization.ggml_blocks import BLOCK_TYPES
from tests.models.quantization.blocks import random_blocks

gguf = pytest.importorskip("gguf", reason="not run: the package gguf is not installed")


def weight_of(kind: str, data: np.ndarray) -> QuantizedWeight:
    block = BLOCK_TYPES[kind]
    fields = block.fields(torch.from_numpy(data))
    inputs = 0 if "heads" in fields else block.num_inputs
    return QuantizedWeight(code=block.code, dtype=torch.float32, inputs_per_scale=inputs, **fields)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@given(rows=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_values_and_bytes_are_those_of_the_file(kind, rows, blocks, seed):
    data = random_blocks(kind, rows, blocks, seed)
    weight = weight_of(kind, data)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(
            data.reshape(rows, -1), gguf.GGMLQuantizationType[kind]
        ).reshape(rows, -1)
    assert weight.shape == expected.shape
    assert torch.equal(weight.dense(), torch.from_numpy(expected))
    assert weight.nbytes == data.nbytes


def test_sizes_of_blocks_are_gguf_s():
    for kind, block in BLOCK_TYPES.items():
        sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        assert sizes == (block.num_inputs, block.num_bytes)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "MXFP4"])
def test_what_gguf_quantizes_comes_back(kind):
    values = np.random.default_rng(0).normal(size=(6, 96)).astype(np.float32)
    data = gguf.quantize(values, gguf.GGMLQuantizationType[kind])
    weight = weight_of(kind, data.reshape(6, 3, -1))
    error = (weight.dense() - torch.from_numpy(values)).abs().max()
    assert error < {"Q8_0": 0.02, "MXFP4": 1.0}.get(kind, 0.3)
