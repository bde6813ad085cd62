"""Which calls the warp groups of ``linear`` take; what they compute is tested on a GPU."""

from __future__ import annotations

import pytest
import torch

from mrv1.kernels._base.triton import INTERPRET
from mrv1.kernels.layers.linear_call import LinearCall
from mrv1.kernels.layers.sum_order import SumOrder

pytestmark = pytest.mark.skipif(INTERPRET, reason="not run: TRITON_INTERPRET=1 is set")


def call(
    num_in: int, leaves: int | None, *, num_rows: int = 6144, stride: int | None = None
) -> LinearCall:
    x = torch.zeros(70, stride or num_in, dtype=torch.bfloat16)[:, :num_in]
    weight = torch.zeros(num_rows, num_in, dtype=torch.bfloat16)
    return LinearCall(
        x=x, weight=weight, bias=None, norm_weight=None, eps=0.0, residual=None, gate=0,
        out=x.new_empty(70, num_rows), out_norm_weight=None, normed_out=None, prefetch=None,
        order=SumOrder.of(num_in, num_rows, leaves),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("num_in", "leaves", "copies"),
    [
        (1024, None, True), (4096, None, True), (2048, 8, True), (1792, 1, True),
        (576, None, False), (576, 8, False), (1000, None, False), (11008, 8, False),
    ],
)  # fmt: skip
def test_steps_are_copied_where_each_leaf_has_whole_ones(num_in, leaves, copies):
    from mrv1.kernels.layers.linear_groups import can_copy

    assert can_copy(call(num_in, leaves)) == copies
    if leaves is None:
        assert can_copy(call(num_in, leaves, num_rows=1024)) == (num_in % 512 == 0)
    assert not can_copy(call(num_in, leaves, stride=num_in + 4))  # rows that are not aligned


def test_splits_fill_the_programs_and_leave_a_program_few_leaves():
    from mrv1.kernels.layers.linear_groups import PROGRAM_LEAVES, choose_splits

    orders = [SumOrder.of(4096, 4096, leaves) for leaves in (1, 2, 4, 8)]
    for order in (*orders, *(SumOrder.of(512 * leaves, 96, None) for leaves in range(3, 9))):
        for num_tiles in (1, 24, 48, 64, 128, 512):
            splits = choose_splits(order, num_tiles, 132)
            assert splits in order.splits
            assert order.leaves <= splits * PROGRAM_LEAVES
    few = [choose_splits(orders[2], tiles, 132) for tiles in (24, 48, 64, 128, 512)]
    assert few == [4, 2, 2, 1, 1]
