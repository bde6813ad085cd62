"""What users may put into the sampler: their own edits of the logits."""

from __future__ import annotations

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
