"""The rows of one step: their shape, known on the host, and what the gather makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
import torch

from mrv1.kernels.registry import Ops
from mrv1.models.batch import AttentionBatch
from mrv1.runner.block_table import BlockTables
from mrv1.runner.request_state import RequestState
from mrv1.runner.staging import Staged
from mrv1.runner.step import Int32Array

MAX_DECODE_QUERY_LEN = 8
"""Longest query per row that the decode kernel takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What the host knows of a step and launches depend on."""

    num_rows: int
    """Padding included."""
    num_tokens: int
    """Padding included."""
    max_query_len: int
    query_len: int | None
    """Tokens of every row if all are decoded: one, or up to 8 with as many drafts; else None."""
    num_decodes: int
    """Leading rows of one token each."""
    has_drafts: bool = False
    samples: bool = True
    """Whether a graph of it draws the tokens, too: not where log-probabilities are wanted."""

    @classmethod
    def of(cls, query_lens: Int32Array, *, has_drafts: bool = False, samples: bool = True) -> Self:
        """Return the shape of rows with so many tokens, those of one token first."""
        longest = int(query_lens.max())
        if longest == 1 and not has_drafts:
            return cls.decode(len(query_lens), samples=samples)
        # Short prompts of one length are prefilled, like those of others.
        uniform = longest == 1 or (
            has_drafts and longest == int(query_lens.min()) <= MAX_DECODE_QUERY_LEN
        )
        return cls(
            num_rows=len(query_lens),
            num_tokens=int(query_lens.sum()),
            max_query_len=longest,
            query_len=longest if uniform else None,
            num_decodes=int((query_lens == 1).sum()),
            has_drafts=has_drafts,
            samples=samples,
        )

    @classmethod
    @lru_cache(maxsize=1024)  # made in every step
    def decode(cls, num_rows: int, *, samples: bool = True) -> Self:
        """Return the shape of a decode of so many rows."""
        return cls(
            num_rows=num_rows,
            num_tokens=num_rows,
            max_query_len=1,
            query_len=1,
            num_decodes=num_rows,
            samples=samples,
        )

    def rows_of(self, shape: StepShape) -> Int32Array:
        """Return where the rows of a ``shape`` are that is padded to this one.

        Padding stands behind the rows of one token, and behind the others.
        """
        rows = np.arange(shape.num_rows, dtype=np.int32)
        rows[shape.num_decodes :] += self.num_decodes - shape.num_decodes
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch:
    """One step's rows on the device."""

    attention: AttentionBatch
    """What the model reads."""
    idx_mapping: torch.Tensor
    """[rows] int32, slot of each row; -1 = padding."""
    logits_rows: torch.Tensor
    """[rows] int64, index of the token that samples; -1 = padding, stopped or unfinished."""


def gather(
    shape: StepShape,
    staged: Staged,
    state: RequestState,
    tables: BlockTables,
    ops: Ops,
    block_size: int,
) -> InputBatch:
    """Build the step's batch on the device from slots and state, in one kernel."""
    device = state.token_ids.device
    num_rows, num_tokens = shape.num_rows, shape.num_tokens
    input_ids = torch.empty(num_tokens, dtype=torch.int64, device=device)
    positions = torch.empty(num_tokens, dtype=torch.int64, device=device)
    seq_lens = torch.empty(num_rows, dtype=torch.int32, device=device)
    logits_rows = torch.empty(num_rows, dtype=torch.int64, device=device)
    slot_mapping = torch.empty(len(tables.groups), num_tokens, dtype=torch.int64, device=device)
    block_table = torch.empty(num_rows, tables.row_width, dtype=torch.int32, device=device)
    ops.gather_tokens(
        staged.idx_mapping,
        None if shape.query_len is not None else staged.query_start_loc,
        state.token_ids,
        state.num_tokens,
        state.num_computed_tokens,
        tables.table,
        block_size=block_size,
        group_table_offset=tables.group_table_offset,
        group_sink=tables.group_sink,
        group_ring_blocks=tables.group_ring_blocks,
        query_len=shape.query_len,
        stopped=state.stopped,
        draft_token_ids=staged.draft_token_ids,
        num_draft_tokens=staged.num_draft_tokens,
        input_ids=input_ids,
        positions=positions,
        seq_lens=seq_lens,
        slot_mapping=slot_mapping,
        logits_rows=logits_rows,
        block_table=block_table,
    )
    attention = AttentionBatch(
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=staged.query_start_loc,
        max_query_len=shape.max_query_len,
        query_len=shape.query_len,
        num_decodes=shape.num_decodes,
        num_tokens=num_tokens,
        num_reqs=num_rows,
    )
    return InputBatch(attention=attention, idx_mapping=staged.idx_mapping, logits_rows=logits_rows)
