"""The rows of one step, from slots to what the model reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from mrv1.kernels.ops import Ops
from mrv1.models.batch import AttentionBatch
from mrv1.runner.block_table import BlockTables
from mrv1.runner.request_state import RequestState
from mrv1.runner.step import HostArrays, Int32Array, StepPlan

MAX_DECODE_QUERY_LEN = 8
"""Longest query per row that the decode kernel takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch:
    """One step's rows on the device."""

    attention: AttentionBatch
    """What the model reads."""
    slots: torch.Tensor
    """[rows] int64."""
    num_scheduled_tokens: torch.Tensor
    """[rows] int32."""
    seq_lens_np: Int32Array
    """[rows], the host's copy of ``attention.seq_lens``."""
    sampled_rows: list[int]
    """Rows whose last known token is computed in this step; others are unfinished prefills."""
    sampled_slots: torch.Tensor
    """[sampled rows] int64."""
    logits_rows: torch.Tensor
    """[sampled rows] int64, index of each sampled row's last token."""


def stage(plan: StepPlan, state: RequestState) -> tuple[HostArrays, list[int]]:
    """Return the arrays that describe the step's rows, and the rows that sample."""
    slots, query_lens = plan.slots, plan.num_scheduled_tokens
    query_start_loc = np.zeros(len(slots) + 1, dtype=np.int32)
    np.cumsum(query_lens, out=query_start_loc[1:])
    computed = state.num_computed_tokens_np[slots] + query_lens
    sampled = np.flatnonzero(computed == state.num_tokens_np[slots])
    arrays: HostArrays = {
        "idx_mapping": slots.astype(np.int32),
        "slots": slots.astype(np.int64),
        "query_start_loc": query_start_loc,
        "num_scheduled_tokens": query_lens.astype(np.int32),
        "sampled_rows": sampled.astype(np.int64),
        "sampled_slots": slots[sampled].astype(np.int64),
    }
    return arrays, sampled.tolist()


def gather(
    plan: StepPlan,
    staged: Mapping[str, torch.Tensor],
    sampled_rows: list[int],
    state: RequestState,
    tables: BlockTables,
    ops: Ops,
    block_size: int,
) -> InputBatch:
    """Build the step's batch on the device from slots and state, in one kernel."""
    device = state.token_ids.device
    num_reqs, num_tokens = len(plan.slots), int(plan.num_scheduled_tokens.sum())
    input_ids = torch.empty(num_tokens, dtype=torch.int64, device=device)
    positions = torch.empty(num_tokens, dtype=torch.int64, device=device)
    seq_lens = torch.empty(num_reqs, dtype=torch.int32, device=device)
    logits_rows = torch.empty(num_reqs, dtype=torch.int64, device=device)
    slot_mapping = torch.empty(len(tables.groups), num_tokens, dtype=torch.int64, device=device)
    ops.gather_tokens(
        staged["idx_mapping"],
        staged["query_start_loc"],
        state.token_ids,
        state.num_tokens,
        state.num_computed_tokens,
        tables.table,
        block_size=block_size,
        group_table_offset=tables.group_table_offset,
        group_sink=tables.group_sink,
        group_ring_blocks=tables.group_ring_blocks,
        input_ids=input_ids,
        positions=positions,
        seq_lens=seq_lens,
        slot_mapping=slot_mapping,
        logits_rows=logits_rows,
    )
    longest, shortest = int(plan.num_scheduled_tokens.max()), int(plan.num_scheduled_tokens.min())
    uniform = longest == shortest and longest <= MAX_DECODE_QUERY_LEN
    attention = AttentionBatch(
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        block_table=tables.rows(staged["slots"]),
        seq_lens=seq_lens,
        query_start_loc=staged["query_start_loc"],
        max_query_len=longest,
        query_len=longest if uniform else None,
        num_tokens=num_tokens,
        num_reqs=num_reqs,
    )
    return InputBatch(
        attention=attention,
        slots=staged["slots"],
        num_scheduled_tokens=staged["num_scheduled_tokens"],
        seq_lens_np=state.num_computed_tokens_np[plan.slots] + plan.num_scheduled_tokens,
        sampled_rows=sampled_rows,
        sampled_slots=staged["sampled_slots"],
        logits_rows=logits_rows.index_select(0, staged["sampled_rows"]),
    )
