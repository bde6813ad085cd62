"""The KV write benchmark: its bytes, its whole-cache check, its peers, its schema."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from enum import IntEnum
from types import ModuleType

import pytest
import torch

from benchmarks import peers
from benchmarks.kernels import comparison, kv_write
from benchmarks.kernels.kv_write import KVWriteBench, run_kv_write
from benchmarks.kernels.kv_write_data import (
    WriteCase,
    make_write_data,
    wrong_elements,
    wrong_quarters,
)
from benchmarks.measure.options import KVDtype
from benchmarks.measure.timing import WrongResultError
from mrv1.errors import ConfigError
from mrv1.kernels import reference

SMALL = {
    "tokens": (1, 33),
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "repeats": 2,
    "device": "cpu",
}
KEYS = {
    "op", "schema", "dtype", "kv_dtype", "path", "device", "driver", "versions", "commit", "date",
    "peers", "copy_bandwidth_bytes_per_s", "conditions", "results", "geometric_mean_over_ours",
}  # fmt: skip
ENTRY_KEYS = {
    "tokens", "bytes_moved", "buffer_sets", "variants", "peer_time_over_ours", "failed_peers",
}  # fmt: skip
VARIANT_KEYS = {
    "bytes_moved", "wrong_elements", "relative_error", "median_us", "p20_us", "p80_us",
    "launches_per_sample", "samples_us", "share_of_copy_bandwidth",
}  # fmt: skip
KV_DTYPES = pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
OUR_VARIANTS = {"auto": {"mrv1-fused"}, "fp8_e4m3": {"mrv1-fused", "mrv1-quarter"}}
CPU = torch.device("cpu")


def _case(num_tokens: int = 33, **options: object) -> WriteCase:
    bench = KVWriteBench(**SMALL | {"tokens": (num_tokens,)} | options)
    return bench.cases()[0]


# --- bytes and data ----------------------------------------------------------------------------


def test_bytes_equal_the_closed_forms():
    """8 heads x 128, per token: 4 KiB of K and V in bf16, 2 KiB of codes, 64 bytes of scales."""
    large, _, _, _, largest = reversed(KVWriteBench().cases())
    assert large.bytes_moved == 16384 * (2 * 4096 + 8)
    assert largest.bytes_moved == 2 * 4096 + 8
    assert replace(large, kv_dtype="fp8_e4m3").bytes_moved == 16384 * (4096 + 2048 + 64 + 8)
    quarters = replace(large, kv_dtype="fp8_e4m3", kv_scale="quarter")
    assert quarters.bytes_moved == 16384 * (4096 + 2048 + 16 + 8)
    assert replace(large, dtype=torch.float32).bytes_moved == 16384 * (4 * 4096 + 8)
    q_and_angles = 2 * 32 * 128 * 2 + 128 * 4
    assert large.fused_bytes_moved == large.bytes_moved + 16384 * q_and_angles


@KV_DTYPES
def test_inputs_are_views_of_a_fused_qkv_and_slots_are_distinct(kv_dtype: KVDtype):
    data = make_write_data(_case(kv_dtype=kv_dtype), 3, CPU)
    for query, key, value in zip(data.queries, data.keys, data.values, strict=True):
        assert query.shape == (33, 4, 16)
        assert key.shape == value.shape == (33, 2, 16)
        assert query.stride() == key.stride() == value.stride() == (8 * 16, 16, 1)
        assert key.data_ptr() - query.data_ptr() == 4 * 16 * 2
        assert value.data_ptr() - key.data_ptr() == 2 * 16 * 2
    slots = torch.cat(data.slots, dim=1)[0]
    assert len(set(slots.tolist())) == 3 * 33
    assert int(slots.max()) < data.k_cache.shape[0] * 16
    assert slots.tolist() != sorted(slots.tolist())
    torch.testing.assert_close(data.cos_sin.square().view(-1, 2, 8).sum(1).mean().item(), 1.0)


def test_blocks_in_random_order_are_filled_token_by_token():
    data = make_write_data(_case(48, slot_order="blocks"), 2, CPU)
    blocks = torch.cat(data.slots, dim=1)[0].view(6, 16)
    assert torch.equal(blocks % 16, torch.arange(16).expand(6, 16))
    assert sorted((blocks[:, 0] // 16).tolist()) == list(range(6))
    assert blocks[:, 0].tolist() != sorted(blocks[:, 0].tolist())


# --- checks ------------------------------------------------------------------------------------


@KV_DTYPES
def test_check_finds_one_bit_in_any_buffer_and_outside_of_the_slots(kv_dtype: KVDtype):
    data = make_write_data(_case(kv_dtype=kv_dtype), 2, CPU)
    vector = 17 if data.scales else 16  # a scale counts as an element
    assert wrong_elements(data) == 2 * 2 * 33 * 2 * vector
    for launch in kv_write.plain_launches(reference, data):
        launch()
    assert wrong_elements(data) == 0
    scales = [data.scales.k_scale, data.scales.v_scale] if data.scales else []
    for buffer in (data.k_cache, data.v_cache, *scales):
        for element in (0, -1):  # the launches write 66 of 80 slots, perhaps not these two
            bits = buffer.view(torch.uint8).view(-1)
            bits[element] ^= 1
            assert wrong_elements(data) == 1
            bits[element] ^= 1


def test_the_check_of_quarters_finds_one_bit_and_a_write_in_another_order():
    data = make_write_data(replace(_case(kv_dtype="fp8_e4m3"), kv_scale="quarter"), 2, CPU)
    launches = kv_write.plain_launches(reference, data)
    for order, is_right in ((launches, True), (launches[::-1], False), (launches[:1], False)):
        data.clear()
        for launch in order:
            launch()
        assert (wrong_quarters(data) == 0) is is_right
    data.v_cache.view(torch.uint8).view(-1)[0] ^= 1  # after the check: the oracle's cache
    assert wrong_quarters(data) == 1


def _swapped(key, value, *arguments, scales):
    reference.kv_cache_write(value, key, *arguments, scales=scales)


def _still(rope):
    """Return ``rope`` with angles of zero."""
    halves = rope.cos_sin.chunk(2, 1)
    return replace(rope, cos_sin=torch.cat([torch.ones_like(halves[0]), halves[1] * 0], 1))


def _unturned(qkv, *arguments, rope, **options):
    return reference.qkv_cache_write(qkv, *arguments, rope=_still(rope), **options)


def _stores_what_it_did_not_turn(*arguments, k_out=None, rope, **options):
    if k_out is None:
        rope = _still(rope)
    return reference.qkv_cache_write(*arguments, k_out=k_out, rope=rope, **options)


@KV_DTYPES
@pytest.mark.parametrize(
    ("op", "wrong", "message"),
    [
        ("kv_cache_write", _swapped, "mrv1 at 1 tokens: expected no wrong element, got"),
        ("qkv_cache_write", _unturned, "mrv1-fused at 1 tokens: expected a relative error <= 0."),
        (
            "qkv_cache_write",
            _stores_what_it_did_not_turn,
            "mrv1-fused at 1 tokens: expected no wrong element, got",
        ),
    ],
)
def test_a_wrong_kernel_ends_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, kv_dtype: KVDtype, op: str, wrong: object, message: str
):
    class Ops:
        kv_cache_write = staticmethod(reference.kv_cache_write)
        qkv_cache_write = staticmethod(reference.qkv_cache_write)

    monkeypatch.setattr(Ops, op, staticmethod(wrong))
    monkeypatch.setattr(comparison, "select_ops", lambda _: Ops)
    with pytest.raises(WrongResultError, match=message):
        run_kv_write(KVWriteBench(**SMALL, kv_dtype=kv_dtype))


# --- results -----------------------------------------------------------------------------------


@KV_DTYPES
def test_result_has_the_schema_and_survives_json(kv_dtype: KVDtype):
    said: list[str] = []
    result = run_kv_write(KVWriteBench(**SMALL, kv_dtype=kv_dtype), said.append)
    assert json.loads(json.dumps(result)) == result
    assert result.keys() == KEYS
    assert (result["op"], result["schema"], result["path"]) == ("kv_cache_write", 2, "reference")
    assert [entry["tokens"] for entry in result["results"]] == [1, 33]
    assert len(said) == 2
    for entry in result["results"]:
        assert entry.keys() == ENTRY_KEYS
        beside = OUR_VARIANTS[kv_dtype]
        assert entry["variants"].keys() == {"mrv1", *beside}
        assert entry["peer_time_over_ours"].keys() == beside
        for variant in entry["variants"].values():
            assert variant.keys() == VARIANT_KEYS
            assert variant["wrong_elements"] == 0
            assert variant["share_of_copy_bandwidth"] is None
        assert entry["bytes_moved"] == entry["variants"]["mrv1"]["bytes_moved"]
        assert entry["variants"]["mrv1"]["relative_error"] is None
        assert 0 < entry["variants"]["mrv1-fused"]["relative_error"] < 1e-2


def test_share_and_ratio_follow_from_bytes_and_times(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(comparison, "copy_bandwidth", lambda _: 1e9)
    for entry in run_kv_write(KVWriteBench(**SMALL))["results"]:
        ours, fused = entry["variants"]["mrv1"], entry["variants"]["mrv1-fused"]
        for variant in (ours, fused):
            floor_us = variant["bytes_moved"] / 1e3
            share = variant["share_of_copy_bandwidth"]
            assert share == pytest.approx(floor_us / variant["median_us"])
        ratio = fused["median_us"] / ours["median_us"]
        assert entry["peer_time_over_ours"]["mrv1-fused"] == pytest.approx(ratio)


@pytest.mark.interp
@pytest.mark.gpu
@KV_DTYPES
def test_the_kernels_themselves_pass_the_check(device: torch.device, kv_dtype: KVDtype):
    options = SMALL | {"device": str(device), "kv_dtype": kv_dtype}
    result = run_kv_write(KVWriteBench(**options))
    assert result["path"] == ("triton" if device.type == "cuda" else "interpreter")
    if device.type == "cuda":
        for entry in result["results"]:
            for variant in entry["variants"].values():
                assert variant["launches_per_sample"] == 256
                assert 0 < variant["share_of_copy_bandwidth"] < 1.2


# --- peers -------------------------------------------------------------------------------------


class _QuantMode(IntEnum):
    FP8_PER_TOKEN_HEAD = 3


def _reshape_and_cache(key, value, key_cache, value_cache, slots, kv_cache_dtype, *scales):
    """vLLM's: [blocks, tokens, heads, dim], any strides but that of dim."""
    assert kv_cache_dtype == "auto"
    assert all(scale.dtype == torch.float32 for scale in scales)
    for rows, cache in ((key, key_cache), (value, value_cache)):
        assert cache.dtype == rows.dtype
        assert cache.stride(-1) == 1
        cache[slots // cache.shape[1], slots % cache.shape[1]] = rows


def _reshape_and_quantize(key, value, key_cache, value_cache, k_scale, v_scale, slots, mode):
    """vLLM's: the same layout, [blocks, tokens, heads] scales >= 1e-6, applied as inverses."""
    assert mode == _QuantMode.FP8_PER_TOKEN_HEAD
    pairs = ((key, key_cache, k_scale), (value, value_cache, v_scale))
    for rows, cache, scales in pairs:
        assert cache.dtype == torch.float8_e4m3fn
        at = slots // cache.shape[1], slots % cache.shape[1]
        scale = (rows.float().abs().amax(-1) / 448).clamp_min(1e-6)
        scales[at] = scale
        codes = (rows.float() * (1 / scale)[..., None]).clamp(-448, 448)
        cache[at] = codes.to(torch.float8_e4m3fn)


def _append_paged_kv_cache(
    key, value, batch_indices, positions, cache, kv_indices, kv_indptr, last_page_len, kv_layout
):
    """FlashInfer's: HND pages, int32 indices, one page list per request."""
    assert kv_layout == "HND"
    size = cache[0].shape[2]
    for index in (batch_indices, positions, kv_indices, kv_indptr, last_page_len):
        assert index.dtype == torch.int32
    assert batch_indices.shape == positions.shape == key.shape[:1]
    assert len(last_page_len) == len(kv_indptr) - 1
    pages = kv_indices[kv_indptr[batch_indices.long()] + positions // size].long()
    for rows, pool in zip((key, value), cache, strict=True):
        pool[pages, :, (positions % size).long()] = rows


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch):
    ops = "vllm.v1.attention.ops.triton_reshape_and_cache_flash"
    names = {
        ops: {
            "triton_reshape_and_cache_flash": _reshape_and_cache,
            "triton_reshape_and_cache_flash_per_token_head_quant": _reshape_and_quantize,
        },
        "vllm.v1.kv_cache_interface": {"KVQuantMode": _QuantMode},
        "flashinfer": {"append_paged_kv_cache": _append_paged_kv_cache},
    }
    for name, members in names.items():
        package, _, _ = name.rpartition(".")
        while package:
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
            package, _, _ = package.rpartition(".")
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(peers, "find_spec", lambda _: object())
    return sys.modules[ops]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("kv_dtype", "ran", "failed"),
    [
        ("auto", {"flashinfer", "vllm-triton"}, "vllm-triton-side"),
        ("fp8_e4m3", {"vllm-triton", "vllm-triton-side"}, "flashinfer"),
    ],
)
def test_every_peer_passes_the_check_of_the_cache(kv_dtype: KVDtype, ran: set[str], failed: str):
    for entry in run_kv_write(KVWriteBench(**SMALL, kv_dtype=kv_dtype))["results"]:
        assert entry["failed_peers"] == {failed: f"has no write to a {kv_dtype} cache"}
        assert entry["variants"].keys() == {"mrv1", *OUR_VARIANTS[kv_dtype], *ran}
        assert entry["peer_time_over_ours"].keys() == {*OUR_VARIANTS[kv_dtype], *ran}
        for name in ran:
            assert entry["variants"][name]["bytes_moved"] == entry["bytes_moved"]


