"""The KV cache: its bytes against closed forms, its scales, and the runner's report of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mrv1 import CapacityError, ConfigError, EngineConfig, ModelRunner, UnsupportedDeviceError
from mrv1.config import KVScaleName
from mrv1.device import Conversion
from mrv1.headwise import FULL, HeadGroups, HeadPolicy, Visible
from mrv1.kernels.cache.formats import PageFormat, ScaleGranularity
from mrv1.runner.kv_cache import CacheSpec, KVCache, StreamingDemand
from tests.models.families import tiny_checkpoint
from tests.models.test_fp8_cache import HEAD_SCALES, add_tensors, scale_tensors

CPU = torch.device("cpu")
REPO = Path(__file__).resolve().parents[2]
LAYERS, HEADS, BLOCK_SIZE, DIM = 3, 4, 32, 64
VECTORS = LAYERS * 2 * HEADS  # per token, K and V
FP8 = {"kv_cache_dtype": "fp8_e4m3"}


def make_spec(dtype: torch.dtype, granularity: ScaleGranularity | None = None) -> CacheSpec:
    return CacheSpec(
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        block_size=BLOCK_SIZE,
        head_dim=DIM,
        page_format=PageFormat(name="", dtype=dtype, granularity=granularity),
    )


WINDOWED = HeadPolicy.of_layer_windows([-1, 10, -1], HEADS)
SHARED = HeadGroups.shared(WINDOWED, block_size=BLOCK_SIZE, max_model_len=999)


def make_cache(spec: CacheSpec, num_blocks: int) -> KVCache:
    scales = torch.rand(LAYERS, 2, HEADS) if spec.page_format.granularity == "head" else None
    return KVCache(spec, SHARED, [num_blocks], CPU, scales)


# --- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "token_bytes", "scale_bytes_of_5_blocks"),
    [
        (make_spec(torch.bfloat16), VECTORS * DIM * 2, 0),
        (make_spec(torch.float32), VECTORS * DIM * 4, 0),
        (
            make_spec(torch.float8_e4m3fn, "token"),
            VECTORS * (DIM + 4),
            5 * BLOCK_SIZE * VECTORS * 4,
        ),
        (
            make_spec(torch.float8_e4m3fn, "quarter"),
            VECTORS * DIM + VECTORS * 4 * 4 // BLOCK_SIZE,
            5 * 4 * VECTORS * 4,
        ),
        (make_spec(torch.float8_e4m3fn, "head"), VECTORS * DIM, VECTORS * 4),
    ],
)
def test_bytes_equal_the_closed_forms(
    spec: CacheSpec, token_bytes: int, scale_bytes_of_5_blocks: int
):
    assert spec.token_bytes == token_bytes
    assert spec.block_bytes == BLOCK_SIZE * token_bytes
    assert spec.scale_bytes(SHARED, [5]) == scale_bytes_of_5_blocks
    fixed = VECTORS * 4 if spec.page_format.granularity == "head" else 0
    assert spec.nbytes(SHARED, [5]) == 5 * BLOCK_SIZE * token_bytes + fixed

    cache = make_cache(spec, 5)
    held = {
        tensor.data_ptr(): tensor.nbytes
        for layer in cache.layers
        for tensor in (
            layer.k,
            layer.v,
            *((layer.scales.k_scale, layer.scales.v_scale) if layer.scales else ()),
        )
    }
    assert sum(held.values()) == cache.nbytes == cache.allocated_bytes == spec.nbytes(SHARED, [5])


def demand(max_model_len: int = 99 * BLOCK_SIZE, **options: object) -> StreamingDemand:
    settings = {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 100,
        "block_size": BLOCK_SIZE,
        "enable_prefix_caching": False,
    } | options
    config = EngineConfig(model="none", **settings)
    assert config.steps_in_flight == 2
    return StreamingDemand(config, max_model_len)


@pytest.mark.parametrize("granularity", [None, "token", "quarter", "head"])
def test_divide_bytes_gives_every_block_that_fits(granularity: ScaleGranularity | None):
    spec = make_spec(torch.float8_e4m3fn, granularity)
    for num_blocks in (0, 1, 7):
        for spare in (0, spec.block_bytes - 1):
            num_bytes = spec.nbytes(SHARED, [num_blocks]) + spare
            assert demand().divide_bytes(spec, SHARED, num_bytes, 99) == (num_blocks,)
    assert demand().divide_bytes(spec, SHARED, -1, 99) == (0,)
    assert demand().divide_bytes(spec, SHARED, 1 << 40, 99) == (99,), "no more than can be used"


@pytest.mark.parametrize(
    ("kv_cache_dtype", "least"), [("auto", 3.9), ("fp8_e4m3", 7.6), ("int4", 14.0)]
)
def test_a_policy_divides_the_bytes_of_a_request_of_128k(kv_cache_dtype, least):
    """llama3-8b in bfloat16 over a policy with a quarter of the heads full, as the engine counts.

    Also in closed form, and as an H100 measured where it did.
    """
    context, layers, heads, dim, block_size, window, sink = 131_072, 32, 8, 128, 16, 256, 64

    def request_bytes(name: str, policy: HeadPolicy) -> list[int]:
        spec = CacheSpec(
            num_layers=layers,
            num_kv_heads=heads,
            block_size=block_size,
            head_dim=dim,
            page_format=PageFormat.named(name, "token", torch.bfloat16),
        )
        config = EngineConfig(model="tiny", block_size=block_size)
        demand = StreamingDemand(config, context)
        groups = HeadGroups.of_roles(
            policy, block_size=block_size, max_model_len=context, max_query_len=8192
        )
        whole = spec.blocks_for(context)
        return [
            (whole if group.keeps.is_full else demand.request_blocks(group))
            * spec.group_bytes(group.num_heads)
            for group in groups.groups
        ]

    quarter = HeadPolicy.of_ratio(layers, heads, 0.75, window=window, sink=sink)
    uniform = request_bytes("auto", HeadPolicy.full(layers, heads))
    held = request_bytes(kv_cache_dtype, quarter)
    assert sum(uniform) / sum(held) >= least
    # A code and its scale, in whole blocks; a window that begins within a block touches one more.
    vector = {"auto": 2 * dim, "fp8_e4m3": dim + 4, "int4": dim // 2 + 4}[kv_cache_dtype]
    kept = sink + window + block_size
    assert held == [2 * layers * 2 * vector * context, 2 * layers * 6 * vector * kept]
    results = json.loads((REPO / "benchmarks/results/capacity-h100.json").read_text("utf-8"))
    measured = {
        (entry["variant"], entry["kv_cache"]["dtype"]): entry["request_bytes"]
        for entry in results["results"]
    }
    assert uniform == measured["uniform", "bfloat16"]
    names = {"auto": ("recycled", "bfloat16"), "fp8_e4m3": ("recycled-fp8", "float8_e4m3fn")}
    if kv_cache_dtype in names:
        assert held == measured[names[kv_cache_dtype]]


# --- head groups ---------------------------------------------------------------------------------

MIXED = HeadPolicy(
    (
        (FULL, Visible(40, 5), Visible(40, 5), FULL),
        (Visible(40, 5),) * 4,
        (Visible(9), FULL, FULL, FULL),
    )
)
GROUPS = HeadGroups.of_roles(
    MIXED, block_size=BLOCK_SIZE, max_model_len=99 * BLOCK_SIZE, max_query_len=100
)


def test_each_role_is_a_group_with_columns_for_a_chunk():
    """A chunk of 100 with a window of 40 sees 139 tokens, at most 6 blocks of 32, and the sink."""
    full, wide, narrow = GROUPS.groups
    assert [g.keeps for g in GROUPS.groups] == [FULL, Visible(40, 5), Visible(9)]
    assert (full.offset, full.width, full.ring_blocks) == (0, 99, 0)
    assert (wide.offset, wide.width, wide.sink_blocks, wide.ring_blocks) == (99, 1 + 6, 1, 6)
    assert (narrow.offset, narrow.width, narrow.ring_blocks) == (106, 5, 5)
    assert [g.num_heads for g in GROUPS.groups] == [(2, 0, 3), (2, 4, 0), (0, 0, 1)]
    assert GROUPS.group_of_head == ((0, 1, 1, 0), (1, 1, 1, 1), (2, 0, 0, 0))
    short = HeadGroups.of_roles(
        MIXED, block_size=BLOCK_SIZE, max_model_len=7 * BLOCK_SIZE, max_query_len=100
    )
    assert [g.width for g in short.groups] == [7, 7, 5], "a ring is not wider than max_model_len"
    assert [g.ring_blocks for g in short.groups] == [0, 0, 5]
    own = HeadGroups.of_heads(MIXED, block_size=BLOCK_SIZE, max_model_len=99)
    assert [g.offset for g in own.groups] == [0, 4, 8, 12]
    assert {g.num_heads for g in own.groups} == {(1, 1, 1)}
    assert [role.group for role in own.roles(1)] == [0, 1, 2, 3]


@pytest.mark.parametrize("granularity", [None, "token", "quarter", "head"])
def test_every_page_of_every_group_has_its_own_bytes(granularity: ScaleGranularity | None):
    """The layout's addresses of all pages cover every byte once: no overlap, no gap."""
    spec = make_spec(torch.uint8 if granularity else torch.float32, granularity)
    num_blocks = [3, 2, 4]
    scales = torch.rand(LAYERS, 2, HEADS) if granularity == "head" else None
    cache = KVCache(spec, GROUPS, num_blocks, CPU, scales)
    pages = sum(n * sum(g.num_heads) for n, g in zip(num_blocks, GROUPS.groups, strict=True))
    per_page = BLOCK_SIZE * DIM * spec.page_format.dtype.itemsize
    per_page += {"token": BLOCK_SIZE * 4, "quarter": 16}.get(granularity, 0)
    static = VECTORS * 4 if granularity == "head" else 0
    assert cache.allocated_bytes == cache.nbytes == 2 * pages * per_page + static
    for index, layer in enumerate(cache.layers):
        layout, seen = layer.layout, []
        for head in range(HEADS):
            group = GROUPS.group_of_head[index][head]
            for block in range(num_blocks[group]):
                start = int(layout.head_base[head] + block * layout.block_stride[head])
                seen += range(start, start + BLOCK_SIZE * DIM)
        assert sorted(seen) == list(range(layer.k.numel())) == list(range(layer.v.numel()))
        if granularity in ("token", "quarter"):
            per_block = {"token": BLOCK_SIZE, "quarter": 4}[granularity]
            seen = []
            for head in range(HEADS):
                group = GROUPS.group_of_head[index][head]
                for block in range(num_blocks[group]):
                    address = layer.scales.base[head] + block * layer.scales.block_stride[head]
                    seen += range(int(address), int(address) + per_block)
            assert sorted(seen) == list(range(layer.scales.k_scale.numel()))


