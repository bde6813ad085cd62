"""Paged prefill attention: the kernel against its oracle and against dense attention."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import HeadRole, KVLayout, PrefillSplits, reference
from mrv1.kernels.attention import prefill
from mrv1.kernels.attention.prefill import attention as prefill_attention
from mrv1.kernels.attention.prefill import choice as prefill_choice
from mrv1.kernels.attention.prefill.choice import (
    PrefillAttentionConfig,
    PrefillLayer,
    prefills_decodes_too,
)
from mrv1.kernels.cache.formats import FP8, PageFormat
from mrv1.testing.strategies import (
    LayoutCase,
    RaggedBatch,
    build_paged_cache,
    kv_layouts,
    paged_caches,
)
from tests.kernels.paged_attention import (
    SENTINEL,
    Result,
    assert_equal,
    assert_in_budget,
    empty_outputs,
    exact,
    finite,
    make_queries,
    make_splits,
    permuted,
    query_rows,
    run_prefill,
    small_tiles,
    softmax_scale,
    streaming_layout,
)

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALL = kv_layouts(head_dims=(16, 80), num_kv_heads=(1, 2), max_blocks=3, max_query_len=40)


@pytest.fixture(autouse=True, scope="module")
def _tiles():
    """Use tiles so small that a test's short chunks fill several of them."""
    with small_tiles(32, tile_rows=32):
        yield


def _check(case, group, **options):
    q = make_queries(case, group, spare_rows=1)
    got, oracle = run_prefill(kernels, case, q, **options), run_prefill(reference, case, q)
    used = slice(-1)
    assert_in_budget(got.rows(used), oracle.rows(used), exact(case, q), case)
    assert (got.out[-1] == SENTINEL).all()
    assert (got.lse[-1] == SENTINEL).all()
    return got


# --- oracle ------------------------------------------------------------------------------------


@given(case=paged_caches(layouts=SMALL, dtypes=DTYPES), group=st.sampled_from([1, 3, 4, 8]))
def test_kernel_agrees_with_the_oracle(device, case, group):
    _check(case.to(device), group)


@given(case=paged_caches(layouts=SMALL, dtypes=DTYPES))
def test_default_tiles_agree_with_the_oracle(device, case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefillAttentionConfig, "default_for", DEFAULT_FOR)
        _check(case.to(device), 2)


DEFAULT_FOR = PrefillAttentionConfig.default_for  # before the fixture changes it


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_head_dims(device, head_dim, dtype):
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=head_dim, max_seq_len=48)
    batch = RaggedBatch(query_lens=(1, 17), seq_lens=(33, 48))
    _check(build_paged_cache(layout, batch, dtype=dtype).to(device), 4)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_sizes(device, block_size):
    layout = LayoutCase.hnd(
        num_kv_heads=1, head_dim=16, block_size=block_size, max_seq_len=3 * block_size, max_reqs=4
    )
    lens = (block_size - 1, block_size, block_size + 1, 3 * block_size)
    batch = RaggedBatch(query_lens=(block_size - 1, 5, 2, 7), seq_lens=lens)
    _check(build_paged_cache(layout, batch).to(device), 1)


# --- edges -------------------------------------------------------------------------------------


def test_streaming_heads_and_a_full_head_agree_with_the_oracle(device):
    """A long context: the rings stay seven and five block-table columns wide."""
    roles = (
        HeadRole(group=0),
        HeadRole(window=40, sink=4, ring_blocks=6, group=1),
        HeadRole(window=17, sink=0, ring_blocks=5, group=2),
    )
    layout = LayoutCase.head_groups(
        roles=roles, head_dim=16, max_seq_len=700, max_reqs=2, max_query_len=40
    )
    assert layout.row_width == 44 + 7 + 5
    batch = RaggedBatch(query_lens=(40, 1), seq_lens=(700, 333))
    _check(build_paged_cache(layout, batch, dtype=torch.float16).to(device), 2)


