"""Prefill attention by warp groups (sm_90): the Gluon kernels against the oracle.

Triton's interpreter does not run Gluon, so these tests need the GPU; elsewhere, and wherever the
kernel does not fit, the Triton kernel runs, which the other tests of prefill attention cover.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import HeadRole, KVLayout, PrefillSplits, reference
from mrv1.kernels.attention.prefill import choice as prefill_choice
from mrv1.kernels.attention.prefill.choice import (
    KERNELS,
    SHORT_WINDOW,
    WARP_GROUP_TILES,
    PrefillLayer,
    division_of,
    kernel_for,
)
from mrv1.kernels.cache.formats import PageFormat
from mrv1.testing.strategies import LayoutCase, RaggedBatch, build_paged_cache
from tests.kernels.paged_attention import (
    SENTINEL,
    Result,
    always_faster,
    assert_equal,
    assert_in_budget,
    attention_logits,
    empty_outputs,
    exact,
    finite,
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
SHAPES = [
    *((128, group) for group in (1, 4, 5, 7, 12, 16)),
    *((64, 3), (64, 8), (80, 1), (80, 4), (96, 1), (96, 6), (256, 2)),
]
"""head_dim, and query heads per KV head; each pair is compiled for itself."""
CAP_ERROR = 2**-11
"""Of these kernels' soft cap, relative to the cap: the tanh is one approximate instruction."""


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

    monkeypatch.setattr(hopper, "MIN_SHARED_TILES", 1)


def _fits(case, q, splits=None):
    return _takes(q, case.k_cache, case.v_cache, case.layout, 1, splits)


def _takes(q, k_cache, v_cache, layout, max_query_len, splits=None) -> bool:
    """Return whether the launch takes a kernel of warp groups, with soft cap and sinks or not."""
    page_format = PageFormat.plain(q.dtype)
    found = {
        kernel_for(
            PrefillLayer(layout, q.dtype, page_format, q.shape[1], plain_scores),
            *(q, k_cache, v_cache, max_query_len, splits),
        )
        for plain_scores in (False, True)
    }
    assert len(found) == 1
    return found != {None}


def _check(case, group, logits=None, scale=1.0, **options) -> Result:
    q = make_queries(case, group, spare_rows=1) * scale
    assert _fits(case, q, options.get("splits"))
    logits = logits or {}
    got = run_prefill(kernels, case, q, **options, **logits)
    oracle = run_prefill(reference, case, q, **logits).rows(slice(-1))
    assert_in_budget(
        got.rows(slice(-1)), oracle, exact(case, q, **logits), case,
        logits_soft_cap=logits.get("logits_soft_cap", 0.0), cap_error=CAP_ERROR,
    )  # fmt: skip
    assert (got.out[-1] == SENTINEL).all()
    assert (got.lse[-1] == SENTINEL).all()
    return got


