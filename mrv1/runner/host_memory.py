"""Memory of the host that the device reads in place."""

from __future__ import annotations

from typing import Protocol

import torch


class HostMemory(Protocol):
    """Allocates memory of the host that kernels read; several ranks may share it."""

    def zeros(self, *shape: int) -> torch.Tensor:
        """Return zeros, int32; ranks that share their memory allocate it in the same order."""


class PinnedMemory:
    """Pinned memory of this process alone; plain memory if ``device`` is a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"

    def zeros(self, *shape: int) -> torch.Tensor:
        """Return zeros, int32."""
        return torch.zeros(shape, dtype=torch.int32, pin_memory=self._is_pinned)
