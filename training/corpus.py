"""The text corpus: loading, splitting and (randomised) tokenisation.

The corpus is tinyshakespeare (public domain). The last tenth is held out for validation; nothing,
the tokenizer included, is fitted on it.

Source: subword regularisation by dropped merges is BPE-dropout, https://arxiv.org/abs/1910.13267.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

CORPUS_PATH = Path(__file__).parent / "data" / "tinyshakespeare.txt"
CHECKPOINT_DIR = Path(__file__).parents[1] / "mrv1" / "models" / "tiny"
END_OF_TEXT = "<|endoftext|>"
TRAIN_FRACTION = 0.9

TokenIds = npt.NDArray[np.int64]


def load_split(path: Path = CORPUS_PATH) -> tuple[str, str]:
    """Return the corpus as (training text, held-out text), cut at a blank line."""
    text = path.read_text(encoding="utf-8")
    cut = text.index("\n\n", int(len(text) * TRAIN_FRACTION)) + 2
    return text[:cut], text[cut:]


def split_speeches(text: str) -> list[str]:
    """Cut the text after every blank line; the pieces join to exactly ``text``."""
    parts = text.split("\n\n")
    return [part + "\n\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText:
    """One tokenisation of a text."""

    ids: TokenIds
    """[num_tokens] token ids."""
    speech_starts: TokenIds
    """[num_speeches] index into ``ids`` of the first token of every speech, ascending."""


def encode(tokenizer: Tokenizer, text: str, *, merge_dropout: float = 0.0) -> EncodedText:
    """Encode ``text``, skipping every BPE merge with probability ``merge_dropout``.

    A blank line always ends a pre-token, so encoding speech by speech (in parallel) gives the same
    ids as encoding the text whole.

    Args:
        tokenizer: byte-level BPE; its model's dropout is set for this call and cleared again.
        text: any text.
        merge_dropout: probability in [0, 1); 0 gives the canonical tokenisation.
    """
    tokenizer.model.dropout = merge_dropout or None
    encodings = tokenizer.encode_batch(split_speeches(text), add_special_tokens=False)
    tokenizer.model.dropout = None
    lengths = np.array([len(encoding.ids) for encoding in encodings], dtype=np.int64)
    ids = np.concatenate([np.array(encoding.ids, dtype=np.int64) for encoding in encodings])
    return EncodedText(ids=ids, speech_starts=np.cumsum(lengths) - lengths)
