"""Tiny random checkpoints that the compressed-tensors library has compressed, and their oracle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import compress_module, decompress_module
from compressed_tensors.compressors.format import infer_model_format
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedModel

from tests.models.families import random_model

Group = Mapping[str, Any]
"""A group of ``config_groups``: weights, and perhaps targets and input_activations."""


def group(num_bits: int, kind: str, strategy: str, **weights: Any) -> dict[str, Any]:
    """Return a group for all linear modules."""
    args = {"num_bits": num_bits, "type": kind, "strategy": strategy, **weights}
    return {"targets": ["Linear"], "weights": args}


def with_inputs(each: Group, **args: Any) -> dict[str, Any]:
    """Return a group whose activations are quantized too."""
    return {**each, "input_activations": args}


DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
SCHEMES: dict[str, dict[str, Any]] = {
    "fp8-tensor-static": with_inputs(group(8, "float", "tensor"), **STATIC),
    "fp8-channel": with_inputs(group(8, "float", "channel"), **DYNAMIC),
    "fp8-block": group(8, "float", "block", block_structure=[128, 128]),
    "fp8-block-48x32": group(8, "float", "block", block_structure=[48, 32]),
    "int4-group": group(4, "int", "group", group_size=32),
    "int4-group-zeros": group(4, "int", "group", group_size=16, symmetric=False),
    "int4-channel-zeros": group(4, "int", "channel", symmetric=False),
    "int8-packed-group": group(8, "int", "group", group_size=32),
    "int8-packed-zeros": group(8, "int", "channel", symmetric=False),
    "int8": with_inputs(
        group(8, "int", "channel"), num_bits=8, type="int", strategy="token", dynamic=True
    ),
    "int8-tensor-zeros": with_inputs(
        group(8, "int", "tensor", symmetric=False), num_bits=8, strategy="token", dynamic=True
    ),
}
"""A scheme of each kind, by name."""


def compress(
    config: PretrainedConfig, groups: Mapping[str, Group], *, ignore: list[str], seed: int = 0
) -> PreTrainedModel:
    """Return a random model that the library has quantized and compressed."""
    model = random_model(config, seed=seed)
    quantization = QuantizationConfig(config_groups=deepcopy(dict(groups)), ignore=ignore)
    apply_quantization_config(model, quantization, show_progress=False)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            calibrate(module)
    infer_model_format(model)
    for module in model.modules():
        compress_module(module)
    return model


def calibrate(module: torch.nn.Module) -> None:
    """Give a module the scales and zero points of its weights, as min-max observers do."""
    args = module.quantization_scheme.weights
    weight = module.weight.data
    if args.strategy == "tensor":
        parts = weight.reshape(1, -1)
    elif args.strategy == "channel":
        parts = weight
    elif args.strategy == "group":
        parts = weight.unflatten(1, (-1, args.group_size))
    else:
        height, width = args.block_structure
        rows, columns = (-(-n // m) for n, m in zip(weight.shape, (height, width), strict=True))
        padded = weight.new_zeros(rows * height, columns * width)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        parts = padded.unflatten(1, (columns, width)).unflatten(0, (rows, height))
        parts = parts.movedim(2, 1).flatten(2)
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
    module.weight_scale.data = scale.reshape(module.weight_scale.shape)
    if getattr(module, "weight_zero_point", None) is not None:
        module.weight_zero_point.data = zero.reshape(module.weight_scale.shape)
    if getattr(module, "input_scale", None) is not None:
        module.input_scale.data.fill_(0.02)


def save_compressed(
    directory: Path,
    config: PretrainedConfig,
    groups: Mapping[str, Group],
    *,
    ignore: list[str] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> PreTrainedModel:
    """Write a compressed random checkpoint; return transformers' model of its values, in float64.

    ``settings`` are further ones of ``quantization_config``.
    """
    ignore = ["lm_head"] if ignore is None else ignore
    model = compress(config, groups, ignore=ignore, seed=seed)
    tensors = {
        name: tensor.to(dtype) if tensor.dtype == torch.float32 else tensor
        for name, tensor in model.state_dict().items()
    }
    directory.mkdir(exist_ok=True)
    copies = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(copies, directory / "model.safetensors")
    written = QuantizationConfig.from_pretrained(model, format=infer_model_format(model).value)
    written.quantization_status = QuantizationStatus.COMPRESSED
    raw = {**config.to_dict(), "architectures": [type(model).__name__]}
    raw["quantization_config"] = {**written.model_dump(mode="json"), **settings}
    (directory / "config.json").write_text(json.dumps(raw))
    for module in model.modules():
        decompress_module(module, leave_decompressed=False)
    return model.double()
