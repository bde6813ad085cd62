"""What adapters (LoRA) add to a product, for kernels that write the product."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mrv1.kernels._base.arithmetic import next_power_of_2
from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.layers.lora import Adapters

MOST_AT_ONCE = 8
"""Most ranks whose loads start before a program waits for any of them."""
VALUES_AT_ONCE = 32
"""Most values of B that a thread loads before it waits, if it has one result at least: with twice
as many, ptxas spills registers of the largest tiles of ``linear`` (sm_90, triton 3.7.1)."""


class LoraPointers(NamedTuple):
    """The adapters of a weight, for tokens whose inputs ``shrink_adapters`` has multiplied."""

    shrunk_ptr: tl.tensor  # [tokens, PARTS * MAX_RANK] float32
    b_ptr: tl.tensor  # [slots, MAX_RANK, rows of the weight]
    slots_ptr: tl.tensor  # [tokens] int32, -1 = none
    ranks_ptr: tl.tensor  # [slots, PARTS] int32


@triton.jit
def adapter_values(
    lora, token, is_token, row, is_row, num_rows, PARTS: tl.constexpr, MAX_RANK: tl.constexpr,
    AT_ONCE: tl.constexpr, SECOND_PART: tl.constexpr, THIRD_PART: tl.constexpr,
):  # fmt: skip
    """Return what adapters add at tokens and rows of a weight, in float32, before any bias.

    ``token`` and ``row`` are broadcast to the tile, such as [tokens, 1] and [1, rows]. A value is
    one chain of fused additions, from the first rank to the last, in every kernel and tile: its
    bits follow from its token and row alone.
    """
    part = (row >= SECOND_PART).to(tl.int32) + (row >= THIRD_PART).to(tl.int32)
    slot = tl.load(lora.slots_ptr + token, mask=is_token, other=-1).to(tl.int64)
    has_rank = (slot >= 0) & is_row
    rank = tl.load(lora.ranks_ptr + slot * PARTS + part, mask=has_rank, other=0)
    shrunk_ptr = lora.shrunk_ptr + token.to(tl.int64) * (PARTS * MAX_RANK) + part * MAX_RANK
    b_ptr = lora.b_ptr + slot * MAX_RANK * num_rows + row
    added = tl.zeros((is_token & is_row).shape, tl.float32)
    for first in range(0, tl.max(rank), AT_ONCE):  # no iteration where no token has an adapter
        shrunks = ()
        columns = ()
        for index in tl.static_range(AT_ONCE):
            is_rank = first + index < rank
            shrunk = tl.load(shrunk_ptr + first + index, mask=is_rank, other=0.0)
            column = tl.load(b_ptr + (first + index) * num_rows, mask=is_rank & is_row, other=0.0)
            shrunks += (shrunk,)  # type: ignore[assignment]
            columns += (column,)  # type: ignore[assignment]
        for index in tl.static_range(AT_ONCE):
            column = columns[index].to(tl.float32)
            shrunk, column = tl.broadcast(shrunks[index], column)  # type: ignore[unreachable]
            added = tl.fma(shrunk, column, added)
    return added


def ranks_at_once(max_rank: int, tile: int, num_warps: int) -> int:
    """Return the ranks that a program with ``tile`` results loads at once, a power of two."""
    of_thread = max(tile // (32 * num_warps), 1)
    at_once = min(MOST_AT_ONCE, max(VALUES_AT_ONCE // of_thread, 1))
    return min(at_once, next_power_of_2(max_rank))


def lora_arguments(
    adapters: Adapters | None, shrunk: torch.Tensor | None, tile: int, num_warps: int
) -> dict[str, Any]:
    """Return the arguments of a kernel that adds adapters' values; none where there are none.

    ``tile`` is the number of results that a program writes at once.
    """
    if adapters is None:
        return {}
    matrices, num_rows = adapters.matrices, sum(adapters.matrices.part_rows)
    starts = (*matrices.part_starts, num_rows, num_rows)
    return {
        "shrunk_ptr": shrunk,
        "b_ptr": matrices.b,
        "slots_ptr": adapters.slots,
        "ranks_ptr": matrices.ranks,
        "LORA_PARTS": len(matrices.part_rows),
        "MAX_RANK": matrices.max_rank,
        "AT_ONCE": ranks_at_once(matrices.max_rank, tile, num_warps),
        "SECOND_PART": starts[1],
        "THIRD_PART": starts[2],
    }
