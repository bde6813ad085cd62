"""Paged decode attention: the kernel against its oracle and against dense attention."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import HeadRole, KVLayout, reference
from mrv1.kernels.attention.decode import plan as plan_buffers
from mrv1.kernels.attention.decode.plan import DecodeAttentionConfig
from mrv1.testing.strategies import (
    LayoutCase,
    RaggedBatch,
    build_paged_cache,
    kv_layouts,
    paged_caches,
)
from tests.kernels.paged_attention import (
    SENTINEL,
    assert_equal,
    assert_in_budget,
    empty_outputs,
    exact,
    finite,
    make_plan,
    make_queries,
    permuted,
    query_rows,
    run_decode,
    run_prefill,
    small_tiles,
    softmax_scale,
)

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALL = kv_layouts(head_dims=(16, 80), num_kv_heads=(1, 2), max_blocks=3)


@pytest.fixture(autouse=True, scope="module")
def _tiles():
    """Use tiles so small that a test's short contexts fill several of them."""
    with small_tiles(32):
        yield


def _check(case, group, **options):
    q = make_queries(case, group)
    got = run_decode(kernels, case, q, **options)
    assert_in_budget(got, run_decode(reference, case, q), exact(case, q), case)
    return got


# --- oracle ------------------------------------------------------------------------------------


@given(data=st.data(), group=st.sampled_from([1, 4, 5, 7, 8, 13]))
def test_kernel_agrees_with_the_oracle(device, data, group):
    query_len = data.draw(st.sampled_from([1, 1, 2, 8]))
    case = data.draw(paged_caches(layouts=SMALL, dtypes=DTYPES, uniform_query_len=query_len))
    splits = data.draw(st.sampled_from([None, 1, 2, 3]))
    _check(case.to(device), group, query_len=query_len, num_kv_splits=splits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_head_dims(device, head_dim, dtype):
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=head_dim, max_seq_len=48)
    batch = RaggedBatch(query_lens=(1, 1), seq_lens=(33, 48))
    _check(build_paged_cache(layout, batch, dtype=dtype).to(device), 4, num_kv_splits=2)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_sizes(device, block_size):
    layout = LayoutCase.hnd(
        num_kv_heads=1, head_dim=16, block_size=block_size, max_seq_len=3 * block_size, max_reqs=4
    )
    lens = (block_size - 1, block_size, block_size + 1, 3 * block_size)
    batch = RaggedBatch(query_lens=(1,) * 4, seq_lens=lens)
    _check(build_paged_cache(layout, batch).to(device), 1)


# --- edges -------------------------------------------------------------------------------------


def test_streaming_heads_and_a_full_head_agree_with_the_oracle(device):
    """A long context: the rings stay five and three block-table columns wide."""
    roles = (
        HeadRole(group=0),
        HeadRole(window=40, sink=4, ring_blocks=4, group=1),
        HeadRole(window=17, sink=0, ring_blocks=3, group=2),
    )
    layout = LayoutCase.head_groups(roles=roles, head_dim=16, max_seq_len=700, max_reqs=2)
    assert layout.row_width == 44 + 5 + 3
    batch = RaggedBatch(query_lens=(2, 2), seq_lens=(700, 333))
    case = build_paged_cache(layout, batch, dtype=torch.float16).to(device)
    with small_tiles(128):
        _check(case, 2, num_kv_splits=2)


def test_a_per_head_table_needs_no_reshaping(device):
    layout = LayoutCase.hnd(num_kv_heads=3, head_dim=16, max_seq_len=64, own_ids=True)
    case = build_paged_cache(layout, RaggedBatch(query_lens=(1, 1), seq_lens=(64, 20)))
    case = case.to(device)
    q = make_queries(case, 1)
    table = case.block_table.view(2 * 3, 4)
    assert_equal(run_decode(kernels, case, q, block_table=table), run_decode(kernels, case, q))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("seq_lens", [(), (0,), (0, 0, 0)])
def test_rows_without_visible_keys_give_zeros_and_lse_minus_infinity(device, seq_lens, splits):
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=16)
    batch = RaggedBatch(query_lens=(2,) * len(seq_lens), seq_lens=seq_lens)
    case = build_paged_cache(layout, batch).to(device)
    got = run_decode(kernels, case, make_queries(case, 2), query_len=2, num_kv_splits=splits)
    assert (got.out == 0).all()
    assert (got.lse == -torch.inf).all()


