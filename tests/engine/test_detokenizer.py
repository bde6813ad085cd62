"""Incremental detokenization: every kind of decoder, any token ids, invalid UTF-8 too."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mrv1.engine.tokenizer import Detokenizer, OutputText, Tokenizer

FFFD = "\N{REPLACEMENT CHARACTER}"
END, PAD = "<end>", "<pad>"
SPECIAL = {0, 1}
NUM_OUTSIDE = 3
"""Number of ids beyond the vocabulary, which a model with padded embeddings may draw."""

WORDS = [
    "\u2581a",
    "\u2581the",
    "b",
    "\u4f60",
    "\u2581",
    "\u2581\u2581",
    ".",
    "\u2581,",
    "<0x",
    "n't",
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _byte_names() -> list[str]:
    """Return the character for each byte in a byte-level vocabulary (GPT-2's table)."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]


NAMES = _byte_names()
SPLIT = [
    b"\xad\xe4",
    b"\xb8",
    b" \xe4\xb8",
    b"\x98\x80\xf0\x9f",
    b"\xf0\x9f\x98",
    b"\xff\xc3",
    b" a",
]
"""Tokens of a byte-level vocabulary whose ends are inside characters."""


def _llama() -> BackendTokenizer:
    """Return a tokenizer like Llama 2's: byte fallback, and no space before the first word."""
    vocab = [END, PAD, "<unk>", *BYTES, *WORDS]
    backend = BackendTokenizer(
        models.BPE(_ids(vocab), [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def _byte_level() -> BackendTokenizer:
    vocab = [END, PAD, *NAMES, *("".join(NAMES[byte] for byte in token) for token in SPLIT)]
    backend = BackendTokenizer(models.BPE(_ids(vocab), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _metaspace() -> BackendTokenizer:
    backend = BackendTokenizer(models.BPE(_ids([END, PAD, *WORDS]), []))
    backend.decoder = decoders.Metaspace()
    return backend


def _word_piece() -> BackendTokenizer:
    """Return a tokenizer whose decoder cleans up token by token, such as " n't" to "n't"."""
    vocab = [END, PAD, "[UNK]", "do", "##n", "n't", "a", ".", "##b", "'", "t"]
    backend = BackendTokenizer(models.WordPiece(_ids(vocab), unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=True)
    return backend


def _suffixes() -> BackendTokenizer:
    """Return a tokenizer whose decoder adds a space after a word, but not at the text's end."""
    vocab = [END, PAD, "a", "b</w>", "the</w>", "c", ".</w>"]
    backend = BackendTokenizer(models.BPE(_ids(vocab), [], end_of_word_suffix="</w>"))
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    return backend


def _ids(vocab: Sequence[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(vocab)}


KINDS: dict[str, Callable[[], BackendTokenizer]] = {
    "llama": _llama,
    "byte_level": _byte_level,
    "metaspace": _metaspace,
    "word_piece": _word_piece,
    "suffixes": _suffixes,
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {kind: _load(make(), tmp_path_factory.mktemp(kind)) for kind, make in KINDS.items()}


def _load(backend: BackendTokenizer, folder: Path) -> Tokenizer:
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=True
    ).save_pretrained(folder)
    return Tokenizer(folder)


BACKENDS = {kind: make() for kind, make in KINDS.items()}
SIZES = {kind: backend.get_vocab_size() for kind, backend in BACKENDS.items()}


def _expected(kind: str, ids: Sequence[int]) -> str:
    """Return the text of the tokenizers library; byte fallback has its own oracle."""
    return _whole(kind, [token for token in ids if token not in SPECIAL])


def _whole(kind: str, ids: Sequence[int]) -> str:
    """Return the text with the special tokens that are in ``ids``."""
    return _llama_text(ids) if kind == "llama" else BACKENDS[kind].decode(ids)


def _llama_text(ids: Sequence[int]) -> str:
    """Decode token by token, and each run of byte tokens with ``_utf8``."""
    tokens = [BACKENDS["llama"].id_to_token(token) for token in ids]
    pieces = []
    for is_byte, run in groupby(filter(None, tokens), key=BYTES.__contains__):
        if is_byte:
            pieces.append(_utf8(bytes(map(BYTES.index, run))))
        else:
            pieces += [token.replace("\u2581", " ") for token in run]
    return "".join(pieces).removeprefix(" ")


def _utf8(raw: bytes) -> str:
    """Decode from the left: the next bytes that form a character, else U+FFFD for one byte."""
    text, at = "", 0
    while at < len(raw):
        for size in range(1, 5):
            try:
                text += raw[at : at + size].decode()
            except UnicodeDecodeError:
                continue
            at += size
            break
        else:
            text, at = text + FFFD, at + 1
    return text


def _has_mixed_run(ids: Sequence[int]) -> bool:
    """Return whether a run of byte tokens has both characters and bytes of no character."""
    tokens = [BACKENDS["llama"].id_to_token(token) for token in ids if token not in SPECIAL]
    for is_byte, run in groupby(filter(None, tokens), key=BYTES.__contains__):
        raw = bytes(map(BYTES.index, run)) if is_byte else b""
        num_invalid = sum(
            "\udc80" <= c <= "\udcff" for c in raw.decode("utf-8", "surrogateescape")
        )
        if 0 < num_invalid < len(raw):
            return True
    return False


def _tokens(kind: str) -> st.SearchStrategy[list[int]]:
    """Draw random ids, among them runs of byte tokens of whole and of cut characters."""
    first = {"llama": 3, "byte_level": 2}.get(kind)
    anything = st.integers(0, SIZES[kind] + NUM_OUTSIDE - 1).map(lambda token: [token])
    if first is None:
        return st.lists(anything, max_size=60).map(_flat)
    raw = st.text(alphabet=" a\u00e9\u4f60\U0001f600\ufffd", min_size=1, max_size=5).map(
        str.encode
    )
    cut = st.tuples(raw, st.integers(0, 3)).map(lambda pair: pair[0][: len(pair[0]) - pair[1]])
    odd = st.sampled_from([b"\xff", b"\x80", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\xaf"])
    runs = st.one_of(raw, cut, odd).map(lambda raw: [first + byte for byte in raw])
    tails = st.integers(SIZES[kind] - len(SPLIT), SIZES[kind] - 1).map(lambda token: [token])
    return st.lists(st.one_of(anything, runs, tails), max_size=30).map(_flat)


def _replacement_crosses(kind: str, ids: list[int], at: int) -> bool:
    """Say whether the bytes of a U+FFFD begin before ``at`` and end after it.

    ``_rest`` cannot tell this character from the U+FFFD of invalid bytes before ``at``.
    """
    first = {"llama": 3, "byte_level": 2}.get(kind)
    if first is None:
        return False
    before, after = ([id_ for id_ in part if id_ not in SPECIAL] for part in (ids[:at], ids[at:]))
    encoded = [first + byte for byte in FFFD.encode()]
    return any(before[-n:] == encoded[:n] and after[: 3 - n] == encoded[n:] for n in (1, 2))


def _flat(parts: Iterable[list[int]]) -> list[int]:
    return [token for part in parts for token in part]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_streamed_text_only_grows_and_ends_as_the_full_text(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
):
    """Any number of tokens may come at once. Only a U+FFFD that may change is withheld.

    The text and the prompt's text are the text of all tokens.
    """
    tokenizer, prompt, ids = tokenizers[kind], data.draw(_tokens(kind)), data.draw(_tokens(kind))
    assume(not _replacement_crosses(kind, prompt + ids, len(prompt)))
    start, prompt_text = tokenizer.after(prompt), _expected(kind, prompt)
    output, shown, end = OutputText(tokenizer, start=start), "", 0
    final = _rest(_expected(kind, prompt + ids), prompt_text)
    while end < len(ids):
        end += data.draw(st.sampled_from([1, 1, 1, 2, 5, 30]))
        before, shown = shown, output.text(ids[:end], is_last=False)
        assert shown.startswith(before)
        assert final.startswith(shown)
        known = _rest(_expected(kind, prompt + ids[:end]), prompt_text)
        held_back = known.removeprefix(shown)
        assert held_back == FFFD * len(held_back)
        assert len(held_back) <= 3
    assert output.text(ids, is_last=True) == final
    assert OutputText(tokenizer, start=start).text(ids, is_last=True) == final  # not streamed
    assert tokenizer.decode(ids) == _expected(kind, ids)


def _rest(whole: str, prompt: str) -> str:
    """Return the text after the prompt's, whose last character other tokens may complete."""
    while not whole.startswith(prompt):
        assert prompt.endswith(FFFD)
        prompt = prompt[:-1]
    return whole[len(prompt) :]


@pytest.mark.parametrize("kind", ["llama", "byte_level", "metaspace"])
@given(data=st.data())
def test_an_output_has_the_text_that_the_library_streams_after_the_prompt(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
):
    """vLLM streams with this class. Prompt and output end where a character ends."""
    first = {"llama": 3, "byte_level": 2, "metaspace": None}[kind]
    others = [END, *(WORDS if kind != "byte_level" else [])]
    token = st.sampled_from([[BACKENDS[kind].token_to_id(name)] for name in others])
    if first is not None:
        character = st.sampled_from("a \u00e9\u4f60\U0001f600").map(str.encode)
        token |= character.map(lambda raw: [first + byte for byte in raw])
    prompt, ids = (data.draw(st.lists(token, max_size=20).map(_flat)) for _ in range(2))
    stream = decoders.DecodeStream(ids=prompt, skip_special_tokens=True)
    backend = tokenizers[kind].library.backend_tokenizer
    expected = "".join(stream.step(backend, token) or "" for token in ids)
    output = OutputText(tokenizers[kind], start=tokenizers[kind].after(prompt))
    assert output.text(ids, is_last=True) == expected


def test_a_character_that_the_prompt_begins_is_text_of_the_output(
    tokenizers: dict[str, Tokenizer],
):
    for kind, first in (("llama", 3), ("byte_level", 2)):
        tokenizer, ids = tokenizers[kind], [first + byte for byte in "a\u4f60a".encode()]
        for at, expected in ((1, "\u4f60a"), (2, "\u4f60a"), (3, "\u4f60a"), (4, "a")):
            output = OutputText(tokenizer, start=tokenizer.after(ids[:at]))
            assert output.text(ids[at:], is_last=True) == expected
        literal = [first + byte for byte in f"a{FFFD}".encode()]  # that is U+FFFD itself
        output = OutputText(tokenizer, start=tokenizer.after(literal))
        assert output.text(ids[:1], is_last=True) == "a"
        for at in (2, 3):  # within its bytes: it counts as the U+FFFD that ends the prompt's text
            output = OutputText(tokenizer, start=tokenizer.after(literal[:at]))
            assert output.text([*literal[at:], *ids[:1]], is_last=True) == "a"


def _joined(ids: Sequence[int]) -> str:
    """Return the text of WordPiece tokens, with no space between two special tokens."""
    vocab = {token: name for name, token in BACKENDS["word_piece"].get_vocab().items()}
    text, was_special = "", False
    for token in ids:
        name, is_special = vocab.get(token, ""), token in SPECIAL
        if name.startswith("##") or not text:
            text += name.removeprefix("##") if text else name
        elif name:
            text += name if is_special and was_special else f" {name}"
        was_special = is_special if name else was_special
    return text


@pytest.mark.parametrize("spaces", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_text_with_special_tokens_only_grows_and_ends_as_the_full_text(
    tokenizers: dict[str, Tokenizer], kind: str, spaces: bool, data: st.DataObject
):
    """Only WordPiece writes spaces between special tokens."""
    tokenizer = tokenizers[kind].with_special_tokens(skip=False, spaces=spaces)
    ids = data.draw(_tokens(kind))
    whole = _joined if kind == "word_piece" and not spaces else partial(_whole_with_special, kind)
    if kind == "word_piece" and not spaces:  # without the decoder's clean-up, such as " n't"
        plain = [BACKENDS[kind].token_to_id(name) for name in (END, PAD, "do", "##n", "a", "##b")]
        ids = data.draw(st.lists(st.sampled_from([*plain, SIZES[kind] + 1]), max_size=80))
    assert tokenizer.decode(ids) == whole(ids)
    at = data.draw(st.integers(0, len(ids)))
    assume(not _replacement_crosses(kind, ids, at))
    final, start = _rest(whole(ids), whole(ids[:at])), tokenizer.after(ids[:at])
    output, shown, end, ids = OutputText(tokenizer, start=start), "", 0, ids[at:]
    while end < len(ids):
        end += data.draw(st.sampled_from([1, 1, 1, 2, 5, 30]))
        before, shown = shown, output.text(ids[:end], is_last=False)
        assert shown.startswith(before)
        assert final.startswith(shown)
    assert output.text(ids, is_last=True) == final


def _whole_with_special(kind: str, ids: Sequence[int]) -> str:
    if kind == "llama":
        return _llama_text(ids)
    return BACKENDS[kind].decode(ids, skip_special_tokens=False)


def test_rules_for_special_tokens_do_not_change_the_tokenizer_itself(
    tokenizers: dict[str, Tokenizer],
):
    tokenizer, ids = tokenizers["word_piece"], [6, 0, 1, 6]
    variants = {
        (skip, spaces): tokenizer.with_special_tokens(skip=skip, spaces=spaces)
        for skip in (True, False)
        for spaces in (True, False)
    }
    assert {key: variant.decode(ids) for key, variant in variants.items()} == {
        (True, True): "a a",
        (True, False): "a a",
        (False, True): f"a {END} {PAD} a",
        (False, False): f"a {END}{PAD} a",
    }
    assert tokenizer.decode(ids) == "a a"
    assert tokenizer.with_special_tokens(skip=False, spaces=False) is variants[False, False]


@given(ids=_tokens("llama"))
def test_text_equals_the_librarys_unless_a_run_mixes_characters_and_invalid_bytes(
    tokenizers: dict[str, Tokenizer], ids: list[int]
):
    library = BACKENDS["llama"].decode([token for token in ids if token not in SPECIAL])
    assert (tokenizers["llama"].decode(ids) == library) == (not _has_mixed_run(ids))


def test_an_invalid_byte_keeps_the_characters_before_it(tokenizers: dict[str, Tokenizer]):
    """The tokenizers library decodes these six bytes to six U+FFFD."""
    ids = [3 + byte for byte in "\u00e9\u4f60".encode() + b"\xff"]
    output = OutputText(tokenizers["llama"])
    shown = [output.text(ids[:end], is_last=False) for end in range(1, 7)]
    assert shown == ["", "\u00e9", "\u00e9", "\u00e9", "\u00e9\u4f60", "\u00e9\u4f60"]
    assert output.text(ids, is_last=True) == "\u00e9\u4f60\ufffd"
    assert BACKENDS["llama"].decode(ids) == FFFD * 6


# --- cost ----------------------------------------------------------------------------------------

ENDLESS = {
    "bytes that are no UTF-8": ("llama", [3 + 0xFF]),
    "characters cut short": ("llama", [3 + 0xF0, 3 + 0x9F, 3 + 0x98]),
    "characters of single bytes": ("llama", [3 + byte for byte in "\u4f60".encode()]),
    "byte-level bytes that are no UTF-8": ("byte_level", [2 + 0xFF]),
    "tokens that end inside characters": ("byte_level", [2 + 256 + 1, 2 + 256]),
    "special tokens": ("llama", [0]),
    "ids beyond the vocabulary": ("byte_level", [SIZES["byte_level"] + 1]),
    "special tokens inside a character": ("llama", [3 + 0xE4, *[0] * 40, 3 + 0xB8, 3 + 0xAD]),
    "spaces": ("llama", [SIZES["llama"] - len(WORDS) + WORDS.index("\u2581")]),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_the_cost_of_streaming_is_linear_in_the_tokens(
    tokenizers: dict[str, Tokenizer], name: str, monkeypatch: pytest.MonkeyPatch
):
    """In a text twice as long, no more tokens are decoded per output token.

    The bound of 4 * 24: each of the at most 24 tokens of the window is decoded up to twice, and an
    invalid byte the second time as the three bytes of U+FFFD.
    """
    kind, period = ENDLESS[name]
    tokenizer, num_decoded = tokenizers[kind], 0
    decode = tokenizer._tokenizer.decode

    def counted(ids: list[int], **options: bool) -> str:
        nonlocal num_decoded
        num_decoded += len(ids)
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer._tokenizer, "decode", counted)
    costs = []
    for length in (800, 1600):
        ids = (period * length)[:length]
        num_decoded, output = 0, OutputText(tokenizer, start=tokenizer.after(ids))
        for end in range(1, length + 1):
            shown = output.text(ids[:end], is_last=False)
        final = output.text(ids, is_last=True)
        costs.append(num_decoded / length)
        assert final == _rest(_expected(kind, ids + ids), _expected(kind, ids))
        assert len(final) - len(shown) <= 3
    assert costs[1] <= 1.1 * costs[0]
    assert costs[1] <= 4 * 24


# --- stop strings --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "byte_level"])
@given(data=st.data())
def test_a_stop_string_is_found_among_invalid_bytes(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
):
    """The first stop string in the text known so far is found, and no part of it was shown."""
    ids = data.draw(_tokens(kind))
    stop = data.draw(
        st.lists(st.text(alphabet=" a\u00e9\u4f60\ufffd", min_size=1, max_size=3), min_size=1)
    )
    output, known, shown = OutputText(tokenizers[kind], stop), Detokenizer(tokenizers[kind]), ""
    for end in range(1, len(ids) + 1):
        is_last = end == len(ids)
        text = known.text(ids[:end], is_last=is_last)
        places = [(text.find(s) + len(s), index) for index, s in enumerate(stop) if s in text]
        found = output.find_stop(ids[:end], is_last=is_last)
        assert found == (stop[min(places)[1]] if places else None)
        before = shown
        shown = output.text(ids[:end], is_last=is_last or found is not None)
        assert shown.startswith(before)
        if found is not None:
            assert shown == text[: text.find(found)]
            return
        assert not any(s in shown for s in stop)
    assert shown == _expected(kind, ids)


def test_a_long_random_text_streams_to_the_full_text(tokenizers: dict[str, Tokenizer]):
    """1000 tokens are many windows long; hypothesis' lists are short."""
    source = random.Random(0)
    for kind, size in SIZES.items():
        ids = [source.randrange(size + NUM_OUTSIDE) for _ in range(1000)]
        output, final = OutputText(tokenizers[kind]), _expected(kind, ids)
        for end in range(1, len(ids) + 1):
            assert final.startswith(output.text(ids[:end], is_last=False))
        assert output.text(ids, is_last=True) == final