@st.composite
def _windows(draw, num_kv_heads: int, sizes: dict[str, int]) -> LayoutCase:
    """Draw heads with the same window, or a window of its own in a ring, or none, for each."""
    windows, sinks = st.sampled_from([1, 16, 100, 128, 300]), st.sampled_from([0, 20, 128, 130])
    if draw(st.booleans()):
        role = HeadRole(window=draw(windows), sink=draw(sinks))
        return LayoutCase.hnd(num_kv_heads=num_kv_heads, role=role, **sizes)
    roles = []
    for head in range(num_kv_heads):
        role = HeadRole(group=head)
        if draw(st.sampled_from([True, True, False])):
            window, ring = draw(windows), 0
            if draw(st.booleans()):
                ring = -(-(window - 1 + sizes["max_seq_len"]) // sizes["block_size"]) + 1
            role = replace(role, window=window, sink=draw(sinks), ring_blocks=ring)
        roles.append(role)
    return LayoutCase.head_groups(roles=roles, max_query_len=sizes["max_seq_len"], **sizes)


@st.composite
def _cases(
    draw,
    max_seq_len: int = 700,
    max_reqs: int = 4,
    block_sizes: Sequence[int] = (16, 32, 64, 128),
    dtypes: Sequence[torch.dtype] = DTYPES,
    streaming: bool = False,
    windows: bool = False,
):
    """Ragged chunks over several tiles of keys, in HND pages or as several head groups.

    Returns the case, and query heads per KV head.
    """
    head_dim, group = draw(st.sampled_from(SHAPES))
    tile_tokens, _ = WARP_GROUP_TILES[head_dim]
    block_size = draw(st.sampled_from([size for size in block_sizes if size <= tile_tokens]))
    num_kv_heads = draw(st.sampled_from([2, 3, 5] if streaming else [1, 2, 3]))
    sizes = {
        "head_dim": head_dim, "block_size": block_size, "max_seq_len": max_seq_len,
        "max_reqs": max_reqs,
    }  # fmt: skip
    if streaming:
        layout = streaming_layout(
            num_kv_heads, ring=draw(st.booleans()), window=draw(st.sampled_from([1, 100, 300])),
            sink=draw(st.sampled_from([0, 20, 130])), **sizes,
        )  # fmt: skip
    elif windows:
        layout = draw(_windows(num_kv_heads, sizes))
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
    batch = RaggedBatch(query_lens=tuple(query_lens), seq_lens=tuple(seq_lens))
    return build_paged_cache(layout, batch, dtype=draw(st.sampled_from(dtypes))), group


@given(drawn=_cases())
def test_warp_groups_agree_with_the_oracle(device, drawn):
    """Pages that no query sees hold NaN, and so do the values after the last token."""
    case, group = drawn
    _check(case.to(device), group)


@pytest.mark.usefixtures("_any_share")
@given(
    drawn=_cases(), num_splits=st.sampled_from([2, 3, 16, 32]), fewer=st.sampled_from([0, 3, 30])
)
def test_programs_that_share_a_tile_agree_with_the_oracle(device, drawn, num_splits, fewer):
    """Launched twice: the second launch starts with the buffers as the first launch left them."""
    case, group = drawn[0].to(device), drawn[1]
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
@given(drawn=_cases(streaming=True), num_splits=st.sampled_from([None, 1, 3, 16, 32]))
def test_full_heads_beside_streaming_heads_agree_with_the_oracle(device, drawn, num_splits):
    """All in one launch, with the buffers that the full heads need."""
    case, group = drawn[0].to(device), drawn[1]
    splits = None
    if num_splits is not None:
        splits = make_splits(case, make_queries(case, group, spare_rows=1), num_splits)
    first = _check(case, group, splits=splits)
    if num_splits is not None and num_splits > 1:
        assert not splits.arrivals.any()
    assert_equal(_check(case, group, splits=splits), first)


@pytest.mark.usefixtures("_any_share")
@given(
    drawn=_cases(windows=True), num_splits=st.sampled_from([None, 1, 3, 16, 32]),
    has_logits=st.booleans(), data=st.data(),
)  # fmt: skip
def test_windows_soft_caps_and_sinks_agree_with_the_oracle(
    device, drawn, num_splits, has_logits, data
):
    case, group = drawn[0].to(device), drawn[1]
    logits, scale = {}, 1.0
    if has_logits:
        num_q_heads = case.layout_case.num_kv_heads * group
        logits = data.draw(attention_logits(num_q_heads, case.key.device))
        if "logits_soft_cap" in logits:  # some scores lie far outside the cap
            scale = data.draw(st.sampled_from([1.0, 30.0]))
    splits = None
    if num_splits is not None:
        splits = make_splits(case, make_queries(case, group, spare_rows=1), num_splits)
    first = _check(case, group, logits, scale, splits=splits)
    assert_equal(_check(case, group, logits, scale, splits=splits), first)


@pytest.mark.parametrize("num_splits", [None, 1, 3])
def test_full_heads_beside_heads_that_visit_masked_pages(device, num_splits):
    layout = streaming_layout(4, 16, 700, 2, ring=False)
    batch = RaggedBatch(query_lens=(300, 5), seq_lens=(700, 690))
    case = finite(build_paged_cache(layout, batch, dtype=torch.bfloat16).to(device))
    q = make_queries(case, 4, spare_rows=1)
    splits = None if num_splits is None else make_splits(case, q, num_splits)
    _check(case, 4, splits=splits, layout=replace(case.layout, visits_masked=True))


@pytest.fixture(params=[1, 3, 132])
def _programs(request, monkeypatch):
    """Let this many programs take all tiles of a queue."""
    _run_with_programs(monkeypatch, request.param)


def _run_with_programs(patch, count):
    from mrv1.kernels.attention.prefill import hopper_queue

    patch.setattr(hopper_queue, "device_info", lambda _: SimpleNamespace(num_sms=count))


@pytest.mark.usefixtures("_programs")
@given(
    drawn=_cases(max_reqs=6, block_sizes=(16,), dtypes=(torch.bfloat16,)),
    other_count=st.sampled_from([2, 7]),
)
def test_tiles_from_a_queue_are_the_same_whoever_takes_them(device, drawn, other_count):
    """Empty requests and padding among them; the second launch follows at once."""
    case, group = drawn[0].to(device), drawn[1]
    q = make_queries(case, group, spare_rows=1)
    splits = make_splits(case, q, 1)
    first = _check(case, group, splits=splits)
    with pytest.MonkeyPatch.context() as patch:
        _run_with_programs(patch, other_count)
        second, third = (run_prefill(kernels, case, q, splits=splits) for _ in range(2))
    assert_equal(second, first)
    assert_equal(third, first)
    assert not splits.ticket.any()


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "dtype"),
    [
        (128, 1, 128, torch.float16), (128, 64, 32, torch.bfloat16), (128, 3, 16, torch.bfloat16),
        (128, 31, 64, torch.bfloat16), (96, 8, 128, torch.float16), (80, 5, 32, torch.float16),
        (64, 16, 128, torch.float16), (64, 128, 16, torch.bfloat16),
    ],
)  # fmt: skip
def test_tiles_from_a_queue_of_other_groups_and_pages(device, head_dim, group, block_size, dtype):
    layout = LayoutCase.hnd(
        num_kv_heads=2, head_dim=head_dim, max_seq_len=700, block_size=block_size
    )  # fmt: skip
    batch = RaggedBatch(query_lens=(300, 0, 5), seq_lens=(700, 9, 300))
    case = build_paged_cache(layout, batch, dtype=dtype).to(device)
    q = make_queries(case, group, spare_rows=1)
    _check(case, group, splits=make_splits(case, q, 1))


