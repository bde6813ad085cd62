"""Custom logits processors: edits of the logits that a user adds to the sampler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from mrv1.errors import ConfigError, RequestError, short
from mrv1.kernels.sampling.contracts import History
from mrv1.sampler.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsContext:
    """The tensors that a custom processor may read, all on the device; it must not synchronise."""

    idx_mapping: torch.Tensor
    """[rows] int32, the slot of each row of logits; -1 = padding, or a refused request."""
    history: History
    """The tokens of every slot, including the last step's, which the host may not know yet."""


@runtime_checkable
class LogitsProcessor(Protocol):
    """Edits logits after mrv1's own edits and before the temperature.

    A runner with custom processors launches the layers and the sampling separately. A processor
    must not change the rows of requests that it is not meant for. Of several ranks, rank 0 alone
    has processors, and draws from the whole logits that they edit; the others take its tokens.

    A request fails alone if ``add_request`` raises for it, or if ``apply`` leaves NaN in its row
    or no token to draw. If ``apply`` raises, or returns a tensor that differs in shape, dtype
    or device, every request of the step fails: nothing tells which request was the cause.
    """

    def add_request(
        self, slot: int, params: SamplingParams, token_ids: npt.NDArray[np.int32]
    ) -> None:
        """Prepare for the request that takes ``slot``; the former request of the slot is gone.

        ``token_ids`` are the request's prompt and, after a preemption, its output so far. An
        exception refuses the request: its rows have slot -1 in ``apply``, and the processors after
        this one are not called.
        """

    def apply(self, logits: torch.Tensor, context: LogitsContext) -> torch.Tensor:
        """Return the logits to draw from, ``[rows, vocab]`` float32; may be the same tensor."""


def checked_processors(given: object) -> tuple[LogitsProcessor, ...]:
    """Return the processors of a caller; ConfigError: there is no list, or an object is none."""
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise ConfigError(
            "logits_processors: expected a list of objects with add_request and apply, got "
            f"{short(given)}"
        )
    processors = tuple(given)
    for processor in processors:
        # A class has the methods too, but no object to call them on.
        if isinstance(processor, type) or not isinstance(processor, LogitsProcessor):
            raise ConfigError(
                "logits_processors: expected objects with add_request and apply, got "
                f"{short(processor)}"
            )
    return processors


class LogitsProcessors:
    """A runner's custom processors, in their order, and the slots whose requests they refused.

    ``are_elsewhere``: another rank has them.
    """

    def __init__(
        self, processors: Iterable[LogitsProcessor], *, are_elsewhere: bool = False
    ) -> None:
        self._processors = checked_processors(processors)
        self.are_elsewhere = are_elsewhere
        self._refused: dict[int, RequestError] = {}
        """By slot, the error of the request that a processor refused."""

    @classmethod
    def of(cls, given: Iterable[LogitsProcessor] | LogitsProcessors) -> LogitsProcessors:
        """Return processors as they are, or those of a list."""
        return given if isinstance(given, LogitsProcessors) else cls(given)

    def __bool__(self) -> bool:
        """Whether there are any processors, on this rank or elsewhere."""
        return bool(self._processors) or self.are_elsewhere

    def add_request(
        self, slot: int, params: SamplingParams, token_ids: npt.NDArray[np.int32]
    ) -> None:
        """Pass the request that takes a slot to each processor, until a processor refuses it."""
        self._refused.pop(slot, None)
        for processor in self._processors:
            try:
                processor.add_request(slot, params, token_ids)
            except torch.AcceleratorError:
                raise  # a kernel failed, perhaps in an earlier step: not the request's fault
            except Exception as error:  # of any type: only this request fails
                hook = f"logits_processors: {type(processor).__name__}.add_request"
                self._refused[slot] = RequestError.caused_by(error, hook)
                return

    def without_refused(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return the slots of rows, with -1 (padding) in the rows of refused requests."""
        if not self._refused:
            return slots
        return np.where(np.isin(slots, [*self._refused]), np.int32(-1), slots)

    def refusals(self, slots: npt.NDArray[np.int32]) -> dict[int, RequestError]:
        """Return the errors of refused requests, by row."""
        if not self._refused:
            return {}
        of_rows = enumerate(slots.tolist())
        return {row: self._refused[slot] for row, slot in of_rows if slot in self._refused}

    def apply(self, logits: torch.Tensor, context: LogitsContext) -> torch.Tensor:
        """Apply the processors in their order.

        RuntimeError: one raised an exception, the ``__cause__``. TypeError: one did not return
        logits of the given shape, dtype and device.
        """
        for processor in self._processors:
            name = f"{type(processor).__name__}.apply"
            try:
                edited: object = processor.apply(logits, context)
            except Exception as error:
                raise RuntimeError(f"logits_processors: {name}: {error!r}") from error
            if not isinstance(edited, torch.Tensor) or not _is_alike(edited, logits):
                raise TypeError(
                    f"logits_processors: expected {name} to return {_described(logits)}, got "
                    f"{_described(edited)}"
                )
            logits = edited
        return logits


def _is_alike(given: torch.Tensor, wanted: torch.Tensor) -> bool:
    return (given.shape, given.dtype, given.device) == (wanted.shape, wanted.dtype, wanted.device)


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{value.dtype} {list(value.shape)} on {value.device}"
