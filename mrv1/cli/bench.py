"""``mrv1 bench``: hands over to the benchmarks of the checkout that mrv1 runs from."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import typer

import mrv1
from mrv1.cli.console import Command, one_line_errors
from mrv1.errors import ConfigError

app = typer.Typer(
    add_completion=False,
    help="Measure kernels, steps and engines on this machine (in a checkout).",
)


@app.command(
    "bench",
    cls=Command,
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def bench(context: typer.Context) -> None:
    """Measure kernels, steps and engines on this machine (in a checkout)."""
    root = Path(mrv1.__file__).resolve().parents[1]
    with one_line_errors():
        if not ((root / "pyproject.toml").is_file() and (root / "benchmarks").is_dir()):
            raise ConfigError(
                f"mrv1 bench: expected mrv1 to run from a checkout of its repository, got {root}; "
                "the package has no benchmarks: in a checkout, run python -m benchmarks"
            )
    sys.path.insert(0, str(root))  # before what another project calls benchmarks
    sys.argv[1:] = context.args
    runpy.run_module("benchmarks", run_name="__main__", alter_sys=True)
