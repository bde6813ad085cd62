"""All of a step's host data in one buffer of pinned memory, which one kernel fetches.

An upload is a run of int32 words: those that kernels read in place, at fixed offsets for captured
graphs; then the changed state of slots as segments (see ``scatter_segments``), and their data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from mrv1.runner.step import Int32Array

NUM_WORDS, NUM_SEGMENTS, RING_SLOT, NUM_SOURCES, HEADER_WORDS = 0, 1, 2, 3, 8
"""Header: words, segments, output slot, tokens whose feature source is read; its own size."""

_FILL = -(1 << 30)
"""Source of a segment filled with -1: negative, even after the offset of the data is added."""

FETCHED_WORDS = 1 << 16
"""Words of data that a fetched upload has room for, besides the tokens and block ids of a request;
a longer one (many prompts) is copied."""


class HostMemory(Protocol):
    """Allocates memory of the host that kernels read; several ranks may share it."""

    def zeros(self, *shape: int) -> torch.Tensor:
        """Return zeros, int32; ranks that share their memory allocate it in the same order."""


class PinnedMemory:
    """Pinned memory of this process alone; plain memory if ``device`` is a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"

    def zeros(self, *shape: int) -> torch.Tensor:
        """Return zeros, int32."""
        return torch.zeros(shape, dtype=torch.int32, pin_memory=self._is_pinned)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """An upload on the device; the other tensors are views of ``words``, all int32."""

    words: torch.Tensor
    """[words]."""
    num_segments: torch.Tensor
    """[1]."""
    segments: torch.Tensor
    """[num_segments or more, 3]."""
    ring_slot: torch.Tensor
    """[1]."""
    num_sources: torch.Tensor
    """[1], first tokens of the batch that have a source of features; mostly 0."""
    idx_mapping: torch.Tensor
    """[rows], -1 = padding."""
    query_start_loc: torch.Tensor
    """[rows + 1]; valid where query lengths were sent."""
    draft_token_ids: torch.Tensor | None
    """[rows, max_drafts]; None = no row has any."""
    num_draft_tokens: torch.Tensor | None
    """[rows]; None = no row has any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What launches have to know of an upload that was sent."""

    num_words: int
    num_segments: int
    num_drafts: tuple[int, int]
    """Rows with drafts, and the drafts that each has place for, at the end; (0, 0) = no row has
    any, or a graph finds them."""
    long_words: torch.Tensor | None
    """[num_words] on the host, if they are too many for ``fetch_upload``."""


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

    def put(self, dst: int, words: Sequence[int]) -> None:
        """Set a few words of the state, from ``dst`` on."""
        self._word_segments += (dst, len(self._words), len(words))
        self._words += words

    def write(self, dst: int, values: npt.NDArray[np.generic]) -> None:
        """Set words of the state, from ``dst`` on; an element of 8 bytes is two words."""
        words = np.ascontiguousarray(values).reshape(-1).view(np.int32)
        if len(words):
            self._array_segments += (dst, self._num_array_words, len(words))
            self._arrays.append(words)
            self._num_array_words += len(words)

    def fill(self, dst: int, length: int) -> None:
        """Set ``length`` of the state's words to -1."""
        if length:
            self._word_segments += (dst, _FILL, length)

    @property
    def num_words(self) -> int:
        """Words of the segments and of their data."""
        return 3 * self.num_segments + len(self._words) + self._num_array_words

    def write_to(self, words: Int32Array, start: int) -> None:
        """Write the segments, then their data, into ``words`` from ``start`` on."""
        at = start + 3 * self.num_segments
        segments = np.array(self._word_segments, dtype=np.int32)
        segments[1::3] += at
        words[start : start + len(segments)] = segments
        words[at : at + len(self._words)] = self._words
        if self._arrays:
            start, at = start + len(segments), at + len(self._words)
            segments = np.array(self._array_segments, dtype=np.int32)
            segments[1::3] += at
            words[start : start + len(segments)] = segments
            np.concatenate(self._arrays, out=words[at : at + self._num_array_words])


