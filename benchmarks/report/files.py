"""The results files of a folder, and the parts of a table that all of them share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrv1.errors import ConfigError

OURS = "mrv1"


@dataclass(frozen=True, slots=True)
class ResultFile:
    """A results file."""

    name: str
    """Without its folder."""
    result: dict[str, Any]

    @property
    def stem(self) -> str:
        """The name without ``.json``."""
        return self.name.removesuffix(".json")

    @property
    def kind(self) -> str:
        """What was measured: its ``op``, in some files ``bench``; "" where it has neither."""
        return str(self.result.get("op") or self.result.get("bench") or "")

    @property
    def key(self) -> tuple[str, int | None]:
        """The kind and its schema: which tables and pictures can show the file."""
        return self.kind, self.result.get("schema")

    @property
    def origin(self) -> str:
        """The commit and the date of the measurement."""
        commits = [
            f"{name} {str(self.result[name])[:12]}"
            for name in ("commit", "before", "after")
            if self.result.get(name)
        ]
        date = self.result.get("date")
        parts = [*(commits or ["commit unknown"]), *([date] if date else [])]
        return ", ".join(parts)

    @property
    def device(self) -> str:
        """The name of the device."""
        device = self.result.get("device", "device unknown")
        return str(device["name"] if isinstance(device, dict) else device)


def load(folder: Path) -> list[ResultFile]:
    """Return the results files of a folder, by name.

    Raises:
        ConfigError: the folder does not exist, or a file is no JSON object.
    """
    if not folder.is_dir():
        raise ConfigError(f"--results: expected an existing directory, got {folder}")
    return [_load(path) for path in sorted(folder.glob("*.json"))]


def _load(path: Path) -> ResultFile:
    try:
        result = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: expected JSON, got {error}") from error
    if not isinstance(result, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(result).__name__}")
    return ResultFile(path.name, result)


def devices(files: Iterable[ResultFile]) -> str:
    """Return the names of all devices that measured some files."""
    return " and ".join(dict.fromkeys(file.device for file in files))


def own_device(file: ResultFile, files: Sequence[ResultFile]) -> str:
    """Return the name of a file's device if others measured some of the files, else ""."""
    return "" if devices(files) == file.device else file.device


def optional(value: float | None, form: str) -> str:
    """Return a formatted value, or "-" for None."""
    return "-" if value is None else form.format(value)


def versions(result: dict[str, Any]) -> str:
    """Return names and versions of the packages that took part."""
    all_versions = result["versions"] | result.get("peers", {})
    return ", ".join(
        f"{name} {version}"
        for name, version in all_versions.items()
        if version and version[0].isdigit()
    )


def with_conditions(text: str, file: ResultFile, *conditions: str) -> str:
    """Return a table with a line below it: file, conditions, and where it was measured."""
    parts = [f"`{file.name}`: {conditions[0]}", *filter(None, conditions[1:]), file.origin]
    return f"{text}\n\n{'; '.join(parts)}."
