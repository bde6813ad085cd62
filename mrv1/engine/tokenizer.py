"""Text in, text out: transformers' tokenizer, its output piece by piece, and where that stops."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

from mrv1.errors import ConfigError, RequestError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
"""A checkpoint with none of these serves token ids only."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Stands for bytes that are no UTF-8, or for a character whose bytes are not complete yet."""

MAX_INCOMPLETE = 3
"""Replacement characters that an incomplete character is at most: one for each of its bytes."""

CONTEXT_TOKENS, WINDOW_TOKENS = 12, 24
"""Tokens that ``Detokenizer`` decodes again: at least, and at most beside the new ones.

The three replacement characters that may end a text are of up to 9 bytes, and the first 3 bytes
may be the rest of a character that began before: 12 tokens, if each is a byte.
"""

_NO_UTF8 = re.compile("[\udc80-\udcff]")
"""A byte that is no part of a character, after a decoding with ``surrogateescape``."""


class Tokenizer:
    """The tokenizer of one checkpoint; a checkpoint without one takes and gives token ids only."""

    def __init__(self, path: Path | None) -> None:
        """Load the tokenizer of the checkpoint at ``path``; None or no tokenizer file: none.

        Raises:
            ConfigError: there are tokenizer files, but they cannot be loaded.
        """
        self._path = path
        self._tokenizer: Any = None
        self._byte_tokens: list[int] = []
        """Tokens of single bytes, by byte, as vocabularies with byte fallback have them."""
        self._byte_of_token: dict[int, int] = {}
        self._gives_text: dict[int, bool] = {}
        """By token: what ``_text_tokens`` has found out."""
        if path is None or not any((path / name).is_file() for name in TOKENIZER_FILES):
            return
        from transformers import AutoTokenizer  # takes a second: only when it is needed

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except Exception as error:  # tokenizers raises its own kinds for a damaged file
            raise ConfigError(
                f"tokenizer: cannot load the one in {str(path)!r}: {error}"
            ) from error
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        tokens = self._tokenizer.convert_tokens_to_ids(names)
        if (
            None not in tokens
            and self._tokenizer.convert_ids_to_tokens(tokens) == names
            and self._decode(tokens[ord("A") : ord("A") + 1]) == "A"
        ):
            self._byte_tokens = tokens
            self._byte_of_token = {token: byte for byte, token in enumerate(tokens)}

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
        """Return the text of ``token_ids`` without special tokens; empty without a tokenizer.

        It is what transformers' tokenizer gives, but for two rules by which later tokens would
        change the text of earlier ones. Its clean-up of spaces is not done. And where tokens of
        single bytes (byte fallback) are not UTF-8, each byte that is no part of a character is
        U+FFFD: transformers has U+FFFD for every byte of the run of such tokens, those of its
        valid characters too.
        """
        if self._tokenizer is None:
            return ""
        text = self._decode(token_ids)
        if self._byte_tokens and REPLACEMENT in text:
            text = self._decode(self._with_valid_bytes(token_ids))
        return text

    def last_text_tokens(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Return the last ``count`` of the tokens that give text: special ones do not."""
        return list(islice(self._text_tokens(reversed(token_ids)), count))[::-1]

    def _text_tokens(self, token_ids: Iterable[int]) -> Iterator[int]:
        for token in token_ids:
            gives_text = self._gives_text.get(token)
            if gives_text is None:  # twice: a space that begins a text may be dropped
                gives_text = self._gives_text[token] = self._decode((token, token)) != ""
            if gives_text:
                yield token

    def _with_valid_bytes(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens with the bytes of U+FFFD for each byte that is not UTF-8."""
        byte_of = self._byte_of_token
        valid: list[int] = []
        for is_bytes, run in groupby(self._text_tokens(token_ids), key=byte_of.__contains__):
            if is_bytes:
                text = bytes(map(byte_of.__getitem__, run)).decode("utf-8", "surrogateescape")
                text = _NO_UTF8.sub(REPLACEMENT, text)
                valid += map(self._byte_tokens.__getitem__, text.encode("utf-8"))
            else:
                valid += run
        return valid

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def decode_token(self, token_id: int) -> str | None:
        """Return one token as text, special or not; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        text: str = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return text


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name}: expected Unicode text, got a lone surrogate at index {error.start}"
        ) from error


class _Decoded(NamedTuple):
    """How far a ``Detokenizer`` is."""

    text: str = ""
    num_tokens: int = 0
    """Tokens seen."""
    window: tuple[int, ...] = ()
    """The last of them."""
    decoded: str = ""
    """The window as text."""
    num_shown: int = 0
    """Characters of it that are in the text."""


class Detokenizer:
    """The text of a growing list of tokens: it is only ever appended to, in linear time.

    The end of the tokens, a window, is decoded anew with every new token. U+FFFD at the end of its
    text, up to ``MAX_INCOMPLETE`` of them, may still become a character: they are held back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._seen = _Decoded()  # replaced as a whole: an interrupt leaves the old or the new one

    def text(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """Return the text of ``token_ids``, which extend those of the last call.

        Args:
            token_ids: from the first on.
            is_last: whether no more will come, so that incomplete characters count as they are.
        """
        if not self._tokenizer.is_loaded:
            return ""
        text, num_tokens, window, decoded, num_shown = self._seen
        new = token_ids[num_tokens:]
        if new:
            num_tokens += len(new)
            window += tuple(new)
            decoded = self._tokenizer.decode(window)
        end = len(decoded)
        if not is_last:
            end -= min(end - len(decoded.rstrip(REPLACEMENT)), MAX_INCOMPLETE)
        text += decoded[num_shown:end]
        num_shown = max(num_shown, end)
        if len(window) > WINDOW_TOKENS and not is_last:
            # The tokens that decide about the text to come; the texts of both windows end alike.
            num_held_back = len(decoded) - num_shown
            window = tuple(self._tokenizer.last_text_tokens(window, CONTEXT_TOKENS))
            decoded = self._tokenizer.decode(window)
            num_shown = len(decoded) - num_held_back
        self._seen = _Decoded(text, num_tokens, window, decoded, num_shown)
        return text


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
        stop_token_sequences: Sequence[Sequence[int]] = (),
    ) -> None:
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
        self._stopped: tuple[str, str] | None = None
        """The stop string that was found, and the text up to it."""

    def find_stop(self, token_ids: Sequence[int], *, is_last: bool) -> str | None:
        """Return the stop string that the output holds, the first one that was found.

        Args:
            token_ids: of the output.
            is_last: whether no more will come, so that incomplete characters count as they are.
        """
        if not self._stop:
            return None
        if self._stopped is not None:
            return self._stopped[0]
        text = self._searched.text(token_ids, is_last=is_last)
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
        self._stopped = stop, text[: at + len(stop) if self._include_stop else at]
        return stop

    def text(self, token_ids: Sequence[int], *, is_last: bool) -> str:
        """Return what may be shown of the text: nothing that could turn out to be a stop string.

        Args:
            token_ids: of the output, as ``find_stop`` has seen them.
            is_last: whether no more will come.
        """
        if self._stopped is not None:
            return self._stopped[1]
        if is_last:
            return self._shown.text(token_ids, is_last=True)
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
