"""fp8 KV caches: codes and scales byte for byte, attention within budget of dense float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.device import fp8_path
from mrv1.kernels import HeadRole, KVLayout, KVScales, reference
from mrv1.kernels._base.interpreter import number_formats as _number_formats
from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.cache.codes import quantize, to_codes, to_values
from mrv1.kernels.cache.formats import FP8, PageFormat
from mrv1.testing.strategies import (
    LayoutCase,
    RaggedBatch,
    build_paged_cache,
    kv_layouts,
    paged_caches,
)
from tests.kernels.paged_attention import (
    assert_equal,
    assert_in_budget,
    bytes_of,
    clone_of,
    exact,
    make_queries,
    run_decode,
    run_prefill,
    small_tiles,
)

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GRANULARITIES = ("token", "quarter", "head")
LAYOUTS = kv_layouts(head_dims=(16, 80), max_blocks=3, max_query_len=40, gap_elements=16)
DECODE_LAYOUTS = kv_layouts(head_dims=(16, 80), max_blocks=3, gap_elements=16)
OPS = pytest.mark.parametrize("ops", [kernels, reference], ids=["kernel", "oracle"])


@pytest.fixture(autouse=True, scope="module")
def _tiles():
    """Use tiles so small that a test's short contexts fill several of them."""
    with small_tiles(32, tile_rows=32):
        yield


@pytest.fixture(scope="module", params=["hardware", "integer"])
def path(request, device):
    """Return the conversion path, hardware or integer arithmetic; launchers choose it too."""
    path = request.param
    if path == "hardware" and device.type == "cuda":
        path = fp8_path(device).path
        if path != "hardware":
            pytest.skip("this GPU converts in integer arithmetic")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageFormat, "codec", lambda self, _: self.tag(path))
        yield FP8.tag(path)


# --- conversion --------------------------------------------------------------------------------


@triton.jit
def _encode_kernel(x_ptr, out_ptr, count, TILE: tl.constexpr, PATH: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0)
    tl.store(out_ptr + at, to_codes(x, PATH), mask=at < count)


@triton.jit
def _decode_kernel(code_ptr, out_ptr, TILE: tl.constexpr, PATH: tl.constexpr):
    at = tl.arange(0, TILE)
    tl.store(out_ptr + at, to_values(tl.load(code_ptr + at), PATH))


def _edges() -> np.ndarray:
    """Return e4m3 values, midpoints, neighbours of both, values out of range and random bits."""
    values = np.sort(_number_formats.decode(np.arange(127, dtype=np.uint8), "fp8e4nv"))
    ties = (values[1:] + values[:-1]) / np.float32(2)
    past = np.array([449, 464, 465, 480, 1e4, 3e38, np.inf, np.nan, 1e-45, 1e-12], np.float32)
    some = np.concatenate([values, ties, past])
    near = [some, np.nextafter(some, np.float32(0)), np.nextafter(some, np.float32(np.inf))]
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    return np.concatenate([*near, *(-x for x in near), bits.view(np.float32)])


def test_encode_is_exact(device, path):
    x = _edges()
    codes = torch.empty(len(x), dtype=torch.uint8, device=device)
    grid = (triton.cdiv(len(x), 1024),)
    _encode_kernel[grid](torch.from_numpy(x).to(device), codes, len(x), TILE=1024, PATH=path)
    np.testing.assert_array_equal(codes.cpu().numpy(), _number_formats.encode(x, "fp8e4nv"))


def test_encode_equals_the_cast_of_torch(device, path):
    """For every float32 on a GPU, and for some with all exponents in the interpreter."""
    on_gpu = device.type == "cuda"
    step, size, tile = (1, 2**28, 1024) if on_gpu else (65_537, 2**16, 2**16)
    for first in range(0, 2**32, step * size):
        bits = torch.arange(first, min(first + step * size, 2**32), step, device=device)
        x = bits.to(torch.int32).view(torch.float32)
        codes = torch.empty(len(x), dtype=torch.uint8, device=device)
        _encode_kernel[(triton.cdiv(len(x), tile),)](x, codes, len(x), TILE=tile, PATH=path)
        want = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(codes, torch.where(x.isnan(), 0x7F, want))