def test_a_queue_of_long_contexts(device):
    """The keys of all heads do not fit L2 together; rows of padding take no work."""
    layout = LayoutCase.hnd(num_kv_heads=4, head_dim=128, max_seq_len=33000, max_reqs=2)
    batch = RaggedBatch(query_lens=(70, 40), seq_lens=(33000, 40))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16).to(device)
    q = make_queries(case, 4, spare_rows=500)
    got = run_prefill(kernels, case, q, splits=make_splits(case, q, 1))
    assert (got.out[110:] == SENTINEL).all()
    oracle = run_prefill(reference, case, q).rows(slice(110))
    assert_in_budget(got.rows(slice(110)), oracle, exact(case, q), case)


@pytest.mark.parametrize(("head_dim", "group"), [(128, 4), (128, 5), (96, 1), (64, 8)])
@pytest.mark.parametrize("hole", [0, 5, 43])
def test_a_queue_skips_a_missing_page(device, hole, head_dim, group):
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=head_dim, max_seq_len=700)
    batch = RaggedBatch(query_lens=(300,), seq_lens=(700,))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16).to(device)
    case.block_table[0, hole] = -1
    keys = torch.arange(700, device=device) // 16 != hole
    case = replace(case, visible=tuple(mask & keys for mask in case.visible))
    q = make_queries(case, group, spare_rows=1)
    _check(case, group, splits=make_splits(case, q, 1))


@pytest.mark.parametrize(("head_dim", "group"), [(128, 5), (128, 12), (64, 6), (64, 8)])
@pytest.mark.parametrize("query_len", [1, 15, 16, 17, 24, 25, 26, 48, 128, 129])
def test_edges_of_boxes_of_queries(device, head_dim, group, query_len):
    """Groups that do not divide a tile's rows: tiles from a queue are boxes of 16 queries.

    With groups of 8 heads of 64 dimensions a tile has 24 queries, for three consumers.
    """
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=head_dim, max_seq_len=300)
    batch = RaggedBatch(query_lens=(query_len, 0, 1, query_len), seq_lens=(300, 7, 20, query_len))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16).to(device)
    q = make_queries(case, group, spare_rows=1)
    _check(case, group, splits=make_splits(case, q, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ((1,), (1,)), ((128,), (128,)), ((129,), (129,)), ((33, 1, 20), (33, 4096, 900)),
        ((0, 0, 5), (0, 3, 5)), ((1, 3, 1), (0, 20, 0)), ((1500,), (4000,)),
    ],
)  # fmt: skip
def test_edges_of_tiles_and_padding_rows(device, query_lens, seq_lens, dtype):
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=128, max_seq_len=4096)
    batch = RaggedBatch(query_lens=query_lens, seq_lens=seq_lens)
    _check(build_paged_cache(layout, batch, dtype=dtype).to(device), 4)


