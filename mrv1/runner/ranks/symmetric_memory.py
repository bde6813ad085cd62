"""GPU memory that the ranks of a process group share, by torch's symmetric memory."""

from __future__ import annotations

from typing import Protocol

import torch

from mrv1.environment import exported
from mrv1.kernels._base.peers import PeerBuffer
from mrv1.runner.ranks.groups import WITHOUT_MULTICAST


class NamedGroup(Protocol):
    """What symmetric memory has to know of a process group of torch, which is one of these."""

    def rank(self) -> int:
        """Return the index of this process."""

    def size(self) -> int:
        """Return the number of ranks."""

    @property
    def group_name(self) -> str:
        """The name by which torch finds the group, which is connected."""


class SymmetricMemory:
    """``PeerMemory`` of a rank on a GPU, without multicast.

    ``process_group`` has the ranks, each on a GPU of this host that reaches the others' memory;
    ``device`` is this rank's GPU.
    """

    def __init__(self, process_group: NamedGroup, device: torch.device) -> None:
        self._group, self._device = process_group, device
        self.rank, self.size = process_group.rank(), process_group.size()
        self.abort = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        """[1] int32, pinned; see ``PeerMemory``."""
        self._handles: list[object] = []
        """What keeps the memory of peers mapped."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> PeerBuffer:
        """Allocate zeros on every rank; as ``PeerMemory``."""
        from torch._C._distributed_c10d import _SymmetricMemory

        group_name = self._group.group_name
        strides = torch.empty(shape, device="meta").stride()
        with exported(**WITHOUT_MULTICAST):
            own = _SymmetricMemory.empty_strided_p2p(shape, strides, dtype, self._device)
            own.zero_()
            torch.cuda.synchronize(self._device)  # before any peer may write
            try:
                handle = _SymmetricMemory.rendezvous(own, group_name)
            except RuntimeError as error:
                raise RuntimeError(
                    f"rank {self.rank}: expected the memory of {self.size} ranks, got {error}"
                ) from error
        self._handles.append((own, handle))
        return PeerBuffer(
            self.rank,
            tuple(
                own if rank == self.rank else handle.get_buffer(rank, shape, dtype)
                for rank in range(self.size)
            ),
        )
