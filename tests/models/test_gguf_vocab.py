"""Tokenizers of GGUF vocabularies equal llama.cpp's, and those of the models' own files.

``llama_cpp_tokens.json`` has what llama.cpp itself made of 30 texts, for each way to cut words.
It has no texts that llama.cpp cuts in another way than the models' own expressions: unusual
spaces, accents inside words.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from mrv1 import ConfigError
from mrv1.models.gguf_vocab import Vocabulary

RECORDED = json.loads((Path(__file__).parent / "llama_cpp_tokens.json").read_text("utf-8"))
SPECIAL = ["<|im_start|>", "<|im_end|>", "<tool>"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
DEEPSEEK = {
    name: f"<\uff5c{name}\uff5c>"
    for name in ("begin\u2581of\u2581sentence", "end\u2581of\u2581sentence", "User", "Assistant")
}


def byte_level(
    tokens: list[str], merges: list[str], kinds: list[int], pre: str | None, **more: Any
) -> Vocabulary:
    return vocabulary(
        model="gpt2", pre=pre, tokens=tokens, merges=merges, token_type=kinds, **more
    )


def sentencepiece(
    pieces: list[str], special: tuple[str, ...] = (), kinds: tuple[int, ...] = (), **more: Any
) -> Vocabulary:
    """Bytes, pieces in the order of their merges, and special tokens, of kind "control"."""
    scores = [-float(rank) for rank in range(len(pieces))]
    return vocabulary(
        model="llama",
        tokens=["<unk>", "<s>", "</s>", *BYTES, *pieces, *special],
        scores=more.pop("scores", [0.0] * 259 + scores + [-1000.0] * len(special)),
        token_type=[UNKNOWN, CONTROL, CONTROL]
        + [BYTE] * 256
        + [NORMAL] * len(pieces)
        + list(kinds or [CONTROL] * len(special)),
        **more,
    )


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def vocabulary(**values: Any) -> Vocabulary:
    return Vocabulary(
        {
            key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}": value
            for key, value in values.items()
            if value is not None
        }
    )


@pytest.mark.parametrize("pre", RECORDED["byte_level"])
def test_tokens_and_ends_equal_llama_cpp(pre):
    merges = RECORDED["merges"]
    tokens = [*dict.fromkeys([*ALPHABET, *(merge.replace(" ", "") for merge in merges)]), *SPECIAL]
    kinds = [NORMAL] * (len(tokens) - 3) + [CONTROL, CONTROL, USER_DEFINED]
    ids = {"bos_token_id": len(tokens) - 3, "eos_token_id": len(tokens) - 2}
    vocab = byte_level(tokens, merges, kinds, pre, **ids)
    check_recorded(vocab, RECORDED["byte_level"][pre])


@pytest.mark.parametrize(
    ("recorded", "names"),
    {
        "llama-bpe": ["dbrx", "smaug-bpe", "glm5"],
        "gpt-2": ["olmo", "mpt", "jais", "trillion", "granite-docling"],
        "smollm": ["starcoder", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
        "qwen2": ["stablelm2", "hunyuan", "solar-open", "grok-2"],
        "deepseek-v3": ["hunyuan-dense", "joyai-llm", "hy_v4"],
    }.items(),
)
def test_names_of_one_expression_give_the_same_tokens(recorded, names):
    """llama.cpp lists these names with one expression; Granite 4's is dbrx, OLMoE's olmo."""
    own = letters(recorded).tokenizer().backend_tokenizer.pre_tokenizer.__getstate__()
    for name in names:
        vocab = letters(name, "<bos>", bos_token_id=256)
        assert vocab.tokenizer().backend_tokenizer.pre_tokenizer.__getstate__() == own, name
        assert vocab.tokenizer().encode("a") == [ALPHABET.index("a")], name


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokens_and_ends_equal_llama_cpp(prefix):
    vocab = sentencepiece(
        RECORDED["pieces"],
        tuple(SPECIAL),
        (CONTROL, CONTROL, USER_DEFINED),
        add_space_prefix=prefix,
    )
    check_recorded(vocab, RECORDED["sentencepiece"]["prefix" if prefix else "no prefix"])


def check_recorded(vocab: Vocabulary, recorded: dict[str, Any]) -> None:
    tokenizer = vocab.tokenizer()
    for text, ids in zip(RECORDED["texts"], recorded["ids"], strict=True):
        assert tokenizer.encode(text) == ids, text
    assert sorted(vocab.ends) == recorded["ends"]


CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ENDINGS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = {
    "llama-bpe": rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{ENDINGS}",
    "qwen2": rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{ENDINGS}",
    "seed-coder": rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
    rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{ENDINGS}",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{ENDINGS}",
}
"""The expressions of the models' ``tokenizer.json``."""


