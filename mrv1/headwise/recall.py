"""Prompts that need a long view: facts in a filler, and questions about them far later.

A fact is the line ``REMEMBER: key value.``; a question is ``RECALL: key``, whose next token is the
fact's value. Random keys and values make the context the only place of the answer.

Source: DuoAttention (arXiv:2410.10819) hides passkeys in filler to find the heads that need the
whole context. The embedded model is trained on lines of this form (training/recall.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mrv1.errors import ConfigError

TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallLines:
    """The parts of facts and questions, as token ids of one tokenizer."""

    remember: tuple[int, ...]  # tokens in front of a fact's key
    recall: tuple[int, ...]  # tokens in front of a question's key
    end: tuple[int, ...]  # tokens that follow every value
    words: TokenIds  # [num_words] one token per word, for keys and values

    def fact(self, key: int, value: int) -> TokenIds:
        """Return the tokens of a fact."""
        return np.array([*self.remember, key, value, *self.end])

    def question(self, key: int, value: int) -> TokenIds:
        """Return the tokens of a question and its answer."""
        return np.array([*self.recall, key, value, *self.end])


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallPrompt:
    """One prompt and the places of its answers."""

    tokens: TokenIds  # [num_tokens]
    answers: TokenIds  # [num_facts] index in ``tokens``: the logits before it predict it
    is_filler: npt.NDArray[np.bool_]  # [num_tokens] whether a token belongs to the filler


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
    """Scatter facts over a filler, and for each fact a question far later.

    Args:
        rng: source of every draw.
        lines: the parts of facts and questions.
        filler: ``[num_tokens]`` text in which the lines replace tokens.
        num_facts: facts of the prompt, each with a key of its own.
        first: least index of a fact.
        distance: least tokens from a fact's value to its answer. Questions come in random order.
            Of the tokens that it leaves, facts lie in the first half and questions in the second.
        exact: whether every distance is exactly ``distance``, with questions in the facts' order.

    Raises:
        ConfigError: the lines do not fit into the filler, or there are too few words.
    """
    num_tokens = len(filler)
    words = rng.permutation(lines.words)[: 2 * num_facts]
    if len(words) < 2 * num_facts:
        raise ConfigError(f"num_facts: expected at most {len(words) // 2}, got {num_facts}")
    keys, values = np.split(words, 2)
    skew = len(lines.remember) - len(lines.recall)  # value's index in a fact minus in a question
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
    """Draw ascending starts of lines that do not overlap, from sorted uniform gaps."""
    gaps = np.sort(rng.integers(0, num_tokens - num_lines * length + 1, num_lines))
    return gaps + np.arange(num_lines) * length


def _put(tokens: TokenIds, is_filler: npt.NDArray[np.bool_], start: int, line: TokenIds) -> None:
    tokens[start : start + len(line)] = line
    is_filler[start : start + len(line)] = False
