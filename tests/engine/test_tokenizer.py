"""Tokenizer and detokenizer, on a byte-level BPE that is trained here."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mrv1 import ConfigError, RequestError
from mrv1.engine.tokenizer import Detokenizer, OutputText, Tokenizer


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
def test_decode_inverts_encode(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(
    text=st.text(alphabet=st.sampled_from("the king \u00e9\u4f60\U0001f600\u0301"), max_size=20)
)
def test_text_of_growing_tokens_never_changes_and_ends_as_the_full_text(tokenizer, text):
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
    detokenizer = Detokenizer(bare)
    assert [detokenizer.text([7] * end) for end in range(1, 100)] == [""] * 99
    assert detokenizer.text([7] * 100, is_last=True) == ""
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


# --- stop strings --------------------------------------------------------------------------------

ALPHABET = "ab\u00e9\u4f60\U0001f600"
stops = st.lists(st.text(alphabet=ALPHABET, min_size=1, max_size=4), min_size=1, max_size=3)


@given(text=st.text(alphabet=ALPHABET, max_size=20), stop=stops, include=st.booleans())
def test_the_text_ends_at_the_first_stop_string_and_none_of_it_was_shown(
    tokenizer, text, stop, include
):
    """Token by token, against a search of all text known so far."""
    ids = tokenizer.encode(text)
    output, whole = OutputText(tokenizer, stop, include_stop=include), Detokenizer(tokenizer)
    shown, found = [], None
    for end in range(1, len(ids) + 1):
        is_last = end == len(ids)
        known = tokenizer.decode(ids[:end]) if is_last else whole.text(ids[:end])
        places = [(known.find(s) + len(s), index) for index, s in enumerate(stop) if s in known]
        found = output.find_stop(ids[:end], is_last=is_last)
        assert found == (stop[min(places)[1]] if places else None)
        assert output.find_stop(ids[:end], is_last=is_last) == found, (
            "again, as after an interrupt"
        )
        is_over = is_last or found is not None
        shown.append(output.text(ids[:end], is_last=is_over))
        if found is not None:
            cut = known.find(found) + (len(found) if include else 0)
            assert shown[-1] == known[:cut]
            break
    else:
        assert not shown or shown[-1] == text
    assert all(later.startswith(earlier) for earlier, later in pairwise(shown))
    assert not any(s in earlier for earlier in shown[:-1] for s in stop)


@pytest.mark.parametrize(
    ("stop", "found"),
    [
        (["abcde", "cd"], "cd"),  # ends first, though it begins later
        (["d", "abcd", "bcd"], "d"),  # all end at one place
        (["abcd", "d"], "abcd"),
        (["e", "b"], "b"),
    ],
)
def test_of_several_stop_strings_in_one_token_the_one_that_ends_first_counts(
    tokenizer, monkeypatch, stop, found
):
    texts = {(): "", (1,): "xabcdef"}
    monkeypatch.setattr(tokenizer, "decode", lambda ids: texts[tuple(ids)])
    for include in (False, True):
        output = OutputText(tokenizer, stop, include_stop=include)
        assert output.find_stop([1], is_last=False) == found
        text, _, _ = "xabcdef".partition(found)
        assert output.text([1], is_last=True) == text + (found if include else "")


def test_text_that_may_become_a_stop_string_is_withheld(tokenizer):
    ids = [token for character in "xaab." for token in tokenizer.encode(character)]
    output = OutputText(tokenizer, ["aac", "b!"])
    shown = []
    for end in range(1, 6):
        assert output.find_stop(ids[:end], is_last=False) is None
        shown.append(output.text(ids[:end], is_last=False))
    assert shown == ["x", "x", "x", "xaa", "xaab."]
    held = OutputText(tokenizer, ["aac"])
    assert held.find_stop(ids[:3], is_last=True) is None
    assert held.text(ids[:3], is_last=True) == "xaa"  # no token follows


@given(text=st.text(alphabet="ab", max_size=16), stop=stops, min_tokens=st.integers(0, 12))
def test_a_stop_string_within_min_tokens_is_text(tokenizer, text, stop, min_tokens):
    """Each character is a token: a stop string that ends before ``min_tokens`` is ignored."""
    ids = [token for character in text for token in tokenizer.encode(character)]
    output = OutputText(tokenizer, stop, min_tokens=min_tokens)
    ends = {
        (start + len(s), start, index)
        for index, s in enumerate(stop)
        for start in range(len(text))
        if text.startswith(s, start) and start + len(s) >= max(min_tokens, 1)
    }
    found = None
    for end in range(1, len(ids) + 1):
        found = output.find_stop(ids[:end], is_last=end == len(ids))
        if found is not None:
            break
    if not ends:
        assert found is None
        return
    first_end = min(ends)[0]
    index, start = min((index, start) for stop_end, start, index in ends if stop_end == first_end)
    assert (end, found) == (first_end, stop[index])
    assert output.text(ids[:end], is_last=True) == text[:start]


# --- stop sequences ------------------------------------------------------------------------------


@given(
    characters=st.text(alphabet="abc", max_size=20),
    sequences=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    stop=st.lists(st.text(alphabet="abc", min_size=1, max_size=3), max_size=2),
    include=st.booleans(),
)
def test_no_part_of_a_stop_sequence_is_shown(tokenizer, characters, sequences, stop, include):
    """Each character is a token; a stop string ends the text as early as without sequences."""
    token_of = {character: tokenizer.encode(character)[0] for character in "abc"}
    ids = [token_of[character] for character in characters]
    output = OutputText(
        tokenizer,
        stop,
        include_stop=include,
        stop_token_sequences=[tuple(token_of[c] for c in s) for s in sequences],
    )
    shown, final = [], characters
    for end in range(1, len(ids) + 1):
        text = characters[:end]
        found = next((s for s in sequences if text.endswith(s)), None)
        is_last = end == len(ids) or found is not None
        if found is not None:
            final = text if include else text.removesuffix(found)
        elif output.find_stop(ids[:end], is_last=is_last) is not None:
            shown.append(output.text(ids[:end], is_last=True))
            first = next(s for s in stop if text.endswith(s))
            final = text if include else text.removesuffix(first)
            break
        else:
            assert not any(s in text for s in stop)
        known = ids[: len(final)] if found is not None else ids[:end]
        shown.append(output.text(known, is_last=is_last))
        if found is not None:
            break
    assert all(later.startswith(earlier) for earlier, later in pairwise(shown))
    assert not shown or shown[-1] == final
