"""The options of a calibration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from mrv1.calibration.prompts import SYNTHETIC
from mrv1.config import DtypeName, KVCacheDtypeName
from mrv1.errors import ConfigError
from mrv1.headwise import Visible
from mrv1.headwise.calibrate import Method, num_full_heads, round_size


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """What to calibrate, and on which prompts.

    Raises:
        ConfigError: an option is out of its range.
    """

    model: str
    """Checkpoint directory with a tokenizer, or ``"tiny"``."""
    data: str | Path = SYNTHETIC
    """UTF-8 text file, over which facts are scattered and whose own tokens are predicted too; or
    ``"synthetic"``: random words, in which only the facts are asked for."""
    budget: float = 0.25
    """Share of the heads that stay full, among layers without a window of their own."""
    window: int = 256
    """Last tokens that a streaming head sees, the current one included."""
    sink: int = 64
    """First tokens, which a streaming head always sees."""
    method: Method = "greedy"
    """``greedy``: heads start to stream in rounds, each tried with the heads of earlier rounds;
    ``single``: each is tried alone: faster, but blind to heads that stand in for each other."""
    num_prompts: int = 2
    """Prompts on which a loss is measured."""
    num_tokens: int = 2048
    """Tokens of a prompt."""
    num_facts: int = 32
    """Facts of a prompt, and questions about them."""
    seed: int = 0
    """Seed of the prompts."""
    dtype: DtypeName = "auto"
    device: str = "auto"
    kv_cache_dtype: KVCacheDtypeName = "auto"
    """Dtype of the cache that the policy is made for; ``auto`` is ``dtype``, and ``fp8_e4m3`` has
    scales per token."""

    def __post_init__(self) -> None:
        """Check."""
        num_full_heads(1, self.budget)
        round_size(1, self.method)
        for name, choices in (
            ("dtype", get_args(DtypeName)),
            ("kv_cache_dtype", get_args(KVCacheDtypeName)),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{name}: expected one of {choices}, got {getattr(self, name)!r}"
                )
        for name, least in (
            ("window", 1), ("sink", 0), ("num_prompts", 1), ("num_tokens", 1), ("num_facts", 1),
            ("seed", 0),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: expected >= {least}, got {getattr(self, name)}")

    @property
    def streaming(self) -> Visible:
        """What a streaming head sees."""
        return Visible(self.window, self.sink)
