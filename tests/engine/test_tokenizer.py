"""Tokenizer and incremental text, on a byte-level BPE made here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mrv1 import ConfigError, RequestError
from mrv1.engine.tokenizer import Detokenizer, Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    backend = BackendTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the king and the queen"] * 3, trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(path)
    return Tokenizer(path)


@given(text=st.text(max_size=30))
def test_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(
    text=st.text(alphabet=st.sampled_from("the king \u00e9\u4f60\U0001f600\u0301"), max_size=20)
)
def test_text_grows_without_ever_changing_and_ends_as_the_whole(tokenizer, text):
    ids = tokenizer.encode(text)
    detokenizer, seen = Detokenizer(tokenizer), ""
    for end in range(1, len(ids) + 1):
        now = detokenizer.text(ids[:end])
        assert now.startswith(seen)
        assert "\N{REPLACEMENT CHARACTER}" not in now
        seen = now
    assert seen == text


def test_special_tokens_are_not_text(tokenizer):
    assert tokenizer.decode([*tokenizer.encode("king"), 0]) == "king"


def test_without_a_tokenizer_there_is_no_text(tmp_path):
    bare = Tokenizer(tmp_path)
    assert bare.decode([1, 2]) == ""
    assert Detokenizer(bare).text([1, 2]) == ""
    with pytest.raises(
        RequestError, match=r"expected token ids, because .* has no tokenizer, got text"
    ):
        bare.encode("king")


def test_a_broken_tokenizer_is_a_config_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{broken")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with pytest.raises(ConfigError, match="tokenizer: cannot load the one in"):
        Tokenizer(tmp_path)
