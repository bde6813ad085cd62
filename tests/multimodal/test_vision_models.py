"""Prompts with images and videos through the engine, against transformers' own models.

The features are transformers' too: those that its vision encoder hands to its text model.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from mrv1.config import EngineConfig
from mrv1.engine.core import EngineCore
from mrv1.multimodal import MultimodalItem
from mrv1.runner.step import TokenLogprobs
from mrv1.sampler import SamplingParams
from tests.models.vision_families import (
    IMAGE,
    VIDEO,
    VISION_END,
    VISION_FAMILIES,
    VISION_START,
)

TOLERANCE = 1e-4
VOCAB = 160
PATCH_SIZE = 3 * 2 * 4 * 4
"""Values of a patch: colours, frames, rows, columns."""


@dataclass
class Visual:
    """An image, or a video of so many steps in time."""

    grid: tuple[int, int, int]
    is_video: bool = False
    seconds: float = 1.0


@dataclass
class Prompt:
    """A prompt for both sides."""

    token_ids: list[int] = field(default_factory=list)
    items: list[MultimodalItem] = field(default_factory=list)
    inputs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of transformers' model."""


@torch.no_grad()
def make_prompt(family: str, oracle: Any, parts: list[int | Visual], *, seed: int = 0) -> Prompt:
    """Return a prompt of random text (number of tokens) and random images and videos."""
    generator = torch.Generator().manual_seed(seed)
    prompt = Prompt()
    types: list[int] = []
    pixels: dict[str, list[torch.Tensor]] = {"image": [], "video": []}
    grids: dict[str, list[tuple[int, int, int]]] = {"image": [], "video": []}
    seconds: list[float] = []

    def text(*token_ids: int) -> None:
        prompt.token_ids += token_ids
        types.extend([0] * len(token_ids))

    for part in parts:
        if isinstance(part, int):
            text(*torch.randint(3, IMAGE, (part,), generator=generator).tolist())
            continue
        modality = "video" if part.is_video else "image"
        patches = torch.randn(int(np.prod(part.grid)), PATCH_SIZE, generator=generator)
        pixels[modality].append(patches)
        grids[modality].append(part.grid)
        if part.is_video:
            seconds.append(part.seconds)
        encoded = oracle.model.visual(patches, grid_thw=torch.tensor([part.grid]))
        deep = getattr(encoded, "deepstack_features", None) or []
        features = torch.cat([encoded.pooler_output, *deep], dim=1)
        frames, token = part.grid[0], VIDEO if part.is_video else IMAGE
        apart = family == "qwen3_vl" and part.is_video
        for rows in features.chunk(frames) if apart else [features]:
            if apart:
                text(7)  # stands for the time
            text(VISION_START)
            prompt.items.append(
                MultimodalItem(
                    features=rows,
                    start=len(prompt.token_ids),
                    modality=modality,
                    grid_thw=(1, *part.grid[1:]) if apart else part.grid,
                    second_per_grid=part.seconds
                    if part.is_video and family == "qwen2_5_vl"
                    else None,
                )
            )
            prompt.token_ids += [token] * len(rows)
            types.extend([2 if part.is_video else 1] * len(rows))
            text(VISION_END)
    prompt.inputs["mm_token_type_ids"] = torch.tensor([types])
    for modality, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if pixels[modality]:
            prompt.inputs[name] = torch.cat(pixels[modality])
            prompt.inputs[f"{modality}_grid_thw"] = torch.tensor(grids[modality])
    if seconds and family == "qwen2_5_vl":
        prompt.inputs["second_per_grid_ts"] = seconds
    return prompt


@torch.no_grad()
def expected(
    oracle: Any, prompt: Prompt, num_tokens: int
) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """Return transformers' log-probabilities of the prompt, and of its greedy output tokens."""
    ids = torch.tensor([prompt.token_ids])
    out = oracle(ids, use_cache=True, **prompt.inputs)
    in_prompt = out.logits[0].log_softmax(-1)
    tokens, rows = [], []
    logits = out.logits[0, -1]
    for _ in range(num_tokens):
        rows.append(logits.log_softmax(-1))
        tokens.append(int(logits.argmax()))
        out = oracle(
            torch.tensor([[tokens[-1]]]), past_key_values=out.past_key_values, use_cache=True
        )
        logits = out.logits[0, -1]
    oracle.model.rope_deltas = None
    return in_prompt, tokens, torch.stack(rows)


MIXTURE: list[list[int | Visual]] = [
    [21],
    [3, Visual((1, 4, 6)), 5],
    [Visual((1, 6, 4)), 2, Visual((1, 4, 4)), 9],
    [4, Visual((3, 4, 4), is_video=True, seconds=1.7), 6],
    [2, Visual((1, 4, 4)), 3, Visual((5, 2, 2), is_video=True, seconds=3.0)],
]
"""Text alone, one image, two images, a video between text, an image and a long video at the end."""


def run(
    engine: EngineCore, prompts: list[Prompt], num_tokens: int, device_features: bool = False
) -> list[Any]:
    """Return the requests of all prompts, run together with all log-probabilities."""
    params = SamplingParams(
        temperature=0,
        max_tokens=num_tokens,
        ignore_eos=True,
        prompt_logprobs=VOCAB,
        logprobs=VOCAB,
    )
    requests = [
        engine.add_request(str(index), prompt.token_ids, params, multimodal=prompt.items)
        for index, prompt in enumerate(prompts)
    ]
    while engine.has_unfinished_requests:
        engine.step()
    return requests


def by_token(parts: list[TokenLogprobs]) -> torch.Tensor:
    """Return log-probabilities ``[positions, vocab]`` in the order of token ids."""
    ids = torch.from_numpy(np.concatenate([part.token_ids for part in parts])).long()
    values = torch.from_numpy(np.concatenate([part.logprobs for part in parts]))
    return torch.full((len(ids), VOCAB), torch.nan).scatter_(1, ids, values)


def check(oracle: Any, prompts: list[Prompt], requests: list[Any], num_tokens: int) -> None:
    for prompt, request in zip(prompts, requests, strict=True):
        in_prompt, tokens, in_output = expected(oracle, prompt, num_tokens)
        assert request.error is None
        assert list(request.output_token_ids) == tokens
        got = by_token(request.prompt_logprobs)
        torch.testing.assert_close(got, in_prompt[:-1], rtol=0, atol=TOLERANCE)
        got = by_token(request.output_logprobs)
        torch.testing.assert_close(got, in_output, rtol=0, atol=TOLERANCE)


def engine_of(checkpoint: Any, **options: Any) -> EngineCore:
    defaults = {
        "dtype": "float32",
        "device": "cpu",
        "num_kv_blocks": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_logprobs": -1,
        "mm_cache_memory_bytes": 1 << 20,
    }
    return EngineCore(EngineConfig(model=str(checkpoint.path), **(defaults | options)))


@pytest.mark.parametrize("family", VISION_FAMILIES)
@pytest.mark.parametrize("chunk", [5, 64])
def test_logits_and_greedy_tokens_equal_transformers(checkpoints, family, chunk):
    """In one batch, two steps in flight; 5 tokens a step cut every item."""
    checkpoint = checkpoints(family)
    oracle = checkpoint.oracle
    prompts = [make_prompt(family, oracle, parts, seed=s) for s, parts in enumerate(MIXTURE)]
    engine = engine_of(checkpoint, max_num_batched_tokens=chunk, max_num_seqs=5)
    requests = run(engine, prompts, 6)
    check(oracle, prompts, requests, 6)
