"""The instructions that widen pairs of codes, computed here for all bits, without a GPU."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from mrv1.kernels.layers import widening
from mrv1.kernels.layers.quantized import E2M1

BITS = np.arange(1 << 16, dtype=np.uint32)
"""Every int16 of codes; a register has the same in both halves."""
PER = {"e4m3": 2, "int8": 2, "int4": 4, "e2m1": 4}
"""Codes in 16 bits."""
WRITTEN = {"e4m3": widening._e4m3_pairs, "int8": widening._int8_pairs}
GENERATED = {"int4": widening._nibble_instructions, "e2m1": widening._e2m1_instructions}


def _lines(code: str, dtype: torch.dtype) -> list[list[str]]:
    """Return the instructions of a function for a dtype, each with its operands."""
    if code in GENERATED:
        body = GENERATED[code](dtype == torch.float16)
    else:
        bodies = re.findall(r'"""(\{.*?\})"""', WRITTEN[code].src, re.S)
        own = "bf16x2" if dtype == torch.bfloat16 else "f16x2"
        (body,) = (each for each in bodies if re.search(rf"\.{own}\b", each))
    lines = (re.split(r"[\s,]+", line.strip()) for line in body.strip("{} \n").split(";"))
    return [line for line in lines if line[0] and line[0] != ".reg"]


def _run(lines: list[list[str]], num_outputs: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the outputs for all of BITS, each [65536, 2] of ``dtype``."""
    registers = {f"${num_outputs}": BITS << 16 | BITS}

    def value(operand: str) -> np.ndarray:
        if operand in registers:
            return registers[operand]
        return np.full_like(BITS, int(operand, 0))

    def halves(operand: str) -> torch.Tensor:
        words = torch.from_numpy(value(operand).copy().view(np.int16).reshape(-1, 2))
        return words.view(dtype).double()

    for name, out, *operands in lines:
        a, *others = operands
        if name == "mov.b32":
            result = value(a)
        elif name.startswith(("shl", "shr")):
            by = int(others[0])
            result = value(a) << by if name[:3] == "shl" else value(a) >> by
        elif name == "and.b32":
            result = value(a) & value(others[0])
        elif name == "lop3.b32":
            masked = value(a) & value(others[0])
            result = {"0xEA": np.bitwise_or, "0x6A": np.bitwise_xor}[others[2]](
                masked, value(others[1])
            )
        else:
            first, second = halves(a), halves(others[0])
            if name.startswith("fma"):
                exact = first * second + halves(others[1])
            else:
                exact = first - second if name.startswith("sub") else first * second
            result = exact.to(dtype).view(torch.int16).numpy().view(np.uint32).reshape(-1)
        registers[out] = result.astype(np.uint32)
    return [
        torch.from_numpy(registers[f"${i}"].view(np.int16).reshape(-1, 2)).view(dtype)
        for i in range(num_outputs)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("code", PER)
def test_pairs_are_the_codes(code: str, dtype: torch.dtype) -> None:
    if code == "e4m3" and dtype == torch.float16:
        pytest.skip("the KV cache's conversion, which has its own tests")
    count = PER[code]
    got = _run(_lines(code, dtype), count, dtype)
    for i, pair in enumerate(got):
        bits = torch.from_numpy((BITS >> (16 // count * i)).astype(np.uint8))
        if count == 4:
            nibble = (bits & 15).int()
            table = torch.tensor((*E2M1, *(-each for each in E2M1)))
            want = table[nibble] if code == "e2m1" else nibble.float() - 8
        else:
            want = bits.view(torch.int8 if code == "int8" else torch.float8_e4m3fn).float()
        is_number = ~want.isnan()
        for half in (0, 1):
            assert torch.equal(pair[:, half][is_number].float(), want[is_number])
