"""Small tokenizers of the kinds that the families have, as ``tokenizers`` writes them."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, how are you doing? def f(n):\n    return n + 1\n",
    "don't can't I'll you've they're 2026 12345",
    "Caf\u00e9 d\u00e9j\u00e0 vu \u4f60\u597d \U0001f60a",
]
GPT2, LLAMA3, QWEN = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def byte_level(pattern: str, *, ignore_merges: bool = False, nfc: bool = False) -> Tokenizer:
    """Return a byte-level BPE whose texts are cut by a pattern, as GPT-2's, Llama 3's, Qwen's."""
    made = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if nfc:
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 8, trainer)
    _add_special(made)
    return made


def sentencepiece(words: Iterable[str] = ("\u2581hello", "\u2581world", "hello")) -> Tokenizer:
    """Return a BPE with byte fallback, as Llama 2's: a space is written before the text."""
    made = _byte_fallback(words)
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = decoders.Sequence([*_decoders(), decoders.Strip(" ", 1, 0)])
    return made


def metaspace() -> Tokenizer:
    """Return a BPE with byte fallback, as later Mistrals': the pre-tokenizer writes the space."""
    made = _byte_fallback(("\u2581hello", "\u2581world", "hello"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence([*_decoders(), decoders.Strip(" ", 1, 0)])
    return made


def gemma() -> Tokenizer:
    """Return a BPE with byte fallback that writes no space before a text."""
    made = _byte_fallback(("hello", "\u2581world", "world"))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence(_decoders())
    return made


def unigram() -> Tokenizer:
    """Return a unigram model, as T5's."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=100, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(TEXTS * 8, trainer)
    _add_special(made)
    return made


FAMILIES = {
    "gpt2": lambda: byte_level(GPT2),
    "llama3": lambda: byte_level(LLAMA3, ignore_merges=True),
    "qwen": lambda: byte_level(QWEN, nfc=True),
    "sentencepiece": sentencepiece,
    "metaspace": metaspace,
    "gemma": gemma,
    "unigram": unigram,
}
"""Kind -> a function that makes a tokenizer of this kind."""


def _decoders() -> list[decoders.Decoder]:
    return [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]


def _byte_fallback(words: Iterable[str]) -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    merges: dict[tuple[str, str], None] = {}
    for word in ("\u2581\u2581", *words):
        whole = word[0]
        for letter in word:
            vocab.setdefault(letter, len(vocab))
        for letter in word[1:]:
            merges[whole, letter] = None
            whole += letter
            vocab.setdefault(whole, len(vocab))
    made = Tokenizer(
        models.BPE(
            vocab=vocab, merges=[*merges], byte_fallback=True, unk_token="<unk>", fuse_unk=True
        )
    )
    _add_special(made)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return made


def _add_special(made: Tokenizer) -> None:
    made.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in SPECIAL])
