"""Paged attention compiled: serving sizes, CUDA graphs, no hidden synchronisation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mrv1 import kernels
from mrv1.kernels import HeadRole, reference
from mrv1.testing.strategies import LayoutCase, RaggedBatch, build_paged_cache
from tests.kernels.paged_attention import (
    assert_equal,
    assert_in_budget,
    empty_outputs,
    exact,
    make_queries,
    run_decode,
    run_prefill,
    softmax_scale,
)

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_only]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _streaming(head_dim: int, max_seq_len: int, max_query_len: int) -> LayoutCase:
    """A full group of two heads and a streaming one of two."""
    window = 512
    ring = -(-(window + max_query_len - 2) // 16) + 1
    roles = [HeadRole(group=0), HeadRole(window=window, sink=64, ring_blocks=ring, group=1)] * 2
    return LayoutCase.head_groups(
        roles=roles, head_dim=head_dim, max_seq_len=max_seq_len, max_query_len=max_query_len
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("query_len", [1, 8])
def test_decode_of_long_contexts(device, head_dim, dtype, query_len):
    layout = _streaming(head_dim, 4096, 8)
    batch = RaggedBatch(query_lens=(query_len,) * 3, seq_lens=(4096, 1023, 17))
    case = build_paged_cache(layout, batch, dtype=dtype).to(device)
    q = make_queries(case, 4)
    got, oracle = run_decode(kernels, case, q), run_decode(reference, case, q)
    assert_in_budget(got, oracle, exact(case, q), case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prefill_of_long_chunks(device, head_dim, dtype):
    layout = _streaming(head_dim, 2048, 700)
    batch = RaggedBatch(query_lens=(700, 1, 129), seq_lens=(2048, 1023, 129))
    case = build_paged_cache(layout, batch, dtype=dtype).to(device)
    q = make_queries(case, 4)
    got, oracle = run_prefill(kernels, case, q), run_prefill(reference, case, q)
    assert_in_budget(got, oracle, exact(case, q), case)


def test_a_captured_decode_serves_other_lengths_and_pages(device):
    layout = _streaming(128, 2048, 8)
    first, second = (
        build_paged_cache(
            layout,
            RaggedBatch(query_lens=(1, 1, 1), seq_lens=seq_lens),
            dtype=torch.bfloat16,
            seed=seed,
            block_seed=seed,
        ).to(device)
        for seed, seq_lens in enumerate([(5, 0, 30), (2048, 700, 0)])
    )
    q = make_queries(first, 2)
    out, lse = empty_outputs(q)
    table, lens = first.block_table.clone(), first.seq_lens
    case = replace(first, k_cache=first.k_cache.clone(), v_cache=first.v_cache.clone())
    static = {
        "block_table": table,
        "seq_lens": lens,
        "layout": case.layout,
        "softmax_scale": softmax_scale(case),
        "num_kv_splits": 4,
        "out": out,
        "lse": lse,
    }
    kernels.paged_decode_attention(q, case.k_cache, case.v_cache, **static)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.paged_decode_attention(q, case.k_cache, case.v_cache, **static)
    table.copy_(second.block_table)
    lens.copy_(second.seq_lens)
    case.k_cache.copy_(second.k_cache)
    case.v_cache.copy_(second.v_cache)
    graph.replay()
    eager = run_decode(kernels, second, q, num_kv_splits=4)
    assert_equal(replace(eager, out=out, lse=lse), eager)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_launches_do_not_synchronise(device):
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=64, max_seq_len=64)
    case = build_paged_cache(layout, RaggedBatch(query_lens=(1, 1), seq_lens=(64, 20))).to(device)
    q = make_queries(case, 2)
    slots, table, lens = case.slot_mapping, case.block_table, case.seq_lens
    starts, kv_layout, scale = case.query_start_loc, case.layout, softmax_scale(case)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels.kv_cache_write(case.key, case.value, case.k_cache, case.v_cache, slots, kv_layout)
        for splits in (None, 1, 2):
            kernels.paged_decode_attention(
                q,
                case.k_cache,
                case.v_cache,
                table,
                lens,
                kv_layout,
                softmax_scale=scale,
                num_kv_splits=splits,
            )
        kernels.paged_prefill_attention(
            q,
            case.k_cache,
            case.v_cache,
            table,
            starts,
            lens,
            kv_layout,
            softmax_scale=scale,
            max_query_len=1,
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
