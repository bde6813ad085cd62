"""The ``mrv1`` command: generate, chat, calibrate, doctor, bench."""

from __future__ import annotations

from typing import Annotated

import typer

from mrv1 import __version__
from mrv1.cli import bench, calibrate, chat, doctor, generate
from mrv1.cli.console import show

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="A Triton-first GPU model runner for LLM inference.",
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("calibrate")(calibrate.calibrate_command)
app.command("doctor")(doctor.doctor)
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        show(f"mrv1 {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show version."),
    ] = False,
) -> None:
    """Hold the one option that all commands share: ``--version``."""


__all__ = ["app"]