@triton.jit
def _quantize_kernel(x_ptr, scale_ptr, out_ptr, TILE: tl.constexpr, PATH: tl.constexpr):
    row = tl.program_id(0) + tl.arange(0, 1)[:, None]
    at = tl.arange(0, TILE)[None, :]
    codes = quantize(tl.load(x_ptr + at), tl.load(scale_ptr + row), True, PATH)
    tl.store(out_ptr + row * TILE + at, codes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_quantize_is_exact_for_every_significand_and_scale(device, path, dtype):
    """One correction of the quotient is enough for 16-bit inputs: all ratios are tried.

    A quotient's rounding depends on the two significands alone; its code depends also on the
    distance of the exponents.
    """
    count = 128 if dtype == torch.bfloat16 else 1024
    significands = 1 + torch.arange(count, dtype=torch.float64) / count
    apart = torch.arange(19 if dtype == torch.bfloat16 else 13, dtype=torch.float64)
    x = (significands[None, :] * 2.0 ** -apart[:, None]).flatten().to(dtype)
    x = torch.cat([x, x.new_zeros(triton.next_power_of_2(len(x)) - len(x))])
    assert torch.equal(x[:count].double(), significands)
    absmax = significands[:: 1 if device.type == "cuda" else count // 128]  # all on a GPU
    scale = FP8.scale(absmax.to(dtype)[:, None])
    codes = torch.empty(len(scale), len(x), dtype=torch.uint8, device=device)
    _quantize_kernel[(len(scale),)](
        x.to(device), scale.to(device), codes, TILE=len(x), PATH=path, num_warps=8
    )
    assert torch.equal(codes.cpu(), FP8.encode(x.expand(len(scale), -1), scale))


def test_decode_is_exact(device, path):
    codes = torch.arange(256, dtype=torch.uint8)
    out = torch.empty(256, dtype=torch.float16, device=device)
    _decode_kernel[(1,)](codes.to(device), out, TILE=256, PATH=path)
    want = _number_formats.decode(codes.numpy(), "fp8e4nv")
    np.testing.assert_array_equal(out.cpu().float().numpy(), want)
    zeros = out[[0, 128]].cpu().view(torch.int16).tolist()
    assert zeros == [0, -(2**15)]  # the sign of zero too


# --- write: tier A -----------------------------------------------------------------------------


def _check_write(ops, case):
    case_layout = case.layout
    k_cache, v_cache = case.k_cache_before.clone(), case.v_cache_before.clone()
    scales = clone_of(case.scales_before)
    ops.kv_cache_write(
        case.key, case.value, k_cache, v_cache, case.slot_mapping, case_layout, scales=scales
    )
    for got, want in (
        (k_cache, case.k_cache),
        (v_cache, case.v_cache),
        (scales.k_scale, case.scales.k_scale),
        (scales.v_scale, case.scales.v_scale),
    ):
        assert torch.equal(bytes_of(got), bytes_of(want))


@given(case=paged_caches(layouts=LAYOUTS, dtypes=DTYPES, granularities=GRANULARITIES))
def test_the_kernel_writes_every_byte_of_cache_and_scales(device, path, case):
    _check_write(kernels, case.to(device))


@given(case=paged_caches(layouts=LAYOUTS, dtypes=DTYPES, granularities=GRANULARITIES))
def test_the_oracle_writes_every_byte_of_cache_and_scales(device, case):
    _check_write(reference, case.to(device))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block_size", [16, 128])
def test_write_sizes(device, head_dim, block_size, granularity):
    layout = LayoutCase.hnd(
        num_kv_heads=2, head_dim=head_dim, block_size=block_size, max_seq_len=2 * block_size
    )
    batch = RaggedBatch(query_lens=(3, 1), seq_lens=(block_size + 1, 2 * block_size))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16, granularity=granularity)
    _check_write(kernels, case.to(device))


def _write_vectors(ops, device, vectors: torch.Tensor, scales=None, as_bytes=False):
    """Write ``vectors`` [tokens, 16] to one head and return (codes, scales) of K and of V."""
    count = len(vectors)
    layout = KVLayout.hnd(1, 16, 16, device=device)
    blocks = -(-count // 16)
    caches = [torch.zeros(blocks, 1, 16, 16, dtype=torch.uint8, device=device) for _ in range(2)]
    if scales is None:
        scales = KVScales.per_token(*(torch.zeros(blocks, 1, 16, device=device) for _ in range(2)))
    slots = torch.arange(count, device=device)[None]
    key = vectors.to(device)[:, None]
    given_caches = caches if as_bytes else [c.view(torch.float8_e4m3fn) for c in caches]
    ops.kv_cache_write(key, -key, *given_caches, slots, layout, scales=scales)
    codes = [c.view(-1, 16)[:count].cpu() for c in caches]
    return codes, [s.flatten()[:count].cpu() for s in (scales.k_scale, scales.v_scale)]


@OPS
@pytest.mark.parametrize("as_bytes", [False, True])
def test_zeros_infinities_and_nan_get_their_codes_and_scales(device, path, ops, as_bytes):
    inf, nan = torch.inf, torch.nan
    vectors = torch.zeros(6, 16)
    vectors[1, :4] = torch.tensor([7.0, inf, -inf, nan])  # 7 / 448 = 2^-6, exact
    vectors[2, :3] = torch.tensor([inf, nan, -inf])
    vectors[3, 0] = 1e-40
    vectors[4, :2] = torch.tensor([448e-12, 1e-12])
    vectors[5] = torch.tensor([inf, nan, -inf, -nan] * 4)
    (k, v), (k_scale, v_scale) = _write_vectors(ops, device, vectors, as_bytes=as_bytes)
    floor = torch.tensor(1e-12)
    assert k_scale.tolist() == [floor, 2**-6, floor, floor, k_scale[4], floor]
    assert k_scale[4].item() == pytest.approx(1e-12, rel=1e-6)
    assert torch.equal(v_scale, k_scale)
    assert k[0].tolist() == [0] * 16
    assert k[1].tolist() == [0x7E, 0x7E, 0xFE, 0x7F] + [0] * 12
    assert v[1].tolist() == [0xFE, 0xFE, 0x7E, 0x7F] + [0x80] * 12  # -0.0 stays
    assert k[2].tolist() == [0x7E, 0x7F, 0xFE] + [0] * 13
    assert k[3].tolist() == [0] * 16
    assert k[4, :2].tolist() == [0x7E, 0x38]
    assert k[5].tolist() == [0x7E, 0x7F, 0xFE, 0x7F] * 4


@OPS
def test_static_scales_saturate_and_are_only_read(device, path, ops):
    vectors = torch.linspace(-10, 10, 160).view(10, 16)
    scales = KVScales.per_head(*(torch.tensor([s], device=device) for s in (2.0**-6, 2.0**-7)))
    (k, v), (k_scale, v_scale) = _write_vectors(ops, device, vectors, scales)
    for codes, scale, x in ((k, 2.0**-6, vectors), (v, 2.0**-7, -vectors)):
        want = _number_formats.encode((x / scale).numpy(), "fp8e4nv")
        np.testing.assert_array_equal(codes.numpy(), want)
    assert (k_scale.item(), v_scale.item()) == (2.0**-6, 2.0**-7)
    assert {0x7E, 0xFE} <= set(k.flatten().tolist())


@given(seed=st.integers(0, 2**31), power=st.integers(-20, 20))
def test_a_power_of_two_changes_the_scale_only(device, seed, power):
    x = torch.randn(20, 16, generator=torch.Generator().manual_seed(seed))
    codes, scales = _write_vectors(kernels, device, x)
    moved_codes, moved_scales = _write_vectors(kernels, device, x * 2.0**power)
    for a, b in zip(codes, moved_codes, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(scales, moved_scales, strict=True):
        assert torch.equal(a * 2.0**power, b)


# --- attention: tier B -------------------------------------------------------------------------


@given(
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    group=st.sampled_from([1, 3]),
    splits=st.sampled_from([1, 3]),
)
def test_decode_agrees_with_the_oracle(device, path, data, dtype, group, splits):
    case = data.draw(
        paged_caches(
            layouts=DECODE_LAYOUTS,
            dtypes=[dtype],
            uniform_query_len=data.draw(st.sampled_from([1, 4])),
            granularities=GRANULARITIES,
        )
    ).to(device)
    q = make_queries(case, group)
    got = run_decode(kernels, case, q, num_kv_splits=splits)
    assert_in_budget(got, run_decode(reference, case, q), exact(case, q), case)


@given(
    case=paged_caches(layouts=LAYOUTS, dtypes=DTYPES, granularities=GRANULARITIES),
    group=st.sampled_from([1, 3]),
)
def test_prefill_agrees_with_the_oracle(device, path, case, group):
    case = case.to(device)
    q = make_queries(case, group)
    got = run_prefill(kernels, case, q)
    assert_in_budget(got, run_prefill(reference, case, q), exact(case, q), case)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("run", [run_decode, run_prefill])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention_sizes(device, head_dim, run, granularity):
    layout = LayoutCase.head_groups(
        roles=[HeadRole(), HeadRole(window=40, sink=4, ring_blocks=3, group=1)],
        head_dim=head_dim,
        block_size=32,
        max_seq_len=200,
    )
    batch = RaggedBatch(query_lens=(2, 2), seq_lens=(33, 200))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16, granularity=granularity)
    case = case.to(device)
    q = make_queries(case, 4)
    assert_in_budget(run(kernels, case, q), run(reference, case, q), exact(case, q), case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_queries_and_uneven_scales_keep_their_precision(device, path, dtype):
    """bf16 queries beyond fp16's range with K scales as much smaller; V scales 2^12 apart."""
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=64)
    batch = RaggedBatch(query_lens=(1,), seq_lens=(64,))
    case = build_paged_cache(layout, batch, dtype=dtype, granularity="token")
    huge = 1.0 if dtype == torch.float16 else 2.0**20
    small = torch.where(torch.arange(64) % 2 == 0, 2.0**-12, 1.0)
    flat = case.block_table[0, :4].long()
    v_scale = case.scales.v_scale.view(-1, 16).clone()
    v_scale[flat] *= small.view(4, 16)
    case = replace(
        case,
        scales=replace(case.scales, k_scale=case.scales.k_scale / huge, v_scale=v_scale.view(-1)),
        keys=tuple(k / huge for k in case.keys),
        values=tuple(v * small[:, None, None] for v in case.values),
    ).to(device)
    q = make_queries(case, 2) * huge
    got = run_decode(kernels, case, q)
    assert_in_budget(got, run_decode(reference, case, q), exact(case, q), case)


def test_both_conversions_give_the_same_attention(device):
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=80, max_seq_len=100)
    batch = RaggedBatch(query_lens=(2, 2), seq_lens=(100, 17))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16, granularity="token").to(device)
    q = make_queries(case, 2)
    results = []
    for path in ("hardware", "integer"):
        if device.type == "cuda" and fp8_path(device).path != "hardware":
            pytest.skip("this GPU has one conversion")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PageFormat, "codec", lambda self, _, path=path: self.tag(path))
            results.append(run_decode(kernels, case, q))
    assert_equal(*results)


