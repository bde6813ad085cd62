"""An adapter as it is stored: low-rank matrices that are added to those of a model's modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from mrv1.models.config import ModelConfig
from mrv1.models.parallel import ParallelContext

EMBED_MODULE, HEAD_MODULE = "model.embed_tokens", "lm_head"
"""Modules with a row for each token."""
ROW_PARALLEL = ("o_proj", "down_proj")
"""Modules of which a rank has some inputs; of others it has some outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """What is added to one module: ``x @ a.T @ b.T * scaling``, to an embedding's row likewise."""

    a: torch.Tensor
    """[rank, in], as stored, on the CPU; of the embedding [rank, vocab]."""
    b: torch.Tensor
    """[out, rank]."""
    scaling: float
    """Factor of the product."""

    @property
    def rank(self) -> int:
        """Rows of ``a``."""
        return len(self.a)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAdapter:
    """The parts of an adapter, of a whole model or of a rank."""

    name: str
    parts: Mapping[str, StoredPart]
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

    def of_rank(self, config: ModelConfig, parallel: ParallelContext) -> StoredAdapter:
        """Return the parts of a tensor-parallel rank, as views.

        A part is cut where the rank's weights are: by inputs behind attention and in the MLP's
        last product, whose outputs are summed over ranks, and by outputs elsewhere. ``config`` is
        the whole model's.
        """
        if parallel.size == 1:
            return self
        own = parallel.shard(config)
        of_mlp = own.intermediate_size
        sizes = {
            "q_proj": own.num_q_heads * own.head_dim,
            "k_proj": own.num_kv_heads * own.head_dim,
            "v_proj": own.num_kv_heads * own.head_dim,
            "o_proj": own.num_q_heads * own.head_dim,
            "gate_proj": of_mlp,
            "up_proj": of_mlp,
            "down_proj": of_mlp,
        }
        parts = {}
        for name, part in self.parts.items():
            kind = name.rpartition(".")[2]
            if name in (EMBED_MODULE, HEAD_MODULE):
                cut = parallel.vocab_part(config.vocab_size)
            else:
                size = part.a.shape[1] if kind in ROW_PARALLEL else len(part.b)
                (cut,) = parallel.part((size,), (sizes[kind],))
            if name == EMBED_MODULE or kind in ROW_PARALLEL:
                parts[name] = replace(part, a=part.a[:, cut])
            else:
                parts[name] = replace(part, b=part.b[cut])
        return replace(self, parts=parts)
