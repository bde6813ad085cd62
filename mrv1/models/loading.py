"""A model that is ready to run: of a checkpoint's weights, or of random ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from mrv1.config import Dtype, LoadFormatName, dtype_name
from mrv1.device import kernel_path, resolve_dtype
from mrv1.errors import ConfigError
from mrv1.kernels.registry import Ops, select_ops
from mrv1.models.checkpoint import Checkpoint, GGUFCheckpoint, Scan, StoredTensor
from mrv1.models.config import ModelConfig
from mrv1.models.decoder import DecoderModel
from mrv1.models.dummy import dummy_weights
from mrv1.models.experts import ExpertNames
from mrv1.models.files import raise_problems
from mrv1.models.hf_config import WEIGHT_DTYPES
from mrv1.models.parallel import ParallelContext
from mrv1.models.weights import (
    EMBED,
    HEAD,
    ModelWeights,
    checkpoint_tensors,
    empty_weights,
    random_weights,
    rank_part,
)
from mrv1.progress import progress_bar

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
"""Dtypes in which a weight may be stored, as safetensors names them."""
NON_WEIGHT_SUFFIXES = (
    "rotary_emb.inv_freq",  # a buffer that old checkpoints carry along
    ".k_scale",  # scale of an fp8 KV cache: Checkpoint.kv_scales reads it for kv_scale="head"
    ".v_scale",
)


def load_model(
    path: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    ops: Ops,
    progress: bool = True,
    parallel: ParallelContext | None = None,
    deterministic: bool = False,
    load_format: LoadFormatName = "auto",
) -> DecoderModel:
    """Return the decoder of a checkpoint, its weights on ``device`` in ``dtype``.

    Every tensor is copied once, from the memory-mapped file into its place in the fused weights:
    the model is never in memory twice. Of several ranks, each reads only its part. Tensors of a
    GGUF file are dequantized one by one, as a whole.

    Args:
        path: whatever ``EngineConfig.model`` may be.
        device: where the weights go.
        dtype: float32, float16, bfloat16 or (reference ops only) float64.
        ops: the ops that ``select_ops`` returned for the device.
        progress: whether to show a progress bar if stderr is a terminal.
        parallel: as in ``DecoderModel``.
        deterministic: as in ``DecoderModel``.
        load_format: as in ``EngineConfig``; ``dummy`` makes up weights and reads none.

    Raises:
        ConfigError: the configuration is not supported, or weights are missing, surplus,
            misshaped, quantized or unreadable; one message lists everything found. Or ``dummy``
            weights of a GGUF file.
    """
    checkpoint = Checkpoint.open(path)
    config = ModelConfig.from_pretrained(checkpoint.path)
    parallel = parallel or ParallelContext()
    if load_format == "dummy":
        if isinstance(checkpoint, GGUFCheckpoint):
            raise ConfigError(
                "load_format: expected 'auto' with a GGUF file, got 'dummy', which makes up the "
                "weights of a config.json"
            )
        weights = dummy_weights(config, device=device, dtype=dtype, parallel=parallel)
    else:
        weights = load_weights(
            checkpoint, config, device=device, dtype=dtype, progress=progress, parallel=parallel
        )
    return DecoderModel(
        parallel.shard(config),
        weights,
        ops,
        parallel=parallel,
        deterministic=deterministic,
        whole_config=config,
    )


def random_model(
    config: ModelConfig,
    dtype: Dtype,
    device: torch.device,
    *,
    seed: int,
    deterministic: bool = False,
) -> DecoderModel:
    """Return a model with ``random_weights``; ConfigError: the device has no such dtype."""
    resolved = resolve_dtype(dtype_name(dtype), config.torch_dtype, device)
    weights = random_weights(config, device=device, dtype=resolved, seed=seed)
    ops = select_ops(kernel_path(device))
    return DecoderModel(config, weights, ops, deterministic=deterministic)


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: bool = True,
    parallel: ParallelContext | None = None,
) -> ModelWeights:
    """Return a rank's part of a checkpoint's weights; arguments and errors as in `load_model`."""
    parallel = parallel or ParallelContext()
    own = parallel.shard(config)
    if dtype not in WEIGHT_DTYPES:
        raise ConfigError(f"dtype: expected one of {WEIGHT_DTYPES}, got {dtype}")
    scan = checkpoint.scan(has_vision=config.vision is not None)
    if config.tie_word_embeddings:
        _rename_tied_head(scan)
    _leave_out_drafter(scan, config)
    if config.expert_names is not None:
        _split_experts(scan, config.expert_names, config.hidden_size)
    wanted = checkpoint_tensors(config, empty_weights(config, "meta", dtype))
    problems = scan.problems + _differences(scan, wanted)
    if config.tie_word_embeddings:
        problems += _untied_head(checkpoint, scan)
    raise_problems(checkpoint.where, problems)
    weights = empty_weights(own, device, dtype, vocab_rows=parallel.vocab_rows(config.vocab_size))
    places = checkpoint_tensors(own, weights)
    stored = {name: scan.tensors[name] for name in places}
    parts = {
        name: rank_part(name, stored[name].shape, place.shape, parallel)
        for name, place in places.items()
        if place.shape != stored[name].shape
    }
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with progress_bar(*columns, visible=progress, transient=False) as bar:
        task = bar.add_task("Loading weights", total=sum(t.nbytes for t in places.values()))
        for name, values in checkpoint.read(stored, parts):
            place, num_rows = places[name], len(values)
            place[:num_rows].copy_(values)
            if num_rows < len(place):  # rows that pad the vocabulary
                place[num_rows:].zero_()
            bar.advance(task, place.nbytes)
    return weights


def _rename_tied_head(scan: Scan) -> None:
    """Rename a head stored for its tied embedding: safetensors keeps the alphabet's first name."""
    if scan.named is not None and HEAD in scan.named and EMBED not in scan.named:
        scan.named = (scan.named - {HEAD}) | {EMBED}
        if HEAD in scan.tensors:
            scan.tensors[EMBED] = scan.tensors.pop(HEAD)


