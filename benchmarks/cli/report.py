"""``mrv1 bench report``: the page, the pictures and the figures of other pages from results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.report import make_report
from mrv1.calibration.plot import require_matplotlib
from mrv1.cli.console import FAILURE, say
from mrv1.cli.options import command


@command
def report(
    results: Annotated[
        Path, typer.Option(file_okay=False, help="Folder of the results files (JSON).")
    ] = Path("benchmarks/results"),
    output: Annotated[
        Path,
        typer.Option(
            dir_okay=False,
            help="Page to write; its pictures go to the folder of that name without .md.",
        ),
    ] = Path("docs/benchmarks.md"),
    pages: Annotated[
        list[Path] | None,
        typer.Option(
            "--page",
            "--readme",
            dir_okay=False,
            help="File whose figures between two markers to rewrite too. Repeatable.",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 where a file differs.")
    ] = False,
) -> None:
    """Write tables and pictures of results files, with device, conditions and commit of each."""
    made = make_report(results, output, pages or [])
    if check:
        differences = made.differences()
        for path in differences:
            say(f"differs from the results files: {path}")
        raise typer.Exit(1 if differences else 0)
    require_matplotlib("bench report")
    try:
        made.write()
    except OSError as error:
        say(f"error: cannot write {str(error.filename)!r}: {error.strerror}")
        raise typer.Exit(FAILURE) from None
    say(f"written: {', '.join(map(str, [*made.texts, *made.pictures]))}")
