"""The start of an engine: mistakes are found before weights load; bars are for terminals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mrv1 import LLM, ConfigError, SamplingParams
from mrv1.runner import model_runner
from tests.models.families import tiny_checkpoint

DAMAGED_FILES = [
    ("tokenizer.json", "{broken", "tokenizer: cannot load the one in"),
    ("tokenizer_config.json", "{broken", "tokenizer: cannot load the one in"),
    ("generation_config.json", "{broken", "generation_config.json: expected a readable JSON file"),
    ("generation_config.json", '{"eos_token_id": "end"}', "eos_token_id: expected "),
    ("config.json", "{broken", "config.json: expected a readable JSON file"),
]
ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"head_policy": "none.json"}, "head policy none.json: "),
    ({"max_model_len": 10**9}, "max_model_len: expected <= 512"),
    ({"kv_cache_dtype": "fp8_e4m3", "kv_scale": "head"}, "k_scale: missing"),
]


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose weights must not be loaded."""
    tiny_checkpoint(tmp_path, "qwen3")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )

    def load_model(*args: object, **kwargs: object) -> None:
        pytest.fail("the weights were loaded")

    monkeypatch.setattr(model_runner, "load_model", load_model)
    return tmp_path


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED_FILES)
def test_a_damaged_file_fails_before_the_weights_load(
    checkpoint: Path, name: str, content: str, message: str
):
    (checkpoint / name).write_text(content)
    if not name.startswith("tokenizer"):
        (checkpoint / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=message):
        LLM(str(checkpoint), device="cpu", num_kv_blocks=16)


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS)
def test_a_wrong_argument_fails_before_the_weights_load(
    checkpoint: Path, arguments: dict[str, Any], message: str
):
    (checkpoint / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=message):
        LLM(str(checkpoint), device="cpu", num_kv_blocks=16, **arguments)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_generate_shows_its_progress_bar_only_if_stderr_is_a_terminal(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with LLM("tiny", device="cpu", num_kv_blocks=16) as llm:
        capsys.readouterr()
        llm.generate([[5], [6]], SamplingParams(max_tokens=2), use_tqdm=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("generate" in captured.err) == is_terminal
