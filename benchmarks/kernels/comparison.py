"""Compare kernels: each is checked, then all are timed in turns in one process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from benchmarks.measure.floor import copy_bandwidth
from benchmarks.measure.options import KernelBench
from benchmarks.measure.timing import (
    Launch,
    Replay,
    WrongResultError,
    capture,
    measure,
    num_launches,
    on_device,
)
from benchmarks.peers import NOT_INSTALLED, Peer, peer_versions
from mrv1.device import kernel_path, resolve_device
from mrv1.errors import Mrv1Error, UnsupportedDeviceError
from mrv1.kernels.registry import Ops, select_ops
from mrv1.provenance import provenance

OURS = "mrv1"
ASSUMED_BANDWIDTH = 1e12
ASSUMED_FLOPS = 5e14
"""Per second; only to guess how many launches make a sample."""

Case = TypeVar("Case")
Say = Callable[[str], None]
Figures = Mapping[str, object]


class NotComparedError(Mrv1Error):
    """A peer does not compute the case; the message names what it lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """An implementation on the data of one case."""

    launches: Sequence[Launch]
    """One per buffer set."""
    bytes_moved: int
    """Bytes that one launch moves, each counted once."""
    flops: int = 0
    clear: Callable[[], object] = dict
    """Removes the results of earlier launches, before the run that is checked."""
    check: Callable[[], Figures] = dict
    """Reads the results, raises ``WrongResultError``, returns figures."""
    rates: Callable[[float], Figures] = lambda _: {}
    """Returns the figures that follow from the median seconds of a launch."""


Contenders = dict[str, Callable[[], Contender]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The device of a benchmark, and the peers that it measures."""

    device: torch.device
    ops: Ops
    """The ops of the device's kernel path."""
    bandwidth: float | None
    """Measured bytes per second of a copy; None on a CPU."""
    repeats: int
    peers: Mapping[str, Peer[Any]]
    versions: dict[str, str]
    """Versions of the chosen peers."""
    say: Say

    def installed(self, make: Callable[[Peer[Any]], Contender]) -> Contenders:
        """Return, per installed peer, the function that makes its contender."""
        names = [name for name, version in self.versions.items() if version != NOT_INSTALLED]
        return {name: partial(make, self.peers[name]) for name in names}

    def run(self, case: str, entry: Figures, contenders: Contenders) -> dict[str, Any]:
        """Return a case's entry of the result: all contenders, checked and timed.

        Args:
            case: the name of the case in messages.
            entry: the figures of the case itself.
            contenders: by name, ``OURS`` among them. A peer that fails is recorded in
                ``failed_peers``; the others are measured all the same.

        Raises:
            WrongResultError: a kernel of ours is wrong.
        """
        ready: dict[str, tuple[Contender, Replay, Figures]] = {}
        failures: dict[str, str] = {}
        for name, make in contenders.items():
            try:
                ready[name] = self._checked(f"{name} at {case}", make)
            except NotComparedError as error:
                failures[name] = str(error)
            except Exception as error:
                if name not in self.versions:
                    raise
                failures[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
        replays = {name: replay for name, (_, replay, _) in ready.items()}
        variants: dict[str, dict[str, Any]] = {}
        for name, timing in measure(replays, self.repeats, self.device).items():
            contender, _, figures = ready[name]
            seconds = timing.median_us * 1e-6
            rate = contender.bytes_moved / seconds
            variants[name] = {
                **asdict(timing),
                "bytes_moved": contender.bytes_moved,
                "share_of_copy_bandwidth": rate / self.bandwidth if self.bandwidth else None,
                **contender.rates(seconds),
                **figures,
            }
        times_us = {name: variant["median_us"] for name, variant in variants.items()}
        self.say(f"{case}: " + ", ".join(f"{name} {us:.2f} us" for name, us in times_us.items()))
        ours_us = times_us.pop(OURS)
        return {
            **entry,
            "variants": variants,
            "peer_time_over_ours": {name: us / ours_us for name, us in times_us.items()},
            "failed_peers": failures,
        }

    def _checked(
        self, name: str, make: Callable[[], Contender]
    ) -> tuple[Contender, Replay, Figures]:
        """Return a contender, its replay, and the figures of a checked run of that replay.

        Raises:
            WrongResultError: a result is wrong.
        """
        try:
            contender = make()
            bandwidth = self.bandwidth or ASSUMED_BANDWIDTH
            floor_s = max(contender.bytes_moved / bandwidth, contender.flops / ASSUMED_FLOPS)
            count = num_launches(len(contender.launches), floor_s * 1e6)
            replay = capture(contender.launches, count, self.device)
            contender.clear()
            replay.run()
            return contender, replay, contender.check()
        except WrongResultError as error:
            raise WrongResultError(f"{name}: {error}") from error


def compare(
    bench: KernelBench,
    peers: Mapping[str, Peer[Any]],
    cases: Iterable[Case],
    measure_case: Callable[[Comparison, Case], dict[str, Any]],
    say: Say,
    *,
    head: Figures,
    conditions: Figures,
) -> dict[str, Any]:
    """Measure every case and return the result, ready for JSON.

    Args:
        bench: options.
        peers: by name.
        cases: in order.
        measure_case: makes a case's data and contenders, and runs them.
        say: receives the times of each case.
        head: fields before the common fields.
        conditions: conditions before the common conditions.

    Raises:
        ConfigError: there is no such peer.
        UnsupportedDeviceError: the device is not there or cannot run mrv1.
        WrongResultError: a kernel of ours is wrong.
    """
    device = resolve_device(bench.device)
    if bench.device == "auto" and kernel_path(device) == "reference":
        raise UnsupportedDeviceError(
            "device: expected a GPU, whose kernels are measured, got 'auto' without one; "
            "--device cpu runs the torch reference"
        )
    comparison = Comparison(
        device=device,
        ops=select_ops(kernel_path(device)),
        peers=peers,
        versions=peer_versions(bench.peers, peers),
        bandwidth=copy_bandwidth(device),
        repeats=bench.repeats,
        say=say,
    )
    graph = "CUDA graph of launches on rotated buffers, events around a replay, variants in turns"
    with on_device(device):
        results = [measure_case(comparison, case) for case in cases]
    return {
        **head,
        "path": kernel_path(device),
        **provenance(device, bench.commit),
        "peers": comparison.versions,
        "copy_bandwidth_bytes_per_s": comparison.bandwidth,
        "conditions": {
            **conditions,
            "repeats": bench.repeats,
            "timer": graph if device.type == "cuda" else "host clock, one launch; no measurement",
            "seed": bench.seed,
            "clocks": "as found, not locked",
        },
        "results": results,
    }


def ratios_of_variants(results: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return, per other variant, its time over ours in each case where it ran."""
    ratios: dict[str, list[float]] = {}
    for entry in results:
        for name, ratio in entry["peer_time_over_ours"].items():
            ratios.setdefault(name, []).append(ratio)
    return ratios


def geometric_means(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return, per other variant, the geometric mean of its time over ours, where it ran."""
    ratios = ratios_of_variants(results)
    return {name: statistics.geometric_mean(values) for name, values in ratios.items()}
