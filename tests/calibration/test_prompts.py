"""The parts of prompts: the embedded model's own lines, words, and a text."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from mrv1 import ConfigError
from mrv1.calibration import Texts, load_texts
from mrv1.models import Checkpoint
from tests.models.families import tiny_checkpoint
from training.corpus import CHECKPOINT_DIR, CORPUS_PATH
from training.recall import RecallVocabulary

TINY = Checkpoint.open("tiny")


@pytest.fixture(scope="module")
def synthetic() -> Texts:
    return load_texts(TINY, "synthetic", 512)


def test_lines_equal_those_that_the_embedded_model_is_trained_on(synthetic):
    tokenizer = Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json"))
    trained = RecallVocabulary.from_tokenizer(tokenizer)
    lines = synthetic.lines
    key, value = (int(word) for word in lines.words[:2])
    expected = trained.lines(np.array([True, False]), np.array([key] * 2), np.array([value] * 2))
    assert lines.fact(key, value).tolist() == expected[0].tolist()
    assert lines.question(key, value).tolist() == expected[1].tolist()
    assert lines.words.tolist() == trained.words.tolist()
    assert synthetic.prefix == ()


def prompt_tokens(texts: Texts, seed: int = 0) -> np.ndarray:
    (prompt,) = texts.prompts(
        np.random.default_rng(seed), 1, num_tokens=200, num_facts=3, sink=5, distance=90
    )
    assert len(prompt.tokens) == 200
    return np.where(prompt.is_filler, prompt.tokens, -1)


def test_synthetic_filler_is_words(synthetic):
    filler = prompt_tokens(synthetic)
    assert set(filler.tolist()) <= {-1, *synthetic.lines.words.tolist()}


def test_filler_is_consecutive_text(synthetic):
    text = load_texts(TINY, CORPUS_PATH, 512)
    assert text.lines.words.tolist() == synthetic.lines.words.tolist()
    ids = text.ids
    assert ids is not None
    filler = prompt_tokens(text)
    windows = np.lib.stride_tricks.sliding_window_view(ids, 200)
    matches = ((windows == filler) | (filler == -1)).all(axis=1)
    assert matches.sum() == 1
    assert prompt_tokens(text, 1).tolist() != filler.tolist()


def test_prompts_begin_with_the_prefix_of_the_model(synthetic):
    texts = Texts(lines=synthetic.lines, prefix=(0, 1), ids=None)
    prompts = texts.prompts(
        np.random.default_rng(0), 9, num_tokens=60, num_facts=2, sink=0, distance=20
    )
    assert all(prompt.tokens[:2].tolist() == [0, 1] for prompt in prompts)
    assert all(len(prompt.tokens) == 60 for prompt in prompts)


def test_unusable_texts_and_tokenizers_are_errors(tmp_path: Path):
    short = tmp_path / "short.txt"
    short.write_text("To be, or not to be", encoding="utf-8")
    with pytest.raises(ConfigError, match="data: expected a text of at least 512 tokens"):
        load_texts(TINY, short, 512)
    with pytest.raises(ConfigError, match=r"data: cannot read .*none.txt"):
        load_texts(TINY, tmp_path / "none.txt", 512)
    short.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"data: cannot read .*short.txt"):
        load_texts(TINY, short, 512)
    tiny_checkpoint(tmp_path / "ids", "qwen3")
    with pytest.raises(ConfigError, match=r"expected a tokenizer in .*ids"):
        load_texts(Checkpoint.at(tmp_path / "ids"), "synthetic", 512)
    shutil.copytree(TINY.path, tmp_path / "damaged")
    (tmp_path / "damaged" / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer: cannot load the one in .*damaged"):
        load_texts(Checkpoint.at(tmp_path / "damaged"), "synthetic", 512)
