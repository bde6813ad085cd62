"""The batch of one step on the device, as ``gather_tokens`` builds it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from mrv1.kernels.layers.contracts import FeatureRows
from mrv1.kernels.registry import Ops
from mrv1.kernels.step.contracts import GatheredTokens, RequestSlots, SlotTables
from mrv1.models.batch import AttentionBatch
from mrv1.runner.rows import StepShape
from mrv1.runner.staging import Staged


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """What the sampling of a step reads of its batch."""

    shape: StepShape
    staged: Staged
    logits_rows: torch.Tensor
    """[rows] int64, token that the row samples from; -1 = padding, stopped or unfinished."""
    adapter_slots: torch.Tensor | None
    """[tokens] int32, as in ``AttentionBatch``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch(SampledRows):
    """The batch of one step on the device."""

    attention: AttentionBatch

    @property
    def sampled(self) -> SampledRows:
        """The part that the sampling reads, without the memory of the other part."""
        return SampledRows(
            shape=self.shape,
            staged=self.staged,
            logits_rows=self.logits_rows,
            adapter_slots=self.adapter_slots,
        )


def gather(
    shape: StepShape,
    staged: Staged,
    slots: RequestSlots,
    tables: SlotTables,
    features: FeatureRows | None,
    ops: Ops,
    attn_mask_offsets: torch.Tensor | None = None,
    visual_ids: torch.Tensor | None = None,
) -> InputBatch:
    """Return the step's batch, which one kernel builds from the state of the slots.

    ``visual_ids``: tokens of prompts that have experts for images, ``VisionConfig``'s; a step of
    decodes has none, see ``StepShape.of``.
    """
    num_rows, num_tokens = shape.num_rows, shape.num_tokens
    num_groups, row_width = len(tables.sink), tables.block_tables.shape[1]
    int32 = partial(torch.empty, dtype=torch.int32, device=tables.sink.device)
    int64 = partial(torch.empty, dtype=torch.int64, device=tables.sink.device)
    block_table = int32(num_rows, row_width)
    axes = () if slots.mrope_spans is None else (3,)
    gathered = GatheredTokens(
        input_ids=int64(num_tokens),
        positions=int64(*axes, num_tokens),
        seq_lens=int32(num_rows),
        slot_mapping=int64(num_groups, num_tokens),
        logits_rows=int64(num_rows),
        block_table=block_table,
        adapter_slots=int32(num_tokens) if shape.has_adapters else None,
    )
    ops.gather_tokens(
        staged.idx_mapping,
        None if shape.query_len is not None else staged.query_start_loc,
        slots,
        tables,
        gathered,
        query_len=shape.query_len,
        draft_token_ids=staged.draft_token_ids,
        num_draft_tokens=staged.num_draft_tokens,
    )
    attention = AttentionBatch(
        input_ids=gathered.input_ids,
        positions=gathered.positions,
        slot_mapping=gathered.slot_mapping,
        block_table=block_table,
        seq_lens=gathered.seq_lens,
        query_start_loc=staged.query_start_loc,
        max_query_len=shape.max_query_len,
        query_len=shape.query_len,
        num_decodes=shape.num_decodes,
        num_tokens=num_tokens,
        num_reqs=num_rows,
        features=features,
        adapter_slots=gathered.adapter_slots,
        is_visual=None
        if visual_ids is None or shape.query_len == 1
        else _visual_tokens(gathered.input_ids, shape, staged, slots, visual_ids),
        attn_mask_offsets=attn_mask_offsets,
    )
    return InputBatch(
        shape=shape,
        staged=staged,
        attention=attention,
        logits_rows=gathered.logits_rows,
        adapter_slots=gathered.adapter_slots,
    )


def _visual_tokens(
    input_ids: torch.Tensor,
    shape: StepShape,
    staged: Staged,
    slots: RequestSlots,
    visual_ids: torch.Tensor,
) -> torch.Tensor:
    """Return [tokens] bool: those of prompts with one of the ids; an output token never is."""
    slot = staged.idx_mapping.clamp(min=0).long()
    starts = staged.query_start_loc
    if shape.query_len is not None:  # the upload has none
        end = (shape.num_rows + 1) * shape.query_len
        starts = torch.arange(0, end, shape.query_len, dtype=starts.dtype, device=starts.device)
    ends = slots.num_tokens.index_select(0, slot)
    if staged.num_draft_tokens is not None:
        ends = ends + staged.num_draft_tokens
    # A query may begin before the first token to compute, as in gather_tokens.
    first = torch.minimum(slots.num_computed_tokens.index_select(0, slot), ends - starts.diff())
    left_of_prompt = slots.prompt_len.index_select(0, slot) - first
    index = torch.arange(len(input_ids), dtype=starts.dtype, device=input_ids.device)
    row = torch.searchsorted(starts[1:], index, right=True).clamp(max=len(slot) - 1)
    is_of_prompt = index < (starts[:-1] + left_of_prompt).index_select(0, row)
    return (input_ids[:, None] == visual_ids).any(1) & is_of_prompt
