"""The oracles of the paged ops against plain dense attention and plain views of the cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.errors import UnsupportedDeviceError
from mrv1.kernels import KVLayout, reference
from mrv1.testing.strategies import RaggedBatch, build_paged_cache, kv_layouts, paged_caches
from tests.kernels.paged_attention import (
    SENTINEL,
    assert_equal,
    attention_logits,
    exact,
    make_queries,
    max_error,
    permuted,
    query_rows,
    run_decode,
    run_prefill,
)

ALL_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LONG_CHUNKS = kv_layouts(max_query_len=40)


def _error_allowed(case):
    """Return half a step of the output's dtype at the largest value, plus the sums' rounding."""
    wide = torch.float64 if case.key.dtype == torch.float64 else torch.float32
    largest = max((v.abs().max().item() for v in case.values if v.numel()), default=0.0)
    steps = torch.finfo(case.key.dtype).eps / 2 + 128 * torch.finfo(wide).eps
    return steps * max(largest, 1.0)


# --- attention ---------------------------------------------------------------------------------


@given(data=st.data(), group=st.sampled_from([1, 4, 8]))
def test_decode_equals_dense_attention(data, group):
    query_len = data.draw(st.sampled_from([1, 2, 8]))
    case = data.draw(paged_caches(dtypes=ALL_DTYPES, uniform_query_len=query_len))
    q = make_queries(case, group)
    got, want = run_decode(reference, case, q, query_len=query_len), exact(case, q)
    assert max_error(got.out, want.out) <= _error_allowed(case)
    assert max_error(got.lse, want.lse) <= _error_allowed(replace(case, key=got.lse))


@given(case=paged_caches(layouts=LONG_CHUNKS, dtypes=ALL_DTYPES), group=st.sampled_from([1, 4]))
def test_prefill_equals_dense_attention(case, group):
    q = make_queries(case, group, spare_rows=2)
    got, want = run_prefill(reference, case, q), exact(case, q)
    assert max_error(got.out[:-2], want.out) <= _error_allowed(case)
    assert max_error(got.lse[:-2], want.lse) <= _error_allowed(replace(case, key=got.lse))
    assert (got.out[-2:] == SENTINEL).all()
    assert (got.lse[-2:] == SENTINEL).all()


@given(case=paged_caches(layouts=LONG_CHUNKS, dtypes=(torch.float64,)), data=st.data())
def test_soft_cap_and_sinks_equal_dense_attention(case, data):
    q = make_queries(case, 3)
    logits = data.draw(attention_logits(q.shape[1], "cpu"))
    got, want = run_prefill(reference, case, q, **logits), exact(case, q, **logits)
    assert max_error(got.out, want.out) <= _error_allowed(case)
    assert max_error(got.lse, want.lse) <= 50 * _error_allowed(case)  # sinks up to 40


@given(case=paged_caches(layouts=LONG_CHUNKS), data=st.data())
def test_a_request_does_not_depend_on_the_batch(case, data):
    q = make_queries(case, 2)
    whole = run_prefill(reference, case, q)
    order = data.draw(st.permutations(range(len(case.batch.seq_lens))))
    some = order[: data.draw(st.integers(0, len(order)))]
    rows = query_rows(case, some)
    assert_equal(run_prefill(reference, permuted(case, some), q[rows]), whole.rows(rows))


@given(data=st.data())
def test_two_chunks_agree_with_one(data):
    layout = data.draw(kv_layouts(max_query_len=64))
    n = data.draw(st.integers(1, layout.max_seq_len))
    queries = data.draw(st.integers(1, min(n, 64)))
    batch = RaggedBatch(query_lens=(queries,), seq_lens=(n,))
    case = build_paged_cache(layout, batch, dtype=torch.float64)
    q = make_queries(case, 2)
    whole = run_prefill(reference, case, q)
    cut = data.draw(st.integers(0, queries))
    head = replace(case, batch=RaggedBatch(query_lens=(cut,), seq_lens=(n - queries + cut,)))
    tail = replace(case, batch=RaggedBatch(query_lens=(queries - cut,), seq_lens=(n,)))
    chunks = [run_prefill(reference, head, q[:cut]), run_prefill(reference, tail, q[cut:])]
    torch.testing.assert_close(
        torch.cat([chunk.out for chunk in chunks]), whole.out, rtol=1e-12, atol=1e-12
    )


def test_more_queries_than_a_slab_equal_dense_attention():
    layout = KVLayout.hnd(1, 128, 16)
    k_cache, v_cache = (torch.randn(5, 1, 128, 16, dtype=torch.float64) for _ in range(2))
    q = torch.randn(600, 1, 16, dtype=torch.float64)
    out = reference.paged_prefill_attention(
        q,
        k_cache,
        v_cache,
        torch.arange(5, dtype=torch.int32)[None],
        torch.tensor([0, 600], dtype=torch.int32),
        torch.tensor([600], dtype=torch.int32),
        layout,
        softmax_scale=0.25,
        max_query_len=600,
    )
    k, v = (cache.view(640, 16)[:600] for cache in (k_cache, v_cache))
    want = torch.nn.functional.scaled_dot_product_attention(
        q[None, :, 0], k[None], v[None], is_causal=True, scale=0.25
    )
    torch.testing.assert_close(out[None, :, 0], want, rtol=1e-12, atol=1e-12)


def test_a_table_too_narrow_for_the_length_is_an_error():
    cache = torch.zeros(2 * 16 * 16)
    with pytest.raises(IndexError):
        reference.paged_decode_attention(
            torch.zeros(1, 1, 16),
            cache,
            cache,
            torch.zeros(1, 1, dtype=torch.int32),
            torch.tensor([17], dtype=torch.int32),
            KVLayout.hnd(1, 16, 16),
            softmax_scale=1.0,
        )


@pytest.mark.parametrize(
    ("starts", "max_query_len", "message"),
    [
        (
            [1, 2, 3],
            2,
            r"query_start_loc: expected to ascend from 0 to at most 3, got \[1, 2, 3\]",
        ),
        (
            [0, 2, 1],
            2,
            r"query_start_loc: expected to ascend from 0 to at most 3, got \[0, 2, 1\]",
        ),
        (
            [0, 1, 4],
            3,
            r"query_start_loc: expected to ascend from 0 to at most 3, got \[0, 1, 4\]",
        ),
        ([0, 1, 3], 1, "max_query_len: expected at least 2, got 1"),
    ],
)
def test_prefill_checks_values_that_the_kernel_cannot_check(starts, max_query_len, message):
    cache = torch.zeros(16 * 16)
    with pytest.raises(ValueError, match=message):
        reference.paged_prefill_attention(
            torch.zeros(3, 1, 16),
            cache,
            cache,
            torch.zeros(2, 1, dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor([3, 3], dtype=torch.int32),
            KVLayout.hnd(1, 16, 16),
            softmax_scale=1.0,
            max_query_len=max_query_len,
        )


# --- cache write -------------------------------------------------------------------------------


@given(case=paged_caches(layouts=LONG_CHUNKS, dtypes=ALL_DTYPES))
def test_write_gives_every_byte_of_the_case(case):
    k_cache, v_cache = case.k_cache_before.clone(), case.v_cache_before.clone()
    reference.kv_cache_write(
        case.key, case.value, k_cache, v_cache, case.slot_mapping, case.layout
    )
    assert torch.equal(k_cache.view(torch.uint8), case.k_cache.view(torch.uint8))
    assert torch.equal(v_cache.view(torch.uint8), case.v_cache.view(torch.uint8))


def test_write_equals_assignments_by_index():
    key = torch.arange(1.0, 1 + 3 * 2 * 8).view(3, 2, 8)
    k_cache, v_cache = torch.zeros(4, 16, 2, 8), torch.zeros(4, 16, 2, 8)
    slots = torch.tensor([[2 * 16 + 5, -1, 3 * 16]])
    reference.kv_cache_write(key, -key, k_cache, v_cache, slots, KVLayout.nhd(2, 16, 8))
    want = torch.zeros(4, 16, 2, 8)
    want[2, 5], want[3, 0] = key[0], key[2]
    assert torch.equal(k_cache, want)
    assert torch.equal(v_cache, -want)


# --- the kernels refuse CPU tensors ------------------------------------------------------------


def test_launchers_refuse_the_cpu_without_the_interpreter():
    layout, q, cache = KVLayout.hnd(1, 16, 16), torch.zeros(1, 1, 16), torch.zeros(256)
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    slots = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(UnsupportedDeviceError, match="key: expected a GPU tensor, got one on the"):
        kernels.kv_cache_write(q, q, cache, cache, slots, layout)
    with pytest.raises(UnsupportedDeviceError, match="q: expected a GPU tensor, got one on the"):
        kernels.paged_decode_attention(q, cache, cache, table, lens, layout, softmax_scale=1.0)
    with pytest.raises(UnsupportedDeviceError, match="q: expected a GPU tensor, got one on the"):
        kernels.paged_prefill_attention(
            q, cache, cache, table, starts, lens, layout, softmax_scale=1.0, max_query_len=1
        )
