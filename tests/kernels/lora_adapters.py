"""Shared by the tests of adapters (LoRA): adapters of one weight, with NaN wherever none is."""

from __future__ import annotations

import torch

from mrv1.kernels.layers.lora import Adapters, LoraMatrices
from tests.kernels.elementwise import normal

USES = ("none", "one", "mixed", "few")
"""Which adapters tokens use: none, all the same, any, or half of the tokens any."""


def lora_adapters(
    num_tokens, num_in, part_rows, dtype, device, *, max_rank=8, slots=5, uses="mixed", seed=0
):
    """Return adapters whose values are of order one; unused slots and ranks are NaN.

    Ranks go from 0, no adapter of this part, to ``max_rank``; slots are in no order.
    """
    generator = torch.Generator().manual_seed(seed)
    matrices = LoraMatrices.empty(slots, max_rank, num_in, part_rows, device=device, dtype=dtype)
    used = torch.randint(-1, slots - 1, (num_tokens,), generator=generator)  # the last is unused
    if uses == "none":
        used.fill_(-1)
    elif uses == "one":
        used.fill_(2)
    elif uses == "few":
        used[torch.rand(num_tokens, generator=generator) < 0.5] = -1
    for each in (matrices.a, matrices.b, matrices.scaling):
        each.fill_(torch.nan)
    matrices.ranks.fill_(max_rank)
    for slot in set(used.tolist()) - {-1}:
        for part, rows in enumerate(part_rows):
            rank = int(torch.randint(0, max_rank + 1, (), generator=generator))
            matrices.ranks[slot, part] = rank
            matrices.scaling[slot, part] = 2.0**-part if slot % 2 else 0.7
            first, start = part * max_rank, matrices.part_starts[part]
            a = normal((rank, num_in), torch.float64, "cpu", seed + 10 * slot + part)
            matrices.a[slot, first : first + rank] = (a * num_in**-0.5).to(dtype).to(device)
            b = normal((rank, rows), torch.float64, "cpu", seed + 100 * slot + part)
            columns = slice(start, start + rows)
            matrices.b[slot, :rank, columns] = (b * max(rank, 1) ** -0.5).to(dtype).to(device)
    return Adapters(matrices=matrices, slots=used.int().to(device))


def of_tokens(adapters, rows):
    """Return the adapters of some of the tokens."""
    return Adapters(matrices=adapters.matrices, slots=adapters.slots[rows].contiguous())


def added(x, adapters):
    """Return what adapters add to ``[tokens, rows]``, in float64, as the formula says it."""
    matrices = adapters.matrices
    out = x.new_zeros(len(x), sum(matrices.part_rows), dtype=torch.float64)
    for token, slot in enumerate(adapters.slots.tolist()):
        for part, rows in enumerate(matrices.part_rows if slot >= 0 else ()):
            rank, first = int(matrices.ranks[slot, part]), part * matrices.max_rank
            columns = slice(matrices.part_starts[part], matrices.part_starts[part] + rows)
            a = matrices.a[slot, first : first + rank].double()
            b = matrices.b[slot, :rank, columns].double()
            scaling = float(matrices.scaling[slot, part])
            out[token, columns] = scaling * (b.T @ (a @ x[token].double()))
    return out
