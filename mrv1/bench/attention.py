"""Paged attention over a grid of (batch, context): time, bytes, share of the copy bandwidth."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
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
from mrv1.bench.attention_options import DTYPES, AttentionBench
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
from mrv1.kernels.ops import Ops, select_ops

SCHEMA = 1
"""Version of the result's layout; raised when a field changes its meaning."""

OURS = "mrv1"
UNIFORM = "mrv1-uniform"
"""Our kernel with every head full, beside a mix of roles."""

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
        "path": kernel_path(device),
        **provenance(device, bench.commit),
        "peers": versions,
        "copy_bandwidth_bytes_per_s": bandwidth,
        "conditions": _conditions(bench, device),
        "results": results,
        "geometric_mean_over_ours": _geometric_means(results),
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
        "data": "normal, pages in random order",
        "timer": "CUDA graph of launches on rotated buffers, events around a replay, variants "
        "in turns" if on_gpu else "host clock, one launch; no measurement",
        "max_relative_error": MAX_ERROR[DTYPES[bench.dtype]],
        "seed": bench.seed,
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
    ops = select_ops(kernel_path(device))
    data = _new_data(case, device, bench.seed)
    errors: dict[str, float] = {}
    replays = {OURS: _checked(OURS, _ours(ops, data), data, bandwidth, errors)}
    bytes_of = {OURS: case.bytes_moved}
    failures: dict[str, str] = {}
    if case.is_uniform:
        for name, version in versions.items():
            if version == NOT_INSTALLED:
                continue
            try:
                launches = PEERS[name][1](data)
                replays[name] = _checked(name, launches, data, bandwidth, errors)
                bytes_of[name] = case.bytes_moved
            except Exception as error:  # a peer that fails must not cost the other rows
                failures[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    else:
        failures = dict.fromkeys(versions, "has no head roles")
        uniform = replace(case, num_full_heads=case.num_kv_heads)
        twin = _new_data(uniform, device, bench.seed)
        replays[UNIFORM] = _checked(UNIFORM, _ours(ops, twin), twin, bandwidth, errors)
        bytes_of[UNIFORM] = uniform.bytes_moved
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
            name: _figures(case, timing, bytes_of[name], errors[name], bandwidth)
            for name, timing in timings.items()
        },
        "peer_time_over_ours": {
            name: timing.median_us / timings[OURS].median_us
            for name, timing in timings.items()
            if name != OURS
        },
        "failed_peers": failures,
    }


def _new_data(case: AttentionCase, device: torch.device, seed: int) -> AttentionData:
    """Return the cell's buffers, if they fit.

    Raises:
        CapacityError: they do not.
    """
    num_layers = rotation(case.bytes_moved, device)
    if device.type == "cuda":
        wanted = num_layers * 2 * buffer_elements(case) * case.dtype.itemsize
        torch.cuda.empty_cache()  # the last cell's buffers
        free, _ = memory_bytes(device)
        if wanted > free:
            raise CapacityError(
                f"cells: {case.cell} needs {wanted / 2**30:.1f} GiB for its caches, "
                f"got {free / 2**30:.1f} GiB free; choose a smaller cell"
            )
    return make_data(case, num_layers, device, seed)


def _ours(ops: Ops, data: AttentionData) -> list[Launch]:
    """Return our kernel's launch on every layer."""
    case = data.case
    launches: list[Launch] = []
    for layer in data.layers:
        cache = (layer.q, layer.k, layer.v, data.block_table)
        if case.query_len == 1:
            launch = partial(ops.paged_decode_attention, *cache, data.seq_lens, data.layout)
        else:
            launch = partial(
                ops.paged_prefill_attention, *cache, data.query_start_loc, data.seq_lens,
                data.layout, max_query_len=case.query_len,
            )  # fmt: skip
        launches.append(partial(launch, softmax_scale=data.softmax_scale, out=layer.out))
    return launches


def _checked(
    name: str,
    launches: list[Launch],
    data: AttentionData,
    bandwidth: float | None,
    errors: dict[str, float],
) -> Replay:
    """Return what will be timed, after one run of exactly that whose result is right.

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
    limit = MAX_ERROR[case.dtype]
    if not all(error <= limit for error in found):  # so that NaN is wrong
        raise WrongResultError(
            f"{name} at {case.cell}: expected a relative error <= {limit}, got {found}"
        )
    errors[name] = max(found)
    return replay


def _figures(
    case: AttentionCase, timing: Timing, bytes_moved: int, error: float, bandwidth: float | None
) -> dict[str, object]:
    seconds = timing.median_us * 1e-6
    on_gpu = bandwidth is not None
    return {
        **asdict(timing),
        "bytes_moved": bytes_moved,
        "share_of_copy_bandwidth": bytes_moved / seconds / bandwidth if bandwidth else None,
        "flops_per_s": case.flops / seconds if on_gpu and case.query_len > 1 else None,
        "relative_error": error,
    }


def _geometric_means(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return each other variant's time over ours, over the cells in which it ran."""
    ratios: dict[str, list[float]] = {}
    for entry in results:
        for name, ratio in entry["peer_time_over_ours"].items():
            ratios.setdefault(name, []).append(ratio)
    return {name: statistics.geometric_mean(values) for name, values in ratios.items()}


def _line(entry: dict[str, Any]) -> str:
    times = [f"{name} {v['median_us']:.1f} us" for name, v in entry["variants"].items()]
    return f"{entry['batch']} x {entry['context']}: {', '.join(times)}"
