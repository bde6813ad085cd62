"""Layouts: the constructors' numbers, the checks on the host, the accepted block tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from mrv1.kernels import HeadRole, KVLayout
from mrv1.testing.strategies import kv_layouts


def _build(**changes):
    arguments = {
        "block_size": 16,
        "head_dim": 16,
        "token_stride": 16,
        "head_base": [0, 256],
        "block_stride": [512, 512],
        "roles": [HeadRole(), HeadRole()],
    }
    return KVLayout.build(**(arguments | changes))


def _dense_offsets(cache_shape, order):
    """Return element offsets [heads, blocks, tokens, dim] of a dense cache with named axes."""
    offsets = torch.arange(torch.Size(cache_shape).numel()).view(cache_shape)
    return offsets.permute([order.index(axis) for axis in "hbtd"])


def _formula_offsets(layout, num_blocks):
    block = torch.arange(num_blocks)[:, None, None]
    token = torch.arange(layout.block_size)[:, None]
    return (
        layout.head_base[:, None, None, None]
        + block * layout.block_stride[:, None, None, None]
        + token * layout.token_stride
        + torch.arange(layout.head_dim)
    )


# --- constructors ------------------------------------------------------------------------------


def test_hnd_addresses_equal_a_dense_tensor():
    want = _dense_offsets((5, 3, 32, 24), "bhtd")
    assert torch.equal(_formula_offsets(KVLayout.hnd(3, 32, 24), 5), want)


def test_nhd_addresses_equal_a_dense_tensor():
    want = _dense_offsets((5, 32, 3, 24), "bthd")
    assert torch.equal(_formula_offsets(KVLayout.nhd(3, 32, 24), 5), want)


@pytest.mark.parametrize("make", [KVLayout.hnd, KVLayout.nhd])
def test_one_window_and_sink_apply_to_all_heads(make):
    layout = make(3, 16, 16, window=100, sink=4)
    assert layout.window.tolist() == [100] * 3
    assert layout.kinds.tolist() == [[100, 4, 3]]
    assert layout.sink.tolist() == [4] * 3
    assert layout.table_offset.tolist() == [0] * 3
    assert layout.group_of_head.tolist() == [0] * 3
    assert layout.num_groups == 1
    assert layout.has_window
    assert not layout.has_ring
    assert not make(3, 16, 16).has_window


@given(case=kv_layouts(kinds=["head_groups"]))
def test_head_groups_are_hnd_caches_one_after_another(case):
    group_base, base = [], 0
    for group, num_blocks in enumerate(case.num_blocks):
        group_base.append(base)
        heads = sum(role.group == group for role in case.roles)
        base += num_blocks * heads * case.block_size * case.head_dim
    layout = KVLayout.head_groups(case.roles, group_base, case.block_size, case.head_dim)
    assert layout.head_base.tolist() == list(case.head_base)
    assert layout.block_stride.tolist() == list(case.block_stride)
    assert layout.token_stride == case.token_stride
    for field in ("window", "sink", "ring_blocks", "table_offset"):
        assert getattr(layout, field).tolist() == [getattr(role, field) for role in case.roles]
    assert layout.group_of_head.tolist() == [role.group for role in case.roles]
    assert layout.num_groups == len(case.num_blocks)
    assert layout.has_ring == any(role.ring_blocks for role in case.roles)


def test_per_head_ids():
    layout = KVLayout.per_head_ids(3, 16, 16, 7, window=[-1, 5, 9], sink=[0, 1, 2])
    assert torch.equal(layout.head_base, KVLayout.hnd(3, 16, 16).head_base)
    assert torch.equal(layout.block_stride, KVLayout.hnd(3, 16, 16).block_stride)
    assert layout.table_offset.tolist() == [0, 7, 14]
    assert layout.full_heads.tolist() == [0]
    assert layout.streaming_heads.tolist() == [1, 2]
    assert layout.group_of_head.tolist() == [0, 1, 2]
    assert layout.window.tolist() == [-1, 5, 9]
    assert layout.kinds.tolist() == [[-1, 0, 1], [5, 1, 1], [9, 2, 1]]
    assert layout.sink.tolist() == [0, 1, 2]
    assert not KVLayout.per_head_ids(3, 16, 16, 7).has_window


@given(case=kv_layouts())
def test_every_address_is_a_multiple_of_the_unit(case):
    layout = case.layout()
    numbers = [*case.head_base, *case.block_stride, case.token_stride, case.head_dim]
    assert layout.address_unit >= 8
    assert all(number % layout.address_unit == 0 for number in numbers)


def test_dtypes_and_device():
    layout = KVLayout.hnd(2, 16, 16, device="meta")
    for name, dtype in (
        ("head_base", torch.int64),
        ("block_stride", torch.int64),
        ("table_offset", torch.int32),
        ("full_heads", torch.int32),
        ("window", torch.int32),
        ("sink", torch.int32),
        ("ring_blocks", torch.int32),
        ("group_of_head", torch.int32),
    ):
        tensor = getattr(layout, name)
        assert (tensor.dtype, tensor.device.type, tensor.shape) == (dtype, "meta", (2,))


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 8}, r"block_size: expected one of \(16, 32, 64, 128\), got 8"),
        ({"roles": [], "head_base": [], "block_stride": []}, "expected at least 1, got 0 heads"),
        ({"head_dim": 0}, "expected at least 1, got 2 heads of 0"),
        ({"head_base": [0]}, "head_base: expected 2 values, got 1"),
        ({"block_stride": [512] * 3}, "block_stride: expected 2 values, got 3"),
        ({"block_stride": [512, 2**31]}, r"block_stride: expected .* 2\*\*31 elements, got 2147"),
        ({"token_stride": 2**27}, r"token_stride: expected a block within .*, got 2147483648"),
        ({"token_stride": 20}, r"token_stride: expected a multiple of 16 bytes .*, got 20 elem"),
        ({"head_base": [0, 4]}, r"head_base: expected a multiple of 16 bytes .*, got 4 elements"),
        ({"block_stride": [512, -8]}, r"block_stride: expected a multiple of 16 bytes .*, got -8"),
        (
            {"roles": [HeadRole(), HeadRole(window=0)]},
            "window of head 1: expected -1 or >= 1, got 0",
        ),
        ({"roles": [HeadRole(), HeadRole(window=-2)]}, "window of head 1: .* got -2"),
        ({"roles": [HeadRole(sink=-1), HeadRole()]}, "sink of head 0: expected >= 0, got -1"),
        ({"roles": [HeadRole(group=-1), HeadRole()]}, "group of head 0: expected >= 0, got -1"),
        (
            {"roles": [HeadRole(table_offset=-1), HeadRole()]},
            "table_offset of head 0: expected >= 0, got -1",
        ),
        (
            {"roles": [HeadRole(window=1, ring_blocks=-1), HeadRole()]},
            "ring_blocks of head 0: expected >= 0, got -1",
        ),
        (
            {"roles": [HeadRole(), HeadRole(ring_blocks=2)]},
            "ring_blocks of head 1: expected 0 for a full head, got 2",
        ),
        (
            {"roles": [HeadRole(), HeadRole(sink=4)]},
            "sink of head 1: expected 0 for a full head, got 4",
        ),
        (
            {"roles": [HeadRole(), HeadRole(group=1)], "num_groups": 1},
            "num_groups: expected at least 2 for the roles' groups, got 1",
        ),
        ({"num_groups": 0}, "num_groups: expected at least 1 for the roles' groups, got 0"),
        (
            {"roles": [HeadRole(window=18, ring_blocks=2), HeadRole()]},
            "ring_blocks of head 0: expected 0 or >= 3 to cover a window of 18, got 2",
        ),
    ],
)
def test_build_checks_its_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        _build(**changes)


@pytest.mark.parametrize("make", [KVLayout.hnd, KVLayout.nhd])
def test_a_sink_needs_a_window(make):
    with pytest.raises(ValueError, match="sink of head 0: expected 0 for a full head, got 4"):
        make(3, 16, 16, sink=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 9}, "roles, window, sink: expected roles alone, got .* window=9, sink=0"),
        ({"window": 9, "sink": 2}, "expected roles alone, got .* window=9, sink=2"),
        ({"sink": 2}, "expected roles alone, got .* window=-1, sink=2"),
        ({"roles": [HeadRole()]}, "roles: expected 2 heads, got 1"),
        ({"roles": [HeadRole()] * 3}, "roles: expected 2 heads, got 3"),
        ({"roles": []}, "roles: expected 2 heads, got 0"),
    ],
)
def test_roles_are_one_per_head_and_exclude_window_and_sink(options, message):
    roles = [HeadRole(window=5, sink=1), HeadRole()]
    layout = KVLayout.hnd(2, 16, 16, roles=roles)
    assert (layout.window.tolist(), layout.sink.tolist()) == ([5, -1], [1, 0])
    with pytest.raises(ValueError, match=message):
        KVLayout.hnd(2, 16, 16, **{"roles": roles} | options)


@pytest.mark.parametrize("name", ["window", "sink"])
@pytest.mark.parametrize("length", [0, 2, 4])
def test_per_head_ids_have_a_window_and_a_sink_for_each_head(name, length):
    with pytest.raises(ValueError, match=f"{name}: expected 3 values, got {length}"):
        KVLayout.per_head_ids(3, 16, 16, 7, **{name: [1] * length})


def test_groups_without_heads_are_kept():
    assert _build(num_groups=3).num_groups == 3
    assert _build().num_groups == 1


def test_the_smallest_rings_are_accepted():
    for window, ring in ((1, 1), (2, 2), (17, 2), (18, 3)):
        layout = _build(roles=[HeadRole(window=window, ring_blocks=ring), HeadRole()])
        assert layout.ring_blocks.tolist() == [ring, 0]


def test_head_groups_checks_the_group():
    with pytest.raises(ValueError, match="group of head 1: expected < 1, got 1"):
        KVLayout.head_groups([HeadRole(), HeadRole(group=1)], [0], 16, 16)


# --- block tables ------------------------------------------------------------------------------


def test_table_rows_are_views():
    layout = KVLayout.per_head_ids(3, 16, 16, 4)
    table = torch.arange(24, dtype=torch.int32)
    rows = layout.table_rows(table.view(6, 4), 2)
    assert rows.shape == (2, 12)
    assert rows.data_ptr() == table.data_ptr()
    assert layout.table_rows(rows, 2) is rows
    assert layout.table_rows(torch.empty(0, 4, dtype=torch.int32), 0).shape[0] == 0


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        (torch.zeros(2, 4), TypeError, "block_table: expected dtype torch.int32, got torch.float"),
        (
            torch.zeros(4, 4, dtype=torch.int32),
            ValueError,
            r"block_table: expected \[2, row_width",
        ),
        (
            torch.zeros(2, dtype=torch.int32),
            ValueError,
            r"contiguous \[6, max_blocks\], got \[2\]",
        ),
        (
            torch.zeros(6, 8, dtype=torch.int32)[:, ::2],
            ValueError,
            r"contiguous \[6, max_blocks\]",
        ),
    ],
)
def test_table_rows_refuses_other_forms(table, error, message):
    with pytest.raises(error, match=message):
        KVLayout.per_head_ids(3, 16, 16, 4).table_rows(table, 2)
