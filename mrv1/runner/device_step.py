"""One step on the device, from the upload to the tokens; a CUDA graph captures all of it.

1. ``fetch_upload`` reads the step's upload from pinned memory.
2. ``scatter_segments`` puts the upload's words into the state of the slots.
3. ``gather_tokens`` builds the batch: ids, positions, lengths, cache slots, tables, logits rows.
4. The layers run; each writes its keys and values and attends.
5. The sampler edits logits and draws; custom processors and log-probabilities run if requested.
6. ``post_update`` appends tokens, advances lengths, finds stops, fills the ring of outputs.
7. A draft head, if there is one, makes the drafts that the next step may verify.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mrv1.config import EngineConfig
from mrv1.headwise import HeadGroups
from mrv1.kernels.registry import Ops
from mrv1.kernels.step.contracts import MAX_SAMPLED_TOKENS, AppendedTokens
from mrv1.models import DecoderModel, ModelConfig
from mrv1.models.drafts import DraftModel
from mrv1.runner import input_batch
from mrv1.runner.async_output import OutputRing
from mrv1.runner.attention_backends import select_backend
from mrv1.runner.block_table import BlockTables
from mrv1.runner.cuda_graph import Forwarded, StepGraphs
from mrv1.runner.draft_layer import DraftLayer
from mrv1.runner.features import FEATURE_SOURCE, FeatureBuffer
from mrv1.runner.input_batch import InputBatch, SampledRows
from mrv1.runner.kv_cache import CacheSpec, KVCache, layer_layouts
from mrv1.runner.kv_listener import HeardStep, LayerEvents
from mrv1.runner.launches import LayersLaunch, SampledReports, SamplingLaunch
from mrv1.runner.logits import LogitsRows, StepLogits
from mrv1.runner.logprobs import (
    FILTER_CHUNK,
    LOGITS_CHUNK,
    LogprobReport,
    LogprobRing,
    PromptPart,
    StoredLogprobs,
    Wanted,
    WantedRows,
    reports_of,
    rows_of,
)
from mrv1.runner.request_state import RequestState
from mrv1.runner.rows import DeviceRows, StepShape, Tail
from mrv1.runner.slot_state import Field, SlotState
from mrv1.runner.staging import HostMemory, PinnedMemory, Staged, Staging
from mrv1.runner.step import Int32Array
from mrv1.sampler import LogitsContext, LogitsProcessors, Sampler, SamplerLimits

NEXT_UPLOAD = "next_upload"
"""The field with the next step's slot in the ring of uploads, set by the step before it."""

SEGMENTS_PER_REQUEST = 40
"""Segments that an upload has room for per slot: enough for a new request, and a margin."""


class TokenMasks(NamedTuple):
    """Masks of the tokens that some rows of logits may draw, on the device."""

    bitmask: torch.Tensor
    """[masks, ceil(vocab / 32)] int32."""
    rows: torch.Tensor
    """[masks] int32, the row of logits that each mask applies to; -1 = none."""


