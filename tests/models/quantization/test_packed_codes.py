"""GPTQ's, AWQ's and gpt-oss's tensors, repacked, against plain Python and public libraries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1.kernels.layers.quantized import QuantizedWeight
from mrv1.models.quantization.awq import awq_codes, read_awq
from mrv1.models.quantization.formats import ModuleFormat, ModulePart
from mrv1.models.quantization.gptq import gptq_zeros, read_gptq
from mrv1.models.quantization.mxfp4 import GROUP, exponent_problem
from mrv1.models.quantization.packing import groups_problem
from mrv1.models.quantization.settings import Settings
from tests.models.quantization import packers

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([8, 16, 32]))
"""Multiples of 8 outputs, groups, and their inputs."""
SEEDS = st.integers(0, 2**32 - 1)


def random_layer(
    shape: tuple[int, int, int], bits: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [out, in], zero points and scales [out, groups]."""
    eights, groups, inputs = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = (8 * eights, groups * inputs), (8 * eights, groups)
    codes, zeros = (torch.randint(2**bits, size, generator=generator) for size in sizes)
    return codes, zeros, torch.rand(sizes[1], generator=generator).add(0.01).half()


def values(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group: torch.Tensor
) -> torch.Tensor:
    """(code - zero) * scale, in float32, each input with its own group."""
    return (codes - zeros[:, group]).float() * scales[:, group].float()


def filled(
    form: ModuleFormat,
    stored: dict[str, torch.Tensor],
    shape: tuple[int, int],
    rank: int,
    cut: int,
) -> QuantizedWeight:
    """The weight of a rank, read in two parts: 0 and 1 divide rows, 2 and 3 inputs, 4 has all."""
    half = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}
    own = [slice(0, size) for size in shape]
    if rank in half:
        dim, index = half[rank]
        size = shape[dim] // 2
        own[dim] = slice(index * size, (index + 1) * size)
    rows, inputs = own
    weight = form.empty(
        [rows.stop - rows.start], inputs.stop - inputs.start,
        rows_per_scale=1, dtype=torch.float32, device="cpu",
    )  # fmt: skip
    for tensor in weight.tensors.values():
        tensor.view(torch.uint8).fill_(0xA5)
    part = ModulePart(name="layer", shape=shape, rows=rows, inputs=inputs)
    for name, place in form.places(part, weight).items():
        values = stored[name]
        assert place.fits(values.shape), name
        assert values.dtype in place.dtypes, name
        assert place.problem is None or place.problem(values) is None
        at = len(values) if place.is_small else min(cut, len(values))
        place.write(0, values[:at])
        if at < len(values):
            place.write(at, values[at:])
    return weight


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
@given(
    shape=SHAPES, seed=SEEDS, has_zeros=st.booleans(), has_order=st.booleans(),
    rank=st.integers(0, 4), cut=st.integers(0, 40),
)  # fmt: skip
def test_gptq_has_the_values_that_were_packed(
    bits, version, shape, seed, has_zeros, has_order, rank, cut
):
    eights, groups, inputs = shape
    codes, zeros, scales = random_layer((2 * eights, 2 * groups, inputs), bits, seed)
    # Version 1 cannot say 0 without a borrow: see below.
    zeros = zeros.clamp(min=1) if has_zeros else torch.full_like(zeros, 2 ** (bits - 1))
    g_idx = torch.arange(2 * groups).repeat_interleave(inputs)
    if has_order:
        g_idx = g_idx[torch.randperm(len(g_idx), generator=torch.Generator().manual_seed(seed))]
        rank = 4 if rank > 1 else rank
    stored = packers.gptq(codes, zeros, scales, bits, version=version) | {"g_idx": g_idx.int()}
    config = {
        "bits": bits, "group_size": inputs, "desc_act": has_order, "sym": not has_zeros,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }  # fmt: skip
    method = read_gptq(Settings("quantization_config", config), scale_dtype=torch.float16)
    form = method.module("model.layers.0.mlp.up_proj")
    assert form is not None
    weight = filled(form, stored, tuple(codes.shape), rank, cut)
    check_part(weight, values(codes, zeros, scales, g_idx), rank)


