"""A function in a process of its own, which frees the GPU at its end and may die alone."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Generator
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from mrv1.errors import Mrv1Error

Send = Callable[[Any], None]

LOG_LINES = 20
"""Last lines of a failed process's output that ``ChildError`` keeps."""

_ERROR_LINE = re.compile(r"(?:^|\s)(\w+(?:Error|Exception): .+)")
_ELSEWHERE = "See root cause above"
"""In vLLM's error where the process of its engine has died; only the output has the reason."""


class ChildError(Mrv1Error):
    """A function in a process of its own failed; the message is its error, in one line."""

    def __init__(self, message: str, log: list[str]) -> None:
        """Keep the last lines of what the process wrote."""
        super().__init__(message)
        self.log = log


def run_in_child(function: Callable[..., None], *arguments: object) -> Generator[Any]:
    """Run ``function(*arguments, send)`` in a new process; yield what it sends.

    As a generator waits in ``yield``, the function waits in ``send`` until the iterator is asked
    for more. The process writes its stdout and stderr to a file, which is removed. It is ended if
    the iterator is closed early.

    Raises:
        ChildError: the function raised an exception, or its process was killed.
    """
    context = get_context("spawn")  # a forked process could not use CUDA
    ours, theirs = context.Pipe()
    with tempfile.NamedTemporaryFile("r", errors="replace") as log, ours:
        process = context.Process(target=_run, args=(theirs, log.name, function, arguments))
        process.start()
        theirs.close()
        error, is_done = None, False
        try:
            while ours in wait([ours, process.sentinel]):
                try:
                    kind, value = ours.recv()
                except (EOFError, ConnectionResetError):
                    break
                if kind == "sent":
                    yield value
                    with suppress(BrokenPipeError):  # it has died meanwhile
                        ours.send("more")
                else:
                    error, is_done = value, kind == "done"
        except BaseException:
            process.terminate()
            raise
        finally:
            process.join()
        if error is None and not is_done:
            error = f"the process ended with exit code {process.exitcode}"
        if error is not None:
            lines = log.read().splitlines()
            raise ChildError(_root_cause(error, lines), lines[-LOG_LINES:])


def _run(
    parent: Connection[Any, Any],
    log: str,
    function: Callable[..., None],
    arguments: tuple[object, ...],
) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)

    def send(value: object) -> None:
        parent.send(("sent", value))
        parent.recv()

    try:
        function(*arguments, send)
        parent.send(("done", None))
    except Exception as error:
        reason = str(error).partition("\n")[0]
        parent.send(("error", f"{type(error).__name__}: {reason}"))
        raise


def _root_cause(error: str, log: list[str]) -> str:
    """Return the error, or the last other one in the output if the error refers to it."""
    if _ELSEWHERE not in error:
        return error
    found = [match[1] for line in log if (match := _ERROR_LINE.search(line))]
    return next((each for each in reversed(found) if _ELSEWHERE not in each), error)
