"""Writes a LoRA adapter to a slot of a decoder."""

from __future__ import annotations

from mrv1.models import DecoderModel
from mrv1.models.lora import StoredAdapter


def write_adapter(model: DecoderModel, slot: int, adapter: StoredAdapter) -> None:
    """Write a rank's part of an adapter to a slot of its model, on the current stream.

    RuntimeError: the model has no slots.
    """
    if model.lora is None:
        raise RuntimeError("load_adapter: expected enable_lora=True, got False")
    config, parallel = model.whole_config, model.parallel
    rows = parallel.vocab_rows(config.vocab_size)
    model.lora.load(slot, adapter.of_rank(config, parallel).placed(rows))
