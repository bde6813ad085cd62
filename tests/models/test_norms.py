"""Norms after layers, and of queries and keys, against transformers.

One family is in the table for these tests only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import Exaone4Config, Olmo2Config

from mrv1.kernels.registry import select_ops
from mrv1.models import ParallelContext, load_model
from mrv1.models.architectures import ARCHITECTURES, Architecture, NormOrder, QKNormKind
from tests.models import families
from tests.models.driver import PagedDriver, blocks_needed
from tests.models.families import expected_logits, save_checkpoint, tiny_config
from tests.thread_ranks import on_ranks

TABLE = {
    "Exaone4ForCausalLM": Architecture(model_type="exaone4", norm_order="after", qk_norm="head"),
}
CONFIGS = {"olmo2": Olmo2Config, "exaone4": Exaone4Config}
SETTINGS: dict[str, dict[str, Any]] = {
    "olmo2": {},
    "exaone4": {"layer_types": ["full_attention"] * 2, "sliding_window": None},
}
PROMPT = [(7 * i) % 160 for i in range(40)]


@pytest.fixture
def family(request, monkeypatch) -> str:
    for name, architecture in TABLE.items():
        monkeypatch.setitem(ARCHITECTURES, name, architecture)
    for name, config in CONFIGS.items():
        monkeypatch.setitem(families.FAMILIES, name, config)
    return request.param


def checkpoint(folder: Path, family: str) -> torch.Tensor:
    """Write a checkpoint; return transformers' logits of the prompt, with norms in float32."""
    model = save_checkpoint(folder, tiny_config(family, **SETTINGS[family]))
    return expected_logits(model.double(), PROMPT)


def logits(path: Path, chunk: int, parallel: ParallelContext | None = None) -> torch.Tensor:
    model = load_model(
        path, device="cpu", dtype=torch.float64, ops=select_ops("reference"), progress=False,
        parallel=parallel,
    )  # fmt: skip
    driver = PagedDriver(
        model, block_size=16, num_blocks=blocks_needed([PROMPT], 16), num_padding_rows=0
    )
    return driver.logits([PROMPT], chunk)[0]


def test_every_value_of_the_fields_has_a_family():
    families = [*ARCHITECTURES.values(), *TABLE.values()]
    assert {each.norm_order for each in families} == {*get_args(NormOrder)}
    assert {each.qk_norm for each in families} == {*get_args(QKNormKind)}


@pytest.mark.parametrize("family", CONFIGS, indirect=True)
def test_logits_equal_those_of_transformers(tmp_path, family):
    """Token by token, which norms later, and with several tokens."""
    expected = checkpoint(tmp_path, family)
    for chunk in (1, 24):
        torch.testing.assert_close(logits(tmp_path, chunk), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [2, 4])  # of 2 KV heads: with 4 ranks, two have the same one
@pytest.mark.parametrize("family", CONFIGS, indirect=True)
def test_ranks_norm_the_sum_of_their_parts(tmp_path, family, size):
    """OLMo 2 norms the heads of all ranks as one vector."""
    expected, one = checkpoint(tmp_path, family), logits(tmp_path, 24)
    for found in on_ranks(size, lambda parallel: logits(tmp_path, 24, parallel)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(found, one, rtol=1e-10, atol=1e-10)