@pytest.mark.parametrize("query_lens", [(0, 0, 5), (5, 0, 0), (0, 1, 0), (1, 1, 1), (33, 1, 20)])
def test_requests_without_queries(device, query_lens):
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=48)
    batch = RaggedBatch(query_lens=query_lens, seq_lens=(33, 48, 20))
    _check(build_paged_cache(layout, batch).to(device), 2)


@pytest.mark.parametrize("num_reqs", [0, 1, 3])
def test_launches_without_tokens_write_nothing(device, num_reqs):
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=16)
    batch = RaggedBatch(query_lens=(0,) * num_reqs, seq_lens=(4,) * num_reqs)
    case = build_paged_cache(layout, batch).to(device)
    for spare_rows in (0, 3):
        q = make_queries(case, 2, spare_rows=spare_rows)
        got = run_prefill(kernels, case, q, max_query_len=4)
        assert (got.out == SENTINEL).all()
        assert (got.lse == SENTINEL).all()


def test_padding_rows_with_queries_give_zeros(device):
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=16, max_seq_len=32)
    batch = RaggedBatch(query_lens=(1, 3, 1), seq_lens=(0, 20, 0))
    case = build_paged_cache(layout, batch).to(device)
    got = _check(case, 1)
    for row in (0, 4):
        assert (got.out[row] == 0).all()
        assert (got.lse[row] == -torch.inf).all()


def test_more_query_heads_than_tile_rows(device):
    """One query of 40 heads needs a tile of 64 rows, where 32 were configured."""
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=32)
    case = build_paged_cache(layout, RaggedBatch(query_lens=(3,), seq_lens=(20,))).to(device)
    _check(case, 40)


def test_max_query_len_may_exceed_the_longest_query(device):
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=48)
    case = build_paged_cache(layout, RaggedBatch(query_lens=(37, 2), seq_lens=(40, 48))).to(device)
    for bound in (37, 1000):
        _check(case, 2, max_query_len=bound)


def test_outputs_are_optional(device):
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=40)
    case = build_paged_cache(layout, RaggedBatch(query_lens=(7,), seq_lens=(40,))).to(device)
    q = make_queries(case, 2)
    out = kernels.paged_prefill_attention(
        q,
        case.k_cache,
        case.v_cache,
        case.block_table,
        case.query_start_loc,
        case.seq_lens,
        case.layout,
        softmax_scale=softmax_scale(case),
        max_query_len=7,
    )
    assert torch.equal(out, run_prefill(kernels, case, q).out)
    assert out.is_contiguous()


# --- keys divided among programs ---------------------------------------------------------------


@pytest.fixture
def _any_share(monkeypatch):
    """Let a program that shares a tile take as little as one step."""
    monkeypatch.setattr(prefill_attention, "MIN_SPLIT_STEPS", 1)


@pytest.mark.usefixtures("_any_share")
@given(
    case=paged_caches(layouts=SMALL, dtypes=DTYPES), group=st.sampled_from([1, 3, 8]),
    num_splits=st.sampled_from([2, 3, 5]), fewer=st.sampled_from([0, 3, 30]),
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
    assert_equal(_check(case, group, splits=splits), first)


@pytest.mark.usefixtures("_any_share")
def test_programs_that_share_tiles_of_streaming_heads_agree_with_the_oracle(device):
    roles = (HeadRole(group=0), HeadRole(window=300, sink=40, ring_blocks=22, group=1))
    layout = LayoutCase.head_groups(
        roles=roles, head_dim=16, max_seq_len=700, max_reqs=2, max_query_len=40
    )
    batch = RaggedBatch(query_lens=(40, 1), seq_lens=(700, 333))
    case = build_paged_cache(layout, batch, dtype=torch.float16).to(device)
    splits = make_splits(case, make_queries(case, 2, spare_rows=1), 5)
    _check(case, 2, splits=splits)
    assert not splits.arrivals.any()


def test_short_contexts_are_not_divided(device):
    """48 tokens are two steps, fewer than MIN_SPLIT_STEPS: bit for bit as by one program."""
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=48)
    case = build_paged_cache(layout, RaggedBatch(query_lens=(7,), seq_lens=(48,))).to(device)
    q = make_queries(case, 2)
    splits = make_splits(case, q, 4)
    assert_equal(run_prefill(kernels, case, q, splits=splits), run_prefill(kernels, case, q))