@pytest.mark.parametrize("splits", [1, 2])
def test_a_request_may_be_shorter_than_its_queries(device, splits):
    """Queries before the first token see nothing; the others see what they see alone."""
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=64)
    batch = RaggedBatch(query_lens=(4, 4, 4), seq_lens=(1, 3, 50))
    case = build_paged_cache(layout, batch).to(device)
    got = _check(case, 2, query_len=4, num_kv_splits=splits)
    unseeing = [0, 1, 2, 4]  # three of the first request's, one of the second's
    assert not got.out[unseeing].any()
    assert (got.lse[unseeing] == -torch.inf).all()


def test_outputs_are_optional(device):
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=40)
    case = build_paged_cache(layout, RaggedBatch(query_lens=(1,), seq_lens=(40,))).to(device)
    q = make_queries(case, 2)
    for splits in (1, 2):
        want = run_decode(kernels, case, q, num_kv_splits=splits)
        out = kernels.paged_decode_attention(
            q,
            case.k_cache,
            case.v_cache,
            case.block_table,
            case.seq_lens,
            case.layout,
            softmax_scale=softmax_scale(case),
            num_kv_splits=splits,
        )
        assert torch.equal(out, want.out)
        assert out.is_contiguous()


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # the interpreter's numpy
@pytest.mark.parametrize("splits", [1, 2])
def test_nan_in_a_query_stays_in_its_row(device, splits):
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=64)
    case = build_paged_cache(layout, RaggedBatch(query_lens=(1, 1), seq_lens=(64, 64))).to(device)
    q = make_queries(case, 2).clone()
    clean = run_decode(kernels, case, q, num_kv_splits=splits)
    q[0, 1, 3] = torch.nan
    got = run_decode(kernels, case, q, num_kv_splits=splits)
    assert got.out[0, 1].isnan().all()
    assert got.lse[0, 1].isnan()
    assert_equal(got.rows(slice(1, 2)), clean.rows(slice(1, 2)))
    assert torch.equal(got.out[0, 0], clean.out[0, 0])


def test_pages_beyond_two_to_the_31_elements(device):
    """Block 2 starts at element 2**31: the multiply by the stride must be 64 bits wide."""
    stride, dim = 2**30, 16
    cache = torch.empty(2 * stride + 16 * dim, dtype=torch.float16, device=device)  # 4 GiB, lazy
    page = torch.randn(16, dim, generator=torch.Generator().manual_seed(0)).to(cache)
    cache[2 * stride :] = page.flatten()
    layout = KVLayout.build(
        block_size=16,
        head_dim=dim,
        token_stride=dim,
        head_base=[0],
        block_stride=[stride],
        roles=[HeadRole()],
        device=device,
    )
    q = page[:1, None].clone()
    lens = torch.tensor([16], dtype=torch.int32, device=device)
    out = kernels.paged_decode_attention(
        q,
        cache,
        cache,
        torch.tensor([[2]], dtype=torch.int32, device=device),
        lens,
        layout,
        softmax_scale=1.0,
    )
    want = torch.softmax(page.double() @ page[0].double(), 0) @ page.double()
    torch.testing.assert_close(out[0, 0].double(), want, rtol=2e-3, atol=2e-3)


# --- properties --------------------------------------------------------------------------------


@given(
    case=paged_caches(layouts=SMALL, dtypes=DTYPES, uniform_query_len=1),
    block_seed=st.integers(0, 99),
)
def test_physical_blocks_do_not_matter(device, case, block_seed):
    moved = build_paged_cache(
        case.layout_case, case.batch, dtype=case.key.dtype, seed=5, block_seed=block_seed
    )
    case = build_paged_cache(case.layout_case, case.batch, dtype=case.key.dtype, seed=5)
    q = make_queries(case, 2).to(device)
    assert_equal(run_decode(kernels, moved.to(device), q), run_decode(kernels, case.to(device), q))


