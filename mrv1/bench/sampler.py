"""Drawing tokens from logits: time, bytes, share of the copy bandwidth, others beside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from mrv1.bench.attention import OURS
from mrv1.bench.floor import copy_bandwidth
from mrv1.bench.peers import NOT_INSTALLED, peer_versions
from mrv1.bench.provenance import provenance
from mrv1.bench.sampler_peers import SAMPLER_PEERS
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
from mrv1.kernels import reference
from mrv1.kernels.ops import select_ops

SCHEMA = 1
"""Version of the result's layout; raised when a field changes its meaning."""

PARAMS: Mapping[str, Mapping[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "min-p 0.1": {"min_p": 0.1},
    "top-k 1000, top-p 0.9": {"top_k": 1000, "top_p": 0.9},
}
"""What all rows of a measurement ask for, by its name."""

TEMPERATURE = 0.8
CHECKED_ROWS = 16
MAX_DIFFERENT = 1
"""Tokens of those that may differ from the oracle's: a near tie is rare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerBench:
    """What to measure.

    Raises:
        ConfigError: a field is out of its range; the message names it.
    """

    rows: tuple[int, ...] = (1, 32, 256)
    """Of one launch; measured one after the other."""
    stds: tuple[float, ...] = (1.0, 2.5)
    """Standard deviations of the logits."""
    vocab_size: int = 151_936
    peers: tuple[str, ...] = tuple(SAMPLER_PEERS)
    repeats: int = 30
    """Samples of each variant, after one that is not counted."""
    device: str = "auto"
    seed: int = 0
    commit: str | None = None
    """Commit of the source; None asks git."""

    def __post_init__(self) -> None:
        """Check what the kernels will not, or not by the option's name."""
        if not self.rows or min(self.rows) < 1 or len(set(self.rows)) < len(self.rows):
            raise ConfigError(f"rows: expected different counts >= 1, got {list(self.rows)}")
        if not self.stds or min(self.stds) <= 0:
            raise ConfigError(f"stds: expected numbers > 0, got {list(self.stds)}")
        for name in ("vocab_size", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected >= 1, got {getattr(self, name)}")


def run_sampler(
    bench: SamplerBench, say: Callable[[str], None] = lambda _: None
) -> dict[str, object]:
    """Measure every size and return the result, ready for JSON.

    Args:
        bench: what to measure.
        say: is told what goes on, one line each.

    Raises:
        ConfigError: an option is wrong.
        UnsupportedDeviceError: the device is not there or cannot run mrv1.
        WrongResultError: our tokens are not the oracle's.
    """
    device = resolve_device(bench.device)
    versions = peer_versions(bench.peers, SAMPLER_PEERS)
    bandwidth = copy_bandwidth(device)
    results = []
    with on_device(device):
        for num_rows in bench.rows:
            for std in bench.stds:
                for name in PARAMS:
                    entry = _measure(bench, num_rows, std, name, versions, device, bandwidth)
                    times = [f"{n} {v['median_us']:.1f} us" for n, v in entry["variants"].items()]
                    say(f"{num_rows} rows, std {std}, {name}: {', '.join(times)}")
                    results.append(entry)
    timer = "CUDA graph of launches on rotated buffers, events around a replay, variants in turns"
    return {
        "op": "sample_tokens",
        "schema": SCHEMA,
        "dtype": "float32",
        "path": kernel_path(device),
        **provenance(device, bench.commit),
        "peers": versions,
        "copy_bandwidth_bytes_per_s": bandwidth,
        "conditions": {
            "vocab_size": bench.vocab_size,
            "temperature": TEMPERATURE,
            "data": "normal logits of the standard deviation named",
            "bytes": "one read of the logits",
            "repeats": bench.repeats,
            "timer": timer if device.type == "cuda" else "host clock; no measurement",
            "check": f"tokens of {CHECKED_ROWS} rows against the oracle's",
            "seed": bench.seed,
            "clocks": "as found, not locked",
        },
        "results": results,
    }


def _measure(
    bench: SamplerBench,
    num_rows: int,
    std: float,
    params: str,
    versions: dict[str, str],
    device: torch.device,
    bandwidth: float | None,
) -> dict[str, Any]:
    """Check ours and time all variants of one size."""
    bytes_moved = num_rows * bench.vocab_size * torch.float32.itemsize
    generator = torch.Generator(device).manual_seed(bench.seed)
    num_sets = rotation(bytes_moved, device)
    sets = [
        torch.empty(num_rows, bench.vocab_size, device=device).normal_(generator=generator) * std
        for _ in range(num_sets)
    ]
    of_row = _arguments(params, num_rows, device)
    sample = select_ops(kernel_path(device)).sample_tokens
    _check(sample(sets[0], **of_row), sets[0], of_row, params)
    failures = {}
    floor_us = bytes_moved / (bandwidth or 1e12) * 1e6
    replays: dict[str, Replay] = {}

    def prepare(launches: list[Launch]) -> Replay:
        return capture(launches, num_launches(len(launches), floor_us), device)

    replays[OURS] = prepare([partial(sample, logits, **of_row) for logits in sets])
    for name, version in versions.items():
        if version == NOT_INSTALLED:
            continue
        try:
            launches = [SAMPLER_PEERS[name].launch(logits, of_row) for logits in sets]
            if None in launches:
                failures[name] = f"has no {params}"
                continue
            replays[name] = prepare([launch for launch in launches if launch is not None])
        except Exception as error:  # a peer that fails must not cost the other rows
            failures[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    timings = measure(replays, bench.repeats, device)
    return {
        "rows": num_rows,
        "std": std,
        "params": params,
        "bytes_moved": bytes_moved,
        "buffer_sets": num_sets,
        "variants": {n: _figures(t, bytes_moved, bandwidth) for n, t in timings.items()},
        "peer_time_over_ours": {
            name: timing.median_us / timings[OURS].median_us
            for name, timing in timings.items()
            if name != OURS
        },
        "failed_peers": failures,
    }


def _arguments(params: str, num_rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return all that the op takes beside the logits: what is not asked for is there, and off."""
    values = {"temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    values |= PARAMS[params]
    index = torch.arange(num_rows, device=device)
    return {
        **{
            name: torch.full(
                (num_rows,),
                value,
                dtype=torch.int32 if name == "top_k" else torch.float32,
                device=device,
            )
            for name, value in values.items()
        },
        "seeds": index * 7919,
        "positions": index,
        "child": torch.zeros(num_rows, dtype=torch.int32, device=device),
    }


def _check(
    tokens: torch.Tensor, logits: torch.Tensor, of_row: dict[str, torch.Tensor], params: str
) -> None:
    """Raise WrongResultError unless the first rows' tokens are the oracle's."""
    some = {name: value[:CHECKED_ROWS] for name, value in of_row.items()}
    want = reference.sample_tokens(logits[:CHECKED_ROWS], **some)
    different = int((tokens[:CHECKED_ROWS] != want).sum())
    if different > MAX_DIFFERENT:
        raise WrongResultError(
            f"{OURS} at {len(logits)} rows, {params}: expected the oracle's tokens, "
            f"got {different} others of {len(want)}"
        )


def _figures(timing: Timing, bytes_moved: int, bandwidth: float | None) -> dict[str, object]:
    rate = bytes_moved / (timing.median_us * 1e-6)
    return {
        **asdict(timing),
        "bytes_moved": bytes_moved,
        "share_of_copy_bandwidth": rate / bandwidth if bandwidth else None,
    }
