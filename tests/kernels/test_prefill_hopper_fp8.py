"""Prefill attention by warp groups from e4m3 caches (sm_90): the Gluon kernel against the oracle.

Triton's interpreter does not run Gluon, so these tests need the GPU; elsewhere, and wherever the
kernel does not fit, the Triton kernel runs, which ``test_fp8_cache`` covers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import HeadRole, KVLayout, reference
from mrv1.kernels.attention.prefill import choice as prefill_choice
from mrv1.kernels.attention.prefill.choice import KERNELS, PrefillLayer, kernel_for
from mrv1.kernels.cache.formats import FP8
from mrv1.testing.strategies import LayoutCase, RaggedBatch, build_paged_cache
from tests.kernels.paged_attention import (
    SENTINEL,
    Result,
    always_faster,
    assert_equal,
    assert_in_budget,
    empty_outputs,
    exact,
    make_queries,
    make_splits,
    permuted,
    query_rows,
    run_prefill,
    softmax_scale,
    streaming_layout,
)

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_only]

DTYPES = (torch.bfloat16, torch.float16)
GRANULARITIES = ("token", "quarter", "head")


@pytest.fixture(autouse=True, scope="module")
def _always():
    """Take the kernel for the short chunks of a test too; skip where the GPU is no Hopper."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not run: no GPU of sm_90")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_choice, "KERNELS", always_faster())
        yield


@pytest.fixture
def _any_share(monkeypatch):
    """Let a program that shares a tile take as little as one step."""
    from mrv1.kernels.attention.prefill import hopper

    monkeypatch.setattr(hopper, "MIN_SHARED_CODES", 1)


def _fits(case, q, splits=None):
    return _takes(q, case.k_cache, case.v_cache, case.layout, 1, splits)


def _takes(q, k_cache, v_cache, layout, max_query_len, splits=None) -> bool:
    """Return whether the launch takes the kernel."""
    layer = PrefillLayer(layout, q.dtype, FP8, q.shape[1])
    return kernel_for(layer, q, k_cache, v_cache, max_query_len, splits) is not None


def _check(case, group, q=None, **options) -> Result:
    q = make_queries(case, group, spare_rows=1) if q is None else q
    assert _fits(case, q, options.get("splits"))
    got, oracle = run_prefill(kernels, case, q, **options), run_prefill(reference, case, q)
    assert_in_budget(got.rows(slice(-1)), oracle.rows(slice(-1)), exact(case, q), case)
    assert (got.out[-1] == SENTINEL).all()
    assert (got.lse[-1] == SENTINEL).all()
    return got


@st.composite
def _cases(draw, max_seq_len: int = 700, max_reqs: int = 4, streaming: bool = False):
    """Ragged chunks over several tiles of 128 keys, in HND pages or as several head groups."""
    block_size = draw(st.sampled_from([16, 32, 64, 128]))
    num_kv_heads = draw(st.sampled_from([2, 3, 5] if streaming else [1, 2, 3]))
    sizes = {
        "head_dim": 128, "block_size": block_size, "max_seq_len": max_seq_len,
        "max_reqs": max_reqs,
    }  # fmt: skip
    if streaming:
        layout = streaming_layout(
            num_kv_heads, block_size, max_seq_len, max_reqs, ring=draw(st.booleans())
        )
    elif draw(st.booleans()):
        layout = LayoutCase.hnd(num_kv_heads=num_kv_heads, **sizes)
    else:
        layout = LayoutCase.head_groups(
            roles=[HeadRole(group=head % 2) for head in range(num_kv_heads)],
            max_query_len=max_seq_len,
            **sizes,
        )
    lens = st.integers(0, max_seq_len)
    seq_lens = draw(st.lists(lens, min_size=1, max_size=max_reqs))
    query_lens = [draw(st.integers(0, seq_len)) for seq_len in seq_lens]
    return build_paged_cache(
        layout,
        RaggedBatch(query_lens=tuple(query_lens), seq_lens=tuple(seq_lens)),
        dtype=draw(st.sampled_from(DTYPES)),
        hole_rate=draw(st.sampled_from([0.0, 0.0, 0.3])),
        granularity=draw(st.sampled_from(GRANULARITIES)),
    )


@given(case=_cases(), group=st.sampled_from([1, 2, 4, 8, 16]))
def test_warp_groups_agree_with_the_oracle(device, case, group):
    """Pages that no query sees hold NaN, and so do the values after the last token."""
    _check(case.to(device), group)


@pytest.mark.usefixtures("_any_share")
@given(
    case=_cases(), group=st.sampled_from([1, 4, 8]),
    num_splits=st.sampled_from([2, 3, 16]), fewer=st.sampled_from([0, 3, 30]),
)  # fmt: skip
def test_programs_that_share_a_tile_agree_with_the_oracle(device, case, group, num_splits, fewer):
    """Launched twice: the second launch starts with the buffers as the first launch left them."""
    case = case.to(device)
    splits = make_splits(case, make_queries(case, group, spare_rows=1), num_splits)
    num_programs = max(splits.num_programs - fewer, case.layout.num_kv_heads)
    splits = replace(splits, num_programs=num_programs)
    first = _check(case, group, splits=splits)
    assert not splits.arrivals.any()
    splits.states.fill_(torch.nan)
    if splits.counts is not None:
        splits.counts.fill_(1 << 30)
    assert_equal(_check(case, group, splits=splits), first)


