"""Made-up weights of a checkpoint of which only ``config.json`` is there: to measure a model."""

from __future__ import annotations

import zlib

import torch

from mrv1.models.config import ModelConfig
from mrv1.models.parallel import ParallelContext
from mrv1.models.weights import ModelWeights, checkpoint_tensors, empty_weights, rank_part

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
    trained model's; norms are 1, biases 0.
    """
    own = parallel.shard(config)
    weights = empty_weights(own, device, dtype, vocab_rows=parallel.vocab_rows(config.vocab_size))
    wholes = checkpoint_tensors(config, empty_weights(config, "meta", dtype))
    for name, place in checkpoint_tensors(own, weights).items():
        if place.dim() == 1 or name.endswith("bias"):
            place.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        whole = wholes[name].shape
        rows, columns = rank_part(name, whole, place.shape, parallel)
        place[rows.stop - rows.start :].zero_()  # rows that pad the vocabulary
        first, bound = rows.start, (3 / whole[1]) ** 0.5
        for part in place[: rows.stop - rows.start].split(max(CHUNK // place.shape[1], 1)):
            own_rows = range(first, first + len(part))
            own_columns = range(columns.start, columns.stop)
            part.copy_(_uniform(name, own_rows, own_columns, part.device) * bound)
            first += len(part)
    return weights


def _uniform(name: str, rows: range, columns: range, device: torch.device) -> torch.Tensor:
    """Return a part of a tensor, [rows, columns] float32, uniform from -1 to 1."""

    def numbers(each: range) -> torch.Tensor:
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
