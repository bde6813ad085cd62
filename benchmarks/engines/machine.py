"""The machine that several engines run on in turn, and the checkpoint that they share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.engines.checkpoint import write_checkpoint
from benchmarks.measure.child import Send
from benchmarks.measure.floor import copy_bandwidth
from benchmarks.measure.options import CheckpointBench
from benchmarks.measure.shapes import shape_config
from mrv1.config import checkpoint_dir, dtype_name
from mrv1.device import resolve_device, resolve_dtype
from mrv1.models import ModelConfig
from mrv1.provenance import provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What all modes run on."""

    on_cpu: bool
    dtype: torch.dtype
    """Of weights and activations."""
    bandwidth: float | None
    """Bytes per second of a copy; None on a CPU."""
    provenance: dict[str, object]


def shared_checkpoint(bench: CheckpointBench, folder: Path) -> tuple[Path, ModelConfig]:
    """Return where the engines' checkpoint is, or for a shape will be, and its configuration.

    Args:
        bench: the options.
        folder: where ``prepare`` writes the checkpoint of a shape.
    """
    if bench.shape is not None:
        return folder, shape_config(bench.shape)
    checkpoint = checkpoint_dir(str(bench.model))
    return checkpoint, ModelConfig.from_pretrained(checkpoint)


def prepare(bench: CheckpointBench, config: ModelConfig, checkpoint: Path, send: Send) -> None:
    """Measure the machine, and write the checkpoint of a shape, in a process of its own."""
    device = resolve_device(bench.device)
    dtype = resolve_dtype(dtype_name(bench.dtype), config.torch_dtype, device)
    bandwidth = copy_bandwidth(device)
    if bench.shape is not None:
        write_checkpoint(checkpoint, config, device=device, dtype=dtype, seed=bench.seed)
    machine = Machine(
        on_cpu=device.type == "cpu",
        dtype=dtype,
        bandwidth=bandwidth,
        provenance=provenance(device, bench.commit),
    )
    send(machine)