@pytest.mark.parametrize("num_reqs", [127, 128, 129, 300])
def test_many_requests(device, num_reqs):
    """A program looks for its tile's request among 128 at a time."""
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=128, max_seq_len=48, max_reqs=num_reqs)
    lens = [1 + number % 48 for number in range(num_reqs)]
    batch = RaggedBatch(query_lens=tuple(1 + n // 2 for n in lens), seq_lens=tuple(lens))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16).to(device)
    _check(case, 4)
    for group in (4, 7):
        q = make_queries(case, group, spare_rows=1)
        _check(case, group, splits=make_splits(case, q, 1))


@pytest.mark.parametrize("hole", [0, 5, 20, 43])
def test_a_missing_page_is_skipped(device, hole):
    """-1 in the block table: the keys of the page are no keys of the request."""
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=128, max_seq_len=700)
    batch = RaggedBatch(query_lens=(300,), seq_lens=(700,))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16).to(device)
    case.block_table[0, hole] = -1
    keys = torch.arange(700, device=device) // 16 != hole
    _check(replace(case, visible=tuple(mask & keys for mask in case.visible)), 4)


def test_lists_of_blocks_per_head(device):
    layout = LayoutCase.hnd(num_kv_heads=3, head_dim=128, max_seq_len=300, own_ids=True)
    batch = RaggedBatch(query_lens=(200, 7), seq_lens=(300, 290))
    _check(build_paged_cache(layout, batch, dtype=torch.bfloat16).to(device), 2)


@given(drawn=_cases(max_seq_len=300), data=st.data())
def test_a_row_has_the_same_bits_in_any_batch(device, drawn, data):
    case, group = drawn[0].to(device), drawn[1]
    q = make_queries(case, group)
    order = data.draw(st.permutations(range(len(case.batch.seq_lens))))
    rows = query_rows(case, order)
    got = run_prefill(kernels, permuted(case, order), q[rows])
    assert_equal(got, run_prefill(kernels, case, q).rows(rows))


