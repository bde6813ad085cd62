"""A model's own encoder of images and videos, loaded for the first conversation with one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mrv1.config import EngineConfig
from mrv1.engine.guards import Turns
from mrv1.errors import ConfigError, RequestError, UnsupportedDeviceError
from mrv1.multimodal import Video, VisionEncoder

R = TypeVar("R")


class ImageEncoder:
    """Encodes for one thread at a time, which takes no turn of the engine."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._encoder: VisionEncoder | None = None
        self._turns = Turns()

    def encode(
        self, token_ids: Sequence[int], images: Sequence[object], videos: Sequence[Video]
    ) -> dict[str, Any]:
        """Return a prompt with images, as ``VisionEncoder.prompt`` does."""
        return self._refusing(lambda: self._loaded().prompt(token_ids, images, videos), videos)

    def load(self, videos: Sequence[Video]) -> None:
        """Load the encoder; RequestError: the model has none that mrv1 can load."""
        self._refusing(self._loaded, videos)

    def _loaded(self) -> VisionEncoder:
        if self._encoder is None:
            self._encoder = VisionEncoder(
                self._config.model, device=self._config.vision_device, dtype=self._config.dtype
            )
        return self._encoder

    def _refusing(self, call: Callable[[], R], videos: Sequence[Video]) -> R:
        try:
            return self._turns.take(call)
        except (ConfigError, UnsupportedDeviceError) as error:
            name = "videos" if videos else "images"
            raise RequestError(f"{name}: {error}") from error

    def close(self) -> None:
        """Give the encoder's memory back."""
        self._turns.take(setattr, self, "_encoder", None)
