"""The only module that imports Gluon, Triton's language of explicit layouts, copies and barriers.

Gluon is experimental: names that differ in Triton 3.6, 3.7 and 3.9 are settled here.
"""

from __future__ import annotations

from typing import Any, TypeVar, dataclass_transform

from mrv1.kernels._base import triton as triton  # settles how the process runs kernels

from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon import language as gl  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import (  # isort: skip
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # isort: skip
from triton.language.core import _aggregate, base_value  # isort: skip

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


@gluon.jit
def let_next_start():
    """Let the next kernel start if it is a dependent launch, as in ``dependent_launch``."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_previous():
    """Wait until all kernels before this one have ended, as in ``dependent_launch``."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


_Class = TypeVar("_Class", bound=type)


@dataclass_transform(eq_default=False)
def aggregate(cls: _Class) -> _Class:
    """Make a value of kernels out of a class of annotated fields and ``gluon.jit`` methods.

    Kernels build it with its fields' values in order: tensors, pointers, shared memory, constants,
    None and aggregates. Unlike a tuple it keeps its constants when assigned to a name. Its fields
    never change. Triton 3.6 and 3.7 want a written-out constructor and evaluated types of the
    fields; a rewritten order of fields must reach the calls, or their cache does not see it.
    """
    names = tuple(cls.__annotations__)

    def init(self: Any, *values: Any) -> None:  # noqa: ANN401
        for name, value in zip(names, values, strict=True):
            setattr(self, name, value if isinstance(value, base_value) else gl.constexpr(value))

    init.__triton_builtin__ = True  # type: ignore[attr-defined]  # cache keys leave it out
    cls.__init__ = init  # type: ignore[misc]
    cls.__annotations__ = dict.fromkeys(names, base_value)
    aggregated: _Class = _aggregate(cls)
    return aggregated


__all__ = [
    "TensorDescriptor",
    "aggregate",
    "copy_box",
    "fence_async_shared",
    "gl",
    "gluon",
    "let_next_start",
    "mbarrier",
    "thread_barrier",
    "wait_for_previous",
    "warpgroup_mma",
    "warpgroup_mma_init",
    "warpgroup_mma_wait",
]