def _draft_words(drafts: Sequence[Sequence[int]], length: int) -> tuple[Int32Array, Int32Array]:
    """Return the number of drafts of each row, and the rows' drafts, padded to ``length`` or more.

    One length for all steps means one variant of each kernel.
    """
    most = max(length, *map(len, drafts))
    token_ids = np.full((len(drafts), most), -1, dtype=np.int32)
    for row, tokens in enumerate(drafts):
        token_ids[row, : len(tokens)] = tokens
    return np.array(list(map(len, drafts)), dtype=np.int32), token_ids.reshape(-1)


class Staging:
    """A ring of pinned buffers, and the place on the device where a step finds its upload.

    ``send``, on the launching thread, writes a slot's buffer once its older step is over.

    Args:
        max_num_reqs, max_segments: most rows of a step, and segments of one that a graph runs.
        num_slots: buffers, taken in turns.
        device: the runner's device.
        request_words: tokens and block ids of the longest request: after a prefix hit a graph runs
            the step that uploads them, whose few tokens take a GPU less time than the launch of
            their kernels would take the host.
        max_sources: most tokens of a step that have a source of features.
        captured_drafts: most rows of a graph with drafts, and its drafts of a row.
        memory: where the buffers are; None = pinned memory of this process.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_segments: int,
        num_slots: int,
        device: torch.device,
        *,
        request_words: int = 0,
        max_sources: int = 0,
        captured_drafts: tuple[int, int] = (0, 0),
        memory: HostMemory | None = None,
    ) -> None:
        def padded(words: int) -> int:
            return -(-words // 4) * 4

        self._device = device
        self._rows_start = HEADER_WORDS
        self._query_start = self._rows_start + padded(max_num_reqs)
        draft_rows, self._max_drafts = captured_drafts
        self._counts_start = self._query_start + padded(max_num_reqs + 1)
        self._drafts_start = self._counts_start + padded(draft_rows)
        self._segments_start = self._drafts_start + padded(draft_rows * self._max_drafts)
        self.max_segments = max_segments + 1  # the last one for sources
        data_words = FETCHED_WORDS + request_words
        self._num_data_words = self._segments_start + 3 * max_segments + data_words
        words = self._num_data_words + 3 + max_sources
        self.fetched = torch.zeros(words, dtype=torch.int32, device=device)
        """[words]: the upload of the step that runs."""
        self.uploads = (memory or PinnedMemory(device)).zeros(num_slots, words)
        """[slots, words] in memory of the host."""
        self._uploads = np.asarray(self.uploads)
        self._long_uploads: list[torch.Tensor | None] = [None] * num_slots
        self.clear()

    def clear(self) -> None:
        """Make each upload one of padding, for steps of a graph's capture; none may be in use."""
        padding = np.zeros(self._uploads.shape[1], dtype=np.int32)
        padding[NUM_WORDS] = self._segments_start
        padding[self._rows_start : self._query_start] = -1
        self._uploads[:] = padding  # other ranks that share the memory may have done it already

    def fits(self, upload: StepUpload) -> bool:
        """Whether an upload, with any sources of features yet to come, fits the graphs' buffer."""
        words = self._segments_start + upload.num_words
        return upload.num_segments < self.max_segments and words <= self._num_data_words

    def static_view(self, num_rows: int, *, has_drafts: bool = False) -> Staged:
        """Return the views in which a graph of ``num_rows`` rows finds any upload that fits."""
        staged = self._view(self.fetched, num_rows, self.max_segments)
        if not has_drafts:
            return staged
        drafts = self.fetched[self._drafts_start : self._segments_start]
        return replace(
            staged,
            num_draft_tokens=self.fetched[self._counts_start : self._counts_start + num_rows],
            draft_token_ids=drafts[: num_rows * self._max_drafts].view(num_rows, -1),
        )

    def _view(self, words: torch.Tensor, num_rows: int, num_segments: int) -> Staged:
        segments = words[self._segments_start : self._segments_start + 3 * num_segments]
        return Staged(
            words=words,
            num_segments=words[NUM_SEGMENTS : NUM_SEGMENTS + 1],
            segments=segments.view(-1, 3),
            ring_slot=words[RING_SLOT : RING_SLOT + 1],
            num_sources=words[NUM_SOURCES : NUM_SOURCES + 1],
            idx_mapping=words[self._rows_start : self._rows_start + num_rows],
            query_start_loc=words[self._query_start : self._query_start + num_rows + 1],
            draft_token_ids=None,
            num_draft_tokens=None,
        )

    def send(
        self,
        slot: int,
        upload: StepUpload,
        idx_mapping: Int32Array,
        query_lens: Int32Array | None,
        *,
        drafts: Sequence[Sequence[int]] = (),
        is_captured: bool = False,
        num_sources: int = 0,
    ) -> Sent:
        """Write an upload to ``slot`` of the ring for ``fetch_upload``; aside if it is too long.

        ``idx_mapping [rows]`` are slots, -1 = padding; ``query_lens [rows]`` None = no kernel
        reads ``query_start_loc``; ``is_captured``: a graph finds the drafts in ``static_view``;
        ``num_sources``: of the first tokens, those with a source of features. Returns what
        ``staged`` needs.
        """
        end = self._segments_start + upload.num_words
        draft_words, num_drafts = None, (0, 0)
        if any(drafts) and not is_captured:
            draft_words = np.concatenate(_draft_words(drafts, self._max_drafts))
            num_drafts = len(drafts), len(draft_words) // len(drafts) - 1
        num_words = end if draft_words is None else end + len(draft_words)
        long_words, words = None, self._uploads[slot]
        if num_words > len(words):
            long_words = self._long_upload(slot, num_words)
            words = np.asarray(long_words)
        words[NUM_WORDS] = num_words
        words[NUM_SEGMENTS] = upload.num_segments
        words[RING_SLOT] = slot
        words[NUM_SOURCES] = num_sources
        words[self._rows_start : self._rows_start + len(idx_mapping)] = idx_mapping
        if query_lens is not None:
            starts = words[self._query_start : self._query_start + len(query_lens) + 1]
            np.cumsum(query_lens, out=starts[1:])
        if any(drafts) and is_captured:
            counts, token_ids = _draft_words(drafts, self._max_drafts)
            words[self._counts_start : self._counts_start + len(counts)] = counts
            words[self._drafts_start : self._drafts_start + len(token_ids)] = token_ids
        upload.write_to(words, self._segments_start)
        if draft_words is not None:
            words[end:num_words] = draft_words
        return Sent(
            num_words=num_words,
            num_segments=upload.num_segments,
            num_drafts=num_drafts,
            long_words=long_words,
        )

    def _long_upload(self, slot: int, num_words: int) -> torch.Tensor:
        """Return the slot's pinned buffer for long uploads, grown as needed."""
        buffer = self._long_uploads[slot]
        if buffer is None or len(buffer) < num_words:
            buffer = PinnedMemory(self._device).zeros(2 * num_words)
            self._long_uploads[slot] = buffer
        return buffer[:num_words]

    def staged(self, sent: Sent, num_rows: int) -> Staged:
        """Return the parts of an upload on the device; a long one is copied there."""
        words = self.fetched
        if sent.long_words is not None:
            words = sent.long_words.to(self._device, non_blocking=True, copy=True)
        staged = self._view(words, num_rows, sent.num_segments)
        if sent.num_drafts == (0, 0):
            return staged
        rows, most = sent.num_drafts
        start = sent.num_words - rows * (most + 1)
        counts, token_ids = words[start : sent.num_words].split([rows, rows * most])
        return replace(staged, num_draft_tokens=counts, draft_token_ids=token_ids.view(-1, most))
