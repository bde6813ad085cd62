"""LoRA adapters in PEFT's folders, written by hand, and models with the same values merged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PREFIX = "base_model.model."
SIZES = {
    "q_proj": (64, 128), "k_proj": (64, 64), "v_proj": (64, 64), "o_proj": (128, 64),
    "gate_proj": (64, 96), "up_proj": (64, 96), "down_proj": (96, 64),
}  # fmt: skip
"""Inputs and outputs of the linear modules of ``tiny_config``, of most families."""
LINEAR = [
    f"model.layers.{layer}.{'mlp' if name[0] in 'gud' else 'self_attn'}.{name}"
    for layer in range(2)
    for name in SIZES
]
"""Their names."""


def write_adapter(
    folder: Path, tensors: Mapping[str, torch.Tensor], *, file: str = "adapter_model.safetensors",
    **settings: Any,
) -> Path:  # fmt: skip
    """Write a folder as PEFT does; ``settings`` replace those of a plain adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8} | settings
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    named = {PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}
    if file.endswith(".bin"):
        torch.save(named, folder / file)
    else:
        save_file(named, folder / file)
    return folder


def random_tensors(
    modules: Mapping[str, tuple[int, int, int]], seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Return tensors of modules with these ranks, inputs and outputs."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.normal(0.0, 0.3, shape, generator=generator).to(dtype)

    tensors = {}
    for name, (rank, columns, rows) in modules.items():
        if name.endswith("embed_tokens"):
            tensors[f"{name}.lora_embedding_A"] = normal(rank, columns)
            tensors[f"{name}.lora_embedding_B"] = normal(rows, rank)
        else:
            tensors[f"{name}.lora_A.weight"] = normal(rank, columns)
            tensors[f"{name}.lora_B.weight"] = normal(rows, rank)
    return tensors


def tiny_tensors(
    *targets: str, rank: int = 4, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Return tensors of the linear modules of ``tiny_config`` that have these ends of names."""
    names = [name for name in LINEAR if name.endswith(targets)]
    sizes = {name: SIZES[name.rpartition(".")[2]] for name in names}
    return random_tensors({name: (rank, *size) for name, size in sizes.items()}, seed, dtype)


def write_tiny(folder: Path, *targets: str, rank: int = 4, seed: int = 0, **settings: Any) -> Path:
    """Write an adapter of some linear modules of ``tiny_config``."""
    tensors = tiny_tensors(*targets, rank=rank, seed=seed)
    return write_adapter(folder, tensors, target_modules=[*targets], r=rank, **settings)


def merge(base: Path, adapter: Path, merged: Path) -> Path:
    """Write the checkpoint of a model with an adapter's products added to its weights.

    Of adapters with one rank and one scaling.
    """
    settings = json.loads((adapter / "adapter_config.json").read_text())
    scaling = settings["lora_alpha"] / settings["r"]
    tensors = load_file(base / "model.safetensors")
    stored = {
        name.removeprefix(PREFIX): tensor
        for name, tensor in load_file(adapter / "adapter_model.safetensors").items()
    }
    for name, a in stored.items():
        if name.endswith("lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            product = stored[f"{module}.lora_B.weight"].double() @ a.double()
        elif name.endswith("lora_embedding_A"):
            module = name.removesuffix(".lora_embedding_A")
            product = (stored[f"{module}.lora_embedding_B"].double() @ a.double()).T
        else:
            continue
        weight = tensors[f"{module}.weight"]
        tensors[f"{module}.weight"] = (weight.double() + scaling * product).to(weight.dtype)
    merged.mkdir(parents=True, exist_ok=True)
    for file in base.iterdir():
        if file.name != "model.safetensors":
            (merged / file.name).write_bytes(file.read_bytes())
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    return merged
