"""The source of prompts: a checkpoint's tokenizer, and a text or random words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mrv1.errors import ConfigError
from mrv1.headwise import RecallLines, RecallPrompt, recall_prompt
from mrv1.headwise.recall import TokenIds
from mrv1.models import Checkpoint

SYNTHETIC = "synthetic"  # value of ``data`` for random words instead of a text
TASK_DATA = "tasks"  # value of ``data`` for the prompts of ``mrv1.calibration.tasks``
MAX_CHARS = 4 << 20  # characters of a file that are read, from its beginning on
COMMON_WORDS = 97
"""Most frequent words (lowest ids) that are left out, as they fill the running text: as many as in
the embedded model's training."""

MAX_WORDS = 4096  # drawn from: a large vocabulary ends in rare words

# A word of at least four lower-case letters with the space in front of it, as byte-level BPE and
# SentencePiece spell it.
_WORD = re.compile("[\u0120\u2581][a-z]{4,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """The parts of prompts: lines with facts and questions, and the text around the lines."""

    lines: RecallLines
    prefix: tuple[int, ...]
    """Tokens that every prompt of the model begins with, such as a begin-of-sequence."""
    ids: TokenIds | None
    """The text; None = random words."""

    def prompts(
        self,
        rng: np.random.Generator,
        num_prompts: int,
        *,
        num_tokens: int,
        num_facts: int,
        sink: int,
        distance: int,
        exact: bool = False,
    ) -> list[RecallPrompt]:
        """Draw ``num_prompts`` prompts of ``num_tokens`` tokens, as ``recall_prompt``, errors too.

        No fact starts in the ``sink`` leading tokens.
        """
        return [
            recall_prompt(
                rng,
                self.lines,
                self._filler(rng, num_tokens),
                num_facts=num_facts,
                first=max(sink, len(self.prefix)),
                distance=distance,
                exact=exact,
            )
            for _ in range(num_prompts)
        ]

    def _filler(self, rng: np.random.Generator, num_tokens: int) -> TokenIds:
        length = max(num_tokens - len(self.prefix), 0)
        if self.ids is None:
            body = rng.choice(self.lines.words, length)
        else:
            start = int(rng.integers(len(self.ids) - length + 1))
            body = self.ids[start : start + length]
        return np.concatenate([np.array(self.prefix, dtype=np.int64), body])


def load_texts(checkpoint: Checkpoint, data: str | Path, num_tokens: int) -> Texts:
    """Return the parts of prompts, in tokens of a checkpoint's tokenizer.

    ``data`` is a UTF-8 text file, or ``"synthetic"``. ConfigError: the tokenizer or the file
    cannot be read, or the text is shorter than a prompt of ``num_tokens``.
    """
    lines = None
    if checkpoint.has_tokenizer:
        tokenizer = checkpoint.tokenizer()
        lines = recall_lines(tokenizer)
    if lines is None or not len(lines.words):
        raise ConfigError(
            f"calibration: expected a tokenizer in {str(checkpoint.path)!r} in which words of "
            "four letters are tokens, found none"
        )
    prefix = tuple(tokenizer.encode(""))
    if str(data) == SYNTHETIC:
        return Texts(lines=lines, prefix=prefix, ids=None)
    try:
        with Path(data).open(encoding="utf-8") as file:
            text = file.read(MAX_CHARS)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data: cannot read {str(data)!r}: {error}") from error
    ids = np.array(_encode(tokenizer, text), dtype=np.int64)
    if len(ids) < num_tokens:
        raise ConfigError(
            f"data: expected a text of at least {num_tokens} tokens, a prompt's, got {len(ids)} "
            f"in {str(data)!r}"
        )
    return Texts(lines=lines, prefix=prefix, ids=ids)


def recall_lines(tokenizer: Any) -> RecallLines:  # noqa: ANN401
    """Return the parts of lines: a word is one token, so that none is part of another."""
    vocab: dict[str, int] = tokenizer.get_vocab()
    words = sorted(vocab[token] for token in vocab if _WORD.fullmatch(token))
    return RecallLines(
        remember=tuple(_encode(tokenizer, "\nREMEMBER:")),
        recall=tuple(_encode(tokenizer, "\nRECALL:")),
        end=tuple(_encode(tokenizer, ".\n")),
        words=np.array(words[COMMON_WORDS:][:MAX_WORDS], dtype=np.int64),
    )


def _encode(tokenizer: Any, text: str) -> list[int]:  # noqa: ANN401
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return ids
