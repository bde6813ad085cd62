"""FP8 checkpoints of transformers (``quant_method: fp8``), and of DeepSeek, vLLM and FBGEMM.

    weight               [out, in] float8_e4m3fn
    weight_scale_inv     [out / 128, in / 128] float32, or exponents of two: despite its name what
                         codes are multiplied by; without blocks one number, or weight_scale
    activation_scale     of a static scheme, or input_scale: one number

A module is not quantized if a name of ``modules_to_not_convert`` ends its name, or matches its
beginning as a pattern, up to the end of a part between dots; without the list the head alone.

Source: transformers 5 (FineGrainedFP8Config, FbgemmFp8Config, ``should_convert_module``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch

from mrv1.kernels.layers.quantized import Activations, QuantizedWeight
from mrv1.models.places import Place
from mrv1.models.quantization.formats import (
    EXPONENT_DTYPES,
    SCALE_DTYPES,
    ModuleFormat,
    ModulePart,
    checked_place,
    codes_place,
    scale_place,
    scale_problem,
)
from mrv1.models.quantization.scheme import Quantization, stored_name
from mrv1.models.quantization.settings import Settings, pattern

METHODS = ("fp8", "fbgemm_fp8")
SCALE = "weight_scale_inv"
INPUT_SCALE = "activation_scale"
_RENAMED = {"weight_scale": SCALE, "input_scale": INPUT_SCALE}
"""Other names of a module's tensors."""
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"
"""The end of a part between dots, which a name that is skipped ends at."""


def is_skipped(name: str, skipped: tuple[str, ...]) -> bool:
    """Whether ``modules_to_not_convert`` has a module of this name."""
    return name.endswith(skipped) or any(each.match(name) for each in _beginnings(skipped))


def skipped_names(config: Settings, *keys: str) -> tuple[str, ...]:
    """Return the names and patterns of some settings; ConfigError: one is not valid."""
    names = [(key, each) for key in keys for each in config.names(key)]
    for key, each in names:
        pattern(f"{config.name}.{key}", f"(?:{each}){_BOUNDARY}")
    return tuple(each for _, each in names)


@lru_cache(maxsize=16)
def _beginnings(skipped: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    """Return patterns, compiled once: experts are tens of thousands of modules."""
    return tuple(re.compile(f"(?:{each}){_BOUNDARY}") for each in skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8Format(ModuleFormat):
    """A module of an FP8 checkpoint."""

    is_static: bool = False
    """Whether there is a static scale of inputs."""

    def places(self, part: ModulePart, weight: QuantizedWeight) -> dict[str, Place]:
        """Return the places of a module's tensors."""
        scale = scale_place(
            part,
            weight.scales,
            weight,
            rows=self.rows,
            inputs=self.inputs,
            shape=(1,) if self.rows == 0 else None,
            dtypes=(*SCALE_DTYPES, *EXPONENT_DTYPES),
        )
        places = {SCALE: scale}
        if self.is_static:
            places[INPUT_SCALE] = checked_place(
                part, (1,), dtypes=SCALE_DTYPES, problem=scale_problem
            )
        places["weight"] = codes_place(part, weight)
        return places


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8(Quantization):
    """``quantization_config`` of an FP8 checkpoint."""

    method: ClassVar[str] = "fp8"

    form: FP8Format
    skipped: tuple[str, ...]
    """``modules_to_not_convert``."""
    prefix: str = "model."
    """Beginning of the names of the checkpoint's layers."""

    @property
    def formats(self) -> tuple[FP8Format, ...]:
        """The one format."""
        return (self.form,)

    def _holds(self, name: str, kind: str) -> bool:
        """Whether a linear module is not skipped; embeddings are never quantized."""
        own = stored_name(name, self.prefix)
        return kind == "Linear" and not is_skipped(own, self.skipped)

    def _module(self, name: str) -> FP8Format | None:
        """Return the format of a linear module."""
        return self.form if self._holds(name, "Linear") else None

    def renamed(self, name: str) -> str:
        """Return transformers' name of a stored tensor."""
        module, _, last = name.rpartition(".")
        return f"{module}.{_RENAMED[last]}" if module and last in _RENAMED else name


def read_fp8(config: Settings, *, scale_dtype: torch.dtype, prefix: str) -> FP8:
    """Return a checkpoint's quantization; ConfigError: something that is not read."""
    is_fbgemm = config.choice("quant_method", METHODS) == "fbgemm_fp8"
    config.refuse("modules_to_convert", "dequantize")
    config.choice("fmt", ("e4m3",), "e4m3")
    config.choice("expert_dtype", ("fp8",), "fp8")
    skipped = skipped_names(config, "modules_to_not_convert", "ignored_layers")
    scheme = config.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    rows, inputs = 1 if is_fbgemm else 0, 0
    if config.get("weight_block_size") is not None:
        rows, inputs = config.pair("weight_block_size")
    form = FP8Format(
        code="e4m3",
        rows=rows,
        inputs=inputs,
        scale_dtype=scale_dtype,
        activations=_activations(inputs, scheme),
        is_static=scheme == "static",
    )
    return FP8(form=form, skipped=skipped or ("lm_head",), prefix=prefix)


def _activations(inputs: int, scheme: str) -> Activations | None:
    """Return how inputs are quantized where so many share a scale of the weight; 0 = all."""
    if not inputs:
        return "token"
    return "group" if (inputs, scheme) == (128, "dynamic") else None