def cut_by(expression: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


OWN = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
    "refact": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
    **{name: cut_by(expression) for name, expression in WORDS.items()},
    "llama3": cut_by(WORDS["llama-bpe"]),
    "smaug-bpe": cut_by(WORDS["llama-bpe"]),
    "glm4": cut_by(WORDS["llama-bpe"]),
    "deepseek-r1-qwen": cut_by(WORDS["qwen2"]),
}


@cache
def trained(pre: str) -> tuple[Tokenizer, Any]:
    """A small tokenizer as a model's own file has it, and what its vocabulary becomes."""
    own = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "llama3", "tekken")))
    own.pre_tokenizer = OWN[pre]
    own.decoder = decoders.ByteLevel()
    own.train_from_iterator(
        RECORDED["texts"] * 3,
        trainers.BpeTrainer(vocab_size=600, initial_alphabet=ALPHABET, show_progress=False),
    )
    own.add_special_tokens([AddedToken(text, special=True) for text in DEEPSEEK.values()])
    content = json.loads(own.to_str())
    tokens = sorted(own.get_vocab(), key=own.token_to_id)
    vocab = byte_level(
        tokens,
        [" ".join(merge) for merge in content["model"]["merges"]],
        [CONTROL if token in DEEPSEEK.values() else NORMAL for token in tokens],
        pre,
    )
    return own, vocab.tokenizer()


@pytest.mark.parametrize("pre", OWN)
@given(st.text(), st.sampled_from([*DEEPSEEK.values(), " don't 123 ", ""]), st.text())
def test_tokens_and_text_equal_the_models_own_tokenizer(pre, before, middle, after):
    own, ours = trained(pre)
    text = before + middle + after
    ids = own.encode(text).ids
    assert ours.encode(text, add_special_tokens=False) == ids
    assert ours.decode(ids) == own.decode(ids, skip_special_tokens=False)


