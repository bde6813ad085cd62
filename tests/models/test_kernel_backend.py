"""The kernels that mrv1's attention calls in a step with both decodes and a short chunk."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mrv1 import kernels
from mrv1.kernels import reference
from mrv1.kernels.attention.prefill import attention as prefill_attention
from mrv1.kernels.attention.prefill import choice as prefill_choice
from mrv1.models.attention import KernelBackend
from mrv1.models.batch import AttentionBatch, LayerCache
from mrv1.testing.strategies import LayoutCase, RaggedBatch, build_paged_cache
from tests.kernels.paged_attention import (
    Result,
    assert_in_budget,
    exact,
    make_queries,
    run_prefill,
    small_tiles,
    softmax_scale,
)

pytestmark = [pytest.mark.interp, pytest.mark.gpu]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_short_chunk_after_a_long_context_is_split_unless_deterministic(
    device, monkeypatch, deterministic
):
    """Another request decodes in this step; a deterministic row must not depend on the batch."""
    gpu = SimpleNamespace(num_sms=132, capability=(9, 0))
    monkeypatch.setattr(prefill_attention, "MIN_SPLIT_STEPS", 1)
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=16, max_seq_len=700)
    lengths = RaggedBatch(query_lens=(1, 5), seq_lens=(300, 700))
    case = build_paged_cache(layout, lengths).to(device)
    q = make_queries(case, 2)
    none = torch.zeros(len(q), dtype=torch.int64, device=device)
    batch = AttentionBatch(
        input_ids=none, positions=none, slot_mapping=none[None], block_table=case.block_table,
        seq_lens=case.seq_lens, query_start_loc=case.query_start_loc, max_query_len=5,
        query_len=None, num_decodes=1, num_tokens=len(q), num_reqs=2,
    )  # fmt: skip
    cache = LayerCache(k=case.k_cache, v=case.v_cache, layout=case.layout, scales=case.scales)
    seen = []

    def prefill(*arguments, splits, **options):
        seen.append(splits)
        return kernels.paged_prefill_attention(*arguments, splits=splits, **options)

    backend = KernelBackend(
        SimpleNamespace(
            plan_decode_attention=kernels.plan_decode_attention,
            paged_decode_attention=kernels.paged_decode_attention,
            paged_prefill_attention=prefill,
        ),
        num_q_heads=4, dtype=q.dtype, softmax_scale=softmax_scale(case),
        deterministic=deterministic,
    )  # fmt: skip
    with small_tiles(32, tile_rows=32):
        with monkeypatch.context() as patch:
            patch.setattr(prefill_choice, "device_info", lambda _: gpu)
            backend.plan(batch, [cache], None, None)
        got = backend.attend(q, batch, cache)
    (splits,) = seen
    assert (splits and splits.num_splits) == (None if deterministic else 16)
    oracle = run_prefill(reference, case, q)
    assert_in_budget(Result(got, oracle.lse), oracle, exact(case, q), case)


def test_a_deterministic_prefill_takes_one_tile_for_every_batch():
    for head_dim in (64, 128, 256):
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
            config = prefill_choice.PrefillAttentionConfig.default_for(head_dim, dtype, (9, 0))
            for group in (1, 8, 64):
                chosen = config.fit_rows(group, prefill_choice.ANY_QUERY_LEN)
                assert chosen == config.fit_rows(group, 1 << 30)
