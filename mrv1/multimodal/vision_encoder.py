"""Images to features: transformers runs a checkpoint's vision encoder and image processor."""

from __future__ import annotations

import reprlib
from base64 import b64decode
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mrv1.config import checkpoint_dir, dtype_name
from mrv1.device import resolve_device, resolve_dtype
from mrv1.errors import ConfigError, RequestError
from mrv1.models import ModelConfig, stored_tensors
from mrv1.models.vision import VISION_PREFIXES
from mrv1.multimodal.item import DIGEST_BYTES, MultimodalItem

if TYPE_CHECKING:
    from mrv1.config import Dtype

IMAGE_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Settings of the image processor: a checkpoint has one of these files."""


class VisionEncoder:
    """The vision encoder of a checkpoint, without its text model.

    The classes are transformers' own. It holds the encoder's weights until it is deleted.

    Example:
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
        if find_spec("PIL") is None:
            raise ConfigError(
                'pillow: expected it installed for images, found none; pip install "mrv1[vision]"'
            )
        self.directory = checkpoint_dir(model)
        config = ModelConfig.from_pretrained(self.directory)
        if config.vision is None:
            raise ConfigError(
                f"model: expected a checkpoint with a vision encoder, got {str(self.directory)!r} "
                f"({config.architecture})"
            )
        self.config = config.vision
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(dtype_name(dtype), config.torch_dtype, self.device)
        self._processor, self._encoder, self._framing = self._load()

    def _load(self) -> tuple[Any, Any, tuple[int, int]]:
        """Return the image processor, the encoder, and the tokens around an image."""
        from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText

        where = f"checkpoint {str(self.directory)!r}"
        if not any((self.directory / name).is_file() for name in IMAGE_PROCESSOR_FILES):
            expected = " or ".join(IMAGE_PROCESSOR_FILES)
            raise ConfigError(f"{where}: image processor: expected {expected}, found neither")
        try:
            processor = AutoImageProcessor.from_pretrained(
                self.directory, local_files_only=True, trust_remote_code=False
            )
            config = AutoConfig.from_pretrained(
                self.directory, local_files_only=True, trust_remote_code=False
            )
            with torch.device("meta"):  # no memory for the text model
                model_class = type(AutoModelForImageTextToText.from_config(config).model.visual)
            encoder = model_class(config.vision_config)
            encoder.load_state_dict(self._weights())
        except Exception as error:  # OSError, ValueError, RuntimeError of names and shapes, ...
            raise ConfigError(f"{where}: vision encoder: {error}") from error
        framing = config.vision_start_token_id, config.vision_end_token_id
        return processor, encoder.to(self.device, self.dtype).eval(), framing

    def _weights(self) -> dict[str, torch.Tensor]:
        """Return the encoder's tensors by their names in it."""
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in stored_tensors(self.directory, VISION_PREFIXES)
            for prefix in VISION_PREFIXES
            if name.startswith(prefix)
        }

    def prompt(
        self, prompt_token_ids: Iterable[int] | None, images: Sequence[object]
    ) -> dict[str, Any]:
        """Return a prompt with images for ``LLM.generate``.

        Args:
            prompt_token_ids: tokens with one placeholder for each image, in their order, as a chat
                template writes them; None = the images alone.
            images: for each image a PIL image, a uint8 array ``[height, width, 3]``, the name of a
                file, or a data URL.

        Returns:
            ``prompt_token_ids``, where each placeholder is repeated once per feature, and
            ``multimodal``, the items.

        Raises:
            RequestError: an image cannot be read, or there is not one placeholder per image.
        """
        placeholder = self.config.image_token_id
        start, end = self._framing
        if prompt_token_ids is None:
            prompt_token_ids = [token for _ in images for token in (start, placeholder, end)]
        else:
            prompt_token_ids = list(prompt_token_ids)
        count = prompt_token_ids.count(placeholder)
        if count != len(images):
            raise RequestError(
                f"images: expected {count}, one for each placeholder (token {placeholder}) of the "
                f"prompt, got {len(images)}"
            )
        expanded: list[int] = []
        items: list[MultimodalItem] = []
        for token in prompt_token_ids:
            if token == placeholder:
                index = len(items)
                item = self._item(f"images[{index}]", images[index], start=len(expanded))
                items.append(item)
                expanded += [token] * item.num_tokens
            else:
                expanded.append(token)
        return {"prompt_token_ids": expanded, "multimodal": items}

    @torch.no_grad()
    def _item(self, name: str, image: object, *, start: int) -> MultimodalItem:
        """Return an image as an item at a place in the prompt."""
        picture = _opened(name, image)
        try:
            inputs = self._processor(images=[picture], return_tensors="pt")
        except Exception as error:  # an image too long and narrow, for example
            raise RequestError(
                f"{name}: expected an image for this model's processor: {error}"
            ) from error
        pixels, grid = inputs["pixel_values"], inputs["image_grid_thw"]
        encoded = self._encoder(pixels.to(self.device, self.dtype), grid_thw=grid.to(self.device))
        # Qwen3-VL adds features of the encoder's earlier layers to the text model's first layers.
        further = getattr(encoded, "deepstack_features", None) or []
        digest = blake2b(
            repr((str(self.directory), self.dtype)).encode(), digest_size=DIGEST_BYTES
        )
        digest.update(pixels.contiguous().numpy().tobytes())
        return MultimodalItem(
            features=torch.cat([encoded.pooler_output, *further], dim=1),
            start=start,
            grid_thw=grid[0].tolist(),
            cache_key=digest.digest(),  # of the pixels: no features are read back from a GPU
        )


def encode_images(
    model: str | Path,
    images: Sequence[object],
    prompt_token_ids: Iterable[int] | None = None,
    *,
    device: str = "auto",
    dtype: Dtype = "auto",
) -> dict[str, Any]:
    """Return a prompt with images for ``LLM.generate``.

    Loads the checkpoint's vision encoder for this call; a ``VisionEncoder`` is loaded once.

    Args:
        model: as in ``VisionEncoder``.
        images: as in ``VisionEncoder.prompt``.
        prompt_token_ids: as in ``VisionEncoder.prompt``; None = the images alone.
        device: as in ``VisionEncoder``.
        dtype: as in ``VisionEncoder``.

    Raises:
        ConfigError, UnsupportedDeviceError: as in ``VisionEncoder``.
        RequestError: as in ``VisionEncoder.prompt``.
    """
    encoder = VisionEncoder(model, device=device, dtype=dtype)
    return encoder.prompt(prompt_token_ids, images)


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
            image = Image.open(str(image).removeprefix("file://"))
        elif not isinstance(image, Image.Image):
            raise TypeError(type(image).__name__)
        return load_image(image)
    except Exception as error:  # OSError, ValueError, TypeError and PIL's own classes
        raise RequestError(
            f"{name}: expected a PIL image, a uint8 array [height, width, 3], an image file or a "
            f"data URL with base64, got {reprlib.repr(image)}: {error}"
        ) from error
