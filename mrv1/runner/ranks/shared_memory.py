"""Memory of the host that several processes see, without a name that could be left behind."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Self

import torch

PAGE_BYTES = mmap.ALLOCATIONGRANULARITY
CPU = torch.device("cpu")


class SharedMemory:
    """An anonymous file, gone with the last process that has it or its tensors.

    It is used either as a whole, as ``bytes``, or as ``HostMemory`` that grows.

    Args:
        fd: what ``os.memfd_create`` has returned, here or in another process; this object's from
            now on.
        device: a GPU whose kernels read what ``zeros`` returns.
    """

    def __init__(self, fd: int, device: torch.device = CPU) -> None:
        self.fd, self._device = fd, device
        self._end = 0
        self._registered: list[torch.Tensor] = []
        self._finalizer = weakref.finalize(self, _release, fd, self._registered)

    @classmethod
    def new(cls, nbytes: int) -> Self:
        """Return new memory, all zeros; OSError if there is no room."""
        memory = cls(os.memfd_create("mrv1"))
        try:
            os.posix_fallocate(memory.fd, 0, nbytes)  # else a write without room is a SIGBUS
        except BaseException:
            memory.close()
            raise
        return memory

    @cached_property
    def bytes(self) -> torch.Tensor:
        """[nbytes] uint8, all of it."""
        return torch.frombuffer(mmap.mmap(self.fd, 0), dtype=torch.uint8)

    def zeros(self, *shape: int) -> torch.Tensor:
        """Return zeros, int32; every rank makes the same calls in the same order."""
        num_bytes = math.prod(shape) * torch.int32.itemsize
        os.posix_fallocate(self.fd, self._end, num_bytes)  # never makes it shorter
        mapped = mmap.mmap(self.fd, num_bytes, offset=self._end)
        self._end += -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        buffer = torch.frombuffer(mapped, dtype=torch.int32).view(shape)
        if self._device.type == "cuda":
            code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), num_bytes, 0))
            if code != 0:
                raise RuntimeError(f"cudaHostRegister: expected success, got error {code}")
            self._registered.append(buffer)
        return buffer

    def close(self) -> None:
        """Give it up; no kernel may use it any more. Harmless when repeated."""
        self.__dict__.pop("bytes", None)
        self._finalizer()
        self.fd = -1

    def leave(self) -> None:
        """Leave the memory to the parent of this process, a forked child."""
        self._finalizer.detach()


def _release(fd: int, registered: Sequence[torch.Tensor]) -> None:
    with suppress(RuntimeError):  # a GPU that has failed
        for buffer in registered:
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
    os.close(fd)
