"""One image, video or piece of audio of a request: its features and their place in the prompt."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, cast

import numpy as np
import numpy.typing as npt
import torch

from mrv1.environment import INT32_MAX
from mrv1.errors import RequestError, short
from mrv1.multimodal.reading import ERROR_LEN, check_unmasked, plain_tensor, reading
from mrv1.options import Range, check_fields, integers, numbers

Modality = Literal["image", "video", "audio"]
FeatureSource = torch.Tensor | npt.NDArray[np.floating] | str | Path
"""A tensor on any device, an array, or the name of a .npy or .safetensors file."""

FEATURE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that features may have; of 8-bit numbers the scale would be missing."""
DIGEST_BYTES = 16  # 128 bits, as the digests of the prefix cache


def _plain(value: object) -> object:
    """Return texts and numbers as Python's own; a text that cannot be encoded raises."""
    if isinstance(value, torch.Tensor | np.ndarray):  # of a grid
        value = value.tolist()
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, str):
        value.encode()
        return str(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value) if isinstance(value, int) else float(value)
    return value


def _is_grid(value: object) -> bool:
    sizes = integers(1, INT32_MAX)
    return isinstance(value, tuple) and len(value) == 3 and all(map(sizes.holds, value))


_GRIDS = Range("three integers >= 1", _is_grid)
_SECONDS = numbers(0, math.inf, "a number of seconds > 0", above=True)
_KEYS = Range("a string or bytes", lambda value: isinstance(value, str | bytes))
_OTHER_FIELDS = ("grid_thw", "second_per_grid", "bidirectional", "cache_key")


