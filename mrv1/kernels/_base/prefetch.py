"""Prefetch data into the L2 cache for a later kernel.

Decode's kernels wait for each other, with registers for few weights; a prefetch occupies only the
cache, and no kernel waits for it. Source: PTX ISA, ``cp.async.bulk.prefetch.L2``.
"""

from __future__ import annotations

from typing import Any

import torch

from mrv1.device import has_dependent_launch
from mrv1.kernels._base.triton import tl, triton

ALIGNMENT = 16
"""Bytes that the address and the size of a prefetch are multiples of."""
MOST_BYTES = 16 * 2**20
"""Most bytes of one prefetch: a third of an H200's L2 cache. Later bytes are not prefetched."""


@triton.jit
def prefetch_part(
    ptr,  # int8, the data to prefetch
    num_bytes,  # of the data, a multiple of 16
    warp_bytes,  # per warp, a multiple of 16
    NUM_WARPS: tl.constexpr,  # per program
):
    """Prefetch this program's part, by axis 0 of the grid; one lane per warp issues it."""
    lane = tl.arange(0, NUM_WARPS * 32)
    first = (tl.program_id(0).to(tl.int64) * NUM_WARPS + lane // 32) * warp_bytes
    size = tl.maximum(tl.minimum(num_bytes - first, warp_bytes), 0).to(tl.int32)
    tl.inline_asm_elementwise(
        """{
        .reg .pred none;
        setp.eq.s32 none, $2, 0;
        mov.u32 $0, 0;
        @none bra done;
        cp.async.bulk.prefetch.L2.global [$1], $2;
        done:
        }""",
        "=r,l,r",
        [ptr + first, tl.where(lane % 32 == 0, size, 0)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def prefetch_arguments(
    wanted: torch.Tensor | None, device: torch.device, num_warps: int
) -> dict[str, Any]:
    """Return a launch's arguments to prefetch contiguous ``wanted`` by all its ``num_warps``."""
    if wanted is None or not has_dependent_launch(device) or wanted.data_ptr() % ALIGNMENT:
        return {"prefetch_ptr": None, "prefetch_bytes": 0, "prefetch_warp_bytes": 0}
    num_units = min(wanted.numel() * wanted.element_size(), MOST_BYTES) // ALIGNMENT
    return {
        "prefetch_ptr": wanted.view(-1).view(torch.int8),
        "prefetch_bytes": num_units * ALIGNMENT,
        "prefetch_warp_bytes": triton.cdiv(num_units, num_warps) * ALIGNMENT,
    }
