"""LoRA adapters: several at once, each token with its request's own.

``settings`` reads ``adapter_config.json`` of PEFT's folders, and ``reading`` the tensors, exactly,
as an ``adapter``. ``weights`` has the slots that a decoder keeps for adapters.
"""

from mrv1.models.lora.adapter import NO_LAYER as NO_LAYER
from mrv1.models.lora.adapter import AdapterPair as AdapterPair
from mrv1.models.lora.adapter import AdapterPlace as AdapterPlace
from mrv1.models.lora.adapter import StoredAdapter as StoredAdapter
from mrv1.models.lora.reading import read_adapter as read_adapter
from mrv1.models.lora.weights import LoraWeights as LoraWeights
from mrv1.models.lora.weights import TokenAdapters as TokenAdapters
from mrv1.models.lora.weights import add_embedding as add_embedding
