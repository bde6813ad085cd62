"""Synthetic long-range recall: facts in running text, asked for again far later.

A fact is the line ``REMEMBER: key value.``; the question is ``RECALL: key`` and its answer, the
fact's value, is the next token. Key and value are drawn at random, so only the context can tell.
Distances count tokens from the fact's value to the answer.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from mrv1.headwise.recall import scattered_starts
from training.corpus import TokenIds

LINE_TOKENS = 6  # line end, REMEMBER or RECALL, ":", key, value, ".\n"
VALUE_OFFSET = 4  # index of the value in its line
NUM_DISTRACTORS = 8  # facts between a measured fact and its question
MIN_DISTANCE = 8  # tokens; shortest distance drawn in training
NUM_COMMON_WORDS = 97  # most frequent words: left out, as the running text is full of them

# How the loss treats a target token.
IGNORED, TEXT, RECALLED, STRUCTURE, REPEATED = range(5)
_FACT_TARGETS = (IGNORED, IGNORED, STRUCTURE, IGNORED, IGNORED, STRUCTURE)
_QUESTION_TARGETS = (IGNORED, IGNORED, STRUCTURE, IGNORED, RECALLED, STRUCTURE)

Targets = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecallVocabulary:
    """Token ids that recall lines are made of."""

    words: TokenIds
    """[num_words] words with a leading space, each one token: the keys and the values."""
    line_ends: TokenIds
    """Tokens that may precede a line: a newline, alone or after punctuation."""
    newline: int
    remember: int
    recall: int
    colon: int
    stop: int
    """The full stop with its newline."""

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> RecallVocabulary:
        """Look the tokens up; words have at least four letters, all of them lower-case."""
        vocab = tokenizer.get_vocab()
        words = sorted(vocab[token] for token in vocab if re.fullmatch("\u0120[a-z]{4,}", token))
        newline = "\u010a"  # how byte-level BPE spells "\n"
        line_ends = [vocab[mark + newline] for mark in ("", ",", ".", ";", ":")]
        return cls(
            words=np.array(words[NUM_COMMON_WORDS:], dtype=np.int64),
            line_ends=np.array(line_ends, dtype=np.int64),
            newline=vocab[newline],
            remember=vocab["REMEMBER"],
            recall=vocab["RECALL"],
            colon=vocab[":"],
            stop=vocab["." + newline],
        )

    def lines(self, is_fact: npt.NDArray[np.bool_], keys: TokenIds, values: TokenIds) -> TokenIds:
        """Return [num_lines, LINE_TOKENS] facts and questions, each after a plain newline."""
        lines = np.empty((len(keys), LINE_TOKENS), dtype=np.int64)
        lines[:, 0] = self.newline
        lines[:, 1] = np.where(is_fact, self.remember, self.recall)
        lines[:, 2] = self.colon
        lines[:, 3] = keys
        lines[:, 4] = values
        lines[:, 5] = self.stop
        return lines


def draw_distances(rng: np.random.Generator, count: int, max_distance: int) -> TokenIds:
    """Draw distances, half of them log-uniform (short distances teach), half uniform."""
    log_uniform = np.exp(rng.uniform(np.log(MIN_DISTANCE), np.log(max_distance), count))
    uniform = rng.uniform(MIN_DISTANCE, max_distance, count)
    return np.where(rng.random(count) < 0.5, log_uniform, uniform).astype(np.int64)


def recall_row(
    rng: np.random.Generator,
    vocabulary: RecallVocabulary,
    filler: TokenIds,
    num_lines: int,
    *,
    max_distance: int,
    text_loss: bool,
) -> tuple[TokenIds, Targets]:
    """Scatter facts and questions over ``filler``.

    Args:
        rng: source of every draw.
        vocabulary: the tokens of the lines.
        filler: [num_tokens] running text; the lines push it back, and its surplus is cut.
        num_lines: facts and questions together, at most ``num_tokens // LINE_TOKENS``.
        max_distance: longest distance drawn for a question. The question asks for the nearest fact
            at that distance or farther back, or for any fact if none is so far back.
        text_loss: whether the running text is trained on in this row.

    Returns:
        tokens [num_tokens], and how the loss treats each as a target [num_tokens].
    """
    num_tokens = len(filler)
    starts = scattered_starts(rng, num_lines, LINE_TOKENS, num_tokens)
    # Facts become rarer towards the row's end, so that most questions can ask for a far fact.
    is_fact = rng.random(num_lines) < rng.uniform(0.6, 1.2) * (1.0 - starts / num_tokens)
    is_fact[0] = True
    fact_starts = starts[is_fact]
    wanted = starts - draw_distances(rng, num_lines, max_distance)
    asked = np.searchsorted(fact_starts, wanted, side="right") - 1
    facts_so_far = np.cumsum(is_fact)
    anyone = rng.integers(0, facts_so_far)  # used if no fact is as far back as drawn
    fact_of_line = np.where(is_fact, facts_so_far - 1, np.where(asked < 0, anyone, asked))
    keys = rng.choice(vocabulary.words, len(fact_starts), replace=False)
    values = rng.choice(vocabulary.words, len(fact_starts))
    lines = vocabulary.lines(is_fact, keys[fact_of_line], values[fact_of_line])
    lines[:, 0] = rng.choice(vocabulary.line_ends, num_lines)

    kept = np.ones((num_lines, LINE_TOKENS), dtype=np.bool_)
    kept[:, 0] = rng.random(num_lines) < 0.7  # some lines follow the running text directly
    where = (starts[:, None] + np.arange(LINE_TOKENS))[kept]
    line_targets = np.where(is_fact[:, None], _FACT_TARGETS, _QUESTION_TARGETS)
    is_text = np.ones(num_tokens, dtype=np.bool_)
    is_text[where] = False
    tokens = np.empty(num_tokens, dtype=np.int64)
    tokens[is_text] = filler[: int(is_text.sum())]
    tokens[where] = lines[kept]
    targets = np.full(num_tokens, TEXT if text_loss else IGNORED, dtype=np.uint8)
    targets[where] = line_targets[kept]
    return tokens, targets


def repeat_row(
    rng: np.random.Generator, vocab_size: int, num_tokens: int, *, max_period: int
) -> tuple[TokenIds, Targets]:
    """Fill a row with repeated runs of random tokens, which only copying can predict.

    A run has ``MIN_DISTANCE`` to ``max_period`` tokens (log-uniform) and stands two to eight times
    in a row; then a new run follows. The tokens of a run's first pass cannot be guessed.
    """
    tokens = np.empty(num_tokens, dtype=np.int64)
    targets = np.full(num_tokens, IGNORED, dtype=np.uint8)
    start = 0
    while start < num_tokens:
        period = int(np.exp(rng.uniform(np.log(MIN_DISTANCE), np.log(max_period))))
        end = min(start + period * int(rng.integers(2, 9)), num_tokens)
        tokens[start:end] = np.resize(rng.integers(1, vocab_size, period), end - start)
        targets[start + period + 1 : end] = REPEATED  # nothing announces the first repeated token
        start = end
    return tokens, targets


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecallTrial:
    """One measured question."""

    tokens: TokenIds
    """[num_tokens] context; the filler that follows the question is invisible to its answer."""
    question_end: int
    """Index of the key asked for: the logits here predict the answer."""
    answer: int


def recall_trial(
    rng: np.random.Generator,
    vocabulary: RecallVocabulary,
    filler: TokenIds,
    distance: int,
) -> RecallTrial:
    """Build one trial: a fact, eight other facts, and the question about the first fact.

    Args:
        rng: source of every draw.
        vocabulary: the tokens of the lines.
        filler: [num_tokens] running text around the lines.
        distance: tokens from the fact's value to the answer.
    """
    num_tokens = len(filler)
    fact_start = int(rng.integers(0, num_tokens - distance - VALUE_OFFSET + 1))
    between_start = fact_start + LINE_TOKENS
    distractor_starts = between_start + scattered_starts(
        rng, NUM_DISTRACTORS, LINE_TOKENS, distance - LINE_TOKENS
    )
    words = rng.choice(vocabulary.words, 2 * (NUM_DISTRACTORS + 1), replace=False)
    keys, values = np.split(words, 2)
    starts = np.concatenate(([fact_start], distractor_starts, [fact_start + distance]))
    order = np.append(np.arange(NUM_DISTRACTORS + 1), 0)  # the last line asks for fact 0
    lines = vocabulary.lines(np.arange(len(order)) < len(keys), keys[order], values[order])
    tokens = filler.copy()
    where = starts[:, None] + np.arange(LINE_TOKENS)
    question_end = fact_start + distance + VALUE_OFFSET - 1
    inside = where <= question_end
    tokens[where[inside]] = lines[inside]
    return RecallTrial(tokens=tokens, question_end=question_end, answer=int(values[0]))
