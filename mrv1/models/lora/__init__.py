"""LoRA adapters: several at once, each token with its request's own.

``settings`` reads ``adapter_config.json`` of PEFT's folders, and ``reading`` the tensors, exactly,
as an ``adapter``. ``weights`` has the slots that a decoder keeps for adapters, and ``embedding``
adds to the embeddings.
"""

from mrv1.models.lora.adapter import NO_LAYER, AdapterPair, AdapterPlace, StoredAdapter
from mrv1.models.lora.embedding import add_embedding
from mrv1.models.lora.reading import read_adapter
from mrv1.models.lora.weights import LoraWeights, TokenAdapters

__all__ = [
    "NO_LAYER",
    "AdapterPair",
    "AdapterPlace",
    "LoraWeights",
    "StoredAdapter",
    "TokenAdapters",
    "add_embedding",
    "read_adapter",
]
