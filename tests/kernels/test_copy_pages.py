"""Copies of whole blocks: every byte of both caches, against plain loops over their addresses."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from mrv1 import kernels
from mrv1.kernels import HeadRole, KVLayout, reference
from mrv1.kernels.cache.copy_pages import CopyPagesConfig
from mrv1.kernels.cache.kv_scales import KVScales
from mrv1.testing.strategies import LayoutCase, RaggedBatch, build_paged_cache, kv_layouts
from tests.kernels.elementwise import normal
from tests.kernels.paged_attention import assert_equal, make_queries, run_decode

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.float16, torch.bfloat16, FP8, torch.uint8)
IDS = (torch.int32, torch.int64)
BOTH = pytest.mark.parametrize("ops", [kernels, reference], ids=["kernel", "oracle"])


@dataclass(frozen=True, kw_only=True)
class Copies:
    layout: LayoutCase
    group: int
    pairs: list[tuple[int, int]]
    """(source, destination) block ids, -1 = skip."""
    dtype: torch.dtype = torch.float16
    """float8_e4m3fn comes with scales."""
    per_block: int | None = None
    """Scales per block and head; None = one per token."""
    ids: torch.dtype = torch.int32
    seed: int = 0


@st.composite
def copies(draw: DrawFn) -> Copies:
    """Draw a layout and copies within one group: no target is a source, or written twice."""
    layout = draw(kv_layouts(head_dims=(16, 64, 80)))
    group = draw(st.integers(0, len(layout.num_blocks) - 1))
    order = draw(st.permutations(range(layout.num_blocks[group])))
    num_sources = draw(st.integers(1, len(order) - 1))
    source = st.sampled_from([*order[:num_sources], -1])
    most = min(4, len(order) - num_sources)
    targets = order[num_sources:][: draw(st.integers(0, most))]
    skipped = st.sampled_from([False, False, True])
    # The addresses of an fp8 cache are multiples of 16.
    dtypes = [d for d in DTYPES if d != FP8 or layout.layout().address_unit % 16 == 0]
    return Copies(
        layout=layout,
        group=group,
        pairs=[(draw(source), -1 if draw(skipped) else target) for target in targets],
        dtype=draw(st.sampled_from(dtypes)),
        per_block=draw(st.sampled_from([None, 4])),
        ids=draw(st.sampled_from(IDS)),
        seed=draw(st.integers(0, 99)),
    )


def _any_bits(num_elements: int, itemsize: int, seed: int) -> np.ndarray:
    """Return random bytes of K and V, uint8 [2, elements, itemsize], with NaN payloads."""
    shape = (2, num_elements, itemsize)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of equal length in a K and a V buffer, ``per_block`` of them per block and head."""

    before: np.ndarray
    """[2, elements, itemsize] uint8."""
    base: list[int]
    block_stride: list[int]
    token_stride: int
    length: int
    per_block: int

    @classmethod
    def of_pages(cls, case: Copies) -> Rows:
        layout = case.layout
        return cls(
            before=_any_bits(layout.num_elements, case.dtype.itemsize, case.seed),
            base=list(layout.head_base),
            block_stride=list(layout.block_stride),
            token_stride=layout.token_stride,
            length=layout.head_dim,
            per_block=layout.block_size,
        )

    @classmethod
    def of_scales(cls, case: Copies) -> Rows:
        """Return scales with gaps between the heads, each head with its own block stride."""
        layout, heads = case.layout, range(case.layout.num_kv_heads)
        per_block = case.per_block or layout.block_size
        stride = [per_block + 4 * head for head in heads]
        size = [max(layout.num_blocks) * n + 8 for n in stride]
        return cls(
            before=_any_bits(sum(size), 4, case.seed + 1),
            base=[sum(size[:head]) + 4 for head in heads],
            block_stride=stride,
            token_stride=1,
            length=1,
            per_block=per_block,
        )

    def tensors(self, dtype: torch.dtype, device) -> list[torch.Tensor]:
        return [torch.from_numpy(x.copy()).flatten().to(device).view(dtype) for x in self.before]

    def after(self, case: Copies) -> np.ndarray:
        after = self.before.copy()
        kept = [(source, target) for source, target in case.pairs if min(source, target) >= 0]
        heads = [head for head, role in enumerate(case.layout.roles) if role.group == case.group]
        for (source, target), head in itertools.product(kept, heads):
            for piece in range(self.per_block):
                row = self.base[head] + piece * self.token_stride
                start, end = (row + b * self.block_stride[head] for b in (source, target))
                after[:, end : end + self.length] = self.before[:, start : start + self.length]
        return after

    def assert_copied(self, got: list[torch.Tensor], case: Copies) -> None:
        """Fail unless every byte of both buffers is as plain loops leave it."""
        for cache, want in zip(got, self.after(case), strict=True):
            assert np.array_equal(cache.view(torch.uint8).cpu().numpy(), want.ravel())


