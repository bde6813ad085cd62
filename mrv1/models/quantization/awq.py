"""AWQ checkpoints, as AutoAWQ writes them in its version ``gemm``.

    qweight  [in, out / 8] int32: a word has eight neighbouring outputs, the even ones before the
             odd ones
    qzeros   [groups, out / 8] int32, alike
    scales   [groups, out]

The value of a code is ``(code - zero) * scale``. A module is quantized if it is in a layer and no
name of ``modules_to_not_convert`` is a part of its own.

Source: AutoAWQ 0.2 (github.com/casper-hansen/AutoAWQ): names, matching, packing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from mrv1.kernels.layers.quantized import CODES, QuantizedWeight
from mrv1.models.places import Place
from mrv1.models.quantization.formats import ModuleFormat, ModulePart, group_slice, no_problem
from mrv1.models.quantization.packing import (
    LAYERS,
    ColumnPlace,
    check_shape,
    fields_of_words,
    scale_columns,
    whole_words,
)
from mrv1.models.quantization.scheme import Quantization
from mrv1.models.quantization.settings import Settings

METHOD = "awq"
FIELD_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)
"""The field of a word that has each of its eight outputs; 0 is the lowest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AWQFormat(ModuleFormat):
    """A module that AWQ has quantized."""

    def places(self, part: ModulePart, weight: QuantizedWeight) -> dict[str, Place]:
        """Return the places of a module's stored tensors; see ``ModuleFormat``."""
        num_out, num_in = part.shape
        check_shape(part, group_size=self.inputs, fields=len(FIELD_OF_OUTPUT))
        groups = group_slice(part, self.inputs)
        words = whole_words(part, "rows", len(FIELD_OF_OUTPUT))
        num_groups, num_words = num_in // (self.inputs or num_in), num_out // len(FIELD_OF_OUTPUT)
        own = partial(
            ColumnPlace,
            dtypes=(torch.int32,),
            convert=awq_codes,
            num_rows=part.rows.stop - part.rows.start,
            module=part.name,
        )
        return {
            "scales": scale_columns(part, weight, num_groups, groups),
            "qzeros": own(
                target=weight.zeros,
                shape=(num_groups, num_words),
                part=(groups, words),
                problem=no_problem,
            ),
            "qweight": own(
                target=weight.codes,
                shape=(num_in, num_words),
                part=(part.inputs, words),
                per_byte=CODES[self.code].per_byte,
            ),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AWQ(Quantization):
    """``quantization_config`` of AutoAWQ and transformers."""

    method: ClassVar[str] = METHOD

    form: AWQFormat
    left_out: tuple[str, ...] = ()
    """Parts of the names of modules in full precision."""
    prefix: str = "model."
    """Beginning of the checkpoint's names of layers."""

    @property
    def formats(self) -> tuple[AWQFormat, ...]:
        """The format of all quantized modules."""
        return (self.form,)

    def _module(self, name: str) -> AWQFormat | None:
        """Return the format of a linear module; see ``Quantization``."""
        own = self.prefix + name.removeprefix("model.")
        if not name.startswith(LAYERS) or any(each in own for each in self.left_out):
            return None
        return self.form


def read_awq(config: Settings, *, scale_dtype: torch.dtype, prefix: str = "model.") -> AWQ:
    """Return a checkpoint's quantization; arguments and errors as ``reading.Reader``."""
    config.refuse("dynamic", "lm_head")
    for key in ("bits", "w_bit"):  # the second name is AutoAWQ's own
        config.choice(key, (4,), 4)
    for key in ("version", "format"):
        config.choice(key, ("gemm", "GEMM"), "gemm")
    config.choice("zero_point", (True,), True)
    size = config.group_size(config.get("q_group_size", 128))
    inputs = max(config.choice("q_group_size", (size,), size), 0)
    form = AWQFormat(code="uint4", inputs=inputs, scale_dtype=scale_dtype, zeros_dtype=torch.uint8)
    return AWQ(form=form, left_out=config.names("modules_to_not_convert"), prefix=prefix)


def awq_codes(words: torch.Tensor) -> torch.Tensor:
    """Return codes ``[out, in]``, one an element, of a ``qweight``; or zero points."""
    fields = fields_of_words(words, 4).unflatten(1, (-1, len(FIELD_OF_OUTPUT)))
    outputs: torch.Tensor = fields[:, :, FIELD_OF_OUTPUT].flatten(1)
    return outputs.T
