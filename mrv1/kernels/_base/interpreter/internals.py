"""Triton's interpreter, untyped: the corrections subclass and replace what has no annotations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
import triton.runtime.interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from mrv1.kernels._base.interpreter.number_formats import Array

Handle: TypeAlias = Any
"""A ``TensorHandle``: numpy ``data`` and the Triton ``dtype`` it stands for."""
DType: TypeAlias = Any
"""A ``triton.language.dtype``, scalar or block."""
Tensor: TypeAlias = Any
"""A ``triton.language.tensor`` around a handle."""
Opaque: TypeAlias = Any
"""Passed through unread."""

ti: Any = triton.runtime.interpreter


def tensors_of(args: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yield every tensor among the arguments of a launch."""
    for arg in args:
        if isinstance(arg, tuple):
            yield from tensors_of(arg)
        elif isinstance(arg, TensorDescriptor):
            yield from tensors_of((arg.base,))
        elif hasattr(arg, "data_ptr"):
            yield ti._unwrap_tensor(arg)


__all__ = ["Array", "DType", "Handle", "Opaque", "Tensor", "tensors_of", "ti"]
