"""Shared parts of all oracles: the count of their calls, the dtypes they accept and compute in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

calls: Counter[str] = Counter()
"""Calls of each oracle in this process; the GPU tests assert that serving calls none."""

ORACLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def counted(op: Callable[P, R]) -> Callable[P, R]:
    """Count the calls of an oracle in ``calls``, by its name."""

    @wraps(op)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        calls[op.__name__] += 1
        return op(*args, **kwargs)

    return wrapper


def wide(x: torch.Tensor) -> torch.Tensor:
    """Upcast to float32, or keep float64: the dtype every oracle computes in."""
    return x if x.dtype == torch.float64 else x.float()
