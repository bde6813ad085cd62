"""Sleep mode: the weights and the KV cache leave the device, and come back when they are needed.

Tensors keep their objects and views; their storage gets new addresses: graphs are recaptured.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal, get_args

import torch

from mrv1.errors import CapacityError, ConfigError
from mrv1.models import (
    ModelConfig,
    NamedTensors,
    ParallelContext,
    checked_update,
    checkpoint_places,
    memory_of,
)
from mrv1.runner.device_memory import release_cached_memory
from mrv1.runner.device_step import DeviceStep

SleepTag = Literal["weights", "kv_cache"]
"""A part of the memory that wakes up by itself."""

TAGS: tuple[SleepTag, ...] = get_args(SleepTag)


class _Memory:
    """The storages behind some tensors. Views that share a storage are freed with it."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = (tensor.untyped_storage() for tensor in tensors if tensor.numel())
        unique = {storage.data_ptr(): storage for storage in storages}
        self._storages = [(storage, storage.nbytes()) for storage in unique.values()]
        self.copies: list[torch.Tensor] = []
        """Copies on the host, one of each storage, which ``allocate`` restores; [] = none."""

    @property
    def is_resident(self) -> bool:
        return all(storage.nbytes() == nbytes for storage, nbytes in self._storages)

    @property
    def is_resizable(self) -> bool:
        return all(storage.resizable() for storage, _ in self._storages)

    def copy_to_host(self) -> None:
        """Make ``copies`` in pinned memory; CapacityError if the host has no room."""
        try:
            copies = [
                torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
                for _, nbytes in self._storages
            ]
        except RuntimeError as error:
            total = sum(nbytes for _, nbytes in self._storages)
            raise CapacityError(
                f"sleep: expected pinned host memory for {total} bytes of weights, got less; "
                "level=2 needs none"
            ) from error
        for copy, (storage, _) in zip(copies, self._storages, strict=True):
            copy.copy_(_bytes_of(storage))
        self.copies = copies

    def free(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)

    def allocate(self) -> None:
        """Allocate what is missing, with its copy's content if any; may raise CapacityError."""
        for storage, nbytes in self._storages:
            if storage.nbytes() != nbytes:
                try:
                    storage.resize_(nbytes)
                except RuntimeError as error:  # a CPU has no OutOfMemoryError of its own
                    raise CapacityError(
                        f"wake_up: expected room for {nbytes} bytes on {storage.device}, got "
                        "less; free memory there and call it again"
                    ) from error
        if self.copies:
            for copy, (storage, _) in zip(self.copies, self._storages, strict=True):
                _bytes_of(storage).copy_(copy)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class SleepMode:
    """Which parts of a runner's memory are on the device, and which weights have a value.

    No step may be in flight. After an interrupt, call the method again or the opposite one.
    """

    def __init__(
        self, step: DeviceStep, model_config: ModelConfig, parallel: ParallelContext
    ) -> None:
        """Take a rank's step, and the configuration of the whole model."""
        self._step, model = step, step.model
        self._config = model_config
        self._places = checkpoint_places(
            model.config, model.weights, whole=model_config, parallel=parallel
        )
        self._weights = _Memory(memory_of(self._places.values()))
        self._parts: Mapping[SleepTag, _Memory] = {
            "weights": self._weights,
            "kv_cache": _Memory(step.kv_cache.buffers),
        }
        self._asleep: set[SleepTag] = set()
        self._unwritten: dict[str, None] = {}
        """Names of weights without a value, in order: dropped, or half written."""
        self._waking: set[SleepTag] = set()
        """Parts of the last ``allocate``."""
        self._absent: list[_Memory] = []
        """Those of them that had no memory."""

    @property
    def is_sleeping(self) -> bool:
        """Whether a part of the memory is asleep."""
        return bool(self._asleep)

    @property
    def refusal(self) -> str | None:
        """Why no step may run now; None = steps may run."""
        if self._asleep:
            asleep = " and ".join(tag for tag in TAGS if tag in self._asleep)
            return f"{asleep}: expected to be awake, got asleep; call wake_up() first"
        if self._unwritten:
            return (
                "weights: expected a value for every tensor, got none for "
                f"{len(self._unwritten)} ({next(iter(self._unwritten))} ...) since sleep(level=2) "
                "or an interrupted update; call update_weights() first"
            )
        return None

    def sleep(self, level: int) -> None:
        """Free the memory of the weights and of the KV cache; see ``ModelRunner.sleep``."""
        self.check_level(level)
        self.copy_weights(level)
        self.free(level)

    def check_level(self, level: int) -> None:
        """Raise ConfigError if there is no such level, or torch cannot free the weights."""
        if type(level) is not int or level not in (1, 2):
            raise ConfigError(f"level: expected 1 or 2, got {level!r}")
        if not self._weights.is_resizable:  # those of a caller's model
            raise ConfigError("model: expected weights in memory of torch's own, got another's")

    def copy_weights(self, level: int) -> None:
        """Copy weights that ``free`` will free to the host if the level says so; CapacityError."""
        if level == 1 and "weights" not in self._asleep and self._step.device.type != "cpu":
            self._weights.copy_to_host()

    def forget_copies(self) -> None:
        """Drop the copies of weights that are awake."""
        if "weights" not in self._asleep:
            self._weights.copies = []

    def free(self, level: int) -> None:
        """Put everything to sleep, its memory freed, after ``copy_weights``."""
        self._asleep, self._absent = set(TAGS), []
        self._parts["kv_cache"].free()
        if level == 2:
            self._unwritten = dict.fromkeys(self._places)
            self._weights.copies = []
        if level == 2 or self._weights.copies:
            self._weights.free()
        self._step.features.free()
        self._step.graphs.clear()
        release_cached_memory(self._step.device)

    def wake_up(self, tags: Collection[str] | None) -> None:
        """Bring parts back, then graphs, as ``ModelRunner.wake_up``; on failure they sleep on."""
        checked = checked_tags(tags)
        try:
            self.allocate(checked)
            self.capture_awake()
        except BaseException:
            self.free_again()
            raise
        self.end_sleep()

    def allocate(self, tags: Collection[SleepTag]) -> None:
        """Allocate parts that sleep; ``end_sleep`` or ``free_again`` has to follow."""
        self._absent = []
        self._waking = self._asleep & {*tags}
        self._absent = [part for tag in self._waking if not (part := self._parts[tag]).is_resident]
        for tag in self._waking:
            self._parts[tag].allocate()

    def capture_awake(self) -> None:
        """Capture the graphs if nothing sleeps but what was allocated, or raise CapacityError."""
        if self._waking and self._waking == self._asleep:
            self._capture_with(features=self._step.features.is_used)

    def free_again(self) -> None:
        """Free what ``allocate`` has allocated, and the graphs: it sleeps on."""
        for part in self._absent:
            part.free()
        if self._waking:
            self._step.features.free()
            self._step.graphs.clear()
        release_cached_memory(self._step.device)

    def end_sleep(self) -> None:
        """Count the parts of ``allocate`` as awake."""
        self._absent = []
        self._asleep -= self._waking
        if "weights" in self._waking:
            self._weights.copies = []

    def check_awake(self) -> None:
        """Raise RuntimeError if the weights sleep."""
        if "weights" in self._asleep:
            raise RuntimeError(
                "update_weights: expected weights that are awake, got asleep; call "
                'wake_up(["weights"]) first'
            )

    def update_weights(self, named_tensors: NamedTensors, *, partial: bool) -> None:
        """Overwrite weights; see ``ModelRunner.update_weights``."""
        self.check_awake()
        tensors = self.checked_update(named_tensors, partial=partial)
        self.begin_update(tensors)
        for name, tensor in tensors.items():
            self.write(name, 0, tensor)
        self.end_update(tensors)

    def checked_update(
        self, named_tensors: NamedTensors, *, partial: bool
    ) -> dict[str, torch.Tensor]:
        """Return new tensors of the whole model, checked; see ``mrv1.models.checked_update``."""
        return checked_update(self._places, named_tensors, config=self._config, partial=partial)

    def begin_update(self, names: Iterable[str]) -> None:
        """Count tensors as half written until ``end_update``, which an interrupt may prevent."""
        self._unwritten |= dict.fromkeys(names)

    def end_update(self, names: Collection[str]) -> None:
        """Count tensors as written."""
        self._unwritten = {name: None for name in self._unwritten if name not in names}

    def write(self, name: str, first_row: int, values: torch.Tensor) -> None:
        """Write rows of a tensor of the whole model to where this rank has them, if it does."""
        self._places[name].write(first_row, values)

    def allocate_features(self) -> None:
        """Allocate the feature buffer, which graphs read, or raise CapacityError."""
        try:
            self._capture_with(features=True)
        except BaseException:
            self.capture_again()
            raise
        self._step.features.is_used = True

    def free_features(self) -> None:
        """Free the feature buffer again, after ``allocate_features``."""
        self._step.features.free()
        self._step.features.is_used = False
        self.capture_again()

    def _capture_with(self, *, features: bool) -> None:
        """Allocate the buffer for features, if it is needed, and capture the graphs."""
        try:
            if features:
                self._step.features.allocate()
            self.capture_again()
        except BaseException:
            self._step.features.free()
            raise

    def capture_again(self) -> None:
        """Capture the graphs at the present addresses, or raise CapacityError."""
        self._step.graphs.clear()
        try:
            self._step.capture(progress=False)
        except BaseException as error:
            self._step.graphs.clear()
            if isinstance(error, torch.OutOfMemoryError):
                raise CapacityError(
                    f"CUDA graphs: expected room on {self._step.device}, got less; free memory "
                    "there and try again"
                ) from error
            raise


def checked_tags(tags: object) -> set[SleepTag]:
    """Return a caller's tags, None = all; ConfigError: there is no such tag."""
    if tags is None:
        return set(TAGS)
    if (
        not isinstance(tags, Collection)
        or isinstance(tags, str)
        or not all(tag in TAGS for tag in tags)
    ):
        raise ConfigError(f"tags: expected None or a list of {TAGS}, got {tags!r}")
    return {tag for tag in TAGS if tag in tags}