def merged(text: str, rank: dict[str, int]) -> list[str]:
    """The rule of sentencepiece: the pair with the best score, of several the first."""
    parts = list(text)
    while True:
        pairs = [(rank[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in rank]
        if not pairs:
            return parts
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@cache
def sentencepiece_tokenizer() -> Any:
    return sentencepiece(RECORDED["pieces"]).tokenizer()


@given(st.text(st.sampled_from("".join(RECORDED["texts"][2:8])), max_size=40))
def test_the_best_score_merges_first(text):
    rank = {piece: at for at, piece in enumerate(RECORDED["pieces"])}
    parts = merged(f"\u2581{text.replace(' ', chr(0x2581))}" if text else "", rank)
    expected = [
        token
        for part in parts
        for token in ([part] if part in rank else [f"<0x{byte:02X}>" for byte in part.encode()])
    ]
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", *expected]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_one_score_for_all_pieces_leaves_their_order():
    """llama.cpp's converter writes -1000 for all where it has only a tokenizer.json."""
    pieces = RECORDED["pieces"]
    vocab = sentencepiece(pieces, scores=[-1000.0] * (259 + len(pieces)))
    for text in RECORDED["texts"]:
        assert vocab.tokenizer().encode(text) == sentencepiece_tokenizer().encode(text)


def letters(pre: str | None = "gpt-2", *special: str, **more: Any) -> Vocabulary:
    """Bytes without merges, and special tokens."""
    kinds = [NORMAL] * 256 + more.pop("kinds", [CONTROL] * len(special))
    return byte_level([*ALPHABET, *special], more.pop("merges", []), kinds, pre, **more)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe", "llama-v3", "tekken"])
@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("add_eos", [None, True, False])
def test_bos_and_eos_are_added_as_the_file_says(pre, add_bos, add_eos):
    vocab = letters(
        pre,
        *("<b>", "<e>"),
        add_bos_token=add_bos,
        add_eos_token=add_eos,
        bos_token_id=256,
        eos_token_id=257,
    )
    implied = pre in ("llama-bpe", "llama-v3", "tekken")
    begin = [256] if (implied if add_bos is None else add_bos) else []
    end = [257] if add_eos else []
    tokenizer = vocab.tokenizer()
    assert tokenizer.encode("a") == [*begin, ALPHABET.index("a"), *end]
    assert tokenizer.encode("a", add_special_tokens=False) == [ALPHABET.index("a")]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<b>", "<e>")


def test_sentencepiece_adds_bos_and_knows_the_usual_ids():
    tokenizer = sentencepiece(["a"]).tokenizer()
    assert tokenizer.encode("") == [1]
    assert tokenizer.special_tokens_map == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    assert sentencepiece(["\u2581", "a"], add_bos_token=False, add_eos_token=True).tokenizer()(
        "a</s>a"
    ).input_ids == [259, 260, 2, 259, 260, 2]


def test_a_word_that_is_a_token_needs_no_merge():
    tokens, merges = [*ALPHABET, "\u0120ab", "ab"], ["a b"]
    whole, cut = ["\u0120ab"], ["\u0120", "ab"]
    for pre, expected in {"llama-bpe": whole, "glm4": whole, "qwen2": cut, "dbrx": cut}.items():
        tokenizer = byte_level(tokens, merges, [NORMAL] * 258, pre).tokenizer()
        assert tokenizer.tokenize(" ab") == expected


def test_control_tokens_are_left_out_of_text_and_user_defined_are_not():
    user, control = "<tool\u2581call>", DEEPSEEK["User"]
    tokenizer = letters("qwen2", control, user, kinds=[CONTROL, USER_DEFINED]).tokenizer()
    ids = tokenizer.encode(f"a{control}b{user}c")
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", control, "b", user, "c"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == f"ab{user}c"


@pytest.mark.parametrize("name", ["Phi3", "Microsoft Phi-3-mini-4k-instruct", "Phi 3.5", None])
@pytest.mark.parametrize("user", [CONTROL, USER_DEFINED])
def test_special_tokens_of_phi3_take_the_blanks_after_them(name, user):
    """As in Phi-3's tokenizer.json: a chat template's line breaks are no tokens."""
    texts = ("<|endoftext|>", "<|user|>", "<|end|>")
    kinds, ids = (CONTROL, user, CONTROL), dict(zip(texts, range(259, 262), strict=True))
    metadata = sentencepiece([], texts, kinds, add_space_prefix=False)._metadata
    tokenizer = Vocabulary(metadata, name).tokenizer()
    got = tokenizer.encode("<s>\n<|user|>\n\n<|end|>\n<|endoftext|>\n", add_special_tokens=False)
    line, blanks = 3 + ord("\n"), int(name in ("Phi 3.5", None))
    user_end = [ids["<|user|>"], *[line] * 2 * blanks, ids["<|end|>"], *[line] * blanks]
    assert got == [1, line, *user_end, ids["<|endoftext|>"], line]


@pytest.mark.parametrize(
    ("names", "merges", "ends"),
    [
        (["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"], [], {256, 257, 258}),
        (["<|im_start|>", "<|im_end|>", "<|endoftext|>"], [], {257, 258}),
        (["<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"], [], {256, 257, 258, 259}),
        (["<end_of_turn>", "<|end|>", DEEPSEEK["end\u2581of\u2581sentence"]], [], {256, 257, 258}),
        (["</", "</s", "</s>"], ["< /", "</ s", "</s >"], set()),  # HTML
    ],
)
@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED, NORMAL, None])
def test_ends_are_found_by_name(names, merges, ends, kind):
    """A token that no merge makes is more than a word, whatever the file says of its kind."""
    kinds = None if kind is None else [NORMAL if merges else kind] * len(names)
    vocab = byte_level(
        [*ALPHABET, *names], merges, kinds and [NORMAL] * 256 + kinds, "qwen2", eot_token_id=4
    )
    assert set(vocab.ends) == ends | {4}
    tokenizer = vocab.tokenizer()
    for end in ends:
        assert tokenizer.encode(names[end - 256]) == [end]
        assert tokenizer.decode([end], skip_special_tokens=True) == ""


