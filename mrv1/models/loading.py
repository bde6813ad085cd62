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

from mrv1.config import Dtype, LoadFormatName, QuantizationName, dtype_name
from mrv1.device import kernel_path, resolve_dtype
from mrv1.errors import ConfigError
from mrv1.kernels.registry import Ops, select_ops
from mrv1.models.checkpoint import Checkpoint, GGUFCheckpoint, Scan, StoredTensor
from mrv1.models.config import ModelConfig
from mrv1.models.decoder import DecoderModel
from mrv1.models.dummy import dummy_weights
from mrv1.models.files import raise_problems
from mrv1.models.fused import OtherNames
from mrv1.models.hf_config import WEIGHT_DTYPES
from mrv1.models.parallel import ParallelContext
from mrv1.models.places import Place, dtype_text, memory_of
from mrv1.models.quantization import zero_problem
from mrv1.models.weights import (
    EMBED,
    HEAD,
    ModelWeights,
    checkpoint_places,
    empty_weights,
    random_weights,
)
from mrv1.progress import progress_bar

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
    rank_invariant: bool = False,
    load_format: LoadFormatName = "auto",
    quantization: QuantizationName | None = None,
    max_model_len: int | None = None,
    config: ModelConfig | None = None,
) -> DecoderModel:
    """Return the decoder of a checkpoint, its weights on ``device`` in ``dtype``.

    Every tensor is copied once, from the memory-mapped file into its place in the fused weights:
    the model is never in memory twice. Of several ranks, each reads only its part. Quantized
    matrices stay codes; tensors of a GGUF file are read or dequantized one by one, as a whole.

    ``path``, ``load_format`` and ``quantization`` are as in ``EngineConfig``, ``dtype`` may be
    float64 with reference ops, and ``max_model_len`` is that of ``ModelConfig.for_context``. Where
    the checkpoint's configuration for this device and context is known, it is ``config``, and
    ``quantization`` and ``max_model_len`` have no effect. ``progress``: show a bar if stderr is a
    terminal. The others are as in ``DecoderModel``.

    ConfigError: the configuration is not supported, or weights are missing, surplus, misshaped, of
    another dtype or unreadable; one message lists everything found. Or ``dummy`` weights of a GGUF
    file.
    """
    checkpoint = Checkpoint.open(path)
    if config is None:
        config = ModelConfig.from_pretrained(
            checkpoint.path, quantization=checkpoint.quantization_on(quantization, device)
        ).for_context(max_model_len)
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
        rank_invariant=rank_invariant,
        whole_config=config,
    )


def random_model(
    config: ModelConfig,
    dtype: Dtype,
    device: torch.device,
    *,
    seed: int,
    deterministic: bool = False,
    rank_invariant: bool = False,
) -> DecoderModel:
    """Return a model with ``random_weights``; ConfigError: the device has no such dtype."""
    resolved = resolve_dtype(dtype_name(dtype), config.torch_dtype, device)
    weights = random_weights(config, device=device, dtype=resolved, seed=seed)
    ops = select_ops(kernel_path(device))
    return DecoderModel(
        config, weights, ops, deterministic=deterministic, rank_invariant=rank_invariant
    )


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
    scan = checkpoint.scan(has_vision=config.has_vision, quantization=config.quantization)
    if not scan.named:
        raise_problems(checkpoint.where, scan.problems)
    if config.tie_word_embeddings and EMBED not in scan.named:
        # A head stored for its tied embedding: safetensors keeps the alphabet's first name.
        scan.rename(lambda name: EMBED if name == HEAD else name)
    scan.rename(lambda name: None if config.is_of_drafter(name) else name)
    if config.other_names is not None:
        _split_fused(scan, config.other_names)
    if config.quantization is not None:
        scan.rename(config.quantization.renamed)
    vocab_rows = parallel.vocab_rows(config.vocab_size)
    # Without memory at first: all that headers tell is known to be right before any is taken.
    meta = empty_weights(own, "meta", dtype, vocab_rows=vocab_rows)
    wanted = checkpoint_places(own, meta, whole=config, parallel=parallel)
    if config.quantization is not None and config.quantization.has_zero_biases:
        _leave_out_zero_biases(checkpoint, scan, wanted)
    problems = scan.problems + differences(scan, wanted, is_tied=config.tie_word_embeddings)
    if config.tie_word_embeddings:
        problems += _untied_head(checkpoint, scan)
    raise_problems(checkpoint.where, problems)
    weights = empty_weights(own, device, dtype, vocab_rows=vocab_rows)
    places = checkpoint_places(own, weights, whole=config, parallel=parallel)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with progress_bar(*columns, visible=progress, transient=False) as bar:
        nbytes = sum(tensor.nbytes for tensor in memory_of(places.values()))
        task = bar.add_task("Loading weights", total=nbytes)
        for of_small in (True, False):  # scales first: an error in one needs no codes
            some = {name: each for name, each in places.items() if each.is_small == of_small}
            parts = {name: each.part for name, each in some.items() if not each.is_whole}
            stored = {name: scan.tensors[name] for name in some}
            for name, values in checkpoint.read(stored, parts):
                place = some[name]
                if place.problem is not None and (problem := place.problem(values)) is not None:
                    problems.append(f"{name}: {problem}")
                place.fill(values)
                place.pad()
                bar.advance(task, sum(tensor.nbytes for tensor in place.memory))
            raise_problems(checkpoint.where, problems)
    return weights


