"""Tiny random checkpoints of GPTQ and AWQ, and transformers' models of their values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedModel

from tests.models.families import random_model
from tests.models.quantization import packers


def quantized(
    matrix: torch.Tensor, bits: int, group: torch.Tensor, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [out, in], zero points and fp16 scales [out, groups] of a matrix, rounded to nearest.

    ``group`` [in] is the group of each input.
    """
    most, num_groups = 2**bits - 1, int(group.max()) + 1
    parts = [matrix[:, group == each] for each in range(num_groups)]
    high = torch.stack([part.amax(1) for part in parts], 1).clamp(min=0)
    low = torch.stack([part.amin(1) for part in parts], 1).clamp(max=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / most).clamp(min=1e-4).half()
    zeros = torch.full_like(low, 2 ** (bits - 1))
    if not symmetric:  # at least 1: version 1 of GPTQ cannot say 0 without a borrow
        zeros = (-low / scales.float()).round().clamp(1, most)
    wide = scales.float()[:, group]
    codes = (matrix / wide + zeros[:, group]).round().clamp(0, most)
    return codes.int(), zeros.int(), scales


def save_quantized(
    directory: Path, config: PretrainedConfig, settings: dict[str, Any], *, seed: int = 0
) -> PreTrainedModel:
    """Write a random checkpoint with a ``quantization_config``; return its values, in float64.

    The linear modules of the layers are quantized, and the head if ``lm_head`` says so.
    """
    model, generator = random_model(config, seed=seed), torch.Generator().manual_seed(seed)
    is_awq, bits = settings["quant_method"] == "awq", settings["bits"]
    tensors = {name: tensor.half() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for name, module in model.named_modules():
            is_head = name == "lm_head" and not settings.get("lm_head")
            if not isinstance(module, torch.nn.Linear) or is_head:
                continue
            weight = module.weight
            size = settings["group_size"] if settings["group_size"] > 0 else weight.shape[1]
            group = torch.arange(weight.shape[1]) // size
            if settings.get("desc_act"):
                group = group[torch.randperm(len(group), generator=generator)]
            codes, zeros, scales = quantized(
                weight, bits, group, symmetric=settings.get("sym", False)
            )
            weight.copy_((codes - zeros[:, group]).float() * scales.float()[:, group])
            if is_awq:
                stored = packers.awq(codes, zeros, scales)
            else:
                version = 2 if settings.get("checkpoint_format") == "gptq_v2" else 1
                stored = packers.gptq(codes, zeros, scales, bits, version=version)
                stored["g_idx"] = group.int()
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{last}": tensor for last, tensor in stored.items()}
        for name, tensor in model.state_dict().items():
            if name in tensors:
                tensor.copy_(tensors[name])
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    directory.mkdir(exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, directory / "model.safetensors")
    raw = {**config.to_dict(), "architectures": [type(model).__name__], "torch_dtype": "float16"}
    raw["quantization_config"] = settings
    (directory / "config.json").write_text(json.dumps(raw))
    return model.double()
