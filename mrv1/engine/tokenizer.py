"""Text in, text out: transformers' tokenizer, its output piece by piece, and where that stops."""

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

    @property
    def is_loaded(self) -> bool:
        """Whether there is one."""
        return self._tokenizer is not None

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
        _check_unicode("prompt", text)
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def encode_word(self, text: str) -> list[int]:
        """Return the token ids of a part of a text, without special tokens.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        _check_unicode("bad_words", text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids`` without special tokens; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def decode_token(self, token_id: int) -> str | None:
        """Return one token as text, special or not; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        text: str = self._tokenizer.decode([token_id])
        return text


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name}: expected Unicode text, got a lone surrogate at index {error.start}"
        ) from error


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


class OutputText:
    """The text of one request's output as it grows, up to the first stop string in it.

    Args:
        tokenizer: of the checkpoint.
        stop: strings that end the output; of several that begin together the first counts.
        include_stop: whether the text ends behind the stop string, not in front of it.
        min_tokens: tokens before which no stop string ends the output.
        stop_token_sequences: what may end the output too, and is not text then.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        stop_token_sequences: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._searched = Detokenizer(tokenizer)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._sequences = () if include_stop else tuple(stop_token_sequences)
        # What is shown lags behind what is searched where a stop sequence may begin.
        self._shown = Detokenizer(tokenizer) if self._sequences else self._searched
        self._num_searched = 0
        """Characters before which no stop string begins."""
        self._num_ignored = 0
        """Characters within which no stop string may end: those of the first tokens."""
        self._end: int | None = None
        """Where the text ends, once a stop string has been found."""

    def find_stop(self, token_ids: Sequence[int], *, is_last: bool) -> str | None:
        """Return the stop string that the output holds now, and has not before.

        Args:
            token_ids: of the output.
            is_last: whether no more will come, so that incomplete characters count as they are.
        """
        if not self._stop or self._end is not None:
            return None
        text = self._tokenizer.decode(token_ids) if is_last else self._searched.text(token_ids)
        if len(token_ids) < self._min_tokens:
            self._num_ignored = len(text)
            return None
        found = [
            (text.find(stop, max(self._num_searched, self._num_ignored - len(stop) + 1)), stop)
            for stop in self._stop
        ]
        found = [(at, stop) for at, stop in found if at >= 0]
        if not found:
            longest = max(map(len, self._stop))
            self._num_searched = max(self._num_searched, len(text) - longest + 1)
            return None
        at, stop = min(found, key=lambda pair: pair[0])
        self._end = at + len(stop) if self._include_stop else at
        return stop

    def text(self, token_ids: Sequence[int], *, is_last: bool) -> str:
        """Return what may be shown of the text: nothing that could turn out to be a stop string.

        Args:
            token_ids: of the output, as ``find_stop`` has seen them.
            is_last: whether no more will come.
        """
        if self._end is not None:
            return self._tokenizer.decode(token_ids)[: self._end]
        if is_last:
            return self._tokenizer.decode(token_ids)
        text = self._shown.text(
            token_ids[: len(token_ids) - self._num_tokens_held_back(token_ids)]
        )
        return text[: len(text) - self._num_held_back(text)]

    def _num_tokens_held_back(self, token_ids: Sequence[int]) -> int:
        """Return the length of the longest end of the tokens that begins a stop sequence."""
        return max(
            (
                length
                for sequence in self._sequences
                for length in range(1, min(len(sequence), len(token_ids) + 1))
                if tuple(token_ids[-length:]) == sequence[:length]
            ),
            default=0,
        )

    def _num_held_back(self, text: str) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        return max(
            (
                length
                for stop in self._stop
                for length in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:length])
            ),
            default=0,
        )