def test_a_uint8_cache_equals_a_float8_cache(device):
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=16, max_seq_len=40)
    batch = RaggedBatch(query_lens=(1,), seq_lens=(40,))
    case = build_paged_cache(layout, batch, granularity="head").to(device)
    as_bytes = replace(case, k_cache=bytes_of(case.k_cache), v_cache=bytes_of(case.v_cache))
    q = make_queries(case, 1)
    for ops in (kernels, reference):
        assert_equal(run_decode(ops, as_bytes, q), run_decode(ops, case, q))


# --- errors ------------------------------------------------------------------------------------


def _token_scales(device):
    return KVScales.per_token(*(torch.ones(2, 2, 16, device=device) for _ in range(2)))


def _with(**changes):
    return lambda arguments: (
        arguments
        | {
            "scales": replace(
                arguments["scales"],
                **{
                    name: change(getattr(arguments["scales"], name))
                    for name, change in changes.items()
                },
            )
        }
    )


def _per_head_of_three(arguments):
    ones = torch.ones(3, device=arguments["k_cache"].device)
    return arguments | {"scales": KVScales.per_head(ones, ones)}


def _unaligned(arguments):
    layout = KVLayout.build(
        block_size=16,
        head_dim=16,
        token_stride=24,
        head_base=[0, 512],
        block_stride=[512, 512],
        roles=[HeadRole()] * 2,
        device=arguments["k_cache"].device,
    )
    return arguments | {"layout": layout}


