"""From logits to tokens: time, bytes, share of the copy bandwidth, others beside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mrv1.bench.attention import OURS
from mrv1.bench.floor import copy_bandwidth
from mrv1.bench.peers import NOT_INSTALLED, peer_versions
from mrv1.bench.provenance import provenance
from mrv1.bench.sampler_cases import (
    CASES,
    CHECKED_ROWS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    TARGET_VOCAB_SIZE,
    TEMPERATURE,
    target_us,
    works,
)
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
from mrv1.kernels.registry import select_ops

SCHEMA = 1
"""Version of the result's layout; raised when a field changes its meaning."""

DRAW = f"{OURS}-draw"
"""Our draw without the edits before it, beside cases that have both."""


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
    vocab_size: int = TARGET_VOCAB_SIZE
    cases: tuple[str, ...] = tuple(CASES)
    """Of ``CASES``. Those that only edit are measured at the first of ``stds``."""
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
        unknown = [name for name in self.cases if name not in CASES]
        if unknown or not self.cases:
            raise ConfigError(
                f"cases: expected some of {', '.join(CASES)}, got {unknown or 'nothing'}"
            )
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
        WrongResultError: ours differs from the oracle.
    """
    device = resolve_device(bench.device)
    versions = peer_versions(bench.peers, SAMPLER_PEERS)
    bandwidth = copy_bandwidth(device)
    results = []
    with on_device(device):
        for num_rows in bench.rows:
            for std in bench.stds:
                for name in bench.cases:
                    if CASES[name].stage in ("edit", "bitmask") and std != bench.stds[0]:
                        continue  # their time does not depend on the values
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
            "history": f"{PROMPT_TOKENS} prompt and {OUTPUT_TOKENS} output tokens, counted before",
            "bytes": "what a case must read and write at least; a read: the logits once",
            "repeats": bench.repeats,
            "timer": timer if device.type == "cuda" else "host clock; no measurement",
            "check": f"{CHECKED_ROWS} rows against the oracle's logits, tokens, log-probabilities",
            "seed": bench.seed,
            "clocks": "as found, not locked",
        },
        "results": results,
    }


def _measure(
    bench: SamplerBench,
    num_rows: int,
    std: float,
    name: str,
    versions: dict[str, str],
    device: torch.device,
    bandwidth: float | None,
) -> dict[str, Any]:
    """Check ours and time all variants of one case and size."""
    case, vocab_size = CASES[name], bench.vocab_size
    bytes_moved = case.bytes_moved(num_rows, vocab_size)
    read_bytes = num_rows * vocab_size * torch.float32.itemsize
    # What moves little needs many sets to be out of L2; the logits are not to fill the device.
    num_sets = min(rotation(bytes_moved, device), 4 * rotation(read_bytes, device))
    generator = torch.Generator(device).manual_seed(bench.seed)
    buffers = [
        torch.empty(num_rows, vocab_size, device=device).normal_(generator=generator) * std
        for _ in range(num_sets)
    ]
    sets = works(case, buffers, select_ops(kernel_path(device)), bench.seed)
    try:
        sets[0].check()
    except WrongResultError as error:
        raise WrongResultError(f"{OURS} at {num_rows} rows, {name}: {error}") from error
    floor_us = bytes_moved / (bandwidth or 1e12) * 1e6

    def prepare(launches: list[Launch]) -> Replay:
        return capture(launches, num_launches(len(launches), floor_us), device)

    replays = {OURS: prepare([work.run for work in sets])}
    if case.stage == "edit and draw":
        replays[DRAW] = prepare([work.draw for work in sets])
    failures = {}
    for peer, version in versions.items():
        if version == NOT_INSTALLED:
            continue
        try:
            launches = [SAMPLER_PEERS[peer].launch(work) for work in sets]
            if None in launches:
                failures[peer] = f"has no {name}"
                continue
            replays[peer] = prepare([launch for launch in launches if launch is not None])
        except Exception as error:  # a peer that fails must not cost the other rows
            failures[peer] = f"{type(error).__name__}: {error}".partition("\n")[0]
    timings = measure(replays, bench.repeats, device)
    ours_us = timings[OURS].median_us
    read_us = read_bytes / bandwidth * 1e6 if bandwidth else None
    return {
        "rows": num_rows,
        "std": std,
        "params": name,
        "bytes_moved": bytes_moved,
        "buffer_sets": num_sets,
        "read_us": read_us,
        "target_us": target_us(name, num_rows, vocab_size, read_us),
        "over_draw_us": ours_us - timings[DRAW].median_us if DRAW in timings else None,
        "variants": {
            variant: _figures(
                timing, read_bytes if variant == DRAW else bytes_moved, bandwidth, read_us
            )
            for variant, timing in timings.items()
        },
        "peer_time_over_ours": {
            variant: timing.median_us / ours_us
            for variant, timing in timings.items()
            if variant != OURS
        },
        "failed_peers": failures,
    }


def _figures(
    timing: Timing, bytes_moved: int, bandwidth: float | None, read_us: float | None
) -> dict[str, object]:
    rate = bytes_moved / (timing.median_us * 1e-6)
    return {
        **asdict(timing),
        "bytes_moved": bytes_moved,
        "share_of_copy_bandwidth": rate / bandwidth if bandwidth else None,
        "reads": timing.median_us / read_us if read_us else None,
    }
