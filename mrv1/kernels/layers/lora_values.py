"""What adapters (LoRA) add to a product, for kernels that write the product."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mrv1.kernels._base.arithmetic import next_power_of_2
from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.layers.lora import Adapters

MOST_AT_ONCE = 8
"""Most ranks whose loads start before a program waits for any of them."""
MOST_OF_VECTOR = 32
"""Most ranks that the kernel of one token loads at once, one for each lane of a warp."""
VALUES_AT_ONCE = 32
"""Most values of B that a thread loads before it waits, if it has one result at least: with twice
as many, ptxas spills registers of the largest tiles of ``linear`` (sm_90, triton 3.7.1)."""


class LoraPointers(NamedTuple):
    """The adapters of a weight, for tokens whose inputs ``shrink_adapters`` has multiplied.

    Tensors at a launch, pointers in kernels.
    """

    shrunk_ptr: Any  # [tokens, PARTS * MAX_RANK, SPLITS] float32
    b_ptr: Any  # [slots, MAX_RANK, rows of the weight]
    slots_ptr: Any  # [tokens] int32, -1 = none
    ranks_ptr: Any  # [slots, PARTS] int32


class LoraConstants(NamedTuple):
    """What kernels are compiled for: the form of the matrices, and how they are read."""

    ROWS: int  # of the weight
    PARTS: int
    MAX_RANK: int
    SPLITS: int  # parts of the inputs whose sums are apart
    AT_ONCE: int  # ranks that are loaded at once
    SECOND_PART: int  # its first row, or ROWS
    THIRD_PART: int


@triton.jit
def part_of(row, LORA: tl.constexpr):
    """Return the part of each row of a weight."""
    return (row >= LORA.SECOND_PART).to(tl.int32) + (row >= LORA.THIRD_PART).to(tl.int32)


@triton.jit
def sum_of_parts(x, COUNT: tl.constexpr):
    """Return [m, n], the sum of [m, n, COUNT], neighbours first: in any layout in one order."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    if COUNT == 16:
        first, second = tl.split(tl.reshape(x, [M, N, 8, 2]))
        x = first + second
    if COUNT >= 8:
        first, second = tl.split(tl.reshape(x, [M, N, 4, 2]))
        x = first + second
    if COUNT >= 4:
        first, second = tl.split(tl.reshape(x, [M, N, 2, 2]))
        x = first + second
    if COUNT >= 2:
        first, second = tl.split(tl.reshape(x, [M, N, 2]))
        x = first + second
    return tl.reshape(x, [M, N])


@triton.jit
def _part_values(lora, token, slot, row, is_row, part, LORA: tl.constexpr):
    """Return what adapters add at rows of one part; a row that is not one has no meaning."""
    SPLITS: tl.constexpr = LORA.SPLITS
    AT_ONCE: tl.constexpr = LORA.AT_ONCE
    rank = tl.load(lora.ranks_ptr + slot * LORA.PARTS + part, mask=slot >= 0, other=0)
    first_value = (token.to(tl.int64) * LORA.PARTS + part) * LORA.MAX_RANK
    shrunk_ptr = lora.shrunk_ptr + first_value * SPLITS
    shrunk_ptr = tl.expand_dims(shrunk_ptr, 2) + tl.arange(0, SPLITS)[None, None, :]
    b_ptr = lora.b_ptr + slot * (LORA.MAX_RANK * LORA.ROWS) + row
    added = tl.zeros((slot >= row).shape, tl.float32)
    for first in range(0, tl.max(rank), AT_ONCE):  # no iteration where no token has an adapter
        shrunks = ()
        columns = ()
        for index in tl.static_range(AT_ONCE):
            is_rank = first + index < rank
            splits = tl.load(
                shrunk_ptr + (first + index) * SPLITS, mask=tl.expand_dims(is_rank, 2), other=0.0
            )
            column = tl.load(b_ptr + (first + index) * LORA.ROWS, mask=is_rank & is_row, other=0.0)
            shrunks += (splits,)  # type: ignore[assignment]
            columns += (column,)  # type: ignore[assignment]
        for index in tl.static_range(AT_ONCE):
            column = columns[index].to(tl.float32)
            shrunk, column = tl.broadcast(  # type: ignore[unreachable]
                sum_of_parts(shrunks[index], SPLITS), column
            )
            added = tl.fma(shrunk, column, added)
    return added