@dataclass(frozen=True, kw_only=True, eq=False)
class MultimodalItem:
    """The features of an image, a video or a piece of audio, which some prompt tokens stand for.

    Each row of features replaces the embedding of a placeholder token; everything else about the
    token stays. An item shares the memory of a tensor or a writable array; a request copies it
    when it is added. If it is on a GPU, making the item waits for that GPU once.

    Raises:
        RequestError: a field is not as described; the message names the item's modality and start.
    """

    features: torch.Tensor | FeatureSource | Sequence[FeatureSource]
    """``[n, hidden]`` in float16, bfloat16, float32 or float64, or a list of parts that follow
    each other, such as the frames of a video. A tensor once the item is made."""
    start: Annotated[int, integers(0), integers(0, INT32_MAX, expected=f"at most {INT32_MAX}")]
    """Position in the prompt of the first of the n placeholder tokens."""
    modality: Modality = "image"
    grid_thw: Annotated[tuple[int, int, int] | None, _GRIDS] = None
    """Patches in time, height and width, before the encoder merges any; models with M-RoPE need
    it for images and video."""
    second_per_grid: Annotated[float | None, _SECONDS] = None
    """Seconds of a video that one step of the grid in time covers; None = the model's default."""
    bidirectional: bool = False
    """Whether the item's tokens see each other in both directions; else each token sees only
    earlier tokens. The item is then computed within one step."""
    cache_key: Annotated[str | bytes | None, _KEYS] = None
    """Names the content, such as the digest of the image file: items with equal keys and equal
    other fields must have equal features. None = a digest of the features, for each request
    anew."""
    num_tokens: int = field(init=False, repr=False)
    """Rows of features, and placeholder tokens."""

    def __post_init__(self) -> None:
        """Check every field and make its value a plain one; load and join the features."""
        for name in ("start", "modality", *_OTHER_FIELDS, "features"):
            argument = self._argument(name)
            with reading(argument, "a value that can be read"):
                value = getattr(self, name)
                value = self._joined(value) if name == "features" else _plain(value)
                if name == "second_per_grid" and type(value) is int:
                    value = float(value)
                object.__setattr__(self, name, value)
                check_fields(self, RequestError, argument.removesuffix(name), only=name)
        if self.modality == "audio" and self.grid_thw is not None:
            raise self.error("grid_thw", "None for audio", short(self.grid_thw))
        if self.modality != "video" and self.second_per_grid is not None:
            expected = f"None for {self.modality}"
            raise self.error("second_per_grid", expected, short(self.second_per_grid))
        object.__setattr__(self, "num_tokens", len(self.tensor))

    @property
    def tensor(self) -> torch.Tensor:
        """``features``, ``[n, hidden]``, as a tensor."""
        return cast("torch.Tensor", self.features)

    @property
    def end(self) -> int:
        """Position in the prompt after the last placeholder token."""
        return self.start + self.num_tokens

    @property
    def name(self) -> str:
        """The item in an error message."""
        return f"{self.modality} at token {self.start}"

    @cached_property
    def content_hash(self) -> bytes:
        """Lazy digest of all that keys and values depend on, except the place in the prompt.

        Without ``cache_key`` it reads all features, and waits for their GPU.
        """
        fields = (self.modality, self.grid_thw, self.second_per_grid, self.bidirectional)
        tensor = self.tensor
        digest = blake2b(repr((*fields, *tensor.shape)).encode(), digest_size=DIGEST_BYTES)
        if self.cache_key is None:
            digest.update(str(tensor.dtype).encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        else:
            key = self.cache_key
            digest.update(b"key" + (key.encode() if isinstance(key, str) else key))
        return digest.digest()

    def with_own_features(self) -> MultimodalItem:
        """Return a copy of the item, which no change of the caller's tensor or array changes."""
        own = self._with(self.tensor.clone())
        vars(own).pop("content_hash", None)  # of the features as they were at some time before
        return own

    def _with(self, features: torch.Tensor) -> MultimodalItem:
        other = copy.copy(self)
        object.__setattr__(other, "features", features)
        return other

    def on_host(self) -> MultimodalItem:
        """Return the item with features on the CPU and the same hash; itself if they are there.

        Waits for the GPU of features.
        """
        if self.tensor.device.type == "cpu":
            return self
        _ = self.content_hash
        return self._with(self.tensor.cpu())

    def without_features(self) -> MultimodalItem:
        """Return a copy of the item for a process that needs its place and its hash alone."""
        _ = self.content_hash
        # Without memory: a view's pickle would share all of the item's with the other process.
        return self._with(torch.empty(0, self.tensor.shape[1], dtype=self.tensor.dtype))

    def prepared(
        self, hidden_size: int, dtype: torch.dtype, *, pin_memory: bool
    ) -> MultimodalItem:
        """Return the item with features for a model and the same hash; itself if it fits.

        ``pin_memory`` pins features on the CPU. RequestError: the hidden size differs, or a value
        is too large for ``dtype``.
        """
        tensor = self.tensor
        if tensor.shape[1] != hidden_size:
            raise self.error(
                "features", f"[n, {hidden_size}], the model's hidden size", list(tensor.shape)
            )
        if tensor.dtype != dtype:
            tensor = tensor.to(dtype)
            if not torch.isfinite(tensor).all():
                raise self.error("features", f"values that fit {dtype}", "larger values")
        if pin_memory and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        tensor = tensor.contiguous()
        _ = self.content_hash  # of the features as they were given
        return self if tensor is self.features else self._with(tensor)

    def _joined(self, source: object) -> torch.Tensor:
        """Return the features as one tensor ``[n, hidden]``."""
        if not isinstance(source, Sequence) or isinstance(source, str):
            return self._loaded(source)
        parts = [self._loaded(part) for part in source]
        if not parts:
            raise self.error("features", "at least one tensor", "an empty list")
        kinds = {(part.shape[1], part.dtype, part.device) for part in parts}
        if len(kinds) > 1:
            raise self.error(
                "features",
                "parts of one hidden size, dtype and device",
                sorted(f"{size} {dtype} {device}" for size, dtype, device in kinds),
            )
        return torch.cat(parts)

    def _loaded(self, source: object) -> torch.Tensor:
        """Return one part of the features as a checked tensor."""
        if isinstance(source, str | Path):
            source = self._read(Path(source))
        if isinstance(source, np.ndarray):
            check_unmasked(self._argument("features"), source)
            array = source if source.flags.writeable else source.copy()  # torch warns of read-only
            try:
                source = torch.from_numpy(array)
            except (TypeError, ValueError) as error:
                got = f"{array.dtype} ({short(error, ERROR_LEN)})"
                raise self.error("features", "an array of floats", got) from error
        if not isinstance(source, torch.Tensor):
            raise self.error(
                "features",
                "a tensor, an array, a file name or a list of these",
                type(source).__name__,
            )
        source = plain_tensor(self._argument("features"), source)
        if source.dtype not in FEATURE_DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FEATURE_DTYPES)
            raise self.error("features", f"one of {names}", source.dtype)
        if source.ndim != 2 or 0 in source.shape:
            raise self.error("features", "shape [n, hidden], both >= 1", list(source.shape))
        finite = torch.isfinite(source).all(dim=1)
        if not finite.all():
            row = int((~finite).nonzero()[0, 0])
            raise self.error("features", "finite values", f"NaN or infinity in row {row}")
        return source

    def _read(self, path: Path) -> object:
        """Return the array or tensor of a file."""
        if path.suffix not in (".npy", ".safetensors"):
            raise self.error("features", "a .npy or .safetensors file", str(path))
        try:
            path = path.expanduser()
            if path.suffix == ".npy":
                return np.load(path, allow_pickle=False)
            from safetensors.torch import load_file  # only here: not every request has files

            tensors = load_file(path)
        except Exception as error:  # no such user, file or array, and safetensors' own class
            raise self.error("features", f"a readable file {str(path)!r}", error) from error
        if len(tensors) != 1:
            raise self.error("features", f"one tensor in {str(path)!r}", sorted(tensors))
        return next(iter(tensors.values()))

    def error(self, field: str, expected: str, got: object) -> RequestError:
        """Return the error of a field that does not fit."""
        return RequestError(f"{self._argument(field)}: expected {expected}, got {got}")

    def _argument(self, field: str) -> str:
        """Return the name of a field in an error message, whatever the fields are."""
        modality, start = (short(value).strip("'") for value in (self.modality, self.start))
        return f"multimodal item ({modality} at token {start}): {field}"


