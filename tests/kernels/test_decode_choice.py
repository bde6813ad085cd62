"""The launch choices of decode attention: every group of query heads gets the same plan.

Groups of 5 and 7 once took a few registers more than groups of 4 and 8: three programs instead of
four ran at the same time, and the one wave that their plan counts on became two.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mrv1.kernels import DecodePlan, HeadRole, KVLayout
from mrv1.kernels.attention.decode import plan as plan_module
from mrv1.kernels.attention.decode.attention import merge_tile
from mrv1.kernels.attention.decode.plan import DecodeAttentionConfig, padded_rows
from mrv1.kernels.cache.formats import FP8, PageFormat

NUM_KV_HEADS = 4
REQUESTS = (1, 12, 24, 32, 40, 48, 64, 600)
HOPPER = (9, 0)
STREAMING = [HeadRole(window=64, sink=16)] * NUM_KV_HEADS


@pytest.fixture(autouse=True)
def gpu(monkeypatch) -> SimpleNamespace:
    """Stand in for a GPU of 132 multiprocessors, whose capability a test sets."""
    info = SimpleNamespace(num_sms=132, capability=HOPPER)
    monkeypatch.setattr(plan_module, "device_info", lambda _: info)
    monkeypatch.setattr(plan_module, "INTERPRET", False)
    return info


def _plan(
    group: int,
    num_reqs: int,
    head_dim: int,
    page_format: PageFormat,
    deterministic: bool = False,
    **options,
):
    layout = KVLayout.hnd(NUM_KV_HEADS, 16, head_dim, **options)
    return DecodePlan.allocate(
        max_reqs=num_reqs,
        max_keys=4096,
        layout=layout,
        num_q_heads=group * NUM_KV_HEADS,
        dtype=torch.bfloat16,
        page_format=page_format,
        deterministic=deterministic,
    )


def _choices(plan: DecodePlan) -> tuple[object, ...]:
    """Return what decides how keys are cut, and into how many programs' work."""
    bounds = (plan.max_items, plan.most_items, plan.fine_items, plan.max_pieces, plan.long_tiles)
    return plan.config, *bounds


@pytest.mark.parametrize("groups", [range(1, 9), range(9, 17)], ids=["to 8", "to 16"])
@pytest.mark.parametrize("page_format", [PageFormat.plain(torch.bfloat16), FP8], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_group_of_a_tile_has_the_same_plan(head_dim, page_format, groups):
    """Groups share a plan up to the columns of a tensor core product, 8, or two of them."""
    assert len({padded_rows(group) for group in groups}) == 1
    for num_reqs in REQUESTS:
        plans = [_plan(group, num_reqs, head_dim, page_format) for group in groups]
        assert len({_choices(plan) for plan in plans}) == 1, num_reqs


@pytest.mark.parametrize("capability", [HOPPER, (10, 0)])
@pytest.mark.parametrize("options", [{}, {"roles": STREAMING}], ids=["full", "streaming"])
@pytest.mark.parametrize("page_format", [PageFormat.plain(torch.bfloat16), FP8], ids=str)
def test_registers_are_held_to_the_share_of_the_planned_programs(
    gpu, page_format, options, capability
):
    """Whatever the compiler would take for one group: all programs of the plan must fit."""
    gpu.capability = capability
    for head_dim in (64, 80, 96, 128, 256):
        for group in (1, 5, 7, 8, 13, 16, 32, 64):
            for num_reqs in REQUESTS:
                config = _plan(group, num_reqs, head_dim, page_format, **options).config
                most = config.max_registers or 255
                warps = 4 * (16384 // (32 * -(-most // 8) * 8))  # in the four parts
                needed = config.num_warps * config.programs_per_sm
                assert needed <= warps, (head_dim, group, num_reqs)
                assert config.launch_options().get("maxnreg") == config.max_registers


def test_pieces_of_codes_are_long_earlier_where_programs_idle():
    """528 programs: two pieces of each of 192 segments leave 144 idle, of each of 256 only 16."""
    keys = {FP8: [], PageFormat.plain(torch.bfloat16): []}
    for page_format, found in keys.items():
        for num_reqs in (32, 48, 64):
            plan = _plan(8, num_reqs, 128, page_format)
            found.append(plan.long_tiles * plan.config.tile_tokens)
    assert [*keys.values()] == [[4096, 2048, 4096], [2048] * 3]


@pytest.mark.parametrize("group", [1, 8, 12, 32])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_tiles_do_not_depend_on_the_batch(head_dim, group):
    """Bits of codes follow from the tiles and their warps, of other formats from the tiles."""
    for page_format in (FP8, PageFormat.plain(torch.bfloat16)):
        configs = {
            _plan(group, num_reqs, head_dim, page_format, deterministic=True).config
            for num_reqs in REQUESTS
        }
        assert len({config.tile_tokens for config in configs}) == 1
        assert len(configs) == 1 or not page_format.has_scales


def test_a_share_of_registers_by_hand():
    def share(num_warps: int, programs: int) -> int | None:
        return DecodeAttentionConfig(64, num_warps, 2, programs).register_share

    assert [share(4, 4), share(4, 3), share(2, 6)] == [128, 168, 168]
    assert [share(2, 7), share(2, 5)] == [128, 168]  # 14 warps in four parts, 10 warps
    assert share(2, 4) is share(4, 2) is None  # 256, more than a thread can have
    assert share(8, 2) == 128


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 9), (12, 0)])
def test_registers_are_free_where_a_share_means_nothing(gpu, capability):
    gpu.capability = capability
    plain = PageFormat.plain(torch.bfloat16)
    assert _plan(7, 32, 128, plain).config.max_registers is None


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_merge_holds_as_many_partial_results_for_every_group_of_a_tile(head_dim):
    for groups in (range(5, 9), range(9, 17)):
        assert len({str(merge_tile(group, head_dim, False)) for group in groups}) == 1
