"""Held-out measurements: text loss, and recall accuracy as a function of distance."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional

from training.corpus import TokenIds
from training.recall import RecallVocabulary, recall_trial

Logits = Callable[[torch.Tensor], torch.Tensor]


@torch.inference_mode()
def text_loss(
    logits_of: Logits, ids: TokenIds, num_tokens: int, rows: int, device: torch.device
) -> float:
    """Return the mean loss in nats per token over ``ids``.

    Windows of ``num_tokens`` follow each other without overlap; each starts with no context. The
    last incomplete window is left out.
    """
    num_windows = (len(ids) - 1) // num_tokens
    total = 0.0
    for first in range(0, num_windows, rows):
        starts = np.arange(first, min(first + rows, num_windows)) * num_tokens
        window = torch.from_numpy(ids[starts[:, None] + np.arange(num_tokens + 1)]).to(device)
        logits = logits_of(window[:, :-1]).float()
        loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        total += float(loss) * len(starts)
    return total / num_windows


@torch.inference_mode()
def recall_accuracy(
    logits_of: Logits,
    vocabulary: RecallVocabulary,
    ids: TokenIds,
    *,
    distance: int,
    num_trials: int,
    num_tokens: int,
    rows: int,
    seed: int,
    device: torch.device,
) -> float:
    """Return the fraction of questions whose answer is the argmax over the whole vocabulary.

    Args:
        logits_of: maps token ids [rows, num_tokens] to logits [rows, num_tokens, vocab].
        vocabulary: the tokens of recall lines.
        ids: held-out text, the filler.
        distance: tokens from the fact's value to the answer.
        num_trials: number of questions.
        num_tokens: tokens of a row.
        rows: questions per forward pass.
        seed: seed of the trials; each distance has its own trials.
        device: where the model runs.
    """
    rng = np.random.default_rng([seed, distance])
    correct = 0
    for first in range(0, num_trials, rows):
        trials = []
        for _ in range(min(rows, num_trials - first)):
            start = int(rng.integers(len(ids) - num_tokens + 1))
            filler = ids[start : start + num_tokens]
            trials.append(recall_trial(rng, vocabulary, filler, distance))
        tokens = torch.from_numpy(np.stack([trial.tokens for trial in trials])).to(device)
        ends = torch.tensor([trial.question_end for trial in trials], device=device)
        answers = torch.tensor([trial.answer for trial in trials], device=device)
        logits = logits_of(tokens)
        guesses = logits[torch.arange(len(trials), device=device), ends].argmax(dim=-1)
        correct += int((guesses == answers).sum())
    return correct / num_trials


def bits_per_byte(nats_per_token: float, num_tokens: int, num_bytes: int) -> float:
    """Convert a loss per token of a text into bits per byte of it."""
    return nats_per_token * num_tokens / num_bytes / math.log(2)
