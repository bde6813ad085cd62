"""The boundary at which values of a caller are read: whatever they raise is a ``RequestError``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import url2pathname

import numpy as np
import torch

from mrv1.errors import Mrv1Error, RequestError, short

ERROR_LEN = 200  # most characters of a foreign error that a message repeats


@contextmanager
def reading(argument: str, expected: str) -> Iterator[None]:
    """Turn any exception of a block that only reads a caller's values into a ``RequestError``.

    It names ``argument`` and what was ``expected``. The values are of unknown classes, whose
    methods, the file system and torch raise errors of any type. Work of the engine itself is never
    inside such a block, so that its faults are not taken for a caller's.
    """
    try:
        yield
    except (Mrv1Error, torch.AcceleratorError):
        raise  # AcceleratorError: a kernel failed, perhaps in an earlier step
    except Exception as error:
        message = f"{argument}: expected {expected}, got {short(error, ERROR_LEN)}"
        raise RequestError(message) from error


def local_path(name: str) -> str:
    """Return the path that a file's name or its ``file://`` URL stands for."""
    return url2pathname(name.removeprefix("file://")) if name.startswith("file://") else name


def check_unmasked(argument: str, value: object) -> None:
    """Raise a RequestError for an array of numpy with a mask, which nothing here would read."""
    if isinstance(value, np.ma.MaskedArray):
        raise RequestError(f"{argument}: expected an array without a mask, got a masked array")


def plain_tensor(argument: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a caller's tensor without its gradient, conjugate or negative bit.

    Shares its memory, if it has neither bit. RequestError: it is of another class, or not in the
    memory of a CPU or a GPU as one block of numbers.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        kind = type(tensor).__name__
    elif tensor.layout is not torch.strided or tensor.is_nested:
        kind = "a nested one" if tensor.is_nested else str(tensor.layout)
    elif tensor.device.type not in ("cpu", "cuda"):
        kind = f"one on {tensor.device}"
    else:
        return tensor.detach().resolve_conj().resolve_neg()
    raise RequestError(f"{argument}: expected a dense tensor on a CPU or GPU, got {kind}")
