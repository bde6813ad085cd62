"""The loaded tokenizer is the checkpoint's tokenizer.json, read by ``tokenizers``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mrv1 import ConfigError
from mrv1.models import Checkpoint
from mrv1.models import tokenizer as tokenizer_module
from tests.models.tokenizer_families import FAMILIES, SPECIAL

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "ernie4_5")
CONFIGS: dict[str, dict[str, Any] | None] = {
    "no tokenizer_config.json": None,
    "plain": {"tokenizer_class": "PreTrainedTokenizerFast"},
    "unknown class": {"tokenizer_class": "Ernie4_5_Tokenizer"},
    "qwen2": {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": False},
    "llama": {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": False},
    "llama, fast": {"tokenizer_class": "LlamaTokenizerFast", "add_prefix_space": None},
    "gemma": {"tokenizer_class": "GemmaTokenizerFast", "add_bos_token": True},
    "gpt2": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, "add_eos_token": True},
}


def write(
    path: Path, tokenizer: Tokenizer, model_type: str, config: dict[str, Any] | None
) -> Path:
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    if config is not None:
        named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        (path / "tokenizer_config.json").write_text(json.dumps(named | config))
    return path


@pytest.fixture(scope="module", params=FAMILIES)
def both(request, tmp_path_factory) -> tuple[Tokenizer, dict[str, Any]]:
    """A tokenizer, and what is loaded for it beside each tokenizer_config.json and model type."""
    tokenizer, root = FAMILIES[request.param](), tmp_path_factory.mktemp("families")
    pairs = [*CONFIGS.items()]
    loaded = {}
    for index, model_type in enumerate(
        MODEL_TYPES * len(pairs)
    ):  # numbers without a common factor
        name, config = pairs[index % len(pairs)]
        path = write(root / f"{index}", tokenizer, model_type, config)
        loaded[f"{model_type}, {name}"] = Checkpoint.at(path).tokenizer()
    return Tokenizer.from_file(str(path / "tokenizer.json")), loaded


def test_all_parts_are_those_of_the_file(both):
    tokenizer, loaded = both
    expected = json.loads(tokenizer.to_str())
    for name, theirs in loaded.items():
        assert json.loads(theirs.backend_tokenizer.to_str()) == expected, name


@given(
    text=st.lists(
        st.text(max_size=8)
        | st.sampled_from([" hello", "12345", "don't", "  ", "\n\n", "e\u0301", *SPECIAL])
    ).map("".join)
)
def test_texts_have_the_tokens_of_the_file(both, text):
    tokenizer, loaded = both
    expected = tokenizer.encode(text).ids
    expected_text = tokenizer.decode(expected, skip_special_tokens=False)
    for name, theirs in loaded.items():
        assert theirs.encode(text) == expected, name
        assert theirs.decode(expected, clean_up_tokenization_spaces=False) == expected_text, name


def test_tokenizer_config_adds_tokens_and_sets_their_flags(tmp_path):
    """As in transformers; each token at the id that the file names."""
    tokenizer = FAMILIES["qwen"]()
    size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id("<|im_end|>")
    plain = {"rstrip": False, "single_word": False, "normalized": False, "special": True}
    added = {
        str(end): {"content": "<|im_end|>", "lstrip": True} | plain,
        str(size): {"content": "<tool>", "lstrip": False} | plain,
    }
    config = {"added_tokens_decoder": added}
    loaded = Checkpoint.at(write(tmp_path / "right", tokenizer, "qwen3", config)).tokenizer()
    ids = loaded.encode("hello<tool> <|im_end|>")
    assert ids == [*tokenizer.encode("hello").ids, size, end]
    assert loaded.decode(ids, skip_special_tokens=True) == "hello"
    for name in ("<tool>", "hello world"):
        added = {str(size + 5): {"content": name, "lstrip": False} | plain}
        path = write(tmp_path / name, tokenizer, "qwen3", {"added_tokens_decoder": added})
        with pytest.raises(ConfigError, match=rf"to be token {size + 5}, as it says, got {size} "):
            Checkpoint.at(path).tokenizer()


def test_a_prompt_is_neither_cut_nor_padded(tmp_path):
    tokenizer = FAMILIES["gpt2"]()
    expected = tokenizer.encode("hello world").ids
    tokenizer.enable_truncation(1)
    tokenizer.enable_padding(length=16)
    loaded = Checkpoint.at(write(tmp_path / "model", tokenizer, "llama", None)).tokenizer()
    assert loaded.encode("hello world") == expected != tokenizer.encode("hello world").ids


CODE = """
import pathlib
pathlib.Path(__file__).with_name("ran").touch()
from transformers import PreTrainedTokenizerFast
class Own(PreTrainedTokenizerFast): pass
"""


@pytest.mark.parametrize("has_file", [True, False])
@pytest.mark.parametrize(
    "auto_map", [{"AutoTokenizer": ["own.Own", "own.Own"]}, ["own.Own", None]]
)
def test_no_code_of_a_checkpoint_runs_and_nobody_is_asked(
    tmp_path, monkeypatch, has_file, auto_map
):
    config = {"tokenizer_class": "Own", "auto_map": auto_map}
    path = write(tmp_path / "model", FAMILIES["gpt2"](), "unknown", config)
    (path / "own.py").write_text(CODE)
    if not has_file:
        (path / "tokenizer.json").unlink()
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on stdin"))
    with pytest.raises(ConfigError, match=r"tokenizer: .*no code of a checkpoint is run"):
        Checkpoint.at(path).tokenizer()
    assert not (path / "ran").exists()
    assert "own" not in sys.modules


def test_a_class_of_transformers_replaces_the_code_that_a_checkpoint_names(tmp_path):
    """Published ERNIE checkpoints name code; transformers reads their tokenizer.json without."""
    tokenizer = FAMILIES["sentencepiece"]()
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    loaded = Checkpoint.at(write(tmp_path / "a", tokenizer, "ernie4_5", config)).tokenizer()
    assert loaded.encode("hello world") == tokenizer.encode("hello world").ids


@pytest.mark.parametrize("name", ["LlamaTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer"])
def test_settings_without_a_vocabulary_are_refused(tmp_path, name):
    """As of a download that was not finished; transformers gives texts no tokens."""
    path = write(tmp_path / "a", FAMILIES["gpt2"](), "llama", {"tokenizer_class": name})
    (path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"vocabulary: expected one of .*, found none"):
        Checkpoint.at(path).tokenizer()


def test_a_vocabulary_in_other_files_counts(tmp_path):
    tokenizer = FAMILIES["gpt2"]()
    path = write(tmp_path / "a", tokenizer, "llama", {"tokenizer_class": "GPT2Tokenizer"})
    (path / "tokenizer.json").unlink()
    tokenizer.model.save(str(path))  # vocab.json, merges.txt
    assert (
        Checkpoint.at(path).tokenizer().encode("hello world")
        == tokenizer.encode("hello world").ids
    )


@pytest.mark.parametrize("is_installed", [True, False])
def test_an_unreadable_sentencepiece_file_names_what_it_needs(tmp_path, monkeypatch, is_installed):
    path = write(
        tmp_path / "a", FAMILIES["gpt2"](), "llama", {"tokenizer_class": "LlamaTokenizer"}
    )
    (path / "tokenizer.json").unlink()
    (path / "tokenizer.model").write_bytes(b"\n\x0e")
    monkeypatch.setattr(tokenizer_module, "find_spec", lambda _: is_installed or None)
    with pytest.raises(ConfigError, match="tokenizer: cannot load the one in") as caught:
        Checkpoint.at(path).tokenizer()
    assert ("needs `pip install sentencepiece protobuf`" in str(caught.value)) != is_installed