@pytest.mark.usefixtures("_any_share")
@pytest.mark.parametrize(("query_lens", "num_tiles"), [((32, 0, 0), 2), ((20, 5, 0), 3)])
def test_padding_takes_no_program_from_the_tiles(device, query_lens, num_tiles):
    """Tiles of 16 queries: 3 * num_tiles programs are three for each tile with queries."""
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=700)
    lengths = RaggedBatch(query_lens=(*query_lens, 0, 0), seq_lens=(700, 600, 30, 0, 0))
    case = build_paged_cache(layout, lengths).to(device)
    q = make_queries(case, 2, spare_rows=1)
    splits = replace(make_splits(case, q, 16), num_programs=3 * num_tiles)
    splits.states_lse.fill_(torch.nan)
    _check(case, 2, splits=splits)
    written = ~splits.states_lse.isnan()
    assert written[:3, :20].all()
    assert not written[3:].any()


def test_the_number_of_programs_that_share_a_tile(device, monkeypatch):
    """Two programs per multiprocessor, divided by all heads' tiles, 16 at most; or merged."""
    info = type("Info", (), {"num_sms": 132, "capability": (8, 9)})()
    monkeypatch.setattr(prefill_choice, "device_info", lambda _: info)
    layout = KVLayout.hnd(8, 16, 128, device=device)

    def found(num_tokens, **options):
        splits = PrefillSplits.allocate(
            num_tokens=num_tokens, num_reqs=3, max_query_len=num_tokens, layout=layout,
            num_q_heads=16, dtype=torch.bfloat16, **options,
        )  # fmt: skip
        return splits and splits.num_splits

    # 32 rows of a tile (set by the fixture) are 16 queries of two heads.
    assert [found(n) for n in (0, 1, 16, 48, 256, 272)] == [None, 16, 16, 11, 2, None]
    assert found(4096, num_splits=2) == 2
    assert found(16, num_splits=1) is None
    info.capability = (9, 0)  # whose programs take whole tiles in turn
    assert [found(n) for n in (0, 64, 256, 272)] == [None, 4, 2, 1]  # four: merged by a launch
    assert found(16, num_splits=1) == 1
    roles = [HeadRole()] * 3 + [HeadRole(window=64, sink=16)] * 5
    layout = KVLayout.hnd(8, 16, 128, roles=roles, device=device)  # the three full heads count
    assert [found(n) for n in (0, 1, 96, 256, 704, 720)] == [None, 32, 7, 5, 2, 1]  # seven: merged


def test_decodes_are_prefilled_too_where_tiles_come_from_a_queue(device, monkeypatch):
    info = type("Info", (), {"num_sms": 132, "capability": (9, 0)})()
    monkeypatch.setattr(prefill_choice, "device_info", lambda _: info)

    def found(page_format=None, max_query_len=4096, num_tokens=8192, padding=0, **options):
        num_q_heads, dtype = options.pop("num_q_heads", 16), options.pop("dtype", torch.bfloat16)
        layout = KVLayout.hnd(8, 16, options.pop("head_dim", 128), device=device, **options)
        layout = replace(layout, token_stride=layout.token_stride + padding)
        page_format = page_format or PageFormat.plain(dtype)
        layer = PrefillLayer(layout, dtype, page_format, num_q_heads)
        return prefills_decodes_too(layer, max_query_len, num_tokens)

    assert found()
    assert found(head_dim=64)
    assert not found(FP8)  # a tile converts the codes of its keys for one query
    assert not found(head_dim=48)  # no kernel of warp groups
    assert not found(num_q_heads=8 * 71)  # a tile has no place for such groups
    assert not found(dtype=torch.float32)
    assert not found(padding=8)  # rows of a page are not contiguous
    assert not found(max_query_len=128)
    assert not found(num_tokens=260, max_query_len=256)  # programs share tiles
    assert not found(roles=[HeadRole(window=64, sink=16)] * 8)
    assert not found(roles=[HeadRole()] * 4 + [HeadRole(window=64, sink=16)] * 4)
    info.capability = (8, 9)
    assert not found()