@given(case=paged_caches(layouts=SMALL, uniform_query_len=2, min_reqs=1), data=st.data())
def test_batch_order_permutes_outputs_only(device, case, data):
    case = case.to(device)
    q = make_queries(case, 2)
    order = data.draw(st.permutations(range(len(case.batch.seq_lens))))
    rows = query_rows(case, order)
    options = {"num_kv_splits": 2}
    whole = run_decode(kernels, case, q, **options)
    assert_equal(run_decode(kernels, permuted(case, order), q[rows], **options), whole.rows(rows))


@given(case=paged_caches(layouts=SMALL, uniform_query_len=1, min_reqs=1))
def test_padding_rows_change_nothing(device, case):
    case = case.to(device)
    q = make_queries(case, 1)
    options = {"num_kv_splits": 2}
    alone = run_decode(kernels, case, q, **options)
    padded = replace(
        case,
        batch=RaggedBatch(
            query_lens=(*case.batch.query_lens, 1), seq_lens=(*case.batch.seq_lens, 0)
        ),
        block_table=torch.cat([case.block_table, case.block_table[:1]]),
    )
    got = run_decode(kernels, padded, torch.cat([q, q[:1]]), **options)
    assert_equal(got.rows(slice(-1)), alone)
    assert (got.out[-1] == 0).all()
    assert (got.lse[-1] == -torch.inf).all()


@given(
    case=paged_caches(layouts=SMALL, dtypes=DTYPES, uniform_query_len=1),
    splits=st.sampled_from([2, 5, 17, 256]),
)
def test_splits_change_rounding_only(device, case, splits):
    _check(case.to(device), 2, num_kv_splits=splits)


@given(case=paged_caches(layouts=SMALL, dtypes=DTYPES, uniform_query_len=1), data=st.data())
def test_a_plan_made_by_the_caller_changes_nothing(device, case, data):
    case = case.to(device)
    q = make_queries(case, 2)
    options = data.draw(
        st.sampled_from([{}, {"num_kv_splits": 2}, {"deterministic": True}]), label="options"
    )
    plan = make_plan(case, q, **options)
    kernels.plan_decode_attention(case.seq_lens, case.layout, plan)
    assert_equal(run_decode(kernels, case, q, plan=plan), run_decode(kernels, case, q, **options))


@pytest.mark.parametrize("rubbish", [2**31 - 1, -(2**31), -1, 2**30])
@pytest.mark.parametrize("has_window", [False, True])
def test_plan_entries_after_the_last_item_are_not_read(device, rubbish, has_window):
    """Buffers are not cleared: old memory may hold a GPU's float32 NaN, as int32 0x7fffffff."""
    roles = [HeadRole(), HeadRole(window=40, sink=4, ring_blocks=4, group=1)]
    layout = LayoutCase.head_groups(
        roles=roles if has_window else roles[:1], head_dim=16, max_seq_len=200
    )
    batch = RaggedBatch(query_lens=(1, 1, 1), seq_lens=(33, 0, 200))
    case = build_paged_cache(layout, batch).to(device)
    q = make_queries(case, 2)
    plan = make_plan(case, q, num_kv_splits=7)
    for buffer in (plan.items, plan.num_items, plan.arrivals):
        buffer.fill_(rubbish)
    kernels.plan_decode_attention(case.seq_lens, case.layout, plan)
    assert int(plan.num_items) < plan.max_items
    _check(case, 2, plan=plan)


@given(data=st.data(), splits=st.sampled_from([2, 5, 17]))
def test_the_last_program_to_finish_merges(device, data, splits):
    """Pieces are merged in order; each launch leaves ``arrivals`` zero for the next launch."""
    query_len = data.draw(st.sampled_from([1, 1, 4]))
    case = data.draw(paged_caches(layouts=SMALL, dtypes=DTYPES, uniform_query_len=query_len))
    case = case.to(device)
    q = make_queries(case, 2)
    plan = make_plan(case, q, num_kv_splits=splits)
    if not plan.may_split:
        return  # no segment can be divided
    kernels.plan_decode_attention(case.seq_lens, case.layout, plan)
    got = run_decode(kernels, case, q, plan=plan)
    assert_in_budget(got, run_decode(reference, case, q), exact(case, q), case)
    for _ in range(2):
        assert not plan.arrivals[: int(plan.num_items)].any()
        assert_equal(run_decode(kernels, case, q, plan=plan), got)


