"""A vocabulary whose logits ranks have in shards, and the memory by which they draw as one.

Each rank computes and edits the logits of its shard, whole groups of the vocabulary, in memory
that its peers can read. A call of ``sample_tokens`` or ``top_logprobs`` has two launches::

    first    reads the own shard; writes the maximum and sum of each group to every rank's memory
    second   waits until all ranks' first launches have ended (``meet_peers``); then every rank
             does the same for every row: it reads the maxima and sums of all groups in its own
             memory, and from the ranks that have them the logits of the few groups that it needs

Noise is by token id and a sum is of one group, so the tokens are those of one rank, bit for bit.
The order of a sum follows from how a warp loads its logits, and that from the alignment of rows:
rows of a shard are aligned to 64 bytes if those of contiguous whole logits are.

**When memory may be overwritten.** No rank waits for the end of a call. A fast rank may be in the
first launch of the next call while a slow one still reads in this one, but no further: the second
launch waits for all. So two halves of maxima and sums, taken in turns, are enough: who writes a
half again has met all ranks in the call between, and they had ended the call that read it.

Logits have one place, and a rank may overwrite its own only after all peers have ended the call
that read them, so after the next meeting. Between two steps it is a sum over ranks in the layers:
a rank has its result only when all have added to it, and each adds only after it has ended the
step before, draw included (a kernel begins when those before it in the stream have ended; an early
start waits for them before it touches memory). Within a step, who computes logits a second time
calls ``meet`` first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch

from mrv1.kernels._base.checks import check_tensor
from mrv1.kernels._base.peers import PeerBuffer, PeerMemory
from mrv1.kernels.sampling.contracts import group_size

MAX_ASKED = 4
"""Most tokens of a row whose ranks ``top_logprobs`` finds in shards."""

_LEAST_TILE = 2048
"""Ids of a program of the first launch, if there are more: each sends a number for a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShards:
    """The logits of all ranks, and what they exchange; every rank makes the same calls."""

    vocab_size: int
    """Token ids of all shards."""
    logits: PeerBuffer
    """[max_rows, >= shard_size] float32: rank r has the ids from r * shard_size on; columns beyond
    the vocabulary may hold anything."""
    sums: PeerBuffer
    """[2, 2, max_rows * groups] float32: a half for odd and for even calls, of maxima, then
    sums."""
    num_better: PeerBuffer
    """[2, max_rows * MAX_ASKED * parts] int32, halves too."""
    flags: PeerBuffer
    """[ranks] int32, see ``peer_flags``."""
    calls: torch.Tensor
    """[2] int32, the number of the last call that has ended, and of the last that has begun."""
    abort: torch.Tensor
    """[1] int32, see ``PeerMemory.abort``."""

    @classmethod
    def allocate(
        cls, peers: PeerMemory, vocab_size: int, max_rows: int, device: torch.device
    ) -> Self:
        """Allocate the memory of this rank, and map that of its peers; all ranks call this.

        Args:
            peers: this rank, and what allocates.
            vocab_size: as above.
            max_rows: most rows of a call.
            device: where this rank's kernels run.

        Raises:
            RuntimeError: as ``PeerMemory.allocate``.
        """
        num_groups = -(-vocab_size // group_size(vocab_size))
        shard_size = _shard_size(vocab_size, peers.size)
        num_parts = peers.size * -(-shard_size // _LEAST_TILE)
        return cls(
            vocab_size=vocab_size,
            logits=cls.allocate_logits(peers, vocab_size, max_rows),
            sums=peers.allocate((2, 2, max_rows * num_groups), torch.float32),
            num_better=peers.allocate((2, max_rows * MAX_ASKED * num_parts), torch.int32),
            flags=peers.allocate((peers.size,), torch.int32),
            calls=torch.zeros(2, dtype=torch.int32, device=device),
            abort=peers.abort,
        )

    @staticmethod
    def allocate_logits(peers: PeerMemory, vocab_size: int, max_rows: int) -> PeerBuffer:
        """Allocate memory for the logits of ranks; all ranks call this."""
        width = _shard_size(vocab_size, peers.size) + (8 if vocab_size % 16 else 0)
        return peers.allocate((max_rows, width), torch.float32)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.logits.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.logits.size

    @property
    def shard_size(self) -> int:
        """Ids of a rank, padding included."""
        return _shard_size(self.vocab_size, self.size)

    @property
    def first_token(self) -> int:
        """First id of this rank's shard."""
        return min(self.rank * self.shard_size, self.vocab_size)

    @property
    def num_tokens(self) -> int:
        """Ids of this rank's shard, without padding; the last ranks may have none."""
        return min(self.shard_size, self.vocab_size - self.first_token)

    def own(self, num_rows: int) -> torch.Tensor:
        """Return this rank's logits of the first rows, [num_rows, num_tokens]."""
        return self.padded(num_rows)[:, : self.num_tokens]

    def padded(self, num_rows: int) -> torch.Tensor:
        """Return ``own`` with the columns of padding, [num_rows, shard_size]."""
        return self.logits.own[:num_rows, : self.shard_size]

    def at(self, rows: slice) -> Self:
        """Return the shards of some consecutive rows."""
        parts = tuple(part[rows] for part in self.logits.parts)
        return replace(self, logits=PeerBuffer(self.rank, parts))

    def whole(self, rows: slice | torch.Tensor) -> torch.Tensor:
        """Return logits of the whole vocabulary, read from all ranks: [rows, vocab].

        All ranks must have met since they wrote them.
        """
        parts = [part[rows, : self.shard_size] for part in self.logits.parts]
        return torch.cat(parts, dim=1)[:, : self.vocab_size].contiguous()

    def of_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of some tokens of each row, [rows, n]; ids as in ``whole``."""
        found = torch.empty_like(token_ids, dtype=torch.float32)
        for rank, part in enumerate(self.logits.parts):
            place = token_ids - rank * self.shard_size
            is_here = (place >= 0) & (place < self.shard_size)
            values = part[: len(token_ids)].gather(1, place.clamp(0, self.shard_size - 1))
            found = torch.where(is_here, values, found)
        return found


def _shard_size(vocab_size: int, num_ranks: int) -> int:
    """Return the ids of a rank: whole groups, as ``ParallelContext.vocab_rows`` has them."""
    size = group_size(vocab_size)
    return -(-vocab_size // (size * num_ranks)) * size


def check_shards(logits: torch.Tensor, shards: VocabShards | None) -> int:
    """Return the vocabulary's size, or raise unless ``logits`` are the first rows of a shard."""
    if shards is None:
        check_tensor("logits", logits, shape=(None, None))
        return logits.shape[1]
    num_rows, max_rows = len(logits), len(shards.logits.own)
    if num_rows > max_rows:
        raise ValueError(f"logits: expected at most {max_rows} rows of shards, got {num_rows}")
    own = shards.own(num_rows)
    check_tensor("logits", logits, shape=(num_rows, shards.num_tokens), dtype=torch.float32)
    if logits.data_ptr() != own.data_ptr() or logits.stride() != own.stride():
        raise ValueError("logits: expected shards.own(rows), got another tensor")
    return shards.vocab_size


def check_asked(num_tokens: int) -> None:
    """Raise unless ``top_logprobs`` takes so many tokens of each row of shards."""
    if num_tokens > MAX_ASKED:
        raise ValueError(
            f"token_ids: expected at most {MAX_ASKED} tokens of each row of shards, "
            f"got {num_tokens}"
        )
