"""Codes of a checkpoint as the kernels read them, and places of tensors stored by input."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrv1.errors import ConfigError
from mrv1.kernels.layers.quantized import QuantizedWeight, low_and_high
from mrv1.models.places import Place
from mrv1.models.quantization.formats import SCALE_DTYPES, ModulePart, scale_problem_of

LAYERS = "model.layers."
"""Beginning of the names of a decoder's layers."""
HEAD_MODULE, EMBED_MODULE = "lm_head", "model.embed_tokens"
"""Modules with a row for each token."""


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Return ``[..., in]`` uint8 codes below 16 as ``[..., in / 2]``: undoes ``low_and_high``."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def fields_of_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the fields of ``[..., n]`` int32 words as ``[..., n * 32 / bits]`` uint8.

    ``bits`` is 4 or 8; the lowest field of a word comes first.
    """
    # Of one column, torch takes any stride for contiguous, but views no such words as bytes.
    words = words.clone(memory_format=torch.contiguous_format)
    octets = words.view(torch.uint8)  # the lowest first, as the machine stores them
    return low_and_high(octets) if bits == 4 else octets


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnPlace(Place):
    """The place of a tensor whose stored rows are columns in memory.

    ``convert`` takes stored rows and returns columns, ``[out, n]``: of codes one an element, even
    where two share a byte of ``target``.
    """

    columns: int = 1
    """Columns that a stored row becomes."""
    per_byte: int = 1
    """Columns in an element of ``target``."""
    num_rows: int
    """Rows of ``target`` that are filled: those after them pad the vocabulary."""
    order: torch.Tensor | None = None
    """[in] int32: the stored column of each column of ``target``, filled before it; None = they
    are in order."""

    @torch.no_grad()
    def fill(self, values: torch.Tensor, first: int = 0) -> None:
        """Write rows of this rank's part, from row ``first`` of the part on."""
        if self.target is None:
            return
        target, columns = self.target[: self.num_rows], self.convert(values.to(self.target.device))
        start = first * self.columns
        where = torch.arange(start, start + columns.shape[1], device=columns.device)
        if self.order is not None:
            where = torch.argsort(self.order)[where]
        elif start % self.per_byte == columns.shape[1] % self.per_byte == 0:
            joined = packed(columns) if self.per_byte == 2 else columns
            target.narrow(1, start // self.per_byte, joined.shape[1]).copy_(joined)
            return
        if self.per_byte == 1:
            target[:, where] = columns
            return
        both = low_and_high(target)  # a byte has another column, too
        both[:, where] = columns
        target.copy_(packed(both))

    def pad(self) -> None:
        """Write zeros after the rows that this rank has."""
        if self.target is not None:
            self.target[self.num_rows :].zero_()


def scale_columns(
    part: ModulePart, weight: QuantizedWeight, num_groups: int, groups: slice
) -> ColumnPlace:
    """Return the place of scales that are stored as ``[groups, out]``."""
    return ColumnPlace(
        target=weight.scales,
        num_rows=part.rows.stop - part.rows.start,
        shape=(num_groups, part.shape[0]),
        part=(groups, part.rows),
        dtypes=SCALE_DTYPES,
        convert=torch.t,
        problem=scale_problem_of(weight.code),
        module=part.name,
    )


def whole_words(part: ModulePart, name: str, fields: int) -> slice:
    """Return the words of ``fields`` rows or inputs (``name``) that a rank has.

    ConfigError: the rank's part begins or ends within a word.
    """
    own: slice = getattr(part, name)
    if own.start % fields or own.stop % fields:
        raise ConfigError(
            f"tensor_parallel_size: expected ranks with whole words of {fields} {name} of "
            f"{part.name}, got {name} {own.start} to {own.stop}"
        )
    return slice(own.start // fields, own.stop // fields)


def check_shape(part: ModulePart, *, group_size: int, fields: int) -> None:
    """Raise a ``ConfigError`` unless words and groups (0 = of all inputs) fill a matrix."""
    for what, size in zip(("rows", "inputs"), part.shape, strict=True):
        if size % fields:
            raise ConfigError(
                f"{part.name}: expected a multiple of {fields} {what}, which share a word, "
                f"got {size}"
            )
    if group_size and part.shape[1] % group_size:
        raise ConfigError(
            f"quantization_config.group_size: expected a divisor of the {part.shape[1]} inputs of "
            f"{part.name}, got {group_size}"
        )
