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
TEXT_PREFIXES = (TEXT_PREFIX, "language_model.model.")
"""Such beginnings; the second is of a text model that was a model with a head of its own."""
_HEAD_PREFIX = "language_model.lm_head."
VISION_PREFIXES = ("model.visual.", "visual.")
"""Beginnings of the names of the vision encoder's tensors."""
_OUTSIDE = (
    *VISION_PREFIXES, "model.vision_model.", "model.vision_tower.", "model.resampler_model.",
    "model.multi_modal_projector.", "vision_model.", "vision_tower.", "multi_modal_projector.",
)  # fmt: skip
"""Beginnings of the names of tensors that are not of the text model."""


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
    temporal_merge_size: int = 1
    """Frames of a video that one feature stands for, but for those that are patches already."""
    expert_token_ids: tuple[int, ...] = ()
    """Tokens of a prompt that have experts for images and videos; () = the model has none."""
    has_encoder: bool = True
    """Whether ``VisionEncoder`` has the encoder."""


def vision_config(
    hf: Any,  # noqa: ANN401
    video_time: VideoTime,
    *,
    has_encoder: bool,
    has_experts: bool,
) -> VisionConfig:
    """Return a configuration's settings; ConfigError: features for more layers than there are.

    ``has_experts``: whether tokens of images and videos have experts of their own.
    """
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
        temporal_merge_size=getattr(vision, "temporal_merge_size", 1),
        expert_token_ids=tuple(getattr(hf, name) for name in _EXPERT_TOKENS if has_experts),
        has_encoder=has_encoder,
    )


_EXPERT_TOKENS = (
    "image_token_id", "image_start_token_id", "image_end_token_id",
    "video_token_id", "video_start_token_id", "video_end_token_id",
)  # fmt: skip


def text_name(name: str) -> str | None:
    """Return a stored tensor's name in the text model alone; None for the vision encoder's."""
    if name.startswith(_OUTSIDE):
        return None
    for prefix in TEXT_PREFIXES:
        if name.startswith(prefix):
            return f"model.{name.removeprefix(prefix)}"
    return f"lm_head.{name.removeprefix(_HEAD_PREFIX)}" if name.startswith(_HEAD_PREFIX) else name
