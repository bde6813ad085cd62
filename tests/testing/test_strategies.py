"""The strategies, an independent model: compared with plain loops, shown to reach the edges."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from mrv1.errors import ConfigError
from mrv1.kernels import HeadRole
from mrv1.testing.strategies import (
    KINDS,
    LayoutCase,
    RaggedBatch,
    build_paged_cache,
    kv_layouts,
    paged_caches,
    ragged_batches,
)

SEARCH = settings(
    max_examples=2000, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def _columns(layout: LayoutCase, role: HeadRole, position: int) -> int:
    """Return a position's column by the ring rule: sink blocks first, then the ring in turns."""
    block, sinks = position // layout.block_size, math.ceil(role.sink / layout.block_size)
    if role.ring_blocks and block >= sinks:
        return role.table_offset + sinks + (block - sinks) % role.ring_blocks
    return role.table_offset + block


def test_a_request_longer_than_its_layout_is_refused():
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=16, max_seq_len=64)
    batch = RaggedBatch(query_lens=(1, 1), seq_lens=(64, 65))
    with pytest.raises(ConfigError, match="seq_lens: expected at most max_seq_len = 64, got 65"):
        build_paged_cache(layout, batch)


# --- layouts -----------------------------------------------------------------------------------


@given(layout=kv_layouts())
def test_no_two_elements_share_an_address(layout):
    used = torch.zeros(layout.num_elements, dtype=torch.int32)
    for head, role in enumerate(layout.roles):
        block = torch.arange(layout.num_blocks[role.group])[:, None, None]
        token = torch.arange(layout.block_size)[:, None]
        address = (
            layout.head_base[head]
            + block * layout.block_stride[head]
            + token * layout.token_stride
            + torch.arange(layout.head_dim)
        )
        used[address.flatten()] += 1
    assert used.max() == 1
    assert used[-1] == 1


@given(layout=kv_layouts())
def test_table_segments_follow_each_other_without_gaps(layout):
    end = 0
    for group in range(len(layout.num_blocks)):
        (role,) = {role for role in layout.roles if role.group == group}
        assert role.table_offset == end
        end += math.ceil(role.sink / layout.block_size) + role.ring_blocks
        if not role.ring_blocks:
            end = role.table_offset + math.ceil(layout.max_seq_len / layout.block_size)
    assert end == layout.row_width


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_drawn(kind):
    assert find(kv_layouts(), lambda layout: layout.kind == kind, settings=SEARCH).kind == kind


@pytest.mark.parametrize(
    "wanted",
    [
        lambda roles: any(r.ring_blocks and r.sink for r in roles),
        lambda roles: any(r.ring_blocks and not r.sink for r in roles),
        lambda roles: any(r.window > 0 and not r.ring_blocks for r in roles),
        lambda roles: len({r.group for r in roles}) > 1 and any(r.window < 0 for r in roles),
    ],
    ids=["ring and sink", "ring", "window", "full beside another group"],
)
def test_every_combination_of_roles_is_drawn(wanted):
    find(kv_layouts(), lambda layout: wanted(layout.roles), settings=SEARCH)


# --- batches -----------------------------------------------------------------------------------


@given(data=st.data(), uniform=st.sampled_from([None, 1, 3]))
def test_batches_fit_their_layout(data, uniform):
    layout = data.draw(kv_layouts())
    batch = data.draw(ragged_batches(layout, uniform_query_len=uniform, min_reqs=1))
    assert 1 <= len(batch.seq_lens) == len(batch.query_lens) <= layout.max_reqs
    for n, queries in zip(batch.seq_lens, batch.query_lens, strict=True):
        assert 0 <= n <= layout.max_seq_len
        assert 0 <= queries <= layout.max_query_len
        assert queries <= n or n == 0
        assert uniform in (None, queries)


