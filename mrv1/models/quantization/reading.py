"""The quantization that a checkpoint's files name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any, Protocol

import torch

from mrv1.config import QuantizationName
from mrv1.errors import ConfigError
from mrv1.models.files import read_json
from mrv1.models.places import stored_dtype
from mrv1.models.quantization import awq, compressed_tensors, fp8, gptq, mxfp4
from mrv1.models.quantization.awq import read_awq
from mrv1.models.quantization.compressed_tensors import read_compressed_tensors
from mrv1.models.quantization.formats import SCALE_DTYPES
from mrv1.models.quantization.fp8 import read_fp8
from mrv1.models.quantization.gguf import GGUFBlocks
from mrv1.models.quantization.gptq import read_gptq
from mrv1.models.quantization.mxfp4 import read_mxfp4
from mrv1.models.quantization.online import OnlineFP8
from mrv1.models.quantization.scheme import Quantization
from mrv1.models.quantization.settings import Settings
from mrv1.models.vision import TEXT_PREFIXES

DEQUANTIZE: QuantizationName = "dequantize"
"""Asks for the numbers of a GGUF file in place of its blocks."""
SETTING = "quantization_config"
OLD_SETTING = "compression_config"
"""What compressed-tensors called the setting at first."""
MODELOPT_FILE = "hf_quant_config.json"


class Reader(Protocol):
    """Reads the settings of a method."""

    def __call__(
        self, config: Settings, *, scale_dtype: torch.dtype, prefix: str
    ) -> Quantization | None:
        """Return the quantization; None: no weight is quantized. ConfigError: not read."""


READERS: dict[str, Reader] = {
    compressed_tensors.METHOD: read_compressed_tensors,
    **dict.fromkeys(fp8.METHODS, read_fp8),
    awq.METHOD: read_awq,
    gptq.METHOD: read_gptq,
    mxfp4.METHOD: read_mxfp4,
}
"""By ``quant_method``."""
SCALE_NAMES = (".weight_scale", ".weight_scale_inv", ".scales")
"""Ends of the names of stored scales, whose dtype they keep."""


class StoredHeader(Protocol):
    """What a file's header says of a tensor."""

    @property
    def dtype(self) -> str:
        """As safetensors names it."""


def read_quantization(
    raw: Mapping[str, Any], headers: Mapping[str, StoredHeader], folder: Path | None = None
) -> Quantization | None:
    """Return the quantization of a checkpoint; None = its weights are in full precision.

    Args:
        raw: its ``config.json``.
        headers: its tensors under their stored names; none for made-up weights.
        folder: where a ``hf_quant_config.json`` may be.

    Raises:
        ConfigError: a method or a setting that is not read, or settings that disagree.
    """
    name, config = _setting(raw, folder)
    if config is None:
        return None
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        raise ConfigError(
            f"{name}.quant_method: expected one of {', '.join(READERS)}, got {method!r}"
        )
    used = (each for each in TEXT_PREFIXES if any(name.startswith(each) for name in headers))
    prefix = next(used, "model.")
    scale_dtype = _scale_dtype(method, raw, headers)
    return READERS[method](config, scale_dtype=scale_dtype, prefix=prefix)


def as_asked(found: Quantization | None, asked: QuantizationName | None) -> Quantization | None:
    """Return a checkpoint's quantization, or the one that is made of it while it loads.

    ConfigError: ``asked``, of ``EngineConfig``, contradicts the checkpoint.
    """
    expected = f"None or {OnlineFP8.method!r} with a checkpoint in full precision"
    if isinstance(found, GGUFBlocks) and asked != found.method:
        expected += f", {found.method!r} or {DEQUANTIZE!r} with this file"
        found, asked = None, None if asked == DEQUANTIZE else asked
    if asked is None or (found is not None and asked == found.method):
        return found
    if found is not None:
        raise ConfigError(
            f"quantization: expected None or {found.method!r}, which the checkpoint has, "
            f"got {asked!r}"
        )
    if asked != OnlineFP8.method:
        raise ConfigError(f"quantization: expected {expected}, got {asked!r}")
    return OnlineFP8()


def _setting(raw: Mapping[str, Any], folder: Path | None) -> tuple[str, Settings | None]:
    """Return the name and the value of the setting; ConfigError: there are two that disagree."""
    text = raw.get("text_config")
    parts = {"": raw, "text_config.": text if isinstance(text, Mapping) else {}}
    found = {
        f"{part}{key}": values[key]
        for part, values in parts.items()
        for key in (SETTING, OLD_SETTING)
        if values.get(key) is not None
    }
    if folder is not None and (folder / MODELOPT_FILE).is_file():
        found[MODELOPT_FILE] = read_json(folder / MODELOPT_FILE)
    if not found:
        return SETTING, None
    name, value = next(iter(found.items()))
    for other, another in found.items():
        if another != value:
            raise ConfigError(f"{other}: expected the same as {name}, or none, got another one")
    return name, Settings(name, value)


def _scale_dtype(
    method: str, raw: Mapping[str, Any], headers: Mapping[str, StoredHeader]
) -> torch.dtype:
    """Return the widest dtype of stored scales; of made-up ones the model's, or float32 for FP8.

    Exponents of two become float32.
    """
    names = {each.dtype for name, each in headers.items() if name.endswith(SCALE_NAMES)}
    found = [dtype for name in names if (dtype := stored_dtype(name)) in SCALE_DTYPES]
    if found or names or method in fp8.METHODS:
        return reduce(torch.promote_types, found or [torch.float32])
    text = raw.get("text_config") or {}
    given = (part.get(key) for part in (raw, text) for key in ("dtype", "torch_dtype"))
    dtype = getattr(torch, str(next(filter(None, given), "")), None)
    return dtype if dtype in SCALE_DTYPES else torch.float32
