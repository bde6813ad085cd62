"""The collectives of ranks, and the store by which they find each other."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch

from mrv1.forks import keep_for_ever
from mrv1.models import ParallelContext
from mrv1.runner.ranks.failure import PeerError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import ProcessGroup, TCPStore  # type: ignore[attr-defined]

HOST = "127.0.0.1"
"""Where the ranks listen: they are processes of one host."""


def open_store(port: int, size: int) -> TCPStore:
    """Return the store by which ranks find each other: rank 0's at ``port``; 0 = a new one."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(HOST, port, size, is_master=port == 0, wait_for_workers=False)


class Gloo:
    """The collectives of a rank, a gloo group of its own; they fail after ``timeout`` seconds."""

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self._timeout = rank, size, timedelta(seconds=timeout)
        self._group: ProcessGroup | None = None

    def connect(self, store: TCPStore) -> None:
        """Connect to the other ranks, which all have to call this."""
        from torch.distributed import ProcessGroupGloo  # not every build of torch has it

        try:
            group = ProcessGroupGloo(store, self.rank, self.size, self._timeout)
        except RuntimeError as error:
            raise PeerError(f"gloo: expected {self.size} ranks, got {error}") from error
        self._group = cast("ProcessGroup", group)  # a backend's own stub lacks its collectives

    def close(self) -> None:
        """Close the connections."""
        self._group = None

    def leave(self) -> None:
        """Leave the connections to the parent of this process, a forked child."""
        keep_for_ever(self._group)
        self._group = None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, which replaces ``tensor``."""
        with self._joined() as group:
            group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, one behind the other along the last dimension."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._joined() as group:
            group.allgather([parts], [tensor]).wait()
        return torch.cat(parts, dim=-1)

    @contextlib.contextmanager
    def _joined(self) -> Iterator[ProcessGroup]:
        if self._group is None:
            raise PeerError("gloo: expected connected ranks, got none")
        try:
            yield self._group
        except RuntimeError as error:
            raise PeerError(str(error)) from error

    @property
    def context(self) -> ParallelContext:
        """This rank and its collectives."""
        return ParallelContext(
            rank=self.rank, size=self.size, all_reduce=self.all_reduce, all_gather=self.all_gather
        )
