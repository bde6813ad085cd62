"""Where the commands write: results to stdout or a file, messages about them to stderr."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from types import FrameType
from typing import Any, Never, TextIO

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer.core import TyperCommand, TyperGroup

from mrv1.errors import ConfigError, Mrv1Error
from mrv1.progress import progress_bar

FAILURE = 1
"""Exit code of a command that could not do its whole work."""
INTERRUPTED = 130
"""Exit code after Ctrl-C; typer and shells use it too."""
STANDARD = Path("-")
"""The name that stands for stdin or stdout where a command takes a file."""
BRIEF = 46
"""Most letters of an option's help where others are hidden."""
SHOW_CURSOR = b"\x1b[?25h\n"
"""Shows the cursor of a terminal again, which a progress bar hides until it ends."""
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


def counting_lines(description: str, items: str) -> Callable[[int, int], None]:
    """Return what says how much of a total is done, where there is no terminal for a bar.

    It prints a line for the first item, and for each tenth of the total.
    """
    start, next_share = time.monotonic(), 0.0

    def count(done: int, total: int) -> None:
        nonlocal next_share
        if next_share <= done / total < 1:
            next_share = done * 10 // total / 10 + 0.1
            left = (time.monotonic() - start) / done * (total - done)
            time_left = f"{left:.0f} s" if left < 120 else f"{left / 60:.0f} min"
            say(f"{description}: {done:,} of {total:,} {items}, about {time_left} left")

    return count


def check_target(option: str, path: Path | None) -> None:
    """Raise ``ConfigError``, before measuring rather than after, if the directory is missing."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{option}: expected an existing directory, got {path.parent}")


def write_result(result: dict[str, Any], output: Path | None) -> None:
    """Write the result as JSON to ``output``, if the user gave one."""
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        say(f"written to {output}")


def show(text: str, *, newline: bool = True) -> None:
    """Write text to stdout as it is."""
    with writing_stdout():
        typer.echo(text, nl=newline)


def show_table(table: RenderableType) -> None:
    """Write a table, or text with styles, to stdout."""
    with writing_stdout():
        Console(highlight=False).print(table)


@contextmanager
def writing(file: TextIO, name: str) -> Iterator[None]:
    """End the command with a one-line error if a write to ``file`` (``name``) fails inside.

    A pipe that nobody reads any more ends it silently, by typer. After a failure ``file`` is
    closed: Python would write its buffer once more at exit, and fail again.
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
def writing_stdout() -> Iterator[None]:
    """End the command with a one-line error if a write to stdout fails inside."""
    if sys.stdout is None:  # the shell closed stdout; typer would drop the text
        _fail_to_write("stdout", os.strerror(errno.EBADF))
    with writing(sys.stdout, "stdout"):
        yield


class Command(TyperCommand):
    """A command whose help reports a failed write, and is short if some options are hidden."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - typer's own types
        """Write the help to stdout; beside hidden options, a line or two for each other one."""
        if any(getattr(each, "hidden", False) for each in self.params):
            self.help = (self.help or "").partition("\n\n")[0]
            for each in self.params:
                text = getattr(each, "help", None) or ""
                sentence = re.split(r"[.;] ", text)[0].rstrip(".")
                vars(each)["help"] = shorten(sentence, BRIEF, placeholder="...")
                vars(each)["show_default"] = False
        with writing_stdout():
            super().format_help(ctx, formatter)


def show_all(ctx: typer.Context, wanted: bool) -> None:
    """Show a command's help with its hidden options, and exit; for ``--help-all``."""
    if wanted:
        for each in ctx.command.params:
            vars(each)["hidden"] = False
        with writing_stdout():
            ctx.get_help()
        raise typer.Exit


class Group(TyperGroup):
    """A group of commands whose help reports a failed write."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - typer's own types
        """Write the help to stdout."""
        with writing_stdout():
            super().format_help(ctx, formatter)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn an error that mrv1 raises on purpose into its message and exit code 2."""
    try:
        yield
    except Mrv1Error as error:
        say(f"error: {error}")
        raise typer.Exit(USER_ERROR) from None


@contextmanager
def second_interrupt_ends() -> Iterator[None]:
    """End with exit code 130 at the second Ctrl-C, even while the main thread waits."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # Ctrl-C is ignored, or somebody else handles it
        return
    counted, signalled = socket.socketpair()
    signalled.setblocking(False)
    former_fd = signal.set_wakeup_fd(signalled.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_end_at_second_interrupt, args=(counted,), daemon=True).start()
    signal.signal(signal.SIGINT, _handle_first_interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _handle_first_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.set_wakeup_fd(former_fd)
            signalled.close()
        else:
            signalled.detach()  # interrupted: the second may come while the interpreter exits


def _handle_first_interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, _leave_to_thread)
    signal.default_int_handler(number, frame)


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    """Raise nothing: the process ends before an exception could be shown."""


def _end_at_second_interrupt(counted: socket.socket) -> None:
    num_interrupts = 0
    with counted:
        while received := counted.recv(64):  # one byte for each signal: its number
            num_interrupts += received.count(signal.SIGINT)
            if num_interrupts > 1:
                if os.isatty(2):
                    os.write(2, SHOW_CURSOR)
                os._exit(INTERRUPTED)
