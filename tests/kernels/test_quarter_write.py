"""KV cache writes with a scale per quarter of a block: sequences of launches, byte for byte."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from mrv1 import kernels
from mrv1.kernels import HeadRole, KVLayout, KVScales, reference
from mrv1.kernels._base.interpreter import number_formats as _number_formats
from mrv1.kernels.cache import quarter_write
from mrv1.kernels.cache.quarter_write import QuarterWriteConfig
from mrv1.testing.strategies import LayoutCase, kv_layouts

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

BOTH = pytest.mark.parametrize("ops", [kernels, reference], ids=["kernel", "oracle"])
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ODD = (np.nan, np.inf, -np.inf, 0.0, -0.0)


@dataclass(frozen=True, kw_only=True)
class Launch:
    slots: list[list[int]]
    """Per group; distinct or -1."""
    power: int
    """Vectors are multiplied by 2 ** power."""


@dataclass(frozen=True, kw_only=True)
class Sequence:
    layout: LayoutCase
    launches: list[Launch]
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def fused(self, index: int) -> torch.Tensor:
        """Return a launch's keys, then values, some of them ODD: a view of a fused projection."""
        launch, source = self.launches[index], np.random.default_rng((self.seed, index))
        num_tokens = len(launch.slots[0])
        shape = (num_tokens, 1 + 2 * self.layout.num_kv_heads, self.layout.head_dim)
        x = source.standard_normal(shape) * 2.0**launch.power
        x = np.where(source.random(shape) < 0.02, source.choice(ODD, shape), x)
        x[source.random(shape[:2]) < 0.1] = 0  # whole vectors
        return torch.from_numpy(x).to(self.dtype)[:, 1:]

    def before(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return random codes and scales; some scales are NaN or 0, as an empty page may have."""
        source = np.random.default_rng(self.seed)
        codes = source.integers(0, 256, (2, self.layout.num_elements), dtype=np.uint8)
        *_, count = self.layout.scale_addresses(4)
        scales = 2.0 ** source.uniform(-12, -4, (2, count))
        scales[source.random((2, count)) < 0.2] = np.nan
        scales[source.random((2, count)) < 0.1] = 0.0
        return list(codes), list(scales.astype(np.float32))


@st.composite
def sequences(draw: DrawFn, max_launches: int = 4) -> Sequence:
    """Draw launches of a few tokens into the quarters of two blocks of each group."""
    layout = draw(
        kv_layouts(head_dims=(16, 80), block_sizes=(16, 32), max_blocks=2, gap_elements=16)
    )
    # Near slots share quarters; far slots let one launch write several quarters.
    near, far = st.integers(0, 7), st.integers(0, 2 * layout.block_size - 1)
    launches = []
    for _ in range(draw(st.integers(1, max_launches))):
        num_tokens = draw(st.integers(0, 9))
        launches.append(
            Launch(
                slots=[
                    [
                        -1 if draw(st.integers(0, 9)) == 0 else slot
                        for slot in draw(
                            st.lists(
                                near | far, min_size=num_tokens, max_size=num_tokens, unique=True
                            )
                            if num_tokens <= 6
                            else st.permutations(range(num_tokens))
                        )
                    ]
                    for _ in layout.num_blocks
                ],
                power=draw(st.integers(-4, 4)),
            )
        )
    return Sequence(
        layout=layout,
        launches=launches,
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 2**31)),
    )


def _write_plainly(case: Sequence, index: int, codes: np.ndarray, scales: np.ndarray, x) -> None:
    """Write one launch's keys or values ``x`` [tokens, heads, dim], quarter by quarter."""
    layout, size = case.layout, case.layout.block_size // 4
    base, block_stride, _ = layout.scale_addresses(4)
    for head, role in enumerate(layout.roles):
        quarters: dict[tuple[int, int], dict[int, int]] = {}
        for token, slot in enumerate(case.launches[index].slots[role.group]):
            if slot >= 0:
                block, offset = divmod(slot, layout.block_size)
                quarters.setdefault((block, offset // size), {})[offset % size] = token
        for (block, quarter), new in quarters.items():
            place = base[head] + block * block_stride[head] + quarter
            old = scales[place] if scales[place] > 0 and 0 not in new else np.float32(0)
            sizes = np.abs(x[list(new.values()), head])
            largest = sizes[np.isfinite(sizes)].max(initial=np.float32(0))
            scale = max(old, largest / np.float32(448), np.float32(1e-12))
            for position in range(size):
                start = (
                    layout.head_base[head]
                    + block * layout.block_stride[head]
                    + (quarter * size + position) * layout.token_stride
                )
                vector = codes[start : start + layout.head_dim]
                if position in new:
                    vector[:] = _encode(x[new[position], head] / scale)
                elif scale > old > 0:
                    vector[:] = _encode(_number_formats.decode(vector, "fp8e4nv") * old / scale)
            scales[place] = scale


def _encode(x: np.ndarray) -> np.ndarray:
    return _number_formats.encode(x.astype(np.float32), "fp8e4nv")


def _check(case: Sequence, device, ops=kernels) -> None:
    """Compare every byte of both caches and their scales after every launch."""
    codes, scales = case.before()
    caches = [torch.from_numpy(c.copy()).to(device) for c in codes]
    base, block_stride, _ = case.layout.scale_addresses(4)
    kv_scales = KVScales.build(
        *(torch.from_numpy(s.copy()).to(device) for s in scales),
        granularity="quarter",
        base=base,
        block_stride=block_stride,
    )
    heads, layout = case.layout.num_kv_heads, case.layout.layout(device)
    for index, launch in enumerate(case.launches):
        fused = case.fused(index)
        for part, x in enumerate(
            fused.float().numpy().reshape(-1, 2, heads, fused.shape[2]).swapaxes(0, 1)
        ):
            _write_plainly(case, index, codes[part], scales[part], x)
        slots = torch.tensor(launch.slots, dtype=torch.int64, device=device)
        key, value = fused.to(device).split(heads, dim=1)
        ops.kv_cache_write(key, value, *caches, slots, layout, scales=kv_scales)
        for got, want in (
            *zip(caches, codes, strict=True),
            (kv_scales.k_scale, scales[0]),
            (kv_scales.v_scale, scales[1]),
        ):
            np.testing.assert_array_equal(
                got.cpu().numpy().view(np.uint8), want.view(np.uint8), f"after launch {index}"
            )


# --- oracle ------------------------------------------------------------------------------------


@BOTH
@given(case=sequences())
def test_every_byte_is_as_plain_loops_leave_it(device, ops, case):
    _check(case, device, ops)


@given(case=sequences(max_launches=2), compares=st.booleans())
def test_several_programs_and_tiles_of_slots(device, case, compares):
    """With both ways to find the new tokens of a quarter."""
    with pytest.MonkeyPatch.context() as patch:
        small = QuarterWriteConfig(
            compares=compares, tile_rows=8, tile_slots=4, num_warps=1, programs_per_sm=1
        )
        patch.setattr(QuarterWriteConfig, "default_for", lambda *_: small)
        _check(case, device)


@pytest.mark.parametrize(
    ("block_size", "head_dim", "compared"),
    [*itertools.product((16, 128), (64, 128, 256), (256,)), (16, 128, 0), (128, 64, 0)],
)
def test_sizes(device, block_size, head_dim, compared, monkeypatch):
    """The first launch has more tokens than a tile of slots; the second writes larger vectors."""
    monkeypatch.setattr(quarter_write, "COMPARED_TOKENS", compared)
    layout = LayoutCase.hnd(
        num_kv_heads=2, head_dim=head_dim, block_size=block_size, max_seq_len=320
    )
    slots = np.random.default_rng(0).permutation(300).tolist()
    launches = [
        Launch(slots=[slots[:150]], power=0),
        Launch(slots=[[*slots[150:], -1]], power=2),
    ]
    _check(Sequence(layout=layout, launches=launches, dtype=torch.bfloat16), device)


# --- edges -------------------------------------------------------------------------------------


@BOTH
def test_the_scale_of_a_quarter_grows_and_starts_anew(device, ops):
    """One head, quarters of four tokens: begun, joined, outgrown, unchanged, begun anew."""
    layout = KVLayout.hnd(1, 16, 16, device=device)
    caches = [torch.full((1, 1, 16, 16), 0x7F, dtype=torch.uint8, device=device) for _ in "kv"]
    nan = torch.full((1, 1, 4), torch.nan, device=device)
    scales = KVScales.per_quarter(nan.clone(), nan.clone())

    def write(slot: int, size: float) -> tuple[float, list[int]]:
        key = torch.full((1, 1, 16), size, device=device)
        slots = torch.tensor([[slot]], device=device)
        ops.kv_cache_write(key, -key, *caches, slots, layout, scales=scales)
        assert torch.equal(caches[1] | 0x80, caches[0] | 0x80)
        assert torch.equal(scales.v_scale.nan_to_num(-1), scales.k_scale.nan_to_num(-1))
        return scales.k_scale[0, 0, 1].item(), caches[0][0, 0, 4:8, 0].tolist()

    one, two, four = 0x38, 0x40, 0x48  # e4m3 codes
    empty, largest = 0x7F, 0x7E
    assert write(4, 448.0) == (1.0, [largest, empty, empty, empty])
    assert write(5, 2.0) == (1.0, [largest, two, empty, empty])
    assert write(6, 896.0) == (2.0, [0x76, one, largest, empty])  # 224, 1, 448: all halved
    assert write(7, 8.0) == (2.0, [0x76, one, largest, four])
    assert write(4, 4.0)[0] == np.float32(4.0) / np.float32(448)
    assert write(5, torch.inf)[1][:2] == [largest, largest]  # an infinity does not raise the scale
    assert scales.k_scale[0, 0, [0, 2, 3]].isnan().all()
    assert (caches[0][0, 0, :4] == empty).all()
    assert (caches[0][0, 0, 8:] == empty).all()


@BOTH
@pytest.mark.parametrize("slots", [[], [-1, -1]], ids=str)
def test_no_tokens_and_only_padding_write_nothing(device, ops, slots):
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=16, max_seq_len=16)
    _check(Sequence(layout=layout, launches=[Launch(slots=[slots], power=0)]), device, ops)


def test_pages_beyond_two_to_the_31_elements(device):
    """Block 2 starts at element 2**31: the multiply by the stride must be 64 bits wide."""
    stride = 2**30
    cache, other = (  # 2 GiB each, lazy
        torch.empty(2 * stride + 256, dtype=torch.uint8, device=device) for _ in "kv"
    )
    cache[2 * stride :] = 0x38
    layout = KVLayout.build(
        block_size=16,
        head_dim=16,
        token_stride=16,
        head_base=[0],
        block_stride=[stride],
        roles=[HeadRole()],
        device=device,
    )
    scales = KVScales.per_quarter(*(torch.ones(3, 1, 4, device=device) for _ in "kv"))
    key = torch.full((1, 1, 16), 896.0, device=device)
    slots = torch.full((1, 1), 2 * 16 + 15, device=device)
    kernels.kv_cache_write(key, key, cache, other, slots, layout, scales=scales)
    want = torch.full((16, 16), 0x38, dtype=torch.uint8, device=device)
    want[12:15], want[15] = 0x30, 0x7E  # halved next to the largest code
    assert torch.equal(cache[2 * stride :].view(16, 16), want)
    assert scales.k_scale.flatten().tolist() == [1.0] * 11 + [2.0]


# --- properties --------------------------------------------------------------------------------


@given(case=sequences(max_launches=1), compares=st.booleans(), data=st.data())
def test_the_order_of_tokens_in_a_launch_does_not_matter(device, case, compares, data):
    """The result does not show which token's program owned a quarter."""
    (launch,) = case.launches
    limit = quarter_write.COMPARED_TOKENS if compares else -1
    patched = mock.patch.object(quarter_write, "COMPARED_TOKENS", limit)
    order = data.draw(st.permutations(range(len(launch.slots[0]))))
    results = []
    for rows in (list(range(len(order))), order):
        slots = [[group[i] for i in rows] for group in launch.slots]
        moved = replace(case, launches=[replace(launch, slots=slots)])
        codes, scales = (list(map(torch.from_numpy, x)) for x in moved.before())
        codes, scales = [c.to(device) for c in codes], [s.to(device) for s in scales]
        base, block_stride, _ = case.layout.scale_addresses(4)
        held = KVScales.build(*scales, granularity="quarter", base=base, block_stride=block_stride)
        key, value = case.fused(0)[rows].to(device).split(case.layout.num_kv_heads, dim=1)
        slots = torch.tensor(slots, dtype=torch.int64, device=device)
        with patched:
            layout = case.layout.layout(device)
            kernels.kv_cache_write(key, value, *codes, slots, layout, scales=held)
        results.append([*codes, *(s.view(torch.int32) for s in scales)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