def test_streaming_groups_get_the_blocks_they_can_use_and_full_groups_the_rest():
    """Per request 1 sink block, 3 for a window of 40 in 2 steps, 1 more; for 3 requests.

    Prompts: 2 steps of 100 tokens take 4 blocks each.
    """
    assert demand().divide(GROUPS, 99) == (99, 3 * (1 + 3 + 1) + 8, 3 * (2 + 1) + 8)
    assert demand().divide(GROUPS, 10) == (10, 10, 10)
    cached = demand(enable_prefix_caching=True, streaming_cache_blocks=7).divide(GROUPS, 99)
    assert cached == (99, 23 + 7, 17 + 7)
    assert demand(enable_prefix_caching=True).divide(GROUPS, 999)[1] == 23 + 64 * 4
    spec = make_spec(torch.float32)
    for num_bytes in (0, 10**6, 10**7, 10**8):
        counts = demand().divide_bytes(spec, GROUPS, num_bytes, 9999)
        assert spec.nbytes(GROUPS, counts) <= num_bytes
        assert spec.nbytes(GROUPS, [count + 1 for count in counts]) > num_bytes


@pytest.mark.parametrize("num_full", [1, 2, 7])
def test_short_memory_is_divided_fairly_between_short_and_long_requests(num_full: int):
    """Relative to the best division for its length, no length gets less than the two extremes."""
    num_heads, window, context, block_size = 8, 40 * 16, 400, 16
    policy = HeadPolicy(((FULL,) * num_full + (Visible(window),) * (num_heads - num_full),))
    sizes = {"max_model_len": context * block_size, "max_query_len": 64}
    groups = HeadGroups.of_roles(policy, block_size=block_size, **sizes)
    asked = demand(sizes["max_model_len"], max_num_seqs=1000, block_size=block_size)
    spec = CacheSpec(
        num_layers=1, num_kv_heads=num_heads, block_size=block_size, head_dim=16,
        page_format=PageFormat.plain(torch.float32),
    )  # fmt: skip
    full, streaming = asked.divide_bytes(spec, groups, 80_000 * 2 * spec.page_bytes, 99_999)
    total = num_full * full + (num_heads - num_full) * streaming
    assert 80_000 - num_heads < total <= 80_000
    window_blocks = asked.request_blocks(groups.groups[1])

    def share_of_best(length: int) -> float:
        held = min(length, window_blocks)
        best = total / (num_full * length + (num_heads - num_full) * held)
        return min(full / length, streaming / held) / best

    extremes = share_of_best(window_blocks), share_of_best(context)
    assert extremes[0] == pytest.approx(extremes[1], rel=1e-3)
    assert min(map(share_of_best, range(1, context + 1))) >= min(extremes) * (1 - 1e-9)