def test_padding_can_be_excluded():
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=64)

    @given(batch=ragged_batches(layout, padding=False))
    def check(batch):
        assert 0 not in batch.seq_lens

    check()


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 21, 22, 23, 25, 26, 27])
def test_every_edge_length_is_drawn(length):
    role = HeadRole(window=22, sink=4)
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=64, role=role)
    find(ragged_batches(layout), lambda batch: length in batch.seq_lens, settings=SEARCH)


# --- caches ------------------------------------------------------------------------------------


def _read(case, cache, request, head, token):
    """Return a token's vector through table and address formula, or None without a page."""
    layout, role = case.layout_case, case.layout_case.roles[head]
    block = case.block_table[request, _columns(layout, role, token)].item()
    if block < 0:
        return None
    address = (
        layout.head_base[head]
        + block * layout.block_stride[head]
        + token % layout.block_size * layout.token_stride
    )
    return cache[address : address + layout.head_dim]


@given(case=paged_caches(layouts=kv_layouts(head_dims=(16,), num_kv_heads=(1, 2))))
def test_caches_hold_exactly_the_visible_vectors(case):
    layout = case.layout_case
    num_written = 0
    for r, (n, queries) in enumerate(zip(case.batch.seq_lens, case.batch.query_lens, strict=True)):
        for head, role in enumerate(layout.roles):
            for token in range(n):
                sees = [
                    token <= query
                    and (role.window < 0 or token > query - role.window or token < role.sink)
                    for query in range(n - queries, n)
                ]
                seen = case.visible[r][head, :, token].tolist()
                if seen != sees:  # only where a page is missing
                    assert not any(seen)
                    assert _read(case, case.k_cache, r, head, token) is None
                if any(seen):
                    num_written += 1
                    for cache, dense in (
                        (case.k_cache, case.keys),
                        (case.v_cache, case.values),
                    ):
                        vector = _read(case, cache, r, head, token)
                        assert torch.equal(vector, dense[r][token, head])
    for cache in (case.k_cache, case.v_cache):
        assert (~cache.isnan()).sum() == num_written * layout.head_dim


@given(case=paged_caches())
def test_slot_mapping_names_the_pages_of_new_tokens(case):
    layout, row = case.layout_case, 0
    for r, (n, queries) in enumerate(zip(case.batch.seq_lens, case.batch.query_lens, strict=True)):
        for position in range(n - queries, n):
            for head, role in enumerate(layout.roles):
                slot = case.slot_mapping[role.group, row].item()
                column = _columns(layout, role, max(position, 0))
                block = case.block_table[r, column].item() if position >= 0 else -1
                if block < 0:
                    assert slot == -1
                    continue
                assert slot == block * layout.block_size + position % layout.block_size
                assert torch.equal(case.key[row, head], case.keys[r][position, head])
                assert torch.equal(case.value[row, head], case.values[r][position, head])
                before = _read(case, case.k_cache_before, r, head, position)
                assert before.isnan().all()
            row += 1
    assert case.key.shape[0] == case.slot_mapping.shape[1] == row


@given(case=paged_caches(layouts=kv_layouts(num_kv_heads=(2,))))
def test_blocks_have_one_owner(case):
    layout = case.layout_case
    ends = [*sorted({role.table_offset for role in layout.roles}), layout.row_width]
    for begin, end in pairwise(ends):
        ids = case.block_table[:, begin:end].flatten()
        ids = ids[ids >= 0]
        assert ids.unique().numel() == ids.numel()


def _scale(scales, case, head, slot):
    """Return a quarter's K scale through its address formula."""
    block, offset = divmod(slot, case.layout_case.block_size)
    quarter = offset * 4 // case.layout_case.block_size
    return scales.k_scale[scales.base[head] + block * scales.block_stride[head] + quarter].item()


