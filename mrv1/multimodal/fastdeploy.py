"""FastDeploy's names of multimodal inputs, turned into a prompt of mrv1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from mrv1.errors import RequestError
from mrv1.multimodal.item import Modality, MultimodalItem
from mrv1.multimodal.reading import local_path, reading

_WITHOUT_MEANING = {
    "generated_modality": "the output is text; leave it out",
    "video_infinity_scales": "it belongs to the generation of video; leave it out",
}
"""Names that are refused if they have a value, and why."""

_NAMES = (
    "image_features",
    "image_feature_urls",
    "image_grid_thws",
    "video_features",
    "video_grid_thws",
    "attention_mask_offset",
    "decode_states",
    *_WITHOUT_MEANING,
)


@reading("from_fastdeploy", "values that can be read")
def from_fastdeploy(
    prompt_token_ids: Sequence[int],
    inputs: Mapping[str, object],
    *,
    image_token_id: int | None = None,
    video_token_id: int | None = None,
) -> dict[str, Any]:
    """Return FastDeploy's multimodal inputs of a request as a prompt for ``LLM`` and its methods.

    ==========================  =================================================================
    name                        becomes
    ==========================  =================================================================
    ``image_features``          one item for each entry: ``[n, hidden]`` tensors or arrays
    ``image_feature_urls``      the same from files: a path or a ``file://`` URL of a .npy or
                                .safetensors file; not together with ``image_features``
    ``image_grid_thws``         ``grid_thw`` of each image
    ``video_features``          one item of modality video for each entry
    ``video_grid_thws``         ``grid_thw`` of each video
    ``attention_mask_offset``   ``attn_mask_offsets``: for each prompt token the last position
                                that it sees, its own if it is causal
    ``decode_states``           nothing if all are 0 (generated text is causal); refused otherwise
    ``generated_modality``      refused unless it is None or 0, which is text
    ``video_infinity_scales``   refused unless it is None or empty
    ==========================  =================================================================

    Args:
        prompt_token_ids: the prompt, with a placeholder token for each row of features.
        inputs: FastDeploy's names; a name whose value is None counts as absent.
        image_token_id: the placeholder of images. The k-th image stands where the first
            placeholders that no earlier image has are.
        video_token_id: the placeholder of videos; it may be the one of images only if the request
            has no image.

    Returns:
        A dict with ``prompt_token_ids``, ``multimodal``, and ``attn_mask_offsets`` if given.

    Raises:
        RequestError: a name is unknown or has no meaning here, counts differ, or an item is wrong.
    """
    given = {name: value for name, value in inputs.items() if value is not None}
    unknown = sorted(given.keys() - set(_NAMES))
    if unknown:
        raise RequestError(f"from_fastdeploy: expected names of {_NAMES}, got {unknown}")
    for name, why in _WITHOUT_MEANING.items():
        if name in given and np.any(_values(given[name])):
            raise RequestError(f"{name}: expected None, because {why}; got {given[name]!r}")
    if "decode_states" in given and np.any(_values(given["decode_states"])):
        raise RequestError(
            "decode_states: expected 0 for every token, because generated tokens are causal, got "
            f"{given['decode_states']!r}"
        )
    if "image_features" in given and "image_feature_urls" in given:
        raise RequestError("image_features: expected None with image_feature_urls, got both")
    images = _list("image_features", given.get("image_features"))
    images += [_path(url) for url in _list("image_feature_urls", given.get("image_feature_urls"))]
    videos = _list("video_features", given.get("video_features"))
    if images and videos and image_token_id == video_token_id:
        raise RequestError(
            f"video_token_id: expected another token than image_token_id, got {video_token_id}"
        )
    items = []
    for modality, features, token_id in (
        ("image", images, image_token_id),
        ("video", videos, video_token_id),
    ):
        name = f"{modality}_grid_thws"
        grids = _list(name, given.get(name)) if name in given else [None] * len(features)
        if len(grids) != len(features):
            raise RequestError(
                f"{name}: expected one for each of {len(features)} {modality}s, got {len(grids)}"
            )
        items += _placed(prompt_token_ids, cast("Modality", modality), features, grids, token_id)
    prompt: dict[str, Any] = {"prompt_token_ids": prompt_token_ids, "multimodal": items}
    if "attention_mask_offset" in given:
        last = _values(given["attention_mask_offset"])
        if last.dtype.kind not in "iu" or last.shape != (len(prompt_token_ids),):
            raise RequestError(
                f"attention_mask_offset: expected {len(prompt_token_ids)} integers, one for each "
                f"prompt token, got {last.dtype} {list(last.shape)}"
            )
        prompt["attn_mask_offsets"] = np.stack([np.zeros_like(last), last + 1], axis=1)
    return prompt


def _placed(
    prompt_token_ids: Sequence[int],
    modality: Modality,
    features: Sequence[Any],
    grids: Sequence[Any],
    token_id: int | None,
) -> list[MultimodalItem]:
    """Return an item for each entry of ``features``, each at the next placeholders."""
    if features and token_id is None:
        raise RequestError(f"{modality}_token_id: expected the placeholder's id, got None")
    places = [index for index, token in enumerate(prompt_token_ids) if token == token_id]
    items, first = [], 0
    for each, grid in zip(features, grids, strict=True):
        start = places[first] if first < len(places) else len(prompt_token_ids)
        item = MultimodalItem(features=each, start=start, modality=modality, grid_thw=grid)
        first += item.num_tokens
        if places[first - item.num_tokens : first] != [*range(item.start, item.end)]:
            expected = f"as many rows as there are consecutive placeholders {token_id}"
            raise item.error("features", expected, item.num_tokens)
        items.append(item)
    if features and first < len(places):
        raise RequestError(
            f"{modality}_features: expected rows for {len(places)} placeholders {token_id}, "
            f"got {first}"
        )
    return items


def _values(given: object) -> np.ndarray[Any, np.dtype[Any]]:
    return given.cpu().numpy() if isinstance(given, torch.Tensor) else np.asarray(given)


def _list(name: str, given: object) -> list[Any]:
    if given is None:
        return []
    if isinstance(given, str) or not isinstance(given, Sequence | np.ndarray | torch.Tensor):
        raise RequestError(f"{name}: expected a list, got {type(given).__name__}")
    return list(given)


def _path(url: object) -> str:
    """Return the path of a local file."""
    if not isinstance(url, str):
        raise RequestError(f"image_feature_urls: expected a string, got {type(url).__name__}")
    path = local_path(url)
    if "://" in path:
        raise RequestError(f"image_feature_urls: expected a local file, got {url!r}")
    return path