@pytest.mark.parametrize("num_splits", [None, 1, 3, 16])
def test_a_launch_can_be_captured_and_replayed(device, num_splits):
    """Two launches in a graph; the second replay has other queries and other lengths."""
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=128, max_seq_len=700)
    batch = RaggedBatch(query_lens=(300, 1), seq_lens=(700, 40))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16).to(device)
    q = make_queries(case, 4).clone()
    out, lse = empty_outputs(q)
    splits = None if num_splits is None else make_splits(case, q, num_splits)
    arguments = {
        "block_table": case.block_table, "query_start_loc": case.query_start_loc,
        "seq_lens": case.seq_lens, "layout": case.layout, "softmax_scale": softmax_scale(case),
        "max_query_len": 300, "out": out, "lse": lse, "splits": splits,
    }  # fmt: skip
    kernels.paged_prefill_attention(q, case.k_cache, case.v_cache, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            kernels.paged_prefill_attention(q, case.k_cache, case.v_cache, **arguments)
    first = run_prefill(kernels, case, q, splits=splits)
    graph.replay()
    assert_equal(Result(out, lse), first)
    q.copy_(make_queries(case, 4, seed=1))
    arguments["query_start_loc"].copy_(torch.tensor([0, 100, 301]))
    arguments["seq_lens"].copy_(torch.tensor([650, 201]))
    arguments["block_table"][1] = arguments["block_table"][0]
    graph.replay()
    fresh = {name: arguments[name] for name in ("block_table", "query_start_loc", "seq_lens")}
    assert_equal(Result(out, lse), run_prefill(kernels, case, q, splits=splits, **fresh))


def test_where_the_triton_kernel_is_faster_it_runs():
    layout = KVLayout.hnd(2, 16, 128, device="cuda")
    q = torch.empty(64, 8, 128, dtype=torch.bfloat16, device="cuda")
    cache = torch.empty(4 * 16 * 2 * 128, dtype=torch.bfloat16, device="cuda")
    splits = PrefillSplits.allocate(
        num_tokens=64, num_reqs=1, max_query_len=64, layout=layout, num_q_heads=8,
        dtype=torch.bfloat16,
    )  # fmt: skip
    queue = replace(splits, num_splits=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_choice, "KERNELS", KERNELS)
        for num_queries, shared, expected in (
            (4095, None, False), (4096, None, True), (1, splits, True), (16, splits, True),
            (127, queue, False), (128, queue, True),
        ):  # fmt: skip
            assert _takes(q, cache, cache, layout, num_queries, shared) is expected


def _visiting_masked(device) -> KVLayout:
    return replace(KVLayout.hnd(2, 16, 128, window=40, device=device), visits_masked=True)


@pytest.mark.parametrize(
    "make",
    [
        partial(KVLayout.nhd, 2, 16, 128),
        partial(KVLayout.hnd, 2, 16, 112),
        partial(KVLayout.hnd, 2, 128, 256),
        _visiting_masked,
    ],
    ids=["nhd", "head_dim 112", "a page larger than a tile", "windows that visit masked pages"],
)
def test_other_layouts_take_the_triton_kernel(make):
    layout = make(device="cuda")
    q = torch.empty(1, 8, layout.head_dim, dtype=torch.bfloat16, device="cuda")
    pages = 4 * layout.block_size * 2 * layout.head_dim
    cache = torch.empty(pages, dtype=torch.bfloat16, device="cuda")
    assert not _takes(q, cache, cache, layout, 8192, None)


def test_float32_large_odd_groups_and_unaligned_caches_take_the_triton_kernel():
    layout = KVLayout.hnd(2, 16, 128, device="cuda")
    q = torch.empty(1, 66, 128, dtype=torch.bfloat16, device="cuda")
    cache = torch.empty(4 * 16 * 2 * 128 + 8, dtype=torch.bfloat16, device="cuda")
    whole = cache[:-8]
    odd, q = q, q[:, :8]
    assert _takes(q, whole, whole, layout, 1, None)
    assert _takes(q[:, :6], whole, whole, layout, 1, None)
    assert not _takes(q.float(), whole, whole, layout, 1, None)
    assert not _takes(odd, whole, whole, layout, 1, None)
    assert not _takes(q, cache, cache, layout, 1, None)
    assert not _takes(q, cache[1:-7], whole, layout, 1, None)


@pytest.mark.parametrize("num_splits", [None, 1, 3])
def test_a_soft_cap_or_sinks(device, num_splits):
    """In tiles of their own, from a queue, and shared; rows of padding have their sink alone."""
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=128, max_seq_len=700)
    batch = RaggedBatch(query_lens=(300, 5, 2), seq_lens=(700, 40, 0))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16).to(device)
    q = make_queries(case, 4, spare_rows=1)
    splits = None if num_splits is None else make_splits(case, q, num_splits)
    sinks = torch.linspace(-2, 5, 8, device=device)
    for logits in ({"logits_soft_cap": 3.0}, {"sinks": sinks}):
        got = _check(case, 4, logits, splits=splits)
        lse = sinks.expand(2, 8) if "sinks" in logits else torch.full((2, 8), -torch.inf)
        assert torch.allclose(got.lse[305:307].cpu(), lse.cpu(), rtol=1e-6)
        assert not got.out[305:307].any()


@pytest.mark.parametrize("num_splits", [None, 1, 3])
def test_nan_stays_in_its_head(device, num_splits):
    layout = LayoutCase.hnd(
        num_kv_heads=1, head_dim=128, max_seq_len=700, role=HeadRole(window=300)
    )  # fmt: skip
    batch = RaggedBatch(query_lens=(300,), seq_lens=(700,))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16).to(device)
    q, sinks = make_queries(case, 4).clone(), torch.arange(4.0, device=device)
    splits = None if num_splits is None else make_splits(case, q, num_splits)
    options = {"splits": splits, "logits_soft_cap": 3.0, "sinks": sinks}
    clean = run_prefill(kernels, case, q, **options)
    q[7, 1, 3] = torch.nan
    got = run_prefill(kernels, case, q, **options)
    assert got.out[7, 1].isnan().all()
    assert got.lse[7, 1].isnan()
    others = torch.ones(300, 4, dtype=torch.bool, device=device)
    others[7, 1] = False
    assert_equal(got.rows(others), clean.rows(others))
    q[7, 1, 3], sinks[2] = 0.0, torch.nan
    got = run_prefill(kernels, case, q, **options)
    assert got.out[:, 2].isnan().all()
    assert not got.out[:, [0, 1, 3]].isnan().any()


