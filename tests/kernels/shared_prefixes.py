"""Requests that begin with the same pages, and decode plans in which they read them together."""

from __future__ import annotations

from dataclasses import replace

from mrv1 import kernels
from mrv1.kernels import DecodePlan, reference
from mrv1.kernels.attention.decode.plan import Item
from tests.kernels.paged_attention import (
    Result,
    assert_in_budget,
    finite,
    make_plan,
    run_decode,
)


def share(case, parents, offsets=None):
    """Return the case, all pages finite, whose requests begin with pages of others.

    Request ``r`` gets the first ``columns`` of request ``parent``'s row, with ``parents[r]``
    ``(parent, columns)``; ``offsets`` are the parts of the row that do so, else all full heads'.
    """
    case = finite(case)
    table = case.block_table.clone()
    if offsets is None:
        offsets = {role.table_offset for role in case.layout.roles if role.window < 0}
    for req, (parent, columns) in enumerate(parents):
        for offset in offsets:
            table[req, offset : offset + columns] = table[parent, offset : offset + columns]
    return replace(case, block_table=table)


def plan_of(ops, case, q, **options) -> DecodePlan:
    """Return the case's plan, whose buffers were full of other numbers before."""
    plan = make_plan(case, q, shares_prefixes=True, **options)
    for buffer in (plan.items, plan.num_items, plan.arrivals, plan.prefixes):
        buffer.fill_(-7)
    ops.plan_decode_attention(case.seq_lens, case.layout, plan, block_table=case.block_table)
    return plan


def items_of(plan) -> list[Item]:
    """Return the items of a plan."""
    items = plan.items[: int(plan.num_items), : len(Item._fields)].tolist()
    return [Item(*item) for item in items]


def _exact(case, q, **logits) -> Result:
    """Return the oracle's result in float64."""
    if case.scales is None:
        case = replace(case, k_cache=case.k_cache.double(), v_cache=case.v_cache.double())
    return run_decode(reference, case, q.double(), **logits)


def check(case, q, plan, **logits) -> Result:
    """Return the kernel's result, which must be as exact as the oracle's."""
    got = run_decode(kernels, case, q, plan=plan, **logits)
    cap = logits.get("logits_soft_cap", 0.0)
    oracle = run_decode(reference, case, q, **logits)
    assert_in_budget(got, oracle, _exact(case, q, **logits), case, logits_soft_cap=cap)
    return got