@pytest.mark.parametrize("num_pieces", [2, 16, 17, 24, 64, 65, 96, 257, 273])
def test_pieces_are_merged_in_rounds(device, monkeypatch, num_pieces):
    """Groups of 16, or of 8 for 17 to 64 pieces; of 257 pieces one is alone in its group."""
    config = DecodeAttentionConfig(tile_tokens=16, num_warps=4, num_stages=1, programs_per_sm=1)
    gpu = SimpleNamespace(num_sms=2 * num_pieces, capability=None)
    monkeypatch.setattr(DecodeAttentionConfig, "default_for", lambda *_: config)
    monkeypatch.setattr(plan_buffers, "device_info", lambda _: gpu)
    num_keys = 16 * num_pieces
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=16, max_seq_len=num_keys)
    batch = RaggedBatch(query_lens=(1,), seq_lens=(num_keys,))
    case = build_paged_cache(layout, batch).to(device)
    q = make_queries(case, 2)
    plan = make_plan(case, q)
    kernels.plan_decode_attention(case.seq_lens, case.layout, plan)
    assert int(plan.num_items) == 2 * num_pieces  # counts of one head lie behind the other's
    for _ in range(2):
        _check(case, 2, plan=plan)
        assert not plan.arrivals.any()


@pytest.mark.parametrize("window", [None, 150])
def test_deterministic_rows_do_not_depend_on_the_batch(device, window):
    """The first request has 3 pieces: one program folds them, or each piece has a program."""
    roles, query_len = [HeadRole()], 1
    if window is not None:
        roles, query_len = [HeadRole(window=window, sink=4, ring_blocks=12)], 3
    layout = LayoutCase.head_groups(roles=roles, head_dim=16, max_seq_len=300)
    batch = RaggedBatch(query_lens=(query_len,) * 2, seq_lens=(300, 128))
    case = build_paged_cache(layout, batch).to(device)
    q = make_queries(case, 2)
    results = []
    for num_sms, rows in ((1, [0, 1]), (20, [0, 1]), (20, [0])):
        gpu = SimpleNamespace(num_sms=num_sms, capability=None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan_buffers, "device_info", lambda _, gpu=gpu: gpu)
            part = permuted(case, rows)
            results.append(
                run_decode(kernels, part, q[: len(rows) * query_len], deterministic=True)
            )
    whole, cut, alone = results
    assert_in_budget(whole, run_decode(reference, case, q), exact(case, q), case)
    assert_equal(cut, whole)
    assert_equal(alone, whole.rows(slice(query_len)))


@given(data=st.data())
def test_pages_that_no_query_sees_are_not_read(device, data):
    """Kernel and oracle mark the same pages in ``visited``: sink and window, no page between."""
    query_len = data.draw(st.sampled_from([1, 3]))
    case = data.draw(paged_caches(layouts=SMALL, uniform_query_len=query_len)).to(device)
    q = make_queries(case, 1)
    shape = (case.seq_lens.shape[0], case.layout.num_kv_heads, case.layout_case.row_width)
    marks = []
    for ops in (kernels, reference):
        visited = torch.zeros(shape, dtype=torch.uint8, device=device)
        run_decode(ops, case, q, query_len=query_len, num_kv_splits=2, visited=visited)
        marks.append(visited)
    assert torch.equal(*marks)


