"""Memory that the ranks of one host share: each rank's part is mapped into every process.

A kernel of one rank reads and writes the parts of the others, its peers, over NVLink or PCIe. What
a kernel waits for may never come, if a peer has ended: it looks at ``PeerMemory.abort`` now and
then, and gives up once that is set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class PeerError(RuntimeError):
    """A wait for other ranks was in vain: one has ended or does not answer."""


@dataclass(frozen=True, slots=True)
class PeerBuffer:
    """The same tensor of every rank, as this process has mapped it."""

    rank: int
    """This process: ``parts[rank]`` is its own."""
    parts: tuple[torch.Tensor, ...]
    """[ranks] tensors of one shape and dtype, contiguous. A Triton kernel takes the tuple."""

    @property
    def own(self) -> torch.Tensor:
        """This rank's part, which is in the memory of its own device."""
        return self.parts[self.rank]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.parts)


class PeerMemory(Protocol):
    """Allocates memory that this rank and its peers can all read and write."""

    @property
    def rank(self) -> int:
        """Index of this process among ``size`` ranks."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def abort(self) -> torch.Tensor:
        """[1] int32, 0 until a rank has failed: a kernel that waits for a peer then gives up.

        On a GPU it is in pinned host memory, so that a host whose device waits can set it.
        """

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> PeerBuffer:
        """Allocate a tensor on every rank, filled with zeros before any rank's call returns.

        All ranks call this in the same order with the same arguments. Every element of the result
        stays mapped as long as the result, or the memory, is alive. Raises RuntimeError if a peer
        does not answer or its memory cannot be mapped; the message names the rank.
        """
