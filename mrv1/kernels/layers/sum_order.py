"""In which order a deterministic product adds its inputs, on one rank and on several."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mrv1.kernels._base.arithmetic import cdiv

MOST_LEAVES = 8
"""Parts of the inputs of a deterministic product whose inputs ranks may divide: whatever their
number, up to as many ranks, each has whole parts."""
CHAIN_IN = 128
"""Inputs of a chain of products, where a leaf is more than one."""
SHORT_INPUTS = 8 * CHAIN_IN
"""Most inputs that are cut into such chains, which eight warps compute side by side."""


@dataclass(frozen=True, slots=True)
class SumOrder:
    """The order in which a deterministic product adds its inputs, for any tokens and rows.

    A leaf is a part of the inputs, and a sum of chains of products, from the first to the last.
    The leaves are added in a tree, neighbours first.
    """

    leaves: int
    """1, 2, 4 or 8."""
    leaf_in: int
    """Inputs of a leaf, but perhaps for the last ones."""
    chain_in: int
    """Inputs of a chain: ``CHAIN_IN``, or ``leaf_in`` where a leaf is one chain."""

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, num_in: int, leaves: int | None) -> SumOrder:
        """Return the order for so many inputs; ``leaves`` None = ranks do not divide them.

        Undivided inputs are one leaf of short chains, or four leaves: few sums are alive at once,
        and a rank with few rows of weights has some parts to read side by side. Nothing follows
        from these rows, which ranks may divide.
        """
        if leaves is None and num_in <= SHORT_INPUTS:
            return cls(leaves=1, leaf_in=num_in, chain_in=CHAIN_IN)
        leaves = leaves or 4
        return cls(leaves=leaves, leaf_in=cdiv(num_in, leaves), chain_in=cdiv(num_in, leaves))

    @property
    def is_chained(self) -> bool:
        """Whether a leaf may have several chains."""
        return self.chain_in < self.leaf_in


def check_leaves(leaves: int | None, *, deterministic: bool) -> None:
    """Raise unless ``leaves`` is None, or a number of leaves of a deterministic product."""
    if leaves is None:
        return
    if not deterministic:
        raise ValueError(f"leaves: expected None without deterministic=True, got {leaves}")
    if leaves not in (1, 2, 4, MOST_LEAVES):
        raise ValueError(f"leaves: expected 1, 2, 4 or {MOST_LEAVES}, got {leaves}")
