"""A matrix of codes: how ``linear`` takes a quantized weight, and what its values are.

    value = code * scale                    e4m3, int8, int4 (nibble - 8), e2m1
    value = (code - zero) * scale           with ``zeros``
    value = code * scale + min              with ``mins``
    value = (d * s) * code - (dmin * m)     q4_k, q5_k: d, dmin, s and m are in ``heads``
    value = (d * s) * (code - 32)           q6_k

Values are computed in float32, each product and sum rounded to it, and rounded once to the model's
dtype. Codes are in the order of the inputs; of two 4-bit codes in a byte, the low one is first.

Source: OCP 8-bit Floating Point Specification, revision 1.0 (E4M3); OCP Microscaling Formats
Specification, version 1.0 (E2M1, E8M0); the super-blocks of 256 inputs are GGUF's K types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, Literal, NamedTuple

import torch

from mrv1.device import INTERPRET, device_info
from mrv1.kernels._base.checks import FLOAT_DTYPES, check_tensor

CodeName = Literal["e4m3", "int8", "int4", "uint4", "e2m1", "q4_k", "q5_k", "q6_k"]
"""What the bits of a code mean."""

Activations = Literal["token", "group"]
"""How inputs are quantized: one scale for each token, or one for 128 inputs of a token."""

MOST_TOKENS = 64
"""Most tokens that are multiplied by codes as they are stored, but for tiles of codes. The four
products of an 8B layer take 183 us with e4m3 codes and 201 us with int4 at 64 tokens on an H100;
widened first, 432 and 405 us at 256."""
MOST_PLAIN_TOKENS = 32
"""Most tokens that are not quantized. On an H100 the four products of an 8B layer take 115 us at
32 tokens as they are, 183 us at 64; quantized, 132 us at 64, where bfloat16 takes 168 us."""
E4M3_CAPABILITY = (8, 9)
"""The first compute capability with products of e4m3."""
BLOCKS_CAPABILITY = (9, 0)
"""The one for which the library has products of blocks."""
BLOCKS_CUDA = (12, 9)
"""The first version of CUDA whose library has them."""
BLOCK = 128
"""Rows and inputs that share a scale, where the library multiplies codes with scales of blocks."""
ALIGNED = 16
"""Inputs and outputs have to be multiples of it, for the library."""
TILES_CAPABILITY = (9, 0)
"""The one on which tiles of many tokens widen codes."""
EXPERTS_PATH = "read as stored for any number of tokens"
"""How products of experts read codes on a GPU, in words."""
SUPER_BLOCK = 256
"""Inputs of a super-block: they share one head."""


class Code(NamedTuple):
    """How the codes of one name are stored."""

    dtype: torch.dtype  # of ``codes``: one code an element, or in uint8 two
    per_byte: int  # codes in an element of ``codes``
    high_per_byte: int = 0  # codes whose high bits share a byte of ``high``; 0 = there is none
    head_bytes: int = 0  # bytes of a super-block's head; 0 = scales are in ``scales``


CODES: dict[CodeName, Code] = {
    "e4m3": Code(torch.float8_e4m3fn, 1),
    "int8": Code(torch.int8, 1),
    "int4": Code(torch.uint8, 2),
    "uint4": Code(torch.uint8, 2),
    "e2m1": Code(torch.uint8, 2),
    "q4_k": Code(torch.uint8, 2, head_bytes=16),
    "q5_k": Code(torch.uint8, 2, high_per_byte=8, head_bytes=16),
    "q6_k": Code(torch.uint8, 2, high_per_byte=4, head_bytes=18),
}
"""The codes that a weight may have."""

_TENSORS = ("codes", "scales", "zeros", "mins", "heads", "high", "order")
"""Fields of a weight that are tensors, or None."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7; 8 more is the same value, negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A matrix ``[out, in]`` of codes, or several of them, ``[..., out, in]``.

    TypeError, ValueError: a field is not as described, or fields do not fit each other. Numbers
    are not looked at: values of codes or scales that are NaN are undefined.
    """

    code: CodeName
    """What the codes mean."""
    codes: torch.Tensor
    """[..., out, in] float8_e4m3fn or int8, or [..., out, in / 2] uint8."""
    dtype: torch.dtype
    """The model's: of the inputs, and of ``dense``'s result."""
    scales: torch.Tensor | None = None
    """[..., ceil(out / rows_per_scale), ceil(in / inputs_per_scale)] float32 | float16 | bfloat16,
    or uint8: exponents of e8m0, 2^(s - 127). None = scales are in ``heads``."""
    rows_per_scale: int = 1
    """Rows that share a scale."""
    inputs_per_scale: int = 0
    """Inputs that share a scale; 0 = all."""
    zeros: torch.Tensor | None = None
    """The scales' shape, int8 | uint8: zero points. Only with int8 and uint4."""
    mins: torch.Tensor | None = None
    """The scales' shape and dtype. Only with uint4."""
    heads: torch.Tensor | None = None
    """[..., out, in / 256, bytes] uint8. q4_k, q5_k: 16 bytes, d and dmin in float16, then 6-bit
    scales and minima of 8 groups, as GGUF packs them. q6_k: 18 bytes, 16 int8 scales, then d."""
    high: torch.Tensor | None = None
    """High bits of input i. q5_k: [..., out, in / 8] uint8, bit i % 8 of byte i // 8; q6_k:
    [..., out, in / 4] uint8, bits 2 * (i % 4) and the next of byte i // 4."""
    order: torch.Tensor | None = None
    """[in] int32, a permutation: the input of each column of codes. None = 0, 1, 2, ..."""
    activations: Activations | None = None
    """How the checkpoint quantizes inputs to e4m3; None = not at all. Only with e4m3 codes and
    float32 scales, one for each row, or with "group" for 128 inputs of some rows."""

    def __post_init__(self) -> None:
        """Raise unless all fields fit each other."""
        _check(self)

    @property
    def num_in(self) -> int:
        """Number of inputs."""
        return self.codes.shape[-1] * CODES[self.code].per_byte

    @property
    def shape(self) -> torch.Size:
        """[..., out, in]."""
        return torch.Size((*self.codes.shape[:-1], self.num_in))

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        return self.codes.device

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by the names of their fields."""
        given = {name: getattr(self, name) for name in _TENSORS}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def group(self) -> int:
        """Inputs that share a scale, as a positive number."""
        return self.inputs_per_scale or self.num_in

    def dense(self) -> torch.Tensor:
        """Return the values, ``[..., out, in]`` in the model's dtype, inputs in order."""
        values = self._values().to(self.dtype)
        if self.order is None:
            return values
        dense = torch.empty_like(values)
        dense[..., self.order.long()] = values
        return dense

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """Return views of some rows; ValueError: a scale has rows inside and outside."""
        unit = self.rows_per_scale if self._grid(-2) > 1 else 1
        self._check_cut("rows", self.shape[-2], unit, start, stop)
        part = self._part(-2, start, stop, unit)
        if self.heads is not None:
            part["heads"] = self.heads[..., start:stop, :, :]
        return self._with(part)

    def inputs(self, start: int, stop: int) -> QuantizedWeight:
        """Return views of some inputs, in the order of the codes, without ``order``.

        ValueError: a scale, a super-block or a byte has inputs inside and outside.
        """
        code = CODES[self.code]
        unit = self.group if self._grid(-1) > 1 else code.per_byte
        unit = SUPER_BLOCK if code.head_bytes else unit
        self._check_cut("inputs", self.num_in, unit, start, stop)
        if start % code.per_byte or stop % code.per_byte:
            raise ValueError(f"inputs: expected whole bytes of codes, got {start} to {stop}")
        part = self._part(-1, start, stop, unit)
        part["codes"] = self.codes[..., start // code.per_byte : stop // code.per_byte]
        if self.high is not None:
            per_byte = code.high_per_byte
            part["high"] = self.high[..., start // per_byte : stop // per_byte]
        if self.heads is not None:
            blocks = slice(start // SUPER_BLOCK, stop // SUPER_BLOCK)
            part["heads"] = self.heads[..., blocks, :]
        return self._with({**part, "order": None})

    def at(self, index: int) -> QuantizedWeight:
        """Return a view of one of several matrices, by its first index; without ``order``."""
        parts: dict[str, Any] = {
            name: each[index] for name, each in self.tensors.items() if name != "order"
        }
        return self._with(parts)

    def contiguous(self) -> QuantizedWeight:
        """Return the same weight with contiguous tensors, as ``linear`` takes it."""
        return self._with({name: each.contiguous() for name, each in self.tensors.items()})

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """Return the same weight on ``device``."""
        return self._with({name: each.to(device) for name, each in self.tensors.items()})

    def _with(self, changes: Mapping[str, Any]) -> QuantizedWeight:
        return replace(self, **changes)

    def _grid(self, dim: int) -> int:
        """Return the number of scales along a dimension; one scale may be cut anywhere."""
        return 1 if self.scales is None else self.scales.shape[dim]

    def _part(self, dim: int, start: int, stop: int, unit: int) -> dict[str, torch.Tensor]:
        """Return codes, high bits and the grid of scales, cut along one dimension."""
        part = {}
        for name, tensor in self.tensors.items():
            if name in ("scales", "zeros", "mins"):
                first = start // unit
                is_shared = tensor.shape[dim] == 1
                part[name] = tensor if is_shared else tensor[_cut(dim, first, -(-stop // unit))]
            elif name in ("codes", "high"):
                part[name] = tensor[_cut(dim, start, stop)] if dim == -2 else tensor
        return part

    def _check_cut(self, name: str, size: int, unit: int, start: int, stop: int) -> None:
        if not 0 <= start < stop <= size:
            raise ValueError(f"{name}: expected 0 <= start < stop <= {size}, got {start}, {stop}")
        if start % unit or (stop % unit and stop < size):
            raise ValueError(
                f"{name}: expected a cut at multiples of {unit}, which share a scale, "
                f"got {start} to {stop}"
            )

    def _values(self) -> torch.Tensor:
        """Return the values in float32, in the order of the codes."""
        if self.heads is not None:
            return _super_block_values(self, self.heads)
        values = _code_values(self)
        if self.zeros is not None:
            values -= self._spread(self.zeros)
        if self.scales is not None:
            values *= self._spread(self.scales)
        if self.mins is not None:
            values += self._spread(self.mins)
        return values

    def _spread(self, grid: torch.Tensor) -> torch.Tensor:
        """Return one number of the grid for each code, in float32."""
        wide = exponent_values(grid) if grid is self.scales else grid.float()
        num_out, num_in = self.shape[-2:]
        if wide.shape[-1] > 1:
            wide = wide.repeat_interleave(self.group, -1)[..., :num_in]
        if wide.shape[-2] not in (1, num_out):
            wide = wide.repeat_interleave(self.rows_per_scale, -2)[..., :num_out, :]
        return wide


def _cut(dim: int, start: int, stop: int) -> tuple[EllipsisType | slice, ...]:
    """Return the index of a range of the last dimension, or (-2) of the one before it."""
    return (..., slice(start, stop), *(slice(None),) * (-1 - dim))


def quantized_path(
    device: torch.device, weights: Sequence[QuantizedWeight] = (), *, as_values: bool = False
) -> str:
    """Say in words how ``linear`` reads quantized weights on a device, or these of them.

    ``as_values`` says that products are deterministic or of float32 inputs.
    """
    if device.type == "cpu":
        return "widened for each product"
    if as_values or torch.version.hip is not None:
        return "widened for each product by a kernel"
    is_kept = device_info(device).capability == TILES_CAPABILITY
    if is_kept and not weights:
        return (
            "read as stored; blocks with minima or super-blocks widened for more than "
            f"{MOST_TOKENS} tokens"
        )
    kept = sum(map(fits_tiles, weights)) if is_kept else 0
    if weights and kept == len(weights):
        return EXPERTS_PATH
    some = f"{len(weights) - kept} of {len(weights)} matrices " if kept else ""
    return f"read as stored for up to {MOST_TOKENS} tokens, {some}widened for more"


def fits_tiles(weight: QuantizedWeight) -> bool:
    """Return whether tiles of many tokens can widen this weight's codes, where there are such."""
    if weight.dtype.itemsize != 2 or weight.scales is None or weight.mins is not None:
        return False
    if weight.codes.stride(0) % 16 or weight.codes.data_ptr() % 16 or weight.num_in % 64:
        return False
    if weight.group >= weight.num_in:
        return weight.zeros is None and weight.scales.dtype != torch.uint8
    if weight.group % 128 and weight.group not in (32, 64):
        return False
    return weight.dtype == torch.bfloat16 or weight.scales.dtype == weight.dtype


def quantizes_tokens(
    device: torch.device, dtype: torch.dtype, activations: Activations | None
) -> bool:
    """Return whether a device quantizes many tokens, for weights that fit the library."""
    if INTERPRET or activations is None or dtype != torch.bfloat16 or device.type != "cuda":
        return False
    capability = device_info(device).capability
    if torch.version.hip is not None or capability is None:
        return False
    if activations == "group":
        has_blocks = tuple(map(int, (torch.version.cuda or "0").split("."))) >= BLOCKS_CUDA
        return capability == BLOCKS_CAPABILITY and has_blocks
    return capability >= E4M3_CAPABILITY


def takes_codes(weight: QuantizedWeight, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device multiplies many tokens of a dtype by this weight as e4m3."""
    if not quantizes_tokens(device, dtype, weight.activations):
        return False
    if weight.num_in % ALIGNED or weight.shape[0] % ALIGNED:
        return False
    if weight.activations != "group":
        return True
    is_square = weight.rows_per_scale == weight.inputs_per_scale == BLOCK
    return is_square and weight.num_in % (4 * BLOCK) == 0 and weight.shape[0] % BLOCK == 0


def inputs_problem(weight: QuantizedWeight) -> str | None:
    """Say what is wrong with the number of inputs, or of those per scale, for the kernels."""
    unit = 2 * CODES[weight.code].per_byte
    if weight.num_in % unit == 0 and (weight.group % unit == 0 or weight.group >= weight.num_in):
        return None
    return (
        f"expected multiples of {unit} inputs and inputs per scale, "
        f"got {weight.num_in} and {weight.group}"
    )


def exponent_values(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in float32: of e8m0's exponents the powers of two, as ldexp has them."""
    if scales.dtype != torch.uint8:
        return scales.float()
    # Twice a power of two: the smallest, 2^-127, is subnormal, and a GPU's exp2 may flush it.
    bits = scales.to(torch.int32) << 23
    return torch.where(scales == 0, 2.0**-127, bits.view(torch.float32))


def low_and_high(packed: torch.Tensor) -> torch.Tensor:
    """Return [..., 2 * n] uint8, both codes of each byte, the low one first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def _code_values(weight: QuantizedWeight) -> torch.Tensor:
    if weight.code in ("e4m3", "int8"):
        return weight.codes.float()
    nibbles = low_and_high(weight.codes)
    if weight.code == "e2m1":
        table = torch.tensor((*E2M1, *(-value for value in E2M1)), device=nibbles.device)
        return table[nibbles.int()]
    return nibbles.float() - (8 if weight.code == "int4" else 0)


def _super_block_values(weight: QuantizedWeight, heads: torch.Tensor) -> torch.Tensor:
    codes = low_and_high(weight.codes)
    if weight.high is not None:
        count = CODES[weight.code].high_per_byte
        shifts = torch.arange(0, 8, 8 // count, dtype=torch.uint8, device=heads.device)
        high = weight.high[..., None] >> shifts & (1 if count == 8 else 3)
        codes = codes | high.flatten(-2) << 4
    if weight.code == "q6_k":
        scales, d = heads[..., :16].view(torch.int8), heads[..., 16:].view(torch.float16)
        steps = (d.float() * scales.float())[..., None]
        blocks = codes.float().unflatten(-1, (-1, 16, 16)) - 32
        values: torch.Tensor = steps * blocks
        return values.flatten(-3)
    d, dmin = heads[..., :4].view(torch.float16).float().unsqueeze(-1).unbind(-2)
    scales, mins = group_numbers(heads[..., 4:])
    blocks = codes.float().unflatten(-1, (-1, 8, 32))
    values = (d * scales)[..., None] * blocks - (dmin * mins)[..., None]
    return values.flatten(-3)


def group_numbers(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and minima, [..., 8] each, of the last 12 bytes of a q4_k or q5_k head."""
    first, second, third = packed.unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((first & 63, (third & 15) | (first >> 2 & 48)), -1)
    mins = torch.cat((second & 63, (third >> 4) | (second >> 2 & 48)), -1)
    return scales, mins


def _check(weight: QuantizedWeight) -> None:
    """Raise unless the fields are as described."""
    code = CODES.get(weight.code)
    if code is None:
        raise ValueError(f"weight.code: expected one of {', '.join(CODES)}, got {weight.code!r}")
    if weight.dtype not in (*FLOAT_DTYPES, torch.float64):
        raise TypeError(f"weight.dtype: expected a floating-point dtype, got {weight.dtype}")
    check_tensor("weight.codes", weight.codes, dtype=code.dtype)
    if weight.codes.dim() < 2 or weight.codes.numel() == 0:
        raise ValueError(
            "weight.codes: expected at least one row and column, "
            f"got shape {list(weight.codes.shape)}"
        )
    for name, tensor in weight.tensors.items():
        if tensor.device != weight.device:
            raise ValueError(
                f"weight.{name}: expected device {weight.device}, got {tensor.device}"
            )
    if code.head_bytes:
        _check_super_blocks(weight, code)
    else:
        _check_grid(weight)
    for name in ("heads", "high") if not code.head_bytes else ("scales", "zeros", "mins"):
        if getattr(weight, name) is not None:
            raise ValueError(f"weight.{name}: expected None for {weight.code} codes, got a tensor")
    if weight.order is not None:
        check_tensor("weight.order", weight.order, shape=(weight.num_in,), dtype=torch.int32)
    _check_activations(weight)


def _check_super_blocks(weight: QuantizedWeight, code: Code) -> None:
    if weight.num_in % SUPER_BLOCK:
        raise ValueError(
            f"weight.codes: expected a multiple of {SUPER_BLOCK} inputs for {weight.code}, "
            f"got {weight.num_in}"
        )
    lead = tuple(weight.codes.shape[:-1])
    shape = (*lead, weight.num_in // SUPER_BLOCK, code.head_bytes)
    check_tensor("weight.heads", weight.heads, shape=shape, dtype=torch.uint8)
    if code.high_per_byte:
        shape = (*lead, weight.num_in // code.high_per_byte)
        check_tensor("weight.high", weight.high, shape=shape, dtype=torch.uint8)
    elif weight.high is not None:
        raise ValueError(f"weight.high: expected None for {weight.code} codes, got a tensor")


def _check_grid(weight: QuantizedWeight) -> None:
    if weight.rows_per_scale < 1 or weight.inputs_per_scale < 0:
        raise ValueError(
            "weight.rows_per_scale, weight.inputs_per_scale: expected at least 1 and 0, got "
            f"{weight.rows_per_scale} and {weight.inputs_per_scale}"
        )
    *lead, num_out, num_in = weight.shape
    shape = (*lead, -(-num_out // weight.rows_per_scale), -(-num_in // weight.group))
    dtypes = FLOAT_DTYPES if weight.code != "e2m1" else (*FLOAT_DTYPES, torch.uint8)
    check_tensor("weight.scales", weight.scales, shape=shape, dtype=dtypes)
    allowed = {"zeros": ("int8", "uint4"), "mins": ("uint4",)}
    for name, codes in allowed.items():
        if getattr(weight, name) is None:
            continue
        if weight.code not in codes:
            raise ValueError(f"weight.{name}: expected None for {weight.code}, got a tensor")
        dtype: Sequence[torch.dtype] = (torch.int8, torch.uint8)
        if name == "mins" and weight.scales is not None:
            dtype = (weight.scales.dtype,)
        check_tensor(f"weight.{name}", getattr(weight, name), shape=shape, dtype=tuple(dtype))
    if weight.zeros is not None and weight.mins is not None:
        raise ValueError("weight.zeros, weight.mins: expected one of them, got both")


def _check_activations(weight: QuantizedWeight) -> None:
    if weight.activations not in (None, "token", "group"):
        raise ValueError(
            f"weight.activations: expected None, 'token' or 'group', got {weight.activations!r}"
        )
    is_row = weight.group >= weight.num_in and weight.rows_per_scale == 1
    if weight.activations == "group":
        is_row = weight.inputs_per_scale in (0, 128)
    if weight.activations is not None and (
        weight.code != "e4m3"
        or not is_row
        or weight.order is not None
        or weight.tensors["scales"].dtype != torch.float32
    ):
        raise ValueError(
            "weight.activations: expected None but for e4m3 codes with float32 scales of rows, or "
            f"of 128 inputs with 'group', in order, got {weight.activations!r}"
        )
