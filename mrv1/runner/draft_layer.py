"""A draft head in a step: which drafts the step verifies, and those that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from mrv1.config import EngineConfig
from mrv1.kernels.step.contracts import RUNNING, RequestSlots, SlotTables
from mrv1.models import AttentionBatch, LayerCache
from mrv1.models.drafts import DraftModel
from mrv1.runner.input_batch import InputBatch
from mrv1.runner.staging import Staged


class DraftLayer:
    """The drafts of every slot, on the device, and the head that makes them.

    Each step makes drafts for the rows that sample in it, and the next step with drafts verifies
    them: the host neither sends nor reads them. The head's keys and values are one more layer of
    the KV cache, in the same blocks. Position p there is of token p + 1, so that of the last
    token in a cached prefix may be that of another continuation, which no output depends on.

    Every launch goes to the current stream, and the host does not wait.
    """

    def __init__(
        self,
        head: DraftModel,
        config: EngineConfig,
        slots: RequestSlots,
        tables: SlotTables,
    ) -> None:
        """Allocate for the largest step, with ``config.max_draft_tokens`` drafts a row."""
        self.num_drafts = num_drafts = config.max_draft_tokens
        num_decodes = config.max_num_seqs * (1 + num_drafts)
        max_tokens = max(config.max_num_seqs + config.max_num_batched_tokens, num_decodes)
        self._head, self.slots, self._tables = head, slots, tables
        self._num_slots, self._max_model_len = slots.token_ids.shape
        self._backend = head.kernel_backend()
        self._drafts = torch.zeros(
            self._num_slots + 1, num_drafts, dtype=torch.int32, device=head.device
        )
        """Of each slot; the last row takes those of rows that have none."""
        sums = head.head.sums
        self._features = torch.empty(
            max_tokens if sums else 0, head.head.num_features, dtype=head.dtype, device=head.device
        )
        """Of the step's tokens: graphs share it."""
        self._kept_table = tables.block_tables.new_empty(
            2 * config.max_num_seqs, tables.block_tables.shape[1]
        )
        """The block table of a graph that does not sample: graphs share it."""

    def sums(self, num_tokens: int) -> Mapping[int, torch.Tensor] | None:
        """Return where the target writes its sums, as ``DecoderModel.forward`` takes them."""
        layers = self._head.head.sums
        if not layers:
            return None
        parts = self._features[:num_tokens].chunk(len(layers), dim=1)
        return dict(zip(layers, parts, strict=True))

    def kept(self, batch: InputBatch) -> InputBatch:
        """Return a batch for the sampling after a graph, its block table where graphs share it.

        With a table of its own, each graph would keep megabytes that no budget counts.
        """
        table = self._kept_table[: batch.attention.num_reqs].copy_(batch.attention.block_table)
        return replace(batch, attention=replace(batch.attention, block_table=table))

    def verified(self, staged: Staged) -> Staged:
        """Return a step's upload with the drafts that the step verifies.

        Fewer than ``num_drafts`` are of a row that ends before.
        """
        slots, slot = self.slots, staged.idx_mapping.clamp(min=0)
        end, known = slots.max_total_tokens, slots.num_tokens
        room = end.index_select(0, slot) - known.index_select(0, slot) - 1
        return replace(
            staged,
            draft_token_ids=self._drafts.index_select(0, slot),
            num_draft_tokens=room.clamp(0, self.num_drafts),
        )

    def propose(
        self,
        batch: AttentionBatch,
        idx_mapping: torch.Tensor,
        logits_rows: torch.Tensor,
        hidden: torch.Tensor,
        cache: LayerCache,
        num_sampled: torch.Tensor | None = None,
    ) -> None:
        """Make the drafts after the tokens that a step has sampled and appended.

        The batch's block table is *written* where drafts need one column more. ``idx_mapping
        [rows]`` are slots, -1 = padding; ``logits_rows [rows]`` as in ``GatheredTokens``;
        ``hidden [tokens, hidden]`` is the target's; ``cache`` the head's layer; ``num_sampled
        [rows]`` the tokens that each row has sampled, None = one.
        """
        slots, slot = self.slots, idx_mapping.clamp(min=0)
        features = self._features[: batch.num_tokens] if len(self._features) else hidden
        ids = self._following(batch, slot)
        shifted = replace(batch, input_ids=ids, features=None, adapter_slots=None)
        self._backend.plan(shifted, [cache], None, None)
        output, following = self._head.predict(
            shifted, self._head.read(features), cache, self._backend
        )
        last = logits_rows if num_sampled is None else logits_rows + num_sampled - 1
        last = last.clamp(min=0)
        found = [self._head.draft(output.index_select(0, last))]
        stopped, known = (each.index_select(0, slot) for each in (slots.stopped, slots.num_tokens))
        lives = (logits_rows >= 0) & (stopped == RUNNING)
        if self.num_drafts > 1:
            following = following.index_select(0, last)
            table = self._widened_table(batch.block_table, slot, known + self.num_drafts - 3)
            for step in range(self.num_drafts - 1):
                one_each = self._one_each(batch, table, found[-1], known - 1 + step, lives)
                self._backend.plan(one_each, [cache], None, None)
                output, following = self._head.predict(one_each, following, cache, self._backend)
                found.append(self._head.draft(output))
        into = torch.where(lives, slot, self._num_slots).long()
        self._drafts.index_copy_(0, into, torch.stack(found, dim=1).int())

    def _following(self, batch: AttentionBatch, slot: torch.Tensor) -> torch.Tensor:
        """Return the token after each token of the batch, where it is known."""
        tokens = torch.arange(batch.num_tokens, dtype=torch.int32, device=slot.device)
        if batch.query_len is None:
            rows = torch.searchsorted(batch.query_start_loc, tokens, right=True) - 1
            rows = rows.clamp(0, batch.num_reqs - 1)
        else:
            rows = tokens // batch.query_len
        at = (batch.positions + 1).clamp(max=self._max_model_len - 1)
        return self.slots.token_ids[slot.index_select(0, rows).long(), at].long()

    def _widened_table(
        self, table: torch.Tensor, slot: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        """Return a table with the block of each row's position ``last``, which drafts write last.

        The step has gathered those of its own tokens, so that one column may be missing.
        """
        column = (last // self._tables.block_size).clamp(0, table.shape[1] - 1).long()[:, None]
        blocks = self._tables.block_tables.index_select(0, slot).gather(1, column)
        return table.scatter_(1, column, blocks)

    def _one_each(
        self,
        batch: AttentionBatch,
        table: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lives: torch.Tensor,
    ) -> AttentionBatch:
        """Return a batch of one token a row; a token without a page is not written."""
        num_rows, block_size = len(token_ids), self._tables.block_size
        lives = lives & (positions < self._max_model_len)
        positions = torch.where(lives, positions, 0)
        column = (positions // block_size).long()[:, None]
        block = table.gather(1, column)[:, 0].long()
        place = block * block_size + positions % block_size
        return replace(
            batch,
            input_ids=token_ids,
            positions=positions.long(),
            slot_mapping=torch.where(lives & (block >= 0), place, -1)[None],
            block_table=table,
            seq_lens=torch.where(lives, positions + 1, 0).int(),
            max_query_len=1,
            query_len=1,
            num_decodes=num_rows,
            num_tokens=num_rows,
            num_reqs=num_rows,
            features=None,
            attn_mask_offsets=None,
            adapter_slots=None,
        )
