"""Ranks that are processes, each on a GPU of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_ranks(module: str, size: int, timeout_seconds: float) -> None:
    """Run ``python -m module RANK SIZE PORT`` for each rank; fail unless all exit with 0.

    PORT is for the store of rank 0. No process is left: the first failure ends them all.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    deadline = time.monotonic() + timeout_seconds
    with tempfile.TemporaryFile("w+") as output:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, *map(str, (rank, size, port))],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank in range(size)
        ]
        try:
            while None in (codes := [each.poll() for each in processes]) and not any(codes):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        finally:
            for each in processes:
                each.kill()
                each.wait()
        output.seek(0)
        assert codes == [0] * size, f"exit codes {codes}: {output.read()[-4000:]}"