@KV_DTYPES
def test_a_peer_that_writes_wrong_values_fails_alone(
    monkeypatch: pytest.MonkeyPatch, stand_ins: ModuleType, kv_dtype: KVDtype
):
    name = "triton_reshape_and_cache_flash"
    if kv_dtype == "fp8_e4m3":
        name += "_per_token_head_quant"
    right = getattr(stand_ins, name)
    monkeypatch.setattr(
        stand_ins, name, lambda key, value, *others: right(key * 1.1, value, *others)
    )
    for entry in run_kv_write(KVWriteBench(**SMALL, kv_dtype=kv_dtype))["results"]:
        assert "vllm-triton" not in entry["variants"]
        message = f"WrongResultError: vllm-triton at {entry['tokens']} tokens: expected no wrong"
        assert message in entry["failed_peers"]["vllm-triton"]


# --- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": ()}, r"tokens: expected different counts >= 1, got \[\]"),
        ({"tokens": (2, 0)}, r"tokens: expected different counts >= 1, got \[2, 0\]"),
        ({"tokens": (2, 2)}, r"tokens: expected different counts >= 1, got \[2, 2\]"),
        ({"dtype": "int8"}, "dtype: expected one of float32, float16, bfloat16, got 'int8'"),
        ({"kv_dtype": "fp8"}, "kv_dtype: expected one of auto, fp8_e4m3, int4, got 'fp8'"),
        ({"block_size": 24}, r"block_size: expected one of \(16, 32, 64, 128\), got 24"),
        ({"repeats": 0}, "repeats: expected >= 1, got 0"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        KVWriteBench(**SMALL | options)


def test_an_unknown_peer_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"peers: expected some of flashinfer, .* got \['fa3'\]"):
        run_kv_write(KVWriteBench(**SMALL, peers=("fa3",)))
