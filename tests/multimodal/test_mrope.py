"""Positions of images and videos in prompts, against transformers' own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from transformers import AutoModelForImageTextToText

from mrv1.errors import RequestError
from mrv1.kernels import reference
from mrv1.kernels.step.contracts import GatheredTokens, RequestSlots, SlotTables
from mrv1.models import ModelConfig
from mrv1.models.vision import VisionConfig
from mrv1.multimodal import MultimodalItem
from mrv1.multimodal.mrope import MRopePositions, mrope_positions
from tests.models.vision_families import FEATURE_FAMILIES, tiny_vision_config

MERGE = 2


@dataclass
class Family:
    """transformers' rule, on weights that hold no data, and our settings of the same model."""

    name: str
    model: Any
    vision: VisionConfig


@pytest.fixture(scope="module")
def families() -> dict[str, Family]:
    made = {}
    for name in FEATURE_FAMILIES:
        config = tiny_vision_config(name)
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config).model
        vision = ModelConfig.from_hf(config).vision
        assert vision is not None
        made[name] = Family(name, model, vision)
    return made


@dataclass
class Visual:
    """An image or a video: its grid of features, the text before it, and its pace."""

    text_before: int
    frames: int
    rows: int
    columns: int
    is_video: bool
    seconds: float | None

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.frames if self.is_video else 1, MERGE * self.rows, MERGE * self.columns


# transformers before 5.18 rounds fractions down.
FRACTIONS = [0.1, 1 / 3, 2.7] if Version(transformers.__version__) >= Version("5.18") else []
VISUALS = st.builds(
    Visual,
    text_before=st.integers(1, 5),  # transformers joins an image to the one right before it
    frames=st.integers(1, 9),
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    is_video=st.booleans(),
    seconds=st.sampled_from([None, 1.0, 41.0, *FRACTIONS]),
)


