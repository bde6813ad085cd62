"""All of a step's host data in one pinned buffer, one host-to-device copy and one scatter.

An upload is a run of int32 words: what the step's kernels read in place, at fixed offsets, so that
a captured graph finds it; then the changes of the slots' state as segments (see
``scatter_segments``), and their words. What did not change is not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from mrv1.kernels.scatter_segments import FILL
from mrv1.runner.step import Int32Array

NUM_SEGMENTS, RING_SLOT, HEADER_WORDS = 0, 1, 8
"""Header: how many segments count, and where in the ring of outputs the step's go."""

STATIC_WORDS = 1 << 16
"""Words of the buffer that graphs read; a longer upload (prompts) gets one of its own."""

COPIED_WORDS = 512
"""A copy for graphs is of a multiple of this: few sizes, hence few views to make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """An upload on the device. All are views of it, int32."""

    words: torch.Tensor
    """[words]."""
    num_segments: torch.Tensor
    """[1]."""
    segments: torch.Tensor
    """[at least those that count, 3]."""
    ring_slot: torch.Tensor
    """[1]."""
    idx_mapping: torch.Tensor
    """[rows], -1 = padding."""
    query_start_loc: torch.Tensor
    """[rows + 1]; valid where query lengths were sent."""
    draft_token_ids: torch.Tensor | None
    """[rows, most drafts]; None = no row has any."""
    num_draft_tokens: torch.Tensor | None
    """[rows]; None likewise."""


class StepUpload:
    """Collects one step's data on the host: short runs as Python integers, long ones as arrays."""

    def __init__(self) -> None:
        self._words: list[int] = []
        self._word_segments: list[int] = []
        self._arrays: list[Int32Array] = []
        self._array_segments: list[int] = []
        self._num_array_words = 0

    @property
    def num_segments(self) -> int:
        """Segments so far."""
        return (len(self._word_segments) + len(self._array_segments)) // 3

    @property
    def payload_words(self) -> int:
        """int32 words to write so far."""
        return len(self._words) + self._num_array_words

    def put(self, dst: int, words: Sequence[int]) -> None:
        """Set the state's words from ``dst`` on, which are few."""
        self._word_segments += (dst, len(self._words), len(words))
        self._words += words

    def write(self, dst: int, values: npt.NDArray[np.generic]) -> None:
        """Set the state's words from ``dst`` on; elements of 8 bytes are two words."""
        words = np.ascontiguousarray(values).reshape(-1).view(np.int32)
        if len(words):
            self._array_segments += (dst, self._num_array_words, len(words))
            self._arrays.append(words)
            self._num_array_words += len(words)

    def fill(self, dst: int, length: int) -> None:
        """Set ``length`` of the state's words to -1."""
        if length:
            self._word_segments += (dst, FILL, length)

    def laid_out(self, payload_start: int) -> tuple[Int32Array, list[Int32Array]]:
        """Return the segments, three words each, sources counting from the start, and words."""
        segments = np.array(self._word_segments + self._array_segments, dtype=np.int32)
        if not len(segments):
            return segments, []
        sources = segments[1::3]
        is_filled = sources == FILL
        sources += payload_start
        sources[len(self._word_segments) // 3 :] += len(self._words)
        sources[is_filled] = FILL
        return segments, [np.array(self._words, dtype=np.int32), *self._arrays]


def _draft_words(drafts: Sequence[Sequence[int]]) -> list[Int32Array]:
    """Return how many drafts each row has, and the rows, padded."""
    most = max(map(len, drafts))
    token_ids = np.full((len(drafts), most), -1, dtype=np.int32)
    for row, tokens in enumerate(drafts):
        token_ids[row, : len(tokens)] = tokens
    return [np.array(list(map(len, drafts)), dtype=np.int32), token_ids.reshape(-1)]


class Staging:
    """A ring of pinned buffers, each guarded by the event of its last reader.

    Owned by the runner, used from the host thread that launches steps. ``send`` waits only when
    the copy that last read the ring's next buffer has not run yet; ``num_waits`` counts that.

    Args:
        max_num_reqs: most rows of a step.
        max_static_segments: most segments of a step that a graph runs.
        depth: pinned buffers: one being filled while copies out of the others may still run.
        device: the runner's.
    """

    def __init__(
        self, max_num_reqs: int, max_static_segments: int, depth: int, device: torch.device
    ) -> None:
        def padded(words: int) -> int:
            return -(-words // 4) * 4

        self._device = device
        self._rows_start = HEADER_WORDS
        self._query_start = self._rows_start + padded(max_num_reqs)
        self._segments_start = self._query_start + padded(max_num_reqs + 1)
        self.max_static_segments = max_static_segments
        words = max(STATIC_WORDS, self._payload_start(max_static_segments) + STATIC_WORDS // 2)
        self._static = torch.zeros(words, dtype=torch.int32, device=device)
        self._static[self._rows_start : self._query_start] = -1  # until a step comes: padding
        self._pinned = [self._new_buffer(words) for _ in range(depth)]
        """Each with its numpy view."""
        self._copied: list[torch.cuda.Event | None] = [None] * depth
        self._static_copies: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        """By pinned buffer and words: the views that a copy takes, made once."""
        self._next = 0
        self.num_waits = 0

    def _payload_start(self, num_segments: int) -> int:
        return self._segments_start + -(-3 * num_segments // 4) * 4

    def _new_buffer(self, num_words: int) -> tuple[torch.Tensor, Int32Array]:
        pin = self._device.type == "cuda"
        buffer = torch.empty(num_words, dtype=torch.int32, pin_memory=pin)
        return buffer, buffer.numpy()

    def fits_static(self, upload: StepUpload) -> bool:
        """Whether an upload fits where graphs look for it."""
        words = self._payload_start(self.max_static_segments) + upload.payload_words
        return upload.num_segments <= self.max_static_segments and words <= self._static.numel()

    def static_view(self, num_rows: int) -> Staged:
        """Return where a graph of so many rows finds every upload that fits."""
        return self._view(self._static, num_rows, self.max_static_segments)

    def _view(self, words: torch.Tensor, num_rows: int, num_segments: int) -> Staged:
        segments = words[self._segments_start : self._segments_start + 3 * num_segments]
        return Staged(
            words=words,
            num_segments=words[NUM_SEGMENTS : NUM_SEGMENTS + 1],
            segments=segments.view(-1, 3),
            ring_slot=words[RING_SLOT : RING_SLOT + 1],
            idx_mapping=words[self._rows_start : self._rows_start + num_rows],
            query_start_loc=words[self._query_start : self._query_start + num_rows + 1],
            draft_token_ids=None,
            num_draft_tokens=None,
        )

    def send(
        self,
        upload: StepUpload,
        slots: Int32Array,
        query_lens: Int32Array | None,
        ring_slot: int,
        *,
        num_padded_rows: int,
        drafts: Sequence[Sequence[int]] = (),
    ) -> torch.Tensor:
        """Copy an upload to the device in one transfer on the current stream.

        Args:
            upload: changes of the state.
            slots: ``[rows]``.
            query_lens: ``[rows]``; None = nothing reads ``query_start_loc``.
            ring_slot: where the step's outputs go.
            num_padded_rows: rows of the batch, at least those of ``slots``.
            drafts: of each row; () = none.

        Returns:
            The upload's words on the device: where graphs look for it, if it fits there.
        """
        num_segments = max(upload.num_segments, self.max_static_segments)
        payload_start = self._payload_start(num_segments)
        segments, payload = upload.laid_out(payload_start)
        if any(drafts):
            payload = [*payload, *_draft_words(drafts)]
        num_words = payload_start + sum(map(len, payload))
        pinned, words = self._acquire(num_words)
        words[NUM_SEGMENTS], words[RING_SLOT] = upload.num_segments, ring_slot
        at = self._rows_start + len(slots)
        words[self._rows_start : at] = slots
        if num_padded_rows > len(slots):
            words[at : self._rows_start + num_padded_rows] = -1
        if query_lens is not None:
            self._write_query_starts(words, query_lens, num_padded_rows)
        if len(segments):
            words[self._segments_start : self._segments_start + len(segments)] = segments
        at = payload_start
        for piece in payload:
            words[at : at + len(piece)] = piece
            at += len(piece)
        if num_words <= self._static.numel() and self.fits_static(upload):
            target, source = self._static_copy(num_words)
        else:
            target = torch.empty(num_words, dtype=torch.int32, device=self._device)
            source = pinned[:num_words]
        target.copy_(source, non_blocking=True)
        self._release()
        return target

    def _static_copy(self, num_words: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where an upload goes for graphs, and whence; a little more than was asked for."""
        rounded = min(-(-num_words // COPIED_WORDS) * COPIED_WORDS, self._static.numel())
        key = (self._next, rounded)
        views = self._static_copies.get(key)
        if views is None:
            pinned, _ = self._pinned[self._next]
            views = self._static_copies[key] = (self._static[:rounded], pinned[:rounded])
        return views

    def _write_query_starts(
        self, words: Int32Array, query_lens: Int32Array, num_padded_rows: int
    ) -> None:
        starts = words[self._query_start : self._query_start + num_padded_rows + 1]
        starts[0] = 0
        np.cumsum(query_lens, out=starts[1 : len(query_lens) + 1])
        starts[len(query_lens) + 1 :] = starts[len(query_lens)]

    def staged(
        self,
        words: torch.Tensor,
        upload: StepUpload,
        num_rows: int,
        drafts: Sequence[Sequence[int]] = (),
    ) -> Staged:
        """Return the parts of what ``send`` returned, given the same arguments."""
        num_segments = max(upload.num_segments, self.max_static_segments)
        staged = self._view(words, num_rows, num_segments)
        if not any(drafts):
            return staged
        most = max(map(len, drafts))
        start = self._payload_start(num_segments) + upload.payload_words
        counts = words[start : start + len(drafts)]
        token_ids = words[start + len(drafts) : start + len(drafts) * (most + 1)]
        return replace(staged, num_draft_tokens=counts, draft_token_ids=token_ids.view(-1, most))

    def _acquire(self, num_words: int) -> tuple[torch.Tensor, Int32Array]:
        event = self._copied[self._next]
        if event is not None and not event.query():
            self.num_waits += 1
            event.synchronize()  # the guard of the ring: the copy out of this buffer must be over
        if self._pinned[self._next][0].numel() < num_words:
            self._pinned[self._next] = self._new_buffer(2 * num_words)
            self._static_copies.clear()  # of buffers that are no more
        return self._pinned[self._next]

    def _release(self) -> None:
        if self._device.type == "cuda":
            event = self._copied[self._next] or torch.cuda.Event()
            event.record()
            self._copied[self._next] = event
        self._next = (self._next + 1) % len(self._pinned)
