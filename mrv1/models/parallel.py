"""The part of a model that one of several tensor-parallel ranks has, and its collectives.

Each rank has whole KV heads with their query heads, rows of the MLP's first projection and of the
vocabulary, and the columns of the second projections that go with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from mrv1.errors import ConfigError
from mrv1.kernels._base.peers import PeerMemory
from mrv1.kernels.layers.sum_order import MOST_LEAVES, tree_sum
from mrv1.kernels.sampling.contracts import group_size
from mrv1.models.config import ModelConfig
from mrv1.models.files import raise_problems

Collective = Callable[[torch.Tensor], torch.Tensor]
"""Takes this rank's part and returns the combined tensor, the same on every rank."""


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelContext:
    """A rank and the collectives it calls; ConfigError: no such rank, or no collectives."""

    rank: int = 0
    """Index of this process among ``size`` ranks."""
    size: int = 1
    """Tensor-parallel ranks."""
    all_reduce: Collective = _identity
    """Sum over ranks, possibly in place; follows the embedding and the row-parallel projections
    (attention output, MLP down)."""
    all_gather: Collective = _identity
    """Concatenation over ranks along the last dimension; follows the vocabulary-parallel head."""
    peers: PeerMemory | None = None
    """Memory that kernels of all ranks read and write; None = the ranks have the collectives
    alone."""

    @property
    def sums_partials(self) -> bool:
        """Whether a projection's output is only this rank's part of a sum over ranks."""
        return self.all_reduce is not _identity

    def __post_init__(self) -> None:
        """Reject an impossible rank, and several ranks that cannot speak to each other."""
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(
                f"rank, size: expected 0 <= rank < size, got rank {self.rank} of {self.size}"
            )
        if self.size > 1 and _identity in (self.all_reduce, self.all_gather):
            raise ConfigError(
                f"all_reduce, all_gather: expected collectives of {self.size} ranks, got none"
            )
        peers = self.peers
        if peers is not None and (peers.rank, peers.size) != (self.rank, self.size):
            raise ConfigError(
                f"peers: expected memory of rank {self.rank} of {self.size}, got rank "
                f"{peers.rank} of {peers.size}"
            )

    @property
    def leaves(self) -> int:
        """Leaves of this rank in a rank-invariant product whose inputs the ranks divide."""
        return MOST_LEAVES // self.size

    def sum_in_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, added as a tree, neighbours first, whatever the backend.

        With ``leaves`` of each rank, it is the sum of all leaves of one rank.
        """
        return tree_sum(self.all_gather(tensor).unflatten(-1, (self.size, -1)).unbind(-2))

    def shard(
        self, config: ModelConfig, *, deterministic: bool = False, rank_invariant: bool = False
    ) -> ModelConfig:
        """Return the configuration of this rank's heads and MLP rows; ``vocab_size`` stays whole.

        If there are more ranks than KV heads, several have the same one. ConfigError: the model
        cannot be divided, or not into parts whose results are ``deterministic``, or are those of
        one rank (``rank_invariant``); the message lists every reason.
        """
        size, heads = self.size, config.num_kv_heads
        if size == 1:
            return config
        problems = self._invariance_problems(config) if rank_invariant else []
        if deterministic and config.qk_norm == "vector":
            problems.append(
                "expected 1 with deterministic=True where a norm is over the heads of all ranks, "
                f"got {size}"
            )
        if max(heads, size) % min(heads, size):
            problems.append(
                f"expected a divisor or a multiple of {heads} KV heads (num_key_value_heads), "
                f"got {size}"
            )
        for name, what in (
            ("num_q_heads", "query heads (num_attention_heads)"),
            ("intermediate_size", "rows of the MLP (intermediate_size)"),
        ):
            if getattr(config, name) % size:
                problems.append(
                    f"expected a divisor of {getattr(config, name)} {what}, got {size}"
                )
        experts = config.experts
        for width in () if experts is None else experts.widths:
            if width % size:
                problems.append(f"expected a divisor of {width} rows of each expert, got {size}")
        if config.vocab_size < size**2:
            problems.append(f"expected at least {size**2} tokens in the vocabulary for {size}, "
                            f"got {config.vocab_size}")  # fmt: skip
        raise_problems("tensor_parallel_size", problems)
        return replace(
            config,
            num_q_heads=config.num_q_heads // size,
            num_kv_heads=max(heads // size, 1),
            intermediate_size=config.intermediate_size // size,
            experts=experts and experts.of_ranks(size),
        )

    def _invariance_problems(self, config: ModelConfig) -> list[str]:
        """Return why several ranks cannot have the bits of one."""
        if MOST_LEAVES % self.size:
            return [f"expected 1, 2, 4 or {MOST_LEAVES} with rank_invariant=True, got {self.size}"]
        inputs = [
            ("head_dim * num_attention_heads", config.head_dim * config.num_q_heads),
            ("intermediate_size", config.intermediate_size),
        ]
        if config.experts is not None:
            inputs += [("the width of an expert", width) for width in config.experts.widths]
        return [
            f"expected a multiple of {MOST_LEAVES} as {name} with rank_invariant=True, got {count}"
            for name, count in inputs
            if count % MOST_LEAVES
        ]

    def vocab_rows(self, vocab_size: int) -> int:
        """Return the rows of a rank's embedding and head: whole groups of the sampler's.

        The last ranks' may end with padding, or be padding alone. One rank has no padding.
        """
        if self.size == 1:
            return vocab_size
        group = group_size(vocab_size)
        return -(-vocab_size // (group * self.size)) * group

    def vocab_part(self, vocab_size: int) -> slice:
        """Return the token ids of a rank's embedding and head; they may be none."""
        own = self.vocab_rows(vocab_size)
        return slice(*(min(rank * own, vocab_size) for rank in (self.rank, self.rank + 1)))

    def part(self, whole: Sequence[int], own: Sequence[int]) -> tuple[slice, ...]:
        """Return where a rank's part, of shape ``own``, is in a tensor of shape ``whole``.

        With fewer parts than ranks, neighbours have the same one. Embedding and head are divided
        by ``vocab_part`` instead.
        """

        def cut(num_all: int, num_own: int) -> slice:
            first = self.rank * (num_all // num_own) // self.size * num_own
            return slice(first, first + num_own)

        return tuple(cut(*sizes) for sizes in zip(whole, own, strict=True))

    def from_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rank 0's tensor on every rank; the others give one of its shape and dtype."""
        return self.all_gather(tensor)[..., : tensor.shape[-1]]

    def least(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Return the least value that any rank has for each of ``counts``."""
        if self.size == 1:
            return tuple(counts)
        of_ranks = self.all_gather(torch.tensor(counts, dtype=torch.int64)[:, None])
        return tuple(of_ranks.amin(dim=1).tolist())

    def union(self, lists: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Return the lists of integers > 0 that any rank has, each once, alike on every rank."""
        if self.size == 1:
            return [*lists]
        longest = max(map(len, lists), default=0)
        count, width = (-least for least in self.least((-len(lists), -longest)))
        table = torch.zeros(count, width, dtype=torch.int64)
        for row, values in zip(table, lists, strict=False):
            row[: len(values)] = torch.tensor(values)
        of_ranks = self.all_gather(table).split(max(width, 1), dim=1)
        rows = (row[row > 0].tolist() for part in of_ranks for row in part)
        return [*dict.fromkeys(map(tuple, filter(None, rows)))]
