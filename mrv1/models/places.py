"""Where the tensors of a checkpoint go: into the weights of a decoder, as a rank has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes in which a weight that is not quantized may be stored."""

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}


def dtype_text(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a safetensors file."""
    return _DTYPES.get(dtype, str(dtype))


def stored_dtype(name: str) -> torch.dtype | None:
    """Return the dtype that a safetensors file names; None = no weight has it."""
    return next((dtype for dtype, each in _DTYPES.items() if each == name), None)


def same(values: torch.Tensor) -> torch.Tensor:
    """Return ``values``: they are kept as they are stored."""
    return values


def plus_one(values: torch.Tensor) -> torch.Tensor:
    """Return ``1 + values`` in float32 or wider."""
    return values.to(torch.promote_types(values.dtype, torch.float32)) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one tensor of a checkpoint goes, all of it or the part that a rank has.

    Rows of the stored tensor follow each other in memory too, perhaps as several rows each.
    """

    target: torch.Tensor | None
    """What is filled: a tensor of the weights, or a view of one. None = the tensor is only
    checked."""
    shape: tuple[int, ...]
    """Of the whole stored tensor; (1,) is also a single number without dimensions."""
    part: tuple[slice, ...]
    """What this rank has of it; padding may follow in ``target``."""
    dtypes: Sequence[torch.dtype] = FLOAT_DTYPES
    """In which it may be stored."""
    convert: Callable[[torch.Tensor], torch.Tensor] = same
    """From stored rows, on the target's device, to rows of ``target``."""
    rows_per_row: int = 1
    """Rows of ``target`` that a stored row becomes."""
    first_row: int = 0
    """Rows of the first stored row that come before ``target``; its last rows may be missing."""
    problem: Callable[[torch.Tensor], str | None] | None = None
    """What is wrong with stored values, if anything: of a small tensor, which is read first."""
    is_one: bool = False
    """Whether rows cannot be converted alone: an update gives the tensor as one row."""
    module: str | None = None
    """The quantized module whose tensors belong together; None = the tensor stands alone."""

    @property
    def is_small(self) -> bool:
        """Whether the tensor is read, and its values checked, before any large one."""
        return self.problem is not None

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """The tensors that are filled."""
        return () if self.target is None else (self.target,)

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all of the stored tensor."""
        return self.part == whole(self.shape)

    def problem_of(self, values: torch.Tensor) -> str | None:
        """Say what is wrong with the values of the whole stored tensor, if anything."""
        return None if self.problem is None else self.problem(values)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a stored tensor has the shape."""
        return tuple(shape) == self.shape or (self.shape == (1,) and not shape)

    def write(self, first_row: int, values: torch.Tensor) -> None:
        """Write rows of the whole stored tensor, from ``first_row`` on, as far as they are here.

        On the current stream.
        """
        own, *columns = self.part
        values = values.reshape(self.shape) if self.is_one or not values.dim() else values
        start, stop = max(own.start, first_row), min(own.stop, first_row + len(values))
        if start < stop:
            rows = values[(slice(start - first_row, stop - first_row), *columns)]
            self.fill(rows, start - own.start)
        self.pad()

    @torch.no_grad()  # a parameter that a trainer gives would make a weight require gradients
    def fill(self, values: torch.Tensor, first: int = 0) -> None:
        """Write rows of this rank's part, from row ``first`` of the part on."""
        if self.target is None:
            return
        values = values if values.dim() else values[None]
        if self.convert is not same:
            values = self.convert(values.to(self.target.device))
        begin = first * self.rows_per_row - self.first_row
        start, stop = max(begin, 0), min(begin + len(values), len(self.target))
        self.target[start:stop].copy_(values[start - begin : stop - begin])

    def pad(self) -> None:
        """Write zeros after the rows that this rank has: they pad the vocabulary."""
        own = self.part[0]
        num_rows = (own.stop - own.start) * self.rows_per_row - self.first_row
        if self.target is not None and num_rows < len(self.target):
            self.target[num_rows:].zero_()


def whole(shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices of a whole tensor."""
    return tuple(slice(0, size) for size in shape)


def memory_of(places: Iterable[Place]) -> list[torch.Tensor]:
    """Return every tensor that is filled."""
    return [tensor for place in places for tensor in place.memory]
