"""Bad words: from the words that a user gives to the token sequences that a request bans."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mrv1.errors import RequestError, short
from mrv1.sampler.params import SamplingParams

TOKENIZATIONS = 2
"""Most tokenizations of a word: without and with a space before it."""


def banned_token_sequences(
    params: SamplingParams,
    encode: Callable[[str], Sequence[int]] | None,
    *,
    max_words: int,
    max_len: int,
) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that a request bans, without duplicates.

    A word given as text is banned at the beginning of a text and after another word: it becomes up
    to ``TOKENIZATIONS`` sequences, which may differ in length. A word of whitespace alone is
    tokenized as given. ``encode`` returns a text's tokens, without special tokens; None = there is
    no tokenizer. A word counts once towards ``max_words``, with all its tokenizations.
    RequestError: there are too many words, a word has no token or more than ``max_len``, or is
    text without a tokenizer. The message names the field and the option that raises a limit.
    """
    num_words = len(params.bad_words) + len(params.bad_words_token_ids)
    if num_words > max_words:
        given = [name for name in ("bad_words", "bad_words_token_ids") if getattr(params, name)]
        raise RequestError(
            f"{' and '.join(given)}: expected at most {max_words} words, got {num_words}; "
            f"raise max_bad_words_num or MRV1_MAX_BAD_WORDS_NUM"
        )
    if params.bad_words and encode is None:
        raise RequestError("bad_words: expected bad_words_token_ids, as there is no tokenizer")
    named = [("bad_words_token_ids", tuple(ids)) for ids in params.bad_words_token_ids]
    named += [
        (f"bad_words: {short(word)}", tuple(encode(text)) if encode else ())
        for word in params.bad_words
        for text in _forms(word)
    ]
    for name, sequence in named:
        if not sequence:
            raise RequestError(f"{name}: expected at least one token, got none")
        if len(sequence) > max_len:
            raise RequestError(
                f"{name}: expected at most {max_len} tokens a word, got {len(sequence)}; "
                f"raise bad_words_max_len or MRV1_BAD_WORDS_MAX_LEN"
            )
    return tuple(dict.fromkeys(sequence for _, sequence in named))


def _forms(word: str) -> tuple[str, ...]:
    bare = word.lstrip()
    return (bare, f" {bare}") if bare else (word,)