def _scales(case: Copies, rows: Rows, device) -> KVScales:
    k_scale, v_scale = rows.tensors(torch.float32, device)
    return KVScales.build(
        k_scale,
        v_scale,
        granularity="quarter" if case.per_block else "token",
        base=rows.base,
        block_stride=rows.block_stride,
    )


def _check(case: Copies, device, ops=kernels) -> None:
    pages, scale_rows = Rows.of_pages(case), Rows.of_scales(case)
    caches = pages.tensors(case.dtype, device)
    scales = _scales(case, scale_rows, device) if case.dtype == FP8 else None
    ids = torch.tensor(case.pairs, dtype=case.ids, device=device).view(-1, 2).T.contiguous()
    ops.copy_pages(
        *caches,
        *ids,
        case.layout.layout(device),
        group=case.group if len(case.layout.num_blocks) > 1 else None,
        scales=scales,
    )
    pages.assert_copied(caches, case)
    if scales is not None:
        scale_rows.assert_copied([scales.k_scale, scales.v_scale], case)


# --- oracle ------------------------------------------------------------------------------------


@BOTH
@given(case=copies())
def test_every_cache_byte_is_as_plain_loops_leave_it(device, ops, case):
    _check(case, device, ops)


@given(case=copies())
def test_several_programs(device, case):
    with pytest.MonkeyPatch.context() as patch:
        small = CopyPagesConfig(tile_rows=32, num_warps=1)
        patch.setattr(CopyPagesConfig, "default_for", lambda *_: small)
        _check(replace(case, pairs=case.pairs[:2]), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 96, 128, 256])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_sizes(device, head_dim, block_size, dtype):
    per_block = 4 if head_dim == 96 else None
    layout = LayoutCase.hnd(
        num_kv_heads=2, head_dim=head_dim, block_size=block_size, max_seq_len=block_size
    )
    case = Copies(layout=layout, group=0, pairs=[(3, 0), (3, 4)], dtype=dtype, per_block=per_block)
    _check(case, device)


def test_the_oracle_takes_float64(device):
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=16, max_seq_len=32)
    case = Copies(layout=layout, group=0, pairs=[(0, 1)], dtype=torch.float64)
    _check(case, device, reference)


# --- edges -------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("pairs", [[], [(-1, -1)], [(0, -1), (-1, 1)]], ids=str)
def test_skipped_pairs_copy_nothing(device, ops, pairs):
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=16, max_seq_len=32)
    _check(Copies(layout=layout, group=0, pairs=pairs), device, ops)


@BOTH
def test_block_ids_belong_to_one_group(device, ops):
    """Two groups in one buffer: block 1 of the other group keeps its bytes."""
    roles = (HeadRole(group=0), HeadRole(group=1, window=20, ring_blocks=3), HeadRole(group=0))
    layout = LayoutCase.head_groups(roles=roles, head_dim=16, max_seq_len=48)
    for group in (0, 1):
        _check(Copies(layout=layout, group=group, pairs=[(2, 1)]), device, ops)