@pytest.mark.usefixtures("_any_share")
@settings(max_examples=settings.default.max_examples // 3)
@given(data=st.data())
def test_streaming_heads_are_computed_apart_where_full_heads_take_another_kernel(device, data):
    """The other kernel, here a stand-in, writes the full heads, and nothing else touches them."""
    layout = streaming_layout(
        data.draw(st.sampled_from([2, 3, 5])), 16, 200, 3, ring=data.draw(st.booleans()),
        head_dim=16,
    )  # fmt: skip
    seq_lens = data.draw(st.lists(st.integers(0, 200), min_size=1, max_size=3))
    query_lens = [data.draw(st.integers(0, seq_len)) for seq_len in seq_lens]
    batch = RaggedBatch(query_lens=tuple(query_lens), seq_lens=tuple(seq_lens))
    granularity = data.draw(st.sampled_from([None, "token"]))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16, granularity=granularity)
    case = case.to(device)
    q = make_queries(case, 2, spare_rows=1)
    num_splits = data.draw(st.sampled_from([None, 3]))
    splits = None if num_splits is None else make_splits(case, q, num_splits)
    full = [head for head in range(2 * layout.num_kv_heads) if head // 2 % 2]
    launched = []

    def launch(call, *_options):
        launched.append(1)
        call.out[:, full] = call.lse[:, full] = 3.0

    with pytest.MonkeyPatch.context() as patch:
        full_only = replace(prefill_choice.KERNELS[-1], has_masks=False)
        patch.setattr(prefill_attention, "kernel_for", lambda *_: full_only)
        for name in ("hopper", "hopper_queue"):
            stand_in = SimpleNamespace(launch=launch)
            patch.setattr(prefill, name, stand_in, raising=False)
            patch.setitem(sys.modules, f"{prefill.__name__}.{name}", stand_in)
        got = run_prefill(kernels, case, q, splits=splits)
    assert launched == ([1] if any(query_lens) else [])
    rows, oracle, want = slice(-1), run_prefill(reference, case, q), exact(case, q)
    if launched:
        assert (got.out[:, full] == 3.0).all()
        assert (got.lse[:, full] == 3.0).all()
    got.out[rows, full], got.lse[rows, full] = oracle.out[rows, full], oracle.lse[rows, full]
    assert_in_budget(got.rows(rows), oracle.rows(rows), want, case)
    assert splits is None or not splits.arrivals.any()


@pytest.mark.parametrize("ops", [kernels, reference], ids=["kernel", "oracle"])
def test_splits_for_other_shapes_are_refused(device, ops):
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=48)
    case = build_paged_cache(layout, RaggedBatch(query_lens=(7,), seq_lens=(48,))).to(device)
    q = make_queries(case, 2)
    with pytest.raises(ValueError, match=r"splits: expected states \(3, 7, 2, 16\)"):
        run_prefill(ops, case, q, splits=make_splits(case, make_queries(case, 4), 3))
    if ops is kernels:  # the oracle has no tiles
        few = replace(splits := make_splits(case, q, 3), arrivals=splits.arrivals[:0])
        with pytest.raises(ValueError, match="splits: expected room for 1 requests of at most 7"):
            run_prefill(ops, case, q, splits=few)
        counts = torch.zeros(7, 8, dtype=torch.int32, device=device)
        with pytest.raises(ValueError, match=r"splits.counts: expected shape \[7, 1\]"):
            run_prefill(ops, case, q, splits=replace(splits, counts=counts))
    queue = PrefillSplits(
        num_splits=1, num_programs=1, states=None, states_lse=None, arrivals=None, counts=None,
        ticket=torch.zeros(1, dtype=torch.int32, device="meta"),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"splits: expected buffers on .*, got meta"):
        run_prefill(ops, case, q, splits=queue)
    with pytest.raises(TypeError, match="splits: expected PrefillSplits or None, got int"):
        run_prefill(ops, case, q, splits=3)
    with pytest.raises(ValueError, match="num_splits: expected None or 1 to 32, got 33"):
        make_splits(case, q, 33)


