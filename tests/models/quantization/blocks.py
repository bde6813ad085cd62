"""Random blocks of GGUF's types, of which gguf writes some alone."""

from __future__ import annotations

import numpy as np

from mrv1.models.quantization.ggml_blocks import BLOCK_TYPES

HALVES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
"""Where the fp16 numbers of a block are; MXFP4 has none."""


def random_blocks(kind: str, rows: int, blocks: int, seed: int) -> np.ndarray:
    """Bytes of any value, but that each fp16 number is finite: zero and subnormal ones, too."""
    rng = np.random.default_rng(seed)
    block = BLOCK_TYPES[kind]
    data = rng.integers(0, 256, (rows, blocks, block.num_bytes), dtype=np.uint8)
    for at in HALVES.get(kind, ()):
        data[..., at + 1] &= 0xBB  # no exponent of 31
    if kind == "MXFP4":
        data[..., 0] = np.minimum(data[..., 0], 254)
    return data


def usable_blocks(shape: tuple[int, int], kind: str) -> np.ndarray:
    """Rows ``[out, bytes]`` of a K type, whose values are about as large as a tiny model's."""
    rows, columns = shape
    data = random_blocks(kind, rows, columns // BLOCK_TYPES[kind].num_inputs, rows * columns)
    for at in HALVES[kind]:
        data[..., at : at + 2] = np.array([2e-4], np.float16).view(np.uint8)
    return data.reshape(rows, -1)
