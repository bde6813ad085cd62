"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

    qweight  [in * bits / 32, out] int32: a word has neighbouring inputs, the first one lowest
    qzeros   [groups, out * bits / 32] int32: a word has neighbouring outputs
    scales   [groups, out]
    g_idx    [in] int32: the group of each input
    bias     [out], also where the model has none: AutoGPTQ stores zeros then

The value of a code is ``(code - zero) * scale``. Version 1 stores zero points one lower: whole
words were subtracted, so that a zero point 0 borrows from the field above, and the sum of words
takes it back. Version 2 stores zero points.

All linear modules of the layers are quantized, or those whose names end as one of
``modules_in_block_to_quantize``. The first pattern of ``dynamic`` that matches the beginning of a
name changes the module's settings, or leaves it out (``-:``): GPTQModel gives the head, if that
is quantized (``lm_head``), 8 bits so.

Source: GPTQModel 7.7 (github.com/ModelCloud/GPTQModel) and AutoGPTQ 0.7: packing, versions,
patterns; optimum 2.3: ``modules_in_block_to_quantize``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from mrv1.errors import ConfigError
from mrv1.kernels.layers.quantized import CODES, QuantizedWeight
from mrv1.models.places import Place
from mrv1.models.quantization.formats import ModuleFormat, ModulePart, group_slice, no_problem
from mrv1.models.quantization.packing import (
    HEAD_MODULE,
    LAYERS,
    ColumnPlace,
    check_shape,
    fields_of_words,
    order_place,
    scale_columns,
    whole_words,
)
from mrv1.models.quantization.scheme import Quantization, stored_name
from mrv1.models.quantization.settings import Settings, pattern

METHOD = "gptq"
WORD = 32
"""Bits of a word of codes or zero points."""
BITS = (4, 8)
"""Bits of a code that are read; GPTQ has 2 and 3 too."""
VERSIONS = {"gptq": 1, "gptq_v2": 2}
"""``checkpoint_format`` -> version of the zero points."""

