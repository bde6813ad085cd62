"""Files that commands write beside what they print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mrv1.cli.console import say
from mrv1.errors import ConfigError


def check_target(option: str, path: Path | None) -> None:
    """Raise ``ConfigError``, before measuring rather than after, if the directory is missing."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{option}: expected an existing directory, got {path.parent}")


def write_result(result: dict[str, Any], output: Path | None) -> None:
    """Write the result as JSON to ``output``, if the user gave one."""
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        say(f"written to {output}")
