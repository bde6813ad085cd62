"""What a scheduler schedules with: its pools, its limits and its policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mrv1.config import EngineConfig, SchedulingPolicyName
from mrv1.engine.graph_padding import Padding, mixed_prefill_tokens
from mrv1.engine.prefix_waits import LEAST_SHARED_TOKENS
from mrv1.headwise import FULL, Visible
from mrv1.runner import ModelRunner


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
