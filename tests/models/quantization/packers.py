"""GPTQ's, AWQ's and gpt-oss's packing in plain Python, from the formats' descriptions.

The functions take codes ``[out, in]`` and zero points ``[out, groups]``, and return what a
checkpoint stores.
"""

from __future__ import annotations

import torch


def words(fields: list[list[int]], bits: int) -> torch.Tensor:
    """Rows of fields as int32 words, the first field lowest."""
    per_word = 32 // bits
    rows = []
    for row in fields:
        runs = (row[i : i + per_word] for i in range(0, len(row), per_word))
        rows.append([sum(field << bits * i for i, field in enumerate(run)) for run in runs])
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)  # the upper half wraps around


def gptq(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, bits: int, *, version: int
) -> dict[str, torch.Tensor]:
    """``g_idx`` is the caller's: a code is stored at its input, whatever its group."""
    stored = zeros.T.tolist()
    if version == 1:
        stored = [[(zero - 1) % 2**bits for zero in row] for row in stored]
    return {
        "qweight": words(codes.tolist(), bits).T.contiguous(),
        "qzeros": words(stored, bits),
        "scales": scales.T.contiguous(),
    }


def awq(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def packed(table: torch.Tensor) -> torch.Tensor:
        rows = table.T.tolist()
        return words([[row[i - i % 8 + order[i % 8]] for i in range(len(row))] for row in rows], 4)

    return {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales.T.contiguous()}
