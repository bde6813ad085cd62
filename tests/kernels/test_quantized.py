"""Matrices of codes: their values, cuts and checks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mrv1.kernels import QuantizedWeight, reference
from tests.kernels.quantized_weights import KINDS, random_weight

gguf = pytest.importorskip("gguf")


def _grid(count: int, unit: int) -> list[int]:
    return [index // unit for index in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_values_follow_from_the_formula(kind: str) -> None:
    """Each value by plain Python, from the bytes."""
    weight = random_weight(kind, 6, 512, torch.float64, seed=1)
    got, order = weight.dense(), weight.order
    for row in range(6):
        for column in (*range(0, 512, 37), 511):
            place = column if order is None else order.tolist().index(column)
            assert got[row, column].item() == _value(weight, row, place), (row, column)


def _value(weight: QuantizedWeight, row: int, place: int) -> float:
    """Return one value, computed in float32 as the formula says."""
    f32 = np.float32
    if weight.heads is not None:
        return _super_block_value(weight, row, place)
    if weight.code in ("e4m3", "int8"):
        code = float(weight.codes[row, place].float())
    else:
        byte = int(weight.codes[row, place // 2])
        nibble = byte >> 4 if place % 2 else byte & 15
        if weight.code == "e2m1":
            code = (0, 0.5, 1, 1.5, 2, 3, 4, 6)[nibble % 8] * (-1 if nibble >= 8 else 1)
        else:
            code = nibble - (8 if weight.code == "int4" else 0)
    at = row // weight.rows_per_scale, place // (weight.inputs_per_scale or weight.shape[1])
    stored = weight.scales[at]
    is_exponent = stored.dtype == torch.uint8
    scale = f32(2.0 ** (int(stored) - 127) if is_exponent else float(stored))
    if weight.zeros is not None:
        code -= int(weight.zeros[at])
    value = f32(code) * scale
    return float(value if weight.mins is None else value + f32(float(weight.mins[at])))


def _super_block_value(weight: QuantizedWeight, row: int, place: int) -> float:
    """Return one value as GGUF's C code computes it: ``get_scale_min_k4`` and the loops around."""
    f32 = np.float32
    block, inside = divmod(place, 256)
    byte = int(weight.codes[row, place // 2])
    code = byte >> 4 if place % 2 else byte & 15
    head = weight.heads[row, block].numpy()
    if weight.code == "q6_k":
        code |= (int(weight.high[row, place // 4]) >> 2 * (place % 4) & 3) << 4
        d, scale = head[16:].view(np.float16)[0], head[:16].view(np.int8)[inside // 16]
        return float(f32(d) * f32(scale) * f32(code - 32))
    if weight.code == "q5_k":
        code |= (int(weight.high[row, place // 8]) >> place % 8 & 1) << 4
    d, dmin = (f32(each) for each in head[:4].view(np.float16))
    q, j = [int(each) for each in head[4:]], inside // 32
    if j < 4:
        scale, least = q[j] & 63, q[j + 4] & 63
    else:
        scale = (q[j + 4] & 15) | (q[j - 4] >> 6) << 4
        least = (q[j + 4] >> 4) | (q[j] >> 6) << 4
    return float(d * f32(scale) * f32(code) - dmin * f32(least))


@pytest.mark.parametrize("kind", KINDS)
def test_cuts_have_the_values_of_their_part(kind: str) -> None:
    weight = replace(random_weight(kind, 256, 1024, torch.bfloat16, seed=2), order=None)
    dense = weight.dense()
    assert torch.equal(weight.rows(0, 128).dense(), dense[:128])
    assert torch.equal(weight.rows(128, 256).dense(), dense[128:])
    assert torch.equal(weight.inputs(256, 1024).dense(), dense[:, 256:])
    cut = weight.inputs(256, 512).rows(0, 128)
    assert torch.equal(cut.contiguous().dense(), dense[:128, 256:512])
    if weight.scales is not None and weight.scales.shape[1] == 1:
        assert torch.equal(weight.inputs(2, 100).dense(), dense[:, 2:100])


def test_a_cut_through_a_group_is_refused() -> None:
    weight = random_weight("e4m3_block", 256, 512, torch.bfloat16, seed=0)
    with pytest.raises(ValueError, match=r"rows: .* multiples of 128, .* 64 to 256"):
        weight.rows(64, 256)
    with pytest.raises(ValueError, match=r"inputs: .* multiples of 128, .* 0 to 64"):
        weight.inputs(0, 64)
    with pytest.raises(ValueError, match="rows: expected 0 <= start < stop <= 256, got 0, 257"):
        weight.rows(0, 257)
    ragged = random_weight("e4m3_block", 200, 512, torch.bfloat16, seed=0)
    assert torch.equal(ragged.rows(128, 200).dense(), ragged.dense()[128:])


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0", "mxfp4", "q6_k", "q4_k", "q5_k"])
def test_values_equal_those_of_the_gguf_package(kind: str) -> None:
    """Random bytes of a file's blocks, taken apart here by numpy alone."""
    generator = np.random.default_rng(3)
    name = {"mxfp4": "MXFP4", "q4_k": "Q4_K", "q5_k": "Q5_K", "q6_k": "Q6_K"}
    stored = gguf.GGMLQuantizationType[name.get(kind, kind.upper())]
    block, size = gguf.GGML_QUANT_SIZES[stored]
    blocks = generator.integers(0, 256, (4, 512 // block, size), dtype=np.uint8)
    halves = {"q4_0": (0,), "q4_1": (0, 2), "q8_0": (0,), "q6_k": (208,), "mxfp4": ()}
    for at in halves.get(kind, (0, 2)):
        values = generator.standard_normal(blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = values.view(np.uint8).reshape(*blocks.shape[:2], 2)
    if kind == "mxfp4":
        blocks[..., 0] = blocks[..., 0] % 200 + 1  # 2^-127 and 2^128 are at the ends of float32
    want = torch.from_numpy(gguf.dequantize(blocks.reshape(4, -1), stored))
    got = _from_blocks(kind, torch.from_numpy(blocks)).dense()
    assert torch.equal(got, want)


def _from_blocks(kind: str, blocks: torch.Tensor) -> QuantizedWeight:
    def half(at: int) -> torch.Tensor:
        return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]

    def packed(nibbles: torch.Tensor) -> torch.Tensor:
        return nibbles[:, 0::2] | nibbles[:, 1::2] << 4

    def halves(part: torch.Tensor) -> torch.Tensor:
        """Codes of bytes whose low nibbles come first, all of them, then the high ones."""
        return torch.cat((part & 15, part >> 4), -1)

    common = {"dtype": torch.float32, "inputs_per_scale": 32}
    if kind == "q8_0":
        codes = blocks[..., 2:].flatten(1).view(torch.int8)
        return QuantizedWeight(code="int8", codes=codes, scales=half(0), **common)
    if kind in ("q4_0", "q4_1", "mxfp4"):
        codes = packed(halves(blocks[..., -16:]).flatten(1))
        if kind == "q4_0":
            return QuantizedWeight(code="int4", codes=codes, scales=half(0), **common)
        if kind == "q4_1":
            return QuantizedWeight(
                code="uint4", codes=codes, scales=half(0), mins=half(2), **common
            )
        return QuantizedWeight(code="e2m1", codes=codes, scales=blocks[..., 0].clone(), **common)
    if kind == "q6_k":
        low = halves(blocks[..., :128].unflatten(-1, (2, 64))).flatten(1)
        high = blocks[..., 128:192].unflatten(-1, (2, 32))
        bits = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(1)
        high = sum(bits[:, at::4] << 2 * at for at in range(4))
        return QuantizedWeight(
            code="q6_k", codes=packed(low), high=high, heads=blocks[..., 192:].clone(),
            dtype=torch.float32,
        )  # fmt: skip
    low = halves(blocks[..., -128:].unflatten(-1, (4, 32))).flatten(1)
    high = None
    if kind == "q5_k":
        bits = torch.cat([blocks[..., 16:48] >> shift & 1 for shift in range(8)], -1).flatten(1)
        high = sum(bits[:, at::8] << at for at in range(8))
    return QuantizedWeight(
        code=kind, codes=packed(low), high=high, heads=blocks[..., :16].clone(),
        dtype=torch.float32,
    )  # fmt: skip


def test_the_oracle_multiplies_by_the_values() -> None:
    weight = random_weight("int4", 24, 256, torch.float32, seed=4)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(5))
    assert torch.equal(reference.linear(x, weight), reference.linear(x, weight.dense()))


def test_fields_that_do_not_fit_are_refused_by_name() -> None:
    int4 = random_weight("int4", 8, 256, torch.bfloat16, seed=0)
    e4m3 = random_weight("e4m3_row", 8, 256, torch.bfloat16, seed=0)
    one_scale = random_weight("e4m3_tensor", 8, 256, torch.bfloat16, seed=0)
    narrow = replace(e4m3, scales=e4m3.tensors["scales"].bfloat16())
    q4_k = random_weight("q4_k", 8, 256, torch.bfloat16, seed=0)
    for weight, error, message, changes in (
        (int4, ValueError, "weight.code: expected one of e4m3, .* got 'int3'", {"code": "int3"}),
        (int4, TypeError, "weight.codes: expected dtype torch.int8", {"code": "int8"}),
        (int4, ValueError, r"weight.scales: expected shape \[8, 4\]", {"inputs_per_scale": 64}),
        (int4, TypeError, "weight.scales: .* got NoneType", {"scales": None}),
        (int4, TypeError, "weight.scales: expected dtype", {"scales": int4.codes[:, :2]}),
        (int4, ValueError, "weight.zeros: expected None for int4", {"zeros": int4.codes[:, :2]}),
        (int4, ValueError, "weight.heads: expected None for int4", {"heads": q4_k.heads}),
        (int4, ValueError, "expected at least 1 and 0, got 0 and 128", {"rows_per_scale": 0}),
        (int4, ValueError, r"weight.order: .* \[256\]", {"order": q4_k.codes[0, :9].int()}),
        (int4, ValueError, "weight.activations: .* got 'token'", {"activations": "token"}),
        (int4, TypeError, "weight.dtype: .* got torch.int8", {"dtype": torch.int8}),
        (int4, ValueError, "weight.codes: .* one row and column", {"codes": int4.codes[:0]}),
        (e4m3, ValueError, "weight.activations: .* got 'row'", {"activations": "row"}),
        (one_scale, ValueError, "weight.activations: .* of rows", {"activations": "token"}),
        (narrow, ValueError, "weight.activations: .* float32 scales", {"activations": "token"}),
        (e4m3, ValueError, "weight.scales: .* cpu, got meta", {"scales": e4m3.scales.to("meta")}),
        (q4_k, TypeError, "weight.heads: .* got NoneType", {"heads": None}),
        (q4_k, ValueError, "weight.scales: expected None for q4_k", {"scales": int4.scales}),
        (q4_k, ValueError, "weight.high: expected None for q4_k", {"high": q4_k.codes}),
        (q4_k, ValueError, "multiple of 256 .* got 128", {"codes": q4_k.codes[:, :64]}),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            replace(weight, **changes)


def test_bytes_are_those_of_all_tensors() -> None:
    weight = random_weight("q4_k", 8, 1024, torch.bfloat16, seed=0)
    assert weight.nbytes == 8 * 4 * 144  # a block of the file has 144 bytes
    assert weight.to("meta").device.type == "meta"
