"""A check for debugging: does every block id that a step needs name a block of the pool?

Kernels trust a block table: with an id past the pool they would read or write other memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mrv1.kernels.cache.contracts import table_columns
from mrv1.kernels.cache.kv_layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class BadBlockId:
    """A block-table entry that a query of its row needs, but that names no block of the pool."""

    row: int  # of the batch
    head: int  # KV head
    column: int  # of the row; one past the last column if the row is too short
    block_id: int  # the entry; -1 = no page, also for a column past the last


def find_bad_block_ids(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor,
    layout: KVLayout,
    num_blocks: Sequence[int],
) -> list[BadBlockId]:
    """Return the table's entries that a step needs and that are outside the pool, row by row.

    A row needs the pages of all positions that one of its queries sees (``kv_layout``), its own
    tokens included. Other entries may be anything.

    Args:
        block_table: as in ``paged_decode_attention``.
        seq_lens: ``[num_reqs]`` int32, tokens including the queries; 0 = padding row.
        query_lens: ``[num_reqs]`` int32, queries of each row.
        layout: the window, the sink and the block-table columns of each head.
        num_blocks: blocks in each head group's pool: ids are ``0 .. num_blocks[group] - 1``.

    Stream:
        Current stream; waits for the device.
    """
    table = layout.table_rows(block_table, seq_lens.shape[0])
    width, longest = table.shape[1], int(seq_lens.max()) if seq_lens.numel() else 0
    columns = table_columns(layout, -(-longest // layout.block_size))  # [heads, blocks]
    outside = columns >= width
    ids = torch.nn.functional.pad(table, (0, 1), value=-1)[:, columns.masked_fill(outside, width)]

    first = torch.arange(columns.shape[1], device=table.device) * layout.block_size
    end = first + layout.block_size  # positions [first, end) of each logical block
    seen_from = (seq_lens - query_lens)[:, None] - layout.window + 1  # [rows, heads]
    in_window = (layout.window < 0)[:, None] | (end > seen_from[..., None])
    in_sink = first < layout.sink[:, None]
    in_row = (first < seq_lens[:, None]) & (query_lens > 0)[:, None]
    needed = in_row[:, None] & (in_window | in_sink)  # [rows, heads, blocks]
    limits = torch.tensor(num_blocks, device=table.device)[layout.group_of_head.long()]
    bad = needed & ((ids < 0) | (ids >= limits[:, None]))
    rows, heads, blocks = bad.nonzero(as_tuple=True)
    found = zip(
        rows.tolist(), heads.tolist(), columns[heads, blocks].tolist(), ids[bad].tolist(),
        strict=True,
    )  # fmt: skip
    return [
        BadBlockId(row=row, head=head, column=min(column, width), block_id=block_id)
        for row, head, column, block_id in found
    ]
