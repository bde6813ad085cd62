"""The launches of a step, and what the host decides about them: all that a rank has to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mrv1.runner.cuda_graph import Forwarded
from mrv1.runner.input_batch import InputBatch
from mrv1.runner.kv_listener import HeardStep
from mrv1.runner.logprobs import LogprobReport, PromptPart, StoredLogprobs, WantedRows
from mrv1.runner.rows import StepShape, Tail
from mrv1.runner.staging import Sent
from mrv1.runner.step import Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersLaunch:
    """The layers of a step that no graph runs."""

    shape: StepShape
    sent: Sent
    """The step's upload."""
    query_lens: Int32Array
    """[rows], tokens of each row."""
    seq_lens: Int32Array
    """[rows], cached tokens after the step."""
    attn_mask_offsets: torch.Tensor | None
    """[tokens, 2] on the host, the keys that each token sees; None = causal."""
    heard: HeardStep | None = None
    """What each rank's listener is told; None = there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLaunch:
    """The sampling after the layers of a step, unless their graph samples."""

    shape: StepShape
    slot: int
    """Slot of the rings."""
    tail: Tail | None
    """What a graph does; None = the sampling is launched kernel by kernel."""
    num_masks: int | None
    """Masks that are in the ring; None = no row has one, and the graph has none."""
    wanted: WantedRows
    """Log-probabilities of the tokens that the step draws."""
    prompts: Sequence[PromptPart]
    """Log-probabilities of prompt tokens."""


SampledReports = tuple[Sequence[LogprobReport | StoredLogprobs], Sequence[LogprobReport]]
"""Log-probabilities of a step's tokens, and of prompt tokens, on their way to the host."""


class Launches(Protocol):
    """Launches the parts of a step, on this rank or on all."""

    def replay(self, shape: StepShape, heard: HeardStep | None = None) -> Forwarded | None:
        """Launch the graph of a step, or of its layers; returns as ``StepGraphs.replay``.

        ``heard`` is what the listeners of other ranks are told then.
        """

    def launch_layers(
        self,
        launch: LayersLaunch,
        *,
        check: Callable[[InputBatch], None] | None = None,
        on_kv_written: Callable[[int], None] | None = None,
    ) -> Forwarded:
        """Launch the layers of a step, kernel by kernel; return ``launch_sampling``'s input.

        ``check`` is called with the gathered batch before the layers run, ``on_kv_written`` with
        each layer's index, as in ``DecoderModel.forward``.
        """

    def launch_sampling(self, launch: SamplingLaunch, forwarded: Forwarded) -> SampledReports:
        """Launch the sampling after the layers."""

    def give_up(self) -> None:
        """Let the next step take the ring slot of a step that was launched only in part."""
