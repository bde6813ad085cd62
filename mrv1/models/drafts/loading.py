"""A draft head's tensors, from its own checkpoint or from its target's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from mrv1.kernels.registry import Ops
from mrv1.models.checkpoint import Checkpoint, Scan
from mrv1.models.config import ModelConfig
from mrv1.models.decoder import DecoderModel
from mrv1.models.drafts.config import MTP_TENSORS, HeadConfig, eagle3_config, mtp_config
from mrv1.models.drafts.model import DraftModel, InputWeights
from mrv1.models.files import raise_problems
from mrv1.models.places import FLOAT_DTYPES, dtype_text
from mrv1.models.weights import LayerWeights, ModelWeights, Weight

_UNUSED = ("verifier_norm.weight", "verifier_lm_head.weight", "t2d")
"""Tensors that training needs, or that follow from others."""


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
    scan, prefix = checkpoint.scan(), ""
    if head.kind == "mtp":
        prefix = MTP_TENSORS
        names = {name for name in scan.named or () if name.startswith(prefix)}
        scan = Scan(
            named=names,
            tensors={name: scan.tensors[name] for name in names & scan.tensors.keys()},
            problems=scan.problems,
        )
    shapes = _mtp_shapes(head) if head.kind == "mtp" else _eagle3_shapes(head, scan)
    raise_problems(checkpoint.where, scan.problems + _differences(scan, shapes))
    read = dict(checkpoint.read({name: scan.tensors[name] for name in shapes}))
    ids = read.pop("d2t", None)
    if ids is not None:
        ids = ids.long() + torch.arange(head.draft_vocab_size)
        if int(ids.min()) < 0 or int(ids.max()) >= head.layer.vocab_size:
            raise_problems(
                checkpoint.where,
                [
                    f"d2t: expected tokens from 0 to {head.layer.vocab_size - 1}, got "
                    f"{int(ids.min())} to {int(ids.max())}"
                ],
            )
        ids = ids.to(target.device)
    tensors = {name: each.to(target.device, target.dtype) for name, each in read.items()}
    make = _mtp_weights if head.kind == "mtp" else _eagle3_weights
    weights, inputs = make(head, tensors, target.weights)
    return DraftModel(
        head,
        weights,
        replace(inputs, target_ids=ids),
        ops,
        deterministic=target.deterministic,
    )


def _differences(scan: Scan, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return every difference between the tensors of a checkpoint and a head's."""
    if scan.named is None:
        return []
    problems = [f"{name}: missing" for name in shapes if name not in scan.named]
    problems += [
        f"{name}: surplus, the head has no such tensor"
        for name in sorted(scan.named - shapes.keys())
        if name not in _UNUSED
    ]
    for name, shape in shapes.items():
        if (stored := scan.tensors.get(name)) is None:
            continue
        if stored.shape != shape:
            problems.append(f"{name}: expected shape {list(shape)}, got {list(stored.shape)}")
        dtypes = ["I64", "I32"] if name == "d2t" else [*map(dtype_text, FLOAT_DTYPES)]
        if stored.dtype not in dtypes:
            problems.append(f"{name}: expected dtype {', '.join(dtypes)}, got {stored.dtype}")
    return problems


