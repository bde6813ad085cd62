"""The only module that imports Gluon, Triton's language of explicit layouts, copies and barriers.

Gluon is experimental: Triton 3.6, 3.7 and 3.9 differ in some names, which are settled here.
Triton's interpreter does not run it.
"""

from __future__ import annotations

from mrv1.kernels._base import triton as triton  # settles how the process runs kernels

from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon import language as gl  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import (  # isort: skip
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # isort: skip

# 3.6 has the older one of each two names.
copy_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def as_boxes(smem, desc, COUNT: gl.constexpr):
        """Return the memory of ``smem`` as ``COUNT`` boxes of a tensor descriptor."""
        shape: gl.constexpr = [COUNT] + desc.block_shape  # noqa: RUF005 - no stars in Triton
        return smem.reinterpret(desc.dtype, shape, desc.layout)
else:

    @gluon.jit
    def as_boxes(smem, desc, COUNT: gl.constexpr):
        """Return the memory of ``smem`` as ``COUNT`` boxes of a tensor descriptor."""
        shape: gl.constexpr = [COUNT] + desc.block_shape  # noqa: RUF005 - no stars in Triton
        return smem._reinterpret(desc.dtype, shape, desc.layout)


__all__ = [
    "TensorDescriptor",
    "copy_box",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "thread_barrier",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
