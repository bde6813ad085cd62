"""Reads a PEFT folder: every tensor is known to fit the model before an adapter is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from mrv1.errors import ConfigError
from mrv1.models.architectures import ARCHITECTURES
from mrv1.models.checkpoint import Checkpoint, safetensors_of
from mrv1.models.config import ModelConfig
from mrv1.models.files import raise_problems, read_json
from mrv1.models.lora.adapter import AdapterPair, StoredAdapter
from mrv1.models.lora.settings import LoraSettings, read_settings
from mrv1.models.places import FLOAT_DTYPES
from mrv1.models.quantization.packing import EMBED_MODULE, HEAD_MODULE
from mrv1.models.vision import TEXT_PREFIX
from mrv1.models.weights import EMBED, HEAD, checkpoint_tensors, empty_weights

SETTINGS_FILE = "adapter_config.json"
TENSOR_FILES = ("adapter_model.safetensors", "adapter_model.bin")
"""The first that exists has the tensors."""
PREFIX = "base_model.model."
"""Beginning of the names of stored tensors; a name of transformers' follows."""
MOST_PROBLEMS = 8
"""Most problems that a message lists: an adapter of another model has one for each tensor."""

Shapes = dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the model under its name in transformers, of which there may be an adapter."""

    columns: int
    """Inputs; of the embedding, the hidden size."""
    rows: dict[str, slice] = field(default_factory=dict)
    """By usual names of the modules that it is: their outputs, or tokens."""
    lacks: str | None = None
    """Why it takes no adapter."""

    @property
    def num_rows(self) -> int:
        """Outputs, or tokens."""
        last: int = max(part.stop for part in self.rows.values())
        return last


def read_adapter(
    name: str, path: str | Path, config: ModelConfig, base: Checkpoint, *, max_rank: int
) -> StoredAdapter:
    """Return the adapter in a folder that PEFT has written, with the values that PEFT uses.

    ``path`` has ``adapter_config.json``, and ``adapter_model.safetensors`` or ``.bin``; ``config``
    is the whole model's, and ``base`` its checkpoint: tensors of the model itself, which PEFT
    stores beside an adapter of the embedding, must be as they are there.

    ConfigError: the folder is unreadable or of another model, or mrv1 does not serve what its
    settings ask for; one message lists the problems.
    """
    where = f"adapter {name!r} ({str(path)!r})"
    try:
        folder = Path(path).expanduser()
        if not (folder / SETTINGS_FILE).is_file():
            raise ConfigError(f"expected a folder with {SETTINGS_FILE}, found none")
        settings = read_settings(read_json(folder / SETTINGS_FILE))
        stored = _stored_tensors(folder)
    except (ConfigError, OSError, RuntimeError) as error:  # RuntimeError: no user after the ~
        raise ConfigError(f"{where}: {error}") from error
    modules = modules_of(config)
    targets = {
        each: module
        for each, module in modules.items()
        if settings.targets(each, is_linear=_is_linear(each, module))
    }
    problems = [*_target_problems(settings, targets, max_rank)]
    if not problems:
        problems = [*_tensor_problems(stored, settings, targets, config, base)]
    if len(problems) > MOST_PROBLEMS:
        more = len(problems) - MOST_PROBLEMS
        problems = [*problems[:MOST_PROBLEMS], f"and {more} more; is it of another model?"]
    raise_problems(where, problems)
    parts: dict[str, AdapterPair] = {}
    for each, module in targets.items():
        names = [*_tensors_of(each, module, settings.rank(each))]
        # Copies: the file may change, and a module that is several has one ``a`` for all.
        a, b = (stored[stored_name].clone() for stored_name in names)
        for own, rows in module.rows.items():
            is_table = own == EMBED_MODULE
            part = b if is_table else b[rows]
            parts[own] = AdapterPair(a=a, b=part, scaling=settings.scaling(each))
    return StoredAdapter(name=name, parts=parts)


def modules_of(config: ModelConfig) -> dict[str, Module]:
    """Return the modules of a model that are linear or an embedding, by transformers' names."""
    family = ARCHITECTURES[config.architecture]
    plain = replace(config, quantization=None, tie_word_embeddings=False)
    tensors = checkpoint_tensors(plain, empty_weights(plain, "meta", torch.float32))
    stored_name = {part: whole for whole, parts in family.fused.items() for part in parts}
    stored_name |= {usual: stored for stored, usual in family.renamed.items()}
    modules: dict[str, Module] = {}
    for tensor_name, tensor in tensors.items():
        name, kind = tensor_name.rpartition(".")[::2]
        if kind != "weight" or tensor.dim() != 2:
            continue
        own, lacks = name, None
        if name.startswith("model.layers."):
            layer, last = name.split(".", 3)[2:]
            own = f"model.layers.{layer}.{stored_name.get(last, last)}"
            if config.has_experts(int(layer)) and not last.startswith("self_attn."):
                lacks = "experts and their routers"
        if config.has_vision and own.startswith("model."):
            own = own.replace("model.", TEXT_PREFIX, 1)
        module = modules.setdefault(own, Module(tensor.shape[1], lacks=lacks))
        start = module.num_rows if module.rows else 0
        module.rows[name] = slice(start, start + len(tensor))
    return modules


