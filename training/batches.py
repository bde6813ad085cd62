"""Training batches: plain text, recall and repetition rows, made in worker processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from training.corpus import EncodedText, TokenIds
from training.recall import TEXT, RecallVocabulary, Targets, recall_row, repeat_row

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """How many rows of each kind a batch holds, and how dense its recall rows are."""

    text_rows: int
    recall_rows: int
    repeat_rows: int
    min_lines: int
    max_lines: int
    max_distance: int
    """Longest distance of a recall question and longest period of a repetition, in tokens."""
    recall_text_fraction: float = 0.0
    """Fraction of recall rows whose running text is trained on as well."""


class BatchStream(IterableDataset[Batch]):
    """Endless batches: tokens [rows, num_tokens + 1] int64 and their targets, uint8.

    Worker ``w`` of ``n`` makes the batches ``w, w + n, ...``, from its own seed: for a fixed
    number of workers the stream is deterministic.
    """

    def __init__(
        self,
        texts: Sequence[EncodedText],
        vocabulary: RecallVocabulary,
        *,
        stages: Sequence[tuple[int, Mixture]],
        vocab_size: int,
        num_tokens: int,
        end_of_text: int,
        seed: int,
    ) -> None:
        """Keep the parameters; nothing is drawn before iteration.

        Args:
            texts: tokenisations of the training text, drawn from uniformly.
            vocabulary: the tokens of recall lines.
            stages: (first batch, mixture) of every stage, ascending, from batch 0 on.
            vocab_size: number of token ids.
            num_tokens: tokens of context a row trains.
            end_of_text: id that separates unrelated texts.
            seed: seed of the stream.
        """
        super().__init__()
        self.texts = texts
        self.vocabulary = vocabulary
        self.stages = stages
        self.vocab_size = vocab_size
        self.row_tokens = num_tokens + 1
        self.end_of_text = end_of_text
        self.seed = seed

    def __iter__(self) -> Iterator[Batch]:
        """Yield this worker's batches."""
        worker = get_worker_info()
        index, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        rng = np.random.default_rng([self.seed, index])
        while True:
            mixture = [stage for first, stage in self.stages if first <= index][-1]
            rows = list(self._rows(rng, mixture))
            index += stride
            tokens, targets = (np.stack(parts) for parts in zip(*rows, strict=True))
            yield torch.from_numpy(tokens), torch.from_numpy(targets)

    def _rows(
        self, rng: np.random.Generator, mixture: Mixture
    ) -> Iterator[tuple[TokenIds, Targets]]:
        for _ in range(mixture.text_rows):
            yield self._text_row(rng)
        for _ in range(mixture.recall_rows):
            num_lines = np.exp(
                rng.uniform(np.log(mixture.min_lines), np.log(mixture.max_lines + 1))
            )
            yield recall_row(
                rng,
                self.vocabulary,
                self._window(rng),
                int(num_lines),
                max_distance=mixture.max_distance,
                text_loss=rng.random() < mixture.recall_text_fraction,
            )
        for _ in range(mixture.repeat_rows):
            yield repeat_row(
                rng,
                self.vocab_size,
                self.row_tokens,
                max_period=min(mixture.max_distance, self.row_tokens // 2),
            )

    def _window(self, rng: np.random.Generator) -> TokenIds:
        ids = self.texts[int(rng.integers(len(self.texts)))].ids
        start = int(rng.integers(len(ids) - self.row_tokens + 1))
        window: TokenIds = ids[start : start + self.row_tokens]
        return window

    def _text_row(self, rng: np.random.Generator) -> tuple[TokenIds, Targets]:
        """Return a plain window, or half the time one with an end of text somewhere in it."""
        text = self.texts[int(rng.integers(len(self.texts)))]
        targets = np.full(self.row_tokens, TEXT, dtype=np.uint8)
        if rng.random() < 0.5:
            return self._window(rng), targets
        starts = text.speech_starts
        head = int(rng.integers(self.row_tokens))  # tokens before the end of text
        ends = starts[starts >= head]
        end = int(ends[rng.integers(len(ends))])
        tail = self.row_tokens - 1 - head
        begins = starts[starts <= len(text.ids) - tail]
        begin = int(begins[rng.integers(len(begins))])
        row = np.concatenate(
            (text.ids[end - head : end], [self.end_of_text], text.ids[begin : begin + tail])
        )
        return row, targets


def loader(stream: BatchStream, *, num_workers: int, pin_memory: bool) -> Iterator[Batch]:
    """Return the stream's batches, made ahead by worker processes (0: in this process)."""
    return iter(
        DataLoader(
            stream,
            batch_size=None,
            num_workers=num_workers,
            prefetch_factor=8 if num_workers else None,
            pin_memory=pin_memory,
        )
    )
