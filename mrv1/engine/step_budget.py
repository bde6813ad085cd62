"""How many tokens each request computes in a step: the limits of a step, which overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from mrv1.engine.request import Request
from mrv1.engine.running_batch import NextStep, RunningBatch
from mrv1.engine.scheduler_config import SchedulerConfig
from mrv1.engine.slot_table import SlotTable


class TokenRoom:
    """The prompt tokens that a step with decodes may still have, all its chunks together."""

    def __init__(self, num_tokens: int) -> None:
        self.num_left = num_tokens  # below 0 if the first chunk had to have more
        self._has_chunk = False

    @property
    def is_full(self) -> bool:
        """Whether not even a chunk of one token fits."""
        return self._has_chunk and self.num_left <= 0

    def fit(self, count: int, least: int) -> int:
        """Return how many of ``count`` tokens the next chunk has; the first at least ``least``."""
        fitting = min(count, max(self.num_left, 0))
        return fitting if self._has_chunk else max(fitting, min(least, count))

    def take(self, count: int) -> None:
        """Add a chunk to the step."""
        self.num_left -= count
        self._has_chunk = True


class StepBudget:
    """The tokens of the step that is being planned, and who may have how many of them.

    **The step** has ``max_num_batched_tokens``. An unsplittable span with too few of them left is
    *promised* its tokens in the next step, or decodes would always come first.

    **Long prompts.** With ``long_prefill_token_threshold`` T, a request computes at most T tokens
    in a step. Running requests with more than T tokens left share T tokens of the step, at most
    half of ``max_mixed_prefill_tokens``, and get what the others leave (``rest``). So a prompt
    waits for those before it as if each had T tokens at most, and each step T tokens less.

    **Chunks beside decodes.** ``max_mixed_prefill_tokens`` limits the tokens of all chunks of a
    step with decodes together (``room``), unless more prompt tokens wait than a step holds: then
    throughput counts. The first has at least a block's tokens, or its first span.

    **Padding.** With ``padding``, a step that is not full leaves the last tokens of its chunks to
    the next step, where a smaller CUDA graph then runs it and that saves time (``trim``).
    """

    def __init__(self, config: SchedulerConfig, slots: SlotTable) -> None:
        self._max_tokens = config.max_num_batched_tokens
        self._threshold = config.long_prefill_token_threshold
        self._max_mixed_tokens = config.max_mixed_prefill_tokens
        self._padding = config.padding
        self._block_size = config.block_size
        self._slots = slots
        self._limited: list[Request] = []  # long prompts that got fewer tokens than the threshold
        self._promise: tuple[Request, int] | None = None
        """The request whose unsplittable span has too few tokens left in this step, and the
        tokens of the span."""
        self.start(0)

    def start(self, num_tokens: int) -> None:
        """Begin a step whose running requests want ``num_tokens`` tokens, if nothing limits it."""
        self.num_left = self._max_tokens - num_tokens  # of no request; < 0: too many are wanted
        self.room: TokenRoom | None = None  # prompt tokens that the step may still get; None = any
        promised, self._promise = self._promise, None
        if promised is not None and promised[0].finished:
            promised = None
        self.promised = promised  # request with a promise of the step before, and its tokens
        self.is_short = self.num_left < 0 or promised is not None  # some may get too few

    def limit_chunks(
        self, counts: npt.NDArray[np.integer], prompt_tokens: Callable[[int, int], int]
    ) -> None:
        """Find out whether chunks of wanted ``counts`` must be cut: for decodes, or if long."""
        chunks = counts[counts > 1]
        most_per_request = self._threshold or self._max_tokens + 1
        if self._max_mixed_tokens is not None and (counts == 1).any():
            num_tokens = int(np.minimum(chunks, most_per_request).sum())
            num_tokens += prompt_tokens(most_per_request, self._max_tokens - num_tokens)
            if self._max_mixed_tokens < num_tokens <= self._max_tokens:
                self.room = TokenRoom(self._max_mixed_tokens)
                self.is_short |= len(chunks) > 0
        self.is_short |= bool((chunks > most_per_request).any())

    def share(self) -> None:
        """Let running requests take their tokens one by one, in their order."""
        self.num_left = self._max_tokens
        self._num_kept = 0 if self.promised is None else self.promised[1]
        """Tokens that are kept for the request that was promised them, until it takes them."""
        self._for_long = self._threshold  # tokens left for requests with a long prompt, together
        if self.room is not None:
            self._for_long = min(self._for_long, max(self.room.num_left // 2, self._block_size))

    @property
    def is_open(self) -> bool:
        """Whether the step may have more prompt tokens."""
        return self.num_left > 0 and (self.room is None or not self.room.is_full)

    def fit(self, request: Request, start: int, count: int, *, enters: bool = False) -> int:
        """Return how many of ``count`` tokens the step may have; ``enters``: it still waits."""
        if enters or (self.promised is not None and request is self.promised[0]):
            self._num_kept = 0
        fitting = min(count, max(self.num_left - self._num_kept, 0))
        if 0 < self._threshold < count:
            share = self._threshold if enters else self._for_long
            fitting = min(fitting, max(share, request.span_size(start)))
        if self.room is not None and (enters or count > 1):
            fitting = self._fit_room(self.room, request, start, fitting)
        return fitting

    def _fit_room(self, room: TokenRoom, request: Request, start: int, count: int) -> int:
        return room.fit(count, max(self._block_size, request.span_size(start)))

    def take(self, request: Request, count: int, num_wanted: int, *, enters: bool = False) -> None:
        """Give a request ``count`` tokens of the ``num_wanted`` that it has yet to compute."""
        self.num_left -= count
        if self.room is not None and count and (enters or num_wanted > 1):
            self.room.take(count)
        if not enters and 0 < self._threshold < num_wanted:
            self._for_long = max(self._for_long - count, 0)
            if count < self._threshold:
                self._limited.append(request)

    def promise(self, request: Request, start: int) -> None:
        """Keep tokens for a request in the next step if its span does not fit into this one."""
        size = request.span_size(start)
        if size > max(self.num_left - self._num_kept, 0) and self._promise is None:
            self._promise = request, size

    def forget_promise(self) -> None:
        """Keep no tokens in the next step."""
        self._promise = None

    def rest(self, step: NextStep, batch: RunningBatch, num_free: int) -> bool:
        """Give the tokens that the step has left to the long prompts, up to the threshold of each.

        Not to those with items or spans, served in their turn, nor beyond ``num_free`` blocks, for
        which nobody is preempted. Raises ``step.ends`` in place; returns whether there were any.
        """
        limited, self._limited = self._limited, []
        if not limited or step.is_starved:
            return False
        index = batch.rows.index
        for request in limited:
            if not self.num_left or request.unsplittable or request.multimodal:
                continue
            row = int((index == request.slot).nonzero()[0][0])
            start, computed = int(step.ends[row]), int(self._slots.num_computed[request.slot])
            capacity = int(self._slots.capacity[request.slot]) + num_free * self._block_size
            end = min(computed + self._threshold, start + self.num_left, capacity)
            if self.room is not None and end > start:
                end = start + self._fit_room(self.room, request, start, end - start)
                if end > start:
                    self.room.take(end - start)
            num_free -= max(batch.num_lacking(request, end), 0)
            self.num_left -= end - start
            step.ends[row] = end
        return True

    def trim(
        self, step: NextStep, batch: RunningBatch, in_order: Callable[[], Sequence[Request]]
    ) -> dict[Request, int]:
        """Shorten chunks if the step then fills a smaller graph and that saves time.

        First those that do not end their prompt, for the sake of short prompts; the newest first,
        against ``in_order``, the order of service. Each keeps at least a block's tokens. A full
        step stays full, for the bounds of waiting prompts; items and spans are not cut. Lowers
        ``step.ends`` in place; returns the requests that are cut, each with its end.
        """
        if self._padding is None:
            return {}
        slots, index, ends = self._slots, batch.rows.index, step.ends
        counts = ends - slots.num_computed[index]
        if int(counts.sum()) == self._max_tokens:
            return {}
        surplus = self._padding.surplus(int(counts[counts > 1].sum()))
        if not surplus:
            return {}
        rows = {request: row for row, request in enumerate(batch.rows.requests)}
        ends_prompt = ends == np.minimum(slots.num_tokens[index], slots.max_computed[index])
        shorter: dict[Request, int] = {}
        newest_first = reversed(in_order())
        for request in sorted(newest_first, key=lambda each: bool(ends_prompt[rows[each]])):
            cut = min(surplus, max(int(counts[rows[request]]) - self._block_size, 0))
            if cut and not request.unsplittable and not request.multimodal:
                shorter[request] = int(ends[rows[request]]) - cut
                surplus -= cut
        if surplus:
            return {}  # a step between two sizes is padded all the same
        for request, end in shorter.items():
            ends[rows[request]] = end
        return shorter
