"""The options of a calibration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from mrv1.calibration.prompts import SYNTHETIC
from mrv1.config import Dtype, KVCacheDtypeName, dtype_name
from mrv1.errors import ConfigError
from mrv1.headwise import Visible
from mrv1.headwise.calibrate import Method, num_full_heads, round_size


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """The model to calibrate, and the prompts.

    Raises:
        ConfigError: an option is out of its range.
    """

    model: str
    """Checkpoint directory with a tokenizer, Hugging Face id, or ``"tiny"``."""
    data: str | Path = SYNTHETIC
    """UTF-8 text file, or ``"synthetic"``: random words. Facts are scattered over the text or the
    words. The loss counts the answers to questions about the facts and, with a file, its text."""
    budget: float = 0.25
    """Share of the heads that stay full. Layers that have a window in the model do not count."""
    window: int = 256
    """Last tokens that a streaming head sees, the current one included."""
    sink: int = 64
    """First tokens, which a streaming head always sees."""
    method: Method = "greedy"
    """``greedy``: several rounds; a head is tried while all heads of earlier rounds stream.
    ``single``: each head is tried alone; faster, but misses heads that can replace each other."""
    num_prompts: int = 2
    """Number of prompts for each loss."""
    num_tokens: int = 2048
    """Tokens of a prompt."""
    num_facts: int = 32
    """Facts of a prompt, and questions about them."""
    seed: int = 0
    """Seed of the prompts."""
    dtype: Dtype = "auto"
    device: str = "auto"
    kv_cache_dtype: KVCacheDtypeName = "auto"
    """Dtype of the KV cache: take the dtype that the policy will be used with. ``auto`` is
    ``dtype``; ``fp8_e4m3`` has a scale per token and head."""

    def __post_init__(self) -> None:
        """Check."""
        num_full_heads(1, self.budget)
        round_size(1, self.method)
        dtype_name(self.dtype)
        choices = get_args(KVCacheDtypeName)
        if self.kv_cache_dtype not in choices:
            raise ConfigError(
                f"kv_cache_dtype: expected one of {choices}, got {self.kv_cache_dtype!r}"
            )
        for name, least in (
            ("window", 1), ("sink", 0), ("num_prompts", 1), ("num_tokens", 1), ("num_facts", 1),
            ("seed", 0),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: expected >= {least}, got {getattr(self, name)}")

    @property
    def streaming(self) -> Visible:
        """The tokens that a streaming head sees."""
        return Visible(self.window, self.sink)
