"""The loss of a model under a policy: of a prompt's answers, and of the text around its lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from mrv1.calibration.forward import PolicyModel
from mrv1.headwise import HeadPolicy, RecallPrompt

LOGIT_ROWS = 512  # rows whose logits exist at a time: 300 MB for a vocabulary of 150,000


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Means over prompts."""

    recall: float
    """Nats per answer."""
    accuracy: float
    """Share of the answers that are the argmax over the whole vocabulary."""
    num_answers: int
    text: float | None
    """Nats per token of the text; None = the filler is not text."""

    @property
    def total(self) -> float:
        """The loss that calibration keeps low: nats per answer plus nats per token of text."""
        return self.recall + (self.text or 0.0)


def measure(
    model: PolicyModel,
    prompts: Sequence[RecallPrompt],
    policy: HeadPolicy,
    *,
    with_text: bool,
    on_forward: Callable[[], None] = lambda: None,
) -> Losses:
    """Return the losses of a model on at least one prompt, its heads under a policy.

    ``with_text``: fillers are text to be predicted; ``on_forward`` is called after every prompt.
    Logits are float32 (float64 of a float64 model), summed over tokens in float64.
    """
    recall, text, correct = [], [], []
    for prompt in prompts:
        hidden = model.hidden(prompt.tokens, policy)
        losses, hits = _of_tokens(model, hidden, prompt.tokens, prompt.answers)
        recall.append(losses)
        correct.append(hits)
        if with_text:
            targets = np.flatnonzero(prompt.is_filler[1:]) + 1  # nothing predicts the first
            text.append(_of_tokens(model, hidden, prompt.tokens, targets)[0])
        on_forward()
    hits = torch.cat(correct)
    return Losses(
        recall=float(torch.cat(recall).mean()),
        accuracy=float(hits.double().mean()),
        num_answers=len(hits),
        text=float(torch.cat(text).mean()) if with_text else None,
    )


@torch.inference_mode()
def _of_tokens(
    model: PolicyModel,
    hidden: torch.Tensor,
    tokens: npt.NDArray[np.int64],
    targets: npt.NDArray[np.int64],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each target's loss (float64) and whether it is its logits' argmax."""
    rows = torch.from_numpy(targets - 1).to(hidden.device)
    expected = torch.from_numpy(tokens[targets]).to(hidden.device)
    losses, hits = [], []
    for part, token in zip(rows.split(LOGIT_ROWS), expected.split(LOGIT_ROWS), strict=True):
        logits = model.model.compute_logits(hidden[part])
        losses.append(functional.cross_entropy(logits, token, reduction="none").double())
        hits.append(logits.argmax(-1) == token)
    return torch.cat(losses), torch.cat(hits)
