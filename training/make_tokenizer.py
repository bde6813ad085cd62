"""Write everything of the ``tiny`` checkpoint but the weights: tokenizer and configuration.

Run ``python -m training.make_tokenizer`` from the repository root. Deterministic: the same corpus
gives the same files, and training the weights afterwards does not change these files.
"""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen3Config

from training.corpus import CHECKPOINT_DIR, END_OF_TEXT, load_split, split_speeches

VOCAB_SIZE = 2048
MAX_MODEL_LEN = 2048
NUM_TEMPLATE_WORDS = 640  # words shown to the tokenizer in recall lines, so that each is one token
TEMPLATE_REPEATS = 30  # enough that a template word is merged before the rarest corpus pairs

# Words take their leading space, digits stand alone, punctuation takes the line ends after it.
PRE_TOKEN_PATTERN = (
    r"'(?:s|t|d|m|st|ll|re|ve)\b| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+\n*|\s*\n+|\s+(?!\S)|\s+"
)


def frequent_words(text: str, count: int) -> list[str]:
    """Return the ``count`` most frequent lower-case words of at least four letters."""
    counts = collections.Counter(re.findall(r"(?<= )[a-z]{4,}\b", text))
    return [word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))][
        :count
    ]


def training_texts(text: str) -> Iterator[str]:
    """Yield the corpus and, so that recall lines tokenise compactly, recall lines."""
    yield from split_speeches(text)
    words = frequent_words(text, NUM_TEMPLATE_WORDS)
    for key, value in zip(words, reversed(words), strict=True):
        for _ in range(TEMPLATE_REPEATS // 2):
            yield f"REMEMBER: {key} {value}.\n"
            yield f"RECALL: {key} {value}.\n"


def build_tokenizer(text: str) -> Tokenizer:
    """Train a byte-level BPE tokenizer that round-trips every text exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(text), trainer)
    return tokenizer


def build_config() -> Qwen3Config:
    """Return the shape of the embedded model: 4.5 million parameters, 4 layers, 4 KV heads."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=MAX_MODEL_LEN,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        dtype="bfloat16",
    )


def write_checkpoint_metadata(directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, config.json and generation_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    train_text, _ = load_split()
    build_tokenizer(train_text).save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_MODEL_LEN,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    build_config().save_pretrained(directory)
    GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0).save_pretrained(directory)


if __name__ == "__main__":
    write_checkpoint_metadata(CHECKPOINT_DIR)