def test_memory_that_full_heads_cannot_use_goes_to_streaming_heads():
    """5, 6 and 1 heads in all layers; the wide group could use 23 blocks, the narrow group 17."""
    spec = make_spec(torch.float32)
    assert demand().divide_bytes(spec, GROUPS, spec.nbytes(GROUPS, [20, 20, 17]), 20) == (
        20,
        20,
        17,
    )
    # A fair division gives 20, 10 and 17 blocks and leaves 28 of 205 pages. A block of the wide
    # group takes 6 pages: the group gets 4 blocks more.
    scarce = spec.nbytes(GROUPS, [20, 15, 15])
    assert demand().divide_bytes(spec, GROUPS, scarce, 20) == (20, 14, 17)
    keeping = demand(enable_prefix_caching=True, streaming_cache_blocks=4)
    short = spec.nbytes(GROUPS, [20, 10, 10])
    without = demand().divide_bytes(spec, GROUPS, short, 999)
    with_cache = keeping.divide_bytes(spec, GROUPS, short, 999)
    assert with_cache[1] / with_cache[0] > without[1] / without[0]


def test_a_window_wider_than_the_context_needs_no_more_blocks_than_the_context():
    long = HeadPolicy(((FULL, Visible(5000)),))
    groups = HeadGroups.of_roles(
        long, block_size=BLOCK_SIZE, max_model_len=99 * BLOCK_SIZE, max_query_len=100
    )
    assert demand().request_blocks(groups.groups[1]) == 99


