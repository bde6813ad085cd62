"""Features of images, video and audio on the device, in place of the embeddings of some tokens.

The buffer stays in place, for CUDA graphs. The scheduler says which rows an item gets and when.
Copies go to the stream of the steps: a row is overwritten after the older steps that read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import torch

from mrv1.config import EngineConfig
from mrv1.environment import INT32_MAX
from mrv1.errors import CapacityError
from mrv1.kernels.layers.contracts import FeatureRows
from mrv1.models import DecoderModel, ModelConfig
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

    They have memory from the start if configured or the model has a vision encoder (or
    CapacityError), else from the first item on; ``slots`` have ``fields(config)``.
    """

    @staticmethod
    def fields(config: EngineConfig) -> dict[str, Field]:
        """Return the fields that all slots share."""
        # Decode rows come first in a batch and are padded; the prompts' tokens follow.
        width = config.max_num_seqs + config.max_num_batched_tokens
        return {FEATURE_SOURCE: Field(width=width, is_shared=True)}

    @staticmethod
    def rows_of(config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype) -> int:
        """Return the rows for a model; CapacityError if an int32 cannot count them."""
        if config.mm_cache_memory_bytes is None:
            return max(config.max_num_batched_tokens, LEAST_DEFAULT_ROWS)
        row_bytes = model_config.feature_size * dtype.itemsize
        num_rows = config.mm_cache_memory_bytes // row_bytes
        if num_rows > INT32_MAX:
            raise CapacityError(
                f"mm_cache_memory_bytes: expected at most {INT32_MAX * row_bytes}, {INT32_MAX} "
                f"rows of {row_bytes} bytes, got {config.mm_cache_memory_bytes}; lower it"
            )
        return num_rows

    def __init__(self, config: EngineConfig, model: DecoderModel, slots: SlotState) -> None:
        num_columns, dtype = model.config.feature_size, model.dtype
        self.num_rows = self.rows_of(config, model.config, dtype)
        """Rows that items can have; 0 = the runner takes no items."""
        self.rows = torch.empty(0, num_columns, dtype=dtype, device=model.device)
        """[num_rows, feature_size], features of any request; [0, feature_size] = no memory."""
        self.is_used = config.mm_cache_memory_bytes is not None or model.config.vision is not None
        """Whether the rows have memory while the runner is awake."""
        self._source = slots[FEATURE_SOURCE][0]
        self._source_word = slots.first_word(FEATURE_SOURCE, 0)
        self._staged: dict[bytes, tuple[int, Int32Array]] = {}
        """Content hash -> last staging of an item, its rows not staged since."""
        self._stagings: dict[int, bytes] = {}
        """The inverse: number of a staging -> content hash."""
        self._num_stagings = 0
        self._staging_of = np.zeros(self.num_rows, dtype=np.int64)
        """Number of the staging that wrote each row last; 0 = none."""
        self._items: dict[int, tuple[MultimodalItem, ...]] = {}
        """Slot -> items of its request, until all their tokens are computed."""
        if self.is_used:
            self.allocate()

    def allocate(self) -> None:
        """Allocate the rows, or raise CapacityError."""
        shape = self.num_rows, self.rows.shape[1]
        try:
            self.rows = self.rows.new_empty(shape)
        except RuntimeError as error:  # a CPU has no OutOfMemoryError of its own
            num_bytes = self.num_rows * self.rows.shape[1] * self.rows.itemsize
            raise CapacityError(
                f"mm_cache_memory_bytes: expected room for {num_bytes} bytes on "
                f"{self.rows.device}, got less; lower it"
            ) from error

    def free(self) -> None:
        """Free the rows, and forget which features they have."""
        self.rows = self.rows[:0].clone()
        self._staged.clear()
        self._stagings.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the rows on the device; 0 = they have no memory."""
        return self.rows.nbytes

    @property
    def has_items(self) -> bool:
        """Whether some request has tokens of items to compute."""
        return bool(self._items)

    def prepared(self, item: MultimodalItem) -> MultimodalItem:
        """Return an item whose features can be staged without a wait of the host.

        RequestError: the features do not fit the model's hidden size or dtype.
        """
        on_gpu = self.rows.device.type == "cuda"
        return item.prepared(self.rows.shape[1], self.rows.dtype, pin_memory=on_gpu)

    def of(self, staged: Staged) -> FeatureRows | None:
        """Return the features of a step's batch; None = the rows have no memory."""
        if not len(self.rows):
            return None
        return FeatureRows(self.rows, self._source, staged.num_sources)

    def enter(self, plan: StepPlan) -> None:
        """Bring the slots' items to the start of the step."""
        for slot in (*plan.preempted, *plan.finished):
            self._items.pop(slot, None)
        for request in plan.entering:
            self._items.pop(request.slot, None)
            if request.multimodal:
                self._items[request.slot] = request.multimodal

    def stage(self, plan: StepPlan) -> None:
        """Copy the features that the plan stages, on the current stream, while the host prepares.

        ValueError: ``plan.staged_features`` has rows that the buffer or the item has not.
        """
        for staged in plan.staged_features:
            item = staged.item
            self._claim(staged)
            if len(item.tensor):  # else rank 0 has sent them: see ``MultimodalItem``
                self.write(staged.rows, item.tensor)
            earlier, _ = self._staged.pop(item.content_hash, (0, None))
            self._stagings.pop(earlier, None)
            self._stagings[self._num_stagings] = item.content_hash
            runs = [np.arange(run.start, run.stop, dtype=np.int32) for run in staged.rows]
            self._staged[item.content_hash] = self._num_stagings, np.concatenate(runs)

    def write(self, runs: Sequence[range], features: torch.Tensor) -> None:
        """Copy features to runs of rows, on the current stream."""
        for run, part in zip(runs, features.split([*map(len, runs)]), strict=True):
            self.rows.narrow(0, run.start, len(run)).copy_(part, non_blocking=True)

    def _claim(self, staged: StagedFeatures) -> None:
        """Check an item's rows, which no longer have the features of other items."""
        if sum(map(len, staged.rows)) != staged.item.num_tokens or not self._has(staged.rows):
            raise ValueError(
                f"staged_features ({staged.item.name}): expected {staged.item.num_tokens} "
                f"different rows in [0, {self.num_rows}), got {list(staged.rows)}"
            )
        self._num_stagings += 1
        for run in staged.rows:
            former = self._staging_of[run.start : run.stop]
            changes = former[1:][former[1:] != former[:-1]]
            for number in map(int, (former[0], *changes)):
                self._staged.pop(self._stagings.pop(number, b""), None)
            former.fill(self._num_stagings)

    def _has(self, rows: tuple[range, ...]) -> bool:
        """Whether these are runs of different rows of the buffer."""
        end = 0
        for run in sorted(rows, key=attrgetter("start")):
            if run.step != 1 or not end <= run.start < run.stop:
                return False
            end = run.stop
        return end <= self.num_rows

    def put_sources(
        self, plan: StepPlan, num_before: Int32Array, rows: DeviceRows, upload: StepUpload
    ) -> int:
        """Add to the upload which tokens of the step have features, and which rows.

        Returns how many of the first tokens have a source, 0 = none; ``num_before`` are each row's
        computed tokens. ValueError: a token's features were not staged.
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
        _, rows = self._staged.get(item.content_hash, (0, None))
        if rows is None:
            raise ValueError(
                f"staged_features: expected the item ({item.name}) staged before its first chunk, "
                "got it not staged, or its rows given to another item since"
            )
        return rows
