"""What a scheduler schedules with: its pools, its limits and its policies.

How many prompt tokens a step should have depends on CUDA graphs and on operations.
A graph computes all tokens that it was captured with: a step of 1,100 prompt tokens takes as long
as one of 1,536, if that is the next larger graph. Computing 1,024 of them, and leaving 76 to the
next step, costs nothing where that has prompts anyway, and a step of few tokens else.

The decodes of a step wait for its prompts. Beyond some number of tokens a step is no more
efficient: a long prompt may as well take several steps, each with a token for every decode.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from mrv1.config import EngineConfig, SchedulingPolicyName
from mrv1.engine.prefix_waits import LEAST_SHARED_TOKENS
from mrv1.headwise import FULL, Visible
from mrv1.models.weights import checkpoint_tensors, empty_weights
from mrv1.runner import ModelRunner

LEAST_PADDING = 256
"""Tokens whose products take as long as reading the weights once: 16-bit weights need as many
operations for a token as they have bytes, so this is a GPU's operations per byte: 185 on an H200
(790 TFLOP/s, 4.3 TB/s, both measured), 260 on an H100."""
STEP_FLOPS = 5e11
"""Operations of the least time of a step, however few its tokens and weights: the 0.6 ms of a
decode step of the Qwen3-0.6B shape on an H200."""
MIXED_FLOPS = 4e12  # of prompts for which decodes may wait: 5 to 6 ms on an H100 or H200
LEAST_MIXED_TOKENS = 1024
"""Prompt tokens beside decodes with which a step is about as efficient as with more: products of
an 8B layer run at 750 TFLOP/s or more on an H100, as with 4,096 tokens."""


@dataclass(frozen=True, slots=True)
class Padding:
    """The sizes of the graphs with prompts, and how much padding is worth another step."""

    sizes: tuple[int, ...]  # prompt tokens of the graphs, in rising order
    worth_a_step: int  # least padding, in tokens, that costs more time than a further step

    @classmethod
    def for_runner(cls, runner: ModelRunner) -> Self | None:
        """Return the padding of a runner's steps; None where no graph runs steps with prompts."""
        sizes = runner.prompt_graph_sizes
        if not sizes:
            return None
        in_tokens = int(STEP_FLOPS / token_flops(runner))
        return cls(sizes, max(LEAST_PADDING, in_tokens))

    def surplus(self, num_tokens: int) -> int:
        """Return how many prompt tokens the next step should compute, so the others fill a graph.

        0 = the padding costs less than a further step, or no graph is smaller.
        """
        larger = bisect_left(self.sizes, num_tokens)
        smaller = bisect_right(self.sizes, num_tokens) - 1
        if smaller < 0 or larger == len(self.sizes):
            return 0
        if self.sizes[larger] - num_tokens < self.worth_a_step:
            return 0
        return num_tokens - self.sizes[smaller]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The parameters of a ``Scheduler``."""

    num_blocks: Sequence[int]  # blocks of each head group
    block_size: int  # tokens per block
    max_num_seqs: int  # most requests that run at the same time
    max_num_batched_tokens: int  # most tokens of a step
    keeps: Sequence[Visible] = (FULL,)  # window and sink of each group; without a window first
    eos_token_ids: Sequence[int] = ()  # end-of-sequence tokens
    max_steps_in_flight: int = 2  # most plans that await their output
    enable_prefix_caching: bool = False  # keep blocks for requests with the same prefix
    custom_masks: tuple[str, ...] = ()  # features that may mask tokens, for errors
    max_loras: int = 0  # adapters of the requests that run at the same time
    num_feature_rows: int = 0  # rows of the runner's buffer for the features of multimodal items
    scheduling_policy: SchedulingPolicyName = "fcfs"
    long_prefill_token_threshold: int = 0  # most tokens of a request in a step; 0 = no limit
    max_mixed_prefill_tokens: int | None = None  # prompt tokens beside decodes; None = any
    padding: Padding | None = None  # graphs of steps with prompts; None = not padded
    least_shared_tokens: int = LEAST_SHARED_TOKENS  # for which a request waits
    drafts_beside_logprobs: bool = True  # whether steps with log-probabilities may have drafts
    num_head_drafts: int = 0  # drafts of a row that a draft head makes on the device; 0 = no head

    @classmethod
    def for_runner(
        cls,
        config: EngineConfig,
        runner: ModelRunner,
        *,
        eos_token_ids: Sequence[int],
        custom_masks: tuple[str, ...],
    ) -> SchedulerConfig:
        """Return the parameters of an engine's scheduler, which plans the steps of ``runner``."""
        return cls(
            num_blocks=runner.kv_cache.num_blocks,
            keeps=[group.keeps for group in runner.head_groups.groups],
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            eos_token_ids=eos_token_ids,
            max_steps_in_flight=config.steps_in_flight,
            enable_prefix_caching=config.caches_prefixes,
            custom_masks=custom_masks,
            max_loras=config.max_loras if config.enable_lora else 0,
            num_feature_rows=runner.num_feature_rows,
            scheduling_policy=config.scheduling_policy,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            max_mixed_prefill_tokens=mixed_prefill_tokens(config, runner),
            padding=Padding.for_runner(runner),
            # Drafts with log-probabilities leave the CUDA graphs, which costs more than they gain.
            drafts_beside_logprobs=not runner.captures_graphs,
            num_head_drafts=config.num_head_drafts,
        )


def token_flops(runner: ModelRunner) -> int:
    """Return the operations of a token in the products of the layers."""
    config = replace(runner.model.config, quantization=None)
    tensors = checkpoint_tensors(config, empty_weights(config, "meta", runner.model.dtype))
    layers = [each for name, each in tensors.items() if name.startswith("model.layers.")]
    return 2 * sum(each.numel() for each in layers if each.ndim > 1)


def mixed_prefill_tokens(config: EngineConfig, runner: ModelRunner) -> int | None:
    """Return ``max_mixed_prefill_tokens`` or its default for a runner; None = no limit."""
    sizes = runner.prompt_graph_sizes
    if config.max_mixed_prefill_tokens is not None:
        return config.max_mixed_prefill_tokens
    if not sizes:
        return None
    most = max(LEAST_MIXED_TOKENS, int(MIXED_FLOPS / token_flops(runner)))
    return max([size for size in sizes if size <= most])
