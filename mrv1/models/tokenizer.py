"""The tokenizer of a checkpoint, as an object of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mrv1.models.gguf_file import is_gguf, load_gguf_tokenizer, open_gguf

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
"""A checkpoint with none of these files serves token ids only."""


def has_tokenizer(path: Path) -> bool:
    """Return whether a checkpoint has a tokenizer."""
    if is_gguf(path):
        return open_gguf(path).has_tokenizer
    return any((path / name).is_file() for name in TOKENIZER_FILES)


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a checkpoint; raise whatever transformers raises."""
    from transformers import AutoTokenizer  # takes a second

    if is_gguf(path):
        return load_gguf_tokenizer(path)
    return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
