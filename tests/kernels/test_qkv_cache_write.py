"""From a fused qkv to q and the cache in one launch: whole buffers, against the separate ops."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import kernels
from mrv1.kernels import KVLayout, KVScales, QKNorm, Rope, reference
from mrv1.kernels.cache.qkv_cache_write import QKVCacheWriteConfig
from mrv1.testing.strategies import (
    LayoutCase,
    PagedCase,
    RaggedBatch,
    build_paged_cache,
    kv_layouts,
    paged_caches,
)
from tests.kernels.elementwise import normal, tiles

pytestmark = [pytest.mark.interp, pytest.mark.gpu]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GRANULARITIES = (None, "token", "quarter", "head")
LAYOUTS = kv_layouts(head_dims=(16, 80, 96), max_query_len=40, gap_elements=16)
OPS = pytest.mark.parametrize("ops", [kernels, reference], ids=["kernel", "oracle"])
MAX_POSITIONS = 64
EPS = 1e-5


def _table(rotary_dim: int, device) -> torch.Tensor:
    frequency = 10_000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(MAX_POSITIONS, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float().to(device)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(_bytes(a), _bytes(b))


def _clone(scales: KVScales | None) -> KVScales | None:
    if scales is None:
        return None
    return replace(scales, k_scale=scales.k_scale.clone(), v_scale=scales.v_scale.clone())


@dataclass(frozen=True, kw_only=True)
class Options:
    """The features that a call uses."""

    group: int = 2
    """Query heads per KV head."""
    rotary_dim: int | None = None
    interleaved: bool = False
    mrope: bool = False
    mrope_interleaved: bool = False
    norm: bool = False
    wide_norm: bool = False
    """Whether the norms' weights are float32."""
    coarse: bool = False
    """Whether every sum of squares is exact in float32, in any order."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call's inputs and the buffers that it may write, all filled with sentinels."""

    case: PagedCase
    options: Options
    qkv: torch.Tensor
    keywords: dict[str, object]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    scales: KVScales | None
    k_out: torch.Tensor
    q_out: torch.Tensor | None = field(default=None)

    @classmethod
    def of(cls, case: PagedCase, options: Options) -> Call:
        heads, dim = case.layout_case.num_kv_heads, case.layout_case.head_dim
        num_tokens, dtype, device = case.key.shape[0], case.key.dtype, case.key.device
        num_q_heads = options.group * heads
        # Rows are wider than necessary: any row stride is allowed.
        row = torch.full((num_tokens, num_q_heads + 2 * heads + 1, dim), 7.0, dtype=dtype)
        qkv = row.to(device)[:, :-1]
        qkv[:, :num_q_heads] = normal((num_tokens, num_q_heads, dim), dtype, device, options.seed)
        qkv[:, num_q_heads:] = torch.cat([case.key, case.value], dim=1)
        if options.coarse:  # multiples of 1/4 up to 8: all squares and their sum have few bits
            qkv.copy_((qkv * 4).round().clamp(-32, 32) / 4)
        keywords: dict[str, object] = {"num_q_heads": num_q_heads}
        if options.norm:
            kind = torch.float32 if options.wide_norm else dtype
            weights = (normal((dim,), kind, device, options.seed + seed) for seed in (0, 1))
            keywords["norm"] = QKNorm(*weights, EPS)
        if options.rotary_dim is not None:
            shape = (3, num_tokens) if options.mrope else (num_tokens,)
            generator = torch.Generator().manual_seed(options.seed)
            positions = torch.randint(MAX_POSITIONS, shape, generator=generator)
            section = None
            if options.mrope:
                half, quarter = options.rotary_dim // 4, options.rotary_dim // 8
                section = (options.rotary_dim // 2 - half - quarter, half, quarter)
            table = _table(options.rotary_dim, device)
            keywords["rope"] = Rope(
                table,
                positions.to(device),
                options.interleaved,
                section,
                options.mrope and options.mrope_interleaved,
            )
        return cls(
            case=case,
            options=options,
            qkv=qkv,
            keywords=keywords,
            k_cache=case.k_cache_before.clone(),
            v_cache=case.v_cache_before.clone(),
            scales=_clone(case.scales_before),
            k_out=torch.full_like(case.key, torch.nan),
        )

    @property
    def parts(self) -> list[torch.Tensor]:
        """Views of q, k and v in ``qkv``."""
        heads = self.case.layout_case.num_kv_heads
        return list(self.qkv.split([self.options.group * heads, heads, heads], dim=1))

    def run(self, ops) -> torch.Tensor:
        return ops.qkv_cache_write(
            self.qkv,
            self.k_cache,
            self.v_cache,
            self.case.slot_mapping,
            self.case.layout,
            q_out=self.q_out,
            k_out=self.k_out,
            scales=self.scales,
            **self.keywords,
        )

    def plain_write(self, ops, key: torch.Tensor) -> Call:
        """Return fresh buffers as ``kv_cache_write`` fills them with ``key`` and this call's v."""
        fresh = Call.of(self.case, self.options)
        ops.kv_cache_write(
            key,
            self.parts[2],
            fresh.k_cache,
            fresh.v_cache,
            self.case.slot_mapping,
            self.case.layout,
            scales=fresh.scales,
        )
        return fresh

    def separate_ops(self, ops) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k as ``rms_norm`` and ``apply_rope`` leave them."""
        q, k, _ = (part.clone() for part in self.parts)
        if self.options.norm:
            ops.rms_norm(q, self.keywords["norm"].q_weight, EPS, out=q)
            ops.rms_norm(k, self.keywords["norm"].k_weight, EPS, out=k)
        if self.options.rotary_dim is not None:
            rope = self.keywords["rope"]
            ops.apply_rope(q, k, rope.cos_sin, rope.positions, interleaved=rope.interleaved)
        return q, k


def _assert_same_cache(a: Call, b: Call) -> None:
    assert _same(a.k_cache, b.k_cache)
    assert _same(a.v_cache, b.v_cache)
    if a.scales is not None and b.scales is not None:
        assert _same(a.scales.k_scale, b.scales.k_scale)
        assert _same(a.scales.v_scale, b.scales.v_scale)


def _pair_sizes(x: torch.Tensor, options: Options) -> torch.Tensor:
    """Return each element's size, or the length of the pair that it was rotated in."""
    size = x.abs()
    if options.rotary_dim is not None:
        half = options.rotary_dim // 2
        turned = x[..., : 2 * half]
        shape, axis = ((half, 2), -1) if options.interleaved else ((2, half), -2)
        pairs = turned.unflatten(-1, shape)
        lengths = pairs.square().sum(axis, keepdim=True).sqrt().expand_as(pairs)
        size[..., : 2 * half] = lengths.flatten(-2)
    return size


def _assert_close(got: torch.Tensor, want: torch.Tensor, options: Options) -> None:
    """Fail unless ``got`` is within two units in the last place of the result and of its pair."""
    step = torch.finfo(got.dtype).eps
    exact = want.double()
    size = exact.abs() + _pair_sizes(exact, options)
    assert bool(((got.double() - exact).abs() <= 2 * step * size).all())


@st.composite
def _calls(draw, **chosen) -> tuple[PagedCase, Options]:
    case = draw(paged_caches(layouts=LAYOUTS, dtypes=DTYPES, granularities=GRANULARITIES))
    dim = case.layout_case.head_dim
    drawn = {
        "group": draw(st.sampled_from([1, 4, 8])),
        "rotary_dim": draw(st.sampled_from([None, dim, dim // 2, 8])),
        "interleaved": draw(st.booleans()),
        "mrope": draw(st.booleans()),
        "mrope_interleaved": draw(st.booleans()),
        "norm": draw(st.booleans()),
        "wide_norm": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31 - 2)),
    }
    return case, Options(**(drawn | chosen))


def _example(
    device, *, granularity=None, dtype=torch.bfloat16, dim=32, heads=2, num_reqs=2, **chosen
) -> Call:
    layout = LayoutCase.hnd(num_kv_heads=heads, head_dim=dim, max_seq_len=40)
    batch = RaggedBatch(query_lens=(3, 20)[:num_reqs], seq_lens=(17, 40)[:num_reqs])
    case = build_paged_cache(layout, batch, dtype=dtype, granularity=granularity)
    return Call.of(case.to(device), Options(**({"rotary_dim": dim, "norm": True} | chosen)))


# --- oracle ------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_oracle_equals_the_formula(interleaved):
    """Heads of 8 elements, of which 4 rotate by two sections of M-RoPE, in float64."""
    layout = KVLayout.hnd(1, 16, 8)
    qkv = normal((2, 4, 8), torch.float64, "cpu")
    cos_sin, positions = _table(4, "cpu"), torch.tensor([[5, 9], [7, 8], [1, 2]])
    weights = [normal((8,), torch.float64, "cpu", seed) for seed in (1, 2)]
    caches = [torch.full((256,), torch.nan, dtype=torch.float64) for _ in range(2)]
    want = qkv[:, :3].clone()
    for token in range(2):
        for head in range(3):
            x = qkv[token, head]
            x = x / (x.square().mean() + EPS).sqrt() * weights[head == 2]
            want[token, head] = x
            for i in range(2):
                position = positions[(0, 2)[i], token]
                cos, sin = cos_sin[position, i].item(), cos_sin[position, 2 + i].item()
                a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 2)
                want[token, head, a] = x[a] * cos - x[b] * sin
                want[token, head, b] = x[b] * cos + x[a] * sin
    q = reference.qkv_cache_write(
        qkv.view(2, 32),
        *caches,
        torch.tensor([[3, -1]]),
        layout,
        num_q_heads=2,
        rope=Rope(cos_sin, positions, interleaved, (1, 0, 1)),
        norm=QKNorm(*weights, EPS),
    )
    torch.testing.assert_close(q, want[:, :2])
    for cache, row in ((caches[0], want[0, 2]), (caches[1], qkv[0, 3])):
        torch.testing.assert_close(cache[24:32], row)
        assert cache.isnan().sum() == 256 - 8


# --- properties --------------------------------------------------------------------------------


@given(drawn=_calls(), as_on_gpu=st.booleans())
def test_one_launch_equals_the_separate_ops(device, drawn, as_on_gpu):
    case, options = drawn
    call = Call.of(case.to(device), options)
    before = call.qkv.clone()
    with tiles("qkv_cache_write", as_on_gpu=as_on_gpu and call.qkv.shape[0] < 8):
        q = call.run(kernels)
    assert _same(call.qkv, before)
    _assert_same_cache(call, call.plain_write(kernels, call.k_out))
    oracle = Call.of(call.case, options)
    _assert_close(q, oracle.run(reference), options)
    _assert_close(call.k_out, oracle.k_out, options)
    if not options.norm and options.rotary_dim is None:
        assert _same(q, call.parts[0])
        assert _same(call.k_out, call.parts[1])


@given(drawn=_calls(coarse=True, mrope=False))
def test_one_launch_rounds_where_the_separate_ops_round(device, drawn):
    """Bit for bit where the norm's sum is exact. On a GPU fused multiply-adds may differ."""
    case, options = drawn
    call = Call.of(case.to(device), options)
    q = call.run(kernels)
    want = call.separate_ops(kernels)
    if device.type == "cuda":
        _assert_close(q, want[0], options)
        _assert_close(call.k_out, want[1], options)
    else:
        assert _same(q, want[0])
        assert _same(call.k_out, want[1])


@given(
    dim=st.sampled_from([32, 80, 128]), dtype=st.sampled_from(DTYPES), interleaved=st.booleans(),
    as_on_gpu=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_a_token_has_the_same_bits_alone_and_in_a_batch(
    device, dim, dtype, interleaved, as_on_gpu, seed
):
    """Alone, its row has another stride and another alignment."""
    options = {"dim": dim, "interleaved": interleaved, "seed": seed}
    call = _example(device, dtype=dtype, num_reqs=1, **options)
    rope = call.keywords["rope"]
    with tiles("qkv_cache_write", as_on_gpu=as_on_gpu):
        want = call.run(kernels)
        for token in (slice(0, 1), slice(2, 3)):
            row = call.qkv[token]
            alone = replace(
                call,
                case=replace(call.case, slot_mapping=call.case.slot_mapping[:, token]),
                qkv=row.new_empty(row.numel() + 1)[1:].view(row.shape).copy_(row),
                k_out=torch.empty_like(call.k_out[token]),
                keywords=call.keywords | {"rope": replace(rope, positions=rope.positions[token])},
            )
            assert _same(alone.run(kernels), want[token])
            assert _same(alone.k_out, call.k_out[token])


@given(seed=st.integers(0, 1000), interleaved=st.booleans())
def test_mrope_of_equal_positions_is_rope(device, seed, interleaved):
    calls = [
        _example(device, mrope=mrope, interleaved=interleaved, seed=seed)
        for mrope in (False, True)
    ]
    one, three = (call.keywords["rope"] for call in calls)
    calls[1].keywords["rope"] = replace(three, positions=one.positions.expand(3, -1))
    one, three = (call.run(kernels) for call in calls)
    assert _same(one, three)
    assert _same(calls[0].k_out, calls[1].k_out)


@given(drawn=_calls(mrope=False))
def test_rope_rows_per_token_equal_a_table_and_positions(device, drawn):
    """A row of cosines and sines for each token, in place of a table and positions."""
    case, options = drawn
    table, rows = (Call.of(case.to(device), options) for _ in range(2))
    if options.rotary_dim is not None:
        rope = rows.keywords["rope"]
        picked = rope.cos_sin[rope.positions].contiguous()
        rows.keywords["rope"] = replace(rope, cos_sin=picked, positions=None)
    assert _same(rows.run(kernels), table.run(kernels))
    _assert_same_cache(rows, table)


@given(drawn=_calls())
def test_in_place_changes_only_q(device, drawn):
    case, options = drawn
    apart, call = (Call.of(case.to(device), options) for _ in range(2))
    q = apart.run(kernels)
    in_place = replace(call, q_out=call.parts[0])
    assert in_place.run(kernels) is in_place.q_out
    assert _same(call.parts[0], q)
    assert _same(call.parts[1], apart.parts[1])
    assert _same(call.parts[2], apart.parts[2])
    assert _same(call.k_out, apart.k_out)
    _assert_same_cache(call, apart)


# --- edges -------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(
    ("dim", "heads", "group"), [(64, 1, 8), (80, 3, 4), (96, 2, 1), (128, 4, 4), (256, 2, 8)]
)
def test_sizes(device, dim, heads, group, granularity):
    call = _example(device, dim=dim, heads=heads, group=group, granularity=granularity)
    q = call.run(kernels)
    _assert_same_cache(call, call.plain_write(reference, call.k_out))
    oracle = _example(device, dim=dim, heads=heads, group=group, granularity=granularity)
    _assert_close(q, oracle.run(reference), oracle.options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile_tokens", [1, 4])
@pytest.mark.parametrize("tile_heads", [1, 4])
def test_several_programs(device, dtype, tile_tokens, tile_heads):
    call = _example(device, dtype=dtype, heads=3, group=2, num_reqs=1)
    config = QKVCacheWriteConfig(tile_tokens=tile_tokens, tile_heads=tile_heads, num_warps=1)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("default_for", "for_interpreter"):
            patch.setattr(QKVCacheWriteConfig, name, lambda *_: config)
        q = call.run(kernels)
    _assert_same_cache(call, call.plain_write(reference, call.k_out))
    oracle = _example(device, dtype=dtype, heads=3, num_reqs=1)
    _assert_close(q, oracle.run(reference), oracle.options)


@OPS
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_no_tokens(device, ops, granularity):
    call = _example(device, num_reqs=0, granularity=granularity)
    assert call.run(ops).shape == (0, 4, 32)
    _assert_same_cache(call, _example(device, num_reqs=0, granularity=granularity))


@OPS
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_only_padding_still_writes_q_and_k_out(device, ops, granularity):
    call = _example(device, granularity=granularity)
    untouched, whole = (_example(device, granularity=granularity) for _ in range(2))
    call.case.slot_mapping.fill_(-1)
    assert _same(call.run(ops), whole.run(ops))
    assert _same(call.k_out, whole.k_out)
    _assert_same_cache(call, untouched)


@OPS
def test_nan_and_infinity_in_v_are_copied_byte_for_byte(device, ops):
    call = _example(device)
    call.parts[2][:, :, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf], device=device)
    call.parts[2].view(torch.int16)[:, :, 3] = 0x7FA5  # NaN with a payload
    call.run(ops)
    _assert_same_cache(call, call.plain_write(reference, call.k_out))


@OPS
def test_a_nan_stays_in_its_head(device, ops):
    call, clean = _example(device), _example(device)
    call.parts[0][1, 2, 5] = torch.nan
    q, want = call.run(ops), clean.run(ops)
    assert q[1, 2].isnan().all()
    q[1, 2] = want[1, 2]
    assert _same(q, want)
    _assert_same_cache(call, clean)


@OPS
@pytest.mark.parametrize("flat", [False, True])
def test_qkv_may_be_flat(device, ops, flat):
    call = _example(device)
    whole = call.qkv.contiguous()
    given_qkv = replace(call, qkv=whole.flatten(1) if flat else whole)
    assert _same(given_qkv.run(ops), _example(device).run(ops))


def test_qkv_and_positions_beyond_two_to_the_31_elements(device):
    """Row 2 of qkv starts at element 2**31: the multiply by the stride must be 64 bits wide."""
    storage = torch.empty(2**31 + 64, dtype=torch.float16, device=device)  # 4 GiB, lazy
    qkv = storage.as_strided((3, 4, 16), (2**30, 16, 1))
    qkv.copy_(normal((3, 4, 16), torch.float16, device))
    caches = [torch.zeros(256, dtype=torch.float16, device=device) for _ in range(2)]
    slots = torch.tensor([[-1, -1, 4]], device=device)
    layout = KVLayout.hnd(1, 16, 16, device=device)
    q = kernels.qkv_cache_write(qkv, *caches, slots, layout, num_q_heads=2)
    assert _same(q, qkv[:, :2])
    assert _same(caches[0][64:80], qkv[2, 2])
    assert _same(caches[1][64:80], qkv[2, 3])


@pytest.mark.parametrize("dim", [16, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_configurations(dim, dtype):
    gpu = QKVCacheWriteConfig.default_for(dim, dtype)
    assert gpu.tile_heads * dim >= 32 * gpu.num_warps  # no element has two threads
    cpu = QKVCacheWriteConfig.for_interpreter(10_000, 12, dim)
    assert cpu.tile_heads >= 12
    assert cpu.tile_tokens * cpu.tile_heads * dim <= 2**18


# --- errors ------------------------------------------------------------------------------------


def _set(**values):
    """Set arguments, or fields of ``rope`` and ``norm``."""

    def changed(arguments):
        for name in ("rope", "norm"):
            own = {k: v for k, v in values.items() if k in arguments[name].__slots__}
            arguments = arguments | {name: replace(arguments[name], **own)}
        return arguments | {k: v for k, v in values.items() if k in arguments}

    return changed


def _change(name, change):
    def changed(arguments):
        bundles = (arguments["rope"], arguments["norm"])
        old = [getattr(bundle, name) for bundle in bundles if name in bundle.__slots__]
        return _set(**{name: change(*(old or [arguments[name]]))})(arguments)

    return changed


WRONG = [
    (_change("qkv", torch.Tensor.long), TypeError, "qkv: expected dtype"),
    (_change("qkv", lambda x: x[0]), ValueError, r"qkv: expected shape \[any, 128\] or \[any, 8"),
    (_change("qkv", lambda x: x[:, :7]), ValueError, r"qkv: .* \[any, 8, 16\], got \[5, 7, 16\]"),
    (_change("qkv", lambda x: x[..., :8]), ValueError, r"qkv: .* got \[5, 8, 8\]"),
    (_change("qkv", lambda x: x.flatten()), ValueError, r"qkv: .* got \[640\]"),
    (_change("qkv", lambda x: x.mT.contiguous().mT), ValueError, "qkv: expected unit last str"),
    (_change("qkv", lambda x: 1.0), TypeError, r"qkv: expected a torch\.Tensor, got float"),
    (_set(num_q_heads=0), ValueError, "num_q_heads: expected >= 1, got 0"),
    (_set(num_q_heads=3), ValueError, r"qkv: expected shape \[any, 112\] or \[any, 7, 16\], got"),
    (_change("k_cache", torch.Tensor.half), TypeError, "k_cache: expected dtype torch.float32"),
    (_change("k_cache", lambda x: x[::2]), ValueError, "k_cache: expected a contiguous tensor"),
    (_change("k_cache", lambda x: x.to("meta")), ValueError, "k_cache: expected device"),
    (_change("v_cache", torch.Tensor.half), TypeError, "v_cache: expected dtype torch.float32"),
    (_change("v_cache", lambda x: x[1:]), ValueError, "v_cache: expected 1024 elements like k_"),
    (_change("slot_mapping", torch.Tensor.int), TypeError, "slot_mapping: expected dtype"),
    (_change("slot_mapping", lambda x: x[:, 1:]), ValueError, r"slot_mapping: expected shape \["),
    (_change("slot_mapping", lambda x: x.to("meta")), ValueError, "slot_mapping: expected dev"),
    (_change("layout", lambda _: KVLayout.hnd(2, 16, 16, device="meta")), ValueError, "layout: "),
    (_change("cos_sin", torch.Tensor.half), TypeError, "cos_sin: expected dtype torch.float32"),
    (_change("cos_sin", lambda x: x[0]), ValueError, r"cos_sin: expected shape \[any, any\]"),
    (_change("cos_sin", lambda x: x.T.contiguous().T), ValueError, "cos_sin: expected a contig"),
    (_change("cos_sin", lambda x: x.to("meta")), ValueError, "cos_sin: expected device"),
    (_change("cos_sin", lambda x: x[:, :7].clone()), ValueError, "cos_sin: .* even .* got 7"),
    (_change("cos_sin", lambda x: x.repeat(1, 2)), ValueError, r"cos_sin: .* in \[2, 16\] .* 32"),
    (_set(cos_sin=None), TypeError, r"cos_sin: expected a torch\.Tensor, got NoneType"),
    (
        _set(positions=None, mrope_section=(8, 0, 0)),
        ValueError,
        r"rope\.cos_sin: expected shape \[5, any\], got",
    ),
    (
        lambda arguments: _set(
            cos_sin=arguments["rope"].cos_sin[:5], positions=None, mrope_section=(8, 0, 0)
        )(arguments),
        ValueError,
        r"rope\.mrope_section: expected None without positions, got \(8, 0, 0\)",
    ),
    (_set(positions=None), ValueError, r"cos_sin: expected shape \[5, any\], got"),
    (_set(positions=[0] * 5), TypeError, r"positions: expected a torch\.Tensor, got list"),
    (_change("positions", torch.Tensor.int), TypeError, "positions: expected dtype torch.int64"),
    (_change("positions", lambda x: x[1:]), ValueError, r"positions: expected shape \[5\], got"),
    (_change("positions", lambda x: x.to("meta")), ValueError, "positions: expected device"),
    (
        _change("positions", lambda x: x.repeat_interleave(2)[::2]),
        ValueError,
        "positions: expected unit last stride",
    ),
    (_set(mrope_section=(4, 2, 2)), ValueError, r"positions: expected shape \[3, 5\], got \[5\]"),
    (_set(mrope_section=(4, 4)), ValueError, r"mrope_section: .* >= 0 with sum 8, got \(4, 4\)"),
    (
        _set(mrope_section=(4, 2, 1)),
        ValueError,
        "mrope_section: expected three sizes >= 0 with sum 8",
    ),
    (_set(mrope_section=(9, -1, 0)), ValueError, "mrope_section: expected three sizes >= 0"),
    (
        _change("q_weight", torch.Tensor.half),
        TypeError,
        r"norm\.q_weight: expected dtype torch\.float32",
    ),
    (
        _change("q_weight", lambda x: x[1:]),
        ValueError,
        r"norm\.q_weight: expected shape \[16\], got \[15\]",
    ),
    (_change("k_weight", lambda x: x.to("meta")), ValueError, "norm.k_weight: expected device"),
    (
        _change("k_weight", lambda x: x.repeat(2)[::2]),
        ValueError,
        r"norm\.k_weight: expected a contiguous",
    ),
    (_set(k_weight=None), TypeError, r"norm\.k_weight: expected a torch\.Tensor, got NoneType"),
    (_set(q_weight=None), TypeError, r"norm\.q_weight: expected a torch\.Tensor, got NoneType"),
    (_change("q_out", torch.Tensor.half), TypeError, "q_out: expected dtype torch.float32"),
    (_change("q_out", lambda x: x[:, 1:]), ValueError, r"q_out: expected shape \[5, 4, 16\]"),
    (_change("q_out", lambda x: x.mT.contiguous().mT), ValueError, "q_out: expected unit last"),
    (_change("q_out", lambda x: x.to("meta")), ValueError, "q_out: expected device"),
    (_change("k_out", torch.Tensor.half), TypeError, "k_out: expected dtype torch.float32"),
    (_change("k_out", lambda x: x[1:]), ValueError, r"k_out: expected shape \[5, 2, 16\], got"),
    (_change("k_out", lambda x: x.mT.contiguous().mT), ValueError, "k_out: expected unit last"),
    (_set(scales=1.0), TypeError, "scales: expected KVScales or None, got float"),
    (
        _set(scales=KVScales.per_head(*torch.ones(2, 2))),
        TypeError,
        "k_cache: expected dtype torch.float8_e4m3fn or torch.uint8",
    ),
]


@OPS
@pytest.mark.parametrize(("change", "error", "message"), WRONG, ids=range(len(WRONG)))
def test_errors_name_the_argument_and_write_nothing(device, ops, change, error, message):
    caches = [torch.full((1024,), torch.nan, device=device) for _ in range(2)]
    outs = [torch.full((5, heads, 16), torch.nan, device=device) for heads in (4, 2)]
    arguments = {
        "qkv": torch.ones(5, 8, 16, device=device),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "slot_mapping": torch.arange(5, device=device)[None],
        "layout": KVLayout.hnd(2, 16, 16, device=device),
        "num_q_heads": 4,
        "rope": Rope(torch.ones(9, 16, device=device), torch.arange(5, device=device)),
        "norm": QKNorm(*torch.ones(2, 16, device=device)),
        "q_out": outs[0],
        "k_out": outs[1],
        "scales": None,
    }
    with pytest.raises(error, match=message):
        ops.qkv_cache_write(**change(arguments))
    assert all(x.isnan().all() for x in (*caches, *outs))


def test_a_head_dim_without_a_kernel_is_refused(device):
    cache, slots = torch.zeros(384, device=device), torch.zeros(1, 1, device=device).long()
    layout = KVLayout.hnd(1, 16, 24, device=device)
    with pytest.raises(ValueError, match=r"layout\.head_dim: expected a multiple of 16 from 16"):
        kernels.qkv_cache_write(
            torch.zeros(1, 72, device=device), cache, cache, slots, layout, num_q_heads=1
        )