_FIELDS = ("features", "start", "modality", *_OTHER_FIELDS)


@reading("multimodal", "a list of items")
def as_items(given: object) -> list[MultimodalItem]:
    """Return a request's items, given as items or dicts of their fields, else a RequestError."""
    if given is None:
        return []
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise RequestError(f"multimodal: expected a list of items, got {type(given).__name__}")
    items = []
    for index, item in enumerate(given):
        if isinstance(item, Mapping):
            required = {"features", "start"}
            if not required <= item.keys() <= set(_FIELDS):
                raise RequestError(
                    f"multimodal[{index}]: expected features, start and others of "
                    f"{', '.join(_FIELDS)}; got {sorted(map(str, item))}"
                )
            item = MultimodalItem(**item)
        if not isinstance(item, MultimodalItem):
            raise RequestError(
                f"multimodal[{index}]: expected a MultimodalItem or a dict of its fields, got "
                f"{type(item).__name__}"
            )
        items.append(item)
    return items


def in_order(
    items: Iterable[MultimodalItem], num_prompt_tokens: int
) -> tuple[MultimodalItem, ...]:
    """Return items in the order of the prompt; RequestError: two overlap, or one ends after it."""
    for item in items:
        if item.end > num_prompt_tokens:
            expected = (
                f"{item.num_tokens} placeholders within the prompt's {num_prompt_tokens} tokens"
            )
            raise item.error("start", expected, f"tokens {item.start} to {item.end}")
    ordered = sorted(items, key=lambda item: item.start)
    for item, following in pairwise(ordered):
        if item.end > following.start:
            expected = f"no item before token {item.end}, where the {item.name} ends"
            raise following.error("start", expected, following.start)
    return tuple(ordered)


def check_bidirectional(items: Iterable[MultimodalItem]) -> None:
    """Raise a RequestError unless the tokens of each image see each other."""
    for item in items:
        if item.modality == "image" and not item.bidirectional:
            expected = "True, as tokens of an image see each other in this model"
            raise item.error("bidirectional", expected, False)


def check_placeholders(
    items: Iterable[MultimodalItem],
    prompt_token_ids: Sequence[int],
    placeholders: Mapping[str, int],
) -> None:
    """Raise a RequestError unless items and placeholders (token ids by modality) match."""
    token_ids = np.array(prompt_token_ids)
    is_left = np.isin(token_ids, list(placeholders.values()))
    for item in items:
        expected = placeholders.get(item.modality)
        is_left[item.start : item.end] = False
        (wrong,) = (token_ids[item.start : item.end] != expected).nonzero()
        if expected is not None and len(wrong):
            at = item.start + int(wrong[0])
            raise item.error(
                "start",
                f"placeholders (token {expected}) at {item.start} to {item.end - 1}",
                f"token {token_ids[at]} at {at}; placeholders in a chat message need "
                "sanitize_control_tokens=False",
            )
    if is_left.any():
        at = int(is_left.argmax())
        raise RequestError(
            f"multimodal: expected an item for every placeholder, got none for token "
            f"{token_ids[at]} at {at}"
        )
