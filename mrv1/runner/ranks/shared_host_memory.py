"""Memory of the host that all ranks see: rank 0 writes, kernels of every rank read."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch

PAGE_BYTES = mmap.ALLOCATIONGRANULARITY


class SharedHostMemory:
    """``HostMemory`` of an anonymous file, which no name outlives, registered with CUDA.

    ``file_descriptor`` is of rank 0's ``os.memfd_create``, or inherited from it.
    """

    def __init__(self, file_descriptor: int, device: torch.device) -> None:
        self.file_descriptor, self._device = file_descriptor, device
        self._end = 0
        self._registered: list[torch.Tensor] = []
        self._finalizer = weakref.finalize(self, _release, file_descriptor, self._registered)

    def zeros(self, *shape: int) -> torch.Tensor:
        """Return zeros, int32; every rank makes the same calls in the same order."""
        num_bytes = math.prod(shape) * torch.int32.itemsize
        os.posix_fallocate(self.file_descriptor, self._end, num_bytes)  # never makes it shorter
        mapped = mmap.mmap(self.file_descriptor, num_bytes, offset=self._end)
        self._end += -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        buffer = torch.frombuffer(mapped, dtype=torch.int32).view(shape)
        if self._device.type == "cuda":
            code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), num_bytes, 0))
            if code != 0:
                raise RuntimeError(f"cudaHostRegister: expected success, got error {code}")
            self._registered.append(buffer)
        return buffer

    def close(self) -> None:
        """Release the memory, which no kernel may use any more; harmless when repeated."""
        self._finalizer()

    def leave(self) -> None:
        """Leave the memory to the parent of this process, a forked child."""
        self._finalizer.detach()


def _release(file_descriptor: int, registered: Sequence[torch.Tensor]) -> None:
    with suppress(RuntimeError):  # a GPU that has failed
        for buffer in registered:
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
    os.close(file_descriptor)
