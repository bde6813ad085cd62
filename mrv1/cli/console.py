"""Where the commands write: results to stdout, everything said about them to stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mrv1.errors import Mrv1Error
from mrv1.progress import progress_bar

USER_ERROR = 2
"""Exit code of a mistake in arguments or input, as for an unknown option."""


def say(line: str) -> None:
    """Print one line to stderr."""
    typer.echo(line, err=True)


def counting_bar(*, transient: bool) -> Progress:
    """Return a progress bar that shows how many items of a total are done."""
    return progress_bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        transient=transient,
    )


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn an error that mrv1 raises on purpose into its message and exit code 2."""
    try:
        yield
    except Mrv1Error as error:
        say(f"error: {error}")
        raise typer.Exit(USER_ERROR) from None
