"""Paged attention over a grid of (batch, context): time, bytes, share of the copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.attention_case import AttentionCase
from benchmarks.kernels.attention_data import AttentionData, cache_shape, make_data, relative_error
from benchmarks.kernels.attention_options import AttentionBench
from benchmarks.kernels.comparison import (
    OURS,
    Comparison,
    Contender,
    Contenders,
    NotComparedError,
    Say,
    compare,
    geometric_means,
    ratios_of_variants,
)
from benchmarks.measure.timing import (
    MAX_LAUNCHES,
    Launch,
    WrongResultError,
    capture,
    measure,
    rotation,
)
from benchmarks.peers import Peer
from benchmarks.peers.attention import PEERS, Adapter
from mrv1.device import memory_bytes
from mrv1.errors import CapacityError
from mrv1.kernels import PrefillSplits
from mrv1.kernels.registry import Ops

SCHEMA = 2
"""Version of the result's layout; raised when a field changes its meaning."""

UNIFORM = f"{OURS}-uniform"
"""Our kernel with every head full; measured where the case mixes roles."""
AUTO = f"{OURS}-auto"
"""Our kernel on a cache of q's dtype; measured where the case's cache has codes."""
FP8 = f"{OURS}-fp8"
"""Our kernel on an fp8 cache; measured where the case's cache has other codes."""
QUARTER = f"{OURS}-quarter"
"""Our kernel on scales per quarter of a block; measured where the case's cache is fp8."""
DETERMINISTIC = f"{OURS}-deterministic"
"""Our kernel with results that do not depend on the batch, on the same cache."""
PLAIN = f"{OURS}-plain"
"""Our kernel without soft cap and logit sinks; measured where the case has one of the two."""
ONE = f"{OURS}-one"
"""Our prefill with one program per tile of queries; measured where several share a tile."""