@settings(max_examples=settings.default.max_examples // 3)
@given(data=st.data())
def test_pages_that_windows_hide_may_be_visited_and_masked(device, data):
    """The result is that of a launch that skips them; kernel and oracle visit the same pages."""
    query_len = data.draw(st.sampled_from([1, 3]))
    cases = paged_caches(
        layouts=kv_layouts(
            kinds=["hnd", "per_head_ids"],
            head_dims=(16, 80),
            num_kv_heads=(1, 2),
            max_blocks=3,
            gap_elements=16,
        ),
        granularities=[None, "quarter"],
        uniform_query_len=query_len,
    )
    case = finite(data.draw(cases).to(device))
    q = make_queries(case, 1)
    visiting = replace(case.layout, visits_masked=True)
    shape = (case.seq_lens.shape[0], case.layout.num_kv_heads, case.layout_case.row_width)
    marks = [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(3)]
    options = {"query_len": query_len, "num_kv_splits": 2}
    got = run_decode(kernels, case, q, layout=visiting, visited=marks[0], **options)
    oracle = run_decode(reference, case, q, layout=visiting, visited=marks[1], **options)
    assert_in_budget(got, oracle, exact(case, q), case)
    assert torch.equal(marks[0], marks[1])
    run_decode(kernels, case, q, visited=marks[2], **options)
    assert (marks[2] <= marks[0]).all()


@given(case=paged_caches(layouts=SMALL, dtypes=DTYPES, uniform_query_len=1))
def test_decode_agrees_with_prefill_of_one_token(device, case):
    case = case.to(device)
    q = make_queries(case, 2)
    got = run_decode(kernels, case, q, num_kv_splits=1)
    assert_in_budget(got, run_prefill(kernels, case, q), exact(case, q), case)


# --- errors ------------------------------------------------------------------------------------


def _arguments(device):
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=16, max_seq_len=32)
    case = build_paged_cache(layout, RaggedBatch(query_lens=(1, 1), seq_lens=(20, 32))).to(device)
    q = make_queries(case, 2)
    out, lse = empty_outputs(q)
    return {
        "q": q,
        "k_cache": case.k_cache,
        "v_cache": case.v_cache,
        "block_table": case.block_table,
        "seq_lens": case.seq_lens,
        "layout": case.layout,
        "softmax_scale": 1.0,
        "logits_soft_cap": 0.0,
        "sinks": torch.zeros(4, device=device),
        "query_len": 1,
        "num_kv_splits": 2,
        "deterministic": False,
        "plan": None,
        "out": out,
        "lse": lse,
        "visited": torch.zeros(2, 2, 2, dtype=torch.uint8, device=device),
    }


