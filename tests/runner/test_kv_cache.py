"""The KV cache: its bytes against closed forms, its scales, and what the runner says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mrv1 import CapacityError, ConfigError, EngineConfig, ModelRunner, UnsupportedDeviceError
from mrv1.config import KVScaleName
from mrv1.device import Fp8Choice
from mrv1.headwise import HeadPolicy
from mrv1.kernels.kv_scales import ScaleGranularity
from mrv1.runner.kv_cache import CacheSpec, KVCache, layer_layouts
from tests.models.families import tiny_checkpoint
from tests.models.test_fp8_cache import HEAD_SCALES, add_tensors, scale_tensors

CPU = torch.device("cpu")
LAYERS, HEADS, BLOCK_SIZE, DIM = 3, 4, 32, 64
VECTORS = LAYERS * 2 * HEADS  # of a token, K and V
FP8 = {"kv_cache_dtype": "fp8_e4m3"}


def make_spec(dtype: torch.dtype, granularity: ScaleGranularity | None = None) -> CacheSpec:
    return CacheSpec(
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        block_size=BLOCK_SIZE,
        head_dim=DIM,
        dtype=dtype,
        granularity=granularity,
    )


def make_cache(spec: CacheSpec, num_blocks: int) -> KVCache:
    scales = torch.rand(LAYERS, 2, HEADS) if spec.granularity == "head" else None
    layouts = layer_layouts(
        spec, HeadPolicy.of_layer_windows([-1, 10, -1], spec.num_kv_heads), CPU
    )
    return KVCache(spec, num_blocks, layouts, CPU, scales)


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
def test_bytes_by_hand(spec: CacheSpec, token_bytes: int, scale_bytes_of_5_blocks: int):
    assert spec.token_bytes == token_bytes
    assert spec.block_bytes == BLOCK_SIZE * token_bytes
    assert spec.scale_bytes(5) == scale_bytes_of_5_blocks
    fixed = VECTORS * 4 if spec.granularity == "head" else 0
    assert spec.nbytes(5) == 5 * BLOCK_SIZE * token_bytes + fixed

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
    assert sum(held.values()) == cache.nbytes == spec.nbytes(5)


@pytest.mark.parametrize("granularity", [None, "token", "quarter", "head"])
def test_as_many_blocks_as_fit(granularity: ScaleGranularity | None):
    spec = make_spec(torch.float8_e4m3fn, granularity)
    for num_blocks in (0, 1, 7):
        assert spec.blocks_in(spec.nbytes(num_blocks)) == num_blocks
        assert spec.blocks_in(spec.nbytes(num_blocks + 1) - 1) == num_blocks
    assert spec.blocks_in(-1) == 0


def test_no_block_is_a_capacity_error():
    with pytest.raises(CapacityError, match=r"no block of \d+ bytes fits"):
        make_cache(make_spec(torch.float32), 0)


# --- scales --------------------------------------------------------------------------------------


def test_every_layer_has_scales_of_its_own():
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
    runner = make_runner(checkpoint, **FP8, kv_scale=kv_scale, enable_prefix_caching=False)
    report, line = runner.kv_report(), runner.describe()
    runner.close()
    per_token = {"token": 4, "quarter": 1, "head": 0}[kv_scale]  # bytes; 16 tokens in a block
    assert report["dtype"] == "float8_e4m3fn"
    assert report["kv_scale"] == kv_scale
    assert report["token_bytes"] == 2 * 2 * 2 * (32 + per_token)
    assert report["block_bytes"] == 16 * report["token_bytes"]
    num_scales = {"token": 16 * 16, "quarter": 16 * 4, "head": 1}[kv_scale]
    assert report["scale_bytes"] == 2 * 2 * 2 * 4 * num_scales
    assert report["total_bytes"] == 2 * 2 * 2 * 16 * 16 * 32 + report["scale_bytes"]
    said = {"token": "token and head", "quarter": "quarter of a block and head", "head": "head"}
    assert f"KV float8_e4m3fn with a scale per {said[kv_scale]}, all heads full" in line
    assert "integer" not in line


def test_without_scales_the_report_says_so(checkpoint: Path):
    runner = make_runner(checkpoint)
    report, line = runner.kv_report(), runner.describe()
    runner.close()
    assert (report["dtype"], report["kv_scale"], report["scale_bytes"]) == ("float32", None, 0)
    assert "float32, KV float32, all heads full" in line


def test_memory_for_scales_is_memory_without_blocks(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    """A budget of 10 fp8 blocks with their scales: not one block more."""
    budget = 10 * 2 * 2 * 2 * 16 * (32 + 4)
    monkeypatch.setattr("mrv1.runner.model_runner.CPU_KV_BYTES", budget)
    runner = make_runner(checkpoint, **FP8, num_kv_blocks=None)
    assert runner.kv_cache.num_blocks == 10
    assert runner.kv_report()["total_bytes"] == budget
    runner.close()


def test_the_static_scales_are_the_checkpoints(checkpoint: Path):
    runner = make_runner(checkpoint, **FP8, kv_scale="head")
    held = [(layer.scales.k_scale, layer.scales.v_scale) for layer in runner.kv_cache.layers]
    assert torch.equal(torch.stack([torch.stack(pair) for pair in held]), HEAD_SCALES)
    runner.close()


def test_the_integer_conversion_is_said_with_its_reason(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    choice = Fp8Choice(path="integer", reason="A100 has no e4m3 (8.9 and newer have)")
    monkeypatch.setattr("mrv1.runner.model_runner.fp8_path", lambda _: choice)
    runner = make_runner(checkpoint, **FP8)
    assert (
        "KV float8_e4m3fn with a scale per token and head, converted in integer arithmetic "
        "(A100 has no e4m3 (8.9 and newer have)), all heads full" in runner.describe()
    )
    runner.close()
    plain = make_runner(checkpoint)
    assert "integer" not in plain.describe()
    plain.close()


def test_a_device_without_a_path_is_refused_before_anything_loads(
    monkeypatch: pytest.MonkeyPatch,
):
    def refuse(_: torch.device) -> Fp8Choice:
        raise UnsupportedDeviceError("GPU X has no fp8")

    monkeypatch.setattr("mrv1.runner.model_runner.fp8_path", refuse)
    with pytest.raises(UnsupportedDeviceError, match="GPU X has no fp8"):
        make_runner(Path("/nowhere"), **FP8)
    with pytest.raises(ConfigError, match="model: expected a checkpoint directory"):
        make_runner(Path("/nowhere"))


def test_head_scales_that_are_not_there_are_a_config_error(tmp_path: Path):
    tiny_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"k_scale: missing .*choose kv_scale='token'"):
        make_runner(tmp_path, **FP8, kv_scale="head")
