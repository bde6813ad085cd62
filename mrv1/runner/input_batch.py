"""The rows of one step: their shape, known on the host, and what the gather makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Self

import numpy as np
import torch

from mrv1.kernels.registry import Ops
from mrv1.kernels.step.contracts import GatheredTokens, RequestSlots, SlotTables
from mrv1.models.batch import AttentionBatch
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
    shape: StepShape, staged: Staged, slots: RequestSlots, tables: SlotTables, ops: Ops
) -> InputBatch:
    """Build the step's batch on the device from slots and state, in one kernel."""
    num_rows, num_tokens = shape.num_rows, shape.num_tokens
    num_groups, row_width = len(tables.sink), tables.block_tables.shape[1]
    int32 = partial(torch.empty, dtype=torch.int32, device=tables.sink.device)
    int64 = partial(torch.empty, dtype=torch.int64, device=tables.sink.device)
    block_table = int32(num_rows, row_width)
    gathered = GatheredTokens(
        input_ids=int64(num_tokens),
        positions=int64(num_tokens),
        seq_lens=int32(num_rows),
        slot_mapping=int64(num_groups, num_tokens),
        logits_rows=int64(num_rows),
        block_table=block_table,
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
    )
    return InputBatch(
        attention=attention, idx_mapping=staged.idx_mapping, logits_rows=gathered.logits_rows
    )
