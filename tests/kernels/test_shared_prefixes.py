"""Shared prefixes at decode: requests that begin with the same pages read them together."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import DecodePlan, HeadRole, KVLayout, reference
from mrv1.kernels.attention.decode import plan as plan_buffers
from mrv1.kernels.attention.decode.plan import (
    APART,
    BEHIND,
    MAX_PREFIX_PIECES,
    PREFIX,
)
from mrv1.testing.strategies import LayoutCase, RaggedBatch, build_paged_cache
from tests.kernels.paged_attention import (
    assert_equal,
    attention_logits,
    make_plan,
    make_queries,
    permuted,
    query_rows,
    run_decode,
    small_tiles,
)
from tests.kernels.shared_prefixes import check, items_of, plan_of, share

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

TILE = 32
MAX_KEYS = 208
STREAMING = HeadRole(window=40, sink=4, ring_blocks=5, group=1)
MIXED = (HeadRole(), STREAMING, HeadRole(group=2))


@pytest.fixture(autouse=True, scope="module")
def _small():
    """Use small tiles and prefixes, on a device that runs few programs at the same time."""
    gpu = SimpleNamespace(num_sms=8, capability=None)
    with pytest.MonkeyPatch.context() as patch, small_tiles(TILE):
        patch.setattr(plan_buffers, "MIN_PREFIX", TILE)
        patch.setattr(plan_buffers, "MIN_PREFIX_PIECE", TILE)
        patch.setattr(plan_buffers, "MIN_SAVED", 0)
        patch.setattr(plan_buffers, "MIN_SHARING", 0)
        patch.setattr(plan_buffers, "prefix_item_rows", lambda *_: 32)
        patch.setattr(plan_buffers, "device_info", lambda _: gpu)
        chosen = plan_buffers.DecodeAttentionConfig.default_for
        one = partial(replace, programs_per_sm=1)  # as in the interpreter
        patch.setattr(
            plan_buffers.DecodeAttentionConfig, "default_for", lambda *args: one(chosen(*args))
        )
        yield


@st.composite
def shared_cases(draw, dtypes=(torch.float32,), granularities=(None,)):
    """Draw requests of which each begins with some pages of an earlier one, or of none."""
    query_len = draw(st.sampled_from([1, 1, 1, 3]))
    lens = draw(st.lists(st.integers(0, MAX_KEYS), min_size=1, max_size=7))
    kind = draw(st.sampled_from(["hnd", "per_head", "mixed"]))
    sizes = {"head_dim": 16, "max_seq_len": MAX_KEYS, "max_reqs": len(lens)}
    if kind == "mixed":
        layout = LayoutCase.head_groups(roles=MIXED, **sizes)
    elif kind == "per_head":
        layout = LayoutCase.per_head_ids(num_kv_heads=2, **sizes)
    else:
        block_size = draw(st.sampled_from([16, 64]))
        layout = LayoutCase.hnd(
            num_kv_heads=draw(st.sampled_from([1, 2])), block_size=block_size, **sizes
        )
    batch = RaggedBatch(query_lens=(query_len,) * len(lens), seq_lens=tuple(lens))
    case = build_paged_cache(
        layout,
        batch,
        dtype=draw(st.sampled_from(dtypes)),
        granularity=draw(st.sampled_from(granularities)),
        seed=draw(st.integers(0, 100)),
    )
    columns = st.integers(0, -(-MAX_KEYS // layout.block_size))
    parents = [(draw(st.integers(0, req)), draw(columns)) for req in range(len(lens))]
    case = share(case, parents)
    if kind == "per_head" and draw(st.booleans()):  # one head shares less
        case.block_table[:, 3] = case.block_table[:, 3].roll(1)
    return case


# --- plan --------------------------------------------------------------------------------------


@given(case=shared_cases(), group=st.sampled_from([1, 4, 5]))
def test_the_plan_equals_the_oracle(device, case, group):
    case = case.to(device)
    q = make_queries(case, group)
    got, want = plan_of(kernels, case, q), plan_of(reference, case, q)
    assert items_of(got) == items_of(want)
    assert not got.arrivals[: int(got.num_items)].any()
    assert not got.arrivals[got.max_items :].any()
    assert torch.equal(got.prefixes[:, :2], want.prefixes[:, :2])
    for req, (leader, _) in enumerate(got.prefixes[:, :2].tolist()):
        assert torch.equal(got.prefixes[leader], want.prefixes[leader])
        assert req in got.prefixes[leader, 2:].tolist()


@given(case=shared_cases(), group=st.sampled_from([1, 4, 5]))
def test_items_cover_every_visible_key_once(device, case, group):
    """Of each request: what its items read, and the prefix's if its rows are among the sharers.

    The pages of a prefix are those of every sharer, and lie before its queries.
    """
    case = case.to(device)
    plan = plan_of(kernels, case, make_queries(case, group))
    items = items_of(plan)
    assert len(items) <= plan.max_items
    kinds = [item.kind for item in items]
    assert kinds[: kinds.count(PREFIX)] == [PREFIX] * kinds.count(PREFIX)
    read = {}
    for item in items:
        reqs = [item.req]
        if item.kind == PREFIX:
            reqs = [req for req in plan.prefixes[item.req, 2:].tolist() if req >= 0]
            assert len(reqs) > 1
            assert item.pieces <= MAX_PREFIX_PIECES
            num_pages = -(-item.end_work // case.layout.block_size)
            rows = case.block_table[reqs, item.table_offset : item.table_offset + num_pages]
            assert torch.equal(rows, rows[:1].expand_as(rows))
        for req in reqs:
            if item.kind == PREFIX:
                assert item.end_work <= int(case.seq_lens[req]) - plan.query_len
            read.setdefault((req, item.head), []).append((item.first_work, item.end_work))
    heads = range(len(case.layout.roles))
    assert sorted(read) == [(req, head) for req in range(len(case.seq_lens)) for head in heads]
    for (req, head), ranges in read.items():
        role, length = case.layout.roles[head], int(case.seq_lens[req])
        ranges.sort()
        assert ranges[0][0] == 0
        assert [end for _, end in ranges[:-1]] == [first for first, _ in ranges[1:]]
        if role.window < 0:
            assert ranges[-1][1] == length


def _conversations(num_reqs, device, *, group=4, shared=128, dtype=torch.float32, **options):
    """Return requests that share ``shared`` tokens and have up to 60 of their own; q, plan."""
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=16, max_seq_len=MAX_KEYS, max_reqs=num_reqs)
    lens = tuple(shared + 1 + (17 * req) % 60 for req in range(num_reqs))
    batch = RaggedBatch(query_lens=(1,) * num_reqs, seq_lens=lens)
    case = build_paged_cache(layout, batch, dtype=dtype)
    case = share(case, [(0, shared // 16)] * num_reqs).to(device)
    q = make_queries(case, group)
    return case, q, plan_of(kernels, case, q, **options)


@pytest.mark.parametrize(("num_reqs", "shared"), [(4, 96), (12, 96)])
def test_more_shared_prefixes_than_items_of_equal_size(device, num_reqs, shared):
    """Pairs whose prefixes come on top of as many segments as there are programs stay whole."""
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=16, max_seq_len=MAX_KEYS, max_reqs=num_reqs)
    batch = RaggedBatch(query_lens=(1,) * num_reqs, seq_lens=(2 * shared,) * num_reqs)
    case = build_paged_cache(layout, batch, dtype=torch.float32)
    case = share(case, [(req - req % 2, shared // 16) for req in range(num_reqs)]).to(device)
    q = make_queries(case, 4)
    assert items_of(plan_of(kernels, case, q)) == items_of(plan_of(reference, case, q))


@pytest.mark.parametrize(("group", "readers"), [(1, 1), (4, 2), (5, 3), (8, 4), (16, 8)])
def test_a_shared_prefix_is_read_once_for_as_many_requests_as_fit(device, group, readers):
    _, _, plan = _conversations(16, device, group=group)
    starts = [item for item in items_of(plan) if item.kind == PREFIX and item.first_work == 0]
    assert len(starts) == 2 * readers
    assert plan.sharers == 32 // group
    assert {item.kind for item in items_of(plan)} == {PREFIX, BEHIND}


def test_prefixes_of_several_prompts_are_told_apart(device):
    """Two prompts in turns, a request of a third, and one whose prefix is too short."""
    case, q, _ = _conversations(8, device)
    parents = [(0, 8), (1, 8), (0, 8), (1, 7), (0, 6), (1, 8), (6, 8), (0, 1)]
    fresh = torch.arange(case.block_table.numel(), device=device).view_as(case.block_table)
    case = share(replace(case, block_table=fresh.to(torch.int32)), parents)
    plan = plan_of(kernels, case, q)
    assert plan.prefixes[:, 0].tolist() == [0, 1, 0, 1, 0, 1, 6, 7]
    assert plan.prefixes[:, 1].tolist() == [3, 3, 3, 3, 3, 3, 0, 0]
    assert plan.prefixes[0, 2:6].tolist() == [0, 2, 4, -1]


def test_options_and_shapes_that_share_nothing(device):
    case, q, plan = _conversations(3, device)
    assert plan.sharers == 8
    for options in ({"deterministic": True}, {"num_kv_splits": 2}):
        other = make_plan(case, q, shares_prefixes=True, **options)
        assert other.sharers == 0
        kernels.plan_decode_attention(case.seq_lens, case.layout, other)
        assert {item.kind for item in items_of(other)} == {APART}
    assert make_plan(case, q).sharers == 0
    assert make_plan(permuted(case, [0]), q, shares_prefixes=True).sharers == 0
    assert make_plan(case, make_queries(case, 17), shares_prefixes=True).sharers == 0
    streaming = KVLayout.hnd(2, 16, 16, window=40, device=device)
    assert (
        DecodePlan.allocate(
            max_reqs=4, max_keys=400, layout=streaming, num_q_heads=8, dtype=q.dtype,
            shares_prefixes=True,
        ).sharers
        == 0
    )  # fmt: skip


def test_few_segments_and_little_to_save_share_nothing(device, monkeypatch):
    programs = _conversations(3, device)[2].programs
    monkeypatch.setattr(plan_buffers, "MIN_SHARING", 0.75)
    fewest = -(-3 * programs // 8)  # requests of two heads
    assert _conversations(fewest, device)[2].sharers == 8
    assert _conversations(fewest - 1, device)[2].sharers == 0
    # Eight requests need not read the prefix of four tiles again: 64 tiles of two heads.
    tile_bytes = 2 * 16 * 4 * TILE
    for saved, kinds in ((64, {PREFIX, BEHIND, APART}), (65, {APART})):
        monkeypatch.setattr(plan_buffers, "MIN_SAVED", saved * tile_bytes)
        for ops in (kernels, reference):
            case, q, _ = _conversations(9, device, group=2)
            assert {item.kind for item in items_of(plan_of(ops, case, q))} | {APART} == kinds | {
                APART
            }


# --- attention ---------------------------------------------------------------------------------


@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data(), group=st.sampled_from([1, 3, 4, 8]))
def test_attention_agrees_with_the_oracle(device, data, group):
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    cases = shared_cases(dtypes=dtypes, granularities=[None, None, "token", "head"])
    case = data.draw(cases).to(device)
    q = make_queries(case, group)
    plan = plan_of(kernels, case, q)
    got = check(case, q, plan)
    assert not plan.arrivals[plan.max_items :].any()
    assert_equal(run_decode(kernels, case, q, plan=plan), got)


@settings(max_examples=settings.default.max_examples // 4)
@given(case=shared_cases(), data=st.data())
def test_soft_cap_and_logit_sinks_count_once(device, case, data):
    case = case.to(device)
    q = make_queries(case, 2)
    logits = data.draw(attention_logits(q.shape[1], device), label="logits")
    check(case, q, plan_of(kernels, case, q), **logits)


@pytest.mark.parametrize("num_reqs", [2, 9, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prefixes_in_pieces_are_merged(device, num_reqs, dtype):
    case, q, plan = _conversations(num_reqs, device, dtype=dtype)
    pieces = [item.pieces for item in items_of(plan) if item.kind == PREFIX]
    assert (max(pieces) > 1) == (num_reqs < 20)
    for _ in range(2):
        check(case, q, plan)
        assert not plan.arrivals[: int(plan.num_items)].any()


def test_the_order_of_the_batch_changes_rounding_only(device):
    case, q, _ = _conversations(9, device)
    order = [8, 3, 5, 0, 1, 7, 2, 6, 4]
    other = permuted(case, order)
    rows = query_rows(case, order)
    check(other, q[rows], plan_of(kernels, other, q[rows]))


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ops", [kernels, reference], ids=["kernel", "oracle"])
def test_errors_name_the_argument(device, ops):
    case, q, plan = _conversations(3, device)
    arguments = case.seq_lens, case.layout, plan
    with pytest.raises(ValueError, match="block_table: expected a table with shares_prefixes"):
        ops.plan_decode_attention(*arguments)
    with pytest.raises(TypeError, match="block_table: expected dtype"):
        ops.plan_decode_attention(*arguments, block_table=case.block_table.long())
    with pytest.raises(ValueError, match=r"block_table: expected \[3, row_width\]"):
        ops.plan_decode_attention(*arguments, block_table=case.block_table[:2])
    visited = torch.zeros(3, 2, case.block_table.shape[1], dtype=torch.uint8, device=device)
    if ops is kernels:
        with pytest.raises(ValueError, match="visited: expected None with a plan that shares"):
            run_decode(ops, case, q, plan=plan, visited=visited)
