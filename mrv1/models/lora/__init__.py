"""LoRA adapters: several at once, each token with its request's own.

``settings`` reads ``adapter_config.json`` of PEFT's folders, and ``reading`` the tensors, exactly,
as a ``stored`` adapter. ``adapter`` is a rank's part of one, ``weights`` has the slots that a
decoder keeps for adapters, and ``embedding`` adds to the embeddings.
"""

from mrv1.models.lora.adapter import NO_LAYER, Adapter, AdapterPair, AdapterPlace
from mrv1.models.lora.embedding import add_embedding
from mrv1.models.lora.reading import read_adapter
from mrv1.models.lora.stored import StoredAdapter, StoredPart
from mrv1.models.lora.weights import LoraWeights, TokenAdapters, adapted_places

__all__ = [
    "NO_LAYER",
    "Adapter",
    "AdapterPair",
    "AdapterPlace",
    "LoraWeights",
    "StoredAdapter",
    "StoredPart",
    "TokenAdapters",
    "adapted_places",
    "add_embedding",
    "read_adapter",
]
