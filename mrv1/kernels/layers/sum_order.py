"""In which order a deterministic product adds its inputs, on one rank and on several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from mrv1.kernels._base.arithmetic import cdiv, next_power_of_2

if TYPE_CHECKING:
    import torch

MOST_LEAVES = 8
"""Most parts of the inputs of a deterministic product. Rank-invariant products whose inputs ranks
divide have so many: up to as many ranks, each has whole parts."""
UNDIVIDED_LEAVES = 4
"""Parts of long inputs that ranks do not divide: few sums are alive at once, and a rank with few
rows of weights has some parts to read side by side."""
CHAIN_IN = 128
"""Inputs of a chain of products, where a leaf is more than one."""
SHORT_INPUTS = 8 * CHAIN_IN
"""Most inputs that are cut into such chains, which eight warps compute side by side."""
NUM_PROGRAMS = 128
"""Programs that run on a GPU at once, one per multiprocessor."""
SPLIT_ROWS = 32
"""Rows of weights of a program whose registers hold one of several leaves."""


@dataclass(frozen=True, slots=True)
class SumOrder:
    """The order in which a deterministic product adds its inputs, for any number of tokens.

    A leaf is a part of the inputs, and a sum of chains of products, from the first to the last.
    The leaves are added in a tree, neighbours first.
    """

    leaves: int
    """1 to 8."""
    leaf_in: int
    """Inputs of a leaf, but perhaps for the last ones."""
    chain_in: int
    """Inputs of a chain: ``CHAIN_IN``, or ``leaf_in`` where a leaf is one chain."""

    @classmethod
    @lru_cache(maxsize=256)
    def of(
        cls, num_in: int, num_rows: int, leaves: int | None, *, is_gated: bool = False
    ) -> SumOrder:
        """Return the order for a weight; ``leaves`` None = of so many as suit its shape.

        Short inputs are then one leaf of short chains. Few rows have leaves of four or eight such
        chains, if registers of NUM_PROGRAMS programs hold them: 2048 -> 1024 has four leaves of
        four chains, 3072 -> 1024 three of eight. Gates and ups are not split.
        """
        if leaves is None and num_in <= SHORT_INPUTS:
            return cls(leaves=1, leaf_in=num_in, chain_in=CHAIN_IN)
        if leaves is None and not is_gated:
            for leaf_in in (4 * CHAIN_IN, 8 * CHAIN_IN):
                count = cdiv(num_in, leaf_in)
                if count <= MOST_LEAVES and count * cdiv(num_rows, SPLIT_ROWS) <= NUM_PROGRAMS:
                    return cls(leaves=count, leaf_in=leaf_in, chain_in=CHAIN_IN)
        leaves = leaves or UNDIVIDED_LEAVES
        return cls(leaves=leaves, leaf_in=cdiv(num_in, leaves), chain_in=cdiv(num_in, leaves))

    @property
    def is_chained(self) -> bool:
        """Whether a leaf may have several chains."""
        return self.chain_in < self.leaf_in

    @property
    def chains(self) -> int:
        """Chains of a leaf."""
        return cdiv(self.leaf_in, self.chain_in)

    @property
    def splits(self) -> tuple[int, ...]:
        """Numbers of programs that may share the inputs: each has a subtree of the leaves."""
        return tuple(
            splits
            for splits in range(1, self.leaves + 1)
            if splits == 1
            or (self.leaves % splits == 0 and (self.leaves // splits).bit_count() == 1)
        )


def undivided_leaves(num_in: int) -> int | None:
    """Return the leaves of a product whose rows ranks divide, and whose bits are any rank's."""
    return None if num_in <= SHORT_INPUTS else UNDIVIDED_LEAVES


def tree_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of parts as kernels add them: of two halves, the first a power of two."""
    if len(parts) == 1:
        return parts[0]
    half = next_power_of_2(len(parts)) // 2
    return tree_sum(parts[:half]) + tree_sum(parts[half:])


def check_leaves(leaves: int | None, *, deterministic: bool) -> None:
    """Raise unless ``leaves`` is None, or a number of leaves of a deterministic product."""
    if leaves is None:
        return
    if not deterministic:
        raise ValueError(f"leaves: expected None without deterministic=True, got {leaves}")
    if leaves not in (1, 2, 4, MOST_LEAVES):
        raise ValueError(f"leaves: expected 1, 2, 4 or {MOST_LEAVES}, got {leaves}")
