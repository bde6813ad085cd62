"""Code in a forked child of the test's own process, as ``os.fork`` in a server would make it."""

from __future__ import annotations

import gc
import multiprocessing.util
import os
import signal
import traceback
import warnings
import weakref
from collections.abc import Callable

SECONDS = 60
"""After so long a child counts as one that waits for ever."""


def in_forked_child(check: Callable[[], None]) -> None:
    """Run a function in a forked child, then what a process does at its end; fail if it fails."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside other threads
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)
            check()
            gc.collect()
            weakref.finalize._exitfunc()  # type: ignore[attr-defined]
            multiprocessing.util._exit_function()  # type: ignore[attr-defined]
            code = 0
        except BaseException:
            os.write(writer, traceback.format_exc().encode())
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader, encoding="utf-8") as failures:
        found = failures.read()
    _, status = os.waitpid(pid, 0)
    assert (found, os.waitstatus_to_exitcode(status)) == ("", 0), found