WRONG = [
    (lambda a: a | {"scales": 1.0}, TypeError, "scales: expected KVScales or None, got float"),
    (lambda a: a | {"scales": None}, TypeError, "scales: expected KVScales for a .*float8.*None"),
    (
        lambda a: a | {"k_cache": a["k_cache"].float()},
        TypeError,
        "k_cache: expected dtype torch.float8_e4m3fn or torch.uint8, got torch.float32",
    ),
    (
        lambda a: a | {"v_cache": a["v_cache"].half()},
        TypeError,
        "v_cache: expected dtype torch.float8_e4m3fn or torch.uint8, got torch.float16",
    ),
    (
        _unaligned,
        ValueError,
        "layout: expected .* multiples of 16 elements .* got a multiple of 8",
    ),
    (_with(k_scale=lambda x: x.half()), TypeError, r"scales\.k_scale: expected dtype .*float32"),
    (_with(k_scale=lambda x: x.to("meta")), ValueError, r"scales\.k_scale: expected device"),
    (_with(k_scale=lambda x: x.mT), ValueError, r"scales\.k_scale: expected shape \[any, 2, 16\]"),
    (_with(k_scale=lambda x: x[:, :1]), ValueError, r"scales\.k_scale: expected shape \[any, 2"),
    (
        _with(k_scale=lambda x: x.mT.contiguous().mT),
        ValueError,
        r"scales\.k_scale: expected a contiguous tensor",
    ),
    (_with(v_scale=lambda x: x.half()), TypeError, r"scales\.v_scale: expected dtype .*float32"),
    (_with(v_scale=lambda x: x[:1]), ValueError, r"scales\.v_scale: expected shape \[2, 2, 16\]"),
    (_with(v_scale=lambda x: x.to("meta")), ValueError, r"scales\.v_scale: expected device"),
    (_with(base=lambda x: x[:1]), ValueError, r"scales\.base: expected shape \[2\], got \[1\]"),
    (_with(base=lambda x: x.int()), TypeError, r"scales\.base: expected dtype torch.int64"),
    (
        _with(block_stride=lambda x: x.to("meta")),
        ValueError,
        r"scales\.block_stride: expected dev",
    ),
    (_per_head_of_three, ValueError, r"scales\.k_scale: expected shape \[2\], got \[3\]"),
]