MAX_ERROR = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative error that is still rounding; a skipped or doubled tile of keys gives far more."""


def run_attention(bench: AttentionBench, say: Say = lambda _: None) -> dict[str, Any]:
    """Measure every cell and return the result, ready for JSON.

    Args:
        bench: the options.
        say: receives messages about the progress, one line each.

    Raises:
        ConfigError: an option is wrong.
        UnsupportedDeviceError: the device is not there or cannot run mrv1.
        CapacityError: a cell does not fit into the device's memory.
        WrongResultError: our kernel's result is not the exact one within rounding.
    """
    roles = {"full_heads": bench.full_heads, "window": bench.window, "sink": bench.sink}
    result = compare(
        bench,
        PEERS,
        bench.cases(),
        partial(_measure_case, bench),
        say,
        head={
            "op": "attention",
            "schema": SCHEMA,
            "mode": bench.mode,
            "dtype": bench.dtype,
            "kv_dtype": bench.kv_dtype,
        },
        conditions={
            **bench.conditions(),
            **({"groups": list(bench.groups)} if bench.groups else {}),
            "head_roles": "uniform" if bench.full_heads == 1.0 else roles,
            "soft_cap": bench.soft_cap,
            "logit_sinks": bench.sinks,
            "data": "normal, pages in random order",
            "plan": "made before, once for all layers, as the peers' are; timed apart (plan_us)",
        },
    )
    ratios = ratios_of_variants(result["results"])
    return result | {
        "geometric_mean_over_ours": geometric_means(result["results"]),
        "worst_over_ours": {name: min(values) for name, values in ratios.items()},
    }


def _measure_case(
    bench: AttentionBench, comparison: Comparison, case: AttentionCase
) -> dict[str, Any]:
    data = _new_data(case, comparison.device, bench.seed)
    contenders: Contenders = dict(_ours(bench, comparison, data))
    entry: dict[str, Any] = {
        **asdict(case.cell),
        **({"group": case.num_q_heads // case.num_kv_heads} if bench.groups else {}),
        "query_len": case.query_len,
        "bytes_moved": case.bytes_moved,
        "kv_bytes": case.kv_bytes,
        "flops": case.flops,
        "buffer_sets": len(data.layers),
    }
    contenders |= comparison.installed(partial(_peer, data))
    if case.query_len == 1:
        entry["plan_us"] = _plan_us(comparison, data)
    group = f", group {entry['group']}" if bench.groups else ""
    return comparison.run(f"{case.cell}{group}", entry, contenders)


def _plan_us(comparison: Comparison, data: AttentionData) -> float:
    """Return the median time of making the plan that all layers of a decode share."""
    plan = data.new_plan(deterministic=False)
    launch = partial(comparison.ops.plan_decode_attention, data.seq_lens, data.layout, plan)
    replays = {"plan": capture([launch], MAX_LAUNCHES, comparison.device)}
    return measure(replays, comparison.repeats, comparison.device)["plan"].median_us


def _ours(
    bench: AttentionBench, comparison: Comparison, data: AttentionData
) -> Iterator[tuple[str, Callable[[], Contender]]]:
    """Yield our kernel on the cell, and the variants that the cell is compared with."""
    case, ops, splits = data.case, comparison.ops, data.new_splits()

    def on(other: AttentionCase) -> Contender:
        twin = _new_data(other, comparison.device, bench.seed)
        return _contender(twin, our_launches(ops, twin, splits=twin.new_splits()))

    yield OURS, lambda: _contender(data, our_launches(ops, data, splits=splits))
    if splits is not None and splits.num_splits > 1:
        yield ONE, lambda: _contender(data, our_launches(ops, data))
    if bench.deterministic:
        yield (
            DETERMINISTIC,
            lambda: _contender(data, our_launches(ops, data, deterministic=True)),
        )
    if case.has_quarters:
        yield QUARTER, partial(on, replace(case, kv_scale="quarter"))
    for name, other in (
        (FP8, case if case.kv_dtype == "auto" else replace(case, kv_dtype="fp8_e4m3")),
        (AUTO, replace(case, kv_dtype="auto")),
        (UNIFORM, replace(case, num_full_heads=case.num_kv_heads)),
        (PLAIN, replace(case, soft_cap=0.0, has_sinks=False)),
    ):
        if other != case:
            yield name, partial(on, other)


def _peer(data: AttentionData, peer: Peer[Adapter]) -> Contender:
    """Return a peer on the cell.

    Raises:
        NotComparedError: the peer does not compute such a cell.
    """
    case = data.case
    windows = not case.num_full_heads and not case.sink  # the same window in every head
    if not case.is_uniform and not (windows and "windows" in peer.extras):
        raise NotComparedError("has no head roles")
    if case.cell.num_decodes and "decodes" not in peer.extras:
        raise NotComparedError("is measured with as many queries in every request")
    if case.soft_cap or case.has_sinks:
        raise NotComparedError("is measured without soft cap and logit sinks")
    if case.cell.shortest:
        raise NotComparedError("is measured with requests of one length")
    if case.kv_dtype not in peer.kv_dtypes:
        raise NotComparedError(f"has no {case.kv_dtype} cache")
    launch = peer.adapter(data)
    own_scale = peer.static_scale_error if case.has_scales else None
    return _contender(data, [launch(layer) for layer in data.layers], own_scale)


def _contender(
    data: AttentionData, launches: list[Launch], static_scale_error: float | None = None
) -> Contender:
    """Return a contender with one launch per layer; for ``static_scale_error`` see ``Peer``."""
    case = data.case
    has_rate = case.query_len > 1 and data.seq_lens.is_cuda
    return Contender(
        launches=launches,
        bytes_moved=case.bytes_moved - (case.scale_bytes if static_scale_error else 0),
        flops=case.flops,
        clear=data.clear,
        check=partial(_checked, data, static_scale_error or MAX_ERROR[case.dtype]),
        rates=lambda seconds: {"flops_per_s": case.flops / seconds if has_rate else None},
    )


def _checked(data: AttentionData, limit: float) -> dict[str, object]:
    """Return the relative error of the first and last layer.

    Raises:
        WrongResultError: an error is above the limit, or NaN.
    """
    found = [relative_error(data, data.layers[index]) for index in {0, len(data.layers) - 1}]
    if not all(error <= limit for error in found):  # false for NaN
        raise WrongResultError(f"expected a relative error <= {limit}, got {found}")
    return {"relative_error": max(found), "max_relative_error": limit}


def _new_data(case: AttentionCase, device: torch.device, seed: int) -> AttentionData:
    """Return the cell's buffers, if they fit.

    Raises:
        CapacityError: the buffers do not fit.
    """
    num_layers = rotation(case.bytes_moved, device)
    if device.type == "cuda":
        spec, groups, num_blocks = cache_shape(case, num_layers)
        wanted = spec.nbytes(groups, num_blocks)
        torch.cuda.empty_cache()  # frees the last cell's buffers
        free, _ = memory_bytes(device)
        if wanted > free:
            raise CapacityError(
                f"cells: {case.cell} needs {wanted / 2**30:.1f} GiB for its caches, "
                f"got {free / 2**30:.1f} GiB free; choose a smaller cell"
            )
    return make_data(case, num_layers, device, seed)


def our_launches(
    ops: Ops,
    data: AttentionData,
    *,
    splits: PrefillSplits | None = None,
    deterministic: bool = False,
) -> list[Launch]:
    """Return our kernel's launch on every layer; all layers of a decode share one plan."""
    case = data.case
    if case.query_len > 1:
        return [
            partial(
                ops.paged_prefill_attention, layer.q, layer.k, layer.v, data.block_table,
                data.query_start_loc, data.seq_lens, data.layout, max_query_len=case.query_len,
                splits=splits, out=layer.out, scales=layer.scales, **data.logits,
            )
            for layer in data.layers
        ]  # fmt: skip
    plan = data.new_plan(deterministic)
    ops.plan_decode_attention(data.seq_lens, data.layout, plan)
    return [
        partial(
            ops.paged_decode_attention, layer.q, layer.k, layer.v, data.block_table,
            data.seq_lens, data.layout, plan=plan,
            out=layer.out, scales=layer.scales, **data.logits,
        )
        for layer in data.layers
    ]  # fmt: skip
