"""Tiny checkpoints of the vision-language families, and transformers' models of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2VLImageProcessorPil

from tests.models.vision_families import (
    IMAGE,
    VIDEO,
    VISION_END,
    VISION_START,
    random_vision_model,
    tiny_vision_config,
)

TEMPLATE = (
    "{% for message in messages %}w3 {{ message.role }} "
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %} w4 "
    "{% endfor %}{% if add_generation_prompt %}w5{% endif %}"
)
"""As Qwen's own templates: an image or a video is one placeholder between two tokens."""


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
            write_processors(path, "Qwen3" if family.startswith("qwen3_vl") else "Qwen2")
            made[family] = Checkpoint(path, oracle)
        return made[family]

    torch.set_float32_matmul_precision("highest")
    return checkpoint


def write_processors(path: Path, generation: str) -> None:
    """Write processors of images and of videos, and a tokenizer of the words w0, w1, ..."""
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    limits = {"size": {"shortest_edge": 64, "longest_edge": 1024}}
    Qwen2VLImageProcessorPil(**sizes, **limits).save_pretrained(path)
    of_videos = {"video_processor_type": f"{generation}VLVideoProcessor"} | sizes
    of_videos |= {"size": {"shortest_edge": 64, "longest_edge": 4096}}
    (path / "video_preprocessor_config.json").write_text(json.dumps(of_videos), "utf-8")
    special = {
        IMAGE: "<|image_pad|>",
        VIDEO: "<|video_pad|>",
        VISION_START: "<|vision_start|>",
        VISION_END: "<|vision_end|>",
    }
    vocab = {special.get(token, f"w{token}"): token for token in range(160)}
    words = Tokenizer(WordLevel(vocab, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, additional_special_tokens=list(special.values())
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
