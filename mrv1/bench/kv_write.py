"""Writing new keys and values into their pages: time, bytes, share of the copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, get_args

import torch

from mrv1.bench.attention import MAX_ERROR, OURS, geometric_means
from mrv1.bench.attention_case import KVDtype
from mrv1.bench.attention_options import DTYPES
from mrv1.bench.floor import copy_bandwidth
from mrv1.bench.kv_write_data import (
    EPS,
    SlotOrder,
    WriteCase,
    WriteData,
    make_write_data,
    wrong_elements,
)
from mrv1.bench.kv_write_peers import WRITE_PEERS, CountWrong
from mrv1.bench.peers import NOT_INSTALLED, peer_versions
from mrv1.bench.provenance import provenance
from mrv1.bench.timing import (
    Launch,
    Replay,
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
from mrv1.kernels import QKNorm, Rope, reference
from mrv1.kernels.cache.kv_layout import BLOCK_SIZES
from mrv1.kernels.registry import Ops, select_ops

SCHEMA = 2
"""Version of the result's layout; raised when a field changes its meaning."""

FUSED = "mrv1-fused"
"""Norm and rotation of q and k before the same write, in one launch; q in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVWriteBench:
    """What to measure: one layer's cache write, from strided views of a fused qkv.

    Raises:
        ConfigError: a field is out of its range; the message names it.
    """

    tokens: tuple[int, ...] = (1, 32, 256, 2048, 16384)
    """Of one launch; measured one after the other."""
    dtype: str = "bfloat16"
    """Of qkv: a key of ``DTYPES``."""
    kv_dtype: KVDtype = "auto"
    """Of the cache: ``auto`` = like qkv, ``fp8_e4m3`` = codes with a scale per (token, head)."""
    num_q_heads: int = 32
    """The fused variant's; otherwise only how far apart the rows of K and V lie in the qkv."""
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    slot_order: SlotOrder = "tokens"
    """What is in random order: all slots, or the blocks alone."""
    peers: tuple[str, ...] = tuple(WRITE_PEERS)
    repeats: int = 50
    """Samples of each variant, after one that is not counted."""
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
        if self.kv_dtype not in get_args(KVDtype):
            raise ConfigError(
                f"kv_dtype: expected one of {', '.join(get_args(KVDtype))}, got {self.kv_dtype!r}"
            )
        if self.slot_order not in get_args(SlotOrder):
            raise ConfigError(
                f"slot_order: expected one of {', '.join(get_args(SlotOrder))}, "
                f"got {self.slot_order!r}"
            )
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size: expected one of {BLOCK_SIZES}, got {self.block_size}")
        for name, least in (
            ("num_q_heads", 1), ("num_kv_heads", 1), ("head_dim", 16),
            ("repeats", 1),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: expected >= {least}, got {getattr(self, name)}")

    def cases(self) -> list[WriteCase]:
        """Return the sizes with everything that belongs to their shape."""
        return [
            WriteCase(
                num_tokens=num_tokens,
                num_q_heads=self.num_q_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                block_size=self.block_size,
                dtype=DTYPES[self.dtype],
                kv_dtype=self.kv_dtype,
                slot_order=self.slot_order,
            )
            for num_tokens in self.tokens
        ]


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
    versions = peer_versions(bench.peers, WRITE_PEERS)
    bandwidth = copy_bandwidth(device)
    results = []
    with on_device(device):
        for case in bench.cases():
            entry = _measure_case(bench, case, versions, device, bandwidth)
            times = [f"{name} {v['median_us']:.2f} us" for name, v in entry["variants"].items()]
            say(f"{case.num_tokens} tokens: {', '.join(times)}")
            results.append(entry)
    return {
        "op": "kv_cache_write",
        "schema": SCHEMA,
        "dtype": bench.dtype,
        "kv_dtype": bench.kv_dtype,
        "path": kernel_path(device),
        **provenance(device, bench.commit),
        "peers": versions,
        "copy_bandwidth_bytes_per_s": bandwidth,
        "conditions": _conditions(bench, device),
        "results": results,
        "geometric_mean_over_ours": geometric_means(results),
    }


def _conditions(bench: KVWriteBench, device: torch.device) -> dict[str, object]:
    graph = "CUDA graph of launches on rotated buffers, events around a replay, variants in turns"
    return {
        "num_q_heads": bench.num_q_heads,
        "num_kv_heads": bench.num_kv_heads,
        "head_dim": bench.head_dim,
        "block_size": bench.block_size,
        "repeats": bench.repeats,
        "kv_scales": "none" if bench.kv_dtype == "auto" else "one per token and head",
        "slot_order": bench.slot_order,
        "data": "normal, K and V strided views of a fused qkv, "
        f"{'slots' if bench.slot_order == 'tokens' else 'blocks'} in random order",
        "fused": "q and k norm, neox rope of the whole head by rows of angles that were "
        "picked before, as layers share them; q in place",
        "timer": graph if device.type == "cuda" else "host clock, one launch; no measurement",
        "check": "whole cache, bit for bit; a peer's fp8 cache within e4m3's rounding",
        "seed": bench.seed,
        "clocks": "as found, not locked",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    """One way to write, found to be right."""

    replay: Replay
    bytes_moved: int
    relative_error: float | None = None
    """Of the fused op's q and k against float64; the others only move what they are given."""


def _measure_case(
    bench: KVWriteBench,
    case: WriteCase,
    versions: dict[str, str],
    device: torch.device,
    bandwidth: float | None,
) -> dict[str, Any]:
    """Check and time all variants of one size."""
    num_sets = rotation(case.bytes_moved, device)
    data = make_write_data(case, num_sets, device, bench.seed)
    ops = select_ops(kernel_path(device))
    check = partial(_checked, data, bandwidth)
    replay = check(OURS, _plain(ops, data), partial(wrong_elements, data))
    variants = {OURS: _Variant(replay=replay, bytes_moved=case.bytes_moved)}
    failures = {}
    for name, version in versions.items():  # before q changes in place, and K and V never do
        peer = WRITE_PEERS[name]
        adapter = peer.on_fp8 if case.is_fp8 else peer.on_auto
        if version == NOT_INSTALLED:
            continue
        if adapter is None:
            failures[name] = f"has no write to a {case.kv_dtype} cache"
            continue
        try:
            replay = check(name, *adapter(data))
            variants[name] = _Variant(replay=replay, bytes_moved=case.bytes_moved)
        except Exception as error:  # a peer that fails must not cost the other rows
            failures[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    variants[FUSED] = _fused_variant(ops, data, check)
    timings = measure({n: v.replay for n, v in variants.items()}, bench.repeats, device)
    return {
        "tokens": case.num_tokens,
        "bytes_moved": case.bytes_moved,
        "buffer_sets": num_sets,
        "variants": {n: _figures(variants[n], t, bandwidth) for n, t in timings.items()},
        "peer_time_over_ours": {
            name: timing.median_us / timings[OURS].median_us
            for name, timing in timings.items()
            if name != OURS
        },
        "failed_peers": failures,
    }


def _checked(
    data: WriteData,
    bandwidth: float | None,
    name: str,
    launches: list[Launch],
    count_wrong: CountWrong,
) -> Replay:
    """Return what will be timed, after one run of exactly that which left the cache right.

    Raises:
        WrongResultError: it did not; of our own kernels this ends the benchmark.
    """
    floor_us = data.case.bytes_moved / (bandwidth or 1e12) * 1e6
    replay = capture(launches, num_launches(len(launches), floor_us), data.k_cache.device)
    data.clear()
    replay.run()
    wrong = count_wrong()
    if wrong:
        raise WrongResultError(
            f"{name} at {data.case.num_tokens} tokens: expected no wrong element, got {wrong}"
        )
    return replay


def _plain(ops: Ops, data: WriteData) -> list[Launch]:
    return [
        partial(
            ops.kv_cache_write, key, value, data.k_cache, data.v_cache, slots, data.layout,
            scales=data.scales,
        )
        for key, value, slots in zip(data.keys, data.values, data.slots, strict=True)
    ]  # fmt: skip


def _fused(ops: Ops, data: WriteData) -> list[Callable[..., torch.Tensor]]:
    """Return the fused op on every buffer set; where q goes is still open."""
    return [
        partial(
            ops.qkv_cache_write, qkv, data.k_cache, data.v_cache, slots, data.layout,
            num_q_heads=data.case.num_q_heads, rope=Rope(data.cos_sin),
            norm=QKNorm(data.q_norm, data.k_norm, EPS), scales=data.scales,
        )
        for qkv, slots in zip(data.qkv, data.slots, strict=True)
    ]  # fmt: skip


def _fused_variant(ops: Ops, data: WriteData, check: Callable[..., Replay]) -> _Variant:
    """Return the fused op on q in place; it may store only what it says that it stores.

    Raises:
        WrongResultError: q or k is not the exact one within rounding, or the cache not k.
    """
    keys = [torch.empty_like(key) for key in data.keys]
    queries = [fused(k_out=key) for fused, key in zip(_fused(ops, data), keys, strict=True)]
    error = _relative_error(data, queries[0], keys[0])
    limit = MAX_ERROR[data.case.dtype]
    if not error <= limit:  # so that NaN is wrong
        raise WrongResultError(
            f"{FUSED} at {data.case.num_tokens} tokens: expected a relative error <= {limit}, "
            f"got {error}"
        )
    launches = [
        partial(fused, q_out=q) for fused, q in zip(_fused(ops, data), data.queries, strict=True)
    ]
    replay = check(FUSED, launches, partial(wrong_elements, data, keys))
    return _Variant(replay=replay, bytes_moved=data.case.fused_bytes_moved, relative_error=error)


def _relative_error(data: WriteData, q: torch.Tensor, k: torch.Tensor) -> float:
    """Return the largest error of a head's vector in the first set, against float64."""
    exact = [x[0].double() for x in (data.queries, data.keys)]
    for x, weight in zip(exact, (data.q_norm, data.k_norm), strict=True):
        reference.rms_norm(x, weight.double(), EPS, out=x)
    rows = torch.arange(data.case.num_tokens, device=q.device)
    reference.apply_rope(exact[0], exact[1], data.cos_sin, rows)
    errors = [
        ((got.double() - want).norm(dim=-1) / want.norm(dim=-1)).max()
        for got, want in zip((q, k), exact, strict=True)
    ]
    return float(torch.stack(errors).max())


def _figures(variant: _Variant, timing: Timing, bandwidth: float | None) -> dict[str, object]:
    rate = variant.bytes_moved / (timing.median_us * 1e-6)
    return {
        **asdict(timing),
        "bytes_moved": variant.bytes_moved,
        "share_of_copy_bandwidth": rate / bandwidth if bandwidth else None,
        "wrong_elements": 0,
        "relative_error": variant.relative_error,
    }
