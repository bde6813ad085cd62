"""The choice of a prefill kernel and its launch, compared with a table of measured choices.

A line of ``prefill_choices.txt`` names a kind of layer: format, head dimension, order of a page,
block size, roles of heads, query heads per KV head and GPU. Three fields of letters follow, for
longest chunks of ``LENGTHS`` in batches of 1, 5 and 60 of them: the kernels where each tile has
one program, the kernels with ``PrefillSplits``, and whether decodes are prefilled too. The other
lines have configurations of the portable kernel: without, with a window, with ranges, with both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mrv1.kernels import HeadRole, KVLayout, PrefillSplits
from mrv1.kernels.attention.prefill import choice
from mrv1.kernels.attention.prefill.choice import (
    PrefillAttentionConfig,
    PrefillLayer,
    WarpGroupKernel,
    choose_launch,
    kernel_for,
    prefills_decodes_too,
)
from mrv1.kernels.cache.formats import FP8, PageFormat

FROZEN = Path(__file__).with_name("prefill_choices.txt")
LENGTHS = (1, 4, 15, 16, 17, 63, 64, 255, 256, 511, 512, 4095, 4096, 8192)
LETTERS = {"hopper": "h", "hopper_queue": "q"}
"""Module -> letter. Portable: p, codes in ``hopper``: f; a capital where programs share a tile."""
STREAMING = HeadRole(window=64, sink=16)
ROLES = {
    "full": [HeadRole()] * 8,
    "streaming": [STREAMING] * 8,
    "mixed": [HeadRole()] * 5 + [STREAMING] * 3,
}


@pytest.fixture(autouse=True)
def gpu(monkeypatch) -> SimpleNamespace:
    """Stand in for a GPU of 132 multiprocessors, whose capability a test sets."""
    info = SimpleNamespace(num_sms=132, capability=(9, 0))
    monkeypatch.setattr(choice, "device_info", lambda _: info)
    monkeypatch.setattr(choice, "INTERPRET", False)
    return info


def _layer(words: str) -> PrefillLayer:
    """Return the layer that the first words of a line describe."""
    stored, head_dim, order, block_size, roles, group = words.split()
    dtype = torch.float32 if "float32" in stored else torch.bfloat16
    if stored == "float16":
        dtype = torch.float16
    options = {} if order == "nhd" else {"roles": ROLES[roles]}
    layout = getattr(KVLayout, order)(8, int(block_size), int(head_dim), **options)
    page_format = FP8 if stored.startswith("fp8") else PageFormat.plain(dtype)
    return PrefillLayer(layout, dtype, page_format, 8 * int(group))


def _name(layer: PrefillLayer, kernel: WarpGroupKernel | None) -> str:
    if kernel is None:
        return "p"
    return "f" if layer.page_format.has_scales else LETTERS[kernel.module]


def _letter(layer: PrefillLayer, longest: int, splits: PrefillSplits | None) -> str:
    """Return the letter of the kernel that a launch takes."""
    head_dim = layer.layout.head_dim
    q = torch.empty(1, layer.num_q_heads, head_dim, dtype=layer.dtype, device="meta")
    cache = torch.empty(2 * head_dim, dtype=torch.uint8, device="meta")
    letter = _name(layer, kernel_for(layer, q, cache, cache, longest, splits))
    return letter.upper() if splits is not None and splits.num_splits > 1 else letter


def _fields(layer: PrefillLayer) -> Iterator[str]:
    """Return the three fields of letters of a line."""
    yield "".join(_letter(layer, longest, None) for longest in LENGTHS)
    with_splits, decodes = "", ""
    for longest in LENGTHS:
        for num_reqs in (1, 5, 60):
            num_tokens = longest * num_reqs
            splits = PrefillSplits.allocate(
                num_tokens=num_tokens, num_reqs=num_reqs, max_query_len=longest,
                layout=layer.layout, num_q_heads=layer.num_q_heads, dtype=layer.dtype,
                page_format=layer.page_format,
            )  # fmt: skip
            letter = _letter(layer, longest, splits)
            chosen = choose_launch(layer, layer, longest, num_tokens)
            assert _name(layer, chosen.kernel) == letter.lower()
            assert (chosen.division in ("keys", "merged")) is letter.isupper()
            with_splits += letter
            decodes += ".d"[prefills_decodes_too(layer, longest, num_tokens)]
    yield with_splits
    yield decodes


def _configs(dtype: torch.dtype, head_dim: int, capability: tuple[int, int] | None) -> str:
    found = (
        PrefillAttentionConfig.default_for(head_dim, dtype, capability, window, offsets)
        for offsets in (False, True)
        for window in (False, True)
    )
    return " ".join(
        f"{each.tile_rows}x{each.tile_tokens}w{each.num_warps}s{each.num_stages}"
        + (f"r{each.max_registers}" if each.max_registers else "")
        for each in found
    )


def test_every_launch_takes_the_kernel_that_was_measured_to_be_faster(gpu):
    kinds = [line.split(": ") for line in FROZEN.read_text().splitlines() if ":" in line]
    assert len(kinds) > 30
    for words, frozen in kinds:
        layer_words, _, capability = words.rpartition(" ")
        gpu.capability = tuple(map(int, capability.split(".")))
        assert " ".join(_fields(_layer(layer_words))) == frozen, words


def test_soft_caps_and_logit_sinks_take_the_same_kernels_but_those_for_codes(gpu):
    kinds = [line.split(": ") for line in FROZEN.read_text().splitlines() if ": " in line]
    for words, _ in kinds:
        layer_words, _, capability = words.rpartition(" ")
        gpu.capability = tuple(map(int, capability.split(".")))
        layer = _layer(layer_words)
        capped = layer._replace(plain_scores=False)
        for longest in LENGTHS:
            chosen, plain = (
                choose_launch(each, each, longest, longest) for each in (capped, layer)
            )
            is_coded = layer.page_format.has_scales
            uncoded = plain._replace(kernel=None, merged_splits=0)
            assert chosen == (uncoded if is_coded else plain), words


@pytest.mark.parametrize(
    ("windows", "modules"),
    [
        ([1023, 64], [None, "hopper_queue", None]),
        ([1024, 64], ["hopper", "hopper_queue", "hopper"]),
        ([-1, 64], ["hopper", "hopper_queue", "hopper"]),
    ],
)  # fmt: skip
def test_programs_of_a_tile_or_less_of_it_need_a_full_head_or_a_long_window(gpu, windows, modules):
    layout = KVLayout.hnd(2, 16, 128, roles=[HeadRole(window=window) for window in windows])
    layer = PrefillLayer(layout, torch.bfloat16, PageFormat.plain(torch.bfloat16), 8)
    found = [choice.choose_kernel(layer, 4096, each) for each in ("keys", "queue", "tiles")]
    assert [kernel and kernel.module for kernel in found] == modules


@pytest.mark.parametrize(
    ("windows", "block_size", "head_dim", "tile"),
    [
        ([1024, 128], 64, 128, (64, 6)), ([1024, 128], 16, 64, (64, 6)),
        ([1025, 128], 16, 128, (128, 3)), ([1024, -1], 16, 128, (128, 3)),
        ([1024, 128], 128, 128, (128, 3)), ([1024, 128], 16, 256, (64, 2)),
    ],
)  # fmt: skip
def test_short_windows_have_smaller_tiles(windows, block_size, head_dim, tile):
    roles = [HeadRole(window=window) for window in windows]
    assert choice.short_window_tile(KVLayout.hnd(2, block_size, head_dim, roles=roles)) == tile


def test_streaming_heads_have_a_launch_of_their_own_where_the_kernel_knows_no_windows():
    layout = KVLayout.hnd(8, 16, 128, roles=ROLES["mixed"])
    for row in choice.KERNELS:
        assert row.takes_windows(layout) is (FP8.dtype not in row.dtypes)
        assert not row.takes_windows(replace(layout, visits_masked=True))


@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 8), (8, 4), (8, 1)])
def test_counts_of_parts_begin_at_16_bytes(num_kv_heads, group):
    """So that one compiled kernel serves every batch."""
    layout = KVLayout.hnd(num_kv_heads, 16, 128)
    page_format = PageFormat.plain(torch.bfloat16)
    layer = PrefillLayer(layout, torch.bfloat16, page_format, num_kv_heads * group)
    num_merged = 0
    for num_tokens in range(1, 500):
        splits = PrefillSplits.allocate(
            num_tokens=num_tokens, num_reqs=1, max_query_len=num_tokens, layout=layout,
            num_q_heads=num_kv_heads * group, dtype=torch.bfloat16,
        )  # fmt: skip
        chosen = choose_launch(layer, layer, num_tokens, num_tokens)
        assert (splits.counts is not None) is (chosen.merged_splits > 0)
        if splits.counts is not None:
            num_merged += 1
            assert splits.counts.storage_offset() % 4 == 0
            assert splits.counts.shape == (num_tokens, num_kv_heads)
    assert num_merged > 50


def test_splits_of_another_layer_change_no_kernel_of_windows():
    options = {"num_tokens": 32, "num_reqs": 1, "max_query_len": 32, "num_q_heads": 32}
    layouts = [KVLayout.hnd(8, 16, 128, roles=ROLES[name]) for name in ("full", "streaming")]
    own, others = (
        PrefillSplits.allocate(layout=layout, dtype=torch.bfloat16, **options)
        for layout in layouts[::-1]
    )
    assert own.counts is None
    assert others.counts is not None
    page_format = PageFormat.plain(torch.bfloat16)
    full, windows = (PrefillLayer(layout, torch.bfloat16, page_format, 32) for layout in layouts)
    assert _letter(windows, 32, own) == _letter(windows, 32, others)
    chosen = choose_launch(windows, full, 32, 32)
    assert chosen == choose_launch(windows, windows, 32, 32)
    assert choose_launch(full, full, 32, 32).merged_splits == 16


def test_every_row_names_a_kernel_for_its_heads():
    folder = Path(choice.__file__).parent
    for row in choice.KERNELS:
        assert (folder / f"{row.module}.py").is_file()
        assert set(row.head_dims) <= set(choice.WARP_GROUP_TILES)


def test_the_portable_kernel_is_launched_as_measured():
    rows = [line.split(" = ") for line in FROZEN.read_text().splitlines() if " = " in line]
    assert len(rows) > 30
    for words, frozen in rows:
        name, head_dim, gpu = words.split()
        capability = None if gpu == "amd" else tuple(map(int, gpu.split(".")))
        assert _configs(getattr(torch, name), int(head_dim), capability) == frozen, words
    for head_dim in (64, 80, 128, 256):
        for dtype in (torch.float16, torch.float64):  # as bfloat16; oracles take float64 too
            as_bfloat16 = _configs(torch.bfloat16, head_dim, (9, 0))
            assert _configs(dtype, head_dim, (9, 0)) == as_bfloat16
