"""Kernels that a compile check must refuse, and a kernel that the check must accept."""

from __future__ import annotations

import torch

from mrv1.kernels._base.triton import tl, triton
from mrv1.testing.aot import AotCase, Target, pointer


@triton.jit
def _copy_kernel(out_ptr, x_ptr, TILE: tl.constexpr):
    index = tl.arange(0, TILE)
    tl.store(out_ptr + index, tl.load(x_ptr + index))


@triton.jit
def _sorted_sum_kernel(out_ptr, x_ptr, TILE: tl.constexpr):
    index = tl.arange(0, TILE)
    x = tl.load(x_ptr + index)
    total = tl.sum(x, axis=0)
    tl.store(out_ptr + index, x / total + tl.sqrt(x) * tl.max(x, axis=0))


@triton.jit
def _dot_kernel(out_ptr, x_ptr, num_tiles, TILE: tl.constexpr):
    index = tl.arange(0, TILE)
    square = index[:, None] * TILE + index[None, :]
    total = tl.zeros([TILE, TILE], tl.float32)
    for tile in range(num_tiles):
        a = tl.load(x_ptr + tile * TILE * TILE + square)
        total = tl.dot(a, tl.load(x_ptr + (tile + 1) * TILE * TILE + square), total)
    tl.store(out_ptr + square, total)


@triton.jit
def _to_fp8_kernel(out_ptr, x_ptr, TILE: tl.constexpr):
    index = tl.arange(0, TILE)
    tl.store(out_ptr + index, tl.load(x_ptr + index).to(tl.float8e4nv))


def cases(target: Target) -> list[AotCase]:
    float32, float16 = pointer(torch.float32), pointer(torch.float16)
    float8 = pointer(torch.float8_e4m3fn)
    good = AotCase(
        name="good", kernel=_copy_kernel, args=(float32, float32), constexprs={"TILE": 1024}
    )
    spills = AotCase(
        name="spills",
        kernel=_sorted_sum_kernel,
        args=(float32, float32),
        constexprs={"TILE": 131_072 if target.backend == "hip" else 65_536},
    )
    if target.backend == "hip":
        return [good, spills]
    return [
        good,
        spills,
        AotCase(
            name="shared",
            kernel=_dot_kernel,
            args=(float32, float16, 99),
            constexprs={"TILE": 64},
            num_stages=14,
        ),
        AotCase(
            name="unsupported",
            kernel=_to_fp8_kernel,
            args=(float8, float32),
            constexprs={"TILE": 1024},
        ),
    ]
