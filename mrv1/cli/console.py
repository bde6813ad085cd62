"""Where the commands write: results to stdout, everything said about them to stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from mrv1.errors import Mrv1Error

USER_ERROR = 2
"""Exit code of a mistake in arguments or input, as for an unknown option."""


def stderr() -> Console:
    """Return a console on stderr that prints text as it is, without markup or wrapping."""
    return Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


def say(line: str) -> None:
    """Print one line to stderr."""
    typer.echo(line, err=True)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn an error that mrv1 raises on purpose into its message and exit code 2."""
    try:
        yield
    except Mrv1Error as error:
        say(f"error: {error}")
        raise typer.Exit(USER_ERROR) from None
