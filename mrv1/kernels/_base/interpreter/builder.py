"""The interpreter's builder with right conversions and right bfloat16 arithmetic.

Stock, Triton 3.6 to 3.9 truncate float32 to bfloat16, wrap and misround float32 to fp8, decode
fp8 NaN as 480 and do bfloat16 arithmetic on the integer codes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir

from mrv1.kernels._base.interpreter.internals import Array, DType, Handle, Opaque, ti
from mrv1.kernels._base.interpreter.number_formats import PACKED, decode, encode

AT_ONCE = 16
"""Products of 16-bit values that tensor cores add to a float32 sum before they round it."""
_COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)


def encode_as(values: Array, dtype: DType, *, toward_zero: bool = False) -> Handle:
    """Return a handle of ``dtype`` that holds float32 ``values`` rounded to it."""
    scalar = dtype.scalar
    if scalar.name in (*PACKED, "fp16"):
        return ti.TensorHandle(encode(values, scalar.name, toward_zero=toward_zero), scalar)
    with np.errstate(all="ignore"):
        return ti.TensorHandle(values.astype(ti._get_np_dtype(scalar)), scalar)


def float32_of(handle: Handle) -> Array:
    """Return the float32 values of any floating handle."""
    return decode(handle.data, handle.dtype.scalar.name)


def _float64_of(handle: Handle) -> Array:
    values = float32_of(handle) if _is_packed(handle.dtype) else handle.data
    return np.ascontiguousarray(values, dtype=np.float64)


def _product(a: Array, b: Array) -> Array:
    """Return ``a @ b`` in float64; no element depends on the shape of either.

    ``np.matmul`` sums over K in an order of its own for each shape and CPU (without AVX-512 a row
    has other bits alone than among 16). ``einsum`` walks the axis of the smallest stride, N,
    innermost, so each element is summed from k = 0 upwards; a result of one column gets a second.
    """
    num_cols = b.shape[-1]
    if num_cols == 1:
        b = np.repeat(b, 2, axis=-1)
    product: Array = np.einsum("...mk,...kn->...mn", a, b, optimize=False)
    return product[..., :num_cols]


def _is_packed(dtype: DType) -> bool:
    return dtype.scalar.name in PACKED


def _is_bf16(handle: Handle) -> bool:
    return bool(handle.dtype.scalar.name == "bf16" and handle.data.dtype == np.uint16)


def _widened(handle: Handle) -> Handle:
    return ti.TensorHandle(float32_of(handle), tl.float32) if _is_bf16(handle) else handle


def _narrowed(handle: Handle) -> Handle:
    return encode_as(handle.data, tl.bfloat16)


def _fused(x: Array, y: Array, z: Array) -> Array:
    """Return float32 ``x * y + z``, rounded once.

    The product is exact in float64. The sum is rounded to odd there (if inexact, to the neighbour
    with an odd last bit), after which rounding to float32 is that of the exact sum.
    """
    with np.errstate(all="ignore"):
        product = x.astype(np.float64) * y
        total = np.asarray(product + z)
        added = total - product
        error = (product - (total - added)) + (z - added)
        bits = total.view(np.int64)
        away = np.where((error > 0) == (total > 0), 1, -1)
        inexact = np.isfinite(total) & (error != 0) & (bits % 2 == 0)
        return np.where(inexact, bits + away, bits).view(np.float64).astype(np.float32)


class _Program(threading.local):
    """The program that this thread interprets: threads may be the ranks of one host."""

    grid_idx: tuple[int, int, int] | None = None
    grid_dim: tuple[int, int, int] | None = None


_program = _Program()


class CorrectedBuilder(ti.InterpreterBuilder):  # type: ignore[misc]
    """Computes bfloat16 in float32 and rounds once, as the compiled kernels do."""

    @property
    def grid_idx(self) -> tuple[int, int, int] | None:
        """Index of this thread's program."""
        return _program.grid_idx

    @grid_idx.setter
    def grid_idx(self, index: tuple[int, int, int] | None) -> None:
        _program.grid_idx = index

    @property
    def grid_dim(self) -> tuple[int, int, int] | None:
        """Grid of this thread's launch."""
        return _program.grid_dim

    @grid_dim.setter
    def grid_dim(self, grid: tuple[int, int, int] | None) -> None:
        _program.grid_dim = grid

    def create_masked_load(
        self, ptrs: Handle, mask: Handle, other: Handle, *how: Opaque
    ) -> Handle:
        """Load; before a volatile load, which may wait for a peer, let other threads run.

        ``how`` ends with ``is_volatile``, after one argument about caches in 3.9 and two before.
        """
        if how[-1]:
            time.sleep(0)
        return super().create_masked_load(ptrs, mask, other, *how)

    def cast_impl(self, src: Handle, dst_type: DType) -> Handle:
        """Convert between dtypes; formats kept as integers go through float32."""
        with np.errstate(all="ignore"):
            if _is_packed(dst_type):
                return encode_as(float32_of(src), dst_type)
            if _is_packed(src.dtype):
                dtype = dst_type.scalar
                return ti.TensorHandle(float32_of(src).astype(ti._get_np_dtype(dtype)), dtype)
            return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src: Handle, dst_type: DType, rounding_mode: Opaque) -> Handle:
        """Convert with an explicit rounding mode."""
        toward_zero = rounding_mode == ir.ROUNDING_MODE.RTZ
        with np.errstate(all="ignore"):
            return encode_as(float32_of(src), dst_type, toward_zero=toward_zero)

    def binary_op(self, lhs: Handle, rhs: Handle, op: Callable[..., Array]) -> Handle:
        """Apply ``op``; comparisons yield int1: 3.9 refuses stock's operand dtype as a mask."""
        with np.errstate(all="ignore"):
            if op in _COMPARISONS:
                return ti.TensorHandle(op(_widened(lhs).data, _widened(rhs).data), tl.int1)
            if not _is_bf16(lhs):
                return super().binary_op(lhs, rhs, op)
            return encode_as(op(_widened(lhs).data, _widened(rhs).data), tl.bfloat16)

    def ternary_op(
        self, lhs: Handle, rhs: Handle, other: Handle, op: Callable[..., Array]
    ) -> Handle:
        """Apply ``op``; a select moves codes and needs no arithmetic."""
        if not _is_bf16(other) or op is np.where:
            return super().ternary_op(lhs, rhs, other, op)
        return _narrowed(super().ternary_op(*map(_widened, (lhs, rhs, other)), op))

    def unary_op(self, arg: Handle, op: Callable[..., Array]) -> Handle:
        """Apply ``op``."""
        with np.errstate(all="ignore"):
            if not _is_bf16(arg):
                return super().unary_op(arg, op)
            return _narrowed(super().unary_op(_widened(arg), op))

    def create_fma(self, x: Handle, y: Handle, z: Handle) -> Handle:
        """Multiply and add, rounding once where stock rounds twice."""
        if _is_bf16(z):
            return _narrowed(self.create_fma(*map(_widened, (x, y, z))))
        if z.data.dtype != np.float32:
            return super().create_fma(x, y, z)
        return ti.TensorHandle(_fused(x.data, y.data, z.data), tl.float32)

    def create_dot(
        self,
        a: Handle,
        b: Handle,
        d: Handle,
        input_precision: Opaque,
        max_num_imprecise_acc: Opaque,
    ) -> Handle:
        """Return ``a @ b + d``, summed over K in one order, which no shape changes.

        Of 16-bit operands ``AT_ONCE`` products at a time are added and rounded, as by the tensor
        cores: a long dot has the bits of a chain of short ones. Of others the sum is rounded once.
        """
        if not a.dtype.is_floating():
            return super().create_dot(a, b, d, input_precision, max_num_imprecise_acc)
        with np.errstate(all="ignore"):  # rows of padding may hold anything, as on a GPU
            left, right, total = (_float64_of(handle) for handle in (a, b, d))
            wide = np.float64 if d.dtype.scalar.name == "fp64" else np.float32
            num_in = left.shape[-1]
            step = AT_ONCE if a.dtype.scalar.primitive_bitwidth == 16 else num_in
            for first in range(0, num_in, step):
                own = slice(first, first + step)
                total = (_product(left[..., own], right[..., own, :]) + total).astype(wide)
            return encode_as(total, d.dtype)

    def get_bf16(self, value: float) -> Handle:
        """Return a bfloat16 constant (stock has none)."""
        return encode_as(np.array([value], dtype=np.float32), tl.bfloat16)

    def get_all_ones_value(self, type: DType) -> Handle:
        """Return all bits set, the operand of ``~`` (stock fails for unsigned integers)."""
        ones = np.array([-1]).astype(ti._get_np_dtype(type))
        return ti.TensorHandle(ones, type.scalar)
