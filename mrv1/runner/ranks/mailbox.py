"""Messages of one word from rank 0 to the others, in memory that they share.

A word has a sequence number and a code, and is stored at once: a reader sees all of it or nothing.
Messages that need more go by a connection, and have a word that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep

import numpy as np
import torch

NUM_WORDS = 4096
"""Words of the ring: many more than rank 0 posts before it waits for a step."""

CODE_BITS = 24

BY_CONNECTION = (1 << CODE_BITS) - 1
"""The code of a message that comes by the connection; others are numbers of graphs."""

MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.001, 0.1
"""Pauses of a sleeping reader; only the first one may miss a word, as it falls asleep."""


def mailbox_words(size: int) -> int:
    """Return the int32 words of memory that the mailbox of ``size`` ranks needs."""
    return 2 * (NUM_WORDS + size)


class Mailbox:
    """The ring of words, and for each rank whether it sleeps; one object for one process."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._words = np.asarray(memory.view(torch.int64)).data
        self._count = 0

    def post(self, code: int) -> None:
        """Post a code as rank 0."""
        self._count += 1
        self._words[self._count % NUM_WORDS] = self._count << CODE_BITS | code

    @property
    def any_sleeps(self) -> bool:
        """Whether a reader waits for a message of its connection, rather than for a word."""
        return any(self._words[NUM_WORDS:])

    def has_news(self) -> bool:
        """Whether the next code is there."""
        count = self._count + 1
        return self._words[count % NUM_WORDS] >> CODE_BITS >= count

    def read(self) -> int | None:
        """Return the next code as another rank; None = there is none yet."""
        count = self._count + 1
        word = self._words[count % NUM_WORDS]
        if word >> CODE_BITS < count:
            return None
        if word >> CODE_BITS > count:
            raise RuntimeError("mailbox: expected a reader that keeps up with rank 0")
        self._count = count
        return word & BY_CONNECTION

    def wait(
        self,
        rank: int,
        spin_seconds: float,
        sleep_up_to: Callable[[float], object],
        on_idle: Callable[[], object],
    ) -> int:
        """Wait for the next code as ``rank``, awake for ``spin_seconds``, and return it.

        ``sleep_up_to`` waits for the connection, for some seconds at most; ``on_idle`` is called
        before each sleep.
        """
        awake_until, pause = monotonic() + spin_seconds, MIN_PAUSE_SECONDS
        while (code := self.read()) is None:
            if monotonic() < awake_until:
                sleep(0)
                continue
            on_idle()
            self._words[NUM_WORDS + rank] = 1
            if (code := self.read()) is None:
                sleep_up_to(pause)
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
                continue
            break
        self._words[NUM_WORDS + rank] = 0
        return code