class MaskBuffer:
    """The fixed place of a step's int32 masks on the device; its ring is like ``OutputRing``."""

    def __init__(
        self,
        max_masks: int,
        mask_words: int,
        num_slots: int,
        device: torch.device,
        memory: HostMemory,
    ) -> None:
        self._bitmask = torch.zeros(max_masks, mask_words, dtype=torch.int32, device=device)
        self._rows = torch.full((max_masks,), -1, dtype=torch.int32, device=device)
        self._host_bitmask = memory.zeros(num_slots, max_masks, mask_words)
        self._host_rows = memory.zeros(num_slots, max_masks)

    def first(self, num_masks: int) -> TokenMasks:
        """Return the first masks of the step."""
        return TokenMasks(self._bitmask[:num_masks], self._rows[:num_masks])

    def check(
        self, bitmask: npt.NDArray[np.generic], rows: Sequence[int], *, has_drafts: bool
    ) -> None:
        """Raise a ``ValueError`` unless these can be the masks of a step, see ``ModelRunner``."""
        expected = [len(rows), self._bitmask.shape[1]]
        if bitmask.dtype != np.int32 or [*bitmask.shape] != expected:
            raise ValueError(
                f"bitmask: expected int32 {expected}, a mask for each of rows, got "
                f"{bitmask.dtype} {list(bitmask.shape)}"
            )
        if len(set(rows)) < len(rows):
            raise ValueError(f"rows: expected different rows, got {[*rows]}")
        if has_drafts:
            raise ValueError("bitmask: expected a step without drafts, got one with some")

    def clear(self) -> None:
        """Make every mask one for no row, on the current stream."""
        self._rows.fill_(-1)

    def write(self, slot: int, bitmask: Int32Array | None, rows: Int32Array) -> int:
        """Write ``bitmask [masks, words]``, None = no mask, to a slot; return the masks' number.

        ``rows`` is as in ``TokenMasks``.
        """
        host_rows = self._host_rows[slot]
        host_rows.fill_(-1)
        if bitmask is None:
            return 0
        host_rows[: len(rows)] = torch.from_numpy(rows)
        self._host_bitmask[slot, : len(bitmask)].copy_(torch.from_numpy(bitmask))
        return len(bitmask)

    def put(self, slot: int, num_masks: int) -> None:
        """Copy the masks of a slot to the device, on the current stream."""
        host_bitmask = self._host_bitmask[slot, :num_masks]
        self._bitmask[:num_masks].copy_(host_bitmask, non_blocking=True)
        self._rows.copy_(self._host_rows[slot], non_blocking=True)


def _sampler_limits(config: EngineConfig, model_config: ModelConfig) -> SamplerLimits:
    return SamplerLimits(
        vocab_size=model_config.vocab_size,
        max_bad_words_num=config.max_bad_words_num,
        bad_words_max_len=config.bad_words_max_len,
        max_logit_bias=config.max_logit_bias,
    )


def tails_of(config: EngineConfig, shape: StepShape, *, has_processors: bool) -> list[Tail]:
    """Return the ways to sample that graphs capture after the layers of a shape."""
    if has_processors:
        return []
    if shape.query_len is None:
        return [Tail(masks=False, logprobs=False)]
    tails = [Tail(masks=True, logprobs=False)]
    if config.logprobs_mode == "raw_logprobs":
        tails += [Tail(masks=False, logprobs=True), Tail(masks=True, logprobs=True)]
    return tails


def slot_fields(
    config: EngineConfig, model_config: ModelConfig, head_groups: HeadGroups, max_model_len: int
) -> dict[str, Field]:
    """Return the fields of the slots; for arguments see ``DeviceStep``."""
    sampling = {
        name: Field(dtype=dtype, width=width)
        for name, (dtype, width) in Sampler.fields(_sampler_limits(config, model_config)).items()
    }
    state = RequestState.fields(
        max_model_len,
        max_stop_seqs_num=config.max_stop_seqs_num,
        stop_seqs_max_len=config.stop_seqs_max_len,
        max_mrope_spans=0 if model_config.vision is None else config.max_mm_items + 1,
        has_adapters=config.enable_lora,
    )
    shared = {NEXT_UPLOAD: Field(is_shared=True)} | FeatureBuffer.fields(config)
    return {**state, **BlockTables.fields(head_groups.groups), **sampling, **shared}


