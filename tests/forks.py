"""Code in processes of its own that share one import of torch, which takes seconds.

``Forks`` starts a process that imports torch, nothing else; each run is a fork of it, in which
mrv1, triton and hypothesis are yet to be imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import Self

NOT_INHERITED = ("MRV1_", "TRITON_", "PYTEST_")
"""Beginnings of variables that decide what is tested: a run sets them itself."""


class Forks:
    """A process to fork; used by one thread, and closed as a context manager."""

    def __init__(self) -> None:
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=Path(__file__).parents[1],
            env=inherited | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, code: str, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run code with these arguments and variables in a new fork."""
        self._process.stdin.write(json.dumps([code, arguments, environment]) + "\n")
        self._process.stdin.flush()
        returncode, stdout, stderr = json.loads(self._process.stdout.readline())
        return subprocess.CompletedProcess(arguments, returncode, stdout, stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.communicate()  # it ends at the end of its stdin


def _serve() -> None:
    """Run what comes on stdin, a line each, and print exit status, stdout and stderr of each."""
    import torch  # noqa: F401

    for line in sys.stdin:
        code, arguments, environment = json.loads(line)
        with TemporaryFile("w+") as stdout, TemporaryFile("w+") as stderr:
            child = os.fork()
            if child == 0:
                os.dup2(stdout.fileno(), 1)
                os.dup2(stderr.fileno(), 2)
                os.environ.update(environment)
                sys.argv[1:] = arguments
                exec(code, {"__name__": "__main__"})  # an error ends the fork, with a traceback
                return
            _, status = os.waitpid(child, 0)
            printed = []
            for file in (stdout, stderr):
                file.seek(0)
                printed.append(file.read())
        sys.stdout.write(json.dumps([os.waitstatus_to_exitcode(status), *printed]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