@given(
    case=paged_caches(
        layouts=kv_layouts(head_dims=(16,), num_kv_heads=(1, 2), gap_elements=16),
        granularities=["quarter"],
    )
)
def test_a_quarter_has_the_scale_of_its_largest_visible_value(case):
    layout, row = case.layout_case, 0
    for r, (n, queries) in enumerate(zip(case.batch.seq_lens, case.batch.query_lens, strict=True)):
        row += queries
        for head in range(layout.num_kv_heads):
            seen = case.visible[r][head].any(0).tolist()
            for token in range(n - 1, max(n - queries, 0) - 1, -1):
                slot = case.slot_mapping[layout.roles[head].group, row - n + token].item()
                if slot < 0:
                    continue
                first = token // (layout.block_size // 4) * (layout.block_size // 4)
                members = [
                    t for t in range(first, min(first + layout.block_size // 4, n)) if seen[t]
                ]
                scale = _scale(case.scales, case, head, slot)
                largest = max(case.keys[r][t, head].abs().max().item() for t in members)
                assert largest <= 448 * scale
                assert largest >= 448 * scale * (1 - 1 / 16)  # as it was rounded
                before = _scale(case.scales_before, case, head, slot)
                assert math.isnan(before) == all(t >= n - queries for t in members)
                assert not before > scale


def test_quarters_that_grow_are_drawn():
    find(
        paged_caches(granularities=["quarter"], layouts=kv_layouts(gap_elements=16)),
        lambda case: (case.scales.k_scale > case.scales_before.k_scale).any(),
        settings=SEARCH,
    )


def test_block_seed_changes_only_the_pages():
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=16, max_seq_len=64)
    batch = RaggedBatch(query_lens=(1, 2), seq_lens=(50, 64))
    one, two = (
        build_paged_cache(layout, batch, seed=3, block_seed=s, hole_rate=0.3) for s in (0, 1)
    )
    assert not torch.equal(one.block_table, two.block_table)
    assert torch.equal(one.block_table < 0, two.block_table < 0)
    for a, b in zip(one.visible + one.keys, two.visible + two.keys, strict=True):
        assert torch.equal(a, b)


def test_a_ring_that_cannot_hold_the_chunk_is_refused():
    role = HeadRole(window=17, ring_blocks=2)
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=64, role=role)
    with pytest.raises(RuntimeError, match="column 1: expected a ring that holds live blocks"):
        build_paged_cache(layout, RaggedBatch(query_lens=(8,), seq_lens=(52,)))


@pytest.mark.parametrize("capped", [False, True])
def test_case_attention_equals_a_plain_loop(capped):
    layout = LayoutCase.hnd(
        num_kv_heads=2, head_dim=16, max_seq_len=32, role=HeadRole(window=5, sink=1)
    )
    batch = RaggedBatch(query_lens=(2, 1), seq_lens=(9, 0))
    case = build_paged_cache(layout, batch, dtype=torch.float64)
    q = torch.randn(3, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sinks = [-math.inf, 0.5, -2.0, 3.0] if capped else [-math.inf] * 4
    options = {"logits_soft_cap": 1.5, "sinks": torch.tensor(sinks)} if capped else {}
    out, lse = case.attention(q, 0.5, **options)
    for j, position in enumerate((7, 8)):
        for head in range(4):
            keys = [0, *range(position - 4, position + 1)]
            scores = [0.5 * (q[j, head] @ case.keys[0][k, head // 2]).item() for k in keys]
            if capped:
                scores = [1.5 * math.tanh(score / 1.5) for score in scores]
            total = sum(map(math.exp, [*scores, sinks[head]]))
            want = sum(
                math.exp(s) / total * case.values[0][k, head // 2]
                for s, k in zip(scores, keys, strict=True)
            )
            torch.testing.assert_close(out[j, head], want, rtol=1e-12, atol=1e-12)
            assert lse[j, head].item() == pytest.approx(math.log(total), rel=1e-12)
    assert (out[2] == 0).all()
    assert lse[2].tolist() == sinks


def test_to_moves_every_tensor():
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=16)
    case = build_paged_cache(layout, RaggedBatch(query_lens=(1,), seq_lens=(3,))).to("meta")
    tensors = (case.k_cache, case.block_table, case.keys[0], case.visible[0], case.seq_lens)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert case.layout.head_base.device.type == "meta"
