"""An adapter (LoRA) in memory of the host: pairs of low-rank matrices, by their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

NO_LAYER = -1
"""The layer of the embedding's and of the head's places."""


class AdapterPlace(NamedTuple):
    """The part of a model that a pair of matrices adapts."""

    layer: int
    """-1 = ``field`` is ``embed`` or ``lm_head``."""
    field: str
    """A weight of ``LayerWeights`` (``qkv``, ``o``, ``gate_up``, ``down``), ``embed`` or
    ``lm_head``."""
    part: int = 0
    """Index among the field's modules: query, key, value; gate, up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPair:
    """What an adapter adds to one place: ``scaling * b @ (a @ x)``; the rank's own shard."""

    a: torch.Tensor
    """[rank, in], any float dtype; of the embedding [rank, vocab]."""
    b: torch.Tensor
    """[out, rank], any float dtype: out is of the place's part alone."""
    scaling: float

    @property
    def rank(self) -> int:
        """Rows of ``a``."""
        return self.a.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One adapter as ``LoraWeights.load`` takes it, cut for a tensor-parallel rank."""

    name: str
    pairs: Mapping[AdapterPlace, AdapterPair]

    @property
    def rank(self) -> int:
        """The largest rank of its pairs."""
        return max((pair.rank for pair in self.pairs.values()), default=0)
