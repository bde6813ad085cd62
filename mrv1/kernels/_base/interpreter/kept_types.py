"""The types of interpreted values, each made once: stock, they are a third of an op's time.

A block's type checks its shape and prints its name when it is made, each value wraps that shape
anew, and each look-up of numpy's dtype makes a table of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import triton.language as tl

from mrv1.kernels._base.interpreter.internals import DType, Handle, Opaque, Tensor, ti


def keep_types() -> None:
    """Keep what blocks' types, and values of them, hold beside their data."""
    make_block, np_dtype_of = tl.block_type.__init__, ti._get_np_dtype
    blocks: dict[tuple[object, ...], dict[str, object]] = {}
    shapes: dict[tuple[int, ...], tuple[Opaque, Opaque]] = {}
    np_dtypes: dict[str, Opaque] = {}

    def init_block(self: DType, element_ty: DType, shape: Sequence[Opaque]) -> None:
        sizes = [getattr(size, "value", size) for size in shape]
        key = element_ty.name, getattr(element_ty, "address_space", None), *sizes
        if key not in blocks or any(type(size) is not int for size in sizes):
            make_block(self, element_ty, shape)
            blocks[key] = {**vars(self)}
        else:
            self.__dict__.update(blocks[key])

    def init_tensor(self: Tensor, handle: Handle, type: DType) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in shapes:
            wrapped = tl.core.tuple([tl.constexpr(size) for size in sizes])
            shapes[sizes] = wrapped, tl.constexpr(math.prod(sizes))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[sizes]

    def get_np_dtype(dtype: DType) -> Opaque:
        scalar = dtype.scalar
        if scalar.name not in np_dtypes:
            np_dtypes[scalar.name] = np_dtype_of(scalar)
        return np_dtypes[scalar.name]

    tl.block_type.__init__, tl.tensor.__init__ = init_block, init_tensor
    ti._get_np_dtype = get_np_dtype