@triton.jit
def adapter_values(lora, token, is_token, row, LORA: tl.constexpr):
    """Return what adapters add at tokens and rows of a weight, in float32, before any bias.

    ``token`` and ``row`` are broadcast to the tile, such as [tokens, 1] and [1, rows]; what is
    returned of a row past the last has no meaning. ROWS is a constant, so that 16 bytes are loaded
    at once. A value is one chain of fused additions, from the first rank to the last, in every
    kernel and tile: its bits follow from its token and row alone.
    """
    slot = tl.load(lora.slots_ptr + token, mask=is_token, other=-1).to(tl.int64)
    if LORA.PARTS == 1:
        added = _part_values(lora, token, slot, row, row < LORA.ROWS, 0, LORA)
    else:
        part = part_of(row, LORA)
        added = tl.zeros((slot >= row).shape, tl.float32)
        for each in range(tl.min(part), tl.max(part) + 1):  # mostly one
            is_own = (row < LORA.ROWS) & (part == each)
            values = _part_values(lora, token, slot, row, is_own, each, LORA)
            added = tl.where(part == each, values, added)
    return added


class Columns(NamedTuple):
    """B of the one token's adapter at [rows, 1] rows."""

    first: tl.tensor  # [rows, AT_ONCE], the first ranks
    rank: tl.tensor  # [rows, 1] of the row's part, 0 = no adapter
    slot: tl.tensor


@triton.jit
def _load_ranks(lora, slot, rank, row, first, LORA: tl.constexpr):
    index = first + tl.arange(0, LORA.AT_ONCE)[None, :]
    b_ptr = lora.b_ptr + (slot * LORA.MAX_RANK + index) * LORA.ROWS + row
    return tl.load(b_ptr, mask=index < rank, other=0.0)


@triton.jit
def _vector_part(lora, b, rank, first_value, first, LORA: tl.constexpr):
    SPLITS: tl.constexpr = LORA.SPLITS
    index = first + tl.arange(0, LORA.AT_ONCE)[None, :]
    ptr = tl.expand_dims(lora.shrunk_ptr + (first_value + index) * SPLITS, 2)
    splits = tl.load(
        ptr + tl.arange(0, SPLITS)[None, None, :], mask=tl.expand_dims(index < rank, 2), other=0.0
    )
    return tl.sum(sum_of_parts(splits, SPLITS) * b.to(tl.float32), axis=1, keep_dims=True)


@triton.jit
def load_columns(lora, row, is_row, LORA: tl.constexpr):
    """Return B of the adapter of a step's one token, at ``row``, [rows, 1]: AT_ONCE ranks of it.

    Each lane of a warp loads another rank: a row has few ranks, and a warp has few rows.
    """
    slot = tl.load(lora.slots_ptr).to(tl.int64)
    part = part_of(row, LORA)
    rank = tl.load(lora.ranks_ptr + slot * LORA.PARTS + part, mask=(slot >= 0) & is_row, other=0)
    first = _load_ranks(lora, slot, rank, row, 0, LORA)
    return Columns(first, rank, slot)


@triton.jit
def vector_values(lora, columns, row, LORA: tl.constexpr):
    """Return what the adapter of a step's one token adds at ``row``, as ``load_columns`` got it.

    AT_ONCE ranks are summed as a tree.
    """
    first_value = part_of(row, LORA) * LORA.MAX_RANK
    added = _vector_part(lora, columns.first, columns.rank, first_value, 0, LORA)
    for first in range(LORA.AT_ONCE, LORA.MAX_RANK, LORA.AT_ONCE):
        b = _load_ranks(lora, columns.slot, columns.rank, row, first, LORA)
        added += _vector_part(lora, b, columns.rank, first_value, first, LORA)
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
    if adapters is None or shrunk is None:
        return {}
    matrices, num_rows = adapters.matrices, sum(adapters.matrices.part_rows)
    starts = (*matrices.part_starts, num_rows, num_rows)
    constants = LoraConstants(
        num_rows, len(matrices.part_rows), matrices.max_rank,
        shrunk.shape[2] if shrunk.dim() == 3 else 1,
        ranks_at_once(matrices.max_rank, tile, num_warps), *starts[1:3],
    )  # fmt: skip
    pointers = LoraPointers(shrunk, matrices.b, adapters.slots, matrices.ranks)
    return {"lora": pointers, "LORA": constants}
