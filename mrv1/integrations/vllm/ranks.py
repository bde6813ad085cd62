"""vLLM's tensor-parallel group as mrv1's ranks: each worker process runs a runner of its own.

vLLM sends every step to all workers and reads the answer of one of them. What fails elsewhere it
would only log, while the others wait for that rank: such a process ends itself, which vLLM's
executor notices.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from typing import NoReturn

import torch
import torch.distributed
from torch._C._distributed_c10d import PrefixStore, _SymmetricMemory
from vllm.distributed import GroupCoordinator, get_tp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform

from mrv1.device import reach_each_other
from mrv1.errors import ConfigError
from mrv1.kernels._base.peers import PeerMemory
from mrv1.models import ParallelContext
from mrv1.runner import AsyncOutput
from mrv1.runner.ranks.symmetric_memory import SymmetricMemory

logger = init_logger("vllm.mrv1.ranks")  # below "vllm": vLLM configures no other loggers


def parallel_context(device: torch.device) -> ParallelContext:
    """Return this process's rank in vLLM's tensor-parallel group, and the group's collectives.

    ConfigError: GPUs do not reach each other's memory.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return ParallelContext()

    def all_gather(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == device:
            gathered: torch.Tensor = group.all_gather(tensor, dim=-1)
            return gathered
        parts = [torch.empty_like(tensor) for _ in range(group.world_size)]
        torch.distributed.all_gather(parts, tensor, group=group.cpu_group)
        return torch.cat(parts, dim=-1)

    return ParallelContext(
        rank=group.rank_in_group,
        size=group.world_size,
        all_reduce=group.all_reduce,
        all_gather=all_gather,
        peers=_peers(group, device),
    )


def _peers(group: GroupCoordinator, device: torch.device) -> PeerMemory | None:
    """Return the memory that the group's GPUs share, None on a CPU.

    ConfigError: some GPU does not reach another. UnsupportedDeviceError: as ``reach_each_other``.
    """
    if device.type == "cpu":
        return None
    visible = current_platform.logical_device_id_to_visible_device_id
    if not reach_each_other([torch.device("cuda", visible(rank)) for rank in group.ranks]):
        raise ConfigError(
            f"tensor_parallel_size: expected {group.world_size} GPUs that can read and write each "
            "other's memory (peer access), got some that cannot; choose others with "
            "CUDA_VISIBLE_DEVICES"
        )
    store = torch.distributed.distributed_c10d._get_process_group_store(group.device_group)
    _SymmetricMemory.set_group_info(
        group.device_group.group_name,
        group.rank_in_group,
        group.world_size,
        PrefixStore("mrv1", store),
    )
    return SymmetricMemory(group.device_group, device)


def end_process(rank: int, error: BaseException) -> NoReturn:
    """End this process because of an error, at once: its GPU may wait for other ranks."""
    logger.critical("rank %d: %s; this process ends, and the engine with it", rank, error)
    for handler in logging.getLogger("vllm").handlers:
        handler.flush()
    os._exit(1)


class Watch:
    """Reads the steps of a rank whose results nobody asks for, to end the process if one fails."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._outputs: queue.SimpleQueue[AsyncOutput | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="mrv1-rank-watch", daemon=True).start()

    def _read(self) -> None:
        while (output := self._outputs.get()) is not None:
            try:
                output.result()
            except Exception as error:
                end_process(self._rank, error)

    def add(self, output: AsyncOutput) -> None:
        """Read a launched step, once those before it are over."""
        self._outputs.put(output)

    def close(self) -> None:
        """Read no more steps."""
        self._outputs.put(None)