@BOTH
@pytest.mark.parametrize("dtype", [FP8, torch.uint8], ids=str)
def test_block_scales_are_copied_and_head_scales_stay(device, ops, dtype):
    layout = KVLayout.hnd(2, 16, 16, device=device)
    for shape, build in (
        ((3, 2, 16), KVScales.per_token),
        ((3, 2, 4), KVScales.per_quarter),
        ((2,), KVScales.per_head),
    ):
        before = [normal(shape, torch.float32, device, seed=s) for s in (1, 2)]
        scales = build(*(scale.clone() for scale in before))
        cache = torch.zeros(3, 2, 16, 16, dtype=torch.uint8, device=device).view(dtype)
        src, dst = torch.tensor([[2], [0]], device=device)
        ops.copy_pages(cache, cache.clone(), src, dst, layout, scales=scales)
        for scale, old in zip((scales.k_scale, scales.v_scale), before, strict=True):
            want = torch.stack([old[2], old[1], old[2]]) if len(shape) == 3 else old
            assert torch.equal(scale, want)


@BOTH
def test_signaling_nans_keep_their_bits(device, ops):
    """Signaling NaNs would lose bits wherever the copy converted a float."""
    layout = KVLayout.hnd(1, 16, 16, device=device)
    for dtype, bits, nan in (
        (torch.float32, torch.int32, 0x7F800001),
        (torch.float16, torch.int16, 0x7C01),
        (torch.bfloat16, torch.int16, 0x7F81),
        (FP8, torch.uint8, 0xFF),
    ):
        pages = torch.zeros(512, dtype=bits, device=device)
        pages[256:] = nan
        src, dst = torch.tensor([[1], [0]], device=device)
        scales = KVScales.per_head(*torch.ones(2, 1, device=device)) if dtype == FP8 else None
        k, v = pages.view(dtype), pages.clone().view(dtype)
        ops.copy_pages(k, v, src, dst, layout, scales=scales)
        assert (pages == nan).all()


@BOTH
def test_pages_beyond_two_to_the_31_elements(device, ops):
    """Block 2 starts at element 2**31: the multiply by the stride must be 64 bits wide."""
    stride = 2**30
    cache = torch.empty(2 * stride + 256, dtype=torch.uint8, device=device)  # 2 GiB, lazy
    layout = KVLayout.build(
        block_size=16,
        head_dim=16,
        token_stride=16,
        head_base=[0],
        block_stride=[stride],
        roles=[HeadRole()],
        device=device,
    )
    page = torch.arange(256, device=device).to(torch.uint8)
    for src, dst in ((0, 2), (2, 0)):
        cache[src * stride :][:256] = page
        cache[dst * stride :][:256] = 0
        ids = torch.tensor([[src], [dst]], dtype=torch.int32, device=device)
        ops.copy_pages(cache, cache, *ids, layout)
        assert torch.equal(cache[dst * stride :][:256], page)


# --- properties --------------------------------------------------------------------------------


def test_attention_over_copied_blocks_is_unchanged(device):
    """Copy on write: a request whose table names the copies gets the same output, bit for bit."""
    roles = (HeadRole(group=0), HeadRole(group=1, window=20, sink=4, ring_blocks=3))
    layout = LayoutCase.head_groups(roles=roles, head_dim=16, max_seq_len=48, max_reqs=2)
    case = build_paged_cache(layout, RaggedBatch(query_lens=(1,), seq_lens=(40,))).to(device)
    q = make_queries(case, 2)
    want = run_decode(kernels, case, q)
    table = case.block_table.clone()
    starts = (0, 3, layout.row_width)  # the full group's three columns, then sink and ring
    for group in (0, 1):
        row = table[0, starts[group] : starts[group + 1]]
        held = [block for block in row.tolist() if block >= 0]
        free = [b for b in range(layout.num_blocks[group]) if b not in held][: len(held)]
        ids = torch.tensor([held, free], dtype=torch.int32, device=device)
        kernels.copy_pages(case.k_cache, case.v_cache, *ids, case.layout, group=group)
        row[row >= 0] = ids[1]
    assert not torch.equal(table, case.block_table)
    assert_equal(run_decode(kernels, case, q, block_table=table), want)


