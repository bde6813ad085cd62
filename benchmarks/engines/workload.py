"""Requests as users send them: lengths that differ, arrivals in time, conversations."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.measure.options import CheckpointBench
from mrv1.errors import ConfigError

LENGTH_KEYS = {"input_len", "output_len"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A user's message, and how long the answer is."""

    tokens: tuple[int, ...]
    """Prompt tokens that the turn adds to its conversation; the first turn's begin with the
    shared system prompt."""
    output_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Turns that follow each other; a turn's prompt is all that was said before it."""

    arrival_s: float
    """When the first turn arrives, in seconds from the start of the run."""
    turns: tuple[Turn, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all turns and answers."""
        return sum(len(turn.tokens) + turn.output_len for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(CheckpointBench):
    """Options of the requests, with vLLM's names for serving benchmarks.

    Raises:
        ConfigError: a field is out of its range, or the file of lengths cannot be used.
    """

    num_conversations: int = 64
    """Conversations, each of ``num_turns`` requests; those of one turn are single requests."""
    num_turns: int = 1
    """Requests of a conversation. A turn arrives when the answer before it has ended, and its
    prompt is the whole conversation so far."""
    prefix_len: int = 0
    """Tokens of a system prompt that all conversations of a run begin with."""
    input_len: int = 512
    """Median tokens that a turn adds to the prompt, without the system prompt; lognormal."""
    input_sigma: float = 1.0
    """Standard deviation of the logarithm of the input lengths; 0 = all are ``input_len``."""
    input_max: int = 8000
    """Longer inputs have this many tokens."""
    output_len: int = 200
    """Median tokens of an answer; lognormal. End-of-sequence tokens do not end it."""
    output_sigma: float = 0.8
    """Standard deviation of the logarithm of the output lengths; 0 = all are ``output_len``."""
    output_max: int = 2000
    """Longer answers have this many tokens."""
    lengths: Path | None = None
    """Recorded lengths instead: a JSONL file of {"input_len": N, "output_len": N}, one line for
    each request; the turns of a conversation follow each other."""
    request_rate: float = math.inf
    """Conversations that arrive per second, as a Poisson process; inf = all arrive at once."""
    peak_share: float | None = None
    """Rate as a share of the first engine's peak instead: of the conversations per second that it
    serves in its uncounted run, in which all arrive at once."""

    def check_workload(self) -> None:
        """Raise ``ConfigError`` if a field is out of its range."""
        self.check_least(
            num_conversations=1, num_turns=1, prefix_len=0, input_len=1, input_sigma=0,
            input_max=1, output_len=1, output_sigma=0, output_max=1,
        )  # fmt: skip
        for name in ("input_sigma", "output_sigma"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name}: expected a finite number, got {getattr(self, name)}")
        for kind in ("input", "output"):
            median, most = getattr(self, f"{kind}_len"), getattr(self, f"{kind}_max")
            if self.lengths is None and median > most:
                raise ConfigError(
                    f"{kind}_len: expected at most {kind}_max ({most}), got {median}"
                )
        if not self.request_rate > 0:  # NaN, too
            raise ConfigError(
                f"request_rate: expected a number > 0, or inf, got {self.request_rate}"
            )
        if self.peak_share is not None:
            if not 0 < self.peak_share < math.inf:
                raise ConfigError(f"peak_share: expected a number > 0, got {self.peak_share}")
            if math.isfinite(self.request_rate):
                raise ConfigError(
                    "request_rate, peak_share: expected one of the two, got "
                    f"{self.request_rate} and {self.peak_share}"
                )

    def turn_lengths(self) -> list[tuple[int, int]]:
        """Return input and output tokens of every request, conversation by conversation.

        Raises:
            ConfigError: the file of lengths cannot be read, or has too few or wrong lines.
        """
        count = self.num_conversations * self.num_turns
        if self.lengths is not None:
            return _recorded(self.lengths, count)
        generator = np.random.default_rng([self.seed, 1])
        pairs = []
        for median, sigma, most in (
            (self.input_len, self.input_sigma, self.input_max),
            (self.output_len, self.output_sigma, self.output_max),
        ):
            drawn = median * np.exp(sigma * generator.standard_normal(count))
            pairs.append(np.clip(drawn.round(), 1, most).astype(int).tolist())
        return list(zip(*pairs, strict=True))

    def conversations(self, run: int, vocab_size: int) -> list[Conversation]:
        """Return the conversations of a run: runs differ in tokens, not in lengths or arrivals."""
        tokens = np.random.default_rng([self.seed, 2, run])
        gaps = np.zeros(self.num_conversations)
        if math.isfinite(self.request_rate):
            generator = np.random.default_rng([self.seed, 3])
            gaps = generator.exponential(1 / self.request_rate, self.num_conversations)
        prefix = tokens.integers(vocab_size, size=self.prefix_len).tolist()
        lengths = iter(self.turn_lengths())

        def turn(start: Sequence[int]) -> Turn:
            input_len, output_len = next(lengths)
            own = tokens.integers(vocab_size, size=input_len).tolist()
            return Turn(tokens=(*start, *own), output_len=output_len)

        return [
            Conversation(
                arrival_s=arrival,
                turns=tuple([turn(() if index else prefix) for index in range(self.num_turns)]),
            )
            for arrival in np.cumsum(gaps).tolist()
        ]


def _recorded(path: Path, count: int) -> list[tuple[int, int]]:
    """Return the first ``count`` pairs of a file of lengths.

    Raises:
        ConfigError: as ``Workload.turn_lengths``.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"lengths: cannot read {str(path)!r}: {error}") from error
    if len(lines) < count:
        raise ConfigError(f"lengths: expected {count} lines in {str(path)!r}, got {len(lines)}")
    pairs = []
    for number, line in enumerate(lines[:count], start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if (
            not isinstance(record, dict)
            or record.keys() != LENGTH_KEYS
            or not all(type(value) is int and value >= 1 for value in record.values())
        ):
            raise ConfigError(
                f'lengths: expected {{"input_len": N, "output_len": N}} with N >= 1 in line '
                f"{number} of {str(path)!r}, got {line[:80]!r}"
            )
        pairs.append((record["input_len"], record["output_len"]))
    return pairs