@pytest.mark.parametrize("num_splits", [None, 1, 3])
def test_sinks_of_minus_infinity_change_no_bit(device, num_splits):
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=128, max_seq_len=700)
    batch = RaggedBatch(query_lens=(300, 5), seq_lens=(700, 0))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16).to(device)
    q = make_queries(case, 4)
    splits = None if num_splits is None else make_splits(case, q, num_splits)
    plain = run_prefill(kernels, case, q, splits=splits)
    sinks = torch.full((8,), -torch.inf, device=device)
    assert_equal(run_prefill(kernels, case, q, splits=splits, sinks=sinks), plain)


def test_a_window_larger_than_all_contexts_changes_no_bit(device):
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=128, max_seq_len=700)
    batch = RaggedBatch(query_lens=(300, 5), seq_lens=(700, 690))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16).to(device)
    q = make_queries(case, 4)
    # Shorter windows have smaller tiles, which round otherwise.
    wide = KVLayout.hnd(2, 16, 128, window=SHORT_WINDOW + 1, device=device)
    for num_splits in (None, 1, 3):
        splits = None if num_splits is None else make_splits(case, q, num_splits)
        plain = run_prefill(kernels, case, q, splits=splits)
        assert_equal(run_prefill(kernels, case, q, splits=splits, layout=wide), plain)


@pytest.mark.parametrize("num_splits", [None, 1, 4])
@pytest.mark.parametrize("window", [100, 128, 512, 5000])
def test_long_contexts_of_windows(device, window, num_splits):
    """A chunk behind keys that its first query does not see, some of whose pages are gone."""
    layout = LayoutCase.hnd(
        num_kv_heads=2, head_dim=128, max_seq_len=9000, max_reqs=2,
        role=HeadRole(window=window, sink=70),
    )  # fmt: skip
    batch = RaggedBatch(query_lens=(260, 1), seq_lens=(9000, 8000))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16).to(device)
    q = make_queries(case, 4, spare_rows=1)
    splits = None if num_splits is None else make_splits(case, q, num_splits)
    logits = {"sinks": torch.linspace(-2, 5, 8, device=device)}
    _check(case, 4, logits, splits=splits)


@pytest.mark.parametrize("num_splits", [None, 1, 4])
@pytest.mark.parametrize(("head_dim", "group"), [(128, 5), (96, 1), (80, 3), (256, 2)])
def test_windows_of_other_dims_and_groups(device, head_dim, group, num_splits):
    """The tiles of keys that are copied begin and end amid the window, and amid the sink."""
    layout = LayoutCase.hnd(
        num_kv_heads=2, head_dim=head_dim, max_seq_len=1500, max_reqs=2,
        role=HeadRole(window=200, sink=70),
    )  # fmt: skip
    batch = RaggedBatch(query_lens=(700, 1), seq_lens=(1500, 900))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16).to(device)
    q = make_queries(case, group, spare_rows=1)
    splits = None if num_splits is None else make_splits(case, q, num_splits)
    logits = {"sinks": torch.linspace(-2, 5, 2 * group, device=device)}
    _check(case, group, logits, splits=splits)


def test_queries_that_no_bulk_copy_can_read_take_no_turns(device):
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=128, max_seq_len=300)
    batch = RaggedBatch(query_lens=(70, 5), seq_lens=(300, 40))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16).to(device)
    q = make_queries(case, 4)
    odd = torch.empty(*q.shape[:2], 132, dtype=q.dtype, device=device)[:, :, :128].copy_(q)
    splits = make_splits(case, q, 1)
    assert division_of(splits, q) == "queue"
    assert division_of(splits, odd) == division_of(None, q) == "tiles"
    assert_equal(run_prefill(kernels, case, odd, splits=splits), run_prefill(kernels, case, q))