@pytest.mark.usefixtures("_any_share")
@given(
    case=_cases(streaming=True), group=st.sampled_from([1, 4, 8]),
    num_splits=st.sampled_from([None, 3, 16]),
)  # fmt: skip
def test_full_heads_beside_streaming_heads_agree_with_the_oracle(device, case, group, num_splits):
    """Full heads take this kernel and streaming heads the Triton kernel, with the same buffers."""
    case = case.to(device)
    splits = None
    if num_splits is not None:
        splits = make_splits(case, make_queries(case, group, spare_rows=1), num_splits)
    first = _check(case, group, splits=splits)
    if splits is not None:
        assert not splits.arrivals.any()
    assert_equal(_check(case, group, splits=splits), first)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ((1,), (1,)), ((128,), (128,)), ((129,), (129,)), ((33, 1, 20), (33, 4096, 900)),
        ((0, 0, 5), (0, 3, 5)), ((1, 3, 1), (0, 20, 0)), ((1500,), (4000,)),
    ],
)  # fmt: skip
def test_edges_of_tiles_and_padding_rows(device, query_lens, seq_lens, dtype, granularity):
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=128, max_seq_len=4096)
    batch = RaggedBatch(query_lens=query_lens, seq_lens=seq_lens)
    case = build_paged_cache(layout, batch, dtype=dtype, granularity=granularity)
    _check(case.to(device), 4)


def test_many_requests(device):
    """A program looks for its tile's request among 128 at a time."""
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=128, max_seq_len=48, max_reqs=300)
    lens = [1 + number % 48 for number in range(300)]
    batch = RaggedBatch(query_lens=tuple(1 + n // 2 for n in lens), seq_lens=tuple(lens))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16, granularity="token")
    _check(case.to(device), 4)


def test_lists_of_blocks_per_head(device):
    layout = LayoutCase.hnd(num_kv_heads=3, head_dim=128, max_seq_len=300, own_ids=True)
    batch = RaggedBatch(query_lens=(200, 7), seq_lens=(300, 290))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16, granularity="token")
    _check(case.to(device), 2)


@pytest.mark.parametrize("size", [2.0**-60, 2.0**-20, 2.0**20])
def test_queries_of_any_size(device, size):
    """bf16 queries are multiplied as fp16 ones, whose range is narrower."""
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=128, max_seq_len=300)
    batch = RaggedBatch(query_lens=(200,), seq_lens=(300,))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16, granularity="token").to(device)
    q = make_queries(case, 4, spare_rows=1)
    scale = softmax_scale(case) / size
    got = run_prefill(kernels, case, q * size, softmax_scale=scale)
    assert_equal(got, run_prefill(kernels, case, q))


@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
def test_a_query_that_is_not_finite_spoils_its_own_row_only(device, poison):
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=128, max_seq_len=300)
    batch = RaggedBatch(query_lens=(200,), seq_lens=(300,))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16, granularity="token").to(device)
    q = make_queries(case, 4).contiguous()
    want = run_prefill(kernels, case, q)
    q[70, 1, 5] = poison
    got = run_prefill(kernels, case, q)
    assert got.out[70, 1].isnan().all()
    got.out[70, 1], got.lse[70, 1] = want.out[70, 1], want.lse[70, 1]
    assert_equal(got, want)


@given(case=_cases(max_seq_len=300), data=st.data())
def test_a_row_has_the_same_bits_in_any_batch(device, case, data):
    case = case.to(device)
    q = make_queries(case, 4)
    order = data.draw(st.permutations(range(len(case.batch.seq_lens))))
    rows = query_rows(case, order)
    got = run_prefill(kernels, permuted(case, order), q[rows])
    assert_equal(got, run_prefill(kernels, case, q).rows(rows))


def test_a_launch_can_be_captured_and_replayed(device):
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=128, max_seq_len=700)
    batch = RaggedBatch(query_lens=(300, 1), seq_lens=(700, 40))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16, granularity="token").to(device)
    q = make_queries(case, 4).clone()
    out, lse = empty_outputs(q)
    arguments = {
        "block_table": case.block_table, "query_start_loc": case.query_start_loc,
        "seq_lens": case.seq_lens, "layout": case.layout, "softmax_scale": softmax_scale(case),
        "max_query_len": 300, "out": out, "lse": lse, "scales": case.scales,
    }  # fmt: skip
    kernels.paged_prefill_attention(q, case.k_cache, case.v_cache, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.paged_prefill_attention(q, case.k_cache, case.v_cache, **arguments)
    q.copy_(make_queries(case, 4, seed=1))
    graph.replay()
    assert_equal(Result(out, lse), run_prefill(kernels, case, q))


def test_few_rows_take_the_triton_kernel():
    layout = KVLayout.hnd(2, 16, 128, device="cuda")
    q = torch.empty(64, 8, 128, dtype=torch.bfloat16, device="cuda")
    cache = torch.empty(4 * 16 * 2 * 128, dtype=torch.uint8, device="cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_choice, "KERNELS", KERNELS)
        for num_queries, expected in ((63, False), (64, True)):
            assert _takes(q, cache, cache, layout, num_queries) is expected
