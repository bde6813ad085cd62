"""The start of an engine: mistakes are found before weights load; bars are for terminals."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tqdm import tqdm

from mrv1 import LLM, ConfigError, RequestError, SamplingParams
from mrv1.runner import start
from tests.models.families import tiny_checkpoint

DAMAGED_FILES = [
    ("tokenizer.json", "{broken", "tokenizer: cannot load the one in"),
    ("tokenizer_config.json", "{broken", "tokenizer: cannot load the one in"),
    ("generation_config.json", "{broken", "generation_config.json: expected a readable JSON file"),
    ("generation_config.json", '{"eos_token_id": "end"}', "config.json: eos_token_id: expected "),
    ("generation_config.json", '{"top_p": 2}', "generation_config.json: top_p: expected a num"),
    ("config.json", "{broken", "config.json: expected a readable JSON file"),
    ("config.json", {"dtype": "auto"}, r"^checkpoint .*: dtype: expected one of .*, got 'auto'$"),
    ("config.json", {"torch_dtype": "int99"}, r"^checkpoint .*: torch_dtype: .*, got 'int99'$"),
    (
        "config.json",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        r"^checkpoint .*: config.json is not valid: .*'yarn'.*factor",
    ),
    ("config.json", {"model_type": None, "architectures": None}, "^checkpoint .*: architectures:"),
    ("config.json", {"hidden_size": "wide"}, "^checkpoint .*: config.json is not valid: .*hidden"),
]
ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"head_policy": "none.json"}, "head_policy: expected a rule such as ratio=0.5,window=256, "),
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

    monkeypatch.setattr(start, "load_model", load_model)
    return tmp_path


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED_FILES)
def test_a_damaged_file_fails_before_the_weights_load(
    checkpoint: Path, name: str, content: str | dict[str, object], message: str
):
    """A mistake in config.json is not the tokenizer's, which transformers loads with that file."""
    if isinstance(content, dict):
        made = json.loads((checkpoint / name).read_text("utf-8")) | content
        (checkpoint / name).write_text(json.dumps(made))
        Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(checkpoint / "tokenizer.json"))
    else:
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


@pytest.mark.parametrize(("is_terminal", "is_on"), [(True, True), (True, False), (False, True)])
def test_bars_are_shown_only_if_they_are_on_and_stderr_is_a_terminal(
    is_terminal: bool,
    is_on: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    shown = is_terminal and is_on
    with LLM("tiny", device="cpu", num_kv_blocks=16, use_tqdm_on_load=is_on) as llm:
        loading = capsys.readouterr()
        llm.generate([[5], [6]], SamplingParams(max_tokens=2), use_tqdm=is_on)
    generating = capsys.readouterr()
    assert loading.out == generating.out == ""
    assert ("Loading weights" in loading.err, "generate" in generating.err) == (shown, shown)
    assert shown or loading.err == generating.err == ""


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", device="cpu", num_kv_blocks=16) as llm:
        yield llm


class Bar:
    """Records the calls that a bar of ``use_tqdm`` gets."""

    def __init__(self, *, total: int, desc: str, fails: bool = False) -> None:
        self.total, self.desc, self.fails, self.done, self.is_closed = total, desc, fails, 0, False
        BARS.append(self)

    def update(self, n: int) -> None:
        if n and self.fails:
            raise OSError("no display")
        self.done += n

    def close(self) -> None:
        self.is_closed = True


BARS: list[Bar] = []


def test_a_class_makes_the_bar_in_any_thread_and_is_closed(llm: LLM):
    params = SamplingParams(max_tokens=2)
    prompts: list[Any] = [[5], [], [7]]
    with ThreadPoolExecutor() as pool:
        pool.submit(llm.generate, prompts, params, use_tqdm=Bar).result()
    llm.generate([5], params, use_tqdm=Bar)
    failing = partial(Bar, fails=True)
    with pytest.raises(OSError, match="no display"):
        llm.generate([[5], [7]], params, use_tqdm=failing)
    assert not llm.has_unfinished_requests()
    assert [(bar.total, bar.done, bar.is_closed) for bar in BARS] == [
        (3, 3, True), (1, 1, True), (2, 0, True)
    ]  # fmt: skip
    BARS.clear()


def test_tqdm_writes_to_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]):
    llm.generate([[5], [6]], SamplingParams(max_tokens=2), use_tqdm=tqdm)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "generate: 100%" in captured.err
    assert "2/2" in captured.err


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_another_switch_is_refused(llm: LLM, value: Any):
    message = f"use_tqdm: expected True, False or a class such as tqdm, got {value!r}"
    for prompts in ([[5], [6]], [5]):
        with pytest.raises(RequestError, match=f"^{message}$"):
            llm.generate(prompts, use_tqdm=value)
    assert not llm.has_unfinished_requests()
    with pytest.raises(ConfigError, match="use_tqdm_on_load: expected True or False, got"):
        LLM("tiny", device="cpu", use_tqdm_on_load=value)
