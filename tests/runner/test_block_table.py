"""BlockTables against lists of blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1.headwise import FULL, HeadGroup, Visible
from mrv1.runner.block_table import NO_PAGE, BlockTables
from mrv1.runner.slot_state import Field, SlotState
from tests.runner.host_state import AppliedUpload, entering, plan_of

NUM_SLOTS, NUM_POOL_BLOCKS = 6, 50
NO_TOKENS = np.full(NUM_SLOTS, -1, dtype=np.int32)
"""Computed tokens with which the one token of a row needs no block."""
ANYTHING = 77
"""Content of the table before a request enters a slot."""


Shape = tuple[int, int, int]
"""Per group: blocks of the longest request, columns before the ring, columns of the ring or 0."""


def make_tables(shapes: list[Shape]) -> tuple[BlockTables, AppliedUpload]:
    groups, offset = [], 0
    for max_blocks, sink, ring in shapes:
        width = sink + ring if ring else max_blocks
        groups.append(
            HeadGroup(
                keeps=Visible(window=5) if ring else FULL,
                num_heads=(1,),
                offset=offset,
                width=width,
                max_blocks=max_blocks,
                sink_blocks=sink,
                ring_blocks=ring,
            )
        )
        offset += width
    fields = {"other": Field(), **BlockTables.fields(groups)}
    slots = SlotState(NUM_SLOTS, fields, torch.device("cpu"))
    slots.buffer.fill_(ANYTHING)
    return BlockTables(slots, NUM_SLOTS, groups, 16), AppliedUpload(slots.buffer)


def columns_of(shape: Shape, blocks: list[int]) -> list[int]:
    """Return a group's columns in a row: in a ring a later block replaces an earlier block."""
    max_blocks, sink, ring = shape
    columns = [NO_PAGE] * (sink + ring if ring else max_blocks)
    for logical, block in enumerate(blocks):
        behind = ring and logical >= sink
        columns[sink + (logical - sink) % ring if behind else logical] = block
    return columns


@given(
    data=st.data(),
    shapes=st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=3
    ),
)
def test_a_row_has_the_blocks_of_each_group_and_then_no_page(data, shapes):
    tables, upload = make_tables(shapes)
    tables.keep_ids(True)
    held: dict[int, list[list[int]]] = {}
    for _ in range(data.draw(st.integers(1, 8))):
        new = data.draw(st.sets(st.integers(0, NUM_SLOTS - 1)), label="new")
        held |= {slot: [[] for _ in shapes] for slot in new}
        rows = new | data.draw(st.sets(st.sampled_from(sorted(held)))) if held else new
        if not rows:
            continue  # no plan is empty
        new_block_ids = {}
        for slot in data.draw(st.permutations(sorted(rows))):
            ids = tuple(
                tuple(
                    data.draw(
                        st.lists(
                            st.integers(NO_PAGE if ring else 0, NUM_POOL_BLOCKS - 1),
                            max_size=max_blocks - len(blocks),
                        )
                    )
                )
                for (max_blocks, _, ring), blocks in zip(shapes, held[slot], strict=True)
            )
            if any(ids) or data.draw(st.booleans()):
                new_block_ids[slot] = ids
                for blocks, own in zip(held[slot], ids, strict=True):
                    blocks += own
        plan = plan_of(
            sorted(rows), new=tuple(map(entering, sorted(new))), new_block_ids=new_block_ids
        )
        tables.stage(plan, NO_TOKENS, [NUM_POOL_BLOCKS] * len(shapes), upload)
        for slot in rows:
            start = 7 * slot
            expected_ids = [blocks[start // 16 : (start + 20) // 16 + 1] for blocks in held[slot]]
            assert tables.ids_of(slot, start, start + 21) == tuple(map(tuple, expected_ids))
        for slot in range(NUM_SLOTS):
            expected = [ANYTHING] * tables.row_width
            if slot in held:
                segments = map(columns_of, shapes, held[slot])
                expected = [block for columns in segments for block in columns]
                assert tables.num_blocks_np[slot].tolist() == list(map(len, held[slot]))
            assert tables.tables.block_tables[slot].tolist() == expected


@pytest.mark.parametrize(
    ("new_block_ids", "message"),
    [
        ({0: ((1,), (2,)), 2: ((1,), (2,))}, r"slots of the step's rows, got \[2\]"),
        (
            {-5: ((1,), (2,))},
            r"slots of the step's rows, got \[-5\]",
        ),  # would index slot 1, a row's
        ({-6: ((1,), (2,)), 6: ((1,), (2,))}, r"slots of the step's rows, got \[-6, 6\]"),
        ({6: ((1,), (2,))}, r"slots of the step's rows, got \[6\]"),
        ({0: ((1,), ()), 1: ((1, 2, 3), ())}, "at most 3 blocks in slot 1, got 4"),
        ({0: ((1, 2, 3, 4), ()), 1: ((), ())}, "at most 3 blocks in slot 0, got 4"),
        ({1: ((2,), (1, 2))}, "at most 2 blocks in slot 1, got 3"),
        ({1: ((2, 50), ())}, r"ids in \[0, 50\), got \(50,\)"),
        ({1: ((2,), (-1,))}, r"ids in \[0, 50\), got \(-1,\)"),
        ({1: ((2,),)}, "zip"),
    ],
)
def test_a_wrong_plan_is_refused_and_changes_no_count(new_block_ids, message):
    """Slots 0 and 1 have a block of each group; in the wrong plan a new request enters slot 0."""
    tables, upload = make_tables([(3, 0, 0), (2, 0, 0)])
    both = {0: ((9,), (8,)), 1: ((7,), (6,))}
    plan = plan_of([0, 1], new=(entering(0), entering(1)), new_block_ids=both)
    tables.stage(plan, NO_TOKENS, [NUM_POOL_BLOCKS] * 2, upload)
    before = tables.num_blocks_np.copy()
    wrong = plan_of([0, 1], new=(entering(0, epoch=1),), new_block_ids=new_block_ids)
    with pytest.raises(ValueError, match=message):
        tables.stage(wrong, NO_TOKENS, [NUM_POOL_BLOCKS] * 2, upload)
    np.testing.assert_array_equal(tables.num_blocks_np, before)
