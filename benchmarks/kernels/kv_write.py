"""Writing new keys and values into their pages: time, bytes, share of the copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch

from benchmarks.kernels.attention import MAX_ERROR
from benchmarks.kernels.comparison import (
    OURS,
    Comparison,
    Contender,
    Contenders,
    NotComparedError,
    Say,
    compare,
    geometric_means,
)
from benchmarks.kernels.kv_write_data import (
    EPS,
    SlotOrder,
    WriteCase,
    WriteData,
    make_write_data,
    wrong_elements,
    wrong_quarters,
)
from benchmarks.measure.options import CacheBench
from benchmarks.measure.timing import Launch, WrongResultError, rotation
from benchmarks.peers import Peer
from benchmarks.peers.kv_write import WRITE_PEERS, Adapter, CountWrong
from mrv1.errors import ConfigError
from mrv1.kernels import QKNorm, Rope, reference
from mrv1.kernels.cache.reference import mix_channels
from mrv1.kernels.registry import Ops

SCHEMA = 2
"""Version of the result's layout; raised when a field changes its meaning."""

QUARTER = f"{OURS}-quarter"
"""Our write of scales per quarter of a block; measured where the case's cache is fp8."""
FUSED = f"{OURS}-fused"
"""Norm and rotation of q and k, then the same write, in one launch; q in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVWriteBench(CacheBench):
    """Options: one layer's cache write is measured, from strided views of a fused qkv.

    Only the fused variant computes on query heads; otherwise they only set how far apart the rows
    of K and V lie in the qkv.

    Raises:
        ConfigError: a field is out of its range; the message names it.
    """

    tokens: tuple[int, ...] = (1, 32, 256, 2048, 16384)
    """Tokens of one launch; the sizes are measured one after the other."""
    slot_order: SlotOrder = "tokens"
    """Unit in random order: every slot, or only the blocks."""
    peers: tuple[str, ...] = tuple(WRITE_PEERS)

    def __post_init__(self) -> None:
        """Check the fields that kernels do not check, or not under the option's name."""
        CacheBench.__post_init__(self)
        if not self.tokens or min(self.tokens) < 1 or len(set(self.tokens)) < len(self.tokens):
            raise ConfigError(f"tokens: expected different counts >= 1, got {list(self.tokens)}")
        if self.slot_order not in get_args(SlotOrder):
            raise ConfigError(
                f"slot_order: expected one of {', '.join(get_args(SlotOrder))}, "
                f"got {self.slot_order!r}"
            )

    def cases(self) -> list[WriteCase]:
        """Return one case per number of tokens, with all its sizes."""
        return [
            WriteCase(num_tokens=num_tokens, slot_order=self.slot_order, **self.shape)
            for num_tokens in self.tokens
        ]


def run_kv_write(bench: KVWriteBench, say: Say = lambda _: None) -> dict[str, Any]:
    """Measure every size and return the result, ready for JSON.

    Args:
        bench: the options.
        say: receives messages about the progress, one line each.

    Raises:
        ConfigError: an option is wrong.
        UnsupportedDeviceError: the device is not there or cannot run mrv1.
        WrongResultError: a bit of the cache is wrong.
    """
    in_random_order = "slots" if bench.slot_order == "tokens" else "blocks"
    result = compare(
        bench,
        WRITE_PEERS,
        bench.cases(),
        partial(_measure_case, bench),
        say,
        head={
            "op": "kv_cache_write",
            "schema": SCHEMA,
            "dtype": bench.dtype,
            "kv_dtype": bench.kv_dtype,
        },
        conditions={
            **bench.conditions(),
            "slot_order": bench.slot_order,
            "data": "normal, K and V strided views of a fused qkv, "
            f"{in_random_order} in random order",
            "fused": "q and k norm, neox rope of the whole head by rows of angles that were "
            "picked before, as layers share them; for 4-bit codes the Hadamard matrix; q in place",
            "check": "whole cache, bit for bit; a peer's fp8 cache within e4m3's rounding; the "
            "quarter variant's against the oracle",
        },
    )
    return result | {"geometric_mean_over_ours": geometric_means(result["results"])}


def _measure_case(bench: KVWriteBench, comparison: Comparison, case: WriteCase) -> dict[str, Any]:
    num_sets = rotation(case.bytes_moved, comparison.device)
    data = make_write_data(case, num_sets, comparison.device, bench.seed)
    contenders: Contenders = {
        OURS: lambda: _contender(
            data, plain_launches(comparison.ops, data), partial(wrong_elements, data)
        ),
        **comparison.installed(partial(_peer, data)),
        FUSED: partial(_fused_contender, comparison.ops, data),
    }
    if case.has_quarters:
        quarter = make_write_data(
            replace(case, kv_scale="quarter"), num_sets, comparison.device, bench.seed
        )
        contenders[QUARTER] = partial(_quarter_contender, comparison.ops, quarter)
    entry = {
        "tokens": case.num_tokens, "bytes_moved": case.bytes_moved, "buffer_sets": num_sets,
    }  # fmt: skip
    return comparison.run(f"{case.num_tokens} tokens", entry, contenders)


