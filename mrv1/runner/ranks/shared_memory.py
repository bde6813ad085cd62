"""Memory that the processes of a host share, without a name that could be left behind."""

from __future__ import annotations

import mmap
import os
from typing import Self

import torch


class SharedMemory:
    """Bytes that several processes see; they are gone with the last process that has them."""

    def __init__(self, fd: int) -> None:
        """Map the memory of a file descriptor, which this object owns from now on."""
        self.fd = fd
        self._map = mmap.mmap(fd, 0)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        """[nbytes] uint8."""

    @classmethod
    def new(cls, nbytes: int) -> Self:
        """Return new memory, all zeros; OSError if there is no room."""
        fd = os.memfd_create("mrv1")
        try:
            os.posix_fallocate(fd, 0, nbytes)  # else a write without room is a SIGBUS
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Give up this view of it, of which no tensor may be in use; harmless when repeated."""
        if self.fd >= 0:
            del self.bytes
            self._map.close()
            os.close(self.fd)
            self.fd = -1