@pytest.mark.parametrize("name", ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_ends_are_found_by_id(name):
    """The first end is EOS."""
    vocab = letters("qwen2", "<1>", "<2>", **{"eos_token_id": 257, f"{name}_token_id": 256})
    assert vocab.ends == ([256] if name == "eos" else [257, 256])


def test_ids_outside_the_vocabulary_are_left_out_with_a_warning(caplog):
    vocab = letters("gpt-2", "<e>", eos_token_id=256, eot_token_id=257, padding_token_id=2**32 - 1)
    assert vocab.ends == [256]
    assert vocab.tokenizer().pad_token is None
    assert "tokenizer.ggml.eot_token_id: 257 is no token of the vocabulary" in caplog.text


def test_a_word_as_padding_stays_a_word():
    vocab = letters("gpt-2", padding_token_id=ALPHABET.index("!"))
    assert (
        vocab.tokenizer().decode(vocab.tokenizer().encode("a!"), skip_special_tokens=True) == "a!"
    )


def test_named_chat_templates_are_kept():
    key = "tokenizer.chat_template"
    assert vocabulary(**{key: "{{ 1 }}"}, **base()).tokenizer().chat_template == "{{ 1 }}"
    named = {
        key: "{{ 1 }}",
        f"{key}.tool_use": "{{ 2 }}",
        "tokenizer.chat_templates": ["tool_use"],
    }
    tokenizer = vocabulary(**named, **base()).tokenizer()
    assert tokenizer.chat_template == {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    for given_tools, text in ((None, "1"), (tools, "2")):
        message = {"role": "user", "content": "a"}
        assert tokenizer.apply_chat_template([message], tools=given_tools, tokenize=False) == text
    assert vocabulary(**base()).tokenizer().chat_template is None


def base(**changes: Any) -> dict[str, Any]:
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ALPHABET,
        "merges": [],
        "token_type": [NORMAL] * 256,
    } | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model: expected gpt2 or llama, got 'bert'"),
        ({"model": None}, "tokenizer.ggml.model: expected gpt2 or llama, got None"),
        ({"pre": "gemma4"}, r"tokenizer.ggml.pre: expected one of .*, got 'gemma4'"),
        ({"pre": "default"}, r"tokenizer.ggml.pre: expected one of .*, got 'default'"),
        ({"pre": None}, r"tokenizer.ggml.pre: expected one of .*, got None"),
        ({"pre": ["gpt-2"]}, r"tokenizer.ggml.pre: expected one of .*, got \['gpt-2'\]"),
        ({"tokens": [*ALPHABET[:-1], "a"]}, "tokens: expected different tokens, got 'a' twice"),
        ({"tokens": 7}, "tokens: expected a list of str, got 7"),
        ({"token_type": [1]}, "token_type: expected 256 values, got 1"),
        ({"merges": None}, "merges: expected a list of str, got None"),
        ({"merges": ["a b"]}, "merges: expected pairs of tokens that make a token"),
        ({"merges": ["ab"]}, "merges: expected pairs of tokens that make a token"),
        ({"model": "llama", "scores": [0.0]}, "scores: expected 256 values, got 1"),
        ({"add_bos_token": 1}, "add_bos_token: expected true or false, got 1"),
        ({"add_eos_token": True}, "add_eos_token: expected false without the token, got true"),
        ({"eos_token_id": [1, 2]}, r"eos_token_id: expected a token id, got \[1, 2\]"),
        ({"eot_token_id": True}, "eot_token_id: expected a token id, got True"),
        ({"bos_token_id": "1"}, "bos_token_id: expected a token id, got '1'"),
        ({"tokenizer.chat_template": 1}, "tokenizer.chat_template: expected text, got 1"),
    ],
)
def test_a_vocabulary_that_cannot_be_used_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        vocabulary(**base(**changes)).tokenizer()


def test_an_empty_token_gets_a_name():
    assert vocabulary(**base(tokens=[*ALPHABET[:-1], ""])).tokens[-1] == "[EMPTY_255]"
