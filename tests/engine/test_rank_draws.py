"""Ranks that draw from their shards of the logits give the results of one rank, bit for bit.

The kernels are interpreted, the ranks are threads, and the layers are replaced by a function that
gives every rank the same hidden states: only what is drawn from them is compared.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrv1 import EngineConfig, SamplingParams
from mrv1.engine.core import EngineCore
from mrv1.engine.request import Request
from mrv1.models import DecoderModel
from mrv1.runner.ranks import parallel_runner
from tests.models.families import tiny_checkpoint
from tests.thread_ranks import ThreadRanks

pytestmark = [pytest.mark.interp]

VOCAB = 400
"""Four groups of ids, the last of which is not full."""
PROMPTS = [[5, 6, 7, 8] * 3, [9, 300, 350], [*range(100, 120)]]


class Odd:
    """A grammar of odd tokens above 127; also its own matcher."""

    def matcher(self) -> Odd:
        return self

    def fill_bitmask(self, bitmask: np.ndarray) -> None:
        bitmask.fill(-0x55555556)
        bitmask[:4] = 0

    def accept(self, token_id: int) -> bool:
        return token_id % 2 == 1

    def is_finished(self) -> bool:
        return False


def _hidden(model: DecoderModel, batch: Any, *_: object) -> torch.Tensor:
    """Return hidden states that depend on a token and its position, after a sum over ranks."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(VOCAB, model.config.hidden_size, generator=generator)
    model.parallel.all_reduce(torch.zeros(1))  # as the layers do
    return table[batch.input_ids] + table[(7 * batch.positions) % VOCAB]


@pytest.fixture(scope="module", autouse=True)
def _short_turns() -> Iterator[None]:
    """Let threads take turns often: those that wait would keep the others from running."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    tiny_checkpoint(path, "qwen3", vocab_size=VOCAB, tie_word_embeddings=False)
    return path


def results(checkpoint: Path, size: int, params: list[SamplingParams], **options) -> list[Request]:
    """Return what an engine of so many ranks makes of the prompts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_runner, "Ranks", ThreadRanks)
        patch.setattr(DecoderModel, "forward", _hidden)
        config = EngineConfig(
            **{
                "model": str(checkpoint), "dtype": "float32", "device": "cpu",
                "num_kv_blocks": 24, "max_num_seqs": 6, "max_num_batched_tokens": 48,
                "max_model_len": 64, "tensor_parallel_size": size,
            } | options,
        )  # fmt: skip
        core = EngineCore(config, progress=False)
        step = core.runner._step
        assert (step.logits.shards is not None) is (size > 1)
        requests = [
            core.add_request(str(i), PROMPTS[i % len(PROMPTS)], each)
            for i, each in enumerate(params)
        ]
        while core.has_unfinished_requests:
            core.step()
        core.runner.close()
    return requests


def assert_equal(several: list[Request], one: list[Request]) -> None:
    for got, want in zip(several, one, strict=True):
        assert got.error is want.error is None
        assert got.output_token_ids == want.output_token_ids
        for name in ("output_logprobs", "prompt_logprobs"):
            for ours, theirs in zip(getattr(got, name), getattr(want, name), strict=True):
                for field in ("token_ids", "logprobs", "ranks"):
                    np.testing.assert_array_equal(getattr(ours, field), getattr(theirs, field))


PARAMS = [
    SamplingParams(temperature=0, max_tokens=3, repetition_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(temperature=1.0, seed=1, max_tokens=3, logprobs=3, prompt_logprobs=5),
    SamplingParams(temperature=0.8, seed=2, max_tokens=3, top_k=20, presence_penalty=2.0),
    SamplingParams(
        temperature=1.2, seed=3, max_tokens=3, top_p=0.8, logit_bias={9: 4.0, 399: 30.0},
        bad_words_token_ids=[[399], [11, 12]], logprobs=2,
    ),
    SamplingParams(
        temperature=1.5, seed=4, max_tokens=3, min_p=0.05, stop_token_ids=[300, 350],
        min_tokens=2, logprob_token_ids=[1, 130, 399],
    ),
    SamplingParams(
        temperature=0.9, seed=5, max_tokens=3, allowed_token_ids=[3, 150, 200, 300, 399],
        logprob_token_ids=[*range(0, VOCAB, 45)], logprobs=1, prompt_logprobs=0,
    ),
]  # fmt: skip


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"logprobs_mode": "processed_logprobs"}, marks=pytest.mark.full),
        {"speculative": {"method": "ngram", "num_tokens": 2, "prompt_lookup_min": 1}},
    ],
    ids=["raw", "processed", "drafts"],
)
def test_every_kind_of_draw_equals_one_rank(checkpoint, size, options):
    one, several = (results(checkpoint, n, PARAMS, **options) for n in (1, size))
    assert_equal(several, one)
    assert one[1].prompt_logprobs
    assert len(one[5].output_logprobs[0].token_ids.ravel()) > 8


def test_grammars_and_whole_vocabularies_equal_one_rank(checkpoint):
    params = [
        SamplingParams(temperature=1.0, seed=1, max_tokens=3, structured_output=Odd(), logprobs=2),
        SamplingParams(temperature=1.0, seed=2, max_tokens=3, logprobs=-1, top_k=5),
        SamplingParams(temperature=0, max_tokens=3, logprobs=2),
    ]
    one, several = (results(checkpoint, n, params, max_logprobs=-1) for n in (1, 2))
    assert_equal(several, one)
    assert all(token % 2 and token > 127 for token in several[0].output_token_ids)
