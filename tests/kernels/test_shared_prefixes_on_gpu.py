"""Shared prefixes at decode with the tiles, prefixes and pieces of real launches.

``test_shared_prefixes`` has small ones, which the interpreter can run.
"""

from __future__ import annotations

import pytest
import torch

from mrv1 import kernels
from mrv1.kernels import reference
from mrv1.kernels.attention.decode import plan as plan_buffers
from mrv1.kernels.attention.decode.plan import BEHIND, PREFIX
from mrv1.testing.strategies import LayoutCase, RaggedBatch, build_paged_cache
from tests.kernels.paged_attention import assert_equal, make_queries, run_decode
from tests.kernels.shared_prefixes import check, items_of, plan_of, share

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_only]

BLOCK_SIZE = 16
NUM_REQS = 21
PROMPTS = ((700, 0), (256, 1), (1500, 2))
"""Shared tokens of a prompt, and the request that leads those which begin with it."""
SHAPES = [
    (torch.bfloat16, 128, 4, None), (torch.bfloat16, 128, 12, None), (torch.bfloat16, 64, 8, None),
    (torch.bfloat16, 96, 1, None), (torch.bfloat16, 256, 2, None), (torch.float16, 128, 5, None),
    (torch.bfloat16, 128, 4, "token"), (torch.bfloat16, 256, 2, "token"),
    (torch.bfloat16, 64, 8, "head"), (torch.float16, 128, 8, "quarter"),
]  # fmt: skip
"""dtype, head_dim, query heads per KV head, and granularity of scales; each is compiled."""


@pytest.fixture(autouse=True)
def _share_little(monkeypatch):
    """Share where real launches save too little: few requests with few heads."""
    monkeypatch.setattr(plan_buffers, "MIN_SAVED", 0)
    monkeypatch.setattr(plan_buffers, "MIN_SHARING", 0)


def _conversations(device, dtype, head_dim, group, granularity, query_len=1):
    """Return requests of three prompts in turns, with 0 to 240 tokens of their own; q, plan."""
    prompts = [PROMPTS[req % 3] for req in range(NUM_REQS)]
    lens = [shared + query_len + (7 * req) % 241 for req, (shared, _) in enumerate(prompts)]
    layout = LayoutCase.hnd(
        num_kv_heads=2, head_dim=head_dim, block_size=BLOCK_SIZE, max_seq_len=max(lens),
        max_reqs=NUM_REQS,
    )  # fmt: skip
    batch = RaggedBatch(query_lens=(query_len,) * NUM_REQS, seq_lens=tuple(lens))
    case = build_paged_cache(layout, batch, dtype=dtype, granularity=granularity)
    case = share(case, [(leader, shared // BLOCK_SIZE) for shared, leader in prompts]).to(device)
    q = make_queries(case, group)
    return case, q, plan_of(kernels, case, q)


@pytest.mark.parametrize(("dtype", "head_dim", "group", "granularity"), SHAPES, ids=str)
def test_attention_agrees_with_the_oracle(device, dtype, head_dim, group, granularity):
    case, q, plan = _conversations(device, dtype, head_dim, group, granularity)
    assert items_of(plan) == items_of(plan_of(reference, case, q))
    items = items_of(plan)
    assert {item.req for item in items if item.kind == PREFIX} >= {0, 1, 2}
    assert BEHIND in {item.kind for item in items}
    got = check(case, q, plan)
    assert not plan.arrivals[: len(items)].any()
    assert not plan.arrivals[plan.max_items :].any()
    assert_equal(run_decode(kernels, case, q, plan=plan), got)


@pytest.mark.parametrize("granularity", [None, "token"])
def test_several_queries_with_soft_cap_and_sinks(device, granularity):
    case, q, plan = _conversations(device, torch.bfloat16, 128, 4, granularity, query_len=3)
    assert PREFIX in {item.kind for item in items_of(plan)}
    sinks = torch.linspace(-2.0, 2.0, q.shape[1], device=device)
    check(case, q, plan, logits_soft_cap=5.0, sinks=sinks)
