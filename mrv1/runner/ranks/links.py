"""How a rank is linked with the others: its collectives, and the memory that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from mrv1.forks import keep_for_ever
from mrv1.kernels._base.peers import PeerError
from mrv1.models import ParallelContext
from mrv1.runner.ranks.groups import Gloo, Nccl
from mrv1.runner.ranks.symmetric_memory import SymmetricMemory

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


class _Connected:
    """A group whose ranks meet and connect each time that they need its name."""

    def __init__(self, nccl: Nccl, rank: int, size: int, connect: Callable[[], None]) -> None:
        self._nccl, self._rank, self._size, self._connect = nccl, rank, size, connect

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    @property
    def group_name(self) -> str:
        self._connect()
        return self._nccl.group_name


class Links:
    """The links of one rank, made when they are first needed, which every rank does in turn.

    Args:
        rank: this rank.
        devices: the device of each rank.
        store: by which the ranks find each other.
        has_peers: whether they share memory: GPUs that all reach each other's.
        meet: called before each call that all ranks have to make; raises if one has failed.
        timeout: seconds within which the other ranks have to answer.
    """

    def __init__(
        self,
        rank: int,
        devices: Sequence[torch.device],
        store: TCPStore,
        *,
        has_peers: bool,
        meet: Callable[[], None],
        timeout: float,
    ) -> None:
        device, size = devices[rank], len(devices)
        self._store: TCPStore | None = store
        self._meet = meet
        self.group: Gloo | Nccl
        self.memory: SymmetricMemory | None = None
        """None = the ranks have the collectives alone."""
        if device.type == "cpu":
            self.group = Gloo(rank, size, timeout)
        else:
            self.group = nccl = Nccl(rank, size, timeout, device)
            if has_peers:
                self.memory = SymmetricMemory(_Connected(nccl, rank, size, self.connect), device)
        self.context = ParallelContext(
            rank=rank,
            size=size,
            all_reduce=self.group.all_reduce,
            all_gather=self.group.all_gather,
            peers=self.memory,
        )
        """This rank, its collectives and its peers' memory."""

    def connect(self) -> None:
        """Wait for the other ranks, which have to call this too, and connect to them."""
        self._meet()
        if self._store is None:
            raise PeerError("links: expected open ones, got some that were closed")
        self.group.connect(self._store)

    def describe(self) -> str:
        """Return by what the ranks reach each other."""
        return self.group.name if self.memory is None else f"peers' memory and {self.group.name}"

    def abort(self) -> None:
        """End the kernels of this rank that wait for another one."""
        if self.memory is not None:
            self.memory.abort.fill_(1)
        self.group.abort()

    def close(self) -> None:
        """Close the links, once no CUDA graph of this rank is left; harmless when repeated."""
        self.group.close()
        self.memory = self._store = None  # the store's port closes with it

    def leave(self) -> None:
        """Leave the links to the parent of this process, a forked child."""
        keep_for_ever(self._store)
        self.group.leave()
