"""Merging the partial results of programs that divide prefill's keys: against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1.kernels import KVLayout
from mrv1.kernels.attention.prefill.call import PrefillCall
from mrv1.kernels.attention.prefill.choice import PrefillSplits
from mrv1.kernels.attention.prefill.merge import merge_splits
from tests.kernels.paged_attention import SENTINEL, empty_outputs

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

NUM_KV_HEADS = 2


def _normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _call(q: torch.Tensor, layout: KVLayout, num_queries: int) -> PrefillCall:
    """Return a call of one request with so many queries; later rows are padding."""
    lengths = torch.tensor([num_queries], dtype=torch.int32, device=q.device)
    starts = torch.tensor([0, num_queries], dtype=torch.int32, device=q.device)
    out, lse = empty_outputs(q)
    return PrefillCall(
        q=q, k_cache=q, v_cache=q, block_table=lengths[:, None], query_start_loc=starts,
        seq_lens=lengths, layout=layout, softmax_scale=1.0, soft_cap=None, sinks=None,
        full_only=False, out=out, lse=lse,
    )  # fmt: skip


@given(
    num_splits=st.sampled_from([4, 5, 8, 16, 17, 32, 44]), num_queries=st.integers(0, 5),
    group=st.sampled_from([1, 3, 4]), head_dim=st.sampled_from([16, 80, 128]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]), seed=st.integers(0, 99),
    hidden=st.sampled_from([0.0, 0.4, 1.0]),
)  # fmt: skip
def test_partial_results_are_weighed_by_their_log_sum_exp(
    device, num_splits, num_queries, group, head_dim, dtype, seed, hidden
):
    """Queries without several partial results, and padding, are left alone."""
    num_tokens, num_q_heads = num_queries + 2, NUM_KV_HEADS * group
    generator = torch.Generator().manual_seed(seed)
    states = _normal(num_splits, num_tokens, num_q_heads, head_dim, seed=seed)
    lse = 3 * _normal(num_splits, num_tokens, num_q_heads, seed=seed + 1)
    lse[torch.rand(lse.shape, generator=generator) < hidden] = -torch.inf  # no key was seen
    counts = torch.randint(
        num_splits + 1, (num_tokens, NUM_KV_HEADS), generator=generator, dtype=torch.int32
    )
    counts[0] = num_splits
    of_head = counts.repeat_interleave(group, dim=1)
    exists = torch.arange(num_splits)[:, None, None] < of_head
    exact_lse = lse.double().masked_fill(~exists, -torch.inf).logsumexp(0)
    weights = (lse.double() - exact_lse).exp().masked_fill(~exists | lse.isinf(), 0.0)
    exact = (weights[..., None] * states.double()).sum(0)
    states[~exists] = lse[~exists] = torch.nan  # left by another launch

    layout = KVLayout.hnd(NUM_KV_HEADS, 16, head_dim, device=device)
    q = torch.zeros(num_tokens, num_q_heads, head_dim, dtype=dtype, device=device)
    call = _call(q, layout, num_queries)
    splits = PrefillSplits(
        num_splits=num_splits, num_programs=1, states=states.to(device),
        states_lse=lse.to(device), arrivals=None, counts=counts.to(device),
        ticket=torch.zeros(1, dtype=torch.int32, device=device),
    )  # fmt: skip
    merge_splits(call, splits)
    is_merged = of_head > 1
    is_merged[num_queries:] = False
    out, got_lse = call.out.cpu().double(), call.lse.cpu().double()
    assert (out[~is_merged] == SENTINEL).all()
    assert (got_lse[~is_merged] == SENTINEL).all()
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(out[is_merged], exact[is_merged], rtol=rounding, atol=1e-5)
    torch.testing.assert_close(got_lse[is_merged], exact_lse[is_merged], rtol=1e-5, atol=1e-5)