def _is_linear(name: str, module: Module) -> bool:
    """Whether a module is what ``all-linear`` means: transformers' experts are parameters."""
    is_table = module.rows.keys() & {EMBED_MODULE, HEAD_MODULE}
    return not is_table and (module.lacks is None or ".shared_experts." in name)


def _tensors_of(name: str, module: Module, rank: int) -> Shapes:
    """Return names and shapes of a module's ``a`` and ``b``."""
    if EMBED_MODULE in module.rows:
        return {
            f"{name}.lora_embedding_A": (rank, module.num_rows),
            f"{name}.lora_embedding_B": (module.columns, rank),
        }
    return {
        f"{name}.lora_A.weight": (rank, module.columns),
        f"{name}.lora_B.weight": (module.num_rows, rank),
    }


def _stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return a folder's tensors by transformers' names, in memory or mapped from the file."""
    file = next((folder / name for name in TENSOR_FILES if (folder / name).is_file()), None)
    if file is None:
        raise ConfigError(f"expected {' or '.join(TENSOR_FILES)}, found neither")
    tensors = safetensors_of(file) if file.suffix == ".safetensors" else _unpickled(file)
    others = [name for name in tensors if not name.startswith(PREFIX)]
    if others or not tensors:
        got = repr(others[0]) if others else "no tensor"
        raise ConfigError(f"{file.name}: expected names that begin with {PREFIX!r}, got {got}")
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def _unpickled(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of ``torch.save``; nothing else in it is made."""
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of many types, for a file that is damaged or holds code
        raise ConfigError(f"{file.name}: expected tensors alone, got {error}") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor)
        for name, tensor in tensors.items()
    ):
        raise ConfigError(f"{file.name}: expected tensors by name, got something else")
    return tensors


def _target_problems(
    settings: LoraSettings, targets: Mapping[str, Module], max_rank: int
) -> Iterator[str]:
    """Yield what is wrong with the modules that have an adapter."""
    if not targets:
        yield (
            f"target_modules: expected modules of the model, got {settings.target_modules!r}, "
            "which name none"
        )
    refused = [name for name, module in targets.items() if module.lacks is not None]
    if refused:
        more = f" (and {len(refused) - 1} more modules)" if refused[1:] else ""
        yield (
            f"{refused[0]}{more}: expected no adapter of {targets[refused[0]].lacks}, which mrv1 "
            "does not serve, got one"
        )
    ranks = {settings.rank(name) for name in targets}
    if ranks and max(ranks) > max_rank:
        yield (
            f"r, rank_pattern: expected a rank of at most {max_rank} (max_lora_rank), got "
            f"{max(ranks)}; raise max_lora_rank"
        )


def _tensor_problems(
    stored: Mapping[str, torch.Tensor],
    settings: LoraSettings,
    targets: Mapping[str, Module],
    config: ModelConfig,
    base: Checkpoint,
) -> Iterator[str]:
    """Yield every difference between the stored tensors and those of an adapter of ``targets``."""
    wanted: Shapes = {}
    for name, module in targets.items():
        wanted |= _tensors_of(name, module, settings.rank(name))
    for name, shape in wanted.items():
        if name not in stored:
            yield f"{name}: missing"
        elif tuple(stored[name].shape) != shape:
            yield f"{name}: expected shape {list(shape)}, got {list(stored[name].shape)}"
        elif stored[name].dtype not in FLOAT_DTYPES:
            yield f"{name}: expected a floating dtype, got {stored[name].dtype}"
    others = {name: tensor for name, tensor in stored.items() if name not in wanted}
    for name in [*others]:
        if "lora_" in name:
            yield f"{name}: surplus, the settings name no such adapter"
            del others[name]
    yield from _changes(others, config, base)


def _changes(
    others: Mapping[str, torch.Tensor], config: ModelConfig, base: Checkpoint
) -> Iterator[str]:
    """Yield a problem for each tensor that is no adapter's and not as the model has it.

    PEFT stores the embedding beside an adapter of it, what ``modules_to_save`` names, and biases.
    """
    if not others:
        return
    held = base.scan().tensors
    for name, values in others.items():
        own = name.replace(".base_layer.", ".")
        found = own if own in held else None
        if found is None and config.tie_word_embeddings and own in (EMBED, HEAD):
            found = next((each for each in (EMBED, HEAD) if each in held), None)
        if found is None:
            yield f"{name}: surplus, the model has no such tensor"
            continue
        ((_, kept),) = base.read({found: held[found]})
        if not _equal(values, kept):
            yield (
                f"{name}: expected the model's own values (modules_to_save, bias: mrv1 has one "
                "such tensor for all requests), got others"
            )


def _equal(values: torch.Tensor, kept: torch.Tensor) -> bool:
    """Whether values are the kept ones, perhaps rounded to another dtype on their way."""
    if values.shape != kept.shape or not {values.dtype, kept.dtype} <= {*FLOAT_DTYPES}:
        return False
    return torch.equal(values.to(kept.dtype), kept) or torch.equal(kept.to(values.dtype), values)
