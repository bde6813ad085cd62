"""What a request bans: words as the user gave them, and the token sequences that they become."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mrv1.errors import RequestError
from mrv1.sampler.params import SamplingParams

TOKENIZATIONS = 2
"""Of a word, at most: as it is, and with a space in front."""


def banned_token_sequences(
    params: SamplingParams,
    encode: Callable[[str], Sequence[int]] | None,
    *,
    max_words: int,
    max_len: int,
) -> tuple[tuple[int, ...], ...]:
    """Return the sequences that a request bans, each once: at most ``TOKENIZATIONS`` of a word.

    A word of text is banned as it begins a text and as it stands behind another word, however many
    tokens that takes.

    Args:
        params: of the request.
        encode: gives a text's tokens, without special ones; None = there is no tokenizer.
        max_words: words that a request may have, as the user counts them.
        max_len: tokens that each of their tokenizations may have.

    Raises:
        RequestError: too many words, one of too many tokens, or text without a tokenizer.
    """
    num_words = len(params.bad_words) + len(params.bad_words_token_ids)
    if num_words > max_words:
        raise RequestError(
            f"bad_words: expected at most {max_words} words (max_bad_words_num), got {num_words}"
        )
    if params.bad_words and encode is None:
        raise RequestError("bad_words: expected bad_words_token_ids, as there is no tokenizer")
    named = [("bad_words_token_ids", tuple(ids)) for ids in params.bad_words_token_ids]
    named += [
        (f"bad_words: {word!r}", tuple(encode(text)) if encode else ())
        for word in params.bad_words
        for text in (word, f" {word.lstrip()}")
    ]
    for name, sequence in named:
        if not 1 <= len(sequence) <= max_len:
            raise RequestError(
                f"{name}: expected 1 to {max_len} tokens (bad_words_max_len), got {list(sequence)}"
            )
    return tuple(dict.fromkeys(sequence for _, sequence in named))
