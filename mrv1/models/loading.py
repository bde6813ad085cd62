"""Load a checkpoint straight into the decoder's tensors on the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.progress import (
    BarColumn,
    DownloadColumn,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from mrv1.config import Dtype, checkpoint_dir, dtype_name
from mrv1.device import kernel_path, resolve_dtype
from mrv1.errors import ConfigError
from mrv1.kernels.registry import Ops, select_ops
from mrv1.models.config import ModelConfig
from mrv1.models.decoder import DecoderModel
from mrv1.models.files import raise_problems
from mrv1.models.hf_config import WEIGHT_DTYPES
from mrv1.models.parallel import ParallelContext
from mrv1.models.shards import Scan, TensorEntry, open_shard, scan_checkpoint
from mrv1.models.weights import (
    ModelWeights,
    checkpoint_tensors,
    empty_weights,
    random_weights,
)
from mrv1.progress import progress_bar

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
"""Dtypes in which a weight may be stored, as safetensors names them."""

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
NON_WEIGHT_SUFFIXES = (
    "rotary_emb.inv_freq",  # a buffer that old checkpoints carry along
    ".k_scale",  # scale of an fp8 KV cache: load_kv_scales reads it for kv_scale="head"
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
) -> DecoderModel:
    """Return the decoder of a checkpoint, its weights on ``device`` in ``dtype``.

    Every tensor is copied once, from the memory-mapped file into its place in the fused weights:
    the model is never in memory twice. Of several ranks, each reads only its part. Tensors of a
    GGUF file are dequantized one by one, as a whole.

    Args:
        path: whatever ``EngineConfig.model`` may be: a Hugging Face checkpoint with safetensors
            weights, in one file or in shards, or a GGUF file.
        device: where the weights go.
        dtype: float32, float16, bfloat16 or (reference ops only) float64.
        ops: the ops that ``select_ops`` returned for the device.
        progress: whether to show a progress bar if stderr is a terminal.
        parallel: this rank among the tensor-parallel ranks; None = a single rank.
        deterministic: as in ``DecoderModel``.

    Raises:
        ConfigError: the configuration is not supported, or weights are missing, surplus,
            misshaped, quantized or unreadable; one message lists everything found.
    """
    directory = checkpoint_dir(path)
    config = ModelConfig.from_pretrained(directory)
    parallel = parallel or ParallelContext()
    weights = load_weights(
        directory, config, device=device, dtype=dtype, progress=progress, parallel=parallel
    )
    own = parallel.shard(config)
    return DecoderModel(own, weights, ops, parallel=parallel, deterministic=deterministic)


def load_weights(
    directory: Path,
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
    scan = scan_checkpoint(directory, has_vision=config.vision is not None)
    if config.tie_word_embeddings:
        _rename_tied_head(scan)
    wanted = checkpoint_tensors(config, empty_weights(config, "meta", dtype))
    problems = scan.problems + _differences(scan, wanted, tied=config.tie_word_embeddings)
    raise_problems(f"checkpoint {str(directory)!r}", problems)
    weights = empty_weights(own, device, dtype, vocab_rows=parallel.vocab_rows(config.vocab_size))
    _copy(scan.entries, checkpoint_tensors(own, weights), progress, parallel)
    return weights


def _rename_tied_head(scan: Scan) -> None:
    """Let a head that is stored instead of the embedding, to which it is tied, be the embedding.

    ``save_model`` of safetensors keeps one name of a shared tensor, the first of the alphabet.
    """
    if scan.named is not None and HEAD in scan.named and EMBED not in scan.named:
        scan.named = (scan.named - {HEAD}) | {EMBED}
        if HEAD in scan.entries:
            scan.entries[EMBED] = scan.entries.pop(HEAD)


def _differences(scan: Scan, wanted: Mapping[str, torch.Tensor], *, tied: bool) -> list[str]:
    """Return every difference between the checkpoint's tensors and the model's."""
    if scan.named is None:
        return []
    problems = [f"{name}: missing" for name in wanted if name not in scan.named]
    surplus = {n for n in scan.named - wanted.keys() if not n.endswith(NON_WEIGHT_SUFFIXES)}
    if tied and HEAD in surplus:
        surplus.remove(HEAD)
        problems += _untied_head(scan)
    problems += [f"{name}: surplus, the model has no such tensor" for name in sorted(surplus)]
    for name, entry in scan.entries.items():
        if name not in wanted:
            continue
        shape = tuple(wanted[name].shape)
        if entry.shape != shape:
            problems.append(f"{name}: expected shape {list(shape)}, got {list(entry.shape)}")
        if entry.dtype not in FLOAT_DTYPES:
            problems.append(f"{name}: expected dtype {', '.join(FLOAT_DTYPES)}, got {entry.dtype}")
    return problems


def _untied_head(scan: Scan) -> list[str]:
    """Return a problem if a stored head differs from the embedding it should be tied to."""
    head, embed = scan.entries.get(HEAD), scan.entries.get(EMBED)
    if head is None or embed is None:
        return []  # already reported as unreadable or missing
    with open_shard(head.file) as head_shard, open_shard(embed.file) as embed_shard:
        embed_tensor = embed_shard.get_tensor(embed.stored_name)
        head_tensor = head_shard.get_tensor(head.stored_name)
        if torch.equal(head_tensor.to(embed_tensor.dtype), embed_tensor):
            return []
    return [
        f"{HEAD}: tie_word_embeddings is true, but it differs from {EMBED}; if the checkpoint has "
        "a head of its own, set tie_word_embeddings to false in config.json"
    ]


def _copy(
    entries: Mapping[str, TensorEntry],
    targets: Mapping[str, torch.Tensor],
    progress: bool,
    parallel: ParallelContext,
) -> None:
    """Fill ``targets`` file by file, one tensor at a time, with the rank's part of each."""
    names_of_file: dict[Path, list[str]] = defaultdict(list)
    for name in targets:
        names_of_file[entries[name].file].append(name)
    with progress_bar(*_columns(), visible=progress, transient=False) as bar:
        task = bar.add_task("Loading weights", total=sum(t.nbytes for t in targets.values()))
        for file, names in names_of_file.items():
            with open_shard(file) as shard:
                for name in names:
                    entry, target = entries[name], targets[name]
                    if entry.shape == target.shape:
                        target.copy_(shard.get_tensor(entry.stored_name))
                    else:
                        part = parallel.part(entry.shape, target.shape)
                        values = shard.get_slice(entry.stored_name)[part]
                        target[: len(values)].copy_(values)
                        target[len(values) :].zero_()  # rows that pad the vocabulary
                    bar.advance(task, target.nbytes)


def _columns() -> tuple[ProgressColumn, ...]:
    return (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )


def random_model(
    config: ModelConfig,
    dtype: Dtype,
    device: torch.device,
    *,
    seed: int,
    deterministic: bool = False,
) -> DecoderModel:
    """Return a model of a shape with random weights, on the device.

    Raises:
        ConfigError: the device has no such dtype.
    """
    resolved = resolve_dtype(dtype_name(dtype), config.torch_dtype, device)
    weights = random_weights(config, device=device, dtype=resolved, seed=seed)
    ops = select_ops(kernel_path(device))
    return DecoderModel(config, weights, ops, deterministic=deterministic)