# --- ranges of keys, pages that are read -------------------------------------------------------


def _draw_offsets(draw, case):
    """Return a key range per row of q: causal, up to the end (as in an image), any or empty."""
    rows = []
    for queries, seq_len in zip(case.batch.query_lens, case.batch.seq_lens, strict=True):
        kind = draw(st.sampled_from(["causal", "image", "any"]))
        edge = st.integers(-1, seq_len + 20)
        for position in range(seq_len - queries, seq_len):
            ranges = {"causal": (0, position + 1), "image": (0, seq_len)}
            rows.append(ranges.get(kind) or (draw(edge), draw(edge)))
    return torch.tensor(rows, dtype=torch.int32).view(-1, 2).to(case.key.device)


def _limited(case, offsets):
    """Return the case with queries that see these ranges of keys only."""
    layout = case.layout
    window, sink = (x.cpu()[:, None, None] for x in (layout.window, layout.sink))
    visible = []
    ranges = offsets.cpu().split(list(case.batch.query_lens))
    for mask, limits, seq_len in zip(case.visible, ranges, case.batch.seq_lens, strict=True):
        key = torch.arange(mask.shape[2])
        query = (torch.arange(mask.shape[1]) + seq_len - mask.shape[1])[:, None]
        seen = (key >= limits[:, :1]) & (key < limits[:, 1:])
        seen = seen & ((window < 0) | (key > query - window) | (key < sink))
        visible.append(seen.to(mask.device) & mask.any(1, keepdim=True))
    return replace(case, visible=tuple(visible))


@pytest.mark.usefixtures("_any_share")
@given(case=paged_caches(layouts=SMALL, dtypes=DTYPES), data=st.data())
def test_attention_over_ranges_of_keys_agrees_with_the_oracle(device, case, data):
    case = case.to(device)
    q = make_queries(case, 2)
    offsets = _draw_offsets(data.draw, case)
    splits = make_splits(case, q, data.draw(st.sampled_from([1, 3])))
    got, oracle = (
        run_prefill(ops, case, q, attn_mask_offsets=offsets, splits=splits)
        for ops in (kernels, reference)
    )
    assert_in_budget(got, oracle, exact(_limited(case, offsets), q), case)


def test_pages_between_ranges_are_not_read(device):
    """Two queries of a tile see pages 0 and 3; NaN in pages 1 and 2 does not spread."""
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=64)
    case = build_paged_cache(layout, RaggedBatch(query_lens=(2,), seq_lens=(64,))).to(device)
    q = make_queries(case, 1)
    offsets = torch.tensor([[0, 16], [48, 99]], dtype=torch.int32, device=device)
    want = exact(_limited(case, offsets), q)
    dead = case.block_table[0, 1:3].long()
    for cache in (case.k_cache, case.v_cache):
        cache.view(-1, layout.block_size * layout.head_dim)[dead] = torch.nan
    for ops in (kernels, reference):
        visited = torch.zeros(1, 1, 4, dtype=torch.uint8, device=device)
        got = run_prefill(ops, case, q, attn_mask_offsets=offsets, visited=visited)
        assert_in_budget(got, got, want, case)
        assert visited.flatten().tolist() == [1, 0, 0, 1]


