"""Triton's interpreter, untyped: the corrections subclass and replace what has no annotations."""

from __future__ import annotations

from typing import Any, TypeAlias

import triton.runtime.interpreter

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

__all__ = ["Array", "DType", "Handle", "Opaque", "Tensor", "ti"]
