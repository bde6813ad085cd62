"""Images and videos to features: transformers runs a checkpoint's encoder and its processors."""

from __future__ import annotations

import reprlib
from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from mrv1.config import dtype_name
from mrv1.device import resolve_device, resolve_dtype
from mrv1.errors import ConfigError, RequestError, short
from mrv1.models import Checkpoint, ModelConfig
from mrv1.models.files import refusal
from mrv1.models.tokenizer import PROCESSOR_FILES, has_processor
from mrv1.models.vision import VISION_PREFIXES
from mrv1.multimodal.item import DIGEST_BYTES, MultimodalItem
from mrv1.multimodal.reading import local_path, reading

if TYPE_CHECKING:
    from mrv1.config import Dtype


@dataclass(frozen=True, kw_only=True, eq=False)
class Video:
    """The frames of a video, all of which the model sees."""

    frames: object
    """Array uint8 ``[frames, height, width, 3]``, or images of one size, as in
    ``VisionEncoder.prompt``."""
    fps: float | None = None
    """Frames for each second of the video; Qwen2.5-VL and Qwen3-VL need it."""


class VisionEncoder:
    """The vision encoder of a checkpoint, without its text model.

    The classes are transformers' own. It holds the encoder's weights until it is deleted.

    Examples:
        >>> encoder = VisionEncoder("path/to/Qwen2.5-VL-3B-Instruct")  # doctest: +SKIP
        >>> prompt = encoder.prompt(token_ids, ["photo.jpg"])  # doctest: +SKIP
        >>> llm.generate(prompt)  # doctest: +SKIP
    """

    def __init__(self, model: str | Path, *, device: str = "auto", dtype: Dtype = "auto") -> None:
        """Load the encoder.

        Args:
            model: a checkpoint directory or Hugging Face id of a model with a vision encoder.
            device: where the encoder runs: "auto", "cpu", "cuda" or "cuda:N".
            dtype: of its weights and features; "auto" as in ``EngineConfig``.

        Raises:
            ConfigError: the checkpoint has no vision encoder or image processor, or one that
                cannot be loaded, or pillow is not installed.
            UnsupportedDeviceError: there is no such GPU.
        """
        self._checkpoint = Checkpoint.open(model)
        self.directory = self._checkpoint.path
        config = ModelConfig.from_pretrained(self.directory)
        wrapper, vision = config.wrapper, config.vision
        if wrapper is not None or (vision is not None and not vision.has_encoder):
            name = config.architecture if wrapper is None else wrapper.model_type
            kind = "bidirectional " if wrapper and wrapper.has_bidirectional_images else ""
            raise ConfigError(
                f"model: expected a family whose encoder mrv1 has, got {name}: pass features that "
                f"are computed elsewhere, as {kind}multimodal items"
            )
        if vision is None:
            raise ConfigError(
                f"model: expected a checkpoint with a vision encoder, got {str(self.directory)!r} "
                f"({config.architecture}), which reads text alone"
            )
        if find_spec("PIL") is None:
            raise ConfigError(
                'pillow: expected it installed for images, found none; pip install -e ".[vision]"'
            )
        self.config = vision
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(dtype_name(dtype), config.torch_dtype, self.device)
        self._processor, self._encoder, self._framing = self._load()
        self._video_processor: Any = None  # loaded for the first video: it needs torchvision
        self._tokenizer: Any = None  # loaded for the first video with text between its frames

    def _load(self) -> tuple[Any, Any, tuple[int, int]]:
        """Return the image processor, the encoder, and the tokens around an image."""
        from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText

        where = self._checkpoint.where
        if not has_processor(self.directory):
            expected = " or ".join(PROCESSOR_FILES)
            raise ConfigError(f"{where}: image processor: expected {expected}, found neither")
        try:
            processor = AutoImageProcessor.from_pretrained(
                self.directory, local_files_only=True, trust_remote_code=False
            )
            config = AutoConfig.from_pretrained(
                self.directory,
                local_files_only=True,
                trust_remote_code=False,
                attn_implementation="sdpa",  # config.json could name a kernel of the Hub
            )
            with torch.device("meta"):  # no memory for the text model
                model = AutoModelForImageTextToText.from_config(config, trust_remote_code=False)
                model_class = type(model.model.visual)
            encoder = model_class(config.vision_config)
            encoder.load_state_dict(self._weights())
        except Exception as error:  # OSError, ValueError, RuntimeError of names and shapes, ...
            raise ConfigError(f"{where}: vision encoder: {refusal(error)}") from error
        framing = config.vision_start_token_id, config.vision_end_token_id
        return processor, encoder.to(self.device, self.dtype).eval(), framing

    def _weights(self) -> dict[str, torch.Tensor]:
        """Return the encoder's tensors by their names in it."""
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in self._checkpoint.tensors(VISION_PREFIXES)
            for prefix in VISION_PREFIXES
            if name.startswith(prefix)
        }

    def prompt(
        self,
        prompt_token_ids: Iterable[int] | None,
        images: Sequence[object] = (),
        videos: Sequence[Video] = (),
    ) -> dict[str, Any]:
        """Return a prompt with images and videos for ``LLM.generate``.

        Args:
            prompt_token_ids: tokens with one placeholder for each image and each video, in their
                order, as a chat template writes them; None = the images, then the videos alone.
            images: for each image a PIL image, a uint8 array ``[height, width, 3]``, the name of a
                file, or a data URL.
            videos: the videos.

        Returns:
            ``prompt_token_ids``, where each placeholder is repeated once per feature, and
            ``multimodal``, the items. For Qwen3-VL, each video's frames have their times between
            them as text.

        Raises:
            RequestError: an image or a video cannot be read or has no placeholder of its own.
            ConfigError: the checkpoint's processor of videos cannot be loaded.
        """
        start, end = self._framing
        given = {self.config.image_token_id: images, self.config.video_token_id: videos}
        if prompt_token_ids is None:
            alone = [(start, token, end) for token, each in given.items() for _ in each]
            prompt_token_ids = [token for tokens in alone for token in tokens]
        else:
            prompt_token_ids = list(prompt_token_ids)
        for name, (placeholder, each) in zip(("images", "videos"), given.items(), strict=True):
            count = prompt_token_ids.count(placeholder)
            if count != len(each):
                raise RequestError(
                    f"{name}: expected {count}, one for each placeholder (token {placeholder}) of "
                    f"the prompt, got {len(each)}"
                )
        if self.config.video_time == "text":  # each frame has a frame of tokens of its own
            prompt_token_ids = _unframed(prompt_token_ids, self.config.video_token_id, start, end)
        expanded: list[int] = []
        items: list[MultimodalItem] = []
        left = {token: iter(enumerate(each)) for token, each in given.items()}
        for token in prompt_token_ids:
            if token not in left:
                expanded.append(token)
                continue
            index, visual = next(left[token])
            if token == self.config.image_token_id:
                items.append(self._image(f"images[{index}]", visual, start=len(expanded)))
                expanded += [token] * items[-1].num_tokens
            else:
                items += self._video(f"videos[{index}]", visual, expanded)
        return {"prompt_token_ids": expanded, "multimodal": items}

    def _image(self, name: str, image: object, *, start: int) -> MultimodalItem:
        """Return an image as an item at a place in the prompt."""
        # A copy: with torchvision, transformers warns of arrays that cannot be written.
        pixels = np.array(_opened(name, image))
        given = {"images": [pixels], "input_data_format": "channels_last"}
        inputs = _processed(self._processor, f"{name}: expected an image", given)
        grid = inputs["image_grid_thw"]
        features, digest = self._encoded(inputs["pixel_values"], grid)
        return MultimodalItem(
            features=features, start=start, grid_thw=grid[0].tolist(), cache_key=digest
        )

    def _video(self, name: str, video: object, expanded: list[int]) -> list[MultimodalItem]:
        """Append a video's tokens to a prompt and return its items."""
        if not isinstance(video, Video):
            raise RequestError(f"{name}: expected a Video, got {reprlib.repr(video)}")
        times, fps = self.config.video_time, video.fps
        is_rate = isinstance(fps, int | float) and not isinstance(fps, bool) and 0 < fps < np.inf
        if not is_rate and not (fps is None and times == "frames"):
            raise RequestError(
                f"{name}: fps: expected the frames of each second, got {short(fps)}"
            )
        with reading(f"{name}: frames", "images"):
            frames = _opened_frames(name, video.frames)
        processor = self._processor_of_videos()
        given = {"videos": [frames], "do_sample_frames": False}
        inputs = _processed(processor, f"{name}: expected a video", given)
        grid = inputs["video_grid_thw"]
        features, digest = self._encoded(inputs["pixel_values_videos"], grid)
        num_steps, *sides = grid[0].tolist()
        frames_per_step = processor.temporal_patch_size
        placeholder, (start, end) = self.config.video_token_id, self._framing
        if times != "text":
            item = MultimodalItem(
                features=features,
                start=len(expanded),
                modality="video",
                grid_thw=(num_steps, *sides),
                second_per_grid=frames_per_step / fps if fps and times == "seconds" else None,
                cache_key=digest,
            )
            expanded += [placeholder] * item.num_tokens
            return [item]
        items = []
        for step, rows in enumerate(features.chunk(num_steps)):
            first = step * frames_per_step
            last = min(first + frames_per_step, len(frames)) - 1
            expanded += [*self._time(first, last, fps), start]
            items.append(
                MultimodalItem(
                    features=rows,
                    start=len(expanded),
                    modality="video",
                    grid_thw=(1, *sides),
                    cache_key=digest + step.to_bytes(4, "little"),
                )
            )
            expanded += [*[placeholder] * len(rows), end]
        return items

    @torch.no_grad()
    def _encoded(self, pixels: torch.Tensor, grid: torch.Tensor) -> tuple[torch.Tensor, bytes]:
        """Return the features of pixels, and a digest of the pixels and the encoder."""
        encoded = self._encoder(pixels.to(self.device, self.dtype), grid_thw=grid.to(self.device))
        # Qwen3-VL adds features of the encoder's earlier layers to the text model's first layers.
        further = getattr(encoded, "deepstack_features", None) or []
        digest = blake2b(
            repr((str(self.directory), self.dtype)).encode(), digest_size=DIGEST_BYTES
        )
        digest.update(pixels.contiguous().numpy().tobytes())  # no features are read from a GPU
        return torch.cat([encoded.pooler_output, *further], dim=1), digest.digest()

    def _processor_of_videos(self) -> Any:  # noqa: ANN401 - a class of transformers
        if self._video_processor is None:
            if find_spec("torchvision") is None:
                raise ConfigError(
                    "torchvision: expected it installed for videos, found none; "
                    'pip install -e ".[video]"'
                )
            from transformers import AutoVideoProcessor

            try:
                self._video_processor = AutoVideoProcessor.from_pretrained(
                    self.directory, local_files_only=True, trust_remote_code=False
                )
            except Exception as error:  # OSError, ValueError, ...
                raise ConfigError(
                    f"{self._checkpoint.where}: video processor: {refusal(error)}"
                ) from error
        return self._video_processor

    def _time(self, first: int, last: int, fps: Any) -> list[int]:  # noqa: ANN401 - checked
        """Return the time between two frames as the tokens that Qwen3-VL has before its frames."""
        if self._tokenizer is None:
            self._tokenizer = self._checkpoint.tokenizer()
        text = f"<{(first / fps + last / fps) / 2:.1f} seconds>"
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return token_ids


