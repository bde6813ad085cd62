"""The tensors of a checkpoint's files, from the headers, and the files' problems."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mrv1.errors import ConfigError
from mrv1.models.files import raise_problems, read_json
from mrv1.models.gguf_file import is_gguf, open_gguf
from mrv1.models.vision import text_name

SINGLE_FILE = "model.safetensors"
"""The whole model in one file; looked for first, as transformers does."""
INDEX_FILE = "model.safetensors.index.json"
"""The index that names the shard of each tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a checkpoint."""

    file: Path
    """The safetensors or GGUF file that contains the tensor."""
    stored_name: str
    """The tensor's name in the file."""
    shape: tuple[int, ...]
    """Its shape."""
    dtype: str
    """Its dtype as safetensors names it, for example ``BF16``; ``F32`` once dequantized."""


@dataclass(slots=True, kw_only=True)
class Scan:
    """The result of reading the headers of a checkpoint."""

    named: set[str] | None = None
    """Tensors that the checkpoint claims to hold; None = the claim itself is unreadable."""
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    """The tensors that can be read, by name."""
    problems: list[str] = field(default_factory=list)
    """Everything wrong with the index and the files."""


@contextmanager
def open_shard(file: Path) -> Iterator[Any]:
    """Open a safetensors or GGUF file (memory-mapped: a tensor is read when it is asked for).

    Raises:
        ConfigError: the file is missing, truncated or of another format.
    """
    if is_gguf(file):
        yield open_gguf(file)
        return
    try:
        with safe_open(file, framework="pt", device="cpu") as shard:
            yield shard
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file.name}: not a readable safetensors file: {error}") from error


def scan_checkpoint(directory: Path, *, has_vision: bool = False) -> Scan:
    """Return the tensors of a checkpoint directory or GGUF file, and every problem found.

    Args:
        directory: the checkpoint.
        has_vision: it has a vision encoder, whose tensors are left out; the others get the names
            of a text model alone.
    """
    scan = _scan(directory)
    if has_vision:
        scan.entries = {
            name: entry
            for stored, entry in scan.entries.items()
            if (name := text_name(stored)) is not None
        }
        if scan.named is not None:
            scan.named = {name for stored in scan.named if (name := text_name(stored)) is not None}
    return scan


def _scan(directory: Path) -> Scan:
    scan = Scan()
    if is_gguf(directory):
        _read_gguf(scan, directory)
        return scan
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        _read_header(scan, single)
        if not scan.problems:
            scan.named = set(scan.entries)
    elif index.is_file():
        _read_index(scan, index)
    else:
        others = sorted(p.name for p in directory.glob("*") if p.suffix in _WEIGHT_SUFFIXES)
        scan.problems.append(
            f"weights: expected {SINGLE_FILE} or {INDEX_FILE}, got {', '.join(others) or 'none'}"
        )
    return scan


def stored_tensors(
    directory: Path, prefixes: tuple[str, ...] = ("",)
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of a checkpoint directory or GGUF file, on the CPU, with its name.

    Args:
        directory: the checkpoint.
        prefixes: only tensors whose name begins with one of these.

    Raises:
        ConfigError: a file is missing or unreadable; one message lists everything found.
    """
    scan = scan_checkpoint(directory)
    raise_problems(f"checkpoint {str(directory)!r}", scan.problems)
    names_of_file: dict[Path, list[str]] = defaultdict(list)
    for name, entry in scan.entries.items():
        if name.startswith(prefixes):
            names_of_file[entry.file].append(name)
    for file, names in names_of_file.items():
        with open_shard(file) as shard:
            for name in names:
                yield name, shard.get_tensor(name)


_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def _read_header(scan: Scan, file: Path) -> None:
    try:
        with open_shard(file) as shard:
            for name in shard.keys():  # noqa: SIM118 - not a dict
                view = shard.get_slice(name)
                scan.entries[name] = TensorEntry(
                    file=file,
                    stored_name=name,
                    shape=tuple(view.get_shape()),
                    dtype=view.get_dtype(),
                )
    except ConfigError as error:
        scan.problems.append(str(error))


def _read_gguf(scan: Scan, file: Path) -> None:
    try:
        content = open_gguf(file)
    except ConfigError as error:
        scan.problems.append(str(error))
        return
    unsupported = content.unsupported_quantizations()
    if unsupported:
        scan.problems.append(
            "weights: expected quantizations that the gguf package can dequantize, got "
            + ", ".join(unsupported)
        )
        return
    scan.entries = {
        name: TensorEntry(file=file, stored_name=name, shape=shape, dtype="F32")
        for name, shape in content.shapes.items()
    }
    scan.named = set(scan.entries)


def _read_index(scan: Scan, index: Path) -> None:
    try:
        weight_map = read_json(index).get("weight_map")
    except ConfigError as error:
        scan.problems.append(str(error))
        return
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) and Path(shard).name == shard for shard in weight_map.values()
    ):
        scan.problems.append(
            f"{index.name}: expected weight_map to name a file of the directory for each tensor"
        )
        return
    scan.named = set(weight_map)
    names_of_shard: dict[str, set[str]] = defaultdict(set)
    for name, shard in weight_map.items():
        names_of_shard[shard].add(name)
    for shard, names in sorted(names_of_shard.items()):
        _read_shard(scan, index.parent / shard, names)


def _read_shard(scan: Scan, file: Path, names: set[str]) -> None:
    """Add the tensors that the index places in one shard; report every difference."""
    try:
        found = file.is_file()
    except OSError:  # a name that no file system accepts
        found = False
    if not found:
        shown = file.name if len(file.name) <= 80 else f"{file.name[:80]}..."
        scan.problems.append(f"{shown}: named in {INDEX_FILE}, but there is no such file")
        return
    held = Scan()
    _read_header(held, file)
    scan.problems += held.problems
    if held.problems:
        return
    scan.entries |= {name: held.entries[name] for name in names & held.entries.keys()}
    scan.problems += [
        f"{name}: {INDEX_FILE} places it in {file.name}, which does not hold it"
        for name in sorted(names - held.entries.keys())
    ]
    scan.problems += [
        f"{name}: held by {file.name}, but {INDEX_FILE} does not place it there"
        for name in sorted(held.entries.keys() - names)
    ]
