"""Small helpers to read a checkpoint directory and to report everything wrong with it at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mrv1.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``; ConfigError: unreadable, or something else in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not JSON or not UTF-8
        raise ConfigError(f"{path}: expected a readable JSON file, got {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def refusal(error: Exception) -> str:
    """Return why transformers cannot load a part of a checkpoint: perhaps it needs Python code."""
    if "trust_remote_code" in str(error):
        return "expected classes of transformers, got auto_map: no code of a checkpoint is run"
    return str(error)


def raise_problems(where: str, problems: Sequence[str]) -> None:
    """Raise one ``ConfigError`` that lists ``problems``, if there are any."""
    if len(problems) == 1:
        raise ConfigError(f"{where}: {problems[0]}")
    if problems:
        raise ConfigError(f"{where}: {len(problems)} problems\n  - " + "\n  - ".join(problems))


def not_positive(settings: Mapping[str, Any], where: str = "") -> list[str]:
    """Return a problem for each setting that is not a number > 0; ``where`` is before its name."""
    return [
        f"{where}{name}: expected a number > 0, got {value!r}"
        for name, value in settings.items()
        if isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value <= sys.float_info.max
    ]