WRONG = [
    ("q", lambda x: x.double(), TypeError, "q: expected dtype"),
    ("q", lambda x: x[0], ValueError, r"q: expected shape \[any, any, 16\], got \[4, 16\]"),
    ("q", lambda x: x.mT.contiguous().mT, ValueError, "q: expected unit last stride"),
    ("q", lambda x: x[:, :3], ValueError, "q: expected a multiple of 2 KV heads, got 3 heads"),
    ("q", lambda x: x[:, :0], ValueError, "q: expected a multiple of 2 KV heads, got 0 heads"),
    ("q", lambda x: x[:1], ValueError, "q: expected 2 requests x 1 = 2 rows, got 1"),
    ("q", lambda x: x.tolist(), TypeError, "q: expected a torch.Tensor, got list"),
    ("k_cache", lambda x: x.half(), TypeError, "k_cache: expected dtype torch.float32"),
    ("k_cache", lambda x: x[::2], ValueError, "k_cache: expected a contiguous tensor"),
    ("k_cache", lambda x: x.to("meta"), ValueError, "k_cache: expected device"),
    ("v_cache", lambda x: x.half(), TypeError, "v_cache: expected dtype torch.float32"),
    ("v_cache", lambda x: x[::2], ValueError, "v_cache: expected a contiguous tensor"),
    ("v_cache", lambda x: x.to("meta"), ValueError, "v_cache: expected device"),
    ("v_cache", lambda x: x[1:], ValueError, "v_cache: expected .* elements like k_cache, got"),
    ("block_table", lambda x: x.long(), TypeError, "block_table: expected dtype torch.int32"),
    ("block_table", lambda x: x[0], ValueError, "block_table: expected shape"),
    ("block_table", lambda x: x[:1], ValueError, r"block_table: expected \[2, row_width\]"),
    ("block_table", lambda x: x.T.contiguous().T, ValueError, "block_table: expected unit last"),
    ("block_table", lambda x: x.to("meta"), ValueError, "block_table: expected device"),
    ("seq_lens", lambda x: x.long(), TypeError, "seq_lens: expected dtype torch.int32"),
    ("seq_lens", lambda x: x[None], ValueError, r"seq_lens: expected shape \[any\]"),
    ("seq_lens", lambda x: x.repeat(2)[::2], ValueError, "seq_lens: expected a contiguous"),
    ("seq_lens", lambda x: x.to("meta"), ValueError, "seq_lens: expected device"),
    ("layout", lambda _: KVLayout.hnd(2, 16, 32), ValueError, "q: expected shape .any, any, 32"),
    (
        "layout",
        lambda _: KVLayout.hnd(2, 16, 16, device="meta"),
        ValueError,
        "layout: expected device .*, got meta",
    ),
    ("softmax_scale", lambda _: 0.0, ValueError, "softmax_scale: expected > 0 and finite, got 0"),
    ("logits_soft_cap", lambda _: -1.0, ValueError, r"logits_soft_cap: .* finite, got -1\.0"),
    ("logits_soft_cap", lambda _: torch.inf, ValueError, "logits_soft_cap: .* finite, got inf"),
    ("logits_soft_cap", lambda _: torch.nan, ValueError, "logits_soft_cap: .* finite, got nan"),
    ("sinks", lambda x: x.double(), TypeError, "sinks: expected dtype torch.float16 or"),
    ("sinks", lambda x: x[:2], ValueError, r"sinks: expected shape \[4\], got \[2\]"),
    ("sinks", lambda x: x.repeat(2)[::2], ValueError, "sinks: expected a contiguous tensor"),
    ("sinks", lambda x: x.to("meta"), ValueError, "sinks: expected device"),
    ("query_len", lambda _: 0, ValueError, "query_len: expected 1 to 8, got 0"),
    ("query_len", lambda _: 9, ValueError, "query_len: expected 1 to 8, got 9"),
    ("num_kv_splits", lambda _: 0, ValueError, "num_kv_splits: expected None or 1 to 256, got 0"),
    ("num_kv_splits", lambda _: 257, ValueError, "num_kv_splits: .* 1 to 256, got 257"),
    ("deterministic", lambda _: True, ValueError, "num_kv_splits: expected None with determ"),
    ("plan", lambda _: 3, TypeError, "plan: expected a DecodePlan or None, got int"),
    ("out", lambda x: x.half(), TypeError, "out: expected dtype torch.float32"),
    ("out", lambda x: x[:1], ValueError, r"out: expected shape \[2, 4, 16\]"),
    ("out", lambda x: x.mT.contiguous().mT, ValueError, "out: expected unit last stride"),
    ("out", lambda x: x.to("meta"), ValueError, "out: expected device"),
    ("lse", lambda x: x.half(), TypeError, "lse: expected dtype torch.float32"),
    ("lse", lambda x: x[:, :1], ValueError, r"lse: expected shape \[2, 4\]"),
    ("lse", lambda x: x.to("meta"), ValueError, "lse: expected device"),
    ("visited", lambda x: x.int(), TypeError, "visited: expected dtype torch.uint8"),
    ("visited", lambda x: x[:, :1], ValueError, r"visited: expected shape \[2, 2, 2\]"),
]


@pytest.mark.parametrize("ops", [kernels, reference], ids=["kernel", "oracle"])
@pytest.mark.parametrize(
    ("name", "change", "error", "message"), WRONG, ids=[f"{i}-{w[0]}" for i, w in enumerate(WRONG)]
)
def test_errors_name_the_argument(device, ops, name, change, error, message):
    arguments = _arguments(device)
    out, lse = arguments["out"], arguments["lse"]
    arguments[name] = change(arguments[name])
    if name == "q":  # out and lse have the shape of the valid q: they would be wrong too
        arguments |= {"out": None, "lse": None}
    if name == "q" and error is TypeError and ops is reference and "dtype" in message:
        arguments[name] = arguments[name].long()  # the oracle takes float64
    with pytest.raises(error, match=message):
        ops.paged_decode_attention(**arguments)
    assert (out == SENTINEL).all()
    assert (lse == SENTINEL).all()


@pytest.mark.parametrize("head_dim", [8, 24, 272])
def test_a_head_dim_without_a_kernel_is_refused(device, head_dim):
    q = torch.zeros(1, 1, head_dim, device=device)
    cache = torch.zeros(16 * head_dim, device=device)
    with pytest.raises(
        ValueError, match=r"layout\.head_dim: expected a multiple of 16 from 16 to"
    ):
        kernels.paged_decode_attention(
            q,
            cache,
            cache,
            torch.zeros(1, 1, dtype=torch.int32, device=device),
            torch.ones(1, dtype=torch.int32, device=device),
            KVLayout.hnd(1, 16, head_dim, device=device),
            softmax_scale=1.0,
        )
