"""Writing new keys and values into their pages: time, bytes, share of the copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch

from mrv1.bench.attention_options import DTYPES
from mrv1.bench.floor import copy_bandwidth
from mrv1.bench.provenance import provenance
from mrv1.bench.timing import (
    Launch,
    Timing,
    WrongResultError,
    capture,
    measure,
    num_launches,
    on_device,
    rotation,
)
from mrv1.device import kernel_path, resolve_device
from mrv1.errors import ConfigError
from mrv1.kernels import KVLayout
from mrv1.kernels.kv_layout import BLOCK_SIZES
from mrv1.kernels.ops import Ops, select_ops

SCHEMA = 1
"""Version of the result's layout; raised when a field changes its meaning."""

SLOT_BYTES = 8
BYTE_DTYPE = {2: torch.int16, 4: torch.int32}
"""Integer type of an element's size: bytes are compared, and NaN is a byte pattern like others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVWriteBench:
    """What to measure: one layer's cache write, from strided views of a fused qkv.

    Raises:
        ConfigError: a field is out of its range; the message names it.
    """

    tokens: tuple[int, ...] = (1, 32, 256, 2048, 16384)
    """Of one launch; measured one after the other."""
    dtype: str = "bfloat16"
    """Of qkv and cache: a key of ``DTYPES``."""
    num_q_heads: int = 32
    """Only how far apart the rows of K and V lie in the qkv."""
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    repeats: int = 50
    """Samples of each size, after one that is not counted."""
    device: str = "auto"
    seed: int = 0
    commit: str | None = None
    """Commit of the source; None asks git."""

    def __post_init__(self) -> None:
        """Check what the kernels will not, or not by the option's name."""
        if not self.tokens or min(self.tokens) < 1 or len(set(self.tokens)) < len(self.tokens):
            raise ConfigError(f"tokens: expected different counts >= 1, got {list(self.tokens)}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size: expected one of {BLOCK_SIZES}, got {self.block_size}")
        for name, least in (
            ("num_q_heads", 1), ("num_kv_heads", 1), ("head_dim", 16),
            ("repeats", 1),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: expected >= {least}, got {getattr(self, name)}")

    def bytes_moved(self, num_tokens: int) -> int:
        """Return the bytes of one write: K and V read and written, and the slots read."""
        row_bytes = self.num_kv_heads * self.head_dim * DTYPES[self.dtype].itemsize
        return num_tokens * (2 * 2 * row_bytes + SLOT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteData:
    """Rotated inputs, all written into slots of their own of one cache."""

    keys: list[torch.Tensor]
    """[tokens, kv_heads, head_dim], a view of a fused qkv."""
    values: list[torch.Tensor]
    slots: list[torch.Tensor]
    """[1, tokens] int64, in random order over the whole cache."""
    k_cache: torch.Tensor
    """[blocks, kv_heads, block_size, head_dim], NaN where nothing was written."""
    v_cache: torch.Tensor
    layout: KVLayout


def run_kv_write(
    bench: KVWriteBench, say: Callable[[str], None] = lambda _: None
) -> dict[str, object]:
    """Measure every size and return the result, ready for JSON.

    Args:
        bench: what to measure.
        say: is told what goes on, one line each.

    Raises:
        ConfigError: an option is wrong.
        UnsupportedDeviceError: the device is not there or cannot run mrv1.
        WrongResultError: the cache is not what it must be, bit for bit.
    """
    device = resolve_device(bench.device)
    bandwidth = copy_bandwidth(device)
    results = []
    with on_device(device):
        for num_tokens in bench.tokens:
            timing = _measure_size(bench, num_tokens, device, bandwidth)
            say(f"{num_tokens} tokens: {timing.median_us:.2f} us")
            results.append(_figures(bench, num_tokens, timing, bandwidth))
    return {
        "op": "kv_cache_write",
        "schema": SCHEMA,
        "dtype": bench.dtype,
        "path": kernel_path(device),
        **provenance(device, bench.commit),
        "copy_bandwidth_bytes_per_s": bandwidth,
        "conditions": _conditions(bench, device),
        "results": results,
    }


def _conditions(bench: KVWriteBench, device: torch.device) -> dict[str, object]:
    graph = "CUDA graph of launches on rotated buffers, events around a replay"
    return {
        "num_q_heads": bench.num_q_heads,
        "num_kv_heads": bench.num_kv_heads,
        "head_dim": bench.head_dim,
        "block_size": bench.block_size,
        "repeats": bench.repeats,
        "data": "normal, K and V strided views of a fused qkv, slots in random order",
        "timer": graph if device.type == "cuda" else "host clock, one launch; no measurement",
        "check": "whole cache, bit for bit",
        "seed": bench.seed,
        "clocks": "as found, not locked",
    }


def make_write_data(
    bench: KVWriteBench, num_tokens: int, num_sets: int, device: torch.device
) -> WriteData:
    """Return random inputs and a cache with a slot for each of their tokens."""
    generator = torch.Generator(device).manual_seed(bench.seed)
    heads, dim, dtype = bench.num_kv_heads, bench.head_dim, DTYPES[bench.dtype]
    keys, values = [], []
    for _ in range(num_sets):
        qkv = torch.empty(
            (num_tokens, bench.num_q_heads + 2 * heads, dim), dtype=dtype, device=device
        ).normal_(generator=generator)
        keys.append(qkv[:, bench.num_q_heads : -heads])
        values.append(qkv[:, -heads:])
    num_blocks = -(-num_tokens * num_sets // bench.block_size)
    order = torch.randperm(num_blocks * bench.block_size, generator=generator, device=device)
    shape = (num_blocks, heads, bench.block_size, dim)
    k_cache = torch.full(shape, torch.nan, dtype=dtype, device=device)
    return WriteData(
        keys=keys,
        values=values,
        slots=[order[None, i * num_tokens : (i + 1) * num_tokens] for i in range(num_sets)],
        k_cache=k_cache,
        v_cache=k_cache.clone(),
        layout=KVLayout.hnd(heads, bench.block_size, dim, device=device),
    )


def wrong_elements(data: WriteData) -> int:
    """Return how many elements of both caches are not what the writes leave, bit for bit."""
    return _wrong(data, data.k_cache, data.keys) + _wrong(data, data.v_cache, data.values)


def _wrong(data: WriteData, cache: torch.Tensor, inputs: list[torch.Tensor]) -> int:
    expected = torch.full_like(cache, torch.nan)
    for rows, slots in zip(inputs, data.slots, strict=True):
        blocks, tokens = slots[0] // data.layout.block_size, slots[0] % data.layout.block_size
        expected[blocks, :, tokens] = rows
    bits = BYTE_DTYPE[cache.dtype.itemsize]
    return int((cache.view(bits) != expected.view(bits)).sum())


def _launches(ops: Ops, data: WriteData) -> list[Launch]:
    return [
        partial(ops.kv_cache_write, key, value, data.k_cache, data.v_cache, slots, data.layout)
        for key, value, slots in zip(data.keys, data.values, data.slots, strict=True)
    ]


def _measure_size(
    bench: KVWriteBench, num_tokens: int, device: torch.device, bandwidth: float | None
) -> Timing:
    """Check and time the write of so many tokens."""
    bytes_moved = bench.bytes_moved(num_tokens)
    num_sets = rotation(bytes_moved, device)
    data = make_write_data(bench, num_tokens, num_sets, device)
    launches = _launches(select_ops(kernel_path(device)), data)
    count = num_launches(num_sets, bytes_moved / (bandwidth or 1e12) * 1e6)
    replay = capture(launches, count, device)
    for cache in (data.k_cache, data.v_cache):
        cache.fill_(torch.nan)
    replay.run()
    wrong = wrong_elements(data)
    if wrong:
        raise WrongResultError(
            f"kv_cache_write of {num_tokens} tokens: expected every element bit for bit, "
            f"got {wrong} wrong ones"
        )
    return measure({"mrv1": replay}, bench.repeats, device)["mrv1"]


def _figures(
    bench: KVWriteBench, num_tokens: int, timing: Timing, bandwidth: float | None
) -> dict[str, object]:
    bytes_moved = bench.bytes_moved(num_tokens)
    rate = bytes_moved / (timing.median_us * 1e-6)
    return {
        "tokens": num_tokens,
        "bytes_moved": bytes_moved,
        "wrong_elements": 0,
        **asdict(timing),
        "share_of_copy_bandwidth": rate / bandwidth if bandwidth else None,
    }
