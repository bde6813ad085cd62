"""Images, video and audio as features of an encoder; a name is imported on first use."""

from typing import TYPE_CHECKING

from mrv1.lazy import lazy_names

if TYPE_CHECKING:
    from mrv1.multimodal.fastdeploy import from_fastdeploy as from_fastdeploy
    from mrv1.multimodal.item import Modality as Modality
    from mrv1.multimodal.item import MultimodalItem as MultimodalItem
    from mrv1.multimodal.item import as_items as as_items
    from mrv1.multimodal.item import check_bidirectional as check_bidirectional
    from mrv1.multimodal.item import check_placeholders as check_placeholders
    from mrv1.multimodal.item import in_order as in_order
    from mrv1.multimodal.masks import Ranges as Ranges
    from mrv1.multimodal.masks import causal_ranges as causal_ranges
    from mrv1.multimodal.masks import visible_ranges as visible_ranges
    from mrv1.multimodal.masks import whole_spans as whole_spans
    from mrv1.multimodal.vision_encoder import Video as Video
    from mrv1.multimodal.vision_encoder import VisionEncoder as VisionEncoder
    from mrv1.multimodal.vision_encoder import encode_images as encode_images
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "fastdeploy": ["from_fastdeploy"],
            "item": [
                "Modality",
                "MultimodalItem",
                "as_items",
                "check_bidirectional",
                "check_placeholders",
                "in_order",
            ],
            "masks": ["Ranges", "causal_ranges", "visible_ranges", "whole_spans"],
            "vision_encoder": ["Video", "VisionEncoder", "encode_images"],
        },
    )
