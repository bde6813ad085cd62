"""What tests of ranks give them; their processes import this module and no test."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import torch

from mrv1 import LogitsContext, SamplingParams
from mrv1.runner import KVListener, KVReady

HEARD: Counter[int] = Counter()
"""By rank: the layers that a listener of ``counting`` was told of in this process."""


def _count(rank: int, ready: KVReady) -> None:
    assert len(ready.heads) == ready.cache.layout.num_kv_heads
    HEARD[rank] += 1


def counting(rank: int) -> KVListener:
    """Return a listener that counts."""
    return partial(_count, rank)


def _write(file: Path, ready: KVReady) -> None:
    if ready.event is not None:
        ready.event.synchronize()
    pages = ready.cache.k.float()
    with file.open("a") as out:
        for tokens in ready.tokens:
            (blocks,) = tokens.block_ids
            for index, head in enumerate(ready.heads):
                total = sum(float(pages[block, index, 0].sum()) for block in blocks)
                out.write(f"{tokens.start} {tokens.stop} {ready.layer} {head} {total:.3f}\n")


def writing(folder: Path, rank: int) -> KVListener:
    """Return a listener that writes sums of keys, head by head, to a file of its rank."""
    return partial(_write, folder / str(rank))


class Evens:
    """A grammar of even tokens, which cannot be pickled; also its own matcher."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def matcher(self) -> Evens:
        return self

    def fill_bitmask(self, bitmask: np.ndarray) -> None:
        bitmask.fill(0x55555555)

    def accept(self, token_id: int) -> bool:
        return token_id % 2 == 0

    def is_finished(self) -> bool:
        return False


class Shift:
    """Requests with a top_k of 77 draw the token before, plus 1; it cannot be pickled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[int, bool] = {}
        self.shapes: set[tuple[int, ...]] = set()
        self.fails_at: int | None = None
        """Call of ``apply`` that raises."""
        self.num_calls = 0

    def add_request(self, slot: int, params: SamplingParams, token_ids: np.ndarray) -> None:
        if params.top_k == 13:
            raise KeyError("unlucky")
        self._slots[slot] = params.top_k == 77

    def apply(self, logits: torch.Tensor, context: LogitsContext) -> torch.Tensor:
        self.shapes.add(tuple(logits.shape[1:]))
        self.num_calls += 1
        if self.num_calls == self.fails_at:
            raise KeyError("out of luck")
        history = context.history
        for row, slot in enumerate(context.idx_mapping.tolist()):
            if slot >= 0 and self._slots[slot]:
                last = int(history.token_ids[slot, int(history.num_tokens[slot]) - 1])
                logits[row] = -torch.inf
                logits[row, (last + 1) % logits.shape[1]] = 0.0
        return logits
