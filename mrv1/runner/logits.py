"""The logits of a step's rows: of the whole vocabulary, or of the shard that this rank has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from mrv1.device import kernel_path
from mrv1.kernels.sampling.shards import MAX_ASKED, VocabShards
from mrv1.models import DecoderModel


class LogitsRows(NamedTuple):
    """The logits of some rows."""

    values: torch.Tensor
    """[rows, vocab], or [rows, tokens] of this rank's shard."""
    shards: VocabShards | None = None
    """Those of all ranks, from the same row on; None = ``values`` are of the whole vocabulary."""

    @property
    def first_token(self) -> int | None:
        """First token of ``values``, for ops that edit them; None = of the whole vocabulary."""
        return None if self.shards is None else self.shards.first_token

    @property
    def vocab_size(self) -> int:
        """Tokens of the whole vocabulary."""
        return self.values.shape[1] if self.shards is None else self.shards.vocab_size

    @property
    def of_ranks(self) -> dict[str, Any]:
        """What ops get besides ``values`` to read those of all ranks."""
        return {} if self.shards is None else {"shards": self.shards}

    def at(self, rows: slice | torch.Tensor) -> LogitsRows:
        """Return some of the rows; those of shards are whole, unless they are a slice."""
        if self.shards is None:
            return LogitsRows(self.values[rows])
        if isinstance(rows, torch.Tensor):
            return LogitsRows(self.shards.whole(rows))
        shards = self.shards.at(rows)
        return LogitsRows(shards.own(len(self.values[rows])), shards)

    def whole(self) -> torch.Tensor:
        """Return the logits of the whole vocabulary, [rows, vocab]; see ``VocabShards.whole``."""
        if self.shards is None:
            return self.values
        return self.shards.whole(slice(len(self.values)))

    def for_ids(self, num_ids: int) -> LogitsRows:
        """Return the rows as ``top_logprobs`` takes them with so many ids of each row."""
        if num_ids <= MAX_ASKED or self.shards is None:
            return self
        return LogitsRows(self.whole())

    def of_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of [rows, n] int64 tokens, read from all ranks."""
        if self.shards is None:
            return self.values.gather(1, token_ids)
        return self.shards.of_tokens(token_ids)


class StepLogits:
    """Computes the logits of a step.

    Ranks whose kernels read each other's memory keep their shards, in memory that never moves;
    others gather the whole vocabulary, as do all with ``needs_whole``. RuntimeError: as
    ``PeerMemory.allocate``.
    """

    def __init__(
        self, model: DecoderModel, max_rows: int, max_kept: int, *, needs_whole: bool
    ) -> None:
        self._model = model
        self.shards: VocabShards | None = None
        """This step's; None = logits are of the whole vocabulary."""
        self._kept: VocabShards | None = None
        """Copies from before they are edited."""
        peers, device = model.parallel.peers, model.device
        if peers is None or needs_whole or kernel_path(device) == "reference":
            return
        vocab_size = model.config.vocab_size
        self.shards = VocabShards.allocate(peers, vocab_size, max_rows, device)
        kept = VocabShards.allocate_logits(peers, vocab_size, max_kept)
        self._kept = replace(self.shards, logits=kept)
        self._nothing = torch.zeros(1, dtype=torch.float32, device=device)

    def compute(
        self,
        hidden: torch.Tensor,
        adapter_slots: torch.Tensor | None = None,
        rows: torch.Tensor | slice | None = None,
        *,
        again: bool = False,
    ) -> LogitsRows:
        """Return the logits of ``rows`` (None = all) of [tokens, hidden] states.

        ``adapter_slots`` are those of the tokens, [tokens]; None = no token has an adapter.
        ``again``: not the first logits of the step. Peers may still read those of before, and
        log-probabilities are read from these without a draw: the ranks meet, before and after.
        """
        if rows is not None:
            # Slots first: the head's kernel reads them before the launch ahead of it has ended.
            adapter_slots = None if adapter_slots is None else _some(adapter_slots, rows)
            hidden = _some(hidden, rows)
        if self.shards is None:
            adapters = () if adapter_slots is None else (adapter_slots,)
            return LogitsRows(self._model.compute_logits(hidden, *adapters))
        if again:
            self._meet()
        self._model.compute_shard(hidden, self.shards.padded(len(hidden)), adapter_slots)
        if again:
            self._meet()
        return LogitsRows(self.shards.own(len(hidden)), self.shards)

    def _meet(self) -> None:
        """Let no rank go on before all have come here: each has the sum only then."""
        self._model.parallel.all_reduce(self._nothing)

    def keep(
        self, logits: LogitsRows, rows: slice | torch.Tensor, *, are_edited: bool
    ) -> LogitsRows:
        """Return rows as they are now; ``are_edited``: they change before they are read.

        Call this before a draw: it is where ranks meet that have copied rows.
        """
        if self._kept is None:
            values = logits.values[rows]
            is_view = isinstance(rows, slice) and are_edited
            return LogitsRows(values.clone() if is_view else values)
        if isinstance(rows, slice) and not are_edited:
            return logits.at(rows)
        values = logits.values[rows]
        return LogitsRows(self._kept.own(len(values)).copy_(values), self._kept)


def _some(tensor: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)
