"""A draft head's tensors, from its own checkpoint or from its target's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from mrv1.kernels.registry import Ops
from mrv1.models.checkpoint import Checkpoint
from mrv1.models.config import ModelConfig
from mrv1.models.decoder import DecoderModel
from mrv1.models.drafts.config import MTP_TENSORS, HeadConfig, eagle3_config, mtp_config
from mrv1.models.drafts.model import DraftModel, InputWeights
from mrv1.models.files import raise_problems
from mrv1.models.loading import differences
from mrv1.models.places import FLOAT_DTYPES, Place, whole
from mrv1.models.weights import ModelWeights, Weight, checkpoint_tensors, empty_weights

_UNUSED = {"verifier_norm.weight", "verifier_lm_head.weight", "t2d"}
"""Tensors that training needs, or that follow from others."""
_LAYER = "model.layers.0."
"""How the tensors of a decoder's first layer begin."""


def head_config(method: str, path: str | Path, target: ModelConfig) -> HeadConfig:
    """Return the configuration of a head for ``target``; ConfigError: it is wrong or unfit.

    ``path`` is the head's checkpoint, of an MTP block the target's.
    """
    if method == "eagle3":
        return eagle3_config(Checkpoint.open(path), target)
    return mtp_config(target)


def load_head(head: HeadConfig, path: str | Path, target: DecoderModel, ops: Ops) -> DraftModel:
    """Return a head on its target's device, in its dtype.

    One ConfigError lists all tensors that are missing, surplus, misshaped or of another dtype.
    """
    checkpoint = Checkpoint.open(path)
    scan, is_mtp = checkpoint.scan(), head.kind == "mtp"
    if not scan.named:
        raise_problems(checkpoint.where, scan.problems)
    begin = MTP_TENSORS if is_mtp else ""
    scan.rename(lambda name: name if name.startswith(begin) and name not in _UNUSED else None)
    empty = partial(_empty, head, scan.named, dtype=target.dtype)
    wanted = _places(head, *empty(device="meta"))
    problems = scan.problems + differences(scan, wanted, is_tied=False, owner="head")
    raise_problems(checkpoint.where, problems)
    weights, inputs = empty(device=target.device)
    places = _places(head, weights, inputs)
    for name, values in checkpoint.read({name: scan.tensors[name] for name in places}):
        if name == "d2t":  # checked on the host: a device that stands in has no values
            values = values.long() + torch.arange(head.draft_vocab_size)
            least, most, size = int(values.min()), int(values.max()), head.layer.vocab_size
            if least < 0 or most >= size:
                problem = f"d2t: expected tokens from 0 to {size - 1}, got {least} to {most}"
                raise_problems(checkpoint.where, [problem])
        places[name].fill(values)
    if is_mtp:
        weights = replace(target.weights, layers=weights.layers)
    else:  # the layer's input is normed already
        layers = (replace(weights.layers[0], input_norm=None),)
        embed = weights.embed if weights.embed.shape[0] else target.weights.embed
        weights = replace(weights, layers=layers, embed=embed)
    return DraftModel(head, weights, inputs, ops, deterministic=target.deterministic)


def _empty(
    head: HeadConfig, named: Collection[str], *, device: torch.device | str, dtype: torch.dtype
) -> tuple[ModelWeights, InputWeights]:
    """Return uninitialised weights of a head whose checkpoint has the ``named`` tensors.

    Without an embedding in its checkpoint, a head's has no rows; MTP's head has none either.
    """
    layer, hidden = head.layer, head.layer.hidden_size
    empty = partial(torch.empty, device=device, dtype=dtype)
    num_tokens = layer.vocab_size if "embed_tokens.weight" in named else 0
    weights = empty_weights(layer, device, dtype, vocab_rows=num_tokens)
    inputs = InputWeights(
        embed_norm=empty(hidden),
        hidden_norm=empty(hidden),
        proj=empty(hidden, 2 * hidden if head.kind == "mtp" else head.num_features),
    )
    if head.kind == "mtp":
        return weights, inputs
    own = weights.layers[0]
    qkv = Weight(matrix=empty(own.qkv.shape[0], 2 * hidden), bias=own.qkv.bias)
    weights = replace(
        weights,
        layers=(replace(own, qkv=qkv),),
        lm_head=Weight(matrix=empty(head.draft_vocab_size, hidden)),
    )
    norms = [empty(head.num_features)] if head.norm_before_fc else []
    if head.fc_norm:
        norms = [empty(hidden) for _ in head.sums]
    ids = None
    if head.draft_vocab_size < layer.vocab_size or "d2t" in named:
        ids = torch.empty(head.draft_vocab_size, dtype=torch.int64, device=device)
    return weights, replace(inputs, feature_norms=tuple(norms), target_ids=ids)


def _places(head: HeadConfig, weights: ModelWeights, inputs: InputWeights) -> dict[str, Place]:
    """Return where each tensor of a head's checkpoint goes."""
    tensors = checkpoint_tensors(head.layer, weights)
    if head.kind == "mtp":
        tensors = {
            name.replace(_LAYER, f"{MTP_TENSORS}block.0."): tensor
            for name, tensor in tensors.items()
            if name.startswith(_LAYER)
        }
        tensors |= {
            f"{MTP_TENSORS}emb_norm.0.weight": inputs.embed_norm,
            f"{MTP_TENSORS}hidden_norm.0.weight": inputs.hidden_norm,
            f"{MTP_TENSORS}linear_proj.0.weight": inputs.proj,
        }
    else:
        tensors = {name.removeprefix("model."): each for name, each in tensors.items()}
        if not weights.embed.shape[0]:
            del tensors["embed_tokens.weight"]
        norms = {
            "input_norm.weight" if head.norm_before_fc else f"fc_norm.{index}.weight": norm
            for index, norm in enumerate(inputs.feature_norms)
        }
        tensors |= norms | {
            "fc.weight": inputs.proj,
            "layers.0.hidden_norm.weight": inputs.hidden_norm,
            "layers.0.input_layernorm.weight": inputs.embed_norm,
        }
        if inputs.target_ids is not None:
            tensors["d2t"] = inputs.target_ids
    return {name: _place(tensor) for name, tensor in tensors.items()}


def _place(tensor: torch.Tensor) -> Place:
    shape = tuple(tensor.shape)
    dtypes = (torch.int64, torch.int32) if tensor.dtype == torch.int64 else FLOAT_DTYPES
    return Place(target=tensor, shape=shape, part=whole(shape), dtypes=dtypes)
