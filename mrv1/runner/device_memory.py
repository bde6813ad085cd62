"""Who has the memory of a GPU that is full: the errors of a start say it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mrv1.device import host_memory_bytes, memory_bytes
from mrv1.errors import CapacityError


def gib(num_bytes: int) -> str:
    """Return a number of bytes in GiB."""
    return f"{num_bytes / 2**30:.2f} GiB"


def own_and_others(device: torch.device, free_bytes: int, total_bytes: int) -> tuple[str, str]:
    """Return in GiB what this process's tensors have of a GPU, and everybody else."""
    own_bytes = torch.cuda.memory_reserved(device)
    return gib(own_bytes), gib(total_bytes - free_bytes - own_bytes)


def release_cached_memory(device: torch.device) -> None:
    """Give the memory that torch has cached back to the device."""
    if device.type == "cuda":
        # cuBLAS never frees its workspace by itself; torch has only a private call to do so.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


@contextmanager
def within_memory(option: str, what: str, device: torch.device) -> Iterator[None]:
    """Run a body that needs memory of a GPU for ``what``, which ``option`` decides.

    CapacityError, saying who has the memory, replaces torch's ``OutOfMemoryError`` and CPU errors.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        free_bytes, total_bytes = memory_bytes(device)
        own, others = own_and_others(device, free_bytes, total_bytes)
        raise CapacityError(
            f"{option}: expected room for {what} in the {gib(total_bytes)} of {device}, got "
            f"{own} for this process's tensors, {gib(free_bytes)} free, and {others} for the "
            "driver and other processes; end other processes on the GPU, or choose a smaller "
            f"{option}"
        ) from error
    except (MemoryError, RuntimeError) as error:
        is_memory = isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
        if device.type != "cpu" or not is_memory:
            raise
        raise CapacityError(
            f"{option}: expected room for {what} in the memory of this machine, of which "
            f"{gib(host_memory_bytes())} are free, got too little; choose a smaller {option}"
        ) from error
