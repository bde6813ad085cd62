"""Buffers for the adapters (LoRA) of a decoder, one slot for each that may be loaded at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mrv1.kernels.layers.lora import Adapters, LoraMatrices
from mrv1.kernels.registry import Ops
from mrv1.models.batch import AttentionBatch
from mrv1.models.config import ModelConfig
from mrv1.models.lora.adapter import NO_LAYER, AdapterPair, AdapterPlace
from mrv1.models.weights import part_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraWeights:
    """A and B of every adapter slot, for every weight of a decoder that may be adapted.

    Loading and clearing go to the current stream: no step that is launched already may use the
    slot.
    """

    max_loras: int
    max_rank: int
    places: Mapping[tuple[int, str], LoraMatrices]
    """By layer and field, as in ``AdapterPlace``."""

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        *,
        max_loras: int,
        max_rank: int,
        device: torch.device | str,
        dtype: torch.dtype,
        vocab_rows: int | None = None,
    ) -> LoraWeights:
        """Return slots without adapters; ``config`` and ``vocab_rows`` are the rank's own.

        A's rows and B's columns beyond an adapter's rank are never read.
        """
        places: dict[tuple[int, str], LoraMatrices] = {}

        def add(key: tuple[int, str], num_in: int, rows: tuple[int, ...]) -> None:
            places[key] = LoraMatrices.empty(
                max_loras, max_rank, num_in, rows, device=device, dtype=dtype
            )

        for layer in range(config.num_layers):
            for field, (rows, num_in) in part_rows(config, layer).items():
                add((layer, field), num_in, rows)
        tokens = config.vocab_size if vocab_rows is None else vocab_rows
        add((NO_LAYER, "embed"), tokens, (config.hidden_size,))
        add((NO_LAYER, "lm_head"), config.hidden_size, (tokens,))
        return cls(max_loras=max_loras, max_rank=max_rank, places=places)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(each.nbytes for each in self.places.values())

    def load(self, slot: int, pairs: Mapping[AdapterPlace, AdapterPair]) -> None:
        """Copy a rank's part of an adapter into a slot, in place of the one that it has.

        ValueError: there is no such slot, or a pair does not fit its place; nothing is copied.
        """
        self._check_slot(slot)
        for place, pair in pairs.items():
            self._check(place, pair)
        self.clear(slot)
        for place, pair in pairs.items():
            matrices = self.places[place.layer, place.field]
            row = place.part * self.max_rank
            start = matrices.part_starts[place.part]
            columns = slice(start, start + matrices.part_rows[place.part])
            a, b = pair.a, pair.b.T
            matrices.a[slot, row : row + pair.rank].copy_(a, non_blocking=a.is_pinned())
            matrices.b[slot, : pair.rank, columns].copy_(b, non_blocking=b.is_pinned())
            matrices.scaling[slot, place.part].fill_(pair.scaling)  # no wait
            matrices.ranks[slot, place.part].fill_(pair.rank)

    def clear(self, slot: int) -> None:
        """Let a slot have no adapter."""
        self._check_slot(slot)
        for matrices in self.places.values():
            matrices.ranks[slot].zero_()

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.max_loras:
            raise ValueError(f"slot: expected 0 to {self.max_loras - 1}, got {slot}")

    def _check(self, place: AdapterPlace, pair: AdapterPair) -> None:
        matrices, name = self.places.get((place.layer, place.field)), _name(place)
        if matrices is None or not 0 <= place.part < len(matrices.part_rows):
            raise ValueError(f"{name}: expected a place of the model, got none")
        if not 1 <= pair.rank <= self.max_rank:
            raise ValueError(f"{name}: expected a rank of 1 to {self.max_rank}, got {pair.rank}")
        shape_a = [pair.rank, matrices.a.shape[2]]
        shape_b = [matrices.part_rows[place.part], pair.rank]
        if [*pair.a.shape] != shape_a or [*pair.b.shape] != shape_b:
            raise ValueError(
                f"{name}: expected a {shape_a} and b {shape_b}, got {[*pair.a.shape]} and "
                f"{[*pair.b.shape]}"
            )


class TokenAdapters(NamedTuple):
    """The adapters of a step's tokens."""

    lora: LoraWeights | None
    slots: torch.Tensor | None
    """[tokens] int32; None = no token has an adapter."""

    def of(self, layer: int, field: str) -> Adapters | None:
        """Return the adapters of a place; None = no token has one."""
        if self.slots is None or self.lora is None:
            return None
        return Adapters(matrices=self.lora.places[layer, field], slots=self.slots)


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


def _name(place: AdapterPlace) -> str:
    layer = "" if place.layer == NO_LAYER else f"layer {place.layer}, "
    return f"{layer}{place.field}, part {place.part}"
