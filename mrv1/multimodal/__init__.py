"""Images, video and audio as features that an encoder has computed, in place of token embeddings.

A name is imported on first use.
"""

from typing import TYPE_CHECKING

from mrv1.lazy import lazy_names

if TYPE_CHECKING:
    from mrv1.multimodal.item import Modality, MultimodalItem, in_order
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {"item": ["Modality", "MultimodalItem", "in_order"]},
    )

__all__ = ["Modality", "MultimodalItem", "in_order"]
