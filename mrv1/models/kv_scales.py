"""The static scales of an fp8 KV cache, as calibration tools store them in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from mrv1.errors import ConfigError
from mrv1.models.config import ModelConfig
from mrv1.models.files import raise_problems
from mrv1.models.shards import TensorEntry, open_shard, scan_checkpoint


def scale_names(layer: int, part: str) -> tuple[str, ...]:
    """Return the names one scale may have; ``part`` is ``"k"`` or ``"v"``.

    compressed-tensors writes the first name; vLLM and ModelOpt write the others.
    """
    attention = f"model.layers.{layer}.self_attn"
    return (
        f"{attention}.{part}_scale",
        f"{attention}.attn.{part}_scale",
        f"{attention}.{part}_proj.{part}_scale",
    )


def load_kv_scales(directory: Path, config: ModelConfig) -> torch.Tensor:
    """Return the scales ``[layers, 2, kv_heads]`` float32 on the CPU: of keys, then of values.

    A scale is a dequantisation multiplier, ``x ~ q * scale``, of a whole layer or of a KV head.

    Raises:
        ConfigError: a scale is missing, misshaped or not a positive number; one message lists
            everything found.
    """
    scan = scan_checkpoint(directory, has_vision=config.vision is not None)
    problems = list(scan.problems)
    scales = torch.ones(config.num_layers, 2, config.num_kv_heads)
    missing = []
    for layer in range(config.num_layers):
        for index, part in enumerate("kv"):
            names = scale_names(layer, part)
            name = next((name for name in names if name in scan.entries), None)
            if name is None:
                missing.append(names)
                continue
            try:
                scales[layer, index] = _read(name, scan.entries, config.num_kv_heads)
            except ConfigError as error:
                problems.append(str(error))
    if missing:
        names, more = missing[0], f" (and {len(missing) - 1} more)" if missing[1:] else ""
        problems.append(
            f"{names[0]}: missing{more}, under this name or as {' or '.join(names[1:])}; "
            "kv_scale='head' takes its scales from the checkpoint: choose kv_scale='token', "
            "which needs none"
        )
    raise_problems(f"kv_scale: checkpoint {str(directory)!r}", problems)
    return scales


def _read(name: str, entries: Mapping[str, TensorEntry], num_kv_heads: int) -> torch.Tensor:
    """Return a scale as ``[1]`` or ``[kv_heads]`` float32."""
    with open_shard(entries[name].file) as shard:
        tensor: torch.Tensor = shard.get_tensor(entries[name].stored_name)
    if tensor.numel() not in (1, num_kv_heads):
        raise ConfigError(
            f"{name}: expected one value or {num_kv_heads} (KV heads), "
            f"got shape {list(tensor.shape)}"
        )
    scale = tensor.float().flatten()
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise ConfigError(f"{name}: expected finite values > 0, got {scale}")
    return scale