def test_a_chunk_of_a_prompt_fits_however_short_memory_is():
    """A chunk of 100 tokens needs 7 blocks in the wide group, and 5 in the narrow group.

    The wide group also sees the sink and 39 tokens before the chunk.
    """
    spec = make_spec(torch.float32)
    num_bytes = spec.nbytes(GROUPS, [7, 7, 7])
    full, wide, narrow = demand().divide_bytes(spec, GROUPS, num_bytes, 99)
    assert (full, wide) == (7, 7)
    assert 5 <= narrow <= 7
    assert demand().fair_blocks(GROUPS.groups[1], 0, 50) == 50, "no full head"


def test_a_cache_without_blocks_is_a_capacity_error():
    with pytest.raises(CapacityError, match=r"no block of \d+ bytes fits"):
        make_cache(make_spec(torch.float32), 0)


# --- scales --------------------------------------------------------------------------------------


def test_every_layer_has_its_own_scales():
    shapes = {"token": (5, HEADS, BLOCK_SIZE), "quarter": (5, HEADS, 4), "head": (HEADS,)}
    for granularity, shape in shapes.items():
        layers = make_cache(make_spec(torch.float8_e4m3fn, granularity), 5).layers
        tensors = [t for layer in layers for t in (layer.scales.k_scale, layer.scales.v_scale)]
        assert {tuple(t.shape) for t in tensors} == {shape}
        assert len({t.data_ptr() for t in tensors}) == 2 * LAYERS


def test_config_and_kernels_name_the_same_granularities():
    assert KVScaleName == ScaleGranularity


# --- the runner ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, 2 layers of 2 KV heads of 32, with static scales."""
    path = tmp_path_factory.mktemp("qwen3")
    tiny_checkpoint(path, "qwen3")
    add_tensors(path, scale_tensors(0))
    return path


def make_runner(checkpoint: Path, **options: object) -> ModelRunner:
    settings = {"device": "cpu", "num_kv_blocks": 16, "max_num_seqs": 4} | options
    return ModelRunner(EngineConfig(model=str(checkpoint), **settings), progress=False)


