"""What users may put into the sampler: their own edits of the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from mrv1.sampler.params import SamplingParams
from mrv1.sampler.sampler import History


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsContext:
    """What a custom processor may look at, all on the device. It must not wait for it."""

    idx_mapping: torch.Tensor
    """[rows] int32, the slot of each row of logits; -1 = padding."""
    history: History
    """The tokens of every slot, the last step's too, whether the host knows them or not."""


@runtime_checkable
class LogitsProcessor(Protocol):
    """Edits logits behind mrv1's own edits and before the temperature.

    A runner that has one launches the layers and the sampling apart. Rows of requests that it does
    not mean to change must come back as they were.
    """

    def add_request(
        self, slot: int, params: SamplingParams, token_ids: npt.NDArray[np.int32]
    ) -> None:
        """Learn that a request takes a slot, whose former one has ended.

        ``token_ids`` are its prompt and, where it was preempted, its output so far.
        """
        ...

    def apply(self, logits: torch.Tensor, context: LogitsContext) -> torch.Tensor:
        """Return the logits to draw from, ``[rows, vocab]`` float32, perhaps the same tensor."""
        ...


def process(
    processors: Sequence[LogitsProcessor], logits: torch.Tensor, context: LogitsContext
) -> torch.Tensor:
    """Apply custom processors in their order.

    Raises:
        TypeError: one returned something else than logits of the shape, dtype and device given.
    """
    for processor in processors:
        edited: object = processor.apply(logits, context)
        if not isinstance(edited, torch.Tensor) or not _is_alike(edited, logits):
            raise TypeError(
                f"logits_processors: expected {type(processor).__name__}.apply to return "
                f"{_described(logits)}, got {_described(edited)}"
            )
        logits = edited
    return logits


def _is_alike(given: torch.Tensor, wanted: torch.Tensor) -> bool:
    return (given.shape, given.dtype, given.device) == (wanted.shape, wanted.dtype, wanted.device)


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{value.dtype} {list(value.shape)} on {value.device}"