@pytest.mark.usefixtures("_any_share")
@given(data=st.data())
def test_pages_that_no_query_sees_are_not_read(device, data):
    """Kernel and oracle mark the same pages in ``visited``: sink and window, no page between."""
    case = data.draw(paged_caches(layouts=SMALL)).to(device)
    q = make_queries(case, 1)
    offsets = _draw_offsets(data.draw, case) if data.draw(st.booleans()) else None
    splits = make_splits(case, q, data.draw(st.sampled_from([1, 3])))
    shape = (case.seq_lens.shape[0], case.layout.num_kv_heads, case.layout_case.row_width)
    marks = []
    for ops in (kernels, reference):
        visited = torch.zeros(shape, dtype=torch.uint8, device=device)
        run_prefill(ops, case, q, attn_mask_offsets=offsets, splits=splits, visited=visited)
        marks.append(visited)
    assert torch.equal(*marks)


@pytest.mark.usefixtures("_any_share")
@settings(max_examples=settings.default.max_examples // 3)
@given(data=st.data())
def test_pages_that_windows_hide_may_be_visited_and_masked(device, data):
    """The result is that of a launch that skips them; kernel and oracle visit the same pages."""
    layouts = kv_layouts(
        kinds=["hnd", "per_head_ids"],
        head_dims=(16, 80),
        num_kv_heads=(1, 2),
        max_blocks=3,
        gap_elements=16,
    )
    case = finite(data.draw(paged_caches(layouts=layouts)).to(device))
    q = make_queries(case, 1)
    offsets = _draw_offsets(data.draw, case) if data.draw(st.booleans()) else None
    splits = make_splits(case, q, data.draw(st.sampled_from([1, 3])))
    visiting = replace(case.layout, visits_masked=True)
    shape = (case.seq_lens.shape[0], case.layout.num_kv_heads, case.layout_case.row_width)
    marks, results = [], []
    for ops in (kernels, reference):
        marks.append(torch.zeros(shape, dtype=torch.uint8, device=device))
        options = {"attn_mask_offsets": offsets, "splits": splits, "visited": marks[-1]}
        results.append(run_prefill(ops, case, q, layout=visiting, **options))
    if offsets is None:
        assert_in_budget(*results, exact(case, q), case)
    else:
        torch.testing.assert_close(results[0].out, results[1].out, rtol=2e-2, atol=2e-2)
    assert torch.equal(*marks)


@pytest.mark.parametrize("hole", [0, 5, 6])
def test_a_missing_page_is_skipped_among_pages_that_all_queries_see(device, hole):
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=200)
    case = build_paged_cache(layout, RaggedBatch(query_lens=(40,), seq_lens=(200,))).to(device)
    case.block_table[0, hole] = -1
    keys = torch.arange(200, device=device) // 16 != hole
    case = replace(case, visible=tuple(mask & keys for mask in case.visible))
    _check(case, 2)


# --- properties --------------------------------------------------------------------------------


@given(
    case=paged_caches(layouts=SMALL, dtypes=DTYPES),
    block_seed=st.integers(0, 99),
)
def test_physical_blocks_do_not_matter(device, case, block_seed):
    moved = build_paged_cache(
        case.layout_case, case.batch, dtype=case.key.dtype, seed=5, block_seed=block_seed
    )
    case = build_paged_cache(case.layout_case, case.batch, dtype=case.key.dtype, seed=5)
    q = make_queries(case, 2).to(device)
    assert_equal(
        run_prefill(kernels, moved.to(device), q), run_prefill(kernels, case.to(device), q)
    )


@given(case=paged_caches(layouts=SMALL), data=st.data())
def test_batch_order_permutes_outputs_only(device, case, data):
    case = case.to(device)
    q = make_queries(case, 2)
    order = data.draw(st.permutations(range(len(case.batch.seq_lens))))
    rows = query_rows(case, order)
    got = run_prefill(kernels, permuted(case, order), q[rows])
    assert_equal(got, run_prefill(kernels, case, q).rows(rows))