def encode_images(
    model: str | Path,
    images: Sequence[object],
    prompt_token_ids: Iterable[int] | None = None,
    *,
    device: str = "auto",
    dtype: Dtype = "auto",
) -> dict[str, Any]:
    """Return a prompt with images for ``LLM.generate``; arguments and errors as ``VisionEncoder``.

    Loads the checkpoint's vision encoder for this call; a ``VisionEncoder`` is loaded once.
    """
    encoder = VisionEncoder(model, device=device, dtype=dtype)
    return encoder.prompt(prompt_token_ids, images)


def _processed(processor: Any, expected: str, given: Mapping[str, object]) -> Any:  # noqa: ANN401
    try:
        return processor(**given, return_tensors="pt")
    except Exception as error:  # an image too long and narrow, for example
        raise RequestError(f"{expected} for this model's processor: {error}") from error


def _unframed(token_ids: list[int], placeholder: int, start: int, end: int) -> list[int]:
    """Return tokens without the two around each placeholder that has them."""
    framed = {
        at
        for at, token in enumerate(token_ids)
        if token == placeholder and token_ids[at - 1 : at + 2] == [start, placeholder, end]
    }
    return [token for at, token in enumerate(token_ids) if not {at - 1, at + 1} & framed]


def _opened_frames(name: str, frames: object) -> npt.NDArray[np.uint8]:
    """Return a video's frames as an array ``[frames, height, width, 3]``."""
    if isinstance(frames, np.ndarray) and frames.dtype == np.uint8 and frames.ndim == 4:
        pictures = frames
    elif isinstance(frames, Sequence) and not isinstance(frames, str | bytes) and len(frames):
        opened = [_opened(f"{name}: frames[{i}]", each) for i, each in enumerate(frames)]
        for one, other in pairwise(opened):
            if one.size != other.size:
                raise RequestError(
                    f"{name}: frames: expected images of one size, got {one.size} and {other.size}"
                )
        pictures = np.stack([np.asarray(each) for each in opened])
    else:
        got = f"{frames.dtype} {[*frames.shape]}" if isinstance(frames, np.ndarray) else frames
        raise RequestError(
            f"{name}: frames: expected a uint8 array [frames, height, width, 3] or a list of "
            f"images, got {reprlib.repr(got)}"
        )
    if 0 in pictures.shape or pictures.shape[3] != 3:
        raise RequestError(
            f"{name}: frames: expected [frames, height, width, 3], got {[*pictures.shape]}"
        )
    return pictures


def _opened(name: str, image: object) -> Any:  # noqa: ANN401 - a PIL image
    """Return an image as a PIL image, upright and in RGB."""
    from PIL import Image
    from transformers.image_utils import load_image

    try:
        if isinstance(image, np.ndarray):
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
                raise ValueError(f"{image.dtype} {list(image.shape)}")
            image = Image.fromarray(image)
        elif isinstance(image, str) and image.startswith("data:"):
            _, _, content = image.partition(",")
            image = Image.open(BytesIO(b64decode(content, validate=True)))
        elif isinstance(image, str | Path):
            image = Image.open(local_path(str(image)))
        elif not isinstance(image, Image.Image):
            raise TypeError(type(image).__name__)
        return load_image(image)
    except Exception as error:  # OSError, ValueError, TypeError and PIL's own classes
        raise RequestError(
            f"{name}: expected a PIL image, a uint8 array [height, width, 3], an image file or a "
            f"data URL with base64, got {reprlib.repr(image)}: {error}"
        ) from error
