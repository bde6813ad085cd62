"""What a model needs to know about the other tensor-parallel ranks; one rank for now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mrv1.errors import ConfigError

Collective = Callable[[torch.Tensor], torch.Tensor]
"""Takes this rank's part and returns the combined tensor."""


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelContext:
    """Rank, world size and the two collectives a tensor-parallel decoder calls.

    Raises:
        ConfigError: more than one rank (not supported yet), or an impossible rank.
    """

    rank: int = 0
    """Index of this process among ``size`` ranks."""
    size: int = 1
    """Tensor-parallel ranks."""
    all_reduce: Collective = _identity
    """Sum over ranks; follows the row-parallel projections (attention output, MLP down)."""
    all_gather: Collective = _identity
    """Concatenation over ranks along the last dimension; follows the vocabulary-parallel head."""

    @property
    def sums_partials(self) -> bool:
        """Whether a projection's output is only this rank's part of a sum over ranks."""
        return self.all_reduce is not _identity

    def __post_init__(self) -> None:
        """Reject more than one rank, and an impossible rank."""
        if self.size > 1:
            raise ConfigError(f"size: expected 1 rank, got {self.size}: not supported yet")
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(
                f"rank, size: expected 0 <= rank < size, got rank {self.rank} of {self.size}"
            )
