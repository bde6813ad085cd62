"""The KV write benchmark: its bytes, its whole-cache check, its schema."""

from __future__ import annotations

import json

import pytest
import torch

from mrv1.bench import KVWriteBench, kv_write, run_kv_write
from mrv1.bench.kv_write import make_write_data, wrong_elements
from mrv1.bench.timing import WrongResultError
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
    "op", "schema", "dtype", "path", "device", "driver", "versions", "commit", "date",
    "copy_bandwidth_bytes_per_s", "conditions", "results",
}  # fmt: skip
ENTRY_KEYS = {
    "tokens", "bytes_moved", "wrong_elements", "median_us", "p20_us", "p80_us",
    "launches_per_sample", "samples_us", "share_of_copy_bandwidth",
}  # fmt: skip


def test_bytes_by_hand():
    """K and V of 8 heads x 128 bf16 are 4 KiB a token, read and written, and a slot of 8."""
    assert KVWriteBench().bytes_moved(16384) == 16384 * (2 * 4096 + 8)
    assert KVWriteBench(dtype="float32", num_kv_heads=2).bytes_moved(3) == 3 * (2 * 2048 + 8)


def test_inputs_are_views_of_a_fused_qkv_and_slots_are_distinct():
    data = make_write_data(KVWriteBench(**SMALL), 33, 3, torch.device("cpu"))
    for key, value in zip(data.keys, data.values, strict=True):
        assert key.shape == value.shape == (33, 2, 16)
        assert key.stride() == value.stride() == ((4 + 2 * 2) * 16, 16, 1)
        assert value.data_ptr() - key.data_ptr() == 2 * 16 * 2
    slots = torch.cat(data.slots, dim=1)[0]
    assert len(set(slots.tolist())) == 3 * 33
    assert int(slots.max()) < data.k_cache.shape[0] * 16
    assert slots.tolist() != sorted(slots.tolist())


def test_check_finds_one_bit_in_either_cache_and_outside_of_the_slots():
    data = make_write_data(KVWriteBench(**SMALL), 33, 2, torch.device("cpu"))
    assert wrong_elements(data) == 2 * 2 * 33 * 2 * 16
    for launch in kv_write._launches(reference, data):
        launch()
    assert wrong_elements(data) == 0
    for cache in (data.k_cache, data.v_cache):
        for element in (0, -1):  # 66 of 80 slots are written: whatever these two are
            bits = cache.view(torch.int16).view(-1)
            bits[element] ^= 1
            assert wrong_elements(data) == 1
            bits[element] ^= 1


def test_a_wrong_kernel_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch):
    def swapped(key, value, k_cache, v_cache, slots, layout):
        reference.kv_cache_write(value, key, k_cache, v_cache, slots, layout)

    class Wrong:
        kv_cache_write = staticmethod(swapped)

    monkeypatch.setattr(kv_write, "select_ops", lambda _: Wrong)
    with pytest.raises(
        WrongResultError,
        match="kv_cache_write of 1 tokens: expected every element bit for bit, got 64 wrong ones",
    ):
        run_kv_write(KVWriteBench(**SMALL))


def test_result_has_the_schema_and_survives_json(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    result = run_kv_write(KVWriteBench(**SMALL), said.append)
    assert json.loads(json.dumps(result)) == result
    assert result.keys() == KEYS
    assert (result["op"], result["path"]) == ("kv_cache_write", "reference")
    assert [entry["tokens"] for entry in result["results"]] == [1, 33]
    assert len(said) == 2
    for entry in result["results"]:
        assert entry.keys() == ENTRY_KEYS
        assert entry["share_of_copy_bandwidth"] is None
        assert entry["bytes_moved"] == entry["tokens"] * (2 * 2 * 2 * 16 * 2 + 8)


def test_share_follows_from_bytes_and_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kv_write, "copy_bandwidth", lambda _: 1e9)
    for entry in run_kv_write(KVWriteBench(**SMALL))["results"]:
        floor_us = entry["bytes_moved"] / 1e3
        share = entry["share_of_copy_bandwidth"]
        assert share == pytest.approx(floor_us / entry["median_us"])


@pytest.mark.interp
@pytest.mark.gpu
def test_the_kernel_itself_passes_the_check(device: torch.device):
    result = run_kv_write(KVWriteBench(**SMALL | {"device": str(device)}))
    assert result["path"] == ("triton" if device.type == "cuda" else "interpreter")
    if device.type == "cuda":
        for entry in result["results"]:
            assert entry["launches_per_sample"] == 256
            assert 0 < entry["share_of_copy_bandwidth"] < 1.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": ()}, r"tokens: expected different counts >= 1, got \[\]"),
        ({"tokens": (2, 0)}, r"tokens: expected different counts >= 1, got \[2, 0\]"),
        ({"tokens": (2, 2)}, r"tokens: expected different counts >= 1, got \[2, 2\]"),
        ({"dtype": "int8"}, "dtype: expected one of float32, float16, bfloat16, got 'int8'"),
        ({"repeats": 0}, "repeats: expected >= 1, got 0"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        KVWriteBench(**SMALL | options)
