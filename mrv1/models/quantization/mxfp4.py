"""MXFP4 experts, as gpt-oss stores them, as codes that the kernels read.

The experts of a layer, ``[experts, out, in]``, are ``NAME_blocks`` ``[experts, out, in / 32, 16]``
uint8, whose bytes have neighbouring inputs, the even one low, each an e2m1 code; and
``NAME_scales`` ``[experts, out, in / 32]`` uint8, exponents: ``2^(scale - 127)``.
"""

from __future__ import annotations

import torch

from mrv1.errors import ConfigError
from mrv1.models.quantization.settings import Settings

METHOD = "mxfp4"
GROUP = 32
"""Inputs that share an exponent."""
NAN = 255
"""The exponent that stands for NaN."""


def read_mxfp4(config: Settings, *, scale_dtype: torch.dtype, prefix: str) -> None:
    """Raise a ``ConfigError``: no family of mrv1 stores experts so; see ``reading.Reader``."""
    del scale_dtype, prefix
    raise config.error(
        "quant_method", "another than that of gpt-oss's experts, a family that mrv1 does not have"
    )


def mxfp4_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Return the codes of ``blocks``: ``[experts, out, in / 2]`` uint8, the same bytes."""
    return blocks.flatten(-2)


def check_exponents(scales: torch.Tensor, name: str) -> None:
    """Raise a ``ConfigError`` that names the tensor if a scale is NaN."""
    if bool((scales == NAN).any()):
        raise ConfigError(
            f"{name}: expected exponents of numbers, 0 to 254, got 255, which is NaN"
        )