def _split_fused(scan: Scan, names: OtherNames) -> None:
    """Replace other names, and fused tensors, by the usual names and by their parts."""
    named: set[str] = set()
    tensors: dict[str, StoredTensor] = {}
    for stored_name in sorted(scan.named):
        pieces, stored = names.pieces(stored_name), scan.tensors.get(stored_name)
        scan.problems += [f"{name}: stored twice" for name in sorted(named & pieces.keys())]
        named |= pieces.keys()
        if stored is None:
            continue
        is_turned, shape = stored.shape == names.turned.get(stored_name), stored.shape
        if is_turned:
            shape = (*shape[:-2], shape[-1], shape[-2])
        fused = names.fused.get(stored_name)
        if fused is not None and shape != fused.shape:
            problem = f"expected shape {list(fused.shape)}, got {list(shape)}"
            scan.problems.append(f"{stored_name}: {problem}")
            continue
        for name, index in pieces.items():
            own = tuple(torch.empty(shape, device="meta")[index].shape) if index else shape
            tensors[name] = replace(stored, shape=own, index=index, is_turned=is_turned)
    scan.named, scan.tensors = named, tensors


def _leave_out_zero_biases(
    checkpoint: Checkpoint, scan: Scan, wanted: Mapping[str, Place]
) -> None:
    """Forget biases of zeros that the model has not; any other is a problem."""
    names = scan.tensors.keys() & biases_of_none(wanted)
    for name, values in checkpoint.read({name: scan.tensors.pop(name) for name in sorted(names)}):
        if problem := zero_problem(values):
            scan.problems.append(f"{name}: {problem}")
    scan.named -= names


def biases_of_none(places: Mapping[str, Place]) -> set[str]:
    """Return the names that biases of quantized modules without one would have."""
    return {f"{place.module}.bias" for place in places.values() if place.module} - places.keys()


def differences(
    scan: Scan, wanted: Mapping[str, Place], *, is_tied: bool, owner: str = "model"
) -> list[str]:
    """Return every difference between a checkpoint's tensors and those of the ``owner``."""
    problems = [f"{name}: missing" for name in wanted if name not in scan.named]
    problems += [
        f"{name}: surplus, the {owner} has no such tensor"
        for name in sorted(scan.named - wanted.keys())
        if not name.endswith(NON_WEIGHT_SUFFIXES) and not (is_tied and name == HEAD)
    ]
    for name, stored in scan.tensors.items():
        if name not in wanted:
            continue
        place = wanted[name]
        if not place.fits(stored.shape):
            problems.append(
                f"{name}: expected shape {list(place.shape)}, got {list(stored.shape)}"
            )
        dtypes = [*map(dtype_text, place.dtypes)]
        if stored.dtype not in dtypes:
            problems.append(f"{name}: expected dtype {', '.join(dtypes)}, got {stored.dtype}")
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
