"""An adapter as it is stored: low-rank matrices that are added to those of a model's modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from mrv1.models.config import ModelConfig
from mrv1.models.lora.adapter import NO_LAYER, Adapter, AdapterPair, AdapterPlace
from mrv1.models.parallel import ParallelContext

EMBED_MODULE, HEAD_MODULE = "model.embed_tokens", "lm_head"
"""Modules with a row for each token."""
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

    def pinned(self, dtype: torch.dtype) -> StoredAdapter:
        """Return a copy in pinned memory, from which a GPU copies while the host goes on.

        It is as ``LoraWeights`` has it, in the model's dtype and with B's columns contiguous:
        anything else goes through memory that is not pinned, and the host waits.
        """
        pinned: dict[int, torch.Tensor] = {}  # several parts may share their ``a``

        def copy(part: StoredPart) -> StoredPart:
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

    def placed(self, vocab_rows: int) -> Adapter:
        """Return a rank's parts by their places; ``vocab_rows`` are its tokens with padding."""
        pairs = {}
        for name, part in self.parts.items():
            a, b = part.a, part.b
            if name == EMBED_MODULE:
                place = AdapterPlace(NO_LAYER, "embed")
                a = pad(a, (0, vocab_rows - a.shape[1]))
            elif name == HEAD_MODULE:
                place = AdapterPlace(NO_LAYER, "lm_head")
                b = pad(b, (0, 0, 0, vocab_rows - len(b)))
            else:
                layer, module = name.removeprefix("model.layers.").split(".", 1)
                place = AdapterPlace(int(layer), *PLACES[module])
            pairs[place] = AdapterPair(a=a, b=b, scaling=part.scaling)
        return Adapter(name=self.name, pairs=pairs)
