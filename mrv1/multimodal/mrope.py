"""M-RoPE: the positions of tokens in time, height and width, from the grids of a prompt's items.

A text token's three positions are equal and one more than the largest side of the grid, or the
text, before it. An item's tokens lie in a grid of frames, rows and columns, counted from the
position of a text token in the place of the first. Output tokens count on from the largest
position of the prompt. Positions are stored per item (``MROPE_SPAN_WORDS``), not per token.

Source: Wang et al., "Qwen2-VL" (2024), section 2.1; ``get_rope_index`` of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mrv1.kernels.step.contracts import MROPE_SPAN_WORDS
from mrv1.models.vision import VisionConfig
from mrv1.multimodal.item import MultimodalItem

MAX_POSITIONS = 2**30  # of one item: over any model's context, and sums fit int32


@dataclass(frozen=True, slots=True, kw_only=True)
class MRopePositions:
    """The positions of one request's tokens."""

    spans: npt.NDArray[np.int32]  # ``[spans, MROPE_SPAN_WORDS]``
    delta: int  # added to an output token's place in the request; the sum is its position
    num_positions: int  # one more than the largest position of the prompt


def mrope_positions(
    items: Sequence[MultimodalItem], num_prompt_tokens: int, vision: VisionConfig
) -> MRopePositions:
    """Return the positions of a request, whose items are in the order of its prompt.

    RequestError: an item's grid is missing or does not fit, or it has no place in M-RoPE.
    """
    spans: list[tuple[int, ...]] = []
    delta = num_positions = 0
    for item in items:
        frames, rows, columns = _merged_grid(item, vision)
        first = item.start + delta
        time_scale = _time_scale(item, vision)
        last_frame = int(np.float32(frames - 1) * time_scale)
        # The text before the item ends at first - 1.
        num_positions = max(num_positions, first + max(last_frame, rows - 1, columns - 1) + 1)
        delta = first + max(rows, columns) - item.end
        bits = int(time_scale.view(np.int32))
        spans.append((item.start, item.end, first, delta, columns, rows * columns, bits))
    if not items or items[-1].end < num_prompt_tokens:
        num_positions = max(num_positions, num_prompt_tokens + delta)
    output_delta = num_positions - num_prompt_tokens
    if output_delta != delta:  # an item's frames lie beyond the text after it
        spans.append((num_prompt_tokens, num_prompt_tokens, 0, output_delta, 1, 1, 0))
    return MRopePositions(
        spans=np.array(spans, dtype=np.int32).reshape(-1, MROPE_SPAN_WORDS),
        delta=output_delta,
        num_positions=num_positions,
    )


def _merged_grid(item: MultimodalItem, vision: VisionConfig) -> tuple[int, int, int]:
    """Return an item's features in time, height and width."""
    merge, grid = vision.spatial_merge_size, item.grid_thw
    if item.modality not in ("image", "video"):
        raise item.error("modality", "'image' or 'video' for this model", repr(item.modality))
    if grid is None:
        raise item.error("grid_thw", "the patches in time, height and width", "None")
    frames, height, width = grid
    per_feature = vision.temporal_merge_size if item.modality == "video" else 1
    if frames % per_feature:
        expected = f"frames that are a multiple of {per_feature} (temporal_merge_size)"
        raise item.error("grid_thw", expected, grid)
    frames //= per_feature
    if height % merge or width % merge:
        expected = f"height and width that are multiples of {merge} (spatial_merge_size)"
        raise item.error("grid_thw", expected, grid)
    if vision.video_time == "text" and frames > 1:
        raise item.error("grid_thw", "an item for each frame, of one step in time", grid)
    count = frames * (height // merge) * (width // merge)
    if count != item.num_tokens:
        raise item.error("grid_thw", f"a grid of {item.num_tokens} features", f"{grid}: {count}")
    return frames, height // merge, width // merge


def _time_scale(item: MultimodalItem, vision: VisionConfig) -> np.float32:
    """Return the positions from one frame to the next; the product with a frame is cut off."""
    seconds = item.second_per_grid
    if vision.video_time == "seconds" and item.modality == "video":
        scale = vision.tokens_per_second * (1.0 if seconds is None else seconds)
        if scale * item.num_tokens > MAX_POSITIONS:
            expected = f"at most {MAX_POSITIONS} positions of a video"
            raise item.error("second_per_grid", expected, seconds)
        return np.float32(scale)
    if seconds is not None:
        raise item.error("second_per_grid", "None for this model", seconds)
    return np.float32(1.0)
