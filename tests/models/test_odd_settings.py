"""Families with unusual settings, against transformers: every setting that counts is another one.

Usual settings of every family are in the other tests of models.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mrv1 import LLM, SamplingParams
from mrv1.kernels import FeatureRows
from mrv1.kernels.registry import select_ops
from mrv1.models import ParallelContext, load_model
from tests.models.driver import PagedDriver, Request, blocks_needed
from tests.models.families import (
    ODD,
    expected_logits,
    random_model,
    save_checkpoint,
    tiny_checkpoint,
    tiny_config,
)
from tests.models.quantizing_cache import fp8_logits
from tests.thread_ranks import on_ranks

PROMPT = [(7 * i) % 160 for i in range(40)]
CASES = pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param(family, settings, id=f"{family}-{index}")
        for family, several in ODD.items()
        for index, settings in enumerate(several)
    ],
)


def logits(
    path: Path,
    chunk: int | None,
    parallel: ParallelContext | None = None,
    **cache: Any,
) -> torch.Tensor:
    model = load_model(
        path, device="cpu", dtype=torch.float64, ops=select_ops("reference"), progress=False,
        parallel=parallel,
    )  # fmt: skip
    blocks = blocks_needed([PROMPT], 16)
    return PagedDriver(model, block_size=16, num_blocks=blocks, **cache).logits([PROMPT], chunk)[0]


@CASES
def test_logits_equal_those_of_transformers(tmp_path, family, settings):
    """Token by token, in chunks and at once, with cached keys and values of both kinds."""
    model = save_checkpoint(tmp_path, tiny_config(family, **settings)).double()
    expected, rounded = expected_logits(model, PROMPT), fp8_logits(model, PROMPT)
    for chunk in (1, 24, None):
        torch.testing.assert_close(logits(tmp_path, chunk), expected, rtol=0, atol=1e-4)
        found = logits(tmp_path, chunk, granularity="token")
        assert (found - rounded).abs().mean() < 1e-4 * rounded.std()  # a last bit may turn a code


@CASES
def test_logits_of_ranks_equal_those_of_one(tmp_path, family, settings):
    tiny_checkpoint(tmp_path, family, **settings)
    expected = logits(tmp_path, 24)
    for found in on_ranks(2, lambda parallel: logits(tmp_path, 24, parallel)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@CASES
def test_greedy_tokens_equal_those_of_transformers(tmp_path, family, settings):
    """Of a prompt, and again, when the blocks of its prefix are cached."""
    model = save_checkpoint(tmp_path, tiny_config(family, **settings)).double()
    with LLM(tmp_path, dtype="float64", device="cpu", num_kv_blocks=64, block_size=16) as llm:
        tokens, cached = (
            list(llm.generate([PROMPT], greedy(count))[0].outputs[0].token_ids)
            for count in (64, 8)
        )
        assert llm.metrics()["prefix_hit_tokens"] == 32
    expected = expected_logits(model, PROMPT + tokens)[len(PROMPT) - 1 : -1].argmax(-1)
    assert tokens == expected.tolist()
    assert cached == tokens[:8]


def test_granite_scales_features_as_transformers_scales_embeddings(tmp_path):
    model = save_checkpoint(tmp_path, tiny_config("granite", **ODD["granite"][0])).double()
    embeds = model.get_input_embeddings().weight[PROMPT].detach().clone()
    embeds[3:6] = torch.arange(3 * 64, dtype=torch.float64).view(3, 64).sin()
    with torch.no_grad():
        expected = model(inputs_embeds=embeds[None]).logits[0]
    decoder = load_model(
        tmp_path, device="cpu", dtype=torch.float64, ops=select_ops("reference"), progress=False
    )
    driver = PagedDriver(decoder, block_size=16, num_blocks=3)
    source = torch.tensor([-1, -1, -1, 0, 1, 2], dtype=torch.int32)
    features = FeatureRows(embeds[3:6].clone(), source, torch.tensor([6], dtype=torch.int32))
    batch = replace(driver.batch([Request(PROMPT)], [40]), features=features)
    found = decoder.compute_logits(decoder.forward(batch, driver.caches)[:40])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["glm4", "granitemoehybrid"])
def test_updates_take_a_familys_own_names(tmp_path, family):
    """Modules with other names, and gates and ups in one tensor."""
    tiny_checkpoint(tmp_path, family)
    other = random_model(tiny_config(family), seed=1).double()
    with LLM(tmp_path, dtype="float64", device="cpu", num_kv_blocks=64, block_size=16) as llm:
        llm.update_weights(other.state_dict())
        tokens = list(llm.generate([PROMPT], greedy(16))[0].outputs[0].token_ids)
    expected = expected_logits(other, PROMPT + tokens)[len(PROMPT) - 1 : -1].argmax(-1)
    assert tokens == expected.tolist()


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
