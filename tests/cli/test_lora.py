"""``--lora NAME=PATH`` of ``mrv1 generate`` and ``mrv1 chat``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrv1 import LLM, LoRARequest, SamplingParams
from mrv1.config import checkpoint_dir
from mrv1.models import ModelConfig
from mrv1.models.lora.reading import modules_of
from tests.cli.conftest import Mrv1
from tests.models.adapters import random_tensors, write_adapter

TINY = ("generate", "--model", "tiny", "--device", "cpu", "--num-kv-blocks", "32")
GREEDY = ("--temperature", "0", "--max-tokens", "12", "--ignore-eos")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """An adapter of the embedded model."""
    modules = modules_of(ModelConfig.from_pretrained(checkpoint_dir("tiny")))
    sizes = {
        name: (4, module.columns, module.num_rows)
        for name, module in modules.items()
        if name.endswith(("q_proj", "down_proj"))
    }
    targets = ["q_proj", "down_proj"]
    folder = tmp_path_factory.mktemp("adapter")
    return write_adapter(folder, random_tensors(sizes), target_modules=targets)


def test_the_text_is_that_of_the_adapter(mrv1: Mrv1, folder: Path, tmp_path: Path):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM("tiny", device="cpu", num_kv_blocks=32, enable_lora=True) as llm:
        asked = [None, LoRARequest("bard", 1, folder)]
        plain, adapted = llm.generate(["ROMEO:"] * 2, params, lora_request=asked, use_tqdm=False)
    expected = adapted.outputs[0].text
    assert expected != plain.outputs[0].text
    lora = ("--lora", f"bard={folder}")
    result = mrv1(*TINY, *GREEDY, *lora, "--prompt", "ROMEO:")
    assert (result.exit_code, result.stdout) == (0, expected + "\n")
    assert "room for 1 LoRA adapters of rank 16" in result.stderr
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(json.dumps({"prompt": "ROMEO:"}) + "\n")
    result = mrv1(*TINY, *GREEDY, *lora, "--input", lines, "--output", "-")
    assert json.loads(result.stdout)["text"] == expected


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ("bard", "--lora: expected NAME=PATH, got 'bard'"),
        ("=x", "--lora: expected NAME=PATH"),
        ("bard=none", "adapter 'bard' ('none'): expected a folder with adapter_config.json"),
    ],
)
def test_an_adapter_that_is_none_ends_the_command(mrv1: Mrv1, lora: str, message: str):
    result = mrv1(*TINY, "--prompt", "a", "--lora", lora)
    assert result.exit_code == 2
    assert message in result.stderr
