"""The options of a calibration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mrv1.calibration.prompts import SYNTHETIC
from mrv1.config import DTYPES, Dtype, KVCacheDtypeName
from mrv1.errors import ConfigError
from mrv1.headwise import Visible
from mrv1.headwise.calibrate import Method
from mrv1.options import Range, check_fields, integers, numbers


def at_least(least: int) -> Range:
    """Return the range of the integers from ``least`` on."""
    return integers(least, expected=f">= {least}")


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
    words. The loss counts the answers to questions about the facts and, with a file, its text.
    ``"tasks"``, for models that follow instructions: questions in plain words about passkeys,
    special numbers, variables and common words in a long text, through the chat template."""
    budget: Annotated[float, numbers(0, 1, "0 to 1")] = 0.25
    """Share of the heads that stay full. Layers that have a window in the model do not count."""
    window: Annotated[int, at_least(1)] = 256
    """Last tokens that a streaming head sees, the current one included."""
    sink: Annotated[int, at_least(0)] = 64
    """First tokens, which a streaming head always sees."""
    method: Method = "greedy"
    """``greedy``: several rounds; a head is tried while all heads of earlier rounds stream.
    ``single``: each head is tried alone; faster, but misses heads that can replace each other."""
    num_prompts: Annotated[int, at_least(1)] = 2
    """Number of prompts for each loss; with ``"tasks"`` at least 5, one for each task."""
    num_tokens: Annotated[int, at_least(1)] = 2048
    """Tokens of a prompt."""
    num_facts: Annotated[int, at_least(1)] = 32
    """Facts of a prompt, and questions about them; not of ``"tasks"``."""
    seed: Annotated[int, at_least(0)] = 0
    """Seed of the prompts."""
    dtype: Annotated[Dtype, DTYPES] = "auto"
    device: str = "auto"
    kv_cache_dtype: KVCacheDtypeName = "auto"
    """Dtype of the KV cache: take the dtype that the policy will be used with. ``auto`` is
    ``dtype``; ``fp8_e4m3`` and ``int4`` have a scale per token and head."""

    def __post_init__(self) -> None:
        """Check."""
        check_fields(self, ConfigError)

    @property
    def streaming(self) -> Visible:
        """The tokens that a streaming head sees."""
        return Visible(self.window, self.sink)