def _contender(
    data: WriteData,
    launches: list[Launch],
    count_wrong: CountWrong,
    relative_error: float | None = None,
) -> Contender:
    """Return a contender with one launch per buffer set."""
    is_fused = relative_error is not None

    def check() -> dict[str, object]:
        wrong = count_wrong()
        if wrong:
            raise WrongResultError(f"expected no wrong element, got {wrong}")
        return {"wrong_elements": 0, "relative_error": relative_error}

    return Contender(
        launches=launches,
        bytes_moved=data.case.fused_bytes_moved if is_fused else data.case.bytes_moved,
        clear=data.clear,
        check=check,
    )


def _quarter_contender(ops: Ops, data: WriteData) -> Contender:
    """Return our write of scales per quarter.

    The check writes each set once, in order: where a set begins a quarter again, the scale of the
    sets that wrote the rest of the quarter is gone.
    """
    launches = plain_launches(ops, data)

    def count_wrong() -> int:
        data.clear()
        for launch in launches:
            launch()
        return wrong_quarters(data)

    return _contender(data, launches, count_wrong)


def _peer(data: WriteData, peer: Peer[Adapter]) -> Contender:
    """Return a peer on the size.

    Raises:
        NotComparedError: the peer has no write to such a cache.
    """
    if data.case.kv_dtype not in peer.kv_dtypes:
        raise NotComparedError(f"has no write to a {data.case.kv_dtype} cache")
    launch, count_wrong = peer.adapter(data)
    return _contender(data, [launch(*each) for each in data.sets], count_wrong)


def plain_launches(ops: Ops, data: WriteData) -> list[Launch]:
    """Return our write of every buffer set."""
    return [
        partial(
            ops.kv_cache_write, key, value, data.k_cache, data.v_cache, slots, data.layout,
            scales=data.scales,
        )
        for key, value, slots in data.sets
    ]  # fmt: skip


def _fused(ops: Ops, data: WriteData) -> list[Callable[..., torch.Tensor]]:
    """Return the fused op on every buffer set; the caller adds the output of q or k."""
    return [
        partial(
            ops.qkv_cache_write, qkv, data.k_cache, data.v_cache, slots, data.layout,
            num_q_heads=data.case.num_q_heads, rope=Rope(data.cos_sin),
            norm=QKNorm(data.q_norm, data.k_norm, EPS), hadamard=data.case.hadamard,
            scales=data.scales,
        )
        for qkv, slots in zip(data.qkv, data.slots, strict=True)
    ]  # fmt: skip


def _fused_contender(ops: Ops, data: WriteData) -> Contender:
    """Return the fused op on q in place; the cache must hold the very keys that it returns.

    Raises:
        WrongResultError: q or k is not the exact one within rounding.
    """
    keys = [torch.empty_like(key) for key in data.keys]
    queries = [fused(k_out=key) for fused, key in zip(_fused(ops, data), keys, strict=True)]
    error = _relative_error(data, queries[0], keys[0])
    limit = MAX_ERROR[data.case.dtype]
    if not error <= limit:  # false for NaN
        raise WrongResultError(f"expected a relative error <= {limit}, got {error}")
    launches: list[Launch] = [
        partial(fused, q_out=q) for fused, q in zip(_fused(ops, data), data.queries, strict=True)
    ]
    return _contender(data, launches, partial(wrong_elements, data, keys), error)


def _relative_error(data: WriteData, q: torch.Tensor, k: torch.Tensor) -> float:
    """Return the largest error of a head's vector in the first set, against float64."""
    exact = [x[0].double() for x in (data.queries, data.keys)]
    for x, weight in zip(exact, (data.q_norm, data.k_norm), strict=True):
        reference.rms_norm(x, weight.double(), EPS, out=x)
    rows = torch.arange(data.case.num_tokens, device=q.device)
    reference.apply_rope(exact[0], exact[1], data.cos_sin, rows)
    if data.case.hadamard:
        exact = [mix_channels(x, data.case.hadamard) for x in exact]
    errors = [
        ((got.double() - want).norm(dim=-1) / want.norm(dim=-1)).max()
        for got, want in zip((q, k), exact, strict=True)
    ]
    return float(torch.stack(errors).max())
