"""4-bit KV caches: codes and scales byte for byte, attention within budget of dense float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.device import nibble_path
from mrv1.kernels import HeadRole, KVLayout, KVScales, QKNorm, Rope, reference
from mrv1.kernels._base.triton import tl, triton
from mrv1.kernels.cache.codes import (
    _quantize_nibbles,
    decode_parts,
    nibble_rows,
    part_factor,
    scale_of_parts,
)
from mrv1.kernels.cache.contracts import hadamard_block
from mrv1.kernels.cache.formats import INT4, PageFormat
from mrv1.kernels.cache.reference import mix_channels
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
    permuted,
    run_decode,
    run_prefill,
    small_tiles,
)

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = kv_layouts(head_dims=(32, 96), max_blocks=3, max_query_len=40, gap_elements=32)
DECODE_LAYOUTS = kv_layouts(head_dims=(32, 96), max_blocks=3, gap_elements=32)
OPS = pytest.mark.parametrize("ops", [kernels, reference], ids=["kernel", "oracle"])


@pytest.fixture(autouse=True, scope="module")
def _tiles():
    """Use tiles so small that a test's short contexts fill several of them."""
    with small_tiles(32, tile_rows=32):
        yield


@pytest.fixture(scope="module", params=["hardware", "integer"])
def path(request, device):
    """Return the conversion path, subnormal or normal fp16; launchers choose it too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageFormat, "codec", lambda self, _: self.tag(request.param))
        yield INT4.tag(request.param)


# --- codes -------------------------------------------------------------------------------------


@triton.jit
def _decode_kernel(word_ptr, out_ptr, PATH: tl.constexpr):
    row = tl.arange(0, 256)[:, None]
    at = row * 256 + tl.arange(0, 256)[None, :]
    parts = decode_parts(tl.load(word_ptr + at), PATH)
    for part in tl.static_range(4):
        value = parts[part].to(tl.float32) * part_factor(part, PATH)
        tl.store(out_ptr + part * 65536 + at, value)


def test_every_word_is_decoded_exactly(device, path):
    words = torch.arange(-(2**15), 2**15, device=device).to(torch.int16)
    out = torch.empty(4, 2**16, device=device)
    _decode_kernel[(1,)](words, out, PATH=path)
    bits = words.int() & 0xFFFF
    for part in range(4):
        assert torch.equal(out[part], (bits >> 4 * part & 15).float())


@triton.jit
def _rows_kernel(byte_ptr, scale_ptr, out_ptr, TOKENS: tl.constexpr, HALF: tl.constexpr):
    token = tl.arange(0, TOKENS)
    at = token[:, None] * HALF + tl.arange(0, HALF)[None, :]
    rows = nibble_rows(tl.load(byte_ptr + at), tl.load(scale_ptr + token))
    target = token[:, None] * (2 * HALF) + tl.arange(0, 2 * HALF)[None, :]
    tl.store(out_ptr + target, rows)


def test_rows_of_every_code_and_zero_are_exact(device):
    bits = torch.tensor(0x3F800000, dtype=torch.int32) | torch.arange(256, dtype=torch.int32)
    scale = bits.view(torch.float32).to(device)
    codes = torch.arange(256, dtype=torch.uint8, device=device).expand(256, -1).contiguous()
    out = torch.empty(256, 512, dtype=torch.float16, device=device)
    _rows_kernel[(1,)](codes, scale, out, TOKENS=256, HALF=256)
    code = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
    assert torch.equal(out.float(), code.float() - torch.arange(256, device=device)[:, None] / 16)


@triton.jit
def _quantize_kernel(x_ptr, scale_ptr, code_ptr, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.arange(0, COUNT)[:, None]
    at = row * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(x_ptr + at)
    scale = scale_of_parts((x,), "int4 hardware")
    tl.store(scale_ptr + row, scale)
    tl.store(code_ptr + at, _quantize_nibbles(x.to(tl.float32), scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(seed=st.integers(0, 2**31), power=st.integers(-60, 60), offset=st.floats(-8, 8))
def test_codes_and_scales_equal_the_oracles(device, dtype, seed, power, offset):
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed)) + offset
    x = (x * 2.0 ** (min(power, 10) if dtype == torch.float16 else power)).to(dtype)
    scale = torch.empty(64, device=device)
    codes = torch.empty(64, 32, dtype=torch.uint8, device=device)
    _quantize_kernel[(1,)](x.to(device), scale, codes, COUNT=64, WIDTH=32)
    want = INT4.scale(x)
    assert torch.equal(bytes_of(scale.cpu()), bytes_of(want))
    assert torch.equal(codes.cpu()[:, ::2] | codes.cpu()[:, 1::2] << 4, INT4.encode(x, want))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_within_half_a_step(dtype):
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    x += torch.linspace(-3, 3, 200, dtype=dtype)[:, None]
    scale = INT4.scale(x)
    values = INT4.decode(INT4.encode(x, scale), scale, torch.float64)
    # An end of the range may be off by half of a zero's step too.
    assert ((values - x).abs() <= scale[:, None] * (0.5 + 1 / 32 + 1e-3)).all()
    assert torch.equal(INT4.decode(INT4.encode(0 * x, scale), scale, torch.float64).abs().amax(-1)
                       <= scale / 2, torch.ones(200, dtype=torch.bool))  # fmt: skip


# --- write: tier A -----------------------------------------------------------------------------


def _check_write(ops, case):
    k_cache, v_cache = case.k_cache_before.clone(), case.v_cache_before.clone()
    scales = clone_of(case.scales_before)
    ops.kv_cache_write(
        case.key, case.value, k_cache, v_cache, case.slot_mapping, case.layout, scales=scales
    )
    for got, want in (
        (k_cache, case.k_cache),
        (v_cache, case.v_cache),
        (scales.k_scale, case.scales.k_scale),
        (scales.v_scale, case.scales.v_scale),
    ):
        assert torch.equal(bytes_of(got), bytes_of(want))


CASES = {"dtypes": DTYPES, "granularities": ["nibbles"]}


@given(case=paged_caches(layouts=LAYOUTS, **CASES))
def test_the_kernel_writes_every_byte_of_cache_and_scales(device, case):
    _check_write(kernels, case.to(device))


@given(case=paged_caches(layouts=LAYOUTS, **CASES))
def test_the_oracle_writes_every_byte_of_cache_and_scales(device, case):
    _check_write(reference, case.to(device))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block_size", [16, 128])
def test_write_sizes(device, head_dim, block_size):
    layout = LayoutCase.hnd(
        num_kv_heads=2, head_dim=head_dim, block_size=block_size, max_seq_len=2 * block_size
    )
    batch = RaggedBatch(query_lens=(3, 1), seq_lens=(block_size + 1, 2 * block_size))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16, granularity="nibbles")
    _check_write(kernels, case.to(device))


@OPS
def test_a_vector_with_an_element_that_is_not_finite_is_nan(device, ops):
    vectors = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).to(device)
    for row, value in ((1, torch.nan), (2, torch.inf), (3, -torch.inf)):
        vectors[row, 5] = value
    vectors[4] = 0.0
    layout = KVLayout.hnd(1, 16, 32, device=device)
    caches = torch.zeros(2, 1, 1, 16, 16, dtype=torch.uint8, device=device)
    scales = KVScales.per_token(*torch.zeros(2, 1, 1, 16, device=device), INT4)
    slots = torch.arange(5, device=device)[None]
    ops.kv_cache_write(vectors[:, None], -vectors[:, None], *caches, slots, layout, scales=scales)
    bits = scales.k_scale.view(torch.int32).flatten()[1:4].tolist()
    assert bits == [0x7FC00000] * 3
    values = INT4.decode(caches[0, 0, 0], scales.k_scale[0, 0], torch.float32)
    assert values[1:4].isnan().all()
    assert values[0].isfinite().all()
    assert (values[4] == 0).all()
    assert scales.k_scale[0, 0, 4].item() == pytest.approx(1e-12, rel=1e-4)


# --- the fused write ---------------------------------------------------------------------------


@given(data=st.data(), dtype=st.sampled_from(DTYPES), interleaved=st.booleans())
def test_the_fused_write_stores_what_the_write_stores_of_its_keys(
    device, data, dtype, interleaved
):
    """And its queries and keys are the oracle's, mixed by the Hadamard matrix or not."""
    num_tokens, q_heads, kv_heads, block_size = data.draw(st.integers(1, 20)), 3, 2, 16
    head_dim = data.draw(st.sampled_from([32, 96, 128]))
    rotary_dim = data.draw(st.sampled_from([None, head_dim, 16]))
    largest = hadamard_block(head_dim, rotary_dim)
    hadamard = data.draw(st.sampled_from([0, 2, largest]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    qkv = torch.randn(num_tokens, (q_heads + 2 * kv_heads) * head_dim, generator=generator)
    qkv = qkv.to(dtype).to(device)
    rope = norm = None
    if rotary_dim is not None:
        angle = torch.rand(num_tokens, rotary_dim // 2, generator=generator) * 6
        cos_sin = torch.cat([angle.cos(), angle.sin()], dim=1).to(device)
        rope = Rope(cos_sin, interleaved=interleaved)
    if data.draw(st.booleans()):
        weight = torch.rand(head_dim, generator=generator).to(dtype).to(device)
        norm = QKNorm(weight, weight)
    layout = KVLayout.hnd(kv_heads, block_size, head_dim, device=device)
    slots = torch.randperm(32, generator=generator)[:num_tokens][None].to(device)
    results = []
    for ops in (kernels, reference):
        caches = torch.zeros(2, 2, kv_heads, block_size, head_dim // 2, dtype=torch.uint8)
        caches = caches.to(device)
        scales = KVScales.per_token(*torch.zeros(2, 2, kv_heads, 16, device=device), INT4)
        k_out = torch.empty(num_tokens, kv_heads, head_dim, dtype=dtype, device=device)
        q = ops.qkv_cache_write(
            qkv, *caches, slots, layout, num_q_heads=q_heads, rope=rope, norm=norm,
            hadamard=hadamard, k_out=k_out, scales=scales,
        )  # fmt: skip
        results.append((q, k_out))
        want, want_scales = torch.zeros_like(caches), clone_of(scales)
        value = qkv.unflatten(1, (-1, head_dim))[:, q_heads + kv_heads :]
        reference.kv_cache_write(k_out, value, *want, slots, layout, scales=want_scales)
        assert torch.equal(caches, want)
        assert torch.equal(bytes_of(scales.k_scale), bytes_of(want_scales.k_scale))
        assert torch.equal(bytes_of(scales.v_scale), bytes_of(want_scales.v_scale))
    for got, want in zip(*results, strict=True):
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(got, want, rtol=4 * eps, atol=8 * eps)


@pytest.mark.parametrize("block", [1, 2, 32])
def test_channels_are_mixed_by_an_orthogonal_matrix_of_signs(block):
    matrix = mix_channels(torch.eye(64, dtype=torch.float64), block)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(64, dtype=torch.float64))
    row, column = torch.arange(64)[:, None], torch.arange(64)[None, :]
    shared = row & column & block - 1
    parity = sum(shared >> bit & 1 for bit in range(6)) % 2
    sign = torch.where(row // block == column // block, 1.0 - 2.0 * parity, 0.0)
    torch.testing.assert_close(matrix, sign.double() * block**-0.5)


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
            granularities=["nibbles"],
        )
    ).to(device)
    q = make_queries(case, group)
    got = run_decode(kernels, case, q, num_kv_splits=splits)
    assert_in_budget(got, run_decode(reference, case, q), exact(case, q), case)


@given(case=paged_caches(layouts=LAYOUTS, **CASES), group=st.sampled_from([1, 3]))
def test_prefill_agrees_with_the_oracle(device, case, group):
    case = case.to(device)
    q = make_queries(case, group)
    got = run_prefill(kernels, case, q)
    assert_in_budget(got, run_prefill(reference, case, q), exact(case, q), case)


@pytest.mark.parametrize("run", [run_decode, run_prefill])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention_sizes(device, head_dim, run):
    layout = LayoutCase.head_groups(
        roles=[HeadRole(), HeadRole(window=40, sink=4, ring_blocks=3, group=1)],
        head_dim=head_dim,
        block_size=32,
        max_seq_len=200,
    )
    batch = RaggedBatch(query_lens=(2, 2), seq_lens=(33, 200))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16, granularity="nibbles")
    case = case.to(device)
    q = make_queries(case, 4)
    assert_in_budget(run(kernels, case, q), run(reference, case, q), exact(case, q), case)


@pytest.mark.parametrize("run", [run_decode, run_prefill])
def test_a_soft_cap_and_logit_sinks(device, run):
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=64, max_seq_len=100)
    batch = RaggedBatch(query_lens=(2, 2), seq_lens=(100, 17))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16, granularity="nibbles").to(device)
    q, sinks = make_queries(case, 2), torch.tensor([0.5, -torch.inf, 2.0, -1.0], device=device)
    options = {"logits_soft_cap": 5.0, "sinks": sinks}
    got, oracle = (run(ops, case, q, **options) for ops in (kernels, reference))
    assert_in_budget(got, oracle, exact(case, q, **options), case, logits_soft_cap=5.0)


