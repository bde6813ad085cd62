"""Random quantized weights of every kind that checkpoints have."""

from __future__ import annotations

from dataclasses import replace

import torch

from mrv1.kernels import QuantizedWeight

KINDS = (
    "e4m3_tensor", "e4m3_row", "e4m3_block", "int8", "int8_zeros", "q8_0", "int4", "int4_row",
    "uint4_zeros", "uint4_order", "q4_0", "q4_1", "mxfp4", "q4_k", "q5_k", "q6_k",
)  # fmt: skip
"""Names of formats, or of codes and what they have beside them."""

INPUTS_PER_SCALE = {"q8_0": 32, "q4_0": 32, "q4_1": 32, "mxfp4": 32, "int4_row": 0}


def random_weight(
    kind: str,
    num_out: int,
    num_in: int,
    dtype: torch.dtype,
    *,
    seed: int,
    device: torch.device | str = "cpu",
) -> QuantizedWeight:
    """Return a weight whose values are about ``num_in ** -0.5``; of K types, multiples of 256."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(dtype)

    def scales(size: float, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        factors = torch.rand(shape, generator=generator) + 0.5
        return (factors * size * num_in**-0.5).to(dtype)

    groups = -(-num_in // (INPUTS_PER_SCALE.get(kind, 128) or num_in))
    common = {"dtype": dtype, "inputs_per_scale": INPUTS_PER_SCALE.get(kind, 128)}
    if kind.startswith("e4m3"):
        codes = torch.randn(num_out, num_in, generator=generator) * 64
        codes = codes.clamp(-448, 448).to(torch.float8_e4m3fn)
        rows, inputs = {"tensor": (num_out, 0), "row": (1, 0), "block": (128, 128)}[kind[5:]]
        shape = -(-num_out // rows), -(-num_in // (inputs or num_in))
        weight = QuantizedWeight(
            code="e4m3", codes=codes, dtype=dtype, rows_per_scale=rows, inputs_per_scale=inputs,
            scales=scales(1 / 64, *shape, dtype=torch.float32),
        )  # fmt: skip
    elif kind in ("int8", "int8_zeros", "q8_0"):
        zeros = None
        if kind == "int8_zeros":
            zeros = integers(-128, 128, num_out, groups, dtype=torch.int8)
        weight = QuantizedWeight(
            code="int8", codes=integers(-128, 128, num_out, num_in, dtype=torch.int8), zeros=zeros,
            scales=scales(1 / 74, num_out, groups, dtype=torch.float16), **common,
        )  # fmt: skip
    elif kind in ("q4_k", "q5_k", "q6_k"):
        weight = _super_blocks(kind, num_out, num_in, dtype, generator)
    else:
        codes = integers(0, 256, num_out, num_in // 2, dtype=torch.uint8)
        code = {"mxfp4": "e2m1", "q4_0": "int4"}.get(kind, kind.partition("_")[0])
        code = "uint4" if kind == "q4_1" else code
        is_file = kind in ("q4_0", "q4_1")
        of_group = scales(
            1 / 5, num_out, groups, dtype=torch.float16 if is_file else torch.bfloat16
        )
        zeros = mins = order = None
        if kind == "mxfp4":
            of_group = integers(118, 124, num_out, groups, dtype=torch.uint8)
        elif kind == "q4_1":
            mins = -7 * of_group
        elif code == "uint4":
            zeros = integers(0, 17, num_out, groups, dtype=torch.uint8)
        if kind == "uint4_order":
            order = torch.randperm(num_in, generator=generator).int()
        weight = QuantizedWeight(
            code=code, codes=codes, scales=of_group, zeros=zeros, mins=mins, order=order, **common
        )
    return weight.to(device)


def random_experts(
    kind: str,
    num_experts: int,
    num_out: int,
    num_in: int,
    dtype: torch.dtype,
    *,
    seed: int,
    device: torch.device | str = "cpu",
) -> QuantizedWeight:
    """Return a stack of ``random_weight``, none of whose kinds has an order."""
    each = [random_weight(kind, num_out, num_in, dtype, seed=seed + i) for i in range(num_experts)]
    stacks = {
        name: torch.stack([weight.tensors[name] for weight in each]) for name in each[0].tensors
    }
    return replace(each[0], **stacks).to(device)


def _super_blocks(
    kind: str, num_out: int, num_in: int, dtype: torch.dtype, generator: torch.Generator
) -> QuantizedWeight:
    def random_bytes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=generator).to(torch.uint8)

    def halves(count: int) -> torch.Tensor:
        size = {"q4_k": 1 / 200, "q5_k": 1 / 400, "q6_k": 1 / 1400}[kind] * num_in**-0.5
        values = (torch.rand(num_out, num_in // 256, count, generator=generator) + 0.5) * size
        return values.half().view(torch.uint8)

    packed = random_bytes(num_out, num_in // 256, 16 if kind == "q6_k" else 12)
    parts = (packed, halves(1)) if kind == "q6_k" else (halves(2), packed)
    per_byte = {"q5_k": 8, "q6_k": 4}.get(kind)
    return QuantizedWeight(
        code=kind,
        codes=random_bytes(num_out, num_in // 2),
        high=None if per_byte is None else random_bytes(num_out, num_in // per_byte),
        heads=torch.cat(parts, -1),
        dtype=dtype,
    )
