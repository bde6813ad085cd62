"""Calibration of one checkpoint, from its files to a policy and what the policy costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mrv1.calibration.forward import PolicyModel
from mrv1.calibration.losses import Losses, measure
from mrv1.calibration.options import CalibrateOptions
from mrv1.calibration.prompts import TASK_DATA, load_texts
from mrv1.calibration.tasks import TaskPrompts
from mrv1.config import dtype_name
from mrv1.device import kernel_path, resolve_device, resolve_dtype
from mrv1.errors import ConfigError
from mrv1.headwise import HeadPolicy, HeadRanking, RecallPrompt, rank_heads, rankable_heads
from mrv1.headwise.calibrate import num_losses
from mrv1.kernels.registry import select_ops
from mrv1.models import Checkpoint, ModelConfig, load_model

Progress = Callable[[int, int], None]  # passes done, and expected in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The result of a calibration."""

    policy: HeadPolicy
    ranking: HeadRanking
    full: Losses
    """Losses of the model as it is, on prompts that the ranking has not seen."""
    calibrated: Losses
    """Losses of the model under the policy, on the same prompts."""


def calibrate(
    options: CalibrateOptions, on_progress: Progress = lambda done, total: None
) -> Calibration:
    """Rank a checkpoint's KV heads by the loss when they stream, and cut at the budget.

    Raises:
        ConfigError: the checkpoint, its tokenizer or the data cannot be used, the prompts are too
            short for their facts, or a loss is not finite.
        UnsupportedDeviceError: there is no such device.
    """
    checkpoint = Checkpoint.open(options.model)
    device = resolve_device(options.device)
    config = ModelConfig.from_pretrained(checkpoint.path)
    heads = rankable_heads(config.layer_windows, config.num_kv_heads)
    # Ranking and judging draw separate prompts: text may repeat, places and facts are drawn anew.
    (ranked_on, judged_on), with_text = _prompts(checkpoint, options)
    decoder = load_model(
        checkpoint.path,
        device=device,
        dtype=resolve_dtype(dtype_name(options.dtype), config.torch_dtype, device),
        ops=select_ops(kernel_path(device)),
        max_model_len=options.num_tokens,
    )
    model = PolicyModel(decoder, options.num_tokens, kv_cache_dtype=options.kv_cache_dtype)
    done, total = 0, options.num_prompts * (num_losses(len(heads), options.method) + 2)

    def advance() -> None:
        nonlocal done
        done += 1
        on_progress(done, total)

    def begin_round(num_left: int) -> None:
        """Update the total: the round's first loss is known, and two losses follow the ranking."""
        nonlocal total
        total = done + options.num_prompts * (num_losses(num_left, options.method) + 1)

    def losses(prompts: list[RecallPrompt], policy: HeadPolicy) -> Losses:
        return measure(model, prompts, policy, with_text=with_text, on_forward=advance)

    ranking = rank_heads(
        config.num_layers,
        config.num_kv_heads,
        heads,
        options.streaming,
        lambda policy: losses(ranked_on, policy).total,
        method=options.method,
        on_round=begin_round,
    )
    policy = ranking.policy(options.budget, options.streaming)
    return Calibration(
        policy=policy,
        ranking=ranking,
        full=losses(judged_on, HeadPolicy.full(config.num_layers, config.num_kv_heads)),
        calibrated=losses(judged_on, policy),
    )


def _prompts(
    checkpoint: Checkpoint, options: CalibrateOptions
) -> tuple[list[list[RecallPrompt]], bool]:
    """Return two draws of prompts, and whether their fillers are text to be predicted."""
    generators = [np.random.default_rng([options.seed, part]) for part in range(2)]
    if str(options.data) == TASK_DATA:
        if not checkpoint.has_tokenizer:
            raise ConfigError(
                f"calibration: expected a tokenizer in {str(checkpoint.path)!r}, found none"
            )
        if options.num_tokens <= options.window + options.sink:
            raise ConfigError(
                f"num_tokens: expected more than window {options.window} and sink {options.sink}, "
                f"which hide nothing of shorter prompts, got {options.num_tokens}"
            )
        tasks = TaskPrompts(checkpoint.tokenizer())
        return [
            tasks.recall_prompts(rng, options.num_prompts, options.num_tokens)
            for rng in generators
        ], False
    texts = load_texts(checkpoint, options.data, options.num_tokens)
    draws = [
        texts.prompts(
            rng,
            options.num_prompts,
            num_tokens=options.num_tokens,
            num_facts=options.num_facts,
            sink=options.sink,
            distance=options.window + 1,  # at ``window``, the question still sees the fact
        )
        for rng in generators
    ]
    return draws, texts.ids is not None