def _leave_out_drafter(scan: Scan, config: ModelConfig) -> None:
    """Forget tensors that only predict further tokens."""
    if scan.named is not None:
        scan.named = {name for name in scan.named if not config.is_of_drafter(name)}
        scan.tensors = {n: t for n, t in scan.tensors.items() if not config.is_of_drafter(n)}


def _split_experts(scan: Scan, names: ExpertNames, hidden_size: int) -> None:
    """Replace names of a model in memory, and tensors of all experts, by a checkpoint's."""
    named: set[str] = set()
    tensors: dict[str, StoredTensor] = {}
    for stored_name in sorted(scan.named or ()):
        pieces, stored = names.pieces(stored_name), scan.tensors.get(stored_name)
        each = {names.stored(stored_name): ()} if pieces is None else pieces
        scan.problems += [f"{name}: stored twice" for name in sorted(named & each.keys())]
        named |= each.keys()
        if stored is None:
            continue
        shape = stored.shape
        if pieces is not None:
            expected = names.fused_shape(stored_name, hidden_size)
            if shape != expected:
                scan.problems.append(
                    f"{stored_name}: expected shape {list(expected)}, got {list(shape)}"
                )
                continue
        for name, index in each.items():
            own = tuple(torch.empty(shape, device="meta")[index].shape) if index else shape
            tensors[name] = replace(stored, shape=own, index=index)
    if scan.named is not None:
        scan.named, scan.tensors = named, tensors


def _differences(scan: Scan, wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """Return every difference between the checkpoint's tensors and the model's."""
    if scan.named is None:
        return []
    problems = [f"{name}: missing" for name in wanted if name not in scan.named]
    problems += [
        f"{name}: surplus, the model has no such tensor"
        for name in sorted(scan.named - wanted.keys() - {HEAD})
        if not name.endswith(NON_WEIGHT_SUFFIXES)
    ]
    for name, stored in scan.tensors.items():
        if name not in wanted:
            continue
        shape = tuple(wanted[name].shape)
        if stored.shape != shape:
            problems.append(f"{name}: expected shape {list(shape)}, got {list(stored.shape)}")
        if stored.dtype not in FLOAT_DTYPES:
            expected = ", ".join(FLOAT_DTYPES)
            problems.append(f"{name}: expected dtype {expected}, got {stored.dtype}")
    return problems


def _untied_head(checkpoint: Checkpoint, scan: Scan) -> list[str]:
    """Return a problem if a stored head differs from the embedding it should be tied to."""
    pair = {name: scan.tensors[name] for name in (HEAD, EMBED) if name in scan.tensors}
    if len(pair) < 2:
        return []  # there is no head, or it has already been reported as unreadable
    values = dict(checkpoint.read(pair))
    if torch.equal(values[HEAD].to(values[EMBED].dtype), values[EMBED]):
        return []
    return [
        f"{HEAD}: tie_word_embeddings is true, but it differs from {EMBED}; if the checkpoint has "
        "a head of its own, set tie_word_embeddings to false in config.json"
    ]
