"""Features of images, video and audio on the device, in place of the embeddings of some tokens.

The buffer is allocated once and never moves, so that CUDA graphs can read it. The scheduler says
which rows of it an item gets and when (``StepPlan.staged_features``). All copies go to the stream
of the steps: a row is overwritten after the older steps that read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch

from mrv1.config import EngineConfig
from mrv1.errors import CapacityError
from mrv1.kernels.layers.contracts import FeatureRows
from mrv1.models import DecoderModel
from mrv1.multimodal import MultimodalItem
from mrv1.runner.rows import DeviceRows
from mrv1.runner.slot_state import Field, SlotState
from mrv1.runner.staging import Staged, StepUpload
from mrv1.runner.step import Int32Array, StagedFeatures, StepPlan

FEATURE_SOURCE = "feature_source"
"""The field with the row of the buffer that replaces each token's embedding, in batch order."""

LEAST_DEFAULT_ROWS = 8192
"""Rows of the buffer, unless the configuration sets its bytes or steps have more tokens."""

NO_SOURCE = -1
"""Source of a token that keeps its embedding."""


class FeatureBuffer:
    """Rows of features on the device, and the items of the requests that have yet to read them.

    Args:
        config: the runner's configuration.
        model: the model whose embeddings the rows replace.
        slots: the slots, whose fields include ``fields(config)``.

    Raises:
        CapacityError: the device has no room.
    """

    @staticmethod
    def fields(config: EngineConfig) -> dict[str, Field]:
        """Return the fields that all slots share."""
        # Decode rows come first in a batch and are padded; the prompts' tokens follow.
        width = config.max_num_seqs + config.max_num_batched_tokens
        return {FEATURE_SOURCE: Field(width=width, is_shared=True)}

    def __init__(self, config: EngineConfig, model: DecoderModel, slots: SlotState) -> None:
        num_columns, dtype = model.config.feature_size, model.dtype
        row_bytes = num_columns * dtype.itemsize
        num_rows = max(config.max_num_batched_tokens, LEAST_DEFAULT_ROWS)
        if config.mm_cache_memory_bytes is not None:
            num_rows = config.mm_cache_memory_bytes // row_bytes
        try:
            self.rows = torch.empty(num_rows, num_columns, dtype=dtype, device=model.device)
            """[rows, feature_size], features of any request."""
        except RuntimeError as error:  # a CPU has no OutOfMemoryError of its own
            raise CapacityError(
                f"mm_cache_memory_bytes: expected room for {num_rows * row_bytes} bytes on "
                f"{model.device}, got less; lower it"
            ) from error
        self._source = slots[FEATURE_SOURCE][0]
        self._source_word = slots.first_word(FEATURE_SOURCE, 0)
        self._staged: dict[bytes | None, Int32Array] = {}
        """Content hash -> rows of an item's features, none of which was staged again since."""
        self._owners = np.full(num_rows, None, dtype=np.object_)
        """Content hash of the item that each row was staged for last."""
        self._items: dict[int, tuple[MultimodalItem, ...]] = {}
        """Slot -> items of its request, until all their tokens are computed."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer on the device."""
        return self.rows.nbytes

    @property
    def has_items(self) -> bool:
        """Whether some request has tokens of items to compute."""
        return bool(self._items)

    def prepared(self, item: MultimodalItem) -> MultimodalItem:
        """Return an item whose features can be staged without a wait of the host.

        Raises:
            RequestError: the features do not fit the model's hidden size or dtype.
        """
        on_gpu = self.rows.device.type == "cuda"
        return item.prepared(self.rows.shape[1], self.rows.dtype, pin_memory=on_gpu)

    def of(self, staged: Staged) -> FeatureRows | None:
        """Return the features of a step's batch; None = the buffer has no rows."""
        if not len(self.rows):
            return None
        return FeatureRows(self.rows, self._source, staged.num_sources)

    def enter(self, plan: StepPlan) -> None:
        """Bring the slots' items to the start of the step.

        Raises:
            ValueError: ``plan.staged_features`` has rows that the buffer or the item has not.
        """
        for slot in (*plan.preempted, *plan.finished):
            self._items.pop(slot, None)
        for request in plan.entering:
            self._items.pop(request.slot, None)
            if request.multimodal:
                self._items[request.slot] = request.multimodal
        for staged in plan.staged_features:
            self._give_rows(staged)

    def _give_rows(self, staged: StagedFeatures) -> None:
        rows, item = staged.rows, staged.item
        count = item.num_tokens
        distinct = np.unique(rows)
        if not len(rows) == len(distinct) == count or not 0 <= rows.min() <= rows.max() < len(
            self.rows
        ):
            raise ValueError(
                f"staged_features ({item.name}): expected {count} different rows in "
                f"[0, {len(self.rows)}), got {rows}"
            )
        for former in set(self._owners[rows]):
            self._staged.pop(former, None)
        self._owners[rows] = item.content_hash
        self._staged[item.content_hash] = rows

    def copy(self, plan: StepPlan) -> None:
        """Copy the features that the plan stages, on the current stream."""
        for staged in plan.staged_features:
            for first, start, end in _runs(staged.rows):
                part = staged.item.tensor[start:end]
                self.rows[first : first + end - start].copy_(part, non_blocking=True)

    def put_sources(
        self, plan: StepPlan, num_before: Int32Array, rows: DeviceRows, upload: StepUpload
    ) -> int:
        """Add to the upload which tokens of the step have features, and which rows.

        Args:
            plan: the step's plan.
            num_before: tokens of each row of the plan that are computed before the step.
            rows: the step's rows.
            upload: collects the changes on the device.

        Returns:
            How many of the first tokens of the batch have a source in the upload; 0 = no token of
            the step has features.

        Raises:
            ValueError: the features of a token were not staged.
        """
        first_tokens = rows.first_tokens
        pieces: list[tuple[int, Int32Array]] = []
        for row, slot in enumerate(map(int, plan.slots)):
            items = self._items.get(slot)
            if items is None:
                continue
            before = int(num_before[row])
            end = before + int(plan.num_scheduled_tokens[row])
            for item in items:
                start, stop = max(before, item.start), min(end, item.end)
                if start < stop:
                    own = self._rows_of(item)[start - item.start : stop - item.start]
                    pieces.append((int(first_tokens[row]) + start - before, own))
            if end >= items[-1].end:
                del self._items[slot]
        if not pieces:
            return 0
        num_sources = max(at + len(own) for at, own in pieces)
        source = np.full(num_sources, NO_SOURCE, dtype=np.int32)
        for at, own in pieces:
            source[at : at + len(own)] = own
        upload.write(self._source_word, source)
        return num_sources

    def _rows_of(self, item: MultimodalItem) -> Int32Array:
        rows = self._staged.get(item.content_hash)
        if rows is None:
            raise ValueError(
                f"staged_features: expected the item ({item.name}) staged before its first chunk, "
                "got it not staged, or its rows given to another item since"
            )
        return rows


def _runs(rows: Int32Array) -> Iterator[tuple[int, int, int]]:
    """Yield (first row, start, end) of each run of consecutive rows, ``rows[start:end]``."""
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    for start, end in pairwise([0, *map(int, cuts), len(rows)]):
        yield int(rows[start]), start, end
