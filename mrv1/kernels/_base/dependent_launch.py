"""Programmatic dependent launch: a kernel starts while the one before it in the stream ends.

A launch costs about a microsecond between two short kernels. With this the programs are already
there, and may load what no earlier kernel writes (weights), when the kernel before is done::

    wait_for_previous(OVERLAP)   before anything is read or written that another kernel touches
    let_next_start(OVERLAP)      once all programs have come so far, the next kernel's may start

Every kernel launched so waits, so whatever runs behind it sees all that was before it. The next
kernel's programs take up room while they wait: worth it for launches that a GPU holds at once.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

import torch

from mrv1.device import has_dependent_launch
from mrv1.kernels._base.triton import tl, triton


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Wait until all kernels before this one have ended and their writes can be seen."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """Let the next kernel's programs start; those that were launched so will wait for this one."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


def overlap_options(device: torch.device, *, worthwhile: bool = True) -> dict[str, bool]:
    """Return the launch's options: the constexpr ``OVERLAP`` and, if it is so, Triton's own.

    Args:
        device: where the kernel runs.
        worthwhile: whether this launch gains by it.
    """
    if worthwhile and has_dependent_launch(device):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}