@given(data=st.data())
def test_two_chunks_agree_with_one(device, data):
    layout = data.draw(SMALL)
    n = data.draw(st.integers(1, layout.max_seq_len))
    queries = data.draw(st.integers(1, min(n, layout.max_query_len)))
    cut = data.draw(st.integers(0, queries))
    batch = RaggedBatch(query_lens=(queries,), seq_lens=(n,))
    case = build_paged_cache(layout, batch).to(device)
    q = make_queries(case, 2)
    head = replace(case, batch=RaggedBatch(query_lens=(cut,), seq_lens=(n - queries + cut,)))
    tail = replace(case, batch=RaggedBatch(query_lens=(queries - cut,), seq_lens=(n,)))
    chunks = [run_prefill(kernels, head, q[:cut]), run_prefill(kernels, tail, q[cut:])]
    got = Result(*(torch.cat([getattr(c, name) for c in chunks]) for name in ("out", "lse")))
    assert_in_budget(got, run_prefill(reference, case, q), exact(case, q), case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_chunks_agree_with_the_oracle(device, dtype):
    """Three pieces of 128 keys are folded; the second request's last piece has one key."""
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=300)
    batch = RaggedBatch(query_lens=(20, 4, 0), seq_lens=(300, 129, 40))
    case = build_paged_cache(layout, batch, dtype=dtype).to(device)
    _check(case, 2, deterministic=True)
    q = make_queries(case, 2)
    with pytest.raises(ValueError, match="splits: expected None with deterministic=True, got Pre"):
        run_prefill(kernels, case, q, splits=make_splits(case, q, 2), deterministic=True)


# --- configuration -----------------------------------------------------------------------------


def test_fit_rows_leaves_room_for_one_query_and_no_more_than_needed():
    config = PrefillAttentionConfig(tile_rows=128, tile_tokens=64, num_warps=8, num_stages=3)
    assert config.fit_rows(group=4, max_query_len=512).tile_rows == 128
    assert config.fit_rows(group=4, max_query_len=9).tile_rows == 64
    assert config.fit_rows(group=4, max_query_len=1).tile_rows == 16
    assert config.fit_rows(group=200, max_query_len=1).tile_rows == 256


# --- errors ------------------------------------------------------------------------------------


def _arguments(device):
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=16, max_seq_len=32)
    case = build_paged_cache(layout, RaggedBatch(query_lens=(2, 3), seq_lens=(20, 32))).to(device)
    q = make_queries(case, 2)
    out, lse = empty_outputs(q)
    return {
        "q": q,
        "k_cache": case.k_cache,
        "v_cache": case.v_cache,
        "block_table": case.block_table,
        "query_start_loc": case.query_start_loc,
        "seq_lens": case.seq_lens,
        "layout": case.layout,
        "softmax_scale": 1.0,
        "logits_soft_cap": 0.0,
        "sinks": torch.zeros(4, device=device),
        "max_query_len": 3,
        "attn_mask_offsets": torch.zeros(5, 2, dtype=torch.int32, device=device),
        "out": out,
        "lse": lse,
        "visited": torch.zeros(2, 2, 2, dtype=torch.uint8, device=device),
    }


