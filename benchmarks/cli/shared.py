"""Options that several benchmarks have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.kernels.attention_case import Cell
from benchmarks.measure.shapes import SHAPES
from mrv1.cli.options import MODEL_HELP
from mrv1.errors import ConfigError

DEFAULT_SHAPE = "qwen3-0.6b"

Output = Annotated[Path | None, typer.Option(dir_okay=False, help="JSON file for the result.")]
Shape = Annotated[
    str | None,
    typer.Option(
        help=f"Model shape to run with random weights: {', '.join(SHAPES)}. "
        f"Default without --model: {DEFAULT_SHAPE} (bench runner on a CPU: tiny-random)."
    ),
]
HELP = {
    "model": f"Model to run instead of --shape. {MODEL_HELP}",
    "commit": "Commit to record in the result. Default: from git.",
}


def chosen_shape(
    shape: str | None, options: dict[str, Any], default: str = DEFAULT_SHAPE
) -> str | None:
    """Return the shape to run: the default where neither a shape nor a model is given."""
    return default if shape is None and "model" not in options else shape


def cells(text: str) -> tuple[Cell, ...]:
    """Return the cells that a text has between commas."""
    return tuple(Cell.parse(cell) for cell in text.split(",") if text)


def words(text: str) -> tuple[str, ...]:
    """Return the comma-separated words of a text."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def counts(name: str, text: str) -> tuple[int, ...]:
    """Return the comma-separated numbers of a text; ConfigError: a part is not a number."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"{name}: expected counts such as 1,256, got {text!r}")
    return tuple(map(int, parts))