@pytest.mark.parametrize("run", [run_decode, run_prefill])
def test_a_deterministic_row_has_the_same_bits_alone(device, run):
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=64, max_seq_len=400)
    batch = RaggedBatch(query_lens=(1, 1, 1), seq_lens=(400, 33, 150))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16, granularity="nibbles").to(device)
    q = make_queries(case, 2)
    whole = run(kernels, case, q, deterministic=True)
    for row in range(3):
        alone = run(kernels, permuted(case, [row]), q[row : row + 1], deterministic=True)
        assert_equal(alone, whole.rows(slice(row, row + 1)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_and_small_queries_keep_their_precision(device, path, dtype):
    """Queries beyond fp16's range, or near its end; V scales 2^12 apart."""
    layout = LayoutCase.hnd(num_kv_heads=1, head_dim=32, max_seq_len=64)
    batch = RaggedBatch(query_lens=(1,), seq_lens=(64,))
    case = build_paged_cache(layout, batch, dtype=dtype, granularity="nibbles").to(device)
    for power in (-12, 12) if dtype == torch.float16 else (-40, 40):
        q = make_queries(case, 2) * 2.0**power
        options = {"softmax_scale": 32**-0.5 * 2.0**-power}
        got, oracle = (run_decode(ops, case, q, **options) for ops in (kernels, reference))
        want = exact(case, q * 2.0**-power)
        assert_in_budget(got, oracle, want, case)


def test_both_conversions_give_the_same_attention(device):
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=96, max_seq_len=100)
    batch = RaggedBatch(query_lens=(2, 2), seq_lens=(100, 17))
    case = build_paged_cache(layout, batch, dtype=torch.bfloat16, granularity="nibbles").to(device)
    q = make_queries(case, 2)
    results = []
    for path in ("hardware", "integer"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PageFormat, "codec", lambda self, _, path=path: self.tag(path))
            results.append(run_decode(kernels, case, q))
    if device.type == "cpu":
        assert_equal(*results)
    else:  # tensor cores align products by their exponents, which subnormal numbers do not have
        for name in ("out", "lse"):
            got, want = (getattr(each, name) for each in results)
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)


