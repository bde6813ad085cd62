"""Shared by the tests of adapters (LoRA): random adapters, and a model with one merged into it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from mrv1.models import DecoderModel, ModelConfig, ParallelContext
from mrv1.models.lora import NO_LAYER, AdapterPair, AdapterPlace
from mrv1.models.weights import part_rows

Adapter = dict[AdapterPlace, AdapterPair]


def adapted_places(config: ModelConfig) -> Iterator[AdapterPlace]:
    """Yield each place of a model that an adapter may adapt."""
    for layer in range(config.num_layers):
        for field, (rows, _) in part_rows(config, layer).items():
            yield from (AdapterPlace(layer, field, part) for part in range(len(rows)))
    yield from (AdapterPlace(NO_LAYER, field) for field in ("embed", "lm_head"))


def shapes(config: ModelConfig, place: AdapterPlace, vocab_rows: int) -> tuple[int, int]:
    """Return the outputs and inputs of a place; ``config`` and ``vocab_rows`` may be a rank's."""
    if place.layer == NO_LAYER:
        hidden = config.hidden_size
        return (hidden, vocab_rows) if place.field == "embed" else (vocab_rows, hidden)
    rows, num_in = part_rows(config, place.layer)[place.field]
    return rows[place.part], num_in


def random_adapter(
    config: ModelConfig, seed: int, *, rank: int = 4, places: Iterable[AdapterPlace] | None = None
) -> Adapter:
    """Return an adapter with ranks from 1 to ``rank`` and different scalings."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for index, place in enumerate(adapted_places(config) if places is None else places):
        num_out, num_in = shapes(config, place, config.vocab_size)
        own = 1 + (seed + index) % rank
        a, b = (
            torch.randn(shape, generator=generator, dtype=torch.float64)
            for shape in ((own, num_in), (num_out, own))
        )
        scaling = (1 + index % 3) * 0.5
        pairs[place] = AdapterPair(a=a * num_in**-0.5, b=b * own**-0.5, scaling=scaling)
    return pairs


def of_rank(
    adapter: Adapter, whole: ModelConfig, own: ModelConfig, parallel: ParallelContext
) -> Adapter:
    """Return a rank's part of an adapter; its last rows of the vocabulary may be padding."""
    pairs, vocab_rows = {}, parallel.vocab_rows(whole.vocab_size)
    for place, pair in adapter.items():
        num_out, num_in = shapes(own, place, vocab_rows)
        rows, columns = parallel.part(shapes(whole, place, whole.vocab_size), (num_out, num_in))
        if place.layer == NO_LAYER:
            part = parallel.vocab_part(whole.vocab_size)
            rows, columns = (rows, part) if place.field == "embed" else (part, columns)
        a, b = torch.zeros(pair.rank, num_in).double(), torch.zeros(num_out, pair.rank).double()
        cut_a, cut_b = pair.a[:, columns], pair.b[rows]
        a[:, : cut_a.shape[1]], b[: len(cut_b)] = cut_a, cut_b
        pairs[place] = AdapterPair(a=a, b=b, scaling=pair.scaling)
    return pairs


def merge(model: DecoderModel, adapter: Adapter) -> None:
    """Add an adapter to the weights of a model on one rank, which stores plain matrices."""
    for place, pair in adapter.items():
        added = pair.scaling * (pair.b @ pair.a)
        if place.field == "embed":
            model.weights.embed.add_(added.T)
        elif place.field == "lm_head":
            model.weights.lm_head.plain.add_(added)
        else:
            rows, _ = part_rows(model.config, place.layer)[place.field]
            start = sum(rows[: place.part])
            weight = getattr(model.weights.layers[place.layer], place.field)
            weight.plain[start : start + rows[place.part]].add_(added)
