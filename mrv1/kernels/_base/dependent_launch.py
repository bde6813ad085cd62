"""Programmatic dependent launch: a kernel starts while the previous kernel in the stream ends.

It saves about a microsecond between two short kernels: the next kernel's programs are on the GPU
when the previous kernel ends, and may have loaded data that no earlier kernel writes (weights)::

    wait_for_previous(OVERLAP)   before the first access to memory that another kernel touches
    let_next_start(OVERLAP)      once all programs got here, the next kernel's programs may start

Every kernel launched this way waits, so a later kernel sees the writes of all kernels before it.
Waiting programs occupy the GPU, so this pays for launches whose programs all fit on it at once.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

import torch

from mrv1.device import has_dependent_launch
from mrv1.kernels._base.triton import tl, triton


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Wait until all kernels before this one have ended and their writes are visible."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """Let the next kernel start if it is a dependent launch; its programs wait for this kernel."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


def overlap_options(device: torch.device, *, worthwhile: bool = True) -> dict[str, bool]:
    """Return the constexpr ``OVERLAP``, and ``launch_pdl`` where it is True."""
    if worthwhile and has_dependent_launch(device):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}
