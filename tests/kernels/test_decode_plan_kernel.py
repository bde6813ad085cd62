"""The plan of decode attention: the kernel equals its oracle, and no key is lost or doubled."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import DecodePlan, HeadRole, KVLayout, reference
from mrv1.kernels.attention.decode import plan as plan_buffers
from mrv1.kernels.attention.decode.plan import DecodeAttentionConfig, Item
from mrv1.kernels.attention.prefill.choice import PrefillAttentionConfig
from mrv1.kernels.cache.formats import FP8

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

MAX_KEYS = 400
ROLES = (
    HeadRole(),
    HeadRole(window=40, sink=4, ring_blocks=5, table_offset=25, group=1),
    HeadRole(window=1, table_offset=3),
)


def _layout(roles, device) -> KVLayout:
    page = 16 * 16
    return KVLayout.build(
        block_size=16,
        head_dim=16,
        token_stride=16,
        head_base=[h * page for h in range(len(roles))],
        block_stride=[len(roles) * page] * len(roles),
        roles=roles,
        device=device,
    )


def _allocate(
    num_reqs,
    layout,
    *,
    programs=6,
    tile_tokens=32,
    min_tiles=1,
    query_len=1,
    max_keys=MAX_KEYS,
    **options,
):
    """Return a plan for a device that runs ``programs`` programs at the same time."""
    with pytest.MonkeyPatch.context() as patch:
        config = DecodeAttentionConfig(
            tile_tokens=tile_tokens,
            num_warps=1,
            num_stages=1,
            programs_per_sm=1,
            min_tiles=min_tiles,
        )
        gpu = SimpleNamespace(num_sms=programs, capability=None)
        patch.setattr(DecodeAttentionConfig, "default_for", lambda *_: config)
        patch.setattr(PrefillAttentionConfig, "default_for", lambda *_: config)
        patch.setattr(plan_buffers, "device_info", lambda _: gpu)
        return DecodePlan.allocate(
            max_reqs=num_reqs,
            max_keys=max_keys,
            layout=layout,
            num_q_heads=2 * layout.num_kv_heads,
            dtype=torch.float32,
            query_len=query_len,
            **options,
        )


@st.composite
def plans(draw):
    """Draw lengths, roles, programs, queries and the options of a plan."""
    lens = draw(st.lists(st.integers(0, MAX_KEYS), max_size=6))
    roles = draw(st.lists(st.sampled_from(ROLES), min_size=1, max_size=4))
    options = draw(
        st.sampled_from(
            [
                {},
                {"min_tiles": 3},
                {"num_kv_splits": 1},
                {"num_kv_splits": 3},
                {"deterministic": True},
            ]
        )
    )
    programs = draw(st.sampled_from([1, 6, 40]))
    query_len = draw(st.sampled_from([1, 4]))
    return lens, roles, programs, query_len, options


def _made(ops, device, lens, roles, programs, query_len, options):
    layout = _layout(roles, device)
    plan = _allocate(len(lens), layout, programs=programs, query_len=query_len, **options)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    for buffer in (plan.items, plan.num_items, plan.arrivals):
        buffer.fill_(-7)
    ops.plan_decode_attention(seq_lens, layout, plan)
    assert not plan.arrivals[: int(plan.num_items)].any()
    return plan


def _items(plan):
    items = plan.items[: int(plan.num_items), : len(Item._fields)].tolist()
    return [Item(*item) for item in items]


def _split(items):
    """Return request, head, first item and pieces of the segments of several pieces."""
    return [
        (item.req, item.head, index, item.pieces)
        for index, item in enumerate(items)
        if item.piece == 0 and item.pieces > 1
    ]


# --- oracle ------------------------------------------------------------------------------------


KEY_BYTES = 2 * 16 * 4
"""Bytes of K and V of one key: 16 dimensions in float32."""


@pytest.fixture
def _long_from_96(monkeypatch):
    """Halve shares of three tiles (96 keys) and longer shares."""
    monkeypatch.setattr(plan_buffers, "LONG_PIECE", 96 * KEY_BYTES)


@pytest.mark.usefixtures("_long_from_96")
@given(plans())
def test_kernel_equals_the_oracle(device, drawn):
    if not drawn[0]:
        return  # no launch, nothing written
    assert _items(_made(kernels, device, *drawn)) == _items(_made(reference, device, *drawn))


@pytest.mark.usefixtures("_long_from_96")
@given(plans())
def test_items_cover_every_visible_key_once(device, drawn):
    """Items equal the definition of visible keys, computed without the kernels' arithmetic."""
    lens, roles, _, query_len, _ = drawn
    if not lens:
        return
    plan = _made(kernels, device, *drawn)
    items = _items(plan)
    assert len(items) <= plan.max_items
    assert plan.may_split or not _split(items)
    whole = {}
    for index, item in enumerate(items):
        segment = whole.setdefault((item.req, item.head), [])
        segment.append((item.first_work, item.end_work, item.pieces, index))
        assert item.piece == len(segment) - 1
    assert sorted(whole) == [(r, h) for r in range(len(lens)) for h in range(len(roles))]
    for (req, head), pieces in whole.items():
        seen = 0
        for position in range(max(lens[req] - query_len, 0), lens[req]):
            role = roles[head]
            keys = {
                k
                for k in range(position + 1)
                if role.window < 0 or k > position - role.window or k < role.sink
            }
            seen = keys if not seen else seen | keys
        bounds = [piece[:2] for piece in pieces]
        assert [first for first, _ in bounds[1:]] == [end for _, end in bounds[:-1]]
        assert bounds[0][0] == 0
        assert bounds[-1][1] == len(seen or ())
        assert {piece[2] for piece in pieces} == {len(pieces)}
        indices = [piece[3] for piece in pieces]
        assert indices == list(range(indices[0], indices[0] + len(pieces)))


