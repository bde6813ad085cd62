"""How a checkpoint stores the matrix of a module, and how it becomes a quantized weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import ClassVar

import torch

from mrv1.errors import ConfigError
from mrv1.kernels.layers.quantized import (
    CODES,
    Activations,
    CodeName,
    QuantizedWeight,
    exponent_values,
)
from mrv1.models.places import Place

SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""In which a checkpoint may store scales; they are kept so."""
EXPONENT_DTYPES = (torch.float8_e8m0fnu, torch.uint8)
"""In which it may store powers of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePart:
    """The part that a rank has of a module's matrix ``[out, in]``."""

    name: str
    """The module, for example ``model.layers.0.self_attn.q_proj``."""
    shape: tuple[int, int]
    """Of the whole matrix."""
    rows: slice
    """The rank's rows."""
    inputs: slice
    """The rank's inputs."""

    def groups(self, size: int) -> slice:
        """Return which groups of ``size`` inputs the rank has, of all that share scales.

        ConfigError: a rank's inputs begin or end within a group.
        """
        start, stop, num_in = self.inputs.start, self.inputs.stop, self.shape[1]
        if start % size or (stop % size and stop != num_in):
            raise ConfigError(
                f"tensor_parallel_size: expected ranks with whole groups of {size} of the "
                f"{num_in} inputs of {self.name}, got inputs {start} to {stop}"
            )
        return slice(start // size, -(-stop // size))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFormat(ABC):
    """How a module's matrix is stored: the code, and what shares a scale."""

    code: CodeName
    rows: int = 1
    """Rows that share a scale; 0 = all."""
    inputs: int = 0
    """Inputs that share a scale; 0 = all."""
    scale_dtype: torch.dtype | None = torch.float32
    """As stored; None = the code has no scales of their own."""
    zeros_dtype: torch.dtype | None = None
    """Of the zero points in memory; None = there are none."""
    has_mins: bool = False
    has_order: bool = False
    """Whether inputs are stored in an order of their own."""
    activations: Activations | None = None
    """How the checkpoint quantizes inputs to e4m3."""
    separator: ClassVar[str] = "."
    """What stands between the names of a module and of its tensors."""

    @abstractmethod
    def places(self, part: ModulePart, weight: QuantizedWeight) -> dict[str, Place]:
        """Return the places of a module's stored tensors in ``weight``, a rank's rows of it.

        The keys are the tensors' names after the module's: ``weight``, ``weight_scale``. None of
        the places reads the values of ``weight``, which may be on device ``meta``. ConfigError: a
        rank's part begins or ends within a group.
        """

    def fuses_with(self, other: ModuleFormat | None) -> bool:
        """Whether the rows of two modules can be one weight: all but ``rows`` are alike."""
        return not self.has_order and other is not None and self == replace(other, rows=self.rows)

    def empty(
        self,
        sizes: Sequence[int],
        num_in: int,
        *,
        rows_per_scale: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> QuantizedWeight:
        """Return an uninitialised weight for modules of ``sizes`` rows, one after the other.

        Where inputs are quantized, scales are as ``linear`` multiplies by them: float32, and, but
        for those of blocks, one for each row.

        ConfigError: a rank would have a part of a block of inputs.
        """
        num_out, code = sum(sizes), CODES[self.code]
        scale_dtype = self.scale_dtype
        if self.activations is not None:
            scale_dtype = torch.float32
            rows_per_scale = rows_per_scale if self.activations == "group" else 1
        if code.head_bytes and num_in % self.inputs:
            raise ConfigError(
                f"tensor_parallel_size: expected ranks with whole groups of {self.inputs} inputs "
                f"of a matrix in {self.code}, got ranks with {num_in}"
            )
        new = partial(torch.empty, device=device)
        grid = (-(-num_out // rows_per_scale), -(-num_in // (self.inputs or num_in)))
        scales, zeros = (
            None if each is None else new(grid, dtype=each)
            for each in (scale_dtype, self.zeros_dtype)
        )
        blocks = num_in // 256
        return QuantizedWeight(
            code=self.code,
            codes=new((num_out, num_in // code.per_byte), dtype=code.dtype),
            dtype=dtype,
            scales=scales,
            rows_per_scale=rows_per_scale,
            inputs_per_scale=0 if self.inputs >= num_in else self.inputs,
            zeros=zeros,
            mins=new(grid, dtype=self.scale_dtype) if self.has_mins else None,
            heads=new((num_out, blocks, code.head_bytes), dtype=torch.uint8)
            if code.head_bytes
            else None,
            high=new((num_out, num_in // code.high_per_byte), dtype=torch.uint8)
            if code.high_per_byte
            else None,
            order=new((num_in,), dtype=torch.int32) if self.has_order else None,
            activations=self.activations,
        )


def shared_rows(formats: Sequence[ModuleFormat], sizes: Sequence[int], *, is_cut: bool) -> int:
    """Return the rows that share a scale where modules of ``sizes`` rows follow each other.

    As many as share one in the checkpoint, but none of two modules, nor, where ranks divide rows
    (``is_cut``), of two ranks: scales are repeated instead.
    """
    rows = [each.rows for each in formats]
    if len(sizes) == 1 and not is_cut:
        return rows[0] or sizes[0]
    if 0 in rows:
        return sizes[0] if len(sizes) == 1 else 1
    return gcd(*rows, *sizes)


def codes_place(part: ModulePart, weight: QuantizedWeight) -> Place:
    """Return the place of codes that are stored as they are in memory."""
    return Place(
        target=weight.codes,
        shape=part.shape,
        part=(part.rows, part.inputs),
        dtypes=(weight.codes.dtype,),
        module=part.name,
    )


def scale_place(
    part: ModulePart,
    target: torch.Tensor | None,
    weight: QuantizedWeight,
    *,
    rows: int,
    inputs: int,
    shape: tuple[int, ...] | None = None,
    dtypes: Sequence[torch.dtype] = SCALE_DTYPES,
    zeros_from: int | None = None,
) -> Place:
    """Return the place of scales, one for ``rows`` x ``inputs`` (0 = all) of a module's matrix.

    Each is repeated where fewer rows share a scale in memory. They are stored as a grid, or as
    ``shape``, the same numbers. With ``zeros_from`` they are int8 zero points, to which it is
    added.
    """
    num_out, num_in = part.shape
    share, in_memory = rows or num_out, weight.rows_per_scale
    first = part.rows.start // share
    grid = (slice(first, -(-part.rows.stop // share)), group_slice(part, inputs))
    whole = (-(-num_out // share), -(-num_in // inputs) if inputs else 1)
    times = max(share // in_memory, 1)
    return Place(
        target=target,
        shape=shape or whole,
        part=grid if shape is None or len(shape) == 2 else grid[:1],
        dtypes=dtypes if zeros_from is None else (torch.int8,),
        convert=partial(_repeated, times=times, offset=zeros_from or 0),
        rows_per_row=times,
        first_row=part.rows.start // in_memory - first * times,
        problem=scale_problem_of(weight.code) if zeros_from is None else no_problem,
        module=part.name,
    )


def group_slice(part: ModulePart, inputs: int) -> slice:
    """Return the columns of a grid of scales that a rank has."""
    return part.groups(inputs) if 0 < inputs < part.shape[1] else slice(0, 1)


def _repeated(values: torch.Tensor, *, times: int, offset: int) -> torch.Tensor:
    """Return rows of a grid, ``[n, groups]`` or ``[n]``, each ``times`` times, and ``offset``."""
    rows = _numbers(values).reshape(len(values), -1).repeat_interleave(times, 0)
    return rows + offset if offset else rows


def _numbers(values: torch.Tensor) -> torch.Tensor:
    """Return ``values``, or the powers of two whose exponents they are."""
    if values.dtype not in EXPONENT_DTYPES:
        return values
    return exponent_values(values.view(torch.uint8))


def scale_problem(values: torch.Tensor, *, may_be_negative: bool = False) -> str | None:
    """Say what is wrong with scales: they are finite and positive."""
    wide = _numbers(values).float()
    is_right = wide.isfinite() & ((wide != 0) if may_be_negative else (wide > 0))
    if bool(is_right.all()):
        return None
    bad, expected = wide[~is_right], "other than 0" if may_be_negative else "> 0"
    return (
        f"expected finite values {expected}, got {bad[0].item():g} "
        f"({bad.numel()} of {wide.numel()})"
    )


def scale_problem_of(code: CodeName) -> Callable[[torch.Tensor], str | None]:
    """Return what checks the scales of codes.

    Integers have one more value below zero than above: AutoRound has negative scales where the
    largest weight of a group is positive.
    """
    return scale_problem if code == "e4m3" else partial(scale_problem, may_be_negative=True)


def zero_problem(values: torch.Tensor) -> str | None:
    """Say what is wrong with a tensor that the model has not: values other than 0 would count."""
    others = int(values.count_nonzero())
    if not others:
        return None
    return f"expected zeros, as the model has no such tensor, got {others} other values"


def no_problem(values: torch.Tensor) -> str | None:
    """Accept the values of a small tensor."""
    return None


def checked_place(part: ModulePart, shape: tuple[int, ...], **options: object) -> Place:
    """Return the place of a tensor that is checked and then not needed."""
    return Place(
        target=None,
        shape=shape,
        part=tuple(slice(0, size) for size in shape),
        module=part.name,
        **options,  # type: ignore[arg-type]
    )