_ONES = {4: 0x11111111, 8: 0x01010101}
"""A word with 1 in each field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTQFormat(ModuleFormat):
    """A module that GPTQ has quantized."""

    bits: int
    version: int

    def places(self, part: ModulePart, weight: QuantizedWeight) -> dict[str, Place]:
        """Return the places of a module's stored tensors; see ``ModuleFormat``."""
        num_out, num_in = part.shape
        check_shape(part, group_size=self.inputs, fields=WORD // self.bits)
        if self.has_order and part.inputs != slice(0, num_in):
            raise ConfigError(
                f"tensor_parallel_size: expected 1 with desc_act, where the inputs of a group are "
                f"anywhere among the {num_in} of {part.name}"
            )
        fields = WORD // self.bits
        own = partial(ColumnPlace, module=part.name, dtypes=(torch.int32,))
        groups, words = group_slice(part, self.inputs), whole_words(part, "rows", fields)
        num_groups = num_in // (self.inputs or num_in)
        return {
            "g_idx": order_place(part, weight.order, self.inputs, is_plain=not self.has_order),
            "scales": scale_columns(part, weight, num_groups, groups),
            "qzeros": own(
                target=weight.zeros,
                num_rows=part.rows.stop - part.rows.start,
                shape=(num_groups, num_out // fields),
                part=(groups, words),
                convert=partial(gptq_zeros, bits=self.bits, version=self.version),
                problem=no_problem
                if self.zeros_dtype is not None
                else partial(_middle_problem, bits=self.bits, version=self.version),
            ),
            "qweight": own(
                target=weight.codes,
                num_rows=part.rows.stop - part.rows.start,
                shape=(num_in // fields, num_out),
                part=(whole_words(part, "inputs", fields), part.rows),
                convert=partial(gptq_codes, bits=self.bits),
                columns=fields,
                per_byte=CODES[self.code].per_byte,
                order=weight.order,
            ),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTQ(Quantization):
    """``quantization_config`` of AutoGPTQ, GPTQModel and transformers."""

    method: ClassVar[str] = METHOD
    has_vocabulary: ClassVar[bool] = True
    has_zero_biases: ClassVar[bool] = True

    form: GPTQFormat
    """The format of a module that no pattern matches."""
    overrides: tuple[tuple[str, GPTQFormat | None], ...] = ()
    """Patterns, of which the first that matches decides; None = not quantized."""
    endings: tuple[str, ...] = ()
    """Endings of the names of quantized modules; () = all of the layers."""
    has_head: bool = False
    """Whether the head is quantized too."""
    prefix: str = "model."
    """Beginning of the checkpoint's names of layers, which the patterns match."""

    @property
    def formats(self) -> tuple[GPTQFormat, ...]:
        """The formats of modules, each once."""
        others = (form for _, form in self.overrides if form is not None)
        return tuple(dict.fromkeys((self.form, *others)))

    def _module(self, name: str) -> GPTQFormat | None:
        """Return the format of a linear module; see ``Quantization``."""
        own = stored_name(name, self.prefix)
        if name == HEAD_MODULE:
            if not self.has_head:
                return None
        elif not name.startswith(LAYERS) or not name.endswith(self.endings or ("",)):
            return None
        matching = (form for text, form in self.overrides if re.match(text, own))
        return next(matching, self.form)


def read_gptq(config: Settings, *, scale_dtype: torch.dtype, prefix: str = "model.") -> GPTQ:
    """Return a checkpoint's quantization; arguments and errors as ``reading.Reader``."""
    given = {key for key in ("format", "checkpoint_format") if config.get(key) is not None}
    versions = {config.choice(key, (*VERSIONS,), "gptq") for key in given} or {"gptq"}
    if len(versions) > 1:
        raise config.error("checkpoint_format", f"{config.get('format')!r}, as format is")
    config.choice("pack_dtype", ("int32",), "int32")
    layers = f"{prefix}layers"
    config.choice("block_name_to_quantize", (layers,), layers)
    config.refuse("is_marlin_format", "adapter", "rotation")
    form = _format(config, VERSIONS[versions.pop()], scale_dtype)
    overrides = []
    for name, setting in config.parts("dynamic").items():
        is_left_out, text = name.startswith("-:"), name.removeprefix("-:").removeprefix("+:")
        pattern(setting.name, text)
        each = _format(setting, form.version, scale_dtype, default=form)
        overrides.append((text, None if is_left_out else each))
    return GPTQ(
        form=form,
        overrides=tuple(overrides),
        endings=_endings(config),
        has_head=config.choice("lm_head", (True, False), False),
        prefix=prefix,
    )


def _format(
    config: Settings, version: int, scale_dtype: torch.dtype, default: GPTQFormat | None = None
) -> GPTQFormat:
    """Return the format that settings describe, or change of ``default``."""
    bits = config.choice("bits", BITS, default and default.bits)
    size = config.group_size(128 if default is None else default.inputs or -1)
    flags = (True, False)
    is_plain = not config.choice("desc_act", flags, default is not None and default.has_order)
    has_zeros = not config.choice("sym", flags, default is None or default.zeros_dtype is None)
    return GPTQFormat(
        code="int8" if bits == 8 else "uint4" if has_zeros else "int4",
        inputs=max(size, 0),
        scale_dtype=scale_dtype,
        zeros_dtype=None if not has_zeros else torch.int8 if bits == 8 else torch.uint8,
        has_order=not is_plain and size > 0,
        bits=bits,
        version=version,
    )


def _endings(config: Settings) -> tuple[str, ...]:
    """Return ``modules_in_block_to_quantize``: lists of names, of which all are quantized."""
    lists, key = config.get("modules_in_block_to_quantize", ()), "modules_in_block_to_quantize"
    if isinstance(lists, str) or not isinstance(lists, Sequence):
        raise config.error(key, "lists of names")
    names = [name for each in lists for name in (each if isinstance(each, list) else [each])]
    if not all(isinstance(name, str) for name in names):
        raise config.error(key, "lists of names")
    return tuple(names)


def gptq_codes(qweight: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Return codes ``[out, in]`` of a ``qweight`` ``[in * bits / 32, out]``, one an element.

    Codes of 8 bits are 128 less, as int8.
    """
    return _centred(fields_of_words(qweight.T, bits), bits)


def gptq_zeros(qzeros: torch.Tensor, *, bits: int, version: int) -> torch.Tensor:
    """Return zero points ``[out, groups]`` of ``qzeros``; those of 8 bits are 128 less."""
    words = qzeros + _ONES[bits] if version == 1 else qzeros  # wraps around, as GPTQModel's does
    return _centred(fields_of_words(words, bits), bits).T


def _middle_problem(qzeros: torch.Tensor, *, bits: int, version: int) -> str | None:
    """Say what is wrong with zero points of symmetric codes: they are half of the range."""
    half, zeros = 2 ** (bits - 1), gptq_zeros(qzeros, bits=bits, version=version).int()
    zeros = zeros + 128 if bits == 8 else zeros
    if bool((zeros == half).all()):
        return None
    got = int(zeros[zeros != half][0])
    return f"expected zero points {half} where sym is true, got {got} in format version {version}"


def _centred(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return uint8 codes; those of 8 bits 128 less, as int8."""
    return (codes ^ 128).view(torch.int8) if bits == 8 else codes