# --- errors ------------------------------------------------------------------------------------


TWO_GROUPS = [HeadRole(group=0), HeadRole(group=1)]
WRONG = [
    ("k_cache", lambda x: x.long(), TypeError, "k_cache: expected dtype"),
    ("k_cache", lambda x: x[::2], ValueError, "k_cache: expected a contiguous"),
    ("v_cache", lambda x: x.half(), TypeError, "v_cache: expected dtype torch.float32"),
    ("v_cache", lambda x: x[::2], ValueError, "v_cache: expected a contiguous"),
    ("v_cache", lambda x: x[1:], ValueError, "v_cache: expected 1024 elements like k_cache"),
    ("src_block_ids", lambda _: [0], TypeError, "src_block_ids: expected a torch.Tensor"),
    ("src_block_ids", lambda x: x.short(), TypeError, "src_block_ids: expected dtype torch.int32"),
    ("src_block_ids", lambda x: x[None], ValueError, r"src_block_ids: expected shape \[any\]"),
    ("src_block_ids", lambda x: x.to("meta"), ValueError, "src_block_ids: expected device"),
    ("dst_block_ids", lambda x: x.float(), TypeError, "dst_block_ids: expected dtype torch.int32"),
    ("dst_block_ids", lambda x: x[:1], ValueError, r"dst_block_ids: expected shape \[2\], got"),
    (
        "dst_block_ids",
        lambda x: x.repeat_interleave(2)[::2],
        ValueError,
        "dst_block_ids: expected a contiguous",
    ),
    ("k_cache", lambda x: x.to(FP8), TypeError, "scales: expected KVScales for a torch.float8_e4"),
    ("scales", lambda _: 1.0, TypeError, "scales: expected KVScales or None, got float"),
    (
        "scales",
        lambda _: KVScales.per_head(*torch.ones(2, 2)),
        TypeError,
        "k_cache: expected dtype torch.float8_e4m3fn or",
    ),
    ("layout", lambda _: KVLayout.hnd(2, 16, 16, device="meta"), ValueError, "layout: expected"),
    ("group", lambda _: 1, ValueError, "group: expected None or 0 to 0, got 1"),
    ("group", lambda _: -1, ValueError, "group: expected None or 0 to 0, got -1"),
    (
        "layout",
        lambda x: KVLayout.head_groups(TWO_GROUPS, [0, 512], 16, 16, device=x.head_base.device),
        ValueError,
        "group: expected one of 2 groups, got None",
    ),
]


@BOTH
@pytest.mark.parametrize(
    ("name", "change", "error", "message"), WRONG, ids=[f"{i}-{w[0]}" for i, w in enumerate(WRONG)]
)
def test_errors_name_the_argument_and_write_nothing(device, ops, name, change, error, message):
    before = torch.arange(1024, dtype=torch.float32, device=device)
    arguments = {
        "k_cache": before.clone(),
        "v_cache": before.clone(),
        "src_block_ids": torch.tensor([0, 0], device=device),
        "dst_block_ids": torch.tensor([1, -1], device=device),
        "layout": KVLayout.hnd(2, 16, 16, device=device),
        "group": None,
        "scales": None,
    }
    caches = arguments["k_cache"], arguments["v_cache"]
    arguments[name] = change(arguments[name])
    with pytest.raises(error, match=message):
        ops.copy_pages(**arguments)
    assert all(torch.equal(cache, before) for cache in caches)


def test_a_head_dim_without_a_kernel_is_refused(device):
    cache, ids = torch.zeros(384, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"layout\.head_dim: expected a multiple of 16 from 16"):
        kernels.copy_pages(cache, cache, ids, ids, KVLayout.hnd(1, 16, 24, device=device))
