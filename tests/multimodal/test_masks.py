"""Ranges of keys, the spans that follow from them, and FastDeploy's names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv1 import RequestError
from mrv1.multimodal import (
    MultimodalItem,
    causal_ranges,
    from_fastdeploy,
    visible_ranges,
    whole_spans,
)
from mrv1.multimodal.fastdeploy import _NAMES
from tests.multimodal.odd_values import Unreadable, odd_values


def item(start: int, size: int, **fields: object) -> MultimodalItem:
    return MultimodalItem(features=torch.ones(size, 2), start=start, **fields)


@given(ends=st.lists(st.integers(1, 6), min_size=1, max_size=14))
def test_a_span_is_cut_exactly_where_no_token_sees_a_later_one(ends):
    num_tokens = len(ends)
    ranges = causal_ranges(0, num_tokens)
    ranges[:, 1] = [min(token + end, num_tokens) for token, end in enumerate(ends)]
    allowed = [
        cut
        for cut in range(num_tokens + 1)
        if all(high <= cut for high in ranges[:cut, 1].tolist())
    ]
    spans = whole_spans(ranges)
    inside = {cut for start, end in spans for cut in range(start + 1, end)}
    assert inside == set(range(num_tokens + 1)) - set(allowed)
    assert all(start in allowed and end in allowed for start, end in spans)


def test_a_bidirectional_item_sees_itself_and_what_is_before_it():
    items = [item(1, 2, bidirectional=True), item(3, 2), item(5, 2, bidirectional=True)]
    ranges = visible_ranges(items, None, 8)
    assert ranges is not None
    assert ranges.tolist() == [
        [0, 1], [0, 3], [0, 3], [0, 4], [0, 5], [0, 7], [0, 7], [0, 8],
    ]  # fmt: skip
    assert whole_spans(ranges) == ((1, 3), (5, 7))
    assert visible_ranges(items[1:2], None, 8) is None
    assert visible_ranges([], causal_ranges(0, 8).tolist(), 8) is None, "causal after all"


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([[0, 1]], r"expected integers \[3, 2\], a range .* for each prompt token, got int"),
        ([[0.0, 1.0]] * 3, r"expected integers \[3, 2\]"),
        (
            np.ma.masked_array([[0, 1], [0, 2], [0, 3]], mask=[[0, 0], [0, 1], [0, 0]]),
            r"expected an array without a mask, got a masked array",
        ),
        ([[0, 1], [0, 2], [0]], r"expected pairs \[lo, hi\)"),
        ("abc", r"expected integers \[3, 2\]"),
        ([[0, 1], [2, 2], [0, 3]], r"expected 0 <= lo < hi <= 3, got \[2, 2\) for token 1"),
        ([[0, 1], [0, 2], [0, 4]], r"expected 0 <= lo < hi <= 3, got \[0, 4\) for token 2"),
        (torch.tensor([[-1, 1], [0, 2], [0, 3]]), r"got \[-1, 1\) for token 0"),
        (torch.ones(3, 2).bfloat16(), r"expected integers \[3, 2\], .* got float32 \[3, 2\]"),
        (torch.ones(3, 2, requires_grad=True), r"expected integers \[3, 2\]"),
        (torch.ones(3, 2, dtype=torch.int, device="meta"), r"a dense tensor .*, got one on meta"),
        (torch.ones(3, 2, dtype=torch.int).to_sparse(), r"a dense tensor .*, got torch.sparse"),
        (Unreadable(), r"expected pairs \[lo, hi\), got OSError"),
    ],
)
def test_wrong_ranges_are_named(ranges, message):
    with pytest.raises(RequestError, match=f"attn_mask_offsets: .*{message}"):
        visible_ranges([], ranges, 3)


@given(ranges=odd_values())
def test_ranges_of_any_kind_are_taken_or_refused(ranges):
    try:
        taken = visible_ranges([], ranges, 4)
    except RequestError as error:
        assert str(error).startswith("attn_mask_offsets: ")  # noqa: PT017 - whichever it is
    else:
        assert taken is None or (taken.dtype, taken.shape) == (np.int32, (4, 2))


@given(inputs=st.dictionaries(st.sampled_from(_NAMES), odd_values(), max_size=2))
def test_fastdeploys_names_with_any_value_are_taken_or_refused(inputs):
    try:
        prompt = from_fastdeploy(PROMPT, inputs, **IDS)
    except RequestError:
        return
    assert {*prompt} <= {"prompt_token_ids", "multimodal", "attn_mask_offsets"}


def test_ranges_do_not_come_with_a_bidirectional_item():
    with pytest.raises(RequestError, match=r"expected None with a bidirectional item \(image at"):
        visible_ranges([item(0, 2, bidirectional=True)], [[0, 1], [0, 2]], 2)


# --- FastDeploy's names --------------------------------------------------------------------------

PROMPT = [1, 7, 7, 2, 7, 8, 8, 8, 3]
TWO, ONE, THREE = torch.zeros(2, 4), torch.zeros(1, 4), torch.ones(3, 4)
IDS = {"image_token_id": 7, "video_token_id": 8}


def test_fastdeploys_names_become_items_and_ranges(tmp_path):
    np.save(tmp_path / "two 2.npy", TWO.numpy())
    grids = {"image_grid_thws": np.array([[1, 2, 4], [1, 2, 2]]), "video_grid_thws": [(3, 2, 2)]}
    masks = {
        "attention_mask_offset": [0, 2, 2, 3, 4, 7, 7, 7, 8], "decode_states": [0, 0],
        "generated_modality": 0, "video_infinity_scales": None,
    }  # fmt: skip
    url = (tmp_path / "two 2.npy").as_uri()
    assert "two%202.npy" in url
    np.save(tmp_path / "one.npy", ONE.numpy())
    for images in (
        {"image_features": [TWO, ONE]},
        {"image_feature_urls": [url, str(tmp_path / "one.npy")]},
    ):
        inputs = {**images, "video_features": [THREE], **grids, **masks}
        prompt = from_fastdeploy(PROMPT, inputs, **IDS)
        made = [
            (each.modality, each.start, each.num_tokens, each.grid_thw)
            for each in prompt["multimodal"]
        ]
        assert made == [
            ("image", 1, 2, (1, 2, 4)), ("image", 4, 1, (1, 2, 2)), ("video", 5, 3, (3, 2, 2)),
        ]  # fmt: skip
        ranges = visible_ranges([], prompt["attn_mask_offsets"], len(PROMPT))
        assert ranges is not None
        assert ranges[:, 1].tolist() == [1, 3, 3, 4, 5, 8, 8, 8, 9]
    assert from_fastdeploy([1, 2], {"image_features": None}) == {
        "prompt_token_ids": [1, 2], "multimodal": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"image_feature": [TWO]}, r"expected names of .*, got \['image_feature'\]"),
        ({"generated_modality": 1}, "generated_modality: expected None, because the output"),
        ({"video_infinity_scales": [0.5]}, "video_infinity_scales: expected None, because"),
        ({"decode_states": [0, 2]}, "decode_states: expected 0 for every token"),
        (
            {"image_features": [TWO], "image_feature_urls": ["a.npy"]},
            "image_features: expected None with image_feature_urls",
        ),
        ({"image_feature_urls": ["https://x/a.npy"]}, "expected a local file, got 'https"),
        ({"image_feature_urls": "a.npy"}, "image_feature_urls: expected a list, got str"),
        ({"image_feature_urls": [5]}, "image_feature_urls: expected a string, got int"),
        (
            {"image_features": [TWO, ONE], "image_grid_thws": [(1, 2, 2)]},
            "image_grid_thws: expected one for each of 2 images, got 1",
        ),
        (
            {"image_features": [TWO], "image_grid_thws": [(1, 2, 2)] * 2},
            "image_grid_thws: expected one for each of 1 images, got 2",
        ),
        ({"image_grid_thws": [(1, 2, 2)]}, "expected one for each of 0 images, got 1"),
        ({"image_features": [TWO]}, "image_features: expected rows for 3 placeholders 7, got 2"),
        ({"image_features": [ONE, TWO]}, "expected as many rows as .* placeholders 7, got 2"),
        ({"image_features": [TWO, ONE, ONE]}, "expected as many rows as .* placeholders 7, got 1"),
        ({"video_features": [TWO, TWO]}, "expected as many rows as .* placeholders 8, got 2"),
        ({"attention_mask_offset": [0, 1]}, "attention_mask_offset: expected 9 integers"),
    ],
)
def test_what_means_nothing_or_does_not_fit_is_refused_by_name(inputs, message):
    with pytest.raises(RequestError, match=message):
        from_fastdeploy(PROMPT, inputs, **IDS)


def test_placeholders_need_their_ids():
    with pytest.raises(
        RequestError, match="image_token_id: expected the placeholder's id, got No"
    ):
        from_fastdeploy(PROMPT, {"image_features": [TWO]}, video_token_id=8)
    inputs = {"image_features": [TWO], "video_features": [ONE]}
    with pytest.raises(RequestError, match="video_token_id: expected another token than image_to"):
        from_fastdeploy(PROMPT, inputs, image_token_id=7, video_token_id=7)
