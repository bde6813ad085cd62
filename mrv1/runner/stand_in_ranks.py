"""A rank without the others, for processes that record the kernels it launches."""

from __future__ import annotations

import torch

from mrv1.kernels._base.peers import PeerBuffer
from mrv1.models import ParallelContext


class StandInPeers:
    """Stands in for memory that ranks share: every rank's part is a tensor of this process."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self._device = rank, size, device
        self.abort = torch.zeros(1, dtype=torch.int32, device=device)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> PeerBuffer:
        """Return a buffer whose parts have the right shape."""
        parts = [torch.zeros(shape, dtype=dtype, device=self._device) for _ in range(self.size)]
        return PeerBuffer(self.rank, tuple(parts))


def stand_in_rank(
    rank: int, size: int, device: torch.device, *, has_peers: bool
) -> ParallelContext:
    """Return a rank whose collectives give tensors of the right shape."""
    if size == 1:
        return ParallelContext()
    return ParallelContext(
        rank=rank,
        size=size,
        all_reduce=lambda tensor: tensor,
        all_gather=lambda tensor: torch.cat([tensor] * size, dim=-1),
        peers=StandInPeers(rank, size, device) if has_peers else None,
    )
