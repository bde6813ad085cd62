"""KV listeners that a rank can make, whose process imports this module and no test."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

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