@pytest.mark.parametrize("kv_scale", ["token", "quarter", "head"])
def test_report_and_start_line_count_the_scales(checkpoint: Path, kv_scale: KVScaleName):
    runner = make_runner(checkpoint, **FP8, kv_scale=kv_scale)
    report, line = runner.kv_report(), runner.describe()
    runner.close()
    per_token = {"token": 4, "quarter": 1, "head": 0}[kv_scale]  # scale bytes; quarter: 4 tokens
    assert report["dtype"] == "float8_e4m3fn"
    assert report["kv_scale"] == kv_scale
    assert report["token_bytes"] == 2 * 2 * 2 * (32 + per_token)
    assert report["block_bytes"] == 16 * report["token_bytes"]
    num_scales = {"token": 16 * 16, "quarter": 16 * 4, "head": 1}[kv_scale]
    assert report["scale_bytes"] == 2 * 2 * 2 * 4 * num_scales
    assert report["total_bytes"] == 2 * 2 * 2 * 16 * 16 * 32 + report["scale_bytes"]
    said = {
        "token": "token and head",
        "quarter": "quarter of a block and head (no prefix caching: its bytes depend on the "
        "order of writes)",
        "head": "head",
    }
    assert f"KV float8_e4m3fn with a scale per {said[kv_scale]}, all heads full" in line
    assert "integer" not in line


def test_without_fp8_the_report_and_start_line_have_no_scales(checkpoint: Path):
    runner = make_runner(checkpoint)
    report, line = runner.kv_report(), runner.describe()
    runner.close()
    assert (report["dtype"], report["kv_scale"], report["scale_bytes"]) == ("float32", None, 0)
    assert "float32, 1 thread, KV float32, all heads full" in line


def test_scales_count_towards_the_memory_of_the_cache(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    """A budget of 10 fp8 blocks with their scales: not one block more."""
    budget = 10 * 2 * 2 * 2 * 16 * (32 + 4)
    monkeypatch.setattr("mrv1.runner.profile.CPU_KV_BYTES", budget)
    runner = make_runner(checkpoint, **FP8, num_kv_blocks=None)
    assert runner.kv_cache.num_blocks == (10,)
    assert runner.kv_report()["total_bytes"] == budget
    runner.close()


def test_the_size_of_the_cache_can_be_set_in_bytes(checkpoint: Path):
    """A block of the tiny model, K and V, 2 layers of 2 heads of 32 float32, takes 16 KiB."""
    runner = make_runner(checkpoint, num_kv_blocks=None, kv_cache_memory_bytes=5 * 2**14 + 1)
    assert runner.kv_cache.num_blocks == (5,)
    runner.close()
    with pytest.raises(CapacityError, match=r"no block of 16384 bytes fits"):
        make_runner(checkpoint, num_kv_blocks=None, kv_cache_memory_bytes=2**14 - 1)
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes: expected an integer >= 1, got"):
        make_runner(checkpoint, kv_cache_memory_bytes=0)


def test_the_static_scales_come_from_the_checkpoint(checkpoint: Path):
    runner = make_runner(checkpoint, **FP8, kv_scale="head")
    held = [(layer.scales.k_scale, layer.scales.v_scale) for layer in runner.kv_cache.layers]
    assert torch.equal(torch.stack([torch.stack(pair) for pair in held]), HEAD_SCALES)
    runner.close()


def test_the_start_line_names_the_integer_conversion_and_its_reason(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    choice = Conversion(path="integer", reason="A100 has no e4m3 (8.9 and newer have)")
    monkeypatch.setattr(PageFormat, "conversion", lambda *_: choice)
    runner = make_runner(checkpoint, **FP8)
    assert (
        "KV float8_e4m3fn with a scale per token and head, converted in integer arithmetic "
        "(A100 has no e4m3 (8.9 and newer have)), all heads full" in runner.describe()
    )
    runner.close()
    plain = make_runner(checkpoint)
    assert "integer" not in plain.describe()
    plain.close()


def test_a_device_without_fp8_is_refused_before_the_model_loads(
    monkeypatch: pytest.MonkeyPatch,
):
    def refuse(_: PageFormat, device: torch.device) -> Conversion:
        raise UnsupportedDeviceError("GPU X has no fp8")

    monkeypatch.setattr(PageFormat, "conversion", refuse)
    with pytest.raises(UnsupportedDeviceError, match="GPU X has no fp8"):
        make_runner(Path("/nowhere"), **FP8)
    with pytest.raises(ConfigError, match="model: expected a checkpoint directory"):
        make_runner(Path("/nowhere"))


def test_missing_head_scales_are_a_config_error(tmp_path: Path):
    tiny_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"k_scale: missing .*choose kv_scale='token'"):
        make_runner(tmp_path, **FP8, kv_scale="head")