def _theirs(
    family: Family, visuals: list[Visual], text_after: int
) -> tuple[list[MultimodalItem], torch.Tensor, int]:
    """Return the items of a prompt, its positions ``[3, tokens]`` and the output's delta."""
    types: list[int] = []
    items = []
    grids: dict[int, list[tuple[int, int, int]]] = {1: [], 2: []}
    for visual in visuals:
        count = visual.rows * visual.columns
        kind = 2 if visual.is_video else 1
        per_feature = 2 if family.name.startswith("ernie") and visual.is_video else 1
        whole = (per_feature * visual.grid[0], *visual.grid[1:])
        grids[kind].append(whole)
        apart = family.name.startswith("qwen3_vl") and visual.is_video
        for grid in [(1, *visual.grid[1:])] * visual.grid[0] if apart else [whole]:
            types += [0] * visual.text_before
            seconds = visual.seconds if visual.is_video else None
            items.append(
                MultimodalItem(
                    features=np.zeros((grid[0] // per_feature * count, 1), np.float32),
                    start=len(types),
                    modality="video" if visual.is_video else "image",
                    grid_thw=grid,
                    second_per_grid=seconds if family.name == "qwen2_5_vl" else None,
                    cache_key="any",
                )
            )
            types += [kind] * (grid[0] // per_feature * count)
    types += [0] * text_after
    options = {}
    if family.name == "qwen2_5_vl":
        videos = [visual for visual in visuals if visual.is_video]
        options["second_per_grid_ts"] = [v.seconds or 1 for v in videos]
    positions, delta = family.model.get_rope_index(
        torch.zeros(1, len(types), dtype=torch.int64),
        torch.tensor([types]),
        torch.tensor(grids[1]) if grids[1] else None,
        torch.tensor(grids[2]) if grids[2] else None,
        **options,
    )
    return items, positions[:, 0], int(delta)


def _gathered(positions: MRopePositions, first: int, num_tokens: int) -> torch.Tensor:
    """Return the positions of a request's tokens from ``first`` on, as a step computes them."""

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    spans = torch.from_numpy(positions.spans)
    num_spans = len(spans)
    spans = torch.nn.functional.pad(spans, (0, 0, 0, 3), value=-7)[None]  # 3 of an earlier request
    total = first + num_tokens
    out = GatheredTokens(
        input_ids=torch.empty(num_tokens, dtype=torch.int64),
        positions=torch.empty(3, num_tokens, dtype=torch.int64),
        seq_lens=int32(0),
        slot_mapping=torch.empty(1, num_tokens, dtype=torch.int64),
        logits_rows=torch.empty(1, dtype=torch.int64),
    )
    slots = RequestSlots(
        token_ids=torch.zeros(1, total, dtype=torch.int32),
        num_tokens=int32(total),
        num_computed_tokens=int32(first),
        stopped=int32(0),
        prompt_len=int32(0),
        max_total_tokens=int32(0),
        min_total_tokens=int32(0),
        stop_token_ids=int32(0)[None],
        mrope_spans=spans,
        num_mrope_spans=int32(num_spans),
    )
    tables = SlotTables(
        block_tables=torch.zeros(1, total, dtype=torch.int32),
        table_offset=int32(0),
        sink=int32(0),
        ring_blocks=int32(0),
        block_size=16,
    )
    reference.gather_tokens(int32(0), None, slots, tables, out, query_len=num_tokens)
    return out.positions


@pytest.mark.parametrize("name", FEATURE_FAMILIES)
@given(visuals=st.lists(VISUALS, max_size=4), text_after=st.integers(0, 4), data=st.data())
def test_positions_equal_transformers(families, name, visuals, text_after, data):
    """Of every token of the prompt and of 5 output tokens, from any chunk's first token on."""
    family = families[name]
    if not visuals:
        text_after += 1
    items, theirs, delta = _theirs(family, visuals, text_after)
    num_tokens = theirs.shape[1]
    positions = mrope_positions(items, num_tokens, family.vision)
    assert positions.delta == delta
    assert positions.num_positions == int(theirs.max()) + 1
    output = torch.arange(num_tokens, num_tokens + 5).expand(3, -1) + delta
    first = data.draw(st.integers(0, num_tokens - 1))
    got = _gathered(positions, first, num_tokens + 5 - first)
    assert got.tolist() == torch.cat([theirs, output], dim=1)[:, first:].tolist()


def test_text_alone_needs_no_spans():
    vision = VisionConfig(
        image_token_id=1, video_token_id=2, spatial_merge_size=2, video_time="frames"
    )
    positions = mrope_positions([], 9, vision)
    assert positions.spans.shape == (0, 7)
    assert (positions.delta, positions.num_positions) == (0, 9)


def test_positions_of_an_earlier_item_may_be_the_largest():
    """3 frames of 50 seconds, 3 positions each second, then an image: its positions are small."""
    vision = VisionConfig(
        image_token_id=1, video_token_id=2, spatial_merge_size=MERGE, video_time="seconds",
        tokens_per_second=3.0,
    )  # fmt: skip
    video = _item(
        features=np.zeros((3, 4), np.float32), start=1, modality="video", grid_thw=(3, 2, 2),
        second_per_grid=50.0,
    )  # fmt: skip
    image = _item(features=np.zeros((1, 4), np.float32), start=5, grid_thw=(1, 2, 2))
    for num_tokens in (6, 9):
        positions = mrope_positions([video, image], num_tokens, vision)
        last = 1 + 2 * 150  # of the video, which starts at 1
        assert positions.num_positions == last + 1
        assert positions.delta == last + 1 - num_tokens, "the output counts on from it"


def _item(**fields: Any) -> MultimodalItem:
    defaults = {"features": np.zeros((6, 4), np.float32), "start": 3, "grid_thw": (1, 4, 6)}
    return MultimodalItem(**(defaults | fields))


@pytest.mark.parametrize(
    ("fields", "video_time", "message"),
    [
        (
            {"modality": "audio", "grid_thw": None},
            "frames",
            r"\(audio at token 3\): modality: expected 'image' or 'video' for this model, got",
        ),
        ({"grid_thw": None}, "frames", r"\(image at token 3\): grid_thw: expected .*, got None"),
        ({"grid_thw": (1, 4, 4)}, "frames", r"grid_thw: expected a grid of 6 features, got .*: 4"),
        ({"grid_thw": (1, 3, 8)}, "frames", r"grid_thw: expected .* multiples of 2 \(spatial"),
        ({"grid_thw": (2, 2, 6), "modality": "video"}, "text", r"expected an item for each frame"),
        (
            {"second_per_grid": 2.0, "modality": "video"},
            "frames",
            "second_per_grid: expected None for this model, got 2.0",
        ),
    ],
)
def test_an_item_without_a_place_is_named(fields, video_time, message):
    vision = VisionConfig(
        image_token_id=1, video_token_id=2, spatial_merge_size=2, video_time=video_time
    )
    with pytest.raises(RequestError, match=message):
        mrope_positions([_item(**fields)], 20, vision)
