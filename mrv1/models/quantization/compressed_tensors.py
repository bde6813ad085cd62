"""Checkpoints of the compressed-tensors library: FP8, INT8 and packed INT4 and INT8 weights.

A module is quantized if a target of a group matches it and nothing of ``ignore`` does: a target is
a module's name, ``re:`` and a pattern that matches from the beginning of the name, or the name of
a class. Of several targets a name is preferred to a pattern, and both to a class.

    float-quantized, naive-quantized   weight [out, in] float8_e4m3fn or int8
    int-quantized                      weight [out, in] int8
    pack-quantized                     weight_packed [out, in * bits / 32] int32, a code plus half
                                       of the range in each group of bits, the lowest first

Source: compressed-tensors 0.20 (github.com/vllm-project/compressed-tensors): names, matching,
packing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal, get_args

import torch

from mrv1.errors import ConfigError
from mrv1.kernels.layers.quantized import Activations, CodeName, QuantizedWeight, low_and_high
from mrv1.models.places import Place
from mrv1.models.quantization.formats import (
    SCALE_DTYPES,
    ModuleFormat,
    ModulePart,
    checked_place,
    codes_place,
    group_slice,
    no_problem,
    scale_place,
    scale_problem,
)
from mrv1.models.quantization.packing import order_place
from mrv1.models.quantization.scheme import Quantization, stored_name
from mrv1.models.quantization.settings import Settings, pattern

METHOD = "compressed-tensors"

Strategy = Literal["tensor", "channel", "group", "block"]

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
"""Formats that are read; all others are refused by name."""
PACKED_BITS = (4, 8)
WORD = 32
"""Bits of a packed word."""
_LINEAR = ("Linear", "Module")
"""Classes of a linear module that a target may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedFormat(ModuleFormat):
    """A module's tensors as the library compresses them."""

    where: str = field(compare=False)
    """What errors call the group's weights."""
    strategy: Strategy
    """What shares a scale."""
    packed_bits: int = 0
    """Bits of a code in a packed word; 0 = codes are not packed."""
    has_zeros: bool = False
    """Whether zero points are stored."""
    input_tensors: tuple[str, ...] = ()
    """Static scales and zero points of activations."""

    def places(self, part: ModulePart, weight: QuantizedWeight) -> dict[str, Place]:
        """Return the places of a module's tensors."""
        num_in = part.shape[1]
        if self.strategy == "group" and num_in % self.inputs:
            raise ConfigError(
                f"{self.where}.group_size: expected a divisor of the {num_in} inputs of "
                f"{part.name}, got {self.inputs}"
            )
        if self.packed_bits == 4 and num_in % 2:
            raise ConfigError(
                f"{self.where}.num_bits: expected 8 for the {num_in} inputs of {part.name}, an "
                "odd number, got 4"
            )
        shape = (1,) if self.strategy == "tensor" else None
        places = {
            "weight_scale": scale_place(
                part, weight.scales, weight, rows=self.rows, inputs=self.inputs, shape=shape
            )
        }
        if self.has_zeros:
            places["weight_zero_point"] = self._zeros(part, weight)
        if weight.order is not None:
            places["weight_g_idx"] = order_place(part, weight.order, self.inputs)
        for name in self.input_tensors:
            is_scale = name.endswith("scale")
            places[name] = checked_place(
                part, (1,), dtypes=SCALE_DTYPES if is_scale else (torch.int8,),
                problem=scale_problem if is_scale else no_problem,
            )  # fmt: skip
        if not self.packed_bits:
            places["weight"] = codes_place(part, weight)
            return places
        places["weight_shape"] = checked_place(
            part, (2,), dtypes=(torch.int64, torch.int32),
            problem=partial(_shape_problem, shape=part.shape),
        )  # fmt: skip
        places["weight_packed"] = self._packed(part, weight)
        return places

    def _packed(self, part: ModulePart, weight: QuantizedWeight) -> Place:
        num_out, num_in = part.shape
        per_word, order = WORD // self.packed_bits, weight.order
        own = part.inputs
        if own.start % per_word or (order is not None and own != slice(0, num_in)):
            what = "one rank" if order is not None else f"inputs from a multiple of {per_word}"
            raise ConfigError(
                f"tensor_parallel_size: expected {what} for the packed {part.name}, "
                f"got inputs {own.start} to {own.stop} of {num_in}"
            )
        words = slice(own.start // per_word, -(-own.stop // per_word))
        return Place(
            target=weight.codes,
            shape=(num_out, -(-num_in // per_word)),
            part=(part.rows, words),
            dtypes=(torch.int32,),
            convert=partial(
                _unpacked, bits=self.packed_bits, num_in=own.stop - own.start, order=order
            ),
            module=part.name,
        )

    def _zeros(self, part: ModulePart, weight: QuantizedWeight) -> Place:
        """Return the place of zero points: packed along the rows if the codes are packed."""
        if not self.packed_bits or self.strategy == "tensor":
            return scale_place(
                part, weight.zeros, weight, rows=self.rows, inputs=self.inputs,
                shape=(1,) if self.strategy == "tensor" else None,
                zeros_from=8 if self.code == "uint4" else 0,
            )  # fmt: skip
        per_word = WORD // self.packed_bits
        num_groups = part.shape[1] // self.inputs if self.inputs else 1
        words = slice(part.rows.start // per_word, -(-part.rows.stop // per_word))
        return Place(
            target=weight.zeros,
            shape=(-(-part.shape[0] // per_word), num_groups),
            part=(words, group_slice(part, self.inputs)),
            dtypes=(torch.int32,),
            convert=partial(_unpacked_rows, bits=self.packed_bits),
            rows_per_row=per_word,
            first_row=part.rows.start - words.start * per_word,
            problem=no_problem,
            module=part.name,
        )


def _shape_problem(values: torch.Tensor, *, shape: tuple[int, int]) -> str | None:
    return None if values.tolist() == [*shape] else f"expected {[*shape]}, got {values.tolist()}"


def _unpacked(
    words: torch.Tensor, *, bits: int, num_in: int, order: torch.Tensor | None
) -> torch.Tensor:
    """Return codes as ``QuantizedWeight`` has them, ``num_in`` of each row."""
    codes = words.contiguous().view(torch.uint8)
    if bits == 8:
        codes = (codes[:, :num_in] ^ 128).view(torch.int8)
        return codes if order is None else codes[:, order.long()]
    if order is None:
        return codes[:, : num_in // 2]
    nibbles = low_and_high(codes)[:, order.long()]
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4


def _unpacked_rows(words: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Return zero points, of which words hold those of several rows."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=words.device)
    packed = words[:, None, :] >> shifts[:, None]
    zeros: torch.Tensor = (packed & (2**bits - 1)).flatten(0, 1)
    return zeros - 128 if bits == 8 else zeros


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedTensors(Quantization):
    """``quantization_config`` of the compressed-tensors library."""

    method: ClassVar[str] = METHOD

    targets: tuple[tuple[str, int], ...]
    """Each target once, in order, and the group whose format its modules have."""
    groups: tuple[CompressedFormat, ...]
    ignore: tuple[str, ...] = ()
    prefix: str = "model."
    """Beginning of the names of the checkpoint's layers."""

    @property
    def formats(self) -> tuple[CompressedFormat, ...]:
        """The formats of the groups, each once."""
        return tuple(dict.fromkeys(self.groups))

    def _holds(self, name: str, kind: str) -> bool:
        """Whether a target matches a module of class ``kind``, and nothing that is ignored."""
        return self._group(name, (kind, "Module")) is not None

    def _module(self, name: str) -> CompressedFormat | None:
        """Return the format of a linear module."""
        index = self._group(name, _LINEAR)
        return None if index is None else self.groups[index]

    def _group(self, name: str, classes: tuple[str, ...]) -> int | None:
        own = stored_name(name, self.prefix)
        if any(_matches(own, classes, each) for each in self.ignore):
            return None
        matching = [each for each in self.targets if _matches(own, classes, each[0])]
        # A target that is a name comes first, then patterns, both by the alphabet; then classes.
        first = min(matching, key=lambda each: _rank(own, each[0]), default=None)
        return None if first is None else first[1]


def _matches(name: str, classes: tuple[str, ...], target: str) -> bool:
    return _matches_name(name, target) or target in classes


def _matches_name(name: str, target: str) -> bool:
    if target.startswith("re:"):
        return pattern("quantization_config", target[3:]).match(name) is not None
    return target == name


def _rank(name: str, target: str) -> tuple[bool, bool, str]:
    return not _matches_name(name, target), "re:" in target, target


def read_compressed_tensors(
    config: Settings, *, scale_dtype: torch.dtype, prefix: str
) -> CompressedTensors | None:
    """Return a checkpoint's quantization; None: it quantized only an fp8 cache.

    ``scale_dtype`` is that of the stored scales. ConfigError: something that is not read.
    """
    config.refuse("transform_config", "moe_sparsity_config")
    sparsity = config.part("sparsity_config")
    if sparsity is not None and sparsity.get("format", "dense") != "dense":
        raise sparsity.error("format", "'dense'")
    cache = config.part("kv_cache_scheme")
    if cache is not None and (cache.get("type"), cache.get("num_bits")) != ("float", 8):
        raise config.error("kv_cache_scheme", "one of 8 bits of type float")
    groups = config.parts("config_groups")
    if not groups:
        if cache is None:
            raise config.error("config_groups", "at least one group")
        return None
    # Older versions say "frozen"; the dtypes of tensors show that they are compressed.
    config.choice("quantization_status", ("compressed", "frozen"), "compressed")
    of_all, formats = config.get("format"), []
    targets: dict[str, int] = {}
    for index, group in enumerate(groups.values()):
        formats.append(_format(group, of_all, scale_dtype))
        targets |= dict.fromkeys(group.names("targets"), index)
    ignore = config.names("ignore")
    for each in (*targets, *ignore):
        if each.startswith("re:"):
            pattern(config.name, each[3:])
    return CompressedTensors(
        targets=tuple(targets.items()), groups=tuple(formats), ignore=ignore, prefix=prefix
    )


def _format(group: Settings, of_all: object, scale_dtype: torch.dtype) -> CompressedFormat:
    stored = group.get("format", of_all)
    if stored not in FORMATS:
        expected = ", ".join(FORMATS)
        raise ConfigError(f"{group.name}.format: expected one of {expected}, got {stored!r}")
    group.refuse("output_activations")
    weights = group.part("weights")
    if weights is None:
        raise group.error("weights", "a scheme")
    weights.refuse("dynamic")
    strategy, rows, inputs = _shares(weights)
    code, packed_bits, has_zeros = _code(weights, stored)
    activations, input_tensors = _activations(group, code, inputs)
    zeros = None
    if has_zeros:
        zeros = torch.uint8 if code == "uint4" else torch.int8
    order = weights.choice("actorder", (None, "weight", "static", "group", "dynamic", True, False))
    has_order = order in ("group", "dynamic") or order is True
    if has_order and (strategy != "group" or not packed_bits):
        raise weights.error("actorder", "none but with packed groups")
    return CompressedFormat(
        code=code,
        rows=rows,
        inputs=inputs,
        scale_dtype=scale_dtype,
        zeros_dtype=zeros,
        has_order=has_order,
        activations=activations,
        where=weights.name,
        strategy=strategy,
        packed_bits=packed_bits,
        has_zeros=has_zeros,
        input_tensors=input_tensors,
    )


def _shares(weights: Settings) -> tuple[Strategy, int, int]:
    """Return the strategy, and the rows and inputs that share a scale (0 = all)."""
    size = weights.get("group_size")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy: Strategy = weights.choice("strategy", STRATEGIES, default)
    if strategy == "group":
        return strategy, 1, weights.count("group_size")
    if strategy == "block":
        if re.fullmatch(r"\d+x\d+", str(structure := weights.get("block_structure"))):
            weights = Settings(
                weights.name, {"block_structure": [*map(int, structure.split("x"))]}
            )
        return strategy, *weights.pair("block_structure")
    return strategy, 0 if strategy == "tensor" else 1, 0


def _code(weights: Settings, stored: str) -> tuple[CodeName, int, bool]:
    """Return the code, its bits in packed words (0 = not packed), and if there are zero points."""
    kind = weights.choice("type", ("int", "float"), "int")
    is_symmetric = weights.choice("symmetric", (True, False), True)
    expected = {"float-quantized": "float", "int-quantized": "int", "pack-quantized": "int"}
    if kind != expected.get(stored, kind):
        raise weights.error("type", f"{expected[stored]!r} in the format {stored}")
    bits = weights.get("num_bits", 8)
    if kind == "float":
        weights.choice("num_bits", (8,), 8)
        if not is_symmetric:
            raise weights.error("symmetric", "true for floating-point codes")
        return "e4m3", 0, False
    if stored != "pack-quantized":
        if type(bits) is not int or not 1 <= bits <= 8:
            raise weights.error("num_bits", "1 to 8")
        return "int8", 0, not is_symmetric
    weights.choice("num_bits", PACKED_BITS, 8)
    if bits == 8:
        return "int8", 8, not is_symmetric
    return ("int4" if is_symmetric else "uint4"), 4, not is_symmetric


def _activations(
    group: Settings, code: CodeName, inputs: int
) -> tuple[Activations | None, tuple[str, ...]]:
    """Return how inputs are quantized to e4m3, and the tensors of static scales.

    Each token gets a scale of its own, also where the checkpoint has a static one. Integer codes,
    codes with scales of groups, and blocks but those of 128 inputs, as many as share a scale of a
    token, are multiplied by inputs as they are.
    """
    args = group.part("input_activations")
    if args is None:
        return None, ()
    tensors = []
    if not args.choice("dynamic", (True, False), False):
        args.choice("strategy", ("tensor",), "tensor")
        tensors.append("input_scale")
        if not args.choice("symmetric", (True, False), True):
            tensors.append("input_zero_point")
    number = args.choice("type", ("int", "float"), "int"), args.get("num_bits", 8)
    if (*number, code) != ("float", 8, "e4m3"):
        return None, tuple(tensors)
    is_grouped = args.get("strategy") == "group" and args.get("group_size") == inputs == 128
    kind: Activations | None = None if inputs else "token"
    return ("group" if is_grouped else kind), tuple(tensors)
