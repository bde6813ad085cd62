"""mrv1's draw in vLLM's second model runner: top-k, top-p and min-p without a sort.

vLLM's own sampler edits the logits (penalties, biases, bad words) and reports log-probabilities;
temperature, filters and draw are one op of mrv1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates

from mrv1.device import kernel_path
from mrv1.errors import ConfigError
from mrv1.integrations.vllm.versions import interface
from mrv1.kernels.registry import select_ops

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams


class DrawModelState(DefaultModelState):  # type: ignore[misc]
    """The state of a model whose tokens mrv1 draws."""

    def custom_sampler(self, sampler: Sampler) -> tuple[Sampler, None]:
        """Return the sampler for the runner; None: there are no drafts to verify."""
        return DrawSampler(sampler, self.device), None


class UnfilteredStates(SamplingStates):  # type: ignore[misc]
    """The sampling parameters of vLLM's slots, in its buffers, which leave logits as they are."""

    def __init__(self, states: SamplingStates) -> None:
        self.__dict__.update(vars(states))

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Keep the parameters; return that they need no copy of the logits."""
        super().add_request(req_idx, sampling_params)
        return False

    def apply_temperature(self, *_: object) -> None:
        """Do nothing: the draw divides by the temperature."""

    def apply_min_p(self, *_: object) -> None:
        """Do nothing: the draw filters."""


class DrawSampler(Sampler):  # type: ignore[misc]
    """vLLM's sampler, whose state it takes over, with mrv1's draw."""

    def __init__(self, sampler: Sampler, device: torch.device) -> None:
        self.__dict__.update(vars(sampler))
        self.sampling_states = UnfilteredStates(sampler.sampling_states)
        self._ops = select_ops(kernel_path(device))

    def sample(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        *args: Any,  # noqa: ANN401 - ``Interface.sample_args``
        return_logprobs: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens ``[rows]`` int64 (failed: 0) and the edited logits ``[rows, vocab]``."""
        edited = self.apply_sampling_params(
            logits, expanded_idx_mapping, *args, skip_top_k_top_p=True
        )
        given = dict(zip(interface().sample_args, args, strict=True))
        states, slots = self.sampling_states, given["idx_mapping_np"]

        def by_row(values: Any, off: float) -> torch.Tensor | None:  # noqa: ANN401 - vLLM's buffer
            """Return the values of the rows; None = off in all of them."""
            return None if np.all(values.np[slots] == off) else values.gpu[expanded_idx_mapping]

        tokens = self._ops.sample_tokens(
            edited,
            states.temperature.gpu[expanded_idx_mapping],
            states.seeds.gpu[expanded_idx_mapping],
            given["pos"],
            top_k=by_row(states.top_k, states.vocab_size),
            top_p=by_row(states.top_p, 1.0),
            min_p=by_row(states.min_p, 0.0),
        )
        return tokens.clamp_(min=0), edited


def check_support(config: VllmConfig) -> None:
    """Raise ConfigError, naming the option, unless the draw can serve vLLM's configuration."""
    model = config.model_config
    problems = []
    if not config.use_v2_model_runner:
        problems.append("VLLM_USE_V2_MODEL_RUNNER: expected 1, as the first runner has no seam")
    if config.speculative_config is not None:
        problems.append("speculative_config: expected None, got a value")
    if model.logprobs_mode.startswith("processed_"):
        problems.append(f"logprobs_mode: expected a raw one, got {model.logprobs_mode!r}")
    flags = ("use_fp64_gumbel", "return_sampling_mask")
    problems += [f"{name}: expected False, got True" for name in flags if getattr(model, name, 0)]
    if problems:
        raise ConfigError(f"sampler='mrv1': {'; '.join(problems)}")
