"""Codes of a checkpoint as the kernels read them, and places of tensors stored by input."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

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


def order_place(
    part: ModulePart, order: torch.Tensor | None, group_size: int, *, is_plain: bool = False
) -> Place:
    """Return the place of the group of each input, ``[in]``, which becomes their order.

    Groups have ``group_size`` inputs (0 = all), neighbours if ``is_plain``.
    """
    num_in = part.shape[1]
    return Place(
        target=order,
        shape=(num_in,),
        part=(slice(0, num_in),),
        dtypes=(torch.int32, torch.int64),
        convert=group_order,
        is_one=True,
        problem=partial(
            groups_problem, num_groups=num_in // (group_size or num_in), is_plain=is_plain
        ),
        module=part.name,
    )


def group_order(g_idx: torch.Tensor) -> torch.Tensor:
    """Return the inputs in the order of their groups, ``[in]`` int32."""
    return torch.argsort(g_idx, stable=True).to(torch.int32)


def groups_problem(g_idx: torch.Tensor, *, num_groups: int, is_plain: bool) -> str | None:
    """Say what is wrong with equal groups of inputs, which are neighbours if ``is_plain``."""
    size, least, most = len(g_idx) // num_groups, int(g_idx.min()), int(g_idx.max())
    if least < 0 or most >= num_groups:
        return f"expected groups from 0 to {num_groups - 1}, got {least} to {most}"
    counts = torch.bincount(g_idx, minlength=num_groups)
    if bool((counts != size).any()):
        group = int((counts != size).nonzero()[0])
        return f"expected {size} inputs in each group, got {int(counts[group])} in group {group}"
    if is_plain and bool((g_idx.diff() < 0).any()):
        return "expected groups of neighbours where desc_act is false, got other groups"
    return None


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
