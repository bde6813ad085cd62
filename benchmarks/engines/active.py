"""How many experts the tokens of a decode step are routed to, counted in a run of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from mrv1.config import EngineConfig
from mrv1.device import kernel_path
from mrv1.engine import EngineCore
from mrv1.kernels.registry import select_ops
from mrv1.models import DecoderModel
from mrv1.sampler import SamplingParams

TOKENS = 16
"""Most tokens of each request in the counted run."""


class ActiveExperts:
    """Counts the routed experts of each layer of the steps that run while it is ``counting``."""

    def __init__(self, model: DecoderModel) -> None:
        """Make ``model``, a decoder of the same weights whose routing is counted."""
        ops = select_ops(kernel_path(model.device))
        self._route = ops.route_experts
        self.counting = False
        self.counts: list[int] = []
        ops.route_experts = self._counted
        self.model = DecoderModel(
            model.config,
            model.weights,
            ops,
            deterministic=model.deterministic,
            rank_invariant=model.rank_invariant,
            whole_config=model.whole_config,
        )

    def _counted(self, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401 - of route_experts
        ids, weights = self._route(*args, **options)
        if self.counting:
            routed = ids[:, : args[2].top_k]
            self.counts.append(routed[routed >= 0].unique().numel())
        return ids, weights


def count_active_experts(
    model: DecoderModel,
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
) -> float | None:
    """Return the routed experts that a layer reads in a decode step: the mean over layers, steps.

    The counted run is of an engine without CUDA graphs, around the weights of ``model``, whose own
    engine is closed. None = the model has no experts, or several ranks have it.
    """
    if model.config.experts is None or config.tensor_parallel_size > 1:
        return None
    num_tokens = min(num_tokens, TOKENS)
    counted = ActiveExperts(model)
    length = max(map(len, prompts)) + num_tokens
    blocks = len(prompts) * (-(-length // config.block_size) + 1)
    config = replace(config, cuda_graphs=False, num_kv_blocks=blocks, kv_cache_memory_bytes=None)
    own = EngineCore(config, model=counted.model, progress=False)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    try:
        requests = [own.add_request(f"{i}", prompt, params) for i, prompt in enumerate(prompts)]
        while own.has_unfinished_requests:
            # A request may end a step before others: what it leaves is no whole batch.
            lengths = [len(request.output_token_ids) for request in requests]
            counted.counting = min(lengths) > 0 and max(lengths) < num_tokens - 2
            own.step()
    finally:
        own.runner.close()
    for request in requests:
        if request.error is not None:
            raise request.error
    return sum(counted.counts) / len(counted.counts) if counted.counts else None
