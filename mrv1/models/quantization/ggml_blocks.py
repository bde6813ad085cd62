"""GGUF's blocks of numbers as codes that the kernels read: codes apart from what scales them.

A row of a GGUF tensor is a run of blocks, each with its scales and its codes, in an order of
inputs that differs by type. Here the codes of a row are side by side, in the order of the inputs,
and so are bits beyond the fourth. Scales are fp16 numbers, or of the super-blocks (K types) the
*heads*, with the bytes of the file: no byte is lost and none is added.

Source: gguf 0.19 (github.com/ggml-org/llama.cpp, gguf-py), ``quants.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mrv1.kernels.layers.quantized import SUPER_BLOCK, CodeName
from mrv1.models.quantization.packing import packed

Fields = dict[str, torch.Tensor]
"""Fields of a ``QuantizedWeight``, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockType:
    """A type of blocks that is kept."""

    code: CodeName
    """What its codes mean."""
    num_inputs: int
    """Inputs of a block."""
    num_bytes: int
    """Bytes of a block in a file."""
    fields: Callable[[torch.Tensor], Fields]
    """Takes ``[out, blocks, bytes]`` uint8 and returns the fields of a weight, on its device."""


def _halves(octets: torch.Tensor) -> torch.Tensor:
    """Return the codes of bytes whose high nibbles follow all low ones, in pairs.

    The last dimension is such a run; all runs of a row are joined: ``[out, in / 2]``.
    """
    return packed(torch.cat((octets & 15, octets >> 4), dim=-1)).flatten(1)


def _numbers(octets: torch.Tensor) -> torch.Tensor:
    """Return ``[out, blocks, 2]`` bytes as ``[out, blocks]`` float16."""
    return octets.contiguous().view(torch.float16).squeeze(-1)


def _q8_0(blocks: torch.Tensor) -> Fields:
    codes = blocks[..., 2:].flatten(1).view(torch.int8)
    return {"codes": codes, "scales": _numbers(blocks[..., :2])}


def _q4_0(blocks: torch.Tensor) -> Fields:
    return {"codes": _halves(blocks[..., 2:]), "scales": _numbers(blocks[..., :2])}


def _q4_1(blocks: torch.Tensor) -> Fields:
    scales, mins = (_numbers(blocks[..., i : i + 2]) for i in (0, 2))
    return {"codes": _halves(blocks[..., 4:]), "scales": scales, "mins": mins}


def _mxfp4(blocks: torch.Tensor) -> Fields:
    return {"codes": _halves(blocks[..., 1:]), "scales": blocks[..., 0].contiguous()}


def _q4_k(blocks: torch.Tensor) -> Fields:
    heads, low = blocks.split((16, SUPER_BLOCK // 2), dim=-1)
    # 32 bytes have the low nibbles of 32 inputs and the high nibbles of the 32 after them.
    return {"codes": _halves(low.unflatten(-1, (-1, 32))), "heads": heads.contiguous()}


def _q5_k(blocks: torch.Tensor) -> Fields:
    heads, high, low = blocks.split((16, SUPER_BLOCK // 8, SUPER_BLOCK // 2), dim=-1)
    # The fifth bit of input 32 i + j is bit i of byte j.
    return {
        "codes": _halves(low.unflatten(-1, (-1, 32))),
        "high": _joined(_spread(high, bits=1), bits=1),
        "heads": heads.contiguous(),
    }


def _q6_k(blocks: torch.Tensor) -> Fields:
    low, high, heads = blocks.split((SUPER_BLOCK // 2, SUPER_BLOCK // 4, 18), dim=-1)
    # 64 bytes have the low nibbles of 64 inputs and the high nibbles of the 64 after them. Of 32
    # bytes, bits 2 i and 2 i + 1 of byte j are high bits of input 32 i + j, of 128.
    return {
        "codes": _halves(low.unflatten(-1, (-1, 64))),
        "high": _joined(_spread(high.unflatten(-1, (-1, 32)), bits=2), bits=2),
        "heads": heads.contiguous(),
    }


def _spread(octets: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Return fields, ``[out, in]``: the lowest of all bytes of the last dimension come first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=octets.device)[:, None]
    return (octets[..., None, :] >> shifts & (1 << bits) - 1).flatten(1)


def _joined(fields: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Return ``[out, in]`` fields of 1 or 2 bits side by side, the first one lowest."""
    while bits < 8:
        fields = fields[:, 0::2] | fields[:, 1::2] << bits
        bits *= 2
    return fields


BLOCK_TYPES = {
    "Q8_0": BlockType(code="int8", num_inputs=32, num_bytes=34, fields=_q8_0),
    "Q4_0": BlockType(code="int4", num_inputs=32, num_bytes=18, fields=_q4_0),
    "Q4_1": BlockType(code="uint4", num_inputs=32, num_bytes=20, fields=_q4_1),
    "MXFP4": BlockType(code="e2m1", num_inputs=32, num_bytes=17, fields=_mxfp4),
    "Q4_K": BlockType(code="q4_k", num_inputs=SUPER_BLOCK, num_bytes=144, fields=_q4_k),
    "Q5_K": BlockType(code="q5_k", num_inputs=SUPER_BLOCK, num_bytes=176, fields=_q5_k),
    "Q6_K": BlockType(code="q6_k", num_inputs=SUPER_BLOCK, num_bytes=210, fields=_q6_k),
}
"""The types that are kept in blocks, by gguf's names."""
