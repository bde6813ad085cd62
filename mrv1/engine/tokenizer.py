"""Text in, text out: transformers' tokenizer, and its output piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrv1.errors import ConfigError, RequestError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
"""A checkpoint with none of these serves token ids only."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a decoder gives for a character whose bytes are not complete yet."""


class Tokenizer:
    """The tokenizer of one checkpoint; a checkpoint without one takes and gives token ids only."""

    def __init__(self, path: Path | None) -> None:
        """Load the tokenizer of the checkpoint at ``path``; None or no tokenizer file: none.

        Raises:
            ConfigError: there are tokenizer files, but they cannot be loaded.
        """
        self._path = path
        self._tokenizer: Any = None
        if path is None or not any((path / name).is_file() for name in TOKENIZER_FILES):
            return
        from transformers import AutoTokenizer  # takes a second: only when it is needed

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except Exception as error:  # tokenizers raises its own kinds for a damaged file
            raise ConfigError(
                f"tokenizer: cannot load the one in {str(path)!r}: {error}"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt, special tokens as the checkpoint adds them.

        Raises:
            RequestError: the checkpoint has no tokenizer, or the text is not valid Unicode.
        """
        if self._tokenizer is None:
            raise RequestError(
                f"prompt: expected token ids, because {str(self._path)!r} has no tokenizer, "
                "got text"
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"prompt: expected Unicode text, got a lone surrogate at index {error.start}"
            ) from error
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids`` without special tokens; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


class Detokenizer:
    """The text of a growing list of tokens, in time that does not grow with the list.

    Decodes only from the last settled piece on. A character whose bytes are spread over several
    tokens appears when its last token has come.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = ""
        self._context = 0
        """Tokens from here on are the decoder's context (whether a word starts with a space)."""
        self._settled = 0
        """Tokens before this one are in the text."""

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``, which extends what came before."""
        known = self._tokenizer.decode(token_ids[self._context : self._settled])
        longer = self._tokenizer.decode(token_ids[self._context :])
        if len(longer) > len(known) and not longer.endswith(REPLACEMENT):
            self._text += longer[len(known) :]
            self._context, self._settled = self._settled, len(token_ids)
        return self._text
