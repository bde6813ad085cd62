"""GGUF files whose blocks are kept: the matrices of layers stay as small as they are in the file.

A tensor ``NAME.weight`` of a type that is kept is read as ``NAME.blocks``, ``[out, blocks,
bytes]`` uint8: the bytes of the file, with rows in Hugging Face's order. Each block goes into the
fields of a ``QuantizedWeight``, those of embedding and head too. Tensors of other types are
dequantized, and an embedding in MXFP4, whose rows are not looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from mrv1.errors import ConfigError
from mrv1.kernels.layers.quantized import CODES, QuantizedWeight
from mrv1.models.places import Place
from mrv1.models.quantization.formats import ModuleFormat, ModulePart
from mrv1.models.quantization.ggml_blocks import BLOCK_TYPES, Fields
from mrv1.models.quantization.mxfp4 import NAN
from mrv1.models.quantization.scheme import Quantization

METHOD = "gguf"
BLOCKS = "blocks"
"""End of the name of a tensor whose blocks are kept, in place of ``weight``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksPlace(Place):
    """The place of a matrix of blocks, which fill several tensors of a weight."""

    weight: QuantizedWeight
    fields: Callable[[torch.Tensor], Fields]
    """From stored rows to rows of the weight's tensors."""

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the weight."""
        return tuple(self.weight.tensors.values())

    @torch.no_grad()
    def fill(self, values: torch.Tensor, first: int = 0) -> None:
        """Write rows of this rank's part; ConfigError: a scale is no number."""
        tensors, fields = self.weight.tensors, self.fields(values.to(self.weight.device))
        if (problem := _problem_of(fields)) is not None:
            raise ConfigError(f"{self.module}.{BLOCKS}: {problem}")
        for name, rows in fields.items():
            tensors[name][first : first + len(rows)].copy_(rows)

    def problem_of(self, values: torch.Tensor) -> str | None:
        """Say what is wrong with scales: an update checks all before it writes any."""
        return _problem_of(self.fields(values))

    def pad(self) -> None:
        """Write zeros after the rows that this rank has."""
        for tensor in self.memory:
            tensor[self.part[0].stop - self.part[0].start :].zero_()


def _problem_of(fields: Fields) -> str | None:
    for name in fields.keys() & {"scales", "mins", "heads"}:
        if not bool(_are_numbers(fields[name]).all()):
            return f"expected finite {name} of blocks, got another"
    return None


def _are_numbers(rows: torch.Tensor) -> torch.Tensor:
    """Return whether scales, minima, exponents or the numbers of heads are finite."""
    if rows.dtype == torch.float16:
        return rows.isfinite()
    if rows.dim() == 2:  # exponents, of which the largest stands for NaN
        return rows != NAN
    halves = rows[..., -2:] if rows.shape[-1] == CODES["q6_k"].head_bytes else rows[..., :4]
    return halves.contiguous().view(torch.float16).isfinite()


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFormat(ModuleFormat):
    """A matrix of blocks of one type."""

    kind: str
    """A name of ``BLOCK_TYPES``."""

    @staticmethod
    def of(kind: str) -> GGUFFormat:
        """Return the format of a type of blocks."""
        block = BLOCK_TYPES[kind]
        dtype = torch.uint8 if block.code == "e2m1" else torch.float16
        has_heads = CODES[block.code].head_bytes > 0
        return GGUFFormat(
            code=block.code,
            inputs=block.num_inputs,
            scale_dtype=None if has_heads else dtype,
            has_mins=kind == "Q4_1",
            kind=kind,
        )

    def places(self, part: ModulePart, weight: QuantizedWeight) -> dict[str, Place]:
        """Return the place of the blocks; see ``ModuleFormat``."""
        block, (num_out, num_in) = BLOCK_TYPES[self.kind], part.shape
        return {
            BLOCKS: BlocksPlace(
                target=weight.codes,
                shape=(num_out, num_in // block.num_inputs, block.num_bytes),
                part=(part.rows, part.groups(block.num_inputs), slice(0, block.num_bytes)),
                dtypes=(torch.uint8,),
                module=part.name,
                weight=weight,
                fields=block.fields,
            )
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFBlocks(Quantization):
    """The types of a file's matrices."""

    method: ClassVar[str] = METHOD
    has_vocabulary: ClassVar[bool] = True

    kinds: tuple[tuple[str, str], ...]
    """Modules whose blocks are kept, and the type of each."""
    dequantized: tuple[tuple[str, int, int], ...] = ()
    """Types whose blocks are not kept, how many tensors have them, and how many bytes in the
    file."""
    _by_module: dict[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index modules: those of experts are tens of thousands."""
        object.__setattr__(self, "_by_module", dict(self.kinds))

    @property
    def formats(self) -> tuple[GGUFFormat, ...]:
        """The formats of modules, each once."""
        return tuple(GGUFFormat.of(kind) for kind in dict.fromkeys(kind for _, kind in self.kinds))

    def _module(self, name: str) -> GGUFFormat | None:
        """Return the format of a module; None = it is dequantized."""
        kind = self._by_module.get(name)
        return None if kind is None else GGUFFormat.of(kind)

    def describe(self) -> str:
        """Return which types are kept in blocks, and which are dequantized, in words."""
        kept = ", ".join(dict.fromkeys(kind for _, kind in self.kinds))
        text = f"{METHOD}: blocks of {kept}"
        for kind, count, nbytes in self.dequantized:
            tensors = "tensor" if count == 1 else "tensors"
            text += f"; {count} {tensors} of {kind} ({nbytes / 2**20:.1f} MiB) dequantized"
        return text