# --- properties --------------------------------------------------------------------------------


def test_equal_shares_fill_the_programs(device):
    """Eight programs share one long request; eight short requests stay whole."""
    plan = _made(kernels, device, [MAX_KEYS], [HeadRole()], 8, 1, {})
    items = _items(plan)
    # 13 tiles of 32, the last one half full: shares of two tiles.
    assert [item.end_work - item.first_work for item in items] == [64] * 6 + [16]
    assert _split(items) == [(0, 0, 0, 7)]
    items = _items(_made(kernels, device, [300] * 8, [HeadRole()], 8, 1, {}))
    assert len(items) == 8
    assert _split(items) == []


def test_long_pieces_are_halved(device, monkeypatch):
    """300 tiles on two programs make two long pieces, which are halved if segments are many."""
    monkeypatch.setattr(plan_buffers, "LONG_PIECE", 2048 * KEY_BYTES)
    layout = _layout([HeadRole()], device)
    for programs, lens, expected in (
        (2, [9600], [2400] * 4),
        (2, [4800], [1216, 1216, 1184, 1184]),
        (2, [4000], [2016, 1984]),  # pieces shorter than LONG_PIECE
        (8, [32000], [4000] * 8),  # not halved: one segment is not many for eight programs
        (4, [6400, 9600], [2144, 2144, 2112, *[1920] * 5]),
    ):
        plan = _allocate(len(lens), layout, programs=programs, max_keys=32000)
        seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
        kernels.plan_decode_attention(seq_lens, layout, plan)
        items = _items(plan)
        assert [item.end_work - item.first_work for item in items] == expected


def test_a_piece_is_long_by_its_bytes(device):
    """With 128 dimensions a piece is long from 2,048 keys of 16 bits, or 4,096 keys of 8 bits."""
    layout = KVLayout.hnd(2, 16, 128, device=device)
    for page_format, keys in ((None, 2048), (FP8, 4096)):
        plan = DecodePlan.allocate(
            max_reqs=2, max_keys=100, layout=layout, num_q_heads=2, dtype=torch.bfloat16,
            page_format=page_format,
        )  # fmt: skip
        assert plan.long_tiles * plan.config.tile_tokens == keys


def test_a_long_request_among_many_short_requests_is_divided(device):
    items = _items(_made(kernels, device, [32] * 5 + [MAX_KEYS], [HeadRole()], 4, 1, {}))
    # 6 segments and half of the programs allow eight items. The long request makes five items of
    # up to three tiles; the five short segments of one tile count as two items and come last.
    assert _split(items) == [(5, 0, 0, 5)]
    assert [item.end_work - item.first_work for item in items] == [96, 96, 96, 64, 48] + [32] * 5


def test_short_segments_leave_the_programs_to_long_segments(device):
    """Eight heads see ten keys, one sees 400: seven pieces on eight programs, short items last."""
    roles = [HeadRole(window=10)] * 3 + [HeadRole()] + [HeadRole(window=10)] * 5
    items = _items(_made(kernels, device, [MAX_KEYS], roles, 8, 1, {}))
    assert _split(items) == [(0, 3, 0, 7)]
    assert [item.head for item in items] == [3] * 7 + [0, 1, 2, 4, 5, 6, 7, 8]


def test_a_plan_makes_no_more_items_than_its_buffers_have(device):
    """A segment of 125 tiles and forty of one tile on eight programs make 53 items.

    Pieces of four tiles would be 72 items. Short segments count as a quarter of an item then, and
    the sum of 42 would be allowed, but the buffers have 53 items.
    """
    layout = _layout([HeadRole()], device)
    lens = torch.tensor([32] * 20 + [4000] + [32] * 20, dtype=torch.int32, device=device)
    for ops in (kernels, reference):
        plan = _allocate(41, layout, programs=8, max_keys=4000)
        assert plan.max_items == 41 + 4 + 8
        ops.plan_decode_attention(lens, layout, plan)
        items = _items(plan)
        assert _split(items) == [(20, 0, 0, 13)]
        assert len(items) == plan.max_items


