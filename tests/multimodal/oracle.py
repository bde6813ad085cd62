"""The embedded model in transformers, fed with embeddings in which features replace some rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from mrv1.config import checkpoint_dir
from mrv1.device import kernel_path
from mrv1.engine.request import Request
from mrv1.kernels.registry import select_ops
from mrv1.models import DecoderModel, load_model

HIDDEN_SIZE = 256
VOCAB = 2048


@cache
def tiny() -> DecoderModel:
    """Return mrv1's model, which every engine of these tests shares."""
    device = torch.device("cpu")
    ops = select_ops(kernel_path(device))
    return load_model("tiny", device=device, dtype=torch.float32, ops=ops)


@cache
def transformers_tiny() -> Any:
    return AutoModelForCausalLM.from_pretrained(
        checkpoint_dir("tiny"), dtype=torch.float32, attn_implementation="eager"
    ).eval()


def features(seed: int, num_rows: int) -> torch.Tensor:
    """Return rows in the range of the model's embeddings."""
    generator = torch.Generator().manual_seed(seed)
    scale = transformers_tiny().get_input_embeddings().weight.std().item()
    return torch.randn(num_rows, HIDDEN_SIZE, generator=generator) * scale


def logprobs_of(
    token_ids: Sequence[int],
    items: Sequence[tuple[int, torch.Tensor]],
    ranges: Sequence[tuple[int, int]],
    model: Any = None,
) -> torch.Tensor:
    """Return ``[tokens, vocab]`` log-probabilities after each token of a sequence.

    Args:
        token_ids: prompt and output.
        items: start of each item, and its rows.
        ranges: for each prompt token the keys that it sees; later tokens are causal.
        model: a model of transformers with eager attention; None = the embedded one.
    """
    model = transformers_tiny() if model is None else model
    embeddings = model.get_input_embeddings()(torch.tensor([token_ids])).detach().clone()
    for start, rows in items:
        embeddings[0, start : start + len(rows)] = rows
    num_tokens = len(token_ids)
    mask = torch.full((num_tokens, num_tokens), -torch.inf)
    for token in range(num_tokens):
        low, high = ranges[token] if token < len(ranges) else (0, token + 1)
        mask[token, low:high] = 0.0
    with torch.no_grad():
        logits = model(inputs_embeds=embeddings, attention_mask=mask[None, None]).logits[0]
    return logits.log_softmax(-1)


def check_output(
    request: Request,
    items: Sequence[tuple[int, torch.Tensor]],
    ranges: Sequence[tuple[int, int]] = (),
) -> None:
    """Check a greedy request's tokens and log-probabilities against transformers, within 1e-4."""
    assert request.error is None, request.error
    output = request.output_token_ids
    want = logprobs_of([*request.prompt_token_ids, *output], items, ranges)
    want = want[len(request.prompt_token_ids) - 1 : -1]
    got = torch.tensor([part.logprobs[0, 0] for part in request.output_logprobs])
    torch.testing.assert_close(got.float(), want[range(len(output)), output], rtol=0, atol=1e-4)
    assert bool((want.max(dim=1).values - got < 1e-4).all()), "a token was not the likeliest"
