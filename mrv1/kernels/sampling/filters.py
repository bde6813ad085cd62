"""The sampling filters min_p, top-k and top-p in plain torch.

Used for log-probabilities of a filtered distribution, and by the oracle of ``sample_tokens``. The
kernel finds the kept tokens without a sort (``search``).
"""

from __future__ import annotations

import torch


def kept_tokens(
    scaled: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return which tokens min_p, top-k and top-p keep, in this order: [rows, vocab] bool.

    Args:
        scaled: [rows, vocab] float64, logits / temperature, no NaN; -inf is not kept.
        top_k: [rows] int32, 0 = all; ties with the k-th stay.
        top_p: [rows] float32, 1 = all: a token stays if strictly likelier tokens have less mass.
        min_p: [rows] float32, 0 = all: least probability to keep, as a share of the largest.
    """
    kept = scaled > -torch.inf
    if min_p is not None:
        kept &= scaled >= scaled.amax(1, keepdim=True) + min_p.double().log()[:, None]
    ranked, order = scaled.masked_fill(~kept, -torch.inf).sort(dim=1, descending=True)
    if top_k is not None:
        last = torch.where(top_k > 0, top_k, scaled.shape[1]).clamp(max=scaled.shape[1])
        kth = ranked.gather(1, last.long()[:, None] - 1)
        ranked = ranked.masked_fill(ranked < kth, -torch.inf)
    if top_p is not None:
        # ``before`` is the mass of strictly likelier tokens at the first of several equal values.
        probs = ranked.softmax(1)
        before = probs.cumsum(1) - probs
        is_first = torch.ones_like(ranked, dtype=torch.bool)
        is_first[:, 1:] = ranked[:, 1:] < ranked[:, :-1]
        enough = is_first & (before >= top_p.double()[:, None]) & (top_p < 1)[:, None]
        enough[:, 0] = False
        ranked = ranked.masked_fill(enough.cummax(1).values, -torch.inf)
    return torch.zeros_like(kept).scatter(1, order, ranked > -torch.inf)
