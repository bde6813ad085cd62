"""Prompts that only far sight completes: facts in a filler, asked for again far later.

A fact is the line ``REMEMBER: key value.``; a question is ``RECALL: key`` and its answer, the
fact's value, is the next token. Keys and values are drawn at random, so that only the context can
tell.

Source: passkeys in filler, to find the heads that need the whole context, are DuoAttention's
(arXiv:2410.10819); the lines are those that the embedded model is trained on (training/recall.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mrv1.errors import ConfigError

TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallLines:
    """What facts and questions are made of, as token ids of one tokenizer."""

    remember: tuple[int, ...]
    """In front of a fact's key."""
    recall: tuple[int, ...]
    """In front of a question's key."""
    end: tuple[int, ...]
    """Behind every value."""
    words: TokenIds
    """[num_words], each a word: the keys and the values."""

    def fact(self, key: int, value: int) -> TokenIds:
        """Return the tokens of a fact."""
        return np.array([*self.remember, key, value, *self.end])

    def question(self, key: int, value: int) -> TokenIds:
        """Return the tokens of a question and its answer."""
        return np.array([*self.recall, key, value, *self.end])


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallPrompt:
    """One prompt and where it asks."""

    tokens: TokenIds
    """[num_tokens]."""
    answers: TokenIds
    """[num_facts], index in ``tokens`` of each answer: the logits before it are to predict it."""
    is_filler: npt.NDArray[np.bool_]
    """[num_tokens], whether a token is of the filler."""


def recall_prompt(
    rng: np.random.Generator,
    lines: RecallLines,
    filler: TokenIds,
    *,
    num_facts: int,
    first: int,
    distance: int,
    exact: bool = False,
) -> RecallPrompt:
    """Scatter facts over a filler, and a question for each far behind it.

    Args:
        rng: source of every draw.
        lines: what facts and questions are made of.
        filler: ``[num_tokens]``, whose tokens the lines replace.
        num_facts: facts of the prompt, of as many keys.
        first: index that no fact is before.
        distance: tokens from a fact's value to the answer at least; questions come in an order
            of their own. The facts lie in one half of what the distance leaves, the questions in
            the other.
        exact: whether every distance is to be ``distance``.

    Raises:
        ConfigError: the lines do not fit into the filler, or there are too few words.
    """
    num_tokens = len(filler)
    words = rng.permutation(lines.words)[: 2 * num_facts]
    if len(words) < 2 * num_facts:
        raise ConfigError(f"num_facts: expected at most {len(words) // 2}, got {num_facts}")
    keys, values = np.split(words, 2)
    skew = len(lines.remember) - len(lines.recall)  # where the value is in a line
    length = 2 + len(lines.end) + max(len(lines.remember), len(lines.recall))
    left = num_tokens - first - distance
    room = min(distance, left) if exact else left // 2
    room -= abs(skew)
    if room < num_facts * length:
        raise ConfigError(
            f"num_tokens: expected room for {num_facts} facts of {length} tokens and as many "
            f"questions, {distance} tokens apart, got {num_tokens}"
        )
    fact_starts = first + scattered_starts(rng, num_facts, length, room)
    if exact:
        asked, question_starts = np.arange(num_facts), fact_starts + distance + skew
    else:
        asked = rng.permutation(num_facts)
        question_starts = num_tokens - room + scattered_starts(rng, num_facts, length, room)
    tokens = filler.astype(np.int64)
    is_filler = np.ones(num_tokens, dtype=np.bool_)
    for fact, start in enumerate(fact_starts.tolist()):
        _put(tokens, is_filler, start, lines.fact(keys[fact], values[fact]))
    for fact, start in zip(asked.tolist(), question_starts.tolist(), strict=True):
        _put(tokens, is_filler, start, lines.question(keys[fact], values[fact]))
    answers = question_starts + len(lines.recall) + 1
    return RecallPrompt(tokens=tokens, answers=answers, is_filler=is_filler)


def scattered_starts(
    rng: np.random.Generator, num_lines: int, length: int, num_tokens: int
) -> TokenIds:
    """Draw ascending starts of lines that do not overlap, uniform over all placements."""
    gaps = np.sort(rng.integers(0, num_tokens - num_lines * length + 1, num_lines))
    return gaps + np.arange(num_lines) * length


def _put(tokens: TokenIds, is_filler: npt.NDArray[np.bool_], start: int, line: TokenIds) -> None:
    tokens[start : start + len(line)] = line
    is_filler[start : start + len(line)] = False
