"""LoRA adapters: PEFT's folders, read exactly, as low-rank parts of a model's linear modules.

``settings`` reads ``adapter_config.json``, ``reading`` the tensors, as a ``stored`` adapter.
"""

from mrv1.models.lora.reading import read_adapter
from mrv1.models.lora.stored import StoredAdapter, StoredPart

__all__ = ["StoredAdapter", "StoredPart", "read_adapter"]
