"""Paged attention over a grid of (batch, context): time, bytes, share of the copy bandwidth."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from mrv1.bench.attention_case import AttentionCase
from mrv1.bench.attention_data import (
    AttentionData,
    buffer_elements,
    make_data,
    relative_error,
)
from mrv1.bench.attention_options import AttentionBench
from mrv1.bench.floor import copy_bandwidth
from mrv1.bench.peers import NOT_INSTALLED, PEERS, peer_versions
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
from mrv1.device import kernel_path, memory_bytes, resolve_device
from mrv1.errors import CapacityError
from mrv1.kernels import PrefillSplits
from mrv1.kernels.registry import Ops, select_ops

SCHEMA = 2
"""Version of the result's layout; raised when a field changes its meaning."""

OURS = "mrv1"
UNIFORM = "mrv1-uniform"
"""Our kernel with every head full, beside a mix of roles."""
AUTO = "mrv1-auto"
"""Our kernel on a cache of q's dtype, beside an fp8 one."""
DETERMINISTIC = "mrv1-deterministic"
"""Our kernel with results that do not depend on the batch, on the same cache."""
ONE = "mrv1-one"
"""Our prefill with one program a tile of queries, beside several that share its keys."""

MAX_ERROR = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative error that is still rounding; a skipped or doubled tile of keys is well above it."""

ASSUMED_FLOPS = 5e14
"""Per second; only to guess how many launches make a sample."""


def run_attention(
    bench: AttentionBench, say: Callable[[str], None] = lambda _: None
) -> dict[str, object]:
    """Measure every cell and return the result, ready for JSON.

    Args:
        bench: what to measure.
        say: is told what goes on, one line each.

    Raises:
        ConfigError: an option is wrong.
        UnsupportedDeviceError: the device is not there or cannot run mrv1.
        CapacityError: a cell does not fit into the device's memory.
        WrongResultError: our kernel's result is not the exact one within rounding.
    """
    device = resolve_device(bench.device)
    versions = peer_versions(bench.peers)
    bandwidth = copy_bandwidth(device)
    results: list[dict[str, Any]] = []
    with on_device(device):
        for case in bench.cases():
            entry = _measure_case(bench, case, versions, device, bandwidth)
            say(_line(entry))
            results.append(entry)
    return {
        "op": "attention",
        "schema": SCHEMA,
        "mode": bench.mode,
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


def _conditions(bench: AttentionBench, device: torch.device) -> dict[str, object]:
    roles = {"full_heads": bench.full_heads, "window": bench.window, "sink": bench.sink}
    on_gpu = device.type == "cuda"
    return {
        "num_q_heads": bench.num_q_heads,
        "num_kv_heads": bench.num_kv_heads,
        "head_dim": bench.head_dim,
        "block_size": bench.block_size,
        "head_roles": "uniform" if bench.full_heads == 1.0 else roles,
        "repeats": bench.repeats,
        "kv_scales": "none" if bench.kv_dtype == "auto" else "one per token and head",
        "data": "normal, pages in random order",
        "timer": "CUDA graph of launches on rotated buffers, events around a replay, variants "
        "in turns" if on_gpu else "host clock, one launch; no measurement",
        "seed": bench.seed,
        "plan": "made before, once for all layers, as the peers' are; not timed",
        "clocks": "as found, not locked",
    }  # fmt: skip


def _measure_case(
    bench: AttentionBench,
    case: AttentionCase,
    versions: dict[str, str],
    device: torch.device,
    bandwidth: float | None,
) -> dict[str, Any]:
    """Check and time all variants of one cell."""
    data = _new_data(case, device, bench.seed)
    variants = _our_variants(bench, data, bandwidth)
    failures = _add_peers(variants, versions, data, bandwidth)
    replays = {name: variant.replay for name, variant in variants.items()}
    timings = measure(replays, bench.repeats, device)
    return {
        "batch": case.cell.batch,
        "context": case.cell.context,
        "query_len": case.query_len,
        "bytes_moved": case.bytes_moved,
        "kv_bytes": case.kv_bytes,
        "flops": case.flops,
        "buffer_sets": len(data.layers),
        "variants": {
            name: _figures(variants[name], timing, bandwidth) for name, timing in timings.items()
        },
        "peer_time_over_ours": {
            name: timing.median_us / timings[OURS].median_us
            for name, timing in timings.items()
            if name != OURS
        },
        "failed_peers": failures,
    }


def _our_variants(
    bench: AttentionBench, data: AttentionData, bandwidth: float | None
) -> dict[str, _Variant]:
    """Return our kernel on the cell, and beside it on what the cell is to be compared with."""
    case, device = data.case, data.seq_lens.device
    ops = select_ops(kernel_path(device))
    splits = data.new_splits()
    variants = {OURS: _checked(OURS, _ours(ops, data, splits=splits), data, bandwidth)}
    if splits is not None:
        variants[ONE] = _checked(ONE, _ours(ops, data), data, bandwidth)
    if bench.deterministic:
        launches = _ours(ops, data, deterministic=True)
        variants[DETERMINISTIC] = _checked(DETERMINISTIC, launches, data, bandwidth)
    for name, other in (
        (AUTO, replace(case, kv_dtype="auto")),
        (UNIFORM, replace(case, num_full_heads=case.num_kv_heads)),
    ):
        if other != case:
            twin = _new_data(other, device, bench.seed)
            launches = _ours(ops, twin, splits=twin.new_splits())
            variants[name] = _checked(name, launches, twin, bandwidth)
    return variants


def _add_peers(
    variants: dict[str, _Variant],
    versions: dict[str, str],
    data: AttentionData,
    bandwidth: float | None,
) -> dict[str, str]:
    """Add every installed peer that computes the cell; return why the others do not."""
    case = data.case
    failures: dict[str, str] = {}
    for name, version in versions.items():
        if version == NOT_INSTALLED:
            continue
        peer = PEERS[name]
        adapter = peer.on_fp8 if case.is_fp8 else peer.on_auto
        if not case.is_uniform:
            failures[name] = "has no head roles"
        elif adapter is None:
            failures[name] = f"has no {case.kv_dtype} cache"
        else:
            own_scale = peer.static_scale_error if case.is_fp8 else None
            try:
                variants[name] = _checked(name, adapter(data), data, bandwidth, own_scale)
            except Exception as error:  # a peer that fails must not cost the other rows
                failures[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return failures


def _new_data(case: AttentionCase, device: torch.device, seed: int) -> AttentionData:
    """Return the cell's buffers, if they fit.

    Raises:
        CapacityError: they do not.
    """
    num_layers = rotation(case.bytes_moved, device)
    if device.type == "cuda":
        vectors = 2 * buffer_elements(case) // case.head_dim
        wanted = num_layers * vectors * case.vector_bytes
        torch.cuda.empty_cache()  # the last cell's buffers
        free, _ = memory_bytes(device)
        if wanted > free:
            raise CapacityError(
                f"cells: {case.cell} needs {wanted / 2**30:.1f} GiB for its caches, "
                f"got {free / 2**30:.1f} GiB free; choose a smaller cell"
            )
    return make_data(case, num_layers, device, seed)


def _ours(
    ops: Ops,
    data: AttentionData,
    *,
    splits: PrefillSplits | None = None,
    deterministic: bool = False,
) -> list[Launch]:
    """Return our kernel's launch on every layer; a decode's plan is made before, for all."""
    case = data.case
    if case.query_len > 1:
        return [
            partial(
                ops.paged_prefill_attention, layer.q, layer.k, layer.v, data.block_table,
                data.query_start_loc, data.seq_lens, data.layout, max_query_len=case.query_len,
                softmax_scale=data.softmax_scale, splits=splits, out=layer.out,
                scales=layer.scales,
            )
            for layer in data.layers
        ]  # fmt: skip
    plan = data.new_plan(deterministic)
    ops.plan_decode_attention(data.seq_lens, data.layout, plan)
    return [
        partial(
            ops.paged_decode_attention, layer.q, layer.k, layer.v, data.block_table,
            data.seq_lens, data.layout, plan=plan,
            softmax_scale=data.softmax_scale, out=layer.out, scales=layer.scales,
        )
        for layer in data.layers
    ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    """One way to compute a cell, found to be right."""

    case: AttentionCase
    replay: Replay
    bytes_moved: int
    error: float
    max_error: float


def _checked(
    name: str,
    launches: list[Launch],
    data: AttentionData,
    bandwidth: float | None,
    static_scale_error: float | None = None,
) -> _Variant:
    """Return what will be timed, after one run of exactly that whose result is right.

    Args:
        name: of the variant.
        launches: one per layer.
        data: what they read.
        bandwidth: bytes per second.
        static_scale_error: a peer's, see there.

    Raises:
        WrongResultError: it is not; of our own kernel this ends the benchmark.
    """
    case, device = data.case, data.seq_lens.device
    floor_s = max(case.bytes_moved / (bandwidth or 1e12), case.flops / ASSUMED_FLOPS)
    replay = capture(launches, num_launches(len(launches), floor_s * 1e6), device)
    for layer in data.layers:
        layer.out.fill_(torch.nan)
    replay.run()
    ends = {0, len(data.layers) - 1}
    found = [relative_error(data, data.layers[index]) for index in ends]
    limit, bytes_moved = MAX_ERROR[case.dtype], case.bytes_moved
    if static_scale_error is not None:
        limit, bytes_moved = static_scale_error, bytes_moved - case.scale_bytes
    if not all(error <= limit for error in found):  # so that NaN is wrong
        raise WrongResultError(
            f"{name} at {case.cell}: expected a relative error <= {limit}, got {found}"
        )
    return _Variant(
        case=case, replay=replay, bytes_moved=bytes_moved, error=max(found), max_error=limit
    )


def _figures(variant: _Variant, timing: Timing, bandwidth: float | None) -> dict[str, object]:
    case, bytes_moved = variant.case, variant.bytes_moved
    seconds = timing.median_us * 1e-6
    on_gpu = bandwidth is not None
    return {
        **asdict(timing),
        "bytes_moved": bytes_moved,
        "share_of_copy_bandwidth": bytes_moved / seconds / bandwidth if bandwidth else None,
        "flops_per_s": case.flops / seconds if on_gpu and case.query_len > 1 else None,
        "relative_error": variant.error,
        "max_relative_error": variant.max_error,
    }


def geometric_means(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return each other variant's time over ours, over the cells in which it ran."""
    ratios: dict[str, list[float]] = {}
    for entry in results:
        for name, ratio in entry["peer_time_over_ours"].items():
            ratios.setdefault(name, []).append(ratio)
    return {name: statistics.geometric_mean(values) for name, values in ratios.items()}


def _line(entry: dict[str, Any]) -> str:
    times = [f"{name} {v['median_us']:.1f} us" for name, v in entry["variants"].items()]
    return f"{entry['batch']} x {entry['context']}: {', '.join(times)}"
