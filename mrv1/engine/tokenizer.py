"""Text in and out: transformers' tokenizer, incremental decoding, and stop strings."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mrv1.errors import ConfigError, RequestError
from mrv1.models import Checkpoint
from mrv1.models.tokenizer import TOKENIZER_FILES

if TYPE_CHECKING:
    from mrv1.multimodal import MultimodalItem

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # for bytes that are no character, or not yet
MAX_INCOMPLETE = 3  # most replacement characters of an incomplete one: one per byte
CONTEXT_TOKENS, WINDOW_TOKENS = 12, 24
"""Least and most tokens, without the new tokens, that ``Detokenizer`` decodes again. The three
replacement characters that may end a text stand for up to 9 bytes, and up to 3 bytes before them
may be the rest of an earlier character: 12 tokens, if each token is a byte."""
_NO_UTF8 = re.compile("[\udc80-\udcff]")  # a byte of no character, by surrogateescape


class ChatPrompt(str):
    """A prompt that a chat template has written: its special tokens are part of the text."""

    token_ids: Sequence[int] | None = None
    """Tokens, where they are not those of the text: control tokens of the messages are encoded as
    text, and the placeholder of an image or a video is repeated once per feature."""
    items: Sequence[MultimodalItem] = ()
    """Images and videos of the prompt."""


class Tokenizer:
    """The tokenizer of one checkpoint; a checkpoint without one takes and gives token ids only."""

    def __init__(self, path: Path | None) -> None:
        """Load the tokenizer at ``path`` (None = none); ConfigError: its files are damaged."""
        self.path = path
        self._tokenizer: Any = None
        self._byte_tokens: list[int] = []  # [256] by byte, with byte fallback; else empty
        self._byte_of_token: dict[int, int] = {}
        self._gives_text: dict[int, bool] = {}  # token -> whether it gives text, as found
        self._token_texts: dict[int, str] = {}  # token -> its text, as found
        self.without_tools: set[str] = set()  # chat templates that were warned of
        self._skips_special = True
        self._joined: frozenset[int] = frozenset()  # added tokens without a space between two
        self._variants: dict[tuple[bool, bool], Tokenizer] = {}
        if path is None or not Checkpoint.at(path).has_tokenizer:
            return
        self._tokenizer = Checkpoint.at(path).tokenizer()
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
        """Whether the checkpoint has a tokenizer."""
        return self._tokenizer is not None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's end-of-sequence token, if it has one."""
        token = None if self._tokenizer is None else self._tokenizer.eos_token_id
        return () if token is None else (token,)

    @property
    def library(self) -> Any:  # noqa: ANN401 - one of many classes of transformers
        """The tokenizer of transformers; a ConfigError if the checkpoint has none."""
        if self._tokenizer is None:
            raise ConfigError(
                f"tokenizer: expected one of {', '.join(TOKENIZER_FILES)} in {str(self.path)!r}, "
                "found none"
            )
        return self._tokenizer

    def with_special_tokens(self, *, skip: bool, spaces: bool) -> Tokenizer:
        """Return a tokenizer that differs in what it does with special tokens.

        With ``skip`` it leaves them out of texts, as this one does; without ``spaces`` it writes
        no space between two added tokens that follow one another.
        """
        if skip or self._tokenizer is None:
            return self
        variant = self._variants.get((skip, spaces))
        if variant is None:
            variant = copy.copy(self)
            variant._skips_special, variant._gives_text = False, {}
            if not spaces:
                variant._joined = frozenset(self._tokenizer.added_tokens_decoder)
            self._variants[skip, spaces] = variant
        return variant

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt, with the special tokens that the checkpoint adds.

        A ``ChatPrompt`` has its own. RequestError: there is no tokenizer, or the text is not
        Unicode.
        """
        if isinstance(text, ChatPrompt) and text.token_ids is not None:
            return list(text.token_ids)
        if self._tokenizer is None:
            raise RequestError(
                f"prompt: expected token ids, because {str(self.path)!r} has no tokenizer, "
                "got text"
            )
        check_unicode("prompt", text)
        ids: list[int] = self._tokenizer.encode(
            str(text), add_special_tokens=not isinstance(text, ChatPrompt)
        )
        return ids

    def encode_word(self, text: str) -> list[int]:
        """Return a text's token ids, without special tokens; RequestError: it is not Unicode."""
        check_unicode("bad_words", text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``; empty without a tokenizer.

        Transformers' text, without two rules by which later tokens would change earlier text:
        spaces are not cleaned up, and of a run of single-byte tokens (byte fallback) that is not
        UTF-8, only the bytes of no character become U+FFFD, not all.
        """
        if self._tokenizer is None:
            return ""
        text = self._decode(token_ids)
        if self._byte_tokens and REPLACEMENT in text:
            text = self._decode(self._with_valid_bytes(token_ids))
        return text

    def last_text_tokens(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Return the last ``count`` tokens that give text; skipped special tokens do not."""
        return list(islice(self._text_tokens(reversed(token_ids)), count))[::-1]

    def after(self, token_ids: Sequence[int]) -> Decoded:
        """Return where the text of an output begins that follows ``token_ids``, its prompt.

        Many decoders drop a space at the beginning of a text, which is not that of an output.
        """
        if self._tokenizer is None:
            return Decoded()
        window = tuple(self.last_text_tokens(token_ids, CONTEXT_TOKENS))
        decoded = self.decode(window)
        return Decoded(window=window, decoded=decoded, num_shown=len(decoded))

    def _text_tokens(self, token_ids: Iterable[int]) -> Iterator[int]:
        for token in token_ids:
            gives_text = self._gives_text.get(token)
            if gives_text is None:  # twice: a space that begins a text may be dropped
                gives_text = self._gives_text[token] = self._decode_part([token, token]) != ""
            if gives_text:
                yield token

    def _with_valid_bytes(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens, with the bytes of U+FFFD in place of each byte that is not UTF-8."""
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
        if not self._joined:
            return self._decode_part(list(token_ids))
        parts: list[list[int]] = [[]]
        for token in self._text_tokens(token_ids):
            if token in self._joined and parts[-1] and parts[-1][-1] in self._joined:
                parts.append([])
            parts[-1].append(token)
        return "".join(map(self._decode_part, parts))

    def _decode_part(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skips_special, clean_up_tokenization_spaces=False
        )
        return text

    def decode_token(self, token_id: int) -> str | None:
        """Return one token as text, special or not; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        text = self._token_texts.get(token_id)
        if text is None:
            text = str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
            self._token_texts[token_id] = text
        return text


NO_TOKENIZER = Tokenizer(None)  # gives no text


def check_unicode(name: str, text: str) -> None:
    """Raise a RequestError unless a text can be encoded."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name}: expected Unicode text, got a lone surrogate at index {error.start}"
        ) from error


class Decoded(NamedTuple):
    """The progress of a ``Detokenizer``."""

    text: str = ""
    num_tokens: int = 0  # tokens of the output seen
    window: tuple[int, ...] = ()  # the last tokens of prompt and output, which are decoded again
    decoded: str = ""  # the window as text
    num_shown: int = 0  # characters of ``decoded`` that are part of the text


class Detokenizer:
    """The text of a growing list of tokens: the text only ever grows, in linear time.

    The last tokens, a window, are decoded again with every new token. Up to ``MAX_INCOMPLETE``
    U+FFFD at the end of the window's text may still become a character: they are held back. A
    character that the prompt begins and the output completes is text of the output. ``start`` is
    what ``tokenizer.after`` returned for the prompt; none = the text begins here.
    """

    def __init__(self, tokenizer: Tokenizer, start: Decoded = Decoded()) -> None:  # noqa: B008
        self._tokenizer = tokenizer
        self._seen = start  # replaced as a whole, so that no interrupt leaves a mixture

    def text(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        """Return the text of all tokens, which extend the tokens of the last call.

        ``is_last``: no tokens will follow, so that incomplete characters are shown too.
        """
        if not self._tokenizer.is_loaded:
            return ""
        text, num_tokens, window, decoded, num_shown = self._seen
        new = token_ids[num_tokens:]
        if new:
            num_tokens += len(new)
            window += tuple(new)
            shown, decoded = decoded[:num_shown], self._tokenizer.decode(window)
            while not text and shown.endswith(REPLACEMENT) and not decoded.startswith(shown):
                shown = shown[:-1]  # the prompt's last character is complete now
            num_shown = len(shown)
        end = len(decoded)
        if not is_last:
            end -= min(end - len(decoded.rstrip(REPLACEMENT)), MAX_INCOMPLETE)
        text += decoded[num_shown:end]
        num_shown = max(num_shown, end)
        if len(window) > WINDOW_TOKENS and not is_last:
            # Keep the tokens that decide about later text; the texts of both windows end alike.
            num_held_back = len(decoded) - num_shown
            window = tuple(self._tokenizer.last_text_tokens(window, CONTEXT_TOKENS))
            decoded = self._tokenizer.decode(window)
            num_shown = len(decoded) - num_held_back
        self._seen = Decoded(text, num_tokens, window, decoded, num_shown)
        return text


class OutputText:
    """The text of one request's output as it grows, up to the first stop string in it.

    ``stop`` are strings that end it: the first to end, then the first given. ``include_stop``: the
    text includes it. ``min_tokens``: least tokens before one counts. ``stop_token_sequences`` may
    end the output too, and then are not text. ``start`` is as for ``Detokenizer``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        stop_token_sequences: Sequence[Sequence[int]] = (),
        start: Decoded = Decoded(),  # noqa: B008 - it cannot change
    ) -> None:
        self._searched = Detokenizer(tokenizer, start)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._sequences = () if include_stop else tuple(stop_token_sequences)
        # Where a stop sequence may begin, the shown text is shorter than the searched text.
        self._shown = Detokenizer(tokenizer, start) if self._sequences else self._searched
        self._num_searched = 0  # characters before which no stop string begins
        self._num_ignored = 0  # characters before which no stop string ends, by ``min_tokens``
        self._stopped: tuple[str, str] | None = None  # stop string found, and the text up to it

    def find_stop(self, token_ids: Sequence[int], *, is_last: bool) -> str | None:
        """Return the first stop string found or None; for ``is_last`` see ``Detokenizer.text``."""
        if not self._stop:
            return None
        if self._stopped is not None:
            return self._stopped[0]
        text = self._searched.text(token_ids, is_last=is_last)
        if len(token_ids) < self._min_tokens:
            self._num_ignored = len(text)
            return None
        searched = self._num_searched
        found = [
            (at + len(stop), at, stop)
            for stop in self._stop
            if (at := text.find(stop, max(searched, self._num_ignored - len(stop) + 1))) >= 0
        ]
        if not found:
            longest = max(map(len, self._stop))
            self._num_searched = max(self._num_searched, len(text) - longest + 1)
            return None
        end, at, stop = min(found, key=itemgetter(0))
        self._stopped = stop, text[: end if self._include_stop else at]
        return stop

    def text(self, token_ids: Sequence[int], *, is_last: bool) -> str:
        """Return the text that may be shown of the same tokens as for ``find_stop``.

        Unless ``is_last``, an end that may become a stop string or sequence is held back.
        """
        if self._stopped is not None:
            return self._stopped[1]
        if is_last:
            return self._shown.text(token_ids, is_last=True)
        num_shown = len(token_ids) - _num_held_back(self._sequences, token_ids)
        text = self._shown.text(token_ids[:num_shown])
        return text[: len(text) - _num_held_back(self._stop, text)]


def _num_held_back(ends: Sequence[Sequence[Any]], output: Sequence[Any]) -> int:
    """Return the largest number of last items of an output that an end may begin with."""
    return max(
        (
            length
            for end in ends
            for length in range(1, min(len(end), len(output) + 1))
            if [*output[-length:]] == [*end[:length]]
        ),
        default=0,
    )
