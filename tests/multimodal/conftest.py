"""Tiny checkpoints of the vision-language families, and transformers' models of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.models.vision_families import random_vision_model, tiny_vision_config


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    oracle: PreTrainedModel
    """transformers' model of it, float32."""


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Return a function from a family's name to its checkpoint, written once."""
    made: dict[str, Checkpoint] = {}

    def checkpoint(family: str) -> Checkpoint:
        if family not in made:
            path = tmp_path_factory.mktemp(family)
            oracle = random_vision_model(tiny_vision_config(family))
            oracle.save_pretrained(path)
            made[family] = Checkpoint(path, oracle)
        return made[family]

    torch.set_float32_matmul_precision("highest")
    return checkpoint
