"""Images, video and audio as features of an encoder; a name is imported on first use."""

from typing import TYPE_CHECKING

from mrv1.lazy import lazy_names

if TYPE_CHECKING:
    from mrv1.multimodal.fastdeploy import from_fastdeploy
    from mrv1.multimodal.item import (
        Modality,
        MultimodalItem,
        as_items,
        check_bidirectional,
        check_placeholders,
        in_order,
    )
    from mrv1.multimodal.masks import Ranges, causal_ranges, visible_ranges, whole_spans
    from mrv1.multimodal.vision_encoder import Video, VisionEncoder, encode_images
else:
    __getattr__, __dir__ = lazy_names(
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

__all__ = [
    "Modality",
    "MultimodalItem",
    "Ranges",
    "Video",
    "VisionEncoder",
    "as_items",
    "causal_ranges",
    "check_bidirectional",
    "check_placeholders",
    "encode_images",
    "from_fastdeploy",
    "in_order",
    "visible_ranges",
    "whole_spans",
]
