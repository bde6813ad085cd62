"""Addresses of the scales of an fp8 cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1.kernels import HeadRole, KVScales
from mrv1.kernels.cache.formats import FP8
from mrv1.testing.strategies import kv_layouts

pytestmark = [pytest.mark.interp, pytest.mark.gpu]


def _pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(shape), torch.zeros(shape)


def test_per_token_is_blocks_heads_tokens():
    k_scale, v_scale = _pair(5, 3, 16)
    scales = KVScales.per_token(k_scale, v_scale)
    assert scales.granularity == "token"
    address = scales.base[2] + 4 * scales.block_stride[2] + 7
    k_scale[4, 2, 7] = 1
    assert scales.k_scale.view(-1)[address] == 1
    assert scales.v_scale is v_scale


def test_per_quarter_is_blocks_heads_quarters():
    k_scale, v_scale = _pair(5, 3, 4)
    scales = KVScales.per_quarter(k_scale, v_scale)
    assert scales.granularity == "quarter"
    address = scales.base[2] + 4 * scales.block_stride[2] + 1
    k_scale[4, 2, 1] = 1
    assert scales.k_scale.view(-1)[address] == 1
    assert scales.v_scale is v_scale


def test_scales_per_block_follow_the_granularity():
    assert [FP8.per(g).scales_per_block(32) for g in ("token", "quarter", "head")] == [32, 4, 0]


@given(case=kv_layouts(kinds=["head_groups"]), granularity=st.sampled_from(["token", "quarter"]))
def test_scales_of_head_groups_follow_each_other(case, granularity):
    per_block = case.block_size if granularity == "token" else 4
    base, block_stride, count = case.scale_addresses(per_block)
    members = [sum(r.group == g for r in case.roles) for g in range(len(case.num_blocks))]
    sizes = [n * b * per_block for n, b in zip(members, case.num_blocks, strict=True)]
    group_base = [sum(sizes[:g]) for g in range(len(sizes))]
    scales = KVScales.head_groups(
        *_pair(count), case.roles, group_base, case.block_size, granularity=granularity
    )
    assert scales.granularity == granularity
    assert scales.base.tolist() == base
    assert scales.block_stride.tolist() == block_stride
    ends = [
        b + (case.num_blocks[role.group] - 1) * stride + per_block
        for b, stride, role in zip(base, block_stride, case.roles, strict=True)
    ]
    assert max(ends) == count


def test_per_head_is_one_scale_per_head():
    scales = KVScales.per_head(*_pair(4))
    assert scales.granularity == "head"
    assert scales.base.tolist() == [0, 1, 2, 3]
    assert scales.block_stride.tolist() == [0] * 4


def test_addresses_are_on_the_device_of_the_scales(device):
    scales = KVScales.per_token(*(x.to(device) for x in _pair(1, 2, 16)))
    assert scales.base.device == scales.k_scale.device
    assert scales.block_stride.device == scales.k_scale.device


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"granularity": "block"}, r"granularity: expected one of \('token', .*, got 'block'"),
        ({"block_stride": [16]}, "block_stride: expected 2 values like base, got 1"),
        ({"base": [0, 2]}, r"base: expected a multiple of 16 bytes \(4 elements\), got 2"),
        ({"base": [-4, 0]}, "base: expected a multiple of 16 bytes .* got -4"),
        ({"block_stride": [16, 17]}, "block_stride: expected a multiple of 16 bytes .* got 17"),
    ],
)
def test_build_names_a_wrong_argument(changes, message):
    arguments = {"granularity": "token", "base": [0, 16], "block_stride": [32, 32]} | changes
    with pytest.raises(ValueError, match=message):
        KVScales.build(*_pair(64), **arguments)


def test_constructors_name_a_wrong_argument():
    with pytest.raises(ValueError, match=r"k_scale: expected shape \[blocks, kv_heads, block_si"):
        KVScales.per_token(*_pair(64))
    for shape in ((8, 4), (2, 2, 16)):
        with pytest.raises(ValueError, match=r"k_scale: expected shape \[blocks, kv_heads, 4\]"):
            KVScales.per_quarter(*_pair(*shape))
    with pytest.raises(ValueError, match="group of head 1: expected < 1, got 1"):
        KVScales.head_groups(*_pair(64), [HeadRole(), HeadRole(group=1)], [0], 16)
    with pytest.raises(ValueError, match="granularity: expected 'token' or 'quarter', got 'head'"):
        KVScales.head_groups(*_pair(64), [HeadRole()], [0], 16, granularity="head")
