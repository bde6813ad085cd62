"""Vision-language families: placeholders, tensors' names. The encoder is the checkpoint's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mrv1.errors import ConfigError

VideoTime = Literal["frames", "seconds", "text"]
"""Time in a video's positions: one position a frame (Qwen2-VL), ``tokens_per_second`` positions a
second (Qwen2.5-VL), or text between frames, each of which is an item of its own (Qwen3-VL)."""
TEXT_PREFIX = "model.language_model."
"""Beginning of the names of the text model's tensors in newer checkpoints; older ones lack it."""
VISION_PREFIXES = ("model.visual.", "visual.")
"""Beginnings of the names of the vision encoder's tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Facts about images and videos that a text model needs."""

    image_token_id: int
    """Placeholder of a feature of an image."""
    video_token_id: int
    """Placeholder of a feature of a video."""
    spatial_merge_size: int
    """Patches per side of the square that one feature stands for."""
    video_time: VideoTime
    """Time in a video's positions."""
    tokens_per_second: float = 1.0
    """Positions per second of video, for ``video_time`` "seconds"."""
    num_deepstack_layers: int = 0
    """First layers after which further features are added to the hidden states (DeepStack, arXiv
    2406.04334): a feature has this many times ``hidden_size`` more columns."""


def vision_config(hf: Any, video_time: VideoTime) -> VisionConfig:  # noqa: ANN401
    """Return a configuration's settings; ConfigError: features for more layers than there are."""
    vision = hf.vision_config
    num_deepstack = len(getattr(vision, "deepstack_visual_indexes", ()))
    if num_deepstack > hf.text_config.num_hidden_layers:
        raise ConfigError(
            "vision_config.deepstack_visual_indexes: expected at most "
            f"{hf.text_config.num_hidden_layers}, one for each layer, got {num_deepstack}"
        )
    return VisionConfig(
        image_token_id=hf.image_token_id,
        video_token_id=hf.video_token_id,
        spatial_merge_size=vision.spatial_merge_size,
        video_time=video_time,
        tokens_per_second=float(getattr(vision, "tokens_per_second", 1.0)),
        num_deepstack_layers=num_deepstack,
    )


def text_name(name: str) -> str | None:
    """Return a stored tensor's name in the text model alone; None for the vision encoder's."""
    if name.startswith(VISION_PREFIXES):
        return None
    return f"model.{name.removeprefix(TEXT_PREFIX)}" if name.startswith(TEXT_PREFIX) else name