def _layer_shapes(layer: ModelConfig, prefix: str, columns: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer whose attention reads ``columns`` numbers of a token."""
    hidden, width = layer.hidden_size, layer.intermediate_size
    q_size, kv_size = (n * layer.head_dim for n in (layer.num_q_heads, layer.num_kv_heads))
    matrices = {
        "self_attn.q_proj": (q_size, columns, layer.qkv_bias),
        "self_attn.k_proj": (kv_size, columns, layer.qkv_bias),
        "self_attn.v_proj": (kv_size, columns, layer.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, layer.o_bias),
        "mlp.gate_proj": (width, hidden, layer.mlp_bias),
        "mlp.up_proj": (width, hidden, layer.mlp_bias),
        "mlp.down_proj": (hidden, width, layer.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, inputs, has_bias) in matrices.items():
        shapes[f"{prefix}{name}.weight"] = rows, inputs
        if has_bias:
            shapes[f"{prefix}{name}.bias"] = (rows,)
    for name in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{prefix}{name}.weight"] = (hidden,)
    if layer.qk_norm == "head":
        shapes |= {f"{prefix}self_attn.{i}_norm.weight": (layer.head_dim,) for i in "qk"}
    return shapes


def _mtp_shapes(head: HeadConfig) -> dict[str, tuple[int, ...]]:
    hidden = head.layer.hidden_size
    return {
        f"{MTP_TENSORS}emb_norm.0.weight": (hidden,),
        f"{MTP_TENSORS}hidden_norm.0.weight": (hidden,),
        f"{MTP_TENSORS}linear_proj.0.weight": (hidden, 2 * hidden),
        **_layer_shapes(head.layer, f"{MTP_TENSORS}block.0.", hidden),
    }


def _eagle3_shapes(head: HeadConfig, scan: Scan) -> dict[str, tuple[int, ...]]:
    layer, hidden, features = head.layer, head.layer.hidden_size, head.num_features
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, features),
        "layers.0.hidden_norm.weight": (hidden,),
        **_layer_shapes(layer, "layers.0.", 2 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (head.draft_vocab_size, hidden),
    }
    if head.norm_before_fc:
        shapes["input_norm.weight"] = (features,)
    if head.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(len(head.sums))}
    if head.draft_vocab_size < layer.vocab_size or "d2t" in (scan.named or ()):
        shapes["d2t"] = (head.draft_vocab_size,)
    if "embed_tokens.weight" in (scan.named or ()):  # else the target's
        shapes["embed_tokens.weight"] = (layer.vocab_size, hidden)
    return shapes


def _layer_weights(tensors: Mapping[str, torch.Tensor], prefix: str) -> LayerWeights:
    """Return a layer's weights; tensors that it lacks are None."""

    def weight(names: Sequence[str]) -> Weight:
        rows = [tensors[f"{prefix}{name}.weight"] for name in names]
        biases = [tensors.get(f"{prefix}{name}.bias") for name in names]
        own = [bias for bias in biases if bias is not None]
        return Weight(matrix=torch.cat(rows), bias=torch.cat(own) if own else None)

    return LayerWeights(
        input_norm=tensors[f"{prefix}input_layernorm.weight"],
        qkv=weight([f"self_attn.{i}_proj" for i in "qkv"]),
        q_norm=tensors.get(f"{prefix}self_attn.q_norm.weight"),
        k_norm=tensors.get(f"{prefix}self_attn.k_norm.weight"),
        o=weight(["self_attn.o_proj"]),
        mlp_norm=tensors[f"{prefix}post_attention_layernorm.weight"],
        gate_up=weight(["mlp.gate_proj", "mlp.up_proj"]),
        down=weight(["mlp.down_proj"]),
    )


def _mtp_weights(
    head: HeadConfig, tensors: Mapping[str, torch.Tensor], target: ModelWeights
) -> tuple[ModelWeights, InputWeights]:
    layer = _layer_weights(tensors, f"{MTP_TENSORS}block.0.")
    inputs = InputWeights(
        embed_norm=tensors[f"{MTP_TENSORS}emb_norm.0.weight"],
        hidden_norm=tensors[f"{MTP_TENSORS}hidden_norm.0.weight"],
        proj=tensors[f"{MTP_TENSORS}linear_proj.0.weight"],
    )
    return replace(target, layers=(layer,)), inputs


def _eagle3_weights(
    head: HeadConfig, tensors: Mapping[str, torch.Tensor], target: ModelWeights
) -> tuple[ModelWeights, InputWeights]:
    layer = _layer_weights(tensors, "layers.0.")
    names = ["input_norm.weight"] if head.norm_before_fc else []
    if head.fc_norm:
        names = [f"fc_norm.{i}.weight" for i in range(len(head.sums))]
    own_norm = layer.input_norm
    if own_norm is None:
        raise ValueError("layer: expected a norm of the embedding, got none")
    inputs = InputWeights(
        embed_norm=own_norm,
        hidden_norm=tensors["layers.0.hidden_norm.weight"],
        proj=tensors["fc.weight"],
        feature_norms=tuple(tensors[name] for name in names),
    )
    weights = ModelWeights(
        embed=tensors.get("embed_tokens.weight", target.embed),
        layers=(replace(layer, input_norm=None),),  # its input is normed already
        final_norm=tensors["norm.weight"],
        lm_head=Weight(matrix=tensors["lm_head.weight"]),
    )
    return weights, inputs