def test_segments_are_divided_by_at_least_min_tiles(device):
    """min_tiles 3, then equal shares: 13 tiles are five pieces, 4 tiles two, 2 tiles one."""
    options = {"min_tiles": 3}
    lens = [MAX_KEYS, 4 * 32, 2 * 32]
    items = _items(_made(kernels, device, lens, [HeadRole()], 40, 1, options))
    assert [item.end_work - item.first_work for item in items] == [96, 96, 96, 64, 48, 64, 64, 64]
    items = _items(_made(kernels, device, [64, 31], [HeadRole()], 40, 1, options))
    assert [item.end_work - item.first_work for item in items] == [64, 31]
    assert _split(items) == []


def test_deterministic_cuts_are_at_the_same_keys_for_every_length(device):
    """Sixteen pieces of 128 keys; from there on each eight pieces are twice as long."""
    layout = _layout([HeadRole()], device)
    lens = [2048, 2049, 70, 9000, 128, 129]
    cuts = [*range(0, 2048, 128), *range(2048, 4096, 256), *range(4096, 8192, 512), 8192]
    for ops in (kernels, reference):
        options = {"deterministic": True, "max_keys": 9000}
        plan = _allocate(len(lens), layout, programs=1000, **options)
        ops.plan_decode_attention(
            torch.tensor(lens, dtype=torch.int32, device=device), layout, plan
        )
        items = _items(plan)
        for req, length in enumerate(lens):
            ranges = [(each.first_work, each.end_work) for each in items if each.req == req]
            starts = [cut for cut in cuts if cut < length]
            assert ranges == list(zip(starts, [*starts[1:], length], strict=True))
        assert [pieces for *_, pieces in _split(items)] == [16, 17, 33, 2]


def test_a_deterministic_plan_leaves_segments_of_an_equal_share_whole(device):
    """Four programs have seven equal shares: of 1,000 keys 7 x 4 tiles, so 160 keys are cut."""
    layout = _layout([HeadRole()], device)
    lens = torch.tensor([128] * 5 + [160, 200], dtype=torch.int32, device=device)
    for ops in (kernels, reference):
        plan = _allocate(len(lens), layout, programs=4, deterministic=True)
        ops.plan_decode_attention(lens, layout, plan)
        assert [segment[0] for segment in _split(_items(plan))] == [5, 6]
        assert plan.max_items >= len(_items(plan))


def test_a_plan_of_forty_heads_and_eighty_requests_equals_the_oracle(device):
    """A tile of 256 x 64 segments, of which 80 x 40 exist."""
    layout = _layout([HeadRole(), HeadRole(window=70)] * 20, device)
    lens = torch.arange(80, dtype=torch.int32, device=device) * 5
    found = []
    for ops in (kernels, reference):
        plan = _allocate(80, layout, programs=3300)
        ops.plan_decode_attention(lens, layout, plan)
        found.append(_items(plan))
    assert found[0] == found[1]
    assert len(_split(found[0])) > 40


@pytest.mark.parametrize(("num_reqs", "longest"), [(7, 1 << 20), (60, 1 << 17), (600, 3000)])
def test_long_and_many_requests_equal_the_oracle(device, num_reqs, longest):
    """Sizes from one tile to thousands, whether half of the heads have a window or none."""
    generator = torch.Generator().manual_seed(num_reqs)
    lens = longest * torch.rand(num_reqs, generator=generator) ** 4
    lens = lens.to(torch.int32).to(device)
    for roles in ([HeadRole()] * 2, [HeadRole(), HeadRole(window=5000, sink=70)]):
        layout = _layout(roles, device)
        found = []
        for ops in (kernels, reference):
            plan = _allocate(num_reqs, layout, programs=200, max_keys=longest)
            ops.plan_decode_attention(lens, layout, plan)
            found.append(_items(plan))
        assert found[0] == found[1]
        assert _split(found[0])


def test_no_merge_where_no_segment_can_be_split(device):
    layout = _layout([HeadRole()], device)
    assert not _allocate(3, layout, num_kv_splits=1).may_split
    assert _allocate(3, layout, num_kv_splits=1).states.numel() == 0
    assert not _allocate(3, layout, tile_tokens=512).may_split
    assert _allocate(3, layout, programs=3).may_split  # if two are short, the third is cut
    assert _allocate(3, layout, programs=4).may_split


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ops", [kernels, reference], ids=["kernel", "oracle"])
def test_errors_name_the_argument(device, ops):
    layout = _layout([HeadRole()], device)
    plan = _allocate(2, layout)
    lens = torch.ones(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="plan: expected a plan for 3 requests, got a plan for 2"):
        ops.plan_decode_attention(lens.new_ones(3), layout, plan)
    with pytest.raises(TypeError, match="seq_lens: expected dtype"):
        ops.plan_decode_attention(lens.long(), layout, plan)
    with pytest.raises(ValueError, match="plan: expected a plan for 2 KV heads, got a plan for 1"):
        ops.plan_decode_attention(lens, _layout([HeadRole()] * 2, device), plan)


def test_too_many_segments_and_conflicting_options_are_refused(device):
    with pytest.raises(ValueError, match="seq_lens: expected fewer requests with 1 KV heads"):
        _allocate(100_000, _layout([HeadRole()], device))
    with pytest.raises(ValueError, match="num_kv_splits: expected None with deterministic"):
        _allocate(1, _layout([HeadRole()], device), num_kv_splits=2, deterministic=True)
