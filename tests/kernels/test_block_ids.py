"""Block ids outside the pool that a step would read, against a plain loop over positions."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1.kernels import HeadRole, KVLayout
from mrv1.kernels.cache.block_ids import BadBlockId, find_bad_block_ids
from mrv1.testing.strategies import PagedCase, paged_caches


def found(case: PagedCase, table: torch.Tensor) -> list[BadBlockId]:
    query_lens = torch.tensor(case.batch.query_lens, dtype=torch.int32)
    return find_bad_block_ids(
        table, case.seq_lens, query_lens, case.layout, case.layout_case.num_blocks
    )


def expected(case: PagedCase, table: torch.Tensor) -> set[BadBlockId]:
    layout = case.layout_case
    bad = set()
    for row, (n, query_len) in enumerate(
        zip(case.batch.seq_lens, case.batch.query_lens, strict=True)
    ):
        for head, role in enumerate(layout.roles):
            for query in range(n - query_len, n):
                for key in range(query + 1):
                    if 0 <= role.window <= query - key and key >= role.sink:
                        continue
                    column = key // layout.block_size
                    sink_blocks = -(-role.sink // layout.block_size)
                    if role.ring_blocks and column >= sink_blocks:
                        column = sink_blocks + (column - sink_blocks) % role.ring_blocks
                    column += role.table_offset
                    block_id = int(table[row, column])
                    if not 0 <= block_id < layout.num_blocks[role.group]:
                        bad.add(BadBlockId(row=row, head=head, column=column, block_id=block_id))
    return bad


@given(case=paged_caches(), seed=st.integers(0, 2**32 - 1))
def test_exactly_the_needed_ids_outside_the_pool_are_found(case, seed):
    table, source = case.block_table.clone(), random.Random(seed)
    for row in range(table.shape[0]):
        for column in range(table.shape[1]):
            if source.random() < 0.2:
                table[row, column] = source.choice(
                    [-1, -7, 2**31 - 1, *case.layout_case.num_blocks]
                )
    bad = found(case, table)
    assert len(set(bad)) == len(bad)
    assert set(bad) == expected(case, table)


def test_a_table_row_that_is_too_short_is_found():
    """40 tokens are three blocks; the third has no column."""
    lens = torch.tensor([40], dtype=torch.int32)
    table = torch.tensor([[4, 0]], dtype=torch.int32)
    assert find_bad_block_ids(table, lens, lens, KVLayout.hnd(1, 16, 16), [5]) == [
        BadBlockId(row=0, head=0, column=2, block_id=-1)
    ]


def test_columns_that_no_query_sees_may_hold_any_id():
    """Position 79 sees 48 to 79 and the sink: blocks 1 and 2 are not needed."""
    table = torch.tensor([[0, 99, -1, 3, 4, 77]], dtype=torch.int32)
    lens, one = torch.tensor([80], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    layout = KVLayout.hnd(2, 16, 16, window=32, sink=3)
    assert find_bad_block_ids(table, lens, one, layout, [5]) == []
    both_heads = find_bad_block_ids(table, lens, 2 * one, layout, [5])  # position 78 sees 47
    assert [(bad.head, bad.column, bad.block_id) for bad in both_heads] == [(0, 2, -1), (1, 2, -1)]


@pytest.mark.parametrize("num_reqs", [0, 2])
def test_requests_without_tokens_need_no_blocks(num_reqs):
    lens = torch.zeros(num_reqs, dtype=torch.int32)
    table = torch.full((num_reqs, 3), -1, dtype=torch.int32)
    assert find_bad_block_ids(table, lens, lens, KVLayout.hnd(1, 16, 16), [5]) == []


def test_each_group_has_a_pool_of_its_own():
    roles = [HeadRole(), HeadRole(table_offset=1, group=1)]
    layout = KVLayout.head_groups(roles, [0, 1024], 16, 16)
    lens = torch.tensor([16], dtype=torch.int32)
    table = torch.tensor([[3, 3]], dtype=torch.int32)
    assert find_bad_block_ids(table, lens, lens, layout, [4, 3]) == [
        BadBlockId(row=0, head=1, column=1, block_id=3)
    ]