class DeviceStep:
    """The launches of a step, and the tensors that they read and write, which never move.

    Owned by the runner, whose thread calls it. Every launch goes to the current stream, and the
    host does not wait. ``spec`` has the shapes and dtypes of ``kv_cache``, which is set before the
    first launch; ``head_scales``, ``[layers, 2, kv_heads]``, are the cache's static scales, if it
    has some; ``processors`` are custom logits processors; ``memory`` is where the buffers are that
    the host writes for the device, None = in pinned memory of this process; ``draft_model`` makes
    drafts, and the last layer of the cache is its own; None = there is none.

    Raises:
        ConfigError, UnsupportedDeviceError: the attention backend does not support the model.
        CapacityError: the state of the slots does not fit.
    """

    kv_cache: KVCache

    def __init__(
        self,
        config: EngineConfig,
        model: DecoderModel,
        ops: Ops,
        spec: CacheSpec,
        head_groups: HeadGroups,
        max_model_len: int,
        *,
        head_scales: torch.Tensor | None,
        processors: LogitsProcessors,
        memory: HostMemory | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        memory = memory or PinnedMemory(model.device)
        self.config, self.model, self.ops, self.spec = config, model, ops, spec
        self.head_groups, self.max_model_len = head_groups, max_model_len
        self.device = device = model.device
        self._head_scales = head_scales
        self.processors = processors
        self._late_error: Exception | None = None
        groups, num_slots = head_groups.groups, config.max_num_seqs
        layouts = layer_layouts(spec, head_groups, [1] * len(groups), device)
        self.attention = select_backend(config.attention_backend, model, spec, layouts)
        limits = _sampler_limits(config, model.config)
        self.logits = StepLogits(
            model, self.max_padded_rows, self.max_logits_rows, needs_whole=bool(processors)
        )
        self.slots = SlotState(
            num_slots, slot_fields(config, model.config, head_groups, max_model_len), device
        )
        self.state = RequestState(self.slots, num_slots, max_model_len, model.config.vision)
        self.features = FeatureBuffer(config, model, self.slots)
        self.visual_ids = None
        """Tokens of prompts that have experts for images; None = none has."""
        if model.config.vision is not None and model.config.vision.expert_token_ids:
            self.visual_ids = torch.tensor(model.config.vision.expert_token_ids, device=device)
        self.block_tables = BlockTables(self.slots, num_slots, groups, config.block_size)
        self.sampler = Sampler(
            num_slots,
            limits,
            {name: self.slots[name] for name in Sampler.fields(limits)},
            ops,
            self.logits.shards,
        )
        self._history = self.state.history()
        num_rows = 2 * num_slots  # a graph may have a decode row and a prompt row for each slot
        self.outputs = OutputRing(num_rows, MAX_SAMPLED_TOKENS, config.steps_in_flight, device)
        self.masks = MaskBuffer(
            num_slots, limits.mask_words, self.outputs.num_slots, device, memory
        )
        self.logprobs = LogprobRing(
            num_slots,
            min(config.logprobs_limit(limits.vocab_size), limits.vocab_size),
            self.outputs.num_slots,
            device,
            dtype=model.dtype,
        )
        self.staging = Staging(
            num_rows,
            num_slots * SEGMENTS_PER_REQUEST,
            self.outputs.num_slots,
            device,
            request_words=max_model_len + self.block_tables.row_width,
            max_sources=self.slots[FEATURE_SOURCE].shape[1],
            captured_drafts=(num_slots, config.max_draft_tokens),
            memory=memory,
        )
        self.drafts = None
        """The drafts of a draft head; None = there is none."""
        if draft_model is not None:
            tables = self.block_tables.tables
            self.drafts = DraftLayer(draft_model, config, self.state.slots, tables)
        self.graphs = StepGraphs(
            num_slots, config.max_num_batched_tokens, max_model_len, config.max_draft_tokens,
            has_adapters=config.enable_lora, draws=not processors,
        )  # fmt: skip
        self.layer_events = LayerEvents()
        # Of the tokens of a graph with prompts, for its sampling. Graphs share it: each would keep
        # tensors of its own out of the memory that they share.
        num_tokens = num_slots + config.max_num_batched_tokens
        self._hidden = torch.empty(
            num_tokens if self.is_capturable else 0,
            model.config.hidden_size,
            dtype=model.dtype,
            device=device,
        )

    def with_heads(self, head_groups: HeadGroups) -> DeviceStep:
        """Return a step of the same model, without a draft head, with other head groups."""
        return DeviceStep(
            self.config, self.model, self.ops, self.spec, head_groups, self.max_model_len,
            head_scales=self._head_scales, processors=self.processors,
        )  # fmt: skip

    @property
    def is_capturable(self) -> bool:
        """Whether steps may run as CUDA graphs; not with FlashInfer, which plans on the host."""
        config = self.config
        return (
            self.device.type == "cuda"
            and config.cuda_graphs
            and not (config.debug or config.debug_sync)
            and config.attention_backend == "triton"
        )

    def capture(self, shapes: Iterable[StepShape] | None = None, *, progress: bool) -> None:
        """Capture all or some shapes, if steps can run as graphs; no step may be in flight."""
        if self.is_capturable:
            with torch.inference_mode():
                self.clear_inputs()
                self.graphs.capture(
                    self.graphs.shapes if shapes is None else shapes,
                    self.run_padding,
                    self.run_tail,
                    partial(tails_of, self.config, has_processors=bool(self.processors)),
                    progress=progress,
                )

    @property
    def max_logits_rows(self) -> int:
        """Most rows of logits that exist at the same time, without a graph's padding."""
        return max(self.config.max_num_seqs, LOGITS_CHUNK)

    @property
    def max_padded_rows(self) -> int:
        """Most rows of logits, padding included: a graph may have two rows for each slot."""
        return max(self.max_logits_rows, 2 * self.config.max_num_seqs * self.is_capturable)

    def new_kv_cache(self, num_blocks: Sequence[int] | None = None) -> KVCache:
        """Return a cache with these blocks of each head group, None = one; or CapacityError."""
        blocks = [1] * len(self.head_groups.groups) if num_blocks is None else num_blocks
        return KVCache(self.spec, self.head_groups, blocks, self.device, self._head_scales)

    def clear_inputs(self) -> None:
        """Make uploads and masks those of padding, for any shape; no step may be in flight."""
        self.staging.clear()
        self.masks.clear()

    def give_up(self) -> None:
        """Let the next step take the ring slot of a step that was launched only in part."""
        self._late_error = None
        self.outputs.give_up()
        self.slots[NEXT_UPLOAD].fill_(self.outputs.next_slot)

    def fail_late(self, error: Exception) -> None:
        """Let the step fail once it is launched to its end: the other ranks are in its middle."""
        self._late_error = self._late_error or error

    def take_late_error(self) -> Exception | None:
        """Return why the step that was launched has to fail, the first time; None = it has not."""
        error, self._late_error = self._late_error, None
        return error

    def run_padding(self, shape: StepShape) -> Forwarded | None:
        """Launch a step of padding, first or after ``clear_inputs``; return ``sample``'s input."""
        staged = self.staging.static_view(shape.num_rows, has_drafts=shape.has_drafts)
        with self.layer_events.recorded(shape) as on_kv_written:
            batch, hidden = self.forward(shape, staged, on_kv_written=on_kv_written)
        if shape.samples:
            self.sample(batch, hidden)
            return None
        if shape.query_len is None:  # else a few rows
            hidden = self._hidden[: len(hidden)].copy_(hidden)
        return batch.sampled if self.drafts is None else self.drafts.kept(batch), hidden

    def run_tail(self, forwarded: Forwarded, tail: Tail) -> None:
        """Launch the sampling after ``run_padding``, for a graph to capture."""
        masks = self.masks.first(forwarded[0].shape.num_rows) if tail.masks else None
        self.sample(*forwarded, masks=masks, stores_logprobs=tail.logprobs)

    def forward(
        self,
        shape: StepShape,
        staged: Staged,
        *,
        query_lens: Int32Array | None = None,
        seq_lens: Int32Array | None = None,
        attn_mask_offsets: torch.Tensor | None = None,
        check: Callable[[InputBatch], None] | None = None,
        on_kv_written: Callable[[int], None] | None = None,
    ) -> tuple[InputBatch, torch.Tensor]:
        """Apply the upload, gather the step's tokens and run the layers; see ``LayersLaunch``.

        ``query_lens`` and ``seq_lens`` are None while a graph is captured. Returns the batch, and
        the hidden states of its tokens, ``[tokens, hidden]``.
        """
        staging = self.staging
        if staged.words is staging.fetched:
            self.ops.fetch_upload(staging.uploads, self.slots[NEXT_UPLOAD], staging.fetched)
        self.ops.scatter_segments(
            self.slots.buffer, staged.words, staged.segments, staged.num_segments
        )
        if self.drafts is not None and shape.has_drafts:
            staged = self.drafts.verified(staged)
        batch = input_batch.gather(
            shape,
            staged,
            self.state.slots,
            self.block_tables.tables,
            self.features.of(staged),
            self.ops,
            attn_mask_offsets,
            self.visual_ids,
        )
        if check is not None:
            check(batch)
        layers = self.kv_cache.layers
        self.attention.plan(batch.attention, layers, query_lens, seq_lens)
        sums = None if self.drafts is None else self.drafts.sums(shape.num_tokens)
        return batch, self.model.forward(
            batch.attention, layers, self.attention, on_kv_written, sums
        )

    def replay(self, shape: StepShape, heard: HeardStep | None = None) -> Forwarded | None:
        """Launch a captured step; as ``Launches``."""
        return self.graphs.replay(shape)

    @torch.inference_mode()
    def launch_layers(
        self,
        launch: LayersLaunch,
        *,
        check: Callable[[InputBatch], None] | None = None,
        on_kv_written: Callable[[int], None] | None = None,
    ) -> Forwarded:
        """Launch the layers of a step, kernel by kernel; as ``Launches``."""
        offsets = launch.attn_mask_offsets
        if offsets is not None:
            offsets = offsets.to(self.device, non_blocking=True)
        batch, hidden = self.forward(
            launch.shape,
            self.staging.staged(launch.sent, launch.shape.num_rows),
            query_lens=launch.query_lens,
            seq_lens=launch.seq_lens,
            attn_mask_offsets=offsets,
            check=check,
            on_kv_written=on_kv_written,
        )
        return batch.sampled if self.drafts is None else batch, hidden

    def plan_sampling(
        self,
        rows: DeviceRows,
        wanted: WantedRows,
        bitmask: Int32Array | None,
        masked_rows: Sequence[int],
        prompts: Sequence[PromptPart],
    ) -> SamplingLaunch:
        """Choose how a step is sampled, a graph if one does all that is asked for; write masks."""
        slot, tail, num_masks = self.outputs.next_slot, None, None
        if rows.is_captured and self.logprobs.has(wanted):
            least = Tail(masks=bitmask is not None or wanted.edits, logprobs=bool(wanted))
            tail = self.graphs.fit_tail(rows.shape, least)
        if bitmask is not None or (tail is not None and tail.masks):
            places = np.array([rows.place(row) for row in masked_rows], dtype=np.int32)
            num_masks = self.masks.write(slot, bitmask, places)
        return SamplingLaunch(
            shape=rows.shape,
            slot=slot,
            tail=tail,
            num_masks=num_masks,
            wanted=wanted,
            prompts=prompts,
        )

    @torch.inference_mode()
    def launch_sampling(self, launch: SamplingLaunch, forwarded: Forwarded) -> SampledReports:
        """Launch the sampling after the layers; as ``Launches``."""
        masks = None
        if launch.num_masks is not None:
            self.masks.put(launch.slot, launch.num_masks)
            masks = self.masks.first(launch.num_masks)
        reports: Sequence[LogprobReport | StoredLogprobs] = []
        if launch.tail is None:
            reports = self.sample(*forwarded, launch.wanted, masks)
        else:
            self.graphs.replay_tail(launch.shape, launch.tail)
            if launch.wanted:
                rows = launch.shape.num_rows
                reports = [self.logprobs.send(launch.slot, rows, launch.wanted)]
        tokens = forwarded[1], forwarded[0].adapter_slots
        return reports, [self.report_prompt(part, *tokens) for part in launch.prompts]

    def sample(
        self,
        batch: SampledRows,
        hidden: torch.Tensor,
        wanted: Sequence[Wanted] = (),
        masks: TokenMasks | None = None,
        *,
        stores_logprobs: bool = False,
    ) -> list[LogprobReport]:
        """Draw a token for each row that samples, append it, and find the requests that stop.

        ``wanted`` is in the order of the rows; steps with drafts have no ``masks``;
        ``stores_logprobs`` lets a decode step store those of all rows.
        """
        shape, staged = batch.shape, batch.staged
        if shape.has_drafts:
            tokens, num_sampled, reports = self._draw_after_drafts(batch, hidden, wanted)
        else:
            rows = None if shape.query_len == 1 else batch.logits_rows.clamp(min=0)
            drawn, reports = self.draw(
                self.logits.compute(hidden, batch.adapter_slots, rows),
                staged.idx_mapping,
                wanted,
                masks,
                stores_logprobs=stores_logprobs,
            )
            tokens, num_sampled = drawn[:, None], None
        num_output, output = self.outputs.views(shape.num_rows, tokens.shape[1])
        self.ops.post_update(
            staged.idx_mapping,
            None if shape.query_len is not None else staged.query_start_loc,
            batch.logits_rows,
            tokens,
            self.state.slots,
            AppendedTokens(output=output, num_output=num_output, ring_slot=staged.ring_slot),
            query_len=shape.query_len,
            num_sampled=num_sampled,
        )
        if self.drafts is not None and isinstance(batch, InputBatch):
            self.drafts.propose(
                batch.attention, staged.idx_mapping, batch.logits_rows, hidden,
                self.kv_cache.draft_layers[0], num_sampled,
            )  # fmt: skip
        return reports

    def draw(
        self,
        logits: LogitsRows,
        idx_mapping: torch.Tensor,
        wanted: Sequence[Wanted] = (),
        masks: TokenMasks | None = None,
        *,
        ahead: torch.Tensor | None = None,
        draft_token_ids: torch.Tensor | None = None,
        stores_logprobs: bool = False,
    ) -> tuple[torch.Tensor, list[LogprobReport]]:
        """Return tokens ``[rows]``, one per row of logits, and the requested log-probabilities.

        The logits are edited in place. ``wanted``, ``masks`` and ``stores_logprobs`` are as in
        ``sample``, other arguments as in ``Sampler.edit``.
        """
        num_columns = 1 if draft_token_ids is None else 1 + draft_token_ids.shape[1]
        rows = rows_of(wanted, num_columns, self.device) if wanted else slice(0)
        is_raw, is_processed = self.config.logprobs_mode == "raw_logprobs", bool(self.processors)
        reported = None
        if is_raw and wanted:
            are_edited = is_processed or any(each.edits for each in wanted)
            reported = self.logits.keep(logits, rows, are_edited=are_edited)
        unmasked = logits
        if stores_logprobs and masks is not None:
            unmasked = self.logits.keep(logits, slice(None), are_edited=True)
        history, values = self._history, logits.values
        if masks is not None:
            self.ops.apply_token_bitmask(
                values, masks.bitmask, rows=masks.rows, first_token=logits.first_token
            )
        self.sampler.edit(
            values, idx_mapping, history, ahead=ahead, draft_token_ids=draft_token_ids
        )
        if self.processors:
            edited, tokens = self._draw_processed(values, idx_mapping, ahead)
            logits = LogitsRows(edited)
        else:
            tokens = self.sampler.draw(values, idx_mapping, history, ahead=ahead)
        if stores_logprobs:
            num_top = self.sampler.num_logprobs
            self.logprobs.store(unmasked, tokens, idx_mapping, num_top, self.ops)
        if not wanted:
            return tokens, []
        slots = idx_mapping[rows]

        def filtered(part: slice | torch.Tensor) -> LogitsRows:
            picked = logits.at(rows).at(part) if isinstance(rows, slice) else logits.at(rows[part])
            return LogitsRows(self.sampler.filtered(picked.whole(), slots[part]))

        return tokens, reports_of(
            wanted,
            tokens[rows],
            filtered if reported is None else reported.at,
            self.ops,
            chunk_rows=FILTER_CHUNK if reported is None else len(slots),
        )

    def _draw_processed(
        self, logits: torch.Tensor, idx_mapping: torch.Tensor, ahead: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits that custom processors edit, and the tokens drawn from them.

        Of several ranks the first has the processors and draws, and the others take its tokens:
        none at all, if a processor fails.
        """
        parallel, history = self.model.parallel, self._history
        tokens = torch.full_like(idx_mapping, -1, dtype=torch.int64)
        if parallel.rank == 0:
            try:
                context = LogitsContext(idx_mapping=idx_mapping, history=history)
                logits = self.processors.apply(logits, context)
                tokens = self.sampler.draw(logits, idx_mapping, history, ahead=ahead)
            except Exception as error:
                if parallel.size == 1:
                    raise
                self.fail_late(error)
        return logits, tokens if parallel.size == 1 else parallel.from_first(tokens)

    def _draw_after_drafts(
        self, batch: SampledRows, hidden: torch.Tensor, wanted: Sequence[Wanted]
    ) -> tuple[torch.Tensor, torch.Tensor, list[LogprobReport]]:
        """Return the tokens drawn after each row's last known token and drafts, counts, reports.

        A draft is accepted if the token drawn in its place is the same. Noise belongs to a
        position, so the tokens are those of a run without drafts.
        """
        idx_mapping, logits_rows = batch.staged.idx_mapping, batch.logits_rows
        drafts, num_drafts = batch.staged.draft_token_ids, batch.staged.num_draft_tokens
        if drafts is None or num_drafts is None:
            raise ValueError("draft_token_ids: expected some, got none")
        ahead = torch.arange(drafts.shape[1] + 1, device=self.device)
        is_drawn = (ahead <= num_drafts[:, None]) & (logits_rows >= 0)[:, None]
        rows = torch.where(is_drawn, logits_rows[:, None] + ahead, 0)

        def draw(start: int, end: int) -> tuple[torch.Tensor, list[LogprobReport]]:
            part, slots = rows[start:end], batch.adapter_slots
            return self.draw(
                self.logits.compute(hidden, slots, part.flatten(), again=start > 0),
                idx_mapping[start:end].repeat_interleave(len(ahead)),
                [
                    replace(each, device_row=each.device_row - start)
                    for each in wanted
                    if start <= each.device_row < end
                ],
                ahead=ahead.repeat(len(part)),
                draft_token_ids=drafts[start:end],
            )

        count = self.max_logits_rows // len(ahead)
        drawn = [draw(start, start + count) for start in range(0, len(rows), count)]
        tokens = torch.cat([of_part for of_part, _ in drawn]).view(rows.shape)
        is_accepted = (tokens[:, :-1] == drafts) & (ahead[:-1] < num_drafts[:, None])
        num_accepted = is_accepted.int().cumprod(dim=1).sum(dim=1, dtype=torch.int32)
        return tokens, num_accepted + 1, [report for _, reports in drawn for report in reports]

    def report_prompt(
        self, part: PromptPart, hidden: torch.Tensor, adapter_slots: torch.Tensor | None = None
    ) -> LogprobReport:
        """Return the log-probabilities of a part of a prompt, from a step's tokens, in chunks."""
        hidden = hidden[part.tokens]
        slots = None if adapter_slots is None else adapter_slots[part.tokens]
        (report,) = reports_of(
            [part.wanted],
            self.state.slots.token_ids[part.slot, part.following].long(),
            lambda chunk: self.logits.compute(hidden, slots, chunk, again=True),
            self.ops,
            chunk_rows=LOGITS_CHUNK,
        )
        return report
