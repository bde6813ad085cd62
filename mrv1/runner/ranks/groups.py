"""The collectives of ranks, and the store by which they find each other.

Gloo's and NCCL's have the same methods; each raises PeerError if another rank has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import socket
import threading
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch

from mrv1.environment import exported
from mrv1.forks import keep_for_ever
from mrv1.kernels._base.peers import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import ProcessGroup, TCPStore, Work  # type: ignore[attr-defined]

HOST = "127.0.0.1"
"""Where the ranks listen: they are processes of one host."""

ABORT_SECONDS = 5.0
"""Longest wait for NCCL's own end."""

WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Variables of NCCL and torch that keep them from multicast over NVLink, set while ranks connect
and allocate: no kernel of mrv1 uses it, and some hosts have it for nobody."""

_ENDS_NOTHING = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Variables that keep torch's threads from ending the caller's process when a rank fails."""


def open_store(port: int, size: int) -> TCPStore:
    """Return the store by which ranks find each other: rank 0's at ``port``; 0 = a new one."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if port != 0:
        return TCPStore(HOST, port, size, is_master=False, wait_for_workers=False)
    listener = socket.create_server((HOST, 0))  # a store's own one listens on every interface
    return TCPStore(
        HOST,
        listener.getsockname()[1],
        size,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store's from now on
    )


_TURN = timedelta(seconds=0.2)
"""Longest wait for gloo without a look for interrupts."""


class Gloo:
    """The collectives of a rank on a CPU, a gloo group of its own; they fail after ``timeout``."""

    name = "gloo"

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self._rank, self._size, self._timeout = rank, size, timedelta(seconds=timeout)
        self._group: ProcessGroup | None = None

    def connect(self, store: TCPStore) -> None:
        """Connect to the other ranks, which all have to call this."""
        from torch.distributed import ProcessGroupGloo  # not every build of torch has it

        try:
            group = ProcessGroupGloo(store, self._rank, self._size, self._timeout)
        except RuntimeError as error:
            raise PeerError(f"gloo: expected {self._size} ranks, got {error}") from error
        self._group = cast("ProcessGroup", group)  # a backend's own stub lacks its collectives

    def abort(self) -> None:
        """Do nothing: a collective fails by itself once another rank has ended."""

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
            _wait(group.allreduce([tensor]))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, one behind the other along the last dimension."""
        parts = [torch.empty_like(tensor) for _ in range(self._size)]
        with self._joined() as group:
            _wait(group.allgather([parts], [tensor]))
        return torch.cat(parts, dim=-1)

    @contextlib.contextmanager
    def _joined(self) -> Iterator[ProcessGroup]:
        if self._group is None:
            raise PeerError("gloo: expected connected ranks, got none")
        try:
            yield self._group
        except RuntimeError as error:
            raise PeerError(str(error)) from error


def _wait(work: Work) -> None:
    """Wait for work on the host, in turns: an interrupt comes between two of them."""
    while not work.is_completed():
        with contextlib.suppress(RuntimeError):  # the turn's end, or an error that comes again
            work.wait(_TURN)
    work.wait()


class Nccl:
    """The collectives of a rank on a GPU, launched on the current stream, in graphs too.

    ``timeout`` is for the connection, in seconds: a kernel waits for ever, until ``abort``.
    """

    name = "NCCL"

    def __init__(self, rank: int, size: int, timeout: float, device: torch.device) -> None:
        self._rank, self._size, self._timeout = rank, size, timedelta(seconds=timeout)
        self._device = device
        self._aborting: threading.Thread | None = None
        self._nccl: ProcessGroup | None = None
        self._group: ProcessGroup | None = None

    @property
    def group_name(self) -> str:
        """The name by which torch's symmetric memory finds the connected group."""
        if self._group is None:
            raise PeerError("NCCL: expected connected ranks, got none")
        return self._group.group_name

    def connect(self, store: TCPStore) -> None:
        """Connect to the other ranks, which all have to call this; harmless when repeated."""
        if self._nccl is not None:
            return
        from torch._C._distributed_c10d import _register_process_group
        from torch.distributed import ProcessGroup, ProcessGroupNCCL

        from mrv1.runner.ranks.counted_store import CountedStore

        options = ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        with exported(**WITHOUT_MULTICAST, **_ENDS_NOTHING):
            nccl = ProcessGroupNCCL(store, self._rank, self._size, options)
            self._nccl = cast("ProcessGroup", nccl)  # its stub lacks its collectives
            self.all_reduce(torch.zeros(1, device=self._device))  # makes the communicator
            torch.cuda.synchronize(self._device)
        # A group that symmetric memory finds by its name, and that no default group knows of.
        counted = CountedStore(store, self._timeout)
        group = ProcessGroup(counted, self._rank, self._size)
        group._register_backend(self._device, ProcessGroup.BackendType.NCCL, nccl)
        name = f"mrv1-{store.port}"
        group._set_group_name(name)  # type: ignore[arg-type]  # of newer stubs
        _register_process_group(name, group)  # type: ignore[arg-type]
        self._group = group
        # At the end of the program the other ranks are gone, and NCCL would wait for them.
        self._finalizer = weakref.finalize(self, keep_for_ever, (nccl, group, counted))

    def abort(self) -> None:
        """End the kernels that wait for another rank; no collective works afterwards."""
        if self._nccl is not None and self._aborting is None:
            # NCCL tells its kernels at once, and then waits until the last graph with one is gone.
            self._aborting = threading.Thread(target=self._nccl.abort, daemon=True)
            self._aborting.start()
            # A call of torch that returned while the interpreter ends would end in std::terminate.
            atexit.register(self._aborting.join, ABORT_SECONDS)

    def close(self) -> None:
        """Close the connections; no CUDA graph that captured a collective may be left."""
        if self._group is not None:
            self._finalizer.detach()
            from torch._C._distributed_c10d import _unregister_process_group

            _unregister_process_group(self._group.group_name)
        self.abort()  # an orderly end would wait for the other ranks
        if self._aborting is not None:
            self._aborting.join(ABORT_SECONDS)
        self._nccl = self._group = None

    def leave(self) -> None:
        """Leave the connections to the parent of this process, a forked child."""
        keep_for_ever((self._nccl, self._group))
        self._nccl = self._group = None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, which replaces ``tensor``."""
        from torch._C._distributed_c10d import AllreduceOptions

        options = AllreduceOptions()
        options.asyncOp = False  # on the current stream
        self._launched(lambda group: group.allreduce([tensor], options))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, one behind the other along the last dimension.

        A tensor of the host, of start-up, goes over the device and back.
        """
        from torch._C._distributed_c10d import AllgatherOptions

        own = tensor.to(self._device).contiguous()
        parts = torch.empty(self._size, *own.shape, dtype=own.dtype, device=self._device)
        options = AllgatherOptions()
        options.asyncOp = False
        self._launched(lambda group: group._allgather_base(parts, own, options))
        return parts.movedim(0, -2).flatten(-2).to(tensor.device)

    def _launched(self, launch: Callable[[ProcessGroup], Work | None]) -> None:
        if self._nccl is None:
            raise PeerError("NCCL: expected connected ranks, got none")
        try:
            work = launch(self._nccl)
            if work is not None:
                work.wait()  # the stream's wait, not the host's
        except RuntimeError as error:
            raise PeerError(str(error)) from error
