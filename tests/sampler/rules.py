"""The documented edits of a row of logits, in their order, in plain Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch

from mrv1 import SamplingParams


def edited(
    logits: torch.Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    late_token_ids: Collection[int],
) -> torch.Tensor:
    """Return a row's logits in float64, edited for the token after prompt and output.

    ``late_token_ids`` are not drawn before ``min_tokens``. Biased logits are rounded to the dtype
    of ``logits``, as the op documents; the result is not rounded.
    """
    dtype, logits = logits.dtype, logits.double()
    if params.allowed_token_ids is not None:
        is_allowed = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        is_allowed[list(params.allowed_token_ids)] = True
        logits = logits.masked_fill(~is_allowed, -torch.inf)
    else:
        logits = logits.clone()
    seen = [*prompt, *output] if params.bad_words_match_prompt else list(output)
    for *prefix, last in params.bad_words_token_ids:
        if seen[len(seen) - len(prefix) :] == prefix:
            logits[last] = -torch.inf
    if len(output) < params.min_tokens:
        logits[list(late_token_ids)] = -torch.inf
    for token, bias in params.logit_bias.items():
        logits[token] = (logits[token] + bias).to(dtype)
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token, count in Counter(output).items():
        logits[token] -= params.frequency_penalty * count
        logits[token] -= params.presence_penalty
    return logits