def check_part(weight: QuantizedWeight, whole: torch.Tensor, rank: int) -> None:
    parts = [*whole.chunk(2, 0), *whole.chunk(2, 1), whole]
    assert torch.equal(weight.dense(), parts[rank])


def test_a_zero_point_0_of_version_1_borrows_from_the_field_above():
    """GPTQModel subtracts whole words, so that 0 and 1 beside it are stored as 0xFF."""
    stored = torch.tensor([[0x00000010 - 0x11111111]], dtype=torch.int32)
    zeros = gptq_zeros(stored, bits=4, version=1)
    assert zeros.flatten().tolist() == [0, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("g_idx", "problem"),
    [
        ([0, 0, 1, 2], "expected groups from 0 to 1, got 0 to 2"),
        ([0, -1, 1, 1], "expected groups from 0 to 1, got -1 to 1"),
        ([0, 0, 0, 1], "expected 2 inputs in each group, got 3 in group 0"),
        ([0, 1, 0, 1], "expected groups of neighbours where desc_act is false, got other groups"),
        ([0, 0, 1, 1], None),
    ],
)
def test_groups_that_there_are_not_are_refused(g_idx, problem):
    given = torch.tensor(g_idx, dtype=torch.int32)
    assert groups_problem(given, num_groups=2, is_plain=True) == problem


@given(shape=SHAPES, seed=SEEDS, rank=st.integers(0, 4), cut=st.integers(0, 40))
def test_awq_has_the_values_that_were_packed(shape, seed, rank, cut):
    eights, groups, inputs = shape
    codes, zeros, scales = random_layer((2 * eights, 2 * groups, inputs), 4, seed)
    config = Settings("quantization_config", {"bits": 4, "group_size": inputs, "version": "GEMM"})
    form = read_awq(config, scale_dtype=torch.float16).module("model.layers.0.mlp.up_proj")
    assert form is not None
    weight = filled(form, packers.awq(codes, zeros, scales), tuple(codes.shape), rank, cut)
    group = torch.arange(2 * groups).repeat_interleave(inputs)
    check_part(weight, values(codes, zeros, scales, group), rank)


def test_awq_has_the_codes_that_compressed_tensors_reads():
    convert = pytest.importorskip(
        "compressed_tensors.entrypoints.convert",
        reason="not run: compressed-tensors is not installed",
    )
    codes, zeros, scales = random_layer((3, 2, 32), 4, 1)
    stored = {f"layer.{name}": value for name, value in packers.awq(codes, zeros, scales).items()}
    converter = convert.AutoAWQConverter(group_size=32, targets=["re:.*layer"])
    theirs = converter.process(dict(stored))
    weight = torch.stack([theirs["layer.weight_packed"] >> 4 * i & 15 for i in range(8)], -1)
    assert torch.equal(awq_codes(stored["layer.qweight"]), weight.flatten(1).to(torch.uint8))
    points = torch.stack([theirs["layer.weight_zero_point"] >> 4 * i & 15 for i in range(8)], 1)
    assert torch.equal(awq_codes(stored["layer.qzeros"]), points.flatten(0, 1).to(torch.uint8))


@given(experts=st.integers(1, 3), rows=st.integers(1, 5), groups=st.integers(1, 3), seed=SEEDS)
def test_mxfp4_has_the_values_of_transformers(experts, rows, groups, seed):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(seed)
    lead = (experts, rows, groups)
    blocks = torch.randint(256, (*lead, GROUP // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(16, 240, lead, generator=generator, dtype=torch.uint8)
    weight = QuantizedWeight(
        code="e2m1", codes=blocks.flatten(-2), scales=scales, inputs_per_scale=GROUP,
        dtype=torch.float32,
    )  # fmt: skip
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(weight.dense(), expected.transpose(1, 2))
    assert exponent_problem(scales) is None


def test_an_exponent_that_is_nan_is_refused():
    problem = exponent_problem(torch.tensor([[3, 255]], dtype=torch.uint8))
    assert problem is not None
    assert problem.startswith("expected exponents of numbers, 0 to 254, got 255")