def test_mixed_queries_and_keys_give_the_scores_of_those_that_were_not(device):
    """What models do before a 4-bit cache changes no score but by rounding."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 7, 64, generator=generator, dtype=torch.float64)
    for block in (2, 32):
        mixed = mix_channels(q, block) @ mix_channels(k, block).T
        torch.testing.assert_close(mixed, q @ k.T)


# --- copies and errors -------------------------------------------------------------------------


@OPS
def test_pages_and_scales_are_copied(device, ops):
    layout = LayoutCase.hnd(num_kv_heads=2, head_dim=32, max_seq_len=32)
    batch = RaggedBatch(query_lens=(1,), seq_lens=(32,))
    case = build_paged_cache(layout, batch, granularity="nibbles").to(device)
    source = case.block_table[0, :1]
    free = set(range(case.k_cache.numel() // 512)) - set(case.block_table[0].tolist())
    target = torch.tensor([min(free)], dtype=torch.int32, device=device)
    want = run_decode(kernels, case, make_queries(case, 1))
    ops.copy_pages(case.k_cache, case.v_cache, source, target, case.layout, scales=case.scales)
    table = case.block_table.clone()
    table[0, 0] = target[0]
    got = run_decode(kernels, case, make_queries(case, 1), block_table=table)
    assert_equal(got, want)


@OPS
def test_arguments_that_do_not_fit_are_refused(device, ops):
    scales = KVScales.per_token(*torch.ones(2, 2, 2, 16, device=device), INT4)
    caches = torch.zeros(2, 2, 2, 16, 16, dtype=torch.uint8, device=device)
    layout = KVLayout.hnd(2, 16, 32, device=device)
    qkv = torch.zeros(1, 6 * 32, device=device)
    slots = torch.zeros(1, 1, dtype=torch.int64, device=device)

    def write(changed_layout=layout, changed_caches=caches, **options):
        ops.qkv_cache_write(
            qkv, *changed_caches, slots, changed_layout, num_q_heads=2, scales=scales, **options
        )

    write()
    with pytest.raises(ValueError, match=r"expected shape .*blocks, 2, 16, 16"):
        write(changed_caches=torch.zeros(2, 2, 2, 16, 32, dtype=torch.uint8, device=device))
    with pytest.raises(TypeError, match=r"k_cache: expected dtype torch.uint8"):
        write(changed_caches=caches.view(torch.float8_e4m3fn))
    for block in (3, 32, -2):
        with pytest.raises(ValueError, match=f"hadamard: .* power of two to 16, got {block}"):
            write(hadamard=block)
    odd = Rope(torch.zeros(1, 6, device=device))
    with pytest.raises(ValueError, match=r"hadamard: expected 0 with these channels, got 2"):
        write(rope=odd, hadamard=2)
    with pytest.raises(ValueError, match=r"multiple of 4 .* for packed codes, got 6"):
        write(rope=odd)
    key = torch.zeros(1, 2, 48, device=device)
    narrow = torch.zeros(2, 2, 2, 16, 24, dtype=torch.uint8, device=device)
    other = KVLayout.hnd(2, 16, 48, device=device)
    with pytest.raises(ValueError, match=r"multiples of 32 .* int4, got .* 48"):
        ops.kv_cache_write(key, key, *narrow, slots, other, scales=scales)


@pytest.mark.parametrize("granularity", ["quarter", "head"])
def test_only_scales_per_token_exist(granularity):
    with pytest.raises(ValueError, match=r"expected one of \('token',\) for int4, got"):
        INT4.per(granularity)


def test_the_cpu_converts_as_gpus_do():
    assert nibble_path(torch.device("cpu")).path == "hardware"
