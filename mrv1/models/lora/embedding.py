"""What adapters (LoRA) add to the embedding of tokens."""

from __future__ import annotations

import torch

from mrv1.kernels.layers.lora import Adapters
from mrv1.kernels.registry import Ops
from mrv1.models.batch import AttentionBatch


def add_embedding(
    hidden: torch.Tensor,
    batch: AttentionBatch,
    adapters: Adapters,
    ops: Ops,
    first_id: int,
    scale: float | None,
) -> None:
    """Add ``scale * scaling * B @ A[:, token]`` to each token's embedding, in place.

    A column of A belongs to a token of the vocabulary; this rank has those from ``first_id`` on,
    and adds nothing for others. Nor does it for tokens whose embedding features replace.
    """
    matrices, slots = adapters.matrices, adapters.slots
    if batch.features is not None:
        source = batch.features.source[: len(slots)]
        tokens = torch.arange(len(source), device=slots.device)
        has_features = (source >= 0) & (tokens < batch.features.num_sources)
        slots = slots.clone()
        slots[: len(source)].masked_fill_(has_features, -1)
    columns = batch.input_ids - first_id
    is_own = (slots >= 0) & (columns >= 0) & (columns < matrices.a.shape[2])
    slot, column = torch.where(is_own, slots, 0), torch.where(is_own, columns, 0)
    ranks = torch.arange(matrices.max_rank, device=slots.device)
    has_rank = is_own[:, None] & (ranks < matrices.ranks[slot])
    factor = matrices.scaling[slot] * (1.0 if scale is None else scale)
    shrunk = matrices.a[slot, :, column].to(factor.dtype) * factor
    shrunk = torch.where(has_rank, shrunk, 0)  # other values mean nothing, and may be NaN
    ops.add_adapters(hidden, shrunk, Adapters(matrices=matrices, slots=slots))
