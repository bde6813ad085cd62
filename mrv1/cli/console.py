"""Where the commands write: results to stdout, messages about them to stderr."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Never, TextIO

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mrv1.errors import Mrv1Error
from mrv1.progress import progress_bar

FAILURE = 1
"""Exit code of a command that could not do its whole work."""

USER_ERROR = 2
"""Exit code of a mistake in arguments or input; typer uses it for an unknown option too."""


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


def show(text: str, *, newline: bool = True) -> None:
    """Write text to stdout as it is."""
    with _writing_stdout():
        typer.echo(text, nl=newline)


def show_table(table: RenderableType) -> None:
    """Write a table, or text with styles, to stdout."""
    with _writing_stdout():
        Console(highlight=False).print(table)


@contextmanager
def writing(file: TextIO, name: str) -> Iterator[None]:
    """End the command with a one-line error if a write to ``file`` fails inside.

    A pipe that nobody reads any more ends the command silently: typer handles that error.

    Args:
        file: written to and flushed inside; closed after a failure, as otherwise Python would
            write its buffer once more at exit, and fail again.
        name: the file's name in the error.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (OSError, UnicodeEncodeError) as error:
        with suppress(OSError):
            file.close()
        _fail_to_write(name, error.strerror if isinstance(error, OSError) else error)


def _fail_to_write(name: str, reason: object) -> Never:
    say(f"error: cannot write {name}: {reason}")
    raise typer.Exit(FAILURE) from None


@contextmanager
def _writing_stdout() -> Iterator[None]:
    if sys.stdout is None:  # the shell closed stdout; typer would drop the text
        _fail_to_write("stdout", os.strerror(errno.EBADF))
    with writing(sys.stdout, "stdout"):
        yield


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn an error that mrv1 raises on purpose into its message and exit code 2."""
    try:
        yield
    except Mrv1Error as error:
        say(f"error: {error}")
        raise typer.Exit(USER_ERROR) from None
