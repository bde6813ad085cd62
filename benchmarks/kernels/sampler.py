"""From logits to tokens: time, bytes, share of the copy bandwidth, against other samplers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.comparison import (
    OURS,
    Comparison,
    Contender,
    Contenders,
    NotComparedError,
    Say,
    compare,
)
from benchmarks.kernels.sampler_cases import (
    CASES,
    CHECKED_ROWS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    TARGET_VOCAB_SIZE,
    TEMPERATURE,
    target_us,
    works,
)
from benchmarks.measure.options import KernelBench
from benchmarks.measure.timing import rotation
from benchmarks.peers import Peer
from benchmarks.peers.sampler import SAMPLER_PEERS, Adapter
from mrv1.errors import ConfigError

SCHEMA = 1
"""Version of the result's layout; raised when a field changes its meaning."""

DRAW = f"{OURS}-draw"
"""Our draw without the edits before it; measured in cases that have both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerBench(KernelBench):
    """The cases to measure, and the sizes of their logits.

    Raises:
        ConfigError: a field is out of its range; the message names it.
    """

    rows: tuple[int, ...] = (1, 32, 256)
    """Rows of one launch; the sizes are measured one after the other."""
    stds: tuple[float, ...] = (1.0, 2.5)
    """Standard deviations of the logits."""
    vocab_size: int = TARGET_VOCAB_SIZE
    cases: tuple[str, ...] = tuple(CASES)
    """Names in ``CASES``. Cases that only edit are measured at the first of ``stds`` alone."""
    peers: tuple[str, ...] = tuple(SAMPLER_PEERS)
    repeats: int = 30

    def __post_init__(self) -> None:
        """Check the fields that kernels do not check, or not under the option's name."""
        if not self.rows or min(self.rows) < 1 or len(set(self.rows)) < len(self.rows):
            raise ConfigError(f"rows: expected different counts >= 1, got {list(self.rows)}")
        if not self.stds or min(self.stds) <= 0:
            raise ConfigError(f"stds: expected numbers > 0, got {list(self.stds)}")
        unknown = [name for name in self.cases if name not in CASES]
        if unknown or not self.cases:
            raise ConfigError(
                f"cases: expected some of {', '.join(CASES)}, got {unknown or 'nothing'}"
            )
        self.check_least(vocab_size=1, repeats=1)


def run_sampler(bench: SamplerBench, say: Say = lambda _: None) -> dict[str, Any]:
    """Measure every size and return the result, ready for JSON.

    Args:
        bench: the options.
        say: receives messages about the progress, one line each.

    Raises:
        ConfigError: an option is wrong.
        UnsupportedDeviceError: the device is not there or cannot run mrv1.
        WrongResultError: our result differs from the oracle's.
    """
    cases = [
        (num_rows, std, name)
        for num_rows in bench.rows
        for std in bench.stds
        for name in bench.cases
        # The time of an edit does not depend on the logits' values: one deviation is enough.
        if std == bench.stds[0] or CASES[name].stage not in ("edit", "bitmask")
    ]
    return compare(
        bench,
        SAMPLER_PEERS,
        cases,
        partial(_measure_case, bench),
        say,
        head={"op": "sample_tokens", "schema": SCHEMA, "dtype": "float32"},
        conditions={
            "vocab_size": bench.vocab_size,
            "temperature": TEMPERATURE,
            "data": "normal logits of the standard deviation named",
            "history": f"{PROMPT_TOKENS} prompt and {OUTPUT_TOKENS} output tokens, counted before",
            "bytes": "what a case must read and write at least; a read: the logits once",
            "check": f"{CHECKED_ROWS} rows against the oracle's logits, tokens, log-probabilities",
        },
    )


def _measure_case(
    bench: SamplerBench, comparison: Comparison, size: tuple[int, float, str]
) -> dict[str, Any]:
    num_rows, std, name = size
    case, vocab_size, device = CASES[name], bench.vocab_size, comparison.device
    bytes_moved = case.bytes_moved(num_rows, vocab_size)
    read_bytes = num_rows * vocab_size * torch.float32.itemsize
    read_us = read_bytes / comparison.bandwidth * 1e6 if comparison.bandwidth else None
    # A case that moves few bytes needs many buffer sets, so that L2 does not hold them; but the
    # logits of all sets must not fill the GPU.
    num_sets = min(rotation(bytes_moved, device), 4 * rotation(read_bytes, device))
    generator = torch.Generator(device).manual_seed(bench.seed)
    buffers = [
        torch.empty(num_rows, vocab_size, device=device).normal_(generator=generator) * std
        for _ in range(num_sets)
    ]
    sets = works(case, buffers, comparison.ops, bench.seed)
    contender = partial(
        Contender,
        rates=lambda seconds: {"reads": seconds * 1e6 / read_us if read_us else None},
    )

    def ours() -> Contender:
        sets[0].check()  # before edits run again and again on the same logits
        return contender(launches=[work.run for work in sets], bytes_moved=bytes_moved)

    def peer(peer: Peer[Adapter]) -> Contender:
        launches = [launch for work in sets if (launch := peer.adapter(work)) is not None]
        if not launches:
            raise NotComparedError(f"has no {name}")
        return contender(launches=launches, bytes_moved=bytes_moved)

    contenders: Contenders = {OURS: ours}
    if case.stage == "edit and draw":
        contenders[DRAW] = partial(
            contender, launches=[work.draw for work in sets], bytes_moved=read_bytes
        )
    entry = comparison.run(
        f"{num_rows} rows, std {std}, {name}",
        {
            "rows": num_rows,
            "std": std,
            "params": name,
            "bytes_moved": bytes_moved,
            "buffer_sets": num_sets,
            "read_us": read_us,
            "target_us": target_us(name, num_rows, vocab_size, read_us),
            "over_draw_us": None,
        },
        contenders | comparison.installed(peer),
    )
    times_us = {variant: figures["median_us"] for variant, figures in entry["variants"].items()}
    if DRAW in times_us:
        entry["over_draw_us"] = times_us[OURS] - times_us[DRAW]
    return entry