@OPS
@pytest.mark.parametrize("op", ["write", "decode", "prefill"])
@pytest.mark.parametrize(("change", "error", "message"), WRONG, ids=range(len(WRONG)))
def test_errors_name_the_argument_and_write_nothing(device, ops, op, change, error, message):
    caches = [torch.full((2048,), 3, dtype=torch.uint8, device=device) for _ in range(2)]
    k_cache, v_cache = (cache.view(torch.float8_e4m3fn) for cache in caches)
    scales = _token_scales(device)
    x = torch.ones(1, 2, 16, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    arguments = change(
        {
            "k_cache": k_cache,
            "v_cache": v_cache,
            "layout": KVLayout.hnd(2, 16, 16, device=device),
            "scales": scales,
        }
    )
    table = {"block_table": zero[None], "seq_lens": zero + 1, "softmax_scale": 1.0}
    run = {
        "write": lambda: ops.kv_cache_write(
            key=x, value=x, slot_mapping=zero[None].long(), **arguments
        ),
        "decode": lambda: ops.paged_decode_attention(q=x, **table, **arguments),
        "prefill": lambda: ops.paged_prefill_attention(
            q=x,
            query_start_loc=torch.arange(2, dtype=torch.int32, device=device),
            max_query_len=1,
            **table,
            **arguments,
        ),
    }
    with pytest.raises(error, match=message):
        run[op]()
    assert all((cache == 3).all() for cache in caches)
    assert (scales.k_scale == 1).all()
