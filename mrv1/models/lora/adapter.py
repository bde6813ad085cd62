"""An adapter (LoRA) in memory of the host: pairs of low-rank matrices, as they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from mrv1.models.config import ModelConfig
from mrv1.models.parallel import ParallelContext
from mrv1.models.quantization.packing import EMBED_MODULE, HEAD_MODULE
from mrv1.models.weights import part_rows

NO_LAYER = -1
"""The layer of the embedding's and of the head's places."""
PLACES = {
    "self_attn.q_proj": ("qkv", 0),
    "self_attn.k_proj": ("qkv", 1),
    "self_attn.v_proj": ("qkv", 2),
    "self_attn.o_proj": ("o", 0),
    "mlp.gate_proj": ("gate_up", 0),
    "mlp.up_proj": ("gate_up", 1),
    "mlp.down_proj": ("down", 0),
}
"""By a module's name in a layer, the field of ``AdapterPlace`` and its part."""


class AdapterPlace(NamedTuple):
    """The part of a model that a pair of matrices adapts."""

    layer: int
    """-1 = ``field`` is ``embed`` or ``lm_head``."""
    field: str
    """A weight of ``LayerWeights`` (``qkv``, ``o``, ``gate_up``, ``down``), ``embed`` or
    ``lm_head``."""
    part: int = 0
    """Index among the field's modules: query, key, value; gate, up."""

    @classmethod
    def of(cls, module: str) -> AdapterPlace:
        """Return the place of a module, by its usual name."""
        if module in (EMBED_MODULE, HEAD_MODULE):
            return cls(NO_LAYER, "embed" if module == EMBED_MODULE else "lm_head")
        layer, own = module.removeprefix("model.layers.").split(".", 1)
        return cls(int(layer), *PLACES[own])


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPair:
    """What is added to one module: ``scaling * b @ (a @ x)``, to an embedding's row likewise."""

    a: torch.Tensor
    """[rank, in], any float dtype; of the embedding [rank, vocab]."""
    b: torch.Tensor
    """[out, rank], any float dtype."""
    scaling: float

    @property
    def rank(self) -> int:
        """Rows of ``a``."""
        return len(self.a)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAdapter:
    """The parts of an adapter, of a whole model or of a rank."""

    name: str
    parts: Mapping[str, AdapterPair]
    """By the module's usual name, such as ``model.layers.0.self_attn.q_proj``; modules that a
    checkpoint fuses are here one by one."""

    @property
    def rank(self) -> int:
        """The largest rank of a part."""
        return max(part.rank for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        """Bytes of its matrices."""
        return sum(part.a.nbytes + part.b.nbytes for part in self.parts.values())

    def pinned(self, dtype: torch.dtype) -> StoredAdapter:
        """Return a copy in pinned memory, from which a GPU copies while the host goes on.

        It is as ``LoraWeights`` has it, in the model's dtype and with B's columns contiguous:
        anything else goes through memory that is not pinned, and the host waits.
        """
        pinned: dict[int, torch.Tensor] = {}  # several parts may share their ``a``

        def copy(part: AdapterPair) -> AdapterPair:
            if id(part.a) not in pinned:
                pinned[id(part.a)] = part.a.to(dtype).pin_memory()
            b = part.b.T.to(dtype).contiguous().pin_memory().T
            return replace(part, a=pinned[id(part.a)], b=b)

        return replace(self, parts={name: copy(part) for name, part in self.parts.items()})

    def of_rank(self, config: ModelConfig, parallel: ParallelContext) -> StoredAdapter:
        """Return the parts of a tensor-parallel rank, as views.

        A part is cut where the rank's weights are: by inputs behind attention and in the MLP's
        last product, whose outputs are summed over ranks, and by outputs elsewhere. ``config`` is
        the whole model's.
        """
        if parallel.size == 1:
            return self
        own, parts = parallel.shard(config), {}
        for name, part in self.parts.items():
            place, cut = AdapterPlace.of(name), parallel.vocab_part(config.vocab_size)
            by_inputs = place.field in ("embed", "o", "down")
            if place.layer != NO_LAYER:
                rows, num_in = part_rows(own, place.layer)[place.field]
                sizes = (part.a.shape[1], num_in) if by_inputs else (len(part.b), rows[place.part])
                (cut,) = parallel.part(sizes[:1], sizes[1:])
            of_rank = (
                replace(part, a=part.a[:, cut]) if by_inputs else replace(part, b=part.b[cut])
            )
            parts[name] = of_rank
        return replace(self, parts=parts)

    def placed(self, vocab_rows: int) -> dict[AdapterPlace, AdapterPair]:
        """Return a rank's parts by their places; ``vocab_rows`` are its tokens with padding."""
        pairs = {AdapterPlace.of(name): part for name, part in self.parts.items()}
        for place, part in pairs.items():
            if place.field == "embed":
                pairs[place] = replace(part, a=pad(part.a, (0, vocab_rows - part.a.shape[1])))
            elif place.field == "lm_head":
                pairs[place] = replace(part, b=pad(part.b, (0, 0, 0, vocab_rows - len(part.b))))
        return pairs
