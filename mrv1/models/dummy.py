"""Made-up weights of a checkpoint of which only ``config.json`` is there: to measure a model."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from math import floor, log2, sqrt

import torch

from mrv1.errors import ConfigError
from mrv1.kernels.layers.quantized import CodeName, QuantizedWeight
from mrv1.models.config import ModelConfig
from mrv1.models.parallel import ParallelContext
from mrv1.models.places import Place, same, whole
from mrv1.models.quantization import ModulePart
from mrv1.models.weights import ModelWeights, checkpoint_places, empty_weights, quantized_modules

LARGEST: dict[CodeName, float] = {"e4m3": 448, "int8": 127, "int4": 7, "uint4": 7, "e2m1": 7}
"""The largest made-up code, or its distance from zero."""
CHUNK = 2**24
"""Values that are made at once: their bits and their float32 take 64 MiB each."""

_STEPS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))
_LAST_SHIFT = 16
"""The finalizer of MurmurHash3: shifts and factors after which every bit depends on all bits."""


def dummy_weights(
    config: ModelConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    parallel: ParallelContext,
) -> ModelWeights:
    """Return a rank's part of made-up weights, each value made where it is kept.

    A value of a matrix is a hash of its tensor's name, its row and its column: whatever the
    number of ranks, together they have the same model. Values are uniform with mean 0 and
    standard deviation ``fan_in^-0.5``, so that activations and logits are about as large as a
    trained model's; norms are 1, biases 0. Of quantized matrices the codes are made so.
    """
    own = parallel.shard(config)
    weights = empty_weights(own, device, dtype, vocab_rows=parallel.vocab_rows(config.vocab_size))
    places = checkpoint_places(own, weights, whole=config, parallel=parallel)
    for name, place in places.items():
        if place.module is None:
            _make_up(name, place)
    for _, module, weight in quantized_modules(own, weights, whole=config, parallel=parallel):
        if weight.codes.dim() == 3:
            _make_stack(module, weight, places[f"{module.name}_blocks"])
        else:
            _make_codes(module, weight)
    return weights


def made_up_tensors(
    config: ModelConfig, *, device: torch.device | str, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a checkpoint's tensors with the values of ``dummy_weights``, one after the other.

    ConfigError: the model's tensors are stored in another way than they are kept.
    """
    places = checkpoint_places(config, empty_weights(config, "meta", dtype))
    stored = [
        name
        for name, place in places.items()
        if place.target is None or place.module is not None or place.convert is not same
    ]
    if stored:
        raise ConfigError(
            f"made-up tensors: expected a model that is kept as it is stored, got {stored[0]}"
        )
    for name, place in places.items():
        if (like := place.target) is not None:
            tensor = torch.empty(place.shape, dtype=like.dtype, device=device)
            _make_up(name, replace(place, target=tensor, part=whole(place.shape)))
            yield name, tensor


def _make_up(name: str, place: Place) -> None:
    """Fill the place of a tensor of numbers, part by part."""
    target = place.target
    if target is None:
        return
    if target.dim() == 1 or name.endswith("bias"):
        target.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    place.pad()
    if target.dim() == 3:  # experts; inputs come before outputs
        for expert in range(len(target)):
            _, inputs, outputs = place.part
            values = _uniform(f"{name}.{expert}", inputs, outputs, target.device)
            place.fill(values[None] * _bound(place.shape[1]), expert)
        return
    rows, *columns = place.part
    step = max(CHUNK // place.shape[1], 1)
    for first in range(rows.start, rows.stop, step):
        part = slice(first, min(first + step, rows.stop))
        values = _uniform(name, part, columns[0], target.device) * _bound(place.shape[1])
        place.fill(values, first - rows.start)


def _make_codes(module: ModulePart, weight: QuantizedWeight) -> None:
    """Fill a module's codes, and its scales with the one that makes them weights."""
    largest = LARGEST[weight.code]
    scale, middle = _bound(module.shape[1]) / largest, 8 if weight.code == "uint4" else 0
    step, rows = max(CHUNK // module.shape[1], 1), module.rows
    for first in range(rows.start, rows.stop, step):
        part = slice(first, min(first + step, rows.stop))
        values = _uniform(f"{module.name}.weight", part, module.inputs, weight.device) * largest
        own = weight.codes[part.start - rows.start : part.stop - rows.start]
        own.copy_(values if weight.code == "e4m3" else _coded(values.round_(), weight.code))
    fills = {"zeros": middle, "mins": -middle * scale, "scales": scale}
    if weight.scales is not None and weight.scales.dtype == torch.uint8:
        fills["scales"] = 127 + floor(log2(scale))
    for name, value in fills.items():
        if (tensor := weight.tensors.get(name)) is not None:
            tensor.fill_(value)
    if weight.order is not None:
        torch.arange(weight.num_in, out=weight.order)


def _make_stack(module: ModulePart, weight: QuantizedWeight, blocks: Place) -> None:
    """Fill the codes and exponents of experts, whose rows are stored in an order of their own."""
    largest = LARGEST[weight.code]
    for expert in range(len(weight.codes)):
        name = f"{module.name}.{expert}.weight"
        values = _uniform(name, module.rows, module.inputs, weight.device) * largest
        codes = _coded(values.round_(), weight.code)
        blocks.fill(codes.unflatten(1, (-1, blocks.shape[-1]))[None], expert)
    if weight.scales is not None:
        weight.scales.fill_(127 + floor(log2(_bound(module.shape[1]) / largest)))


def _coded(values: torch.Tensor, code: CodeName) -> torch.Tensor:
    """Return whole numbers as codes."""
    if code == "int8":
        return values
    signs = values.lt(0).mul(8) if code == "e2m1" else 8
    codes = (values.abs() if code == "e2m1" else values).add(signs).to(torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4


def _bound(num_in: int) -> float:
    """Return the largest of uniform values with the standard deviation of weights."""
    return sqrt(3 / num_in)


def _uniform(name: str, rows: slice, columns: slice, device: torch.device) -> torch.Tensor:
    """Return a part of a tensor, [rows, columns] float32, uniform from -1 to 1."""

    def numbers(each: slice) -> torch.Tensor:
        return torch.arange(each.start, each.stop, dtype=torch.int32, device=device)

    row = _mixed(numbers(rows) ^ _int32(zlib.crc32(name.encode())))
    return _mixed(row[:, None] ^ numbers(columns)).float() * 2**-31


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """Replace int32 bits by their hash."""
    for shift, factor in _STEPS:
        bits ^= _shifted(bits, shift)
        bits *= _int32(factor)
    return bits.bitwise_xor_(_shifted(bits, _LAST_SHIFT))


def _shifted(bits: torch.Tensor, shift: int) -> torch.Tensor:
    """Return int32 bits, shifted right; zeros come in, not the sign."""
    return (bits >> shift).bitwise_and_((1 << (32 - shift)) - 1)


def _int32(bits: int) -> int:
    """Return 32 bits as the number that they are in int32."""
    return bits - (1 << 32) if bits >> 31 else bits