WRONG = [
    ("q", lambda x: x.long(), TypeError, "q: expected dtype"),
    ("q", lambda x: x[0], ValueError, r"q: expected shape \[any, any, 16\], got \[4, 16\]"),
    ("q", lambda x: x.mT.contiguous().mT, ValueError, "q: expected unit last stride"),
    ("q", lambda x: x[:, :3], ValueError, "q: expected a multiple of 2 KV heads, got 3 heads"),
    ("k_cache", lambda x: x.half(), TypeError, "k_cache: expected dtype torch.float32"),
    ("k_cache", lambda x: x[::2], ValueError, "k_cache: expected a contiguous tensor"),
    ("v_cache", lambda x: x.to("meta"), ValueError, "v_cache: expected device"),
    ("v_cache", lambda x: x[1:], ValueError, "v_cache: expected .* elements like k_cache, got"),
    ("block_table", lambda x: x.long(), TypeError, "block_table: expected dtype torch.int32"),
    ("block_table", lambda x: x[:1], ValueError, r"block_table: expected \[2, row_width\]"),
    ("query_start_loc", lambda x: x.long(), TypeError, "query_start_loc: expected dtype"),
    ("query_start_loc", lambda x: x[:2], ValueError, r"query_start_loc: expected shape \[3\]"),
    ("query_start_loc", lambda x: x.to("meta"), ValueError, "query_start_loc: expected device"),
    ("query_start_loc", lambda x: x.repeat(2)[::2], ValueError, "query_start_loc: expected a con"),
    ("seq_lens", lambda x: x.long(), TypeError, "seq_lens: expected dtype torch.int32"),
    ("seq_lens", lambda x: x.to("meta"), ValueError, "seq_lens: expected device"),
    ("layout", lambda _: KVLayout.hnd(2, 16, 32), ValueError, "q: expected shape .any, any, 32"),
    ("max_query_len", lambda _: -1, ValueError, "max_query_len: expected >= 0, got -1"),
    ("softmax_scale", lambda _: 0.0, ValueError, "softmax_scale: expected > 0 and finite, got 0"),
    ("logits_soft_cap", lambda _: -1.0, ValueError, r"logits_soft_cap: .* finite, got -1\.0"),
    ("logits_soft_cap", lambda _: torch.inf, ValueError, "logits_soft_cap: .* finite, got inf"),
    ("logits_soft_cap", lambda _: torch.nan, ValueError, "logits_soft_cap: .* finite, got nan"),
    ("sinks", lambda x: x.double(), TypeError, "sinks: expected dtype torch.float16 or"),
    ("sinks", lambda x: x[:2], ValueError, r"sinks: expected shape \[4\], got \[2\]"),
    ("sinks", lambda x: x.repeat(2)[::2], ValueError, "sinks: expected a contiguous tensor"),
    ("sinks", lambda x: x.to("meta"), ValueError, "sinks: expected device"),
    ("attn_mask_offsets", lambda x: x.long(), TypeError, "attn_mask_offsets: expected dtype"),
    ("attn_mask_offsets", lambda x: x[1:], ValueError, "attn_mask_offsets: expected shape"),
    ("attn_mask_offsets", lambda x: x.mT.contiguous().mT, ValueError, "attn_mask_offsets: .*cont"),
    ("visited", lambda x: x.int(), TypeError, "visited: expected dtype torch.uint8"),
    ("visited", lambda x: x[:, :1], ValueError, r"visited: expected shape \[2, 2, 2\]"),
    ("out", lambda x: x.half(), TypeError, "out: expected dtype torch.float32"),
    ("out", lambda x: x[:1], ValueError, r"out: expected shape \[5, 4, 16\]"),
    ("lse", lambda x: x.half(), TypeError, "lse: expected dtype torch.float32"),
    ("lse", lambda x: x[:, :1], ValueError, r"lse: expected shape \[5, 4\]"),
]


@pytest.mark.parametrize("ops", [kernels, reference], ids=["kernel", "oracle"])
@pytest.mark.parametrize(
    ("name", "change", "error", "message"), WRONG, ids=[f"{i}-{w[0]}" for i, w in enumerate(WRONG)]
)
def test_errors_name_the_argument(device, ops, name, change, error, message):
    arguments = _arguments(device)
    out, lse = arguments["out"], arguments["lse"]
    arguments[name] = change(arguments[name])
    with pytest.raises(error, match=message):
        ops.paged_prefill_attention(**arguments)
    assert (out == SENTINEL).all()
    assert (lse == SENTINEL).all()


def test_a_head_dim_without_a_kernel_is_refused(device):
    cache = torch.zeros(16 * 8, device=device)
    with pytest.raises(ValueError, match=r"layout\.head_dim: expected a multiple of 16 from 16"):
        kernels.paged_prefill_attention(
            torch.zeros(1, 1, 8, device=device),
            cache,
            cache,
            torch.zeros(1, 1, dtype=torch.int32, device=device),
            torch.tensor([0, 1], dtype=torch.int32, device=device),
            torch.ones(1, dtype=torch.int32, device=device),
            KVLayout.hnd(1, 16, 8, device=device),
            softmax_scale=1.0,
            max_query_len=1,
        )
